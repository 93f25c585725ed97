"""Stages 0 to 3 on two ranks against each other and against a plain PyTorch loop in one process.

Losses and weights are compared step by step in fp32, where an error in a collective, a denominator or a gradient shows
in the first digits and rounding later; and in bf16, the way users train, stage against stage.
"""

from pathlib import Path

import pytest
import torch

from engine.recipe_file import load_recipe
from model.build import build_model
from model.load import load_weights
from tests.distributed.launcher import run_ranks
from tests.distributed.plain import assert_equals_plain_loop, load_result
from tests.distributed.recipes import write_chats, write_recipe
from tests.tiny import tiny_checkpoint

SCRIPT = Path(__file__).parent / "train_script.py"
SHIPPED = ("zero3", "zero3_offload")  # as users name them; here small parameters stay gathered between steps


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One launch: dense and MoE on all four stages in both numeric types, and the configurations that ship."""
    directory = tmp_path_factory.mktemp("train")
    data = write_chats(directory / "chats.jsonl")
    paths = {}
    for kind in ("qwen3", "qwen3_moe"):
        model = tiny_checkpoint(directory / kind, kind, tied=kind == "qwen3")
        for stage in range(4):
            for dtype in ("float32", "bfloat16"):
                name = f"{kind}_zero{stage}_{dtype}"
                paths[kind, stage, dtype] = write_recipe(directory, name, model, data, stage=stage, dtype=dtype)
    model = tiny_checkpoint(directory / "llama", "llama")
    for shipped in SHIPPED:
        paths["llama", shipped, "float32"] = write_recipe(
            directory, f"llama_{shipped}", model, data, stage=3, dtype="float32", deepspeed=shipped
        )
    paths["qwen3_moe", "coded", "float32"] = write_recipe(
        directory,
        "qwen3_moe_coded",
        directory / "qwen3_moe",
        data,
        stage=3,
        dtype="float32",
        quant={"calibration_batches": 2, "gather_codes": True},
    )
    run_ranks(SCRIPT, *map(str, paths.values()), timeout=600)
    return paths


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_fp32_equals_a_plain_loop_on_every_stage(results, kind, stage):
    assert_equals_plain_loop(results[kind, stage, "float32"])


@pytest.mark.parametrize("shipped", SHIPPED)
def test_shipped_configurations_equal_a_plain_loop(results, shipped):
    assert_equals_plain_loop(results["llama", shipped, "float32"])


def test_weights_gathered_as_codes_equal_a_plain_loop(results):
    """With learned scales, whose gradients are then summed up after the reduction."""
    assert_equals_plain_loop(results["qwen3_moe", "coded", "float32"])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_bf16_stages_differ_less_from_each_other_than_bf16_from_fp32(results, kind):
    """Stages add bf16 gradients up in different orders, so they differ; what bf16 itself costs is the measure."""
    exact, first = load_result(results[kind, 1, "float32"]), load_result(results[kind, 1, "bfloat16"])
    loss_error = distance(first, exact, "losses")
    weight_error = distance(first, exact, "weights")
    for stage in (0, 2, 3):
        found = load_result(results[kind, stage, "bfloat16"])
        assert distance(found, first, "losses") < loss_error, stage
        assert distance(found, first, "weights") < weight_error, stage


def distance(a, b, what: str) -> float:
    """Largest difference of the total loss over the steps, or mean difference of the trained weights."""
    if what == "losses":
        return max(abs(x["loss/total"] - y["loss/total"]) for x, y in zip(a["losses"], b["losses"], strict=True))
    differences = [
        (a["weights"][name].float() - b["weights"][name].float()).abs().flatten() for name in a["requires_grad"]
    ]
    return float(torch.cat(differences).mean())


def test_rotary_frequencies_stay_fp32_and_no_step_is_skipped(results):
    for key, path in results.items():
        found = load_result(path)
        assert found["inv_freq"] and set(found["inv_freq"].values()) == {torch.float32}, key
        assert found["skipped"][-1] == 0, key


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_take_little_of_the_norm_that_clips(results, kind, stage, dtype):
    """Under 1% of it, so that clipping the whole gradient does not throttle the weights for the scales' sake."""
    found = load_result(results[kind, stage, dtype])
    measured = [(scales, whole) for scales, whole in zip(found["scale_norms"], found["norms"], strict=True) if scales]
    assert len(measured) == len(found["norms"]) // 2
    assert all(scales < 0.01 * whole for scales, whole in measured), measured


def test_exactly_what_is_learnable_trains(results):
    """Defaults: weights and weight scales. Norms, routers and initial scales keep their values, all else moves."""
    for (kind, _, dtype), path in results.items():
        if dtype == "bfloat16":  # a step may round to nothing there
            continue
        found = load_result(path)
        start = build_model(load_recipe(path).model.path, {}, dtype=torch.float32, device=torch.device("cpu"))
        load_weights(start, load_recipe(path).model.path, progress=False)
        before = dict(start.named_parameters())
        for name, weight in found["weights"].items():
            leaf = name.rpartition(".")[2]
            frozen = "norm" in name or name.endswith("mlp.gate.weight") or leaf.endswith("_s0")
            assert (name in found["requires_grad"]) != frozen, name
            if leaf.endswith("_theta"):
                assert weight.any(), f"{kind}: {name} did not move"
            elif name in before:
                assert torch.equal(weight, before[name]) == frozen, f"{kind}: {name}"
        assert found["groups"] == ["weights", "embeddings", "weight_scales"]
