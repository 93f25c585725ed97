"""MX: scales that are powers of two, against compressed-tensors, vLLM's quantizer and exact numbers."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from quant import kernels
from quant.formats.config import quantization_args
from quant.reference import (
    absmax_scale,
    fake_quant,
    fake_quantize_tokens,
    fake_quantize_tokens_backward,
    quantize_tokens,
    tokens_inside,
)
from quant.spec import SCHEMES, TensorSpec

MXFP8, MXFP4 = SCHEMES["mxfp8"].activations, SCHEMES["mxfp4_w4a4"].activations
WEIGHTS = {MXFP8: SCHEMES["mxfp8"].weights, MXFP4: SCHEMES["mxfp4"].weights}
BOTH = pytest.mark.parametrize("spec", [MXFP8, MXFP4], ids=["mxfp8", "mxfp4"])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def million(seed_rows: int = 4096) -> torch.Tensor:
    """Groups of 32 of all sizes that a scale can have, a third of them bf16 numbers, whose largest often lies on the
    edge between two scales."""
    x = torch.randn(seed_rows, 256) * 10 ** torch.empty(seed_rows, 8).uniform_(-30, 30).repeat_interleave(32, -1)
    x[::3] = x[::3].bfloat16().float()
    return x


def groups(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 32))


def theirs(x: torch.Tensor, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """compressed-tensors' fake quantization, and the scales that it used."""
    args = QuantizationArgs(**quantization_args(spec))
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), None)
    return fake_quantize(x, scale, zero, args, None), scale


@BOTH
def test_a_million_weights_are_those_of_compressed_tensors(spec, seed):
    """Scales and values bit for bit."""
    x = million()
    expected, scale = theirs(x, WEIGHTS[spec])
    ours = absmax_scale(groups(x).abs().amax(-1), WEIGHTS[spec])
    assert torch.equal(ours, scale)
    assert torch.equal(fake_quant(x, ours, WEIGHTS[spec]), expected)


def of_vllm(x: torch.Tensor, largest: float) -> torch.Tensor:
    """The scales of vLLM 0.33's ``_mxfp8_e4m3_quantize_torch`` (model_executor/layers/quantization/utils/
    mxfp8_utils.py), which are those of FlashInfer 0.7.2 for either format, but in fp64."""
    absmax = groups(x).abs().amax(-1).double().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.ceil(torch.log2(absmax / largest)).clamp(-127, 127)).float()


@BOTH
def test_a_million_inputs_have_the_scales_of_vllm_and_the_values_of_compressed_tensors_for_them(spec, seed):
    x = million()
    scale = of_vllm(x, spec.qmax)
    expected = fake_quantize(x, scale, None, QuantizationArgs(**quantization_args(spec)), None)
    for quantize, fake in (
        (quantize_tokens, fake_quantize_tokens),
        (kernels.quantize_tokens, kernels.fake_quantize_tokens),
    ):
        codes, ours, _ = quantize(x, spec)
        assert torch.equal(ours, scale) and codes.dtype == (torch.float8_e4m3fn if spec is MXFP8 else torch.uint8)
        assert torch.equal(fake(x, spec), expected)
    assert tokens_inside(x, spec).all(), "nothing is clipped"


def test_where_transformers_and_vllm_differ(seed):
    """compressed-tensors takes the scales of weights. MXFP8 differs where the largest value is 1.75 times a power of
    two, and there in subnormal codes alone; MXFP4 where it lies between 1.5 and 1.75 times one."""
    x = million().bfloat16().float()
    mantissa = torch.frexp(groups(x).abs().amax(-1)).mantissa
    for spec, low, high in ((MXFP8, 0.875, 0.875), (MXFP4, 0.75, 0.875)):
        values, scale = theirs(x, spec)
        _, ours, _ = quantize_tokens(x, spec)
        ratio = ours / scale
        apart = mantissa == 0.875 if spec is MXFP8 else (mantissa > low) & (mantissa < high)
        assert torch.equal(ratio != 1, apart) and apart.any()
        assert set(ratio[apart].tolist()) == ({0.5} if spec is MXFP8 else {2.0})
        if spec is MXFP8:
            finer = fake_quantize_tokens(x, spec) != values
            assert (
                groups(x.abs())[groups(finer)] < (2.0**-6 * scale).unsqueeze(-1).expand_as(groups(x))[groups(finer)]
            ).all()


@BOTH
def test_scales_in_exact_numbers(spec, seed):
    """The smallest power of two with ``absmax / scale <= qmax``; of weights that of the half-open range."""
    edge = Fraction(448 if spec is MXFP8 else 7)
    sizes = [1.5, 1.75, math.nextafter(1.5, 2), 1.75 - 2.0**-23, 1.75 + 2.0**-23, 1.0, 2 - 2.0**-23]
    absmax = torch.tensor([m * 2.0**e for m in sizes for e in (-100, -7, 0, 8, 120)] + torch.rand(200).tolist())
    inputs, weights = absmax_scale(absmax, spec), absmax_scale(absmax, WEIGHTS[spec])
    for size, of_input, of_weight in zip(absmax.tolist(), inputs.tolist(), weights.tolist(), strict=True):
        assert Fraction(size) / Fraction(of_input) <= Fraction(spec.qmax) < 2 * Fraction(size) / Fraction(of_input)
        assert edge / 2 <= Fraction(size) / Fraction(of_weight) < edge


@BOTH
def test_groups_at_the_edges(spec):
    """Zeros, an infinity, a NaN, groups too small for a scale, subnormal codes and ties, by both definitions."""
    x = torch.zeros(7, 32)
    x[1, :3] = torch.tensor([torch.inf, 1.0, -900.0])
    x[2, :3] = torch.tensor([torch.nan, 1.0, 2.0])
    x[3] = torch.linspace(-1, 1, 32) * 1e-40
    x[4, :2] = torch.tensor([spec.qmax, -spec.qmax])  # a scale of 1
    x[4, 2:6] = (
        torch.tensor([0.25, 0.75, -1.25, -0.0]) if spec is MXFP4 else torch.tensor([17.0, 19.0, -(2.0**-10), -0.0])
    )
    x[5, :1] = spec.qmax * (1 + 2.0**-20)  # a scale of 2
    x[6, 0], x[6, 1] = 2e38, 1e-38
    for fake in (fake_quantize_tokens, kernels.fake_quantize_tokens):
        values = fake(x, spec)
        assert values[[1, 2]].isnan().all() and not values[[0, 3]].any()
        expected = [0, 1, -1, 0] if spec is MXFP4 else [16, 20, 0, 0]
        assert values[4, :6].tolist() == [spec.qmax, -spec.qmax, *expected] and values[4, 5].signbit()
        assert values[5, 0] == spec.qmax
        assert values[6, 0].isfinite() and values[6, 1] == 0
    inside = tokens_inside(x, spec)
    assert not inside[[1, 2]].any() and inside[[0, 3, 4, 5, 6]].all()
    scale = quantize_tokens(x, spec)[1].flatten()
    assert scale[[0, 3, 4, 5]].tolist() == [1, 1, 1, 2] and scale[[1, 2]].isnan().all()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_are_the_reference(spec, dtype, seed):
    """Bit for bit in every dtype and layout, codes, scales, values and gradients."""
    for columns in (32, 96, 2080):
        x = (torch.randn(2, 5, columns) * 3).to(dtype)
        x = torch.cat([x, x], dim=-1)[..., ::2] if columns > 32 else x
        if columns == 96:
            x[0, 1, 7], x[1, 2, 40] = torch.nan, torch.inf
        grad = torch.randn_like(x)
        for ours, reference in zip(kernels.quantize_tokens(x, spec), quantize_tokens(x, spec), strict=True):
            assert torch.equal(ours.float().nan_to_num(7.0), reference.float().nan_to_num(7.0))
            assert ours.dtype == reference.dtype and ours.shape == reference.shape
        expected = fake_quantize_tokens(x, spec)
        assert torch.equal(kernels.fake_quantize_tokens(x, spec).nan_to_num(7.0), expected.nan_to_num(7.0))
        masked = fake_quantize_tokens_backward(grad, x, spec)
        assert torch.equal(kernels.fake_quantize_tokens_backward(grad, x, spec), masked)
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(kernels.fake_quantize_tokens(leaf, spec), leaf, grad)
        assert torch.equal(found, masked)
    for shape in ((0, 64), (3, 0, 32)):
        empty = torch.empty(shape, dtype=dtype)
        assert kernels.fake_quantize_tokens(empty, spec).shape == empty.shape
        assert kernels.fake_quantize_tokens_backward(empty, empty, spec).shape == empty.shape


def test_what_a_power_of_two_may_be_of():
    """fp4 in groups of 32 is MX by itself, fp8 where it says so; nothing else is."""
    assert TensorSpec("fp4_e2m1", 4, "group", 32) == TensorSpec("fp4_e2m1", 4, "group", 32, mx=True)
    assert replace(SCHEMES["mxfp4"].weights, dynamic=True).scale_format == "e8m0"
    assert TensorSpec("fp8_e4m3", 8, "group", 32).scale_format == "float32"
    assert TensorSpec("fp8_e4m3", 8, "group", 32, mx=True).scale_format == "e8m0"
    for wrong in (("fp4_e2m1", 4, "group", 16), ("int", 8, "group", 32), ("fp8_e4m3", 8, "group", 128)):
        with pytest.raises(ValueError, match=r"powers of two \(mx\) are of floats in groups of 32"):
            TensorSpec(*wrong, mx=True)
    with pytest.raises(ValueError, match=r"powers of two"):
        TensorSpec("fp8_e4m3", 8, "tensor", mx=True)
