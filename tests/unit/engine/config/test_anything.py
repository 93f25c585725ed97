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
from tests.lib.seeds import seed_of
from tests.unit.engine.config.anything import Change, changed, changes, ds_changes, ds_keys, options
from tests.unit.engine.config.ds_files import recipe

MINIMAL = {"model": {"path": "model"}, "data": {"train": ["a.jsonl"]}, "train": {"steps": 10}, "output_dir": "out"}
# A file is written over by each example.
HYGIENE = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
FEW, MANY = (settings(max_examples=count, **HYGIENE) for count in (40, 2000))
SEED = seed(seed_of(__name__))
SECTIONS = "|".join(sorted({path[0] for path in options()}))
# optim.lr: or quant.rules[3].layers: or, of a key that no one would write, optim.'l r': or quant.schemes.'~'.weights:
KEY = re.compile(rf"({SECTIONS})[\w.:\[\], -]*(('.*'|\".*\")[\w.\[\]]*)?: |('.*'|\".*\"|[\w.-]+): unknown key; ")
DS_KEY = re.compile(r"(\w+).*?(: | is )")


@SEED
@FEW
@given(changes(options()))
def test_a_recipe(tmp_path_factory: pytest.TempPathFactory, drawn: list[Change]) -> None:
    read_or_refuse(tmp_path_factory.getbasetemp(), drawn)


@pytest.mark.full
@SEED
@MANY
@given(changes(options()))
def test_two_thousand_recipes(tmp_path_factory: pytest.TempPathFactory, drawn: list[Change]) -> None:
    read_or_refuse(tmp_path_factory.getbasetemp(), drawn)


def read_or_refuse(directory: Path, drawn: list[Change]) -> None:
    """A recipe that is read is written and read back equal, one that is refused has lines that name file and keys."""
    path, back = directory / "anything.yaml", directory / "back.yaml"
    path.write_text(yaml.safe_dump(changed(MINIMAL, drawn), allow_unicode=True), encoding="utf-8")
    try:
        with ends(path.read_text(encoding="utf-8")):
            read = load_recipe(path)
    except RecipeError as error:
        for line in assert_lines(str(error)):
            problem = re.sub(rf"^{re.escape(str(path))}(, line \d+)?: ", "", line)
            assert KEY.match(problem), line
        return
    save_recipe(read, back)
    assert load_recipe(back) == read


@SEED
@FEW
@given(ds_changes())
def test_a_deepspeed_file(tmp_path_factory: pytest.TempPathFactory, drawn: tuple[int, str, list[Change]]) -> None:
    resolve_or_refuse(tmp_path_factory.getbasetemp(), *drawn)


@pytest.mark.full
@SEED
@MANY
@given(ds_changes())
def test_two_thousand_deepspeed_files(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[int, str, list[Change]]
) -> None:
    resolve_or_refuse(tmp_path_factory.getbasetemp(), *drawn)


def resolve_or_refuse(directory: Path, stage: int, dtype: str, drawn: list[Change]) -> None:
    """What is complete keeps what the file says, what is refused has lines that name file and key."""
    path = directory / "anything.json"
    contents: dict[str, Any] = changed({"zero_optimization": {"stage": stage}}, drawn)
    path.write_text(json.dumps(contents))
    known = {key[0] for key in ds_keys()}
    try:
        with ends(contents):
            complete = resolve(recipe(str(path), dtype), 2, local_size=2)
    except RecipeError as error:
        for line in assert_lines(str(error)):
            assert line.startswith(f"{path}: "), line
            problem = line.removeprefix(f"{path}: ")
            found = DS_KEY.match(problem)
            assert found and (found[1] in known or "unknown key" in problem), line
        return
    assert complete.keys() >= contents.keys() - {"optimizer", "scheduler"}


def assert_lines(text: str) -> list[str]:
    """The lines of an error, each with something that a terminal shows as it is."""
    lines = text.split("\n")
    assert all(line.isprintable() and 0 < len(line) < 2000 for line in lines), lines
    return lines
