"""The rules of inputs that are turned, or that are codes: each is broken by a recipe of its own, and only that rule."""

from operator import attrgetter

import pytest

from engine.config.config import Recipe
from engine.config.contradictions import contradictions
from engine.config.input_rules import RULES_OF_INPUTS
from engine.config.quant import RuleRecipe
from engine.config.sections import DataRecipe, ModelRecipe, TrainRecipe

ROTATED = {"quant.rotate": [r".*\.down_proj"]}
BROKEN = {
    "blocks are of inputs that are turned": {"quant.rotate_block": 64},
    "scales from files are of weights that are not turned": {**ROTATED, "quant.scales": "ptq"},
    "adapters are not of turned weights": {**ROTATED, "adapter.kind": "lora", "learnable.weight": False},
    "turned inputs are read from one format": {**ROTATED, "export.format": "dequantized"},
    "codes are kept of dynamic floats": {"quant.keep_codes": True, "quant.scheme": "8da4w"},
    "weights that travel as codes have one scale per tensor or row": {
        "quant.quantized_all_gather": True,
        "quant.scheme": "nvfp4_w4a4",
    },
    "norms write codes of static scales": {"quant.fuse_norms": True, "quant.scheme": "fp8_dynamic"},
    "norms write codes of scales that do not learn": {"quant.fuse_norms": True, "learnable.act_scale": True},
    "adapters read values": {"quant.fuse_norms": True, "adapter.kind": "lora", "learnable.weight": False},
    "what is compiled is fused by the compiler": {"quant.fuse_norms": True, "train.compile": True},
    "a plain checkpoint has no turned inputs": {**ROTATED, "quant.fake_quant_start": -1},
}


def recipe(settings: dict[str, object]) -> Recipe:
    made = Recipe(ModelRecipe("model"), DataRecipe(["chats.jsonl"]), TrainRecipe(steps=10), "out")
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(made), name, value)
    return made


@pytest.mark.parametrize("rule", RULES_OF_INPUTS, ids=lambda rule: rule.name)
def test_each_is_broken_alone(rule):
    broken = recipe(BROKEN[rule.name])
    assert list(contradictions(broken)) == [rule.text(broken)]


@pytest.mark.parametrize("scheme", ["mxfp4_mxfp8", "nvfp4_w4a4", "w4a16_g32"])
def test_good_ones_pass(scheme):
    settings = {**ROTATED, "quant.rotate_block": 1024, "quant.scheme": scheme}
    assert list(contradictions(recipe(settings))) == []
    kept = {"quant.keep_codes": True, "quant.scheme": "nvfp4_w4a4"}
    assert list(contradictions(recipe(kept))) == []
    for gathered in ("fp8_dynamic", "int8_dynamic", "w4a16_channel"):
        assert list(contradictions(recipe({"quant.quantized_all_gather": True, "quant.scheme": gathered}))) == []
    rules = [RuleRecipe("fp8_static", first=1)]
    mixed = {"quant.quantized_all_gather": True, "quant.scheme": "mxfp8", "quant.rules": rules}
    assert list(contradictions(recipe(mixed))) == []
    for fused in ("fp8_static", "w8a8_static"):
        assert list(contradictions(recipe({"quant.fuse_norms": True, "quant.scheme": fused}))) == []
    assert not list(recipe({"quant.rotate_block": 1024}).quant.problems())
