"""The quantisers in plain PyTorch. This file is the definition: every kernel and every export is tested against it.

Formulas, with ``s`` the scale and ``v = x * (1/s)`` computed in fp32 (the reciprocal too: dividing by ``s`` instead, or
working in bf16, changes 0.07% or 3% of the codes of a bf16 tensor)::

    fp8     Q(v) = cast(clamp(v, -448, 448))            round to nearest, ties to even
    int     Q(v) = clamp(round(v), qmin, qmax)          round to nearest, ties to even
    fq(x)   = Q(v) * s                                  product in fp32, result in x's dtype

``v`` is *inside the range* where rounding alone lands on the grid: ``qmin <= round(v) <= qmax``, for e4m3 ``|v| <=
464``. Asking ``qmin <= v <= qmax`` instead would zero the gradient of elements that are not clipped at all (at int2,
6.8% of Gaussian weights instead of 1.6%).

The gradient with respect to ``x`` is straight-through: one inside, zero outside. With respect to ``s`` it is that of
a surrogate with the rounding error held fixed, which asks in what unit it is fixed (LSQ, Esser et al. 2020, knows
integers only)::

    clipped                              fq = s * bound                     d fq / d s = bound
    evenly spaced: int, |v| < 2^-6       fq = x + s * stopgrad(Q(v) - v)    d fq / d s = Q(v) - v
    normal e4m3 numbers                  fq = x + stopgrad(s Q(v) - x)      d fq / d s = 0

An evenly spaced grid has a spacing of ``s``, and its error grows with ``s``. The spacing of a floating-point grid
follows the magnitude of ``x``: twice the scale is the same grid with the exponents one lower, so the error of a normal
number does not depend on ``s`` (on average over an octave). With LSQ's ``Q(v) - v`` there, a scale that minimises the
squared error of Gaussian values shrinks until it clips so many that the error is 19% above the best; with 0 it ends
within 1%. Scaling by ``1/sqrt(numel * qmax)`` is left to the caller, who knows how many elements share the scale.

Non-finite values: NaN stays NaN in ``fq`` and contributes no gradient; an infinity clips to the bound and has no
gradient of its own, like every clipped value.

Dynamic int8 per token (8da4w), of a token ``x`` whose range, extended to include 0, is ``[min, max]``::

    asymmetric   s = (max - min) / 255    z = clamp(-128 - round(min * (1/s)), -128, 127)
    symmetric    s = 2 absmax / 255       z = 0
    q = clamp(round(x * (1/s)) + z, -128, 127)      fq = (q - z) * s

Its scale follows the token and counts as constant in the gradient. A token with a NaN or an infinity has no range: all
of it becomes NaN, without a gradient.

Shapes: ``x`` is any shape for a scale per tensor (shape ``(1,)``); for a scale per channel or group ``x`` is ``[out,
in]`` and the scale ``[out, groups]`` (``groups = 1`` per channel). Scales are fp32 throughout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quant.spec import FP8_ROUNDS_TO_MAX, FP8_SMALLEST_NORMAL, TensorSpec


def effective_scale(s0: Tensor, theta: Tensor | None, spec: TensorSpec, model_dtype: torch.dtype) -> Tensor:
    """``s0 * exp(theta)`` in fp32; an integer scale is rounded to the model's dtype, because that is what is stored.

    The rounding is straight-through: the derivative with respect to theta is ``s0 * exp(theta)``, not rounded. The
    exponential is taken in fp64 and rounded to fp32, because every library's fp32 exponential has its own last bit.

    Args:
        s0: the frozen scale, fp32.
        theta: its learned logarithmic correction, any float dtype, or None.
        spec: how the tensor is quantised.
        model_dtype: dtype of the model's weights.
    """
    scale = s0.float() if theta is None else s0.float() * torch.exp(theta.double()).float()
    if spec.dtype == "int":
        scale = scale.to(model_dtype).float()  # autograd differentiates a cast as the identity
    return scale


def absmax_scale(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """The fp32 scale that maps the largest magnitude to the edge of the grid.

    ``absmax / 448`` for fp8 and ``absmax / ((qmax - qmin) / 2)`` for int, as compressed-tensors and torchao compute it.
    Where ``absmax`` is 0, or so small that ``1/scale`` would overflow, the scale is 1: zeros are exact under any scale.
    """
    half_range = spec.qmax if spec.dtype == "fp8_e4m3" else (spec.qmax - spec.qmin) / 2
    scale = absmax.float() / half_range
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def quantize(x: Tensor, scale: Tensor, spec: TensorSpec) -> Tensor:
    """Codes of ``x``, in its shape: ``torch.float8_e4m3fn`` or ``torch.int8``. The integer code of a NaN is 0."""
    codes = _round_to_grid(_in_codes(x, scale, spec), spec)
    if spec.dtype == "fp8_e4m3":
        return codes.reshape(x.shape)
    return codes.nan_to_num_(nan=0.0).to(torch.int8).reshape(x.shape)


def dequantize(codes: Tensor, scale: Tensor, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    """``codes * scale``, multiplied in fp32, in ``dtype``."""
    return (_blocks(codes, spec).float() * _per_block(scale, spec)).to(dtype).reshape(codes.shape)


def fake_quant(x: Tensor, scale: Tensor, spec: TensorSpec) -> Tensor:
    """``dequantize(quantize(x))`` in ``x``'s dtype, except that a NaN stays a NaN for integers too."""
    rounded = _round_to_grid(_in_codes(x, scale, spec), spec).float()
    return rounded.mul_(_per_block(scale, spec)).to(x.dtype).reshape(x.shape)


def inside_range(x: Tensor, scale: Tensor, spec: TensorSpec) -> Tensor:
    """Bool mask in ``x``'s shape: where rounding alone lands on the grid. NaN is outside."""
    return _inside(_in_codes(x, scale, spec), spec).reshape(x.shape)


def fake_quant_backward(
    grad: Tensor, x: Tensor, scale: Tensor, spec: TensorSpec, *, scale_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of :func:`fake_quant` (of the surrogate above).

    Args:
        grad: gradient of the fake-quantised tensor, same shape as ``x``.
        x: the tensor before quantisation.
        scale: its effective scale.
        spec: how it is quantised.
        scale_gradient: whether the gradient of the scale is wanted.

    Returns:
        The gradient of ``x`` in ``grad``'s dtype, and that of the scale in fp32 and in the scale's shape, summed over
        the elements that share it (None where it is not wanted).
    """
    v = _in_codes(x, scale, spec)
    inside = _inside(v, spec)
    grad_blocks = _blocks(grad, spec)
    grad_x = grad_blocks.masked_fill(~inside, 0).reshape(x.shape)
    if not scale_gradient:
        return grad_x, None
    rounded = _round_to_grid(v, spec).float()
    error = rounded - v
    if spec.dtype == "fp8_e4m3":
        error.masked_fill_(v.abs() >= FP8_SMALLEST_NORMAL, 0)
    terms = torch.where(inside, error, rounded).nan_to_num_(nan=0.0)  # only a NaN x makes a NaN here
    terms.mul_(grad_blocks)
    if spec.granularity == "tensor":
        return grad_x, terms.sum().reshape(scale.shape)
    return grad_x, terms.sum(dim=-1).reshape(scale.shape)


def quantize_tokens(x: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Dynamic int8 codes of ``x [..., features]`` in its shape, and each token's fp32 scale and int8 zero point
    ``[..., 1]``. Codes and zero point of a token that is not finite are 0, its scale is NaN."""
    scale, zero_point = _token_grid(x, symmetric)
    codes = _token_codes(x, scale, zero_point).clamp_(-128, 127).nan_to_num_(nan=0.0)
    return codes.to(torch.int8), scale, zero_point.to(torch.int8)


def fake_quantize_tokens(x: Tensor, *, symmetric: bool) -> Tensor:
    """``x [..., features]`` through dynamic int8 and back, in its dtype."""
    scale, zero_point = _token_grid(x, symmetric)
    codes = _token_codes(x, scale, zero_point).clamp_(-128, 127)
    return codes.sub_(zero_point).mul_(scale).to(x.dtype)


def fake_quantize_tokens_backward(grad: Tensor, x: Tensor, *, symmetric: bool) -> Tensor:
    """Gradient of :func:`fake_quantize_tokens`: straight-through where rounding alone lands on the grid."""
    codes = _token_codes(x, *_token_grid(x, symmetric))
    return grad.masked_fill(~((codes >= -128) & (codes <= 127)), 0)


# Multiplying eight bytes of 0 or 1 by this collects them in the top byte, the first byte in its lowest bit.
_GATHER_BITS = 0x0102040810204080


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor of any shape as a flat uint8 tensor of ``ceil(numel / 8)`` bytes."""
    flat = F.pad(mask.reshape(-1), (0, -mask.numel() % 8)).contiguous()
    return flat.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The bool tensor of ``shape`` that :func:`pack_bits` packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(1)
    return bits.view(-1)[: shape.numel()].view(torch.bool).view(shape)


def _token_grid(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of every token ``[..., 1]``, both fp32; the scale is NaN of a token that is not finite."""
    lowest, highest = (edge.float() for edge in torch.aminmax(x, dim=-1, keepdim=True))
    lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
    width = 2 * torch.maximum(-lowest, highest) if symmetric else highest - lowest
    scale = width / 255
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    zero_point = (-128 - (lowest * (1.0 / scale)).round()).clamp_(-128, 127).nan_to_num_(nan=0.0)
    return scale, torch.zeros_like(zero_point) if symmetric else zero_point


def _token_codes(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Codes before they are clamped, as fp32."""
    return (x.float() * (1.0 / scale)).round_().add_(zero_point)


def _in_codes(x: Tensor, scale: Tensor, spec: TensorSpec) -> Tensor:
    """``v = x * (1/s)`` in fp32, in the shape of :func:`_blocks`."""
    return _blocks(x, spec).float() * (1.0 / _per_block(scale, spec))


def _round_to_grid(v: Tensor, spec: TensorSpec) -> Tensor:
    """``Q(v)``: as e4m3, or as integers in fp32."""
    if spec.dtype == "fp8_e4m3":
        return v.clamp(spec.qmin, spec.qmax).to(torch.float8_e4m3fn)
    return v.round().clamp_(spec.qmin, spec.qmax)


def _inside(v: Tensor, spec: TensorSpec) -> Tensor:
    if spec.dtype == "fp8_e4m3":
        return v.abs() <= FP8_ROUNDS_TO_MAX
    rounded = v.round()
    return (rounded >= spec.qmin) & (rounded <= spec.qmax)


def _blocks(x: Tensor, spec: TensorSpec) -> Tensor:
    """``x`` with the elements that share a scale along the last dimension; per tensor ``x`` as it is."""
    if spec.granularity == "group":
        return x.unflatten(-1, (-1, spec.group_size))
    return x


def _per_block(scale: Tensor, spec: TensorSpec) -> Tensor:
    """The scale in a shape that broadcasts over :func:`_blocks`."""
    return scale.unsqueeze(-1) if spec.granularity == "group" else scale
