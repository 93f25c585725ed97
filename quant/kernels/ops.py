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
from quant.reference import round_scale
from quant.spec import TensorSpec

_LIBRARY = torch.library.Library("deepqat", "DEF")
_OPS = torch.ops.deepqat
_SCALE = "Tensor s0, Tensor? theta"

for _schema in (
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
):
    _LIBRARY.define(_schema)

_NAMES = (
    "effective_scale",
    "quantize",
    "quantize_with_values",
    "dequantize",
    "fake_quantize",
    "fake_quantized",
    "fake_quantize_backward",
    "fake_quantize_backward_",
    "masked",
    "masked_",
    "amax",
    "quantize_tokens",
    "fake_quantize_tokens",
    "fake_quantized_tokens",
    "fake_quantize_tokens_backward",
)
_ready: list[bool] = []  # holds something once the kernels can be called


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


# Left alone, inductor keeps in fp32 what the reference rounds to a dtype on its way, and approximates 1/scale.
_AS_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


def _implement(key: str, implementation: Callable[[str], Callable[..., Any]]) -> None:
    for name in _NAMES:
        _LIBRARY.impl(name, implementation(name), key)


def _ensure() -> None:
    if not _ready:
        remark = prepare_kernels()
        if remark:
            warnings.warn(remark, stacklevel=3)


_FLOAT_GRIDS = {"fp8_e4m3": 0, "fp4_e2m1": 1}
_CODE_DTYPES = {0: torch.float8_e4m3fn, 1: torch.uint8}


def grid_of(spec: TensorSpec) -> int:
    """The number by which the operators know a grid."""
    return _FLOAT_GRIDS.get(spec.dtype, spec.bits)


def stored_dtype(spec: TensorSpec, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the operators round a scale to."""
    return model_dtype if spec.scale_format == "model" else torch.float32


def effective_scale(
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    global_scale: Tensor | None = None,
    *,
    after: Tensor | None = None,
) -> Tensor:
    """:func:`quant.reference.effective_scale` without a gradient, for those who need the scale as a tensor; ``after``
    as above."""
    scale = learned_scale(s0, theta, stored_dtype(spec, model_dtype), after=after)
    return round_scale(scale, spec, global_scale) if spec.scale_format in ("e8m0", "e4m3") else scale


def learned_scale(
    s0: Tensor, theta: Tensor | None, scale_dtype: torch.dtype = torch.float32, *, after: Tensor | None = None
) -> Tensor:
    """``s0 * exp(theta)`` rounded to ``scale_dtype``, as fp32 in s0's shape; ``after`` as above."""
    if theta is None and scale_dtype == torch.float32 and after is None:
        return s0
    _ensure()
    return _OPS.effective_scale(s0, theta, scale_dtype, after)


def quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    mask: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` in its shape, and which elements are inside the range.

    Args:
        x: any shape and stride; fp32, bf16 or fp16.
        s0: frozen scale, fp32, contiguous; its elements divide ``x`` into equal parts.
        theta: learned logarithmic correction in any of these dtypes and s0's shape, or None.
        spec: the grid. Which elements share a scale follows from the number of scales, not from its granularity.
        model_dtype: dtype of the model's weights.
        zero: the scales' zero points, fp32, contiguous, in s0's shape; of integers only.
        mask: whether the mask is wanted.

    Returns:
        Codes (``float8_e4m3fn``, ``int8`` or, of e2m1, ``uint8``), and the mask as uint8 ``[ceil(numel / 8)]``, element
        ``i`` at bit ``i % 8`` of byte ``i // 8`` (empty if it is not wanted).

    Raises:
        RuntimeError: the scales do not divide ``x``, or a dtype is none of those above. So do the other operators.
    """
    _ensure()
    return _OPS.quantize(x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), mask, zero)


def quantize_with_values(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize` and :func:`fake_quantize` in one pass: codes, mask, values."""
    _ensure()
    return _OPS.quantize_with_values(x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), mask, zero)


def dequantize(
    codes: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    after: Tensor | None = None,
) -> Tensor:
    """``(codes - zero) * scale`` in ``dtype``, in the shape of ``codes``; other arguments as for :func:`quantize`,
    ``after`` as above."""
    _ensure()
    return _OPS.dequantize(codes, s0, theta, stored_dtype(spec, model_dtype), dtype, after, zero)


def fake_quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    after: Tensor | None = None,
) -> Tensor:
    """``x`` through the grid and back, in its shape and dtype. Differentiable in ``x`` and theta (no LSQ factor);
    ``after`` as above."""
    _ensure()
    operator = _OPS.fake_quantize if torch.is_grad_enabled() else _OPS.fake_quantized
    return operator(x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), after, zero)


def fake_quantize_backward_(
    grad: Tensor,
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    factor: float,
    theta_gradient: bool,
) -> Tensor | None:
    """Gradients of :func:`fake_quantize` in one pass: theta's, times ``factor``, where wanted; that of ``x`` takes the
    place of ``grad``.

    ``grad`` is contiguous, in the shape and dtype of ``x``. Sums are fp32, in an order that depends on the shape alone.
    """
    _ensure()
    grad_theta = _OPS.fake_quantize_backward_(
        grad, x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), factor, theta_gradient, zero
    )
    return grad_theta if theta_gradient else None


def masked_(grad: Tensor, mask: Tensor) -> Tensor:
    """``grad``, contiguous, made zero where the mask of :func:`quantize` says outside."""
    _ensure()
    _OPS.masked_(grad, mask)
    return grad


def amax(x: Tensor, count: int = 1) -> Tensor:
    """Largest magnitude of each of ``count`` equal consecutive parts: fp32 ``[count]``, NaN where there is one, 0 of
    nothing."""
    _ensure()
    return _OPS.amax(x, count)


def quantize_tokens(x: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Dynamic codes of ``x [..., features]``, and their fp32 scales and int8 zero points ``[..., n]``, of the ``n``
    groups of a token (one per token)."""
    _ensure()
    codes, scale, zero_point = _OPS.quantize_tokens(_token_groups(x, spec), grid_of(spec), spec.symmetric)
    return codes.view(x.shape), scale.flatten(x.dim() - 1), zero_point.flatten(x.dim() - 1)


def fake_quantize_tokens(x: Tensor, spec: TensorSpec, *, after: Tensor | None = None) -> Tensor:
    """Each token, or group of its features, of ``x [..., features]`` through its own grid and back. Differentiable;
    ``after`` as above."""
    _ensure()
    operator = _OPS.fake_quantize_tokens if torch.is_grad_enabled() else _OPS.fake_quantized_tokens
    values = operator(_token_groups(x, spec), grid_of(spec), spec.symmetric, after)
    return values.view(x.shape)


def fake_quantize_tokens_backward(grad: Tensor, x: Tensor, spec: TensorSpec) -> Tensor:
    """Gradient of :func:`fake_quantize_tokens`; ``grad`` has the shape and dtype of ``x``."""
    _ensure()
    grads, groups = _token_groups(grad, spec), _token_groups(x, spec)
    return _OPS.fake_quantize_tokens_backward(grads, groups, grid_of(spec), spec.symmetric).view(x.shape)


def _token_groups(x: Tensor, spec: TensorSpec) -> Tensor:
    """``x`` with the elements that share a scale along the last dimension."""
    return x if spec.group_size is None else x.unflatten(-1, (-1, spec.group_size))


# ---- what torch.compile and autograd need to know


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Results are contiguous whatever the strides of the input."""
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


@torch.library.register_fake("deepqat::effective_scale")
def _(s0: Tensor, theta: Tensor | None, scale_dtype: torch.dtype, after: Tensor | None = None) -> Tensor:
    return _like(s0)


@torch.library.register_fake("deepqat::quantize")
def _(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    mask: bool,
    zero: Tensor | None = None,
) -> Any:
    codes = _like(x, _CODE_DTYPES.get(grid, torch.int8))
    return codes, x.new_empty((x.numel() + 7) // 8 if mask else 0, dtype=torch.uint8)


@torch.library.register_fake("deepqat::quantize_with_values")
def _(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    mask: bool,
    zero: Tensor | None = None,
) -> Any:
    codes = _like(x, _CODE_DTYPES.get(grid, torch.int8))
    return codes, x.new_empty((x.numel() + 7) // 8 if mask else 0, dtype=torch.uint8), _like(x)


@torch.library.register_fake("deepqat::dequantize")
def _(
    codes: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    after: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    return _like(codes, dtype)


@torch.library.register_fake("deepqat::fake_quantized")
@torch.library.register_fake("deepqat::fake_quantize")
def _(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    after: Tensor | None = None,
    zero: Tensor | None = None,
) -> Tensor:
    return _like(x)


@torch.library.register_fake("deepqat::fake_quantize_backward")
def _(
    grad: Tensor,
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    factor: float,
    theta_gradient: bool,
    zero: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(theta) if theta is not None and theta_gradient else x.new_empty(0)


@torch.library.register_fake("deepqat::fake_quantize_backward_")
def _(
    grad: Tensor,
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    factor: float,
    theta_gradient: bool,
    zero: Tensor | None = None,
) -> Tensor:
    return _like(theta) if theta is not None and theta_gradient else x.new_empty(0)


@torch.library.register_fake("deepqat::masked_")
def _(grad: Tensor, mask: Tensor) -> None:
    return None


@torch.library.register_fake("deepqat::masked")
def _(grad: Tensor, mask: Tensor) -> Tensor:
    return _like(grad)


@torch.library.register_fake("deepqat::amax")
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty(count, dtype=torch.float32)


@torch.library.register_fake("deepqat::quantize_tokens")
def _(x: Tensor, grid: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape, codes = (*x.shape[:-1], 1), _like(x, _CODE_DTYPES.get(grid, torch.int8))
    return codes, x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int8)


@torch.library.register_fake("deepqat::fake_quantized_tokens")
@torch.library.register_fake("deepqat::fake_quantize_tokens")
def _(x: Tensor, grid: int, symmetric: bool, after: Tensor | None = None) -> Tensor:
    return _like(x)


@torch.library.register_fake("deepqat::fake_quantize_tokens_backward")
def _(grad: Tensor, x: Tensor, grid: int, symmetric: bool) -> Tensor:
    return _like(x)


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
