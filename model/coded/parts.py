"""What a rank that holds some consecutive elements of a weight computes without the others.

The quantiser works on single elements. So codes can be made before a partition is sent, a byte each; and of the
gradient with respect to the quantised weight, both what the quantiser lets through (a mask) and what a learned scale
gets (a sum over elements) can be taken after the reduction: neither changes while the gradients of ranks and
micro-batches are added up.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quant.calibrate import by_run
from quant.weight_scale import WeightScale


def quantize_part(flat: Tensor, start: int, numel: int, scale: WeightScale) -> Tensor:
    """Quantise part of a weight.

    Args:
        flat: its elements ``[start, start + len(flat))``, 1-D, in the weight's dtype.
        start: where the part begins in the row-major weight.
        numel: how many elements the whole weight has.
        scale: the scales of the whole weight, each of which belongs to as many consecutive elements as every other.

    Returns:
        uint8, as many as there are elements: the bytes of the codes (``float8_e4m3fn`` or ``int8``).
    """
    codes = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for (runs, rows), (_, out) in zip(_runs(flat, start, numel, scale), _runs(codes, start, numel, scale), strict=True):
        out.copy_(_of(scale, runs).quantize(rows).view(torch.uint8))
    return codes


def dequantize_whole(codes: Tensor, scale: WeightScale) -> Tensor:
    """What the bytes of :func:`quantize_part` of all parts stand for, 1-D, in the weight's dtype."""
    return scale.dequantize(codes.view(torch.float8_e4m3fn if scale.spec.dtype == "fp8_e4m3" else torch.int8))


def part_gradients_(
    grad: Tensor, flat: Tensor, start: int, numel: int, scale: WeightScale, *, factor: float
) -> Tensor | None:
    """Gradients of part of a weight and of its theta from that with respect to the quantised weight.

    Args:
        grad: the gradient with respect to the quantised elements, fp32, 1-D. That of the weight takes its place, with
            NaN where the weight is NaN: no integer code says so, and the step must be seen to have gone wrong.
        flat, start, numel, scale: as in :func:`quantize_part`.
        factor: what theta's gradient is multiplied with, see :func:`quant.function.lsq_factor`.

    Returns:
        The part's share of theta's gradient, fp32, 1-D, one per scale; None if there is no theta.
    """
    shares = None if scale.theta is None else torch.zeros(scale.theta.numel(), device=grad.device)
    for (runs, rows), (_, grads) in zip(
        _runs(flat, start, numel, scale), _runs(grad, start, numel, scale), strict=True
    ):
        # The operator takes both in one dtype; its theta's gradient is of theta's.
        share = _of(scale, runs).backward_(grads, rows.float(), factor=factor, theta_gradient=shares is not None)
        grads.masked_fill_(rows.isnan(), torch.nan)
        if shares is not None:
            assert share is not None
            shares[runs] = share.flatten()
    return shares


def _runs(flat: Tensor, start: int, numel: int, scale: WeightScale) -> Iterator[tuple[slice, Tensor]]:
    return by_run(flat, start, numel // scale.s0.numel())


def _of(scale: WeightScale, runs: slice) -> WeightScale:
    """The scales of these runs, theta in fp32, so that nothing of a share is rounded."""
    theta = None if scale.theta is None else scale.theta.flatten()[runs].float()
    return scale._replace(s0=scale.s0.flatten()[runs], theta=theta)
