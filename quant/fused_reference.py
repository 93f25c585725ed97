"""Reference of the fused kernels in plain PyTorch: RMSNorm and SwiGLU, then static per-tensor quantization.

RMSNorm of a row ``x`` of ``n`` features in the model's dtype T, in fp32 where T is not written::

    rstd = 1 / sqrt(sum(x^2) / n + eps)        each operation rounded once
    h = T(x * rstd)      y = T(weight * h)      codes, mask = quantize(y)

The rounding steps are the same as in LlamaRMSNorm and its variants in transformers, but the bits are not: the sum has a
fixed order, equal on every device (:func:`sum_in_order` and quant/kernels/kernels.h), and the root is not torch's
rsqrt. vLLM's ``rms_norm_static_fp8_quant_kernel`` (csrc/layernorm_quant_kernels.cu, commit 0112cf2) rounds in the same
places and also multiplies by ``1 / scale``; its sum is a block reduction, its root CUDA's approximate rsqrt.

Gradients, straight-through with ``dy`` the gradient of ``y``, set to 0 outside of the mask::

    g = dy * weight      c = sum(g * (x * rstd)) / n      dx = T((g - (x * rstd) * c) * rstd)
    dweight = T(sum over rows of dy * h)      in fp32, over 32 rows one by one, then over these sums one by one

SwiGLU of gate ``a`` and up ``b``::

    s = T(a / (1 + exp(-a)))      y = T(s * b)      codes, mask = quantize(y)
    db = T(dy * s)      d = T(dy * b)      sigma = 1 / (1 + exp(-a))      da = T((d * sigma) * (1 + a * (1 - sigma)))

This equals torch's ``silu(a) * b`` except for the exponential, which in torch differs between devices.
:func:`exponential` uses only additions and multiplications and is within 2 ulp of the exact value in fp32. After
rounding to bf16, a few elements of a million differ from torch's.
"""

import torch
from torch import Tensor

from quant import reference
from quant.spec import TensorSpec

POSITIONS, NEIGHBOURS, ROWS_PER_SUM = 2048, 8, 32


def sum_in_order(terms: Tensor) -> Tensor:
    """Sum the last dimension in a fixed order: fp32 ``[..., n]`` to ``[..., 1]``, n at most 16,384. Accumulator p of
    2,048 adds the terms p, p + 2048, ...; each 8 neighboring accumulators are added by halves, then their 256 sums are
    also added by halves."""
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
    ``rstd``, fp32 ``[rows]``. ``scale`` is the effective scale, fp32 ``(1,)``."""
    rows = x.float()
    mean = sum_in_order(rows * rows) / torch.tensor(float(x.shape[-1]), device=x.device)
    root = (mean + torch.tensor(eps, device=x.device)).double().sqrt().float()  # torch's fp32 root may be off by a bit
    rstd = 1.0 / root
    y = weight * (rows * rstd).to(x.dtype)
    return *_quantized(y, scale, spec), rstd.reshape(-1)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x`` and of the weight, in their dtypes, from the gradient of the quantized result."""
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
    """Sum the rows in their order to ``[1, n]``."""
    total = rows.new_zeros(1, rows.shape[-1])
    for row in rows:
        total = total + row
    return total


def silu_mul_quantize(gate: Tensor, up: Tensor, scale: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes, bool mask and fake-quantized values of ``silu(gate) * up``, in the shape of ``gate``. ``scale`` is
    the effective scale, fp32 ``(1,)``."""
    return _quantized(_silu(gate) * up, scale, spec)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up, in their dtype, from the gradient of the quantized result."""
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
        return reference.quantize(y, scale, spec), torch.ones_like(y, dtype=torch.bool), y
    return (
        reference.quantize(y, scale, spec),
        reference.inside_range(y, scale, spec),
        reference.fake_quant(y, scale, spec),
    )
