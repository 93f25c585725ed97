"""Launched on every rank: loops with a schedule of actions, as a user's own script would have.

    scripts/variants.py ACTION:RECIPE...

``ACTION`` names what of ``ACTIONS`` the loop of the recipe gets. Rank 0 writes ``<output_dir>/result.pt``: what
``scripts/train.py`` keeps, and under ``seen`` what the action saw.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.loader import Loader, MicroBatch
from engine.loop import Loop, LoopState
from engine.losses.kd import KD_KINDS
from engine.session.probes import needs_mask
from model.ranks import is_main, rank
from model.zero import gathered
from quant.linear import linears_of
from tests.distributed.engine.scripts.train import run, whole_parameters
from tests.lib.garbage import collect
from tests.lib.host_waits import HostWaits

POISONED = 1  # the step of which rank 1's gradients are NaN


def none(loop: Loop, seen: dict[str, Any]) -> None:
    """Nothing beside what the recipe says."""


def losses(loop: Loop, seen: dict[str, Any]) -> None:
    """Another distillation loss in each step."""
    for step, kind in enumerate(KD_KINDS):

        @loop.at(step)
        def choose(state: LoopState, kind: str = kind) -> None:
            state.recipe.loss.kd = kind  # type: ignore[assignment]
            state.recipe.loss.temperature = 2.0 if kind == "kd" else 1.0


def watch_start(loop: Loop, seen: dict[str, Any]) -> None:
    """Watches fake quant start: the loop's own action was added before this one, so it has run."""
    start = loop.recipe.quant.fake_quant_start

    @loop.at(start - 1)
    def before(state: LoopState) -> None:
        seen["before"] = whole_parameters(state.model)

    @loop.at(start)
    def after(state: LoopState) -> None:
        seen["enabled"] = state.quant.enabled
        seen["after"] = whole_parameters(state.model)
        seen["groups"] = {group.owner: group.members for group in state.session.quantization.weight_groups}


def off_and_on(loop: Loop, seen: dict[str, Any]) -> None:
    """Fake quant is switched off in the middle, and on again."""

    @loop.at(2)
    def disable(state: LoopState) -> None:
        state.quant.disable()
        seen["off"] = whole_parameters(state.model)

    @loop.at(4)
    def enable(state: LoopState) -> None:
        seen["on"] = whole_parameters(state.model)
        state.quant.enable()


def poison(loop: Loop, seen: dict[str, Any]) -> None:
    """In one step the gradients of rank 1 alone are NaN from the last norm downwards."""

    @loop.at(POISONED)
    def arm(state: LoopState) -> None:
        seen["before"] = whole_parameters(state.model)
        norm = state.model.get_submodule("model.norm")
        handle = norm.register_full_backward_hook(lambda module, inputs, _: tuple(nan_on_rank_1(g) for g in inputs))

        @loop.every(POISONED + 1)
        def disarm(state: LoopState) -> None:
            handle.remove()
            seen.setdefault("after", whole_parameters(state.model))


def poison_observers(loop: Loop, seen: dict[str, Any]) -> None:
    """In one step, while observers watch, what the first layer gives to the second is NaN on rank 1."""

    @loop.at(POISONED)
    def arm(state: LoopState) -> None:
        layer = state.model.get_submodule("model.layers.1")
        handle = layer.register_forward_pre_hook(lambda module, inputs: (nan_on_rank_1(inputs[0]), *inputs[1:]))
        loop.schedule.at(POISONED + 1, lambda state: handle.remove())


def nan_on_rank_1(gradient: torch.Tensor) -> torch.Tensor:
    """NaN in place of a gradient, on rank 1."""
    return gradient * torch.nan if rank() == 1 else gradient


class OnlyRankZero(Loader):
    """The batches of a loader, of which rank 1 has no target."""

    def __init__(self, loader: Loader) -> None:
        self.__dict__ = loader.__dict__

    def step(self, k: int) -> list[MicroBatch]:
        """The micro-batches of step ``k``."""
        batches = super().step(k)
        if rank() == 1:
            for batch in batches:
                batch["labels"].fill_(-100)
        return batches


def rank_1_without_targets(loop: Loop, seen: dict[str, Any]) -> None:
    """Rank 1 has no token with a target."""

    @loop.at(0)
    def mask(state: LoopState) -> None:
        state.loader = OnlyRankZero(state.loader)


def user(loop: Loop, seen: dict[str, Any]) -> None:
    """What the README shows: an action at a step, one every few steps, values of one's own, an early end."""

    @loop.at(step=1)
    def weights_only(state: LoopState) -> None:
        state.quant.enable(activations=False)

    @loop.every(2)
    def probe(state: LoopState) -> None:
        state.log({"my/step": state.step})

    @loop.every(3)
    def stop(state: LoopState) -> None:
        seen["fake_quant"] = set(state.session.quantization.fake_quant_state().values())
        state.stop()


def without_mask(loop: Loop, seen: dict[str, Any]) -> None:
    """Padded rows have no attention mask if the model needs none, as on a GPU; and what the forward gets."""

    @loop.at(0)
    def ask(state: LoopState) -> None:
        state.session = replace(state.session, mask=needs_mask(state.session, state.loader.samples))
        seen["needs_mask"], seen["given"] = state.session.mask, set()
        state.model.register_forward_pre_hook(lambda *call: seen["given"].update(call[2]), with_kwargs=True)


def host_waits(loop: Loop, seen: dict[str, Any]) -> None:
    """What the second step would wait for, and the third, which measures the quantization."""
    without_mask(loop, seen)
    for step, name in ((1, "plain"), (2, "measured")):
        waits = HostWaits()

        @loop.at(step)
        def begin(state: LoopState, waits: HostWaits = waits) -> None:
            waits.__enter__()

        @loop.every(step + 1)
        def end(state: LoopState, waits: HostWaits = waits, name: str = name) -> None:
            if name not in seen:
                waits.__exit__(None, None, None)
                seen[name] = dict(waits.by_function)


def keep_evaluations(loop: Loop, seen: dict[str, Any]) -> None:
    """What each evaluation found; it comes before the actions of its step."""

    @loop.every(1)
    def keep(state: LoopState) -> None:
        seen.setdefault("evaluations", []).append(dict(state.evaluation))


def used_weights(loop: Loop, seen: dict[str, Any]) -> None:
    """What each quantized Linear multiplies its input with after the last step: its output for the unit matrix."""

    @loop.every(1)
    def keep(state: LoopState) -> None:
        seen["used"], seen["scales"] = {}, {}
        for name, layer in state.session.quantization.layers.items():
            with gathered(layer.parameters(recurse=False)), torch.no_grad():
                quantizes, layer.input_fake_quant = layer.input_fake_quant, False
                experts, units = layer.num_experts, torch.eye(layer.in_features, dtype=layer.weight.dtype)
                ends = torch.arange(1, experts + 1, dtype=torch.int32) * layer.in_features if experts else None
                # Not the module's call, which would gather for a step of ZeRO-3's.
                columns = layer.forward(units.repeat(experts or 1, 1), ends)
                layer.input_fake_quant = quantizes
                whole = columns.view(*layer.weight_shape[:-2], layer.in_features, -1).transpose(-2, -1)
                for part in linears_of(name, layer):
                    seen["used"][part.name] = part.weight(whole).clone()
                    seen["scales"][part.name] = part.scale(layer.weight_scale(), layer.scheme.weights).clone()


def held(loop: Loop, seen: dict[str, Any]) -> None:
    """What each Linear multiplies with, the bytes that this rank holds of each Parameter, and the bits of codes."""
    used_weights(loop, seen)

    @loop.every(1)
    def sizes(state: LoopState) -> None:
        named = dict(state.model.named_parameters())
        seen["bytes"] = {name: getattr(own, "ds_tensor", own).nbytes for name, own in named.items()}
        layers = state.session.quantization.layers.items()
        seen["bits"] = {f"{name}.weight": one.scheme.weights.bits for name, one in layers if one.held is not None}


def changes_frozen(loop: Loop, seen: dict[str, Any]) -> None:
    """A frozen parameter is changed once, in the first step."""

    @loop.at(1)
    def change(state: LoopState) -> None:
        norm = state.model.get_parameter("model.layers.1.input_layernorm.weight")
        with gathered([norm], modifier_rank=0), torch.no_grad():
            norm.mul_(1.5)


ACTIONS: dict[str, Callable[[Loop, dict[str, Any]], None]] = {
    action.__name__: action
    for action in (
        none,
        losses,
        watch_start,
        off_and_on,
        poison,
        poison_observers,
        rank_1_without_targets,
        user,
        used_weights,
        held,
        changes_frozen,
        keep_evaluations,
        without_mask,
        host_waits,
    )
}


def main() -> None:
    """Recipes in the order given, one process group for all of them."""
    for argument in (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")):
        action, _, path = argument.partition(":")
        loop, seen = Loop.from_recipe(path), {}
        ACTIONS[action](loop, seen)
        result = run(loop)
        if is_main():
            torch.save({**result, "seen": seen}, Path(loop.recipe.output_dir) / "result.pt")
        collect()


if __name__ == "__main__":
    main()
