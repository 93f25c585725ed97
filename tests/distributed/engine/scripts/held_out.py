"""Launched on every rank: runs that evaluate while they train, one that does not, and one that is stopped and resumed.

    scripts/held_out.py DIRECTORY

Rank 0 writes ``<run>.pt``: what ``scripts/train.py`` keeps, and the evaluation that each step began with.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint.save import SaveError
from engine.config.config import Recipe
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.ranks import is_main
from tests.distributed.engine.scripts.train import run
from tests.lib.garbage import collect

OPTIONS: dict[str, Any] = {"weight_decay": 0.25, "eps": 1e-6, "betas": (0.8, 0.9)}
STOP = 3  # steps done when a signal stops the run, between two evaluations


def main() -> None:
    """All runs, one process group for them."""
    directory = Path(sys.argv[1] if not sys.argv[1].startswith("--") else sys.argv[2])
    for name in ("without", "with", "stopped"):
        loop = Loop(load_recipe(directory / f"{name}.yaml"))
        if name == "stopped":
            loop.schedule.at(STOP - 1, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        keep(directory, name, loop)
    recipe = load_recipe(directory / "ended.yaml")
    for resume in (False, True):
        loop = Loop(replace(recipe, train=replace(recipe.train, resume=resume)))
        if not resume:
            loop.schedule.at(recipe.train.steps - 1, lambda state: os.kill(os.getpid(), signal.SIGTERM))
        run(loop)
        collect()
    recipe = load_recipe(directory / "stopped.yaml")
    recipe = replace(recipe, train=replace(recipe.train, resume=True))
    keep(directory, "resumed", Loop(recipe))
    unsaved(directory, recipe)


def unsaved(directory: Path, recipe: Recipe) -> None:
    """Two more steps with other options of the optimizer, whose checkpoint has no place, and an export."""
    last = recipe.train.steps + 2
    loop = Loop(
        replace(
            recipe,
            train=replace(recipe.train, steps=last),
            optim=replace(recipe.optim, **OPTIONS),
            export=replace(recipe.export, enabled=True),
        )
    )
    found: dict[str, Any] = {}

    def spoil(state: LoopState) -> None:
        groups = state.session.engine.optimizer.param_groups
        found["groups"] = {group["name"]: {key: group[key] for key in OPTIONS} for group in groups}
        if is_main():
            taken = Path(recipe.output_dir) / "checkpoints" / f"step_{last:08d}"
            taken.mkdir()  # it is moved aside, to where something is already
            (taken.with_name(f"{taken.name}.replaced.partial") / "something").mkdir(parents=True)

    loop.schedule.at(last - 1, spoil)
    try:
        loop.run()
    except SaveError as error:
        found["error"] = str(error)
    if is_main():
        torch.save(found, directory / "unsaved.pt")


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
    collect()


if __name__ == "__main__":
    main()
