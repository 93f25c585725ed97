"""Read scales from a checkpoint's files, in the spellings of several writers, and arrange them by the model's groups.

A checkpoint has a scale per Linear. In the model several Linears may share a scale, and the Linears of all experts of a
MoE layer may form one layer, with a stack of scales. :func:`arrange` finds the tensors of each group's scale by their
names only; :meth:`GroupScale.value` computes the scale after :mod:`model.scales.loading` has checked them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import DiskTensor, read_header
from model.zero import full_shape
from quant import Quantization, QuantLayer, ScaleGroup
from quant.formats.compressed_tensors import input_suffix
from quant.formats.packing import packed_columns, unpack_zero_points
from quant.linear import LinearPart, linears_of
from quant.reference import E8M0_BIAS
from quant.spec import Scheme, TensorSpec

# Suffixes of keys, after the name of the Linear.
WEIGHT_SCALE = ".weight_scale"
GLOBAL_SCALE = ".weight_global_scale"
INPUT_SCALE = ".input_scale"
INPUT_GLOBAL_SCALE = ".input_global_scale"
ZERO_POINT = ".weight_zero_point"
GROUP_INDEX = ".weight_g_idx"
# Other spellings of the first two. DeepSeek's fp8 multiplies by its "inverse". ModelOpt's NVFP4 multiplies by its
# second scale and its input_scale, while compressed-tensors divides by its global scale.
INVERSE = ".weight_scale_inv"
SECOND_SCALE = ".weight_scale_2"

# Spellings of the KV cache's scales (llm-compressor's now and before, ModelOpt's and AutoFP8's), after the name of the
# attention module.
CACHE_SCALES = {
    "k_cache": (".k_scale", ".k_cache.scale", ".k_proj.k_scale", ".k_proj.output_scale"),
    "v_cache": (".v_scale", ".v_cache.scale", ".v_proj.v_scale", ".v_proj.output_scale"),
}

MODELOPT_CACHE = 2  # index of ModelOpt's spelling
CACHE_ENDS = tuple(end for ends in CACHE_SCALES.values() for end in ends)

LinearParts = dict[str, LinearPart]  # by name on disk


class StoredScales(NamedTuple):
    """Scales in the files of a directory, by key.

    Attributes:
        scales: fp32; scales of layers have compressed-tensors' names (``weight_scale``, ...) whatever the files call
            them, scales of the KV cache keep the names in the files.
        zero_points, group_indices: zero points, and GPTQ's group of each column, as stored.
        tensors: headers of all tensors, including scales and zero points.
    """

    scales: dict[str, Tensor]
    zero_points: dict[str, Tensor]
    group_indices: dict[str, Tensor]
    tensors: dict[str, DiskTensor]


def read_scales(directory: Path) -> StoredScales:
    """Read every scale, zero point and group index in the directory's safetensors files. Raises ValueError if there is
    no safetensors file, one is damaged, or a key in two files, or a scale in two spellings, has different values."""
    endings = (WEIGHT_SCALE, GLOBAL_SCALE, INPUT_SCALE, INPUT_GLOBAL_SCALE, INVERSE, SECOND_SCALE, *CACHE_ENDS)
    stored = StoredScales({}, {}, {}, {})
    for path in scale_files(directory):
        if not path.is_file():
            raise ValueError(f"{path}: expected a safetensors file, found something else")
        try:
            with safe_open(path, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (a safe_open handle is not iterable)
                    if key.endswith(endings):
                        _add(stored.scales, *_as_ours(key, reader.get_tensor(key)), path)
                    elif key.endswith("zero_point"):
                        _add(stored.zero_points, key, reader.get_tensor(key), path)
                    elif key.endswith(GROUP_INDEX):
                        _add(stored.group_indices, key, reader.get_tensor(key), path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
        stored.tensors.update({tensor.key: tensor for tensor in read_header(path)})
    # ModelOpt's scales of NVFP4 inputs get compressed-tensors' keys and meaning.
    for name in [key.removesuffix(SECOND_SCALE) for key in stored.tensors if key.endswith(SECOND_SCALE)]:
        if (scale := stored.scales.pop(name + INPUT_SCALE, None)) is not None:
            stored.scales[name + INPUT_GLOBAL_SCALE] = 1 / scale
    return stored


def scale_files(directory: Path) -> list[Path]:
    """List the safetensors files of a directory. Raises ValueError if there are none."""
    if not (files := sorted(directory.glob("*.safetensors"))):
        raise ValueError(f"{directory} has no *.safetensors file: expected a PTQ checkpoint")
    return files


def input_ending(scheme: Scheme) -> str:
    """Return the suffix, after the Linear's name, of the key of an input scale in files of this scheme."""
    return INPUT_SCALE if scheme.stored_input is None else f".{input_suffix(scheme.stored_input)}"


def _as_ours(key: str, stored: Tensor) -> tuple[str, Tensor]:
    """Convert a scale to compressed-tensors' key and meaning, in fp32. Powers of two are stored in uint8, as exponents
    plus a bias."""
    value = torch.exp2(stored.float() - E8M0_BIAS) if stored.dtype == torch.uint8 else stored.float()
    if key.endswith(INVERSE):
        return key.removesuffix(INVERSE) + WEIGHT_SCALE, value
    if key.endswith(SECOND_SCALE):
        return key.removesuffix(SECOND_SCALE) + GLOBAL_SCALE, 1 / value
    return key, value


def _add(found: dict[str, Tensor], key: str, value: Tensor, path: Path) -> None:
    if key in found and not torch.equal(found[key], value):
        raise ValueError(
            f"{path}: {key} is there twice, with different values (in another file or spelling): keep one of the two"
        )
    found[key] = value


def cache_keys(model: PreTrainedModel, name: str) -> list[str]:
    """List the possible keys of a KV cache scale in files, in the order of ``CACHE_SCALES``. ``name`` is the name of
    the quantizer of keys or values in the model, ``<attention>.k_cache`` or ``<attention>.v_cache``."""
    attention, _, kind = name.rpartition(".")
    return [module_name_on_disk(model, attention) + ending for ending in CACHE_SCALES[kind]]


@dataclass(frozen=True)
class ZeroPoints:
    """Zero points of a scale in the files.

    Attributes:
        key: their key in the files.
        values: zero points, unpacked, one per scale; as found in the files if their shape there is not an allowed one;
            None if the files have none.
        shape, packed_shape: the two allowed shapes in the files: unpacked, and packed into int32.
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
        value: fp32 factor of codes (with a global scale: divided by it), or a global scale in compressed-tensors' form.
        shape: shape that the value must have, ignoring dimensions of size 1.
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
        layers: a list of scales in the files for each member of the group that has any, in module order; empty if the
            group's scale comes from elsewhere (measured, or the recipe's initial value).
        projections: number of Linears per expert, if the group's layer is a stack of experts with scales of their own;
            else 0.
        smallest: True if the smallest of several scales is taken; False for the largest, which inference engines take
            when they fuse layers.
    """

    group: ScaleGroup
    layers: list[list[StoredScale]]
    projections: int = 0
    smallest: bool = False

    @property
    def stored(self) -> list[StoredScale]:
        """The scales of all layers."""
        return [one for of_layer in self.layers for one in of_layer]

    def value(self) -> Tensor:
        """Compute the group's scale from the checked scales in the files: fp32 in the shape of the group's s0; with
        zero points ``[2, *shape]``: scales, then zero points. ``layers`` must not be empty."""
        shape = full_shape(self.group.s0)
        scales = self._one(torch.stack([self._of_layer(stored, shape) for stored in self.layers]), 0)
        if self.group.zero is None:
            return scales
        beside = [one.zero_points for one in self.stored]
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
        weights, globals, inputs: all scale groups of the model's weights, global scales and inputs (with keys and
            values). ``layers`` of a group is empty if the files lack any of its scales (of inputs: all of them).
        expected: all keys that scales of the model's quantized layers and KV cache may have.
        unused: keys in the files of scales of layers that are not quantized in the model.
        linears: Linears of each quantized layer, by the layer's name and then by name on disk.
        caches: True if the files have scales of keys or values that the model quantizes.
    """

    weights: list[GroupScale]
    globals: list[GroupScale]
    inputs: list[GroupScale]
    expected: set[str]
    unused: list[str]
    linears: dict[str, LinearParts]
    caches: bool


def arrange(model: PreTrainedModel, quantization: Quantization, stored: StoredScales) -> ArrangedScales:
    """Assign the stored scales to the scale groups of ``quantization``, without checks.

    A group of weights needs the scale of every Linear; if one is missing, the group gets none. A group of inputs needs
    the scale of only one Linear: q, k and v read one tensor, and an expert that calibration never reached has no scale.
    If layers of a group have different global scales, the smallest is taken, so that no scale of these layers exceeds
    the range of e4m3.
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
    return ArrangedScales(
        weights=[_weight_scale(group, quantization, linears, stored) for group in quantization.weight_groups],
        globals=[_global_scale(group, quantization, linears, stored) for group in quantization.global_groups],
        inputs=[_input_scale(group, inputs, stored, heads[group.owner]) for group in quantization.input_groups],
        expected=expected,
        unused=[key for key in stored.scales if key.rpartition(".")[0] not in of_layers],
        linears=linears,
        caches=any(key in stored.scales for name in quantization.caches for key in inputs[name]),
    )


def _weight_scale(
    group: ScaleGroup, quantization: Quantization, linears: Mapping[str, LinearParts], stored: StoredScales
) -> GroupScale:
    """Find the stored scales of a scale group of weights, divided by their global scale if there is one (NVFP4)."""
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
    """Find the stored scales of a scale group of inputs, or of keys or values (in the files perhaps one per head)."""
    found = [[key for key in keys[name] if key in stored.scales] for name in group.members]
    shape = tuple(full_shape(group.s0))
    values = {key: stored.scales[key] for some in found for key in some}
    parts = {key: list(value.flatten()) if value.numel() == heads else [value] for key, value in values.items()}
    layers = [[StoredScale(key, one, shape) for key in some for one in parts[key]] for some in found if some]
    return GroupScale(group, layers, smallest=group.spec.has_global_scale)


def scales_per_head(arranged: ArrangedScales) -> list[str]:
    """List the keys of scales that the files store per attention head; the model takes the largest of the heads."""
    keys = [one.key for scale in arranged.inputs for one in scale.stored]
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
