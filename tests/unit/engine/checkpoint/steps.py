"""Small checkpoints, written and made current as a run does it."""

import json
from pathlib import Path

import torch

from engine.checkpoint.checked_files import CheckedFiles, file_crc32
from engine.checkpoint.save import BestMetric, _make_current
from engine.config.config import Recipe
from engine.config.reading import save_recipe
from model.zero import LeftOut
from tests.lib.checkpoints import edit_json
from tests.lib.recipes import minimal

NOTHING = LeftOut(torch.nn.Module(), ())


def recipe(directory: Path, *, resume: bool | str = True, **data) -> Recipe:
    train = {"gradient_accumulation_steps": 6, "resume": resume}
    return minimal(data=data, train=train, output_dir=str(directory))


def write_step(
    directory: Path, step: int, *, keep: int = 10, world: int = 1, measured=None, samples="", **data
) -> Path:
    """Write a checkpoint of two small files and a recipe, and make it current as a run does."""
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
    _make_current(directory, partial, directory / name, keep, measured and BestMetric(*measured))
    return directory / name


def refit(checkpoint: Path) -> None:
    """Make size and checksum of b.pt in the manifest fit again, as the sender of a changed file would."""
    path = checkpoint / "b.pt"
    written = {"b.pt": [path.stat().st_size, file_crc32(path)]}
    edit_json(checkpoint / "state.json", lambda state: state["files"].update(written))
