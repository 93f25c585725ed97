"""SIGKILL at random moments: nothing is lost. The run that goes on ends with the files of the one undisturbed, its best
checkpoint marked like there, and nothing left behind."""

import json
import random
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from engine.checkpoint.find import BEST, LATEST, STEP_DIRECTORIES
from launch.train import main as train
from tests.lib.forked import Job
from tests.lib.fp16_cpu import allow_fp16_on_cpu
from tests.lib.patience import PATIENCE
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats, write_ds_config, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

# Each as users name it, and both kinds of 16-bit numbers.
LADDER = (
    *(f"{name}:bfloat16" for name in sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))),
    *(f"zero{stage}:float16" for stage in range(4)),
)
RANKS, STEPS = 2, 6
WHO = ("both", "one", "launcher")
MET = "data: "  # what rank 0 says first once the ranks have met
WHEN = ("some time", "calibrate", "save", "mark", "evaluate", "export")


@pytest.mark.parametrize(
    ("kills", "strategies"),
    [
        pytest.param(3, ("zero3_hpz:bfloat16",), id="3"),
        pytest.param(60, LADDER, id="60", marks=pytest.mark.full),
    ],
)
def test_killed_at_random_moments_the_run_goes_on_to_the_same_export(tmp_path, seed, kills, strategies):
    program = f"from {__name__} import main; main()"
    result = run_python(program, tmp_path, kills, seed, *strategies, timeout=PATIENCE * kills)
    assert result.returncode == 0, f"seed {seed}\n{result.stderr[-8000:]}"
    found = json.loads((tmp_path / "kills.json").read_text())
    assert len(found["kills"]) == kills == sum(run["kills"] for run in found["runs"])
    # Which come depends on the machine, but of many none stays out.
    assert kills < 60 or {when for _, when in found["kills"]} == set(WHEN), found["kills"]
    assert all(run["same"] and not run["left"] for run in found["runs"]), f"seed {seed}: {found}"


def main() -> None:
    """Start, kill and resume jobs of two ranks, forked from this process, until there were so many kills.

    Of each strategy first a run that is not disturbed; then runs that get SIGKILL on both ranks, on one or on their
    launcher, at a random moment or while they calibrate, save, mark the best, evaluate or export, and are resumed. Each
    that came to its end is compared with the undisturbed one.
    """
    directory, kills, seed, strategies = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    rng = random.Random(seed)
    Job(1, lambda: write_recipes(directory, strategies, kills), directory / "setup.log").finish()
    plans = list(product(WHO, WHEN))
    rng.shuffle(plans)
    runs, seen, durations = [], [], {}
    for strategy in strategies:
        began = time.monotonic()
        start(directory, f"straight_{strategy}").finish()
        durations[strategy] = time.monotonic() - began
    while len(seen) < kills:
        strategy = strategies[len(runs) % len(strategies)]
        name = f"killed{len(runs)}_{strategy}"
        killed, straight = directory / name, directory / f"straight_{strategy}"
        of_this, most = 0, max(1, kills // len(strategies))
        while of_this < most and len(seen) < kills and not (killed / "export").exists():
            plans.append(plan := plans.pop(0))  # also where its moment does not come
            moment = moments(killed, directory / f"{name}.log", rng, durations[strategy])[plan[1]]
            if run_and_kill(start(directory, name), plan[0], moment):
                seen.append(plan)
                of_this += 1
        if not (killed / "export").exists():
            start(directory, name).finish()
        if not of_this:  # the machine has more time for it now
            durations[strategy] *= 0.8
        same = exported(killed) == exported(straight) and best(killed) == best(straight)
        runs.append({"name": name, "kills": of_this, "same": same, "left": sorted(files(killed) ^ files(straight))})
        # After each, so that a campaign that is cut short says how far it came.
        (directory / "kills.json").write_text(json.dumps({"runs": runs, "kills": seen}))


def write_recipes(directory: Path, strategies: list[str], kills: int) -> None:
    """More than can be needed: on a machine that gets faster a run may end before it is killed."""
    model, chats = tiny_checkpoint(directory / "model"), write_chats(directory / "chats.jsonl")
    names = [("straight", strategy) for strategy in strategies]
    names += [(f"killed{index}", strategies[index % len(strategies)]) for index in range(20 * kills)]
    for run, strategy in names:
        shipped, dtype = strategy.split(":")
        # The others take scales from what steps have seen.
        calibrates = strategies.index(strategy) % 2 == 0
        # In fp16 some steps overflow, and the loss scale moves up and down over the checkpoints.
        fp16 = {"initial_scale_power": 15, "loss_scale_window": 2}
        write_recipe(
            directory,
            f"{run}_{strategy}",
            model,
            chats,
            stage=0,
            dtype=dtype,
            deepspeed=write_ds_config(directory, strategy, shipped, fp16=fp16),
            data={"held_out": 4},
            eval={"every": 1},
            train={"steps": STEPS, "gradient_accumulation_steps": 2, "checkpoint_every": 1},
            quant={"fake_quant_start": 0 if calibrates else 2, "calibration_batches": 4 if calibrates else 0},
            loss=NO_TEACHER,
            export={"enabled": True},
        )


def has_checkpoint(output: Path) -> bool:
    """Return if there is something to go on from."""
    checkpoints = output / "checkpoints"
    return (checkpoints / LATEST).exists() or any(checkpoints.glob(STEP_DIRECTORIES))


def start(directory: Path, name: str) -> Job:
    """The job that ``deepspeed --num_gpus 2 launch/train.py --config ...`` starts; it goes on where there is something.

    The export is renamed when it is whole, and the last thing that a run does.
    """
    resume = str(has_checkpoint(directory / name)).lower()

    def rank() -> None:
        allow_fp16_on_cpu()
        sys.argv = ["train.py", "--config", f"{directory}/{name}.yaml", "--train.resume", resume]
        train()

    return Job(RANKS, rank, directory / f"{name}.log")


def moments(output: Path, log: Path, rng: random.Random, duration: float) -> dict[str, Callable[[], bool]]:
    """For each of WHEN, whether it is now."""
    began, checkpoints, said = time.monotonic(), output / "checkpoints", log.stat().st_size if log.exists() else 0
    # Any moment of a run, less often before its first step, where there is nothing to lose.
    pause, later = duration * rng.triangular(0.2, 1, 0.8), 0.2 * rng.random()
    before = {name: stamp(checkpoints / name) for name in (LATEST, BEST)}
    saves = rng.randrange(1, STEPS)

    def saved() -> bool:
        """Return if a checkpoint was written a moment ago: then comes a step, and its evaluation."""
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
    elif who == "launcher":  # as with a signal: a save, exit code 0
        job.kill_launcher()
        job.finish()
    else:
        job.kill_one()
        if job.wait(PATIENCE) is None:  # the other rank must notice
            job.kill()
            raise RuntimeError(f"a rank did not notice that the other one was gone:\n{job.log.read_text()[-6000:]}")
    return True


def best(output: Path) -> str:
    return (output / "checkpoints" / BEST).read_text()


def files(output: Path) -> set[str]:
    """The names of all files but those of TensorBoard, of which every start makes one, and what was measured of memory,
    of which one without a step makes none."""
    found = (path.relative_to(output) for path in output.rglob("*") if path.is_file() and path.name != "memory.json")
    return {str(path) for path in found if path.parts[0] != "tensorboard"}


def exported(output: Path) -> dict[str, bytes]:
    """The files that a user serves."""
    return {path.name: path.read_bytes() for path in sorted((output / "export").iterdir()) if path.suffix != ".md"}
