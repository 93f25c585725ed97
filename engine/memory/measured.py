"""What a run holds on this rank, measured: parameters, gradients, optimizer, and the most of all."""

import json
import resource
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.ranks import world_size
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
        self._inner.register_step_post_hook(self._measure)

    def _measure(self, *_: Any) -> None:
        if self.items is not None:  # torch lets no hook remove itself
            return
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


def write_measured(directory: Path, watch: MemoryWatch, device: torch.device, resident: int) -> None:
    """Write ``memory.json``, which ``launch/memory.py --measured`` reads; nothing if no step was watched.

    A disk that is full costs this file, with a warning, and not the run.

    Args:
        directory: the run's.
        watch: of one of its steps.
        device: of this rank. The peak is the allocator's on CUDA, on the CPU what the process grew by.
        resident: bytes of the process before there was a model.
    """
    if watch.items is None:
        return
    on_cuda = device.type == "cuda"
    measured = Measured(
        device.type,
        world_size(),
        torch.cuda.max_memory_allocated(device) if on_cuda else resident_bytes() - resident,
        {"parameters": watch.parameters(), **watch.items},
    )
    try:
        (directory / MEASURED).write_text(json.dumps(asdict(measured), indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"what the run held could not be written: {error}", stacklevel=2)


@dataclass(frozen=True)
class Measured:
    """Of rank 0: where, among how many ranks, the most bytes of the run until its export, and bytes by item."""

    device: str
    ranks: int
    peak: int
    items: dict[str, int]


def read_measured(file: Path) -> Measured:
    """What a run wrote.

    Raises:
        ValueError: there is no such file, or it is another one.
    """
    try:
        return Measured(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--measured: {file}, expected the {MEASURED} in the output_dir of a run ({error})") from error
