"""How long a GPU takes for something, by its own clock."""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.timing import synchronize

WARM_UP, ROUNDS = 5, 20


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """The median of a few rounds. What a round reads is not in the GPU's cache unless it fits there."""
    times = []
    for _ in range(WARM_UP):
        function()
    for _ in range(ROUNDS):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            synchronize(device)
            times.append(begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            function()
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
