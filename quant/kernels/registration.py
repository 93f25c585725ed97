"""The quantisers as operators of torch (``torch.ops.deepqat``): schemas, shapes, gradients, and who computes them.

An operator forms the scale itself, ``s0 * exp(theta)`` rounded to ``scale_dtype``, so that a learned scale costs no
launch of its own. Scale ``i`` of ``n`` belongs to the ``i``-th of ``n`` equal consecutive parts of the row-major
tensor: one scale is per tensor, ``(E,)`` per expert of a stack, ``(out, groups)`` per group. A *grid* is 0 for e4m3, 1
for e2m1, else the number of bits of a signed integer, which may have a zero point beside each scale. Tokens have a grid
of 0 or 2 to 8; asymmetric only integers.

Who computes: on the CPU the compiled kernels, or where there is no C++ compiler the reference. On CUDA the compiled
kernels; where there is no nvcc, the reference through ``torch.compile``; where that cannot be either, the reference in
eager mode. What is slower than it should be is said once.

``fake_quantize`` and ``fake_quantize_tokens`` have a gradient, ``fake_quantized`` and ``fake_quantized_tokens`` are the
same without one: torch calls a registered gradient from Python, which costs some 0.1 ms in the middle of a step even
where no gradient is wanted, in the forward and backward of an autograd function.

What backward quantises again is given a gradient as ``after``, which no value depends on. Without it ``torch.compile``
would see the same call as in the forward, make it once there, and keep the result for backward: a fake-quantised copy
of every weight.

Values that are not finite: a NaN stays a NaN (its code, but for e4m3, is 0) and has no gradient; an infinity clips.
Of :func:`fake_quantize_tokens` a token that holds either becomes NaN as a whole.
"""

import shutil
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quant.kernels import eager
from quant.kernels.build import build

_LIBRARY = torch.library.Library("deepqat", "DEF")
_OPS = torch.ops.deepqat
_SCALE = "Tensor s0, Tensor? theta"

_SCHEMAS = (
    f"effective_scale({_SCALE}, ScalarType scale_dtype, Tensor? after=None) -> Tensor",
    f"quantize(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, bool mask, Tensor? zero=None) -> (Tensor, Tensor)",
    f"quantize_with_values(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, bool mask, Tensor? zero=None) "
    "-> (Tensor, Tensor, Tensor)",
    f"dequantize(Tensor codes, {_SCALE}, ScalarType scale_dtype, ScalarType dtype, Tensor? after=None, "
    "Tensor? zero=None) -> Tensor",
    f"fake_quantize(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, Tensor? after=None, Tensor? zero=None) "
    "-> Tensor",
    f"fake_quantized(Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, Tensor? after=None, Tensor? zero=None) "
    "-> Tensor",
    f"fake_quantize_backward(Tensor grad, Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, float factor, "
    "bool theta_gradient, Tensor? zero=None) -> (Tensor, Tensor)",
    f"fake_quantize_backward_(Tensor(a!) grad, Tensor x, {_SCALE}, int grid, ScalarType scale_dtype, float factor, "
    "bool theta_gradient, Tensor? zero=None) -> Tensor",
    "masked(Tensor grad, Tensor mask) -> Tensor",
    "masked_(Tensor(a!) grad, Tensor mask) -> ()",
    "amax(Tensor x, int count) -> Tensor",
    "quantize_tokens(Tensor x, int grid, bool symmetric) -> (Tensor, Tensor, Tensor)",
    "fake_quantize_tokens(Tensor x, int grid, bool symmetric, Tensor? after=None) -> Tensor",
    "fake_quantized_tokens(Tensor x, int grid, bool symmetric, Tensor? after=None) -> Tensor",
    "fake_quantize_tokens_backward(Tensor grad, Tensor x, int grid, bool symmetric) -> Tensor",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)

_ready: list[bool] = []  # holds something once the kernels can be called


# Left alone, inductor keeps in fp32 what the reference rounds to a dtype on its way, and approximates 1/scale.
_AS_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


@cache
def prepare_kernels() -> str:
    """Compile and load the kernels, or put in their place what can be had.

    Happens by itself at the first use; call it earlier to choose when the half minute of the first build passes.

    Returns:
        What is slower than it should be, and why; empty if nothing is.
    """
    built = build()
    remarks = []
    if built.library is None:
        _implement("CPU", lambda name: getattr(eager, name))
        remarks.append(f"fake quantisation runs in eager mode on the CPU, many times slower: {built.why}")
    if torch.cuda.is_available() and not built.cuda:
        compilable = find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))
        if compilable:
            _implement("CUDA", lambda name: torch.compile(getattr(eager, name), dynamic=True, options=_AS_EAGER))
            remarks.append(f"fake quantisation on CUDA runs the reference through torch.compile, slower: {built.why}")
        else:
            _implement("CUDA", lambda name: getattr(eager, name))
            remarks.append(
                f"fake quantisation on CUDA runs in eager mode, many times slower: {built.why}; "
                "torch.compile needs triton and a C compiler"
            )
    _ready.append(True)
    return "; ".join(remarks)


def _implement(key: str, implementation: Callable[[str], Callable[..., Any]]) -> None:
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        _LIBRARY.impl(name, implementation(name), key)


def ensure_ready() -> None:
    """Prepare the kernels unless they are, and warn of what is slower than it should be."""
    if not _ready:
        remark = prepare_kernels()
        if remark:
            warnings.warn(remark, stacklevel=3)


# ---- what torch.compile needs to know: the shapes of results. Torch passes the arguments in the order of the schemas,
# without those at the end that have their defaults.

_CODE_DTYPES = {0: torch.float8_e4m3fn, 1: torch.uint8}  # by grid; all others have int8


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Results are contiguous whatever the strides of the input."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _quantized(x: Tensor, _s0: Any, _theta: Any, grid: int, _stored: Any, mask: bool, *_: Any) -> tuple[Tensor, Tensor]:
    codes = _like(x, _CODE_DTYPES.get(grid, torch.int8))
    return codes, x.new_empty((x.numel() + 7) // 8 if mask else 0, dtype=torch.uint8)


def _theta_gradient(x: Tensor, theta: Tensor | None, wanted: bool) -> Tensor:
    return _like(theta) if theta is not None and wanted else x.new_empty(0)


def _quantized_tokens(x: Tensor, grid: int, _symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape, codes = (*x.shape[:-1], 1), _like(x, _CODE_DTYPES.get(grid, torch.int8))
    return codes, x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int8)


_FAKES: dict[str, Callable[..., Any]] = {
    "effective_scale": lambda s0, *_: _like(s0),
    "quantize": _quantized,
    "quantize_with_values": lambda x, *rest: (*_quantized(x, *rest), _like(x)),
    "dequantize": lambda codes, _s0, _theta, _stored, dtype, *_: _like(codes, dtype),
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
    "amax": lambda x, count: x.new_empty(count, dtype=torch.float32),
    "quantize_tokens": _quantized_tokens,
    "fake_quantize_tokens": lambda x, *_: _like(x),
    "fake_quantized_tokens": lambda x, *_: _like(x),
    "fake_quantize_tokens_backward": lambda grad, x, *_: _like(x),
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"deepqat::{_name}", _fake)


# ---- what autograd needs to know


def _save_fake_quantize(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, s0, theta, grid, scale_dtype, _, zero = inputs
    ctx.save_for_backward(x, s0, theta, zero)
    ctx.grid, ctx.scale_dtype = grid, scale_dtype


def _fake_quantize_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, s0, theta, zero = ctx.saved_tensors
    grad_x, grad_theta = _OPS.fake_quantize_backward(
        grad, x, s0, theta, ctx.grid, ctx.scale_dtype, 1.0, ctx.needs_input_grad[2], zero
    )
    return grad_x, None, grad_theta if ctx.needs_input_grad[2] else None, None, None, None, None


def _save_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.grid, ctx.symmetric, _ = inputs
    ctx.save_for_backward(x)


def _tokens_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    grad_x = _OPS.fake_quantize_tokens_backward(grad, ctx.saved_tensors[0], ctx.grid, ctx.symmetric)
    return grad_x, None, None, None


torch.library.register_autograd(
    "deepqat::fake_quantize", _fake_quantize_gradients, setup_context=_save_fake_quantize, lib=_LIBRARY
)
torch.library.register_autograd(
    "deepqat::fake_quantize_tokens", _tokens_gradients, setup_context=_save_tokens, lib=_LIBRARY
)
