"""Options that do not go together with adapters."""

from pathlib import Path

import pytest

from engine.config.errors import RecipeError
from tests.unit.engine.session.adapted import BESIDE, FROZEN, recipe

CONTRADICTIONS = [
    ({"learnable": {"weight": True}}, "learnable.weight: True, expected false with adapter.kind lora"),
    ({"quant": {"scheme": "w4a16_g32", "fake_quant_start": -1}}, "quant.fake_quant_start: -1 (never), expected 0 or"),
    (
        {"quant": {"scheme": "fp8_static", "quantized_all_gather": True}},
        "quant.quantized_all_gather: True, expected false with adapter",
    ),
    ({"train": {"steps": 4, "compile": True}}, "train.compile: True, expected false with adapter.kind lora"),
    ({"adapter": {"targets": [".*"]}}, "adapter.targets: ['.*'], expected nothing, or adapter.kind lora"),
    ({"adapter": {"ranks": {".*": 3}}}, "adapter.ranks: {'.*': 3}, expected nothing, or adapter.kind lora"),
    ({"adapter": {"kind": "lora", "ranks": {"(": 3}}}, "adapter.ranks: {'(': 3}, expected regular expressions"),
    ({"adapter": {"kind": "lora", "rank": 0}}, "adapter.rank: 0, expected at least 1"),
    ({"adapter": {"kind": "lora", "dropout": 0.1}}, "dropout"),
    ({"adapter": {"merge": False}}, "adapter.merge: False, expected true, or adapter.kind lora: there are no adapters"),
    ({"adapter": {"start": "a"}}, "adapter.start: 'a', expected null, or adapter.kind lora: there are no adapters"),
    (
        {"adapter": {"kind": "lora", "init": "error"}},
        "adapter.init: 'error', expected zeros, or adapter.kind lora with",
    ),
    ({"adapter": BESIDE}, "learnable: more than adapters learns, expected weight_scale, act_scale, norm, router to be"),
    (
        {"adapter": {**BESIDE, "ranks": {".*q_proj": 3}}, **FROZEN},
        "adapter.ranks: {'.*q_proj': 3}, expected nothing with adapter.merge false: vLLM multiplies",
    ),
    (
        {"adapter": BESIDE, **FROZEN, "export": {"format": "mlx"}},
        "export.format: 'mlx', expected one of compressed, vllm_fp8, dequantized, peft with adapter.merge false",
    ),
    (
        {"adapter": {"kind": "lora", "dropout": 0.1}},
        "adapter.dropout: 0.1, expected 0, or adapter.kind lora with adapter.merge false",
    ),
    ({"adapter": {"dropout": 0.1}}, "adapter.dropout: 0.1, expected 0, or adapter.kind lora with adapter.merge false"),
    *(
        ({"adapter": {**BESIDE, "dropout": share}, **FROZEN}, f"adapter.dropout: {share}, expected a number of at")
        for share in (1.0, -0.1, 1.5)
    ),
    (
        {"adapter": {"kind": "lora", "base": "quantized"}},
        "adapter.base: 'quantized', expected weights, or adapter.kind lora with",
    ),
    (
        {"adapter": {**BESIDE, "base": "nf4"}, **FROZEN},
        "adapter.base: Expected one of ['weights', 'quantized']. Got value: nf4",
    ),
    *(
        (
            {"adapter": {**BESIDE, "base": "quantized"}, **FROZEN, "quant": {"scheme": "w4a16_g32", **quant}},
            f"adapter.base: 'quantized', expected weights{said}",
        )
        for quant, said in (
            ({"start": "a"}, " with quant.start or quant.scales"),
            ({"scales": "a"}, " with quant.start or quant.scales"),
            ({"fake_quant_start": 2}, "; or codes with quant.fake_quant_start 0"),
            ({"scales_follow_weights": True, "weight_range": "absmax"}, "; or codes with quant.fake_quant_start 0"),
        )
    ),
    (
        {"adapter": {**BESIDE, "base": "quantized", "init": "error"}, **FROZEN},
        "adapter.init: 'error', expected zeros with adapter.base codes",
    ),
    ({"export": {"format": "peft"}}, "export.format: 'peft', expected another format, or adapter.kind lora with"),
]


@pytest.mark.parametrize(("sections", "said"), CONTRADICTIONS)
def test_options_that_do_not_go_together(tmp_path, sections, said):
    with pytest.raises(RecipeError) as refused:
        recipe(tmp_path, Path("model"), **sections)
    assert said in str(refused.value)


def test_adapters_alone_may_train(tmp_path):
    recipe(tmp_path, Path("model"), learnable={"weight": False, "weight_scale": False})
