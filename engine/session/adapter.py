"""LoRA adapters: choice of layers before weights are read, the packed base of QLoRA, and the adapter modules."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.config.config import Recipe
from engine.config.sections import AdapterRecipe
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.moe.experts import PerExpertMLPs
from model.peft import PeftSource, read_adapter
from model.quantized.quantization_config import is_quantized
from model.quantized.quantize_on_load import can_quantize_on_load
from model.ranks import listed, say
from quant import Quantization, QuantLinear, Ranges, Scheme
from quant.adapters import Adapter, AdapterBeside
from quant.linear import StackedLinear, linears_of
from quant.packed_weight import BASE, store_packed
from quant.rules import assign, examples, schemes_of_layers


def check_adapters(recipe: Recipe, model: PreTrainedModel, exempt: Sequence[str], named: Mapping[str, Scheme]) -> None:
    """Refuse impossible or unsupported adapters before weights are loaded and layers quantized. ``exempt``: regexes on
    names of layers that stay unquantized; ``named``: schemes of layers by exact name. Raises ValueError: one line for
    each kind of problem, with the layers and the remedy."""
    adapter, head = recipe.adapter, model.get_output_embeddings()
    schemes, _ = assign(model, recipe.quant.default_scheme(), recipe.quant.chosen_rules(), exempt, named)
    layers = dict(_layers(model))
    # Patterns may match unquantized layers, lm_head and embeddings, which are refused below; without patterns these
    # layers are not chosen.
    outer = {name for name, layer in layers.items() if layer is head or isinstance(layer, nn.Embedding)}
    fit = [name for name in layers if adapter.targets or (name in schemes and name not in outer)]
    ranks = chosen_ranks(adapter, fit)
    chosen = {name: layers[name] for name in ranks}
    problems = [
        f"adapter.targets: {listed(wrong, 3)}: {why}"
        for why, wrong in _problems(adapter, model, chosen, schemes, ranks)
        if wrong
    ]
    if problems:
        raise ValueError("\n".join(problems))
    if adapter.start is not None:
        _check_start(recipe, model, chosen, ranks)


def pack_base(recipe: Recipe, model: PreTrainedModel, exempt: Sequence[str], named: Mapping[str, Scheme]) -> None:
    """Replace the weights of all layers to be quantized, except lm_head, embeddings and shared weights, by packed ones.

    An unquantized ``model.path`` is quantized on load (:mod:`model.quantized.quantize_on_load`). The student's
    parameters are on the meta device; ``exempt`` and ``named`` are as in :func:`check_adapters`. Raises ValueError: a
    layer cannot be packed or quantized on load, or an option needs the unquantized weights.
    """
    made = not is_quantized(Path(recipe.model.path))
    if made:
        _check_made(recipe)
    chosen, _ = assign(model, recipe.quant.default_scheme(), recipe.quant.chosen_rules(), exempt, named)
    pack_layers(model, chosen, BASE, recipe.quant.ranges() if made else None)


def pack_layers(model: PreTrainedModel, chosen: Mapping[str, Scheme], option: str, ranges: Ranges | None) -> None:
    """Replace the weights of chosen layers, except lm_head, embeddings and shared weights, by packed weights.

    Args:
        model: a model with parameters on the meta device.
        chosen: schemes by the name that a Linear has in a checkpoint.
        option: option of the recipe that errors name.
        ranges: criteria to choose scales if weights are quantized on load; None if codes are loaded.

    Raises:
        ValueError: a layer cannot be packed or quantized on load.
    """
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    users = Counter(id(own) for module in modules.values() for own in module.parameters(recurse=False))
    for name, scheme in schemes_of_layers(chosen, modules).items():
        layer = modules[name]
        if layer is head or isinstance(layer, nn.Embedding) or users[id(layer.weight)] > 1:
            continue
        try:
            if ranges is not None and not can_quantize_on_load(scheme.weights):
                raise ValueError(
                    f"{option}: scheme {scheme.name!r} has one scale for a whole weight, but "
                    f"weights are quantized a few rows at a time: {_ELSE}"
                )
            store_packed(layer, scheme.weights, tuple(layer.weight.shape), ranges, option)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


_ELSE = "set adapter.base to weights, or model.path to a quantized checkpoint, which launch/export.py makes"


def _check_made(recipe: Recipe) -> None:
    """Raise ValueError for options that need unquantized weights: weights that are quantized on load are kept as codes
    only."""
    path = f"adapter.base: quantized: model.path {recipe.model.path!r} is not quantized, and only its codes are kept: "
    if recipe.teacher_kind() == "self":
        raise ValueError(f"{path}set loss.teacher to model.path, as loss.teacher self would be the quantized model")
    if any(event.fake_quant in (False, "activations") for event in recipe.schedule):
        raise ValueError(
            f"{path}remove events that switch fake_quant of weights off, as unquantized weights do not exist"
        )
    if recipe.quant.stores_input_scales() and recipe.quant.initial_input_scale is None:
        raise ValueError(f"{path}scales of inputs would be measured in the quantized model instead: {_ELSE}")


def _check_start(
    recipe: Recipe, model: PreTrainedModel, layers: Mapping[str, nn.Module], ranks: Mapping[str, int]
) -> None:
    """Refuse an ``adapter.start`` whose base, layers, ranks or scalings differ from the recipe's adapters."""
    adapter, start = recipe.adapter, f"adapter.start: {recipe.adapter.start!r}: "
    source = _source(recipe, model, layers)
    if source.base is not None and source.base != digest_of_checkpoint(recipe.model.path):
        raise ValueError(
            f"{start}it was trained on another checkpoint than model.path {recipe.model.path!r}: set model.path to "
            "that one"
        )
    if missing := [name for name in layers if name not in source.shapes]:
        raise ValueError(
            f"{start}it has no A and B for {listed(missing, 3)}; set adapter.targets to the layers that it has"
        )
    for name, (a, b) in source.shapes.items():
        rank, layer = ranks[name], layers[name]
        expected = (rank, layer.in_features), (layer.out_features, rank)
        if (a, b) != expected:
            raise ValueError(
                f"{start}{name} has {list(a)} and {list(b)}, expected {[*map(list, expected)]}: set adapter.rank"
            )
        if source.scalings[name] != adapter.scaling(rank):
            raise ValueError(
                f"{start}the factor of {name} is {source.scalings[name]:g}, expected {adapter.scaling(rank):g}, which "
                "follows from adapter.alpha, adapter.rank and adapter.rslora: set these to the adapter's values"
            )


def _source(recipe: Recipe, model: PreTrainedModel, names: Iterable[str]) -> PeftSource:
    """Read the adapter in ``adapter.start`` for the layers ``names``. Raises ValueError: missing or unsupported."""
    try:
        return read_adapter(Path(str(recipe.adapter.start)), model, names)
    except ValueError as error:
        raise ValueError(f"adapter.start: {error}") from error


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all layers that patterns can match: Linears, embeddings, and each stack of experts once for the name of
    each of its Linears."""
    for name, module in model.named_modules():
        if isinstance(module, StackedLinear):
            yield from ((part.name, module) for part in linears_of(name, module))
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            yield name, module


def _problems(
    adapter: AdapterRecipe,
    model: PreTrainedModel,
    layers: Mapping[str, nn.Module],
    schemes: Mapping[str, Scheme],
    ranks: Mapping[str, int],
) -> Iterator[tuple[str, list[str]]]:
    """Yield each possible problem of the chosen layers as an error text, and the names of the layers with it."""
    head = model.get_output_embeddings()
    outer = [name for name, layer in layers.items() if layer is head or isinstance(layer, nn.Embedding)]
    yield "lm_head and embeddings get no adapter; name other layers, or leave adapter.targets empty", outer
    left = [name for name in layers if name not in schemes and name not in outer]
    yield "not quantized; an adapter is merged where the sum is quantized, so name other layers", left
    users = Counter(id(own) for module in model.modules() for own in module.parameters(recurse=False))
    tied = [name for name, layer in layers.items() if users[id(layer.weight)] > 1 and name not in outer]
    yield "the weight is another module's too, which would not have the adapter; name other layers", tied
    stacks = {name: layer for name, layer in layers.items() if isinstance(layer, StackedLinear)}
    chosen = Counter((id(layer), ranks[name]) for name, layer in stacks.items())
    apart = [
        name
        for name, layer in stacks.items()
        if chosen[id(layer), ranks[name]] != layer.num_experts * len(layer.projections)
    ]
    text = "these experts share one weight with others, so all or none of them get an adapter, of one rank"
    yield f"{text}; name all of them, or set model.experts to per_expert", apart
    for name, layer in layers.items():
        side = 0 if name in outer else min(int(layer.in_features), int(layer.out_features))  # type: ignore[arg-type]
        if 0 < side < ranks[name]:
            why = f"rank {ranks[name]}, expected at most {side}, the layer's smaller side: see adapter.rank and "
            yield f"{why}adapter.ranks", [name]
            break
    if adapter.beside or adapter.start:
        # No tested reader computes such adapters as training does; peft 0.21.2 renames or refuses them where
        # transformers stacks the experts in one weight.
        option = "merge: false" if adapter.beside else "start"
        why = f"whose adapters were not tested with adapter.{option}; name other layers, such as .*self_attn.*"
        yield f"experts that share one weight, {why}", list(stacks)
        split = [f"{name}." for name, module in model.named_modules() if isinstance(module, PerExpertMLPs)]
        own = [name for name in layers if name.startswith(tuple(split))]
        yield f"experts that share one weight in transformers, {why}", own


def chosen_ranks(adapter: AdapterRecipe, names: Sequence[str]) -> dict[str, int]:
    """Choose which of the layers ``names`` get an adapter; return the adapters' ranks by layer name.

    Raises:
        ValueError: a pattern of ``targets`` matches no layer, a pattern of ``ranks`` decides for no layer with an
            adapter, or ``names`` is empty.
    """
    for pattern in adapter.targets:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ValueError(
                f"adapter.targets: {pattern!r} matches no linear layer; it must match a full name such as "
                f"{examples(names)}"
            )
    patterns = adapter.targets
    chosen = [name for name in names if not patterns or any(re.fullmatch(one, name) for one in patterns)]
    if not chosen:
        raise ValueError(
            "adapter.targets: found no linear, quantized layer in the model, expected at least one: see quant.rules "
            "and quant.exempt"
        )
    ranks, unused = {}, dict.fromkeys(adapter.ranks)
    for name in chosen:
        own = next((pattern for pattern in adapter.ranks if re.fullmatch(pattern, name)), None)
        ranks[name] = adapter.rank if own is None else adapter.ranks[own]
        if own is not None:
            unused.pop(own, None)
    if unused:
        raise ValueError(
            f"adapter.ranks: {next(iter(unused))!r} decides for no layer: it matches no layer with an adapter, or "
            f"patterns before it match the same layers; names look like {examples(chosen)}"
        )
    return ranks


def add_adapters(recipe: Recipe, model: PreTrainedModel, quantization: Quantization) -> None:
    """Attach an adapter to every layer that :func:`chosen_ranks` chooses, and to each expert of a chosen stack.

    A is drawn uniformly within ``1 / sqrt(in)``, as torch draws a Linear's weight, and B is zeros; or both are read
    from ``adapter.start``. Random values depend on ``train.seed`` and the layer's name only: equal on every rank, at
    any number of ranks. Raises ValueError as :func:`chosen_ranks` does, or if the adapter in ``adapter.start`` cannot
    be read.
    """
    head = model.get_output_embeddings()
    layers = {
        name: layer
        for name, layer in quantization.layers.items()
        if isinstance(layer, QuantLinear) and layer is not head
    }
    stack_of = {part.name: name for name, layer in layers.items() for part in linears_of(name, layer)}
    ranks = {stack_of[part]: rank for part, rank in chosen_ranks(recipe.adapter, list(stack_of)).items()}
    source = None if recipe.adapter.start is None else _source(recipe, model, stack_of)
    kind, trained = (AdapterBeside if recipe.adapter.beside else Adapter), 0
    for name, rank in ranks.items():
        layer = layers[name]
        *stack, out_features, in_features = layer.weight_shape
        device, dtype = layer.weight.device, layer.weight.dtype
        lora_a = torch.empty(*stack, rank, in_features, dtype=dtype, device=device)
        if device.type != "meta":
            generator = torch.Generator().manual_seed(seed_of(recipe, name))
            drawn = torch.rand(lora_a.shape, generator=generator)
            lora_a.copy_((2 * drawn - 1) / in_features**0.5)
        lora_b = torch.zeros(*stack, out_features, rank, dtype=dtype, device=device)
        if source is not None and device.type != "meta":
            for own, found in zip((lora_a, lora_b), source.pair(name), strict=True):
                own.copy_(found)
        pair, scaling = (nn.Parameter(lora_a), nn.Parameter(lora_b)), recipe.adapter.scaling(rank)
        dropout = [recipe.adapter.dropout] if recipe.adapter.beside else []
        layer.attach_adapter(kind(*pair, scaling, *dropout))
        trained += lora_a.numel() + lora_b.numel()
    say(f"adapters: {len(ranks)} layers, {trained:,} parameters")


def seed_of(recipe: Recipe, drawn: str) -> int:
    """Derive the seed for drawing the values named ``drawn`` from ``train.seed``."""
    digest = hashlib.blake2b(f"{recipe.train.seed} {drawn}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
