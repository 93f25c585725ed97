"""Whether the scales of a weight fit it: judged by what they do to the weight, not by what they are.

Many scales are right for one weight: the largest magnitude's, the one of the smallest squared error, one that was
clipped, signed, rounded to a power of two, or trained over thousands of steps. Scales of other bits, of another layer
or of another order are none of these. Two numbers per scale tell them apart, the squared error that it makes and the
one that the weight's own scale makes (:func:`quant.calibrate.partial_fit`), and two more for the Linear:

- **error**: squared error over squared weights, at most :data:`WORSE` times that of the own scales, or ``_floor``;
- **width**: the geometric mean of the scale over the own absmax scale; beyond :data:`WIDEST` codes are left unused,
  which nobody does on purpose. Floating-point grids lose nothing by that (:data:`WIDEST_FP8`);
- **narrowness**, at 2 and 3 bits: there a scale that clips nearly everything is at most a few times worse;
- **order**: scales that differ do so as the weights do. Where the logarithms of the scales follow neither those of the
  own scales nor those of the weights' sizes, they belong to something else.

What this cannot see does no more harm than these bounds say. They are from the measurements of
``benchmarks/scale_fit.py``: legitimate scales of every kind pass, on Gaussian and heavy-tailed weights, with outlier
columns and unequal rows, and on trained ones.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quant.spec import TensorSpec

# Largest error over that of the own scales. absmax at 2 bits makes up to 2.9 times the error of the best scale, trained
# scales up to 2.5 times that of absmax.
WORSE = 3.3
# Largest geometric mean of scale / absmax scale, and where all scales are powers of two. -1..1 with absmax / 1 has 1.5
# at 2 bits; rounding up to a power of two has less than 2.
WIDEST, WIDEST_POWERS = 1.6, 2.05
WIDEST_FP8 = 16.0
# Smallest geometric mean of scale / best scale at 2 and 3 bits, unless the error is as good as the best.
NARROWEST = 0.4
# An error that is no concern whatever else is said of the scales, over that of the own scales.
AS_GOOD = 1.3
# Least correlation, of at least so many scales. Of permuted ones it is within 2 / sqrt(scales) of 0; learned ones that
# strayed by 30% from absmax on rows that are all alike have 0.25.
CORRELATION, ENOUGH = 0.1, 256
# One scale that is this many times too large or too small, and loses half of its weights or more, is damage.
WILD = 64.0


class Fit(NamedTuple):
    """Scales of one Linear beside its own, each fp64 ``[scales]``.

    Attributes:
        scale: those that were loaded, effective.
        own: those that would be measured: absmax, at 3 bits and fewer those of the smallest error.
        largest: the absmax scales.
        error, own_error: squared errors with ``scale`` and with ``own``.
        squares: squared weights.
    """

    scale: Tensor
    own: Tensor
    largest: Tensor
    error: Tensor
    own_error: Tensor
    squares: Tensor


def misfit(fit: Fit, spec: TensorSpec) -> str | None:
    """What is wrong with the scales of a Linear, with both values and the likely cause; None if they fit."""
    # A scale of weights that are all but zero says nothing.
    counts = fit.squares > 1e-6 * fit.squares.mean()
    if not bool(counts.any()):
        return None
    fit = Fit(*(part[counts] for part in fit))
    total = fit.squares.sum()
    error, own_error = float(fit.error.sum() / total), float(fit.own_error.sum() / total)
    if (wild := _wild(fit)) is not None:
        return wild
    ratio = (fit.scale.abs() / fit.largest).log()
    width, of_own = math.exp(float(ratio.mean())), math.exp(float((fit.scale.abs() / fit.own).log().mean()))
    half = (spec.qmax - spec.qmin) / 2
    if spec.symmetric and any(
        float((ratio - math.log(half / edge)).abs().mean()) < 0.1 for edge in (half, spec.qmax, -spec.qmin)
    ):
        return None  # they are absmax scales, as one grid or another has them
    cause = None
    if width > _widest(fit, spec) or (spec.bits <= 3 and of_own < NARROWEST and error > AS_GOOD * own_error):
        cause = _cause(width, fit, spec)
    elif error > AS_GOOD * own_error and _unrelated(fit):
        cause = "they are of another layer or checkpoint, or in another order"
    elif error > max(WORSE * own_error, _floor(spec)):
        cause = _cause(width, fit, spec)
    if cause is None:
        return None
    return (
        f"scales are {_mean(fit.scale):.3g} in the geometric mean, those of the weights themselves are "
        f"{_mean(fit.own):.3g}; the squared error would be {error:.2g} of the weights instead of {own_error:.2g}. "
        f"Probably {cause}"
    )


def _floor(spec: TensorSpec) -> float:
    """An error over the squared weights up to which clipping is a choice: a percentile, a trained scale."""
    return 0.05 if spec.bits == 8 else 0.1


def _widest(fit: Fit, spec: TensorSpec) -> float:
    if spec.dtype == "fp8_e4m3":
        return WIDEST_FP8
    mantissa, _ = torch.frexp(fit.scale.abs())
    powers = spec.scale_format != "e8m0" and bool((mantissa == 0.5).all())
    return WIDEST_POWERS if powers else WIDEST


def _wild(fit: Fit) -> str | None:
    """A single scale that is far from its own and loses what it stands for."""
    ratio = fit.scale.abs() / fit.largest
    wild = ((ratio > WILD) | (ratio < 1 / WILD)) & (fit.error > 0.5 * fit.squares) & (fit.own_error < fit.error / 2)
    if not bool(wild.any()) or int(wild.sum()) > 0.1 * wild.numel():  # many of them: the others say why
        return None
    found = fit.scale[wild][0].item(), fit.own[wild][0].item()
    return (
        f"{int(wild.sum())} of {wild.numel()} scales would lose their weights, one is {found[0]:.3g} where that of the "
        f"weights themselves is {found[1]:.3g}. Probably the file is damaged"
    )


def _unrelated(fit: Fit) -> bool:
    """Whether scales that differ do not do so as the weights do."""
    if fit.scale.numel() < ENOUGH:
        return False
    logs = fit.scale.abs().log()
    others = [each.log() for each in (fit.own, fit.largest, fit.squares)]
    if float(logs.std()) < 0.3 * max(float(other.std()) for other in others[:2]):  # all alike: a choice, if a poor one
        return False
    return (
        max(float(torch.corrcoef(torch.stack([logs, other]))[0, 1].nan_to_num(0.0)) for other in others) < CORRELATION
    )


def _mean(scale: Tensor) -> float:
    return math.exp(float(scale.abs().log().mean()))


def _cause(width: float, fit: Fit, spec: TensorSpec) -> str:
    """What the ratio to the absmax scales looks like."""
    half = (spec.qmax - spec.qmin) / 2
    known = {f"they are of int{bits}": half / ((2**bits - 1) / 2) for bits in range(2, 9)}
    known |= {"they are of e4m3": half / 448, "they are of e2m1": half / 6, "they are of e5m2": half / 57344}
    known |= {
        "they are largest magnitudes that were not divided by that of the codes": half,
        "they were doubled": 2.0,
        "they were halved": 0.5,
        "exponents are stored without their bias": 2.0**-127,
        "the bias of exponents was added twice": 2.0**127,
    }
    if abs(math.log(_mean(fit.scale) * _mean(fit.largest))) < 0.2 and width > 4:
        return "they are reciprocals"
    good = {name: abs(math.log(width / ratio)) for name, ratio in known.items() if abs(math.log(ratio)) > 0.1}
    name = min(good, key=lambda each: good[each])
    rest = "they are of weights that were smoothed (AWQ, SmoothQuant), of other bits, or of another checkpoint"
    return name if good[name] < 0.12 else rest
