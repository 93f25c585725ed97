"""Names on disk and names in the model, in both directions.

Three things lie between them. transformers renames keys as it loads (mixtral's ``block_sparse_moe`` is ``mlp`` in its
model); it merges per-expert tensors into its fused 3-D parameters; and :mod:`model.experts` may take these apart again.
All three only move whole runs of memory: a tensor on disk is made of contiguous runs of ours, row-major. So a mapping
is a key, the shape that its tensor must have, and the :class:`Piece` of ours that each run of it is.

The renaming rules are transformers' own (``get_model_conversion_mapping``). They are found by model class and type, not
by looking at the experts, so that it does not matter that these have been replaced. Rules that compute something
(transposing, splitting a projection, permuting for RoPE) are refused by name, if a key of the checkpoint meets one.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

from model.experts import ExpertMLPs, StackedMLPs
from model.zero import full_shape
from quant import SCALE_PARAMETERS

Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A run of one of our tensors inside a tensor on disk, ``prod(shape)`` contiguous elements of both.

    Attributes:
        name: the name of our tensor.
        offset: the element of the tensor on disk at which the run begins.
        shape: its shape there.
        start: the element of our tensor at which it begins.
    """

    name: str
    offset: int
    shape: Shape
    start: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Layout(NamedTuple):
    """What a tensor on disk holds: the shape it must have, and our tensors in it."""

    shape: Shape
    pieces: tuple[Piece, ...]


class UnsupportedConversionError(ValueError):
    """Raised for a key from whose tensor transformers would compute something, instead of moving it."""


class Names:
    """Translates names in both directions for one model. It is cheap to make: no tensor is touched.

    Args:
        model: as ``build_model`` returns it, also after ``quant.prepare``.
    """

    def __init__(self, model: PreTrainedModel):
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix
        self.own = {name: tuple(full_shape(tensor)) for name, tensor in own_tensors(model).items()}
        self._experts = _expert_tensors(model)
        self._fused = _fused_layouts(self._experts)
        # The names that transformers' own model has, and that its rules lead to.
        arranged = {expert.piece.name for expert in self._experts.values()}
        self._theirs = dict.fromkeys([*(name for name in self.own if name not in arranged), *self._fused], True)
        # For writing, legacy spellings are not brought back, and a prefix that may have been there is not made up.
        rules = get_model_conversion_mapping(model, add_legacy=False)
        reverse = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, PrefixChange)]
        self._reverse_renamings = [rule for rule in reverse if isinstance(rule, WeightRenaming)]
        stacking = [rule for rule in self._converters if _is_stacking(rule)]
        self._stackings = [(rule, rule.reverse_transform()) for rule in stacking]
        self._sources: dict[str, list[tuple[list[str], str]]] = {}
        self._expert_of = {p: re.compile(_expert_pattern(p)) for rule in stacking for p in rule.source_patterns}

    def layout(self, key: str) -> Layout | None:
        """What the tensor ``key`` of a checkpoint holds; None if nothing in the model.

        Raises:
            UnsupportedConversionError: transformers would compute something from this tensor for this model.
        """
        renamed = apply_renamings(key, self._renamings)
        name, pattern = self._converted_name(renamed, self._converters)
        if name not in self._theirs and key in self._theirs:
            # The spelling of the model itself, which a rule for another one met.
            name, pattern = self._converted_name(key, [])
        if name in self._theirs:
            if pattern is not None:
                return self._converted(key, renamed, name, pattern)
            return self._fused.get(name) or self._whole(name)
        # Per-expert names of our own, for an architecture that has only fused tensors on disk.
        if key not in self._experts:
            return None
        piece = self._experts[key].piece
        return Layout(piece.shape, (piece._replace(offset=0),))

    def key(self, name: str) -> str:
        """The key under which ``save_pretrained`` writes our parameter ``name``.

        The weight of a single expert has the name that :func:`quant.experts.linears_of` gives it.

        Where transformers knows fused tensors on disk only, the per-expert key is the name itself, renamed.
        """
        key = name
        if name in self._experts:
            key = self._expert_key(self._experts[name]) or name
        return apply_renamings(key, self._reverse_renamings)

    def linear(self, piece: Piece) -> str | None:
        """The name of the Linear's weight that a piece is in a stack of experts; None where it is in none."""
        return next(
            (
                name
                for name, expert in self._experts.items()
                if expert.piece == piece._replace(offset=expert.piece.offset)
            ),
            None,
        )

    def missing(self, name: str, covered: Collection[int]) -> list[str]:
        """Keys of what is missing of our parameter ``name``; ``covered`` says where the pieces begin that are there."""
        parts = [part for part, expert in self._experts.items() if expert.piece.name == name]
        absent = [self.key(part) for part in parts if self._experts[part].piece.start not in covered]
        return absent if parts else [self.key(name)]

    def _converted_name(self, renamed: str, converters: list[WeightConverter]) -> tuple[str, str | None]:
        """Name in transformers' model, and the source pattern of the converter that matched, if one did."""
        return rename_source_key(renamed, [], converters, self._prefix, self._theirs)

    def _whole(self, name: str) -> Layout:
        shape = self.own[name]
        return Layout(shape, (Piece(name, 0, shape),))

    def _converted(self, key: str, renamed: str, name: str, pattern: str) -> Layout | None:
        """The slice of the fused parameter ``name`` that ``key`` is, where the matching converter would put it.

        None for an expert that the model does not have.
        """
        converter = self._by_pattern[pattern]
        expert = self._expert_of[pattern].search(renamed) if pattern in self._expert_of else None
        if name not in self._fused or expert is None:
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            raise UnsupportedConversionError(f"{key} (transformers makes {name} from it by {operations})")
        part, parts = converter.source_patterns.index(pattern), len(converter.source_patterns)
        fused = self._fused[name]
        shape = (fused.shape[1] // parts, *fused.shape[2:])
        start = (int(expert.group(1)) * parts + part) * math.prod(shape)
        # All pieces of a fused parameter are of one size.
        size = fused.pieces[0].numel
        inside = fused.pieces[start // size : (start + math.prod(shape)) // size]
        pieces = tuple(Piece(piece.name, piece.offset - start, piece.shape, piece.start) for piece in inside)
        return Layout(shape, pieces) if pieces else None

    def _expert_key(self, expert: "_ExpertTensor") -> str | None:
        """The key that a stacking converter has for a part of a fused parameter; None without such a converter."""
        rows = self._fused[expert.fused].shape[1]
        index, row = divmod(expert.piece.offset // math.prod(expert.piece.shape[1:]), rows)
        for sources, first in self._stacked_from(expert.fused):
            if len(sources) * expert.piece.shape[0] == rows:
                return first.replace(sources[0], sources[row // expert.piece.shape[0]]).replace("*", str(index), 1)
        return None

    def _stacked_from(self, fused: str) -> list[tuple[list[str], str]]:
        """Every stacking converter that makes the parameter ``fused``: its sources, and the key of the first."""
        if fused not in self._sources:
            found = self._sources[fused] = []
            for converter, reverse in self._stackings:
                first, matched = reverse.rename_source_key(fused)
                if matched is not None:
                    found.append((converter._original_source_patterns, first))
        return self._sources[fused]


class _ExpertTensor(NamedTuple):
    """The weight of one Linear of one expert: transformers' parameter that holds it, and where it lies there and
    here."""

    fused: str
    shape: Shape  # of transformers' parameter
    piece: Piece


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of ``model`` holds: parameters, tied ones under each of their names, and persistent buffers.

    Scales are not among them: the layers of :mod:`quant` may be in place already, and scales have their own reader.
    """
    tensors: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.rpartition(".")[2] not in SCALE_PARAMETERS
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def module_name_on_disk(model: PreTrainedModel, module: str) -> str:
    """Name on disk of a module, such as ``model.layers.0.mlp.experts.3.gate_proj``: its tensors' keys start with it."""
    if model not in _NAMES:
        _NAMES[model] = Names(model)
    return _NAMES[model].key(f"{module}.weight").removesuffix(".weight")


# A writer asks for thousands of modules in turn, and the rules of a model do not change.
_NAMES: WeakKeyDictionary[PreTrainedModel, Names] = WeakKeyDictionary()


def _expert_tensors(model: nn.Module) -> dict[str, _ExpertTensor]:
    """The weight of every Linear of every expert, by its per-expert name, in transformers' order."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ExpertMLPs):
            e, h, i = module.num_experts, module.hidden_dim, module.intermediate_dim
            for fused, shape, projections in (
                ("gate_up_proj", (i, h), ("gate_proj", "up_proj")),
                ("down_proj", (h, i), ("down_proj",)),
            ):
                whole = (e, len(projections) * shape[0], shape[1])
                for index in range(e * len(projections)):
                    expert, part = divmod(index, len(projections))
                    name = f"{prefix}.{expert}.{projections[part]}.weight"
                    offset = index * math.prod(shape)
                    piece = Piece(name, offset, shape)
                    if isinstance(module, StackedMLPs):
                        piece = Piece(f"{prefix}.{fused}.weight", offset, shape, offset)
                    found[name] = _ExpertTensor(f"{prefix}.{fused}", whole, piece)
    return found


def _fused_layouts(experts: dict[str, _ExpertTensor]) -> dict[str, Layout]:
    """Transformers' fused parameters by name: their shapes, and our tensors in them."""
    shapes, pieces = {}, defaultdict(list)
    for expert in experts.values():
        shapes[expert.fused] = expert.shape
        pieces[expert.fused].append(expert.piece)
    return {name: Layout(shape, tuple(pieces[name])) for name, shape in shapes.items()}


def _is_stacking(converter: WeightConverter) -> bool:
    """Whether a converter does nothing but stack experts, with gate and up of each behind one another at most."""
    kinds = [(type(operation), operation.dim) for operation in converter.operations if hasattr(operation, "dim")]
    several = len(converter.source_patterns) > 1
    expected = [(MergeModulelist, 0), (Concatenate, 1)] if several else [(MergeModulelist, 0)]
    return len(kinds) == len(converter.operations) and kinds == expected and len(converter.target_patterns) == 1


def _expert_pattern(pattern: str) -> str:
    """The source pattern of a converter, with the star that stands for the expert as a group of digits."""
    return pattern.replace("*.", r"(\d+)\.")
