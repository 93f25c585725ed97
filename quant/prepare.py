"""Replace the Linears of a model by QuantLinears that share scales as serving does (see quant/quantization.py)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quant.gemm import takes_codes_of_stacks
from quant.inputs import SharedInput
from quant.kv_cache import attach_kv_cache
from quant.linear import QuantEmbedding, QuantLayer, QuantLinear, StackedLinear, linears_of
from quant.observers import Ranges
from quant.quantization import (
    Linears,
    Quantization,
    ScaleGroup,
    cache_group,
    embedding_group,
    input_groups,
    weight_groups,
    weight_shape,
)
from quant.rules import DEFAULT_EXEMPT, Rule, assign, examples, exempt_line, fused_sets, schemes_of_layers
from quant.spec import Scheme, TensorSpec


def prepare(
    model: nn.Module,
    scheme: Scheme | None,
    *,
    rules: Sequence[Rule] = (),
    exempt: Sequence[str] = DEFAULT_EXEMPT,
    named: Mapping[str, Scheme] | None = None,
    learn_weight_scale: bool,
    learn_input_scale: bool,
    learn_kv_scale: bool = False,
    ranges: Ranges = Ranges(),  # noqa: B008 (frozen)
    fp8_gemm: bool = False,
    fast_accum: bool = True,
    kv_cache: TensorSpec | None = None,
) -> Quantization:
    """Replace every nn.Linear of ``model`` that has a scheme by a QuantLinear, and every named embedding by a
    QuantEmbedding, in place.

    Weights and biases stay the same Parameters. Scales are new Parameters on the weights' device, not partitioned:
    under ZeRO-3 partition them next. They start as NaN, so that an unfilled scale shows in the loss.

    Args:
        model: any module tree; Linears may be partitioned or on the meta device.
        scheme, rules, exempt, named: scheme of each layer, see :func:`quant.rules.assign`.
        learn_weight_scale: learn the scales of weights.
        learn_input_scale: learn the stored scales of inputs.
        learn_kv_scale: learn the scales of keys and values.
        ranges: method to measure scales.
        fp8_gemm, fast_accum: options of the fp8 GEMM, see :class:`QuantLayer`.
        kv_cache: format of keys and values, see :func:`quant.kv_cache.attach_kv_cache`; None leaves them unquantized.

    Raises:
        ValueError: a rule or pattern matches nothing, nothing is left to quantize, layers that serving fuses have
            different schemes, a weight is shared, a layer cannot be quantized, or an option needs something that the
            model lacks: a stored input scale, an fp8 GEMM or a KV cache.
    """
    assigned = assign(model, scheme, rules, exempt, named)
    modules = dict(model.named_modules())
    schemes = schemes_of_layers(assigned.schemes, modules)
    embeddings = {name: one for name, one in modules.items() if name in schemes and isinstance(one, nn.Embedding)}
    linears: dict[str, Any] = {name: modules[name] for name in schemes if name not in embeddings}
    if not assigned.schemes and (kv_cache is None or scheme is not None or any(rule.scheme for rule in rules)):
        raise ValueError(_nothing_to_quantize(model))
    of_linears = {name: schemes[name] for name in linears}
    _check_schemes_allow(of_linears, learn_input_scale=learn_input_scale and kv_cache is None, fp8_gemm=fp8_gemm)
    _check_layers(modules, linears, schemes, embeddings)
    by_weight, by_input = (fused_sets(of_linears, modules, across_experts=across) for across in (False, True))
    of_weights, of_globals = weight_groups(by_weight, linears, schemes, learn_weight_scale)
    of_inputs = input_groups(by_input, linears, schemes, learn_input_scale, ranges)
    caches = {} if kv_cache is None else attach_kv_cache(model, kv_cache, learn=learn_kv_scale)
    quant_linears = _replace(modules, linears, schemes, of_weights, of_globals, of_inputs)
    of_inputs += [cache_group(name, cache, ranges) for name, cache in caches.items()]
    _share_inputs(quant_linears, by_weight)
    simulated = _use_fp8_gemm(quant_linears, fast_accum) if fp8_gemm else []
    replaced: dict[str, QuantLayer] = {**quant_linears}
    for name, embedding in embeddings.items():
        replaced[name], group = _replace_embedding(model, name, embedding, schemes[name], learn_weight_scale)
        of_weights.append(group)
    layers = {name: replaced[name] for name in schemes}  # in module order
    order = {name: index for index, name in enumerate(layers)}
    of_weights.sort(key=lambda group: order[group.owner])
    return Quantization(layers, assigned.exempt, of_weights, of_inputs, of_globals, ranges, simulated, caches)


def _nothing_to_quantize(model: nn.Module) -> str:
    """Write the error text for a model without an nn.Linear to quantize, with the classes of modules that have
    matrices."""
    kinds = Counter(
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, (nn.Linear, nn.Embedding))
        and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )
    elsewhere = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))
    return (
        f"nothing to quantize: every nn.Linear of {type(model).__name__} is exempt (quant.exempt, quant.exempt_more), "
        "or it has none" + (f"; its matrices are in {elsewhere}, which are not supported" if elsewhere else "")
    )


def _check_schemes_allow(schemes: Mapping[str, Scheme], *, learn_input_scale: bool, fp8_gemm: bool) -> None:
    names = ", ".join(dict.fromkeys(one.name for one in schemes.values()))
    if learn_input_scale and not any(one.learns_input for one in schemes.values()):
        raise ValueError(f"learnable.act_scale: true, expected false: no scheme stores a scale of inputs ({names})")
    if fp8_gemm and not any(one.has_fp8_gemm for one in schemes.values()):
        raise ValueError(
            "quant.compute: the fp8 GEMM needs fp8 codes with one scale per tensor for weights and inputs; none of "
            f"{names} has them: set auto"
        )


def _check_layers(
    modules: Mapping[str, nn.Module], linears: Linears, schemes: Mapping[str, Scheme], embeddings: Iterable[str]
) -> None:
    """Raise one error for all layers that cannot be quantized, with the recipe line that exempts them."""
    shared = _shared(modules, [*linears, *embeddings])
    problems = {
        name: problem
        for name, linear in linears.items()
        if (problem := shared.get(name) or _problem(name, linear, schemes[name]))
    }
    tables = {name: problem for name, problem in shared.items() if name not in linears}
    if problems or tables:
        raise ValueError(_cannot_be_quantized(modules, linears, schemes, problems, tables))


def _cannot_be_quantized(
    modules: Mapping[str, nn.Module],
    linears: Linears,
    schemes: Mapping[str, Scheme],
    problems: dict[str, str],
    tables: dict[str, str],
) -> str:
    """Write the error text for layers with ``problems`` and embedding ``tables``, by name, with all layers to exempt.
    These include layers that serving fuses with such a layer, and the other Linears of a stack."""
    names = dict.fromkeys(problems)
    for members in fused_sets({name: schemes[name] for name in linears}, dict(modules), across_experts=False):
        names |= dict.fromkeys(members) if problems.keys() & members else {}
    for stack in [name for name in names if isinstance(linears[name], StackedLinear)]:
        names |= dict.fromkeys(name for name in linears if name.rpartition(".")[0] == stack.rpartition(".")[0])
    parts = [part.name for name in names for part in linears_of(name, linears[name])]
    return examples(list(dict.fromkeys([*tables.values(), *problems.values()]))) + (
        f"; to leave them as they are, set {exempt_line(parts)}" if parts else ""
    )


def _problem(name: str, linear: nn.Linear | StackedLinear, scheme: Scheme) -> str | None:
    """Return the reason why a layer cannot be quantized with a scheme, or None."""
    if type(linear) is not nn.Linear and not isinstance(linear, StackedLinear) and not _computes_linear(linear):
        return f"{name} is a {type(linear).__name__}, a subclass of nn.Linear that computes something else"
    try:
        scheme.weights.scale_shape(weight_shape(linear))
    except ValueError as error:
        return f"{name}: {error}"
    return None


def _computes_linear(module: nn.Linear) -> bool:
    """Return True if a subclass of nn.Linear (such as Falcon's) computes the same as nn.Linear; tested with a small
    weight."""
    small: Any = object.__new__(type(module))
    small.__dict__ = {**module.__dict__, "_parameters": {"weight": None, "bias": None}}
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x, weight, bias = (torch.randn(*shape, generator=generator).double() for shape in ((2, 3, 8), (4, 8), (4,)))
        bias = bias if module.bias is not None else None
        values = {"weight": nn.Parameter(weight), "bias": None if bias is None else nn.Parameter(bias)}
        small.__dict__ |= {"_parameters": values, "in_features": 8, "out_features": 4}
        expected = nn.functional.linear(x, weight, bias)
        try:
            found = type(module).forward(small, x)
        except Exception:  # any error means another signature, so not a Linear
            return False
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def _shared(modules: Mapping[str, nn.Module], chosen: Iterable[str]) -> dict[str, str]:
    """Find the error texts of layers that share their weight with another module: one tensor on disk cannot be both
    quantized and unquantized."""
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    found = {}
    for name in chosen:
        names = users[id(modules[name].weight)]
        if len(names) > 1:
            found[name] = f"{' and '.join(names)} share one weight; leave {name} unquantized"
    return found


def _replace_embedding(
    model: nn.Module, name: str, embedding: nn.Embedding, scheme: Scheme, learn: bool
) -> tuple[QuantEmbedding, ScaleGroup]:
    try:
        group = embedding_group(name, embedding, scheme.weights, learn)
        layer = QuantEmbedding(embedding, scheme, weight=group.scale)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    model.set_submodule(name, layer)
    return layer, group


def _replace(
    modules: dict[str, nn.Module],
    linears: Linears,
    schemes: dict[str, Scheme],
    of_weights: list[ScaleGroup],
    of_globals: list[ScaleGroup],
    of_inputs: list[ScaleGroup],
) -> dict[str, QuantLinear]:
    weight_group = {name: group for group in of_weights for name in group.members}
    global_group = {name: group for group in of_globals for name in group.members}
    input_group = {name: group for group in of_inputs for name in group.members}
    layers = {}
    for name, linear in linears.items():
        weight, input_, global_ = weight_group[name], input_group.get(name), global_group.get(name)
        shapes = [weight_shape(linears[member]) for member in weight.members]
        scale = weight.scale if global_ is None else weight.scale._replace(global_=global_.s0)
        layers[name] = QuantLinear(
            linear,
            schemes[name],
            weight=scale,
            input=None if input_ is None else input_.scale,
            weight_numel=sum(weight.spec.elements_per_scale(shape) for shape in shapes),
        )
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, layers[name])
    return layers


def _share_inputs(layers: dict[str, QuantLinear], sets: list[list[str]]) -> None:
    """Share quantized inputs between layers of one parent that serving fuses; experts share a scale, not an input."""
    for names in sets:
        if len(names) > 1 and layers[names[0]].scheme.activations is not None:
            shared = SharedInput(len(names))
            for name in names:
                layers[name].shared_input = shared


def _use_fp8_gemm(layers: dict[str, QuantLinear], fast_accum: bool) -> list[str]:
    """Enable the fp8 GEMM where possible; return the names of layers whose scheme allows it but whose shape or device
    does not."""
    able = {name: layer for name, layer in layers.items() if layer.scheme.has_fp8_gemm}
    for layer in able.values():
        layer.fast_accum = fast_accum
        whole = layer.in_features % 16 == 0 and layer.out_features % 16 == 0
        layer.fp8_gemm = whole and (not layer.projections or takes_codes_of_stacks(layer.weight))
    return [name for name, layer in able.items() if not layer.fp8_gemm]
