"""Scales of inputs, of keys and of values that a file has, against the inputs of the first samples."""

import random

import pytest
import torch

from engine.fake_quant import calibrate_inputs, check_input_scales
from model.ranks import RankError
from model.scales import input_scales, renew_weight_scales, write_scales
from quant import Quantization, prepare
from quant.spec import PRESETS
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.save.test_loadable import CPU, loaded

LAYER = "model.layers.1"
Q, DOWN, KEYS, VALUES = (
    f"{LAYER}.{name}" for name in ("self_attn.q_proj", "mlp.down_proj", "self_attn.k_cache", "self_attn.v_cache")
)


def batch_of(rows: int, length: int) -> dict[str, torch.Tensor]:
    spans = torch.tensor([[row, 0, length] for row in range(rows)])
    return {"input_ids": torch.randint(0, 301, (rows, length)), "spans": spans}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    model = loaded(tiny_checkpoint(source, "qwen3", seed=random.randrange(2**31), wide=True))
    preset = PRESETS["fp8_static_kv"]
    quantization = prepare(
        model, preset.linear, kv_cache=preset.kv_cache, learn_weight_scale=False, learn_input_scale=False
    )
    owners = {group.owner for group in quantization.input_groups}
    write_scales(quantization.weight_groups, {g.owner: torch.tensor([0.01]) for g in quantization.weight_groups})
    calibrate_inputs(model, quantization, owners, [batch_of(3, 40), batch_of(2, 30)], CPU)
    return model, quantization, input_scales(quantization)


def check(model, quantization: Quantization, scales: dict[str, float]) -> None:
    write_scales(quantization.input_groups, {name: torch.tensor([value]) for name, value in scales.items()})
    switches = quantization.fake_quant_state()
    try:
        check_input_scales(model, quantization, set(scales), [batch_of(2, 50)], CPU, "the files")
    finally:
        assert quantization.fake_quant_state() == switches
        assert not quantization.observing
        assert model.training is False


@pytest.mark.parametrize("factor", [1, 0.5, 2, 30])
def test_scales_of_other_samples_pass(calibrated, factor):
    """Clipped ones, too, and those of samples with an outlier."""
    model, quantization, good = calibrated
    check(model.eval(), quantization, {name: value * factor for name, value in good.items()})


WAYS = {
    "reciprocals": lambda good: {name: 1 / value for name, value in good.items()},
    "absmax, not divided": lambda good: {name: 448 * value for name, value in good.items()},
    "divided twice": lambda good: {name: value / 448 for name, value in good.items()},
    "of another unit": lambda good: {name: value * 1e-3 for name, value in good.items()},
    "one of q, k and v": lambda good: good | {Q: good[Q] / 100},
    "one of down_proj": lambda good: good | {DOWN: good[DOWN] * 1000},
    "of keys": lambda good: good | {KEYS: good[KEYS] / 100},
    "of values": lambda good: good | {VALUES: good[VALUES] * 1000},
}


@pytest.mark.parametrize("way", WAYS)
def test_scales_of_something_else_are_an_error(calibrated, way):
    model, quantization, good = calibrated
    scales = WAYS[way](good)
    with pytest.raises(RankError, match=r"inputs in the files do not fit.* quant\.calibration_batches") as error:
        check(model.eval(), quantization, scales)
    changed = [name for name in good if scales[name] != good[name]]
    assert any(f"\n{name}: the scale is {scales[name]:.3g}, absmax is" in str(error.value) for name in changed)
    assert len(str(error.value).splitlines()) <= 7


def test_scales_of_the_weights_beside_them_are_an_error(calibrated):
    model, quantization, good = calibrated
    layers = quantization.layers
    scales = {name: layers[name].weight.abs().max().item() / 448 if name in layers else good[name] for name in good}
    with pytest.raises(RankError, match=rf"{Q}: the scale is .* of its elements are beyond the range"):
        check(model.eval(), quantization, scales)


def test_global_scales_of_inputs_are_not_their_reciprocals(tmp_path):
    """NVFP4's, which divides in compressed-tensors and multiplies in ModelOpt."""
    model = loaded(tiny_checkpoint(tmp_path, "qwen3", seed=random.randrange(2**31), even=True))
    scheme = PRESETS["nvfp4_w4a4"].linear
    quantization = prepare(model, scheme, learn_weight_scale=False, learn_input_scale=False)
    owners = {group.owner for group in quantization.input_groups}
    renew_weight_scales(quantization)
    calibrate_inputs(model, quantization, owners, [batch_of(3, 40)], CPU)
    good = input_scales(quantization)
    for factor in (0.5, 1, 30):
        check(model.eval(), quantization, {name: value * factor for name, value in good.items()})
    for wrong in (
        {name: 1 / value for name, value in good.items()},
        {name: value * 1e3 for name, value in good.items()},
    ):
        with pytest.raises(RankError, match="the scales below this one, which divides"):
            check(model.eval(), quantization, wrong)
