"""Tensors of a plain or quantized checkpoint, with weights that are decoded when read in place of codes, and its
schemes.

``quantization_config.py`` decides which checkpoints can be read, ``linears.py`` finds the tensors of each Linear,
``tensor.py`` decodes ranges of a Linear's weight. This file adds decoded weights to the tensors of a checkpoint for the
readers of plain weights, and ``scales.py`` loads the scales.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import AGAIN, Checkpoint, CheckpointError, DiskTensor, read_headers
from model.quantized.linears import read_blocks, read_columns, read_quantized
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
from quant import DEFAULT_EXEMPT, SCHEMES, QuantLayer, Rule, Scheme, TensorSpec
from quant.linear import LinearPart, StackedLinear, check_sizes, linears_of


@dataclass
class SourceCheckpoint:
    """Headers of all files of a checkpoint, with a :class:`QuantizedTensor` for each quantized weight.

    Attributes:
        tensors: tensors by key; a quantized weight has the key that the plain weight would have.
        problems, lost: problems of the files, one sentence each; keys that the index maps to an unreadable file.
        beside: tensors that the quantized weights consist of, and scales of inputs and of keys and values, by key.
        kv_cache: number format of keys and values; None if they are not quantized, or their format cannot be read.
    """

    tensors: dict[str, DiskTensor | QuantizedTensor]
    problems: list[str]
    lost: set[str]
    beside: dict[str, DiskTensor] = field(default_factory=dict)
    kv_cache: TensorSpec | None = None

    def is_damaged(self, key: str) -> bool:
        """Return True if the files have codes of a weight that is not among the tensors: ``problems`` says why."""
        name = key.removesuffix(".weight")
        if any(one in self.beside for one in (key, f"{name}.weight_packed", f"{name}.qweight")):
            return True
        expert, _, leaf = name.rpartition(".")
        stack = expert.rpartition(".")[0]  # gpt-oss has a tensor for all experts
        return f"{stack}.{leaf}_blocks" in self.beside and f"{stack}.0.{leaf}.weight" not in self.tensors

    @property
    def coded(self) -> dict[str, QuantizedTensor]:
        """Quantized weights by the names of their Linears on disk."""
        return {tensor.name: tensor for tensor in self.tensors.values() if isinstance(tensor, QuantizedTensor)}


def read_checkpoint(directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """Read the headers of a checkpoint of ``model``, and combine the tensors of quantized weights. Raises
    CheckpointError if ``directory`` has no safetensors checkpoint, or if its quantization is not supported."""
    found = read_headers(directory)
    if is_quantized(directory):
        return _with_weights(found, directory, model)
    return SourceCheckpoint({**found.tensors}, found.problems, found.lost)


def _with_weights(checkpoint: Checkpoint, directory: Path, model: PreTrainedModel | None) -> SourceCheckpoint:
    """Replace the codes in a quantized checkpoint by :class:`QuantizedTensor`, with narrow range if the codes have it.
    Without a model, layers have their names on disk."""
    config = read_quantization_config(directory)

    @cache
    def our_names() -> dict[str, str]:
        if model is None:
            return {}
        return {module_name_on_disk(model, part.name): part.name for part in parts_of(model)}

    try:
        rules, packing = rules_of(config), packing_of(config)
        if config["quant_method"] == "mxfp4":
            found = read_blocks(checkpoint, SCHEMES["mxfp4"])
        elif packing is not None:
            found = read_columns(checkpoint, rules, packing)
        else:
            modelopt = config["quant_method"] == "modelopt"
            found = read_quantized(
                checkpoint, rules, lambda name: {name, our_names().get(name, name)}, modelopt=modelopt
            )
        coded = with_grids(found.coded)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: quantization_config: {error}") from error
    plain = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in found.beside}
    problems = checkpoint.problems + found.problems
    source = SourceCheckpoint({**plain, **coded}, problems, checkpoint.lost, found.beside)
    with suppress(ValueError):
        source.kv_cache = kv_cache_of(config)
    return source


def source_schemes(
    model: PreTrainedModel, directory: Path, said: Collection[TensorSpec] | None = None
) -> dict[str, Scheme]:
    """Map each Linear and embedding of ``model`` that is quantized in ``directory`` to its scheme, by name (for stacked
    experts, of each Linear). If the directory has no weights, config.json decides.

    A weight whose sizes its scheme does not support (:func:`quant.linear.check_sizes`) is left out and logged.

    Args:
        model, directory: the model, and its quantized checkpoint.
        said: weight specs of the recipe's schemes, which decide if the range of integers is narrow
            (:mod:`model.quantized.narrow_range`). With None, the codes decide.

    Raises:
        ValueError: the checkpoint is damaged, has no codes, or has full-range codes for a narrow recipe.
    """
    rules = [*(Rule(None, pattern) for pattern in DEFAULT_EXEMPT), *rules_of(read_quantization_config(directory))]
    read = read_checkpoint(directory, model) if any(directory.glob("*.safetensors")) else None
    if read is not None and read.problems:
        lines = [f"file: {one}" for one in read.problems[:20]]
        between = " " if len(lines) == 1 else "\n"
        raise CheckpointError(between.join([f"{directory} is damaged: {AGAIN}:", *lines]))
    coded = {} if read is None else read.coded
    schemes: dict[str, Scheme] = {}
    left_out: list[str] = []
    for part in parts_of(model):
        disk = module_name_on_disk(model, part.name)
        if read is not None:
            scheme = coded[disk].scheme if disk in coded else None
        else:
            matching = (rule.scheme for rule in rules if rule.matches(part.name, 0) or rule.matches(disk, 0))
            scheme = next(matching, None)
        if scheme is None:
            continue
        if said is not None:
            scheme = _on_grid(scheme, said, None if read is None else part.name)
        try:
            check_sizes(part, scheme)
            schemes[part.name] = scheme
        except ValueError:
            left_out.append(part.name)
    if left_out:
        say(f"not quantized, as groups do not divide their sizes: {listed(left_out, 5)}")
    if not schemes and coded:
        raise ValueError(
            f"{directory} has codes of {listed(list(coded), 2)}, but the {type(model).__name__} of its config.json has "
            "no such layers: config.json or the weights are damaged (copy or download them again), or belong to "
            "another model"
        )
    if not schemes and read is not None and (missing := _missing_linears(model, read)):
        raise ValueError(
            f"{directory} has neither weights of {listed(missing, 2)} nor codes as the quantization_config of its "
            "config.json describes them: config.json or the weights are damaged (copy or download them again)"
        )
    if not schemes:
        raise ValueError(f"{directory} has no quantized layer of {type(model).__name__}: name a quant.scheme")
    return schemes


def _missing_linears(model: PreTrainedModel, read: SourceCheckpoint) -> list[str]:
    """List the Linears of ``model``, by their names on disk, whose weights the files lack; without those that are
    exempt by default (lm_head may be tied)."""
    exempt = [Rule(None, pattern) for pattern in DEFAULT_EXEMPT]
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    disk = [module_name_on_disk(model, name) for name in names if not any(rule.matches(name, 0) for rule in exempt)]
    return [name for name in disk if f"{name}.weight" not in read.tensors]


def _on_grid(scheme: Scheme, said: Collection[TensorSpec], name: str | None) -> Scheme:
    """Return the scheme with the range of codes, full or narrow, that the recipe's schemes (``said``) have.

    ``name`` is the layer whose codes were read, or None. Raises ValueError if the recipe has the narrow range and the
    codes have the full range.
    """
    other = on_other_grid(scheme)
    if other is None or scheme.weights in said or other.weights not in said:
        return scheme
    if name is not None and other.weights.narrow:
        raise ValueError(
            f"quant.schemes has narrow: true for {name}, but its checkpoint has codes down to {scheme.weights.qmin:g}, "
            "so the recipe was written for another checkpoint: remove quant.schemes from the recipe, or set narrow: "
            "false"
        )
    return other


def parts_of(model: nn.Module) -> Iterator[LinearPart]:
    """Yield every Linear (for stacks, of each expert) and embedding of the model: the layers that files may have
    quantized."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield LinearPart(name, module.num_embeddings, module.embedding_dim)
        elif isinstance(module, (nn.Linear, StackedLinear, QuantLayer)):
            yield from linears_of(name, module)
