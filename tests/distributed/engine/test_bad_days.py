"""Scripts whose ranks do not do the same, disks that fill up, data that trains nothing: said on every rank, no hang."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.distributed.engine.scripts.bad_days import RUNS
from tests.lib.launcher import run_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "bad_days.py"
RANKS, STEPS = 2, 3
WRITE = ("skipped", "replaced", "read_only", "uncurved")  # runs that would write something
UNWRITABLE = ("replaced", "read_only")  # in which that is not possible after the first step


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
            train={
                "steps": STEPS,
                "gradient_accumulation_steps": 1,
                "checkpoint_every": int(name in UNWRITABLE),
                "quant_stats_every": 0 if name in UNWRITABLE else STEPS,
            },
            loss={"kd_weight": 0.0, "teacher": None},
            quant={"scheme": "w4a16_channel"} if name == "layers" else {"calibration_batches": 1},
            export={"enabled": name in WRITE},
        )
    (base / "skipped" / "export.tmp-0123abcd").mkdir(parents=True)  # of an export that was killed
    try:
        (base / "output.txt").write_text(run_ranks(SCRIPT, str(base)))
        yield base
    finally:
        subprocess.run(["umount", "-l", str(base / "read_only")], check=False, capture_output=True)


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
    assert (base / "output.txt").read_text().count(said) == len(RUNS) - len(WRITE)
    assert not [path for path in base.glob("*/.running*") if path.parent.name not in ("replaced_moved", "read_only")]


@pytest.mark.parametrize("name", UNWRITABLE)
def test_an_output_directory_that_cannot_be_written_any_more(base, name):
    """The run comes to its last step; what could not be written is an error that names it, on every rank."""
    found, output = seen(base, name), (base / "output.txt").read_text()
    if name == "read_only" and not os.statvfs(base / name).f_flag & os.ST_RDONLY:
        pytest.skip("a disk that becomes read-only needs leave to mount one")
    assert found["steps"] == STEPS
    assert found["text"].startswith("RankError: ") and str(base / name) in found["text"], found
    not_saved = re.findall(
        rf"^warning: {base / name}/checkpoints/step_0000000(\d) was not written", output, re.MULTILINE
    )
    assert sorted(not_saved) == [str(step) for step in range(2, STEPS + 1)], output
    assert output.count(f"warning: {base / name / 'tensorboard'} cannot be written") == 1


def test_curves_that_are_removed_cost_a_warning(base):
    assert seen(base, "uncurved") == {"text": "nothing was raised", "steps": STEPS, "reductions": []}
    said = f"warning: {base / 'uncurved' / 'tensorboard'} cannot be written"
    assert (base / "output.txt").read_text().count(said) == 1
    assert (base / "uncurved" / "export" / "model.safetensors").is_file()


def test_a_second_process_group_in_one_process_is_refused(base):
    assert seen(base, "again")["text"].startswith("this process has closed its process group and cannot start another")
