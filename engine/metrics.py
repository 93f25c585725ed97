"""TensorBoard files and the final summary of a run, written by rank 0 alone."""

import io
import math
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary as EventSummary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import histogram, hparams, text

from engine.config.config import Recipe
from model.console import figure
from model.ranks import is_main, say

RETRY_SECONDS = 60.0
_LIMITS = 1e-12 * 1.1 ** np.arange(774)
EDGES = np.concatenate([-_LIMITS[::-1], [0.0], _LIMITS])  # of all histograms, so that TensorBoard can compare steps


class Metrics:
    """TensorBoard files in ``<output_dir>/tensorboard``; on ranks other than 0 every method does nothing.

    Tags: ``loss/...``, ``kd/...``, ``eval/...``; ``lr/<group>``; ``train/...`` (grad norms of all, of weights and of
    scales, tokens per second and device, peak memory, skipped steps, loss scale of fp16, epoch); ``quant/...`` (see
    engine.fake_quant).

    A failure to write curves (a full disk, a missing directory) does not end the run: it is reported once, values are
    lost, and from time to time a new file is tried.
    """

    def __init__(self, directory: Path, recipe: Path, *, done: int = 0) -> None:
        """Open a file in ``directory``, and show the text of the ``recipe`` file in TensorBoard.

        Args:
            directory: directory of the files.
            recipe: YAML file.
            done: optimizer steps done. Points of later steps, which an earlier continuation of this run wrote, are
                hidden.
        """
        self._directory = directory
        self._file: Path | None = None  # an event file, on rank 0
        self._lost: float | None = None  # time of the last failure to write; None: no failure yet
        if is_main():
            self._open(done + 1 if done else None)
        self._write(text("recipe", f"```yaml\n{recipe.read_text(encoding='utf-8')}\n```"), done)

    def _open(self, first_step: int | None = None) -> None:
        """Create an event file; with ``first_step``, points of other files from that step on are hidden."""
        self._file = self._directory / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        with suppress(OSError):  # the first write reports it
            self._directory.mkdir(parents=True, exist_ok=True)
        self._append(Event(file_version="brain.Event:2"))
        if first_step is not None:
            self._append(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def _append(self, event: Event) -> None:
        """Write an event in the calling thread, so that the file is complete afterwards.

        SummaryWriter of torch writes in a thread of its own, and a full disk ends that thread with a traceback. The
        file is opened by its name each time, since it may have been removed. After a failure it is abandoned: it may
        end in half an event.
        """
        if self._file is None:
            return
        event.wall_time = time.time()
        try:
            with self._file.open("ab") as file:
                RecordWriter(file).write(event.SerializeToString())
        except OSError as error:
            if self._lost is None:
                why = f"{self._directory} cannot be written ({error.strerror})"
                say(f"warning: {why}: points are missing in TensorBoard")
            self._lost = time.monotonic()
            self._file = None

    def _writes(self) -> bool:
        """Return True on rank 0 if an event file is open; after a failure, try to open a new one."""
        if self._lost is not None and self._file is None and time.monotonic() - self._lost >= RETRY_SECONDS:
            self._open()
        return self._file is not None

    def _write(self, summary: EventSummary, step: int) -> None:
        """Write values at ``step``."""
        if self._writes():
            self._append(Event(step=step, summary=summary))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one point per value at ``step`` (optimizer steps done)."""
        points = [EventSummary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        self._write(EventSummary(value=points), step)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """Add a histogram of the finite values, if any."""
        finite = np.array([value for value in values if math.isfinite(value)])
        if len(finite):
            self._write(histogram(tag, finite, EDGES), step)

    def picture(self, tag: str, draw: Callable[[], Figure], step: int) -> None:
        """Add the picture that ``draw`` returns; ``draw`` is called on rank 0 only."""
        if self._writes():
            figure, png = draw(), io.BytesIO()
            figure.savefig(png, format="png")
            width, height = map(int, figure.bbox.size)
            image = EventSummary.Image(
                encoded_image_string=png.getvalue(), width=width, height=height, colorspace=len("RGBA")
            )
            self._write(EventSummary(value=[EventSummary.Value(tag=tag, image=image)]), step)

    def results(self, recipe: Recipe, results: Mapping[str, float], step: int) -> None:
        """Add options and results of the run to TensorBoard's HPARAMS tab."""
        # Each result is also a scalar, which must not add a point to a curve.
        final = {f"final/{name}": value for name, value in results.items()}
        for summary in hparams(flat_options(recipe), final):
            self._write(summary, step)
        self.log(final, step)


def flat_options(recipe: Recipe) -> dict[str, Any]:
    """Map options by dotted path to values of TensorBoard's types: numbers, booleans, and text for the rest."""
    options: dict[str, Any] = {}
    for section, values in asdict(recipe).items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            plain = value if isinstance(value, bool | int | float | str) else str(value)
            options[f"{section}.{name}".rstrip(".")] = plain
    return options


LAST = 10
"""Number of last steps whose mean loss the summary shows: the loss of a single step depends on its samples."""


@dataclass
class Summary:
    """Totals of a run for the last lines of its output.

    Attributes:
        recent: the last ``LAST`` values of each loss (some losses are not measured in every step).
        peak_bytes: peak memory of rank 0 while training: of torch's allocator on CUDA, resident on a CPU.
    """

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: int = 0
    valid_tokens: int = 0
    first: dict[str, float] = field(default_factory=dict)
    recent: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=LAST)))
    peak_bytes: int = 0

    def step(self, losses: Mapping[str, float], tokens: int, valid_tokens: int) -> None:
        """Add one optimizer step of this process; ``losses`` are empty if it was skipped."""
        self.steps += 1
        self.tokens += tokens
        self.valid_tokens += valid_tokens
        self.first = {**losses, **self.first}
        for name, value in losses.items():
            self.recent[name].append(value)

    @property
    def last(self) -> dict[str, float]:
        """Mean of the last values of each loss."""
        return {name: math.fsum(values) / len(values) for name, values in self.recent.items()}

    def text(self, *, devices: int, skipped: int, evaluations: tuple[Mapping, Mapping]) -> str:
        """Format the summary; ``evaluations`` are the run's first and last evaluation."""
        seconds = time.perf_counter() - self.started
        lines = [
            f"{self.steps:,} steps, {self.tokens:,} tokens ({self.valid_tokens:,} with a target) in "
            f"{time.strftime('%H:%M:%S', time.gmtime(seconds))}, "
            f"{self.tokens / max(seconds, 1e-9) / devices:,.0f} tokens/s per device"
            + (f", {skipped} steps left out" if skipped else ""),
            f"peak memory of rank 0 while training: {self.peak_bytes / 1e9:.2f} GB",
        ]
        if self.recent:
            shown = max(map(len, self.recent.values()))
            lines += [f"losses, first value -> mean of the last {shown} values:", *_changes(self.first, self.last)]
        if evaluations[1]:
            lines += ["held-out samples, first evaluation -> last:", *_changes(*evaluations)]
        return "\n".join(lines)


def _changes(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Format a line per figure, with its first and last value."""
    return [f"  {name:<22} {figure(first.get(name, math.nan)):>10} -> {figure(value)}" for name, value in last.items()]
