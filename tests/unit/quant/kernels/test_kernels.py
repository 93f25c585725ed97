"""The compiled CPU kernels against the reference: every operator, bit for bit, whatever the shape, stride and value.

Only theta's gradient, a sum, need not equal the reference's: it must equal the sum in the order that kernels.h
documents, bit for bit, and be within fp32 rounding of the exact sum."""

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from quant import SCHEMES, kernels, reference
from quant.formats import packing
from tests.unit.quant.kernels.cases import (
    DTYPES,
    GRIDS,
    POSITIONS,
    SEGMENT,
    Case,
    calls_of_layers,
    calls_with_scales,
    eager,
    every_value,
    random_case,
    random_layout,
    rows_to_sum,
    special_values,
)
from tests.unit.quant.kernels.comparing import (
    OPS,
    TOKEN_GRIDS,
    assert_same,
    check_operators,
    check_same,
    check_sum_of_products,
    check_theta_gradient,
    check_tokens,
    gradients,
    results,
)

pytestmark = pytest.mark.usefixtures("compiled")


def check(case: Case) -> None:
    """All operators on one case, with codes that no quantizer made, too."""
    what, beside = str(case), (case.zero, case.above)
    codes = check_operators(case, partial(check_same, what=what))
    any_codes = random_layout(torch.randint(256, (codes.numel(),), dtype=torch.uint8).view(codes.dtype), codes.shape)
    given = (*case.scales, case.scale_dtype, random.choice(DTYPES), case.theta is not None, None, *beside)
    check_same("dequantize", any_codes, *given, what=what)
    check_tokens(case.x, case.grad, what, random.sample(TOKEN_GRIDS, 3))
    check_gradients(case, (case.grad, case.x, *case.scales, case.grid, case.scale_dtype, case.factor), beside)
    if case.theta is not None:
        check_sum_of_products(case, OPS.sum_products(case.x, case.grad, case.theta, case.factor))


def check_gradients(case: Case, arguments: tuple, beside: tuple) -> None:
    """NaN in theta's gradient shows what is not finite in a weight; nothing else changes in it."""
    for wanted in (False, True) if case.theta is not None else (False,):
        for of_weight in (False, True):
            given = (*arguments, wanted, *beside, of_weight)
            grad_x, grad_theta = gradients(OPS, *given)
            assert_same(grad_x, gradients(eager, *given)[0], f"gradient of x, {case}")
            assert grad_theta.shape == (case.theta.shape if wanted else (0,))
            if not wanted:
                continue
            assert grad_theta.dtype == case.theta.dtype
            if not of_weight:
                check_theta_gradient(case, plain := grad_theta)
                continue
            scale = OPS.effective_scale(*case.scales, case.scale_dtype, None, case.above)
            v = case.x.float().reshape(scale.numel(), -1) * (1.0 / scale.reshape(-1, 1))
            broken = ~v.isfinite().all(1).view(grad_theta.shape)
            assert grad_theta[broken].isnan().all()
            assert_same(grad_theta[~broken], plain[~broken], f"of theta, {case}")


def test_random_tensors(seed):
    """Any shape, stride, dtype, grid, number of scales and value."""
    for _ in range(200):
        check(random_case())


def test_theta_of_nothing_has_a_gradient_of_0_whatever_the_scale():
    x, s0 = torch.empty(0, 8), torch.tensor([math.nan, math.inf, 1.0])
    grad_theta, _ = check_same("fake_quantize_backward_", x, x, s0, torch.zeros(3), 4, torch.float32, 1.0, True)
    assert grad_theta.tolist() == [0, 0, 0]


@pytest.mark.full
def test_many_random_tensors(seed):
    for _ in range(4000):
        check(random_case())
    for _ in range(100):
        check(random_case(2_000_000))


def test_sums_of_rows(seed):
    """One addition at a time, each rounded: a CPU's sum over a dimension rounds once."""
    for _ in range(200):
        rows, places = rows_to_sum()
        assert_same(kernels.sum_rows(rows, places), eager.sum_rows(rows, places), f"{rows.shape}, {places.shape}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["nvfp4_w4a4", "mxfp4_w4a4", "mxfp4_mxfp8", "fp8_dynamic", "fp8_block"])
def test_inputs_kept_as_codes(scheme, dtype, seed):
    """In one pass what several operators make of them; with values that a global scale clips, zeros, NaN, infinity."""
    spec = SCHEMES[scheme].activations
    above = torch.empty(1).uniform_(300, 1000) if spec.has_global_scale else None
    for shape in ((3, 5, 1024), (7, 128), (33, 384)):
        tame, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        x = (tame * torch.randn(shape).exp()).to(dtype)
        flat = x.view(-1)
        flat[3], flat[200], flat[32:64], flat[-16:] = float("inf"), float("nan"), 0, flat[-16:] * 1e3
        groups = kernels._token_groups(x, spec)
        for mask in (False, True) if above is not None else (False,):
            check_same("keep_tokens", groups, kernels.grid_of(spec), mask, *kernels._stored(spec, above))
        values, codes, _, scales = kernels.keep_tokens(x, spec, above, mask=True)
        assert_same(values, kernels.fake_quantize_tokens(x, spec, above))
        restored = kernels.restore_tokens(codes, scales, spec, dtype, above, after=None)
        assert torch.equal(torch.nan_to_num(restored), torch.nan_to_num(values))
        for some in (x, tame):  # of the second no group is masked as a whole
            _, _, mask, scales = kernels.keep_tokens(some, spec, above, mask=True)
            expected = reference.fake_quantize_tokens_backward(grad, some, spec, above)
            assert torch.equal(kernels.kept_gradient_(grad.clone(), scales, mask), expected)


@pytest.mark.full
def test_a_run_of_more_segments_than_accumulators(seed):
    """Step 4 of the order of addition adds more than one segment per accumulator: beyond 33.5 million elements."""
    numel = SEGMENT * POSITIONS + 3 * SEGMENT + 5
    x, grad = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    case = Case(x, grad, torch.tensor([0.3]), torch.tensor([0.1]), 4, torch.bfloat16, 1.0)
    _, grad_theta = gradients(OPS, grad, x, *case.scales, 4, torch.bfloat16, 1.0, True)
    check_theta_gradient(case, grad_theta)


@pytest.mark.full
def test_more_than_2_to_31_elements():
    """Offsets are 64-bit. 2 GiB of codes, 4 GiB of values."""
    codes = torch.zeros(2**31 + 40, dtype=torch.int8)
    codes[-40:] = torch.arange(-20, 20)
    codes[2**31 - 1] = 7
    values, _ = OPS.dequantize(codes, torch.tensor([0.5]), None, torch.float32, torch.bfloat16, False)
    assert torch.equal(values[-40:].float(), torch.arange(-20, 20) * 0.5)
    assert values[2**31 - 1] == 3.5
    for begin in range(0, 2**31 - 1, 2**28):
        assert not values[begin : min(begin + 2**28, 2**31 - 1)].any()
    values.zero_()[-1] = -3
    assert OPS.amax(values, 1).item() == 3


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(1, 40 * SEGMENT + 77, 1), (4096, 96, 4096), (70, SEGMENT + 3, 70), (300, 1000, 600)],
)
def test_the_number_of_threads_changes_nothing(rows, columns, count, seed):
    """Many segments of one run, short runs and long ones, tokens, layers: bit for bit, and again the same."""
    x = torch.randn(rows, columns).bfloat16()
    calls = calls_with_scales(x, torch.rand(count) * 0.2 + 0.1) + (calls_of_layers(x) if columns % 8 == 0 else [])
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 3):
            torch.set_num_threads(number)
            found.append([one for name, arguments in calls for one in results(OPS, name, *arguments)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same(a, b)


# ---- every value


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
            check_same("quantize", x, *arguments, True, True, False, what=what)
            check_same("fake_quantize", x, *arguments, what=what)
            check_same("fake_quantize_backward_", grad, x, *arguments, 1.0, False, what=what)
    for others in ((), (1.0,), (-0.7, 2.0), (1e-3, -1e3)):
        tokens = torch.stack([x, *(torch.full_like(x, other) for other in others)], dim=1)
        check_tokens(tokens, torch.ones_like(tokens), str(others))


def test_every_code(seed):
    """All 256 of them, under random scales, to every dtype."""
    every = torch.arange(256, dtype=torch.uint8)
    code_dtypes = (torch.float8_e4m3fn, torch.int8, torch.uint8)
    for code_dtype, dtype, scale_dtype in itertools.product(code_dtypes, DTYPES, DTYPES):
        s0, codes = torch.exp(3 * torch.randn(40)), every.view(code_dtype).expand(40, 256)
        ours, _ = check_same("dequantize", codes, s0, None, scale_dtype, dtype, False)
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
        codes, mask, *_ = check_same("quantize", sign * ties, *one, True, False, False)
        assert torch.equal(codes.view(torch.uint8), (expected | bit).to(torch.uint8))
        assert torch.equal(packing.unpack_bits(mask, ties.shape), ties.double() <= last_inside)
        around = sign * torch.cat([ties.flatten(), neighbors(values[1:-1]).flatten()])
        check_same("fake_quantize", around, *one)
        case = Case(around, torch.ones_like(around), ONE, torch.zeros(1), grid, torch.float32, 1.0)
        given = (case.grad, around, *case.scales, grid, torch.float32, 1.0, True)
        grad_x, grad_theta = gradients(OPS, *given)
        assert torch.equal(grad_x, (around.abs().double() <= last_inside).float())
        assert torch.equal(grad_x, gradients(eager, *given)[0])
        check_theta_gradient(case, grad_theta)


@pytest.mark.parametrize("bits", (*range(2, 9), -2, -3, -4, -8))
def test_every_boundary_of_integers(bits):
    """Ties go to the even step from 0, also at the ends, where they decide what is inside; before the zero point is
    added, so that its parity decides what an end takes. Negative bits: a narrow grid."""
    low, high = -(2 ** (abs(bits) - 1)) + (bits < 0), 2 ** (abs(bits) - 1) - 1
    for shift in (0,) if bits < 0 else range(low, high + 1, 1 if bits < 5 else 37):
        zero = None if bits < 0 else torch.tensor([float(shift)])
        ties = neighbors(torch.arange(low - shift - 2, high - shift + 2) + 0.5)
        codes, mask, *_ = check_same("quantize", ties, ONE, None, bits, torch.float32, True, False, False, zero)
        reached = torch.from_numpy(np.rint(ties.double().numpy())) + shift
        inside = (reached >= low) & (reached <= high)
        assert torch.equal(codes.double(), reached.clamp(low, high))
        assert torch.equal(packing.unpack_bits(mask, ties.shape), inside)
        (values,) = check_same("fake_quantize", ties, ONE, None, bits, torch.float32, None, zero)
        assert torch.equal(values.double(), reached.clamp(low, high) - shift)
        case = Case(ties, torch.ones_like(ties), ONE, torch.zeros(1), bits, torch.float32, 1.0, zero)
        given = (case.grad, ties, *case.scales, bits, torch.float32, 1.0, True, zero)
        grad_x, grad_theta = gradients(OPS, *given)
        assert torch.equal(grad_x, inside.float()) and torch.equal(grad_x, gradients(eager, *given)[0])
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
    return OPS.dequantize(ones, torch.ones(theta.numel()), theta, torch.float32, torch.float32, False)[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential(dtype, seed):
    """The correctly rounded fp32 number: for every 16-bit theta, and for a million fp32 ones around 0 and beyond.

    Where e^theta is within 2^-50 of itself from a tie between two fp32 numbers, either may come out: fp64 is not
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
