"""Frozen weights stored as packed codes (``adapter.base: quantized``): half a byte per weight at four bits.

A layer whose weight never changes and is always quantized needs only the codes. A Parameter stores them in place of the
weight, row after row, each packed as in :mod:`quant.formats.compressed_tensors`. The Parameter has the model's dtype,
but its elements are raw bytes: an element of two bytes contains four codes of four bits. The reason is that DeepSpeed
gathers a list of parameters in one collective per dtype: a separate uint8 dtype would cost another collective per list.
With the model's dtype, the bytes are gathered, saved and offloaded with the other parameters, and copied unchanged. No
code may compute with these elements.

The forward unpacks the codes and multiplies the input by ``code * scale``. Its result has the same bits as a forward
that quantizes a weight to the same codes.

With the quantized all-gather, a trainable weight may also be present as codes only (:func:`placeholder`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant import kernels
from quant.formats.packing import pack_int32, pack_nibbles, packed_columns, unpack_nibbles, unpack_rows
from quant.observers import Ranges
from quant.scale import Quantizer
from quant.spec import TensorSpec

BASE = "adapter.base: quantized"
CODE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp4_e2m1": torch.uint8}  # int8 for integers


@dataclass(frozen=True)
class PackedCodes:
    """Layout of a weight's codes in a Parameter; stored as the Parameter's attribute ``held``.

    Attributes:
        spec: the weight's number format.
        shape: the weight's shape, ``(out, in)`` or ``(E, out, in)``.
        ranges: method to choose scales if weights are quantized on load; None if codes are loaded.
        option: recipe option to name in errors.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    ranges: Ranges | None = None
    option: str = BASE

    @property
    def row_bytes(self) -> int:
        """Number of bytes of the codes of one row."""
        columns = self.shape[-1]
        if self.spec.dtype == "int":
            return 4 * packed_columns(columns, self.spec.bits)
        return columns if self.spec.dtype == "fp8_e4m3" else columns // 2

    def packed_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Compute the shape of the Parameter in the model's dtype: the weight's shape with a shorter last dimension.
        Raises ValueError if the bytes of a row's codes do not fill whole elements of that dtype."""
        if self.row_bytes % dtype.itemsize:
            raise ValueError(
                f"the {self.row_bytes} bytes of codes in a row of {list(self.shape)} do not fill whole elements of "
                f"{dtype}: keep the weights (adapter.base: weights, or export without convert)"
            )
        return (*self.shape[:-1], self.row_bytes // dtype.itemsize)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes ``[rows, in]`` row by row to uint8 ``[rows, row_bytes]``."""
        if self.spec.dtype == "int":
            return pack_int32(codes, self.spec.bits).view(torch.uint8)
        return codes.view(torch.uint8) if self.spec.dtype == "fp8_e4m3" else pack_nibbles(codes)

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack a gathered Parameter to codes in the weight's shape: int8, ``float8_e4m3fn``, or uint8 for e2m1."""
        rows, columns = packed.detach().view(torch.uint8).view(-1, self.row_bytes), self.shape[-1]
        if self.spec.dtype == "fp8_e4m3":
            return rows.view(torch.float8_e4m3fn).view(self.shape)
        codes = unpack_rows(rows, self.spec.bits, columns) if self.spec.dtype == "int" else unpack_nibbles(rows)
        return codes.view(self.shape)

    def values(self, packed: Tensor, quantizer: Quantizer) -> Tensor:
        """Dequantize a gathered Parameter: the weight in its shape and the model's dtype."""
        return kernels.dequantize(self.unpack(packed), quantizer)


def as_weight(parameter: Tensor) -> Tensor:
    """Return the Parameter, or a meta tensor in the weight's shape if the Parameter stores codes."""
    held = packed_codes(parameter)
    return parameter if held is None else torch.empty(held.shape, dtype=parameter.dtype, device="meta")


def packed_codes(parameter: Tensor) -> PackedCodes | None:
    """Return the layout of the codes in a Parameter; None for an ordinary Parameter."""
    held: PackedCodes | None = getattr(parameter, "held", None)
    return held


def store_packed(
    layer: nn.Module, spec: TensorSpec, shape: tuple[int, ...], ranges: Ranges | None = None, option: str = BASE
) -> None:
    """Replace the weight of a layer (a Linear or stack, on the meta device) by a frozen Parameter for its codes. For
    the arguments see :class:`PackedCodes`. Raises ValueError as :meth:`PackedCodes.packed_shape`."""
    weight, held = layer.weight, PackedCodes(spec, shape, ranges, option)
    assert isinstance(weight, nn.Parameter) and weight.is_meta and math.prod(shape) == weight.numel()
    packed = torch.empty(held.packed_shape(weight.dtype), dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.weight.held = held  # type: ignore[attr-defined]


def placeholder(parts: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Create a tensor that has the shape and dtype of a weight, but whose memory contains only the weight's codes.

    Autograd and ZeRO see an ordinary weight, and the codes live as long as the tensor. All its elements are one NaN
    stored after the codes (strides of 0): a computation with the tensor itself instead of :func:`codes_of_placeholder`
    results in NaN. ``parts`` contains the bytes of the codes, uint8 in any shape, and may be padded at the end.
    """
    size = -(-parts.numel() // dtype.itemsize) * dtype.itemsize
    memory = torch.empty(size + dtype.itemsize, dtype=torch.uint8, device=parts.device)
    memory[: parts.numel()].view(parts.shape).copy_(parts)
    elements = memory.view(dtype)
    elements[-1] = torch.nan
    return elements[-1].expand(shape)


def is_placeholder(weight: Tensor) -> bool:
    """Return True if ``weight`` is a :func:`placeholder`: no ordinary trainable weight has only strides of 0."""
    return not any(weight.stride()) and weight.numel() > 1


def codes_of_placeholder(weight: Tensor, spec: TensorSpec) -> Tensor:
    """Return the codes stored in a :func:`placeholder`, in the weight's shape. Raises ValueError if the tensor is not a
    placeholder."""
    before = weight.storage_offset() * weight.itemsize
    storage = weight.untyped_storage()
    if any(weight.stride()) or before < weight.numel() or before + weight.itemsize != storage.nbytes():
        raise ValueError(
            f"found a weight {list(weight.shape)} with strides {weight.stride()}, expected a placeholder with codes "
            "(strides 0)"
        )
    codes = torch.empty(0, dtype=CODE_DTYPES.get(spec.dtype, torch.int8), device=weight.device)
    strides = torch.empty(weight.shape, device="meta").stride()
    return codes.set_(storage, 0, weight.shape, strides)
