"""Two ranks that have imported everything, in the environment that the launcher gives: a job starts in a second.

Each process of tests starts its own at its first job. How the launcher starts and ends a job is tested by those who
call ``launcher.launch``.
"""

import atexit
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.lib.patience import PATIENCE
from tests.lib.processes import start_python
from tests.lib.root import ROOT

PROGRAM = "from tests.distributed.scripts.waiting import main; main()"
RANKS = 2
GRACE = 60.0  # seconds that a rank has to end when the other has failed


class WaitingRanks:
    """Ranks that wait for jobs until this process ends."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="deepqat_ranks_"))
        atexit.register(shutil.rmtree, self._directory, ignore_errors=True)
        self._log = self._directory / "log"
        self._log.touch()
        address = str(self._directory / "socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(RANKS)
            server.settimeout(1.0)
            started = [self._start(rank, address) for rank in range(RANKS)]
            self._ranks = sorted((self._accept(server, started) for _ in range(RANKS)), key=lambda rank: rank.number)

    def _start(self, rank: int, address: str) -> ForkServerProcess:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS}
        place |= {"CROSS_RANK": 0, "CROSS_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        environment = {name: str(value) for name, value in place.items()}
        return start_python(PROGRAM, address, cwd=ROOT, out=self._log, err=self._log, environment=environment)

    def _accept(self, server: socket.socket, started: list[ForkServerProcess]) -> "_Rank":
        end = time.monotonic() + PATIENCE
        while all(rank.exitcode is None for rank in started) and time.monotonic() < end:
            try:
                return _Rank(server.accept()[0])
            except TimeoutError:
                continue
        for rank in started:
            rank.kill()
        raise RuntimeError(f"no ranks to run jobs on:\n{self._log.read_text()[-4000:]}")

    def run(self, argv: list[str], environment: dict[str, str], timeout: float) -> tuple[int, str]:
        """Exit code and output of a job. A rank that fails takes the other with it, as under the launcher."""
        log = self._directory / "job"
        log.write_text("")
        for rank in self._ranks:
            rank.start({"argv": argv, "environment": environment, "log": str(log)})
        end = time.monotonic() + timeout
        running, code = list(self._ranks), 0
        while running:
            ready, _, _ = select.select([rank.connection for rank in running], [], [], 1.0)
            for rank in [rank for rank in running if rank.connection in ready]:
                running.remove(rank)
                ended = rank.receive("code")
                if ended:  # a signal's number is below 0 and says more than what came of it on the other rank
                    code, end = min(code, ended) if code else ended, min(end, time.monotonic() + GRACE)
            if running and time.monotonic() > end:
                for rank in running:
                    os.kill(rank.pid, signal.SIGKILL)
                code, end = code or -signal.SIGKILL, time.monotonic() + PATIENCE
        return code, log.read_text(errors="replace")


class _Rank:
    """The socket to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self.connection = connection
        self._lines = connection.makefile("rw")
        self.number = self.receive("rank")
        self.pid = 0

    def start(self, job: dict[str, Any]) -> None:
        """Send a job; the process that runs it is there when this returns."""
        print(json.dumps(job), file=self._lines, flush=True)
        self.pid = self.receive("pid")

    def receive(self, what: str) -> int:
        """The value of the next message, which must have this name."""
        line = self._lines.readline()
        if not line:
            raise RuntimeError("a rank that waited for jobs has ended")
        return int(json.loads(line)[what])
