"""Trackers of experiments beside TensorBoard: Weights & Biases, MLflow, Trackio (``train.report_to``).

Rank 0 alone imports their packages, before a model is built. Each tracker has a thread of its own, which takes points
from a bounded queue, so that the run never waits for a tracker. If one fails or stalls, it is off for the rest of the
run, and one line says so. Each start of a run is a new run of the tracker, so that none gets a step twice.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from engine.config.config import Recipe
from engine.config.hub import named
from engine.metrics import FILE, MetricsWriter, flat_options
from model.ranks import errors_on_all_ranks, is_main, say

PROJECT = "deepqat"  # unless an environment variable of the tracker names another one
MOST_WAITING = 1000  # points
CALL_SECONDS = 30.0  # at the end of a run, for one call of a tracker
END_SECONDS = 60.0  # at the end of a run, for all points that wait
MOST_PARAMS = 100  # that MLflow takes at once
LONGEST_REASON = 300  # characters


class Sink(NamedTuple):
    """Functions that send points (values, step), and that finish a run (failed or not), of a started tracker."""

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
    """Kill the children of this process that run a program of ``package``, which would wait for them at exit."""
    folder = Path(str(package.__file__)).resolve().parent
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            own = f"\nPPid:\t{os.getpid()}\n" in status.read_text()
            if own and Path(os.readlink(status.with_name("exe"))).is_relative_to(folder):
                os.kill(int(status.parent.name), signal.SIGKILL)


class Tracker(MetricsWriter):
    """Sends points to a tracker from a thread of its own."""

    def __init__(self, name: str, package: ModuleType, recipe: Recipe, *, done: int) -> None:
        """Start the tracker ``name`` in its thread; ``done`` are the optimizer steps before this start."""
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
        """Queue one point per value."""
        self._put((values, step))

    def _put(self, point: tuple[Mapping[str, float], int] | None) -> None:
        if not self._off:
            try:
                self._points.put_nowait(point)
            except queue.Full:
                self._turn_off(f"it has not taken the last {MOST_WAITING:,} points")

    def close(self, *, failed: bool) -> None:
        """Wait for the last points, unless the tracker stalls or takes longer than ``END_SECONDS`` for all."""
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
