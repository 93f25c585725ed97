"""Whether the scales of a weight fit it: judged by what they do to the weight, not by what they are.

Many scales are right for one weight: the largest magnitude's, the one of the smallest squared error, one that was
clipped, signed, rounded to a power of two, or trained over thousands of steps. Scales of other bits, of another layer
or of another order are none of these. Two numbers per scale tell them apart, the squared error that it makes and the
one that the weight's own scale makes (:func:`quant.observers.partial_fit`), and two more for the Linear:

- **error**: squared error over squared weights, at most :data:`WORSE` times that of the own scales, or ``_floor``;
- **width**: the geometric mean of the scale over the own absmax scale; beyond :data:`WIDEST` codes are left unused,
  which nobody does on purpose. Floating-point grids lose nothing by that (:data:`WIDEST_FP8`);
- **narrowness**, at 2 and 3 bits: there a scale that clips nearly everything is at most a few times worse;
- **order**: scales that differ do so as the weights do. A line through the logarithms of the scales, over those of the
  own scales or of the weights' sizes, has a slope of 1, whatever else was done to them; where that is certain not to be
  so, they belong to something else;
- **sign**: a negative scale maps the extreme weight to the code that has no counterpart, the other sign does not.

What this cannot see does no more harm than these bounds say. They are from the measurements of
``benchmarks/results/scale_fit.md``: legitimate scales of every kind pass, on Gaussian and heavy-tailed weights, with
outlier columns and unequal rows, and on trained ones.
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
# Scales are in another order where the slope and so many of its standard errors stay below this. Permuted ones have a
# slope of 0 and an error of 1 / sqrt(scales); those of 200 steps of training at ten times the default rate have 0.95.
SLOPE, ERRORS = 0.7, 4.0
# Share of the negative scales that would be better without their sign. It is near 0 for those that were chosen with it,
# and 1/2 where signs do not matter.
OTHER_SIGN, ENOUGH = 0.75, 16
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
        turned: squared errors with ``-scale``; None where no scale is negative.
    """

    scale: Tensor
    own: Tensor
    largest: Tensor
    error: Tensor
    own_error: Tensor
    squares: Tensor
    turned: Tensor | None = None


def scale_problem(fit: Fit, spec: TensorSpec) -> str | None:
    """What is wrong with the scales of a Linear, with both values and the likely cause; None if they fit."""
    # A scale of weights that are all but zero says nothing.
    counts = fit.squares > 1e-6 * fit.squares.mean()
    if not bool(counts.any()):
        return None
    fit = Fit(*[part[counts] for part in fit if part is not None])  # the last one alone may be missing
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
    if (sign := _other_sign(fit)) is not None:
        return sign
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
    return 0.04 if spec.bits == 8 else 0.1


def _widest(fit: Fit, spec: TensorSpec) -> float:
    if spec.dtype == "fp8_e4m3":
        return WIDEST_FP8
    return WIDEST_POWERS if spec.scale_format != "e8m0" and _powers(fit) else WIDEST


def _powers(fit: Fit) -> bool:
    """Whether all scales are powers of two."""
    mantissa, _ = torch.frexp(fit.scale.abs())
    return bool((mantissa == 0.5).all())


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
    logs, count = fit.scale.abs().log(), fit.scale.numel()
    if count < ENOUGH:
        return False
    others = [fit.own.log(), fit.largest.log(), fit.squares.log() / 2]
    spread = max(float(other.std()) for other in others[:2])
    if float(logs.std()) < 0.3 * spread:  # all alike: a choice, if a poor one
        return False
    if _powers(fit) and spread < math.log(2):  # what is rounded away is as large as what they differ by
        return False
    centered = logs - logs.mean()
    for other in others:
        over = other - other.mean()
        squares = max(float(over.square().sum()), 1e-30)
        slope = float((over * centered).sum()) / squares
        error = math.sqrt(float((centered - slope * over).square().sum()) / (count - 2) / squares)
        if slope + ERRORS * error > SLOPE:
            return False
    return True


def _other_sign(fit: Fit) -> str | None:
    """Negative scales that were turned round."""
    if fit.turned is None:
        return None
    negative = (fit.scale < 0) & (fit.turned != fit.error)
    worse = negative & (fit.turned < fit.error)
    if int(negative.sum()) < ENOUGH or int(worse.sum()) < OTHER_SIGN * int(negative.sum()):
        return None
    return (
        f"{int(worse.sum())} of {int(negative.sum())} negative scales would be better if they were positive: the "
        f"squared error is {float(fit.error.sum() / fit.squares.sum()):.2g} of the weights. Probably signs were changed"
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
