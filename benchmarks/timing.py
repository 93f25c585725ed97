"""Times several ways of doing one thing in one process, in turn, and says on which machine it did.

A machine's speed drifts while a benchmark runs: other jobs come and go, clocks rise and fall. Ways that are timed in
turn (A, B, C, A, B, C, ...) drift together, so that their ratios hold where their times do not.
"""

import argparse
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of one way, one per round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        """The usual time."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """The time that nothing disturbed."""
        return min(self.seconds)

    def ratio(self, other: "Timing") -> float:
        """Of the medians."""
        return self.median / other.median

    def spread(self, other: "Timing") -> tuple[float, float]:
        """The quartiles of the ratios of each round: half of the rounds lie between them."""
        ratios = [mine / its for mine, its in zip(self.seconds, other.seconds, strict=True)]
        first, _, third = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return first, third


def interleave(ways: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, Timing]:
    """Each way once per round, in turn; a way returns the seconds that it took. Rounds of warm-up are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(warmup + rounds):
        for name, way in ways.items():
            taken = way()
            if index >= warmup:
                seconds[name].append(taken)
    return {name: Timing(values) for name, values in seconds.items()}


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done ``work``, launches included.

    With one thread on the CPU it is the time that the process had a core: what other jobs take from it does not count.
    """
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronize(device)
    begin = clock()
    work()
    synchronize(device)
    return clock() - begin


def clock_text(device: torch.device) -> str:
    """Which time :func:`seconds_of` takes, for a result."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return "Time is that of the process on its core, so that waiting for the core does not count; shared caches do."
    return "Time is elapsed time, launches included."


def command() -> str:
    """How this run was started."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def arguments_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that all these benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that the tables are written to")
    return parser


def chosen_device(name: str) -> torch.device:
    """The device, or an end with one line where it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: run this on a machine with a GPU, or with --device cpu")
    return torch.device(name)


def machine(device: torch.device, load: tuple[float, ...], *packages: str) -> str:
    """Date, machine and versions, for the head of a result; ``load`` is the load average when the run began."""
    used = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} of them used"
    if device.type == "cuda":
        used = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}; {used}"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", *packages) if installed(name)]
    now = os.getloadavg()
    return (
        f"{date.today()}; {used}; Python {platform.python_version()}, {', '.join(versions)}; "
        f"load average {load[0]:.1f} when it began, {now[0]:.1f} at the end."
    )


def installed(package: str) -> bool:
    """Whether a package that the comparison can do without is there."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def write(results: Path, name: str, device: torch.device, text: str) -> Path:
    """Print a result and write it where it belongs."""
    path = results / f"{name}{'_cuda' if device.type == 'cuda' else ''}.md"
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text)
    return path


def processor() -> str:
    """The CPU's name as Linux gives it, with the instructions that torch uses."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
