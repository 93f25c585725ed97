"""Jobs of several ranks, forked from one process that has imported everything: a second each instead of ten.

What the deepspeed launcher does for a job, without the launcher: an environment for each rank, one process each.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.distributed.launcher import free_port
from tests.patience import PATIENCE


class Job:
    """A job that runs ``action`` on every rank; what its ranks print goes to the end of ``log``."""

    def __init__(self, ranks: int, action: Callable[[], object], log: Path) -> None:
        self.log = log
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        self._running = set()
        self._codes: list[int] = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
                become(action, log)
            self._running.add(pid)

    def wait(self, seconds: float) -> list[int] | None:
        """Exit codes of all ranks, None if they take longer than ``seconds``."""
        until = time.monotonic() + seconds
        while self._running:
            for pid in list(self._running):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._running.remove(pid)
                    self._codes.append(os.waitstatus_to_exitcode(status))
            if self._running and time.monotonic() > until:
                return None
            time.sleep(0.01)
        return self._codes

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        self.wait(PATIENCE)

    def kill_one(self) -> None:
        """SIGKILL to one of the ranks that run."""
        os.kill(next(iter(self._running)), signal.SIGKILL)

    def finish(self) -> None:
        """Wait for the end; an error, with the end of the log, unless every rank ends with exit code 0."""
        codes = self.wait(PATIENCE)
        if codes is None:
            self.kill()
        if codes is None or any(codes):
            raise RuntimeError(f"the job ended with {codes}:\n{self.log.read_text()[-6000:]}")


def become(action: Callable[[], object], log: Path) -> None:
    """In the child: run the action as a process of its own."""
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
