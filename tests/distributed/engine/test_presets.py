"""Every preset, dense and MoE: trained on two ranks under ZeRO-3, exported, read back by transformers and by us."""

from typing import Any

import torch

from engine.config.reading import load_recipe
from engine.loop import Loop
from quant import PRESETS
from tests.distributed.engine.scripts.variants import used_weights
from tests.lib.plain import load_result
from tests.lib.variants import NO_TEACHER, Variant, assert_export_is_of_the_last_forward, each, runs_of
from tools.verify.check import compare_with_transformers

# With a choice, one token that a rounding sends to other experts moves the mean over few tokens beyond bounds.
MODELS = {"qwen3": "qwen3 wide seed=1", "qwen3_moe": "qwen3_moe wide seed=1 config.num_experts_per_tok=5"}
MIXED, ROTATED, GATHERED = "mixed", "rotated", "gathered as codes"
QUANT: dict[str, dict[str, Any]] = {
    **{preset: {"scheme": preset} for preset in PRESETS},
    MIXED: {
        "scheme": "w4a16_g32",
        "rules": [{"first": 1, "scheme": "fp8_dynamic"}],
        "lm_head": "w8a16_channel",
    },
    ROTATED: {"scheme": "nvfp4_w4a4", "rotate": [r".*\.down_proj"], "rotate_block": 256},
    GATHERED: {"scheme": "fp8_static", "quantized_all_gather": True},
}
EVERY = [f"{kind}-{preset}" for kind in MODELS for preset in [*PRESETS, MIXED]]
# One of each format, of each kind of input, and what is special about a MoE; the others with the large counts.
SOME = [f"qwen3-{name}" for name in ("fp8_block", "8da4w", "nvfp4_w4a4_kv", "w4a16_asym", MIXED, ROTATED)]
SOME += [f"qwen3_moe-{name}" for name in ("fp8_static_kv", "w8a8_static", "mxfp4", "nvfp4_w4a4", "w2a16_g32", GATHERED)]
OTHERS = [name for name in EVERY if name not in SOME]


def used_first_and_last(loop: Loop, seen: dict[str, Any]) -> None:
    used_weights(loop, seen)
    loop.at(1)(lambda state: seen.update(first=dict(seen["used"])))


def run(name: str) -> Variant:
    """Build the run of a kind of model and a preset; everything learns that the preset has."""
    kind, _, chosen = name.partition("-")
    preset = PRESETS[QUANT[chosen]["scheme"]]
    static = preset.kv_cache is not None or (preset.linear is not None and preset.linear.learns_input)
    sections = {
        "stage": 3,
        "quant": {**QUANT[chosen], "calibration_batches": 1},
        "learnable": {"weight_scale": preset.linear is not None, "act_scale": static},
        "optim": {"lr": 3e-3, "warmup_steps": 0},
        "train": {"gradient_accumulation_steps": 1},
        "loss": NO_TEACHER,
        "export": {"enabled": True, "max_shard_size": "300KB"},
    }
    return Variant(sections, MODELS[kind], "bfloat16", used_first_and_last)


paths = runs_of(*({name: run(name) for name in names} for names in (SOME, OTHERS)))


@each(SOME, OTHERS)
def test_what_was_trained_is_what_is_served(paths, name):
    """And no longer what the first forward used; transformers computes the logits of our forward."""
    path = paths[name]
    assert_export_is_of_the_last_forward(path)
    seen = load_result(path)["seen"]
    moved = [not torch.equal(value, seen["first"][layer]) for layer, value in seen["used"].items()]
    linear = PRESETS[QUANT[name.partition("-")[2]]["scheme"]].linear
    assert sum(moved) > len(moved) / 4 if linear is not None else not moved, "training moved little of what is exported"
    report = compare_with_transformers(load_recipe(path).export_dir(), [torch.randint(0, 301, (2, 33))])
    assert report.ok, report.table()
