"""One job at a time in a directory, whatever became of the one before."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine.cluster import job
from engine.cluster.job import RUNNING, RunLock
from model.ranks import RankError
from tests.lib.root import ROOT

HOLDS = """
import sys, time
from pathlib import Path
from engine.cluster.job import RunLock
with RunLock() as run_lock:
    run_lock.take(Path(sys.argv[1]), "output_dir")
    print("holds", flush=True)
    time.sleep(600)
"""


def write(path, host: str) -> None:
    path.write_text(json.dumps({"host": host, "pid": 12, "started": "2026-01-01 00:00:00 UTC"}))


def test_a_second_job_is_refused_by_name_and_the_directory_is_free_after_a_kill(tmp_path):
    job = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert job.stdout is not None and job.stdout.readline() == "holds\n"
        with (
            RunLock() as second,
            pytest.raises(RankError, match=rf"output_dir: '{tmp_path}': the job of process {job.pid} "),
        ):
            second.take(tmp_path, "output_dir")
        assert (tmp_path / RUNNING).exists()  # the one that was refused removes nothing
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    with RunLock() as next_job:
        next_job.take(tmp_path, "output_dir")
    assert list(tmp_path.iterdir()) == []
    with RunLock():
        pass  # that ended before it took anything


def test_a_rank_that_outlives_its_job_keeps_the_directory(tmp_path):
    """Rank 0 is dead, and another one still writes its part of a checkpoint."""
    write(tmp_path / RUNNING, "elsewhere")
    with (tmp_path / RUNNING).open("r+") as left, RunLock() as next_job:
        fcntl.flock(left, fcntl.LOCK_SH)
        with pytest.raises(
            RankError, match="the job of process 12 on elsewhere, started 2026-01-01 00:00:00 UTC, runs in"
        ):
            next_job.take(tmp_path, "output_dir")


def test_a_job_of_another_machine_lives_as_long_as_it_renews_its_file(tmp_path, monkeypatch):
    """As on a file system without locks between machines."""
    monkeypatch.setattr(job, "STALE_SECONDS", 1.5)
    write(tmp_path / RUNNING, "elsewhere")
    end = threading.Event()

    def renew() -> None:
        while not end.wait(0.1):
            os.utime(tmp_path / RUNNING)

    renewer = threading.Thread(target=renew)
    renewer.start()
    with RunLock() as second, pytest.raises(RankError, match="on elsewhere"):
        second.take(tmp_path, "output_dir")
    end.set()
    renewer.join()
    long_ago = time.time() - 1000
    os.utime(tmp_path / RUNNING, (long_ago, long_ago))
    with RunLock() as second:
        second.take(tmp_path, "output_dir")
        assert json.loads((tmp_path / RUNNING).read_text())["pid"] == os.getpid()


def test_what_is_no_mark_of_a_job_is_in_nobodys_way(tmp_path):
    for text in ("", "{", "[1]", '{"pid": 3}'):
        (tmp_path / RUNNING).write_text(text)
        with RunLock() as job:
            job.take(tmp_path, "output_dir")


def test_a_link_that_lies_ready_is_not_written_through(tmp_path):
    """As an output directory of somebody else may have it."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / RUNNING).symlink_to(victim)
    with RunLock() as job, pytest.raises(RankError, match=rf"symbolic links: '{tmp_path / RUNNING}'"):
        job.take(tmp_path, "output_dir")
    assert victim.read_text() == "mine"
