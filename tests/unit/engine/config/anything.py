"""Recipes and DeepSpeed configurations that nobody would write, drawn from the options themselves (hypothesis).

An option that is added to a dataclass of engine/config/ is drawn from then on, with values of its type, of other types,
null, and numbers at and beyond what a computer holds.
"""

import copy
import datetime
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CSVConfig, TensorBoardConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from hypothesis import strategies as st
from pydantic import BaseModel

from engine.config.config import Recipe
from engine.config.deepspeed import BROKEN, CHECKED
from quant import PRESETS

INTEGERS = st.sampled_from([-1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63) - 1, 10**30, 10**400])
FLOATS = st.sampled_from(
    [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-320, 1e-45, 0.25, 0.5, 1.0, 1.5, 3e38, 4e38, 1e300, -1.0]
)
PATTERNS = [".*", "(a+)+$", "re:(", "[", "model\\.layers\\.0\\..*", "(?P<x>", "\\", "(?:(?:a|aa)+)+b"]
WORDS = ["", " ", "auto", "self", "best", "null", "true", "no", "1e3", "0x10", "1:30", "~", "step_00000001", "../x"]
ODD = ["\0", "\u2028", "\x1b[31m", "a" * 5000, "é", "*x", "&x", "!!python/name:os.system", "os.path", "pathlib.Path"]
CONDITIONS = [
    "loss/lm < 2.5",
    "loss/lm < nan",
    "loss/lm <",
    "eval/perplexity >= 1e400",
    "x < 1 < 2",
    "loss/nothing > 0",
]
TEXTS = st.sampled_from(
    [*WORDS, *ODD, *PATTERNS, *CONDITIONS, *PRESETS, "none", "sdpa", "eager", "500MB", "0GB", "9" * 400, "1e999GB"]
)
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS)
ODD_SCALARS = st.sampled_from([datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1, 12), b"\xff\0", {"a", "b"}])
# What YAML can say: keys of mappings are texts here, as every other key is a text to who reads it.
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.one_of(SCALARS, SCALARS, ODD_SCALARS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(TEXTS, st.sampled_from(["class_path"])), inner, max_size=3),
    ),
    max_leaves=6,
)
# As JSON has it.
ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)

DS_WORDS = st.sampled_from(["cpu", "nvme", "none", "fp32", "bf16", "fp16", "int8", "info", "Warn", "auto", 1e9, "5e8"])


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an option's type, of any size; those that stand in a YAML file for it."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return st.one_of(ANY_JSON, SCALARS, DS_WORDS)
    if is_dataclass(kind):
        return section(kind)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is list:
        return st.lists(option(parts[0]), max_size=3)
    if origin is tuple:
        return st.lists(option(parts[0]), max_size=3)
    if origin is dict:
        names = st.one_of(TEXTS, st.sampled_from(["lm", "kd", "weights", "weight_scales", "mine", "input", "output"]))
        return st.dictionaries(names, option(parts[1]), max_size=2)
    if parts:
        return st.one_of(*map(of_type, parts))
    known = {bool: st.booleans(), int: INTEGERS, float: st.one_of(FLOATS, INTEGERS), str: TEXTS, type(None): st.none()}
    return known[kind]


def option(kind: Any) -> st.SearchStrategy[Any]:
    """A value for an option: mostly of its type."""
    return st.one_of(of_type(kind), of_type(kind), of_type(kind), ANYTHING)


def section(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping of some of a dataclass's options, mostly with those that have no default."""
    hints = get_type_hints(kind)
    needed = {item.name: option(hints[item.name]) for item in fields(kind) if _has_no_default(item)}
    others = {name: option(hint) for name, hint in hints.items() if name not in needed}
    few = st.lists(st.sampled_from(sorted(others)), min_size=1, max_size=3, unique=True)
    chosen = few.flatmap(lambda names: st.fixed_dictionaries({**needed, **{name: others[name] for name in names}}))
    return st.one_of(chosen, chosen, st.dictionaries(st.sampled_from(sorted(hints)), SCALARS, max_size=3))


def _has_no_default(item: Field) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def options() -> dict[tuple[str, ...], Any]:
    """The type of every option by its path in a recipe: ``("optim", "lr")``, ``("output_dir",)``; of sections too."""
    found: dict[tuple[str, ...], Any] = {}
    for name, hint in get_type_hints(Recipe).items():
        found[name,] = hint
        if is_dataclass(hint):
            found |= {(name, inner): kind for inner, kind in get_type_hints(hint).items()}
    return found


Change = tuple[tuple[str, ...], Any]


def changes(paths: dict[tuple[str, ...], Any], most: int = 3) -> st.SearchStrategy[list[Change]]:
    """A few options with what is written there; at times a key that does not exist."""
    one = st.sampled_from(sorted(paths)).flatmap(lambda path: st.tuples(st.just(path), option(paths[path])))
    sections = sorted({path[:-1] for path in paths})
    unknown = st.tuples(st.builds(lambda path, name: (*path, name), st.sampled_from(sections), TEXTS), SCALARS)
    return st.lists(st.one_of(*[one] * 9, unknown), min_size=1, max_size=most)


def changed(contents: dict[str, Any], drawn: list[Change]) -> dict[str, Any]:
    """A recipe, or another mapping of sections, with these values in it."""
    result = copy.deepcopy(contents)
    for path, value in drawn:
        place = result
        for name in path[:-1]:
            place = place.setdefault(name, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[path[-1]] = value
    return result


def ds_keys() -> dict[tuple[str, ...], Any]:
    """The type of every key of a DeepSpeed file by its path, from DeepSpeed's own models of sections and our lists."""
    found: dict[tuple[str, ...], Any] = {(key,): Any for key in sorted(CHECKED | BROKEN.keys())}
    models: list[tuple[tuple[str, ...], type[BaseModel]]] = [
        (("zero_optimization",), DeepSpeedZeroConfig),
        (("zero_optimization", "offload_param"), DeepSpeedZeroOffloadParamConfig),
        (("zero_optimization", "offload_optimizer"), DeepSpeedZeroOffloadOptimizerConfig),
        (("bf16",), DeepSpeedBF16Config),
        (("fp16",), DeepSpeedFP16Config),
        (("comms_logger",), CommsLoggerConfig),
        (("tensorboard",), TensorBoardConfig),
        (("csv_monitor",), CSVConfig),
    ]
    for path, model in models:
        found |= {(*path, name): Any for name in sorted(model.model_fields)}
    profiler = ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file")
    found |= {("flops_profiler", name): Any for name in profiler}
    found |= {("aio", name): Any for name in ("block_size", "queue_depth", "thread_count", "single_submit")}
    return found | {("data_types", "grad_accum_dtype"): Any, ("checkpoint", "tag_validation"): Any}


def ds_changes() -> st.SearchStrategy[tuple[int, str, list[Change]]]:
    """A stage, a model's dtype, and what else a DeepSpeed file says."""
    paths = ds_keys()
    one = st.sampled_from(sorted(paths)).flatmap(lambda path: st.tuples(st.just(path), of_type(paths[path])))
    dtypes = st.sampled_from(["bfloat16", "float16", "float32"])
    return st.tuples(st.integers(0, 3), dtypes, st.lists(one, min_size=1, max_size=2))
