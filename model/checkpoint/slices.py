"""Map the model's tensors to slices of transformers' tensors: contiguous runs, and transposed matrices.

In the model a stack of experts is always ``[E, out, in]``, whatever its layout in transformers. So groups of weights
run along the last dimension, and a partition is contiguous in the checkpoint.
"""

import math
from collections import defaultdict
from typing import NamedTuple

from torch import Tensor, nn

from model.moe.experts import ExpertMLPs, StackedMLPs

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """Slice of a tensor on disk that is a contiguous run of ``prod(shape)`` elements of one tensor of the model.

    Attributes:
        name: name of the model's tensor.
        offset: first element in the tensor on disk.
        shape: shape of the slice in the model's tensor.
        start: first element in the model's tensor.
        turned: 0 if the slice is contiguous on disk too. Otherwise its rows are columns of a matrix on disk, and this
            is the number of columns of that matrix.
    """

    name: str
    offset: int
    shape: Shape
    start: int = 0
    turned: int = 0

    @property
    def numel(self) -> int:
        """Number of elements of the slice."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """Number of elements on disk from the slice's first to its last."""
        return (self.shape[1] - 1) * self.turned + self.shape[0] if self.turned else self.numel

    def of(self, span: Tensor) -> Tensor:
        """Extract the slice, flat and in the order of the model's tensor, from the flat elements on disk from
        ``offset`` on."""
        if not self.turned:
            return span[: self.numel]
        return span.as_strided(self.shape, (1, self.turned)).reshape(-1)


class DiskLayout(NamedTuple):
    """Required shape of a tensor on disk, and the slices of the model's tensors in it."""

    shape: Shape
    pieces: tuple[Piece, ...]


class Stack(NamedTuple):
    """Tensor on disk with Linears of all experts, in the order of the experts.

    Attributes:
        key: the tensor's key.
        shape: the tensor's shape.
        projections: Linears of each expert in the tensor, their rows concatenated.
        turned: True if the matrix of each expert is ``[in, out]``.
        only: True if transformers reads these experts in no other form.
    """

    key: str
    shape: Shape
    projections: tuple[str, ...]
    turned: bool
    only: bool


class ExpertTensor(NamedTuple):
    """Weight of one Linear of one expert: the fused parameter of transformers that contains it, and its slice in that
    parameter and in the model's tensor."""

    fused: str
    shape: Shape  # of transformers' parameter
    projection: str
    piece: Piece


def expert_tensors(model: nn.Module) -> dict[str, ExpertTensor]:
    """Map per-expert names to the weight of every Linear of every expert, in transformers' order."""
    found = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, ExpertMLPs):
            continue
        for held in module.of.held:
            (rows, columns), inside = module.of.stacks[held.stack]
            all_rows = rows * len(held.projections)
            for index in range(module.num_experts * len(held.projections)):
                expert, part = divmod(index, len(held.projections))
                projection = held.projections[part]
                name = f"{prefix}.{expert}.{projection}.weight"
                offset = (expert * all_rows + part * rows) * columns
                if held.turned:
                    offset = expert * all_rows * columns + part * rows
                piece = Piece(name, offset, (rows, columns), 0, all_rows if held.turned else 0)
                if isinstance(module, StackedMLPs):
                    start = (expert * len(inside) + inside.index(projection)) * rows * columns
                    piece = piece._replace(name=f"{prefix}.{held.stack}.weight", start=start)
                shape = module.of.shape_of(held)
                found[name] = ExpertTensor(f"{prefix}.{held.name}", shape, projection, piece)
    return found


def fused_layouts(experts: dict[str, ExpertTensor]) -> dict[str, DiskLayout]:
    """Map names of transformers' fused parameters to their shapes and the slices of the model's tensors in them."""
    shapes, pieces = {}, defaultdict(list)
    for expert in experts.values():
        shapes[expert.fused] = expert.shape
        pieces[expert.fused].append(expert.piece)
    return {name: DiskLayout(shape, _merged(pieces[name])) for name, shape in shapes.items()}


def turned(layout: DiskLayout) -> DiskLayout:
    """Transpose a layout of experts ``[E, out, in]`` to ``[E, in, out]``."""
    experts, rows, columns = layout.shape
    pieces = []
    for piece in layout.pieces:
        expert, row = divmod(piece.offset // columns, rows)
        pieces.append(piece._replace(offset=expert * rows * columns + row, turned=rows))
    return DiskLayout((experts, columns, rows), _merged(pieces))


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Merge transposed slices that are adjacent in one matrix and in one tensor of the model, to read them once."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if (
            last is not None
            and piece.turned
            and piece.offset % piece.turned
            and (last.name, last.start + last.numel, last.offset + last.shape[0])
            == (piece.name, piece.start, piece.offset)
        ):
            merged[-1] = last._replace(shape=(last.shape[0] + piece.shape[0], last.shape[1]))
        else:
            merged.append(piece)
    return tuple(merged)
