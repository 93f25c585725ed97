"""Arrange the scales of a checkpoint's Linears by the model's scale groups.

A checkpoint has a scale per Linear. In the model several Linears may share a scale, and the Linears of all experts of a
MoE layer may form one layer, with a stack of scales. :func:`arrange` finds the tensors of each group's scale by their
names only; :meth:`GroupScale.value` computes the scale after :mod:`model.scales.scale_check` has checked them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.scales.read import GLOBAL_SCALE, WEIGHT_SCALE, ZERO_POINT, StoredScales, cache_keys, input_ending
from model.zero import full_shape
from quant import Quantization, QuantLayer, ScaleGroup
from quant.formats.packing import packed_columns, unpack_zero_points
from quant.linear import LinearPart, linears_of
from quant.spec import TensorSpec

LinearParts = dict[str, LinearPart]  # by name on disk


@dataclass(frozen=True)
class ZeroPoints:
    """Zero points of a scale in the files.

    Attributes:
        key: their key in the files.
        values: zero points, one per scale, or a tensor of a wrong shape as found in the files; None if the files have
            none.
        shape, packed_shape: the allowed shapes: unpacked, and packed into int32.
    """

    key: str
    values: Tensor | None
    shape: tuple[int, ...]
    packed_shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredScale:
    """One scale of the files.

    Attributes:
        key: its key in the files.
        value: fp32 factor of codes; a global scale is kept as stored.
        shape: required shape, ignoring dimensions of size 1.
        zero_points: its zero points, if the scheme has any.
    """

    key: str
    value: Tensor
    shape: tuple[int, ...]
    zero_points: ZeroPoints | None = None


@dataclass(frozen=True)
class GroupScale:
    """Scale group, and the scales in the files from which the group's scale is computed.

    Attributes:
        group: the group.
        layers: scales in the files for each member of the group that has any, in module order; empty if the group's
            scale is measured or set otherwise.
        projections: number of Linears per expert in the group's layer, a stack of experts; 0 if the group's layers are
            no stacks, or have one scale for all experts.
        smallest: take the smallest of several scales. Otherwise the largest is taken, as engines do when they fuse
            layers.
    """

    group: ScaleGroup
    layers: list[list[StoredScale]]
    projections: int = 0
    smallest: bool = False

    def value(self) -> Tensor:
        """Compute the value for :func:`model.scales.in_place.fill_scales`, from checked scales."""
        shape = full_shape(self.group.s0)
        scales = self._one(torch.stack([self._of_layer(stored, shape) for stored in self.layers]), 0)
        if self.group.zero is None:
            return scales
        beside = [one.zero_points for stored in self.layers for one in stored]
        zeros = [one.values.float().flatten() for one in beside if one is not None and one.values is not None]
        return torch.stack([scales, torch.cat(zeros).view(shape)])

    def _of_layer(self, stored: Sequence[StoredScale], shape: Sequence[int]) -> Tensor:
        scales = torch.stack([one.value.flatten() for one in stored])  # [Linears, scales of a Linear]
        if not self.projections:
            scales = self._one(scales, 0)
        elif len(shape) == 1:  # one per tensor, which gate and up of an expert share
            scales = self._one(scales.view(-1, self.projections), 1)
        return scales.reshape(tuple(shape))

    def _one(self, scales: Tensor, dim: int) -> Tensor:
        return scales.amin(dim) if self.smallest else scales.amax(dim)


@dataclass(frozen=True)
class ArrangedScales:
    """Scales of a checkpoint by the groups of a model.

    Attributes:
        weights, globals, inputs: every group of each kind; ``layers`` is empty if the files have no scale of it.
        without_global: names on disk of Linears that have a scale, but lack its global scale.
        not_symmetric: keys of zero points that are not 0, of layers with a symmetric scheme in the model.
        unused: keys of scales of layers that are not quantized in the model.
        none_used: True if all scales in the files are unused.
        expected: example key of a scale of the model's layers, for a message.
        linears: Linears of each layer, by the layer's name.
        caches: True if the files have scales of keys or values that the model quantizes.
    """

    weights: list[GroupScale]
    globals: list[GroupScale]
    inputs: list[GroupScale]
    without_global: list[str]
    not_symmetric: list[str]
    unused: list[str]
    none_used: bool
    expected: str
    linears: dict[str, LinearParts]
    caches: bool


def arrange(model: PreTrainedModel, quantization: Quantization, stored: StoredScales) -> ArrangedScales:
    """Assign the stored scales to the groups of ``quantization``, without checks.

    A group of weights needs the scale of every Linear. A group of inputs needs the scale of only one Linear: q, k and v
    read one tensor, and an expert that calibration never reached has no scale. If layers of a group have different
    global scales, the smallest is taken, so that no scale of these layers exceeds the range of e4m3.
    """
    linears: dict[str, LinearParts] = {
        name: {module_name_on_disk(model, part.name): part for part in linears_of(name, layer)}
        for name, layer in quantization.layers.items()
    }
    inputs = {
        name: [disk + input_ending(quantization.layers[name].scheme) for disk in parts]
        for name, parts in linears.items()
    }
    inputs |= {name: cache_keys(model, name) for name in quantization.caches}
    own = getattr(model.config.get_text_config(), "num_key_value_heads", None) or 1
    heads = {group.owner: own if group.owner in quantization.caches else 1 for group in quantization.input_groups}
    expected = {key for keys in inputs.values() for key in keys}
    expected |= {disk + kind for parts in linears.values() for disk in parts for kind in (WEIGHT_SCALE, GLOBAL_SCALE)}
    of_layers = {key.rpartition(".")[0] for key in expected}
    unused = [key for key in stored.scales if key.rpartition(".")[0] not in of_layers]
    return ArrangedScales(
        weights=[_weight_scale(group, quantization, linears, stored) for group in quantization.weight_groups],
        globals=[_global_scale(group, quantization, linears, stored) for group in quantization.global_groups],
        inputs=[_input_scale(group, inputs, stored, heads[group.owner]) for group in quantization.input_groups],
        without_global=_without_global(quantization, linears, stored),
        not_symmetric=_not_symmetric(quantization, linears, of_layers, stored),
        unused=unused,
        none_used=len(unused) == len(stored.scales),
        expected=min(expected),
        linears=linears,
        caches=any(key in stored.scales for name in quantization.caches for key in inputs[name]),
    )


def _weight_scale(
    group: ScaleGroup, quantization: Quantization, linears: Mapping[str, LinearParts], stored: StoredScales
) -> GroupScale:
    """Find the scales of a group of weights; scales stored relative to a global scale (NVFP4) are divided by it."""
    if any(disk + WEIGHT_SCALE not in stored.scales for name in group.members for disk in linears[name]):
        return GroupScale(group, [])
    layers = []
    for name in group.members:
        shape, scales = _shape_of_linear(group, quantization.layers[name]), []
        for disk, part in linears[name].items():
            value, divisor = stored.scales[disk + WEIGHT_SCALE], stored.scales.get(disk + GLOBAL_SCALE)
            value = value if divisor is None else value / divisor
            zero = None if group.zero is None else _zero_points(disk + ZERO_POINT, part, group.spec, stored)
            scales.append(StoredScale(disk + WEIGHT_SCALE, value, shape, zero))
        layers.append(scales)
    return GroupScale(group, layers, projections=len(quantization.layers[group.owner].projections))


def _global_scale(
    group: ScaleGroup, quantization: Quantization, linears: Mapping[str, LinearParts], stored: StoredScales
) -> GroupScale:
    keys = [[disk + GLOBAL_SCALE for disk in linears[name]] for name in group.members]
    if any(key not in stored.scales for of_layer in keys for key in of_layer):
        return GroupScale(group, [])
    layers = [[StoredScale(key, stored.scales[key], (1,)) for key in of_layer] for of_layer in keys]
    projections = len(quantization.layers[group.owner].projections)
    return GroupScale(group, layers, projections=projections, smallest=True)


def _input_scale(group: ScaleGroup, keys: Mapping[str, Sequence[str]], stored: StoredScales, heads: int) -> GroupScale:
    """Find the scales of a group of inputs, or of keys or values, which may have one scale for each of ``heads`` in the
    files."""
    found = [[key for key in keys[name] if key in stored.scales] for name in group.members]
    shape = tuple(full_shape(group.s0))
    values = {key: stored.scales[key] for some in found for key in some}
    parts = {key: list(value.flatten()) if value.numel() == heads else [value] for key, value in values.items()}
    layers = [[StoredScale(key, one, shape) for key in some for one in parts[key]] for some in found if some]
    return GroupScale(group, layers, smallest=group.spec.has_global_scale)


def scales_per_head(arranged: ArrangedScales) -> list[str]:
    """List the keys of scales of keys and values that the files have per head; the largest of the heads is taken."""
    keys = [one.key for scale in arranged.inputs for of_layer in scale.layers for one in of_layer]
    return [key for key, count in Counter(keys).items() if count > 1]


def _shape_of_linear(group: ScaleGroup, layer: QuantLayer) -> tuple[int, ...]:
    """Compute the shape of the weight scale of one Linear of ``layer``, a member of the group."""
    shape = tuple(full_shape(group.s0))
    if not layer.projections:
        return shape
    return (1,) if len(shape) == 1 else (shape[1] // len(layer.projections), *shape[2:])


def _zero_points(key: str, part: LinearPart, spec: TensorSpec, stored: StoredScales) -> ZeroPoints:
    """Find the zero points of one Linear, unpacked if necessary."""
    shape = spec.scale_shape((part.out_features, part.in_features))
    packed = (packed_columns(shape[0], spec.bits), shape[1])
    values = stored.zero_points.get(key)
    if values is not None and values.dtype == torch.int32 and values.shape == packed:
        values = unpack_zero_points(values, spec.bits, shape[0])
    return ZeroPoints(key, values, shape, packed)


def _not_symmetric(
    quantization: Quantization, linears: Mapping[str, LinearParts], of_layers: Collection[str], stored: StoredScales
) -> list[str]:
    groups = [group for group in quantization.weight_groups if group.zero is not None]
    expected = {disk + ZERO_POINT for group in groups for disk in linears[group.owner]}
    return [
        key
        for key, zero in stored.zero_points.items()
        if key.rpartition(".")[0] in of_layers and key not in expected and bool(zero.any())
    ]


def _without_global(quantization: Quantization, linears: Mapping[str, LinearParts], stored: StoredScales) -> list[str]:
    disks = (disk for group in quantization.global_groups for name in group.members for disk in linears[name])
    return [d for d in disks if d + WEIGHT_SCALE in stored.scales and d + GLOBAL_SCALE not in stored.scales]
