"""Frozen weights that are held as their packed codes (``adapter.base: quantized``): half a byte per weight at four
bits.

A layer that never changes its weight, and always quantizes it, needs no more of it than the codes. They lie in a
Parameter in place of the weight, one row of codes behind another, each packed as
:mod:`quant.formats.compressed_tensors` packs it. The Parameter says that it has the model's dtype, although nobody
reads it as such: an element of two bytes holds four codes of four bits. DeepSpeed gathers a list of parameters in one
collective per dtype. Bytes of a dtype of their own would cost another collective for each list; under the model's dtype
they travel, are saved and are offloaded beside the other parameters, and are copied as they are. Nothing may compute
with them.

The layer unpacks the codes while it runs and multiplies what they stand for, ``code * scale``. Those are the bits of a
forward that quantizes the weight itself, if the weight has the same codes.

A weight that trains may be there as codes for a while, too: where they traveled in its place (:func:`head_proxy`).
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

CODE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp4_e2m1": torch.uint8}  # int8 of integers


@dataclass(frozen=True)
class PackedCodes:
    """How a Parameter holds the codes of a weight; its attribute ``held``.

    Attributes:
        spec: the weight's number format.
        shape: of the weight, ``(out, in)`` or ``(E, out, in)``.
        ranges: how scales are chosen where the codes are made of weights that are read; None where codes are read.
    """

    spec: TensorSpec
    shape: tuple[int, ...]
    ranges: Ranges | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's codes."""
        columns = self.shape[-1]
        if self.spec.dtype == "int":
            return 4 * packed_columns(columns, self.spec.bits)
        return columns if self.spec.dtype == "fp8_e4m3" else columns // 2

    def packed_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Shape of the Parameter in the model's dtype: that of the weight with shorter rows.

        Raises:
            ValueError: the codes of a row do not fill whole elements.
        """
        if self.row_bytes % dtype.itemsize:
            raise ValueError(
                f"adapter.base: quantized: the {self.row_bytes} bytes of codes in a row of {list(self.shape)} do "
                "not fill "
                f"whole elements of {dtype}: set adapter.base to weights"
            )
        return (*self.shape[:-1], self.row_bytes // dtype.itemsize)

    def pack(self, codes: Tensor) -> Tensor:
        """The bytes ``[rows, row_bytes]``, uint8, of rows of codes ``[rows, in]``, one by one."""
        if self.spec.dtype == "int":
            return pack_int32(codes, self.spec.bits).view(torch.uint8)
        return codes.view(torch.uint8) if self.spec.dtype == "fp8_e4m3" else pack_nibbles(codes)

    def unpack(self, packed: Tensor) -> Tensor:
        """The codes, in the weight's shape, of a gathered Parameter: int8, ``float8_e4m3fn``, or uint8 of e2m1."""
        rows, columns = packed.detach().view(torch.uint8).view(-1, self.row_bytes), self.shape[-1]
        if self.spec.dtype == "fp8_e4m3":
            return rows.view(torch.float8_e4m3fn).view(self.shape)
        codes = unpack_rows(rows, self.spec.bits, columns) if self.spec.dtype == "int" else unpack_nibbles(rows)
        return codes.view(self.shape)

    def values(self, packed: Tensor, quantizer: Quantizer) -> Tensor:
        """The weight that a gathered Parameter stands for, in the model's dtype."""
        return kernels.dequantize(self.unpack(packed), quantizer)


def as_weight(parameter: Tensor) -> Tensor:
    """The Parameter itself, or, where it holds codes, a meta tensor like their weight."""
    held = packed_codes(parameter)
    return parameter if held is None else torch.empty(held.shape, dtype=parameter.dtype, device="meta")


def packed_codes(parameter: Tensor) -> PackedCodes | None:
    """How a Parameter holds codes; None where it is what it says."""
    held: PackedCodes | None = getattr(parameter, "held", None)
    return held


def store_packed(layer: nn.Module, spec: TensorSpec, shape: tuple[int, ...], ranges: Ranges | None = None) -> None:
    """Make the weight of a Linear, or of a stack of them, on the meta device a Parameter for its codes; ``spec``,
    ``shape`` and ``ranges`` as of :class:`PackedCodes`.

    Raises:
        ValueError: of :meth:`PackedCodes.packed_shape`.
    """
    weight, held = layer.weight, PackedCodes(spec, shape, ranges)
    assert isinstance(weight, nn.Parameter) and weight.is_meta and math.prod(shape) == weight.numel()
    packed = torch.empty(held.packed_shape(weight.dtype), dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.weight.held = held  # type: ignore[attr-defined]


def placeholder(parts: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What stands in for a weight whose codes alone are there, while a layer computes.

    It has the weight's shape and dtype, so that autograd and whoever keeps count of parameters see no difference, and
    the codes lie in its memory, so that they live as long as it does. All of its elements are one NaN behind the codes:
    somebody who computes with it, instead of asking :func:`codes_of_placeholder`, cannot overlook it.

    Args:
        parts: the bytes of the codes, uint8 in any shape; more than there are elements may follow at the end.
        shape, dtype: of the weight.
    """
    size = -(-parts.numel() // dtype.itemsize) * dtype.itemsize
    memory = torch.empty(size + dtype.itemsize, dtype=torch.uint8, device=parts.device)
    memory[: parts.numel()].view(parts.shape).copy_(parts)
    elements = memory.view(dtype)
    elements[-1] = torch.nan
    return elements[-1].expand(shape)


def is_placeholder(weight: Tensor) -> bool:
    """Whether it is a :func:`head_proxy`: no weight that could train has all elements in one place."""
    return not any(weight.stride()) and weight.numel() > 1


def codes_of_placeholder(weight: Tensor, spec: TensorSpec) -> Tensor:
    """The codes behind a :func:`head_proxy`, in the weight's shape.

    Raises:
        ValueError: of any other tensor.
    """
    before = weight.storage_offset() * weight.itemsize
    storage = weight.untyped_storage()
    if any(weight.stride()) or before < weight.numel() or before + weight.itemsize != storage.nbytes():
        raise ValueError(f"a weight {list(weight.shape)} of strides {weight.stride()} holds no codes")
    codes = torch.empty(0, dtype=CODE_DTYPES.get(spec.dtype, torch.int8), device=weight.device)
    strides = torch.empty(weight.shape, device="meta").stride()
    return codes.set_(storage, 0, weight.shape, strides)
