"""Launched on every rank: runs that evaluate while they train, one that does not, and one that is stopped and resumed.

    held_out_script.py DIRECTORY

Rank 0 writes ``<run>.pt``: what ``train_script.py`` keeps, and the evaluation that each step began with.
"""

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.loop import Loop, LoopState
from engine.recipe import load_recipe
from model.ranks import is_main
from tests.distributed.train_script import run

STOP = 3  # steps done when a signal stops the run, between two evaluations


def main() -> None:
    """All runs, one process group for them."""
    directory = Path(sys.argv[1] if not sys.argv[1].startswith("--") else sys.argv[2])
    for name in ("without", "with", "stopped"):
        loop = Loop(load_recipe(directory / f"{name}.yaml"))
        if name == "stopped":
            loop.schedule.at(STOP - 1, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        keep(directory, name, loop)
    recipe = load_recipe(directory / "stopped.yaml")
    keep(directory, "resumed", Loop(replace(recipe, train=replace(recipe.train, resume=True))))


def keep(directory: Path, name: str, loop: Loop) -> None:
    """Run the loop; rank 0 writes what came of it."""
    evaluations: list[dict[str, Any]] = []

    def look(state: LoopState) -> None:
        evaluations.append(dict(state.evaluation))

    for step in range(loop.recipe.train.steps):
        loop.schedule.at(step, look)
    result = run(loop)
    if is_main():
        torch.save({**result, "evaluations": evaluations}, directory / f"{name}.pt")
    gc.collect()


if __name__ == "__main__":
    main()
