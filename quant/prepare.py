"""Replaces the Linears of a model by QuantLinears and decides which of them share a scale.

Serving fuses q/k/v and gate/up into one GEMM and keeps one scale for the fused weight and one for the input; a fused
MoE kernel keeps one input scale per layer for all experts. If training used separate scales, serving would requantise
to the largest one and compute something else than was trained. So the same groups share one Parameter here:

* a weight scale per tensor: over q/k/v, over gate/up (of one expert in an MoE); finer scales belong to one row, never
  shared;
* a static input scale: over q/k/v, over gate/up, and over all experts of an MoE layer, one for gate/up and one for
  down.

Where the experts of a layer are one stack, its scales are one Parameter too, with an entry for each expert.

The Parameter is registered on every member and owned by the first one in module order, so ``model.parameters()`` lists
it once. A group that is only partly quantised is an error: what is served could not be what was trained.

Keys and values have a scale each per layer, which nothing shares; their groups are among those of inputs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from quant.calibrate import Ranges
from quant.embedding import QuantEmbedding
from quant.experts import StackedLinear, linears_of
from quant.gemm import takes_codes_of_stacks
from quant.inputs import SharedInput
from quant.kv_cache import QuantCache, attach_kv_cache
from quant.layer import QuantLayer
from quant.linear import QuantLinear
from quant.observe import Observer
from quant.rules import DEFAULT_EXEMPT, Rule, assign, examples
from quant.spec import FP8_TENSOR, Scheme, TensorSpec

# Layers that serving fuses, by the last component of their names; the members of a group have one parent.
FUSED: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Linears = dict[str, nn.Linear | StackedLinear]

_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\.(?P<projection>gate_proj|up_proj|down_proj)")


@dataclass(frozen=True)
class ScaleGroup:
    """One scale and the layers that share it.

    Attributes:
        owner: name of the first member in module order; the scale's Parameters carry its name in
            ``named_parameters()``.
        members: names of all layers (or the quantiser of keys, or of values) that share the scale, in module order.
        spec: how what it scales is quantised.
        s0: the frozen fp32 scale, in the shape that ``spec`` says, ``(1,)`` of an input; NaN until filled.
        theta: its learned correction in the model's dtype, 0 at the start, or None for a static scale.
        observer: of the group's input, or None in a group of weights.
        zero: the frozen zero points beside ``s0``, fp32, NaN until filled; None where ``spec`` has none.
    """

    owner: str
    members: list[str]
    spec: TensorSpec
    s0: nn.Parameter
    theta: nn.Parameter | None
    observer: Observer | None = None
    zero: nn.Parameter | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What has to be gathered to read the scale."""
        return [parameter for parameter in (self.s0, self.theta, self.zero) if parameter is not None]


@dataclass(frozen=True)
class Quantization:
    """What :func:`prepare` did to a model, and the switches.

    Attributes:
        layers: the quantised layers by module name, in module order; each knows its scheme.
        exempt: names of the modules that an exempt pattern matched (routers that are no nn.Linear among them), in
            module order.
        weight_groups: every weight scale; each layer is a member of one.
        input_groups: every stored scale of inputs, then those of keys and values; empty where there is none.
        global_groups: every global scale of weights whose scales are e4m3 (NVFP4).
        ranges: what first scales are to fit.
        simulated: names of the layers that the fp8 GEMM was asked for and cannot take; they simulate.
        caches: the quantisers of keys and values by module name, in module order; empty where the KV cache stays as it
            is.
    """

    layers: dict[str, QuantLayer]
    exempt: list[str]
    weight_groups: list[ScaleGroup] = field(default_factory=list)
    input_groups: list[ScaleGroup] = field(default_factory=list)
    global_groups: list[ScaleGroup] = field(default_factory=list)
    ranges: Ranges = Ranges()  # noqa: RUF009 (frozen)
    simulated: list[str] = field(default_factory=list)
    caches: dict[str, QuantCache] = field(default_factory=dict)

    @property
    def modules(self) -> dict[str, QuantLayer | QuantCache]:
        """Everything that can be switched, by module name: layers, then caches."""
        return {**self.layers, **self.caches}

    def set_fake_quant(self, weights: bool, activations: bool, pattern: str | None = None) -> None:
        """Switch fake quantisation of weights, and of what the scheme quantises of inputs, keys and values.

        Args:
            weights: whether weights are fake-quantised from now on.
            activations: the same of inputs, keys and values; without effect where the scheme leaves them alone.
            pattern: a regex that names the layers to switch in full; all of them without it.

        Raises:
            ValueError: the pattern matches no layer.
        """
        for name in self.matching(pattern):
            if name in self.layers:
                self.layers[name].weight_fake_quant = weights
                self.layers[name].input_fake_quant = activations and self.layers[name].scheme.activations is not None
            else:
                self.caches[name].input_fake_quant = activations
        self._switched()

    def matching(self, pattern: str | None) -> list[str]:
        """Names of the layers (and quantisers of keys and values) that the regex matches in full; all without one.

        Raises:
            ValueError: the pattern matches no layer.
        """
        names = [name for name in self.modules if pattern is None or re.fullmatch(pattern, name)]
        if not names:
            raise ValueError(
                f"pattern {pattern!r} matches no quantised layer; names look like {examples(list(self.modules))}"
            )
        return names

    def fake_quant_state(self) -> dict[str, tuple[bool, bool]]:
        """What is fake-quantised now, (weight, input) by layer; :meth:`restore_fake_quant` takes it back.

        Keys and values count as inputs.
        """
        return {
            name: (isinstance(module, QuantLayer) and module.weight_fake_quant, module.input_fake_quant)
            for name, module in self.modules.items()
        }

    def restore_fake_quant(self, state: Mapping[str, tuple[bool, bool]]) -> None:
        """Set the switches of every layer as :meth:`fake_quant_state` gave them."""
        for name, layer in self.layers.items():
            layer.weight_fake_quant, layer.input_fake_quant = state[name]
        for name, cache in self.caches.items():
            _, cache.input_fake_quant = state[name]
        self._switched()

    def _switched(self) -> None:
        """A quantised input is held until all have taken it that quantise theirs; others are told of the switches."""
        sharing = [layer for layer in self.layers.values() if layer.shared_input is not None]
        for layer in sharing:
            assert layer.shared_input is not None
            layer.shared_input.consumers = 0
            layer.shared_input.drop()
        for layer in sharing:
            assert layer.shared_input is not None
            layer.shared_input.consumers += layer.input_fake_quant
        for layer in self.layers.values():
            if layer.when_changed is not None:
                layer.when_changed()

    @property
    def observing(self) -> bool:
        """Whether inputs are being watched."""
        return any(module.input_observer is not None for module in self.modules.values())

    def observe(self, on: bool) -> None:
        """Start or stop watching the inputs of every input group. Starting forgets what was seen before."""
        modules = self.modules
        for group in self.input_groups:
            if on and group.observer is not None:
                group.observer.reset()
            for name in group.members:
                modules[name].input_observer = group.observer if on else None


def prepare(
    model: nn.Module,
    scheme: Scheme | None,
    *,
    rules: Sequence[Rule] = (),
    exempt: Sequence[str] = DEFAULT_EXEMPT,
    named: Mapping[str, Scheme] | None = None,
    learn_weight_scale: bool,
    learn_input_scale: bool,
    ranges: Ranges = Ranges(),  # noqa: B008 (frozen)
    fp8_gemm: bool = False,
    kv_cache: TensorSpec | None = None,
) -> Quantization:
    """Replace every nn.Linear of ``model`` that gets a scheme by a QuantLinear, in place, and named embeddings too.

    Weights and biases are the same Parameters afterwards. The scales are new ones on the weights' device, not
    partitioned: under ZeRO-3 partition them next. They start as NaN, so that one that nothing fills shows in the loss.

    Args:
        model: any module tree; Linears may be partitioned or on the meta device.
        scheme, rules, exempt, named: which layer gets which scheme, see :func:`quant.rules.assign`.
        learn_weight_scale: whether weight scales get a theta.
        learn_input_scale: whether stored input scales, and those of keys and values, get one.
        ranges: what scales are to fit when they are measured.
        fp8_gemm: multiply codes, not fake-quantised values, in the layers whose scheme and shapes allow it.
        kv_cache: how the keys and values of every attention module are quantised, see
            :func:`quant.kv_cache.attach_kv_cache`; None leaves them as they are.

    Raises:
        ValueError: a rule or pattern matches nothing, nothing is left to quantise, layers that serving fuses have
            several schemes, a weight is shared with another module, a layer does not fit its scheme, there is no input
            scale to learn, or no fp8 GEMM, or the model's KV cache cannot be quantised.
    """
    assigned = assign(model, scheme, rules, exempt, named)
    modules = dict(model.named_modules())
    assigned_layers = _of_layers(assigned.schemes, modules)
    embeddings = {
        name: one for name, one in modules.items() if name in assigned_layers and isinstance(one, nn.Embedding)
    }
    schemes = {name: one for name, one in assigned_layers.items() if name not in embeddings}
    linears = {name: _checked_linear(name, modules[name]) for name in schemes}
    if not assigned.schemes and kv_cache is None:
        raise ValueError(f"nothing to quantise: every nn.Linear of {type(model).__name__} is exempt, or it has none")
    if learn_input_scale and kv_cache is None and not any(one.static_input for one in schemes.values()):
        names = ", ".join(dict.fromkeys(one.name for one in schemes.values()))
        raise ValueError(f"{names}: no scheme here stores a scale of inputs, so there is none to learn")
    if fp8_gemm and not any(one.has_fp8_gemm for one in schemes.values()):
        names = ", ".join(dict.fromkeys(one.name for one in schemes.values()))
        raise ValueError(f"{names}: no scheme here has fp8 codes per tensor on both sides, which the fp8 GEMM needs")
    _check_not_tied(modules, {**linears, **embeddings})
    by_weight = _fused(schemes, modules, across_experts=False)
    by_input = _fused(schemes, modules, across_experts=True)
    weight_groups, global_groups = _weight_groups(by_weight, linears, schemes, learn_weight_scale)
    input_groups = [
        _input_group(members, linears, spec, learn_input_scale, ranges)
        for members in by_input
        if (spec := schemes[members[0]].static_input) is not None
    ]
    caches: dict[str, QuantCache] = {}
    if kv_cache is not None:
        caches = attach_kv_cache(model, kv_cache, learn=learn_input_scale)
    quant_linears = _replace(modules, linears, schemes, weight_groups, global_groups, input_groups)
    input_groups += [_cache_group(name, cache, ranges) for name, cache in caches.items()]
    _share_inputs(quant_linears, by_weight)
    simulated = _use_fp8_gemm(quant_linears) if fp8_gemm else []
    layers: dict[str, QuantLayer] = {**quant_linears}
    for name, embedding in embeddings.items():
        layers[name], group = _embedding(name, embedding, assigned_layers[name], learn_weight_scale)
        model.set_submodule(name, layers[name])
        weight_groups.append(group)
    order = {name: index for index, name in enumerate(assigned_layers)}
    layers = dict(sorted(layers.items(), key=lambda item: order[item[0]]))
    weight_groups.sort(key=lambda group: order[group.owner])
    return Quantization(layers, assigned.exempt, weight_groups, input_groups, global_groups, ranges, simulated, caches)


def _of_layers(schemes: Mapping[str, Scheme], modules: Mapping[str, nn.Module]) -> dict[str, Scheme]:
    """Schemes by name of the layer, in module order, from those by name of the Linear in a checkpoint.

    Raises:
        ValueError: the Linears of one layer's stacked experts have several schemes, or only some have one.
    """
    experts: dict[str, list[str]] = {}  # Linears by the module that holds the stacks
    for name, module in modules.items():
        if isinstance(module, StackedLinear):
            members = experts.setdefault(name.rpartition(".")[0], [])
            members += [part.name for part in linears_of(name, module)]
    found = {}
    for name, module in modules.items():
        if isinstance(module, StackedLinear):
            members = experts[name.rpartition(".")[0]]
            if any(member in schemes for member in members):
                _check_one_scheme(members, schemes)
                found[name] = schemes[members[0]]
        elif name in schemes:
            found[name] = schemes[name]
    return found


def _checked_linear(name: str, module: nn.Module) -> nn.Linear | StackedLinear:
    if type(module) not in (nn.Linear, StackedLinear):
        raise ValueError(
            f"{name} is a {type(module).__name__}, a subclass of nn.Linear, whose forward QuantLinear might not "
            f"reproduce; exempt it"
        )
    return module  # type: ignore[return-value]


def _weight_shape(linear: nn.Linear | StackedLinear) -> tuple[int, ...]:
    stack = (linear.num_experts,) if isinstance(linear, StackedLinear) else ()
    return (*stack, linear.out_features, linear.in_features)


def _check_not_tied(
    modules: dict[str, nn.Module], chosen: Mapping[str, nn.Linear | StackedLinear | nn.Embedding]
) -> None:
    """A tied weight has one value on disk, so it cannot be quantised in one place and not in the other."""
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    for name, layer in chosen.items():
        if len(users[id(layer.weight)]) > 1:
            raise ValueError(f"{' and '.join(users[id(layer.weight)])} share one weight; leave {name} unquantised")


def _fused(schemes: dict[str, Scheme], modules: dict[str, nn.Module], *, across_experts: bool) -> list[list[str]]:
    """The layers in sets that serving fuses, each name in one set, sets and names in module order.

    Raises:
        ValueError: the layers of a set have several schemes, or only some have one.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in schemes:
        groups.setdefault(_fused_key(name, modules, across_experts), []).append(name)
    for parent, *leaves in groups:
        if across_experts and parent.rpartition(".")[2] == "experts":
            leaves = [*FUSED[1], "down_proj"]  # each shares its inputs, but one kernel runs all of them
        _check_one_scheme(_members(parent, leaves, modules, across_experts), schemes)
    return list(groups.values())


def _fused_key(name: str, modules: dict[str, nn.Module], across_experts: bool) -> tuple[str, ...]:
    """What the layers of one set have in common: their parent, or MoE layer, and the names that are fused there."""
    expert = _EXPERT.fullmatch(name)
    if across_experts and expert is not None:
        return (expert["experts"], *next((names for names in FUSED if expert["projection"] in names), ("down_proj",)))
    parent, _, leaf = name.rpartition(".")
    fused = next((names for names in FUSED if leaf in names), (leaf,))
    if not any(f"{parent}.{other}".lstrip(".") in modules for other in fused if other != leaf):
        fused = (leaf,)  # attention without k and v projections, an MLP without a gate: nothing to fuse with
    return (parent, *fused)


def _members(parent: str, leaves: Sequence[str], modules: dict[str, nn.Module], across_experts: bool) -> list[str]:
    """The layers of a set as serving has them, quantised or not."""
    parents = [parent]
    if across_experts and parent.rpartition(".")[2] == "experts":
        parents = [f"{parent}.{index}" for index, _ in modules[parent].named_children() if index.isdigit()]
    return [f"{one}.{leaf}".lstrip(".") for one in parents for leaf in leaves]


def _check_one_scheme(members: Sequence[str], schemes: Mapping[str, Scheme]) -> None:
    missing = [name for name in members if name not in schemes]
    if missing:
        raise ValueError(
            f"{examples(members, 6)} are served as one layer, so all or none of them can be quantised, but "
            f"{examples(missing, 6)} {'is' if len(missing) == 1 else 'are'} exempt or no nn.Linear; exempt the others "
            "too"
        )
    found = {schemes[name]: name for name in reversed(members)}
    if len(found) > 1:
        raise ValueError(
            f"{examples(members, 6)} are served as one layer, so they need one scheme, but "
            + ", ".join(f"{name} has {scheme.name}" for scheme, name in reversed(found.items()))
        )


def _weight_groups(
    sets: list[list[str]], linears: Linears, schemes: dict[str, Scheme], learn: bool
) -> tuple[list[ScaleGroup], list[ScaleGroup]]:
    """Scale groups of the weights, and those of their global scales."""
    groups, global_groups = [], []
    for members in sets:
        spec = schemes[members[0]].weights
        owner = linears[members[0]]
        for some in [members] if spec.granularity == "tensor" else [[name] for name in members]:
            first = linears[some[0]]
            try:
                shape = spec.scale_shape(_weight_shape(first))
            except ValueError as error:
                raise ValueError(f"{some[0]}: {error}") from None
            groups.append(_weight_group(some, first, spec, shape, learn))
        if spec.scale_format == "e4m3":
            shape = FP8_TENSOR.scale_shape(_weight_shape(owner))
            global_groups.append(ScaleGroup(members[0], members, spec, *_new_scale(owner, shape, False)))
    return groups, global_groups


def _weight_group(
    members: list[str], owner: nn.Linear | StackedLinear, spec: TensorSpec, shape: tuple[int, ...], learn: bool
) -> ScaleGroup:
    zero = _new_scale(owner, shape, False)[0] if spec.has_zero_points else None
    return ScaleGroup(members[0], members, spec, *_new_scale(owner, shape, learn), zero=zero)


def _embedding(name: str, embedding: nn.Embedding, scheme: Scheme, learn: bool) -> tuple[QuantEmbedding, ScaleGroup]:
    try:
        shape = scheme.weights.scale_shape((embedding.num_embeddings, embedding.embedding_dim))
        group = ScaleGroup(name, [name], scheme.weights, *_new_scale(embedding, shape, learn))
        return QuantEmbedding(embedding, scheme, weight_s0=group.s0, weight_theta=group.theta), group
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _input_group(members: list[str], linears: Linears, spec: TensorSpec, learn: bool, ranges: Ranges) -> ScaleGroup:
    widths = {name: linears[name].in_features for name in members}
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"layers that share an input scale read inputs of different widths: {widths}; exempt all of them"
        )
    return ScaleGroup(members[0], members, spec, *_new_scale(linears[members[0]], (1,), learn), _observer(spec, ranges))


def _cache_group(name: str, cache: QuantCache, ranges: Ranges) -> ScaleGroup:
    return ScaleGroup(name, [name], cache.spec, cache.input_s0, cache.input_theta, _observer(cache.spec, ranges))


def _observer(spec: TensorSpec, ranges: Ranges) -> Observer:
    return Observer(spec, histogram=ranges.inputs != "absmax")


def _new_scale(
    owner: nn.Linear | StackedLinear | nn.Embedding, shape: tuple[int, ...], learn: bool
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A frozen fp32 scale of NaNs, and a theta of zeros in the dtype of the weight if it learns."""
    device, dtype = owner.weight.device, owner.weight.dtype
    s0 = nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float32, device=device), requires_grad=False)
    return s0, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) if learn else None


def _replace(
    modules: dict[str, nn.Module],
    linears: Linears,
    schemes: dict[str, Scheme],
    weight_groups: list[ScaleGroup],
    global_groups: list[ScaleGroup],
    input_groups: list[ScaleGroup],
) -> dict[str, QuantLinear]:
    weight_group = {name: group for group in weight_groups for name in group.members}
    global_group = {name: group for group in global_groups for name in group.members}
    input_group = {name: group for group in input_groups for name in group.members}
    layers = {}
    for name, linear in linears.items():
        ours, its_input, its_global = weight_group[name], input_group.get(name), global_group.get(name)
        shapes = [_weight_shape(linears[member]) for member in ours.members]
        layers[name] = QuantLinear.from_linear(
            linear,
            schemes[name],
            weight_s0=ours.s0,
            weight_theta=ours.theta,
            weight_global=its_global.s0 if its_global is not None else None,
            weight_zero=ours.zero,
            input_s0=its_input.s0 if its_input is not None else None,
            input_theta=its_input.theta if its_input is not None else None,
            weight_numel=sum(ours.spec.elements_per_scale(shape) for shape in shapes),
        )
        parent, _, leaf = name.rpartition(".")
        setattr(modules[parent], leaf, layers[name])
    return layers


def _share_inputs(layers: dict[str, QuantLinear], sets: list[list[str]]) -> None:
    """Layers of one parent that serving fuses read one tensor; experts of a layer share a scale, not a tensor."""
    for names in sets:
        if len(names) > 1 and layers[names[0]].scheme.activations is not None:
            shared = SharedInput(len(names))
            for name in names:
                layers[name].shared_input = shared


def _use_fp8_gemm(layers: dict[str, QuantLinear]) -> list[str]:
    """Switch the layers over whose codes :func:`quant.gemm.scaled_linear` multiplies; names of those that have the
    scheme for it but are something else."""
    able = {name: layer for name, layer in layers.items() if layer.scheme.has_fp8_gemm}
    for layer in able.values():
        divides = layer.in_features % 16 == 0 and layer.out_features % 16 == 0
        layer.fp8_gemm = divides and (not layer.projections or takes_codes_of_stacks(layer.weight))
    return [name for name, layer in able.items() if not layer.fp8_gemm]
