"""Launched on every rank: run the loop on each recipe named, and keep what came of it for the test to compare.

For each recipe, rank 0 writes ``<output_dir>/result.pt``: losses and grad norms of every step, the trained Parameters,
whole, by name, the scales that the last forward used, and which Parameters the optimizer held.
"""

import gc
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from engine.loop import Loop, LoopState
from engine.recipe import load_recipe
from model.ranks import is_main
from model.zero import gathered


def run(loop: Loop) -> dict[str, Any]:
    """Run the loop and return what came of it, the same on every rank; its engine is destroyed then."""
    losses, norms, skipped = [], [], []

    @loop.every(1)
    def keep(state: LoopState) -> None:
        losses.append(state.last.losses)
        norms.append(state.last.grad_norm)
        skipped.append(state.session.engine.skipped_steps)

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
        "skipped": skipped,
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


def main() -> None:
    """Recipes in the order given, one process group for all of them."""
    for path in (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")):
        recipe = load_recipe(path)
        result = run(Loop(recipe))
        if is_main():
            torch.save(result, Path(recipe.output_dir) / "result.pt")
        gc.collect()


if __name__ == "__main__":
    main()
