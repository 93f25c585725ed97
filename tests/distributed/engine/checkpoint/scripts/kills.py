"""One process that starts, kills and resumes jobs of two ranks: what ``launch/train.py`` does, forked (see forked.py).

    scripts/kills.py DIRECTORY KILLS SEED STRATEGY...

A strategy is a name in ds_configs/ and a numeric type: ``zero3:bfloat16``. For each a run that nobody disturbs, then
runs that get SIGKILL on both ranks, on one or on their launcher, at a random moment or while they calibrate, save, mark
the best, evaluate or export, and are resumed, each strategy's in turn and as often, until they have been killed
``KILLS`` times in all and the last has come to its end. Every step is evaluated, saved and perhaps marked as the best.
Every run that ended is compared with the undisturbed one: the export, the mark, and the names of all files. Writes
``DIRECTORY/kills.json``.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  imported by the engine at first, which takes 2 s
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from engine.checkpoint.find import BEST, LATEST
from engine.checkpoint.find import STEP_DIRECTORIES as STEP_DIRECTORIES
from launch.train import main as train
from tests.lib.forked import Job
from tests.lib.fp16_cpu import allow_fp16_on_cpu
from tests.lib.patience import PATIENCE
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.tiny import tiny_checkpoint

RANKS = 2
STEPS = 6
WHO = ("both", "one", "launcher")
MET = "data: "  # what rank 0 says first once the ranks have met
WHEN = ("some time", "calibrate", "save", "mark", "evaluate", "export")


def main() -> None:
    """See above."""
    directory, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    strategies = sys.argv[4:]
    rng = random.Random(seed)
    Job(1, lambda: write_recipes(directory, strategies, kills), directory / "setup.log").finish()
    planned = list(product(WHO, WHEN))
    rng.shuffle(planned)
    runs, seen, of_each = [], [], max(1, kills // len(strategies))
    durations = {strategy: undisturbed(directory, strategy) for strategy in strategies}
    while len(seen) < kills:
        strategy = strategies[len(runs) % len(strategies)]
        name = f"killed{len(runs)}_{strategy}"
        began, before = time.monotonic(), len(seen)
        while not (directory / name / "export").exists():
            if len(seen) == kills or len(seen) - before == of_each:
                start(directory, name).finish()
                continue
            who, when = next(
                plan for plan in planned if plan[1] != "calibrate" or at_start(strategies, strategy, directory / name)
            )
            moment = moments(directory / name, directory / f"{name}.log", rng, durations[strategy])[when]
            if run_and_kill(start(directory, name), who, moment):
                seen.append([who, when])
            planned.remove((who, when))
            planned.append((who, when))  # also where its moment did not come
        if len(seen) == before:  # the machine has more time for it now
            durations[strategy] = min(durations[strategy], time.monotonic() - began)
        killed, straight = directory / name, directory / f"straight_{strategy}"
        same = {"export": exported(killed) == exported(straight), "best": best(killed) == best(straight)}
        left = sorted(files(killed) ^ files(straight))
        runs.append({"name": name, "kills": len(seen) - before, "same": same, "left": left})
        # After each, so that a campaign that is cut short says how far it came.
        (directory / "kills.json").write_text(json.dumps({"runs": runs, "kills": seen, "when": WHEN}))


def write_recipes(directory: Path, strategies: list[str], kills: int) -> None:
    """More than can be needed: on a machine that gets faster a run may end before it is killed."""
    chats = write_chats(directory / "chats.jsonl")
    model = tiny_checkpoint(directory / "model", "qwen3")
    names = [("straight", strategy) for strategy in strategies]
    names += [(f"killed{index}", strategies[index % len(strategies)]) for index in range(20 * kills)]
    for run, strategy in names:
        shipped, dtype = strategy.split(":")
        calibrates = calibrates_first(strategies, strategy)
        write_recipe(
            directory,
            f"{run}_{strategy}",
            model,
            chats,
            stage=0,
            dtype=dtype,
            # In fp16 some steps overflow, and the loss scale moves up and down over the checkpoints.
            deepspeed=write_ds_config(
                directory, strategy, shipped, fp16={"initial_scale_power": 15, "loss_scale_window": 2}
            ),
            data={"held_out": 4},
            eval={"every": 1},
            train={"steps": STEPS, "gradient_accumulation_steps": 2, "checkpoint_every": 1},
            quant={"fake_quant_start": 0 if calibrates else 2, "calibration_batches": 4 if calibrates else 0},
            loss={"kd_weight": 0.0, "teacher": None},
            export={"enabled": True},
        )


def calibrates_first(strategies: list[str], strategy: str) -> bool:
    """Whether runs of a strategy calibrate before the first step; the others take scales from what steps have seen."""
    return strategies.index(strategy) % 2 == 0


def at_start(strategies: list[str], strategy: str, output: Path) -> bool:
    """Whether a run calibrates when it is started now: one that goes on from a checkpoint has its scales."""
    return calibrates_first(strategies, strategy) and not has_checkpoint(output)


def has_checkpoint(output: Path) -> bool:
    """Whether there is something to go on from."""
    checkpoints = output / "checkpoints"
    return (checkpoints / LATEST).exists() or any(checkpoints.glob(STEP_DIRECTORIES))


def start(directory: Path, name: str) -> Job:
    """The job that ``deepspeed --num_gpus 2 launch/train.py --config ...`` starts; it goes on where there is something.

    The export is renamed when it is whole, and the last thing that a run does.
    """
    resume = has_checkpoint(directory / name)

    def rank() -> None:
        allow_fp16_on_cpu()
        sys.argv = ["train.py", "--config", f"{directory}/{name}.yaml"]
        sys.argv += ["--train.resume", str(resume).lower()]
        train()

    return Job(RANKS, rank, directory / f"{name}.log")


def undisturbed(directory: Path, strategy: str) -> float:
    """Run from the first to the last step; the seconds that it takes."""
    began = time.monotonic()
    start(directory, f"straight_{strategy}").finish()
    return time.monotonic() - began


def moments(output: Path, log: Path, rng: random.Random, duration: float) -> dict[str, Callable[[], bool]]:
    """For each of WHEN, whether it is now."""
    began, checkpoints, said = time.monotonic(), output / "checkpoints", log.stat().st_size if log.exists() else 0
    # Any moment of a run, less often before its first step, where there is nothing to lose.
    pause, later = duration * rng.triangular(0.2, 1, 0.8), 0.2 * rng.random()
    before = {name: stamp(checkpoints / name) for name in (LATEST, BEST)}
    saves = rng.randrange(1, STEPS)

    def saved() -> bool:
        """Whether a checkpoint was written a moment ago: then comes a step, and its evaluation."""
        now = stamp(checkpoints / LATEST)
        return now != before[LATEST] and time.time() > now + later

    return {
        "some time": lambda: time.monotonic() > began + pause,
        "calibrate": lambda: log.exists() and "calibrating" in log.read_text()[said:],
        "save": lambda: any(checkpoints.glob(f"step_0000000[{saves}-9].partial/*")),
        "mark": lambda: stamp(checkpoints / BEST) != before[BEST],
        "evaluate": saved,
        "export": lambda: any(output.glob("export.tmp-*/*")),
    }


def stamp(path: Path) -> float:
    """When the file was written, 0 where there is none."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def run_and_kill(job: Job, who: str, now: Callable[[], bool]) -> bool:
    """Kill both ranks of a job, one or its launcher at the first moment for which ``now``; False if it ended before."""
    while not now():
        if job.over():
            job.finish()
            return False
        time.sleep(0.002)
    # A rank that still waits for one that is gone does so for half an hour; the launcher would end it.
    if who == "both" or (who == "one" and MET not in job.text()):
        job.kill()
        return True
    if who == "launcher":  # as with a signal: a save, exit code 0
        job.kill_launcher()
        job.finish()
        return True
    job.kill_one()
    if job.wait(PATIENCE) is None:  # the other rank finds out by itself
        job.kill()
        raise RuntimeError(f"a rank did not notice that the other one was gone:\n{job.log.read_text()[-6000:]}")
    return True


def best(output: Path) -> str:
    """What is said of the best checkpoint."""
    return (output / "checkpoints" / BEST).read_text()


def files(output: Path) -> set[str]:
    """The names of all files but those of TensorBoard, of which every start makes one, and what was measured of memory,
    of which one without a step makes none."""
    found = (path.relative_to(output) for path in output.rglob("*") if path.is_file() and path.name != "memory.json")
    return {str(path) for path in found if path.parts[0] != "tensorboard"}


def exported(output: Path) -> dict[str, bytes]:
    """The files that a user serves."""
    return {path.name: path.read_bytes() for path in sorted((output / "export").iterdir()) if path.suffix != ".md"}


if __name__ == "__main__":
    main()
