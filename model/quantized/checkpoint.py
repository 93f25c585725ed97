"""A checkpoint, plain or quantized, as the weights that it holds."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import Checkpoint, CheckpointError, DiskTensor, read_headers
from model.quantized.compressed_tensors import read_quantized
from model.quantized.config import is_quantized, kv_cache_of, packing_of, read_quantization_config, rules_of
from model.quantized.gptq_awq import read_columns
from model.quantized.mxfp4_experts import read_blocks
from model.quantized.narrow_range import with_grids
from model.quantized.tensor import QuantizedTensor
from quant import SCHEMES, TensorSpec
from quant.linear import linears_of


@dataclass
class SourceCheckpoint:
    """The headers of all files of a checkpoint, with a :class:`QuantizedTensor` wherever a weight is stored as codes.

    Attributes:
        tensors: by key, a coded weight under the key that the weight would have.
        problems, lost: as of :class:`model.checkpoint.safetensors.Checkpoint`.
        beside: what the coded weights are made of, and scales of inputs and of keys and values, by key.
        kv_cache: how keys and values are quantized; None where they are not, or in a way that is not read.
    """

    tensors: dict[str, DiskTensor | QuantizedTensor]
    problems: list[str]
    lost: set[str]
    beside: dict[str, DiskTensor] = field(default_factory=dict)
    kv_cache: TensorSpec | None = None

    @property
    def coded(self) -> dict[str, QuantizedTensor]:
        """The coded weights by the names of their Linears on disk."""
        return {tensor.name: tensor for tensor in self.tensors.values() if isinstance(tensor, QuantizedTensor)}


def read_checkpoint(directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """Read the headers of a checkpoint of ``model``, and of a quantized one which tensors make up a weight.

    Raises:
        CheckpointError: there is no safetensors checkpoint in ``directory``, or it is quantized in a way that is not
            read.
    """
    found = read_headers(directory)
    if is_quantized(directory):
        return _with_weights(found, directory, model)
    return SourceCheckpoint({**found.tensors}, found.problems, found.lost)


def _with_weights(found: Checkpoint, directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """A quantized checkpoint, with weights in the place of codes, on the grid that these are on. Without a model layers
    have the names that they have on disk."""
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
    """The names that the Linears and embeddings of ``model`` have in it, by those on disk."""
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            names[module_name_on_disk(model, name)] = name
        elif hasattr(module, "out_features") and hasattr(module, "in_features"):
            for part in linears_of(name, module):
                names[module_name_on_disk(model, part.name)] = part.name
    return names
