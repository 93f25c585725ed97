"""Runs on two ranks that report to the real packages of trackers, offline: what lands, and that a stall ends nothing.

Each needs the package that its extra installs: see `make test-trackers`.
"""

import importlib.util
import json
import math
import os
import pickle
import re
import signal
import socket
import sqlite3
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.metrics import STARTS
from model.ranks import is_main
from tests.lib.launcher import CALL, launch, on_ranks
from tests.lib.patience import until
from tests.lib.recipes import write_chats, write_recipe
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.lib.variants import NO_TEACHER

Points = dict[int, dict[str, Any]]
NAMES = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is missing"))
    for name in STARTS
]
STEPS = 4
OWN = {"own/infinite": math.inf, "own/nan": math.nan}


def report(base: Path, name: str, environment: dict[str, str]) -> None:
    """Train, log points that are not finite, and resume."""
    os.environ.update(environment)
    recipe = load_recipe(base / "run.yaml")
    for resume, steps in ((False, STEPS // 2), (True, STEPS)):
        recipe.train.resume, recipe.train.steps = resume, steps
        loop = Loop(recipe)
        loop.at(1)(lambda state: state.log(OWN))
        loop.run()


def wandb_runs(base: Path) -> Iterator[tuple[str, Any, Points, bool]]:
    """Read each run's file: blocks of 32 KiB with records that have seven bytes in front, as LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted((base / "run" / "wandb").glob("offline-run-*/*.wandb")):
        content, at, whole = file.read_bytes(), 7, b""
        points: Points = {}
        name, config, ended = "", {}, False
        while at < len(content):
            if (left := 2**15 - at % 2**15) < 7:
                at += left
                continue
            _, length, part = struct.unpack("<IHB", content[at : at + 7])
            whole += content[at + 7 : at + 7 + length]
            at += 7 + length
            if part not in (1, 4):  # whole, or the last part
                continue
            record = Record.FromString(whole)
            whole = b""
            if record.HasField("run"):
                name = record.run.display_name
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("history"):
                values = {item.nested_key[0] if item.nested_key else item.key: item for item in record.history.item}
                own = {key: json.loads(item.value_json) for key, item in values.items() if "/" in key}
                points.setdefault(record.history.step.num, {}).update(own)
            ended |= record.HasField("exit") and record.exit.exit_code == 0
        yield name, config["train"]["steps"], points, ended


def mlflow_runs(base: Path) -> Iterator[tuple[str, Any, Points, bool]]:
    with sqlite3.connect(base / "mlflow.db") as db:
        (experiment,) = db.execute("SELECT name FROM experiments WHERE name != 'Default'").fetchone()
        assert experiment == "deepqat"
        for run, name, status in db.execute("SELECT run_uuid, name, status FROM runs ORDER BY start_time").fetchall():
            points: Points = {}
            metrics = db.execute("SELECT step, key, value, is_nan FROM metrics WHERE run_uuid = ?", [run])
            for step, key, value, is_nan in metrics:
                points.setdefault(step, {})[key] = math.nan if is_nan else value
            query = "SELECT value FROM params WHERE run_uuid = ? AND key = 'train.steps'"
            yield name, int(db.execute(query, [run]).fetchone()[0]), points, status == "FINISHED"


def trackio_runs(base: Path) -> Iterator[tuple[str, Any, Points, bool]]:
    with sqlite3.connect(base / "trackio" / "deepqat.db") as db:
        for run, name, config in db.execute("SELECT run_id, run_name, config FROM configs ORDER BY id").fetchall():
            points: Points = {}
            for step, values in db.execute("SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id", [run]):
                points.setdefault(step, {}).update(json.loads(values))
            yield name, json.loads(config)["train"]["steps"], points, True


def servers() -> list[int]:
    """List the processes that this one has of wandb, which write its files."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended
            own = f"\nPPid:\t{os.getpid()}\n" in status.read_text()
            if own and "wandb-core" in os.readlink(status.with_name("exe")):
                found.append(int(status.parent.name))
    return found


def lose_server(base: Path, number: int) -> None:
    """Train, and send a signal to the process of wandb after the second step."""
    loop = Loop(load_recipe(base / "run.yaml"))

    @loop.at(2)
    def lose(state: LoopState) -> None:
        if is_main():
            until(servers, lambda: "wandb has no process")
            for server in servers():
                os.kill(server, number)

    loop.run()


RUNS: dict[str, Callable[[Path], Iterator[tuple[str, Any, Points, bool]]]] = {
    "wandb": wandb_runs,
    "mlflow": mlflow_runs,
    "trackio": trackio_runs,
}


def write(base: Path, name: str) -> Path:
    model, chats = tiny_checkpoint(base / "model", layers=1), write_chats(base / "chats.jsonl")
    train = {"steps": STEPS, "checkpoint_every": 2, "report_to": [name]}
    return write_recipe(base, "run", model, chats, stage=1, train=train, loss=NO_TEACHER)


def check_off(base: Path, name: str, ended: subprocess.CompletedProcess[str]) -> None:
    """Check that the run trained to its end, and said in one line that the tracker is off."""
    assert ended.returncode == 0, ended.stdout[-8000:]
    (line,) = re.findall(rf"warning: {name}: .*", ended.stdout)
    assert "it is off from here on, and the run goes on (metrics.jsonl has all points)" in line
    lines = [json.loads(line) for line in (base / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_gets_each_point_of_each_step_once(tmp_path, name):
    write(tmp_path, name)
    environment = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    _, said = on_ranks(report, tmp_path, name, {**environment, "TRACKIO_DIR": str(tmp_path / "trackio")})
    assert not re.search(rf"warning: {name}", said) and said.count(f"\n{name}: ") == 2, said
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    runs = [*RUNS[name](tmp_path)]
    assert [(label, steps, ended) for label, steps, _, ended in runs] == [
        ("run", STEPS // 2, True),
        (f"run from step {STEPS // 2}", STEPS, True),
    ]
    found = {step: values for _, _, points, _ in runs for step, values in points.items()}
    assert sorted(found) == [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    for line in lines:
        for key, value in line.items():
            if key in ("step", "time") or isinstance(value, dict):  # histograms are TensorBoard's
                continue
            if key in OWN:  # some have texts of their own for these, or a largest number
                assert key in found[line["step"]]
            else:
                assert float(found[line["step"]][key]) == pytest.approx(value, rel=1e-6), key


@pytest.mark.parametrize("name", [one for one in NAMES if one.values[0] != "trackio"])  # it has no server
def test_a_server_that_takes_all_and_answers_nothing_ends_no_run(tmp_path, name, monkeypatch):
    """Through the launcher, so that a package's own end of the process is there, too."""
    recipe = write(tmp_path, name)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for key, value in {"WANDB_BASE_URL": url, "WANDB_API_KEY": "x" * 40, "MLFLOW_TRACKING_URI": url}.items():
            monkeypatch.setenv(key, value)
        ended = launch(ROOT / "launch" / "train.py", "--config", recipe)
    check_off(tmp_path, name, ended)


@pytest.mark.parametrize("name", [one for one in NAMES if one.values[0] == "wandb"])  # alone has a process of its own
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stalls_ends_no_run(tmp_path, name, number, monkeypatch):
    write(tmp_path, name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "call").write_bytes(pickle.dumps((lose_server, (tmp_path, number))))
    check_off(tmp_path, name, launch(CALL, tmp_path / "call"))
