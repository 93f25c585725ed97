"""Ranks that meet, or name those that are missing, and gloo's threads at the end of a process."""

import errno
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from model import ranks
from model.ranks import RankError, _wait_for_gloo, made_by_main, meet, words_of
from tests.lib.launcher import free_port
from tests.lib.patience import PATIENCE


def test_ranks_meet_while_rank_0_waits_for_something_else(monkeypatch):
    """A collective may last 10 minutes, a server that rank 0 waits for longer."""
    met, go = [], threading.Event()

    def from_main(value):
        met.append(value)
        if len(met) == 3:
            go.set()
        return value

    monkeypatch.setattr(ranks, "MEET_SECONDS", 0.02)
    monkeypatch.setattr(ranks, "from_main", from_main)
    assert made_by_main(lambda: go.wait(PATIENCE) and "made") == "made"
    assert len(met) >= 4 and met[-1] == (True, "made") and set(met[:-1]) == {(False, None)}
    with pytest.raises(ZeroDivisionError):
        made_by_main(lambda: 1 / 0)


def test_an_error_is_described_without_a_working_directory(tmp_path, monkeypatch):
    """An exception instead of a description would leave the other ranks in a collective."""
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = words_of(FileNotFoundError(errno.ENOENT, "No such file or directory", "runs/a"))
    expected = "the working directory is missing: was it removed, or its disk unmounted?"
    assert found == f"runs/a: No such file or directory; {expected}"
    assert words_of(PermissionError(errno.EACCES, "Permission denied", "/")) == "/: Permission denied"


def test_a_thread_of_gloo_that_works_is_waited_for():
    """The thread works without Python's GIL, like one that has woken its waiter and has not yet dropped its tensors.
    The abort itself occurs once in about twenty exits, and cannot be provoked."""
    named, done, end, data = threading.Event(), [], threading.Event(), bytes(2**28)

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        named.set()
        hashlib.sha256(data)
        done.append(True)
        end.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    named.wait()
    _wait_for_gloo()
    assert done, "left before the thread was idle"
    end.set()
    thread.join()


# A rank is known to the others well within two seconds, at a load of 20 too, and waits four for one that never comes.
UNTIL_NOTICE, UNTIL_END = 2.0, timedelta(seconds=4)


def joins(number: int, port: int, log: Path, *, all_come: bool, **environment: str) -> int:
    """Fork a rank of three that meets the others, if they come; return its process id."""
    if (pid := os.fork()) == 0:
        sys.stdout = log.open("w")
        os.environ.update(environment)
        os.environ.update(RANK=str(number), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        ranks.NOTICE_SECONDS = PATIENCE if all_come else UNTIL_NOTICE
        try:
            store = meet(timedelta(seconds=PATIENCE) if all_come else UNTIL_END)
            ranks.say("met")
            store.add("left", 1)
            while number == 0 and store.add("left", 0) < 3:  # the others read from rank 0
                time.sleep(0.01)
            os._exit(0)
        except RankError as error:
            ranks.say(f"error: {error}")
        finally:
            os._exit(1)
    return pid


@pytest.mark.parametrize(
    ("started", "notice", "end"),
    [
        ((0, 1, 2), "", "met"),
        ((0, 1), " waits for rank 2 of 3 at 127.0.0.1:", " has waited 0:00:04 for rank 2 of 3 at 127.0.0.1:"),
        ((1, 2), " waits for rank 0 of 3 at", " has waited 0:00:04 for rank 0 of 3 at"),
        ((0, 1, 1), "", "error: RANK is 1 in two processes, expected another number in each"),
    ],
)
def test_each_rank_names_those_that_never_start(tmp_path, started, notice, end):
    """And first, after a minute, the ranks that it waits for."""
    logs, port = [tmp_path / str(index) for index in range(len(started))], free_port()
    come = len(started) == 3
    pids = [joins(number, port, log, all_come=come) for number, log in zip(started, logs, strict=True)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [end != "met"] * len(started)
    for log in logs:
        *before, last = log.read_text().splitlines()
        assert end in last and ("waited" not in end or "check that WORLD_SIZE is the number of" in last), last
        assert [notice in line for line in before] == [True] * bool(notice), before


@pytest.fixture
def agent() -> Iterator[int]:
    """Port of a store in a process of its own: to fork a rank beside the threads of a store may hang the rank."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        signal.pause()
    yield int(os.read(read, 10))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)


def test_ranks_that_torchrun_restarts_do_not_meet_those_of_before(tmp_path, agent):
    for attempt, started, code in (("0", (0, 1), 1), ("1", (0, 1, 2), 0), ("2", (1, 2), 1)):
        kept = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": attempt}
        logs = [tmp_path / f"{attempt}-{number}" for number in started]
        come = len(started) == 3
        pids = [joins(number, agent, log, all_come=come, **kept) for number, log in zip(started, logs, strict=True)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [code] * len(started), [log.read_text() for log in logs]
        missing = {"0": " for rank 2 of 3", "1": "met", "2": " for rank 0 of 3"}[attempt]
        assert all(missing in log.read_text() for log in logs)
