"""The definition of the quantizers against an independent oracle, and its gradients against finite differences."""

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

from quant.reference import asymmetric_grid, dequantize, fake_quant, fake_quant_backward, inside_range, quantize
from quant.spec import TensorSpec
from tests.unit.quant.oracle import (
    DTYPES,
    E2M1,
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

# Every non-negative finite e4m3 value in order: its code is its position.
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
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


def test_the_cast_to_e4m3_rounds_to_nearest_even():
    """Every midpoint between neighbors goes to the even code, and its fp32 neighbors to the nearer one."""
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


def test_e2m1_rounds_as_compressed_tensors_does(seed):
    """Random values, every tie, and what is beside it."""
    positive = E2M1[:8]
    ties = torch.cat([(positive[1:] + positive[:-1]) / 2, torch.tensor([7.0])])
    beside = [torch.nextafter(ties, torch.tensor(side)) for side in (0.0, torch.inf)]
    v = torch.cat([3 * torch.randn(100_000), ties, *beside, positive])
    v = torch.cat([v, -v]).view(1, -1)
    assert torch.equal(fake_quant(v, torch.ones(1, 1), NVFP4), cast_to_fp4(v.clone()))


def test_an_empty_tensor():
    """An expert that no token chose."""
    x = torch.empty(0, 16)
    codes = quantize(x, torch.ones(1), FP8)
    assert codes.shape == (0, 16)
    assert dequantize(codes, torch.ones(1), FP8, torch.bfloat16).shape == (0, 16)
    grad_x, grad_scale = fake_quant_backward(x, x, torch.ones(1), FP8, scale_gradient=True)
    assert grad_x.shape == (0, 16) and grad_scale.tolist() == [0.0]
