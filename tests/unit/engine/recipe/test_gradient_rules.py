"""The rules of products of fp8 codes: each is broken by a recipe of its own, and only that rule."""

import pytest

from engine.recipe.contradictions import contradictions
from engine.recipe.gradient_rules import RULES_OF_GRADIENTS
from engine.recipe.quant import RuleRecipe
from tests.unit.engine.recipe.test_input_rules import recipe

E4M3 = {"quant.fp8_gradients": "e4m3"}
SLOW = {"quant.fp8_fast_accum": False}
BROKEN = {
    "fast sums are of layers that multiply codes": {**SLOW, "quant.compute": "simulate"},
    "fast sums are of schemes with an fp8 GEMM": {**SLOW, "quant.scheme": "w4a16_g128"},
    "fast sums are of bfloat16": {**SLOW, "model.dtype": "float32"},
    "gradients in fp8 are of layers that multiply codes": {**E4M3, "quant.compute": "simulate"},
    "gradients in fp8 are of schemes with an fp8 GEMM": {**E4M3, "quant.scheme": "w4a16_g128"},
    "gradients in fp8 come out as bfloat16": {**E4M3, "model.dtype": "float32"},
    "gradients in fp8 are not of adapters": {**E4M3, "adapter.kind": "lora", "learnable.weight": False},
}


@pytest.mark.parametrize("rule", RULES_OF_GRADIENTS, ids=lambda rule: rule.name)
def test_each_is_broken_alone(rule):
    broken = recipe(BROKEN[rule.name])
    assert list(contradictions(broken)) == [rule.text(broken)]


def test_codes_with_scales_per_group_have_no_gradients_in_fp8():
    """Also where another layer's scheme would."""
    rules = [RuleRecipe("fp8_static", first=1)]
    mixed = {**E4M3, "quant.compute": "block_gemm", "quant.scheme": "mxfp8", "quant.rules": rules}
    (said,) = contradictions(recipe(mixed))
    assert said == "quant.fp8_gradients: 'e4m3', expected null: quant.compute block_gemm has no fp8 GEMM"


@pytest.mark.parametrize("compute", ["auto", "fp8_gemm"])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_good_ones_pass(kind, compute):
    settings = {"quant.fp8_gradients": kind, "quant.compute": compute, "quant.gather_codes": True}
    assert list(contradictions(recipe(settings))) == []
