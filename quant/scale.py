"""Scale of one tensor, its quantizer (scale, number format and dtype), and the check of loaded scales.

A scale is passed as a :class:`Scale`, except where torch needs single tensors: arguments of an autograd function or an
operator, and Parameters of a module.

The rounding bin of a code is the set of all numbers that round to it. If codes were not chosen by rounding to nearest
(GPTQ, a file of another tool) and the weight trains, :func:`snap_to_codes` moves each weight outside the bin of its
code to the middle of the bin. If they were moved only to the edge of the bin, nearer to their original value, half of
these weights would leave the bin again in the first training steps. Weights inside their bin keep their original value
(benchmarks/results/small_models.md).

The scale check judges the scales of a weight by their quantization error. Many scales are valid for one weight: absmax,
smallest squared error, clipped, signed, rounded to a power of two, or trained over thousands of steps. So the check is
one comparison: the squared error with the loaded scales may be at most :data:`WORSE` times the error with scales
measured from the weight (:func:`quant.observers.partial_fit`), or at most the share :data:`CLIPPED` of the squared
weights, which clipping may cost. Three faults that change the total error little are checked separately:

- **width**: scales larger than :data:`WIDEST` times the measured scales leave codes unused, which adds little error for
  floating-point grids; with scales smaller than :data:`NARROWEST` times the measured scales nearly all weights are
  clipped, which adds little error at 2 bits;
- **order**: scales that vary, but do not correlate with the measured scales, belong to other rows or layers;
- **single scales** that lose nearly all of their weights.

The bounds come from valid and wrong scales of every kind, on Gaussian and heavy-tailed weights, with outlier columns
and unequal rows, and on trained weights; see ``tests/unit/quant/test_fit.py``.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quant import kernels
from quant.reference import absmax_scale, global_scale
from quant.spec import TensorSpec


class Scale(NamedTuple):
    """Scale of one tensor, ``s = s0 * exp(theta)``, with its zero points and global scale.

    In a module or a scale group the fields are Parameters, possibly ZeRO-3 partitions.

    Attributes:
        s0: frozen scale as loaded or measured, fp32, in the shape of :meth:`quant.spec.TensorSpec.scale_shape`;
            ``(1,)`` for an input.
        theta: logarithmic correction that trains, in the shape of ``s0`` and any float dtype; None for a fixed scale.
        global_: global scale of scales stored in e4m3 (NVFP4), fp32 ``(1,)``, for a stack ``(E,)``; None for other
            formats.
        zero: zero points, fp32, in the shape of ``s0``; None for a symmetric grid.
    """

    s0: Tensor
    theta: Tensor | None = None
    global_: Tensor | None = None
    zero: Tensor | None = None


class Quantizer(NamedTuple):
    """Scale, number format and dtype of a tensor, as the functions of :mod:`quant.kernels` take them.

    Attributes:
        scale: the tensor's scale, all Parameters gathered.
        spec: its number format.
        dtype: dtype of the model's weights, to which scales of integers are rounded.
    """

    scale: Scale
    spec: TensorSpec
    dtype: torch.dtype


def first_input_scale(absmax: Tensor, spec: TensorSpec, headroom: float = 1.0) -> Tensor:
    """Compute the initial stored scale, fp32, of an input with largest magnitude ``absmax``. For dynamic scales this is
    the global scale, with which ``headroom * absmax`` still fits; otherwise ``headroom`` has no effect."""
    return global_scale(headroom * absmax, spec) if spec.dynamic else absmax_scale(absmax, spec)


def lsq_factor(numel: int, spec: TensorSpec) -> float:
    """Compute LSQ's gradient scale (Esser et al. 2020, section 2.2): ``1/sqrt(numel * qmax)``, for the ``numel``
    elements of a weight that share a scale, or the ``numel`` features of an input."""
    return 1 / math.sqrt(numel * spec.qmax)


def check_fp32(scales: Mapping[str, Tensor | None]) -> None:
    """Raise TypeError if one of ``scales``, frozen scales by name, is not fp32 (None is skipped): a cast of the whole
    module, as DeepSpeed's to bf16 on stages 0 to 2, has rounded it."""
    for name, scale in scales.items():
        if scale is not None and scale.dtype != torch.float32:
            raise TypeError(
                f"{name} is {scale.dtype}, expected torch.float32: a cast of its data has rounded it, as "
                "deepspeed.initialize casts all parameters; call that inside model.zero.keep_frozen_fp32"
            )


def have_codes(values: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Return a bool tensor that is True where an element of ``values``, when quantized, has its code in ``codes``."""
    found, _ = kernels.quantize(values, quantizer)
    return found.view(torch.uint8) == codes.view(torch.uint8)


def snap_to_codes(weight: Tensor, decoded: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Return a copy of ``weight`` in which each element that does not round to its code in ``codes`` is replaced by
    the dequantized code, ``decoded``; all have one shape."""
    return torch.where(have_codes(weight, codes, quantizer), weight, decoded)


# Largest error relative to the error with the measured scales. absmax at 2 bits has up to 2.9 times the error of the
# best scale, trained scales up to 2.5 times the error of absmax.
WORSE = 3.3
# Accepted clipping error (a percentile, a trained scale), as a share of the squared weights: at 8 bits, and below.
CLIPPED = {True: 0.04, False: 0.1}
# Bounds of the geometric mean of scale / measured scale. It is up to 1.66 when rounding up to powers of two, 2 for
# doubled scales; in fp8 several layers may share one scale. At 3 bits and fewer, where absmax is up to 3.2 times the
# best scale, only the error bounds large scales.
NARROWEST, WIDEST, WIDEST_FP8 = 0.4, 1.75, 16.0
# Smallest correlation of the logarithms of scales and measured scales, for at least ENOUGH scales whose logarithms have
# a standard deviation of DIFFER or more. Trained scales have 0.34 and more, permuted scales up to 0.1.
FOLLOWING, ENOUGH, DIFFER = 0.25, 64, 0.12
# A scale is damaged if its error exceeds LOST of its squares, and the measured scale has less than KEPT of that error.
LOST, KEPT = 0.9, 0.2


class Fit(NamedTuple):
    """Loaded and measured scales of one Linear with their squared quantization errors, each fp64 ``[scales]``.

    Attributes:
        scale: loaded scales, effective.
        own: scales measured from the weight: absmax, or at 3 bits and fewer the scales with the smallest squared error.
        error, own_error: squared errors with ``scale`` and with ``own``.
        squares: squared weights.
    """

    scale: Tensor
    own: Tensor
    error: Tensor
    own_error: Tensor
    squares: Tensor


def scale_problem(fit: Fit, spec: TensorSpec) -> str | None:
    """Compare the loaded scales of a Linear with scales measured from its weight. Return None if they pass the check,
    else an error text with both scales and the likely cause."""
    # Scales of nearly zero weights are arbitrary.
    counts = fit.squares > 1e-6 * fit.squares.mean()
    if not bool(counts.any()):
        return None
    fit = Fit(*[part[counts] for part in fit])
    total = fit.squares.sum()
    error, own_error = float(fit.error.sum() / total), float(fit.own_error.sum() / total)
    width = math.exp(float((fit.scale / fit.own).abs().log().mean()))
    widest = WIDEST_FP8 if spec.dtype == "fp8_e4m3" else WIDEST if spec.bits > 3 else math.inf
    if error > max(WORSE * own_error, CLIPPED[spec.bits == 8]) or not NARROWEST <= width <= widest:
        cause = _cause(width, fit, spec)
    elif _follow(fit.scale, fit.own) < FOLLOWING:
        cause = "they belong to another layer or checkpoint, or are in another order"
    else:
        return _lost(fit)
    return (
        f"scales are {_mean(fit.scale):.3g} in the geometric mean, those of the weights themselves are "
        f"{_mean(fit.own):.3g}; the squared error would be {error:.2g} of the weights instead of {own_error:.2g}. "
        f"Probably {cause}"
    )


def _follow(scale: Tensor, own: Tensor) -> float:
    """Compute the correlation of the logarithms of loaded and measured scales; 1 if they are too few or too similar."""
    logs = torch.stack([scale, own]).abs().log()
    if len(scale) < ENOUGH or bool((logs.std(1) < DIFFER).any()):
        return 1.0
    return float(logs.corrcoef()[0, 1])


def _lost(fit: Fit) -> str | None:
    """Describe single scales at which nearly all of their weights become 0 or are clipped, or return None."""
    lost = (fit.error > LOST * fit.squares) & (fit.own_error < KEPT * fit.error)
    if not bool(lost.any()):
        return None
    return (
        f"{int(lost.sum())} of {lost.numel()} scales would round their weights to 0 or clip them, one is "
        f"{fit.scale[lost][0]:.3g} where that of the weights themselves is {fit.own[lost][0]:.3g}. Probably the file "
        "is damaged"
    )


def _mean(scale: Tensor) -> float:
    return math.exp(float(scale.abs().log().mean()))


def _cause(width: float, fit: Fit, spec: TensorSpec) -> str:
    """Write the likely cause of wrong scales; ``width`` is the ratio of loaded to measured scales."""
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
    if abs(math.log(_mean(fit.scale) * _mean(fit.own))) < 0.2 and width > 4:
        return "they are reciprocals"
    good = {name: abs(math.log(width / ratio)) for name, ratio in known.items() if abs(math.log(ratio)) > 0.1}
    name = min(good, key=lambda each: good[each])
    rest = "they are of weights that were smoothed (AWQ, SmoothQuant), of other bits, or of another checkpoint"
    return name if good[name] < 0.12 else rest
