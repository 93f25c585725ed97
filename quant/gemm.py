"""Forward and gradient GEMMs of a linear layer, for one weight or a stack of expert weights, and the Hadamard rotation
of its input.

For a stack ``[E, out, in]`` the input rows are sorted by expert, and ``offsets`` are the ends of the experts' rows,
int32 [E]: expert ``e`` has the rows ``[offsets[e - 1], offsets[e])``. The weight of an expert without rows has a
gradient of zeros.

Where supported, ``torch.nn.functional.grouped_mm`` multiplies all experts in one call, and ``torch._scaled_grouped_mm``
does so with fp8 codes. Elsewhere experts are multiplied one by one, and the host waits for the offsets; on a GPU this
warns. The kernels need addresses divisible by 16, but a Parameter gathered by DeepSpeed may begin at any address: it is
then copied.

The block-wise rotation (:func:`rotate`) spreads an outlier over its block, so that one scale fits all values (QuaRot,
arXiv 2404.00456, section 4). The layer's weight contains the inverse rotation. It is meant for inputs whose rotation
cannot be folded into a preceding weight: the input of ``down_proj`` is a product of two activations.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCKS = (64, 256, 1024)
"""Block sizes of :func:`rotate`."""

_MATRICES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast is disabled on the device of ``x``."""
    device = x.device.type  # is_autocast_enabled raises for the meta device, where nothing is computed anyway
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if autocast else nullcontext()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.t() + bias``, ``[..., in]`` to ``[..., out]``, all in one dtype; differentiable. A stack has
    ``offsets`` (see the module) and no bias. For a stack, backward saves the Parameter itself, because a view would
    keep the tensor gathered by ZeRO-3 alive."""
    return F.linear(x, weight, bias) if offsets is None else _StackFunction.apply(x, weight, offsets)


class _StackFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offsets)
        if _only_shapes(x):
            return x.new_empty(x.shape[0], weight.shape[1])
        if _grouped(x, weight):
            return F.grouped_mm(_aligned(x), _aligned(weight).transpose(-2, -1), offs=offsets)
        return torch.cat([F.linear(rows, one) for rows, one in zip(_split(x, offsets), weight, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad_x = None if weight is None else input_gradient(grad, weight, offsets)
        return grad_x, None if x is None else weight_gradient(grad, x, offsets), None


def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    offsets: Tensor | None = None,
    *,
    fast_accum: bool = False,
) -> Tensor:
    """Compute ``(x @ weight.t()) * x_scale * weight_scale + bias`` of e4m3 codes, on fp8 tensor cores if available.

    Args:
        x: codes ``[..., in]``; for a stack ``[rows, in]``.
        x_scale, weight_scale: fp32 ``[1]``; for a stack ``weight_scale`` is ``[E]``.
        weight: codes ``[out, in]``, multiples of 16; or a stack ``[E, out, in]``, if :func:`takes_codes_of_stacks`.
        bias: ``[out]``; None for a stack.
        dtype: dtype of the result.
        offsets: for a stack, see the module; else None.
        fast_accum: accumulate in Hopper's tensor cores, in fewer bits than fp32, as vLLM does (see
            docs/how_a_layer_computes.md); otherwise partial sums are moved to fp32 regularly. CPUs always add in fp32.

    Returns:
        ``[..., out]``, not differentiable.
    """
    output_shape = (*x.shape[:-1], weight.shape[-2])
    if x.numel() == 0:
        return x_scale.new_zeros(output_shape, dtype=dtype)
    x, x_scale, weight, weight_scale = (_aligned(one) for one in (x, x_scale, weight, weight_scale))
    bias = None if bias is None else _aligned(bias)
    if offsets is None:
        rows = x.reshape(-1, x.shape[-1])
        return _scaled_mm(rows, x_scale, weight, weight_scale, bias, dtype, fast_accum).reshape(output_shape)
    if x.device.type != "cpu":  # all experts in one call, without a device sync; their rows may begin anywhere
        return torch._scaled_grouped_mm(
            x,
            weight.transpose(-2, -1),
            x_scale.expand(x.shape[0]).contiguous(),
            weight_scale[:, None].expand(weight.shape[:2]).contiguous(),
            offs=offsets,
            out_dtype=dtype,
            use_fast_accum=fast_accum,
        )
    experts = zip(_split(x, offsets), weight, weight_scale.unbind(), strict=True)
    return torch.cat([_scaled_mm(rows, x_scale, one, scale, None, dtype, fast_accum) for rows, one, scale in experts])


def takes_codes_of_stacks(weight: Tensor) -> bool:
    """Return True if :func:`scaled_linear` takes stacks of experts on the device and in the dtype of ``weight``.

    torch's grouped fp8 GEMM (scales per row, here all equal) needs compute capability 9.0 and bf16 results. A CPU
    multiplies the experts one by one; the meta device counts as a supported GPU.
    """
    if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device) != (9, 0):
        return False
    return weight.device.type == "cpu" or weight.dtype == torch.bfloat16


def _scaled_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    if x.shape[0] == 0:  # an expert without tokens
        return x_scale.new_zeros((0, weight.shape[0]), dtype=dtype)
    apart = bias if dtype == torch.float32 else None  # CUDA's kernel takes no bias with an fp32 result
    output = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=weight_scale,
        bias=bias if apart is None else None,
        out_dtype=dtype,
        use_fast_accum=fast_accum,
    )
    return output if apart is None else output.add_(apart)


def input_gradient(grad: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
    """Compute ``grad @ weight`` in one dtype: ``[rows, out]`` to ``[rows, in]``. ``offsets`` is for a stack."""
    if offsets is None:
        return grad @ weight
    if _only_shapes(grad):
        return grad.new_empty(grad.shape[0], weight.shape[2])
    if _grouped(grad, weight):
        return F.grouped_mm(_aligned(grad), _aligned(weight), offs=offsets)
    return torch.cat([rows @ one for rows, one in zip(_split(grad, offsets), weight, strict=True)])


def weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor | None) -> Tensor:
    """Compute ``grad.t() @ x`` of ``grad [rows, out]`` and ``x [rows, in]``. The result is ``[out, in]``, or with the
    ``offsets`` of a stack ``[E, out, in]``."""
    if offsets is None:
        return grad.t() @ x
    if _only_shapes(grad):
        return grad.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])
    if _grouped(grad, x):
        gradient = F.grouped_mm(_aligned(grad).t(), _aligned(x), offs=offsets)
        # From this compute capability on, the gradients of experts without rows are uninitialized (pytorch#172439).
        skips_empty = gradient.is_cuda and torch.cuda.get_device_capability(gradient.device) >= (10, 0)
        return zero_where_empty_(gradient, offsets) if skips_empty else gradient
    pairs = zip(_split(grad, offsets), _split(x, offsets), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def _only_shapes(rows: Tensor) -> bool:
    """Return True for meta tensors that are not bf16: torch's ``grouped_mm`` has no meta kernel for them."""
    return rows.is_meta and rows.dtype != torch.bfloat16


def _split(rows: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """Split ``rows [rows, n]`` into the rows of each expert."""
    ends = offsets.tolist() if len(rows) else [0] * len(offsets)
    return rows.split([end - begin for begin, end in zip([0, *ends], ends, strict=False)])


def _grouped(rows: Tensor, other: Tensor) -> bool:
    """Return True if ``grouped_mm`` takes the operands: bf16 (on the CPU also fp32 and fp16), with row strides that are
    multiples of 16 bytes."""
    dtypes = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float32, torch.float16)
    whole = all(side * rows.itemsize % 16 == 0 for side in (rows.shape[-1], other.shape[-1]))
    if rows.is_cuda and not (whole and rows.dtype in dtypes):
        warnings.warn(
            f"experts of {rows.shape[-1]} and {other.shape[-1]} features in {rows.dtype} are multiplied one by one, "
            "and the host waits for the GPU each time: the grouped GEMM is for bfloat16 in rows of whole 16 bytes",
            stacklevel=2,
        )
    return rows.dtype in dtypes and whole and rows.shape[0] > 0


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if not contiguous or (on CUDA) not aligned to 16 bytes.

    Under torch.compile, addresses are unknown and not checked: codes are then new tensors, and scales are not part of a
    ZeRO-3 buffer, so both are aligned.
    """
    tensor = tensor.contiguous()
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return tensor
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def zero_where_empty_(gradient: Tensor, offsets: Tensor) -> Tensor:
    """Zero the part of ``gradient [E, out, in]`` that belongs to experts without rows, in place and without a device
    sync, and return ``gradient``."""
    empty = offsets == F.pad(offsets[:-1], (1, 0))
    return gradient.masked_fill_(empty[:, None, None], 0)


def hadamard(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Build Sylvester's matrix ``[block, block]`` of 1 and -1; ``block`` is a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate(values: Tensor, block: int) -> Tensor:
    """Rotate each block of ``block`` values along the last axis of ``values [..., n * block]``: ``x H / sqrt(block)``
    with Sylvester's symmetric H; differentiable.

    The rotation is its own inverse. A Linear computes the same output if this function rotates both its weight ``[out,
    in]`` and its input. ``block`` is a power of 4, so that 1 / sqrt(block) is a power of two: every entry of the matrix
    is exact in fp16 and bf16, products with it are exact, and only the fp32 sum is rounded, once. The type ``hadamard``
    of compressed-tensors (0.20.0, ``transform/factory/hadamard.py``) is the same rotation and also sums in fp32.
    """
    with without_autocast(values):
        rotated = values.unflatten(-1, (-1, block)) @ _rotation_matrix(block, values.dtype, values.device)
    return rotated.flatten(-2)


def _rotation_matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthogonal matrix ``[block, block]``, cached for each dtype and device."""
    if torch.compiler.is_compiling():  # no cache: the compiler folds constants
        return hadamard(block, dtype, device) / block**0.5
    key = (block, dtype, device)
    if key not in _MATRICES:
        with torch.inference_mode(False), torch.no_grad():
            _MATRICES[key] = hadamard(block, dtype, device) / block**0.5
    return _MATRICES[key]
