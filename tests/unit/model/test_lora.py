"""Adapters that start from the error of quantization, and adapters beside products of codes."""

import copy
import re

import pytest
import torch
from torch import nn

from model.peft import start_from_error
from model.ranks import RankError
from quant import Quantization, QuantLinear, weights_changed
from quant.adapters import Adapter, AdapterBeside
from tests.lib.checkpoints import load_model, quantize
from tests.lib.tiny import tiny_checkpoint

RANK = 4


def with_adapter(dtype: torch.dtype, scaling: float) -> tuple[Quantization, QuantLinear]:
    model = nn.Sequential(nn.Linear(96, 40)).to(dtype)
    quantization = quantize(model, "w2a16_g32", learn=False)
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
    with pytest.raises(
        RankError, match=re.escape(f"init: error, but {dtype} cannot represent an adapter of 0 ") + ".* adapter.alpha"
    ):
        start_from_error(quantization)


@pytest.mark.parametrize("kind", ("qwen3", "qwen3_moe"))
@pytest.mark.parametrize(
    ("scheme", "way"), [("fp8_static", "fp8_gemm"), ("nvfp4_w4a4", "dynamic_codes"), ("mxfp4_mxfp8", "dynamic_codes")]
)
def test_other_ways_to_multiply_have_the_gradients_of_the_sum(tmp_path, scheme, way, kind):
    """Products of codes, and cached codes of inputs: outputs have the bits of a layer whose weight is the sum, and
    gradients differ by bf16 rounding at most. For a Linear and a stack of experts."""
    model = load_model(tiny_checkpoint(tmp_path, kind, wide=True, layers=1)).requires_grad_(False)
    quantization = quantize(model, scheme, input_scale=0.02)
    ending = "o_proj" if kind == "qwen3" else "gate_up_proj"
    layer = next(one for name, one in quantization.layers.items() if name.endswith(ending))
    *stack, out, in_ = layer.weight_shape
    lora_a, lora_b = torch.randn(*stack, 3, in_), torch.randn(*stack, out, 3) * float(layer.weight.float().std()) / 4
    layer.attach_adapter(Adapter(nn.Parameter(lora_a.bfloat16()), nn.Parameter(lora_b.bfloat16()), 0.75))
    weights_changed(model)
    setattr(layer, way, True)
    plain = copy.deepcopy(layer)
    plain.adapter, plain.weight = None, nn.Parameter(layer.merged_weight())
    ends = torch.tensor([3, 3, 7, 11, 16], dtype=torch.int32) if layer.num_experts else None
    x = torch.randn(16, in_).bfloat16().requires_grad_()
    direction = torch.randn(16, out).bfloat16()
    outputs = layer(x, ends), plain(x, ends)
    assert torch.equal(*outputs)
    of_x, of_a, of_b = torch.autograd.grad(outputs[0], [x, layer.lora_a, layer.lora_b], direction)
    expected_x, of_sum = torch.autograd.grad(outputs[1], [x, plain.weight], direction)
    a, b, whole = layer.lora_a.double(), layer.lora_b.double(), of_sum.double()
    for own, other in ((of_x, expected_x), (of_a, 0.75 * b.mT @ whole), (of_b, 0.75 * whole @ a.mT)):
        assert (own.double() - other).norm() <= 0.01 * other.double().norm()
