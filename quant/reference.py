"""The quantizers in plain PyTorch. This file is the definition: every kernel and every export is tested against it.

Formulas, with ``s`` the scale and ``v = x * (1/s)`` computed in fp32 (the reciprocal too: dividing by ``s`` instead, or
working in bf16, changes 0.07% or 3% of the codes of a bf16 tensor)::

    e4m3    Q(v) = nearest value of the grid, ties to the even code, at most 448
    e2m1    Q(v) = nearest value of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code
    int     Q(v) = clamp(round(v), qmin, qmax)          round to nearest, ties to even
    fq(x)   = Q(v) * s                                  product in fp32, result in x's dtype

Integer weights that are not symmetric have a *zero point* ``z`` beside each scale: the code that stands for 0. Their
codes are ``q = clamp(round(v) + z, qmin, qmax)``, and ``Q(v) = q - z``: the grid of ``Q`` goes from ``qmin - z`` to
``qmax - z``, which are ``qmin`` and ``qmax`` in all that follows. ``z`` does not learn, and need not where
``s`` does: it says how the range lies about 0, and a range that grows or shrinks by a factor lies there as before.

The floating-point grids are those of the OCP Microscaling (MX) Specification v1.0, section 5.3 (e4m3 has one NaN).

``v`` is *inside the range* where rounding alone lands on the grid, if the grid went on beyond its end: ``qmin <=
round(v) <= qmax``, for e4m3 ``|v| <= 464`` and for e2m1 ``|v| < 7`` (a tie of 448 and 480 goes to 448, one of 6 and 8
to 8). Asking ``qmin <= v <= qmax`` instead would zero the gradient of elements that are not clipped at all (at int2,
6.8% of Gaussian weights instead of 1.6%).

The gradient with respect to ``x`` is straight-through: one inside, zero outside. With respect to ``s`` it is that of
a surrogate with the rounding error held fixed, which asks in what unit it is fixed (LSQ, Esser et al. 2020, knows
integers only)::

    evenly spaced: int, subnormal        fq = x + s * stopgrad(Q(v) - v)    d fq / d s = Q(v) - v
    normal e4m3 or e2m1 numbers          fq = x + stopgrad(s Q(v) - x)      d fq / d s = 0
    int outside the range, or
    e4m3, e2m1 beyond +-448, +-6         fq = s * bound                     d fq / d s = bound

Subnormal are e4m3 numbers with ``|v| < 2^-6`` and e2m1 numbers with ``|v| < 1``. An evenly spaced grid has a spacing of
``s``, and its error grows with ``s``. The spacing of a floating-point grid follows the magnitude of ``x``: twice the
scale is the same grid with the exponents one lower, so the error of a normal number does not depend on ``s`` (on
average over an octave). With LSQ's ``Q(v) - v`` there, a scale that minimizes the squared error of Gaussian values
shrinks until it clips so many that the error is 19% above the best (e4m3, 18% e2m1); with 0 it ends within 1%. Beyond
its largest number a grid does not follow ``x`` any more, whether ``v`` is inside the range or not: if e2m1 counted as
clipped from 7 on instead, the largest value of each group of 32 would settle there, and the error end 60% above the
best instead of 21%. The caller scales by ``1/sqrt(numel * qmax)``, and knows how many elements share the scale.

Non-finite values: NaN stays NaN in ``fq`` and contributes no gradient; an infinity clips to the bound and has no
gradient of its own, like every clipped value. Codes may be all that a forward sees of a weight: where its ``v`` is not
finite its gradient is NaN, or its scale's where that is wanted.

A *dynamic* scale is that of one token, or of one group of its features, ``x``. With ``[min, max]`` its range, extended
to include 0, and ``absmax`` its largest magnitude (per token asymmetric int8 is 8da4w)::

    symmetric    s = absmax / ((qmax - qmin) / 2)   z = 0
    asymmetric   s = (max - min) / (qmax - qmin)    z = clamp(qmin - round(min * (1/s)), qmin, qmax)
    int          q = clamp(round(v) + z, qmin, qmax)        fq = (q - z) * s
    e4m3         q = Q(v)                                   fq = q * s

Such a scale follows its token and counts as constant in the gradient. A token (or group) with a NaN or an infinity has
no range: all of it becomes NaN, without a gradient. The first scale and zero point of weights are those of their range
likewise, as compressed-tensors and torchao compute them.

NVFP4 inputs have a dynamic scale per group of 16, held in e4m3 below ``G``, the stored global scale of the tensor::

    k = e4m3(min(G * (absmax / 6), 448)), 1/8 for 0        s = k / G        q = Q(v)        fq = q * s

as compressed-tensors 0.20 has it (quantization/utils/helpers.py, lifecycle/forward_helpers.py), which divides by ``s``.
vLLM's kernel (csrc/libtorch_stable/quantization/fp4/nvfp4_utils.cuh, ``cvt_warp_fp16_to_fp4``) and FlashInfer's do
multiply, with approximate reciprocals of 6, ``G`` and ``s``. They differ within a rounding of a tie. Where ``k``
becomes 0, so does every code of the group; its gradient passes. Rounding ``k`` to nearest takes the largest value to
``|v| <= 6.4``, inside the range. Beyond it (from 7 on) are values of groups larger than those of calibration, for which
``k`` saturates, infinities among them, and values of up to 9 where ``k`` is 2^-9 or 2^-8, its smallest numbers.

MXFP8 and MXFP4 inputs have a dynamic scale per group of 32, the smallest power of two that clips nothing::

    s = 2^ceil(log2(absmax / qmax)), 1 where that is below 2^-126        q = Q(v)        fq = q * s

as vLLM 0.33 has it (``_mxfp8_e4m3_quantize_torch`` in model_executor/layers/quantization/utils/mxfp8_utils.py), and the
kernels of FlashInfer 0.7.2 that it calls (``float_to_ue8m0_fast`` in quantization/kernels/mxfp8_quantize.py and
mxfp4_quantize.py; by an approximate 1 / qmax). compressed-tensors 0.20 has those of weights (:func:`power_of_two`),
which differ where absmax is 1.75 times a power of two (MXFP8), or 1.5 to 1.75 times (MXFP4).

Shapes: ``x`` is any shape for a scale per tensor (shape ``(1,)``). Else ``x`` is ``[out, in]`` and the scale ``[out,
1]`` per channel, ``[out, in / size]`` per group or ``[out / size, in / size]`` per block. Scales are fp32 throughout.
"""

import math

import torch
from torch import Tensor

from quant.spec import (
    FP4_MAX,
    FP4_ROUNDS_TO_MAX,
    FP4_SMALLEST_NORMAL,
    FP8_MAX,
    FP8_ROUNDS_TO_MAX,
    FP8_SMALLEST_NORMAL,
    TensorSpec,
)

E4M3_SMALLEST, E8M0_BIAS, FP16_SMALLEST, FP16_MAX = 2.0**-9, 127, 2.0**-24, 65504.0


def effective_scale(
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """``s = s0 * exp(theta)`` in fp32, rounded to what is stored (``spec.scale_format``)::

        float32   s
        model     s in the model's dtype
        float16   the nearest fp16 number to s that is neither 0 nor infinite, also of ``model`` where that is fp16
        e8m0      2^round(log2(s)), the exponent within -127 and 127    OCP MX Specification v1.0, section 5.4.1
        e4m3      e4m3(clamp(s * G, 2^-9, 448)) / G, G the global scale NVFP4, as compressed-tensors stores it

    The rounding is straight-through: the derivative with respect to theta is ``s0 * exp(theta)``, not rounded. The
    exponential is taken in fp64 and rounded to fp32, because every library's fp32 exponential has its own last bit.

    Args:
        s0: the frozen scale, fp32.
        theta: its learned logarithmic correction, any float dtype, or None.
        spec: how the tensor is quantized.
        model_dtype: dtype of the model's weights.
        global_scale: G, fp32 ``(1,)``; for the format ``e4m3`` and only for it.
    """
    scale = s0.float() if theta is None else s0.float() * torch.exp(theta.double()).float()
    if spec.scale_format == "float32":
        return scale
    if spec.scale_format == "model" and model_dtype != torch.float16:
        return scale.to(model_dtype).float()  # autograd differentiates a cast as the identity
    # The rounded number exactly, with the derivative of the other: what is added is 0.
    return round_scale(scale.detach(), spec, global_scale) + (scale - scale.detach())


def round_scale(scale: Tensor, spec: TensorSpec, global_scale: Tensor | None) -> Tensor:
    """The fp32 ``scale`` (positive but in fp16) as ``float16``, ``e8m0`` and ``e4m3`` hold it; NaN if not finite."""
    if spec.mx:
        # In fp64, whose errors are far smaller than the distance of an fp32 number from a tie: all libraries agree.
        rounded = torch.exp2(scale.double().log2().round().clamp(-E8M0_BIAS, E8M0_BIAS)).float()
    elif spec.scale_format in ("float16", "model"):
        rounded = torch.copysign(scale.abs().clamp(FP16_SMALLEST, FP16_MAX).half().float(), scale)
    else:
        assert spec.scale_format == "e4m3" and global_scale is not None
        code = (scale * global_scale).clamp(E4M3_SMALLEST, FP8_MAX).to(torch.float8_e4m3fn)
        rounded = code.float() / global_scale
    return torch.where(scale.isfinite(), rounded, torch.nan)


def absmax_scale(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """The fp32 scale that maps the largest magnitude to the edge of the grid.

    ``absmax / ((qmax - qmin) / 2)``, the divisor 448 for e4m3 and 6 for e2m1, as compressed-tensors and torchao compute
    it; :func:`power_of_two` of MX. Where ``1/scale`` would overflow it is 1: zeros are exact under any scale.
    """
    scale = power_of_two(absmax, spec) if spec.mx else _over(absmax.float(), (spec.qmax - spec.qmin) / 2)
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def power_of_two(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """The scale of a group as a power of two, fp32; ``absmax`` itself where that is 0 or not finite.

    Of weights it brings ``absmax / scale`` into ``[224, 448)`` (e4m3) or ``[3.5, 7)`` (e2m1), as compressed-tensors'
    ``generate_mx_scales``; of dynamic inputs it is the smallest with ``absmax / scale <= qmax``. Nothing is clipped.
    """
    edge = FP4_ROUNDS_TO_MAX if spec.dtype == "fp4_e2m1" and not spec.dynamic else spec.qmax
    (mantissa, exponent), (its_mantissa, its_exponent) = torch.frexp(absmax.float()), math.frexp(edge)
    above = mantissa > its_mantissa if spec.dynamic else mantissa >= its_mantissa
    scale = torch.exp2((exponent - its_exponent + above).double()).float()  # exact, as in round_scale
    return torch.where(absmax.isfinite() & (absmax > 0), scale, absmax)


def global_scale(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """``G = 448 * qmax / absmax`` fp32, with which the largest scale of a group becomes 448, as compressed-tensors'
    ``generate_gparam``; 1 of nothing but zeros, which are exact under any scale."""
    scale = FP8_MAX * spec.qmax / absmax.float()
    return torch.where(scale.isinf(), 1.0, scale)


def _over(x: Tensor, divisor: float) -> Tensor:
    """``x / divisor``, rounded once on every device: by a number of Python's, CUDA multiplies by its reciprocal."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def asymmetric_grid(lowest: Tensor, highest: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Scale and zero point, both fp32, with which the integer grid spans the range from ``lowest <= 0`` to ``highest >=
    0``; formulas above. Of a range that is 0, or so small that ``1/scale`` would overflow, the scale is 1. A range that
    is not finite gives a scale that is not, and the zero point 0."""
    scale = _over(highest.float() - lowest.float(), spec.qmax - spec.qmin)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    zero = (spec.qmin - (lowest.float() * (1.0 / scale)).round()).clamp(spec.qmin, spec.qmax)
    return scale, torch.where(scale.isfinite(), zero, 0.0)


def quantize(x: Tensor, scale: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Codes of ``x``, in its shape: ``torch.float8_e4m3fn``, ``torch.int8``, or for e2m1 ``torch.uint8`` 0 to 15 (the
    sign in bit 3, then exponent and mantissa). Where the grid has no NaN, the code of a NaN is 0. ``zero`` is the zero
    points, fp32 in the scale's shape, here and below."""
    zero = _zero_per_part(zero)
    return _encode(_round_to_grid(_in_codes(x, scale), spec, zero), spec, zero).reshape(x.shape)


def dequantize(
    codes: Tensor, scale: Tensor, spec: TensorSpec, dtype: torch.dtype, zero: Tensor | None = None
) -> Tensor:
    """``(codes - zero) * scale``, multiplied in fp32, in ``dtype``."""
    values = _decode(_parts(codes, scale), spec, _zero_per_part(zero))
    return (values * _per_part(scale)).to(dtype).reshape(codes.shape)


def fake_quant(x: Tensor, scale: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """``dequantize(quantize(x))`` in ``x``'s dtype, except that a NaN stays a NaN on every grid."""
    rounded = _round_to_grid(_in_codes(x, scale), spec, _zero_per_part(zero))
    return rounded.mul_(_per_part(scale)).to(x.dtype).reshape(x.shape)


def inside_range(x: Tensor, scale: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Bool mask in ``x``'s shape: where rounding alone lands on the grid. NaN is outside. Of dynamic inputs it is the
    global ``scale`` that is given."""
    if spec.dynamic:
        return tokens_inside(x, spec, scale)
    return _inside(_in_codes(x, scale), spec, _zero_per_part(zero)).reshape(x.shape)


def fake_quant_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    spec: TensorSpec,
    zero: Tensor | None = None,
    *,
    scale_gradient: bool,
    of_weight: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`fake_quant` (of the surrogate above).

    Args:
        grad: gradient of the fake-quantized tensor, same shape as ``x``.
        x: the tensor before quantization.
        scale: its effective scale.
        spec: how it is quantized.
        zero: its zero points.
        scale_gradient: whether the gradient of the scale is wanted.
        of_weight: whether ``x`` is a weight, see above.

    Returns:
        The gradient of ``x`` in ``grad``'s dtype, and that of the scale in fp32 and in the scale's shape, summed over
        the elements that share it (None where it is not wanted).
    """
    v, zero = _in_codes(x, scale), _zero_per_part(zero)
    inside = _inside(v, spec, zero)
    grad_parts = _parts(grad, scale)
    grad_x = grad_parts.masked_fill(~inside, 0).reshape(x.shape)
    if not scale_gradient:
        return grad_x.masked_fill_(~v.isfinite().view(x.shape), torch.nan) if of_weight else grad_x, None
    rounded = _round_to_grid(v, spec, zero)
    terms = _scale_terms(v, rounded, inside, spec).nan_to_num_(nan=0.0)  # only a NaN x makes a NaN here
    terms.mul_(grad_parts).masked_fill_(~v.isfinite() & of_weight, torch.nan)
    return grad_x, terms.sum().reshape(scale.shape) if scale.numel() == 1 else terms.sum(dim=(1, 3))


def quantize_tokens(x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Dynamic codes of ``x [..., features]`` in its shape, and their fp32 scales and int8 zero points ``[..., n]``, of
    the ``n`` groups of a token (one per token). Of a token that is not finite the scale is NaN, and so are the codes,
    but those of grids without a NaN are 0.

    ``above`` is the global scale, fp32 ``(1,)``, where ``spec`` has one; here and below.
    """
    groups = _token_groups(x, spec)
    scale, zero_point = _token_grid(groups, spec, above)
    v = groups.float() * (1.0 / scale)
    codes = _encode(_round_to_grid(v, spec, zero_point), spec, zero_point)
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    return codes.reshape(x.shape), scale.squeeze(-1), zero_point.squeeze(-1).to(torch.int8)


def fake_quantize_tokens(x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> Tensor:
    """``x [..., features]`` through its dynamic codes and back, in its dtype."""
    groups = _token_groups(x, spec)
    scale, zero_point = _token_grid(groups, spec, above)
    rounded = _round_to_grid(groups.float() * (1.0 / scale), spec, zero_point)
    return rounded.mul_(scale).to(x.dtype).reshape(x.shape)


def fake_quantize_tokens_backward(grad: Tensor, x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> Tensor:
    """Gradient of :func:`fake_quantize_tokens`: straight-through where rounding alone lands on the grid."""
    return grad.masked_fill(~tokens_inside(x, spec, above), 0)


def tokens_inside(x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> Tensor:
    """Bool mask in ``x``'s shape: where rounding alone lands on the grid of the token, or group."""
    groups = _token_groups(x, spec)
    scale, zero_point = _token_grid(groups, spec, above)
    return _inside(groups.float() * (1.0 / scale), spec, zero_point).reshape(x.shape)


def dynamic_scale(absmax: Tensor, above: Tensor) -> Tensor:
    """The scales of groups of NVFP4 inputs from their largest magnitudes, fp32, below the global scale ``above``."""
    code = (_over(absmax, FP4_MAX) * above).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(code == 0, 0.125, code) / above


# ---- tokens


def _token_groups(x: Tensor, spec: TensorSpec) -> Tensor:
    """``x`` as ``[..., n, size]``, of the ``n`` groups that have a scale each."""
    return x.unflatten(-1, (1, -1) if spec.group_size is None else (-1, spec.group_size))


def _token_grid(groups: Tensor, spec: TensorSpec, above: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of ``groups [..., n, size]``, both fp32 ``[..., n, 1]``; the scale is NaN where a value is
    not finite. Floats have no zero point."""
    if above is not None:
        return dynamic_scale(groups.abs().amax(-1, keepdim=True).float(), above), None
    lowest, highest = (edge.float() for edge in torch.aminmax(groups, dim=-1, keepdim=True))
    lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
    if spec.symmetric:
        scale = absmax_scale(torch.maximum(-lowest, highest), spec)
        zero_point = torch.zeros_like(scale) if spec.dtype == "int" else None
    else:
        scale, zero_point = asymmetric_grid(lowest, highest, spec)
    return torch.where(scale.isfinite(), scale, torch.nan), zero_point


# ---- grids: functions of v alone, and codes


def _round_to_grid(v: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """``Q(v)``, fp32."""
    if spec.dtype == "fp8_e4m3":
        return v.clamp(spec.qmin, spec.qmax).to(torch.float8_e4m3fn).float()
    if spec.dtype == "fp4_e2m1":
        size = v.abs()
        spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        return (v / spacing).round_().mul_(spacing).clamp_(spec.qmin, spec.qmax)
    rounded = v.round()
    if zero is None:
        return rounded.clamp_(spec.qmin, spec.qmax)
    return rounded.add_(zero).clamp_(spec.qmin, spec.qmax).sub_(zero)


def _inside(v: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    if spec.dtype == "fp8_e4m3":
        return v.abs() <= FP8_ROUNDS_TO_MAX
    if spec.dtype == "fp4_e2m1":
        return v.abs() < FP4_ROUNDS_TO_MAX
    rounded = v.round() if zero is None else v.round().add_(zero)
    return (rounded >= spec.qmin) & (rounded <= spec.qmax)


def _scale_terms(v: Tensor, rounded: Tensor, inside: Tensor, spec: TensorSpec) -> Tensor:
    """``d fq / d s``."""
    if spec.dtype == "int":
        return torch.where(inside, rounded - v, rounded)
    size = v.abs()
    smallest = FP8_SMALLEST_NORMAL if spec.dtype == "fp8_e4m3" else FP4_SMALLEST_NORMAL
    return torch.where(size > spec.qmax, rounded, torch.where(size < smallest, rounded - v, 0.0))


def _encode(rounded: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """The codes of values of the grid."""
    if spec.dtype == "fp8_e4m3":
        return rounded.to(torch.float8_e4m3fn)
    number = (rounded if zero is None else rounded + zero).nan_to_num(nan=0.0)
    if spec.dtype == "int":
        return number.to(torch.int8)
    size = number.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return (code + 8 * number.signbit()).to(torch.uint8)


def _decode(codes: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """The values of codes, fp32."""
    if spec.dtype != "fp4_e2m1":
        return codes.float() if zero is None else codes.float() - zero
    code = codes.bitwise_and(7).float()
    size = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes.bitwise_and(8) == 0, size, -size)


# ---- which elements have which scale


def _in_codes(x: Tensor, scale: Tensor) -> Tensor:
    """``v = x * (1/s)`` in fp32, in the shape of :func:`_parts`."""
    return _parts(x, scale).float() * (1.0 / _per_part(scale))


def _parts(x: Tensor, scale: Tensor) -> Tensor:
    """``x [out, in]`` as ``[m, out / m, n, in / n]`` for a scale ``[m, n]``; for a single scale ``x`` as it is."""
    if scale.numel() == 1:
        return x
    return x.unflatten(1, (scale.shape[1], -1)).unflatten(0, (scale.shape[0], -1))


def _per_part(scale: Tensor) -> Tensor:
    """The scale in a shape that broadcasts over :func:`_parts`."""
    return scale.reshape(1) if scale.numel() == 1 else scale[:, None, :, None]


def _zero_per_part(zero: Tensor | None) -> Tensor | None:
    return None if zero is None else _per_part(zero)
