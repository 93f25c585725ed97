"""Convert a QAT configuration of AngelSlim or torchtune to a recipe, and say which keys have no counterpart.

    python launch/convert_recipe.py qwen3-30b-a3b_fp8_static_end2end_learn_scale_zero3.yaml > recipe.yaml

The recipe goes to stdout, with a comment for each key without a counterpart; these lines go to stderr, too. Keys that
only say where something runs (device maps, workers, caches) are left out without a line. ``docs/coming_from.md`` has
the tables and the differences.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # not a model.py or data/ of the current directory

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from engine.config.hub import parse_name
from engine.config.sections import TRACKERS
from launch.scripts import option_parser
from quant import SCHEMES, Scheme, TensorSpec

# Keys without effect on what is trained.
HOUSEKEEPING = re.compile(
    r"model\.(name|device_map|low_cpu_mem_usage|use_cache)|compression\.quantization\.bits|.*\.hf_cache_dir|"
    r".*\.(weight|activation)_scale_init_value|dataset\.(name|batch_size)|.*\.kd_alpha|"
    r".*\.teacher_(torch_dtype|device_map|trust_remote_code|low_cpu_mem_usage|use_cache|cache_dir)|"
    r".*\.hf_args\.(logging_first_step|gradient_checkpointing_kwargs\..*|dataloader_num_workers|output_dir)|"
    r".*\.student_type|device|metric_logger\..*|tokenizer\.(_component_|path|merges_file)|log_peak_memory_stats|memory_efficient_fsdp_wrap|profiler\..*|"
    r"optimizer\.(foreach|fused)|checkpointer\.(_component_|checkpoint_files.*|model_type|output_dir|recipe_checkpoint)|"
    r"batch_size_val|log_level|custom_sharded_layers|"
    r"model\.(vocab_size|num_layers|num_heads|num_kv_heads|embed_dim|intermediate_dim|max_seq_len|norm_eps|rope_base)"
)
PAGE = "docs/coming_from.md"
FOCUS = "scales of parts of a group (FOCUS) are not supported: quant.decoupled_scales true has one for each group"
KV_CACHE = "not converted: keys and values are quantized by the presets fp8_kv, fp8_static_kv and nvfp4_w4a4_kv alone"
TORCH_BETAS = [0.9, 0.999]  # of torch's AdamW and of transformers' Trainer
UNKNOWN = "choose_one"  # no scheme has this name, so training refuses the recipe until it has one
THERE = " (the default there)"
PTQ_BATCHES = 64  # per rank: 256 samples, as of AngelSlim's PTQ, on four ranks with one sample per micro-batch
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
GRANULARITIES = {"per-tensor": "tensor", "per-channel": "channel", "per-group": "group", "per-token": "token"}
INTERVALS = {"logging_steps": "train.log_every", "save_steps": "train.checkpoint_every"}
LOSSES = ("kl", "rkl", "mse", "cakld", "kd")
# Quantizations of weights and inputs that AngelSlim's names of quantization imply.
NAMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "fp8_static": ({"qtype": "fp8"}, {"qtype": "fp8", "dynamic": False}),
    "fp8_dynamic": ({"qtype": "fp8"}, {"qtype": "fp8", "dynamic": True}),
    "w4a8_fp8": ({"qtype": "int4"}, {"qtype": "fp8", "dynamic": False}),
    "int8_dynamic": ({"qtype": "int8"}, {"qtype": "int8", "dynamic": True}),
    "int4_weight_only": ({"qtype": "int4"}, None),
    "nvfp4": ({"qtype": "nvfp4"}, {"qtype": "nvfp4"}),
    "mxfp4": ({"qtype": "mxfp4"}, {"qtype": "mxfp4"}),
}


class ForeignRecipe:
    """Configuration file of another tool. Keys are taken one by one, so that unconverted keys can be listed."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self.keys = dict(_flat(contents))
        """The values that were not taken yet, by dotted key."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` if it is absent or null, and mark the key as taken."""
        value = self.keys.pop(key, None)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Tell if the file sets ``key`` to a value other than null, and it was not taken yet."""
        return self.keys.get(key) is not None

    def take_below(self, prefix: str) -> dict[str, Any]:
        """Return the values of all keys that begin with ``prefix`` and a dot, by the rest of the key; mark them as
        taken."""
        names = [key for key in self.keys if key.startswith(f"{prefix}.")]
        return {name.removeprefix(f"{prefix}."): self.keys.pop(name) for name in names}

    def left(self) -> list[str]:
        """Return the keys that were not taken, except those with an empty value or without effect on the training
        (``HOUSEKEEPING``)."""
        empty: tuple[Any, ...] = (None, "", False, [], {})
        return [key for key, value in self.keys.items() if value not in empty and not HOUSEKEEPING.fullmatch(key)]


def _flat(contents: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in contents.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Converted:
    """Recipe under construction, with notes for the user."""

    def __init__(self) -> None:
        self.recipe: dict[str, Any] = {}
        self.notes: list[str] = []
        """One line per key of the source that has no counterpart, or another meaning."""

    def put(self, key: str, value: Any) -> None:
        """Set an option, unless the value is None."""
        section, _, name = key.rpartition(".")
        if value is not None:
            (self.recipe.setdefault(section, {}) if section else self.recipe)[name] = value

    def say(self, key: str, text: str) -> None:
        """Add a note about a key of the source."""
        self.notes.append(f"{key}: {text}")


def expect(source: ForeignRecipe, made: Converted, key: str, usual: Any, text: str) -> None:
    """Take a key of the source, and add the note ``text`` if it is set to another value than ``usual``."""
    if (found := source.take(key, usual)) != usual:
        made.say(key, f"{found}: {text}")


def tensor(given: dict[str, Any], *, inputs: bool) -> TensorSpec:
    """Convert AngelSlim's description of a quantized tensor: of a layer's inputs, or of its weights if ``inputs`` is
    False. Raises ValueError for a number format or granularity that is not supported."""
    qtype = str(given.get("qtype", "")).lower()
    granularity = given.get("granularity", "per-tensor")
    dynamic = bool(given.get("dynamic")) or (inputs and granularity == "per-token")
    if qtype == "nvfp4":
        return TensorSpec("fp4_e2m1", 4, "group", 16, dynamic=inputs)
    if qtype in ("mxfp4", "mxfp4_rceil"):  # rceil: the scale is rounded up, as an absmax scale is here
        return TensorSpec("fp4_e2m1", 4, "group", 32, dynamic=inputs, mx=True)
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r}, expected one of {', '.join(GRANULARITIES)}")
    size = given.get("group_size") if granularity == "per-group" else None
    shape: dict[str, Any] = {"granularity": GRANULARITIES[granularity], "group_size": size, "dynamic": dynamic}
    if qtype in BITS:
        return TensorSpec("int", BITS[qtype], symmetric=bool(given.get("is_sym", True)), **shape)
    if qtype.startswith("fp8"):
        return TensorSpec("fp8_e4m3", **shape)
    raise ValueError(f"qtype {qtype!r}, expected one of {', '.join(BITS)}, fp8, nvfp4 and mxfp4")


def put_scheme(made: Converted, weights: TensorSpec, activations: TensorSpec | None, key: str) -> None:
    """Set quant.scheme: a preset with these number formats, or a new scheme under quant.schemes. If no scheme can
    combine the formats, set a name that training refuses, and add a note about ``key`` of the source."""
    try:
        wanted = Scheme("converted", weights, activations)
    except ValueError as error:
        made.say(key, f"no scheme has this combination ({error}): choose a quant.scheme")
        made.put("quant.scheme", UNKNOWN)
        return
    same = (name for name, scheme in SCHEMES.items() if (scheme.weights, scheme.activations) == (weights, activations))
    name = next(same, wanted.name)
    made.put("quant.scheme", name)
    if name == wanted.name:
        tensors = {"weights": weights, "activations": activations}
        default = vars(TensorSpec("int"))
        parts = {
            part: {"dtype": one.dtype} | {field: value for field, value in vars(one).items() if value != default[field]}
            for part, one in tensors.items()
            if one is not None
        }
        made.put("quant.schemes", {name: parts})


def from_angelslim(source: ForeignRecipe) -> Converted:
    """Convert a QAT or QAD configuration of AngelSlim (github.com/Tencent/AngelSlim at 67394ce). Raises ValueError for
    another compression.name, or if its section is missing."""
    made = Converted()
    kind = source.take("compression.name")
    if kind not in ("QAT", "QAD"):
        there = {"PTQ": "launch/calibrate.py quantizes without training", "MCoreQAD": f"write a recipe by {PAGE}"}
        raise ValueError(f"compression.name: {kind!r}, expected QAT or QAD: {there.get(kind, 'it trains nothing')}")
    section = f"compression.{kind}"
    if not any(key.startswith(f"{section}.") for key in source.keys):
        raise ValueError(
            f"{section}: no keys below it, expected those of the training; older versions of AngelSlim had them in a "
            f"section training, with other defaults: move them to {section}, and set all keys of quant_config.learnable"
        )
    quantizer = f"{section}.plugin_config.quant_config"
    made.put("model.path", source.take("model.model_path"))
    made.put("model.trust_remote_code", source.take("model.trust_remote_code") or None)
    dtype = source.take("model.torch_dtype", "auto")
    made.put("model.dtype", None if dtype == "auto" else dtype)
    made.put("model.attn_implementation", source.take("model.attn_implementation"))
    _angelslim_quantization(source, made, quantizer)
    _angelslim_learnable(source, made, section, quantizer)
    _angelslim_losses(source, made, section, kind)
    _angelslim_data(source, made, section)
    _trainer(source, made, f"{section}.hf_args")
    _angelslim_first_scales(source, made, section, quantizer)
    if (mode := source.take(f"{section}.training_mode", "end2end")) != "end2end":
        made.say(
            f"{section}.training_mode",
            f"{mode} is not converted: to tune layer by layer before the first step, set quant.init: blockwise",
        )
        source.take_below(f"{section}.block_wise_config")
    expect(source, made, f"{section}.dist_mode", "hf", "the loop here is DeepSpeed's engine")
    expect(source, made, f"{section}.do_train", True, "launch/calibrate.py quantizes without training")
    form = source.take(f"{section}.save_format")
    forms = {"real": None, "real_and_kvcache": None, "fake": "dequantized"}
    if form in forms:
        made.put("export.format", forms[form])
    elif form is not None:
        made.say(f"{section}.save_format", f"{form} is not written alone: the export has all tensors")
    if source.take(f"{section}.resume_ckpt_dir"):
        made.say(f"{section}.resume_ckpt_dir", "train.resume: true continues from this project's own checkpoints")
    made.put("output_dir", source.take("global.save_path", "runs/converted"))
    return made


def _angelslim_quantization(source: ForeignRecipe, made: Converted, quantizer: str) -> None:
    name = source.take("compression.quantization.name")
    method = "compression.quantization.quant_method"
    weights, inputs = NAMES.get(name, ({}, {}))
    size = {"group_size": source.take(f"{method}.group_size")}
    weights = weights | size | {"granularity": source.take(f"{method}.weight", "per-tensor")}
    inputs = (inputs or {}) | {"granularity": source.take(f"{method}.activation", "per-tensor")}
    weights |= source.take_below(f"{quantizer}.weight")
    inputs |= source.take_below(f"{quantizer}.activation")
    if source.take(f"{quantizer}.weight_quantizer") == "special":
        special = source.take_below(f"{quantizer}.special")
        weights["qtype"] = f"{special.get('quant_method')} of {special.get('w_bits')} bits"
        source.take(f"{quantizer}.group_size")
    if not source.take(f"{quantizer}.use_weight_quant"):
        made.say(f"{quantizer}.use_weight_quant", "false: here weights are always quantized")
    quantized_inputs = source.take(f"{quantizer}.use_activation_quant")
    if weights.pop("use_subgroup_scale", False):
        made.say(f"{quantizer}.weight.use_subgroup_scale", FOCUS)
        weights.pop("num_sub", None)
    try:
        activations = tensor(inputs, inputs=True) if quantized_inputs else None
        put_scheme(made, tensor(weights, inputs=False), activations, "compression.quantization")
    except ValueError as error:
        made.say("compression.quantization", f"{error}: choose a quant.scheme")
        made.put("quant.scheme", UNKNOWN)
    if (weights.get("qtype"), inputs.get("qtype"), quantized_inputs) == ("int4", "fp8", True):
        made.say(
            "compression.quantization.name",
            "w4a8_fp8 has one stored scale for a layer's inputs, as converted; for vLLM set quant.scheme: w4a8_fp8, "
            "which has a scale per token",
        )
    ignored = source.take("compression.quantization.ignore_layers", [])
    usual = ("lm_head", "embed_tokens", "gate.weight")  # lm_head and routers are exempt by default
    made.put("quant.exempt_more", [f".*{re.escape(one)}.*" for one in ignored if one not in usual] or None)
    for part in ("q", "k", "v"):
        if source.take_below(f"{quantizer}.{part}"):
            made.say(f"{quantizer}.{part}", "queries are not quantized here" if part == "q" else KV_CACHE)
    expect(source, made, f"{quantizer}.use_qkv_quant", False, KV_CACHE)
    if source.take(f"{quantizer}.fp8_attn"):
        made.say(f"{quantizer}.fp8_attn", "attention itself is not quantized")


def _angelslim_learnable(source: ForeignRecipe, made: Converted, section: str, quantizer: str) -> None:
    learnable = f"{quantizer}.learnable"
    everything = source.take(f"{section}.trainable_parameters", "quant") == "all"
    static_inputs = _static_inputs(made)
    made.put("learnable.weight", everything)
    made.put("learnable.weight_scale", bool(source.take(f"{learnable}.weight_scale", True)))
    learn_inputs = bool(source.take(f"{learnable}.act_scale", False))
    made.put("learnable.act_scale", learn_inputs if static_inputs else None)
    if source.take(f"{learnable}.kv_scale"):
        made.say(f"{learnable}.kv_scale", f"{KV_CACHE}; with one of them, learnable.kv_scale learns the scale")
    if source.take(f"{learnable}.norm"):
        made.say(f"{learnable}.norm", "AngelSlim's optimizer gets no norms; learnable.norm: true trains them here")
    lwc = source.take(f"{learnable}.lwc") or source.take(f"{quantizer}.lwc.enable_lwc")
    source.take_below(f"{quantizer}.lwc")
    if lwc:
        made.say(f"{learnable}.lwc", "with frozen weights clipping and learnable.weight_scale learn the same scale")
    if source.take(f"{learnable}.quant_max_scale_lr"):
        made.say(f"{learnable}.quant_max_scale_lr", FOCUS)
    expect(source, made, f"{section}.plugin_config.enable_scale", True, "here layers are always quantized")


def _angelslim_first_scales(source: ForeignRecipe, made: Converted, section: str, quantizer: str) -> None:
    """Convert the source of the first scales: a PTQ checkpoint, or a number of samples that each process runs."""
    samples = int(source.take(f"{quantizer}.lazy_init_samples", 10))
    if scales := source.take(f"{section}.from_ptq_ckpt"):
        nested = Path(scales, "final_quant_checkpoint")  # as its QAT writes them
        made.put("quant.scales", str(nested) if nested.is_dir() else scales)
        made.say(
            f"{section}.from_ptq_ckpt",
            "if there is no such directory, remove quant.scales: the run then measures the first scales",
        )
    if _static_inputs(made):
        batches = -(-samples // made.recipe["data"]["micro_batch_size"])
        made.put("quant.calibration_batches", PTQ_BATCHES if scales else batches)
        if not scales and batches != samples:
            rows = made.recipe["data"]["micro_batch_size"]
            made.say(f"{quantizer}.lazy_init_samples", f"{samples} are {batches} micro-batches of {rows}")


def _static_inputs(made: Converted) -> bool:
    """Return True if the converted scheme stores scales of inputs."""
    quant = made.recipe.get("quant", {})
    name = quant.get("scheme")
    if name in SCHEMES:
        inputs = SCHEMES[name].activations
        return inputs is not None and not inputs.dynamic
    return "activations" in quant.get("schemes", {}).get(name, {})


def _angelslim_losses(source: ForeignRecipe, made: Converted, section: str, kind: str) -> None:
    named = source.has(f"{section}.loss_type")
    loss = source.take(f"{section}.loss_type", "origin" if kind == "QAT" else "kd")
    lm = float(source.take(f"{section}.lm_loss_weight", 1.0))
    kd = float(source.take(f"{section}.kd_loss_weight", 0.0 if kind == "QAT" else 1.0))
    top = source.take(f"{section}.loss_topk")
    temperature = float(source.take(f"{section}.kd_temperature", 1.0))
    teacher = source.take(f"{section}.teacher_model_path")
    made.put("loss.lm_weight", lm)
    if loss == "origin" or kd == 0:
        if named and loss != "origin":
            made.say(f"{section}.loss_type", f"{loss} has no effect, as kd_loss_weight is 0 there: labels alone teach")
        return
    made.put("loss.kd_weight", kd)
    found = re.fullmatch(r"(r_?)?kl_top(?:_(\d+|k))?", str(loss).lower())
    if found:
        made.put("loss.kd", "r_kl_top_k" if found[1] else "kl_top_k")
        made.put("loss.top_k", int(top or (found[2] if (found[2] or "k") != "k" else 1000)))
    elif loss in LOSSES:
        made.put("loss.kd", loss)
    else:
        made.say(f"{section}.loss_type", f"{loss}, expected one of {', '.join(LOSSES)}, kl_top and r_kl_top")
    made.put("loss.temperature", temperature if loss == "kd" else None)
    frozen = not made.recipe["learnable"]["weight"]
    made.put("loss.teacher", teacher or ("self" if frozen else made.recipe["model"]["path"]))


def _angelslim_data(source: ForeignRecipe, made: Converted, section: str) -> None:
    hub = source.take(f"{section}.hf_dataset")
    said = "false" if source.has("dataset.is_sft_data") else f"false{THERE}"
    path, answers_alone = source.take("dataset.data_path"), source.take("dataset.is_sft_data", False)
    key = f"{section}.hf_dataset"
    if not hub and path and parse_name(path.partition(",")[0]):
        hub, key = path, "dataset.data_path"
    if hub:  # owner/name, or owner/name,configuration
        name, _, configuration = hub.partition(",")
        path = f"hf://datasets/{name}" + (f"/{configuration}/train*" if configuration else "")
        made.say(key, f"converted to the files {path}: look if the data set has its text there")
    made.put("data.train", [path or "train.jsonl"])
    made.put("data.kind", "text" if hub else None)
    if not hub and not answers_alone:
        made.say("dataset.is_sft_data", f"{said}: prompts are learned there too; here answers alone are")
    made.put("data.max_length", length := source.take("dataset.max_seq_length"))
    if not hub:
        made.say(
            "dataset.max_seq_length",
            f"{length}: longer samples lose their end there; here they are dropped, or lose their beginning with "
            "data.too_long: truncate",
        )
    if rows := source.take("dataset.num_samples"):
        made.say("dataset.num_samples", f"the whole file is trained on, not its first {rows} rows")


def _trainer(source: ForeignRecipe, made: Converted, prefix: str) -> None:
    """Convert arguments of transformers' Trainer."""

    def take(name: str, default: Any = None) -> Any:
        return source.take(f"{prefix}.{name}", default)

    def interval(name: str) -> int | None:
        """Take a number of steps; a value below 1 is a share of max_steps, or None with a note if that is not set."""
        value = float(take(name, 500))
        if not 0 < value < 1:
            return int(value)
        if steps > 0:
            return math.ceil(value * steps)
        made.say(
            f"{prefix}.{name}", f"{value:g} is a share of all steps there: {INTERVALS[name]} takes a number of steps"
        )
        return None

    shown = ("per_device_train_batch_size", "num_train_epochs", "max_steps", "logging_steps", "save_steps")
    absent = [name for name in shown if not source.has(f"{prefix}.{name}")]
    whose = "" if source.has(f"{prefix}.learning_rate") else THERE
    rate = float(take("learning_rate", 1e-5))
    if made.recipe["learnable"]["weight"]:
        made.put("optim.lr", rate)
    made.say(
        f"{prefix}.learning_rate",
        f"{rate:g}{whose} is added to a scale there; optim.scale_lr multiplies it (1e-3: 0.1% a step), so its default "
        "is kept",
    )
    made.put("data.micro_batch_size", int(take("per_device_train_batch_size", 8)))
    made.put("train.gradient_accumulation_steps", int(take("gradient_accumulation_steps", 1)))
    steps = int(take("max_steps", -1))
    epochs = float(take("num_train_epochs", 3))
    made.put(*(("train.steps", steps) if steps > 0 else ("train.epochs", epochs)))
    schedule = str(take("lr_scheduler_type", "linear"))
    if schedule in ("constant", "linear", "cosine"):
        made.put("optim.schedule", schedule)
    else:
        made.say(f"{prefix}.lr_scheduler_type", f"{schedule}, expected constant, linear or cosine")
    made.put("optim.min_lr_ratio", 0.0 if schedule != "constant" else None)  # transformers' schedules end at 0
    made.put("optim.warmup_ratio", float(take("warmup_ratio", 0.0)) or None)
    warmup = float(take("warmup_steps", 0))
    made.put(
        "optim.warmup_ratio" if 0 < warmup < 1 else "optim.warmup_steps",
        (warmup if warmup < 1 else int(warmup)) or None,
    )
    made.put("optim.grad_clip", float(take("max_grad_norm", 1.0)))
    made.put("optim.betas", [float(take("adam_beta1", TORCH_BETAS[0])), float(take("adam_beta2", TORCH_BETAS[1]))])
    decay = float(take("weight_decay", 0.0))
    if decay and not made.recipe["learnable"]["weight"]:
        made.say(f"{prefix}.weight_decay", "scales do not decay here")
    made.put("optim.weight_decay", (decay or None) if made.recipe["learnable"]["weight"] else None)
    made.put("train.seed", int(take("seed", 42)))
    made.put("data.seed", int(take("data_seed", made.recipe["train"]["seed"])))
    made.put("train.activation_checkpointing", take("gradient_checkpointing"))
    made.put(INTERVALS["logging_steps"], interval("logging_steps"))
    when = take("save_strategy", "steps")
    if when == "steps":
        made.put(INTERVALS["save_steps"], interval("save_steps"))
    take("save_steps")
    if when not in ("steps", "no"):
        made.say(f"{prefix}.save_strategy", f"{when}: set train.checkpoint_every to a number of steps")
    made.put("train.keep_checkpoints", take("save_total_limit"))
    if not take("bf16", True) or take("fp16"):
        made.say(f"{prefix}.bf16", "false: set model.dtype")
    used = {"num_train_epochs": steps <= 0, "max_steps": False, "save_steps": when == "steps"}
    values = {"per_device_train_batch_size": 8, "num_train_epochs": 3, "logging_steps": 500, "save_steps": 500}
    if unset := [f"{name} {values[name]}" for name in absent if used.get(name, True)]:
        made.say(prefix, f"not set, so the Trainer's defaults are converted: {', '.join(unset)}")
    trackers = take("report_to")
    if trackers is not None:
        names = [one for one in ([trackers] if isinstance(trackers, str) else trackers) if one != "none"]
        known = [one for one in names if one in TRACKERS]
        made.put("train.report_to", known)
        if known != names:
            made.say(f"{prefix}.report_to", f"{', '.join(names)}, expected {', '.join(TRACKERS)} or none")
    strategy = str(take("deepspeed", ""))
    made.put("deepspeed", chosen := "zero3" if "zero3" in strategy else "zero2")
    made.say(f"{prefix}.deepspeed", f"{strategy or 'not set'}: {chosen} is chosen, for others see ds_configs/README.md")


def from_torchtune(source: ForeignRecipe) -> Converted:
    """Convert a configuration of torchtune's recipes qat_distributed and qat_lora_finetune_distributed."""
    made = Converted()
    output = source.take("output_dir", "runs/converted")

    def path(value: Any) -> Any:
        return value.replace("${output_dir}", str(output)) if isinstance(value, str) else value

    made.put("model.path", path(source.take("checkpointer.checkpoint_dir")))
    if "HF" not in str(source.keys.get("checkpointer._component_", "")):
        made.say("checkpointer", "model.path is a Hugging Face checkpoint (safetensors), not Meta's consolidated files")
    model = str(source.take("model._component_"))
    if "lora" in model:
        _torchtune_adapter(source, made)
    dtype = source.take("dtype", "bf16")
    made.put("model.dtype", {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(dtype, dtype))
    if made.recipe["model"]["dtype"] == "bfloat16":
        made.say("dtype", "bf16: torchtune's optimizer then updates bf16 weights; here it always updates fp32 copies")
    _torchtune_quantizer(source, made)
    made.put("learnable.norm", "adapter" not in made.recipe)
    data = {name: source.take(f"dataset.{name}") for name in ("data_files", "source", "_component_", "packed")}
    files = data["data_files"] or data["source"] or data["_component_"] or "train.jsonl"
    made.put("data.train", [files])
    made.say(
        "dataset",
        f"data.train takes files, or names on the Hub: save the rows of {files} as JSONL; prompts are not learned here",
    )
    if validation := source.take_below("dataset_val"):
        made.say("dataset_val", f"data.eval takes files, data.held_out a share of the samples: {validation}")
    made.put("data.loss_on", "all")  # as there, all answers of a chat
    if (length := source.take("tokenizer.max_seq_len")) is not None:
        made.put("data.max_length", length)
        made.put("data.too_long", "truncate")
        made.say("tokenizer.max_seq_len", f"{length}: longer samples lose their end there, here their beginning")
    made.put("data.packing", bool(data["packed"]) or None)
    made.put("data.micro_batch_size", source.take("batch_size"))
    expect(source, made, "shuffle", True, "samples are always shuffled")
    made.put("data.seed", source.take("seed"))
    made.put("train.epochs", source.take("epochs"))
    made.put("train.gradient_accumulation_steps", source.take("gradient_accumulation_steps"))
    made.put("train.activation_checkpointing", source.take("enable_activation_checkpointing"))
    made.put("train.activation_offload", source.take("enable_activation_offloading") or None)
    made.put("train.compile", source.take("compile") or None)
    made.put("train.log_every", source.take("log_every_n_steps"))
    optimizer = source.take("optimizer._component_")
    if str(optimizer).endswith("AdamW8bit"):
        made.put("optim.moments", "8bit")
    elif not str(optimizer).endswith("AdamW"):
        made.say("optimizer._component_", f"{optimizer}: AdamW is the optimizer here")
    made.put("optim.lr", float(source.take("optimizer.lr", 1e-3)))
    made.put("optim.betas", source.take("optimizer.betas", TORCH_BETAS))
    made.put("optim.weight_decay", float(source.take("optimizer.weight_decay", 0.01)))  # torch's default
    schedule = str(source.take("lr_scheduler._component_", ""))
    if schedule and not schedule.endswith("get_cosine_schedule_with_warmup"):
        made.say("lr_scheduler._component_", f"{schedule}: here it becomes a cosine that ends at 0 (optim.schedule)")
    expect(source, made, "lr_scheduler.num_cycles", 0.5, "a cosine falls to its end once here")
    made.put("optim.schedule", "cosine" if schedule else "constant")
    made.put("optim.min_lr_ratio", 0.0 if schedule else None)
    made.put("optim.warmup_steps", source.take("lr_scheduler.num_warmup_steps"))
    made.put("optim.grad_clip", float(source.take("clip_grad_norm", 0.0)))  # torchtune clips where it is set
    loss = str(source.take("loss._component_", "CrossEntropyLoss"))
    if "CrossEntropy" not in loss:
        made.say("loss._component_", f"{loss}: the loss here is cross entropy, and distillation (loss.kd)")
    if source.take("resume_from_checkpoint"):
        made.say("resume_from_checkpoint", "train.resume: true continues from this project's own checkpoints")
    made.put("deepspeed", "zero3")
    made.put("output_dir", output)
    return made


def _torchtune_adapter(source: ForeignRecipe, made: Converted) -> None:
    """Convert the options of LoRA to an adapter that is not merged into the quantized weights."""
    made.put("adapter.kind", "lora")
    made.put("adapter.merge", False)
    made.put("adapter.rank", source.take("model.lora_rank", 8))
    made.put("adapter.alpha", float(source.take("model.lora_alpha", 16)))
    made.put("adapter.dropout", float(source.take("model.lora_dropout", 0.0)) or None)
    names = [name.replace("output_proj", "o_proj") for name in source.take("model.lora_attn_modules", [])]
    names += ["gate_proj", "up_proj", "down_proj"] if source.take("model.apply_lora_to_mlp") else []
    made.put("adapter.targets", [rf".*\.({'|'.join(names)})"])


def _torchtune_quantizer(source: ForeignRecipe, made: Converted) -> None:
    name = str(source.take("quantizer._component_")).rpartition(".")[2]
    size = source.take("quantizer.groupsize", 256)  # torchao's default for both
    weights = TensorSpec("int", 4, "group", size)
    inputs = TensorSpec("int", 8, "token", symmetric=False, dynamic=True)
    found = {"Int8DynActInt4WeightQATQuantizer": inputs, "Int4WeightOnlyQATQuantizer": None}
    if name in found:
        put_scheme(made, weights, found[name], "quantizer")
        if found[name] is None:
            made.say(
                "quantizer._component_",
                f"{name}: the codes of a group span its minimum to its maximum there (asymmetric), here they are "
                "symmetric; exports for other tools differ",
            )
    else:
        made.say("quantizer._component_", f"{name}, expected one of {', '.join(found)}: choose a quant.scheme")
    # torchao measures each step's weights, and learns no scales.
    made.put("quant.weight_range", "absmax")
    made.put("quant.scales_follow_weights", True)
    made.put("learnable.weight_scale", False)
    made.put("quant.fake_quant_start", source.take("fake_quant_after_n_steps"))


def converted_recipe(contents: dict[str, Any]) -> Converted:
    """Convert the contents of a configuration file of AngelSlim (QAT or QAD) or torchtune (QAT). Raises ValueError for
    any other file."""
    source = ForeignRecipe(contents)
    tools: list[tuple[str, Callable[[ForeignRecipe], Converted]]] = [
        ("compression", from_angelslim),
        ("quantizer", from_torchtune),
    ]
    for section, tool in tools:
        if section in contents:
            made = tool(source)
            for key in source.left():
                made.say(key, f"{source.keys[key]!r} has no counterpart, or is not known")
            return made
    raise ValueError(
        "expected a QAT configuration of AngelSlim (section compression) or of torchtune (section quantizer); for "
        f"other tools write a recipe by {PAGE}"
    )


def main() -> None:
    """Print the recipe with notes, and the notes on stderr, too. Exits with an error if that is not possible."""
    parser = option_parser(__doc__)
    parser.add_argument("file", type=Path, help="YAML configuration of AngelSlim or torchtune")
    file = parser.parse_args().file
    try:
        contents = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(contents, dict):
            raise ValueError("expected a YAML file with keys and values")
        made = converted_recipe(contents)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        parser.error(f"{file}: {error}")
    print(f"# Converted from {file.name} by launch/convert_recipe.py.")
    for note in made.notes:
        line = f"note: {' '.join(note.split())}"
        print(f"# {line}")
        print(line, file=sys.stderr)
    following = "deepspeed --num_gpus N launch/train.py --config RECIPE (without a GPU N is the number of ranks)"
    print(f"next: {following}", file=sys.stderr)
    print(yaml.safe_dump(made.recipe, sort_keys=False, allow_unicode=True), end="")


if __name__ == "__main__":
    main()
