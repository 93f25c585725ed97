"""Micro-batches on their way to the device: in one copy, for which the host does not wait."""

from collections.abc import Callable

import torch
from torch import Tensor

from data.loader import MicroBatch
from data.samples import IGNORE

READ_BY_THE_HOST = ("sample_ids", "spans")


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """A micro-batch of a loader with its ``positions`` [N]: where there are labels, among all B * T, in their order.

    What the host reads stays where it is. That there are as many positions as there are could be read from labels on a
    GPU too; the host would wait for all that the GPU has to do before.
    """
    batch = {**batch, "positions": (batch["labels"].flatten() != IGNORE).nonzero().squeeze(-1)}
    return batch if device.type == "cpu" else _moved(batch, lambda flat: without_wait(flat, device))


def without_wait(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for which the host waits neither now nor for what the device has to do before."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _moved(batch: MicroBatch, copy: Callable[[Tensor], Tensor]) -> MicroBatch:
    """``batch`` with views of one ``copy`` of all its tensors, which are int64, one behind the other."""
    tensors = {name: tensor for name, tensor in batch.items() if name not in READ_BY_THE_HOST}
    parts = copy(torch.cat([tensor.flatten() for tensor in tensors.values()])).split(
        [tensor.numel() for tensor in tensors.values()]
    )
    moved = {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
    return {**batch, **moved}
