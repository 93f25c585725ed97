"""The three products of a linear layer: of one weight, or of a stack of them, each with rows of its own.

With a stack ``[E, out, in]`` the rows of the input are sorted by expert, and ``offsets`` says where each expert's end:
those of expert ``e`` are ``[offsets[e - 1], offsets[e])``. An expert without rows is multiplied by nothing, and its
weight has a gradient of zeros.

``torch.nn.functional.grouped_mm`` multiplies all experts at once where it can. Elsewhere they come one by one, in their
order, for which the host has to wait for the offsets.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """``x @ weight.t() + bias``.

    Args:
        x: ``[..., in]``; of a stack ``[rows, in]``.
        weight: ``[out, in]``, or a stack ``[E, out, in]``, in the dtype of ``x``.
        bias: ``[out]`` or None; a stack has none.
        offsets: of a stack, int32 ``[E]``; the last is the number of rows.

    Returns:
        ``[..., out]``. Differentiable; of a stack the Parameter itself is kept for backward, no view of it, which would
        hold what ZeRO-3 gathered.
    """
    return F.linear(x, weight, bias) if offsets is None else _StackFunction.apply(x, weight, offsets)


class _StackFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, offsets)
        return _product(x, weight, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = None if weight is None else input_gradient(grad, weight, offsets)
        return grad_x, None if x is None else weight_gradient(grad, x, offsets), None


def _product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if _grouped(x, weight):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    return torch.cat([F.linear(rows, one) for rows, one in zip(_split(x, offsets), weight, strict=True)])


def input_gradient(grad: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
    """``grad @ weight``: ``[rows, out]`` to ``[rows, in]``, as above."""
    if offsets is None:
        return grad @ weight
    if _grouped(grad, weight):
        return F.grouped_mm(grad, weight, offs=offsets)
    return torch.cat([rows @ one for rows, one in zip(_split(grad, offsets), weight, strict=True)])


def weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor | None) -> Tensor:
    """``grad.t() @ x`` of ``[rows, out]`` and ``[rows, in]``, in the shape of the weight, as above."""
    if offsets is None:
        return grad.t() @ x
    if _grouped(grad, x):
        return F.grouped_mm(grad.t(), x, offs=offsets)
    pairs = zip(_split(grad, offsets), _split(x, offsets), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def _split(rows: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert."""
    ends = offsets.tolist()
    return rows.split([end - begin for begin, end in zip([0, *ends], ends, strict=False)])


def _grouped(rows: Tensor, other: Tensor) -> bool:
    """Whether ``grouped_mm`` takes them: bf16 (on the CPU fp32 and fp16 too), whole 16 bytes from row to row."""
    dtypes = (torch.bfloat16,) if rows.is_cuda else (torch.bfloat16, torch.float32, torch.float16)
    aligned = all(side * rows.itemsize % 16 == 0 for side in (rows.shape[-1], other.shape[-1]))
    if rows.is_cuda:  # a Parameter may begin anywhere in a flat buffer of DeepSpeed's
        aligned = aligned and rows.data_ptr() % 16 == other.data_ptr() % 16 == 0
    return rows.dtype in dtypes and aligned and rows.shape[0] > 0 and rows.is_contiguous() and other.is_contiguous()
