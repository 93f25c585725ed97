"""One process that starts, kills and resumes jobs of two ranks: what ``launch/train.py`` does, forked (see forked.py).

    scripts/kills.py DIRECTORY KILLS SEED STRATEGY...

A strategy is a name in ds_configs/ and a numeric type: ``zero3:bfloat16``. For each a run that nobody disturbs, then
runs that get SIGKILL on both ranks or on one at random moments and are resumed, each strategy's in turn and as often,
until they have been killed ``KILLS`` times in all and the last has come to its end. Every step is evaluated, saved and
perhaps marked as the best. Every run that ended is compared with the undisturbed one: the export, the mark, and the
names of all files. Writes ``DIRECTORY/kills.json``.
"""

import json
import random
import sys
import time
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  imported by the engine at first, which takes 2 s
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

from engine.checkpoint.find import BEST, LATEST
from launch.train import main as train
from tests.distributed.forked import Job
from tests.distributed.fp16_cpu import allow_fp16_on_cpu
from tests.distributed.recipes import write_chats, write_ds_config, write_recipe
from tests.patience import PATIENCE
from tests.tiny import tiny_checkpoint

RANKS = 2
STEPS = 8


def main() -> None:
    """See above."""
    directory, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    strategies = sys.argv[4:]
    rng = random.Random(seed)
    Job(1, lambda: write_recipes(directory, strategies, kills), directory / "setup.log").finish()
    done, runs, seen, of_each = 0, [], [], max(1, kills // len(strategies))
    durations = {strategy: undisturbed(directory, strategy) for strategy in strategies}
    while done < kills:
        strategy = strategies[len(runs) % len(strategies)]
        name = f"killed{len(runs)}_{strategy}"
        moments: list[str] = []
        began = time.monotonic()
        while not run_or_kill(
            directory,
            name,
            pause(rng, durations[strategy]) if done < kills and len(moments) < of_each else None,
            rng.random() < 0.5,
            moments,
        ):
            done += 1
        if not moments:  # the machine has more time for it now
            durations[strategy] = min(durations[strategy], time.monotonic() - began)
        seen += moments
        killed, straight = directory / name, directory / f"straight_{strategy}"
        same = exported(killed) == exported(straight) and best(killed) == best(straight)
        left = sorted(files(killed) ^ files(straight))
        runs.append({"name": name, "kills": len(moments), "same": same, "left": left})
    (directory / "kills.json").write_text(json.dumps({"kills": done, "runs": runs, "latest_when_killed": seen}))


def write_recipes(directory: Path, strategies: list[str], kills: int) -> None:
    """More than can be needed: on a machine that gets faster a run may end before it is killed."""
    chats = write_chats(directory / "chats.jsonl")
    model = tiny_checkpoint(directory / "model", "qwen3")
    names = [("straight", strategy) for strategy in strategies]
    names += [(f"killed{index}", strategies[index % len(strategies)]) for index in range(20 * kills)]
    for run, strategy in names:
        shipped, dtype = strategy.split(":")
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
            quant={"fake_quant_start": 2, "calibration_batches": 0},
            loss={"kd_weight": 0.0, "teacher": None},
        )


def job(directory: Path, name: str, *, resume: bool, export: bool) -> Job:
    """The job that ``deepspeed --num_gpus 2 launch/train.py --config ...`` starts."""

    def rank() -> None:
        allow_fp16_on_cpu()
        sys.argv = ["train.py", "--config", f"{directory}/{name}.yaml"]
        sys.argv += ["--train.resume", str(resume).lower(), "--export.enabled", str(export).lower()]
        train()

    return Job(RANKS, rank, directory / f"{name}.log")


def undisturbed(directory: Path, strategy: str) -> float:
    """Run from the first to the last step; the seconds that it takes."""
    began = time.monotonic()
    job(directory, f"straight_{strategy}", resume=False, export=True).finish()
    return time.monotonic() - began


def run_or_kill(directory: Path, name: str, seconds: float | None, one: bool, moments: list[str]) -> bool:
    """Start the run or go on with it, and kill it, or ``one`` rank, after ``seconds``; whether it ended before that.

    The export is renamed when it is whole, and the last thing that a run does.
    """
    if (directory / name / "export").exists():
        return True
    latest = directory / name / "checkpoints" / LATEST
    running = job(directory, name, resume=latest.exists(), export=True)
    if seconds is None or running.wait(seconds) is not None:
        running.finish()
        return True
    if one:
        running.kill_one()
        if running.wait(PATIENCE) is None:  # the other rank finds out by itself
            running.kill()
            raise RuntimeError(f"a rank did not notice that the other one was gone:\n{running.log.read_text()[-6000:]}")
    else:
        running.kill()
    moments.append(latest.read_text() if latest.exists() else "")
    return False


def pause(rng: random.Random, duration: float) -> float:
    """Until the kill: any moment of a run, less often before its first step, where there is nothing to lose."""
    return duration * rng.triangular(0.2, 1, 0.8)


def best(output: Path) -> str:
    """What is said of the best checkpoint."""
    return (output / "checkpoints" / BEST).read_text()


def files(output: Path) -> set[str]:
    """The names of all files but those of TensorBoard, of which every start makes one."""
    found = (path.relative_to(output) for path in output.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != "tensorboard"}


def exported(output: Path) -> dict[str, bytes]:
    """The files that a user serves."""
    return {path.name: path.read_bytes() for path in sorted((output / "export").iterdir()) if path.suffix != ".md"}


if __name__ == "__main__":
    main()
