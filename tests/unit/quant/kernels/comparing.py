"""What an operator gives against what it must give: bit for bit, and theta's gradient in the order of its additions."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.kernels import eager
from tests.unit.quant.kernels.cases import POSITIONS, SEGMENT, Case

OPS = torch.ops.deepqat
TOKEN_GRIDS = ((0, True), *((bits, symmetric) for bits in (2, 4, 8) for symmetric in (False, True)))
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def assert_same(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Bit for bit, so that -0.0 is not 0.0; only which NaN a NaN is does not matter."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    ours, theirs = ours.contiguous(), theirs.contiguous()
    if ours.dtype == torch.float8_e4m3fn:
        nan, equal = (theirs.float().isnan(), ours.float().isnan()), ours.view(torch.uint8) == theirs.view(torch.uint8)
    elif ours.is_floating_point():
        integer = BITS[ours.dtype]
        nan, equal = (theirs.isnan(), ours.isnan()), ours.view(integer) == theirs.view(integer)
    else:
        assert torch.equal(ours, theirs), what
        return
    wrong = ~torch.where(nan[0], nan[1], equal)
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        pytest.fail(
            f"{what}: {wrong.sum()} of {wrong.numel()} differ, first at {first}: {ours[*first]} for {theirs[*first]}"
        )


def added_in_order(terms: Tensor) -> Tensor:
    """The sum of each row of ``terms`` in the order that kernels.h documents, in numpy's fp32."""

    def padded(values: np.ndarray, multiple: int) -> np.ndarray:
        return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % multiple)])

    def one_segment(values: np.ndarray) -> np.ndarray:
        steps = padded(values, POSITIONS)
        steps = steps.reshape(*values.shape[:-1], -1, POSITIONS)
        accumulators = np.zeros((*values.shape[:-1], POSITIONS), np.float32)
        for i in range(steps.shape[-2]):
            accumulators = accumulators + steps[..., i, :]
        sums = accumulators.reshape(*accumulators.shape[:-1], POSITIONS // 8, 8)
        for half in (4, 2, 1):
            sums = sums[..., :half] + sums[..., half : 2 * half]
        sums = sums[..., 0]
        while sums.shape[-1] > 1:
            half = sums.shape[-1] // 2
            sums = sums[..., :half] + sums[..., half:]
        return sums[..., 0]

    values = terms.numpy()
    with np.errstate(all="ignore"):
        if values.shape[-1] <= SEGMENT:
            return torch.from_numpy(one_segment(values))
        segments = padded(values, SEGMENT).reshape(len(values), -1, SEGMENT)
        return torch.from_numpy(one_segment(one_segment(segments)))


def additions(n: int) -> int:
    """The longest chain of additions that a term of a run of ``n`` passes through."""
    segments = math.ceil(n / SEGMENT)
    chain = min(8, math.ceil(n / POSITIONS)) + 3 + 8
    return chain + (math.ceil(segments / POSITIONS) + 3 + 8 if segments > 1 else 0)


def check_theta_gradient(case: Case, ours: Tensor) -> None:
    """Equal to the documented order of addition, which is within fp32 rounding of the exact sum.

    Every addition and every product rounds by at most u = 2^-24 of its result, and all partial sums are bounded by the
    sum S of the terms' magnitudes: a chain of k additions and the products with scale and factor are off by at most
    (k + 2) u S (to first order; 1.01 covers the rest), and the cast to theta's dtype by half its epsilon.
    """
    if case.x.numel() == 0:
        assert not ours.any(), f"of nothing it is 0 whatever the scale, {case}"
        return
    terms, learned = case.terms(), case.learned()
    factor = float(np.float32(case.factor))
    assert case.theta is not None
    in_order = added_in_order(terms) * learned * factor
    assert_same(ours, in_order.to(ours.dtype).reshape(ours.shape), f"order of addition, {case}")
    weights = learned.double() * factor
    exact, size = terms.double().sum(1) * weights, terms.double().abs().sum(1) * weights
    info, tiny = torch.finfo(ours.dtype), 2.0**-149
    bound = 1.01 * (additions(terms.shape[1]) + 2) * 2.0**-24 * size + info.eps / 2 * exact.abs()
    bound += info.smallest_normal * info.eps + tiny * (1 + weights)  # where the result, or a product, is subnormal
    off = (ours.reshape(-1).double() - exact).abs()
    # Beyond the range of either dtype a result, or a product on the way to it, is infinite.
    largest = terms.double().abs().sum(1) * learned.double().clamp(min=1)
    representable = (largest < 1e38) & (exact.abs() + bound < info.max)
    assert (off <= bound)[representable].all(), f"{(off / bound)[representable].max()} times the bound, {case}"


def check_tokens(x: Tensor, grad: Tensor, what: str, grids: Sequence[tuple[int, bool]] = TOKEN_GRIDS) -> None:
    """The operators of dynamic codes."""
    for grid in grids:
        about = f"tokens of grid and symmetry {grid}, {what}"
        for ours, theirs in zip(OPS.quantize_tokens(x, *grid), eager.quantize_tokens(x, *grid), strict=True):
            assert_same(ours, theirs, f"codes, scale or zero point, {about}")
        assert_same(OPS.fake_quantize_tokens(x, *grid), eager.fake_quantize_tokens(x, *grid), about)
        grad_x = OPS.fake_quantize_tokens_backward(grad, x, *grid)
        assert_same(grad_x, eager.fake_quantize_tokens_backward(grad, x, *grid), f"gradient, {about}")
        for wanted in (True, False):
            overwritten = grad.clone(memory_format=torch.contiguous_format)
            values = OPS.fake_quantize_tokens_and_mask_(overwritten, x, *grid, wanted)
            expected = eager.fake_quantize_tokens(x, *grid) if wanted else x.new_empty(0)
            assert_same(values, expected, f"values while masking, {about}")
            assert_same(overwritten, grad_x, f"masked, {about}")
