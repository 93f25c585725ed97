"""Fill packed weights (``adapter.base: quantized``): quantize plain weights while they are read, or read codes.

A :class:`QuantizeOnLoad` represents a weight of a plain checkpoint, as a
:class:`model.quantized.tensor.QuantizedTensor` represents a weight of a quantized checkpoint. Its rows are read in the
model's dtype, a million elements at a time, their scales are measured and the rows are quantized. So the whole weight
is never in memory, and no quantized copy is written to disk. The scales have the same bits as the scales that
:mod:`model.scales.in_place` measures from the loaded weight with the same functions: a scale belongs to one row, a
slice of a row, or a block of rows, so a rank needs only the rows that it reads.

Codes are filled in when weights are loaded. Scales are filled in later, when the quantized layers exist
(:func:`fill_quantize_on_load_scales`): each rank measures them again for its own range. So the checkpoint is read
twice, but no scales are kept in between.

A :class:`PackedTensor` packs these codes, or the codes of a quantized checkpoint, as the Parameter stores them
(:mod:`quant.packed_weight`). A rank reads the rows of its partition. A few rows at a time are decoded and quantized
again: the codes must be the same, so that layers compute with the file's values.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
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
from quant.observers import measured_scales
from quant.packed_weight import PackedCodes, packed_codes
from quant.spec import per_run


def can_quantize_on_load(spec: TensorSpec) -> bool:
    """Return True if the scales of some rows of a weight can be measured without other rows or weights."""
    return spec.granularity != "tensor" and not spec.has_global_scale


@dataclass(frozen=True)
class QuantizeOnLoad:
    """Weight of a plain checkpoint, to be read as codes and scales.

    Attributes:
        plain: tensor on disk; its last dimension is the inputs' dimension.
        spec: number format, for which :func:`can_quantize_on_load` is True.
        ranges: method to choose the weight's scales.
    """

    plain: DiskTensor
    spec: TensorSpec
    ranges: Ranges

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, in)``, with the rows of all matrices of a 3-D tensor."""
        columns = self.plain.shape[-1]
        return math.prod(self.plain.shape[:-1]), columns

    def checked_rows(
        self, reader: Reader, rows: slice, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Read and quantize some rows. Returns their codes and, in ``dtype``, their dequantized values, both
        ``[rows, in]``. Raises CheckpointError if a weight is not finite, or if the dequantized values would quantize to
        other codes."""
        down = self.spec.rows_per_scale
        around = slice(rows.start // down * down, min(-(-rows.stop // down) * down, self.shape[0]))  # whole blocks
        weight, scale, zero = self._measured(reader, around, dtype, device)
        if self.spec.granularity == "block":
            scale = per_run(scale, weight.shape, self.spec)
            inside = slice(rows.start - around.start, rows.stop - around.start)
            weight, scale = weight[inside], scale[inside].contiguous()
        quantizer = Quantizer(Scale(scale, zero=zero), self.spec.of_runs, dtype)
        codes, _ = kernels.quantize(weight, quantizer)
        values = kernels.dequantize(codes, quantizer)
        again, _ = kernels.quantize(values, quantizer)
        check_return(codes, again, values, self.plain)
        return codes, values

    def scales(
        self, reader: Reader, start: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Measure the scales [start, start + count) of the flattened scales; yield ``(offset, scales, zero points)``,
        flat, with the offset from ``start``, and None as zero points if ``spec`` has none. ``dtype`` is the model's.
        Raises CheckpointError if a weight is not finite."""
        columns, down = self.shape[1], self.spec.rows_per_scale
        across = self.spec.scale_shape(self.shape)[1]
        first = start // across * down
        last = min(-(-(start + count) // across) * down, self.shape[0])  # rows of the weight
        for rows in row_chunks(first * columns, last * columns, columns, together=down):
            _, *measured = self._measured(reader, rows, dtype, device)
            begin = rows.start // down * across
            low, high = max(start, begin), min(start + count, -(-rows.stop // down) * across)
            scale, zero = (None if one is None else one.view(-1)[low - begin : high - begin] for one in measured)
            assert scale is not None
            yield low - start, scale, zero

    def _measured(
        self, reader: Reader, rows: slice, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read rows in ``dtype`` (whole blocks) and measure their scales and zero points. Raises as :meth:`scales`."""
        columns = self.shape[1]
        weight = torch.empty((rows.stop - rows.start) * columns, dtype=dtype, device=device)
        reader.read(self.plain, rows.start * columns, weight)
        weight = weight.view(-1, columns)
        scale, zero = measured_scales([weight], self.spec, self.ranges)
        if not bool(torch.isfinite(scale).all()):
            raise CheckpointError(f"{self.plain.file}: weights with NaN or Inf cannot be quantized: {self.plain.key}")
        return weight, scale, zero


class QuantizeOnLoadRows(NamedTuple):
    """Rows of a packed weight, and the tensor on disk from which they were quantized. The Parameter's attribute
    ``made`` is a dict of these, by first row.

    Attributes:
        first: first row in the Parameter.
        number: number of rows.
        tensor: the weight on disk.
        on_disk: row of ``tensor`` that became ``first``.
    """

    first: int
    number: int
    tensor: QuantizeOnLoad
    on_disk: int


@torch.no_grad()
def fill_quantize_on_load_scales(model: nn.Module, quantization: Quantization) -> set[str]:
    """Fill scales and zero points of all weights quantized on load. Returns the owners of the filled scale groups. A
    collective, after the weights are loaded and before ``deepspeed.initialize``. Raises RankError if a file can no
    longer be read, or has NaN or Inf."""
    owners = set()
    with errors_on_all_ranks(OSError, CheckpointError), Reader() as reader:
        for group in quantization.weight_groups:
            weight = quantization.layers[group.owner].weight
            for rows in getattr(weight, "made", {}).values():
                _fill_range(group, rows, weight.dtype, reader)
                owners.add(group.owner)
    forget_secondary_copies(model)
    return owners


def _fill_range(group: ScaleGroup, rows: QuantizeOnLoadRows, dtype: torch.dtype, reader: Reader) -> None:
    """Write this rank's part of the scales of some rows."""
    (start, stop), local, tensor = local_range(group.s0), local_data(group.s0), rows.tensor
    down, across = tensor.spec.rows_per_scale, tensor.spec.scale_shape(tensor.shape)[1]
    begin, end, first = (-(-row // down) * across for row in (rows.first, rows.first + rows.number, rows.on_disk))
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
    """Codes of a weight as elements of a packed Parameter; takes the place of the tensor on disk in the plan of reads.

    Attributes:
        coded: the weight on disk, quantized or to be quantized on load.
        held: layout of the codes in the Parameter.
    """

    coded: QuantizedTensor | QuantizeOnLoad
    held: PackedCodes

    @property
    def key(self) -> str:
        """Key that the plain weight would have."""
        return self._on_disk.key

    def bytes_of(self, count: int) -> int:
        """Estimate the bytes that are read from the file for ``count`` elements of the packed Parameter, each of which
        holds two bytes of packed codes (as in bf16)."""
        return self._on_disk.bytes_of(count * 2 * self.coded.shape[1] // self.held.row_bytes)

    @property
    def _on_disk(self) -> QuantizedTensor | DiskTensor:
        return self.coded if isinstance(self.coded, QuantizedTensor) else self.coded.plain

    def values(
        self, reader: Reader, start: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(offset, elements)``, flat, with the offset from ``start``, for elements [start, start + count) of
        the packed Parameter, in its ``dtype``: they hold the bytes of codes. Raises CheckpointError if a scale is
        invalid, a code is below a narrow range, or codes decoded to ``dtype`` would quantize to other codes."""
        columns, width = self.coded.shape[1], self.held.row_bytes // dtype.itemsize
        for rows in row_chunks(start // width * columns, -(-(start + count) // width) * columns, columns):
            codes, _ = self.coded.checked_rows(reader, rows, dtype, device)
            if isinstance(self.coded, QuantizedTensor):
                check_codes(codes, self.held.spec, self.coded)
            packed = self.held.pack(codes).contiguous().view(-1).view(dtype)
            low, high = max(start, rows.start * width), min(start + count, rows.stop * width)
            yield low - start, packed[low - rows.start * width : high - rows.start * width]


def in_codes(read: Any, model: nn.Module) -> Any:
    """Convert a planned read (``_Read`` of :mod:`model.checkpoint.load`) of a packed weight into one that reads packed
    rows. Rows to quantize on load are also recorded in the Parameter's ``made``. Raises CheckpointError if the tensor
    on disk has another number format than the packed weight, or if the read is not of whole rows and blocks."""
    parameter, piece, source = model.get_parameter(read.piece.name), read.piece, read.source
    held = packed_codes(parameter)
    assert held is not None
    coded: QuantizedTensor | QuantizeOnLoad
    if held.ranges is not None and isinstance(source, DiskTensor):
        coded = QuantizeOnLoad(source, held.spec, held.ranges)
    elif isinstance(source, QuantizedTensor) and held.spec.takes(source.scheme.weights):
        coded = source
    else:
        found = f"quantized as {source.scheme.weights}" if isinstance(source, QuantizedTensor) else "not quantized"
        raise CheckpointError(
            f"adapter.base: quantized: {source.key} is {found} in {source.file.parent}, but {held.spec} in the recipe: "
            "set quant.scheme to source, or adapter.base to weights"
        )
    columns, width = held.shape[-1], held.row_bytes // parameter.dtype.itemsize
    whole = coded.shape[-1] == columns and not piece.turned and piece.offset % columns == 0 == piece.start % columns
    if not whole or read.filled_from is not None:
        raise CheckpointError(
            f"{held.option}: found parts of rows or a transpose of {piece.name} in {source.key}, expected whole rows: "
            "remove that option"
        )
    first, on_disk, rows = piece.start // columns, piece.offset // columns, piece.numel // columns
    if isinstance(coded, QuantizeOnLoad):
        down, whole_matrix = coded.spec.rows_per_scale, coded.shape == held.shape == (rows, columns)
        if not whole_matrix and any(edge % down for edge in (first, on_disk, rows)):
            raise CheckpointError(
                f"{held.option}: found rows of {source.key} that do not fill blocks of {down} rows with one scale: "
                "remove that option"
            )
        made = {**getattr(parameter, "made", {}), first: QuantizeOnLoadRows(first, rows, coded, on_disk)}
        parameter.made = made  # type: ignore[attr-defined]
    moved = TensorSlice(piece.name, on_disk * width, (rows, width), first * width)
    return read._replace(source=PackedTensor(coded, held), piece=moved, target=parameter)
