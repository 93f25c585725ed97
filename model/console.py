"""Output for people, on rank 0: progress of long jobs, and numbers of any size.

On a terminal a job has a bar. In a log file it has a plain line after ten seconds, and then every half minute. Bar and
lines are also written during a long part of the job, such as its first.
"""

import math
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from tqdm import tqdm

from model.ranks import is_main

FIRST_SECONDS, SECONDS = 10.0, 30.0
"""Time to the first line in a log file, and between two lines. A job that ends earlier writes none."""
BEAT_SECONDS = 1.0
"""Interval at which a thread checks if a bar is due to be drawn."""


class _Bar(tqdm):
    """Progress bar that a thread draws again while a part of the job lasts long."""

    last_print_t: float

    def __init__(self, **options: Any) -> None:
        self._closed = threading.Event()
        super().__init__(**options, miniters=0, smoothing=0)
        if not self.disable:
            threading.Thread(target=_beat, args=(weakref.ref(self), self._closed), daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items; tqdm's own iteration does not count them until it draws."""
        with self:
            for item in self.iterable:
                yield item
                self.update()

    def beat(self) -> None:
        """Draw the bar if it is due."""
        with self.get_lock():
            now, first = self._time(), self.start_t + self.delay
            if (
                not self.disable
                and now >= first
                and (self.last_print_t < first or now - self.last_print_t >= self.mininterval)
            ):
                self.last_print_t = now
                self.refresh(nolock=True)

    def close(self) -> None:
        """Erase the bar (with ``leave``: keep it on the terminal), and end its thread."""
        with self.get_lock():
            super().close()
        self._closed.set()


def _beat(bar: "weakref.ref[_Bar]", closed: threading.Event) -> None:
    while not closed.wait(BEAT_SECONDS) and (found := bar()) is not None:
        found.beat()
        del found  # a bar that nothing else refers to is closed


def progress_bar(
    total: int | None = None,
    desc: str = "",
    unit: str = "step",
    *,
    over: Iterable[Any] | None = None,
    initial: int = 0,
    leave: bool = False,
    any_rank: bool = False,
) -> tqdm:
    """Create the progress bar of a job; by default it is shown on rank 0 only.

    Args:
        total: units of the whole job; None: the length of ``over``, or unknown.
        desc: name of the job.
        unit: ``B`` for bytes, or a word in the singular.
        over: items to iterate over; None if the job calls ``update``.
        initial: units that are done already.
        leave: show the bar from the start, and leave it on the terminal at the end.
        any_rank: show the bar on the calling rank, whichever it is: for a job that only this rank runs.
    """
    units = "B" if unit == "B" else f" {unit}es" if unit.endswith("ch") else f" {unit}s"
    line = "{desc}: {n_fmt} of {total_fmt}" + units + ", {elapsed} passed, {remaining} left, {rate_fmt}{postfix}"
    options = {"iterable": over, "total": total, "unit": unit, "unit_scale": unit == "B", "initial": initial}
    return _bar(desc, line, leave=leave, shown=any_rank or is_main(), **options)


@contextmanager
def working(desc: str) -> Iterator[None]:
    """Show on rank 0 for how long the block has run, unless it ends soon: for a job whose progress is unknown."""
    with _bar(desc, "{desc}: {elapsed} passed", shown=is_main(), bar_format="{desc}: {elapsed}"):
        yield


def _bar(desc: str, line: str, *, shown: bool, leave: bool = False, **options: Any) -> tqdm:
    """Create a progress bar: drawn on a terminal, otherwise written as the text ``line`` after ``FIRST_SECONDS`` and
    then every ``SECONDS`` seconds."""
    options |= {"desc": desc, "leave": leave, "disable": not shown}
    if sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns  # 0 in a recorded session
        size = {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}
        return _Bar(**options, **size, delay=0 if leave else 1)
    options |= {"bar_format": line, "file": _Lines(sys.stderr), "position": 0}
    return _Bar(**options, delay=FIRST_SECONDS, mininterval=SECONDS)


class _Lines:
    """File object for tqdm that writes each drawn bar as a line; on a full disk, the text is lost without an error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        """Write a drawn bar as a line, and nothing for an erased bar."""
        if line := " ".join(text.split()):
            with suppress(OSError):
                self._file.write(f"{line}\n")

    def flush(self) -> None:
        """Flush the file."""
        with suppress(OSError):
            self._file.flush()


def perplexity(loss: float) -> float:
    """Compute the perplexity of a loss in nats per token; inf if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def figure(value: float, digits: int = 4) -> str:
    """Format a number with ``digits`` decimals; if its magnitude is 10,000 or more, with one decimal and an exponent:
    ``1.0e4``."""
    if not math.isfinite(value) or abs(value) < 1e4:
        return f"{value:.{digits}f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table. The first row has the names of the columns. Columns are aligned in the text as
    well: the first column to the left, the others to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    first, *others = (max(3, *map(len, column)) for column in zip(*cells, strict=True))
    cells = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in cells]
    cells.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
