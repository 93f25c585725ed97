"""Where our tensors lie in those of transformers: runs of memory, and matrices that lie turned.

A stack of experts is ``[E, out, in]`` here, whatever transformers makes of it: groups of weights lie along the last
dimension, and so do the partitions of a checkpoint.
"""

import math
from collections import defaultdict
from typing import NamedTuple

from torch import Tensor, nn

from model.moe.experts import ExpertMLPs, StackedMLPs

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A run of one of our tensors inside a tensor on disk, ``prod(shape)`` elements of both, contiguous in ours.

    Attributes:
        name: the name of our tensor.
        offset: the element of the tensor on disk at which it begins.
        shape: its shape here.
        start: the element of our tensor at which it begins.
        turned: 0 where it is contiguous on disk too. Else its rows are columns there, of a matrix with so many.
    """

    name: str
    offset: int
    shape: Shape
    start: int = 0
    turned: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def span(self) -> int:
        """From its first element on disk to its last, so many elements."""
        return (self.shape[1] - 1) * self.turned + self.shape[0] if self.turned else self.numel

    def of(self, span: Tensor) -> Tensor:
        """Its elements, flat and in our order, from those that lie on disk from ``offset`` on, flat."""
        if not self.turned:
            return span[: self.numel]
        return span.as_strided(self.shape, (1, self.turned)).reshape(-1)


class Layout(NamedTuple):
    """What a tensor on disk holds: the shape it must have, and our tensors in it."""

    shape: Shape
    pieces: tuple[Piece, ...]


class Stack(NamedTuple):
    """A tensor on disk that holds Linears of all experts, in their order.

    Attributes:
        key: of the tensor.
        shape: its shape.
        projections: which Linears of each expert it holds, their rows behind one another.
        turned: whether the matrix of each expert is ``[in, out]``.
        only: transformers reads these experts in no other form.
    """

    key: str
    shape: Shape
    projections: tuple[str, ...]
    turned: bool
    only: bool


class ExpertTensor(NamedTuple):
    """The weight of one Linear of one expert: transformers' parameter that holds it, and where it lies there and
    here."""

    fused: str
    shape: Shape  # of transformers' parameter
    projection: str
    piece: Piece


def expert_tensors(model: nn.Module) -> dict[str, ExpertTensor]:
    """The weight of every Linear of every expert, by its per-expert name, in transformers' order."""
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


def fused_layouts(experts: dict[str, ExpertTensor]) -> dict[str, Layout]:
    """Transformers' fused parameters by name: their shapes, and our tensors in them."""
    shapes, pieces = {}, defaultdict(list)
    for expert in experts.values():
        shapes[expert.fused] = expert.shape
        pieces[expert.fused].append(expert.piece)
    return {name: Layout(shape, _merged(pieces[name])) for name, shape in shapes.items()}


def turned(layout: Layout) -> Layout:
    """The same experts ``[E, out, in]`` where each matrix lies turned: ``[E, in, out]``."""
    experts, rows, columns = layout.shape
    pieces = []
    for piece in layout.pieces:
        expert, row = divmod(piece.offset // columns, rows)
        pieces.append(piece._replace(offset=expert * rows * columns + row, turned=rows))
    return Layout((experts, columns, rows), _merged(pieces))


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Pieces that lie turned in one matrix and behind one another in one tensor of ours, as one: read once."""
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
