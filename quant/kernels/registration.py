"""Quantizers, sums of rows, norms and SwiGLU as torch operators (``torch.ops.deepqat``): schemas, shapes, gradients.

An operator computes the scale ``s0 * exp(theta)`` rounded to ``scale_dtype``, so that a learned scale needs no extra
launch. Scale ``i`` of ``n`` belongs to the ``i``-th of ``n`` equal consecutive segments of the row-major tensor: one
scale is per tensor, ``(E,)`` per expert of a stack, ``(out, groups)`` per group. A *grid* is 0 for e4m3, 1 for e2m1,
else the number of bits of a signed integer, optionally with a zero point for each scale; a negative number means a
narrow range without zero points (-4: -7..7). Grids of tokens are 0, 1 or 2 to 8; only integers may be asymmetric.

``scale_dtype`` is the dtype to which scales are rounded: fp32, bf16 or fp16; ``float8_e8m0fnu`` for powers of two (MX);
or ``float8_e4m3fn`` for e4m3 numbers relative to ``above``, the global scale, fp32 ``(1,)`` or for a stack one per
expert (NVFP4). For tokens, None means fp32; ``float8_e8m0fnu`` goes with groups of 32 features, ``float8_e4m3fn`` with
groups of 16, and e2m1 needs one of them.

``fake_quantize`` and ``fake_quantize_tokens`` are differentiable; ``fake_quantized`` and ``fake_quantized_tokens`` are
the same without a gradient. Inside an autograd function the latter are used, as a registered gradient costs a call into
Python of about 0.1 ms even if it is not needed.

Operators that backward uses to quantize again take a gradient as ``after``, which does not affect the result. Without
it, ``torch.compile`` would merge the call with the same call in the forward and keep the result for backward: a
fake-quantized copy of every weight.

Non-finite values: a NaN stays a NaN (its code is 0 except for e4m3) and has no gradient; an infinity clips. With
``of_weight``, non-finite elements have a gradient of NaN, or theta has one if its gradient is requested; the gradient
of ``fake_quantize`` always does so. A token that contains a NaN or an infinity becomes NaN as a whole in
:func:`fake_quantize_tokens`.

``keep_tokens`` is ``fake_quantize_tokens`` of floats with everything that backward can keep instead of the input: codes
(e2m1: two in a byte, the first in the low four bits), the mask, and the scales in their stored format.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OPERATORS = torch.library.Library("deepqat", "DEF")
_OPS = torch.ops.deepqat
_SCALE = "Tensor s0, Tensor? theta"
_BESIDE = "Tensor? zero=None, Tensor? above=None"
_OF_TOKENS = "ScalarType? scale_dtype=None, Tensor? above=None"

SCHEMAS = (
    f"effective_scale({_SCALE}, ScalarType scale_dtype, Tensor? after=None, Tensor? above=None) -> Tensor",
    f"quantize(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, bool mask, {_BESIDE}) -> (Tensor, Tensor)",
    f"quantize_with_values(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, bool mask, {_BESIDE}) "
    "-> (Tensor, Tensor, Tensor)",
    f"quantize_with_scale(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, {_BESIDE}) -> (Tensor, Tensor)",
    f"dequantize(Tensor codes, {_SCALE}, ScalarType scale_dtype, ScalarType dtype, Tensor? after=None, "
    f"{_BESIDE}) -> Tensor",
    "dequantize_with_zeros(Tensor codes, Tensor s0, Tensor theta, ScalarType scale_dtype, ScalarType dtype, "
    f"Tensor? after=None, {_BESIDE}) -> (Tensor, Tensor)",
    f"fake_quantize(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, Tensor? after=None, {_BESIDE}) -> Tensor",
    f"fake_quantized(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, Tensor? after=None, {_BESIDE}) -> Tensor",
    f"fake_quantize_backward(Tensor grad, Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, float factor, "
    f"bool theta_gradient, {_BESIDE}, bool of_weight=False) -> (Tensor, Tensor)",
    f"fake_quantize_backward_(Tensor(a!) grad, Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, float factor, "
    f"bool theta_gradient, {_BESIDE}, bool of_weight=False) -> Tensor",
    "masked(Tensor grad, Tensor mask) -> Tensor",
    "masked_(Tensor(a!) grad, Tensor mask) -> ()",
    f"dequantize_and_mask_(Tensor(a!) grad, Tensor mask, Tensor codes, {_SCALE}, ScalarType scale_dtype, {_BESIDE}) "
    "-> Tensor",
    "amax(Tensor x, int count) -> Tensor",
    f"quantize_tokens(Tensor x, int grid, bool symmetric, {_OF_TOKENS}) -> (Tensor, Tensor, Tensor)",
    f"keep_tokens(Tensor x, int grid, bool mask, {_OF_TOKENS}) -> (Tensor, Tensor, Tensor, Tensor)",
    f"fake_quantize_tokens(Tensor x, int grid, bool symmetric, Tensor? after=None, {_OF_TOKENS}) -> Tensor",
    f"fake_quantized_tokens(Tensor x, int grid, bool symmetric, Tensor? after=None, {_OF_TOKENS}) -> Tensor",
    f"fake_quantize_tokens_backward(Tensor grad, Tensor x, int grid, bool symmetric, {_OF_TOKENS}) -> Tensor",
    "fake_quantize_tokens_and_mask_(Tensor(a!) grad, Tensor x, int grid, bool symmetric, bool values, "
    f"{_OF_TOKENS}) -> Tensor",
    "sum_rows(Tensor rows, Tensor places) -> Tensor",
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, Tensor s0, int grid, ScalarType scale_dtype, bool mask, "
    "bool values) -> (Tensor, Tensor, Tensor, Tensor)",
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, Tensor mask, bool weight_gradient) "
    "-> (Tensor, Tensor)",
    "silu_mul_quantize(Tensor gate, Tensor up, Tensor s0, int grid, ScalarType scale_dtype, bool mask, bool values) "
    "-> (Tensor, Tensor, Tensor)",
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up, Tensor mask) -> (Tensor, Tensor)",
)
for _schema in SCHEMAS:
    OPERATORS.define(_schema)

# ---- shapes of results for torch.compile. Torch passes the arguments in the order of the schemas, without trailing
# arguments that have their defaults.

_CODE_DTYPES = {0: torch.float8_e4m3fn, 1: torch.uint8}  # by grid; int8 for all others


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Create an empty contiguous tensor in the shape of ``x``."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _quantized(x: Tensor, _s0: Any, _theta: Any, grid: int, _stored: Any, mask: bool, *_: Any) -> tuple[Tensor, Tensor]:
    codes = _like(x, _CODE_DTYPES.get(grid, torch.int8))
    return codes, x.new_empty((x.numel() + 7) // 8 if mask else 0, dtype=torch.uint8)


def _written(x: Tensor, grid: int, stored: Any, mask: bool, values: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *_quantized(x, None, None, grid, stored, mask), _like(x) if values else x.new_empty(0)


def _theta_gradient(x: Tensor, theta: Tensor | None, wanted: bool) -> Tensor:
    return _like(theta) if theta is not None and wanted else x.new_empty(0)


def _quantized_tokens(x: Tensor, grid: int, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape, codes = (*x.shape[:-1], 1), _like(x, _CODE_DTYPES.get(grid, torch.int8))
    return codes, x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int8)


def _kept_tokens(
    x: Tensor, grid: int, mask: bool, scale_dtype: torch.dtype | None = None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, four = x.shape[:-1], grid == 1
    codes = x.new_empty((*shape, x.shape[-1] // 2 if four else x.shape[-1]), dtype=_CODE_DTYPES[grid])
    packed = x.new_empty(x.numel() // 8 if mask else 0, dtype=torch.uint8)
    return _like(x), codes, packed, x.new_empty((*shape, 1), dtype=scale_dtype or torch.float32)


_FAKES: dict[str, Callable[..., Any]] = {
    "effective_scale": lambda s0, *_: _like(s0),
    "quantize": _quantized,
    "quantize_with_values": lambda x, *rest: (*_quantized(x, *rest), _like(x)),
    "quantize_with_scale": lambda x, s0, _theta, grid, *_: (_like(x, _CODE_DTYPES.get(grid, torch.int8)), _like(s0)),
    "dequantize": lambda codes, _s0, _theta, _stored, dtype, *_: _like(codes, dtype),
    "dequantize_with_zeros": lambda codes, _s0, theta, _stored, dtype, *_: (_like(codes, dtype), _like(theta)),
    "fake_quantize": lambda x, *_: _like(x),
    "fake_quantized": lambda x, *_: _like(x),
    "fake_quantize_backward": lambda grad, x, s0, theta, grid, stored, factor, wanted, *_: (
        _like(x),
        _theta_gradient(x, theta, wanted),
    ),
    "fake_quantize_backward_": lambda grad, x, s0, theta, grid, stored, factor, wanted, *_: _theta_gradient(
        x, theta, wanted
    ),
    "masked": lambda grad, mask: _like(grad),
    "masked_": lambda grad, mask: None,
    "dequantize_and_mask_": lambda grad, *_: _like(grad),
    "amax": lambda x, count: x.new_empty(count, dtype=torch.float32),
    "quantize_tokens": _quantized_tokens,
    "keep_tokens": _kept_tokens,
    "fake_quantize_tokens": lambda x, *_: _like(x),
    "fake_quantized_tokens": lambda x, *_: _like(x),
    "fake_quantize_tokens_backward": lambda grad, x, *_: _like(x),
    "fake_quantize_tokens_and_mask_": lambda grad, x, grid, symmetric, values, *_: (
        _like(x) if values else x.new_empty(0)
    ),
    "sum_rows": lambda rows, places: rows.new_empty(places.shape[0], rows.shape[1]),
    "rms_norm_quantize": lambda x, weight, eps, s0, *rest: (
        *_written(x, *rest),
        x.new_empty(x.shape[:-1].numel(), dtype=torch.float32),
    ),
    "rms_norm_backward": lambda grad, x, weight, rstd, mask, wanted: (
        _like(x),
        _like(weight) if wanted else weight.new_empty(0),
    ),
    "silu_mul_quantize": lambda gate, up, s0, *rest: _written(gate, *rest),
    "silu_mul_backward": lambda grad, gate, up, mask: (_like(gate), _like(gate)),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"deepqat::{_name}", _fake)


# ---- gradients for autograd


def _save_fake_quantize(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, s0, theta, grid, scale_dtype, _, zero, above = inputs
    ctx.save_for_backward(x, s0, theta, zero, above)
    ctx.grid, ctx.scale_dtype = grid, scale_dtype


def _fake_quantize_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, s0, theta, zero, above = ctx.saved_tensors
    grad_x, grad_theta = _OPS.fake_quantize_backward(
        grad, x, s0, theta, ctx.grid, ctx.scale_dtype, 1.0, ctx.needs_input_grad[2], zero, above, True
    )
    return grad_x, None, grad_theta if ctx.needs_input_grad[2] else None, None, None, None, None, None


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.grid, ctx.symmetric, _, ctx.scale_dtype, above = inputs
    ctx.save_for_backward(x, above)


def _tokens_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
    x, above = ctx.saved_tensors
    grad_x = _OPS.fake_quantize_tokens_backward(grad, x, ctx.grid, ctx.symmetric, ctx.scale_dtype, above)
    return grad_x, None, None, None, None, None


torch.library.register_autograd(
    "deepqat::fake_quantize", _fake_quantize_gradients, setup_context=_save_fake_quantize, lib=OPERATORS
)
torch.library.register_autograd(
    "deepqat::fake_quantize_tokens", _tokens_gradients, setup_context=_save_tokens, lib=OPERATORS
)
