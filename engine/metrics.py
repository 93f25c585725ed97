"""Progress bar, TensorBoard and final summary, written by rank 0 alone."""

import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from engine.config.config import Recipe
from model.ranks import is_main, say

RETRY_SECONDS = 60.0


class Metrics:
    """TensorBoard files in ``<output_dir>/tensorboard``; on ranks other than 0 every method does nothing.

    Tags: ``loss/...``, ``kd/...``, ``eval/...``; ``lr/<group>``; ``train/...`` (grad norms of all, of weights and of
    scales, tokens per second and device, peak memory, skipped steps, loss scale of fp16, epoch); ``quant/...`` (see
    engine.fake_quant).

    A failure to write curves (a full disk, a missing directory) does not end the run: it is reported once, values are
    lost, and from time to time a new file is tried.
    """

    def __init__(self, directory: Path, recipe: Path, *, done: int = 0) -> None:
        """Open files in ``directory``, and show the text of the ``recipe`` file in TensorBoard.

        Args:
            directory: directory of the files.
            recipe: YAML file.
            done: optimizer steps done. Later points are hidden: an earlier continuation of this run wrote them.
        """
        self._directory = directory
        self.writer: SummaryWriter | None = None
        self._lost: float | None = None  # time of the last failure to write; None: no failure yet
        if is_main():
            self._open(done + 1 if done else None)
        text = recipe.read_text(encoding="utf-8")
        self._write(lambda writer: writer.add_text("recipe", f"```yaml\n{text}\n```", done))

    def _open(self, purge_step: int | None = None) -> None:
        """Open a new event file, on rank 0."""
        try:
            self.writer = SummaryWriter(str(self._directory), purge_step=purge_step)
        except OSError as error:
            self._lose(error)

    def _write(self, add: Callable[[SummaryWriter], object]) -> None:
        """Call ``add`` with the open file, or with a new one after a failure."""
        if self._lost is not None and self.writer is None and time.monotonic() - self._lost >= RETRY_SECONDS:
            self._open()
        if self.writer is None:
            return
        try:
            add(self.writer)
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Continue without a file; the failed file is not closed, as closing writes to it."""
        if self._lost is None:
            say(f"warning: {self._directory} cannot be written ({error.strerror}): points are missing in TensorBoard")
        self._lost = time.monotonic()
        self.writer = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one point per value at ``step`` (optimizer steps done)."""

        def add(writer: SummaryWriter) -> None:
            for name, value in values.items():
                writer.add_scalar(name, float(value), step)

        self._write(add)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """Add a histogram of the finite values, if any."""
        finite = np.array([value for value in values if math.isfinite(value)])
        if len(finite):
            self._write(lambda writer: writer.add_histogram(tag, finite, step))

    def picture(self, tag: str, draw: Callable[[], Figure], step: int) -> None:
        """Add the picture that ``draw`` returns; ``draw`` is called on rank 0 only."""
        self._write(lambda writer: writer.add_figure(tag, draw(), step))

    def results(self, recipe: Recipe, results: Mapping[str, float]) -> None:
        """Add options and results of the run to TensorBoard's HPARAMS tab."""
        # Each result is also a scalar, which must not add a point to a curve. Without run_name (the same folder)
        # TensorBoard shows a second run, named by the time.
        final = {f"final/{name}": value for name, value in results.items()}
        self._write(lambda writer: writer.add_hparams(flat_options(recipe), final, run_name="."))

    def flush(self) -> None:
        """Flush buffered points: a run that resumes from a checkpoint does not write earlier points again."""
        self._write(lambda writer: writer.flush())

    def close(self) -> None:
        """Flush and close; nothing can be added afterwards."""
        self._write(lambda writer: writer.close())


def flat_options(recipe: Recipe) -> dict[str, Any]:
    """Map options by dotted path to values of TensorBoard's types: numbers, booleans, and text for the rest."""
    options: dict[str, Any] = {}
    for section, values in asdict(recipe).items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            plain = value if isinstance(value, bool | int | float | str) else str(value)
            options[f"{section}.{name}".rstrip(".")] = plain
    return options


@dataclass
class Progress:
    """Progress bar over optimizer steps with the loss, tokens/s per device and the time left."""

    bar: tqdm

    @classmethod
    def start(cls, total: int, done: int) -> "Progress":
        """Create a bar, which is visible on rank 0 only."""
        return cls(
            tqdm(total=total, initial=done, desc="train", unit="step", disable=not is_main(), dynamic_ncols=True)
        )

    def step(self, values: Mapping[str, float]) -> None:
        """Advance by one optimizer step and show ``values`` behind the bar."""
        with suppress(OSError):  # of a log on a full disk
            self.bar.set_postfix({name: f"{value:.4g}" for name, value in values.items()}, refresh=False)
            self.bar.update(1)

    def close(self) -> None:
        """Close the bar and leave it on the screen."""
        with suppress(OSError):
            self.bar.close()


@dataclass
class Summary:
    """Totals of a run for the last lines of its output."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: int = 0
    valid_tokens: int = 0
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)

    def step(self, losses: Mapping[str, float], tokens: int, valid_tokens: int) -> None:
        """Add one optimizer step of this process."""
        self.steps += 1
        self.tokens += tokens
        self.valid_tokens += valid_tokens
        self.first = {**losses, **self.first}
        self.last |= losses  # some are measured in some steps only

    def text(self, *, devices: int, skipped: int, peak_bytes: int, evaluations: tuple[Mapping, Mapping]) -> str:
        """Format the summary, one line per figure; ``evaluations`` are the run's first and last evaluation."""
        seconds = time.perf_counter() - self.started
        lines = [
            f"{self.steps:,} steps, {self.tokens:,} tokens ({self.valid_tokens:,} with a target) in "
            f"{time.strftime('%H:%M:%S', time.gmtime(seconds))}, "
            f"{self.tokens / max(seconds, 1e-9) / devices:,.0f} tokens/s per device, "
            f"at most {peak_bytes / 2**30:.2f} GiB on rank 0" + (f", {skipped} steps left out" if skipped else "")
        ]
        first, last = {**self.first, **evaluations[0]}, {**self.last, **evaluations[1]}
        lines += [f"{name:<24} {first.get(name, math.nan):>10.4f} -> {value:.4f}" for name, value in last.items()]
        return "\n".join(lines)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on CUDA, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # it counts KiB on Linux
