"""Statistics of the quantization against their definitions."""

import itertools
import math
import random

import pytest
import torch
from torch import nn

from model.scales import input_scales, measure_weight_scales, weight_statistics, write_scales
from quant import DEFAULT_EXEMPT, TensorSpec, get_scheme, partial_squares, prepare
from quant.reference import fake_quant, inside_range

SPECS = [
    TensorSpec("fp8_e4m3", 8, "tensor"),
    TensorSpec("int", 4, "group", 8),
    TensorSpec("int", 2, "channel"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_squares_of_pieces_add_up_to_those_of_the_whole(spec, seed):
    shape = (random.randint(1, 9), 8 * random.randint(1, 5))
    weight = torch.randn(shape)
    scale = 0.01 + torch.rand(spec.scale_shape(shape))
    cuts = sorted(random.randint(0, weight.numel()) for _ in range(3))
    edges = [0, *cuts, weight.numel()]
    flat = weight.flatten()
    found = sum(partial_squares(flat[a:b], a, shape, scale, spec) for a, b in itertools.pairwise(edges))
    error = (fake_quant(weight, scale, spec).double() - weight.double()).square().sum()
    torch.testing.assert_close(found, torch.stack([error, weight.double().square().sum()]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", ["fp8_static", "w4a16_g32"])
def test_weight_statistics_are_of_the_effective_scales(scheme, seed):
    """With a theta that is not 0: what is clipped and how large the error is follow the scale that the forward uses."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 96)).bfloat16()
    learn = get_scheme(scheme).activations is not None
    quantization = prepare(
        model, get_scheme(scheme), exempt=DEFAULT_EXEMPT, learn_weight_scale=True, learn_input_scale=learn
    )
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
