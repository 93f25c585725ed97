"""Training checkpoints in which something is not what it was: named, or whole. No code of theirs runs."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from engine.checkpoint.checked_files import read_object
from engine.checkpoint.find import check_resumable, verify_checkpoint
from engine.config.errors import RecipeError
from model.ranks import RankError
from model.zero import CHECKPOINT_CLASSES
from tests.lib.mutations import cut, flip, of_folder, value
from tests.lib.patience import ends
from tests.unit.engine.checkpoint.steps import recipe, refit, write_step

STATE = {"stage": CHECKPOINT_CLASSES[0](3), "tensor": torch.arange(300.0), "plain": [1, 2.0, "x", None, (3,)]}


def mutate_and_read(rng: random.Random, work: Path) -> str:
    """Change one thing, and read all that a resume reads before DeepSpeed does; return what came of it."""
    newest, kind = work / "step_00000002", rng.randrange(5)
    if kind < 2:
        said = f"of b.pt: {(flip, cut)[kind](rng, newest / 'b.pt')}"
        refit(newest)
    elif kind == 2:
        said = f"of the manifest: {value(rng, newest / 'state.json')}"
    elif kind == 3:
        path = work / rng.choice(["best.json", "latest"])
        said = f"of {path.name}: {(value if path.suffix else flip)(rng, path)}"
    else:
        said = f"of the folder: {of_folder(rng, newest)}"
    try:
        with ends(said):
            found = check_resumable(recipe(work, resume=rng.choice([True, "best", newest.name])), work)
            verify_checkpoint(found)
            for path in (found.path / name for name in found.files if name.endswith(".pt")):
                try:  # the check before it maps files into memory, where torch lets a wrong size of a record pass
                    read_object(path)
                except ValueError as error:
                    assert str(path) in str(error), f"{said}\n{error}"
                    return "named"
    except (RankError, RecipeError) as error:
        assert str(work) in str(error), f"{said}\n{error}"
        return "named"
    finally:
        assert "EVIL" not in os.environ, said
    return "whole"


@pytest.mark.parametrize("count", [30, pytest.param(500, marks=pytest.mark.full)])
def test_mutated_checkpoints(tmp_path, monkeypatch, seed, count):
    monkeypatch.setenv("WORLD_SIZE", "1")
    base, work, rng = tmp_path / "base", tmp_path / "work", random.Random(seed)
    for step in (1, 2):
        path = write_step(base, step)
        torch.save(STATE, path / "b.pt")
        refit(path)
    (base / "best.json").write_text('{"name": "step_00000001", "step": 1, "metric": "eval/lm", "value": 1.5}')
    found = set()
    for _ in range(count):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        found.add(mutate_and_read(rng, work))
    assert found == {"named", "whole"}
