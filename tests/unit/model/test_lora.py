"""Adapters that start from the error of quantization: the best of their rank, or a line that names the layer."""

import re

import pytest
import torch
from torch import nn

import quant
from model.peft import start_from_error
from model.ranks import RankError
from model.scales import renew_weight_scales
from quant import SCHEMES, Quantization, QuantLinear
from quant.lora import AdapterBeside

RANK = 4


def with_adapter(dtype: torch.dtype, scaling: float) -> tuple[Quantization, QuantLinear]:
    model = nn.Sequential(nn.Linear(96, 40)).to(dtype)
    quantization = quant.prepare(model, SCHEMES["w2a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    layer = quantization.layers["0"]
    pair = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((RANK, 96), (40, RANK))]
    layer.adapter = AdapterBeside(*pair, scaling)
    return quantization, layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", [1e-3, 1.0, 50.0])
def test_the_adapter_is_the_nearest_of_its_rank(dtype, scaling, seed):
    quantization, layer = with_adapter(dtype, scaling)
    start_from_error(quantization)
    error = (layer.weight - layer.quantized_weight()).detach().double()
    product = scaling * layer.adapter.lora_b.detach().double() @ layer.adapter.lora_a.detach().double()
    best = torch.linalg.svdvals(error)[RANK:].norm()
    assert best * (1 - 1e-6) <= (error - product).norm() <= 1.02 * best


@pytest.mark.parametrize(
    ("dtype", "scaling"),
    [(torch.float16, 1e-15), (torch.float16, 1e15), (torch.float32, 1e-40)],
)
def test_an_adapter_that_its_dtype_cannot_hold_is_refused(dtype, scaling, seed):
    quantization, _ = with_adapter(dtype, scaling)
    with pytest.raises(RankError, match=re.escape(f"init error: 0: {dtype} cannot hold") + ".* adapter.alpha"):
        start_from_error(quantization)
