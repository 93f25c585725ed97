"""Every preset, dense and MoE: trained on two ranks under ZeRO-3, exported, read back by transformers and by us."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.reading import load_recipe
from engine.loop import Loop
from quant import PRESETS
from tests.distributed.engine.scripts.variants import used_weights
from tests.lib.plain import load_result
from tests.lib.variants import NO_TEACHER, Variant, run_variants
from tools.compressed import load_compressed
from tools.verify.check import compare_with_transformers

# With a choice, one token that a rounding sends to other experts moves the mean over few tokens beyond bounds.
MODELS = {"qwen3": "qwen3 wide seed=1", "qwen3_moe": "qwen3_moe wide seed=1 config.num_experts_per_tok=5"}
MIXED, ROTATED = "mixed", "rotated"
QUANT: dict[str, dict[str, Any]] = {
    **{preset: {"scheme": preset} for preset in PRESETS},
    MIXED: {
        "scheme": "w4a16_g32",
        "rules": [{"first": 1, "scheme": "fp8_dynamic"}],
        "lm_head": "w8a16_channel",
    },
    ROTATED: {"scheme": "nvfp4_w4a4", "rotate": [r".*\.down_proj"], "rotate_block": 256},
}
EVERY = [(kind, preset) for kind in MODELS for preset in [*PRESETS, MIXED]]
# One of each format, of each kind of input, and what is special about a MoE; the others with the large counts.
SOME = [
    ("qwen3", "fp8_block"),
    ("qwen3", "8da4w"),
    ("qwen3", "nvfp4_w4a4_kv"),
    ("qwen3", "w4a16_asym"),
    ("qwen3", MIXED),
    ("qwen3", ROTATED),
    ("qwen3_moe", "fp8_static_kv"),
    ("qwen3_moe", "w8a8_static"),
    ("qwen3_moe", "mxfp4"),
    ("qwen3_moe", "nvfp4_w4a4"),
    ("qwen3_moe", "w2a16_g32"),
]
OTHERS = [each for each in EVERY if each not in SOME]


def used_first_and_last(loop: Loop, seen: dict[str, Any]) -> None:
    used_weights(loop, seen)
    loop.at(1)(lambda state: seen.update(first=dict(seen["used"])))


def run(directory: Path, chosen: list[tuple[str, str]]) -> dict[tuple[str, str], Path]:
    """One job for all of them; everything learns that a preset has."""
    variants = {}
    for kind, name in chosen:
        preset = PRESETS[QUANT[name]["scheme"]]
        static = preset.kv_cache is not None or (preset.linear is not None and preset.linear.learns_input)
        sections = {
            "stage": 3,
            "quant": {**QUANT[name], "calibration_batches": 1},
            "learnable": {"weight_scale": preset.linear is not None, "act_scale": static},
            "optim": {"lr": 3e-3, "warmup_steps": 0},
            "train": {"gradient_accumulation_steps": 1},
            "loss": NO_TEACHER,
            "export": {"enabled": True, "max_shard_size": "300KB"},
        }
        variants[f"{kind}-{name}"] = Variant(sections, MODELS[kind], "bfloat16", used_first_and_last)
    paths = run_variants(directory, variants)
    return {(kind, name): paths[f"{kind}-{name}"] for kind, name in chosen}


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    return run(tmp_path_factory.mktemp("presets"), SOME)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return run(tmp_path_factory.mktemp("others"), OTHERS)


@pytest.mark.parametrize(("kind", "preset"), SOME)
def test_what_was_trained_is_what_is_served(some, kind, preset):
    check(some[kind, preset])


@pytest.mark.full
@pytest.mark.parametrize(("kind", "preset"), OTHERS)
def test_what_was_trained_is_what_is_served_in_the_other_presets(others, kind, preset):
    check(others[kind, preset])


def check(path: Path) -> None:
    """Weights and scales of the export are those of the last forward, and no longer those of the first; transformers
    computes the logits of our forward."""
    seen, export = load_result(path)["seen"], load_recipe(path).export_dir()
    _, quantization = load_compressed(export, dtype=torch.bfloat16)
    assert seen["used"].keys() == quantization.layers.keys()
    found = {name: served(layer) for name, layer in quantization.layers.items()}
    assert not [name for name, value in found.items() if not torch.equal(value, seen["used"][name])]
    scales = {name: layer.weight_scale() for name, layer in quantization.layers.items()}
    assert not [name for name, scale in scales.items() if not torch.equal(scale, seen["scales"][name])]
    each = {**quantization.layers, **quantization.caches}
    inputs = {name: one.input_scale() for name, one in each.items() if one.input_s0 is not None}
    assert inputs.keys() == seen["inputs"].keys()
    assert not [name for name, scale in inputs.items() if not torch.equal(scale, seen["inputs"][name])]
    moved = [not torch.equal(value, seen["first"][name]) for name, value in seen["used"].items()]
    assert sum(moved) > len(moved) / 4 or not moved, "training moved little of what is exported"
    report = compare_with_transformers(export, [torch.randint(0, 301, (2, 33))])
    assert report.ok, report.table()


def served(layer: torch.nn.Module) -> torch.Tensor:
    """The weight that an exported layer multiplies by."""
    layer.input_fake_quant = False
    with torch.no_grad():
        return layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).t()
