"""Files of DeepSpeed's configuration beside a recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.config import Recipe
from engine.config.deepspeed import DsConfigError, resolve
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe

SHIPPED = (
    "zero0",
    "zero1",
    "zero2",
    "zero2_offload",
    "zero3",
    "zero3_hpz",
    "zero3_offload",
    "zero3_offload_param",
    "zeropp",
)


def recipe(deepspeed: str = "zero3", dtype: Any = "bfloat16") -> Recipe:
    made = Recipe(
        model=ModelRecipe(path="model", dtype=dtype),
        data=DataRecipe(train=["train.jsonl"], micro_batch_size=3),
        train=TrainRecipe(steps=10, gradient_accumulation_steps=5),
        output_dir="out",
        deepspeed=deepspeed,
    )
    made.optim.grad_clip = 0.0
    return made


def resolve_file(tmp_path: Path, content: Any, *, dtype: Any = "bfloat16", world_size: int = 2) -> dict[str, Any]:
    """What comes of a file with this content: text as it is, anything else as JSON."""
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return resolve(recipe(str(path), dtype), world_size)


def refusal(tmp_path: Path, content: Any, *, dtype: Any = "bfloat16") -> list[str]:
    """The problems with such a file, without the file's name, which every line must open with."""
    with pytest.raises(DsConfigError) as error:
        resolve_file(tmp_path, content, dtype=dtype)
    lines = str(error.value).splitlines()
    path = str(tmp_path / "mine.json")
    assert all(line.startswith(path) for line in lines), lines
    return [line.removeprefix(path) for line in lines]
