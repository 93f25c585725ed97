"""Processes of a job: one job at a time in a directory, ranks that do not meet, signals that stop a run."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from engine.cluster import job
from engine.cluster.job import RUNNING, RunLock, StopRequests, other_ranks
from model.ranks import RankError
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import CPU, run_python, start_python
from tests.lib.root import ROOT


@contextlib.contextmanager
def process(program: str, *argv: object, says: str):
    """Run a program in a process of its own, which has said this line, and the file of what it says; it is killed in
    the end."""
    with tempfile.TemporaryDirectory() as directory:
        out, err = (Path(directory) / name for name in ("out", "err"))
        out.touch()
        running = start_python(program, *argv, cwd=ROOT, out=out, err=err, environment={})
        try:
            until(lambda: out.read_text() == f"{says}\n", err.read_text)
            yield running, out
        finally:
            running.kill()
            running.join()


# One job at a time in a directory

HOLDS = """
import sys, time
from pathlib import Path
from engine.cluster.job import RunLock
with RunLock() as run_lock:
    run_lock.take(Path(sys.argv[1]))
    print("holds", flush=True)
    time.sleep(600)
"""


def take(directory: Path) -> None:
    with RunLock() as run_lock:
        run_lock.take(directory)


@pytest.fixture(params=["elsewhere"])
def left(tmp_path: Path, request) -> Path:
    """The mark of a job of another machine, or of this one."""
    path = tmp_path / RUNNING
    path.write_text(json.dumps({"host": request.param, "pid": 12, "started": "2026-01-01 00:00:00 UTC"}))
    return path


def test_a_second_job_is_refused_by_name_and_the_directory_is_free_after_a_kill(tmp_path):
    with process(HOLDS, tmp_path, says="holds") as (first, _):
        with pytest.raises(RankError, match=rf"output_dir: '{tmp_path}': the job of process {first.pid} "):
            take(tmp_path)
        assert (tmp_path / RUNNING).exists()  # the one that was refused removes nothing
    take(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with RunLock():
        pass  # that ended before it took anything


def test_a_rank_that_outlives_its_job_keeps_the_directory(tmp_path, left):
    """Rank 0 is dead, and another one still writes its part of a checkpoint."""
    said = "the job of process 12 on elsewhere, started 2026-01-01 00:00:00 UTC, runs in"
    with left.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(RankError, match=said):
            take(tmp_path)


@pytest.mark.parametrize("left", ["elsewhere", socket.gethostname()], indirect=True, ids=["other", "own"])
def test_a_job_lives_as_long_as_it_renews_its_file(tmp_path, monkeypatch, left):
    """As on a file system without locks between machines, or without any."""
    if socket.gethostname() in left.read_text():

        def without(*_: object) -> None:
            raise OSError(errno.ENOSYS, "no locks here")

        monkeypatch.setattr(fcntl, "flock", without)
    monkeypatch.setattr(job, "STALE_SECONDS", 1.5)
    end = threading.Event()

    def renew() -> None:
        while not end.wait(0.1):
            os.utime(left)

    renewer = threading.Thread(target=renew)
    renewer.start()
    with pytest.raises(RankError, match=r"the job of process 12 on .* runs in it"):
        take(tmp_path)
    end.set()
    renewer.join()
    long_ago = time.time() - 1000
    os.utime(left, (long_ago, long_ago))
    with RunLock() as second:
        second.take(tmp_path)
        assert json.loads(left.read_text())["pid"] == os.getpid()


def test_a_file_that_is_no_mark_of_a_job_is_replaced_and_a_link_refused(tmp_path):
    """A link in an output directory may be another user's; it is not written through."""
    for text in ("", "{", "[1]", '{"pid": 3}'):
        (tmp_path / RUNNING).write_text(text)
        take(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / RUNNING).symlink_to(victim)
    with pytest.raises(RankError, match=f"{tmp_path / RUNNING}: Too many levels of symbolic links"):
        take(tmp_path)
    assert victim.read_text() == "mine"


# A rank that does not meet the others says so in one line: there is no process group yet that could.

JOINS = """
from launch.exits import clean_exit
from engine.cluster.job import join_ranks
with clean_exit():
    join_ranks()
"""
# The processes of tests have imported DeepSpeed, which has chosen its accelerator; this chooses another.
CHOOSES = """
from deepspeed.accelerator import set_accelerator, {0}_accelerator as chosen
set_accelerator(chosen.{1}_Accelerator())
"""


def environment(rank: int, port: object) -> dict[str, str]:
    """Variables of a rank of two."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return {**CPU, **own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def test_a_peer_dies_before_the_process_group_exists(tmp_path):
    """Rank 0, which dies when rank 1 has found it and waits for what it will say."""
    read, write = os.pipe()
    if (first := os.fork()) == 0:
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        signal.pause()
    port = int(os.read(read, 10))
    out, err = tmp_path / "out", tmp_path / "err"
    second = start_python(JOINS, cwd=tmp_path, out=out, err=err, environment=environment(1, port))
    watching = TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
    until(lambda: any("joined/1" in key for key in watching.list_keys()), err.read_text)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    second.join(PATIENCE)
    said = err.read_text()
    assert second.exitcode == 1 and "Traceback" not in said, said
    *before, last = said.splitlines()  # before it torch's own warnings, from its C++ code
    assert last.startswith(f"error: rank 1 of 2 has not met the others at 127.0.0.1:{port} (")
    assert not any("error:" in line for line in before) and "what ended another rank" in last


NOT_MET = "rank 0 of 2 has not met the others at 127.0.0.1:"


@pytest.mark.parametrize(
    ("program", "changed", "said", "more"),
    [
        *(
            (JOINS, {name: "x"}, f"{name} is 'x' in the environment, expected a number: start", "")
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        ),
        (CHOOSES.format("mps", "MPS") + JOINS, {}, "DeepSpeed's accelerator is 'mps', expected cuda or cpu", ""),
        (CHOOSES.format("cuda", "CUDA") + JOINS, {}, "LOCAL_RANK is 0, but torch finds 0 CUDA devices here", ""),
        (JOINS, {"MASTER_PORT": "abc"}, f"{NOT_MET}abc (", "invalid literal for int()"),
        (JOINS, {"MASTER_PORT": "taken"}, f"{NOT_MET}taken (", "EADDRINUSE"),
    ],
)
def test_what_a_launcher_sets_is_wrong(tmp_path, program, changed, said, more):
    with contextlib.closing(socket.socket()) as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        taken = str(other.getsockname()[1])
        changed = {name: value.replace("taken", taken) for name, value in changed.items()}
        result = run_python(program, cwd=tmp_path, **{**environment(0, 1), **changed})
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"error: {said.replace('taken', taken)}") and more in last
    assert ("set another one" in last) == (more == "EADDRINUSE")
    assert program != JOINS or result.stderr.count("\n") == 1, result.stderr


# Signals as wishes, in one process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_a_wish_inside_and_what_it_was_outside(number):
    before = signal.getsignal(number)
    with StopRequests() as requests:
        assert not requests.requested
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert requests.requested and requests.signal == number
    assert signal.getsignal(number) == before
    with StopRequests() as again:
        assert not again.requested


# A dead peer is waited for without an end, as in a collective. The other one lives until this process ends.
WAITS = """
import subprocess, sys, threading, time
import psutil
from engine.cluster.job import StopRequests

dead = sys.argv[1] == "True"
with StopRequests() as requests:
    peer = subprocess.Popen([sys.executable, "-c", "pass" if dead else "input()"], stdin=subprocess.PIPE)
    requests._peers = [psutil.Process(peer.pid)]
    if dead:
        peer.wait()
    print("waiting", flush=True)
    if dead:
        threading.Event().wait()
    while not requests.requested:
        time.sleep(0.01)
    print("wished", flush=True)
peer.kill()
"""


@pytest.mark.parametrize("dead", [True, False])
def test_a_rank_whose_peer_is_dead_ends_at_once(dead):
    """It may never come back to Python from a collective; where all are alive the signal is only a wish."""
    with process(WAITS, dead, says="waiting") as (running, out):
        os.kill(running.pid, signal.SIGTERM)
        running.join(PATIENCE)
        assert running.exitcode == (1 if dead else 0)
        assert out.read_text() == ("waiting\n" if dead else "waiting\nwished\n")


def test_only_ranks_of_this_job_are_peers(monkeypatch):
    """A shell that starts ranks has other children: a ``tee``, ranks of another job."""
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    children = [{}, own, own | {"LOCAL_RANK": "1"}, own | {"LOCAL_RANK": "1", "MASTER_PORT": "29501"}]
    with contextlib.ExitStack() as stack:
        started = []
        for environment in children:
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
            stack.callback(child.wait)
            stack.callback(child.kill)
            started.append(child.pid)
        pairs = list(zip(started, children, strict=True))
        until(lambda: all(ours.items() <= psutil.Process(pid).environ().items() for pid, ours in pairs), str)
        assert [process.pid for process in other_ranks(psutil.Process())] == started[2:3]


LEAVES = """
import os, signal, threading
from engine.cluster.job import StopRequests

looks, leaves = threading.Event(), threading.Event()

class Peer:
    def is_running(self):
        looks.set()
        return not leaves.wait(0.5)

with StopRequests() as requests:
    requests._peers = [Peer(), Peer()]
    os.kill(os.getpid(), signal.SIGTERM)
    looks.wait()
leaves.set()
threading.Event().wait(1)
print("done")
"""


def test_a_peer_that_ends_after_this_rank_has_left_is_no_dead_one():
    """A look at the peers that is slow may not see the end of one that only began when all ranks were through."""
    done = run_python(LEAVES)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
