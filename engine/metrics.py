"""What people see: a progress bar, TensorBoard, one line per figure that matters. Rank 0 writes, nobody else."""

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from model.ranks import is_main, reduce_over_ranks
from model.scales import clipped_weight_fractions
from quant import Quantization


class Metrics:
    """TensorBoard files in ``<output_dir>/tensorboard``; on ranks other than 0 every method does nothing.

    Tags: ``loss/total``, ``loss/lm``, ``loss/kd/<kind>``, ``loss/router_aux``; ``lr/<group>``; ``train/grad_norm``,
    ``train/tokens_per_second_per_device``, ``train/peak_memory_gib``, ``train/skipped_steps``, ``train/epoch``;
    ``quant/clipped_weights/<layer>``, ``quant/clipped_inputs/<layer>`` (fractions of elements outside the range).
    """

    def __init__(self, directory: Path, recipe: Path) -> None:
        """Open files in ``directory`` and show the text of the ``recipe`` file on the page."""
        self.writer = SummaryWriter(str(directory)) if is_main() else None
        if self.writer is not None:
            self.writer.add_text("recipe", f"```yaml\n{recipe.read_text(encoding='utf-8')}\n```")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one point per value at ``step`` (optimizer steps done)."""
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Write out what is buffered."""
        if self.writer is not None:
            self.writer.close()


@dataclass
class Progress:
    """The progress bar over optimizer steps, with the loss, tokens/s per device and the time left."""

    bar: tqdm

    @classmethod
    def start(cls, total: int, done: int) -> "Progress":
        """A bar on rank 0; elsewhere one that shows nothing."""
        return cls(
            tqdm(total=total, initial=done, desc="train", unit="step", disable=not is_main(), dynamic_ncols=True)
        )

    def step(self, values: Mapping[str, float]) -> None:
        """One optimizer step is done; ``values`` are what stands behind the bar."""
        self.bar.set_postfix({name: f"{value:.4g}" for name, value in values.items()}, refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this process held so far: the allocator's on CUDA, resident (ru_maxrss, in KiB) on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clipped_fractions(quantization: Quantization) -> dict[str, float]:
    """Fraction of elements outside the range, per scale group: of the weights, and of the inputs that were observed.

    A collective: weights are counted where they lie, in the partitions. Input fractions cover the passes since the
    observers were switched on; groups that saw nothing are left out.
    """
    fractions = {
        f"quant/clipped_weights/{owner}": fraction for owner, fraction in clipped_weight_fractions(quantization).items()
    }
    groups = quantization.input_groups
    if not groups:
        return fractions
    observers = [group.observer for group in groups if group.observer is not None]
    counts = torch.tensor([[int(observer.clipped), observer.total] for observer in observers], dtype=torch.float64)
    for group, (clipped, total) in zip(groups, reduce_over_ranks(counts).tolist(), strict=True):
        if total:
            fractions[f"quant/clipped_inputs/{group.owner}"] = clipped / total
    return fractions
