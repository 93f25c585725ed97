"""Where the time of two steps goes: the device's by kind of kernel, launches, and waits of the host."""

import gzip
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

LONGEST = 40  # kernels that are listed by name
# The first kind of which a word is in a kernel's name.
KINDS = {
    "our kernels": ("deepqat",),
    "GEMM": ("gemm", "nvjet", "cutlass", "xmma", "mkldnn", "aten::mm", "addmm"),
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "communication": ("nccl", "gloo", "all_reduce", "reduce_scatter", "all_gather"),
    "optimizer": ("adam", "multi_tensor"),
    "copy and fill": ("memcpy", "memset", "copy", "fill"),
}


class Profile:
    """Watches from :meth:`start` to :meth:`stop`, then prints what it saw; on a GPU it writes a trace too."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.on_gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
        self._profile = profile(activities=activities)
        self._began = 0.0

    def start(self) -> None:
        self._profile.start()
        self._began = time.perf_counter()

    def stop(self) -> None:
        wall = time.perf_counter() - self._began
        self._profile.stop()
        events = list(self._profile.key_averages())
        print("\n".join(self._report(events, wall)), flush=True)
        if self.on_gpu:
            self._profile.export_chrome_trace(str(self.trace))
            with open(self.trace, "rb") as plain, gzip.open(f"{self.trace}.gz", "wb") as packed:
                shutil.copyfileobj(plain, packed)
            self.trace.unlink()

    def _report(self, events: list[Any], wall: float) -> list[str]:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA] if self.on_gpu else events
        seconds, calls = Counter[str](), Counter[str]()
        for event in kernels:
            seconds[kind_of(event.key)] += self._seconds(event)
            calls[kind_of(event.key)] += event.count
        launches = sum(event.count for event in events if "LaunchKernel" in event.key)
        waits = {event.key: event.count for event in events if "Synchronize" in event.key}
        longest = sorted(kernels, key=self._seconds, reverse=True)[:LONGEST]
        return [
            f"profile of two steps: {wall:.3f} s under the profiler, device busy {seconds.total():.3f} s, "
            f"{launches} launches, waits of the host {waits}",
            *(f"  {name}: {1e3 * time:.1f} ms, {calls[name]} calls" for name, time in seconds.most_common()),
            *(f"    {1e3 * self._seconds(one):9.2f} ms {one.count:6d}  {one.key[:150]}" for one in longest),
        ]

    def _seconds(self, event: Any) -> float:
        """Of the device; on a CPU, which is the device there, of its own code."""
        return (event.self_device_time_total if self.on_gpu else event.self_cpu_time_total) / 1e6


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "elementwise and rest")
