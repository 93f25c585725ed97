"""Launched on every rank: jobs of a directory, in their order, in one process group.

    scripts/losses.py DIRECTORY

``DIRECTORY/jobs.json`` lists [kind, recipe]. ``train``: run the loop, with what the recipe's name asks for; ``cache``:
write the recipe's teacher cache; ``refused``: set up and keep the RankError that every rank must get. Rank 0 writes
``<output_dir>/result.pt`` for each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import fake_quant as quant_stats
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.losses.objective import LossChunk
from model.ranks import RankError, gather_objects, is_main, rank
from tests.distributed.engine.scripts.train import run
from tests.distributed.engine.scripts.variants import OnlyRankZero
from tests.lib.garbage import collect
from tools.write_teacher_cache import check_recipe, write_cache


class Gathers(TorchDispatchMode):
    """Sizes of what all-gathers put together, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in str(func):
            output = args[0]
            while isinstance(output, list | tuple):
                output = output[0]
            self.sizes.append(output.numel())
        return func(*args, **(kwargs or {}))


def entropy(chunk: LossChunk) -> torch.Tensor:
    """A user's loss: the student's entropy."""
    log_q = chunk.student.log_softmax(-1)
    return -(log_q.exp() * log_q).sum(-1)


def train(path: Path) -> dict[str, Any]:
    """Run the recipe's loop."""
    loop = Loop(load_recipe(path))
    name = path.stem.partition("_")[0]
    seen: dict[str, Any] = {"clipped": [], "gathers": []}
    if name == "own":
        loop.token_loss("entropy", weight=0.25)(entropy)
    if name == "empty":

        @loop.at(0)
        def mask(state: LoopState) -> None:
            state.loader = OnlyRankZero(state.loader)

    if name == "gathers":
        mode = Gathers()

        @loop.at(2)
        def begin(state: LoopState) -> None:
            mode.__enter__()

        @loop.every(3)
        def end(state: LoopState) -> None:
            mode.__exit__(None, None, None)
            seen["gathers"] = mode.sizes
            state.stop()

    if name in ("self", "original"):

        @loop.at(0)
        def watch(state: LoopState) -> None:
            state.quant.observe(True)

        @loop.every(1)
        def keep(state: LoopState) -> None:
            seen["clipped"].append(quant_stats.measure(state.quant.quantization).clipped_inputs)

    return {**run(loop), "seen": seen}


def refused(path: Path) -> dict[str, Any]:
    """The error of every rank."""
    recipe = load_recipe(path)
    if path.stem == "refused_ondisk1" and rank() == 1:
        recipe.loss.teacher_cache = str(recipe.loss.teacher_cache) + "_elsewhere"
    try:
        Loop(recipe).run()
        error = "no error"
    except RankError as caught:
        error = str(caught)
    return {"errors": gather_objects(error)}


def main() -> None:
    """All jobs."""
    directory = Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
    for kind, name in json.loads((directory / "jobs.json").read_text()):
        path = directory / f"{name}.yaml"
        recipe = load_recipe(path)
        Path(recipe.output_dir).mkdir(exist_ok=True)
        if kind == "cache":
            result: dict[str, Any] = vars(write_cache(recipe, check_recipe(recipe, None)))
        else:
            result = train(path) if kind == "train" else refused(path)
        if is_main():
            torch.save(result, Path(recipe.output_dir) / "result.pt")
        collect()


if __name__ == "__main__":
    main()
