"""Training checkpoints on two ranks: a run that is interrupted and resumed is the run that was not, bit for bit.

The runs switch fake quant on in the middle, so that a checkpoint holds what its start must not lose: what the observers
saw (interrupted before), the scales that were measured then (interrupted after), and which layers are quantised.
"""

import json
import signal
import time
from pathlib import Path

import pytest
import torch

from engine.checkpoint import LATEST, read_checkpoint
from tests.distributed.checkpoint_script import SPOILED, STOPS
from tests.distributed.launcher import launch
from tests.distributed.recipes import STEPS, write_chats, write_recipe
from tests.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "checkpoint_script.py"
RANKS = 2
START = 2
# Stage 3 with experts; the others are plain modules to it. Stage 0 keeps its optimizer in fp32 here, which is the case
# where DeepSpeed wraps nothing.
STAGES = {0: ("qwen3", "float32"), 1: ("qwen3", "bfloat16"), 2: ("llama", "bfloat16"), 3: ("qwen3_moe", "bfloat16")}
# What they set before the first stop holds after it, and a condition that was met is not met again.
EVENTS = [
    {"at": 0, "lr": {"weights": 5e-3}},
    {"when": "loss/total < 1e9", "loss": {"lm": 0.7}, "lr": {"embeddings": 0.0}},
    {"at": STEPS - 1, "freeze_scales": True},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One launch, whose last run is killed."""
    directory = tmp_path_factory.mktemp("checkpoint")
    data = write_chats(directory / "chats.jsonl")
    for stage, (kind, dtype) in STAGES.items():
        model = tiny_checkpoint(directory / f"{kind}_{stage}", kind)
        names = ["straight", "resumed"] + ["killed"] * (stage == 3)
        for name in names:
            every = STEPS if name == "straight" else 2 if name == "killed" else 1
            write_recipe(
                directory,
                f"{name}_{stage}",
                model,
                data,
                stage=stage,
                dtype=dtype,
                train={"steps": STEPS, "gradient_accumulation_steps": 2, "checkpoint_every": every},
                quant={"fake_quant_start": START, "calibration_batches": 0},
                optim={"lr": 1e-2},  # one step must show in bf16 weights, and in their maxima
                learnable={"act_scale": True, "norm": True},
                loss={"kd_weight": 0.0, "teacher": None},
                export={"enabled": True},
                schedule=EVENTS,
                data={"packing": stage == 1},
            )
    result = launch(SCRIPT, str(directory), *map(str, STAGES), timeout=400)
    assert (directory / "errors_1.json").exists(), f"failed before the run that is killed:\n{result.stdout[-8000:]}"
    # The launcher takes a second to see it; the other rank may be in a collective.
    assert time.time() - float((directory / "killed_at").read_text()) < 60
    assert result.returncode != 0 and f"exits with return code = {-signal.SIGKILL}" in result.stdout, result.stdout
    return directory


@pytest.mark.parametrize("stage", STAGES)
def test_resumed_equals_straight_bit_for_bit(runs, stage):
    straight = torch.load(runs / f"straight_{stage}.pt", weights_only=True)
    parts = [torch.load(runs / f"part{part}_{stage}.pt", weights_only=True) for part in range(len(STOPS) + 1)]
    assert [len(part["losses"]) for part in parts] == [1, 2, 2]
    assert [loss for part in parts for loss in part["losses"]] == straight["losses"]
    assert [norm for part in parts for norm in part["norms"]] == straight["norms"]
    last = parts[-1]
    assert last["weights"].keys() == straight["weights"].keys()
    for name, weight in straight["weights"].items():
        assert torch.equal(last["weights"][name], weight), name
    # What would make the comparison empty: nothing measured at START, or nothing learned since.
    first = parts[0]["weights"]
    scales = [name for name in first if name.endswith("weight_s0")]
    assert any(not torch.equal(first[name], straight["weights"][name]) for name in scales)
    assert any(straight["weights"][name].any() for name in straight["weights"] if name.endswith("weight_theta"))


@pytest.mark.parametrize("stage", STAGES)
def test_export_from_a_checkpoint_equals_the_one_at_the_end_of_training(runs, stage):
    for name in ("model.safetensors", "config.json"):
        expected = (runs / f"straight_{stage}" / "export" / name).read_bytes()
        assert (runs / f"out_{stage}" / name).read_bytes() == expected
        assert (runs / f"resumed_{stage}" / "export" / name).read_bytes() == expected


@pytest.mark.parametrize("stage", STAGES)
def test_old_checkpoints_go_and_latest_is_replaced_by_a_rename(runs, stage):
    checkpoints = runs / f"resumed_{stage}" / "checkpoints"
    assert [path.name for path in sorted(checkpoints.glob("step*"))] == ["step_00000004", "step_00000005"]
    assert (checkpoints / LATEST).read_text() == "step_00000005"
    # Written in place, the file's other name would show the new text too.
    assert (checkpoints / "first_latest").read_text() == "step_00000001"


def test_what_cannot_be_resumed_is_refused_on_every_rank(runs):
    seen = [json.loads((runs / f"errors_{rank}.json").read_text()) for rank in range(RANKS)]
    assert seen[0] == seen[1]
    errors = seen[0]
    latest = {name: f"{runs}/{name}/checkpoints/step_00000005" for name in SPOILED}
    offer = "the one before it is step_00000004: set train.resume to step_00000004 to go on from there"
    assert f"{runs}/nothing/checkpoints" in errors["nothing"] and "train.resume: false" in errors["nothing"]
    # 2 x 2 x 3 ranks were 12 rows per step: 2 ranks need 6 each.
    assert latest["other_ranks"] in errors["other_ranks"] and "rows per step (were 12, are 8" in errors["other_ranks"]
    assert "data.micro_batch_size 2 and train.gradient_accumulation_steps 3" in errors["other_ranks"]
    assert f"{latest['cut']} is damaged: rank_1.pt has " in errors["cut"] and offer in errors["cut"]
    assert f"{latest['gone']} is not a whole checkpoint: it has no state.json; {offer}" in errors["gone"]
    assert errors["flipped"].startswith("RankError: rank ") and "CRC-32" in errors["flipped"]
    assert f"{latest['flipped']} is damaged: the content of " in errors["flipped"] and offer in errors["flipped"]
    assert "step_00000009 is not there; the one before it is step_00000005" in errors["dangling"]
    anew = errors["not resumed"]
    assert anew.startswith("RecipeError") and "output_dir" in anew and "train.resume" in anew


def test_the_checkpoint_that_is_offered_leads_to_the_same_end(runs):
    straight = torch.load(runs / "straight_3.pt", weights_only=True)
    offered = torch.load(runs / "offered.pt", weights_only=True)
    assert offered["losses"] == straight["losses"][4:]
    assert all(torch.equal(offered["weights"][name], weight) for name, weight in straight["weights"].items())


def test_killed_in_the_middle_the_last_whole_checkpoint_stays(runs):
    checkpoints = runs / "killed_3" / "checkpoints"
    assert (checkpoints / LATEST).read_text() == "step_00000002"
    assert read_checkpoint(checkpoints / "step_00000002").step == 2
