"""Translate names on disk to names in the model and back.

The names differ for three reasons. transformers renames keys on loading (mixtral's ``block_sparse_moe`` is ``mlp`` in
its model); it merges per-expert tensors into fused 3-D parameters; and :mod:`model.moe.experts` may split these again.
All three steps only move contiguous runs or transpose matrices. So a mapping consists of a key, the required shape of
its tensor, and a :class:`model.checkpoint.slices.Piece` of a tensor of the model for each run in it.

The renaming rules are transformers' own (``get_model_conversion_mapping``). The rules depend on model class and type,
not on the expert modules, so they stay valid after these modules are replaced. Rules that compute something (splitting
a projection, permuting for RoPE) raise an error if a key of the checkpoint matches one.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    rename_source_key,
)

from model.checkpoint.slices import DiskLayout, ExpertTensor, Piece, Shape, Stack, expert_tensors, fused_layouts, turned
from model.families import is_composite, left_out, transposed_weights
from model.moe.experts import ExpertMLPs
from model.zero import full_shape
from quant import ADAPTER_PARAMETERS, SCALE_PARAMETERS
from quant.packed_weight import as_weight

# Keys of rotary tables, which every reader computes; files written by old versions of transformers hold them.
ROTARY_TABLES = r"(^|\.)(rotary|rope)\w*\.(\w*inv_freq|(cos|sin)(_cached?)?)$"


class Place(NamedTuple):
    """Location on disk of a tensor of the model, or of a slice of it.

    Attributes:
        key: the tensor on disk.
        shape: shape of the tensor on disk.
        start: first element of the slice in the model's tensor.
        turned: True if the matrix is transposed on disk.
    """

    key: str
    shape: Shape
    start: int
    turned: bool = False


class _Rows(NamedTuple):
    """Rows of one tensor of the model that form a tensor on disk: the model's name, first element and shape."""

    name: str
    start: int
    shape: Shape


class UnsupportedConversionError(ValueError):
    """Error for a key whose tensor transformers would not just move: it would compute a parameter from it."""


class Names:
    """Translator of names for one model. It is cheap to create, as no tensor is read.

    Args:
        model: from ``build_model``, also after ``quant.prepare``.
        on_disk: shapes by key of a checkpoint's tensors. They are needed to locate tensors that the model concatenates
            into one; without them the keys of such tensors are rejected.
    """

    def __init__(self, model: PreTrainedModel, on_disk: Mapping[str, Shape] | None = None):
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix
        self.own = {name: tuple(full_shape(tensor)) for name, tensor in own_tensors(model).items()}
        self.turned = transposed_weights(model)
        dense = not any(isinstance(module, ExpertMLPs) for module in model.modules())
        self._experts = {} if dense else expert_tensors(model)
        self._fused = fused_layouts(self._experts)
        self._fused_of: dict[str, dict[str, list[str]]] = {}  # by model's name: transformers' names, and their Linears
        for expert in self._experts.values():
            inside = self._fused_of.setdefault(expert.piece.name, {}).setdefault(expert.fused, [])
            inside += [expert.projection] if expert.projection not in inside else []
        # The names in transformers' own model, to which its rules lead.
        arranged = {expert.piece.name for expert in self._experts.values()}
        self._theirs = dict.fromkeys([*(name for name in self.own if name not in arranged), *self._fused], True)
        # For writing, legacy spellings are not restored, and no prefix is invented.
        rules = get_model_conversion_mapping(model, add_legacy=False)
        reverse = [rule.reverse_transform() for rule in reversed(rules) if not isinstance(rule, PrefixChange)]
        self._reverse_renamings = [rule for rule in reverse if isinstance(rule, WeightRenaming)]
        stacking = [rule for rule in self._converters if _is_stacking(rule)]
        self._stackings = [(rule, rule.reverse_transform()) for rule in stacking]
        self._sources: dict[str, list[tuple[list[str], str]]] = {}
        self._expert_of = {p: re.compile(_expert_pattern(p)) for rule in stacking for p in rule.source_patterns}
        self._left_out = left_out(model) if is_composite(model.config) else []
        self._on_disk = on_disk or {}
        concatenations = [rule for rule in self._converters if _is_concatenation(rule)]
        self._rows = self._concatenated(concatenations, self._on_disk) if concatenations else {}

    def layout(self, key: str) -> DiskLayout | None:
        """Return the layout of the tensor ``key`` of a checkpoint; None if no tensor of the model contains it.

        Raises:
            UnsupportedConversionError: transformers would compute a parameter from this tensor.
        """
        renamed, name, pattern = self._find(key)
        if name in self._theirs:
            if pattern is not None:
                return self._converted(key, renamed, name, pattern)
            return self._fused.get(name) or self._whole(name)
        # Our own per-expert names, for an architecture that has only fused tensors on disk.
        if key not in self._experts:
            return None
        piece = self._experts[key].piece
        return DiskLayout(piece.shape, (piece._replace(offset=0, turned=0),))

    def key(self, name: str) -> str:
        """Return the key under which ``save_pretrained`` writes the model's parameter ``name``.

        A single expert's weight is named as in :func:`quant.linear.linears_of`. If transformers has only fused tensors
        on disk, its per-expert key is that name, renamed.
        """
        key = name
        if name in self._experts:
            key = self._expert_key(self._experts[name]) or name
        return apply_renamings(key, self._reverse_renamings)

    def places(self, name: str) -> list[Place]:
        """Return the locations on disk of the model's parameter or buffer ``name``: one tensor, or several that the
        model concatenates."""
        parts = [(start, key) for key, (whole, start, _) in self._rows.items() if whole == name]
        if parts:
            return [Place(key, self._rows[key].shape, start) for start, key in sorted(parts)]
        turned = name in self.turned
        return [Place(self.key(name), self.own[name][::-1] if turned else self.own[name], 0, turned)]

    def stacks(self, name: str) -> list[Stack]:
        """Return the tensors on disk with all experts of the model's parameter ``name``; empty if it is no weight of
        experts. Their layout is transposed if the tensors in ``on_disk`` are transposed."""
        stacks = []
        for fused, projections in self._fused_of.get(name, {}).items():
            key = apply_renamings(fused, self._reverse_renamings)
            layout = self._fused_at(key, fused, self._find(key)[2])
            only = not self._stacked_from(fused)
            stacks.append(Stack(key, layout.shape, tuple(projections), layout.pieces[0].turned > 0, only))
        return stacks

    def is_unknown(self, key: str) -> bool:
        """Return True if no tensor of the model contains the tensor ``key`` of a checkpoint."""
        _, name, _ = self._find(key)
        return name not in self._theirs and key not in self._experts

    def is_left_out(self, key: str) -> bool:
        """Return True if the tensor ``key`` of a checkpoint belongs to a part that was removed from the model."""
        renamed = apply_renamings(key, self._renamings)
        spellings = [key, renamed, f"{self._prefix}.{renamed}"]
        return any(one == part or one.startswith(f"{part}.") for part in self._left_out for one in spellings)

    def renamed(self, key: str) -> str:
        """Rename the key of a tensor on disk by transformers' rules for the model, which need not have the tensor."""
        return apply_renamings(key, self._renamings)

    def linear(self, piece: Piece) -> str | None:
        """Return the weight's name of the expert's Linear that ``piece``, a slice of stacked experts, holds.

        None if ``piece`` is no such slice.
        """
        return next(
            (
                name
                for name, expert in self._experts.items()
                if expert.piece == piece._replace(offset=expert.piece.offset, turned=expert.piece.turned)
            ),
            None,
        )

    def missing(self, name: str, covered: Collection[int]) -> list[str]:
        """Return the keys of missing slices of the model's parameter ``name``; ``covered`` has the first elements of
        the present slices."""
        parts = [part for part, expert in self._experts.items() if expert.piece.name == name]
        absent = [self.key(part) for part in parts if self._experts[part].piece.start not in covered]
        return absent if parts else [self.key(name)]

    def _converted_name(self, renamed: str, converters: list[WeightConverter]) -> tuple[str, str | None]:
        """Return the name in transformers' model, and the source pattern of the converter that matched, if any."""
        return rename_source_key(renamed, [], converters, self._prefix, self._theirs)

    def _find(self, key: str) -> tuple[str, str, str | None]:
        """Return ``key`` renamed, its name in transformers' model, and the source pattern of the converter that
        matched."""
        renamed = apply_renamings(key, self._renamings)
        name, pattern = self._converted_name(renamed, self._converters)
        if name not in self._theirs and key in self._theirs:
            # Already the model's own spelling, matched by a rule for another one.
            name, pattern = self._converted_name(key, [])
        return renamed, name, pattern

    def _concatenated(self, rules: list[WeightConverter], on_disk: Mapping[str, Shape]) -> dict[str, _Rows]:
        """Find the keys whose tensors are concatenated in one tensor of the model: for each, that tensor's name, and
        the first element and shape in it."""
        patterns = {pattern: (index, rule) for rule in rules for index, pattern in enumerate(rule.source_patterns)}
        parts: dict[str, dict[int, str]] = defaultdict(dict)
        number: dict[str, int] = {}
        for key in on_disk:
            _, name, pattern = self._find(key)
            if name in self._theirs and pattern in patterns:
                index, rule = patterns[pattern]
                parts[name][index], number[name] = key, len(rule.source_patterns)
        rows: dict[str, _Rows] = {}
        for name, keys in parts.items():
            ordered = [keys[index] for index in sorted(keys)]
            whole = (sum(on_disk[key][0] for key in ordered), *on_disk[ordered[0]][1:])
            if len(ordered) == number[name] and whole == self.own[name]:
                start = 0
                for key in ordered:
                    rows[key] = _Rows(name, start, on_disk[key])
                    start += math.prod(on_disk[key])
        return rows

    def _whole(self, name: str) -> DiskLayout:
        shape = self.own[name]
        if name in self.turned:
            return DiskLayout(shape[::-1], (Piece(name, 0, shape, turned=shape[0]),))
        return DiskLayout(shape, (Piece(name, 0, shape),))

    def _converted(self, key: str, renamed: str, name: str, pattern: str) -> DiskLayout | None:
        """Return the layout of ``key`` as a slice of the fused parameter ``name``, according to the matching converter.

        None for an expert that the model does not have.
        """
        if key in self._rows:
            _, start, shape = self._rows[key]
            return DiskLayout(shape, (Piece(name, 0, shape, start),))
        converter = self._by_pattern[pattern]
        if name in self._fused and _is_transposing(converter):
            return self._fused_at(key, name, pattern)
        expert = self._expert_of[pattern].search(renamed) if pattern in self._expert_of else None
        if name not in self._fused or expert is None:
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            raise UnsupportedConversionError(f"{key} (transformers makes {name} from it by {operations})")
        part, parts = converter.source_patterns.index(pattern), len(converter.source_patterns)
        fused = self._fused[name]
        shape = (fused.shape[1] // parts, *fused.shape[2:])
        start = (int(expert.group(1)) * parts + part) * math.prod(shape)
        # All slices of a fused parameter have the same size.
        size = fused.pieces[0].numel
        inside = fused.pieces[start // size : (start + math.prod(shape)) // size]
        pieces = tuple(Piece(piece.name, piece.offset - start, piece.shape, piece.start) for piece in inside)
        return DiskLayout(shape, pieces) if pieces else None

    def _fused_at(self, key: str, fused: str, pattern: str | None) -> DiskLayout:
        """Return the layout of the tensor ``key`` that becomes transformers' parameter ``fused`` by the converter with
        the source ``pattern``, if any."""
        layout = self._fused[fused]
        converter = self._by_pattern.get(pattern or "")
        if converter is None or not _is_transposing(converter):
            return layout
        operation: Any
        (operation,) = converter.operations
        if operation.check_dims and self._on_disk.get(key, layout.shape) == layout.shape:
            return layout
        return turned(layout)

    def _expert_key(self, expert: ExpertTensor) -> str | None:
        """Return the key that a stacking converter has for a slice of a fused parameter; None without such a
        converter."""
        rows = self._fused[expert.fused].shape[1]
        index, row = divmod(expert.piece.offset // math.prod(expert.piece.shape[1:]), rows)
        for sources, first in self._stacked_from(expert.fused):
            if len(sources) * expert.piece.shape[0] == rows:
                return first.replace(sources[0], sources[row // expert.piece.shape[0]]).replace("*", str(index), 1)
        return None

    def _stacked_from(self, fused: str) -> list[tuple[list[str], str]]:
        """Return the source patterns of every stacking converter that creates the parameter ``fused``, and the key of
        the first one."""
        if fused not in self._sources:
            found = self._sources[fused] = []
            for converter, reverse in self._stackings:
                first, matched = reverse.rename_source_key(fused)
                if matched is not None:
                    found.append((converter._original_source_patterns, first))
        return self._sources[fused]


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of ``model``: parameters (a tied one under each of its names) and persistent
    buffers.

    Scales and adapters of :mod:`quant`'s layers are left out; packed weights are represented by meta tensors.
    """
    tensors: dict[str, Tensor] = {
        name: as_weight(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name.rpartition(".")[2] not in (*SCALE_PARAMETERS, *ADAPTER_PARAMETERS)
    }
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def module_name_on_disk(model: PreTrainedModel, module: str) -> str:
    """Return the name on disk of a module, such as ``model.layers.0.mlp.experts.3.gate_proj``: the prefix of its
    tensors' keys."""
    if model not in _NAMES:
        _NAMES[model] = Names(model)
    return _NAMES[model].key(f"{module}.weight").removesuffix(".weight")


# Cached: a writer resolves thousands of modules one by one, and a model's rules do not change.
_NAMES: WeakKeyDictionary[PreTrainedModel, Names] = WeakKeyDictionary()


def concatenates(model: PreTrainedModel) -> bool:
    """Return True if transformers concatenates several tensors on disk into one tensor of ``model``."""
    rules = get_model_conversion_mapping(model)
    return any(isinstance(rule, WeightConverter) and _is_concatenation(rule) for rule in rules)


def _is_stacking(converter: WeightConverter) -> bool:
    """Return True if a converter only stacks experts; it may also concatenate gate and up of each expert."""
    kinds = [(type(operation), operation.dim) for operation in converter.operations if hasattr(operation, "dim")]
    several = len(converter.source_patterns) > 1
    expected = [(MergeModulelist, 0), (Concatenate, 1)] if several else [(MergeModulelist, 0)]
    return len(kinds) == len(converter.operations) and kinds == expected and len(converter.target_patterns) == 1


def _is_transposing(converter: WeightConverter) -> bool:
    """Return True if a converter only transposes the matrices of a stack."""
    kinds = [(type(one), {getattr(one, "dim0", 0), getattr(one, "dim1", 0)}) for one in converter.operations]
    return kinds == [(Transpose, {1, 2})] and len(converter.source_patterns) == len(converter.target_patterns) == 1


def _is_concatenation(converter: WeightConverter) -> bool:
    """Return True if a converter only concatenates tensors along their first dimension."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    return kinds == [(Concatenate, 0)] and len(converter.target_patterns) == 1


def _expert_pattern(pattern: str) -> str:
    """Convert a converter's source pattern to a regular expression, with the star of the expert as a group of
    digits."""
    return pattern.replace("*.", r"(\d+)\.")
