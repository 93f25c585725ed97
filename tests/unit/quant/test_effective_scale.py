"""Scales as the reference makes them: of s0 and theta, in the formats they are stored in, of the largest magnitude."""

import math
import random

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from quant import kernels
from quant.reference import absmax_scale, effective_scale, inside_range
from quant.scale import Quantizer, Scale
from quant.spec import TensorSpec
from tests.unit.quant.oracle import DTYPES, FP8, MXFP4, NVFP4, round_oracle


@pytest.mark.parametrize("model_dtype", DTYPES)
def test_the_effective_scale(model_dtype, seed):
    """s0 where theta is 0 or none; rounded to the model's dtype for integers, which the derivative ignores."""
    s0 = torch.rand(5, 3) + 0.1
    theta = torch.zeros(5, 3, dtype=model_dtype)
    integer = TensorSpec("int", 4, "group", 16)
    for scale in (effective_scale(s0, None, FP8, model_dtype), effective_scale(s0, theta, FP8, model_dtype)):
        assert scale.dtype == torch.float32 and torch.equal(scale, s0)
    theta = (0.3 * torch.randn(5, 3)).to(model_dtype).requires_grad_()
    exact = s0 * theta.detach().double().exp().float()  # each fp32 exponential has its own last bit
    scale = effective_scale(s0, theta, integer, model_dtype)
    assert scale.dtype == torch.float32 and torch.equal(scale, exact.to(model_dtype).float())
    (derivative,) = torch.autograd.grad(scale.sum(), theta)
    torch.testing.assert_close(derivative, exact.to(model_dtype), rtol=torch.finfo(model_dtype).eps, atol=0)


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The nearest in the logarithm, one by one: the fraction of frexp against the square root of a half, squared."""
    parts = [math.frexp(value) for value in scale.tolist()]  # value = fraction * 2^exponent, fraction in [0.5, 1)
    return torch.tensor([2.0 ** (exponent - (fraction * fraction < 0.5)) for fraction, exponent in parts])


@pytest.mark.parametrize("theta_dtype", (None, *DTYPES))
def test_effective_scales_of_8_bits(theta_dtype, seed):
    """e8m0 and e4m3, of scales in their range; the derivative is that of the scale before rounding."""
    s0 = torch.exp(5 * torch.randn(2000))
    theta = None if theta_dtype is None else (0.3 * torch.randn(2000)).to(theta_dtype).requires_grad_()
    unrounded = s0 if theta is None else s0 * theta.detach().double().exp().float()
    scale = effective_scale(s0, theta, MXFP4, torch.bfloat16)
    assert scale.dtype == torch.float32 and torch.equal(scale, powers_of_two(unrounded))

    global_scale = torch.tensor([random.uniform(0.01, 100.0)])
    product = (unrounded * global_scale).clamp(2.0**-9, 448).numpy()
    stored = torch.from_numpy(round_oracle(product, FP8)).float()
    nvfp4 = effective_scale(s0, theta, NVFP4, torch.bfloat16, global_scale)
    assert torch.equal(nvfp4, stored / global_scale)
    if theta is None:
        return
    for rounded in (scale, nvfp4):
        (derivative,) = torch.autograd.grad(rounded.sum(), theta)
        # One rounding to theta's dtype, or of the product in fp32.
        torch.testing.assert_close(derivative, unrounded.to(theta_dtype), rtol=torch.finfo(theta_dtype).eps, atol=0)


def test_the_edges_of_scales_of_8_bits():
    """Powers of two stay, the middle between two in the logarithm is no fp32 number, and both formats have ends."""
    exponents = torch.arange(-126.0, 128.0)
    powers = torch.exp2(exponents.double()).float()
    assert torch.equal(effective_scale(powers, None, MXFP4, torch.float32), powers)
    middle = torch.exp2(exponents[:-1].double() + 0.5).float()  # rounded, to one side or the other
    for side, expected in ((0.0, powers[:-1]), (torch.inf, powers[1:])):
        beside = torch.nextafter(middle, torch.tensor(side))
        assert torch.equal(effective_scale(beside, None, MXFP4, torch.float32), expected)
    ends = torch.tensor([0.0, 1e-45, 2.0**-127, 1.4 * 2.0**127, 1.5 * 2.0**127, torch.inf, torch.nan])
    for found in (
        effective_scale(ends, None, MXFP4, torch.float32),
        kernels.effective_scale(Quantizer(Scale(ends), MXFP4, torch.float32)),
    ):
        assert found[:5].tolist() == [2.0**-127] * 3 + [2.0**127] * 2 and found[5:].isnan().all()
    ends = torch.tensor([0.0, 2.0**-10, 2.0**-9, 448.0, 500.0, torch.inf, torch.nan])
    for found in (
        effective_scale(ends / 4, None, NVFP4, torch.float32, torch.tensor([4.0])),
        kernels.effective_scale(Quantizer(Scale(ends / 4, global_=torch.tensor([4.0])), NVFP4, torch.float32)),
    ):
        assert (4 * found)[:5].tolist() == [2.0**-9] * 3 + [448.0] * 2 and found[5:].isnan().all()


def test_the_absmax_scale(seed):
    """The largest magnitude lands on the edge of the grid, and nothing divides by zero."""
    absmax = torch.rand(7, 3) + 1e-3
    assert torch.equal(absmax_scale(absmax, FP8), absmax / 448)
    assert torch.equal(absmax_scale(absmax, NVFP4), absmax / 6)
    assert torch.equal(absmax_scale(absmax, TensorSpec("int", 4, "group", 16)), absmax / 7.5)
    assert torch.equal(absmax_scale(absmax, TensorSpec("int", 2, "group", 16)), absmax / 1.5)
    assert torch.equal(absmax_scale(absmax, TensorSpec("int", 4, "group", 16, narrow=True)), absmax / 7)
    # 1e-38 is a normal fp32 number, but the reciprocal of 1e-38 / 448 overflows.
    for spec in (FP8, NVFP4, MXFP4, TensorSpec("int", 4, "tensor")):
        for absmax in (0.0, 1e-45, 1e-38):
            assert torch.isfinite(1 / absmax_scale(torch.tensor([absmax]), spec)).all()
        assert absmax_scale(torch.zeros(1), spec).item() == 1.0
        assert absmax_scale(torch.tensor([torch.nan]), spec).isnan().all(), (
            "a NaN weight must not get a scale in silence"
        )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_power_of_two_scales_are_those_of_compressed_tensors(dtype, seed):
    """absmax / scale in [3.5, 7), so that nothing is clipped; rounding such a scale again changes nothing."""
    absmax = torch.exp(10 * torch.randn(10_000)).to(dtype)
    edges = 1.75 * torch.exp2(torch.arange(-20.0, 20.0)).to(dtype)
    absmax = torch.cat([absmax, edges, *(torch.nextafter(edges, torch.tensor(to, dtype=dtype)) for to in (0.0, 9e9))])
    scale = absmax_scale(absmax, MXFP4)
    assert torch.equal(scale, torch.exp2(generate_mx_scales(absmax).float() - 127))
    assert torch.equal(effective_scale(scale, None, MXFP4, dtype), scale)
    ratio = absmax.float() / scale
    assert ((ratio >= 3.5) & (ratio < 7)).all()
    assert inside_range(absmax.view(-1, 1), scale.view(-1, 1), MXFP4).all()


def test_scales_with_a_global_scale_are_those_of_compressed_tensors(seed):
    """absmax / 6 times the global scale, as e4m3."""
    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    absmax = torch.exp(torch.randn(1000, 1))
    global_scale = generate_gparam(-absmax.amax(), absmax.amax())
    stored, _ = calculate_qparams(-absmax, absmax, args, global_scale=global_scale)
    ours = effective_scale(absmax_scale(absmax, NVFP4), None, NVFP4, torch.float32, global_scale)
    assert torch.equal(ours, stored.float() / global_scale)
