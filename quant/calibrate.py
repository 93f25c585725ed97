"""Scales of a weight measured from the pieces of it that the ranks hold, without gathering it.

ZeRO-3 gives each rank a contiguous range of the row-major weight. A rank reduces its range to one number per scale
(:func:`partial_stats`), the engine combines these over ranks (:func:`combine` is a maximum, so an all-reduce does) and
the result becomes scales (:func:`scales_from_stats`). Scales whose elements lie on several ranks come out exactly as if
one rank had seen them all.

The largest magnitude is a poor scale where the grid is coarse: at 2 bits it leaves 22% of the energy of a Gaussian
weight as error (groups of 32), the best scale 14%. Where :func:`needs_search` says so, a second pass measures the
squared error of a few fractions of that scale (:func:`partial_errors`, summed over ranks) and takes the best one of
each (:func:`scales_from_errors`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quant.reference import absmax_scale, fake_quant, inside_range
from quant.spec import TensorSpec

# Fractions of the absmax scale that the search tries. At 2 and 3 bits a grid of 200 lowers the error of a Gaussian
# weight by less than another 1%, and its choices all lie in this interval. 1 is among them: the result is never worse
# than absmax.
SEARCH_FRACTIONS: tuple[float, ...] = tuple(step / 20 for step in range(6, 27))

_CHUNK = 2**20  # elements that the search holds in fp32 at a time, in a few copies


def partial_stats(flat: Tensor, start: int, shape: tuple[int, int], spec: TensorSpec) -> Tensor:
    """Largest magnitude per scale over one range of a weight.

    Args:
        flat: the values ``[start, start + len(flat))`` of the row-major weight, 1-D, any float dtype.
        start: where the range begins.
        shape: ``(out, in)`` of the whole weight.
        spec: how it is quantised.

    Returns:
        fp32 tensor of the scale's shape; 0 where nothing of that scale is in the range, NaN where a NaN is.

    Raises:
        ValueError: the range does not lie inside the weight.
    """
    stats = torch.zeros(spec.scale_shape(shape), dtype=torch.float32, device=flat.device)
    for scales, rows in _by_scale(flat, start, shape, spec):
        smallest, largest = torch.aminmax(rows, dim=-1)  # unlike abs(), makes no copy of the rows
        stats.view(-1)[scales] = torch.maximum(-smallest, largest).float()
    return stats


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Statistics of two ranges, or of two weights that share their scales: the elementwise maximum."""
    return torch.maximum(a, b)


def scales_from_stats(stats: Tensor, spec: TensorSpec) -> Tensor:
    """fp32 absmax scales, in the shape of ``stats``, from the combined statistics."""
    return absmax_scale(stats, spec)


def needs_search(spec: TensorSpec) -> bool:
    """Whether the default initial scale minimises the squared error: integers of 3 bits and fewer."""
    return spec.dtype == "int" and spec.bits <= 3


def partial_errors(flat: Tensor, start: int, shape: tuple[int, int], stats: Tensor, spec: TensorSpec) -> Tensor:
    """Squared quantisation error per candidate and scale over one range of a weight.

    Args:
        flat, start, shape, spec: as in :func:`partial_stats`.
        stats: the statistics of the whole weight, combined over all ranges.

    Returns:
        fp32 ``[len(SEARCH_FRACTIONS), *scale shape]``; 0 where nothing of that scale is in the range. Errors of two
        ranges, or of two weights that share their scales, add up.
    """
    errors = torch.zeros(len(SEARCH_FRACTIONS), *stats.shape, dtype=torch.float32, device=flat.device)
    absmax_scales = scales_from_stats(stats, spec).view(-1, 1)
    for scales, rows in _by_scale(flat, start, shape, spec):
        for part in _chunks(scales, rows.shape[1]):
            values = rows[part.start - scales.start : part.stop - scales.start].float()
            for index, fraction in enumerate(SEARCH_FRACTIONS):
                error = fake_quant(values, fraction * absmax_scales[part], _per_row(spec)).sub_(values)
                errors[index].view(-1)[part] = error.square_().sum(-1)
    return errors


def scales_from_errors(stats: Tensor, errors: Tensor, spec: TensorSpec) -> Tensor:
    """fp32 scales of the smallest squared error, in the shape of ``stats``, from the combined statistics and errors."""
    fractions = torch.tensor(SEARCH_FRACTIONS, dtype=torch.float32, device=stats.device)
    return scales_from_stats(stats, spec) * fractions[errors.argmin(0)]


def partial_clipped(flat: Tensor, start: int, shape: tuple[int, int], scale: Tensor, spec: TensorSpec) -> Tensor:
    """How many values of one range of a weight its scales clip; int64 scalar on the range's device.

    Args:
        flat, start, shape, spec: as in :func:`partial_stats`.
        scale: the whole effective scale, fp32.
    """
    clipped = torch.zeros((), dtype=torch.int64, device=flat.device)
    for scales, rows in _by_scale(flat, start, shape, spec):
        clipped += (~inside_range(rows, scale.view(-1, 1)[scales], _per_row(spec))).sum()
    return clipped


def partial_squares(flat: Tensor, start: int, shape: tuple[int, int], scale: Tensor, spec: TensorSpec) -> Tensor:
    """Squared quantisation error, and squared values, summed over one range of a weight; fp64 [2].

    The first over the second is the relative error of the weight, its inverse the signal-to-noise ratio.

    Args:
        flat, start, shape, spec: as in :func:`partial_stats`.
        scale: the whole effective scale, fp32.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
    for scales, rows in _by_scale(flat, start, shape, spec):
        for part in _chunks(scales, rows.shape[1]):
            for piece in rows[part.start - scales.start : part.stop - scales.start].split(_CHUNK, dim=1):
                values = piece.float()
                error = fake_quant(values, scale.view(-1, 1)[part], _per_row(spec)).sub_(values)
                sums += torch.stack([t.square().sum(dtype=torch.float64) for t in (error, values)])
    return sums


def _by_scale(flat: Tensor, start: int, shape: tuple[int, int], spec: TensorSpec) -> Iterator[tuple[slice, Tensor]]:
    """The range as at most three views ``[scales, values]``, each with the slice of the flattened scales it belongs to.

    These are the rest of a scale that began on an earlier rank, the whole scales, and the beginning of one that goes on
    on the next rank.
    """
    numel, stop = shape[0] * shape[1], start + flat.numel()
    if flat.dim() != 1 or not 0 <= start <= stop <= numel:
        raise ValueError(
            f"expected a 1-D range inside the {numel} values of a weight {tuple(shape)}, "
            f"got shape {tuple(flat.shape)} at [{start}, {stop})"
        )
    size = spec.elements_per_scale(shape)
    first = start // size
    head = min(-start % size, flat.numel())
    whole = (flat.numel() - head) // size
    if head:
        yield slice(first, first + 1), flat[:head].view(1, -1)
        first += 1
    if whole:
        yield slice(first, first + whole), flat[head : head + whole * size].view(whole, size)
    if head + whole * size < flat.numel():
        yield slice(first + whole, first + whole + 1), flat[head + whole * size :].view(1, -1)


def _per_row(spec: TensorSpec) -> TensorSpec:
    """The same grid for the rows of :func:`_by_scale`."""
    return TensorSpec(spec.dtype, spec.bits, "channel")


def _chunks(scales: slice, size: int) -> Iterator[slice]:
    """``scales`` in pieces of about ``_CHUNK`` elements, where each scale has ``size``."""
    step = max(1, _CHUNK // size)
    for begin in range(scales.start, scales.stop, step):
        yield slice(begin, min(begin + step, scales.stop))
