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

INT4 = TensorSpec("int", 4, "group", 16)


def powers_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The nearest in the logarithm, one by one: the fraction of frexp against the square root of a half, squared."""
    parts = [math.frexp(value) for value in scale.tolist()]  # value = fraction * 2^exponent, fraction in [0.5, 1)
    return torch.tensor([2.0 ** (exponent - (fraction * fraction < 0.5)) for fraction, exponent in parts])


@pytest.mark.parametrize("theta_dtype", (None, *DTYPES))
def test_the_effective_scale(theta_dtype, seed):
    """``s0 * exp(theta)``, rounded to the format it is stored in; the derivative is that of the scale before it."""
    wide, model_dtype = torch.exp(5 * torch.randn(2000)), theta_dtype or torch.bfloat16
    theta = None if theta_dtype is None else (0.3 * torch.randn(2000)).to(theta_dtype).requires_grad_()
    above = torch.tensor([random.uniform(0.01, 100.0)])
    for spec in (INT4, MXFP4, NVFP4):
        s0 = wide if spec != INT4 else torch.rand(2000) + 0.1  # fp16 ends at 65504
        exact = s0 if theta is None else s0 * theta.detach().double().exp().float()  # fp32 exp has its own last bit
        expected = powers_of_two(exact) if spec == MXFP4 else exact.to(model_dtype).float()
        if spec == NVFP4:
            stored = round_oracle((exact * above).clamp(2.0**-9, 448).numpy(), FP8)
            expected = torch.from_numpy(stored).float() / above
        scale = effective_scale(s0, theta, spec, model_dtype, above if spec == NVFP4 else None)
        assert scale.dtype == torch.float32 and torch.equal(scale, expected)
        if theta is not None:
            (derivative,) = torch.autograd.grad(scale.sum(), theta)
            # One rounding to theta's dtype, or of the product in fp32.
            eps = torch.finfo(theta_dtype).eps
            torch.testing.assert_close(derivative, exact.to(theta_dtype), rtol=eps, atol=0)
    for none in (None, torch.zeros(2000, dtype=model_dtype)):
        assert torch.equal(effective_scale(wide, none, FP8, model_dtype), wide)


def test_the_edges_of_scales_of_8_bits():
    """Powers of two stay, the middle between two in the logarithm is no fp32 number, and both formats have ends."""
    exponents = torch.arange(-126.0, 128.0)
    powers = torch.exp2(exponents.double()).float()
    assert torch.equal(effective_scale(powers, None, MXFP4, torch.float32), powers)
    middle = torch.exp2(exponents[:-1].double() + 0.5).float()  # rounded, to one side or the other
    for side, expected in ((0.0, powers[:-1]), (torch.inf, powers[1:])):
        beside = torch.nextafter(middle, torch.tensor(side))
        assert torch.equal(effective_scale(beside, None, MXFP4, torch.float32), expected)
    ends = {0.0: 2.0**-127, 1e-45: 2.0**-127, 2.0**-127: 2.0**-127, 1.4 * 2.0**127: 2.0**127, 1.5 * 2.0**127: 2.0**127}
    below = {0.0: 2.0**-9, 2.0**-10: 2.0**-9, 2.0**-9: 2.0**-9, 448.0: 448.0, 500.0: 448.0}
    for spec, table, above in ((MXFP4, ends, None), (NVFP4, below, torch.tensor([4.0]))):
        factor = 1 if above is None else 4
        s0 = torch.tensor([*table, torch.inf, torch.nan]) / factor
        for found in (
            effective_scale(s0, None, spec, torch.float32, above),
            kernels.effective_scale(Quantizer(Scale(s0, global_=above), spec, torch.float32)),
        ):
            assert (factor * found)[:5].tolist() == list(table.values()) and found[5:].isnan().all()


def test_the_absmax_scale(seed):
    """The largest magnitude lands on the edge of the grid, nothing divides by zero, and NaN stays NaN."""
    absmax, narrow = torch.rand(7, 3) + 1e-3, TensorSpec("int", 4, "group", 16, narrow=True)
    for spec, edge in ((FP8, 448), (NVFP4, 6), (INT4, 7.5), (TensorSpec("int", 2, "group", 16), 1.5), (narrow, 7)):
        assert torch.equal(absmax_scale(absmax, spec), absmax / edge)
    # 1e-38 is a normal fp32 number, but the reciprocal of 1e-38 / 448 overflows.
    for spec in (FP8, NVFP4, MXFP4, TensorSpec("int", 4, "tensor")):
        assert torch.isfinite(1 / absmax_scale(torch.tensor([0.0, 1e-45, 1e-38]), spec)).all()
        assert absmax_scale(torch.zeros(1), spec).item() == 1.0
        assert absmax_scale(torch.tensor([torch.nan]), spec).isnan().all()


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
