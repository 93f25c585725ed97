"""Translate names on disk to names in the model and back.

The names differ for three reasons. transformers renames keys on loading (mixtral's ``block_sparse_moe`` is ``mlp`` in
its model); it merges per-expert tensors into fused 3-D parameters; and :mod:`model.moe.experts` may split these again.
All three steps only move contiguous runs or transpose matrices. So the layout of a tensor on disk (:class:`DiskLayout`)
is its required shape and a list of slices (:class:`TensorSlice`), each a run or matrix that belongs to one tensor of
the model. In the model a stack of experts is always ``[E, out, in]``, whatever its layout in transformers: groups of
weights then run along the last dimension, and a partition is contiguous in the checkpoint.

The renaming rules are transformers' own (``get_model_conversion_mapping``). The rules depend on model class and type,
not on the expert modules, so they stay valid after these modules are replaced. Rules that compute something (splitting
a projection, permuting for RoPE) raise an error if a key of the checkpoint matches one.
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple
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

from model.families import left_out, transposed_weights
from model.moe.experts import ExpertMLPs, StackedMLPs
from model.zero import full_shape
from quant import SCALE_PARAMETERS
from quant.linear import ADAPTER_PARAMETERS
from quant.packed_weight import as_weight

# Keys of rotary tables, which every reader computes; files written by old versions of transformers hold them.
ROTARY_TABLES = r"(^|\.)(rotary|rope)\w*\.(\w*inv_freq|(cos|sin)(_cached?)?)$"


Shape = tuple[int, ...]


class TensorSlice(NamedTuple):
    """Slice of a tensor on disk that is a contiguous run of ``prod(shape)`` elements of one tensor of the model.

    Attributes:
        name: name of the model's tensor.
        offset: index of its first element in the flattened tensor on disk.
        shape: shape of the slice in the model's tensor.
        start: index of its first element in the flattened tensor of the model.
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
        """Number of elements on disk from the first element of the slice to the last one, both included."""
        return (self.shape[1] - 1) * self.turned + self.shape[0] if self.turned else self.numel

    def of(self, span: Tensor) -> Tensor:
        """Extract the slice from ``span``, the flat elements on disk from ``offset`` on: flat, in the order of the
        model's tensor."""
        if not self.turned:
            return span[: self.numel]
        return span.as_strided(self.shape, (1, self.turned)).reshape(-1)


class DiskLayout(NamedTuple):
    """Shape that a tensor on disk must have, and its slices, each of which belongs to one tensor of the model."""

    shape: Shape
    pieces: tuple[TensorSlice, ...]


class Stack(NamedTuple):
    """Tensor on disk that has the Linears of all experts of a layer, in the order of the experts.

    Attributes:
        key: the tensor's key.
        shape: the tensor's shape.
        projections: names of the Linears of each expert in the tensor, whose rows are concatenated in this order.
        turned: True if the matrix of each expert is ``[in, out]``.
        only: True if transformers reads these experts in no other form.
    """

    key: str
    shape: Shape
    projections: tuple[str, ...]
    turned: bool
    only: bool


class ExpertTensor(NamedTuple):
    """Weight of one Linear of one expert, as a slice both of transformers' fused parameter and of the model's tensor.

    Attributes:
        fused, shape: name and shape of transformers' fused parameter.
        projection: name of the Linear in its expert.
        piece: the slice, with the fused parameter as the tensor on disk.
    """

    fused: str
    shape: Shape
    projection: str
    piece: TensorSlice


class Place(NamedTuple):
    """Location on disk of a tensor of the model, or of one slice of it.

    Attributes:
        key, shape: key and shape of the tensor on disk.
        start: index of the slice's first element in the flattened tensor of the model; 0 for a whole tensor.
        turned: True if the matrix is transposed on disk.
    """

    key: str
    shape: Shape
    start: int
    turned: bool = False


class UnsupportedConversionError(ValueError):
    """Error for a tensor on disk from which transformers would compute a parameter instead of moving its values."""


class Names:
    """Translator between keys on disk and the names of one model's tensors. It is cheap to create: no tensor is read.

    Args:
        model: from ``build_model``, also after ``quant.replace_layers``.
        on_disk: shapes by key of a checkpoint's tensors, needed to locate tensors that the model concatenates into one;
            without them :meth:`layout` raises UnsupportedConversionError for such keys.
    """

    def __init__(self, model: PreTrainedModel, on_disk: Mapping[str, Shape] | None = None):
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}
        self._prefix = model.base_model_prefix
        self.own = {name: tuple(full_shape(tensor)) for name, tensor in own_tensors(model).items()}
        self.turned = transposed_weights(model)
        self._experts = expert_tensors(model)
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
        stacking = [rule for rule in self._converters if _moves(rule) == "stack"]
        self._stackings = [(rule, rule.reverse_transform()) for rule in stacking]
        self._sources: dict[str, list[tuple[list[str], str]]] = {}
        sources = [source for rule in stacking for source in rule.source_patterns]
        self._expert_of = {source: re.compile(source.replace("*.", r"(\d+)\.")) for source in sources}
        self._left_out = left_out(model)
        self._on_disk = on_disk or {}
        self._rows = self._concatenated()

    def layout(self, key: str) -> DiskLayout | None:
        """Return the layout of the tensor ``key`` of a checkpoint; None if it belongs to no tensor of the model. Raises
        UnsupportedConversionError if transformers would compute a parameter from this tensor."""
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
        """Return the key under which ``save_pretrained`` writes the model's parameter ``name``. ``name`` may be a
        single expert's weight (``experts.7.gate_proj.weight``): if transformers has only fused tensors on disk, the key
        is this name, renamed."""
        key = name
        if name in self._experts:
            key = self._expert_key(self._experts[name]) or name
        return apply_renamings(key, self._reverse_renamings)

    def places(self, name: str) -> list[Place]:
        """Return the locations on disk of the model's parameter or buffer ``name``: several if the model concatenates
        several tensors of ``on_disk`` into it, else one."""
        parts = [Place(key, rows.shape, rows.start) for key, rows in self._rows.items() if rows.name == name]
        if parts:
            return sorted(parts, key=lambda place: place.start)
        turned = name in self.turned
        return [Place(self.key(name), self.own[name][::-1] if turned else self.own[name], 0, turned)]

    def stacks(self, name: str) -> list[Stack]:
        """Return the tensors on disk, each with all experts of a layer, that store the model's parameter ``name``. They
        are transposed if those in ``on_disk`` are. Empty if the parameter is no weight of experts."""
        stacks = []
        for fused, projections in self._fused_of.get(name, {}).items():
            key = apply_renamings(fused, self._reverse_renamings)
            layout = self._fused_at(key, fused, self._find(key)[2])
            only = not self._stacked_from(fused)
            stacks.append(Stack(key, layout.shape, tuple(projections), layout.pieces[0].turned > 0, only))
        return stacks

    def is_unknown(self, key: str) -> bool:
        """Return True if the tensor ``key`` of a checkpoint belongs to no tensor of the model."""
        _, name, _ = self._find(key)
        return name not in self._theirs and key not in self._experts

    def is_left_out(self, key: str) -> bool:
        """Return True if the tensor ``key`` of a checkpoint belongs to a part that was removed from the model
        (:func:`model.families.take_out_towers`)."""
        renamed = self.renamed(key)
        spellings = [key, renamed, f"{self._prefix}.{renamed}"]
        return any(one == part or one.startswith(f"{part}.") for part in self._left_out for one in spellings)

    def renamed(self, key: str) -> str:
        """Rename the key of a tensor on disk by transformers' rules for the model; the model need not contain the
        tensor."""
        return apply_renamings(key, self._renamings)

    def linear(self, piece: TensorSlice) -> str | None:
        """Return the name of the expert's weight (``experts.7.gate_proj.weight``) that ``piece``, a slice of a tensor
        of the model, covers exactly; None if it is not exactly one expert's weight."""
        return next(
            (
                name
                for name, expert in self._experts.items()
                if expert.piece == piece._replace(offset=expert.piece.offset, turned=expert.piece.turned)
            ),
            None,
        )

    def missing(self, name: str, covered: Collection[int]) -> list[str]:
        """Return the keys on disk that the files lack for the model's parameter ``name``: of stacked experts, the key
        of each expert's weight whose first element's index is not in ``covered``; of others, the parameter's key."""
        parts = [part for part, expert in self._experts.items() if expert.piece.name == name]
        absent = [self.key(part) for part in parts if self._experts[part].piece.start not in covered]
        return absent if parts else [self.key(name)]

    def _find(self, key: str) -> tuple[str, str, str | None]:
        """Return ``key`` renamed, the parameter's name in transformers' model, and the source pattern of the matching
        converter, if any."""
        renamed = self.renamed(key)
        name, pattern = rename_source_key(renamed, [], self._converters, self._prefix, self._theirs)
        if name not in self._theirs and key in self._theirs:
            # Already the model's own spelling, matched by a rule for another one.
            name, pattern = rename_source_key(key, [], [], self._prefix, self._theirs)
        return renamed, name, pattern

    def _concatenated(self) -> dict[str, TensorSlice]:
        """Map the keys of tensors that are concatenated in one tensor of the model to their slices of it."""
        rules = [rule for rule in self._converters if _moves(rule) == "concatenate"]
        of_pattern = {pattern: rule.source_patterns for rule in rules for pattern in rule.source_patterns}
        parts: dict[str, dict[str, str]] = defaultdict(dict)  # by model's name: key by pattern
        for key in self._on_disk if rules else ():
            _, name, pattern = self._find(key)
            if name in self._theirs and pattern in of_pattern:
                parts[name][pattern] = key
        pieces: dict[str, TensorSlice] = {}
        for name, keys in parts.items():
            patterns = of_pattern[next(iter(keys))]
            shapes = [self._on_disk[keys[pattern]] for pattern in patterns if pattern in keys]
            whole = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if len(shapes) == len(patterns) and whole == self.own[name]:
                start = 0
                for pattern, shape in zip(patterns, shapes, strict=True):
                    pieces[keys[pattern]] = TensorSlice(name, 0, shape, start)
                    start += math.prod(shape)
        return pieces

    def _whole(self, name: str) -> DiskLayout:
        shape = self.own[name]
        if name in self.turned:
            return DiskLayout(shape[::-1], (TensorSlice(name, 0, shape, turned=shape[0]),))
        return DiskLayout(shape, (TensorSlice(name, 0, shape),))

    def _converted(self, key: str, renamed: str, name: str, pattern: str) -> DiskLayout | None:
        """Return the layout of ``key`` as a slice of the fused parameter ``name``, by the converter with the source
        ``pattern``; None for an expert that the model does not have. Raises UnsupportedConversionError."""
        if key in self._rows:
            return DiskLayout(self._rows[key].shape, (self._rows[key],))
        converter = self._by_pattern[pattern]
        if name in self._fused and _moves(converter) == "transpose":
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
        pieces = tuple(TensorSlice(piece.name, piece.offset - start, piece.shape, piece.start) for piece in inside)
        return DiskLayout(shape, pieces) if pieces else None

    def _fused_at(self, key: str, fused: str, pattern: str | None) -> DiskLayout:
        """Return the layout of the tensor ``key`` that becomes transformers' parameter ``fused``, by the converter with
        the source ``pattern`` if any."""
        layout = self._fused[fused]
        converter = self._by_pattern.get(pattern or "")
        if converter is None or _moves(converter) != "transpose":
            return layout
        operation: Any
        (operation,) = converter.operations
        if operation.check_dims and self._on_disk.get(key, layout.shape) == layout.shape:
            return layout
        return turned(layout)

    def _expert_key(self, expert: ExpertTensor) -> str | None:
        """Return the key on disk of one expert's slice of a fused parameter, if transformers stacks it on loading; else
        None."""
        rows = self._fused[expert.fused].shape[1]
        index, row = divmod(expert.piece.offset // math.prod(expert.piece.shape[1:]), rows)
        for sources, first in self._stacked_from(expert.fused):
            if len(sources) * expert.piece.shape[0] == rows:
                return first.replace(sources[0], sources[row // expert.piece.shape[0]]).replace("*", str(index), 1)
        return None

    def _stacked_from(self, fused: str) -> list[tuple[list[str], str]]:
        """Return the source patterns of every stacking converter that creates ``fused``, and the key of the first
        one."""
        if fused not in self._sources:
            found = self._sources[fused] = []
            for converter, reverse in self._stackings:
                first, matched = reverse.rename_source_key(fused)
                if matched is not None:
                    found.append((converter._original_source_patterns, first))
        return self._sources[fused]


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return by name the tensors of ``model`` that a checkpoint stores: parameters (a tied one under each of its names)
    and persistent buffers, without scales and adapters of :mod:`quant`'s layers. A packed weight is represented by a
    meta tensor of the weight's shape."""
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
    """Return the name on disk of the model's module ``module``: the prefix of the keys of its tensors."""
    if model not in _NAMES:
        _NAMES[model] = Names(model)
    return _NAMES[model].key(f"{module}.weight").removesuffix(".weight")


# Cached: a writer resolves thousands of modules one by one, and a model's rules do not change.
_NAMES: WeakKeyDictionary[PreTrainedModel, Names] = WeakKeyDictionary()


def concatenates(model: PreTrainedModel) -> bool:
    """Return True if transformers concatenates several tensors on disk into one tensor of ``model``."""
    rules = get_model_conversion_mapping(model)
    return any(isinstance(rule, WeightConverter) and _moves(rule) == "concatenate" for rule in rules)


def _moves(converter: WeightConverter) -> Literal["stack", "transpose", "concatenate"] | None:
    """Return how a converter moves values: it stacks experts (and may concatenate gate and up of each), transposes the
    matrices of a stack, or concatenates tensors along their first dimension. None if it does anything else."""
    several = len(converter.source_patterns) > 1
    steps = [
        (type(one), {one.dim0, one.dim1} if isinstance(one, Transpose) else getattr(one, "dim", None))
        for one in converter.operations
    ]
    if len(converter.target_patterns) > 1:
        return None
    if steps == ([(MergeModulelist, 0), (Concatenate, 1)] if several else [(MergeModulelist, 0)]):
        return "stack"
    if steps == [(Transpose, {1, 2})] and not several:
        return "transpose"
    return "concatenate" if steps == [(Concatenate, 0)] else None


def expert_tensors(model: nn.Module) -> dict[str, ExpertTensor]:
    """Map the name of every single expert's Linear weight (``...experts.7.gate_proj.weight``) to its location; in the
    order in which transformers' fused parameters contain them."""
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
                piece = TensorSlice(name, offset, (rows, columns), 0, all_rows if held.turned else 0)
                if isinstance(module, StackedMLPs):
                    start = (expert * len(inside) + inside.index(projection)) * rows * columns
                    piece = piece._replace(name=f"{prefix}.{held.stack}.weight", start=start)
                shape = module.of.shape_of(held)
                found[name] = ExpertTensor(f"{prefix}.{held.name}", shape, projection, piece)
    return found


def fused_layouts(experts: dict[str, ExpertTensor]) -> dict[str, DiskLayout]:
    """Map the names of transformers' fused parameters, of which ``experts`` are slices, to their layouts."""
    shapes, pieces = {}, defaultdict(list)
    for expert in experts.values():
        shapes[expert.fused] = expert.shape
        pieces[expert.fused].append(expert.piece)
    return {name: DiskLayout(shape, _merged(pieces[name])) for name, shape in shapes.items()}


def turned(layout: DiskLayout) -> DiskLayout:
    """Return the layout of a tensor ``[E, in, out]`` on disk, from that of the same experts as ``[E, out, in]``."""
    experts, rows, columns = layout.shape
    pieces = []
    for piece in layout.pieces:
        expert, row = divmod(piece.offset // columns, rows)
        pieces.append(piece._replace(offset=expert * rows * columns + row, turned=rows))
    return DiskLayout((experts, columns, rows), _merged(pieces))


def _merged(pieces: list[TensorSlice]) -> tuple[TensorSlice, ...]:
    """Merge transposed slices that are adjacent in one matrix and in one tensor of the model, to read them once."""
    merged: list[TensorSlice] = []
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
