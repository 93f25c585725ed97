"""The compiled CPU kernels against the reference: every operator, bit for bit, whatever the shape, stride and value.

The one result that need not equal the reference's is theta's gradient, a sum of which only the order differs: it must
equal the sum in the order that kernels.h documents, bit for bit, and lie within fp32 rounding of the exact sum.
"""

import math
import random

import pytest
import torch
from torch import Tensor

from quant.kernels import eager
from tests.unit.quant.kernels.cases import DTYPES, POSITIONS, SEGMENT, Case, random_case, random_layout
from tests.unit.quant.kernels.comparing import OPS, TOKEN_GRIDS, assert_same, check_theta_gradient, check_tokens

pytestmark = pytest.mark.usefixtures("compiled")


def check_weight_gradient(case, arguments, grad_x, grad_theta):
    """Of a weight NaN shows what is not finite, in theta's gradient if that is wanted; nothing else changes."""
    ours_x, ours_theta = OPS.fake_quantize_backward(*arguments, True)
    overwritten = case.grad.clone(memory_format=torch.contiguous_format)
    assert_same(OPS.fake_quantize_backward_(overwritten, *arguments[1:], True), ours_theta, f"in place, {case}")
    assert_same(overwritten, ours_x, f"gradient of a weight in place, {case}")
    expected_x, expected_theta = eager.fake_quantize_backward(*arguments, True)
    assert_same(ours_x, expected_x, f"gradient of a weight, {case}")
    if expected_theta.numel() == 0:
        wrong = ~(ours_x.isnan() | (ours_x == grad_x) | grad_x.isnan())
        assert not wrong.any()
        return
    assert_same(ours_x, grad_x, f"gradient of a weight beside theta's, {case}")
    scale = OPS.effective_scale(*case.scales, case.scale_dtype, None, case.above)
    v = case.x.float().reshape(scale.numel(), -1) * (1.0 / scale.reshape(-1, 1))
    broken = ~v.isfinite().all(1).view(ours_theta.shape)
    assert ours_theta[broken].isnan().all()
    assert_same(ours_theta[~broken], grad_theta[~broken], f"of theta, {case}")


def check(case: Case) -> None:
    """All operators on one case, against the reference."""
    x, scales, grid, beside, what = case.x, case.scales, case.grid, (case.zero, case.above), str(case)
    codes, mask = OPS.quantize(x, *scales, grid, case.scale_dtype, True, *beside)
    expected_codes, expected_mask = eager.quantize(x, *scales, grid, case.scale_dtype, True, *beside)
    assert_same(codes, expected_codes, f"codes, {what}")
    assert_same(mask, expected_mask, f"mask, {what}")
    alone, nothing = OPS.quantize(x, *scales, grid, case.scale_dtype, False, *beside)
    assert_same(alone, expected_codes, f"codes without a mask, {what}")
    assert nothing.shape == (0,) and nothing.dtype == torch.uint8
    scale = OPS.effective_scale(*scales, case.scale_dtype, None, case.above)
    assert_same(scale, eager.effective_scale(*scales, case.scale_dtype, None, case.above), f"scale, {what}")

    codes_too, scale_too = OPS.quantize_with_scale(x, *scales, grid, case.scale_dtype, *beside)
    assert_same(codes_too, expected_codes, f"codes beside scales, {what}")
    assert_same(scale_too, scale, f"scales beside codes, {what}")
    expected_values = eager.fake_quantize(x, *scales, grid, case.scale_dtype, None, *beside)
    for masked in (True, False):
        codes_too, mask_too, values = OPS.quantize_with_values(x, *scales, grid, case.scale_dtype, masked, *beside)
        assert_same(codes_too, expected_codes, f"codes beside values, {what}")
        assert_same(mask_too, expected_mask if masked else nothing, f"mask beside values, {what}")
        assert_same(values, expected_values, f"values beside codes, {what}")
    values = OPS.fake_quantize(x, *scales, grid, case.scale_dtype, None, *beside)
    assert_same(values, expected_values, f"fake quant, {what}")
    any_codes = random_layout(torch.randint(256, (x.numel(),), dtype=torch.uint8).view(codes.dtype), tuple(x.shape))
    out_dtype = random.choice(DTYPES)
    for some in (codes, any_codes):
        values = OPS.dequantize(some, *scales, case.scale_dtype, out_dtype, None, *beside)
        expected = eager.dequantize(some, *scales, case.scale_dtype, out_dtype, None, *beside)
        assert_same(values, expected, f"dequantized to {out_dtype}, {what}")
        if case.theta is not None:
            values, zeros = OPS.dequantize_with_zeros(some, *scales, case.scale_dtype, out_dtype, None, *beside)
            assert_same(values, expected, f"dequantized to {out_dtype} beside zeros, {what}")
            assert_same(zeros, torch.zeros_like(case.theta), f"zeros, {what}")

    for wanted in (False, True) if case.theta is not None else (False,):
        arguments = (case.grad, x, *scales, grid, case.scale_dtype, case.factor, wanted, *beside)
        grad_x, grad_theta = OPS.fake_quantize_backward(*arguments)
        expected_x, _ = eager.fake_quantize_backward(*arguments)
        assert_same(grad_x, expected_x, f"gradient of x, {what}")
        assert grad_theta.shape == (case.theta.shape if wanted and case.theta is not None else (0,))
        overwritten = case.grad.clone(memory_format=torch.contiguous_format)
        assert_same(OPS.fake_quantize_backward_(overwritten, *arguments[1:]), grad_theta, f"in place, {what}")
        assert_same(overwritten, expected_x, f"gradient of x in place, {what}")
        check_weight_gradient(case, arguments, grad_x, grad_theta)
    if case.theta is not None:
        assert grad_theta.dtype == case.theta.dtype
        check_theta_gradient(case, grad_theta)
    assert_same(OPS.masked(case.grad, mask), eager.masked(case.grad, mask), f"masked, {what}")
    overwritten = case.grad.clone(memory_format=torch.contiguous_format)
    OPS.masked_(overwritten, mask)
    assert_same(overwritten, eager.masked(case.grad, mask), f"masked in place, {what}")
    overwritten = case.grad.clone(memory_format=torch.contiguous_format)
    values = OPS.dequantize_and_mask_(overwritten, mask, codes, *scales, case.scale_dtype, *beside)
    expected = eager.dequantize(codes, *scales, case.scale_dtype, case.grad.dtype, None, *beside)
    assert_same(values, expected, f"dequantized while masking, {what}")
    assert_same(overwritten, eager.masked(case.grad, mask), f"masked while dequantizing, {what}")
    assert_same(OPS.amax(x, case.s0.numel()), eager.amax(x, case.s0.numel()), f"amax, {what}")
    check_tokens(x, case.grad, what, random.sample(TOKEN_GRIDS, 3))


def test_random_tensors(seed):
    """Any shape, stride, dtype, grid, number of scales and value."""
    for _ in range(200):
        check(random_case())


@pytest.mark.full
def test_many_random_tensors(seed):
    for _ in range(4000):
        check(random_case())
    for _ in range(100):
        check(random_case(2_000_000))


@pytest.mark.full
def test_a_run_of_more_segments_than_accumulators(seed):
    """Step 4 of the order of addition adds more than one segment per accumulator: beyond 33.5 million elements."""
    numel = SEGMENT * POSITIONS + 3 * SEGMENT + 5
    x, grad = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    case = Case(x, grad, torch.tensor([0.3]), torch.tensor([0.1]), 4, torch.bfloat16, 1.0)
    _, grad_theta = OPS.fake_quantize_backward(grad, x, *case.scales, 4, torch.bfloat16, 1.0, True)
    check_theta_gradient(case, grad_theta)


def test_the_metric_tells_values_apart():
    """assert_same and the bound of check_theta_gradient can fail."""
    assert_same(torch.tensor([math.nan, 1.0, -0.0]), torch.tensor([-math.nan, 1.0, -0.0]))
    for a, b in ((0.0, -0.0), (1.0, 1 + 2**-23), (math.nan, 1.0), (1.0, math.nan)):
        with pytest.raises(pytest.fail.Exception):
            assert_same(torch.tensor([a]), torch.tensor([b]))
    x, grad = torch.randn(5000), torch.rand(5000)
    case = Case(x, grad, torch.tensor([0.3]), torch.tensor([0.1]), 4, torch.float32, 1.0)
    _, grad_theta = OPS.fake_quantize_backward(grad, x, *case.scales, 4, torch.float32, 1.0, True)
    check_theta_gradient(case, grad_theta)
    with pytest.raises(pytest.fail.Exception):
        check_theta_gradient(case, torch.nextafter(grad_theta, torch.tensor(9e9)))


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(1, 40 * SEGMENT + 77, 1), (4096, 96, 4096), (70, SEGMENT + 3, 70), (300, 999, 900)],
)
def test_the_number_of_threads_changes_nothing(rows, columns, count, seed):
    """Many segments of one run, short runs and long ones, tokens: bit for bit, and again the same."""
    x, grad = torch.randn(rows, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    s0, theta = torch.rand(count) * 0.2 + 0.1, 0.3 * torch.randn(count)

    def everything() -> list[Tensor]:
        codes, mask = OPS.quantize(x, s0, theta, 0, torch.float32, True)
        return [
            codes.view(torch.uint8),
            mask,
            OPS.dequantize(codes, s0, theta, torch.float32, torch.bfloat16),
            *OPS.quantize_with_values(x, s0, theta, 5, torch.float16, True),
            OPS.effective_scale(s0, theta, torch.bfloat16),
            OPS.fake_quantize(x, s0, theta, 4, torch.bfloat16),
            *OPS.fake_quantize_backward(grad, x, s0, theta, 4, torch.bfloat16, 0.3, True),
            OPS.masked(grad, mask),
            OPS.amax(x, count),
            OPS.fake_quantize(x, s0, theta, 1, torch.float32),
            *OPS.quantize_tokens(x, 8, False),
            OPS.fake_quantize_tokens(x, 0, True),
            OPS.fake_quantize_tokens_backward(grad, x, 8, False),
            *OPS.quantize_with_scale(x, s0, theta, 4, torch.bfloat16),
            *OPS.dequantize_with_zeros(codes, s0, theta, torch.float32, torch.bfloat16),
            OPS.fake_quantize_tokens_and_mask_(grad.clone(memory_format=torch.contiguous_format), x, 8, False, True),
        ]

    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3, 3):
            torch.set_num_threads(number)
            results.append(everything())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
