"""The CPU kernels on every value there is: of 16-bit dtypes, of codes, and around the boundaries of each grid."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.formats import packing
from quant.kernels import eager
from tests.unit.quant.kernels.cases import DTYPES, GRIDS, Case, special_values
from tests.unit.quant.kernels.comparing import OPS, assert_same, check_theta_gradient, check_tokens

pytestmark = pytest.mark.usefixtures("compiled")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_value_of_a_16_bit_dtype(dtype):
    """All 65,536 bit patterns, NaNs and denormals among them, under a few scales of every grid."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    grad = torch.full_like(x, -3.0)
    for grid in GRIDS:
        for scale in (1.0, 0.25, 0.0123, 3.3e-5, 700.0):
            arguments = (torch.tensor([scale]), None, grid, torch.float32)
            what = f"grid {grid}, scale {scale}"
            for ours, theirs in zip(
                OPS.quantize(x, *arguments, True), eager.quantize(x, *arguments, True), strict=True
            ):
                assert_same(ours, theirs, what)
            assert_same(OPS.fake_quantize(x, *arguments), eager.fake_quantize(x, *arguments), what)
            grad_x, _ = OPS.fake_quantize_backward(grad, x, *arguments, 1.0, False)
            assert_same(grad_x, eager.fake_quantize_backward(grad, x, *arguments, 1.0, False)[0], what)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_value_as_a_token(dtype):
    """Each bit pattern beside a few others that make its range."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for others in ((), (1.0,), (-0.7, 2.0), (1e-3, -1e3)):
        tokens = torch.stack([x, *(torch.full_like(x, other) for other in others)], dim=1)
        check_tokens(tokens, torch.ones_like(tokens), str(others))


def test_every_code(seed):
    """All 256 of them, under random scales, to every dtype."""
    every = torch.arange(256, dtype=torch.uint8)
    code_dtypes = (torch.float8_e4m3fn, torch.int8, torch.uint8)
    for code_dtype, dtype, scale_dtype in itertools.product(code_dtypes, DTYPES, DTYPES):
        s0 = torch.exp(3 * torch.randn(40))
        codes = every.view(code_dtype).expand(40, 256)
        ours = OPS.dequantize(codes, s0, None, scale_dtype, dtype)
        assert_same(ours, eager.dequantize(codes, s0, None, scale_dtype, dtype))
        held = s0.clamp(2.0**-24, 65504.0) if scale_dtype == torch.float16 else s0  # neither 0 nor infinite
        stored = held.to(scale_dtype).float()[:, None]
        if code_dtype == torch.uint8:
            values = torch.tensor(E2M1 + [-value for value in E2M1])[every.long() % 16].expand(40, 256)
        else:
            values = codes.float()  # what a code is, torch says
        assert_same(ours, (values * stored).to(dtype))


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
        values = torch.cat(
            [torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float(), torch.tensor([480])]
        )
        sign_bit, last_inside = 0x80, 464.0
    else:
        values = torch.tensor([*E2M1, 8.0])  # and here 8, which is even
        sign_bit, last_inside = 8, math.nextafter(7.0, 0.0)
    last = len(values) - 2
    ties = neighbors((values[1:] + values[:-1]) / 2)  # exact in fp32
    below = torch.arange(last + 1)
    even = below + below % 2
    expected = torch.stack([below, below, even, below + 1, below + 1]).clamp(max=last)
    one = (torch.ones(1), None, grid, torch.float32)
    for sign, bit in ((1, 0), (-1, sign_bit)):
        codes, mask = OPS.quantize(sign * ties, *one, True)
        assert torch.equal(codes.view(torch.uint8), (expected | bit).to(torch.uint8))
        inside = ties.double() <= last_inside
        assert torch.equal(packing.unpack_bits(mask, ties.shape), inside)
        around = sign * torch.cat([ties.flatten(), neighbors(values[1:-1]).flatten()])
        assert_same(OPS.fake_quantize(around, *one), eager.fake_quantize(around, *one))
        case = Case(around, torch.ones_like(around), one[0], torch.zeros(1), grid, torch.float32, 1.0)
        grad_x, grad_theta = OPS.fake_quantize_backward(case.grad, around, *case.scales, grid, torch.float32, 1.0, True)
        assert torch.equal(grad_x, (around.abs().double() <= last_inside).float())
        check_theta_gradient(case, grad_theta)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_boundary_of_integers(bits):
    """Ties go to the even code, also at the ends, where they decide what is inside."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    ties = neighbors(torch.arange(low - 2, high + 2) + 0.5)
    codes, mask = OPS.quantize(ties, torch.ones(1), None, bits, torch.float32, True)
    rounded = torch.from_numpy(np.rint(ties.double().numpy()))
    assert torch.equal(codes.double(), rounded.clamp(low, high))
    assert torch.equal(packing.unpack_bits(mask, ties.shape), (rounded >= low) & (rounded <= high))


def test_no_scale_of_fp16_is_0_or_infinite(seed):
    """2^-24 and 65504 are the ends, whichever way a scale came there, and signs stay; NaN and infinities are NaN."""
    ends = [1e-12, 2.0**-26, 2.0**-25, 2.9e-8, 2.0**-24, 9e-8, 1e-6, 2.0**-14, 1.0, 65504.0, 65519.0, 65520.0, 1e9]
    expected = torch.tensor(ends).clamp(2.0**-24, 65504).half().float()
    s0 = torch.tensor([*ends, *(-end for end in ends), math.nan, math.inf, -math.inf])
    expected = torch.cat([expected, -expected, torch.full((3,), math.nan)])
    assert_same(OPS.effective_scale(s0, None, torch.float16), expected)
    assert_same(eager.effective_scale(s0, None, torch.float16), expected)
    x = special_values(torch.randn(len(s0), 32), 1e-7)
    theta = torch.where(torch.rand(len(s0)) < 0.5, -200.0, 0.3)  # e^-200 is 0 in fp32
    for dtype, its_theta in itertools.product(DTYPES, (None, theta)):
        arguments = (x.to(dtype), s0, its_theta, 4, torch.float16)
        ours = OPS.fake_quantize(*arguments)
        assert_same(ours, eager.fake_quantize(*arguments))
        assert not ours[: 2 * len(ends)].isnan().logical_xor(arguments[0][: 2 * len(ends)].isnan()).any()
