"""Training checkpoints on two ranks: a run that is interrupted and resumed is the run that was not, bit for bit.

The runs switch fake quant on in the middle, so that a checkpoint holds what its start must not lose: what the observers
saw (interrupted before), the scales that were measured then (interrupted after), and which layers are quantized.
"""

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from engine.checkpoint.find import LATEST, read_step_directory
from tests.distributed.engine.checkpoint.scripts.checkpoint import KILLED, SPOILED, STOPS
from tests.lib.launcher import launch, run_ranks
from tests.lib.recipes import STEPS, write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "scripts" / "checkpoint.py"
RANKS = 2
START = 2
# Everything that a checkpoint keeps for quantization, in one run: histograms of inputs, keys and values, global scales
# of NVFP4, scales that follow the weights beside thetas that learn (LWC), lm_head and embeddings.
MIXED = {
    "quant": {
        "scheme": "fp8_static_kv",
        "rules": [{"first": 1, "scheme": "nvfp4"}, {"layers": ".*o_proj", "scheme": "w2a16_g32"}],
        "lm_head": "w8a16_channel",
        "embedding": "w4a16_g32",
        "weight_range": "absmax",
        "scales_follow_weights": True,
        "input_range": "mse",
    }
}
NVFP4 = {"quant": {"scheme": "nvfp4", "embedding": "w4a16_g32"}, "learnable": {"act_scale": False}}
ABSMAX = {
    "quant": {"scheme": "w4a16_g32", "weight_range": "absmax", "scales_follow_weights": True, "signed_scales": True},
    "learnable": {"weight_scale": False, "act_scale": False},
}
# Zero points that follow the weights, of channels and of groups.
ASYM = {
    "quant": {
        "scheme": "w8a16_asym",
        "schemes": {
            "groups": {
                "weights": {"dtype": "int", "bits": 4, "granularity": "group", "group_size": 32, "symmetric": False}
            }
        },
        "rules": [{"layers": ".*(q|k|v)_proj", "scheme": "groups"}],
        "weight_range": "absmax",
        "scales_follow_weights": True,
    },
    "learnable": {"act_scale": False},
}
# name: stage, kind of checkpoint, dtype, what differs in the recipe. Stage 3 with experts; the others are plain modules
# to it. Stage 0 keeps its optimizer in fp32 here, which is the case where DeepSpeed wraps nothing.
CASES = {
    "packed-0": (0, "qwen3", "float32", {"data": {"packing": True}}),
    "mixed-2": (2, "llama", "bfloat16", MIXED),
    "plain-3": (3, "qwen3_moe", "bfloat16", {}),
}
MORE = {
    "plain-0": (0, "qwen3", "float32", {}),
    "packed-1": (1, "qwen3", "bfloat16", {"data": {"packing": True}}),
    "mixed-0": (0, "qwen3", "float32", MIXED),
    "mixed-1": (1, "llama", "bfloat16", MIXED),
    "mixed-3": (3, "qwen3_moe", "bfloat16", MIXED),
    "nvfp4-3": (3, "qwen3", "bfloat16", NVFP4),
    "absmax-2": (2, "qwen3_moe", "bfloat16", ABSMAX),
    "absmax-3": (3, "qwen3", "bfloat16", ABSMAX),
    "asym-2": (2, "llama", "bfloat16", ASYM),
    "asym-3": (3, "qwen3_moe", "bfloat16", ASYM),
    "fp16-2": (2, "llama", "float16", {}),
}
# Where links lie when a run begins, and what lies there at its end.
LINKED = {
    "recipe.yaml": "file",
    "recipe.yaml.partial": "nothing",
    "memory.json": "file",
    "checkpoints/latest.partial": "nothing",
    "checkpoints/step_00000005.partial": "nothing",
    "checkpoints/zero_to_fp32.py": "file",
    "checkpoints/zero_to_torch.py": "file",
}
# Some steps overflow, and the loss scale moves from checkpoint to checkpoint.
FP16 = {"initial_scale_power": 15, "loss_scale_window": 2}
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
    write_cases(directory, CASES)
    lay_links(directory)
    result = launch(SCRIPT, str(directory), *CASES)
    assert (directory / "errors_1.json").exists(), f"failed before the run that is killed:\n{result.stdout[-8000:]}"
    # The launcher has ended, although the other rank waits in a collective, which would give up after half an hour.
    # It names the killed rank, or that one, if the loss of its peer ended it within the same look at both.
    assert result.returncode != 0 and (directory / "killed").exists(), result.stdout
    assert re.search(rf"exits with return code = ({-signal.SIGKILL}|1)\b", result.stdout), result.stdout
    return directory


def lay_links(directory):
    """Links to somebody's file at every name that a run writes in its output directory."""
    (directory / "precious").write_text("somebody's")
    for name in LINKED:
        link = directory / f"straight_{KILLED}" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory / "precious")


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory):
    """One launch."""
    directory = tmp_path_factory.mktemp("more")
    write_cases(directory, MORE)
    run_ranks(SCRIPT, str(directory), *MORE)
    return directory


def write_cases(directory, cases):
    """Recipes of straight and resumed runs, and for plain-3 of the one that is killed."""
    data = write_chats(directory / "chats.jsonl")
    for case, (stage, kind, dtype, changes) in cases.items():
        # Groups of 32 where there are any.
        model = tiny_checkpoint(directory / f"{kind}_{case}", kind, even="quant" in changes)
        for name in ["straight", "resumed"] + ["killed"] * (case == KILLED):
            every = STEPS if name == "straight" else 2 if name == "killed" else 1
            write_recipe(
                directory,
                f"{name}_{case}",
                model,
                data,
                stage=stage,
                dtype=dtype,
                train={"steps": STEPS, "gradient_accumulation_steps": 2, "checkpoint_every": every},
                quant={"fake_quant_start": START, "calibration_batches": 0, **changes.get("quant", {})},
                optim={"lr": 1e-2},  # one step must show in bf16 weights, and in their maxima
                learnable={"act_scale": True, "norm": True, **changes.get("learnable", {})},
                loss={"kd_weight": 0.0, "teacher": None},
                export={"enabled": True},
                schedule=EVENTS,
                data=changes.get("data", {}),
                **(
                    {"deepspeed": write_ds_config(directory, case, f"zero{stage}", fp16=FP16)}
                    if dtype == "float16"
                    else {}
                ),
            )


@pytest.mark.parametrize("case", CASES)
def test_resumed_equals_straight_bit_for_bit(runs, case):
    assert_resumed_equals_straight(runs, case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE)
def test_resumed_equals_straight_on_every_stage(more_runs, case):
    assert_resumed_equals_straight(more_runs, case)


def assert_resumed_equals_straight(runs, case):
    """Losses, norms, Parameters; and the exports of both and of the last checkpoint."""
    straight = torch.load(runs / f"straight_{case}.pt", weights_only=True)
    parts = [torch.load(runs / f"part{part}_{case}.pt", weights_only=True) for part in range(len(STOPS) + 1)]
    assert [len(part["losses"]) for part in parts] == [1, 2, 2]
    assert [loss for part in parts for loss in part["losses"]] == straight["losses"]
    assert [norm for part in parts for norm in part["norms"]] == straight["norms"]
    assert [scale for part in parts for scale in part["loss_scales"]] == straight["loss_scales"]
    assert not case.startswith("fp16") or len(set(straight["loss_scales"])) > 1
    last = parts[-1]
    assert last["weights"].keys() == straight["weights"].keys()
    for name, weight in straight["weights"].items():
        assert torch.equal(last["weights"][name], weight), name
    # What would make the comparison empty: nothing measured at START, or nothing learned since.
    first = parts[0]["weights"]
    for kind in scales_of(case):
        scales = [name for name in first if name.endswith(kind)]
        assert any(not torch.equal(first[name], straight["weights"][name]) for name in scales), kind
    for name in ("model.safetensors", "config.json"):
        expected = (runs / f"straight_{case}" / "export" / name).read_bytes()
        assert (runs / f"out_{case}" / name).read_bytes() == expected
        assert (runs / f"resumed_{case}" / "export" / name).read_bytes() == expected


def scales_of(case):
    """Ends of the names of scales that move in a run."""
    if case.startswith("absmax"):
        return ["weight_s0"]
    if case.startswith("asym"):
        return ["weight_s0", "weight_zero", "weight_theta"]
    if case.startswith("nvfp4"):
        return ["weight_s0", "weight_global", "proj.weight_theta", "embed_tokens.weight_theta"]
    mixed = [
        "weight_global",
        "lm_head.weight_theta",
        "embed_tokens.weight_theta",
        "cache.input_s0",
    ]
    return ["weight_s0", "weight_theta", "input_s0", "input_theta", *(mixed if case.startswith("mixed") else [])]


@pytest.mark.parametrize("case", CASES)
def test_old_checkpoints_go_and_latest_is_replaced_by_a_rename(runs, case):
    checkpoints = runs / f"resumed_{case}" / "checkpoints"
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
    straight = torch.load(runs / f"straight_{KILLED}.pt", weights_only=True)
    offered = torch.load(runs / "offered.pt", weights_only=True)
    assert offered["losses"] == straight["losses"][4:]
    assert all(torch.equal(offered["weights"][name], weight) for name, weight in straight["weights"].items())


def test_killed_in_the_middle_the_last_whole_checkpoint_stays(runs):
    checkpoints = runs / f"killed_{KILLED}" / "checkpoints"
    assert (checkpoints / LATEST).read_text() == "step_00000002"
    assert read_step_directory(checkpoints / "step_00000002").step == 2


def test_nothing_is_written_through_links_that_lie_ready(runs):
    assert (runs / "precious").read_text() == "somebody's"
    for name, left in LINKED.items():
        path = runs / f"straight_{KILLED}" / name
        assert not path.is_symlink() and path.is_file() == (left == "file"), name
