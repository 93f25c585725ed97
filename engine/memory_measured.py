"""What a run holds on this rank, measured: parameters, gradients, optimizer, and the most of all."""

import json
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.zero import gradient_buffers, master_weights, partitions

MEASURED = "memory.json"


@dataclass
class MemoryWatch:
    """Watches one step of an optimizer.

    Attributes:
        model: in its engine.
        optimizer: ``engine.optimizer``.
        items: bytes of gradients, master weights and moments in the step; none until it has been made.
    """

    model: nn.Module
    optimizer: Any
    items: dict[str, int] | None = None

    def __post_init__(self) -> None:
        self._inner = getattr(self.optimizer, "optimizer", self.optimizer)
        # There the gradients of the step are complete, and not yet gone.
        self._handle = self._inner.register_step_post_hook(self._measure)

    def _measure(self, *_: Any) -> None:
        self._handle.remove()
        state = self._inner.state.values()
        moments = [held[key] for held in state for key in ("exp_avg", "exp_avg_sq") if key in held]
        own = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        seen: set[int] = set()
        self.items = {
            "gradients": _bytes([*gradient_buffers(self.optimizer), *own], seen),
            "master weights": _bytes(master_weights(self.optimizer), seen),
            "moments": _bytes(moments, seen),
        }

    def parameters(self) -> int:
        """Bytes of parameters now, between two steps."""
        return _bytes(partitions(self.model), set())


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Each storage once."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def resident_bytes() -> int:
    """The most memory that this process had resident so far (ru_maxrss is in KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_measured(file: Path, watch: MemoryWatch, peak: int, device: torch.device, ranks: int) -> None:
    """What ``launch/memory.py --measured`` reads; nothing if no step was watched."""
    if watch.items is None:
        return
    items = {"parameters": watch.parameters(), **watch.items}
    file.write_text(json.dumps({"device": device.type, "ranks": ranks, "peak": peak, "items": items}, indent=1) + "\n")
