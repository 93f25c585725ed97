"""The definition of the quantizers against independent oracles, and its gradients against finite differences."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from quant import kernels, reference
from quant.reference import (
    absmax_scale,
    asymmetric_grid,
    dequantize,
    effective_scale,
    fake_quant,
    fake_quant_backward,
    fake_quantize_tokens,
    fake_quantize_tokens_backward,
    inside_range,
    quantize,
    quantize_tokens,
)
from quant.scale import Quantizer, Scale
from quant.spec import TensorSpec
from tests.unit.quant.oracle import (
    DTYPES,
    FP8,
    MXFP4,
    NVFP4,
    SPECS,
    Surrogate,
    ends,
    expand,
    per_scale,
    random_case,
    round_oracle,
    values_of,
)

CODES = {"fp8_e4m3": torch.float8_e4m3fn, "fp4_e2m1": torch.uint8, "int": torch.int8}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_and_values_against_the_oracle(spec, dtype, seed):
    """Exact: codes, their product with the scale, and which elements are inside, for any shape and stride."""
    for _ in range(10):
        x, scale, zero = random_case(spec, dtype)
        scales, (lowest, highest) = expand(scale, x, spec), ends(x, zero, spec)
        v = (x.float() * (1 / scales)).numpy()  # the definition's fp32 arithmetic; the oracle takes over from here
        rounded = round_oracle(v, spec)
        codes = quantize(x, scale, spec, zero)
        assert codes.shape == x.shape
        assert codes.dtype == CODES[spec.dtype]
        steps = values_of(codes, spec) - (0 if zero is None else expand(zero, x, spec))
        np.testing.assert_array_equal(steps.double().numpy(), rounded.clip(lowest.numpy(), highest.numpy()))
        expected = (steps * scales).to(dtype)
        for values in (dequantize(codes, scale, spec, dtype, zero), fake_quant(x, scale, spec, zero)):
            assert values.dtype == dtype and values.shape == x.shape
            assert torch.equal(values, expected)
        inside = (rounded >= lowest.numpy()) & (rounded <= highest.numpy())
        assert not inside.all(), "the case must clip something"
        np.testing.assert_array_equal(inside_range(x, scale, spec, zero).numpy(), inside)


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_asymmetric_grids_are_those_of_compressed_tensors(bits, seed):
    """Scales exactly. Zero points but for those whose fraction is a half to within fp32 rounding of 255 steps: it
    divides by the scale, and rounds after the subtraction. Some rows are of one sign; 0 belongs to their range too."""
    spec = TensorSpec("int", bits, "channel", symmetric=False)
    args = QuantizationArgs(num_bits=bits, type="int", strategy="channel", symmetric=False)
    x = torch.randn(3000, 24) * torch.exp(3 * torch.randn(3000, 1)) + torch.randint(-4, 5, (3000, 1))
    lowest, highest = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    scale, zero = asymmetric_grid(lowest, highest, spec)
    theirs, their_zero = calculate_qparams(x.amin(1), x.amax(1), args)
    assert torch.equal(scale, theirs)
    exact = lowest.double() / scale.double()
    tie = (exact - exact.floor() - 0.5).abs() < 1e-4
    assert torch.equal(zero[~tie], their_zero[~tie].float()) and tie.float().mean() < 0.1
    assert ((zero[tie] - their_zero[tie].float()).abs() <= 1).all()
    assert (zero[lowest == 0] == spec.qmin).all() and (zero[highest == 0] == spec.qmax).all()
    reached = fake_quant(x, scale.view(-1, 1), spec, zero.view(-1, 1))
    # An end lies half a step beyond where rounding the zero point puts it, at most, and x half a step from a code.
    assert ((reached - x).abs() <= 1.001 * scale.view(-1, 1)).all()
    nothing = asymmetric_grid(torch.zeros(1), torch.zeros(1), spec)
    assert [one.item() for one in nothing] == [1.0, spec.qmin]


@pytest.mark.parametrize(
    ("spec", "zero", "codes", "values", "terms"),
    [
        # 1.2 is a normal number of the floating-point grids, whose error does not depend on the scale.
        (FP8, None, None, [112.0, -112.0, 0.3125], [0, 448, -448, 0]),
        (MXFP4, None, [0, 7, 15, 2], [1.5, -1.5, 0.25], [0, 6, -6, 0]),
        (TensorSpec("int", 4, "group", 4), None, [0, 7, -8, 1], [1.75, -2.0, 0.25], [0, 7, -8, 1 - 1.2]),
        (
            TensorSpec("int", 4, "channel", symmetric=False),
            5.0,
            [0, 7, -8, 6],
            [0.5, -3.25, 0.25],
            [0, 2, -13, 1 - 1.2],
        ),
    ],
    ids=str,
)
def test_values_that_are_not_finite(spec, zero, codes, values, terms):
    """NaN stays NaN, infinities clip; none has a gradient, and the scale's gradient stays finite."""
    x, grad = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.3]]), torch.tensor([[2.0, 3.0, 5.0, 7.0]])
    grid = (torch.full((1, 1), 0.25), spec, None if zero is None else torch.tensor([[zero]]))
    found = fake_quant(x, *grid)
    assert found[0, 0].isnan() and found[0, 1:].tolist() == values
    assert quantize(x, *grid)[0, 0].isnan() if codes is None else quantize(x, *grid)[0].tolist() == codes
    assert inside_range(x, *grid).tolist() == [[False, False, False, True]]
    grad_x, grad_scale = fake_quant_backward(grad, x, *grid, scale_gradient=True)
    assert grad_x.tolist() == [[0, 0, 0, 7]]
    assert grad_scale.item() == pytest.approx((grad[0] * torch.tensor(terms)).sum().item(), rel=1e-6)
    if zero is not None:  # a zero point that nothing filled shows
        assert fake_quant(x, grid[0], spec, torch.full((1, 1), torch.nan)).isnan().all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_against_finite_differences(spec, seed):
    """Of the fp64 :class:`Surrogate`, for every element and every scale.

    It is piecewise linear in x and s, with its kinks where a value rounds to an end of the grid; an element there is
    inside, so the difference is taken inwards: in x towards the middle of the grid, and in s to where x / s comes
    closer to it (upwards, but for elements between 0 and the middle of a grid that a zero point moves). Differences of
    linear functions are exact: what is left is the rounding of v in fp32 (6e-8, times v up to about 500) in the scale's
    gradient, summed over the elements of one scale.
    """
    for _ in range(5):
        x, scale, zero = random_case(spec, torch.float32)
        grad = torch.randn_like(x)
        v = x.float() * (1 / expand(scale, x, spec))
        x64, scale64 = x.double(), scale.double()
        surrogate = Surrogate(x, scale, spec, zero)

        # Steps of 1e-7 and 1e-9 codes: no element outside is carried back in.
        step = 1e-7 * expand(scale64, x, spec) * surrogate.inwards
        by_x = (surrogate(x64 + step, scale64) - surrogate(x64, scale64)) / step * grad
        scale_step = 1e-9 * scale64
        up, down = (sign * (surrogate(x64, scale64 + sign * scale_step) - surrogate(x64, scale64)) for sign in (1, -1))
        change = torch.where(x64.sign() == surrogate.inwards, down, up) * grad
        size = grad.double().abs() * (1 + v.double().abs())
        by_scale, size = (per_scale(one, spec).sum(-1) for one in (change, size))
        by_scale = by_scale / scale_step

        grad_x, grad_scale = fake_quant_backward(grad, x, scale, spec, zero, scale_gradient=True)
        # fp64 rounding of x (1e-16 times up to 1e3 codes) over a step of 1e-7 codes is 1e-6.
        torch.testing.assert_close(grad_x.double(), by_x, rtol=1e-5, atol=1e-5)
        assert grad_scale.dtype == torch.float32 and grad_scale.shape == scale.shape
        # fp32 rounding of v and of the sum, and fp64 rounding over a step of 1e-9, both about 1e-7 of the magnitudes.
        assert ((grad_scale.double() - by_scale).abs() <= 2e-6 * size).all()
        without, none = fake_quant_backward(grad, x, scale, spec, zero, scale_gradient=False)
        assert none is None and torch.equal(without, grad_x)
        # Of 16 bits: the masked gradient in its dtype; the scale's is computed in fp32.
        for dtype in (torch.bfloat16, torch.float16):
            low, low_grad = x.to(dtype), grad.to(dtype)
            grad_x, grad_scale = fake_quant_backward(low_grad, low, scale, spec, zero, scale_gradient=True)
            assert grad_x.dtype == dtype and torch.equal(grad_x, low_grad * inside_range(low, scale, spec, zero))
            wide = fake_quant_backward(low_grad.float(), low.float(), scale, spec, zero, scale_gradient=True)
            assert torch.equal(grad_scale, wide[1])


# ---- scales

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


# ---- dynamic inputs

ASYMMETRIC = TensorSpec("int", 8, "token", symmetric=False, dynamic=True)
DYNAMIC = [
    ASYMMETRIC,
    TensorSpec("int", 8, "token", dynamic=True),
    TensorSpec("fp8_e4m3", 8, "token", dynamic=True),
    TensorSpec("fp8_e4m3", 8, "group", 16, dynamic=True),
    TensorSpec("int", 8, "group", 16, dynamic=True),
    TensorSpec("int", 4, "token", symmetric=False, dynamic=True),
]


def random_input(dtype: torch.dtype) -> Tensor:
    """Tokens of many sizes, some of one sign, in one to three dimensions and any layout."""
    shape = (*random.choice(((7,), (2, 5), ())), 16 * random.randint(1, 8))
    x = torch.randn(shape) * 10 ** torch.empty(*shape[:-1], 1).uniform_(-4, 3) + random.choice((0.0, 0.0, 3.0, -3.0))
    if random.random() < 0.3:
        x = torch.cat([x, x], dim=-1)[..., ::2]
    return x.to(dtype)


def expected_grid(groups: np.ndarray, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Scale, in fp32, and zero point of each row by the formulas of the definition."""
    low, high = np.minimum(groups.min(1), np.float32(0)), np.maximum(groups.max(1), np.float32(0))
    if spec.symmetric:
        half_range = 448 if spec.dtype == "fp8_e4m3" else (2**spec.bits - 1) / 2
        return np.maximum(-low, high) / np.float32(half_range), np.zeros_like(low)
    scale = (high - low) / np.float32(2**spec.bits - 1)
    zero = spec.qmin - np.rint((low * (np.float32(1) / scale)).astype(np.float64))
    return scale, zero.clip(spec.qmin, spec.qmax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", DYNAMIC, ids=str)
def test_codes_values_and_gradients(spec, dtype, seed):
    """Exact, by the reference and by the kernels: codes, scales, zero points, values and gradients. Those of stored
    scales are tested against an oracle and finite differences."""
    clipped, stored = 0, replace(spec, dynamic=False, granularity="group" if spec.group_size else "channel")
    for _ in range(10):
        x = random_input(dtype)
        grad = torch.randn_like(x)
        rows = x.reshape(-1, x.shape[-1])
        scale, zero = expected_grid(x.float().reshape(-1, spec.group_size or x.shape[-1]).numpy(), spec)
        scale, zero = (torch.from_numpy(one).float().reshape(len(rows), -1) for one in (scale, zero))
        grid = (scale, stored, None if spec.symmetric else zero)
        masked, _ = reference.fake_quant_backward(grad.view_as(rows), rows, *grid, scale_gradient=False)
        clipped += int((masked == 0).sum())
        # One scale per token, or one for every group of it.
        scale_shape = (*x.shape[:-1], x.shape[-1] // spec.group_size if spec.group_size else 1)
        codes, its_scale, zero_point = quantize_tokens(x, spec)
        assert its_scale.dtype == torch.float32 and torch.equal(its_scale, scale.reshape(scale_shape))
        assert zero_point.dtype == torch.int8 and torch.equal(zero_point.float(), zero.reshape(scale_shape))
        assert codes.dtype == (torch.float8_e4m3fn if spec.dtype == "fp8_e4m3" else torch.int8)
        assert torch.equal(codes.float(), reference.quantize(rows, *grid).float().view(x.shape))
        for module in (reference, kernels):
            assert torch.equal(module.fake_quantize_tokens(x, spec), reference.fake_quant(rows, *grid).view(x.shape))
        assert torch.equal(fake_quantize_tokens_backward(grad, x, spec), masked.view(x.shape))
        grad = grad.contiguous()
        kernels.fake_quantize_tokens_and_mask_(grad, x, spec, values=False)
        assert torch.equal(grad, masked.view(x.shape))
    if spec.symmetric:  # integers have no code for absmax / scale = 127.5, e4m3 has one for 448
        assert (clipped > 0) == (spec.dtype == "int")


def test_a_tie_at_both_ends_clips():
    """-127.5 and 127.5 are rounded apart, to 257 codes: one element of an asymmetric token is outside after all."""
    x = torch.tensor([[-127.5, 0.3, 127.5]])
    codes, scale, zero_point = quantize_tokens(x, ASYMMETRIC)
    assert (codes.tolist(), scale.item(), zero_point.item()) == ([[-128, 0, 127]], 1.0, 0)
    assert fake_quantize_tokens(x, ASYMMETRIC).tolist() == [[-128, 0, 127]]
    assert fake_quantize_tokens_backward(torch.ones(1, 3), x, ASYMMETRIC).tolist() == [[1, 1, 0]]


@pytest.mark.parametrize("spec", DYNAMIC, ids=str)
def test_tokens_without_a_range(spec):
    """Zeros stay zeros under a scale of 1; what is not finite makes NaN of its token or group, and only of that."""
    x = torch.zeros(4, 32)
    x[1:] = torch.linspace(-1, 2, 32)
    x[2, 3], x[3, 4] = torch.nan, torch.inf
    codes, scale, zero_point = quantize_tokens(x, spec)
    assert (scale[0] == 1).all() and torch.equal(codes[0].float(), zero_point[0, 0].float().expand(32))
    size = spec.group_size or 32
    values, grad = fake_quantize_tokens(x, spec), fake_quantize_tokens_backward(torch.ones(4, 32), x, spec)
    assert not values[0].any() and (grad[0] == 1).all()
    assert values[1].isfinite().all()
    for row in (2, 3):
        assert values[row, :size].isnan().all() and values[row, size:].isfinite().all()
        assert scale[row, 0].isnan() and zero_point[row, 0] == 0
        assert not grad[row, :size].any() and (size == 32 or grad[row, size:].any())
        bad = codes[row, :size].float()
        assert bad.isnan().all() if spec.dtype == "fp8_e4m3" else not bad.any()
