"""Recipes and DeepSpeed files with anything in them: read, or refused in lines that open with the key. No traceback."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings

from engine.config.deepspeed import resolve
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe, save_recipe
from tests.lib.patience import ends
from tests.lib.recipes import MINIMAL, minimal
from tests.lib.seeds import seed_of
from tests.unit.engine.config.anything import Change, changed, changes, ds_changes, ds_keys, options

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
        contents = changed(yaml.safe_load(MINIMAL), drawn)
        path.write_text(yaml.safe_dump(contents, allow_unicode=True), encoding="utf-8")
        try:
            with ends(path.read_text(encoding="utf-8")):
                read = load_recipe(path)
        except RecipeError as error:
            for line in lines_of(error):
                problem = re.sub(rf"^{re.escape(str(path))}(, line \d+)?: ", "", line)
                assert KEY.match(problem), line
        else:
            save_recipe(read, back)
            assert load_recipe(back) == read

    read_or_refuse()


@pytest.mark.parametrize("count", COUNTS)
def test_deepspeed_files(tmp_path: Path, count: int) -> None:
    """One that is taken keeps what it says, one that is refused has lines that name file and key."""
    path, known = tmp_path / "anything.json", {key[0] for key in ds_keys()}

    @SEED
    @settings(max_examples=count, **HYGIENE)
    @given(ds_changes())
    def resolve_or_refuse(drawn: tuple[int, str, list[Change]]) -> None:
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
        else:
            assert complete.keys() >= contents.keys() - {"optimizer", "scheduler"}

    resolve_or_refuse()
