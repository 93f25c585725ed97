"""Compare results of operators bit for bit, and theta's gradient with the sum in the documented order."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.reference import sum_in_order
from tests.unit.quant.kernels.cases import DTYPES, POSITIONS, SEGMENT, Case, eager

OPS = torch.ops.deepqat
TOKEN_GRIDS = ((0, True), *((bits, symmetric) for bits in (2, 4, 8) for symmetric in (False, True)))
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Bit for bit, so that -0.0 is not 0.0; only which NaN a NaN is does not matter."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    bits = [one.contiguous().view(BITS[one.itemsize]) for one in (ours, theirs)]
    wrong = (bits[0] != bits[1]) & ~(ours.float().isnan() & theirs.float().isnan())
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        pytest.fail(
            f"{what}: {wrong.sum()} of {wrong.numel()} differ, first at {first}: {ours[*first]} for {theirs[*first]}"
        )


def results(module: Any, name: str, *arguments: Any) -> list[Tensor]:
    """Results of an operator; of one that writes in place a copy of its first argument, overwritten, comes last."""
    written = [arguments[0].clone(memory_format=torch.contiguous_format)] if name.endswith("_") else []
    found = getattr(module, name)(*(written or arguments[:1]), *arguments[1:])
    return [one for one in (*(found if isinstance(found, tuple) else (found,)), *written) if one is not None]


def gradients(module: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and theta that ``fake_quantize_backward_`` gives."""
    of_theta, of_x = results(module, "fake_quantize_backward_", *arguments)
    return of_x, of_theta


def check_same(name: str, *arguments: Any, what: str = "") -> list[Tensor]:
    """Results of an operator, which are those of the reference."""
    ours = results(OPS, name, *arguments)
    for one, other in zip(ours, results(eager, name, *arguments), strict=True):
        assert_same(one, other, f"{name}, {what}")
    return ours


def check_operators(case: Case, same: Callable[..., list[Tensor]]) -> Tensor:
    """Call ``same`` for the operators with static scales that add nothing up; return the codes."""
    x, beside, stored = case.x, (case.zero, case.above), (*case.scales, case.scale_dtype)
    quantizer = (*case.scales, case.grid, case.scale_dtype)
    same("effective_scale", *stored, None, case.above)
    same("fake_quantize", x, *quantizer, None, *beside)
    for wanted in ((False, False, True), (False, True, False), (True, True, True), (True, False, False)):
        codes, mask, *_ = same("quantize", x, *quantizer, *wanted, *beside)
    for zeros in (False, True) if case.theta is not None else (False,):
        same("dequantize", codes, *stored, random.choice(DTYPES), zeros, None, *beside)
    if case.theta is not None:
        same("multiply_runs", x, case.theta)
    same("masked_", case.grad, mask)
    same("dequantize_and_mask_", case.grad, mask, codes, *stored, *beside)
    same("amax", x, case.s0.numel())
    return codes


def added_in_order(terms: Tensor) -> Tensor:
    """The sum of each row of ``terms`` in the order that kernels.h documents."""
    if terms.shape[-1] <= SEGMENT:
        return sum_in_order(terms).squeeze(-1)
    segments = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % SEGMENT)).unflatten(-1, (-1, SEGMENT))
    return sum_in_order(sum_in_order(segments).squeeze(-1)).squeeze(-1)


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
    check_sums(case.terms(), case.learned(), ours, case)


def check_sum_of_products(case: Case, ours: Tensor) -> None:
    """The same of the sum of ``x * grad`` in each run, times the factor."""
    assert case.theta is not None and (ours.dtype, ours.shape) == (case.theta.dtype, case.theta.shape)
    if case.x.numel() == 0:
        assert not ours.any()
        return
    terms = (case.x.float() * case.grad.float()).reshape(case.s0.numel(), -1)
    check_sums(terms, torch.ones(case.s0.numel()), ours, case)


def check_sums(terms: Tensor, learned: Tensor, ours: Tensor, case: Case) -> None:
    factor = float(np.float32(case.factor))
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
        about = f"grid and symmetry {grid}, {what}"
        check_same("fake_quantize_tokens", x, *grid, what=about)
        for values in (True, False):
            check_same("fake_quantize_tokens_and_mask_", grad, x, *grid, values, what=about)
