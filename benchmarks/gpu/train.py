"""Ten steps of real training under ZeRO-3, one rank: seconds per step, tokens per second, peak memory.

    python benchmarks/gpu/train.py NAME --work DIRECTORY [--profile] [--dry] [--section.field value ...]

The recipe is the same for all but for the options behind, which are those of launch/train.py. ``--profile`` takes two
of the steps below torch's profiler (kernel_times.py), which are left out of the times.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import yaml

from benchmarks.gpu.kernel_times import Profile
from benchmarks.timing import synchronize
from engine.loop import Loop
from engine.state import LoopState
from launch.exits import clean_exit, recipe_or_exit

STEPS, FIRST = 10, 2  # steps, and how many of them warm up
PROFILED = range(5, 7)


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the run: a folder, and the head of its line")
    parser.add_argument("--work", type=Path, required=True, help="where random_model.py has written model/")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dry", action="store_true", help="short rows")
    options, rest = parser.parse_known_args()
    path = options.work / f"{options.name}.yaml"
    path.write_text(yaml.safe_dump(recipe_of(options.name, options.work, options.dry)), encoding="utf-8")
    with clean_exit():
        loop = Loop(recipe_or_exit(["--config", str(path), *rest]))
        watch = Watch(loop, Profile(options.work / f"trace_{options.name}.json") if options.profile else None)
        state = loop.run()
        print(watch.line(options.name, state), flush=True)


def recipe_of(name: str, work: Path, dry: bool) -> dict[str, Any]:
    """The recipe that all runs share: fp8 with learned scales, no calibration beyond one micro-batch."""
    output = work / "runs" / f"{name}_{time.time_ns()}"
    return {
        "model": {"path": str(work / "model" / "random")},
        "deepspeed": "zero3",
        "output_dir": str(output),
        "data": {
            "kind": "text",
            "train": [str(work / "model" / "train.txt")],
            "max_length": 64 if dry else 2048,
            "micro_batch_size": 2 if dry else 4,
        },
        "quant": {"scheme": "fp8_static", "calibration_batches": 1},
        "train": {"steps": STEPS, "quant_stats_every": 0},
        "optim": {"lr": 1.0e-5},
        "export": {"enabled": False, "dir": str(output / "export")},
    }


class Watch:
    """Takes the time between steps, the device waited for; profiles some of them."""

    def __init__(self, loop: Loop, profile: Profile | None) -> None:
        self.times: list[float] = []
        self.profile = profile
        self._last: float | None = None
        loop.every(1)(self._tick)

    def _tick(self, state: LoopState) -> None:
        synchronize(state.session.device)
        now = time.perf_counter()
        profiled = self.profile is not None and state.step - 1 in PROFILED
        if self._last is not None and not profiled:
            self.times.append(now - self._last)
        if self.profile is not None and state.step == PROFILED.start:
            self.profile.start()
        if self.profile is not None and state.step == PROFILED.stop:
            self.profile.stop()
        self._last = time.perf_counter()

    def line(self, name: str, state: LoopState) -> str:
        """The result of the run in one line."""
        assert state.last is not None
        kept = self.times[FIRST - 1 :]
        median, device = statistics.median(kept), state.session.device
        peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0
        return (
            f"step of {name}: median {1e3 * median:.1f} ms, least {1e3 * min(kept):.1f} ms, "
            f"{state.last.tokens / median:.0f} tokens/s, loss {state.last.losses['loss/total']:.4f}, "
            f"peak {peak:.1f} GiB"
        )


if __name__ == "__main__":
    main()
