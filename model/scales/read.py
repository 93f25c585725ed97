"""Scales and zero points as a checkpoint's files hold them."""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from model.names import module_name_on_disk
from quant.reference import E8M0_BIAS

# How keys end, behind the name of the Linear.
WEIGHT_SCALE = ".weight_scale"
GLOBAL_SCALE = ".weight_global_scale"
INPUT_SCALE = ".input_scale"
ZERO_POINT = ".weight_zero_point"

# Scales of the KV cache have several spellings (llm-compressor's now and before, and ModelOpt's), behind the name of
# the attention module.
CACHE_SCALES = {
    "k_cache": (".k_scale", ".k_cache.scale", ".k_proj.k_scale"),
    "v_cache": (".v_scale", ".v_cache.scale", ".v_proj.v_scale"),
}


class StoredScales(NamedTuple):
    """What the files of a directory hold, by key: scales in fp32, zero points as they are stored."""

    scales: dict[str, Tensor]
    zero_points: dict[str, Tensor]


def read_scales(directory: Path) -> StoredScales:
    """Every scale and every zero point in the directory's safetensors files.

    Raises:
        ValueError: there is no safetensors file, or a damaged one.
    """
    endings = (WEIGHT_SCALE, GLOBAL_SCALE, INPUT_SCALE, *(end for ends in CACHE_SCALES.values() for end in ends))
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no *.safetensors file: expected a PTQ checkpoint")
    stored = StoredScales({}, {})
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (a safe_open handle is not iterable)
                    if key.endswith(endings):
                        stored.scales[key] = _number(reader.get_tensor(key))
                    elif key.endswith("zero_point"):
                        stored.zero_points[key] = reader.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    return stored


def _number(scale: Tensor) -> Tensor:
    """A stored scale in fp32. A power of two is stored as its exponent plus a bias, in uint8."""
    return torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()


def cache_keys(model: PreTrainedModel, name: str) -> list[str]:
    """Keys that the scale of ``name``, a quantiser of keys or values, may have; the first is the one that we write."""
    attention, _, kind = name.rpartition(".")
    return [module_name_on_disk(model, attention) + ending for ending in CACHE_SCALES[kind]]
