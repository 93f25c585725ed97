"""The three products of a linear layer: of one weight, or of a stack of them, each with rows of its own.

With a stack ``[E, out, in]`` the rows of the input are sorted by expert, and ``offsets`` says where each expert's end:
those of expert ``e`` are ``[offsets[e - 1], offsets[e])``. An expert without rows is multiplied by nothing, and its
weight has a gradient of zeros.

``torch.nn.functional.grouped_mm`` multiplies all experts at once where it can, ``torch._scaled_grouped_mm`` their fp8
codes. Elsewhere they come one by one, in their order, for which the host has to wait for the offsets; on a GPU that is
said. Kernels take tensors from an address that 16 divides; a Parameter, gathered by DeepSpeed, may begin anywhere.
"""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 16  # what each expert's rows are filled up to for the grouped GEMM of codes


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
    """``(x @ weight.t()) * x_scale * weight_scale + bias`` of e4m3 codes, on the fp8 tensor cores where there are any.

    Args:
        x, weight, bias, offsets: as of :func:`linear`, the former two as codes; both sides of a weight are multiples of
            16. A stack is one that :func:`takes_codes_of_stacks`.
        x_scale, weight_scale: fp32 ``[1]``; of a stack the latter is ``[E]``.
        dtype: of the result.
        fast_accum: leave the sums to Hopper's tensor cores, which add in fewer bits than fp32 has, as vLLM does (see
            docs/how_a_layer_computes.md); otherwise they go to fp32 every so many products. CPUs add in fp32 always.

    Returns:
        ``[..., out]``, not differentiable.
    """
    output_shape = (*x.shape[:-1], weight.shape[-2])
    if x.numel() == 0:
        return x_scale.new_zeros(output_shape, dtype=dtype)
    weight = _aligned(weight)
    if offsets is None:
        rows = x.reshape(-1, x.shape[-1])
        return _scaled_mm(rows, x_scale, weight, weight_scale, bias, dtype, fast_accum).reshape(output_shape)
    if x.device.type != "cpu":
        return _scaled_grouped_mm(x, x_scale, weight, weight_scale, dtype, offsets, fast_accum)
    experts = zip(_split(x, offsets), weight, weight_scale.unbind(), strict=True)
    return torch.cat([_scaled_mm(rows, x_scale, one, scale, None, dtype, fast_accum) for rows, one, scale in experts])


def takes_codes_of_stacks(weight: Tensor) -> bool:
    """Whether :func:`scaled_linear` takes stacks on the device of ``weight`` and gives its dtype.

    torch has the grouped GEMM of fp8 codes with scales per row, which can say what scales per tensor say, for compute
    capability 9.0 and bf16 results only. A CPU takes the experts one by one; the meta device stands for such a GPU.
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
    if x.shape[0] == 0:  # an expert that no token chose
        return x_scale.new_zeros((0, weight.shape[0]), dtype=dtype)
    apart = bias if dtype == torch.float32 else None  # of a result in fp32 CUDA's kernel takes none
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


def _scaled_grouped_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype,
    offsets: Tensor,
    fast_accum: bool,
) -> Tensor:
    """Each expert's rows are moved apart to begin at multiples of 16, as the kernel's authors ask for (pytorch#148531),
    without the host knowing how many there are."""
    (rows, width), (experts, out, _) = x.shape, weight.shape
    ends, places = _moved_apart(rows, offsets)
    capacity = -(-rows // ROWS) * ROWS + ROWS * experts  # at least the last of the ends
    apart = torch.zeros((capacity, width // 8), dtype=torch.int64, device=x.device)  # codes of 0, moved by eights
    apart[places] = x.view(torch.int64)
    output = torch._scaled_grouped_mm(
        apart.view(x.dtype),
        weight.transpose(-2, -1),
        x_scale.expand(capacity).contiguous(),
        weight_scale[:, None].expand(experts, out).contiguous(),
        offs=ends,
        out_dtype=dtype,
        use_fast_accum=fast_accum,
    )
    return output[places]


def _moved_apart(rows: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Where each expert's rows end, int32 ``[E]``, if each has a multiple of 16 of them; and the place of every row."""
    begins = F.pad(offsets[:-1], (1, 0))
    sizes = (offsets - begins + ROWS - 1) // ROWS * ROWS
    ends = sizes.cumsum(0, dtype=torch.int32)
    row = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    expert = torch.searchsorted(offsets, row, right=True)
    return ends, row + (ends - sizes - begins)[expert]


def _product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if _only_shapes(x):
        return x.new_empty(x.shape[0], weight.shape[1])
    if _grouped(x, weight):
        return F.grouped_mm(_aligned(x), _aligned(weight).transpose(-2, -1), offs=offsets)
    return torch.cat([F.linear(rows, one) for rows, one in zip(_split(x, offsets), weight, strict=True)])


def input_gradient(grad: Tensor, weight: Tensor, offsets: Tensor | None) -> Tensor:
    """``grad @ weight``: ``[rows, out]`` to ``[rows, in]``, as above."""
    if offsets is None:
        return grad @ weight
    if _only_shapes(grad):
        return grad.new_empty(grad.shape[0], weight.shape[2])
    if _grouped(grad, weight):
        return F.grouped_mm(_aligned(grad), _aligned(weight), offs=offsets)
    return torch.cat([rows @ one for rows, one in zip(_split(grad, offsets), weight, strict=True)])


def weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor | None) -> Tensor:
    """``grad.t() @ x`` of ``[rows, out]`` and ``[rows, in]``, in the shape of the weight, as above."""
    if offsets is None:
        return grad.t() @ x
    if _only_shapes(grad):
        return grad.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])
    if _grouped(grad, x):
        gradient = F.grouped_mm(_aligned(grad).t(), _aligned(x), offs=offsets)
        return zero_where_empty_(gradient, offsets) if _leaves_out_empty(gradient) else gradient
    pairs = zip(_split(grad, offsets), _split(x, offsets), strict=True)
    return torch.stack([left.t() @ right for left, right in pairs])


def _only_shapes(rows: Tensor) -> bool:
    """Whether there is nothing to compute, and no ``grouped_mm``: on the meta device torch has it for bf16 alone."""
    return rows.is_meta and rows.dtype != torch.bfloat16


def _split(rows: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """The rows of each expert."""
    ends = offsets.tolist() if len(rows) else [0] * len(offsets)
    return rows.split([end - begin for begin, end in zip([0, *ends], ends, strict=False)])


def _grouped(rows: Tensor, other: Tensor) -> bool:
    """Whether ``grouped_mm`` takes them: bf16 (on the CPU fp32 and fp16 too), whole 16 bytes from row to row."""
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
    """The tensor itself, or a copy that lies as a kernel for CUDA wants it: contiguous, from whole 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.is_cuda and tensor.data_ptr() % 16 else tensor


def _leaves_out_empty(gradient: Tensor) -> bool:
    """Whether ``grouped_mm`` leaves the gradients of experts without rows as it found the memory: from compute
    capability 10.0 on (pytorch#172439)."""
    return gradient.is_cuda and torch.cuda.get_device_capability(gradient.device) >= (10, 0)


def zero_where_empty_(gradient: Tensor, offsets: Tensor) -> Tensor:
    """The gradient ``[E, out, in]`` of a stack, with zeros for the experts without rows; in place, without a wait."""
    empty = offsets == F.pad(offsets[:-1], (1, 0))
    return gradient.masked_fill_(empty[:, None, None], 0)
