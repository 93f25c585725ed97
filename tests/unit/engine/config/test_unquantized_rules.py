"""The rules of a run without fake quant: each is broken by a recipe of its own, and only that rule."""

import pytest

from engine.config.contradictions import contradictions
from engine.config.events import EventRecipe
from engine.config.unquantized_rules import RULES_OF_UNQUANTIZED
from tests.unit.engine.config.test_input_rules import recipe

# What breaks each rule in a run that never quantizes.
BROKEN = {
    "quant.scales": [{"quant.scales": "ptq"}],
    "quant.scales_follow_weights": [{"quant.scales_follow_weights": True, "quant.weight_range": "absmax"}],
    "quant.compute": [{"quant.compute": "fp8_gemm"}],
    "quant.fp8_fast_accum": [{"quant.fp8_fast_accum": False}],
    "quant.keep_codes": [{"quant.keep_codes": True, "quant.scheme": "nvfp4_w4a4"}],
    "quant.fuse_norms": [{"quant.fuse_norms": True}],
    "quant.quantized_all_gather": [{"quant.quantized_all_gather": True}],
    "export.format": [{"export.format": "vllm_fp8"}, {"export.format": "mlx", "quant.scheme": "w4a16_g32"}],
    "learnable.act_scale": [{"learnable.act_scale": True}],
}
CASES = [(rule, settings) for rule in RULES_OF_UNQUANTIZED for settings in BROKEN[rule.key]]


@pytest.mark.parametrize(("rule", "settings"), CASES)
def test_each_is_broken_alone(rule, settings):
    """And not where fake quant begins at some time: from the start, later, or by an event."""
    never = recipe({**settings, "quant.fake_quant_start": -1})
    assert list(contradictions(never)) == [rule.text(never)]
    for start in (0, 2):
        assert list(contradictions(recipe({**settings, "quant.fake_quant_start": start}))) == []
    never.schedule = [EventRecipe(at=1, fake_quant=True)]
    assert list(contradictions(never)) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quant.compute": "simulate", "quant.calibration_batches": 0, "learnable.weight_scale": False},
        {"quant.scheme": "w2a16_g32", "quant.signed_scales": True, "quant.weight_range": "mse"},
        {"quant.scheme": "fp8_static_kv", "quant.input_range": "percentile", "quant.percentile": 99.0},
    ],
)
def test_what_describes_a_quantized_run_beside_it_may_stay(settings):
    assert list(contradictions(recipe({**settings, "quant.fake_quant_start": -1}))) == []
