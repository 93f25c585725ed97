"""Quantize weights while they are read, or read their codes, into packed weights (``adapter.base: quantized``).

A :class:`QuantizeOnLoad` represents a weight of a plain checkpoint, as a
:class:`model.quantized.tensor.QuantizedTensor` represents a weight of a quantized checkpoint. Its rows are read in the
model's dtype, a million elements at a time, their scales are measured and the rows are quantized. So the whole weight
is never in memory, and no quantized copy is written to disk. The scales have the same bits as the scales that
:mod:`model.scales.in_place` measures from the loaded weight with the same functions: a scale belongs to one row, a
slice of a row, or a block of rows, so a rank needs only the rows that it reads.

Codes are filled in when weights are loaded, scales later, when the quantized layers exist
(:func:`fill_quantize_on_load_scales`): each rank measures them again for its own range. That reads a checkpoint twice,
but no scales need to be kept until then.

A :class:`PackedTensor` packs these codes, or the codes of a quantized checkpoint, as the Parameter stores them
(:mod:`quant.packed_weight`). A rank reads the rows of its partition. A few rows at a time are decoded and quantized
again, to check that the codes are the same and a layer computes with the file's values.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.checkpoint.names import TensorSlice
from model.checkpoint.safetensors import CheckpointError, DiskTensor, Reader
from model.quantized.narrow_range import check_codes
from model.quantized.tensor import QuantizedTensor, check_return, row_chunks
from model.ranks import errors_on_all_ranks
from model.zero import forget_secondary_copies, local_data, local_range
from quant import Quantization, Quantizer, Ranges, Scale, ScaleGroup, TensorSpec, kernels
from quant.observers import partial_errors, partial_stats, scales_from_errors, scales_from_stats, zero_points_from_stats
from quant.packed_weight import PackedCodes, packed_codes


def can_quantize_on_load(spec: TensorSpec) -> bool:
    """Return True if the scales of some rows of a weight can be measured without other rows or weights."""
    return spec.granularity != "tensor" and not spec.has_global_scale


def measured_scales(rows: Tensor, spec: TensorSpec, ranges: Ranges) -> tuple[Tensor, Tensor | None]:
    """Measure scales and zero points of whole rows ``[n, in]``: fp32, in the shapes of ``spec`` for such a weight; not
    finite for rows with NaN or Inf."""
    shape, flat, signed = tuple(rows.shape), rows.reshape(-1), ranges.signs(spec)
    stats = partial_stats(flat, 0, shape, spec)
    if ranges.searches(spec) and bool(torch.isfinite(stats).all()):
        errors = partial_errors(flat, 0, shape, stats, spec, signed=signed)
        scales = scales_from_errors(stats, errors, spec, signed=signed)
    else:
        scales = scales_from_stats(stats, spec, signed=signed)
    return torch.where(torch.isfinite(stats).all(0), scales, torch.nan), zero_points_from_stats(stats, spec)


@dataclass(frozen=True)
class QuantizeOnLoad:
    """Weight of a plain checkpoint, to be read as codes and scales.

    Attributes:
        plain: tensor on disk; its last dimension is the inputs' dimension.
        spec: number format, see :func:`can_quantize_on_load`.
        ranges: method to choose its scales.
    """

    plain: DiskTensor
    spec: TensorSpec
    ranges: Ranges

    @property
    def key(self) -> str:
        """Key of the tensor."""
        return self.plain.key

    @property
    def file(self) -> Path:
        """File of the tensor."""
        return self.plain.file

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, in)``, with the rows of all matrices of a 3-D tensor."""
        columns = self.plain.shape[-1]
        return math.prod(self.plain.shape[:-1]), columns

    def bytes_of(self, count: int) -> int:
        """Return the number of bytes to read for ``count`` values."""
        return self.plain.bytes_of(count)

    def checked_rows(
        self, reader: Reader, rows: slice, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Quantize some rows: their codes, one per element, and the decoded values in ``dtype``.

        Raises:
            CheckpointError: a weight is not finite, or the values are quantized to other codes.
        """
        around = self._whole_blocks(rows)
        weight, scale, zero = self._measured(reader, around, dtype, device)
        spec = self.spec
        if spec.granularity == "block":
            # Groups of the same width quantize single rows like blocks.
            spec, scale = replace(spec, granularity="group"), scale.repeat_interleave(self.down, 0)
            inside = slice(rows.start - around.start, rows.stop - around.start)
            weight, scale = weight[inside], scale[inside].contiguous()
        quantizer = Quantizer(Scale(scale, zero=zero), spec, dtype)
        codes, _ = kernels.quantize(weight, quantizer)
        values = kernels.dequantize(codes, quantizer)
        again, _ = kernels.quantize(values, quantizer)
        check_return(codes, again, values, self.plain)
        return codes, values

    def scales(
        self, reader: Reader, start: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield ``(offset, scales, zero points)``, flat, for the scales [start, start + count) in order; raises as
        :meth:`checked_rows`."""
        columns, down = self.shape[1], self.down
        _, across = self.scale_shape
        first, last = start // across * down, -(-(start + count) // across) * down  # rows of the weight
        for rows in row_chunks(first * columns, last * columns, columns, together=down):
            _, *measured = self._measured(reader, rows, dtype, device)
            begin = rows.start // down * across
            low, high = max(start, begin), min(start + count, rows.stop // down * across)
            scale, zero = (None if one is None else one.view(-1)[low - begin : high - begin] for one in measured)
            assert scale is not None
            yield low - start, scale, zero

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of the scales: one row for each row of the weight, or for each block of rows."""
        rows, across = self.spec.scale_shape(self.shape)
        return rows, across

    @property
    def down(self) -> int:
        """Number of rows that share a scale."""
        return self.spec.group_size or 1 if self.spec.granularity == "block" else 1

    def _whole_blocks(self, rows: slice) -> slice:
        """Extend ``rows`` to whole blocks."""
        return slice(rows.start // self.down * self.down, -(-rows.stop // self.down) * self.down)

    def _measured(
        self, reader: Reader, rows: slice, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read rows of whole scales in ``dtype``, and measure their scales and zero points.

        Raises:
            CheckpointError: a weight is not finite.
        """
        columns = self.shape[1]
        weight = torch.empty((rows.stop - rows.start) * columns, dtype=dtype, device=device)
        reader.read(self.plain, rows.start * columns, weight)
        weight = weight.view(-1, columns)
        scale, zero = measured_scales(weight, self.spec, self.ranges)
        if not bool(torch.isfinite(scale).all()):
            raise CheckpointError(f"{self.file}: weights with NaN or Inf cannot be quantized: {self.key}")
        return weight, scale, zero


class QuantizeOnLoadRows(NamedTuple):
    """Rows of a packed weight, and the tensor that they were quantized from.

    Attributes:
        first: first row in the Parameter.
        number: number of rows.
        tensor: the weight on disk.
        on_disk: first row in ``tensor``.
    """

    first: int
    number: int
    tensor: QuantizeOnLoad
    on_disk: int


def record_quantized_on_load(parameter: Tensor, rows: QuantizeOnLoadRows) -> None:
    """Record in a Parameter the tensor that some of its rows were quantized from.

    Raises:
        CheckpointError: the rows do not fill whole blocks.
    """
    tensor = rows.tensor
    if any(edge % tensor.down for edge in (rows.first, rows.number, rows.on_disk)):
        raise CheckpointError(
            f"adapter.base: quantized: the rows of {tensor.key} do not fill whole blocks of {tensor.down}: set "
            "adapter.base to weights"
        )
    parameter.made = {**quantized_on_load_of(parameter), rows.first: rows}  # type: ignore[attr-defined]


def quantized_on_load_of(parameter: Tensor) -> dict[int, QuantizeOnLoadRows]:
    """Return the tensors that a Parameter was quantized from, by first row; empty if its codes were read."""
    found: dict[int, QuantizeOnLoadRows] = getattr(parameter, "made", {})
    return found


@torch.no_grad()
def fill_quantize_on_load_scales(model: nn.Module, quantization: Quantization) -> set[str]:
    """Fill scales and zero points of all weights quantized on load; a collective, before ``deepspeed.initialize``.

    Args:
        model, quantization: the quantized model; the weights are loaded.

    Returns:
        The owners of the groups of these scales.

    Raises:
        RankError: on every rank: a file can no longer be read.
    """
    groups = {group.owner: group for group in quantization.weight_groups}
    made = {owner: quantized_on_load_of(quantization.layers[owner].weight) for owner in groups}
    with errors_on_all_ranks(OSError, CheckpointError), Reader() as reader:
        for owner, rows in ((owner, rows) for owner, found in made.items() for rows in found.values()):
            _fill_range(groups[owner], rows, quantization.layers[owner].weight.dtype, reader)
    forget_secondary_copies(model)
    return {owner for owner, found in made.items() if found}


def _fill_range(group: ScaleGroup, rows: QuantizeOnLoadRows, dtype: torch.dtype, reader: Reader) -> None:
    """Write this rank's part of the scales of some rows."""
    (start, stop), local, tensor = local_range(group.s0), local_data(group.s0), rows.tensor
    _, across = tensor.scale_shape
    begin, end, first = ((row // tensor.down) * across for row in (rows.first, rows.first + rows.number, rows.on_disk))
    low, high = max(start, begin), min(stop, end)
    if low >= high:
        return
    for offset, scale, zero in tensor.scales(reader, first + low - begin, high - low, dtype, local.device):
        at = slice(low - start + offset, low - start + offset + scale.numel())
        local[at].copy_(scale)
        if group.zero is not None:  # of the same shape, so a rank has the same range of it
            assert zero is not None
            local_data(group.zero)[at].copy_(zero)


@dataclass(frozen=True)
class PackedTensor:
    """Codes of a weight on disk as elements of a packed Parameter; replaces the :class:`QuantizedTensor` or plain
    tensor in the plan of reads."""

    coded: QuantizedTensor | QuantizeOnLoad
    held: PackedCodes

    @property
    def key(self) -> str:
        """Key that the plain weight would have."""
        return self.coded.key

    def bytes_of(self, count: int) -> int:
        """Estimate the number of bytes to read for ``count`` elements, assuming two bytes per element."""
        return self.coded.bytes_of(count * 2 * self.coded.shape[1] // self.held.row_bytes)

    def values(
        self, reader: Reader, start: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(offset, elements)`` for the elements [start, start + count) of the packed rows.

        Raises:
            CheckpointError: as :meth:`QuantizedTensor.values`.
        """
        columns, width = self.coded.shape[1], self.held.row_bytes // dtype.itemsize
        for rows in row_chunks(start // width * columns, -(-(start + count) // width) * columns, columns):
            codes, _ = self.coded.checked_rows(reader, rows, dtype, device)
            if isinstance(self.coded, QuantizedTensor):
                check_codes(codes, self.held.spec, self.coded)
            packed = self.held.pack(codes).contiguous().view(-1).view(dtype)
            low, high = max(start, rows.start * width), min(start + count, rows.stop * width)
            yield low - start, packed[low - rows.start * width : high - rows.start * width]


def in_codes(read: Any, model: nn.Module) -> Any:
    """Convert a read of :mod:`model.checkpoint.load` into a packed weight to a read of packed rows.

    Raises:
        CheckpointError: the weight is not stored in these codes.
    """
    parameter, piece, coded = model.get_parameter(read.piece.name), read.piece, read.source
    held = packed_codes(parameter)
    assert held is not None
    if held.ranges is not None and isinstance(coded, DiskTensor):
        coded = QuantizeOnLoad(coded, held.spec, held.ranges)
    elif not isinstance(coded, QuantizedTensor) or not held.spec.takes(coded.scheme.weights):
        there = f"quantized as {coded.scheme.weights}" if isinstance(coded, QuantizedTensor) else "not quantized"
        raise CheckpointError(
            f"adapter.base: quantized: {coded.key} is {there} in {coded.file.parent}, and the recipe says "
            f"{held.spec}: set "
            "quant.scheme to source, or adapter.base to weights"
        )
    columns, width = held.shape[-1], held.row_bytes // parameter.dtype.itemsize
    whole = coded.shape[-1] == columns and not piece.turned and piece.offset % columns == 0 == piece.start % columns
    if not whole or read.filled_from is not None:
        raise CheckpointError(
            f"adapter.base: quantized: the rows of {coded.key} are not those of {piece.name}: set adapter.base to "
            "weights"
        )
    rows = piece.numel // columns
    if isinstance(coded, QuantizeOnLoad):
        record_quantized_on_load(
            parameter, QuantizeOnLoadRows(piece.start // columns, rows, coded, piece.offset // columns)
        )
    moved = TensorSlice(piece.name, piece.offset // columns * width, (rows, width), piece.start // columns * width)
    return read._replace(source=PackedTensor(coded, held), piece=moved, target=parameter)
