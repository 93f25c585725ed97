"""What :func:`quant.prepare` did to a model: its quantised layers and scales, and the switches of a schedule."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from quant.calibrate import Ranges
from quant.kv_cache import QuantCache
from quant.linear import QuantLayer
from quant.rules import examples
from quant.scale_groups import ScaleGroup


@dataclass(frozen=True)
class Quantization:
    """What :func:`quant.prepare` did to a model, and the switches.

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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block nothing is fake-quantised and no input is watched, unless the block switches it on.

        After it, also where it raises, the switches are as they were, the same observers watch the same inputs, and
        they have seen what they had seen. Nothing is copied or read from the device.
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
        """What the observers have seen so far, by owner of the group; :meth:`restore_seen` takes it back.

        Nothing is copied or read from the device: an observer replaces its tensors, it never writes into them.
        """
        return {group.owner: dict(vars(group.observer)) for group in self.input_groups if group.observer is not None}

    def restore_seen(self, seen: Mapping[str, dict[str, Any]]) -> None:
        """Forget what the observers have seen since :meth:`seen`."""
        for group in self.input_groups:
            if group.observer is not None:
                vars(group.observer).update(seen[group.owner])

    def state_dict(self) -> dict[str, Any]:
        """What is fake-quantised, whether inputs are watched, and what the observers have seen, by owner of the group.

        Plain values and tensors on the CPU, for a checkpoint.
        """
        return {
            "fake_quant": self.fake_quant_state(),
            "observing": self.observing,
            "observers": {
                group.owner: group.observer.state_dict() for group in self.input_groups if group.observer is not None
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.restore_fake_quant(state["fake_quant"])
        self.observe(state["observing"])
        for group in self.input_groups:
            if group.observer is not None:
                group.observer.load_state_dict(state["observers"][group.owner])
