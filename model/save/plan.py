"""What becomes of every module on disk: a pure function of names and sizes, the same on every rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from model.batches import batches
from model.names import Names, module_name_on_disk
from model.scales import cache_keys
from model.zero import full_numel, full_shape, is_partitioned, is_whole
from quant import SCALE_PARAMETERS, Quantization, QuantLayer
from quant.experts import LinearPart, linears_of
from quant.export import Shapes
from quant.kv_cache import QuantCache
from quant.layouts import Layout, linear_shapes


@dataclass(frozen=True)
class Item:
    """One module's own tensors: what must be gathered, and what it becomes on disk.

    Attributes:
        name: of the module; of a quantiser of keys or values the key of its scale.
        module: the module.
        parameters: those that must be gathered.
        shapes: dtype and shape of everything that will be written, by key on disk.
        layout: how a QuantLayer is written; None for every other module, which is written as it is.
        linears: of a QuantLayer, the Linears that it is on disk, by their names there.
        plain: parameters and buffers that are written as they are, by key.
        stacked: keys of the equal parts of the module's only parameter, in their order.
    """

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]
    shapes: Shapes
    layout: Layout | None = None
    linears: Mapping[str, LinearPart] = field(default_factory=dict)
    plain: Mapping[str, torch.Tensor] = field(default_factory=dict)
    stacked: tuple[str, ...] = ()

    @cached_property
    def bytes(self) -> int:
        """Bytes on disk."""
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.shapes.values())

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes that gathering the parameters takes; nothing for those that are whole on every rank anyway."""
        return sum(full_numel(p) * p.element_size() for p in self.parameters if is_partitioned(p) and not is_whole(p))


def plan_shards(
    model: PreTrainedModel, quantization: Quantization | None, layout: Layout, max_shard_size: int
) -> list[list[Item]]:
    """Every module with tensors of its own, in module order, by the file that it goes to.

    A tied parameter is written once, under its first name. The items of a file have at most ``max_shard_size`` bytes
    together; one that is larger gets a file of its own.
    """
    names = Names(model)
    seen: set[int] = set()
    items = []
    for name, module in model.named_modules():
        if quantization is not None and name in quantization.layers:
            items.append(_quantized_item(model, name, quantization.layers[name], layout))
        elif isinstance(module, QuantCache):
            if quantization is not None and layout != "dequantized":
                items.append(_cache_item(cache_keys(model, name)[0], module))
        elif getattr(module, "projections", ()):
            items.append(_stacked_item(model, name, module))
        else:
            items.append(_plain_item(names, name, module, seen))
    return list(batches((item for item in items if item.shapes), lambda item: item.bytes, max_shard_size))


def _quantized_item(model: PreTrainedModel, name: str, layer: QuantLayer, layout: Layout) -> Item:
    dtype = layer.weight.dtype
    linears = {module_name_on_disk(model, part.name): part for part in linears_of(name, layer)}
    shapes: Shapes = {}
    for on_disk, part in linears.items():
        suffixes = linear_shapes(layout, part.in_features, part.out_features, layer.scheme, dtype)
        if layer.bias is not None:
            suffixes["bias"] = (dtype, (part.out_features,))
        shapes |= {f"{on_disk}.{suffix}": expected for suffix, expected in suffixes.items()}
    return Item(name, layer, list(layer.parameters(recurse=False)), shapes, layout=layout, linears=linears)


def _stacked_item(model: PreTrainedModel, name: str, module: nn.Module) -> Item:
    """A stack of experts that is written without scales: one that is not quantised, or a plain checkpoint."""
    stack = module.get_parameter("weight")
    shapes: Shapes = {
        f"{module_name_on_disk(model, part.name)}.weight": (stack.dtype, (part.out_features, part.in_features))
        for part in linears_of(name, module)
    }
    return Item(name, module, [stack], shapes, stacked=tuple(shapes))


def _cache_item(key: str, cache: QuantCache) -> Item:
    """The quantiser of keys or of values, of which the scale alone is stored."""
    return Item(key, cache, list(cache.parameters()), {key: (torch.float32, (1,))})


def _plain_item(names: Names, name: str, module: nn.Module, seen: set[int]) -> Item:
    """A module whose own parameters and persistent buffers are written as they are, but for scales of a QuantLayer."""
    plain: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor | None] = {**module._parameters, **module._buffers}
    for suffix, tensor in own.items():
        scale = isinstance(module, QuantLayer) and suffix in SCALE_PARAMETERS
        if tensor is None or scale or suffix in module._non_persistent_buffers_set or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        plain[names.key(f"{name}.{suffix}" if name else suffix)] = tensor
    parameters = [tensor for tensor in plain.values() if isinstance(tensor, nn.Parameter)]
    shapes: Shapes = {key: (tensor.dtype, tuple(full_shape(tensor))) for key, tensor in plain.items()}
    return Item(name, module, parameters, shapes, plain=plain)
