"""Evaluation while training, on two ranks: it moves nothing that trains, a resumed run knows it, the best is kept."""

from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.checkpoint.find import best_checkpoint
from engine.session.optimizer import SCALE_EPS
from tests.distributed.engine.scripts.held_out import OPTIONS, STOP
from tests.lib.launcher import run_ranks
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "held_out.py"
STEPS, EVERY, START = 6, 2, 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One launch. Fake quant starts in the middle, so that evaluations before it measure scales of their own."""
    directory = tmp_path_factory.mktemp("held_out")
    model, chats = tiny_checkpoint(directory / "model"), write_chats(directory / "chats.jsonl")
    for name in ("without", "with", "stopped", "ended"):
        write_recipe(
            directory,
            name,
            model,
            chats,
            stage=3,
            dtype="bfloat16",
            # Batches of two: one rank runs out of samples, and its last batch has fewer than the other's.
            data={"held_out": 5},
            train={"steps": STEPS, "checkpoint_every": EVERY, "keep_checkpoints": 1},
            optim={"lr": 1e-2},
            learnable={"act_scale": True},
            quant={"fake_quant_start": START, "calibration_batches": 2},
            loss={"diagnostics_every": 1},
            eval={"every": 0 if name == "without" else EVERY},
        )
    run_ranks(SCRIPT, str(directory))
    return directory


def load(runs: Path, name: str) -> dict:
    return torch.load(runs / f"{name}.pt", weights_only=True)


def test_evaluation_moves_nothing_that_trains(runs):
    without, found = load(runs, "without"), load(runs, "with")
    assert found["losses"] == without["losses"] and found["norms"] == without["norms"]
    learned = [name for name in without["weights"] if not name.endswith("_s0")]
    assert all(torch.equal(found["weights"][name], without["weights"][name]) for name in learned)
    assert len(found["evaluations"]) == STEPS and all(found["evaluations"])


def test_a_resumed_run_knows_the_last_evaluation(runs):
    straight, stopped, resumed = (load(runs, name) for name in ("with", "stopped", "resumed"))
    assert len(stopped["losses"]) == STOP
    assert resumed["evaluations"] == straight["evaluations"][STOP:]
    assert stopped["losses"] + resumed["losses"] == straight["losses"]
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in straight["weights"].items())


def test_a_resumed_run_follows_the_optimizer_options_that_it_is_given(runs):
    groups = torch.load(runs / "unsaved.pt", weights_only=True)["groups"]
    assert groups["weights"] == OPTIONS
    assert groups["weight_scales"] == {**OPTIONS, "weight_decay": 0.0, "eps": SCALE_EPS}


def test_a_last_checkpoint_that_cannot_be_written_does_not_cost_the_export(runs):
    error = torch.load(runs / "unsaved.pt", weights_only=True)["error"]
    assert f"step_{STEPS + 2:08d} was not written: " in error
    assert (runs / "stopped" / "export" / "config.json").is_file()


def test_curves_have_one_point_at_a_step(runs):
    """Diagnostics are those of training; what is measured on held-out samples has tags of its own."""
    accumulator = EventAccumulator(str(runs / "with" / "tensorboard"))
    accumulator.Reload()
    points = {tag: [event.step for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
    assert points["kd/forward_kl"] == points["loss/lm"] == list(range(1, STEPS + 1))
    assert points["eval/lm"] == points["eval/kd/cakld"] == list(range(0, STEPS + 1, EVERY))


def test_the_best_checkpoint_is_the_one_of_the_smallest_loss(runs):
    accumulator = EventAccumulator(str(runs / "with" / "tensorboard"))
    accumulator.Reload()
    values = {event.step: event.value for event in accumulator.Scalars("eval/lm")}
    checkpoints = runs / "with" / "checkpoints"
    best = best_checkpoint(checkpoints)
    assert best is not None and best.step == min(values, key=values.__getitem__)
    assert (checkpoints / best.name / "state.json").is_file()


def test_a_step_that_a_signal_ended_is_evaluated_and_marked_when_the_run_goes_on(runs):
    """It was saved without an evaluation: the last one here, and the best."""
    marks = [best_checkpoint(runs / name / "checkpoints") for name in ("with", "ended")]
    assert marks[0] is not None and marks[0].step == STEPS and marks[1] == marks[0]
