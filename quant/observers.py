"""Choice of initial scales: for a weight from the shards on the ranks, for an input from observed statistics.

ZeRO-3 gives each rank a contiguous range of the row-major weight. A rank reduces its range to two numbers per scale
(:func:`partial_stats`), the engine combines these over ranks (a maximum, thus an all-reduce) and converts the result to
scales (:func:`scales_from_stats`) and zero points (:func:`zero_points_from_stats`). If the elements of a scale are on
several ranks, the scale has the same bits as on one rank.

The absmax scale is poor for a coarse grid: at 2 bits it leaves 22% of the energy of a Gaussian weight as error (groups
of 32), the best scale 14%. If :meth:`Ranges.searches` is true, a second pass measures the squared error of a few
fractions of the absmax scale (:func:`partial_errors`, summed over ranks) and takes the best fraction
(:func:`scales_from_errors`). An integer grid has one more negative code than positive codes. A *signed* scale, negative
where the largest magnitude is positive, uses that code: 13% of the energy remains as error with it, 11% with the search
as well.

For inputs, an :class:`Observer` tracks the largest magnitude over many batches, the number of clipped elements, and
optionally a histogram of magnitudes (:func:`scale_from_histogram`). Statistics stay on the device and are never read
here, so that observing costs no host synchronization (except a histogram on CUDA, whose bincount waits for the device,
and clipped inputs of separate experts in a padded batch). The caller reads them and reduces over ranks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quant import kernels
from quant.reference import absmax_scale, asymmetric_grid, fake_quant, inside_range, round_scale
from quant.spec import TensorSpec, per_block, per_run

# The bin of a magnitude is its bf16 number without the two lowest bits: 32 bins per power of two, over all powers of
# two, so that ranks and batches need no common range in advance.
_DROPPED = 2
BINS = 2**15 >> _DROPPED
# Middle of each bin.
MAGNITUDES = ((torch.arange(BINS, dtype=torch.int32) << _DROPPED | 1 << _DROPPED - 1) << 16).view(torch.float32)
MAGNITUDES[0] = 0


class _Recomputing:
    """Flag that a backward pass is running. Not a context variable, as on CUDA autograd recomputes in another
    thread."""

    now = False


@contextmanager
def recomputing() -> Iterator[None]:
    """Context for a backward pass: observers ignore the forwards that activation checkpointing repeats inside it."""
    _Recomputing.now = True
    try:
        yield
    finally:
        _Recomputing.now = False


class _Tokens:
    """Mask of the positions of a batch that have tokens, bool [B, T], or of such rows of experts, bool [rows]; and the
    number of True elements. The mask is None if all positions have tokens."""

    mask: Tensor | None = None
    count: int | None = 0


@contextmanager
def only_tokens(mask: Tensor, count: int | None) -> Iterator[None]:
    """Context for a forward of a padded batch: observers ignore the padding, which is never served. ``mask``, bool
    [B, T] on the inputs' device, is True at the ``count`` positions that have tokens. If ``count`` is None, an observer
    that needs this number computes it, and the host waits for the device."""
    before = _Tokens.mask, _Tokens.count
    _Tokens.mask, _Tokens.count = mask, count
    try:
        yield
    finally:
        _Tokens.mask, _Tokens.count = before


def only_rows_of_tokens(token: Tensor, positions: int, per_token: int | None) -> AbstractContextManager[None]:
    """Context for the Linears of experts inside :func:`only_tokens`: observers ignore the rows of padding.

    Args:
        token: [rows], for each row of the inputs its index among the batch's B T positions.
        positions: B T; without effect if the mask has another number.
        per_token: number of rows of each position; None if it varies.
    """
    if _Tokens.mask is None or _Tokens.mask.numel() != positions:
        return nullcontext()
    rows = _Tokens.mask.flatten()[token]
    known = _Tokens.count
    return only_tokens(rows, None if per_token is None or known is None else per_token * known)


class Observer:
    """Statistics of one input; a plain object, shared by the layers that share the input's scale.

    These layers read the same tensor (q, k and v) or different tokens (experts). Counting one tensor three times
    changes neither a maximum nor a ratio. Padding (:func:`only_tokens`) is ignored where the input has the shape
    ``[B, T, features]``, ``[B T, features]`` or ``[B, heads, T, features]``, and in the rows of experts.

    Attributes:
        spec: number format of the input.
        histogram: int64 ``[BINS]``, number of magnitudes per bin (:data:`MAGNITUDES`); None if not kept.
        absmax: largest magnitude seen, fp32 scalar; 0 before the first token, NaN after a NaN.
        clipped: number of elements outside the range so far, int64 scalar.
        total: number of elements that were checked for ``clipped``, inside the range or not.
    """

    def __init__(self, spec: TensorSpec, *, histogram: bool = False) -> None:
        """Create empty statistics; ``histogram`` costs a pass over the input."""
        self.spec = spec
        self.histogram: Tensor | None = torch.zeros(0) if histogram else None
        self.reset()

    def reset(self) -> None:
        """Reset all statistics."""
        self.absmax = torch.zeros((), dtype=torch.float32)
        self.clipped = torch.zeros((), dtype=torch.int64)
        self.total = 0
        if self.histogram is not None:
            self.histogram = torch.zeros(BINS, dtype=torch.int64)

    @torch.no_grad()
    def update(self, x: Tensor, scale: Tensor | None) -> None:
        """Add the elements of ``x``, any shape; with a scale, also count those outside its range. No effect inside
        :func:`recomputing`."""
        if _Recomputing.now or x.numel() == 0:  # an expert without tokens
            return
        count, tokens = x.numel(), _mask_for(x)
        if tokens is not None:
            x = x.detach().masked_fill(~tokens, 0)
            if self.histogram is not None or scale is not None:
                count = count // tokens.numel() * (int(tokens.sum()) if _Tokens.count is None else _Tokens.count)
        self.absmax = torch.maximum(self.absmax.to(x.device), kernels.amax(x)[0])
        if self.histogram is not None:
            bits = x.detach().to(torch.bfloat16).abs().view(torch.int16).flatten()
            self.histogram = self.histogram.to(x.device) + torch.bincount(bits.int() >> _DROPPED, minlength=BINS)
            self.histogram[0] -= x.numel() - count
        if scale is not None:
            self.clipped = self.clipped.to(x.device) + (~inside_range(x, scale, self.spec)).sum()
            self.total += count

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics as CPU tensors, for a checkpoint and :meth:`load_state_dict`."""
        state = {"absmax": self.absmax.cpu(), "clipped": self.clipped.cpu(), "total": torch.tensor(self.total)}
        return state if self.histogram is None else state | {"histogram": self.histogram.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the statistics returned by :meth:`state_dict`."""
        self.absmax, self.clipped, self.total = state["absmax"], state["clipped"], int(state["total"])
        if self.histogram is not None:
            self.histogram = state["histogram"]


def _mask_for(x: Tensor) -> Tensor | None:
    """Return the mask of the batch's tokens, broadcastable to ``x``; None without one, or if ``x`` has no positions."""
    mask = _Tokens.mask
    if mask is None or not 2 <= x.dim() <= 4:
        return None
    if x.dim() == 2:
        mask = mask.flatten()
    positions = (x.shape[0], x.shape[2]) if x.dim() == 4 else x.shape[:-1]
    if positions != mask.shape:
        return None
    return mask[:, None, :, None] if x.dim() == 4 else mask[..., None]


# Fractions of the absmax scale that the search tries. At 2 and 3 bits a grid of 200 lowers the error of a Gaussian
# weight by less than another 1%, with all optima in this interval. It contains 1: without signs, the result is never
# worse than absmax.
SEARCH_FRACTIONS: tuple[float, ...] = tuple(step / 20 for step in range(6, 27))
# e2m1 has no value between 4 and 6, so the largest weight of a group may fit better at 4 (NVIDIA's "four over six"): in
# SmolLM2-135M the squared error of nvfp4 falls by 27% from absmax, by 18% without these.
FP4_FRACTIONS = (*SEARCH_FRACTIONS, *(step / 20 for step in range(27, 31)))

_CHUNK = 2**20  # elements per step of the search, in a few fp32 copies


@dataclass(frozen=True)
class Ranges:
    """Method to choose initial scales.

    Attributes:
        weights: method for weights. ``absmax``: largest magnitude; ``mse``: smallest squared error; ``auto``: ``mse``
            for integers of 3 bits and fewer, otherwise ``absmax``.
        signed: allow negative scales of integer weights; scales of ggml formats may always be negative.
        inputs: method for inputs: ``absmax``, ``mse``, or ``percentile`` of the magnitudes.
        percentile: the percentile for inputs, in percent; only for the method ``percentile``.
        headroom: factor, at least 1, by which an NVFP4 input may exceed the largest magnitude observed before its group
            scales saturate.
    """

    weights: Literal["auto", "absmax", "mse"] = "auto"
    signed: bool = False
    inputs: Literal["absmax", "percentile", "mse"] = "absmax"
    percentile: float = 99.99
    headroom: float = 1.0

    def searches(self, spec: TensorSpec) -> bool:
        """Return True if the initial scales of a weight minimize its squared error, False if they fit its absmax."""
        return self.weights == "mse" or (self.weights == "auto" and spec.dtype == "int" and spec.bits <= 3)

    def signs(self, spec: TensorSpec) -> bool:
        """Return True if scales of a weight may be negative, to use the smallest code, which has no positive
        counterpart."""
        return (self.signed or spec.ggml) and spec.dtype == "int" and spec.symmetric and not spec.narrow


def partial_stats(flat: Tensor, start: int, shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    """Compute the largest value and the largest negated value per scale over one range of a weight.

    Args:
        flat: elements ``[start, start + len(flat))`` of the row-major weight, 1-D, any float dtype.
        start: index of the first element of the range.
        shape: ``(out, in)`` of the whole weight, or ``(E, out, in)`` of a stack.
        spec: number format.

    Returns:
        fp32 ``[2, *scale shape]``, largest values first; 0 if the range has no element of that scale and sign, NaN if
        an element of that scale is NaN.

    Raises:
        ValueError: the range is not inside the weight.
    """
    stats = torch.zeros(2, _runs(shape, spec), dtype=torch.float32, device=flat.device)
    for runs, rows in _pieces(flat, start, shape, spec):
        smallest, largest = torch.aminmax(rows, dim=-1)  # unlike abs(), makes no copy of the rows
        stats[0, runs], stats[1, runs] = largest.float().clamp(min=0), (-smallest).float().clamp(min=0)
    return _by_scale(stats, shape, spec).amax(-2).view(2, *spec.scale_shape(shape))


def scales_from_stats(stats: Tensor, spec: TensorSpec, *, signed: bool = False) -> Tensor:
    """Compute fp32 scales that fit the largest magnitude to the grid. ``stats [2, *scale shape]`` is the maximum of the
    results of :func:`partial_stats` for all ranges of a weight.

    With ``signed``, scales may be negative and map the largest magnitude to ``qmin``, the code without a positive
    counterpart. Scales of a format with zero points cover the range from the smallest to the largest value.
    """
    if spec.has_zero_points:
        return asymmetric_grid(-stats[1], stats[0], spec)[0]
    scales = absmax_scale(stats.amax(0), spec)
    return scales * ((spec.qmax - spec.qmin) / 2 / -spec.qmin) * _signs(stats) if signed else scales


def zero_points_from_stats(stats: Tensor, spec: TensorSpec) -> Tensor | None:
    """Compute fp32 zero points from ``stats`` (:func:`scales_from_stats`); None for a symmetric format. The zero
    points stay valid for any fraction of the scale, which shrinks the range by one factor on both sides of 0."""
    return asymmetric_grid(-stats[1], stats[0], spec)[1] if spec.has_zero_points else None


def search_fractions(spec: TensorSpec) -> tuple[float, ...]:
    """Return the fractions of the absmax scale that the search for the smallest error tries."""
    return FP4_FRACTIONS if spec.dtype == "fp4_e2m1" else SEARCH_FRACTIONS


def partial_errors(
    flat: Tensor, start: int, shape: tuple[int, ...], stats: Tensor, spec: TensorSpec, *, signed: bool = False
) -> Tensor:
    """Compute the squared quantization error over one range of a weight, with the absmax scales multiplied by each of
    :func:`search_fractions`.

    The range is given as in :func:`partial_stats`, ``stats`` as in :func:`scales_from_stats`. With ``signed``, scales
    are negative where the largest magnitude is a positive value. Returns fp32 ``[fractions, *scale shape]``, 0 if the
    range has no element of that scale. The caller adds up the errors of all ranges, and of weights that share their
    scales.
    """
    errors = torch.zeros(len(search_fractions(spec)), _runs(shape, spec), dtype=torch.float32, device=flat.device)
    candidates = [_per_run(scale, shape, spec) for scale in _candidates(stats, spec, signed)]
    zeros = _per_run(zero_points_from_stats(stats, spec), shape, spec)
    for runs, rows in _pieces(flat, start, shape, spec):
        values = rows.float()
        for index, scales in enumerate(candidates):
            error = fake_quant(values, scales[runs], spec.of_runs, _of(zeros, runs)).sub_(values)
            errors[index, runs] = error.square_().sum(-1)
    return _by_scale(errors, shape, spec).sum(-2).view(-1, *spec.scale_shape(shape))


def scales_from_errors(stats: Tensor, errors: Tensor, spec: TensorSpec, *, signed: bool = False) -> Tensor:
    """Choose the fp32 scales with the smallest squared error. ``stats`` and ``signed`` are as in
    :func:`partial_errors`, ``errors`` is the sum of its results over all ranges of the weight."""
    best = errors.argmin(0, keepdim=True)
    return torch.stack(_candidates(stats, spec, signed)).gather(0, best).squeeze(0)


def _candidates(stats: Tensor, spec: TensorSpec, signed: bool) -> list[Tensor]:
    """Compute the candidate scales of the search, each in the scale's shape, from ``stats [2, *scale shape]``; rounded
    to powers of two if stored so."""
    scales = scales_from_stats(stats, spec)
    signs = _signs(stats) if signed else 1
    tried = [fraction * scales * signs for fraction in search_fractions(spec)]
    return [round_scale(one, spec, None) for one in tried] if spec.scale_format == "e8m0" else tried


def _signs(stats: Tensor) -> Tensor:
    """Compute the signs of signed scales from ``stats [2, *scale shape]``: -1 where the largest magnitude is a positive
    value, else 1."""
    return torch.where(stats[0] > stats[1], -1.0, 1.0)


def scale_from_histogram(counts: Tensor, ranges: Ranges, spec: TensorSpec) -> Tensor:
    """Compute the scale ``(1,)`` of an input from ``counts``, the histogram of its magnitudes (:class:`Observer`).

    The method is ``ranges.inputs``: ``percentile``, or ``mse``, which searches over fractions of the absmax scale. The
    scale is exact to half the width of a bin, 1.6% of its value. Raises ValueError for an input with dynamic scales:
    its global scale is always measured by absmax.
    """
    if spec.dynamic:
        raise ValueError(f"quant.input_range {ranges.inputs} is not for the global scale of NVFP4 inputs: set absmax")
    counts, magnitudes = counts.double().cpu(), MAGNITUDES.double()
    if ranges.inputs == "percentile":
        fits = counts.cumsum(0) >= ranges.percentile / 100 * counts.sum()
        # At least the smallest nonzero magnitude: otherwise inputs of nearly only zeros would become all zeros.
        index = max(int(fits.int().argmax()), int(counts[1:].nonzero().min()) + 1 if counts[1:].any() else 0)
        return absmax_scale(magnitudes[index].float().view(1), spec)
    seen = counts.nonzero().flatten()
    values, weights = magnitudes[seen].float(), counts[seen]
    largest = absmax_scale(values.max().view(1), spec)
    tried = [largest * step / 50 for step in range(5, 51)]
    errors = [(fake_quant(values, scale, spec).sub(values).double().square() * weights).sum() for scale in tried]
    return tried[int(torch.stack(errors).argmin())]


def measured_scales(weights: Sequence[Tensor], spec: TensorSpec, ranges: Ranges) -> tuple[Tensor, Tensor | None]:
    """Measure the scales and zero points (None if symmetric) of ``weights``, whole tensors ``[..., out, in]`` that
    share them: fp32, in the shape of one weight's scale. A scale is NaN if one of its weights is NaN or Inf."""
    parts = [(weight.reshape(-1), 0, tuple(weight.shape)) for weight in weights]
    stats = torch.stack([partial_stats(*part, spec) for part in parts]).amax(0)
    finite, signed = torch.isfinite(stats).all(0), ranges.signs(spec)
    if ranges.searches(spec) and bool(finite.all()):
        errors = torch.stack([partial_errors(*part, stats, spec, signed=signed) for part in parts]).sum(0)
        scales = scales_from_errors(stats, errors, spec, signed=signed)
    else:
        scales = scales_from_stats(stats, spec, signed=signed)
    return torch.where(finite, scales, torch.nan), zero_points_from_stats(stats, spec)


def partial_clipped(
    flat: Tensor, start: int, shape: tuple[int, ...], scale: Tensor, spec: TensorSpec, zero: Tensor | None = None
) -> Tensor:
    """Count the elements of one range of a weight that the scales clip; int64 scalar on the range's device. The range
    is given as in :func:`partial_stats`; ``scale`` (effective, fp32) and ``zero`` belong to the whole weight."""
    clipped = torch.zeros((), dtype=torch.int64, device=flat.device)
    scales, zeros = _per_run(scale, shape, spec), _per_run(zero, shape, spec)
    for runs, rows in _pieces(flat, start, shape, spec):
        clipped += (~inside_range(rows, scales[runs], spec.of_runs, _of(zeros, runs))).sum()
    return clipped


def partial_fit(
    flat: Tensor, start: int, shape: tuple[int, ...], scale: Tensor, spec: TensorSpec, zero: Tensor | None = None
) -> Tensor:
    """Sum the squared quantization error and the squared values per scale over one range of a weight; fp64 ``[2, *scale
    shape]``.

    The error divided by the squared values is the relative error, the inverse of the signal-to-noise ratio. The
    arguments are those of :func:`partial_clipped`.
    """
    sums = torch.zeros(2, _runs(shape, spec), dtype=torch.float64, device=flat.device)
    scales, zeros = _per_run(scale, shape, spec), _per_run(zero, shape, spec)
    for runs, rows in _pieces(flat, start, shape, spec):
        for piece in rows.split(_CHUNK, dim=1):
            values = piece.float()
            error = fake_quant(values, scales[runs], spec.of_runs, _of(zeros, runs)).sub_(values)
            sums[:, runs] += torch.stack([t.square().sum(-1, dtype=torch.float64) for t in (error, values)])
    return _by_scale(sums, shape, spec).sum(-2).view(2, *spec.scale_shape(shape))


def by_run(flat: Tensor, start: int, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Split ``flat``, the elements of a row-major tensor from index ``start`` on, into up to three views ``[runs,
    elements of a run]``; yield each view after the slice of its run indices.

    A run is ``size`` consecutive elements of the tensor. The views are the rest of a run that begins on an earlier
    rank, the whole runs, and the beginning of a run that continues on the next rank.
    """
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


def _pieces(flat: Tensor, start: int, shape: tuple[int, ...], spec: TensorSpec) -> Iterator[tuple[slice, Tensor]]:
    """Split a range of a weight into runs, consecutive elements that share a scale. Yields views ``[runs, values]`` of
    at most :data:`_CHUNK` elements, or one run, each with the slice of its run indices. Raises ValueError if ``flat``
    is not 1-D, or if the range exceeds the weight."""
    numel, stop = math.prod(shape), start + flat.numel()
    if flat.dim() != 1 or not 0 <= start <= stop <= numel:
        raise ValueError(
            f"expected a 1-D range inside the {numel} values of a weight {tuple(shape)}, "
            f"got shape {tuple(flat.shape)} at [{start}, {stop})"
        )
    for runs, rows in by_run(flat, start, spec.run_length(shape)):
        step = max(1, _CHUNK // rows.shape[1])
        for first, piece in zip(range(runs.start, runs.stop, step), rows.split(step), strict=True):
            yield slice(first, first + len(piece)), piece


def _runs(shape: tuple[int, ...], spec: TensorSpec) -> int:
    """Count the runs of a weight: segments of consecutive elements that share a scale (see :mod:`quant.spec`)."""
    return math.prod(shape) // spec.run_length(shape)


def _by_scale(values: Tensor, shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    """Arrange ``[n, runs]`` as ``[n, ..., runs of a scale, scales]``."""
    if spec.granularity != "block":
        return values.view(len(values), -1, 1, 1)
    return per_block(values.view(len(values), *shape[:-1], -1), shape, spec)


def _per_run(scale: Any, shape: tuple[int, ...], spec: TensorSpec) -> Any:
    """Expand scales (or zero points, or None) to one per run, ``[runs, 1]``."""
    if scale is None:
        return None
    return per_run(scale, shape, spec).reshape(-1, 1)


def _of(zero: Tensor | None, runs: slice) -> Tensor | None:
    return None if zero is None else zero[runs]
