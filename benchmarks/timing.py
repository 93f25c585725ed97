"""Shared by the benchmarks: options, ways timed in turn, memory of a step, and the head and tables of a result.

A machine's speed drifts while a benchmark runs. Ways that are timed in turn (A, B, C, A, B, C, ...) drift together, so
that their ratios hold where their times do not.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

RESULTS = Path(__file__).resolve().parent / "results"
LOAD = os.getloadavg()[0]  # when the run began
MIB = 2**20


@dataclass(frozen=True)
class Timing:
    """Seconds of one way, one per round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        return min(self.seconds)

    def ratio(self, other: "Timing") -> float:
        """Ratio of the medians."""
        return self.median / other.median

    def quartiles(self, other: "Timing") -> tuple[float, float]:
        """First and third quartile of the ratios of single rounds."""
        ratios = [mine / its for mine, its in zip(self.seconds, other.seconds, strict=True)]
        first, _, third = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return first, third

    def text(self, other: "Timing") -> str:
        """The ratio with its quartiles, for a table."""
        first, third = self.quartiles(other)
        return f"{self.ratio(other):.3f} ({first:.3f} to {third:.3f})"


def interleave(ways: Mapping[str, Callable[[], float]], rounds: int, warmup: int) -> dict[str, Timing]:
    """Call each way once per round, in turn; a way returns its seconds. Rounds of warm-up are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(warmup + rounds):
        for name, way in ways.items():
            taken = way()
            if index >= warmup:
                seconds[name].append(taken)
    return {name: Timing(values) for name, values in seconds.items()}


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done ``work``; of one CPU thread those of the process, without waits for a core."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronize(device)
    begin = clock()
    work()
    synchronize(device)
    return clock() - begin


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kept_bytes(forward: Callable[[], Tensor], module: nn.Module) -> int:
    """Bytes that autograd keeps between forward and backward: every storage once, parameters excluded."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}
    alive = []  # a storage that is freed could give its address to the next

    def note(tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):  # torchao's: it has no storage of its own
            for name in tensor.__tensor_flatten__()[0]:
                note(getattr(tensor, name))
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    alive.clear()  # `note` refers to itself: without this its storages would live until the garbage collector finds it
    return sum(storages.values())


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Growth of what torch's allocator has given out, at most, during ``step``."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The CPU's allocator keeps no statistics, but tells the profiler of every block.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    return most_allocated(profile)


def most_allocated(profile: Any) -> int:
    """The most that was allocated at a time while ``profile`` watched, beyond what was there before."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def options_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Make the parser with the options that the benchmarks of one process have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder that the table is written to")
    return parser


def device_of(options: argparse.Namespace) -> torch.device:
    """Set threads and seed, and return the device, or end with one line where it is not there."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device: run this on a machine with a GPU, or with --device cpu")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return torch.device(options.device)


def installed(package: str) -> bool:
    """Tell if an optional package is installed."""
    return importlib.util.find_spec(package) is not None


def head(device: torch.device, *packages: str) -> str:
    """Date, machine, versions and command, for the head of a result."""
    used = f"{processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    if device.type == "cuda":
        used = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}; {used}"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", *packages) if installed(name)]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return (
        f"{date.today()}; {used}; Python {platform.python_version()}, {', '.join(versions)}; "
        f"load average {LOAD:.1f} when it began, {os.getloadavg()[0]:.1f} at the end.\n`{command}`"
    )


def processor() -> str:
    """The CPU's name as Linux gives it, with the instructions that torch uses."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells below a head, in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [columns, ["---"] * len(columns), *rows])


def write(results: Path, name: str, device: torch.device, *paragraphs: str) -> None:
    """Print a result and write it to its file."""
    text = "\n\n".join(filter(None, paragraphs)) + "\n"
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}{'_cuda' if device.type == 'cuda' else ''}.md").write_text(text, encoding="utf-8")
    print(text)
