"""Curves of a run in metrics.jsonl, TensorBoard and trackers, and its final summary, written by rank 0 alone.

Trackers of experiments beside TensorBoard are Weights & Biases, MLflow and Trackio (``train.report_to``). Rank 0 alone
imports their packages, before a model is built. Each tracker has a thread of its own, which takes points from a bounded
queue, so that training never waits for a tracker. A tracker that fails or stalls is off for the rest of the run, and
one line says so. Each start of a run is a new run in the tracker, so that no run in it has a step twice.
"""

import importlib
import io
import json
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from google.protobuf.json_format import MessageToDict
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary as EventSummary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import histogram, hparams, text

from engine.config.config import Recipe, recipe_options
from engine.config.hub import named
from model.console import figure
from model.ranks import errors_on_all_ranks, is_main, say

if TYPE_CHECKING:  # half a second to import, which only a picture needs
    from matplotlib.figure import Figure

_LIMITS = 1e-12 * 1.1 ** np.arange(774)
EDGES = np.concatenate([-_LIMITS[::-1], [0.0], _LIMITS])  # of all histograms, so that TensorBoard can compare steps


class MetricsWriter:
    """Destination of a run's curves. None of its methods raises an error of a disk or a network. A destination
    implements ``log``, and of the other methods those that apply to it; by default they do nothing."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one point per value at ``step`` (optimizer steps done)."""
        raise NotImplementedError

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """Add a histogram of finite values, at least one."""

    def picture(self, tag: str, draw: Callable[[], "Figure"], step: int) -> None:
        """Add the picture that ``draw`` returns."""

    def results(self, recipe: Recipe, results: Mapping[str, float], step: int) -> None:
        """Add the recipe's options and the run's results, by name, to the destination's table that compares runs."""

    def close(self, *, failed: bool) -> None:
        """Finish after the last point; ``failed`` if an error ends the run."""


class Metrics:
    """All destinations of a run's curves; none on ranks other than 0, where nothing is written.

    Tags: ``loss/...``, ``kd/...``, ``eval/...``; ``lr/<group>``; ``train/...`` (grad norms of all, of weights and of
    scales, tokens per second and device, peak memory, skipped steps, loss scale of fp16, epoch); ``quant/...`` (see
    engine.report); ``on_policy/...``; ``final/...``. A context, which closes the destinations at its end.
    """

    def __init__(self, writers: Sequence[MetricsWriter]) -> None:
        self._writers = writers

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for writer in self._writers:
            writer.close(failed=kind is not None)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one point per value at ``step`` (optimizer steps done). Raises ValueError if a name is ``step`` or
        ``time``."""
        if taken := OWN_KEYS & values.keys():
            raise ValueError(f"state.log: {min(taken)!r}, expected another name: lines of {FILE} have it already")
        plain = {name: float(value) for name, value in values.items()}
        for writer in self._writers:
            writer.log(plain, step)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """Add a histogram of the finite values; nothing if there are none."""
        if finite := [value for value in values if math.isfinite(value)]:
            for writer in self._writers:
                writer.histogram(tag, finite, step)

    def picture(self, tag: str, draw: Callable[[], "Figure"], step: int) -> None:
        """Add the picture that ``draw`` returns."""
        for writer in self._writers:
            writer.picture(tag, draw, step)

    def results(self, recipe: Recipe, results: Mapping[str, float], step: int) -> None:
        """Add the run's results as scalars under ``final/``, and its options beside them."""
        # Each result is also a scalar, which must not add a point to a curve.
        final = {f"final/{name}": value for name, value in results.items()}
        for writer in self._writers:
            writer.results(recipe, final, step)
        self.log(final, step)


FILE = "metrics.jsonl"
OWN_KEYS = {"step", "time"}


class GrowingFile:
    """File that grows at its end, without buffers: a killed run has lost nothing.

    A write that fails (a full disk, a missing directory) does not end the run. The first failure is reported. The next
    write overwrites the incomplete bytes."""

    def __init__(self, path: Path, shown: Path, lost: str) -> None:
        """Store the arguments; nothing is written. ``shown`` and ``lost``: path and loss that the warning names."""
        self.path, self._shown, self._lost = path, shown, lost
        self._failed = False

    def write(self, place: int, data: bytes) -> tuple[int, int]:
        """Write ``data`` from byte ``place`` (or from the end of a shorter file), and cut off what follows. Return the
        offsets in the file where ``data`` begins and ends; ``place`` twice if the write fails."""
        try:
            # Opened by its name each time, since it may have been removed; never through a link.
            with open(self.path, "r+b", opener=_create_file) as file:
                begin = min(place, file.seek(0, os.SEEK_END))
                file.seek(begin)
                file.write(data)
                file.truncate()
        except OSError as error:
            self.report(error)
            return place, place
        return begin, begin + len(data)

    def report(self, error: OSError) -> None:
        """Print a warning about a failed write, only the first time."""
        if not self._failed:
            say(f"warning: {self._shown} cannot be written ({error.strerror or error}): {self._lost}")
        self._failed = True


def _create_file(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


class MetricsFile(MetricsWriter):
    """The file ``metrics.jsonl``: a line per logged step with its number, the time, all scalars and all histograms.

    A line is complete after each call, and written again with more values if the step logs again: a killed run has
    lost none. NaN and infinity, which JSON lacks, are the texts NaN, Infinity and -Infinity.
    """

    def __init__(self, path: Path, *, done: int) -> None:
        """Drop the lines of an earlier run at ``path``; in a resumed run only damaged lines and those of steps after
        ``done``."""
        self._file = GrowingFile(path, path, "lines are missing there")
        self._begin = self._end = 0  # of the last line
        self._line: dict[str, Any] = {}
        try:
            if done and path.exists():
                self._keep(done)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._file.report(error)

    def _keep(self, done: int) -> None:
        """Keep the complete lines of the steps up to ``done``."""
        path = self._file.path
        aside = path.with_name(f"{FILE}.partial")
        aside.unlink(missing_ok=True)  # may be a link
        with path.open("rb") as old, aside.open("xb") as new:
            for line in old:
                with suppress(ValueError, TypeError, KeyError, RecursionError):
                    values = json.loads(line)
                    if values["step"] <= done:
                        self._begin, self._line = self._end, values
                        self._end += new.write(line.rstrip(b"\n") + b"\n")
        os.replace(aside, path)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add scalars to the line of ``step``."""
        self._add({name: value if math.isfinite(value) else json.dumps(value) for name, value in values.items()}, step)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """Add a histogram to the line of ``step``, with the fields of TensorBoard's: min, max, num, bucket, ..."""
        made = histogram(tag, np.array(values), EDGES).value[0].histo
        self._add({tag: MessageToDict(made, preserving_proto_field_name=True)}, step)

    def _add(self, values: Mapping[str, Any], step: int) -> None:
        if step != self._line.get("step"):
            self._begin, self._line = self._end, {"step": step, "time": 0.0}
        self._line |= {"time": round(time.time(), 3), **values}
        self._begin, self._end = self._file.write(self._begin, json.dumps(self._line).encode() + b"\n")


class TensorBoard(MetricsWriter):
    """TensorBoard files in a directory.

    SummaryWriter of torch writes in a thread of its own, and a full disk ends that thread with a traceback. Here each
    event is written by the calling thread.
    """

    def __init__(self, directory: Path, recipe: Path, *, done: int = 0) -> None:
        """Begin a file in ``directory``, and show the text of the ``recipe`` file in TensorBoard. Points after ``done``
        optimizer steps, which an earlier continuation of this run wrote, are hidden."""
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file, self._end = GrowingFile(directory / name, directory, "points are missing in TensorBoard"), 0
        if done:
            self._append(Event(step=done + 1, session_log=SessionLog(status=SessionLog.START)))
        self._write(text("recipe", f"```yaml\n{recipe.read_text(encoding='utf-8')}\n```"), done)

    def _append(self, event: Event) -> None:
        """Write an event; a new file begins with an event that names the format's version."""
        with suppress(OSError):  # the write reports it
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._file.path.is_file():
            self._end = 0
        records = io.BytesIO()
        for one in (*([] if self._end else [Event(file_version="brain.Event:2")]), event):
            one.wall_time = time.time()
            RecordWriter(records).write(one.SerializeToString())
        _, self._end = self._file.write(self._end, records.getvalue())

    def _write(self, summary: EventSummary, step: int) -> None:
        """Write values at ``step``."""
        self._append(Event(step=step, summary=summary))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add one point per value."""
        points = [EventSummary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(EventSummary(value=points), step)

    def histogram(self, tag: str, values: Sequence[float], step: int) -> None:
        """Add a histogram whose bucket limits are ``EDGES``."""
        self._write(histogram(tag, np.array(values), EDGES), step)

    def picture(self, tag: str, draw: Callable[[], "Figure"], step: int) -> None:
        """Add the picture that ``draw`` returns."""
        figure, png = draw(), io.BytesIO()
        figure.savefig(png, format="png")
        width, height = map(int, figure.bbox.size)
        image = EventSummary.Image(
            encoded_image_string=png.getvalue(), width=width, height=height, colorspace=len("RGBA")
        )
        self._write(EventSummary(value=[EventSummary.Value(tag=tag, image=image)]), step)

    def results(self, recipe: Recipe, results: Mapping[str, float], step: int) -> None:
        """Add options and results of the run to the HPARAMS tab."""
        for summary in hparams(flat_options(recipe), results):
            self._write(summary, step)


def flat_options(recipe: Recipe) -> dict[str, Any]:
    """Map the key of every option (``optim.lr``) to a plain value: a number, a boolean, or for the rest a text."""
    values = {key: named(getattr(owner, item.name)) for key, owner, item in recipe_options(recipe)}
    return {key: one if isinstance(one, bool | int | float | str) else str(one) for key, one in values.items()}


_RECENT = 10
"""Number of last steps whose mean loss the summary shows: the loss of a single step depends on its samples."""


@dataclass
class Summary:
    """Totals of a run for the last lines of its output.

    Attributes:
        recent: the last ``_RECENT`` values of each loss (some losses are not measured in every step).
        peak_bytes: peak memory of rank 0 while training: of torch's allocator on CUDA, resident on a CPU.
    """

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: int = 0
    valid_tokens: int = 0
    first: dict[str, float] = field(default_factory=dict)
    recent: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=_RECENT)))
    peak_bytes: int = 0
    skipped: int = 0

    def step(self, losses: Mapping[str, float], tokens: int, valid_tokens: int) -> None:
        """Count one optimizer step and its tokens over all ranks (all, and those with a target), and store its losses;
        ``losses`` is empty for a skipped step."""
        self.steps += 1
        self.skipped += not losses
        self.tokens += tokens
        self.valid_tokens += valid_tokens
        self.first = {**losses, **self.first}
        for name, value in losses.items():
            self.recent[name].append(value)

    @property
    def last(self) -> dict[str, float]:
        """Map each loss to the mean of its values in ``recent``."""
        return {name: math.fsum(values) / len(values) for name, values in self.recent.items()}

    def text(self, *, devices: int, evaluations: tuple[Mapping, Mapping]) -> str:
        """Format the summary. ``devices``: number of ranks; ``evaluations``: results of this process's first and of the
        last evaluation, left out if there was none."""
        seconds = time.perf_counter() - self.started
        minutes = int(seconds) // 60
        lines = [
            f"{self.steps:,} steps, {self.tokens:,} tokens ({self.valid_tokens:,} with a target) in "
            f"{minutes // 60:02d}:{minutes % 60:02d}:{int(seconds) % 60:02d}, "
            f"{self.tokens / max(seconds, 1e-9) / devices:,.0f} tokens/s per device"
            + (f", {self.skipped} steps left out" if self.skipped else ""),
            f"peak memory of rank 0 while training: {self.peak_bytes / 1e9:.2f} GB",
        ]
        if self.recent:
            shown = max(map(len, self.recent.values()))
            lines += [f"losses, first value -> mean of the last {shown} values:", *_changes(self.first, self.last)]
        if evaluations[1]:
            lines += ["held-out samples, first evaluation -> last:", *_changes(*evaluations)]
        return "\n".join(lines)


def _changes(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Format a line per loss or result, with its first and last value."""
    return [f"  {name:<22} {figure(first.get(name, math.nan)):>10} -> {figure(value)}" for name, value in last.items()]


# ---- trackers

PROJECT = "deepqat"  # unless an environment variable of the tracker names another one
MOST_WAITING = 1000  # points
CALL_SECONDS = 30.0  # at the end of a run, for one call of a tracker
END_SECONDS = 60.0  # at the end of a run, for all points that wait
MOST_PARAMS = 100  # that MLflow takes at once
LONGEST_REASON = 300  # characters


class Sink(NamedTuple):
    """Started tracker: ``log(values, step)`` sends points, ``finish(failed)`` ends its run; ``place`` is text for the
    user that says where the points go, such as an address."""

    log: Callable[[Mapping[str, float], int], object]
    finish: Callable[[bool], object]
    place: str


def _start_wandb(wandb: Any, recipe: Recipe, name: str) -> Sink:
    asks = sys.stdin is not None and sys.stdin.isatty() and os.environ.get("WANDB_MODE", "online") == "online"
    if asks and not wandb.login(prompt=False):
        raise RuntimeError("no API key: run `wandb login`, or set WANDB_MODE=offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=os.environ.get("WANDB_NAME", name),
        dir=recipe.output_dir,
        config=_plain(recipe),
        settings={"console": "off", "silent": True, "finish_timeout": CALL_SECONDS},
    )
    finish = lambda failed: run.finish(exit_code=1) if failed else run.finish()  # noqa: E731
    place = "offline" if getattr(run, "offline", True) else str(run.url)
    return Sink(lambda values, step: run.log(dict(values), step=step), finish, place)


def _start_mlflow(mlflow: Any, recipe: Recipe, name: str) -> Sink:
    if not {"MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"} & os.environ.keys():
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
    mlflow.start_run(run_name=name)
    options = list(flat_options(recipe).items())
    for begin in range(0, len(options), MOST_PARAMS):
        mlflow.log_params(dict(options[begin : begin + MOST_PARAMS]))
    return Sink(
        lambda values, step: mlflow.log_metrics(dict(values), step=step),
        lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"),
        str(mlflow.get_tracking_uri()),
    )


def _start_trackio(trackio: Any, recipe: Recipe, name: str) -> Sink:
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    run = trackio.init(project=project, name=name, config=_plain(recipe))
    return Sink(lambda values, step: run.log(dict(values), step=step), lambda _: run.finish(), f"project {project}")


STARTS = {"wandb": _start_wandb, "mlflow": _start_mlflow, "trackio": _start_trackio}


def _plain(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to dictionaries, lists and plain values."""
    return json.loads(json.dumps(named(asdict(recipe))))


def import_trackers(recipe: Recipe) -> dict[str, ModuleType]:
    """Import the packages of the trackers of ``train.report_to`` on rank 0; a collective.

    Returns:
        The packages by the tracker's name; empty on other ranks.

    Raises:
        RankError: on every rank: a package is not installed, or cannot be imported.
    """
    found: dict[str, ModuleType] = {}
    with errors_on_all_ranks(ValueError):
        for name in recipe.train.report_to if is_main() else []:
            if name not in STARTS:
                continue
            try:
                found[name] = importlib.import_module(name)
                if getattr(found[name], "__file__", None) is None:  # a folder of that name, such as wandb leaves
                    raise ModuleNotFoundError(name=name)
            except (Exception, SystemExit) as error:  # a package may raise anything
                why = "is not installed" if getattr(error, "name", None) == name else f"fails: {_reason(error)}"
                raise ValueError(
                    f"train.report_to: {name!r}, but the package {name} {why}; pip install -e '.[{name}]' (or pip "
                    f"install {name}), or leave it out"
                ) from error
    return found


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")[:LONGEST_REASON]


def _kill_programs_of(package: ModuleType) -> None:
    """Kill the child processes that run a program of ``package``: at exit, the package would wait for them."""
    folder = Path(str(package.__file__)).resolve().parent
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            own = f"\nPPid:\t{os.getpid()}\n" in status.read_text()
            if own and Path(os.readlink(status.with_name("exe"))).is_relative_to(folder):
                os.kill(int(status.parent.name), signal.SIGKILL)


class Tracker(MetricsWriter):
    """Destination that sends points to a tracker, in a thread of its own."""

    def __init__(self, name: str, package: ModuleType, recipe: Recipe, *, done: int) -> None:
        """Start the tracker ``name`` in its thread. ``done``: optimizer steps before this start of the run."""
        self._name, self._package = name, package
        self._points: queue.Queue[tuple[Mapping[str, float], int] | None] = queue.Queue(MOST_WAITING)
        self._busy_since: float | None = time.monotonic()  # None: it waits for a point
        self._off, self._failed = False, False
        label = Path(recipe.output_dir).resolve().name + (f" from step {done}" if done else "")
        self._thread = threading.Thread(target=self._run, args=(recipe, label), daemon=True)
        self._thread.start()

    def _run(self, recipe: Recipe, label: str) -> None:
        """Start the tracker, send points until the last one, and finish."""
        try:
            sink = STARTS[self._name](self._package, recipe, label)
            say(f"{self._name}: {sink.place}")
            while (point := self._next()) is not None:
                sink.log(*point)
            sink.finish(self._failed)
        except BaseException as error:  # it may call sys.exit, too
            self._turn_off(_reason(error))
            if self._name == "wandb":  # which would end its process at exit, and wait for it
                with suppress(Exception):
                    self._package.teardown()

    def _next(self) -> tuple[Mapping[str, float], int] | None:
        self._busy_since = None
        point = self._points.get()
        self._busy_since = time.monotonic()
        return point

    def _turn_off(self, why: str) -> None:
        if not self._off:
            self._off = True
            say(f"warning: {self._name}: {why}: it is off from here on, and the run goes on ({FILE} has all points)")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue one point per value; if the queue is full, turn the tracker off for the rest of the run."""
        self._put((values, step))

    def _put(self, point: tuple[Mapping[str, float], int] | None) -> None:
        if not self._off:
            try:
                self._points.put_nowait(point)
            except queue.Full:
                self._turn_off(f"it has not taken the last {MOST_WAITING:,} points")

    def close(self, *, failed: bool) -> None:
        """Wait until the tracker has sent all points and ended its run. Give up on it, with a warning, if one call
        takes longer than ``CALL_SECONDS``, or all together longer than ``END_SECONDS``."""
        self._failed, end = failed, time.monotonic() + END_SECONDS
        self._put(None)
        while self._thread.is_alive() and not self._off:
            self._thread.join(0.1)
            busy, now = self._busy_since, time.monotonic()
            if busy is not None and now - busy > CALL_SECONDS:
                self._turn_off(f"it does not answer for {CALL_SECONDS:.0f} s")
            elif now > end:
                self._turn_off(f"{self._points.qsize():,} points still wait {END_SECONDS:.0f} s after the last step")
        if self._thread.is_alive():
            _kill_programs_of(self._package)
            self._thread.join(1.0)
