"""Signals, full disks, losses that are not finite, ranks and launchers that die: nothing hangs and nothing is lost."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.distributed.engine.scripts.faults import STAGES, STEPS, STOP
from tests.lib.launcher import launch
from tests.lib.patience import until
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "faults.py"
RANKS = 2
FILLED = 8  # steps of a run whose disk has no room in every second one
DISK = "5m"  # holds one checkpoint of the tiny model and the one being written, and not three


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Recipes, and a small disk for the checkpoints of one of them where mounting is allowed."""
    base = tmp_path_factory.mktemp("faults")
    model, chats = tiny_checkpoint(base / "model"), write_chats(base / "chats.jsonl")
    often = {"checkpoint_every": 1, "keep_checkpoints": 1}
    runs = {
        "straight": (3, "bfloat16", {}),
        "signalled": (3, "bfloat16", {}),  # no checkpoints at an interval: a signal makes one all the same
        "full_disk": (3, "bfloat16", often),
        "fills": (2, "bfloat16", {"steps": FILLED, **often}),
        "orphans": (3, "bfloat16", {"steps": 100_000}),
        "stops": (1, "bfloat16", {"max_skipped_steps": 3}),
        "raise_3": (3, "bfloat16", {}),
        **{f"not_finite_{name}": (stage, dtype, {"steps": 3}) for name, (stage, dtype) in STAGES.items()},
    }
    for name, (stage, dtype, train) in runs.items():
        write_recipe(
            base,
            name,
            model,
            chats,
            stage=stage,
            dtype=dtype,
            train={"steps": STEPS, **train},
            optim={"schedule": "constant"},
            loss={"kd_weight": 0.0, "teacher": None},
            export={"enabled": name in ("signalled", "fills")},
            **({"data": {"held_out": 4}, "eval": {"every": 1}} if name == "fills" else {}),
        )
    mounted = []
    for directory in (base / "full_disk" / "checkpoints", base / "fills"):
        directory.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(directory)]
        if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
            mounted.append(directory)
    yield base
    for directory in mounted:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture(scope="module")
def ran(base):
    """One launch, whose launcher is killed at the end; the ranks go on for a moment."""
    result = launch(SCRIPT, str(base))
    assert (base / "orphans_begin_0.json").exists(), f"failed before its launcher was killed:\n{result.stdout[-8000:]}"
    until(
        lambda: all((base / f"orphans_{rank}.json").exists() for rank in range(RANKS)),
        lambda: f"the ranks did not come to their end:\n{result.stdout[-8000:]}",
    )
    return base, result.stdout


def seen(base: Path, name: str) -> dict:
    """What the ranks saw, which is the same on both."""
    first, second = (json.loads((base / f"{name}_{rank}.json").read_text()) for rank in range(RANKS))
    assert first == second
    return first


def weights(base: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(base / f"{name}.pt", weights_only=True)["weights"]


def assert_same_weights(base: Path, name: str) -> None:
    straight, found = weights(base, "straight"), weights(base, name)
    assert straight.keys() == found.keys()
    assert all(torch.equal(found[key], straight[key]) for key in straight)


def not_written(output: str, directory: Path) -> list[str]:
    """The warnings of checkpoints that are not in this directory."""
    lines = [line for line in output.splitlines() if line.startswith("warning: ") and "was not written" in line]
    return [line for line in lines if str(directory) in line]


def test_a_signal_to_one_rank_stops_all_after_the_step_with_a_checkpoint(ran):
    base, output = ran
    part = torch.load(base / "signalled_part.pt", weights_only=True)
    assert len(part["losses"]) == STOP
    assert f"asked to stop: step {STOP} is saved" in output
    assert seen(base, "signalled") == {"export": False, "handler": "[<Handlers.SIG_DFL: 0>, <Handlers.SIG_DFL: 0>]"}
    assert_same_weights(base, "signalled")
    assert (base / "signalled" / "export").is_dir()


def test_a_launcher_that_is_gone_stops_the_run_with_a_checkpoint(ran):
    base, _ = ran
    assert seen(base, "orphans") == {"step": STOP, "saved": STOP}
    assert (base / "orphans" / "checkpoints" / "latest").read_text() == f"step_{STOP:08d}"


def test_a_save_that_fails_loses_neither_the_run_nor_the_checkpoint_before(ran):
    base, output = ran
    found = seen(base, "full_disk")
    assert found["latest"] == "step_00000001"
    assert not [name for name in found["left"] if name.startswith("step_") and name != "step_00000001"]
    assert found["end"] == [f"step_{STEPS:08d}"]
    directory = base / "full_disk" / "checkpoints"
    warnings = not_written(output, directory)
    assert [warning.partition("step_")[2][:8] for warning in warnings] == ["00000002", "00000003", "00000004"]
    mounted = os.path.ismount(directory)
    for warning, reason in zip(warnings, ("File too large", "Is a directory", "No space left on device"), strict=True):
        assert " MB are free there; training goes on" in warning
        assert reason in warning or not mounted
    assert_same_weights(base, "full_disk")


def test_at_the_end_of_a_run_a_save_that_fails_is_an_error(ran):
    base, _ = ran
    found = seen(base, "last_save")
    assert found["error"].startswith("CheckpointError: ") and f"step_{STEPS + 1:08d} was not written" in found["error"]
    assert found["latest"] == f"step_{STEPS:08d}"


def test_a_disk_that_fills_in_every_second_step_costs_what_did_not_fit(ran):
    base, output = ran
    found = seen(base, "fills")
    assert found["error"] == "nothing was raised"
    assert found["latest"] == f"step_{FILLED:08d}" and found["best"] in found["left"] and found["export"]
    assert not [name for name in found["left"] if "partial" in name]
    steps = [warning.partition("step_")[2][:8] for warning in not_written(output, base / "fills" / "checkpoints")]
    assert steps == [f"{step:08d}" for step in range(1, FILLED, 2)]


@pytest.mark.parametrize("name", STAGES)
def test_an_infinite_loss_with_finite_gradients_moves_nothing(ran, name):
    base, _ = ran
    first = json.loads((base / f"not_finite_{name}_0.json").read_text())
    second = json.loads((base / f"not_finite_{name}_1.json").read_text())
    for found in (first, second):
        assert found["skipped"] == [0, 1, 1]
        assert found["weights"] and found["moments"][0] > 0 and found["moments"][1]
        assert found["warm_up"] == [1, 1]
        assert found["moved_at_last"] and found["finite"]


def test_too_many_steps_in_a_row_end_the_run_and_name_the_samples(ran):
    base, output = ran
    error = seen(base, "stops")["error"]
    assert error.startswith("RankError: step 4: the loss or its gradients are not finite\n")
    rank0, rank1 = error.splitlines()[1:3]
    assert rank0.startswith("  rank 0, step 4, samples ") and rank0.endswith(": loss finite")
    assert rank1.startswith("  rank 1, step 4, samples ") and rank1.endswith(": loss not finite")
    assert "3 steps in a row were left out (train.max_skipped_steps)" in error
    # Step 0 is followed by a good one, so it does not count.
    for step, count in ((0, 1), (2, 1), (3, 2)):
        assert f"warning: step {step}: the loss or its gradients are not finite" in output
        assert f"left out ({count} in a row; the run ends at 3)" in output


def test_a_rank_that_raises_ends_the_job_with_its_error_first(base):
    """The launcher ends at all: the other rank waits in a collective, which would give up after half an hour."""
    result = launch(SCRIPT, str(base), "raise")
    assert result.returncode == 1
    errors = [line for line in result.stdout.splitlines() if line.startswith("error on rank")]
    assert errors[0] == "error on rank 1:" and "ZeroDivisionError: planted in the middle of a step" in result.stdout
