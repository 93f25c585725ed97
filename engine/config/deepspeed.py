"""The DeepSpeed configuration: a file like those in ``ds_configs/``, completed by the recipe and checked against it.

The JSON files have DeepSpeed's own keys, so that its documentation applies and published files work. A key with the
same meaning as a recipe option is "auto" (or missing) in the file and gets the recipe's value; a different value is
an error, as one of the two would be ignored. For all other keys of sections "auto" means DeepSpeed's own default.

The recipe owns the optimizer and its schedule. Keys that break a run (``BROKEN``) are refused, and all others are
passed on. DeepSpeed silently accepts a misspelt top-level key (``zero_optimizaton`` trains at stage 0), and clips
gradients at 1.0 by default. So top-level keys that DeepSpeed never reads are refused, and clipping is always set
explicitly.
"""

import copy
import difflib
import functools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel, Field, StrictBool, StrictFloat, StrictInt, ValidationError

from engine.config.config import Recipe
from engine.config.errors import RecipeError
from model.checkpoint.safetensors import parse_json
from model.ranks import local_world_size

SHIPPED = Path(__file__).parents[2] / "ds_configs"

COMPILED = (
    "zero_optimization.stage is 3, but train.compile is true: under stage 3 hooks gather the parameters of each "
    "module, which a compiled graph cannot hold; use stage 0, 1 or 2, or train.compile false"
)
# Top-level keys whose values come from the recipe.
FROM_RECIPE = frozenset(
    {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
)
_MEAN = "leave it out: the loop scales the loss for DeepSpeed's default, a mean over ranks and micro-batches"
_DATA = "the recipe owns the data: see its data section"
_PARALLEL = "leave it out: DeepQAT partitions the model by ZeRO only"
# Top-level keys that break a run, with the remedy.
BROKEN = {
    "bfloat16": 'write "bf16", as DeepSpeed calls it now',
    "torch_autocast": "set model.dtype in the recipe: parameters and GEMMs have that type",
    "activation_checkpointing": "set train.activation_checkpointing in the recipe",
    "data_efficiency": _DATA,
    "dataloader_drop_last": _DATA,
    "weight_quantization": "set quant.scheme in the recipe",
    "gradient_allreduce_op": _MEAN,
    "gradient_predivide_factor": _MEAN,
    "managed_gradient_accumulation": _MEAN,
    "prescale_gradients": _MEAN,
    "compile": "leave it out: DeepCompile was not tried with fake quantization; train.compile works on stages 0 to 2",
    "datastates_ckpt": "leave it out: a resume reads the files of DeepSpeed's own checkpoint engine",
    "disable_allgather": "leave it out: weights would not be gathered after the update",
    "hybrid_engine": "leave it out: it replaces the modules of the model",
    "expert_parallel": _PARALLEL,
    "pipeline": _PARALLEL,
    "tensor_parallel": _PARALLEL,
}
_COPIES = "the optimizer's copies are fp32"
_CODES = (
    "it rounds weights and scales (through fp16) when they are gathered for the forward, but not when they are "
    "gathered for the export, so the exported model would differ from the trained one"
)
# Keys of sections that break a run unless they have DeepSpeed's default, and why.
BROKEN_NESTED = {
    "zero_optimization.load_from_fp32_weights": (
        "a resumed run would go on from rounded weights, not from the optimizer's fp32 copies"
    ),
    "zero_optimization.zero_quantized_weights": _CODES,
    "zero_optimization.zero_quantized_nontrainable_weights": _CODES,
    "zero_optimization.zero_quantized_gradients": (
        "across nodes DeepSpeed 0.19.8 reads bf16 gradients as fp16, thousands of times too large, and divides their "
        "sum by the nodes, not by the ranks; on one node it does nothing"
    ),
    "zero_optimization.elastic_checkpoint": "a resume reads shards of the ordinary layout",
    "zero_optimization.legacy_stage1": "it is gone from DeepSpeed",
    "zero_optimization.zenflow": "it updates weights with gradients of earlier steps",
    "zero_optimization.leaf_module": "model.experts decides which modules are gathered as a whole",
    "zero_optimization.compute_grad_norm": "gradients are clipped by their norm, which is logged",
    "zero_optimization.cpu_offload": "write offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "write offload_param: {device: cpu}",
    "bf16.check_grad_overflow": (
        "without it a step whose gradients are not finite is taken on some stages, and every weight is NaN after it"
    ),
    "bf16.bf16_master_weights_and_grads": _COPIES,
    "bf16.bf16_optimizer_states": "the optimizer's moments are fp32",
    "fp16.auto_cast": "it casts inputs, which are token ids",
    "fp16.fp16_master_weights_and_grads": _COPIES,
}
# Keys of ``offload_optimizer`` that need DeepSpeed's CPUAdam, with their defaults.
NEEDS_CPU_ADAM = {"ratio": 1.0, "super_offload": False}
# Allowed ranges of numbers that DeepSpeed does not limit, and with which it would fail long after the start: elements
# of a bucket (2^40 exceed any memory) and loss scales (which must fit in fp32).
RANGES: dict[str, tuple[float, float]] = {
    "zero_optimization.reduce_bucket_size": (1, 2**40),
    "zero_optimization.allgather_bucket_size": (1, 2**40),
    "zero_optimization.sub_group_size": (1, 2**40),
    "zero_optimization.stage3_prefetch_bucket_size": (0, 2**40),
    "fp16.loss_scale": (0, 2**32),
    "fp16.min_loss_scale": (0, 2**32),
    "fp16.initial_scale_power": (0, 32),
}

# Keys of the student's configuration that are copied for its teacher, which has no optimizer.
TEACHER_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "zero_optimization",
    "communication_data_type",
    "log_level",
)


class _Strict(BaseModel, extra="forbid"):
    """Section with no other keys than those declared. DeepSpeed would silently ignore other keys, or use them: dtypes
    of parameters and buffers would change the model, and a resumed run cannot read other checkpoint formats."""


class _DataTypes(_Strict):
    grad_accum_dtype: Any = None  # see _fill_precision


class _FlopsProfiler(_Strict):
    enabled: StrictBool = False
    recompute_fwd_factor: StrictInt | StrictFloat = Field(0, ge=0, allow_inf_nan=False)
    profile_step: StrictInt = Field(1, ge=1)
    module_depth: StrictInt = Field(-1, ge=-1)
    top_modules: StrictInt = Field(1, ge=1)
    detailed: StrictBool = True
    output_file: str | None = Field(None, pattern=r"^[^\x00-\x1f\x7f]*$")


class _Timers(_Strict):
    throughput: DeepSpeedThroughputTimerConfig | None = None


class _Checkpoint(_Strict):
    tag_validation: str = Field("Warn", pattern="(?i)^(ignore|warn|fail)$")


class Checked(BaseModel, validate_assignment=True):
    """Top-level keys of a file whose values are checked: first sections, by DeepSpeed's own models where it has some,
    then single values."""

    zero_optimization: DeepSpeedZeroConfig
    bf16: DeepSpeedBF16Config
    fp16: DeepSpeedFP16Config
    comms_logger: CommsLoggerConfig
    tensorboard: TensorBoardConfig
    csv_monitor: CSVConfig
    wandb: WandbConfig
    comet: CometConfig
    data_types: _DataTypes
    flops_profiler: _FlopsProfiler
    timers: _Timers
    checkpoint: _Checkpoint
    wall_clock_breakdown: StrictBool
    memory_breakdown: StrictBool
    dump_state: StrictBool
    disable_python_gc: StrictBool
    zero_allow_untested_optimizer: StrictBool
    zero_force_ds_cpu_optimizer: StrictBool
    steps_per_print: StrictInt | None = Field(ge=1)
    log_level: Literal["debug", "info", "warning", "error", "critical"]
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None


# DeepSpeed's or our own model of every section that is checked.
MODELS: dict[str, type[BaseModel]] = {
    key: field.annotation
    for key, field in Checked.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
# Sections, and keys of sections, that have no effect here.
WITHOUT_EFFECT = {
    "optimizer": "the recipe owns it",
    "scheduler": "the recipe owns it",
    "aio": "nothing is offloaded to NVMe",
    "fp16.hysteresis": "every overflow halves the loss scale",
    "fp16.consecutive_hysteresis": "every overflow halves the loss scale",
    # link_hp_params gets the parameters in their first order, the masters are in the new one (stage_1_and_2.py:841).
    "zero_optimization.round_robin_gradients": (
        "it is switched off, as DeepSpeed 0.19.8 takes the fp32 weights of other parameters for those of a parameter "
        "with it"
    ),
}
CHECKED = frozenset({*FROM_RECIPE, *Checked.model_fields, "optimizer", "scheduler", "aio"})


class DsConfigError(RecipeError):
    """Error of a bad DeepSpeed configuration: one line per problem, with file and key."""


def config_path(name_or_path: str) -> Path:
    """Find the file that a recipe's ``deepspeed`` names: ``zero3`` is a file of ds_configs/, and a text with a slash or
    the ending .json is a path, relative to the current directory. Raises DsConfigError if the file does not exist; the
    message lists the names in ds_configs/."""
    is_path = name_or_path.endswith(".json") or os.path.sep in name_or_path
    path = Path(name_or_path) if is_path else SHIPPED / f"{name_or_path}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        wrong = f"there is no such file{where}" if is_path else f"expected one of {names}, or the path of a .json file"
        raise DsConfigError(f"deepspeed: {name_or_path!r}, {wrong}")
    return path


def read_ds_config(path: Path) -> dict[str, Any]:
    """Read a file and check its top-level keys. Raises DsConfigError: not JSON (with file and line) or UTF-8, not an
    object, a duplicate key, or a refused key."""
    try:
        config = parse_json(path.read_bytes())
    except json.JSONDecodeError as error:
        raise DsConfigError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise DsConfigError(f"{path}: not UTF-8 text ({error})") from error
    except ValueError as error:
        raise DsConfigError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise DsConfigError(f"{path}: expected an object with DeepSpeed's keys, found {type(config).__name__}")
    found = (_key_problem(key, value) for key, value in config.items())
    if problems := "\n".join(f"{path}: {problem}" for problem in found if problem):
        raise DsConfigError(problems)
    return config


@functools.cache
def keys_of_deepspeed() -> frozenset[str]:
    """List the top-level keys that DeepSpeed reads, recorded while it reads a configuration."""
    asked: set[str] = set()

    class Recorder(dict):
        def __copy__(self) -> "Recorder":
            return Recorder(self)

        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            asked.add(key)
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            asked.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    DeepSpeedConfig(Recorder(train_micro_batch_size_per_gpu=1))  # good for any number of ranks
    return frozenset(asked)


def _key_problem(key: str, value: Any) -> str | None:
    """Describe the problem of a top-level key and its value; None if there is none."""
    if key in BROKEN:
        return f"{key}: {BROKEN[key]}"
    if key not in keys_of_deepspeed():
        close = difflib.get_close_matches(key, sorted(keys_of_deepspeed() - BROKEN.keys()), n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(CHECKED))}"
        return f"{key}: unknown key, which DeepSpeed would ignore in silence; {hint}"
    if value == "auto" and key not in FROM_RECIPE:
        return f'{key}: the recipe has no value for "auto"; write one, or leave the key out'
    if key in {*MODELS, "optimizer", "scheduler", "aio"} and not isinstance(value, dict):
        return f"{key}: {value!r}, expected an object"
    return None


def resolve(recipe: Recipe, world_size: int, *, local_size: int | None = None) -> dict[str, Any]:
    """Build the complete configuration for ``deepspeed.initialize`` and ``zero.Init``, a new dict.

    Needs no process group: call it before the group starts, with WORLD_SIZE of the environment.

    Args:
        recipe: the run; it names the file, and provides the values that the file leaves to the recipe.
        world_size: number of ranks of the job.
        local_size: number of ranks of a node, used only if ``zero_hpz_partition_size`` is "auto"; None: the number in
            the launcher's environment.

    Raises:
        DsConfigError: the file is missing or wrong, or contradicts the recipe, or the number of ranks of a node is
            needed but unknown; one line per problem.
    """
    path = config_path(recipe.deepspeed)
    config = read_ds_config(path)
    problems = _take_out_optimizer(config, recipe)
    problems += _fill_from_recipe(config, recipe, world_size) + _fill_precision(config, recipe)
    if config.get("zero_optimization", {}).get("zero_hpz_partition_size") is not None:
        problems += _fill_hpz(config["zero_optimization"], world_size, local_size or local_world_size())
    problems += _value_problems(config)
    if recipe.train.compile and config.get("zero_optimization", {}).get("stage") == 3:
        problems.append(COMPILED)
    if recipe.quant.quantized_all_gather:
        problems += _gather_problems(config, recipe)
    if problems := problems or [*_nvme_problems(config, recipe)] or [*_refused_by_deepspeed(config)]:
        raise DsConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    config["zero_optimization"].pop("round_robin_gradients", None)
    if config["zero_optimization"].get("offload_optimizer") is not None:
        # The optimizer is torch.optim.AdamW everywhere, also on the CPU: DeepSpeed's CPUAdam compiles at first use.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    if recipe.optim.moments == "8bit":
        config["zero_allow_untested_optimizer"] = True  # DeepSpeed lists classes, of which ours is none
    return config


def remarks(name_or_path: str) -> list[str]:
    """Describe each key of a valid file (named as for :func:`config_path`) that has no effect, or that DeepQAT passes
    on untested; one line each."""
    path = config_path(name_or_path)
    config = read_ds_config(path)
    lines = []
    for dotted, why in WITHOUT_EFFECT.items():
        section, _, key = dotted.partition(".")
        if dotted == "aio" and offloads_to_nvme(config):
            continue
        if section in config and (not key or config[section].get(key, "auto") not in ("auto", False)):
            lines.append(f"{dotted}: has no effect: {why}")
    lines += [f"{key}: passed on to DeepSpeed, untested" for key in config if key not in CHECKED]
    return [f"{path}: {line}" for line in lines]


def _take_out_optimizer(config: dict[str, Any], recipe: Recipe) -> list[str]:
    """Remove the sections ``optimizer`` and ``scheduler``; return problems where they differ from the recipe."""
    optim = recipe.optim
    optimizer, scheduler = config.pop("optimizer", {}), config.pop("scheduler", {})
    for section, values in (("optimizer", optimizer), ("scheduler", scheduler)):
        if not isinstance(values.get("params") or {}, dict):
            return [f"{section}.params: {values['params']!r}, expected an object"]
    same: dict[str, Any] = {
        "type": ("Adam", "AdamW"),
        "torch_adam": (True, False),
        "adam_w_mode": (True,),
        "lr": (optim.lr,),
        "betas": (list(optim.betas),),
        "eps": (optim.eps,),
        "weight_decay": (optim.weight_decay,),
    }
    given = {"type": optimizer.get("type", "AdamW"), **(optimizer.get("params") or {})}
    remedy = "the recipe owns the optimizer: set optim.lr, optim.betas, optim.eps and optim.weight_decay there"
    problems = [
        f'optimizer.{key}: {value!r}, expected "auto" or the recipe\'s value: {remedy}'
        for key, value in given.items()
        if value != "auto" and value not in same.get(key, ())
    ]
    remedy = "the recipe owns the schedule: set optim.schedule, optim.warmup_steps and optim.min_lr_ratio there"
    return problems + [
        f'scheduler.{key}: {value!r}, expected "auto": {remedy}'
        for key, value in (scheduler.get("params") or {}).items()
        if value != "auto"
    ]


def _gather_problems(config: dict[str, Any], recipe: Recipe) -> Iterator[str]:
    """Yield conflicts with quant.quantized_all_gather: in the model's dtype, the ZeRO stage or hpZ."""
    zero = config.get("zero_optimization", {})
    stage, hpz = zero.get("stage", 0), zero.get("zero_hpz_partition_size", 1)
    on = "but quant.quantized_all_gather is true"
    if recipe.model.dtype == "float16":
        yield f"fp16 is on (model.dtype: float16), {on}: codes are gathered in bfloat16 and float32 only"
    if stage != 3:
        yield f"zero_optimization.stage is {stage}, {on}: only stage 3 gathers the weights of every layer"
    if hpz != 1:
        yield (
            f"zero_optimization.zero_hpz_partition_size is {hpz}, {on}: hpZ would keep the decoded codes in place of "
            "the weights"
        )


def offloads_to_nvme(config: dict[str, Any]) -> bool:
    """Tell if a DeepSpeed configuration keeps the optimizer's states in files on NVMe."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer")
    return isinstance(offload, dict) and offload.get("device") == "nvme"


def _nvme_problems(config: dict[str, Any], recipe: Recipe) -> Iterator[str]:
    """Yield conflicts with an optimizer whose states are kept in files: the ZeRO stage, 8-bit moments, or keys of the
    section ``offload_optimizer``."""
    if not offloads_to_nvme(config):
        return
    zero, key = config["zero_optimization"], "zero_optimization.offload_optimizer"
    if zero.get("stage") != 3:
        yield f"{key}: device 'nvme', expected cpu or none: only stage 3 keeps optimizer states in files"
    if recipe.optim.moments == "8bit":
        yield f"{key}: device 'nvme', but optim.moments is '8bit': DeepSpeed keeps only fp32 states in files"
    offload = zero["offload_optimizer"]
    if not offload.get("nvme_path"):
        yield f"{key}.nvme_path: missing, expected a directory on the drive"
    for name in ("pipeline_read", "pipeline_write"):
        if offload.get(name):
            yield f"{key}.{name}: leave it out: checkpoints would copy files that are being written"
    if offload.get("buffer_count", 4) < 4:
        yield f"{key}.buffer_count: {offload['buffer_count']}, expected 4: fp32 weights, gradients and two moments"


def _fill_from_recipe(config: dict[str, Any], recipe: Recipe, world_size: int) -> list[str]:
    """Set keys with the meaning of a recipe option to the recipe's values; return the contradictions."""
    micro, accumulation = recipe.data.micro_batch_size, recipe.train.gradient_accumulation_steps
    product = "data.micro_batch_size * train.gradient_accumulation_steps * ranks"
    shared = (
        ("train_micro_batch_size_per_gpu", micro, "data.micro_batch_size", micro),
        ("gradient_accumulation_steps", accumulation, "train.gradient_accumulation_steps", accumulation),
        ("train_batch_size", micro * accumulation * world_size, product, micro * accumulation * world_size),
        ("gradient_clipping", recipe.optim.grad_clip, "optim.grad_clip", recipe.optim.grad_clip),
        ("bf16.enabled", recipe.model.dtype == "bfloat16", "model.dtype", recipe.model.dtype),
        ("fp16.enabled", recipe.model.dtype == "float16", "model.dtype", recipe.model.dtype),
    )
    problems = []
    for key, value, recipe_key, recipe_value in shared:
        *parents, last = key.split(".")
        section = config.setdefault(parents[0], {}) if parents else config
        written = section.setdefault(last, "auto")
        if written not in ("auto", value):
            problems.append(
                f'{key} is {written!r}, but {recipe_key} is {recipe_value!r}: write "auto", or make them equal'
            )
        section[last] = value
    return problems


def _fill_precision(config: dict[str, Any], recipe: Recipe) -> list[str]:
    """Set fp32 gradient accumulation for 16-bit parameters where DeepSpeed can (stages 1-3); return the problems.

    Under stage 3 gradients are summed over the ranks in the parameters' type. With one micro-batch per step nothing is
    added to this sum, so it is stored in that type: half the bytes, and the same results. It stays in fp32 if
    quant.quantized_all_gather changes the sum, or communication_data_type is another type. On stages 1 and 2 other code
    of DeepSpeed would run: stage 1 would compute the norm in another way, and stage 2 would need a copy in the step.
    """
    types = config.setdefault("data_types", {})
    stage = config.get("zero_optimization", {}).get("stage")
    written = types.pop("grad_accum_dtype", "auto")
    if written != "auto":
        types["grad_accum_dtype"] = written
    own = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[recipe.model.dtype]
    reduced = config.get("communication_data_type", "auto")
    if reduced == "fp16" and own != "fp16":
        return [
            "communication_data_type is 'fp16', expected fp32 or bf16: without a loss scale fp16 rounds gradients "
            "below 3e-8 to 0, which those of scales often are"
        ]
    # On stage 0 DeepSpeed raises "unsupported mix" for anything but the parameters' own type.
    only_own = stage == 0 and own != "fp32"
    if written not in ("auto", own) and (only_own or written != "fp32"):
        expected = f"expected fp32 (the default){'' if own == 'fp32' else f' or {own}'}"
        why = f", {expected}: DeepSpeed would add up gradients in any type that torch has"
        if only_own:
            why = f": stage 0 accumulates in {own} only; leave it out or use stage 1"
        return [f"data_types.grad_accum_dtype is {written!r}{why}"]
    if own != "fp32" and not only_own:
        unchanged = recipe.train.gradient_accumulation_steps == 1 and not recipe.quant.quantized_all_gather
        unchanged = unchanged and reduced in (None, "auto", own)
        types.setdefault("grad_accum_dtype", own if stage == 3 and unchanged else "fp32")
    return []


def _fill_hpz(zero: dict[str, Any], world_size: int, local_size: int | None) -> list[str]:
    """Replace hpZ's "auto" by the number of ranks of a node, among which gathers are fast; return the problems."""
    size = zero["zero_hpz_partition_size"]
    if size == "auto":
        if local_size is None and world_size > 1:
            return [
                "zero_optimization.zero_hpz_partition_size is 'auto', the ranks of a node, but the launcher sets "
                "neither LOCAL_WORLD_SIZE nor LOCAL_SIZE; set one of them, or write their number"
            ]
        size = zero["zero_hpz_partition_size"] = local_size or 1
    if not isinstance(size, int) or size < 1 or world_size % size:
        return [
            f"zero_optimization.zero_hpz_partition_size: {size!r}, expected auto (the ranks of a node), or a number "
            f"that divides the {world_size} ranks of this job"
        ]
    return []


def _value_problems(config: dict[str, Any]) -> Iterator[str]:
    """Yield problems of values, which DeepSpeed would report only after the process group has started, or never."""
    # DeepSpeed's default stage is 0: every rank would hold the whole model, and large ones run out of memory.
    stage = config.get("zero_optimization", {}).get("stage", "auto")
    if stage in (None, "auto") or isinstance(stage, bool | str):  # DeepSpeed takes true for 1, and "3" for 3
        found = "missing" if stage in (None, "auto") else repr(stage)
        yield f"zero_optimization.stage: {found}, expected 0, 1, 2 or 3"
    for key, least in (("offload_optimizer", 1), ("offload_param", 3)):
        offload = config.get("zero_optimization", {}).get(key)
        on_host = isinstance(offload, dict) and offload.get("device") == "cpu"
        if on_host and isinstance(stage, int) and stage < least:
            yield (
                f"zero_optimization.{key} has no effect on stage {stage}, expected stage {least} or more: leave it "
                "out, or change the stage"
            )
    for key in Checked.model_fields:
        values = config.get(key, "auto")
        if values == "auto":
            continue
        if key in MODELS:
            problems = {name: _nested_problem(key, name, value) for name, value in values.items()}
            yield from (f"{key}.{name}: {problem}" for name, problem in problems.items() if problem)
            # Without the refused keys, for which DeepSpeed's models may raise any exception.
            values = {name: value for name, value in values.items() if not problems[name]}
        try:
            setattr(Checked.model_construct(), key, values)
        except ValidationError as error:
            yield from _lines(error)
        except (TypeError, OverflowError) as error:  # a key such as "self", or an integer too large for a float
            yield f"{key}: DeepSpeed cannot read its keys and values: {error}"


def _nested_problem(section: str, key: str, value: Any) -> str | None:
    """Describe the problem of a value that DeepSpeed's own models accept; None if there is none."""
    dotted, field = f"{section}.{key}", MODELS[section].model_fields.get(key)
    unchanged = value in (None, "auto") or (field is not None and value == field.default)
    if dotted in BROKEN_NESTED and not unchanged:
        return f"leave it out: {BROKEN_NESTED[dotted]}"
    if dotted == "zero_optimization.offload_param" and isinstance(value, dict) and value.get("device") == "nvme":
        return (
            "device 'nvme', expected cpu or none: weights are read into their partitions and scales measured there, in "
            "memory; a file would have to be read and written for each"
        )
    if dotted == "zero_optimization.offload_optimizer" and isinstance(value, dict):
        for name, default in NEEDS_CPU_ADAM.items():
            if value.get(name, default) != default:
                return f"{name} {value[name]!r}, expected {default!r}: only DeepSpeed's CPUAdam supports it"
    least, most = RANGES.get(dotted, (-math.inf, math.inf))
    if isinstance(value, int | float) and not least <= value <= most:
        return f"{value!r}, expected {least} to {most}"
    return None


def _lines(error: ValidationError) -> Iterator[str]:
    """Yield a line for each problem that pydantic found."""
    for found in error.errors():
        yield f"{'.'.join(map(str, found['loc']))}: {found['msg']}, found {found['input']!r}"


def _refused_by_deepspeed(config: dict[str, Any]) -> Iterator[str]:
    """Yield problems that DeepSpeed finds in the configuration; it would raise them after the process group starts."""
    # Without a process group DeepSpeed would compare train_batch_size with the batch of a single rank.
    given = {key: value for key, value in config.items() if key != "train_batch_size"}
    error = _error_of_deepspeed(given)
    if isinstance(error, ValidationError):
        yield from _lines(error)
    elif error is not None:
        why = f"DeepSpeed cannot read it: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        for key in given:  # it is the cause if DeepSpeed reads the others
            left = _error_of_deepspeed({name: value for name, value in given.items() if name != key})
            if left is None or isinstance(left, ValidationError):
                why = f"{key}: {why}"
                break
        yield why


def _error_of_deepspeed(config: dict[str, Any]) -> Exception | None:
    """Return the exception that DeepSpeed raises for a configuration, if any."""
    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:  # of any type: it reads some keys without type checks
        return error
    return None


def teacher_config(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Derive the configuration of a frozen teacher, an engine without optimizer, from the student's ``ds_config``.

    ZeRO partitions both alike. Optimizer and monitors are left out: monitors would overwrite the student's files.
    ``ds_config`` is the result of :func:`resolve`, and is not changed.
    """
    config = {key: copy.deepcopy(ds_config[key]) for key in TEACHER_KEYS if key in ds_config}
    config["zero_optimization"].pop("offload_optimizer", None)
    return config
