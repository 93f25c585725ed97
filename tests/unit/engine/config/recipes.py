"""The smallest recipe, in Python and as a file, and what is said of a bad one."""

from pathlib import Path
from typing import Any

import pytest

from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.reading import parse_recipe
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe

MINIMAL = """\
model: {path: model}
data: {train: [train.jsonl]}
train: {steps: 10}
output_dir: out
"""


def minimal(**sections: Any) -> Recipe:
    """The smallest valid recipe, with whole sections replaced."""
    values: dict[str, Any] = {
        "model": ModelRecipe(path="model"),
        "data": DataRecipe(train=["train.jsonl"]),
        "train": TrainRecipe(steps=10),
        "output_dir": "out",
    }
    return Recipe(**(values | sections))


def write(directory: Path, extra: str = "") -> Path:
    path = directory / "recipe.yaml"
    path.write_text(MINIMAL + extra, encoding="utf-8")
    return path


def refusal(*argv: str) -> list[str]:
    """What is wrong with a bad command line, a line each; reading it must only raise."""
    with pytest.raises(RecipeError) as refused:
        parse_recipe(argv, check_files=False)
    lines = str(refused.value).splitlines()
    assert lines
    assert all(lines), lines
    return lines
