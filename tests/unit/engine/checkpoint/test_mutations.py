"""Training checkpoints in which something is not what it was: named, or whole. No code of theirs runs."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from engine.checkpoint.files import file_crc32, read_object
from engine.checkpoint.find import check_resumable, verify_checkpoint
from engine.config.errors import RecipeError
from model.ranks import RankError
from model.zero import CHECKPOINT_CLASSES
from tests.lib.patience import ends
from tests.unit.engine.checkpoint.steps import recipe, write_step
from tests.unit.model.mutations import cut, flip, of_folder, value

STATE = {"stage": CHECKPOINT_CLASSES[0](3), "tensor": torch.arange(300.0), "plain": [1, 2.0, "x", None, (3,)]}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Two checkpoints, the first of which is the best, with an object of DeepSpeed's in one file of each."""
    base = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        torch.save(STATE, write_step(base, step) / "b.pt")
        refit(base / f"step_{step:08d}")
    (base / "best.json").write_text('{"name": "step_00000001", "step": 1, "metric": "eval/lm", "value": 1.5}')
    return base


def refit(checkpoint: Path) -> None:
    """Make sizes and checksums of the manifest fit again, as whoever sends a file of theirs would."""
    state = json.loads((checkpoint / "state.json").read_text())
    for name in state["files"]:
        state["files"][name] = [(checkpoint / name).stat().st_size, file_crc32(checkpoint / name)]
    (checkpoint / "state.json").write_text(json.dumps(state))


def mutate_and_read(rng: random.Random, base: Path, work: Path) -> str:
    """One mutation, and all that a resume reads before DeepSpeed does; what came of it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, work)
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
            for name in found.files:
                if name.endswith(".pt"):
                    try:  # the check before it maps files into memory, where torch lets a wrong size of a record pass
                        read_object(found.path / name)
                    except ValueError as error:
                        assert str(found.path / name) in str(error), f"{said}\n{error}"
                        return "named"
    except (RankError, RecipeError) as error:
        assert str(work) in str(error), f"{said}\n{error}"
        return "named"
    finally:
        assert "EVIL" not in os.environ, said
    return "whole"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")


def test_thirty_checkpoints(base, tmp_path):
    rng = random.Random(22)
    assert {mutate_and_read(rng, base, tmp_path / "work") for _ in range(30)} == {"named", "whole"}


@pytest.mark.full
def test_five_hundred_checkpoints(base, tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(500):
        mutate_and_read(rng, base, tmp_path / "work")


def test_a_value_that_no_recipe_has_is_named_with_its_file(base, tmp_path):
    """Which of two recipes it is nobody could tell otherwise: the checkpoint's, or that of the run which resumes it."""
    shutil.copytree(base, tmp_path / "work")
    path = tmp_path / "work" / "step_00000002" / "recipe.yaml"
    path.write_text(path.read_text().replace("input_range: absmax", "input_range: abcmax"))
    with pytest.raises(RecipeError, match=rf"{re.escape(str(path))}: quant.input_range: .*Got value: abcmax"):
        check_resumable(recipe(tmp_path / "work", resume=True), tmp_path / "work")
