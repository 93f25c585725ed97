"""Adapters on a base that is held as codes: of a quantized checkpoint, or made of an ordinary one."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.errors import RecipeError
from engine.session.student import build_student, empty_student, initial_scales
from model.build import build_model
from model.checkpoint.load import load_weights
from model.ranks import RankError
from model.save import export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, prepare
from tests.unit.engine.session.adapted import BESIDE, CPU, DS_CONFIG, FROZEN, recipe


def quantized(source: Path, directory: Path, scheme: str) -> Path:
    """The checkpoint in a scheme."""
    model = build_model(source, DS_CONFIG, dtype=torch.bfloat16, device=CPU)
    load_weights(model, source, progress=False)
    quantization = prepare(model, SCHEMES[scheme], learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    export_model(model, quantization, source, directory)
    return directory


def test_a_base_that_codes_do_not_say_is_refused(tmp_path, checkpoints):
    """Weights quantized otherwise; and scales of which one would take the place of several."""
    base = {**BESIDE, "rank": 4, "base": "quantized"}
    path = quantized(checkpoints["qwen3"], tmp_path / "nvfp4", "nvfp4")
    settings = recipe(tmp_path, path, base, **FROZEN, quant={"scheme": "source"})
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    initial_scales(settings, model, quantization)
    assert all(layer.held is not None for layer in quantization.layers.values())

    other = recipe(tmp_path, path, base, **FROZEN, quant={"scheme": "w4a16_g32"})
    with pytest.raises(
        RankError, match=r"adapter.base: quantized: .*weight is quantized as .*set quant.scheme to source"
    ):
        build_student(other, DS_CONFIG, CPU)

    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight_global_scale"] *= 2
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    with pytest.raises(
        RankError, match=r"adapter.base: quantized: .*layers.1.self_attn.k_proj.* do not have the scales"
    ):
        initial_scales(settings, model, quantization)


GIVEN = {"initial_input_scale": 0.5, "calibration_batches": 0}
# What the recipe has beside a base whose codes are to be made, and what is said.
NOT_MADE = [
    ({"quant": {"scheme": "fp8_static", **GIVEN}}, "q_proj: .*scheme 'fp8_static' has a scale that a whole weight"),
    ({"quant": {"scheme": "nvfp4"}}, "q_proj: .*scheme 'nvfp4' has a scale that a whole weight, or several, must be"),
    ({"quant": {"scheme": "w8a8_static"}}, "scales of inputs would be measured in another model"),
    ({"loss": {"kd_weight": 1.0, "kd": "kl", "teacher": "self"}}, "set loss.teacher to it, as loss.teacher self would"),
    ({"schedule": [{"at": 1, "fake_quant": False}]}, "leave fake_quant of weights on in the schedule"),
    ({"quant": {"scheme": "source"}}, "has no quantization_config"),
]


@pytest.mark.parametrize(("sections", "said"), NOT_MADE)
def test_codes_that_cannot_be_made_are_refused_before_weights_are_read(tmp_path, checkpoints, sections, said):
    base = {**BESIDE, "rank": 4, "base": "quantized"}
    with pytest.raises((RankError, RecipeError), match=said):
        empty_student(recipe(tmp_path, checkpoints["qwen3"], base, **{**FROZEN, **sections}), DS_CONFIG, CPU)


def test_codes_are_made_of_an_ordinary_checkpoint(tmp_path, checkpoints):
    """Of all quantized layers but lm_head, which keeps its weight; scales of inputs may be given."""
    base = {**BESIDE, "rank": 4, "base": "quantized"}
    settings = recipe(tmp_path, checkpoints["qwen3"], base, **FROZEN, quant={"scheme": "w4a16_g32"})
    model, quantization = build_student(settings, DS_CONFIG, CPU)
    assert initial_scales(settings, model, quantization) == set()
    quant = {"scheme": "w8a8_static", **GIVEN, "lm_head": "w8a16_channel"}
    given = recipe(tmp_path, checkpoints["qwen3"], base, **FROZEN, quant=quant)
    other, static = build_student(given, DS_CONFIG, CPU)
    assert initial_scales(given, other, static) == set() and static.layers["lm_head"].held is None
    for layer in (*quantization.layers.values(), *static.layers.values()):
        assert layer.weight_s0.isfinite().all() and (layer.held is not None or layer is static.layers["lm_head"])
