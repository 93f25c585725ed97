"""Measure a run's memory on this rank: bytes of parameters, gradients and optimizer states, and the peak."""

import json
import resource
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.errors import RecipeError
from model.checkpoint.safetensors import parse_json
from model.ranks import world_size
from model.zero import gradient_buffers, master_weights, partitions, secondary_partitions

MEASURED = "memory.json"


@dataclass
class MemoryWatch:
    """Measures memory in the first optimizer step after its creation.

    Attributes:
        model: the student, wrapped in its engine.
        optimizer: ``engine.optimizer``.
        items: bytes of gradients, master weights and moments in that step; None before the step.
    """

    model: nn.Module
    optimizer: Any
    items: dict[str, int] | None = None
    _second: int = 0  # bytes of hpZ's shares in that step

    def __post_init__(self) -> None:
        self._inner = getattr(self.optimizer, "optimizer", self.optimizer)
        # When this hook is called the gradients of the step are complete, and not yet freed.
        self._inner.register_step_post_hook(self._measure)

    def _measure(self, *_: Any) -> None:
        if self.items is not None:  # a hook cannot remove itself
            return
        state = self._inner.state.values()
        moments = [held[key] for held in state for key in ("exp_avg", "exp_avg_sq") if key in held]
        own = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self._second = _bytes(secondary_partitions(self.model), set())
        seen: set[int] = set()
        self.items = {
            "gradients": _bytes([*gradient_buffers(self.optimizer), *own], seen),
            "master weights": _bytes(master_weights(self.optimizer), seen),
            "moments": _bytes(moments, seen),
        }

    def parameters(self) -> int:
        """Count bytes of the parameters now and of hpZ's shares in the step; call it between two steps."""
        return _bytes(partitions(self.model), set()) + self._second


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Count bytes of the tensors' storages except storages in ``seen``, and add the counted storages to ``seen``."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes: of torch's allocator on CUDA, resident on a CPU.

    This is the only measure of a run's peak: in TensorBoard, in ``memory.json`` and in the last lines.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # it counts KiB on Linux


def write_measured(directory: Path, watch: MemoryWatch, device: torch.device, peak: int) -> None:
    """Write ``memory.json``, which ``launch/memory.py --measured`` reads, unless no step was taken.

    If the disk is full there is a warning and no file; the run goes on.

    Args:
        directory: the run's output directory.
        watch: measurement of one of the run's steps.
        device: this rank's device.
        peak: :func:`peak_memory` after the last step.
    """
    if watch.items is None:
        return
    measured = Measured(device.type, world_size(), peak, {"parameters": watch.parameters(), **watch.items})
    try:
        (directory / MEASURED).unlink(missing_ok=True)  # it may be a link to a file elsewhere
        (directory / MEASURED).write_text(json.dumps(asdict(measured), indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"the measured memory could not be written: {error}", stacklevel=2)


@dataclass(frozen=True)
class Measured:
    """Memory measured on rank 0.

    Attributes:
        device: device type of the rank.
        ranks: number of ranks of the run.
        peak: :func:`peak_memory` after the last step, before the export.
        items: bytes by item.
    """

    device: str
    ranks: int
    peak: int
    items: dict[str, int]


def read_measured(file: Path) -> Measured:
    """Read the ``memory.json`` of a run.

    Raises:
        RecipeError: there is no such file, or its content is something else.
    """
    try:
        return Measured(**parse_json(file.read_bytes()))
    except (OSError, TypeError, ValueError) as error:
        raise RecipeError(
            f"--measured: {file}, expected the {MEASURED} in the output_dir of a run ({error})"
        ) from error
