"""Reads weights into Parameters that hold their codes (:mod:`quant.held`): those of a quantised checkpoint, or codes
that are made of an ordinary one (:mod:`model.quantised.made`).

A rank reads the rows that its share of the packed codes lies in, and packs them as the Parameter has them. Nowhere is
there more of a weight's values than of a few rows, which are made to see that their codes come back: what a layer
computes with is what the file holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.pieces import Piece
from model.quantised.made import MadeRows, MadeTensor, note_made
from model.quantised.narrow import check_codes
from model.quantised.tensor import CodedTensor, row_chunks
from model.shards import CheckpointError, DiskTensor, Reader
from quant.held import HeldCodes, held_codes


@dataclass(frozen=True)
class PackedTensor:
    """The codes of a weight in a checkpoint as the elements of a Parameter that holds them; it stands for the
    :class:`CodedTensor`, or the ordinary tensor, in the list of what is read."""

    coded: CodedTensor | MadeTensor
    held: HeldCodes

    @property
    def key(self) -> str:
        """The key that the weight would have."""
        return self.coded.key

    def bytes_of(self, count: int) -> int:
        """About how many bytes are read for so many of its elements, of two bytes as a rule."""
        return self.coded.bytes_of(count * 2 * self.coded.shape[1] // self.held.row_bytes)

    def values(
        self, reader: Reader, start: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """``(offset, elements)`` for the elements [start, start + count) of the packed rows.

        Raises:
            CheckpointError: as of :meth:`CodedTensor.values`.
        """
        columns, width = self.coded.shape[1], self.held.row_bytes // dtype.itemsize
        for rows in row_chunks(start // width * columns, -(-(start + count) // width) * columns, columns):
            codes, _ = self.coded.checked_rows(reader, rows, dtype, device)
            if isinstance(self.coded, CodedTensor):
                check_codes(codes, self.held.spec, self.coded)
            packed = self.held.pack(codes).contiguous().view(-1).view(dtype)
            low, high = max(start, rows.start * width), min(start + count, rows.stop * width)
            yield low - start, packed[low - rows.start * width : high - rows.start * width]


def in_codes(read: Any, model: nn.Module) -> Any:
    """A read of :mod:`model.load` whose target holds codes: the same of their packed rows.

    Raises:
        CheckpointError: the weight is not stored in these codes.
    """
    parameter, piece, coded = model.get_parameter(read.piece.name), read.piece, read.source
    held = held_codes(parameter)
    assert held is not None
    if held.ranges is not None and isinstance(coded, DiskTensor):
        coded = MadeTensor(coded, held.spec, held.ranges)
    elif not isinstance(coded, CodedTensor) or not held.spec.takes(coded.scheme.weights):
        there = f"quantised as {coded.scheme.weights}" if isinstance(coded, CodedTensor) else "not quantised"
        raise CheckpointError(
            f"adapter.base: codes: {coded.key} is {there} in {coded.file.parent}, and the recipe says {held.spec}: set "
            "quant.scheme to source, or adapter.base to weights"
        )
    columns, width = held.shape[-1], held.row_bytes // parameter.dtype.itemsize
    whole = coded.shape[-1] == columns and not piece.turned and piece.offset % columns == 0 == piece.start % columns
    if not whole or read.filled_from is not None:
        raise CheckpointError(
            f"adapter.base: codes: the rows of {coded.key} are not those of {piece.name}: set adapter.base to weights"
        )
    rows = piece.numel // columns
    if isinstance(coded, MadeTensor):
        note_made(parameter, MadeRows(piece.start // columns, rows, coded, piece.offset // columns))
    moved = Piece(piece.name, piece.offset // columns * width, (rows, width), piece.start // columns * width)
    return read._replace(source=PackedTensor(coded, held), piece=moved, target=parameter)
