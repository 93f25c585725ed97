"""The compiled CPU kernels against the reference: every operator, bit for bit, whatever the shape, stride and value.

Only theta's gradient, a sum, need not equal the reference's: it must equal the sum in the order that kernels.h
documents, bit for bit, and lie within fp32 rounding of the exact sum.
"""

import math
import random

import pytest
import torch
from torch import Tensor

from quant import SCHEMES, kernels
from quant.kernels import eager, ops
from tests.unit.quant.kernels.cases import (
    DTYPES,
    POSITIONS,
    SEGMENT,
    Case,
    calls_of_layers,
    calls_with_scales,
    random_case,
    random_layout,
    rows_to_sum,
)
from tests.unit.quant.kernels.comparing import (
    OPS,
    TOKEN_GRIDS,
    assert_same,
    check_same,
    check_theta_gradient,
    check_tokens,
    results,
)

pytestmark = pytest.mark.usefixtures("compiled")


def check(case: Case) -> None:
    """All operators on one case."""
    x, what, beside = case.x, str(case), (case.zero, case.above)
    stored = (*case.scales, case.scale_dtype)
    quantizer = (*case.scales, case.grid, case.scale_dtype)

    def same(name: str, *arguments: object) -> list[Tensor]:
        return check_same(name, *arguments, what=what)

    same("effective_scale", *stored, None, case.above)
    same("quantize_with_scale", x, *quantizer, *beside)
    same("fake_quantize", x, *quantizer, None, *beside)
    for mask in (False, True):
        same("quantize_with_values", x, *quantizer, mask, *beside)
        codes, inside = same("quantize", x, *quantizer, mask, *beside)
    any_codes = random_layout(torch.randint(256, (x.numel(),), dtype=torch.uint8).view(codes.dtype), tuple(x.shape))
    for some in (codes, any_codes):
        for name in ("dequantize", "dequantize_with_zeros") if case.theta is not None else ("dequantize",):
            same(name, some, *stored, random.choice(DTYPES), None, *beside)
    same("masked", case.grad, inside)
    same("masked_", case.grad, inside)
    same("dequantize_and_mask_", case.grad, inside, codes, *stored, *beside)
    same("amax", x, case.s0.numel())
    check_tokens(x, case.grad, what, random.sample(TOKEN_GRIDS, 3))
    check_gradients(case, (case.grad, x, *quantizer, case.factor), beside)


def check_gradients(case: Case, arguments: tuple, beside: tuple) -> None:
    """NaN in theta's gradient shows what is not finite in a weight; nothing else changes in it."""
    for wanted in (False, True) if case.theta is not None else (False,):
        for of_weight in (False, True):
            given = (*arguments, wanted, *beside, of_weight)
            grad_x, grad_theta = OPS.fake_quantize_backward(*given)
            assert_same(grad_x, eager.fake_quantize_backward(*given)[0], f"gradient of x, {case}")
            in_place = results(OPS, "fake_quantize_backward_", *given)
            assert_same(in_place[0], grad_theta, f"theta's in place, {case}")
            assert_same(in_place[1], grad_x, f"gradient of x in place, {case}")
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
        groups = ops._token_groups(x, spec)
        for mask in (False, True) if above is not None else (False,):
            check_same("keep_tokens", groups, ops.grid_of(spec), mask, *ops._stored(spec, above))
        values, codes, _, scales = kernels.keep_tokens(x, spec, above, mask=True)
        assert_same(values, kernels.fake_quantize_tokens(x, spec, above))
        restored = kernels.restore_tokens(codes, scales, spec, dtype, above, after=None)
        assert torch.equal(torch.nan_to_num(restored), torch.nan_to_num(values))
        for some in (x, tame):  # of the second no group is masked as a whole
            _, _, mask, scales = kernels.keep_tokens(some, spec, above, mask=True)
            expected = kernels.fake_quantize_tokens_backward(grad, some, spec, above)
            assert torch.equal(kernels.kept_gradient_(grad.clone(), scales, mask), expected)


@pytest.mark.full
def test_a_run_of_more_segments_than_accumulators(seed):
    """Step 4 of the order of addition adds more than one segment per accumulator: beyond 33.5 million elements."""
    numel = SEGMENT * POSITIONS + 3 * SEGMENT + 5
    x, grad = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    case = Case(x, grad, torch.tensor([0.3]), torch.tensor([0.1]), 4, torch.bfloat16, 1.0)
    _, grad_theta = OPS.fake_quantize_backward(grad, x, *case.scales, 4, torch.bfloat16, 1.0, True)
    check_theta_gradient(case, grad_theta)


@pytest.mark.full
def test_more_than_2_to_31_elements():
    """Offsets are 64-bit. 2 GiB of codes, 4 GiB of values."""
    codes = torch.zeros(2**31 + 40, dtype=torch.int8)
    codes[-40:] = torch.arange(-20, 20)
    codes[2**31 - 1] = 7
    values = OPS.dequantize(codes, torch.tensor([0.5]), None, torch.float32, torch.bfloat16)
    assert torch.equal(values[-40:].float(), torch.arange(-20, 20) * 0.5)
    assert values[2**31 - 1] == 3.5
    for begin in range(0, 2**31 - 1, 2**28):
        assert not values[begin : min(begin + 2**28, 2**31 - 1)].any()
    values.zero_()[-1] = -3
    assert OPS.amax(values, 1).item() == 3


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
