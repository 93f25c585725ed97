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
        by_scale, size = (per_scale(one, tuple(scale.shape)).sum(-1) for one in (change, size))
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


def test_e2m1_rounds_as_compressed_tensors_does(seed):
    """Random values, every tie, and what is beside it."""
    positive = E2M1[:8]
    ties = torch.cat([(positive[1:] + positive[:-1]) / 2, torch.tensor([7.0])])
    beside = [torch.nextafter(ties, torch.tensor(side)) for side in (0.0, torch.inf)]
    v = torch.cat([3 * torch.randn(100_000), ties, *beside, positive])
    v = torch.cat([v, -v]).view(1, -1)
    assert torch.equal(fake_quant(v, torch.ones(1, 1), NVFP4), cast_to_fp4(v.clone()))
