"""The DeepSpeed configuration: a file of ``ds_configs/`` made complete by the recipe, contradictions refused.

The JSON files hold DeepSpeed's own keys, so that its documentation applies and a file of one's own can be brought
along. Where a key says the same as a knob of the recipe, the file holds "auto" (or nothing) and the recipe's value goes
in; a file that holds another value than the recipe is an error, because one of the two would be ignored. Any other
"auto" below the top level means DeepSpeed's own default, as it does to DeepSpeed.

DeepSpeed accepts an unknown top-level key in silence (``zero_optimisation`` trains at stage 0), and clips gradients at
1.0 unless told otherwise. So top-level keys are checked here, and clipping is always written out.
"""

import copy
import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ValidationError

from engine.recipe.checks import RecipeError
from engine.recipe.ds_keys import (
    ALLOWED,
    FROM_RECIPE,
    NESTED,
    REFUSED,
    SECTIONS,
    SETTINGS,
    TEACHER_KEYS,
    VALUES,
    ZERO_KEYS,
)
from engine.recipe.recipe import Recipe
from model.ranks import local_world_size

SHIPPED = Path(__file__).parents[2] / "ds_configs"


COMPILED = (
    "zero_optimization.stage is 3, but train.compile is true: under stage 3 hooks gather the parameters of each "
    "module, which a compiled graph cannot hold; use stage 0, 1 or 2, or train.compile false"
)
# DeepSpeed's own models of sections.
MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "comms_logger": CommsLoggerConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}


class DsConfigError(RecipeError):
    """A bad DeepSpeed configuration. Its text has one line per problem, which names the file and the key."""


def config_path(name_or_path: str) -> Path:
    """The file of ``zero3`` (a name in ds_configs/) or ``my/config.json`` (a path, relative to the current directory).

    Raises:
        DsConfigError: there is no such file; lists the names there are.
    """
    is_path = name_or_path.endswith(".json") or os.path.sep in name_or_path
    path = Path(name_or_path) if is_path else SHIPPED / f"{name_or_path}.json"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        wrong = f"there is no such file{where}" if is_path else f"expected one of {names}, or the path of a .json file"
        raise DsConfigError(f"deepspeed: {name_or_path!r}, {wrong}")
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The file's own keys and values, top-level keys checked.

    Raises:
        DsConfigError: not JSON (names file and line), not an object, a key twice, or a key that may not be there.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key in (keys := [key for key, _ in pairs]):
            if keys.count(key) > 1:
                raise DsConfigError(f"{path}: {key!r} occurs twice in one object")
        return dict(pairs)

    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except DsConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise DsConfigError(_no_json(path, error)) from error
    if not isinstance(config, dict):
        raise DsConfigError(f"{path}: expected an object with DeepSpeed's keys, found {type(config).__name__}")
    problems = [f"{path}: {problem}" for key, value in config.items() for problem in _key_problems(key, value)]
    if problems:
        raise DsConfigError("\n".join(problems))
    return config


def _no_json(path: Path, error: Exception) -> str:
    """Why a file is none of JSON: a number may have more digits than Python reads, too."""
    if isinstance(error, json.JSONDecodeError):
        return f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"{path}: not UTF-8 text ({error})"
    if isinstance(error, RecursionError):
        return f"{path}: nested too deep for a configuration"
    return f"{path}: not JSON ({error})"


def _key_problems(key: str, value: Any) -> list[str]:
    """What is wrong with one top-level key and its value."""
    if key in REFUSED:
        return [f"{key}: {REFUSED[key]}"]
    if key not in ALLOWED:
        close = difflib.get_close_matches(key, sorted(ALLOWED), n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(ALLOWED))}"
        return [f"{key}: unknown key, which DeepSpeed would ignore in silence; {hint}"]
    if key in SECTIONS and value != "auto" and not isinstance(value, dict):
        return [f"{key}: {value!r}, expected an object"]
    if key in NESTED and isinstance(value, dict):
        return [problem for name, inner in value.items() for problem in _nested_problems(key, name, inner)]
    if value == "auto" and key not in FROM_RECIPE:
        return [f'{key}: the recipe has no value for "auto"; write one, or leave the key out']
    if key in VALUES and not VALUES[key][0](value):
        return [f"{key}: {value!r}, expected {VALUES[key][1]}"]
    return []


def _nested_problems(section: str, key: str, value: Any) -> Iterator[str]:
    """What is wrong with a key of a section that DeepSpeed does not check."""
    if key not in (known := NESTED[section]):
        yield f"{section}.{key}: leave it out; expected {', '.join(known)} at most"
    elif not known[key][0](value):
        yield f"{section}.{key}: {value!r}, expected {known[key][1]}"


def resolve(recipe: Recipe, world_size: int, *, local_size: int | None = None) -> dict[str, Any]:
    """The complete configuration for ``deepspeed.initialize`` and ``zero.Init``, a new dict.

    Needs no process group: call it before there is one, with the WORLD_SIZE of the environment.

    Args:
        recipe: names the file, and has the values that the file leaves open.
        world_size: ranks of the job.
        local_size: ranks of a node; by default what the launcher says, which it must where hpZ is auto.

    Raises:
        DsConfigError: the file is missing or wrong, or contradicts the recipe; one line per problem.
    """
    path = config_path(recipe.deepspeed)
    config = read_config(path)
    problems = _fill_from_recipe(config, recipe, world_size) + _fill_precision(config, recipe)
    if config.get("zero_optimization", {}).get("zero_hpz_partition_size") is not None:
        problems += _fill_hpz(config["zero_optimization"], world_size, local_size or local_world_size())
    problems += _section_problems(config)
    if recipe.train.compile and config.get("zero_optimization", {}).get("stage") == 3:
        problems.append(COMPILED)
    if recipe.quant.gather_codes:
        problems += _gather_problems(config, recipe)
    if problems := problems or list(_refused_by_deepspeed(config)):
        raise DsConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    if config["zero_optimization"].get("offload_optimizer") is not None:
        # The optimizer is torch.optim.AdamW everywhere, also on the CPU: DeepSpeed's CPUAdam compiles at first use.
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def _gather_problems(config: dict[str, Any], recipe: Recipe) -> list[str]:
    """What rules out gathering weights as codes (quant.gather_codes): the model's dtype, the stage or hpZ."""
    zero = config.get("zero_optimization", {})
    if recipe.model.dtype == "float16":
        return [
            "fp16 is on (model.dtype: float16), but quant.gather_codes is true: codes are gathered in bfloat16 and "
            "float32 only; use one of the two"
        ]
    if zero.get("stage") != 3:
        return [
            f"zero_optimization.stage is {zero.get('stage', 0)}, but quant.gather_codes is true: only stage 3 gathers "
            "weights for every layer; use stage 3, or quant.gather_codes false"
        ]
    if zero.get("zero_hpz_partition_size", 1) != 1:
        return [
            f"zero_optimization.zero_hpz_partition_size is {zero['zero_hpz_partition_size']}, but quant.gather_codes "
            "is true: hpZ would keep what the codes stand for in place of the weights; use one of the two"
        ]
    return []


def _fill_from_recipe(config: dict[str, Any], recipe: Recipe, world_size: int) -> list[str]:
    """Write the recipe's values into the keys that say the same; returns the contradictions."""
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
    """Gradients accumulate in fp32 beside 16-bit parameters, where DeepSpeed can (stages 1-3); returns the problems."""
    types = config.setdefault("data_types", {})
    stage = config.get("zero_optimization", {}).get("stage")
    written = types.pop("grad_accum_dtype", "auto")
    if written != "auto":
        types["grad_accum_dtype"] = written
    own = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[recipe.model.dtype]
    # On stage 0 DeepSpeed raises "unsupported mix" for anything but the parameters' own type.
    only_own = stage == 0 and own != "fp32"
    if written not in ("auto", own) and (only_own or written != "fp32"):
        return [f"data_types.grad_accum_dtype is {written!r}{_other_precision(own, only_own)}"]
    if own != "fp32" and not only_own:
        types.setdefault("grad_accum_dtype", "fp32")
    return []


def _other_precision(own: str, only_own: bool) -> str:
    """What is wrong with a type that gradients are to accumulate in, beside parameters of the type ``own``."""
    if only_own:
        return f": stage 0 accumulates in {own} only; leave it out or use stage 1"
    also = "" if own == "fp32" else f" or {own}"
    return f", expected fp32 (the default){also}: DeepSpeed would add up gradients in any type that torch has"


def _fill_hpz(zero: dict[str, Any], world_size: int, local_size: int | None) -> list[str]:
    """Replace hpZ's "auto" by the number of ranks of a node, among which gathering is fast; returns the problems."""
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


def _section_problems(config: dict[str, Any]) -> Iterator[str]:
    """What is wrong inside the nested sections, some of it found by DeepSpeed's own models of them.

    DeepSpeed would say so only after the process group has started, or not at all.
    """
    for path, good, problem in SETTINGS:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not good(value):
            yield f"{path}: {problem.format(value)}"
    untried = _known_to(DeepSpeedZeroConfig) - ZERO_KEYS
    for section, model in MODELS.items():
        values = config.get(section, {})
        if section == "zero_optimization":  # without those that are refused, which may raise anything
            refused = [key for key in values if key in untried]
            yield from (f"{section}.{key}: leave it out: DeepQAT has not been tried with it" for key in refused)
            values = {key: value for key, value in values.items() if key not in untried}
        try:
            model(**values)
        except ValidationError as error:
            for found in error.errors():
                yield f"{'.'.join(map(str, (section, *found['loc'])))}: {found['msg']}, found {found['input']!r}"
        except (TypeError, OverflowError) as error:
            yield _not_taken(section, values, error)


def _not_taken(section: str, values: dict[str, Any], error: Exception) -> str:
    """Of a key that Python has a meaning for, such as self, or an integer that DeepSpeed makes a float of."""
    large = [key for key, one in values.items() if isinstance(one, int) and abs(one) >= 2**63]
    if isinstance(error, OverflowError):
        return f"{'.'.join((section, *large[:1]))}: expected numbers that 64 bits hold"
    return f"{section}: DeepSpeed cannot take its keys ({error})"


def _known_to(model: type[BaseModel]) -> set[str]:
    """The keys of a section that DeepSpeed's own model of it has, by each of their names."""
    return {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}


def _refused_by_deepspeed(config: dict[str, Any]) -> Iterator[str]:
    """What DeepSpeed's own reading of the whole configuration says, which would else come after the process group."""
    # Whose sizes it would compare, before there is one, with those of a single rank.
    given = {key: copy.deepcopy(value) for key, value in config.items() if key != "train_batch_size"}
    try:
        DeepSpeedConfig(given)
    except ValidationError as error:
        for found in error.errors():
            yield f"{'.'.join(map(str, found['loc']))}: {found['msg']}, found {found['input']!r}"
    except Exception as error:  # of any kind: it reads some keys without a look at their type
        yield f"DeepSpeed cannot read it: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def teacher_config(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a frozen teacher, an engine without an optimizer, beside a student with ``ds_config``.

    The same partitioning; nothing of the optimizer, and none of the monitors, which would write the student's files
    again. ``ds_config`` is what :func:`resolve` returned; it is not changed.
    """
    config = {key: copy.deepcopy(ds_config[key]) for key in TEACHER_KEYS if key in ds_config}
    config["zero_optimization"].pop("offload_optimizer", None)
    return config
