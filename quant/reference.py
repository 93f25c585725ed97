"""Reference quantizers in plain PyTorch, against which every kernel and every export is tested; at the end RMSNorm and
SwiGLU with quantized results.

Formulas, with ``s`` the scale and ``v = x * (1/s)``, both operations in fp32 (for a bf16 tensor, dividing by ``s``
changes 0.07% of the codes, computing in bf16 changes 3%)::

    e4m3    Q(v) = nearest value of the grid, ties to the even code, at most 448
    e2m1    Q(v) = nearest value of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code
    int     Q(v) = clamp(round(v), qmin, qmax)          round to nearest, ties to even
    fq(x)   = Q(v) * s                                  product in fp32, result in x's dtype

Asymmetric integer weights have a *zero point* ``z`` for each scale: the code of 0. Their codes are ``q = clamp(round(v)
+ z, qmin, qmax)``, and ``Q(v) = q - z``: the grid of ``Q`` goes from ``qmin - z`` to ``qmax - z``, and these are the
bounds ``qmin`` and ``qmax`` in the formulas below. ``z`` does not learn, and need not if ``s`` learns: the position of
0 within the range does not change when the range grows or shrinks by a factor.

The floating-point grids are defined in the OCP Microscaling (MX) Specification v1.0, section 5.3 (e4m3 has one NaN).

``v`` is *inside the range* if it rounds to a value of the grid when the grid continues beyond its end: ``qmin <=
round(v) <= qmax``, for e4m3 ``|v| <= 464`` and for e2m1 ``|v| < 7`` (a tie of 448 and 480 goes to 448, one of 6 and 8
to 8). The condition ``qmin <= v <= qmax`` instead would zero the gradient of unclipped elements (at int2, 6.8% of
Gaussian weights instead of 1.6%).

The gradient with respect to ``x`` is straight-through: one inside, zero outside. The gradient with respect to ``s`` is
the gradient of a surrogate in which the rounding error is a constant. The unit of that error depends on the grid (LSQ,
Esser et al. 2020, covers integers only)::

    evenly spaced: int, subnormal        fq = x + s * stopgrad(Q(v) - v)    d fq / d s = Q(v) - v
    normal e4m3 or e2m1 numbers          fq = x + stopgrad(s Q(v) - x)      d fq / d s = 0
    int outside the range, or
    e4m3, e2m1 beyond +-448, +-6         fq = s * bound                     d fq / d s = bound

Subnormal are e4m3 numbers with ``|v| < 2^-6`` and e2m1 numbers with ``|v| < 1``. The spacing of an evenly spaced grid
is ``s``, so its error grows with ``s``. The spacing of a floating-point grid follows the magnitude of ``x``: doubling
the scale only lowers the exponents by one, so the error of a normal number does not depend on ``s`` (on average over an
octave). With LSQ's gradient ``Q(v) - v`` for normal numbers, a scale that minimizes the squared error of Gaussian
values shrinks and clips until the error is 19% above the best (e4m3; 18% for e2m1); with 0 it ends within 1%. Beyond
its largest number a grid no longer follows ``x``, inside the range or not: if e2m1 counted as clipped only from 7 on,
the largest value of each group of 32 would settle there, and the error would end 60% above the best instead of 21%. The
caller multiplies the scale's gradient by ``1/sqrt(numel * qmax)`` for the ``numel`` elements of a weight that share
the scale, or the ``numel`` features of an input.

Non-finite values: NaN stays NaN in ``fq`` and contributes no gradient; an infinity clips to the bound and has no
gradient, like every clipped value. As a forward may use only the codes of a weight, which hide a NaN, a weight with
non-finite ``v`` gets a gradient of NaN; if its scale learns, the scale's gradient is NaN instead.

A *dynamic* scale belongs to one token, or to one group of its features. With ``[min, max]`` the range of these
features, extended to include 0, and ``absmax`` their largest magnitude (the scheme 8da4w has asymmetric int8 inputs per
token)::

    symmetric    s = absmax / ((qmax - qmin) / 2)   z = 0
    asymmetric   s = (max - min) / (qmax - qmin)    z = clamp(qmin - round(min * (1/s)), qmin, qmax)
    int          q = clamp(round(v) + z, qmin, qmax)        fq = (q - z) * s
    e4m3         q = Q(v)                                   fq = q * s

Such a scale is a constant in the gradient. A token (or group) with a NaN or an infinity has no range: all of it becomes
NaN, without a gradient (except for infinities in NVFP4, see below). The initial scale and zero point of weights use the
same formulas, as in compressed-tensors and torchao.

NVFP4 inputs have a dynamic scale per group of 16, stored in e4m3 relative to ``G``, the global scale of the tensor::

    k = e4m3(min(G * (absmax / 6), 448)), 1/8 for 0        s = k / G        q = Q(v)        fq = q * s

as in compressed-tensors 0.20 (quantization/utils/helpers.py, lifecycle/forward_helpers.py), which divides by ``s``. The
kernels of vLLM (csrc/libtorch_stable/quantization/fp4/nvfp4_utils.cuh, ``cvt_warp_fp16_to_fp4``) and FlashInfer
multiply, with approximate reciprocals of 6, ``G`` and ``s``, and differ only near a rounding tie. If ``k`` rounds to 0,
so does every code of the group, but no element counts as clipped. Rounding ``k`` to nearest maps the largest value to
``|v| <= 6.4``, inside the range. Outside (from 7 on) are values of groups larger than in calibration, for which ``k``
saturates, including infinities, and values of up to 9 if ``k`` is 2^-9 or 2^-8, its smallest numbers.

MXFP8 and MXFP4 inputs have a dynamic scale per group of 32, the smallest power of two that clips nothing::

    s = 2^ceil(log2(absmax / qmax)), 1 where that is below 2^-126        q = Q(v)        fq = q * s

as in vLLM 0.33 (``_mxfp8_e4m3_quantize_torch`` in model_executor/layers/quantization/utils/mxfp8_utils.py) and the
kernels of FlashInfer 0.7.2 that it calls (``float_to_ue8m0_fast`` in quantization/kernels/mxfp8_quantize.py and
mxfp4_quantize.py; with an approximate 1 / qmax). Scales of weights follow compressed-tensors 0.20
(:func:`power_of_two`): they differ from this formula if absmax is 1.75 times a power of two (MXFP8), or 1.5 to 1.75
times a power of two (MXFP4).

Shapes: for a scale per tensor, shape ``(1,)``, ``x`` has any shape. Otherwise ``x`` is ``[out, in]`` and the scale
``[out, 1]`` per channel, ``[out, in / size]`` per group or ``[ceil(out / size), ceil(in / size)]`` per block. Scales
are fp32.
"""

import math
from typing import Any

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
    per_block,
    per_run,
)

E4M3_SMALLEST, E8M0_BIAS, FP16_SMALLEST, FP16_MAX = 2.0**-9, 127, 2.0**-24, 65504.0


def effective_scale(
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    global_scale: Tensor | None = None,
) -> Tensor:
    """Compute ``s = s0 * exp(theta)`` in fp32, rounded to the stored format (``spec.scale_format``)::

        float32   s
        model     s in the model's dtype
        float16   the nearest fp16 number to s that is neither 0 nor infinite; also ``model`` for fp16 models
        e8m0      2^round(log2(s)), the exponent within -127 and 127 (OCP MX Specification v1.0, section 5.4.1)
        e4m3      e4m3(clamp(s * G, 2^-9, 448)) / G, G the global scale (NVFP4, as compressed-tensors stores it)

    The rounding is straight-through: the derivative with respect to theta is the unrounded ``s0 * exp(theta)``. The
    exponential is computed in fp64 and rounded to fp32, as fp32 exponentials of libraries differ in the last bit. The
    fields of a scale are described in :class:`quant.scale.Scale`.
    """
    scale = s0.float() if theta is None else s0.float() * torch.exp(theta.double()).float()
    if spec.scale_format == "float32":
        return scale
    if spec.scale_format == "model" and model_dtype != torch.float16:
        return scale.to(model_dtype).float()  # autograd differentiates a cast as the identity
    # Adds 0: the exact rounded value with the derivative of the unrounded one.
    return round_scale(scale.detach(), spec, global_scale) + (scale - scale.detach())


def round_scale(scale: Tensor, spec: TensorSpec, global_scale: Tensor | None) -> Tensor:
    """Round the fp32 ``scale`` to the format in which ``spec`` stores it: ``float16`` (also ``model``, in fp16 models),
    ``e8m0`` or ``e4m3``; NaN if not finite. Only fp16 scales may be negative. ``global_scale`` is for ``e4m3``."""
    if spec.mx:
        # fp64 errors are far smaller than the distance of an fp32 number from a tie: all libraries agree.
        rounded = torch.exp2(scale.double().log2().round().clamp(-E8M0_BIAS, E8M0_BIAS)).float()
    elif spec.scale_format in ("float16", "model"):
        rounded = torch.copysign(scale.abs().clamp(FP16_SMALLEST, FP16_MAX).half().float(), scale)
    else:
        assert spec.scale_format == "e4m3" and global_scale is not None
        code = (scale * global_scale).clamp(E4M3_SMALLEST, FP8_MAX).to(torch.float8_e4m3fn)
        rounded = code.float() / global_scale
    return torch.where(scale.isfinite(), rounded, torch.nan)


def absmax_scale(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """Compute the fp32 scale that maps the largest magnitude to the edge of the grid.

    ``absmax / ((qmax - qmin) / 2)``, with the divisor 448 for e4m3 and 6 for e2m1, as in compressed-tensors and
    torchao; :func:`power_of_two` for MX. If ``1/scale`` would overflow, the scale is 1: zeros are exact under any
    scale.
    """
    scale = power_of_two(absmax, spec) if spec.mx else _over(absmax.float(), (spec.qmax - spec.qmin) / 2)
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def power_of_two(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """Compute the scale of a group as a power of two, fp32; ``absmax`` itself if 0 or not finite.

    For weights, ``absmax / scale`` is in ``[224, 448)`` (e4m3) or ``[3.5, 7)`` (e2m1), as in compressed-tensors'
    ``generate_mx_scales``; for dynamic inputs, the smallest scale with ``absmax / scale <= qmax``. Nothing is clipped.
    """
    edge = FP4_ROUNDS_TO_MAX if spec.dtype == "fp4_e2m1" and not spec.dynamic else spec.qmax
    (mantissa, exponent), (its_mantissa, its_exponent) = torch.frexp(absmax.float()), math.frexp(edge)
    above = mantissa > its_mantissa if spec.dynamic else mantissa >= its_mantissa
    scale = torch.exp2((exponent - its_exponent + above).double()).float()  # exact, as in round_scale
    return torch.where(absmax.isfinite() & (absmax > 0), scale, absmax)


def global_scale(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """Compute ``G = 448 * qmax / absmax``, fp32, which maps the largest group scale to 448, as compressed-tensors'
    ``generate_gparam``; 1 for a tensor of zeros, which are exact under any scale."""
    scale = FP8_MAX * spec.qmax / absmax.float()
    return torch.where(scale.isinf(), 1.0, scale)


def _over(x: Tensor, divisor: float) -> Tensor:
    """Compute ``x / divisor``, rounded once on every device: CUDA would multiply by the reciprocal of a Python
    number."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def asymmetric_grid(lowest: Tensor, highest: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """Compute the fp32 scale and zero point of the integer grid over the range ``lowest <= 0`` to ``highest >= 0``, by
    the module's formulas.

    The scale is 1 for a range of 0 or so small that ``1/scale`` would overflow. For a range that is not finite, the
    scale is not finite and the zero point is 0.
    """
    scale = _over(highest.float() - lowest.float(), spec.qmax - spec.qmin)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    zero = (spec.qmin - (lowest.float() * (1.0 / scale)).round()).clamp(spec.qmin, spec.qmax)
    return scale, torch.where(scale.isfinite(), zero, 0.0)


def quantize(x: Tensor, scale: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Compute the codes of ``x``, in its shape: ``torch.float8_e4m3fn``, ``torch.int8``, or for e2m1 ``torch.uint8`` 0
    to 15 (sign in bit 3, then exponent and mantissa). A NaN has the code 0 on grids without NaN. ``zero``: zero points,
    fp32 in the scale's shape."""
    scale, zero = per_run(scale, x.shape, spec), _per_part(zero)
    return _encode(_round_to_grid(_in_codes(x, scale), spec, zero), spec, zero).reshape(x.shape)


def dequantize(
    codes: Tensor, scale: Tensor, spec: TensorSpec, dtype: torch.dtype, zero: Tensor | None = None
) -> Tensor:
    """Compute ``(codes - zero) * scale`` in fp32, returned in ``dtype``; an e2m1 code counts as the number that it
    stands for. Scale and zero points are fp32."""
    scale = per_run(scale, codes.shape, spec)
    values = _decode(_parts(codes, scale), spec, _per_part(zero))
    return (values * _per_part(scale)).to(dtype).reshape(codes.shape)


def fake_quant(x: Tensor, scale: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Compute ``dequantize(quantize(x))`` in ``x``'s dtype, except that a NaN stays NaN on every grid."""
    scale = per_run(scale, x.shape, spec)
    rounded = _round_to_grid(_in_codes(x, scale), spec, _per_part(zero))
    return rounded.mul_(_per_part(scale)).to(x.dtype).reshape(x.shape)


def inside_range(x: Tensor, scale: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Compute a bool mask, in ``x``'s shape, of the elements inside the range; NaN is outside. For dynamic inputs,
    ``scale`` is the global scale."""
    if spec.dynamic:
        return tokens_inside(x, spec, scale)
    return _inside(_in_codes(x, per_run(scale, x.shape, spec)), spec, _per_part(zero)).reshape(x.shape)


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
    """Compute the gradients of :func:`fake_quant`: straight-through for ``x``, by this file's surrogate for the scale.

    Returns the gradient of ``x`` in ``grad``'s dtype, and the gradient of the scale, fp32 in the scale's shape, summed
    over the elements that share it (None without ``scale_gradient``). With ``of_weight``, a non-finite element of ``x``
    makes a gradient NaN: with ``scale_gradient`` the gradient of its scale, else the gradient of the element.
    """
    scale = per_run(scale, x.shape, spec)
    v, zero = _in_codes(x, scale), _per_part(zero)
    inside = _inside(v, spec, zero)
    grad_parts = _parts(grad, scale)
    grad_x = grad_parts.masked_fill(~inside, 0).reshape(x.shape)
    if not scale_gradient:
        return grad_x.masked_fill_(~v.isfinite().view(x.shape), torch.nan) if of_weight else grad_x, None
    rounded = _round_to_grid(v, spec, zero)
    terms = _scale_terms(v, rounded, inside, spec).nan_to_num_(nan=0.0)  # NaN only from a NaN x
    terms.mul_(grad_parts).masked_fill_(~v.isfinite() & of_weight, torch.nan)
    sums = terms.sum().reshape(scale.shape) if scale.numel() == 1 else terms.sum(dim=(1, 3))
    return grad_x, per_block(sums, x.shape, spec).sum(-2) if spec.granularity == "block" else sums


def quantize_tokens(x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``x [..., features]`` with dynamic scales: codes in its shape, fp32 scales and int8 zero points ``[...,
    n]`` for the ``n`` groups of a token (1 for scales per token). A group with NaN or Inf has a scale of NaN, and codes
    of NaN, or 0 on grids without NaN; in NVFP4 an infinity saturates instead.

    ``above`` is the global scale, fp32 ``(1,)``, if ``spec`` has one; else None.
    """
    v, scale, zero_point = _tokens_in_codes(x, spec, above)
    codes = _encode(_round_to_grid(v, spec, zero_point), spec, zero_point)
    zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
    return codes.reshape(x.shape), scale.squeeze(-1), zero_point.squeeze(-1).to(torch.int8)


def fake_quantize_tokens(x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> Tensor:
    """Quantize ``x [..., features]`` with dynamic scales and dequantize it, in its dtype; ``above`` is the global scale
    or None."""
    v, scale, zero_point = _tokens_in_codes(x, spec, above)
    return _round_to_grid(v, spec, zero_point).mul_(scale).to(x.dtype).reshape(x.shape)


def fake_quantize_tokens_backward(grad: Tensor, x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> Tensor:
    """Compute the gradient of :func:`fake_quantize_tokens`, with the same arguments, from ``grad``, the gradient of its
    result: straight-through inside the range, 0 outside."""
    return grad.masked_fill(~tokens_inside(x, spec, above), 0)


def tokens_inside(x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> Tensor:
    """Compute a bool mask, in ``x``'s shape, of the elements inside the range of their token or group; arguments as in
    :func:`fake_quantize_tokens`."""
    v, _, zero_point = _tokens_in_codes(x, spec, above)
    return _inside(v, spec, zero_point).reshape(x.shape)


# ---- tokens


def _tokens_in_codes(x: Tensor, spec: TensorSpec, above: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``v = x * (1/s)``, fp32 ``[..., n, size]`` for the ``n`` groups of a token, with their scales and zero
    points, fp32 ``[..., n, 1]``. The scale is NaN for groups with NaN or (not NVFP4) Inf. Floats have no zero point."""
    groups = x.unflatten(-1, (1, -1) if spec.group_size is None else (-1, spec.group_size))
    zero_point = None
    if above is not None:
        absmax = groups.abs().amax(-1, keepdim=True).float()
        code = (_over(absmax, FP4_MAX) * above).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
        scale = torch.where(code == 0, 0.125, code) / above
    else:
        lowest, highest = (edge.float() for edge in torch.aminmax(groups, dim=-1, keepdim=True))
        lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
        if spec.symmetric:
            scale = absmax_scale(torch.maximum(-lowest, highest), spec)
            zero_point = torch.zeros_like(scale) if spec.dtype == "int" else None
        else:
            scale, zero_point = asymmetric_grid(lowest, highest, spec)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
    return groups.float() * (1.0 / scale), scale, zero_point


# ---- grids: functions of only v, and codes


def _round_to_grid(v: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Round ``v``, values in units of their scale, to the grid, clipped to its ends; fp32."""
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
    """Compute the derivative of each fake-quantized element with respect to its scale."""
    if spec.dtype == "int":
        return torch.where(inside, rounded - v, rounded)
    size = v.abs()
    smallest = FP8_SMALLEST_NORMAL if spec.dtype == "fp8_e4m3" else FP4_SMALLEST_NORMAL
    return torch.where(size > spec.qmax, rounded, torch.where(size < smallest, rounded - v, 0.0))


def _encode(rounded: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Convert grid values (rounded, in units of the scale) to codes as stored."""
    if spec.dtype == "fp8_e4m3":
        return rounded.to(torch.float8_e4m3fn)
    number = (rounded if zero is None else rounded + zero).nan_to_num(nan=0.0)
    if spec.dtype == "int":
        return number.to(torch.int8)
    size = number.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4))
    return (code + 8 * number.signbit()).to(torch.uint8)


def _decode(codes: Tensor, spec: TensorSpec, zero: Tensor | None = None) -> Tensor:
    """Convert stored codes to grid values (in units of the scale), fp32."""
    if spec.dtype != "fp4_e2m1":
        return codes.float() if zero is None else codes.float() - zero
    code = codes.bitwise_and(7).float()
    size = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes.bitwise_and(8) == 0, size, -size)


# ---- broadcasting scales over elements


def _in_codes(x: Tensor, scale: Tensor) -> Tensor:
    """Compute ``v = x * (1/s)`` in fp32, in the shape of :func:`_parts`: dimensions split by the scale's shape."""
    return _parts(x, scale).float() * (1.0 / _per_part(scale))


def _parts(x: Tensor, scale: Tensor) -> Tensor:
    """View ``x [out, in]`` as ``[m, out / m, n, in / n]`` for a scale ``[m, n]``; unchanged for a single scale."""
    if scale.numel() == 1:
        return x
    return x.unflatten(1, (scale.shape[1], -1)).unflatten(0, (scale.shape[0], -1))


def _per_part(scale: Any) -> Any:
    """Reshape the scale (or zero points, or None) to broadcast over :func:`_parts`."""
    if scale is None:
        return None
    return scale.reshape(1) if scale.numel() == 1 else scale[:, None, :, None]


# ---- RMSNorm and SwiGLU with a quantized result

POSITIONS, NEIGHBOURS, ROWS_PER_SUM = 2048, 8, 32


def sum_in_order(terms: Tensor) -> Tensor:
    """Sum the last dimension in a fixed order: fp32 ``[..., n]`` to ``[..., 1]``, n at most 16,384. Accumulator p of
    2,048 adds the terms p, p + 2048, ...; each 8 neighboring accumulators are added by halves (the first half plus the
    second, until one is left), then their 256 sums are also added by halves."""
    padded = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % POSITIONS))
    sums = torch.zeros_like(padded[..., :POSITIONS])
    for step in padded.split(POSITIONS, dim=-1):
        sums = sums + step
    lanes = _sum_by_halves(sums.unflatten(-1, (-1, NEIGHBOURS)), NEIGHBOURS)
    return _sum_by_halves(lanes.squeeze(-1), POSITIONS // NEIGHBOURS)


def _sum_by_halves(sums: Tensor, size: int) -> Tensor:
    while size > 1:
        size //= 2
        sums = sums[..., :size] + sums[..., size : 2 * size]
    return sums


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor, spec: TensorSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute codes, bool mask and fake-quantized values of RMSNorm's result, in the shape of ``x [..., n]``, and
    ``rstd``, fp32 ``[rows]``. ``scale`` is the effective scale, fp32 ``(1,)``.

    In fp32, except where a value is rounded to the model's dtype T::

        rstd = 1 / sqrt(sum(x^2) / n + eps)        each operation rounded once
        h = T(x * rstd)      y = T(weight * h)      codes, mask = quantize(y)

    The rounding steps are the same as in LlamaRMSNorm and its variants in transformers, but the bits are not: the sum
    has a fixed order, equal on every device (:func:`sum_in_order` and quant/kernels/kernels.h), and the root is not
    torch's rsqrt. vLLM's ``rms_norm_static_fp8_quant_kernel`` (csrc/layernorm_quant_kernels.cu, commit 0112cf2) rounds
    in the same places and also multiplies by ``1 / scale``; its sum is a block reduction, its root CUDA's approximate
    rsqrt.
    """
    rows = x.float()
    mean = sum_in_order(rows * rows) / torch.tensor(float(x.shape[-1]), device=x.device)
    root = (mean + torch.tensor(eps, device=x.device)).double().sqrt().float()  # torch's fp32 root may be off by a bit
    rstd = 1.0 / root
    y = weight * (rows * rstd).to(x.dtype)
    return *_quantized(y, scale, spec), rstd.reshape(-1)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x`` and of the weight, in their dtypes, from the gradient of the quantized result.

    Straight-through, with ``dy`` the gradient of ``y``, set to 0 outside of the mask; ``y``, ``h``, ``n`` and ``T`` are
    those of :func:`rms_norm_quantize`::

        g = dy * weight      c = sum(g * (x * rstd)) / n      dx = T((g - (x * rstd) * c) * rstd)
        dweight = T(sum over rows of dy * h)      in fp32, over 32 rows one by one, then over these sums one by one
    """
    n = x.shape[-1]
    dy = grad.masked_fill(~mask, 0).reshape(-1, n)
    rows, w = x.reshape(-1, n).float(), weight.float()
    h = rows * rstd[:, None]
    g = dy.float() * w
    c = sum_in_order(g * h) / torch.tensor(float(n), device=x.device)
    of_weight = torch.zeros(0, n, device=x.device)
    for dy_rows, h_rows in zip(dy.float().split(ROWS_PER_SUM), h.to(x.dtype).float().split(ROWS_PER_SUM), strict=True):
        of_weight = torch.cat([of_weight, _sum_rows(dy_rows * h_rows)])
    return ((g - h * c) * rstd[:, None]).to(x.dtype).reshape(x.shape), _sum_rows(of_weight)[0].to(weight.dtype)


def _sum_rows(rows: Tensor) -> Tensor:
    """Sum rows ``[m, n]`` one after the other to ``[1, n]``."""
    total = rows.new_zeros(1, rows.shape[-1])
    for row in rows:
        total = total + row
    return total


def silu_mul_quantize(gate: Tensor, up: Tensor, scale: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes, bool mask and fake-quantized values of ``silu(gate) * up``, in the shape of ``gate``. ``scale`` is
    the effective scale, fp32 ``(1,)``.

    With ``a`` the gate, ``b`` the up projection and ``T`` a rounding to their dtype::

        s = T(a / (1 + exp(-a)))      y = T(s * b)      codes, mask = quantize(y)

    This equals torch's ``silu(a) * b`` except for the exponential, which in torch differs between devices.
    :func:`exponential` uses only additions and multiplications and is within 2 ulp of the exact value in fp32. After
    rounding to bf16, a few elements of a million differ from torch's.
    """
    return _quantized(_silu(gate) * up, scale, spec)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up, in their dtype, from the gradient of the quantized result.

    With ``dy`` the gradient of the result, set to 0 outside of the mask, and ``a``, ``b``, ``s`` and ``T`` as in
    :func:`silu_mul_quantize`::

        db = T(dy * s)      d = T(dy * b)      sigma = 1 / (1 + exp(-a))
        da = T((d * sigma) * (1 + a * (1 - sigma)))
    """
    dy = grad.masked_fill(~mask, 0)
    a, d = gate.float(), (dy * up).float()
    sigma = 1.0 / (1.0 + exponential(-a))
    return ((d * sigma) * (1.0 + a * (1.0 - sigma))).to(gate.dtype), dy * _silu(gate)


def _silu(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide / (1.0 + exponential(-wide))).to(x.dtype)


def exponential(x: Tensor) -> Tensor:
    """Compute ``e^x`` in fp32, one rounding per operation: with ``x = k ln2 + r``, the polynomial of Cephes' expf
    (single/expf.c) in ``r``, multiplied by 2^k in two factors."""
    x = torch.where(x > 104, 104.0, torch.where(x < -104, -104.0, x))
    magic = torch.tensor(12582912.0, device=x.device)
    shifted = x * 1.44269504088896341 + magic
    k = shifted - magic
    r = (x - k * 0.693359375) - k * -2.12194440e-4
    total = torch.full_like(r, 1.9875691500e-4)
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        total = total * r + term
    total = (total * (r * r) + r) + 1.0
    power = shifted.view(torch.int32) - magic.view(torch.int32)
    half = power >> 1
    return (total * ((half + 127) << 23).view(torch.float32)) * ((power - half + 127) << 23).view(torch.float32)


def _quantized(y: Tensor, scale: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor, Tensor]:
    y = y.contiguous()
    if y.numel() == 0:
        return quantize(y, scale, spec), torch.ones_like(y, dtype=torch.bool), y
    return quantize(y, scale, spec), inside_range(y, scale, spec), fake_quant(y, scale, spec)
