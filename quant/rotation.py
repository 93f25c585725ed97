"""Layers that rotate their inputs at run time (:func:`quant.gemm.rotate`), and their entry in a checkpoint's config.

The config is compressed-tensors' ``transform_config``: a group of type ``hadamard`` at the location ``input``, with the
block size in ``head_dim``. Only rotations that vLLM also computes are supported (0.33.0,
``compressed_tensors/transform/linear.py``, ``module.py``): inputs of Linears without a bias that vLLM does not fuse
with others. Experts are not supported, because vLLM's MoE kernel ignores transforms, nor are queries and keys
(``q_attn``, ``k_cache``), which vLLM skips. The stored weights already contain the inverse rotation; it is not listed
in the config, as readers would apply it again.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant.gemm import BLOCKS, hadamard
from quant.linear import QuantEmbedding, QuantLayer, QuantLinear
from quant.quantization import Quantization
from quant.rules import FUSED, examples

GROUP = "rotated"  # name of the config group
KEY = f"{GROUP}_input.weight"  # tensor name of the matrix, after the layer's name
# vLLM multiplies NVFP4 inputs by matrices of these sizes inside QuTLASS, which has no global scale and rounds the
# absmax of a group to e4m3 (``schemes/linear_qutlass_nvfp4.py``): other codes than in training.
_QUTLASS = (16, 32, 64, 128)
_EXPERT = re.compile(r"(?:.*\.)?experts\..+")


def rotate_inputs(quantization: Quantization, patterns: Sequence[str], block: int) -> None:
    """Switch on the rotation of the inputs of selected layers; the caller must then rotate the layers' weights.

    ``patterns`` are regexes on full names of quantized layers, ``block`` is an element of :data:`quant.gemm.BLOCKS`.
    Raises ValueError if a pattern matches nothing, or a layer's input cannot be rotated as vLLM does it.
    """
    names = list(quantization.layers)
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in names if re.fullmatch(pattern, name)]
        if not found:
            raise ValueError(
                f"quant.rotate: {pattern!r} matches no quantized layer; it must match a full name such as "
                f"{examples(names)}"
            )
        chosen |= dict.fromkeys(found)
    problems = [
        f"{name} {problem}" for name in chosen if (problem := _problem(name, quantization.layers[name], names, block))
    ]
    tables = {id(layer.weight) for layer in quantization.layers.values() if isinstance(layer, QuantEmbedding)}
    problems += [
        f"{name} has the embeddings' weight" for name in chosen if id(quantization.layers[name].weight) in tables
    ]
    if problems:
        raise ValueError(f"quant.rotate: {examples(problems, 2)}; leave such layers out of the patterns")
    for name in chosen:
        layer = quantization.layers[name]
        assert isinstance(layer, QuantLinear)
        layer.rotation = block


def _problem(name: str, layer: QuantLayer, names: Sequence[str], block: int) -> str | None:
    """Return the reason why the input of a layer cannot be rotated, or None."""
    if not isinstance(layer, QuantLinear):
        return "is an embedding, which has no input to rotate"
    if layer.projections or _EXPERT.fullmatch(name):
        return "belongs to an expert, and vLLM ignores transforms of experts (launch/rotate.py rotates their inputs)"
    parent, _, _ = name.rpartition(".")
    for members, _ in FUSED:
        if any(name == f"{parent}.{one}".lstrip(".") for one in members):
            others = [one for one in members if f"{parent}.{one}".lstrip(".") in names]
            if len(others) > 1:
                return f"shares its input with {', '.join(others)} (launch/rotate.py rotates such inputs)"
    if layer.bias is not None:
        return "has a bias, and vLLM applies no transform to layers with a bias"
    if layer.in_features % block:
        return f"has {layer.in_features} inputs, not divisible by quant.rotate_block {block}"
    inputs = layer.scheme.activations
    if inputs is not None and inputs.has_global_scale and block in _QUTLASS:
        larger = " or ".join(str(one) for one in BLOCKS if one not in _QUTLASS)
        return f"has NVFP4 inputs, which vLLM codes differently with blocks of {block}: set quant.rotate_block {larger}"
    return None


def rotated_layers(quantization: Quantization) -> dict[str, int]:
    """Return the block size of each layer that rotates its input, by name."""
    layers = {name: layer for name, layer in quantization.layers.items() if isinstance(layer, QuantLinear)}
    return {name: layer.rotation for name, layer in layers.items() if layer.rotation is not None}


def transform_config(targets: Iterable[str], block: int) -> dict[str, Any]:
    """Build the ``transform_config`` that rotates the inputs of ``targets`` (module names, or regexes after
    ``re:``)."""
    arguments = {"targets": list(targets), "location": "input", "inverse": False, "ignore": []}
    return {
        "config_groups": {
            GROUP: {
                "type": "hadamard",
                "apply": [arguments],
                "randomize": False,
                "requires_grad": False,
                "head_dim": block,
                "precision": "torch.float32",
            }
        }
    }


def stored_matrix(layer: QuantLayer) -> Tensor:
    """Build the Hadamard matrix ``[block, block]`` of 1 and -1 that compressed-tensors stores with the layer, in the
    model's dtype."""
    assert isinstance(layer, QuantLinear) and layer.rotation is not None
    return hadamard(layer.rotation, layer.weight.dtype, torch.device("cpu"))


class RotatedInputs(NamedTuple):
    """Entry of a ``transform_config``: layers whose inputs are rotated (``targets``, except ``ignore``), and the block
    size."""

    targets: list[str]
    ignore: list[str]
    block: int


def rotations_from_config(config: Mapping[str, Any] | None) -> list[RotatedInputs]:
    """Read the input rotations from a ``transform_config``, or from None, which has no rotations.

    Entries at ``weight_input`` are skipped: the weights in the file are already rotated. Raises ValueError if the
    config has a transform of another kind or at another location.
    """
    found = []
    groups = (config or {}).get("config_groups") or {}
    for name, group in groups.items():
        key, block = f"transform_config.config_groups.{name}", group.get("head_dim")
        for option, is_so, expected in (
            ("type", group.get("type") == "hadamard", "'hadamard'"),
            ("randomize", not group.get("randomize"), "false"),
            ("head_dim", block in BLOCKS, f"one of {', '.join(map(str, BLOCKS))}"),
        ):
            if not is_so:
                raise ValueError(f"{key}.{option} is {group.get(option)!r}, expected {expected}")
        for entry in group.get("apply") or []:
            if (place := entry.get("location")) not in ("input", "weight_input"):
                raise ValueError(f"{key}.apply has the location {place!r}, expected 'input' or 'weight_input'")
            if place == "input":
                targets, ignore = entry.get("targets") or [], entry.get("ignore") or []
                found.append(RotatedInputs(list(targets), list(ignore), block))
    return found
