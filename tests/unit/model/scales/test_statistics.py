"""Statistics of quantized weights against their definitions."""

import math

import pytest
import torch
from torch import nn

from model.scales import input_scales, measure_weight_scales, weight_statistics, write_scales
from quant import get_scheme, prepare
from quant.reference import fake_quant, inside_range


@pytest.mark.parametrize("scheme", ["fp8_static", "w4a16_g32"])
def test_weight_statistics_are_of_the_effective_scales(scheme, seed):
    """With a theta that is not 0: what is clipped and how large the error is follow the scale that the forward uses."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 96)).bfloat16()
    learn = get_scheme(scheme).activations is not None
    quantization = prepare(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=learn)
    write_scales(quantization.weight_groups, measure_weight_scales(quantization))
    write_scales(quantization.input_groups, {group.owner: torch.tensor([0.02]) for group in quantization.input_groups})
    with torch.no_grad():
        for group in (*quantization.weight_groups, *quantization.input_groups):
            group.theta.fill_(-0.5)
    found = weight_statistics(quantization)
    assert found.keys() == quantization.layers.keys()
    for name, layer in quantization.layers.items():
        weight, scale, spec = layer.weight.detach().float(), layer.weight_scale().detach(), layer.scheme.weights
        error = (fake_quant(weight, scale, spec) - weight).double().square().sum() / weight.double().square().sum()
        assert found[name].error == pytest.approx(float(error), rel=1e-6)
        assert found[name].clipped == pytest.approx(float((~inside_range(weight, scale, spec)).double().mean()))
        assert found[name].clipped > 0
        assert found[name].scale == pytest.approx(math.exp(float(scale.double().log().mean())), rel=1e-5)
    expected = 0.02 * math.exp(-0.5)
    assert all(scale == pytest.approx(expected, rel=1e-5) for scale in input_scales(quantization).values())
