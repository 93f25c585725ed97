"""The rules of products of fp8 codes: each is broken by a recipe of its own, and only that rule."""

import pytest

from engine.config.contradictions import contradictions
from engine.config.gradient_rules import RULES_OF_GRADIENTS
from tests.unit.engine.config.test_input_rules import recipe

SLOW = {"quant.fp8_fast_accum": False}
BROKEN = {
    "fast sums are of layers that multiply codes": {**SLOW, "quant.compute": "simulate"},
    "fast sums are of schemes with an fp8 GEMM": {**SLOW, "quant.scheme": "w4a16_g128"},
    "fast sums are of bfloat16": {**SLOW, "model.dtype": "float32"},
}


@pytest.mark.parametrize("rule", RULES_OF_GRADIENTS, ids=lambda rule: rule.name)
def test_each_is_broken_alone(rule):
    broken = recipe(BROKEN[rule.name])
    assert list(contradictions(broken)) == [rule.text(broken)]


@pytest.mark.parametrize("compute", ["auto", "fp8_gemm"])
def test_good_ones_pass(compute):
    settings = {**SLOW, "quant.compute": compute, "quant.quantized_all_gather": True}
    assert list(contradictions(recipe(settings))) == []
