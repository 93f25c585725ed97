"""What a rank that holds some consecutive elements of a weight computes without the others.

The quantiser works on single elements. So codes can be made before a partition is sent, a byte each; and of the
gradient with respect to the quantised weight, both what the quantiser lets through (a mask) and what a learned scale
gets (a sum over elements) can be taken after the reduction: neither changes while the gradients of ranks and
micro-batches are added up.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quant import kernels
from quant.calibrate import by_run
from quant.scale import Quantizer, Scale


def quantize_part(flat: Tensor, start: int, numel: int, quantizer: Quantizer) -> Tensor:
    """Quantise part of a weight.

    Args:
        flat: its elements ``[start, start + len(flat))``, 1-D, in the weight's dtype.
        start: where the part begins in the row-major weight.
        numel: how many elements the whole weight has.
        quantizer: of the whole weight; each of its scales belongs to as many consecutive elements as every other.

    Returns:
        uint8, as many as there are elements: the bytes of the codes (``float8_e4m3fn`` or ``int8``).
    """
    codes = flat.new_empty(flat.numel(), dtype=torch.uint8)
    for runs, rows, out in _runs(flat, codes, start, numel, quantizer):
        out.copy_(kernels.quantize(rows, _of(quantizer, runs))[0].view(torch.uint8))
    return codes


def part_gradients_(
    grad: Tensor, flat: Tensor, start: int, numel: int, quantizer: Quantizer, *, factor: float
) -> Tensor | None:
    """Turn the gradient of part of a quantised weight into those of the weight and of its theta.

    Args:
        grad: the gradient with respect to the quantised elements, fp32, 1-D. That of the weight takes its place, with
            NaN where the weight is not finite: no code says so, and the step must be seen to have gone wrong.
        flat, start, numel, quantizer: as in :func:`quantize_part`.
        factor: what theta's gradient is multiplied with, see :func:`quant.function.lsq_factor`.

    Returns:
        The part's share of theta's gradient, fp32, 1-D, one per scale; None if there is no theta.
    """
    theta = quantizer.scale.theta
    shares = None if theta is None else torch.zeros(theta.numel(), device=grad.device)
    for runs, rows, grads in _runs(flat, grad, start, numel, quantizer):
        # The operator takes both in one dtype; its theta's gradient is of theta's.
        operands, wanted = (grads, rows.float(), _of(quantizer, runs)), shares is not None
        share = kernels.fake_quantize_backward_(*operands, factor=factor, theta_gradient=wanted, of_weight=True)
        if shares is not None:
            grads.masked_fill_(rows.isnan(), torch.nan)  # the operator says it in the share, which may go nowhere
            assert share is not None
            shares[runs] = share.flatten()
    return shares


def _runs(
    flat: Tensor, other: Tensor, start: int, numel: int, quantizer: Quantizer
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """:func:`by_run` of two tensors that belong to the same elements, in runs of one scale."""
    size = numel // quantizer.scale.s0.numel()
    for (runs, rows), (_, others) in zip(by_run(flat, start, size), by_run(other, start, size), strict=True):
        yield runs, rows, others


def _of(quantizer: Quantizer, runs: slice) -> Quantizer:
    """The scales of these runs, theta in fp32, so that nothing of a share is rounded."""
    s0, theta, *_ = quantizer.scale
    part = Scale(s0.flatten()[runs], None if theta is None else theta.flatten()[runs].float())
    return quantizer._replace(scale=part)
