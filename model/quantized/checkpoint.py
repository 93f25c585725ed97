"""Tensors of a plain or quantized checkpoint, with decodable weights in place of codes."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import Checkpoint, CheckpointError, DiskTensor, read_headers
from model.quantized.foreign_layouts import read_blocks, read_columns
from model.quantized.linears import read_quantized
from model.quantized.narrow_range import with_grids
from model.quantized.quantization_config import (
    is_quantized,
    kv_cache_of,
    packing_of,
    read_quantization_config,
    rules_of,
)
from model.quantized.tensor import QuantizedTensor
from quant import SCHEMES, TensorSpec
from quant.linear import linears_of


@dataclass
class SourceCheckpoint:
    """Headers of all files of a checkpoint, with a :class:`QuantizedTensor` for each quantized weight.

    Attributes:
        tensors: by key, a quantized weight under the key that the plain weight would have.
        problems, lost: as in :class:`model.checkpoint.safetensors.Checkpoint`.
        beside: tensors that the quantized weights consist of, and scales of inputs and of keys and values, by key.
        kv_cache: quantization of keys and values; None without one, or with one that cannot be read.
    """

    tensors: dict[str, DiskTensor | QuantizedTensor]
    problems: list[str]
    lost: set[str]
    beside: dict[str, DiskTensor] = field(default_factory=dict)
    kv_cache: TensorSpec | None = None

    @property
    def coded(self) -> dict[str, QuantizedTensor]:
        """Quantized weights by the names of their Linears on disk."""
        return {tensor.name: tensor for tensor in self.tensors.values() if isinstance(tensor, QuantizedTensor)}


def read_checkpoint(directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """Read the headers of a checkpoint of ``model``, and combine the tensors of quantized weights.

    Raises:
        CheckpointError: there is no safetensors checkpoint in ``directory``, or its quantization is not supported.
    """
    found = read_headers(directory)
    if is_quantized(directory):
        return _with_weights(found, directory, model)
    return SourceCheckpoint({**found.tensors}, found.problems, found.lost)


def _with_weights(found: Checkpoint, directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """Replace codes of a quantized checkpoint by weights, in narrow or full range as the codes are. Without a model,
    layers have their names on disk."""
    config = read_quantization_config(directory)
    try:
        rules = rules_of(config)
        names: dict[str, str] = {}

        def spellings(name: str) -> set[str]:
            if not names and model is not None:
                names.update(_our_names(model))
            return {name, names.get(name, name)}

        packing = packing_of(config)
        if config["quant_method"] == "mxfp4":
            coded, beside, problems = read_blocks(found, SCHEMES["mxfp4"])
        elif packing is not None:
            coded, beside, problems = read_columns(found, rules, packing)
        else:
            coded, beside, problems = read_quantized(found, rules, spellings)
        coded = with_grids(coded)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: quantization_config: {error}") from error
    tensors = {key: tensor for key, tensor in found.tensors.items() if key not in beside}
    source = SourceCheckpoint({**tensors, **coded}, found.problems + problems, found.lost, beside)
    with suppress(ValueError):
        source.kv_cache = kv_cache_of(config)
    return source


def _our_names(model: PreTrainedModel) -> dict[str, str]:
    """Map names on disk of the Linears and embeddings of ``model`` to its own names."""
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            names[module_name_on_disk(model, name)] = name
        elif hasattr(module, "out_features") and hasattr(module, "in_features"):
            for part in linears_of(name, module):
                names[module_name_on_disk(model, part.name)] = part.name
    return names
