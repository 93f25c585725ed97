"""The definition of the quantisers against an independent oracle, and its gradients against finite differences."""

import math
import random

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from quant import kernels
from quant.reference import (
    absmax_scale,
    asymmetric_grid,
    dequantize,
    effective_scale,
    fake_quant,
    fake_quant_backward,
    inside_range,
    quantize,
)
from quant.scale import Quantizer, Scale
from quant.spec import SCHEMES, Scheme, TensorSpec, get_scheme

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")
NVFP4, MXFP4 = TensorSpec("fp4_e2m1", 4, "group", 16), TensorSpec("fp4_e2m1", 4, "group", 32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = [
    FP8,
    TensorSpec("fp8_e4m3", 8, "channel"),
    TensorSpec("fp8_e4m3", 8, "group", 16),
    TensorSpec("fp8_e4m3", 8, "block", 16),
    NVFP4,
    MXFP4,
    *(TensorSpec("int", bits, "group", 16) for bits in (2, 3, 4, 8)),
    TensorSpec("int", 4, "channel"),
    TensorSpec("int", 8, "tensor"),
    *(TensorSpec("int", bits, "group", 16, narrow=True) for bits in (2, 4, 8)),
    *(TensorSpec("int", bits, "group", 16, symmetric=False) for bits in (2, 4, 8)),
    TensorSpec("int", 8, "channel", symmetric=False),
]
# Every non-negative finite e4m3 value in order: its code is its position.
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
# Every e2m1 value by its code.
E2M1 = torch.tensor([sign * size for sign in (1.0, -1.0) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
# Exponent and mantissa bits: where subnormal numbers end, and 2 to the power of how many spacings fill a power of two.
SMALLEST_EXPONENT = {"fp8_e4m3": -6, "fp4_e2m1": 0}
MANTISSA = {"fp8_e4m3": 3, "fp4_e2m1": 1}
CODES = {"fp8_e4m3": torch.float8_e4m3fn, "fp4_e2m1": torch.uint8, "int": torch.int8}


def round_oracle(v: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Nearest value of the *unbounded* grid, ties to even, by arithmetic in float64 that shares nothing with torch's
    cast.

    e4m3 continued beyond 448 and e2m1 beyond 6 as if their exponents had no end; integers beyond qmin and qmax.
    """
    v = v.astype(np.float64)
    if spec.dtype == "int":
        return np.rint(v)
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(v))), SMALLEST_EXPONENT[spec.dtype])
    spacing = np.exp2(exponent - MANTISSA[spec.dtype])
    return np.rint(v / spacing) * spacing


def values_of(codes: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What codes stand for, fp32."""
    return E2M1[codes.long()] if spec.dtype == "fp4_e2m1" else codes.float()


def per_scale(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The elements of ``x [out, in]`` as ``[*shape, elements]``, by the scale of this shape that they have."""
    if shape == (1,):
        return x.reshape(1, -1)
    return x.reshape(shape[0], x.shape[0] // shape[0], shape[1], -1).transpose(1, 2).flatten(2)


def random_case(spec: TensorSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A tensor in a random shape and stride with a scale that clips some of it, and its zero points if it has any.

    With zero points some rows are of one sign alone, and one is of zeros.
    """
    rows, columns = random.randint(1, 40), 32 * random.randint(1, 6)
    if spec.granularity == "block":
        rows = 16 * random.randint(1, 3)
    x = torch.randn(rows, columns) * torch.exp(torch.randn(rows, 1))
    layout = random.choice(("plain", "transposed", "sliced"))
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "sliced":
        x = torch.cat([x, x], dim=1)[:, :columns]
    x = x.to(dtype)
    if spec.has_zero_points:
        x = x + torch.randint(-3, 4, (rows, 1)).to(dtype)
        x[1:2] = 0
    parts = per_scale(x.float(), spec.scale_shape((rows, columns)))
    clip = torch.empty(parts.shape[:-1]).uniform_(0.3, 1.2)
    clip.view(-1)[0] = 0.3
    if not spec.has_zero_points:
        return x, absmax_scale(parts.abs().amax(-1), spec) * clip, None
    scale, zero = asymmetric_grid(parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0), spec)
    return x, scale * clip, zero


def ends(x: torch.Tensor, zero: torch.Tensor | None, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest value of every element's grid, in steps from 0."""
    shift = torch.zeros(()) if zero is None else expand(zero, x, spec).double()
    return spec.qmin - shift, spec.qmax - shift


def expand(scale: torch.Tensor, x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The scale of every element."""
    if spec.granularity == "tensor":
        return scale.expand(x.shape)
    rows = scale.repeat_interleave(x.shape[0] // scale.shape[0], dim=0)
    return rows.repeat_interleave(x.shape[1] // scale.shape[1], dim=1)


class Surrogate:
    """What the gradients are those of: fp64 fake quant with the rounding errors of (x, scale) held fixed.

    ``s * clamp(v + e, qmin - z, qmax - z)``, where the error e is fixed in codes on an evenly spaced grid, and in units
    of x (e shrinks as s grows) where the spacing follows x: normal numbers of floating-point grids. Rounding is to the
    unbounded grid, so that clamp alone decides what is outside. Beyond the largest number of a floating-point grid it
    is ``s * bound``, and follows x all the same where that is inside: ``s * bound + x - stopgrad(x)``.
    """

    def __init__(self, x, scale, spec, zero=None):
        self.spec, self.ends = spec, ends(x, zero, spec)
        s = expand(scale, x, spec)
        v = x.float() * (1 / s)
        rounded = torch.from_numpy(round_oracle(v.numpy(), spec))
        self.error = rounded - x.double() / s.double()
        self.scale = s.double()
        self.follows_x = torch.zeros_like(v, dtype=torch.bool)
        if spec.dtype != "int":
            self.follows_x = v.abs() >= 2.0 ** SMALLEST_EXPONENT[spec.dtype]
        self.beyond = (v.abs() > spec.qmax) & (spec.dtype != "int")
        self.x, self.inside = x.double(), rounded.abs() <= spec.qmax

    def __call__(self, x, scale):
        s = expand(scale, x, self.spec)
        error = torch.where(self.follows_x, self.error * self.scale / s, self.error)
        values = s * (x / s + error).clamp(*self.ends)
        bound = s * self.spec.qmax * self.x.sign()
        return torch.where(self.beyond, bound + torch.where(self.inside, x - self.x, 0.0), values)


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


def test_the_cast_to_e4m3_rounds_to_nearest_even():
    """Every midpoint between neighbours goes to the even code, and its fp32 neighbours to the nearer one."""
    values = torch.from_numpy(E4M3).float()
    middle = (values[1:] + values[:-1]) / 2  # exact in fp32
    one = torch.ones(1)
    codes = quantize(middle, one, FP8).view(torch.uint8)
    assert (codes % 2 == 0).all()
    above = torch.nextafter(middle, torch.tensor(torch.inf))
    below = torch.nextafter(middle, torch.tensor(0.0))
    assert torch.equal(quantize(above, one, FP8).view(torch.uint8), torch.arange(1, 127, dtype=torch.uint8))
    assert torch.equal(quantize(below, one, FP8).view(torch.uint8), torch.arange(0, 126, dtype=torch.uint8))
    assert torch.equal(quantize(-middle, one, FP8).float(), -quantize(middle, one, FP8).float())


@pytest.mark.parametrize(
    ("spec", "last_inside", "lowest_inside"),
    [
        (FP8, 464.0, -464.0),  # the tie between 448 and what would be 480 goes to 448
        (NVFP4, 7.0, -7.0),  # and that of 6 and 8 to 8, whose code is even
        # Ties go to even: qmax is odd, so qmax + 0.5 leaves the grid; qmin is even, so qmin - 0.5 stays.
        *(
            (TensorSpec("int", bits, "tensor"), 2 ** (bits - 1) - 0.5, -(2 ** (bits - 1)) - 0.5)
            for bits in (2, 3, 4, 8)
        ),
        # Without its smallest code the grid ends alike on both sides.
        *(
            (TensorSpec("int", bits, "tensor", narrow=True), 2 ** (bits - 1) - 0.5, 0.5 - 2 ** (bits - 1))
            for bits in (2, 3, 4, 8)
        ),
    ],
    ids=str,
)
def test_the_edges_of_the_range(spec, last_inside, lowest_inside):
    """Exactly at, just inside and just outside both ends; the gradient is masked alike."""
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    high, low = torch.tensor(last_inside), torch.tensor(lowest_inside)
    v = torch.stack([high, torch.nextafter(high, down), torch.nextafter(high, up)])
    v = torch.cat([v, torch.stack([low, torch.nextafter(low, up), torch.nextafter(low, down)])])
    high_tie, low_tie = spec.dtype == "fp8_e4m3", spec.dtype != "fp4_e2m1" and not spec.narrow
    expected = torch.tensor([high_tie, True, False, low_tie, True, False])
    for scale in (torch.ones(1), torch.full((1,), 0.25)):  # powers of two, so that x * (1/s) is v exactly
        x = v * scale
        assert torch.equal(inside_range(x, scale, spec), expected)
        ends = values_of(quantize(x, scale, spec), spec)
        assert torch.equal(ends, torch.tensor([spec.qmax] * 3 + [spec.qmin] * 3))
        grad, _ = fake_quant_backward(torch.ones(6), x, scale, spec, scale_gradient=True)
        assert torch.equal(grad, expected.float())


@pytest.mark.parametrize("bits", (2, 3, 4, 8))
def test_the_edges_of_a_range_with_a_zero_point(bits):
    """Ties go to the even step from 0 before the zero point is added, so that its parity decides what an end takes."""
    spec = TensorSpec("int", bits, "channel", symmetric=False)
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    for zero in range(int(spec.qmin), int(spec.qmax) + 1):
        lowest, highest = int(spec.qmin) - zero, int(spec.qmax) - zero
        high, low = torch.tensor(highest + 0.5), torch.tensor(lowest - 0.5)
        v = torch.stack([high, torch.nextafter(high, down), torch.nextafter(high, up)])
        v = torch.cat([v, torch.stack([low, torch.nextafter(low, up), torch.nextafter(low, down)])]).view(1, 6)
        expected = [highest % 2 == 0, True, False, lowest % 2 == 0, True, False]
        grid = (torch.ones(1, 1), spec, torch.full((1, 1), float(zero)))
        assert inside_range(v, *grid)[0].tolist() == expected
        assert quantize(v, *grid)[0].tolist() == [spec.qmax] * 3 + [spec.qmin] * 3
        assert fake_quant(v, *grid)[0].tolist() == [highest] * 3 + [lowest] * 3
        grad, scale_grad = fake_quant_backward(torch.ones(1, 6), v, *grid, scale_gradient=True)
        assert grad[0].tolist() == expected
        reached = zip(3 * [highest] + 3 * [lowest], v[0], expected, strict=True)
        terms = [end - x if inside else end for end, x, inside in reached]
        assert scale_grad.item() == pytest.approx(sum(terms).item(), rel=1e-5, abs=1e-5)  # fp32 sums


def test_values_that_are_not_finite_beside_a_zero_point():
    """As on symmetric grids; a zero point that nothing filled shows as NaN."""
    spec = TensorSpec("int", 4, "channel", symmetric=False)
    x, scale, zero = (
        torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.3]]),
        torch.full((1, 1), 0.25),
        torch.tensor([[5.0]]),
    )
    values = fake_quant(x, scale, spec, zero)
    assert values[0, 0].isnan() and values[0, 1:].tolist() == [0.5, -3.25, 0.25]
    assert quantize(x, scale, spec, zero)[0].tolist() == [0, 7, -8, 6]
    assert inside_range(x, scale, spec, zero)[0].tolist() == [False, False, False, True]
    grad_x, grad_scale = fake_quant_backward(torch.ones(1, 4), x, scale, spec, zero, scale_gradient=True)
    assert grad_x[0].tolist() == [0, 0, 0, 1] and grad_scale.item() == pytest.approx(2 - 13 + 1 - 1.2, rel=1e-6)
    assert fake_quant(x, scale, spec, torch.full((1, 1), torch.nan)).isnan().all()


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


@pytest.mark.parametrize("spec", [FP8, MXFP4, TensorSpec("int", 4, "group", 4)], ids=str)
def test_values_that_are_not_finite(spec):
    """NaN stays NaN, infinities clip; none has a gradient, and the scale's gradient stays finite."""
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.3]])
    scale = torch.full((1, 1), 0.25)
    values = fake_quant(x, scale, spec)
    assert values[0, 0].isnan()
    assert values[0, 1:3].tolist() == [spec.qmax * 0.25, spec.qmin * 0.25]
    assert inside_range(x, scale, spec).tolist() == [[False, False, False, True]]
    if spec.dtype == "fp8_e4m3":
        assert quantize(x, scale, spec)[0, 0].isnan()
    else:
        expected_codes = [0, 7, -8, 1] if spec.dtype == "int" else [0, 7, 8 + 7, 2]
        assert quantize(x, scale, spec)[0].tolist() == expected_codes
    grad = torch.tensor([[2.0, 3.0, 5.0, 7.0]])
    grad_x, grad_scale = fake_quant_backward(grad, x, scale, spec, scale_gradient=True)
    assert grad_x.tolist() == [[0, 0, 0, 7]]
    v = x[0, 3].item() * 4
    # 1.2 is a normal number of the floating-point grids, whose error does not depend on the scale.
    rounding = quantize(x, scale, spec).float()[0, 3].item() - v if spec.dtype == "int" else 0
    expected = 3 * spec.qmax + 5 * spec.qmin + 7 * rounding
    assert grad_scale.item() == pytest.approx(expected, rel=1e-6)  # fp32 sum of three terms


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
        inwards = torch.where(v > sum(ends(x, zero, spec)) / 2, -1.0, 1.0)

        # Steps of 1e-7 and 1e-9 codes: no element outside is carried back in.
        step = 1e-7 * expand(scale64, x, spec) * inwards
        by_x = (surrogate(x64 + step, scale64) - surrogate(x64, scale64)) / step * grad
        scale_step = 1e-9 * scale64
        up, down = (sign * (surrogate(x64, scale64 + sign * scale_step) - surrogate(x64, scale64)) for sign in (1, -1))
        change = torch.where(x64.sign() == inwards, down, up) * grad
        by_scale = _sum_per_scale(change, scale) / scale_step
        size = _sum_per_scale((grad.double() * (1 + v.double().abs())).abs(), scale)

        grad_x, grad_scale = fake_quant_backward(grad, x, scale, spec, zero, scale_gradient=True)
        # fp64 rounding of x (1e-16 times up to 1e3 codes) over a step of 1e-7 codes is 1e-6.
        torch.testing.assert_close(grad_x.double(), by_x, rtol=1e-5, atol=1e-5)
        assert grad_scale.dtype == torch.float32 and grad_scale.shape == scale.shape
        # fp32 rounding of v and of the sum, and fp64 rounding over a step of 1e-9, both about 1e-7 of the magnitudes.
        assert ((grad_scale.double() - by_scale).abs() <= 2e-6 * size).all()
        without, none = fake_quant_backward(grad, x, scale, spec, zero, scale_gradient=False)
        assert none is None and torch.equal(without, grad_x)


def _sum_per_scale(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return per_scale(values, tuple(scale.shape)).sum(-1)


@pytest.mark.parametrize(
    ("groups", "most"),
    [
        (1, 1.06),  # 1.18 with the gradient of integers
        # In groups of 32 luck decides where the best scale is. This is what absmax scales have; if elements between 6
        # and 7 had the gradient of normal numbers, the largest of every group would settle at 7, with 1.6.
        (1024, 1.35),
    ],
)
def test_learning_a_scale_of_e2m1(groups, most, seed):
    """Minimising the squared error from half and from twice the best scale ends near the error of the best.

    Not rounded to a format: the gradient is that of unrounded scales. Test_function does the same for other grids.
    """
    x = torch.randn(groups, 32 * 1024 // groups)
    absmax = x.abs().amax(1, keepdim=True)

    def errors(scale: torch.Tensor) -> torch.Tensor:
        return (fake_quant(x, scale, NVFP4) - x).square().sum(1, keepdim=True)

    candidates = torch.linspace(0.3, 1.05, 100).view(-1, 1, 1) * absmax / 6
    best = candidates.gather(0, torch.stack([errors(c) for c in candidates]).argmin(0, keepdim=True))[0]
    for beginning in (0.5, 2.0):
        scale = beginning * best
        for step in range(120):
            grad = fake_quant(x, scale, NVFP4) - x
            _, gradient = fake_quant_backward(grad, x, scale, NVFP4, scale_gradient=True)
            scale = scale * torch.exp(-0.05 * (1 - step / 120) * gradient.sign())
        assert errors(scale).sum() < most * errors(best).sum()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gradients_in_low_precision(dtype, seed):
    """The gradient of x is the masked gradient itself, in its dtype; that of the scale is computed in fp32."""
    x, scale, _ = random_case(FP8, dtype)
    grad = torch.randn_like(x)
    grad_x, grad_scale = fake_quant_backward(grad, x, scale, FP8, scale_gradient=True)
    assert grad_x.dtype == dtype
    assert torch.equal(grad_x, grad * inside_range(x, scale, FP8))
    _, exact = fake_quant_backward(grad.float(), x.float(), scale, FP8, scale_gradient=True)
    # Same fp32 terms; only the order of a sum of up to 8,000 of them may differ.
    torch.testing.assert_close(grad_scale, exact, rtol=1e-5, atol=1e-3)


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


# ---- the formats of 4-bit floats, as compressed-tensors has them


def test_e2m1_rounds_as_compressed_tensors_does(seed):
    """Random values, every tie, and what is beside it."""
    positive = E2M1[:8]
    ties = torch.cat([(positive[1:] + positive[:-1]) / 2, torch.tensor([7.0])])
    beside = [torch.nextafter(ties, torch.tensor(side)) for side in (0.0, torch.inf)]
    v = torch.cat([3 * torch.randn(100_000), ties, *beside, positive])
    v = torch.cat([v, -v]).view(1, -1)
    assert torch.equal(fake_quant(v, torch.ones(1, 1), NVFP4), cast_to_fp4(v.clone()))


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


def test_an_empty_tensor():
    """An expert that no token chose."""
    x = torch.empty(0, 16)
    codes = quantize(x, torch.ones(1), FP8)
    assert codes.shape == (0, 16)
    assert dequantize(codes, torch.ones(1), FP8, torch.bfloat16).shape == (0, 16)
    grad_x, grad_scale = fake_quant_backward(x, x, torch.ones(1), FP8, scale_gradient=True)
    assert grad_x.shape == (0, 16) and grad_scale.tolist() == [0.0]


def test_specs_and_schemes_refuse_what_they_cannot_be():
    """Errors say what was expected."""
    with pytest.raises(ValueError, match="8 bits, got bits=4"):
        TensorSpec("fp8_e4m3", 4, "tensor")
    with pytest.raises(ValueError, match="2 to 8 bits, got bits=9"):
        TensorSpec("int", 9, "tensor")
    for granularity, group_size in (("group", None), ("tensor", 32)):
        with pytest.raises(ValueError, match="group_size"):
            TensorSpec("int", 4, granularity, group_size)
    for granularity, dtype in (("tensor", "int"), ("channel", "fp8_e4m3"), ("block", "int")):
        size = 16 if granularity == "block" else None
        with pytest.raises(ValueError, match="only int codes per channel or group"):
            TensorSpec(dtype, 8, granularity, size, symmetric=False)
    for spec in (
        {"dtype": "fp8_e4m3", "bits": 8, "granularity": "tensor"},
        {"dtype": "int", "bits": 4, "granularity": "channel", "symmetric": False},
        {"dtype": "int", "bits": 8, "granularity": "token", "dynamic": True},
    ):
        with pytest.raises(ValueError, match="only symmetric int weights have a narrow grid"):
            TensorSpec(**spec, narrow=True)
    with pytest.raises(ValueError, match="readers quantise inputs to all codes"):
        Scheme("bad", FP8, TensorSpec("int", 8, "tensor", narrow=True))
    with pytest.raises(ValueError, match="in_features 48 is not divisible by group_size 32"):
        get_scheme("w4a16_g32").weights.scale_shape((8, 48))
    with pytest.raises(ValueError, match="w4a16_g32") as error:
        get_scheme("w4a16")
    assert all(name in str(error.value) for name in SCHEMES)
    with pytest.raises(ValueError, match="a stored scale of inputs is per tensor, of 8 bits"):
        Scheme("bad", FP8, TensorSpec("int", 4, "tensor"))
