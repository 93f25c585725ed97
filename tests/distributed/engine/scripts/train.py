"""Runs of the loop on every rank, and what is kept of them for a test to compare."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.ranks import is_main, reduce_over_ranks
from model.zero import full_numel, full_shape, gathered, is_partitioned, is_whole, local_data, local_range
from tests.lib.fp16_cpu import allow_fp16_on_cpu
from tests.lib.garbage import collect

# Gives a loop what it has beside its recipe. What it puts into the dictionary is in the result, as ``seen``.
Action = Callable[[Loop, dict[str, Any]], None]


class End(NamedTuple):
    """How a run ended: the error ("" without one), whether its first step began, and how many steps were done."""

    text: str
    began: bool
    steps: int


def run_all(jobs: Sequence[tuple[Action | None, Path]]) -> None:
    """Run loops of recipes in one process group; rank 0 writes what came of each to ``<output_dir>/result.pt``."""
    allow_fp16_on_cpu()
    for action, path in jobs:
        loop, seen = Loop(load_recipe(path)), {}
        if action is not None:
            action(loop, seen)
        result = run(loop)
        if is_main():
            torch.save({**result, "seen": seen}, Path(loop.recipe.output_dir) / "result.pt")


def ends_of(directory: Path, plants: Mapping[str, Callable[[Loop], None] | None]) -> dict[str, End]:
    """Run recipes by their names, with what a test does to their loops; the process group outlives an error."""
    ends = {}
    for name, plant in plants.items():
        ends[name] = end_of(directory / f"{name}.yaml", plant)
        collect()
    return ends


def end_of(path: Path, plant: Callable[[Loop], None] | None = None) -> End:
    """Run a recipe to its end or to its error."""
    began: list[LoopState] = []
    done: list[int] = []
    text = ""
    try:
        loop = Loop(load_recipe(path))
        loop.at(0)(began.append)
        loop.every(1)(lambda state: done.append(state.step))
        if plant is not None:
            plant(loop)
        loop.run()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return End(text, bool(began), len(done))


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all Parameters, whole: a collective, put together from the partitions.

    Gathering them would do, but it drops what stage 3 keeps gathered between steps, which the runs are to show.
    """
    whole = {}
    for name, parameter in model.named_parameters():
        if is_whole(parameter):
            whole[name] = local_data(parameter).view(full_shape(parameter)).cpu().clone()
        elif is_partitioned(parameter):
            flat = torch.zeros(full_numel(parameter), dtype=parameter.dtype, device=local_data(parameter).device)
            flat[slice(*local_range(parameter))] = local_data(parameter)
            whole[name] = reduce_over_ranks(flat).view(full_shape(parameter)).cpu()
        else:
            whole[name] = parameter.detach().cpu().clone()
    return whole


def run(loop: Loop) -> dict[str, Any]:
    """Run the loop and return what came of it, the same on every rank; nothing of its engine is left.

    Losses and grad norms of every step, the whole Parameters by name after the last step (in fp32 and fp16 after every
    step too), the scales that the last forward used, and which Parameters the optimizer held.
    """
    result = _run(loop)
    collect()
    return result


def _run(loop: Loop) -> dict[str, Any]:
    losses, norms, scale_norms, skipped, loss_scales, after = [], [], [], [], [], []

    @loop.every(1)
    def keep(state: LoopState) -> None:
        losses.append(state.last.losses)
        norms.append(state.last.grad_norm)
        scale_norms.append(state.last.scale_grad_norm)
        skipped.append(state.session.engine.skipped_steps)
        loss_scales.append(state.last.loss_scale)
        if loop.recipe.model.dtype != "bfloat16":
            after.append(whole_parameters(state.model))

    state = loop.run()
    model, engine = state.session.model, state.session.engine
    names = dict(model.named_parameters())
    with gathered(names.values()):
        weights = {name: parameter.detach().cpu().clone() for name, parameter in names.items()}
        scales = {
            name: layer.weight_scale().detach().cpu().clone()
            for name, layer in state.session.quantization.layers.items()
        }
    result = {
        "losses": losses,
        "norms": norms,
        "scale_norms": scale_norms,
        "skipped": skipped,
        "loss_scales": loss_scales,
        "after": after,
        "weights": weights,
        "scales": scales,
        "inv_freq": {name: b.dtype for name, b in model.named_buffers() if name.endswith("inv_freq")},
        "requires_grad": [name for name, parameter in names.items() if parameter.requires_grad],
        "groups": [group["name"] for group in engine.optimizer.param_groups],
        "optimized": [name for name, parameter in names.items() if id(parameter) in optimized(engine)],
    }
    engine.destroy()
    return result


def optimized(engine: deepspeed.DeepSpeedEngine) -> set[int]:
    """Ids of the Parameters that the optimizer trains: DeepSpeed's optimizers keep them beside their flat copies."""
    optimizer = engine.optimizer
    for attribute in ("bit16_groups", "fp16_groups"):  # stages 1 and 2, stage 3
        if hasattr(optimizer, attribute):
            return {id(parameter) for group in getattr(optimizer, attribute) for parameter in group}
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
