"""Mixed precision, quantized embeddings and lm_head, scales that follow the weights: two ranks against a plain loop."""

import itertools

import pytest
import torch

from tests.distributed.engine.test_train import SCRIPT
from tests.lib.launcher import run_ranks
from tests.lib.plain import assert_equals_plain_loop, load_result
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.tiny import tiny_checkpoint

pytestmark = pytest.mark.full  # half a minute and more

MIXED = {
    "scheme": "w4a16_g32",
    "weight_range": "absmax",
    "rules": [{"first": 1, "scheme": "w8a16_channel"}, {"layers": ".*down_proj", "scheme": "none"}],
    "lm_head": "w8a16_channel",
    "embedding": "w4a16_g32",
}
FOLLOWING = {"scheme": "w3a16_g32", "weight_range": "absmax", "scales_follow_weights": True}
SHIFTED = {"weights": {"dtype": "int", "bits": 3, "granularity": "group", "group_size": 32, "symmetric": False}}
ROTATED = {"scheme": "mxfp4_mxfp8", "rotate": [r".*\.o_proj"], "rotate_block": 64, "keep_codes": True}
# name: stage, sections of the recipe
RUNS = {
    "mixed-0": (0, {"quant": MIXED}),
    "mixed-3": (3, {"quant": MIXED}),
    "clipping-1": (1, {"quant": FOLLOWING}),
    "clipping-3": (3, {"quant": FOLLOWING}),
    "shifted-3": (3, {"quant": {**FOLLOWING, "scheme": "shifted", "schemes": {"shifted": SHIFTED}}}),
    "absmax-2": (2, {"quant": FOLLOWING, "learnable": {"weight_scale": False}}),
    # Its statistics, which are logged every second step, need the global scales that no rank holds whole.
    "nvfp4-3": (3, {"quant": {"scheme": "nvfp4"}}),
    # Global scales of inputs are measured over both ranks' batches; the scales below them follow every token.
    "nvfp4-inputs-3": (3, {"quant": {"scheme": "nvfp4_w4a4", "calibration_batches": 2}}),
    "nvfp4-inputs-1": (1, {"quant": {"scheme": "nvfp4_w4a4", "calibration_batches": 2, "keep_codes": True}}),
    # Weights are turned before their scales are measured, inputs of 64 = 2 x 32 in one block, also when recomputed.
    "rotated-3": (3, {"quant": ROTATED, "train": {"activation_checkpointing": True}}),
    "rotated-1": (1, {"quant": ROTATED}),
    "signed-3": (3, {"quant": {"scheme": "w2a16_g32", "weight_range": "absmax", "signed_scales": True}}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """One launch."""
    directory = tmp_path_factory.mktemp("schemes")
    data = write_chats(directory / "chats.jsonl")
    model = tiny_checkpoint(directory / "qwen3", "qwen3", even=True)
    paths = {
        name: write_recipe(directory, name, model, data, stage=stage, dtype="float32", **sections)
        for name, (stage, sections) in RUNS.items()
    }
    run_ranks(SCRIPT, *map(str, paths.values()))
    return paths


@pytest.mark.parametrize("name", RUNS)
def test_every_step_equals_a_plain_one(results, name):
    assert_equals_plain_loop(results[name])


def test_what_is_quantized_and_what_moves(results):
    """lm_head and embeddings have scales that train, one down_proj has none; scales that follow change in every step,
    and signed ones have both signs."""
    mixed = load_result(results["mixed-3"])
    assert {"lm_head", "model.embed_tokens"} <= mixed["scales"].keys()
    assert not any("layers.1.mlp.down_proj" in name for name in mixed["scales"])
    for name in ("lm_head", "model.embed_tokens"):
        assert mixed["weights"][f"{name}.weight_theta"].any(), name
    clipping = load_result(results["clipping-3"])
    name = "model.layers.1.mlp.up_proj"
    starts = [step[f"{name}.weight_s0"] for step in clipping["after"]]
    # The first step of the warm-up moves by half a learning rate, which shows in every absmax.
    assert all((a != b).float().mean() > 0.9 for a, b in itertools.pairwise(starts))
    assert clipping["weights"][f"{name}.weight_theta"].any()
    shifted = [step[f"{name}.weight_zero"] for step in load_result(results["shifted-3"])["after"]]
    assert shifted[0].unique().numel() > 2 and not torch.equal(shifted[0], shifted[-1]), "zero points follow as well"
    assert not any(key.endswith("weight_theta") for key in load_result(results["absmax-2"])["weights"])
    signs = torch.cat([scale.sign().flatten() for scale in load_result(results["signed-3"])["scales"].values()])
    assert 0.3 < (signs < 0).float().mean() < 0.7
