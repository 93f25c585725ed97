"""Quantizers, sums of rows, norms and SwiGLU as torch operators (``torch.ops.deepqat``).

A function here declares an operator by its parameters, and implements it in plain PyTorch with :mod:`quant.reference`:
used without a compiler, and in tests as the expected result of the kernels. :func:`_operator` also takes a function
that computes the results' shapes for torch.compile.

An operator computes the scale ``s0 * exp(theta)`` rounded to ``scale_dtype``, so that a learned scale needs no extra
launch. Scale ``i`` of ``n`` belongs to the ``i``-th of ``n`` equal consecutive segments of the row-major tensor: one
scale is per tensor, ``(E,)`` per expert of a stack, ``(out, groups)`` per group. A *grid* is 0 for e4m3, 1 for e2m1,
else the number of bits of a signed integer, optionally with a zero point for each scale; a negative number means a
narrow range without zero points (-4: -7..7). Grids of tokens are 0, 1 or 2 to 8; only integers may be asymmetric.

``scale_dtype`` is the dtype to which scales are rounded: fp32, bf16 or fp16; ``float8_e8m0fnu`` for powers of two (MX);
or ``float8_e4m3fn`` for e4m3 numbers relative to ``above``, the global scale, fp32 ``(1,)`` or for a stack one per
expert (NVFP4). For tokens, None means fp32; ``float8_e8m0fnu`` goes with groups of 32 features, ``float8_e4m3fn`` with
groups of 16, and e2m1 needs one of them.

No operator has a gradient in autograd: autograd functions call them, with ``fake_quantize_backward_`` and
``fake_quantize_tokens_and_mask_`` in backward. Operators whose name ends in ``_`` overwrite their first argument.

Operators that backward uses to quantize again take a gradient as ``after``, which does not affect the result. Without
it, ``torch.compile`` would merge the call with the same call in the forward and keep the result for backward: a
fake-quantized copy of every weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quant import reference
from quant.formats.packing import pack_bits, pack_nibbles, unpack_bits
from quant.spec import MX_GROUP, NVFP4_GROUP, Dtype, Granularity, TensorSpec

OPERATORS = torch.library.Library("deepqat", "DEF")
REFERENCE: dict[str, Callable[..., Any]] = {}  # the functions of this module by their operators' names

_CODE_DTYPES = {0: torch.float8_e4m3fn, 1: torch.uint8}  # by grid; int8 for all others
# Specs whose scales are not stored as numbers of a dtype.
_STORED = {
    torch.float8_e8m0fnu: TensorSpec("fp4_e2m1", 4, "group", MX_GROUP),
    torch.float8_e4m3fn: TensorSpec("fp4_e2m1", 4, "group", NVFP4_GROUP),
}
_FLOATS: tuple[tuple[Dtype, int], ...] = (("fp8_e4m3", 8), ("fp4_e2m1", 4))


def _operator(shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the operator that the decorated function implements.

    Args:
        shapes: returns empty results of the right shapes, for the same arguments in the same order; torch leaves out
            trailing arguments that have their defaults.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.removeprefix("_")
        written = ("grad",) if name.endswith("_") else ()
        OPERATORS.define(torch.library.infer_schema(function, mutates_args=written, op_name=name))
        torch.library.register_fake(f"deepqat::{name}", shapes)
        REFERENCE[name] = function
        return function

    return declare


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Create an empty contiguous tensor in the shape of ``x``."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _written(x: Tensor, grid: int, _stored: Any, mask: bool, values: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes = _like(x, _CODE_DTYPES.get(grid, torch.int8))
    packed = x.new_empty((x.numel() + 7) // 8 if mask else 0, dtype=torch.uint8)
    return codes, packed, _like(x) if values else x.new_empty(0)


def _kept_tokens(
    x: Tensor, grid: int, mask: bool, scale_dtype: torch.dtype | None = None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, four = x.shape[:-1], grid == 1
    codes = x.new_empty((*shape, x.shape[-1] // 2 if four else x.shape[-1]), dtype=_CODE_DTYPES[grid])
    packed = x.new_empty((x.numel() + 7) // 8 if mask else 0, dtype=torch.uint8)
    return _like(x), codes, packed, x.new_empty((*shape, 1), dtype=scale_dtype or torch.float32)


@_operator(lambda s0, *_: _like(s0))
def _effective_scale(
    s0: Tensor,
    theta: Tensor | None,
    scale_dtype: torch.dtype,
    after: Tensor | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Compute the effective scales, fp32, in s0's shape."""
    if above is not None:
        above = above.repeat_interleave(s0.numel() // above.numel()).view(s0.shape)
    scale = reference.effective_scale(s0, theta, _STORED.get(scale_dtype, _spec(8)), scale_dtype, above)
    return scale.clone() if scale is s0 else scale  # an operator must not return its argument


@_operator(
    lambda x, s0, _theta, grid, stored, mask, values, scale, *_: (
        *_written(x, grid, stored, mask, values),
        _like(s0) if scale else s0.new_empty(0),
    )
)
def _quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    mask: bool,
    values: bool,
    scale: bool,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute codes, packed mask of unclipped elements, fake-quantized ``x`` and effective scales; each of the last
    three is empty unless requested."""
    effective = _effective_scale(s0, theta, scale_dtype, above=above)
    rows, quantizer = _rows(x, s0), (effective.reshape(-1, 1), _spec(grid), _zeros(zero))
    codes = reference.quantize(rows, *quantizer).reshape(x.shape)
    inside = reference.inside_range(rows, *quantizer) if mask else rows.new_empty(0, dtype=torch.bool)
    rounded = reference.fake_quant(rows, *quantizer).reshape(x.shape) if values else x.new_empty(0)
    return codes, pack_bits(inside), rounded, effective if scale else effective.new_empty(0)


@_operator(
    lambda codes, _s0, theta, _stored, dtype, zeros, *_: (
        _like(codes, dtype),
        _like(theta) if zeros else codes.new_empty(0, dtype=dtype),
    )
)
def _dequantize(
    codes: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    zeros: bool,
    after: Tensor | None = None,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``(codes - zero) * scale`` in ``dtype``, and zeros like theta, empty unless requested."""
    spec = _spec({torch.float8_e4m3fn: 0, torch.uint8: 1, torch.int8: 8}[codes.dtype])
    scale = _scales(s0, theta, scale_dtype, above)
    values = reference.dequantize(_rows(codes, s0), scale, spec, dtype, _zeros(zero)).reshape(codes.shape)
    return values, torch.zeros_like(theta) if zeros and theta is not None else values.new_empty(0)


@_operator(lambda x, *_: _like(x))
def _fake_quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    after: Tensor | None = None,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize ``x``."""
    scale = _scales(s0, theta, scale_dtype, above)
    return reference.fake_quant(_rows(x, s0), scale, _spec(grid), _zeros(zero)).reshape(x.shape)


@_operator(lambda grad, x, s0, theta, grid, stored, factor, wanted, *_: _like(theta) if wanted else x.new_empty(0))
def _fake_quantize_backward_(
    grad: Tensor,
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    factor: float,
    theta_gradient: bool,
    zero: Tensor | None = None,
    above: Tensor | None = None,
    of_weight: bool = False,
) -> Tensor:
    """Overwrite ``grad`` with the gradient of ``x``; return the gradient of theta times ``factor``, empty if not
    requested."""
    grad_x, grad_scale = reference.fake_quant_backward(
        _rows(grad, s0),
        _rows(x, s0),
        _scales(s0, theta, scale_dtype, above),
        _spec(grid),
        _zeros(zero),
        scale_gradient=theta_gradient,
        of_weight=of_weight,
    )
    grad.copy_(grad_x.reshape(x.shape))
    if theta is None or grad_scale is None:
        return x.new_empty(0)
    if x.numel() == 0:
        return torch.zeros_like(theta)
    learned = _effective_scale(s0, theta, torch.float32)
    return (grad_scale.reshape(s0.shape) * learned * factor).to(theta.dtype)


@_operator(lambda x, theta: _like(x))
def _multiply_runs(x: Tensor, theta: Tensor) -> Tensor:
    """Multiply the segment of ``x`` that belongs to each element of theta by ``exp(theta)``."""
    factors = torch.exp(theta.double()).float().view(-1, 1)
    return (_rows(x, theta) * factors).to(x.dtype).view(x.shape)


@_operator(lambda x, y, theta, factor: _like(theta))
def _sum_products(x: Tensor, y: Tensor, theta: Tensor, factor: float) -> Tensor:
    """Sum ``x * y`` in fp32 over the segment that belongs to each element of theta; return the sums times
    ``factor``."""
    sums = (_rows(x, theta).float() * _rows(y, theta).float()).sum(1)
    return (sums * factor).to(theta.dtype).view(theta.shape)


@_operator(lambda grad, mask: None)
def _masked_(grad: Tensor, mask: Tensor) -> None:
    """Zero ``grad`` in place where the packed ``mask`` has a 0 bit."""
    grad.masked_fill_(~unpack_bits(mask, grad.shape), 0)


@_operator(lambda grad, *_: _like(grad))
def _dequantize_and_mask_(
    grad: Tensor,
    mask: Tensor,
    codes: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    scale_dtype: torch.dtype,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Zero ``grad`` in place where the packed ``mask`` has a 0 bit; return ``codes`` dequantized to the dtype of
    ``grad``."""
    _masked_(grad, mask)
    return _dequantize(codes, s0, theta, scale_dtype, grad.dtype, False, None, zero, above)[0]


@_operator(lambda x, count: x.new_empty(count, dtype=torch.float32))
def _amax(x: Tensor, count: int) -> Tensor:
    """Compute the largest magnitude of each of ``count`` segments, fp32; NaN for a segment with NaN."""
    if x.numel() == 0:
        return torch.zeros(count, device=x.device)
    return x.reshape(count, -1).abs().amax(1).float()


@_operator(_kept_tokens)
def _keep_tokens(
    x: Tensor, grid: int, mask: bool, scale_dtype: torch.dtype | None = None, above: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute fake-quantized values, codes (e2m1: two in a byte), mask, and scales in their stored format."""
    spec = _token_spec(grid, True, scale_dtype)
    if x.numel() == 0:
        codes, scale = reference.quantize(x, torch.ones(1, device=x.device), spec), torch.ones((*x.shape[:-1], 1))
    else:
        codes, scale, _ = reference.quantize_tokens(x.contiguous(), spec, above)
        scale = scale if above is None else scale * above
    inside = reference.tokens_inside(x, spec, above) if mask and x.numel() > 0 else x.new_empty(0, dtype=torch.bool)
    if grid == 1:
        codes = pack_nibbles(codes.view(-1, codes.shape[-1])).view(*codes.shape[:-1], -1)
    values = _fake_quantize_tokens(x, grid, True, None, scale_dtype, above)
    return values, codes, pack_bits(inside), scale.to(x.device, scale_dtype or torch.float32)


@_operator(lambda x, *_: _like(x))
def _fake_quantize_tokens(
    x: Tensor,
    grid: int,
    symmetric: bool,
    after: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize ``x`` with a dynamic scale per token (the last dimension), or per group as
    ``scale_dtype`` demands."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    return reference.fake_quantize_tokens(x.contiguous(), _token_spec(grid, symmetric, scale_dtype), above)


@_operator(lambda grad, x, grid, symmetric, values, *_: _like(x) if values else x.new_empty(0))
def _fake_quantize_tokens_and_mask_(
    grad: Tensor,
    x: Tensor,
    grid: int,
    symmetric: bool,
    values: bool,
    scale_dtype: torch.dtype | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Overwrite ``grad`` with the gradient of ``x``; return fake-quantized ``x`` if ``values``, else an empty
    tensor."""
    if x.numel() > 0:
        spec = _token_spec(grid, symmetric, scale_dtype)
        grad.copy_(reference.fake_quantize_tokens_backward(grad, x.contiguous(), spec, above))
    return _fake_quantize_tokens(x, grid, symmetric, None, scale_dtype, above) if values else x.new_empty(0)


@_operator(lambda rows, places: rows.new_empty(places.shape[0], rows.shape[1]))
def _sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Sum the ``rows`` [N, H] at the indices ``places`` [T, K] to [T, H]."""
    sums = rows.new_zeros(places.shape[0], rows.shape[1])
    for column in places.unbind(1):
        sums += rows.index_select(0, column)
    return sums


@_operator(
    lambda x, weight, eps, s0, *rest: (
        *_written(x, *rest),
        x.new_empty(x.shape[:-1].numel(), dtype=torch.float32),
    )
)
def _rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, s0: Tensor, grid: int, scale_dtype: torch.dtype, mask: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute codes, packed mask and fake-quantized values of RMSNorm's result, and 1 / RMS of each row."""
    of_tensor = (_scales(s0, None, scale_dtype, None).view(1), _spec(grid, "tensor"))
    codes, inside, rounded, rstd = reference.rms_norm_quantize(x, weight, eps, *of_tensor)
    return *_wanted(codes, inside, rounded, mask, values), rstd


@_operator(
    lambda grad, x, weight, rstd, mask, wanted: (
        _like(x),
        _like(weight) if wanted else weight.new_empty(0),
    )
)
def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mask: Tensor, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x`` and the weight (empty if not requested)."""
    of_x, of_weight = reference.rms_norm_backward(grad, x, weight, rstd, unpack_bits(mask, x.shape))
    return of_x.contiguous(), of_weight if weight_gradient else weight.new_empty(0)


@_operator(lambda gate, up, s0, *rest: _written(gate, *rest))
def _silu_mul_quantize(
    gate: Tensor, up: Tensor, s0: Tensor, grid: int, scale_dtype: torch.dtype, mask: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes, packed mask of unclipped elements and fake-quantized values of ``silu(gate) * up``; each of the
    last two is empty unless requested."""
    of_tensor = (_scales(s0, None, scale_dtype, None).view(1), _spec(grid, "tensor"))
    return _wanted(*reference.silu_mul_quantize(gate, up, *of_tensor), mask, values)


@_operator(lambda grad, gate, up, mask: (_like(gate), _like(gate)))
def _silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up from ``grad``, zeroed where the packed ``mask`` has a 0 bit."""
    of_gate, of_up = reference.silu_mul_backward(grad, gate, up, unpack_bits(mask, gate.shape))
    return of_gate.contiguous(), of_up.contiguous()


def _wanted(codes: Tensor, inside: Tensor, rounded: Tensor, mask: bool, values: bool) -> tuple[Tensor, Tensor, Tensor]:
    packed = pack_bits(inside if mask else inside.new_empty(0))
    return codes, packed, rounded.contiguous() if values else rounded.new_empty(0)


def _spec(grid: int, granularity: Granularity = "channel") -> TensorSpec:
    """Build the spec of a grid (0: e4m3, 1: e2m1, else bits of an integer, negative for narrow range). The shapes of
    rows and scales determine which elements share a scale."""
    if grid == 1:
        return TensorSpec("fp4_e2m1", 4, "group", 16)
    if grid == 0:
        return TensorSpec("fp8_e4m3", 8, granularity)
    return TensorSpec("int", abs(grid), granularity, narrow=grid < 0)


def _token_spec(grid: int, symmetric: bool, scale_dtype: torch.dtype | None) -> TensorSpec:
    """Build the spec of a grid (0: e4m3, 1: e2m1, else bits of an integer) with dynamic scales per token, or per group
    if ``scale_dtype`` has groups."""
    if scale_dtype in _STORED:
        stored = _STORED[scale_dtype]
        return TensorSpec(*_FLOATS[grid], "group", stored.group_size, dynamic=True, mx=stored.mx)
    if grid == 0:
        return TensorSpec("fp8_e4m3", 8, "token", dynamic=True)
    return TensorSpec("int", grid, "token", symmetric=symmetric, dynamic=True)


def _rows(x: Tensor, s0: Tensor) -> Tensor:
    """View ``x`` as ``[scales, elements]``, contiguous, each row with the elements that share a scale."""
    return x.contiguous().reshape(s0.numel(), x.numel() // s0.numel())


def _scales(s0: Tensor, theta: Tensor | None, scale_dtype: torch.dtype, above: Tensor | None) -> Tensor:
    """Compute the effective scale of every row."""
    return _effective_scale(s0, theta, scale_dtype, above=above).reshape(-1, 1)


def _zeros(zero: Tensor | None) -> Tensor | None:
    """Reshape zero points to one per row."""
    return None if zero is None else zero.reshape(-1, 1)
