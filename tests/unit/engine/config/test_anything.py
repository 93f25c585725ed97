"""Recipes and DeepSpeed files with odd values, drawn from the options themselves (hypothesis): read, or refused in
lines that open with the key. No traceback.

An option that is added to a dataclass of engine/config/ is drawn from then on, with values of its type, of other types,
null, and numbers at and beyond what a computer holds.
"""

import copy
import datetime
import json
import re
from collections import Counter
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from engine.config.config import Recipe
from engine.config.deepspeed import BROKEN, CHECKED, MODELS, resolve
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe, save_recipe
from quant import PRESETS
from tests.lib.patience import ends
from tests.lib.recipes import MINIMAL, minimal
from tests.lib.seeds import seed_of

INTEGERS = st.sampled_from([-1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63) - 1, 10**30, 10**400])
FLOATS = st.sampled_from(
    [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-320, 1e-45, 0.25, 0.5, 1.0, 1.5, 3e38, 4e38, 1e300, -1.0]
)
PATTERNS = [".*", "(a+)+$", "re:(", "[", "model\\.layers\\.0\\..*", "(?P<x>", "\\", "(?:(?:a|aa)+)+b"]
WORDS = ["", " ", "auto", "self", "best", "null", "true", "no", "1e3", "0x10", "1:30", "~", "step_00000001", "../x"]
ODD = ["\0", "\u2028", "\x1b[31m", "a" * 5000, "é", "*x", "&x", "!!python/name:os.system", "os.path", "pathlib.Path"]
CONDITIONS = ["loss/lm < 2.5", "loss/lm < nan", "loss/lm <", "eval/lm >= 1e400", "x < 1 < 2", "loss/nothing > 0"]
SIZES = ["500MB", "0GB", "9" * 400, "1e999GB"]
TEXTS = st.sampled_from([*WORDS, *ODD, *PATTERNS, *CONDITIONS, *SIZES, *PRESETS, "none", "sdpa", "eager"])
SCALARS = st.one_of(st.none(), st.booleans(), INTEGERS, FLOATS, TEXTS)
NO_JSON = st.sampled_from([datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1, 12), b"\xff\0", {"a", "b"}])


def nested(scalars: st.SearchStrategy[Any], keys: st.SearchStrategy[str] = TEXTS) -> st.SearchStrategy[Any]:
    """Lists and mappings of these."""
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)),
        max_leaves=6,
    )


# As YAML has it, and as JSON has it for a key of DeepSpeed's.
ANYTHING = nested(st.one_of(SCALARS, SCALARS, NO_JSON), st.one_of(TEXTS, st.just("class_path")))
DS_WORDS = st.sampled_from(["cpu", "nvme", "none", "fp32", "bf16", "fp16", "int8", "info", "Warn", "auto", 1e9, "5e8"])
DS_VALUES = st.one_of(nested(SCALARS), SCALARS, DS_WORDS)


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an option's type, of any size."""
    origin, parts = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        needed = {item.name for item in fields(kind) if item.default is item.default_factory is MISSING}
        values = {name: option(hint) for name, hint in hints.items()}
        few = st.lists(st.sampled_from(sorted(hints)), max_size=3, unique=True)
        return few.flatmap(lambda names: st.fixed_dictionaries({name: values[name] for name in {*names, *needed}}))
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in (list, tuple):
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


def options() -> dict[tuple[str, ...], Any]:
    """The type of every option by its path in a recipe: ``("optim", "lr")``, ``("output_dir",)``; of sections too."""
    found: dict[tuple[str, ...], Any] = {}
    for name, hint in get_type_hints(Recipe).items():
        found[name,] = hint
        if is_dataclass(hint):
            found |= {(name, inner): kind for inner, kind in get_type_hints(hint).items()}
    return found


Change = tuple[tuple[str, ...], Any]


def changes() -> st.SearchStrategy[list[Change]]:
    """A few options of a recipe with what is written there; at times a key that does not exist."""
    paths = options()
    one = st.sampled_from(sorted(paths)).flatmap(lambda path: st.tuples(st.just(path), option(paths[path])))
    sections = st.sampled_from(sorted({path[:-1] for path in paths}))
    unknown = st.tuples(st.builds(lambda path, name: (*path, name), sections, TEXTS), SCALARS)
    return st.lists(st.one_of(*[one] * 9, unknown), min_size=1, max_size=3)


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


def ds_keys() -> list[tuple[str, ...]]:
    """Paths of the keys of a DeepSpeed file, from the models of its sections and our lists."""
    sections: dict[tuple[str, ...], Any] = {(name,): model.model_fields for name, model in MODELS.items()}
    sections["zero_optimization", "offload_param"] = DeepSpeedZeroOffloadParamConfig.model_fields
    sections["zero_optimization", "offload_optimizer"] = DeepSpeedZeroOffloadOptimizerConfig.model_fields
    nested_keys = [(*path, name) for path, names in sections.items() for name in names]
    return sorted([*((key,) for key in CHECKED | BROKEN.keys()), *nested_keys])


def ds_changes() -> st.SearchStrategy[tuple[int, str, list[Change]]]:
    """A stage, a model's dtype, and what else a DeepSpeed file says."""
    dtypes = st.sampled_from(["bfloat16", "float16", "float32"])
    one = st.tuples(st.sampled_from(ds_keys()), DS_VALUES)
    return st.tuples(st.integers(0, 3), dtypes, st.lists(one, min_size=1, max_size=2))


# A file is written over by each example.
HYGIENE = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
COUNTS = [40, pytest.param(2000, marks=pytest.mark.full)]
SEED = seed(seed_of(__name__))
SECTIONS = "|".join(sorted({path[0] for path in options()}))
# optim.lr: or quant.rules[3].layers: or, of a key that no one would write, optim.'l r': or quant.schemes.'~'.weights:
KEY = re.compile(rf"({SECTIONS})[\w.:\[\], -]*(('.*'|\".*\")[\w.\[\]]*)?: |('.*'|\".*\"|[\w.-]+): unknown key; ")
DS_KEY = re.compile(r"(\w+).*?(: | is )")


def lines_of(error: RecipeError) -> list[str]:
    """Lines of an error, each with something that a terminal shows as it is."""
    lines = str(error).split("\n")
    assert all(line.isprintable() and 0 < len(line) < 2000 for line in lines), lines
    return lines


@pytest.mark.parametrize("count", COUNTS)
def test_recipes(tmp_path: Path, count: int) -> None:
    """One that is read is written and read back equal, one that is refused has lines that name file and keys."""
    path, back = tmp_path / "anything.yaml", tmp_path / "back.yaml"

    @SEED
    @settings(max_examples=count, **HYGIENE)
    @given(changes())
    def read_or_refuse(drawn: list[Change]) -> None:
        ended["drawn"] += 1
        contents = changed(yaml.safe_load(MINIMAL), drawn)
        path.write_text(yaml.safe_dump(contents, allow_unicode=True), encoding="utf-8")
        try:
            with ends(path.read_text(encoding="utf-8")):
                read = load_recipe(path)
        except RecipeError as error:
            for line in lines_of(error):
                problem = re.sub(rf"^{re.escape(str(path))}(, line \d+)?: ", "", line)
                assert KEY.match(problem), line
            ended["refused"] += 1
        else:
            save_recipe(read, back)
            assert load_recipe(back) == read

    ended = Counter[str]()
    read_or_refuse()
    assert 0 < ended["refused"] < ended["drawn"], ended


@pytest.mark.parametrize("count", COUNTS)
def test_deepspeed_files(tmp_path: Path, count: int) -> None:
    """One that is taken keeps what it says, one that is refused has lines that name file and key."""
    path, known = tmp_path / "anything.json", {key[0] for key in ds_keys()}

    @SEED
    @settings(max_examples=count, **HYGIENE)
    @given(ds_changes())
    def resolve_or_refuse(drawn: tuple[int, str, list[Change]]) -> None:
        ended["drawn"] += 1
        stage, dtype, inside = drawn
        contents: dict[str, Any] = changed({"zero_optimization": {"stage": stage}}, inside)
        path.write_text(json.dumps(contents))
        try:
            with ends(contents):
                complete = resolve(minimal(model={"dtype": dtype}, deepspeed=str(path)), 2, local_size=2)
        except RecipeError as error:
            for line in lines_of(error):
                problem = line.removeprefix(f"{path}: ")
                found = DS_KEY.match(problem)
                assert line != problem and found and (found[1] in known or "unknown key" in problem), line
            ended["refused"] += 1
        else:
            assert complete.keys() >= contents.keys() - {"optimizer", "scheduler"}

    ended = Counter[str]()
    resolve_or_refuse()
    assert 0 < ended["refused"] < ended["drawn"], ended
