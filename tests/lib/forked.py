"""Jobs of several ranks, forked from one process that has imported everything: a second each instead of ten.

As by the deepspeed launcher, each rank has an environment and a process. Between the test and the ranks is a process
that can be killed, as the launcher can.
"""

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.lib.launcher import free_port
from tests.lib.patience import PATIENCE

PR_SET_CHILD_SUBREAPER = 36


class Job:
    """A job that runs ``action`` on every rank; what its ranks print goes to the end of ``log``."""

    def __init__(self, ranks: int, action: Callable[[], object], log: Path) -> None:
        self.log = log
        self._said = log.stat().st_size if log.exists() else 0
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks whose launcher is gone become children of this one
        read, write = os.pipe()
        self._launcher = os.fork()
        if self._launcher == 0:
            pids = []
            for rank in range(ranks):
                if (pid := os.fork()) == 0:
                    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                    become(action, log)
                pids.append(pid)
            os.write(write, " ".join(map(str, pids)).encode())
            signal.pause()
        self._running = set(map(int, os.read(read, 1000).split()))
        os.close(read)
        os.close(write)
        self._codes: list[int] = []

    def text(self) -> str:
        """Return the output of the ranks so far."""
        return self.log.read_bytes()[self._said :].decode(errors="replace") if self.log.exists() else ""

    def over(self) -> bool:
        """Return True if every rank has ended."""
        return all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in self._running)

    def wait(self, seconds: float) -> list[int] | None:
        """Exit codes of all ranks, None if they take longer than ``seconds``."""
        until = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > until:
                return None
            time.sleep(0.01)
        self.kill_launcher()
        while self._running:
            self._codes.append(os.waitstatus_to_exitcode(os.waitpid(self._running.pop(), 0)[1]))
        return self._codes

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        self.wait(PATIENCE)

    def kill_one(self) -> None:
        """SIGKILL to one of the ranks that run."""
        os.kill(next(iter(self._running)), signal.SIGKILL)

    def kill_launcher(self) -> None:
        """SIGKILL to the process that has started the ranks; they run on."""
        if self._launcher:
            os.kill(self._launcher, signal.SIGKILL)
            os.waitpid(self._launcher, 0)
            self._launcher = 0

    def finish(self) -> None:
        """Wait for the end; an error, with the end of the log, unless every rank ends with exit code 0."""
        codes = self.wait(PATIENCE)
        if codes is None:
            self.kill()
        if codes is None or any(codes):
            raise RuntimeError(f"the job ended with {codes}:\n{self.log.read_text()[-6000:]}")


def become(action: Callable[[], object], log: Path) -> None:
    """In the child: run the action as a process of its own."""
    gc.freeze()  # as in once.py
    code = 1
    try:
        with log.open("a") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
        action()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
