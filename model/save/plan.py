"""Plan an export: map every module to its tensors on disk, from names and sizes only, so that all ranks get the same
plan."""

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION
from transformers.utils.quantization_config import QuantizationMethod

from model.checkpoint.names import ROTARY_TABLES, Names, Place, Stack, module_name_on_disk
from model.checkpoint.safetensors import DiskTensor
from model.quantized.checkpoint import SourceCheckpoint
from model.quantized.tensor import QuantizedTensor
from model.save.shard_writer import KINDS
from model.scales.grouping import CACHE_ENDS, INVERSE, MODELOPT_CACHE, WEIGHT_SCALE, cache_keys
from model.zero import batches, full_numel, is_partitioned, is_whole
from quant import SCALE_PARAMETERS, Quantization, QuantLayer, QuantLinear
from quant.attention import QuantCache
from quant.formats.compressed_tensors import Shapes
from quant.formats.layouts import Layout, block_shapes, linear_shapes
from quant.formats.modelopt import RECIPROCALS
from quant.fused import FusedModule
from quant.linear import LinearPart, linears_of
from quant.rotation import KEY

EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Layouts whose readers take a tied lm_head from the (quantized) embeddings; the others need both.
TIED_LAYOUTS = ("gguf", "mlx", "dequantized")


@dataclass(frozen=True)
class Item:
    """A module's own parameters, to be gathered, and the tensors on disk that they become.

    Attributes:
        name: the module's name; for a quantizer of keys or values the key of its scale, for a copied tensor its key.
        module: the module; None for a copied tensor.
        parameters: parameters to gather.
        shapes: dtype and shape of every tensor to write, by key on disk.
        layout: format of a QuantLayer; None for every other module, which is written unchanged.
        linears: parts of a QuantLayer or a stack of experts that are single Linears on disk, by their names on disk.
        plain: parameters and buffers written unchanged, and their locations on disk.
        fused: tensors on disk that each contain all experts of a stack, written in parts.
        joined: for mlx and gpt_oss, which store all experts in one tensor: by name of an expert's Linear, the prefix
            of the shared tensor's key and the expert's index in it.
        turned: True if the weight of a QuantLayer is written transposed.
        copied: tensor of the source that belongs to no module of the model: written unchanged, or decoded if it is
            quantized and ``stored`` is empty; None for modules.
        stored: tensors of the source that are written unchanged in place of ``copied``: its codes and scales, or a
            scale of keys or values; only in exports that have the source's format.
        source: scales of the source by key, for :func:`quant.formats.modelopt.modelopt_tensors`.
        kept: tensors of the source by key, which are written in place of the module's.
        rounded: tensors of the source by key that the module's dtype has rounded: they are written in the source's
            dtype; elements that training has not changed get the source's values again.
    """

    name: str
    module: nn.Module | None
    parameters: list[nn.Parameter]
    shapes: Shapes
    layout: Layout | None = None
    linears: Mapping[str, LinearPart] = field(default_factory=dict)
    plain: Sequence[tuple[torch.Tensor, Place]] = ()
    fused: tuple[Stack, ...] = ()
    joined: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    turned: bool = False
    copied: DiskTensor | QuantizedTensor | None = None
    stored: Sequence[DiskTensor] = ()
    source: Mapping[str, DiskTensor] = field(default_factory=dict)
    kept: Mapping[str, DiskTensor] = field(default_factory=dict)
    rounded: Mapping[str, DiskTensor] = field(default_factory=dict)

    @cached_property
    def bytes(self) -> int:
        """Number of bytes on disk."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.shapes.values())

    @cached_property
    def gathered_bytes(self) -> int:
        """Number of bytes needed to gather the parameters; parameters that are whole on every rank count as 0."""
        return sum(full_numel(p) * p.element_size() for p in self.parameters if is_partitioned(p) and not is_whole(p))


def plan_shards(
    model: PreTrainedModel,
    quantization: Quantization | None,
    layout: Layout,
    max_shard_size: int,
    checkpoint: SourceCheckpoint,
    dtypes: Mapping[str, torch.dtype] | None = None,
    inputs: Mapping[str, DiskTensor] | None = None,
) -> list[list[Item]]:
    """List the items of every file: of modules with tensors of their own, in module order, then of copied tensors.

    A tied parameter is written once, under its first name, or twice if the export keeps the source's format and the
    source has it twice. If it is quantized, it is written twice, except in :data:`TIED_LAYOUTS`, where it is written
    once. The tensors of a file total at most ``max_shard_size`` bytes; a larger item gets its own file.

    Args:
        model, quantization, layout: the model, its quantized layers (or None), and their format on disk.
        checkpoint: headers of the checkpoint that the model was loaded from.
        dtypes: None unless the export has the format and schemes of ``checkpoint``; then dtypes by key, in which
            tensors are written instead of the model's. If given, scales get the shapes that they have in
            ``checkpoint``, and codes outside of the model are copied.
        inputs: input scales of ``checkpoint``, by key, that are written in place of the model's; None for none.

    Raises:
        ValueError: the layout cannot store a module (experts that transformers reads only as one tensor, a quantized
            Conv1D, an adapter of an unquantized layer), or safetensors cannot store the dtype of a copied tensor.
    """
    source, beside = checkpoint.tensors, {} if dtypes is None else checkpoint.beside
    names = Names(model, {key: tensor.shape for key, tensor in source.items()})
    quantized = quantization is not None and bool(quantization.layers) and layout != "dequantized"
    seen: set[int] = set()
    items = []
    for name, module in model.named_modules():
        if quantization is not None and name in quantization.layers:
            weight = id(quantization.layers[name].weight)
            if weight in seen and layout in TIED_LAYOUTS:
                continue
            seen.add(weight)
            item = _quantized_item(model, names, name, quantization.layers[name], layout, source)
            ends = tuple(f".{suffix}" for suffix in RECIPROCALS) if layout == "modelopt" else ()
            read = {key: beside[key] for key in item.shapes if key in beside and key.endswith(ends)}
            kept = {key: one for key, one in (inputs or {}).items() if key in item.shapes}
            items.append(replace(_in_dtypes(item, source, beside, dtypes), source=read, kept=kept))
        elif isinstance(module, QuantCache):
            if quantization is not None and layout != "dequantized":
                keys = cache_keys(model, name)
                usual = keys[MODELOPT_CACHE if layout == "modelopt" else 0]
                key = next((one for one in keys if one in beside), usual)
                shapes = _as_stored({key: (torch.float32, () if layout == "modelopt" else (1,))}, beside, dtypes)
                items.append(Item(key, module, list(module.parameters()), shapes))
        elif getattr(module, "projections", ()):
            item = _stacked_item(model, names, name, module, source, quantized=quantized)
            items.append(_in_dtypes(item, source, {}, dtypes))
        else:
            item = _plain_item(names, name, module, seen, () if dtypes is None else source)
            items.append(_in_dtypes(item, source, {}, dtypes))
    own = {key for name in (quantization.caches if quantization else ()) for key in cache_keys(model, name)}
    others = {key: one for key, one in beside.items() if key not in own}
    items += _copied_items(model, names, source, others, as_source=dtypes is not None)
    return list(batches((item for item in items if item.shapes), lambda item: item.bytes, max_shard_size))


def _in_dtypes(
    item: Item,
    source: Mapping[str, DiskTensor | QuantizedTensor],
    beside: Mapping[str, DiskTensor],
    dtypes: Mapping[str, torch.dtype] | None,
) -> Item:
    """Return ``item`` with the shapes and dtypes of :func:`_as_stored`, and with ``rounded``: the tensors of the source
    to be written in a dtype that the model's dtype rounds."""
    rounded = {}
    for key, (own, _) in item.shapes.items():
        one, dtype = source.get(key), (dtypes or {}).get(key, own)
        if isinstance(one, DiskTensor) and torch.promote_types(dtype, own) != own:
            rounded[key] = one
    return replace(item, shapes=_as_stored(item.shapes, beside, dtypes), rounded=rounded)


def _as_stored(shapes: Shapes, beside: Mapping[str, DiskTensor], dtypes: Mapping[str, torch.dtype] | None) -> Shapes:
    """Return ``shapes`` in the form of the source: with the dimensions of 1 (``[]`` or ``[1]``, ``[out]`` or
    ``[out, 1]``) and DeepSeek's keys of scales as in its headers ``beside``, and with ``dtypes`` by key."""

    def sides(shape: tuple[int, ...]) -> list[int]:
        return [side for side in shape if side != 1]

    described: Shapes = {}
    for key, (dtype, shape) in shapes.items():
        if key not in beside and inverse_of(key) in beside:
            key = inverse_of(key)
        same = key in beside and sides(shape) == sides(beside[key].shape)
        described[key] = (dtypes or {}).get(key, dtype), beside[key].shape if same else shape
    return described


def inverse_of(key: str) -> str:
    """Return DeepSeek's key for the weight scale ``key``: it ends in ``weight_scale_inv`` instead of ``weight_scale``.
    The values are the same."""
    return key.removesuffix(WEIGHT_SCALE) + INVERSE


def copied_modules(items: Sequence[Item], spelled: Callable[[str], str] = str) -> list[str]:
    """List modules, named as on disk, that are copied completely because the model has no part of them. Only the
    outermost modules are listed (``model.visual``, ``mtp``, ``model.layers.61``). ``spelled`` converts a tensor's key
    to the spelling of the returned names."""
    # Include the model's own spelling: a module that has one of its layers in any reader is not copied.
    own = [key for item in items if item.copied is None for key in (f"{item.name}.", *item.shapes)]
    above = {key[:end] for key in own for end in _ends(key)}
    found: dict[str, None] = {}
    for item in items:
        for key in map(spelled, item.shapes if item.copied is not None else ()):
            highest = next((key[:end] for end in _ends(key) if key[:end] not in above), None)
            if highest is not None:
                found[highest] = None
    return list(found)


def _ends(key: str) -> list[int]:
    """Return the lengths of the prefixes of a tensor's key that are names of its parent modules, outermost first."""
    return [index for index, character in enumerate(key) if character == "."]


def _quantized_item(
    model: PreTrainedModel,
    names: Names,
    name: str,
    layer: QuantLayer,
    layout: Layout,
    source: Container[str],
) -> Item:
    dtype = layer.weight.dtype
    linears = {module_name_on_disk(model, part.name): part for part in linears_of(name, layer)}
    stacks, turned = names.stacks(f"{name}.weight"), f"{name}.weight" in names.turned
    only = [stack.key for stack in stacks if stack.only]
    fused: tuple[Stack, ...] = ()
    joined: dict[str, tuple[str, int]] = {}
    if layout == "dequantized":
        fused = _fused(names, name, layer, source)
    elif layout == "gpt_oss":
        fused = tuple(stacks)
        joined = {on_disk: (fused[0].key, index) for index, on_disk in enumerate(linears)}
    elif turned:
        raise ValueError(
            f"{name}: transformers has a Conv1D here, which no reader takes quantized: set export.format to dequantized"
        )
    elif only and layout != "gguf" and not _becomes_linears(model, name):
        raise ValueError(
            f"{name}: transformers reads these experts as one tensor, {only[0]}, which has no quantized form in "
            f"layout {layout!r}: to leave them as they are set quant.exempt_more: ['.*\\.{name.split('.')[-2]}\\..+'], "
            "or write them with export.format 'dequantized' (gpt-oss' in mxfp4 with 'gpt_oss')"
        )
    elif layout == "mlx" and layer.projections:
        joined = {on_disk: (module, expert or 0) for on_disk in linears for module, expert in [mlx_place(on_disk)]}
    experts = 1 + max((index for _, index in joined.values()), default=0)
    shapes: Shapes = {}
    if layout == "gpt_oss":
        part = next(iter(linears.values()))
        shapes |= block_shapes(fused[0].key, len(linears), part.in_features, part.out_features)
    elif fused:
        shapes |= {stack.key: (dtype, stack.shape) for stack in fused}
    else:
        for on_disk, part in linears.items():
            suffixes = linear_shapes(layout, part.in_features, part.out_features, layer.scheme, dtype)
            if layer.bias is not None:
                suffixes["bias"] = (dtype, (part.out_features,))
            if turned:
                suffixes["weight"] = (dtype, (part.in_features, part.out_features))
            if isinstance(layer, QuantLinear) and layer.rotation is not None:
                suffixes[KEY] = (dtype, (layer.rotation, layer.rotation))
            prefix, stack = (joined[on_disk][0], (experts,)) if joined else (on_disk, ())
            shapes |= {f"{prefix}.{suffix}": (kind, (*stack, *shape)) for suffix, (kind, shape) in suffixes.items()}
    parameters = list(layer.parameters(recurse=False))
    return Item(name, layer, parameters, shapes, layout, linears, fused=fused, joined=joined, turned=turned)


def mlx_place(linear: str) -> tuple[str, int | None]:
    """Return the name of mlx-lm's module for a Linear (given by its name on disk), and the expert's index in this
    module, None outside of experts."""
    expert = EXPERT.search(linear)
    return (linear, None) if expert is None else (EXPERT.sub(".switch_mlp.", linear), int(expert[1]))


def linears_of_quantized(kind: str) -> Callable[[PretrainedConfig], nn.Module] | None:
    """Return the function by which transformers replaces experts of the class named ``kind`` by Linears before it loads
    a quantized checkpoint; None if it keeps these experts."""
    entry: Any = MODULES_TO_PATCH_FOR_QUANTIZATION.get(kind, {})
    applies = QuantizationMethod.COMPRESSED_TENSORS in entry.get("quantization_methods", ())
    linears: Callable[[PretrainedConfig], nn.Module] | None = entry["module_name"] if applies else None
    return linears


def _becomes_linears(model: PreTrainedModel, name: str) -> bool:
    """Return True if transformers replaces the experts of the stack ``name`` by Linears when it loads a quantized
    checkpoint."""
    experts = model.get_submodule(name.rpartition(".")[0])
    return linears_of_quantized(getattr(experts, "replaces", "")) is not None


def _fused(names: Names, name: str, module: nn.Module, source: Container[str]) -> tuple[Stack, ...]:
    """Find the tensors on disk that contain all experts, for the weight of a module. Empty unless the source has such
    tensors or transformers reads no other form. Raises ValueError if transformers reads no other form, but the model
    has separate experts."""
    stacks = tuple(names.stacks(f"{name}.weight"))
    only = [stack.key for stack in stacks if stack.only]
    if getattr(module, "projections", ()):
        return stacks if only or any(stack.key in source for stack in stacks) else ()
    if only:
        raise ValueError(
            f"{name}: transformers reads these experts as one tensor, {only[0]}, so they cannot be written one by one: "
            "set model.experts to stacked"
        )
    return ()


def _stacked_item(
    model: PreTrainedModel, names: Names, name: str, module: nn.Module, source: Container[str], *, quantized: bool
) -> Item:
    """Create the item of a stack of experts without scales: the stack is not quantized, or the checkpoint is plain.

    ``quantized``: other layers of the checkpoint are quantized.
    """
    stack = module.get_parameter("weight")
    linears = {module_name_on_disk(model, part.name): part for part in linears_of(name, module)}
    fused = () if quantized and _becomes_linears(model, name) else _fused(names, name, module, source)
    shapes: Shapes = {one.key: (stack.dtype, one.shape) for one in fused}
    if not fused:
        shapes = {f"{key}.weight": (stack.dtype, (one.out_features, one.in_features)) for key, one in linears.items()}
    return Item(name, module, [stack], shapes, linears=linears, fused=fused)


def _copied_items(
    model: PreTrainedModel,
    names: Names,
    source: Mapping[str, DiskTensor | QuantizedTensor],
    beside: Mapping[str, DiskTensor],
    *,
    as_source: bool,
) -> Iterator[Item]:
    """Yield items of the tensors that the model does not use but readers may: of towers outside of the text model, and
    of heads for speculative decoding (MTP), with their scales of keys and values; without buffers that every reader
    computes, unless the export is ``as_source``. ``beside`` has codes and scales that may be copied."""
    owned: dict[str, list[DiskTensor]] = {}
    for key, one in beside.items():
        owned.setdefault(key.rpartition(".")[0], []).append(one)
    computed, tables = {name for name, _ in model.named_non_persistent_buffers()}, re.compile(ROTARY_TABLES)
    for key, tensor in source.items():
        if (as_source or not (tables.search(key) or key in computed)) and names.is_unknown(key):
            if isinstance(tensor, DiskTensor):
                yield Item(key, None, [], _copied_shapes([tensor]), copied=tensor)
            elif stored := owned.get(tensor.name):
                yield Item(key, None, [], _copied_shapes(stored), copied=tensor, stored=stored)
            else:  # decoded: its scales are no part of the export's numerics
                yield Item(key, None, [], {key: (model.dtype, tensor.shape)}, copied=tensor)
    for key, one in beside.items():
        if key.endswith(CACHE_ENDS):
            yield Item(key, None, [], _copied_shapes([one]), copied=one, stored=[one])


def _copied_shapes(tensors: Sequence[DiskTensor]) -> Shapes:
    shapes: Shapes = {}
    for tensor in tensors:
        if tensor.dtype not in KINDS:
            raise ValueError(
                f"{tensor.file}: {tensor.key} is not part of the trained model, and its dtype {tensor.kind} cannot be "
                "copied: remove it from the checkpoint"
            )
        shapes[tensor.key] = tensor.dtype, tensor.shape
    return shapes


def _plain_item(names: Names, name: str, module: nn.Module, seen: set[int], twice: Container[str]) -> Item:
    """Create the item of a module whose own parameters and persistent buffers, except scales, are written unchanged.
    Tied ones, whose ids are in ``seen``, are left out unless their key is in ``twice``; ``seen`` gets the other ids.
    Raises ValueError for experts that only a fused tensor can store, and for an adapter."""
    _fused(names, name, module, ())  # raises for an expert that only a fused tensor can store
    plain: list[tuple[torch.Tensor, Place]] = []
    if isinstance(module, QuantLayer) and module.adapter is not None:
        raise ValueError(
            f"{name} is not quantized but has an adapter, which is exported only with a quantized weight: quantize "
            "the layer"
        )
    own: dict[str, torch.Tensor | None] = {**module._parameters, **module._buffers}
    for suffix, tensor in own.items():
        scale = isinstance(module, (QuantLayer, FusedModule)) and suffix in SCALE_PARAMETERS
        if tensor is None or scale or suffix in module._non_persistent_buffers_set:
            continue
        places = names.places(f"{name}.{suffix}" if name else suffix)
        plain += [(tensor, place) for place in places if id(tensor) not in seen or place.key in twice]
        seen.add(id(tensor))
    parameters = list({id(tensor): tensor for tensor, _ in plain if isinstance(tensor, nn.Parameter)}.values())
    shapes: Shapes = {place.key: (tensor.dtype, place.shape) for tensor, place in plain}
    return Item(name, module, parameters, shapes, plain=plain)
