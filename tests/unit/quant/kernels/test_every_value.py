"""The CPU kernels on every value: of 16-bit dtypes, of codes, at the boundaries of each grid, and the exponential."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.formats import packing
from quant.kernels import eager
from tests.unit.quant.kernels.cases import DTYPES, GRIDS, Case, every_value, special_values
from tests.unit.quant.kernels.comparing import OPS, assert_same, check_same, check_theta_gradient, check_tokens

pytestmark = pytest.mark.usefixtures("compiled")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code
ONE = torch.ones(1)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_value_of_a_16_bit_dtype(dtype):
    """Under a few scales of every grid; and as a token beside a few others that make its range."""
    x = every_value(dtype)
    grad = torch.full_like(x, -3.0)
    for grid in GRIDS:
        for scale in (1.0, 0.25, 0.0123, 3.3e-5, 700.0):
            arguments, what = (torch.tensor([scale]), None, grid, torch.float32), f"grid {grid}, scale {scale}"
            check_same("quantize", x, *arguments, True, what=what)
            check_same("fake_quantize", x, *arguments, what=what)
            check_same("fake_quantize_backward", grad, x, *arguments, 1.0, False, what=what)
    for others in ((), (1.0,), (-0.7, 2.0), (1e-3, -1e3)):
        tokens = torch.stack([x, *(torch.full_like(x, other) for other in others)], dim=1)
        check_tokens(tokens, torch.ones_like(tokens), str(others))


def test_every_code(seed):
    """All 256 of them, under random scales, to every dtype."""
    every = torch.arange(256, dtype=torch.uint8)
    code_dtypes = (torch.float8_e4m3fn, torch.int8, torch.uint8)
    for code_dtype, dtype, scale_dtype in itertools.product(code_dtypes, DTYPES, DTYPES):
        s0, codes = torch.exp(3 * torch.randn(40)), every.view(code_dtype).expand(40, 256)
        (ours,) = check_same("dequantize", codes, s0, None, scale_dtype, dtype)
        held = s0.clamp(2.0**-24, 65504.0) if scale_dtype == torch.float16 else s0  # neither 0 nor infinite
        values = codes.float()  # what a code is, torch says
        if code_dtype == torch.uint8:
            values = torch.tensor(E2M1 + [-value for value in E2M1])[every.long() % 16].expand(40, 256)
        assert_same(ours, (values * held.to(scale_dtype).float()[:, None]).to(dtype))


def neighbors(v: Tensor) -> Tensor:
    """``v`` and the floats next to it, two to each side."""
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    above, below = torch.nextafter(v, up), torch.nextafter(v, down)
    return torch.stack([torch.nextafter(below, down), below, v, above, torch.nextafter(above, up)])


@pytest.mark.parametrize("grid", (0, 1))
def test_every_boundary_of_floating_point_grids(grid):
    """The fp32 numbers around each tie between neighbors, and around each value itself, go where they must."""
    if grid == 0:
        # Beyond the end of the grid comes 480, the tie with which goes to the even 448.
        values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values, sign_bit, last_inside = torch.cat([values, torch.tensor([480])]), 0x80, 464.0
    else:
        values, sign_bit, last_inside = torch.tensor([*E2M1, 8.0]), 8, math.nextafter(7.0, 0.0)  # 8 is even
    last = len(values) - 2
    ties = neighbors((values[1:] + values[:-1]) / 2)  # exact in fp32
    below = torch.arange(last + 1)
    expected = torch.stack([below, below, below + below % 2, below + 1, below + 1]).clamp(max=last)
    one = (ONE, None, grid, torch.float32)
    for sign, bit in ((1, 0), (-1, sign_bit)):
        codes, mask = check_same("quantize", sign * ties, *one, True)
        assert torch.equal(codes.view(torch.uint8), (expected | bit).to(torch.uint8))
        assert torch.equal(packing.unpack_bits(mask, ties.shape), ties.double() <= last_inside)
        around = sign * torch.cat([ties.flatten(), neighbors(values[1:-1]).flatten()])
        check_same("fake_quantize", around, *one)
        case = Case(around, torch.ones_like(around), ONE, torch.zeros(1), grid, torch.float32, 1.0)
        given = (case.grad, around, *case.scales, grid, torch.float32, 1.0, True)
        grad_x, grad_theta = OPS.fake_quantize_backward(*given)
        assert torch.equal(grad_x, (around.abs().double() <= last_inside).float())
        assert torch.equal(grad_x, eager.fake_quantize_backward(*given)[0])
        check_theta_gradient(case, grad_theta)


@pytest.mark.parametrize("bits", (*range(2, 9), -2, -3, -4, -8))
def test_every_boundary_of_integers(bits):
    """Ties go to the even step from 0, also at the ends, where they decide what is inside; before the zero point is
    added, so that its parity decides what an end takes. Negative bits: a narrow grid."""
    low, high = -(2 ** (abs(bits) - 1)) + (bits < 0), 2 ** (abs(bits) - 1) - 1
    for shift in (0,) if bits < 0 else range(low, high + 1, 1 if bits < 5 else 37):
        zero = None if bits < 0 else torch.tensor([float(shift)])
        ties = neighbors(torch.arange(low - shift - 2, high - shift + 2) + 0.5)
        codes, mask = check_same("quantize", ties, ONE, None, bits, torch.float32, True, zero)
        reached = torch.from_numpy(np.rint(ties.double().numpy())) + shift
        inside = (reached >= low) & (reached <= high)
        assert torch.equal(codes.double(), reached.clamp(low, high))
        assert torch.equal(packing.unpack_bits(mask, ties.shape), inside)
        (values,) = check_same("fake_quantize", ties, ONE, None, bits, torch.float32, None, zero)
        assert torch.equal(values.double(), reached.clamp(low, high) - shift)
        case = Case(ties, torch.ones_like(ties), ONE, torch.zeros(1), bits, torch.float32, 1.0, zero)
        given = (case.grad, ties, *case.scales, bits, torch.float32, 1.0, True, zero)
        grad_x, grad_theta = OPS.fake_quantize_backward(*given)
        assert torch.equal(grad_x, inside.float()) and torch.equal(grad_x, eager.fake_quantize_backward(*given)[0])
        check_theta_gradient(case, grad_theta)


def test_no_scale_of_fp16_is_0_or_infinite(seed):
    """2^-24 and 65504 are the ends, whichever way a scale came there, and signs stay; NaN and infinities are NaN."""
    ends = [1e-12, 2.0**-26, 2.0**-25, 2.9e-8, 2.0**-24, 9e-8, 1e-6, 2.0**-14, 1.0, 65504.0, 65519.0, 65520.0, 1e9]
    expected = torch.tensor(ends).clamp(2.0**-24, 65504).half().float()
    s0 = torch.tensor([*ends, *(-end for end in ends), math.nan, math.inf, -math.inf])
    (found,) = check_same("effective_scale", s0, None, torch.float16)
    assert_same(found, torch.cat([expected, -expected, torch.full((3,), math.nan)]))
    x = special_values(torch.randn(len(s0), 32), 1e-7)
    theta = torch.where(torch.rand(len(s0)) < 0.5, -200.0, 0.3)  # e^-200 is 0 in fp32
    for dtype, its_theta in itertools.product(DTYPES, (None, theta)):
        (ours,) = check_same("fake_quantize", x.to(dtype), s0, its_theta, 4, torch.float16)
        assert torch.equal(ours[: 2 * len(ends)].isnan(), x.to(dtype)[: 2 * len(ends)].isnan())


def exponentials(theta: Tensor) -> Tensor:
    """The kernel's fp32 ``exp(theta)``, which makes a scale of theta: of a code 1 with s0 = 1."""
    ones = torch.ones(theta.numel(), dtype=torch.int8)
    return OPS.dequantize(ones, torch.ones(theta.numel()), theta, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential(dtype, seed):
    """The correctly rounded fp32 number: for every 16-bit theta, and for a million fp32 ones around 0 and beyond.

    Where e^theta lies within 2^-50 of itself from a tie between two fp32 numbers, either may come out: fp64 is not
    exact. One in some 2^26 random arguments does.
    """
    theta = torch.cat([scale * torch.randn(250_000) for scale in (0.01, 1.0, 20.0, 80.0)])
    theta = theta if dtype == torch.float32 else every_value(dtype)
    ours, exact = exponentials(theta), theta.double().exp()
    either = torch.stack([(exact * (1 + side * 2.0**-50)).float() for side in (-1, 1)])
    wrong = ~((ours == either).any(0) | (ours.isnan() & theta.isnan()))
    assert not wrong.any(), f"{wrong.sum()}, such as exp({theta[wrong][0]}) = {ours[wrong][0]}"
    assert (ours != exact.float()).logical_and(~theta.isnan()).sum() <= 2  # expected: 1e6 / 2^26


def test_the_exponential_of_special_values():
    """1 exactly at 0, the limits of fp32, what is not finite."""
    up, down = np.float32(np.inf), np.float32(-np.inf)
    largest, smallest = np.float32(88.72283), np.float32(-103.97208)  # ln of 2^128 and of 2^-150, rounded down
    expected = {0.0: 1.0, 1e-45: 1.0, largest: np.exp(np.float64(largest)), np.nextafter(largest, up): math.inf}
    expected |= {np.nextafter(smallest, down): 0.0, np.nextafter(smallest, up): 2.0**-149, math.nan: math.nan}
    expected |= dict.fromkeys((104.0, 199.9, 201.0, 1e9, 3e38, math.inf), math.inf)
    expected |= dict.fromkeys((-104.0, -199.9, -201.0, -1e9, -3e38, -math.inf), 0.0)
    expected |= {88.0: np.exp(88.0), -88.0: np.exp(-88.0)}
    theta, exact = (torch.tensor([float(one) for one in part]) for part in (expected.keys(), expected.values()))
    assert_same(exponentials(theta), exact)
    assert exponentials(torch.tensor([-0.0])).item() == 1
