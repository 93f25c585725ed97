"""Scripts whose ranks do not do the same, disks that fill up, data that trains nothing: said on every rank, no hang."""

import json
from pathlib import Path

import pytest

from tests.distributed.engine.scripts.bad_days import RUNS
from tests.distributed.launcher import run_ranks
from tests.distributed.recipes import write_chats, write_recipe
from tests.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "bad_days.py"
RANKS, STEPS = 2, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """One launch for all runs."""
    base = tmp_path_factory.mktemp("bad_days")
    model, chats = tiny_checkpoint(base / "model", layers=1), write_chats(base / "chats.jsonl")
    for index, name in enumerate(RUNS):
        write_recipe(
            base,
            name,
            model,
            chats,
            stage=index % 4,
            dtype="bfloat16",
            train={"steps": STEPS, "gradient_accumulation_steps": 1},
            loss={"kd_weight": 0.0, "teacher": None},
            quant={"scheme": "w4a16_channel"} if name == "layers" else {"calibration_batches": 1},
            export={"enabled": name == "skipped"},
        )
    (base / "skipped" / "export.tmp-0123abcd").mkdir(parents=True)  # of an export that was killed
    (base / "output.txt").write_text(run_ranks(SCRIPT, str(base)))
    return base


def seen(base: Path, name: str) -> dict:
    """What the ranks saw, which is the same on both."""
    first, second = (json.loads((base / f"{name}_{rank}.json").read_text()) for rank in range(RANKS))
    assert first["text"] == second["text"], (first, second)
    return first


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [
        ("rates", 1, 'peak rates is {} on rank 0 and {"weights": 0.5} on rank 1'),
        ("weights", 1, 'loss weights is {"lm": 1.0} on rank 0 and {"lm": 2.0} on rank 1'),
        ("layers", 1, "fake quant is {"),
        ("stops", 1, "stopped is true on rank 0 and false on rank 1"),
        ("last", STEPS, 'peak rates is {"weights": 0.0} on rank 0 and {"weights": 1.0} on rank 1'),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told_apart(base, name, steps, expected):
    found = seen(base, name)
    assert found["text"].startswith(f"RankError: step {steps}: the ranks differ in what events have set: ")
    assert expected in found["text"] and "Conditions and actions must do the same on every rank" in found["text"]
    assert found["steps"] == steps


def test_ranks_that_do_the_same_train_on_with_two_reductions_a_step(base):
    """What they agree on travels with the counts of the tokens."""
    found = seen(base, "same")
    assert found["text"] == "nothing was raised" and found["steps"] == STEPS
    ours = [one for one in found["reductions"] if one in ("torch.float32 2", "torch.int64 4")]
    assert sorted(ours) == ["torch.float32 2", "torch.int64 4"], found["reductions"]
    assert sum(one.startswith("torch.int64") for one in found["reductions"]) == 1


def test_a_run_in_which_no_step_trained_fails_and_exports_nothing(base):
    found = seen(base, "skipped")
    assert found["steps"] == STEPS
    assert found["text"].startswith(
        f"RankError: all {STEPS} steps were left out: their loss or gradients were not finite"
    )
    assert not (base / "skipped" / "export").exists()


def test_what_a_killed_export_left_is_removed(base):
    assert not list((base / "skipped").glob("export.tmp-*"))


def test_a_run_that_would_write_nothing_says_so_before_it_trains(base):
    """All but the one that exports; and none leaves the mark of a job that runs."""
    said = "warning: this run writes neither an export (export.enabled is false) nor a checkpoint"
    assert (base / "output.txt").read_text().count(said) == len(RUNS) - 1
    assert not list(base.glob("*/.running*"))


def test_a_second_process_group_in_one_process_is_refused(base):
    assert seen(base, "again")["text"].startswith("this process has closed its process group and cannot start another")
