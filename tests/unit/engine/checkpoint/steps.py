"""Small checkpoints, written and made current as a run does it."""

import json
from pathlib import Path

import torch

from engine.checkpoint.files import CheckedFiles
from engine.checkpoint.save import _make_current
from engine.config.config import Recipe
from engine.config.reading import save_recipe
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe
from model.zero import LeftOut

NOTHING = LeftOut(torch.nn.Module(), ())


def recipe(directory: Path, *, resume: bool | str = True, **data) -> Recipe:
    return Recipe(
        model=ModelRecipe(path="model"),
        data=DataRecipe(train=["train.jsonl"], **data),
        train=TrainRecipe(steps=10, gradient_accumulation_steps=6, resume=resume),
        output_dir=str(directory),
    )


def write_step(
    directory: Path, step: int, *, keep: int = 10, world: int = 1, measured=None, samples="", **data
) -> Path:
    """A checkpoint of two small files and a recipe, made current as a run does."""
    name = f"step_{step:08d}"
    partial = directory / f"{name}.partial"
    partial.mkdir(parents=True)
    files = CheckedFiles(NOTHING)
    for file in ("a.pt", "b.pt"):
        files.save({"tensor": torch.rand(1000), "file": file}, partial / file)
    assert files.failure is None
    save_recipe(recipe(directory, **data), partial / "recipe.yaml")
    state = {"step": step, "world_size": world, "stage": 3, "files": files.written}
    state |= {"samples": samples, "base": None, "left_out": {}}
    (partial / "state.json").write_text(json.dumps(state))
    _make_current(directory, partial, directory / name, keep, measured)
    return directory / name
