"""Launched on every rank: runs straight through, runs that are interrupted and resumed, and one that is killed.

    scripts/checkpoint.py DIRECTORY CASE...

For each case, ``DIRECTORY/straight_<case>.yaml`` and ``DIRECTORY/resumed_<case>.yaml`` are run; what came of every part
is in ``<part>_<case>.pt``. If the case ``KILLED`` is the last of them, its checkpoints are spoiled then, what each rank
saw of the errors is in ``errors_<rank>.json``, and the last run is killed with SIGKILL in the middle of a step, on rank
1 alone, so the launcher is expected to fail.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.find import LATEST
from engine.config.config import Recipe
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from launch.export import export_checkpoint
from model.ranks import barrier, is_main, rank
from tests.distributed.engine.scripts.train import run
from tests.lib.fp16_cpu import allow_fp16_on_cpu
from tests.lib.garbage import collect

STOPS = (1, 3)  # steps after which the resumed run is interrupted: before and after fake quant starts
KILLED, KILLED_AT = "plain-3", 3
SPOILED = ("nothing", "other_ranks", "cut", "gone", "flipped", "dangling")


def main() -> None:
    """Every case, then the run that is killed."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    directory, cases = Path(arguments[0]), arguments[1:]
    allow_fp16_on_cpu()
    for case in cases:
        keep(directory, f"straight_{case}", Loop(load_recipe(directory / f"straight_{case}.yaml")))
        recipe = load_recipe(directory / f"resumed_{case}.yaml")
        checkpoints = Path(recipe.output_dir) / "checkpoints"
        for part, stop in enumerate((*STOPS, recipe.train.steps)):
            recipe = replace(
                recipe,
                train=replace(recipe.train, resume=part > 0),
                export=replace(recipe.export, enabled=stop == recipe.train.steps),
            )
            loop = Loop(recipe)
            loop.schedule.every(stop, lambda state: state.stop())
            keep(directory, f"part{part}_{case}", loop)
            if part == 0 and is_main():
                os.link(checkpoints / LATEST, checkpoints / "first_latest")  # another name of the very file
            barrier()
        trained = load_recipe(checkpoints / "step_00000005" / "recipe.yaml")
        trained.export.dir = f"{directory}/out_{case}"
        export_checkpoint(trained, checkpoints / "step_00000005")
    if cases[-1] == KILLED:
        spoil_and_kill(directory, recipe, checkpoints)


def spoil_and_kill(directory: Path, recipe: Recipe, checkpoints: Path) -> None:
    """What is refused when a run is to be resumed from its spoiled checkpoints; then the run that is killed."""
    errors: dict[str, str] = {}
    spoil(directory, checkpoints)
    for name in SPOILED:
        errors[name] = failure(Loop(resumed(recipe, directory / name)).run)
    keep(directory, "offered", Loop(resumed(recipe, directory / "flipped", "step_00000004")))
    anew = resumed(recipe, Path(recipe.output_dir))
    errors["not resumed"] = failure(Loop(replace(anew, train=replace(anew.train, resume=False))).run)
    (directory / f"errors_{rank()}.json").write_text(json.dumps(errors))
    barrier()

    loop = Loop(load_recipe(directory / f"killed_{KILLED}.yaml"))

    @loop.every(KILLED_AT)
    def kill(state: LoopState) -> None:
        if rank() == 0:  # the first that the launcher looks at: the other one may have ended by then, too
            (directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    loop.run()


def keep(directory: Path, name: str, loop: Loop) -> None:
    """Run the loop; rank 0 writes what came of it."""
    result = run(loop)
    if is_main():
        torch.save(result, directory / f"{name}.pt")
    collect()


def resumed(recipe: Recipe, output_dir: Path, which: bool | str = True) -> Recipe:
    """The recipe, to be resumed from the checkpoints in ``output_dir``, without an export."""
    export_off = replace(recipe.export, enabled=False)
    train = replace(recipe.train, resume=which)
    return replace(recipe, output_dir=str(output_dir), export=export_off, train=train)


def spoil(directory: Path, checkpoints: Path) -> None:
    """Copies of the checkpoints, with something wrong in the latest."""
    if is_main():
        for name in SPOILED[1:]:
            shutil.copytree(checkpoints, directory / name / "checkpoints")
        state, cut, gone, flipped = (
            directory / name / "checkpoints" / "step_00000005" / file
            for name, file in (
                ("other_ranks", "state.json"),
                ("cut", "rank_1.pt"),
                ("gone", "state.json"),
                ("flipped", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
            )
        )
        state.write_text(json.dumps({**json.loads(state.read_text()), "world_size": 3}))
        cut.write_bytes(cut.read_bytes()[:-1])
        gone.unlink()
        flipped = next(flipped.parent.glob(f"*{flipped.name}"))  # bf16_ may stand before it
        content = bytearray(flipped.read_bytes())
        content[len(content) // 2] ^= 4
        flipped.write_bytes(content)
        (directory / "dangling" / "checkpoints" / LATEST).write_text("step_00000009")
    barrier()


def failure(action: Callable[[], object]) -> str:
    """Type and text of what the action raises."""
    try:
        action()
    except Exception as error:
        collect()
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


if __name__ == "__main__":
    main()
