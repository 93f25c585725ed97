"""Launched on every rank: what a script, a disk or the data does to a run on a bad day.

    scripts/bad_days.py DIRECTORY

In one process group. Each rank writes ``DIRECTORY/<name>_<rank>.json``: how the run of that name ended, and after how
many steps.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.losses.objective import LossChunk
from model.ranks import RankError, barrier, is_main, rank, shut_down
from tests.lib.garbage import collect


def rates(loop: Loop) -> None:
    """A condition that holds on rank 1 alone changes a rate, which no collective shows."""
    loop.when(lambda state: rank() == 1)(lambda state: state.set_peak_rates(weights=0.5))


def weights(loop: Loop) -> None:
    """An action sets another loss weight on each rank."""
    loop.at(1)(lambda state: state.set_loss_weights(lm=1.0 + rank()))


def layers(loop: Loop) -> None:
    """An action switches fake quant off on rank 0 alone."""
    loop.at(1)(lambda state: state.session.quantization.set_fake_quant(False, False) if is_main() else None)


def stops(loop: Loop) -> None:
    """Rank 0 ends its run after the first step, rank 1 does not."""
    loop.every(1)(lambda state: state.stop() if is_main() else None)


def last(loop: Loop) -> None:
    """The ranks part after the last step: there is no other to find it."""
    loop.every(loop.recipe.train.steps)(lambda state: state.set_peak_rates(weights=float(rank())))


def same(loop: Loop) -> None:
    """Both ranks do the same, and a condition is met: nothing is wrong. Counts the reductions of a step."""
    loop.when(lambda state: True)(lambda state: state.set_peak_rates(weights=1e-4))
    counted = dist.all_reduce

    def count(tensor: Tensor, *arguments: object, **options: object) -> object:
        REDUCTIONS.append(f"{tensor.dtype} {tensor.numel()}")
        return counted(tensor, *arguments, **options)

    @loop.at(1)
    def begin(state: LoopState) -> None:
        dist.all_reduce = count  # the very function that model.ranks looks up

    @loop.every(2)
    def end(state: LoopState) -> None:
        dist.all_reduce = counted


def skipped(loop: Loop) -> None:
    """Every loss is infinite, in fewer steps than end a run by themselves."""

    @loop.token_loss("bad", weight=1.0)
    def bad(chunk: LossChunk) -> Tensor:
        return 0.0 * chunk.student.sum(-1) + torch.inf


def replaced(loop: Loop) -> None:
    """After the first step the output directory is somewhere else, and a file stands in its place."""
    output = Path(loop.recipe.output_dir)

    @loop.at(1)
    def replace(state: LoopState) -> None:
        if is_main():
            output.rename(output.with_name(f"{output.name}_moved"))
            output.touch()
        barrier()


def read_only(loop: Loop) -> None:
    """After the first step nothing can be written any more, where mounting is allowed."""
    output = loop.recipe.output_dir

    @loop.at(1)
    def remount(state: LoopState) -> None:
        if is_main() and subprocess.run(["mount", "--bind", output, output], check=False).returncode == 0:
            subprocess.run(["mount", "-o", "remount,bind,ro", output], check=False)
        barrier()


def uncurved(loop: Loop) -> None:
    """After the first step the curves are gone."""

    @loop.at(1)
    def remove(state: LoopState) -> None:
        if is_main():
            curves = Path(loop.recipe.output_dir) / "tensorboard"
            while curves.exists():  # their own thread may write another file while they are removed
                shutil.rmtree(curves, ignore_errors=True)
        barrier()


RUNS: dict[str, Callable[[Loop], None]] = {
    action.__name__: action
    for action in (rates, weights, layers, stops, last, same, skipped, replaced, read_only, uncurved)
}
REDUCTIONS: list[str] = []


def main() -> None:
    """Every run, in the order of the table."""
    (directory,) = (Path(argument) for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    for name, plant in RUNS.items():
        steps: list[int] = []
        text = "nothing was raised"
        try:
            loop = Loop(load_recipe(directory / f"{name}.yaml"))
            plant(loop)
            loop.every(1)(lambda state, steps=steps: steps.append(state.step))
            loop.run()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        found = {"text": text, "steps": len(steps), "reductions": REDUCTIONS if name == "same" else []}
        (directory / f"{name}_{rank()}.json").write_text(json.dumps(found))
        collect()
    number = rank()
    shut_down()
    try:
        Loop(load_recipe(directory / "same.yaml")).run()
    except RankError as error:
        (directory / f"again_{number}.json").write_text(json.dumps({"text": str(error)}))


if __name__ == "__main__":
    main()
