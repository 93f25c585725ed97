"""Tensors of a plain or quantized checkpoint, with decodable weights in place of codes, and schemes of its layers."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import Checkpoint, CheckpointError, DiskTensor, read_headers
from model.quantized.foreign_layouts import read_blocks, read_columns
from model.quantized.linears import read_quantized
from model.quantized.narrow_range import on_other_grid, with_grids
from model.quantized.quantization_config import (
    is_quantized,
    kv_cache_of,
    packing_of,
    read_quantization_config,
    rules_of,
)
from model.quantized.tensor import QuantizedTensor
from model.ranks import listed, say
from quant import DEFAULT_EXEMPT, SCHEMES, Rule, Scheme, TensorSpec
from quant.linear import LinearPart, StackedLinear, linears_of


@dataclass
class SourceCheckpoint:
    """Headers of all files of a checkpoint, with a :class:`QuantizedTensor` for each quantized weight.

    Attributes:
        tensors: tensors by key; a quantized weight has the key that the plain weight would have.
        problems, lost: as in :class:`model.checkpoint.safetensors.Checkpoint`.
        beside: tensors that the quantized weights consist of, and scales of inputs and of keys and values, by key.
        kv_cache: number format of keys and values; None if they are not quantized, or their format cannot be read.
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
    """Replace codes of a quantized checkpoint by weights, with narrow or full range according to the codes. Without a
    model, layers have their names on disk."""
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


def source_schemes(
    model: PreTrainedModel, directory: Path, said: Collection[TensorSpec] | None = None
) -> dict[str, Scheme]:
    """Map every Linear and embedding of ``model`` with codes in ``directory`` to its scheme, by name (for stacked
    experts, of each Linear). If there are no weights, config.json decides.

    A weight whose last block is incomplete cannot be quantized here, and is logged.

    Args:
        model, directory: the model, and its quantized checkpoint.
        said: weight specs of the recipe's schemes, which decide if the range of integers is narrow
            (:mod:`model.quantized.narrow_range`). With None, the codes decide.

    Raises:
        ValueError: the checkpoint is damaged, has no codes, or has full-range codes for a narrow recipe.
    """
    rules = [*(Rule(None, pattern) for pattern in DEFAULT_EXEMPT), *rules_of(read_quantization_config(directory))]
    there = any(directory.glob("*.safetensors"))
    read = read_checkpoint(directory, model) if there else None
    if read is not None and read.problems:
        raise CheckpointError("\n".join([f"{directory} is damaged:", *(f"file: {one}" for one in read.problems[:20])]))
    coded = {} if read is None else read.coded
    schemes: dict[str, Scheme] = {}
    left_out: list[str] = []
    for part in _parts(model):
        disk = module_name_on_disk(model, part.name)
        if there:
            scheme = coded[disk].scheme if disk in coded else None
        else:
            rule = next((rule for rule in rules if rule.matches(part.name, 0) or rule.matches(disk, 0)), None)
            scheme = None if rule is None else rule.scheme
        if scheme is None:
            continue
        if said is not None:
            scheme = _on_grid(scheme, said, part.name if there else None)
        try:
            scheme.weights.scale_shape((part.out_features, part.in_features))
            schemes[part.name] = scheme
        except ValueError:
            left_out.append(part.name)
    if left_out:
        say(f"not quantized, for their last block is not full: {listed(left_out, 5)}")
    if not schemes and coded:
        raise ValueError(
            f"{directory} has codes of {listed(list(coded), 2)}, but the {type(model).__name__} of its config.json has "
            "no such layers: one of the two is damaged, or they are of different models"
        )
    if not schemes:
        raise ValueError(f"{directory} has no layer of {type(model).__name__} as codes: name a quant.scheme")
    return schemes


def _on_grid(scheme: Scheme, said: Collection[TensorSpec], name: str | None) -> Scheme:
    """Return the scheme of layer ``name`` (None if its codes were not read) with the recipe's narrow or full range.

    Raises:
        ValueError: the recipe has narrow range, but the codes have full range.
    """
    other = on_other_grid(scheme)
    if other is None or scheme.weights in said or other.weights not in said:
        return scheme
    if name is not None and other.weights.narrow:
        raise ValueError(
            f"quant.schemes says narrow: true for {name}, but codes of its scheme are {scheme.weights.qmin:g}: this is "
            "not the checkpoint that the recipe was written for. Take the schemes out of the recipe, or set narrow to "
            "false"
        )
    return other


def _parts(model: nn.Module) -> list[LinearPart]:
    """List every Linear, also of stacks, and embeddings, which may be quantized in the files."""
    parts: list[LinearPart] = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, StackedLinear)):
            parts += linears_of(name, module)
        elif isinstance(module, nn.Embedding):
            parts.append(LinearPart(name, module.num_embeddings, module.embedding_dim))
    return parts
