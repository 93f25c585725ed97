"""Quantize a model: replace its Linears by layers that share scales as serving does, and switch them in a schedule.

Servers keep one scale for the layers that they fuse (:mod:`quant.rules`) and one for their input; a fused MoE kernel
keeps one input scale per layer for all experts. If these layers trained separate scales, a server would requantize with
the largest one, and the outputs would differ from training. So they share one Parameter in training:

* a weight scale per tensor is shared by q, k and v, and by gate and up (of one expert in an MoE); finer scales belong
  to single rows and are never shared;
* a static input scale, or the global scale of dynamic scales (NVFP4), is shared by q, k and v, and by gate and up. All
  experts of an MoE layer share one such scale for gate and up, and another for down.

If the experts of a layer are one stack, its scales are also one Parameter with an entry per expert. A shared Parameter
is registered on all layers that share it and owned by the first one in module order, so ``model.parameters()`` lists it
once. Fused layers of which only some are quantized are an error, as no server can run them.

Keys and values each have one scale per layer, never shared; their groups are listed with the groups of inputs.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.adapters import DecoupledScale
from quant.attention import QuantCache, attach_kv_cache
from quant.gemm import takes_codes_of_stacks
from quant.inputs import SharedInput
from quant.linear import QuantEmbedding, QuantLayer, QuantLinear, StackedLinear, check_sizes, linears_of
from quant.observers import Observer, Ranges
from quant.rules import DEFAULT_EXEMPT, Rule, assign, examples, exempt_line, fused_sets, schemes_of_layers
from quant.scale import Scale
from quant.spec import FP8_TENSOR, Scheme, TensorSpec

Linears = dict[str, nn.Linear | StackedLinear]


@dataclass(frozen=True)
class ScaleGroup:
    """Scale and the layers that share it.

    Attributes:
        owner: name of the first member in module order; the scale's Parameters have its name in ``named_parameters()``.
        members: names of all layers that share the scale, in module order; for keys or values the name of their
            quantizer.
        spec: number format of the scaled tensors.
        scale: scale made of Parameters. s0 has the shape given by ``spec``, ``(1,)`` for an input; s0 and zero points
            are NaN until filled. theta has the model's dtype and starts at 0. For NVFP4, a weight's global scale is the
            s0 of a separate group, and an input's global scale is the group's s0.
        observer: observer of the group's input, or None for weights.
    """

    owner: str
    members: list[str]
    spec: TensorSpec
    scale: Scale
    observer: Observer | None = None

    @property
    def s0(self) -> nn.Parameter:
        """Frozen part of the scale."""
        return self.scale.s0  # type: ignore[return-value]

    @property
    def theta(self) -> nn.Parameter | None:
        """Learned part of the scale; None for a scale that does not learn."""
        return self.scale.theta  # type: ignore[return-value]

    @property
    def zero(self) -> nn.Parameter | None:
        """Zero points stored with the scale, None if ``spec`` has none."""
        return self.scale.zero  # type: ignore[return-value]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters of the scale, to be gathered before it is read."""
        return [parameter for parameter in (self.s0, self.theta, self.zero) if parameter is not None]


@dataclass(frozen=True)
class Quantization:
    """Quantized layers of a model, their scales, and the switches of fake quantization.

    Attributes:
        layers: quantized layers by module name, in module order.
        exempt: names of the modules that an exempt pattern matched (also routers that are not nn.Linear), in module
            order.
        weight_groups: every weight scale; each layer is in exactly one group.
        input_groups: every stored scale of inputs, then the scales of keys and values; may be empty.
        global_groups: every global scale of weights whose scales are e4m3 (NVFP4).
        ranges: method to choose initial scales.
        simulated: names of the layers that use fake quant and a bf16 GEMM although the fp8 GEMM was requested.
        caches: quantizers of keys and values by module name, in module order; empty for an unquantized KV cache.
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
        """All modules with switches by name: layers, then caches."""
        return {**self.layers, **self.caches}

    @property
    def ties_layers(self) -> bool:
        """Return True if lm_head and the embeddings are both quantized and share one weight."""
        return len({id(layer.weight) for layer in self.layers.values()}) < len(self.layers)

    def set_fake_quant(self, weights: bool, activations: bool, pattern: str | None = None) -> None:
        """Switch fake quantization of weights, and of inputs, keys and values that the scheme quantizes, in the layers
        that :meth:`matching` finds."""
        for name in self.matching(pattern):
            if name in self.layers:
                self.layers[name].weight_fake_quant = weights
                self.layers[name].input_fake_quant = activations and self.layers[name].scheme.activations is not None
            else:
                self.caches[name].input_fake_quant = activations
        self._switched()

    def matching(self, pattern: str | None) -> list[str]:
        """Find the names of layers (and quantizers of keys and values) that the regex fully matches; all for None.
        Raises ValueError if it matches none of them."""
        names = [name for name in self.modules if pattern is None or re.fullmatch(pattern, name)]
        if not names:
            raise ValueError(
                f"pattern {pattern!r} matches no quantized layer; names look like {examples(list(self.modules))}"
            )
        return names

    def fake_quant_state(self) -> dict[str, tuple[bool, bool]]:
        """Return the switches (weight, input) by layer, for :meth:`restore_fake_quant`; keys and values count as
        inputs."""
        return {
            name: (isinstance(module, QuantLayer) and module.weight_fake_quant, module.input_fake_quant)
            for name, module in self.modules.items()
        }

    def restore_fake_quant(self, state: Mapping[str, tuple[bool, bool]]) -> None:
        """Set the switches of every layer to a state returned by :meth:`fake_quant_state`."""
        for name, layer in self.layers.items():
            layer.weight_fake_quant, layer.input_fake_quant = state[name]
        for name, cache in self.caches.items():
            _, cache.input_fake_quant = state[name]
        self._switched()

    def _switched(self) -> None:
        """After a change of switches, clear and recount the caches of shared inputs, and call the layers'
        ``when_changed``."""
        for shared in {layer.shared_input for layer in self.layers.values()} - {None}:
            assert shared is not None
            shared.consumers = 0
            shared.drop()
        for layer in self.layers.values():
            if layer.shared_input is not None:
                layer.shared_input.consumers += layer.input_fake_quant
            if layer.when_changed is not None:
                layer.when_changed()

    @property
    def _observers(self) -> dict[str, Observer]:
        """Observers of inputs, keys and values, by owner of their scale group."""
        return {group.owner: group.observer for group in self.input_groups if group.observer is not None}

    @property
    def observing(self) -> bool:
        """Return True if inputs are being observed."""
        return any(module.input_observer is not None for module in self.modules.values())

    def observe(self, on: bool) -> None:
        """Start or stop observing the inputs of every input group; starting resets the statistics."""
        modules = self.modules
        for group in self.input_groups:
            if on and group.observer is not None:
                group.observer.reset()
            for name in group.members:
                modules[name].input_observer = group.observer if on else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which fake quantization and observation are off at first; the block may switch them on.
        Afterwards, also after an exception, switches, observers and their statistics are restored."""
        modules = self.modules
        switches, seen = self.fake_quant_state(), self.seen()
        observers = {name: module.input_observer for name, module in modules.items()}
        try:
            self.set_fake_quant(weights=False, activations=False)
            self.observe(False)
            yield
        finally:
            for name, module in modules.items():
                module.input_observer = observers[name]
            self.restore_seen(seen)
            self.restore_fake_quant(switches)

    def seen(self) -> dict[str, dict[str, Any]]:
        """Return the observers' statistics by owner of the scale group, for :meth:`restore_seen`.

        Nothing is copied or read from the device: an observer replaces its tensors and never writes into them.
        """
        return {owner: dict(vars(observer)) for owner, observer in self._observers.items()}

    def restore_seen(self, seen: Mapping[str, dict[str, Any]]) -> None:
        """Reset the observers to statistics returned by :meth:`seen`."""
        for owner, observer in self._observers.items():
            vars(observer).update(seen[owner])

    def decouple_scales(self, head: nn.Module | None = None) -> None:
        """Give every Linear except ``head`` (None: every Linear) a learned scale that only chooses its codes
        (:mod:`quant.adapters`), attached like an adapter. Weights and scales must not be partitioned yet."""
        for layer in self.layers.values():
            if isinstance(layer, QuantLinear) and layer is not head:
                spec = layer.scheme.weights
                shape = spec.scale_shape(layer.weight_shape)
                theta = torch.zeros(shape, dtype=layer.weight.dtype, device=layer.weight.device)
                layer.attach_adapter(DecoupledScale(nn.Parameter(theta), spec))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores: which layers fake-quantize, whether inputs are observed, and the observers'
        statistics, as plain values and CPU tensors."""
        observers = {owner: observer.state_dict() for owner, observer in self._observers.items()}
        return {"fake_quant": self.fake_quant_state(), "observing": self.observing, "observers": observers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.restore_fake_quant(state["fake_quant"])
        self.observe(state["observing"])
        for owner, observer in self._observers.items():
            observer.load_state_dict(state["observers"][owner])


def replace_layers(
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
    """Replace every nn.Linear or StackedLinear of ``model`` that has a scheme by a QuantLinear, and every embedding in
    ``named`` by a QuantEmbedding, in place. ``kv_cache`` also wraps the attention (:mod:`quant.attention`).

    Weights and biases stay the same Parameters. Scales are new Parameters on the weights' device, not partitioned:
    under ZeRO-3 partition them next. They start as NaN, so that an unfilled scale shows in the loss.

    Args:
        model: any module tree; Linears may be partitioned or on the meta device.
        scheme, rules, exempt, named: as in :func:`quant.rules.assign`: default scheme; rules for some layers; patterns
            of unquantized layers; schemes by exact name.
        learn_weight_scale, learn_input_scale, learn_kv_scale: learn the scales of weights, the stored scales of
            inputs, the scales of keys and values.
        ranges: method to measure scales.
        fp8_gemm, fast_accum: multiply codes where both operands are e4m3; accumulate faster, in fewer bits than fp32,
            on Hopper.
        kv_cache: format of keys and values; None leaves them unquantized.

    Raises:
        ValueError: a rule or pattern matches nothing, nothing is left to quantize, layers that serving fuses have
            different schemes, two modules share a weight (except lm_head and embeddings of one scheme), a layer cannot
            be quantized, or an option needs something that the model lacks: a stored input scale, an fp8 GEMM or a KV
            cache.
    """
    assigned, exempted = assign(model, scheme, rules, exempt, named)
    modules = dict(model.named_modules())
    schemes = schemes_of_layers(assigned, modules)
    embeddings = [name for name in schemes if isinstance(modules[name], nn.Embedding)]
    linears: dict[str, Any] = {name: modules[name] for name in schemes if name not in embeddings}
    if not schemes and (kv_cache is None or scheme is not None or any(rule.scheme for rule in rules)):
        raise ValueError(_nothing_to_quantize(model))
    of_linears = {name: schemes[name] for name in linears}
    names = ", ".join(dict.fromkeys(one.name for one in of_linears.values()))
    if learn_input_scale and kv_cache is None and not any(one.learns_input for one in of_linears.values()):
        expected = f"expected false: no scheme stores a scale of inputs that can be learned ({names})"
        raise ValueError(f"learnable.act_scale: true, {expected}")
    if fp8_gemm and not any(one.has_fp8_gemm for one in of_linears.values()):
        raise ValueError(
            "quant.compute: the fp8 GEMM needs fp8 codes with one scale per tensor for weights and inputs; none of "
            f"{names} has them: set auto"
        )
    _check_layers(modules, linears, schemes, embeddings)
    by_weight, by_input = (fused_sets(of_linears, modules, across_experts=across) for across in (False, True))
    of_weights, of_globals = _weight_groups(by_weight, linears, schemes, learn_weight_scale)
    of_inputs = _input_groups(by_input, linears, schemes, learn_input_scale, ranges)
    caches = {} if kv_cache is None else attach_kv_cache(model, kv_cache, learn=learn_kv_scale)
    replaced: dict[str, QuantLayer] = {**_quant_linears(linears, schemes, of_weights, of_globals, of_inputs)}
    for name, cache in caches.items():
        scale = Scale(cache.input_s0, cache.input_theta)
        of_inputs.append(ScaleGroup(name, [name], cache.spec, scale, _observer(cache.spec, ranges)))
    for members in by_weight:  # experts share a scale, not an input
        if len(members) > 1 and schemes[members[0]].activations is not None:
            shared = SharedInput(len(members))
            for name in members:
                replaced[name].shared_input = shared
    simulated = _use_fp8_gemm(replaced, fast_accum) if fp8_gemm else []
    for name in embeddings:
        head = next((group for group in of_weights if modules[group.owner].weight is modules[name].weight), None)
        group, replaced[name] = _quant_embedding(name, modules[name], schemes[name], learn_weight_scale, head)
        of_weights = [group, *(one for one in of_weights if one is not head)]
    for name, layer in replaced.items():
        model.set_submodule(name, layer)
    layers = {name: replaced[name] for name in schemes}  # in module order
    order = {name: index for index, name in enumerate(layers)}
    of_weights.sort(key=lambda group: order[group.owner])
    return Quantization(layers, exempted, of_weights, of_inputs, of_globals, ranges, simulated, caches)


def _quant_embedding(
    name: str, table: nn.Embedding, scheme: Scheme, learn_scale: bool, head: ScaleGroup | None
) -> tuple[ScaleGroup, QuantEmbedding]:
    """Build a quantized embedding and the group of its scale. If ``head``, the group of a tied lm_head, is given, the
    embedding takes its scale. Raises ValueError if the embedding cannot be quantized."""
    spec = scheme.weights
    try:
        shape = spec.scale_shape((table.num_embeddings, table.embedding_dim))
        scale = _new_scale(table, shape, learn_scale) if head is None else head.scale
        group = ScaleGroup(name, [name, *(head.members if head else ())], spec, scale)
        return group, QuantEmbedding(table, scheme, weight=scale)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _nothing_to_quantize(model: nn.Module) -> str:
    """Write the error text for a model without an nn.Linear to quantize; the text names other classes with matrices."""
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


def _check_layers(
    modules: Mapping[str, nn.Module], linears: Linears, schemes: Mapping[str, Scheme], embeddings: Iterable[str]
) -> None:
    """Raise one error for all layers that cannot be quantized, with the recipe line that exempts them."""
    shared = _shared(modules, schemes, [*linears, *embeddings])
    problems = {
        name: problem
        for name, linear in linears.items()
        if (problem := shared.get(name) or _problem(name, linear, schemes[name]))
    }
    problems = _between_blocks(modules, linears, schemes) | problems
    tables = [problem for name, problem in shared.items() if name not in linears]
    if not (problems or tables):
        return
    # All layers to exempt: also layers that serving fuses with them, and the other Linears of a stack.
    names = dict.fromkeys(problems)
    for members in fused_sets({name: schemes[name] for name in linears}, dict(modules), across_experts=False):
        names |= dict.fromkeys(members) if problems.keys() & members else {}
    for stack in [name for name in names if isinstance(linears[name], StackedLinear)]:
        names |= dict.fromkeys(name for name in linears if name.rpartition(".")[0] == stack.rpartition(".")[0])
    parts = [part.name for name in names for part in linears_of(name, linears[name])]
    found = examples(list(dict.fromkeys([*tables, *problems.values()])))
    raise ValueError(found + (f"; to leave them as they are, set {exempt_line(parts)}" if parts else ""))


def _problem(name: str, linear: nn.Linear | StackedLinear, scheme: Scheme) -> str | None:
    """Return the reason why a layer cannot be quantized with a scheme, or None."""
    if type(linear) is not nn.Linear and not isinstance(linear, StackedLinear) and not _computes_linear(linear):
        return f"{name} is a {type(linear).__name__}, a subclass of nn.Linear that computes something else"
    try:
        for part in linears_of(name, linear):
            check_sizes(part, scheme)
    except ValueError as error:
        return f"{name}: {error}"
    return None


def _between_blocks(
    modules: Mapping[str, nn.Module], linears: Linears, schemes: Mapping[str, Scheme]
) -> dict[str, str]:
    """Return error texts of layers whose rows do not fill whole blocks, although servers fuse them with other layers.

    In the fused tensor (q, k and v; gate and up) the rows of the next layer would begin inside a block of the scales.
    """
    found = {}
    for *first, last in fused_sets({name: schemes[name] for name in linears}, dict(modules), across_experts=False):
        for name in first:
            rows, size = linears[name].out_features, schemes[name].weights.rows_per_scale
            if rows % size:
                found[name] = (
                    f"{name}: out_features {rows} is not divisible by the block size {size}, and servers put the rows "
                    f"of {last.rpartition('.')[2]} behind it in one tensor; choose another scheme, or exempt this layer"
                )
    return found


def forward_with(module: nn.Module, *inputs: Tensor, parameters: dict[str, Any], **attributes: Any) -> Any:
    """Run the forward of ``module``'s class on small ``inputs``, on the CPU and without gradients. ``parameters`` and
    ``attributes``, of sizes that fit the inputs, take the place of the module's own. Return the result, or None if the
    forward raises."""
    small = object.__new__(type(module))
    small.__dict__ = {**module.__dict__, "_parameters": parameters, **attributes}
    with torch.device("cpu"), torch.no_grad():
        try:
            return type(module).forward(small, *inputs)
        except Exception:  # any error means another signature
            return None


def random_tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Draw a random tensor for each of ``shapes`` on the CPU, with a fixed seed, to compare the results of two
    modules."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes]


def _computes_linear(module: nn.Linear) -> bool:
    """Return True if a subclass of nn.Linear (such as Falcon's) computes the same as nn.Linear; tested with a small
    weight."""
    x, weight, bias = random_tensors((2, 3, 8), (4, 8), (4,), dtype=torch.float64)
    values = {"weight": nn.Parameter(weight), "bias": None if module.bias is None else nn.Parameter(bias)}
    expected = nn.functional.linear(x, weight, values["bias"])
    found = forward_with(module, x, parameters=values, in_features=8, out_features=4)
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def _shared(modules: Mapping[str, nn.Module], schemes: Mapping[str, Scheme], chosen: Iterable[str]) -> dict[str, str]:
    """Write the error texts of layers that share their weight with another module: one tensor on disk cannot be both
    quantized and unquantized. An embedding and lm_head may share one weight if they have one scheme."""
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(name)
    found = {}
    for name in chosen:
        names = users[id(modules[name].weight)]
        tables = [one for one in names if isinstance(modules[one], nn.Embedding)]
        tied = len(names) == 2 and len(tables) == 1 and schemes.get(names[0]) == schemes.get(names[1])
        if len(names) > 1 and not tied:
            found[name] = f"{' and '.join(names)} share one weight; leave {name} unquantized"
    return found


def _weight_groups(
    sets: list[list[str]], linears: Linears, schemes: Mapping[str, Scheme], learn: bool
) -> tuple[list[ScaleGroup], list[ScaleGroup]]:
    """Build the scale groups of weights, and of their global scales (never learned). ``sets`` are names of layers that
    serving fuses."""
    groups, global_groups = [], []
    for members in sets:
        spec = schemes[members[0]].weights
        for some in [members] if spec.granularity == "tensor" else [[name] for name in members]:
            shape = spec.scale_shape(_weight_shape(linears[some[0]]))
            scale = _new_scale(linears[some[0]], shape, learn, zero_points=spec.has_zero_points)
            groups.append(ScaleGroup(some[0], some, spec, scale))
        if spec.has_global_scale:
            shape = FP8_TENSOR.scale_shape(_weight_shape(linears[members[0]]))
            global_groups.append(ScaleGroup(members[0], members, spec, _new_scale(linears[members[0]], shape, False)))
    return groups, global_groups


def _weight_shape(linear: nn.Linear | StackedLinear) -> tuple[int, ...]:
    """Return ``(out, in)``, or ``(E, out, in)`` for a stack, even if the weight is a partition."""
    stack = (linear.num_experts,) if isinstance(linear, StackedLinear) else ()
    return (*stack, linear.out_features, linear.in_features)


def _input_groups(
    sets: list[list[str]], linears: Linears, schemes: Mapping[str, Scheme], learn: bool, ranges: Ranges
) -> list[ScaleGroup]:
    """Build the scale groups of inputs, for schemes that store an input scale. ``sets`` are names of layers that
    serving fuses. Raises ValueError if the layers of a set differ in ``in_features``."""
    groups = []
    for members in sets:
        spec = schemes[members[0]].stored_input
        if spec is None:
            continue
        widths = {name: linears[name].in_features for name in members}
        if len(set(widths.values())) > 1:
            raise ValueError(
                f"layers that share an input scale have different in_features {widths}, expected one: exempt all of "
                "them (quant.exempt_more)"
            )
        scale = _new_scale(linears[members[0]], (1,), learn and not spec.dynamic)
        groups.append(ScaleGroup(members[0], members, spec, scale, _observer(spec, ranges)))
    return groups


def _observer(spec: TensorSpec, ranges: Ranges) -> Observer:
    return Observer(spec, histogram=ranges.inputs != "absmax")


def _new_scale(owner: nn.Module, shape: tuple[int, ...], learn: bool, *, zero_points: bool = False) -> Scale:
    """Create a frozen fp32 scale of NaNs, optionally with a theta of zeros in the weight's dtype and zero points of
    NaNs."""
    weight: Any = owner.weight

    def frozen() -> nn.Parameter:
        return nn.Parameter(torch.full(shape, torch.nan, device=weight.device), requires_grad=False)

    theta = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device)) if learn else None
    return Scale(frozen(), theta, zero=frozen() if zero_points else None)


def _quant_linears(
    linears: Linears,
    schemes: Mapping[str, Scheme],
    of_weights: list[ScaleGroup],
    of_globals: list[ScaleGroup],
    of_inputs: list[ScaleGroup],
) -> dict[str, QuantLinear]:
    weight_group, global_group, input_group = (
        {name: group for group in groups for name in group.members} for groups in (of_weights, of_globals, of_inputs)
    )
    layers = {}
    for name, linear in linears.items():
        weight, input_, global_ = weight_group[name], input_group.get(name), global_group.get(name)
        shapes = [_weight_shape(linears[member]) for member in weight.members]
        layers[name] = QuantLinear(
            linear,
            schemes[name],
            weight=weight.scale if global_ is None else weight.scale._replace(global_=global_.s0),
            input=None if input_ is None else input_.scale,
            weight_numel=sum(weight.spec.elements_per_scale(shape) for shape in shapes),
        )
    return layers


def _use_fp8_gemm(layers: Mapping[str, Any], fast_accum: bool) -> list[str]:
    """Enable the fp8 GEMM where possible; return the names of layers whose scheme allows it but whose shape or device
    does not."""
    able = {name: layer for name, layer in layers.items() if layer.scheme.has_fp8_gemm}
    for layer in able.values():
        layer.fast_accum = fast_accum
        whole = layer.in_features % 16 == 0 and layer.out_features % 16 == 0
        layer.fp8_gemm = whole and (not layer.projections or takes_codes_of_stacks(layer.weight))
    return [name for name, layer in able.items() if not layer.fp8_gemm]
