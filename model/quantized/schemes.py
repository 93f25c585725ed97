"""Schemes of a model's layers in its quantized checkpoint."""

from collections.abc import Collection
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.quantized.checkpoint import read_checkpoint
from model.quantized.narrow_range import on_other_grid
from model.quantized.quantization_config import read_quantization_config, rules_of
from model.ranks import listed, say
from quant import DEFAULT_EXEMPT, Rule, Scheme, TensorSpec
from quant.linear import LinearPart, StackedLinear, linears_of


def source_schemes(
    model: PreTrainedModel, directory: Path, said: Collection[TensorSpec] | None = None
) -> dict[str, Scheme]:
    """Map every Linear and embedding of ``model`` with codes in ``directory`` to its scheme, by name (for stacked
    experts, of each Linear). If there are no weights, config.json decides.

    A weight whose last block is incomplete cannot be quantized here, and is logged.

    Args:
        model, directory: the model, and its quantized checkpoint.
        said: weight specs of the recipe's schemes, which decide if the range of integers is narrow
            (:mod:`model.quantized.narrow_range`); None: the codes decide.

    Raises:
        ValueError: the checkpoint cannot be read, has no codes, or has full-range codes for a narrow recipe.
    """
    rules = [*(Rule(None, pattern) for pattern in DEFAULT_EXEMPT), *rules_of(read_quantization_config(directory))]
    there = any(directory.glob("*.safetensors"))
    coded = read_checkpoint(directory, model).coded if there else {}
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
    if not schemes:
        raise ValueError(f"{directory} has no layer of {type(model).__name__} as codes: name a quant.scheme")
    return schemes


def _on_grid(scheme: Scheme, said: Collection[TensorSpec], name: str | None) -> Scheme:
    """Return the scheme of layer ``name`` (None if its codes were not read) with the recipe's narrow or full range.

    Raises:
        ValueError: the recipe has narrow range, and the codes do not.
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
