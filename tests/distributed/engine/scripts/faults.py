"""Launched on every rank: what goes wrong in a run, on purpose.

    scripts/faults.py DIRECTORY [raise]

With ``raise`` only the run ``raise_3``: rank 1 raises in the middle of a step. Else, in one process group: runs that
get signals, a disk that fills up, losses that are infinite; at the end one whose launcher is killed. Each rank writes
what it saw into ``DIRECTORY/<name>_<rank>.json``, rank 0 the weights at the end into ``DIRECTORY/<name>.pt``.
"""

import copy
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.loader import Loader, MicroBatch
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.losses.objective import LossChunk
from launch.exits import clean_exit
from model.ranks import barrier, is_main, rank
from tests.distributed.engine.scripts.train import run, whole_parameters
from tests.lib.garbage import collect

STAGES = {"0_fp32": (0, "float32"), "0": (0, "bfloat16"), "1": (1, "bfloat16"), "2": (2, "bfloat16")}
STAGES |= {"3": (3, "bfloat16"), "3_fp32": (3, "float32")}
STEPS = 6
STOP = 2  # the step in which a signal comes, counted from 1
BALLAST = "ballast"  # a file on the disk that fills up


def with_bad_loss(loop: Loop, steps: tuple[int, ...]) -> Loop:
    """Rank 1's loss is infinite in some steps, its gradients are not."""
    now = 0

    @loop.every(1)
    def count(state: LoopState) -> None:
        nonlocal now
        now = state.step

    @loop.token_loss("bad", weight=1.0)
    def bad(chunk: LossChunk) -> Tensor:
        value = 0.0 * chunk.student.sum(-1)
        return value + torch.inf if rank() == 1 and now in steps else value

    return loop


class Defect(dict):
    """A micro-batch that cannot be brought to the device."""

    def __getitem__(self, name: str) -> Any:
        """Raise instead of giving out the tensors."""
        raise ZeroDivisionError("planted in the middle of a step")


class WithDefect(Loader):
    """The batches of a loader, the second of which is a defect in each step on rank 1."""

    def __init__(self, loader: Loader) -> None:
        self.__dict__ = loader.__dict__

    def step(self, k: int) -> list[MicroBatch]:
        """The micro-batches of step ``k``."""
        batches = super().step(k)
        if rank() == 1:
            batches[1] = Defect(batches[1])
        return batches


def main() -> None:
    """See above."""
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    directory = Path(arguments[0])
    if arguments[1:] == ["raise"]:
        with clean_exit():
            loop = Loop(load_recipe(directory / "raise_3.yaml"))

            @loop.at(1)
            def plant(state: LoopState) -> None:
                state.loader = WithDefect(state.loader)

            loop.run()
        return
    keep(directory, "straight", Loop(load_recipe(directory / "straight.yaml")))
    signalled(directory)
    full_disk(directory)
    fills(directory)
    for name in STAGES:
        not_finite(directory, name)
    stops(directory)
    launcher_dies(directory)


def keep(directory: Path, name: str, loop: Loop) -> None:
    """Run the loop; rank 0 writes what came of it."""
    result = run(loop)
    if is_main():
        torch.save(result, directory / f"{name}.pt")
    collect()


def resumed(loop: Loop) -> Loop:
    """The same run, from its latest checkpoint."""
    return Loop(replace(loop.recipe, train=replace(loop.recipe.train, resume=True)))


def signalled(directory: Path) -> None:
    """Rank 1 alone gets SIGTERM, and SIGUSR1 behind it; then the run goes on."""
    loop = Loop(load_recipe(directory / "signalled.yaml"))
    loop.schedule.at(STOP - 1, lambda state: send(signal.SIGTERM, signal.SIGUSR1) if rank() == 1 else None)
    keep(directory, "signalled_part", loop)
    output = Path(loop.recipe.output_dir)
    write(directory, "signalled", {"export": (output / "export").exists(), "handler": str(handlers())})
    barrier()
    keep(directory, "signalled", resumed(loop))


def send(*signals: int) -> None:
    """Signals to this process."""
    for number in signals:
        os.kill(os.getpid(), number)


def handlers() -> list[Any]:
    """What the signals do now."""
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]


def full_disk(directory: Path) -> None:
    """A checkpoint after each step; those of steps 2, 3 and 4 fail, on other ranks and for other reasons."""
    loop = Loop(load_recipe(directory / "full_disk.yaml"))
    checkpoints = Path(loop.recipe.output_dir) / "checkpoints"
    script, seen = checkpoints / "zero_to_fp32.py", {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @loop.at(1)
    def no_large_files(state: LoopState) -> None:
        if rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    @loop.at(2)
    def a_script_of_deepspeed(state: LoopState) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if is_main():
            script.unlink()
            script.mkdir()

    @loop.at(3)
    def no_space(state: LoopState) -> None:
        barrier()
        if is_main():
            script.rmdir()
            fill(checkpoints)

    @loop.at(4)
    def space(state: LoopState) -> None:
        seen["latest"] = (checkpoints / "latest").read_text()
        seen["left"] = sorted(path.name for path in checkpoints.iterdir())
        barrier()
        if is_main():
            (checkpoints / BALLAST).unlink(missing_ok=True)

    keep(directory, "full_disk", loop)
    seen["end"] = sorted(path.name for path in checkpoints.glob("step_*"))
    write(directory, "full_disk", seen)

    loop = resumed(Loop(replace(loop.recipe, train=replace(loop.recipe.train, steps=STEPS + 1))))
    loop.schedule.at(STEPS, lambda state: fill(checkpoints) if is_main() else None)
    write(directory, "last_save", {"error": failure(loop.run), "latest": (checkpoints / "latest").read_text()})
    barrier()
    if is_main():
        (checkpoints / BALLAST).unlink(missing_ok=True)
    barrier()
    collect()


def fills(directory: Path) -> None:
    """A disk without room in every second step of a run that evaluates, marks and saves after each, and exports."""
    loop = Loop(load_recipe(directory / "fills.yaml"))
    output = Path(loop.recipe.output_dir)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @loop.every(1)
    def every_second(state: LoopState) -> None:
        barrier()
        if is_main():
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            (output / BALLAST).unlink(missing_ok=True)
            if state.step % 2 and state.step < loop.recipe.train.steps:
                fill(output)
        barrier()

    error = failure(loop.run)
    best = json.loads((output / "checkpoints" / "best.json").read_text())
    found = {"error": error, "latest": (output / "checkpoints" / "latest").read_text(), "best": best["name"]}
    found["left"] = sorted(path.name for path in (output / "checkpoints").iterdir())
    found["export"] = sorted(path.name for path in (output / "export").glob("*.safetensors"))
    write(directory, "fills", found)
    collect()


def fill(checkpoints: Path) -> None:
    """Leave no room on the small disk that the test mounted there, if it could."""
    if not os.path.ismount(checkpoints):
        # In its place a directory that takes no new entry would be root's to write all the same.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        return
    try:
        with (checkpoints / BALLAST).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


def not_finite(directory: Path, name: str) -> None:
    """One step of which rank 1's loss is infinite: nothing may move in it."""
    loop = with_bad_loss(Loop(load_recipe(directory / f"not_finite_{name}.yaml")), (1,))
    states: list[tuple[Any, ...]] = []

    def remember(state: LoopState) -> None:
        optimizer = state.session.engine.optimizer
        moments = getattr(optimizer, "optimizer", optimizer).state
        warm = state.quant.scale_steps["weight_scales"]
        states.append((whole_parameters(state.model), copy.deepcopy(list(moments.values())), warm))

    for step in (1, 2):
        loop.schedule.at(step, remember)
    result = run(loop)
    (before, moments, warm), (after, moments_after, warm_after) = states
    write(
        directory,
        f"not_finite_{name}",
        {
            "weights": all(torch.equal(before[key], after[key]) for key in before),
            "moments": [len(moments), all(map(equal, moments, moments_after))],
            "warm_up": [warm, warm_after],
            "skipped": result["skipped"],
            "moved_at_last": any(not torch.equal(after[key], result["weights"][key]) for key in after),
            "finite": all(bool(weight.isfinite().all()) for weight in result["weights"].values()),
        },
    )
    collect()


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether the optimizer's states of one parameter are equal; they are not empty."""
    return len(a) > 0 and all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in a)


def stops(directory: Path) -> None:
    """Infinite losses in one step, and then in more than are allowed in a row."""
    loop = with_bad_loss(Loop(load_recipe(directory / "stops.yaml")), (0, 2, 3, 4))
    write(directory, "stops", {"error": failure(loop.run)})
    collect()


def launcher_dies(directory: Path) -> None:
    """The launcher gets SIGUSR1, for which it has no handler; the ranks run on without it."""
    write(directory, "orphans_begin", {})
    loop = Loop(load_recipe(directory / "orphans.yaml"))
    launcher = os.getppid()

    @loop.at(STOP - 1)
    def kill(state: LoopState) -> None:
        if is_main():
            os.kill(launcher, signal.SIGUSR1)
        while os.getppid() == launcher:
            time.sleep(0.01)

    state = loop.run()
    write(directory, "orphans", {"step": state.step, "saved": state.saved_step})


def failure(action: Callable[[], object]) -> str:
    """Type and text of what the action raises."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def write(directory: Path, name: str, value: Any) -> None:
    """What this rank saw, for the test; whole as soon as it has its name."""
    path = directory / f"{name}_{rank()}.json"
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(value))
    aside.rename(path)


if __name__ == "__main__":
    main()
