"""Read scales and zero points from a checkpoint's files, in the spellings of several writers."""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import DiskTensor, read_header
from quant.formats.compressed_tensors import input_suffix
from quant.reference import E8M0_BIAS
from quant.spec import Scheme

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


class StoredScales(NamedTuple):
    """Contents of the files of a directory, by key.

    Attributes:
        scales: fp32, under the keys of compressed-tensors for any writer's spelling.
        zero_points, group_indices: the tensors as stored.
        tensors: headers of all tensors, including scales and zero points.
    """

    scales: dict[str, Tensor]
    zero_points: dict[str, Tensor]
    group_indices: dict[str, Tensor]
    tensors: dict[str, DiskTensor]


def read_scales(directory: Path) -> StoredScales:
    """Read every scale and every zero point in the directory's safetensors files.

    Raises:
        ValueError: there is no safetensors file, a file is damaged, or a key in two files, or a scale in two spellings,
            has different values.
    """
    cache = [end for ends in CACHE_SCALES.values() for end in ends]
    endings = (WEIGHT_SCALE, GLOBAL_SCALE, INPUT_SCALE, INPUT_GLOBAL_SCALE, INVERSE, SECOND_SCALE, *cache)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no *.safetensors file: expected a PTQ checkpoint")
    stored = StoredScales({}, {}, {}, {})
    for path in files:
        if not path.is_file():
            raise ValueError(f"{path}: expected a safetensors file, found something else")
        try:
            with safe_open(path, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (a safe_open handle is not iterable)
                    if key.endswith(endings):
                        _add(stored.scales, *_as_ours(key, _number(reader.get_tensor(key))), path)
                    elif key.endswith("zero_point"):
                        _add(stored.zero_points, key, reader.get_tensor(key), path)
                    elif key.endswith(GROUP_INDEX):
                        _add(stored.group_indices, key, reader.get_tensor(key), path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
        stored.tensors.update({tensor.key: tensor for tensor in read_header(path)})
    _name_global_inputs(stored)
    return stored


def _name_global_inputs(stored: StoredScales) -> None:
    """Convert ModelOpt's scales of NVFP4 inputs to compressed-tensors' keys and meaning."""
    for name in [key.removesuffix(SECOND_SCALE) for key in stored.tensors if key.endswith(SECOND_SCALE)]:
        if (scale := stored.scales.pop(name + INPUT_SCALE, None)) is not None:
            stored.scales[name + INPUT_GLOBAL_SCALE] = 1 / scale


def input_ending(scheme: Scheme) -> str:
    """Return the suffix of an input scale's key in a file of this scheme."""
    return INPUT_SCALE if scheme.stored_input is None else f".{input_suffix(scheme.stored_input)}"


def _as_ours(key: str, value: Tensor) -> tuple[str, Tensor]:
    """Convert a scale to compressed-tensors' key and meaning."""
    if key.endswith(INVERSE):
        return key.removesuffix(INVERSE) + WEIGHT_SCALE, value
    if key.endswith(SECOND_SCALE):
        return key.removesuffix(SECOND_SCALE) + GLOBAL_SCALE, 1 / value
    return key, value


def _add(found: dict[str, Tensor], key: str, value: Tensor, path: Path) -> None:
    if key in found and not torch.equal(found[key], value):
        raise ValueError(f"{path}: {key} is there twice, with different values (in another file or spelling)")
    found[key] = value


def _number(scale: Tensor) -> Tensor:
    """Convert a stored scale to fp32. A power of two is stored as its exponent plus a bias, in uint8."""
    return torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()


def cache_keys(model: PreTrainedModel, name: str) -> list[str]:
    """List possible keys of the scale of ``name``, a quantizer of keys or values; the first is used for writing."""
    attention, _, kind = name.rpartition(".")
    return [module_name_on_disk(model, attention) + ending for ending in CACHE_SCALES[kind]]
