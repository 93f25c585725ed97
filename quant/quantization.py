"""Result of :func:`quant.prepare`: the quantized layers of a model, their shared scales, and the switches of a
schedule.

Serving keeps one scale for the layers it fuses (:mod:`quant.rules`) and one scale for their input; a fused MoE kernel
keeps one input scale per layer for all experts. With separate scales in training, serving would requantize with the
largest scale and compute something else than was trained. So the same groups share one Parameter in training:

* a weight scale per tensor is shared by q, k and v, and by gate and up (of one expert in an MoE); finer scales belong
  to single rows and are never shared;
* a static input scale, or the global scale of dynamic scales (NVFP4), is shared by q, k and v, and by gate and up. All
  experts of an MoE layer share one such scale for gate and up, and another for down.

If the experts of a layer are one stack, its scales are also one Parameter with an entry per expert. The Parameter is
registered on every member and owned by the first one in module order, so ``model.parameters()`` lists it once. A group
that is only partly quantized is an error, as it could not be served as trained.

Keys and values each have one scale per layer, never shared; their groups are listed with the groups of inputs.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.kv_cache import QuantCache
from quant.linear import QuantLayer, StackedLinear
from quant.observers import Observer, Ranges
from quant.rules import examples
from quant.scale import Scale
from quant.spec import FP8_TENSOR, Scheme, TensorSpec

Linears = dict[str, nn.Linear | StackedLinear]


@dataclass(frozen=True)
class ScaleGroup:
    """Scale and the layers that share it.

    Attributes:
        owner: name of the first member in module order; the scale's Parameters have its name in ``named_parameters()``.
        members: names of all layers (or the quantizer of keys, or of values) that share the scale, in module order.
        spec: number format of the scaled tensors.
        scale: scale made of Parameters. s0 has the shape given by ``spec``, ``(1,)`` for an input; s0 and zero points
            are NaN until filled. theta has the model's dtype and starts at 0. The global scale of a weight with e4m3
            scales is the s0 of a separate group. For an input with dynamic e4m3 scales, the global scale is the only
            s0.
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
        """Learned part of the scale, None for a static scale."""
        return self.scale.theta  # type: ignore[return-value]

    @property
    def zero(self) -> nn.Parameter | None:
        """Zero points stored with the scale, None if ``spec`` has none."""
        return self.scale.zero  # type: ignore[return-value]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters to gather for reading the scale."""
        return [parameter for parameter in (self.s0, self.theta, self.zero) if parameter is not None]


def weight_shape(linear: nn.Linear | StackedLinear) -> tuple[int, ...]:
    """Return ``(out, in)``, or ``(E, out, in)`` for a stack, even if the weight is a partition."""
    stack = (linear.num_experts,) if isinstance(linear, StackedLinear) else ()
    return (*stack, linear.out_features, linear.in_features)


def weight_groups(
    sets: list[list[str]], linears: Linears, schemes: Mapping[str, Scheme], learn: bool
) -> tuple[list[ScaleGroup], list[ScaleGroup]]:
    """Build the scale groups of weights, and the groups of their global scales.

    Args:
        sets: names of the layers that serving fuses, see :func:`quant.rules.fused_sets`.
        linears: the layers by name.
        schemes: their schemes by name.
        learn: give the scales a theta; global scales and zero points never have one.

    Raises:
        ValueError: a weight does not divide into the groups of its scheme.
    """
    groups, global_groups = [], []
    for members in sets:
        spec = schemes[members[0]].weights
        for some in [members] if spec.granularity == "tensor" else [[name] for name in members]:
            owner = linears[some[0]]
            scale = _new_scale(owner, spec.scale_shape(weight_shape(owner)), learn, zero_points=spec.has_zero_points)
            groups.append(ScaleGroup(some[0], some, spec, scale))
        if spec.scale_format == "e4m3":
            owner = linears[members[0]]
            scale = _new_scale(owner, FP8_TENSOR.scale_shape(weight_shape(owner)), False)
            global_groups.append(ScaleGroup(members[0], members, spec, scale))
    return groups, global_groups


def embedding_group(name: str, embedding: nn.Embedding, spec: TensorSpec, learn: bool) -> ScaleGroup:
    """Build the scale group of an embedding's table, never shared.

    Raises:
        ValueError: the table does not divide into the groups of ``spec``.
    """
    shape = spec.scale_shape((embedding.num_embeddings, embedding.embedding_dim))
    return ScaleGroup(name, [name], spec, _new_scale(embedding, shape, learn))


def input_groups(
    sets: list[list[str]], linears: Linears, schemes: Mapping[str, Scheme], learn: bool, ranges: Ranges
) -> list[ScaleGroup]:
    """Build the scale groups of inputs, for each set (see :func:`quant.rules.fused_sets`) whose scheme stores an input
    scale.

    Raises:
        ValueError: layers of a set read inputs of different widths.
    """
    groups = []
    for members in sets:
        spec = schemes[members[0]].stored_input
        if spec is not None:
            _check_same_width(members, linears)
            scale = _new_scale(linears[members[0]], (1,), learn and not spec.dynamic)
            groups.append(ScaleGroup(members[0], members, spec, scale, _observer(spec, ranges)))
    return groups


def _check_same_width(members: list[str], linears: Linears) -> None:
    widths = {name: linears[name].in_features for name in members}
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"layers that share an input scale read inputs of different widths: {widths}; exempt all of them"
        )


def cache_group(name: str, cache: QuantCache, ranges: Ranges) -> ScaleGroup:
    """Build the scale group of the keys, or of the values, of one layer."""
    scale = Scale(cache.input_s0, cache.input_theta)
    return ScaleGroup(name, [name], cache.spec, scale, _observer(cache.spec, ranges))


def _observer(spec: TensorSpec, ranges: Ranges) -> Observer:
    return Observer(spec, histogram=ranges.inputs != "absmax")


def _new_scale(
    owner: nn.Linear | StackedLinear | nn.Embedding,
    shape: tuple[int, ...],
    learn: bool,
    *,
    zero_points: bool = False,
) -> Scale:
    """Create a frozen fp32 scale of NaNs, optionally with a theta of zeros in the weight's dtype and zero points of
    NaNs."""
    device, dtype = owner.weight.device, owner.weight.dtype

    def frozen() -> nn.Parameter:
        return nn.Parameter(torch.full(shape, torch.nan, dtype=torch.float32, device=device), requires_grad=False)

    theta = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) if learn else None
    return Scale(frozen(), theta, zero=frozen() if zero_points else None)


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
        ranges: method to choose first scales.
        simulated: names of the layers that simulate although the fp8 GEMM was requested.
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

    def set_fake_quant(self, weights: bool, activations: bool, pattern: str | None = None) -> None:
        """Switch fake quantization of weights, and of inputs, keys and values that the scheme quantizes.

        Args:
            weights: fake-quantize weights from now on.
            activations: fake-quantize inputs, keys and values; no effect if the scheme leaves them unquantized.
            pattern: regex on full names of the layers to switch; None for all.

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
        """Find the names of the layers (and quantizers of keys and values) that fully match the regex; all for None.

        Raises:
            ValueError: the pattern matches no layer.
        """
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
        """Update the consumers of shared inputs, and call ``when_changed``, after the switches changed."""
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
        """Switch off fake quantization and observation inside the block, unless the block switches them on.

        Afterwards, also after an exception, switches, observers and their statistics are restored. Nothing is copied or
        read from the device.
        """
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
        """Return the observers' statistics by owner of the group, for :meth:`restore_seen`.

        Nothing is copied or read from the device: an observer replaces its tensors and never writes into them.
        """
        return {group.owner: dict(vars(group.observer)) for group in self.input_groups if group.observer is not None}

    def restore_seen(self, seen: Mapping[str, dict[str, Any]]) -> None:
        """Reset the observers to statistics returned by :meth:`seen`."""
        for group in self.input_groups:
            if group.observer is not None:
                vars(group.observer).update(seen[group.owner])

    def state_dict(self) -> dict[str, Any]:
        """Return the switches and the observers' statistics, by owner of the group, as plain values and CPU tensors for
        a checkpoint."""
        return {
            "fake_quant": self.fake_quant_state(),
            "observing": self.observing,
            "observers": {
                group.owner: group.observer.state_dict() for group in self.input_groups if group.observer is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self.restore_fake_quant(state["fake_quant"])
        self.observe(state["observing"])
        for group in self.input_groups:
            if group.observer is not None:
                group.observer.load_state_dict(state["observers"][group.owner])
