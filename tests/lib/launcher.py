"""Run a script on two real ranks, on CPU with gloo.

`launch` does it as a user would, through the ``deepspeed`` launcher. `run_ranks` forks ranks from a process that has
imported everything (processes.py), in the environment that the launcher gives: a second each instead of ten. `on_ranks`
calls a function of a test file on these.
"""

import fcntl
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from launch.scripts import find_launcher
from tests.lib.patience import PATIENCE
from tests.lib.processes import start_python
from tests.lib.root import ROOT
from tests.lib.seeds import seed_of

GRACE = 60.0  # seconds that a rank has to end when another has failed
CALL = ROOT / "tests" / "distributed" / "scripts" / "call.py"

_PORTS = random.Random()  # fresh, or other runs of the same tests would want the same ports
_TAKEN: list[IO[str]] = []  # locks on the ports that this process has given away


def free_port() -> int:
    """Reserve a port that nothing listens on, for ranks that start seconds later.

    The system gives ports from 32768 on to outgoing connections, so this one is lower. A lock on a file
    keeps other processes of tests off it; the lock goes with this process.
    """
    while True:
        port = _PORTS.randrange(20000, 32000)
        lock = open(Path(tempfile.gettempdir()) / f"deepqat_tests_port_{port}", "w")  # noqa: SIM115 (kept open)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _TAKEN.append(lock)
        return port


def launch(script: Path | str, *args: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run ``script`` under the launcher and return what came of it: output of both streams together, exit code."""
    command = [find_launcher(), "--num_gpus", str(ranks), "--master_port", str(free_port()), str(script)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": _path()}
    return subprocess.run(
        [*command, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, **environment, "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")},
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
    )


def run_ranks(script: Path | str, *args: object, ranks: int = 2) -> str:
    """Run ``script`` on ranks; its output, or an AssertionError with the end of it unless it succeeds."""
    code, output = run_waiting(script, *args, ranks=ranks)
    assert code == 0, f"{script} {' '.join(map(str, args))} failed with {code}:\n{output[-8000:]}"
    return output


def on_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2) -> tuple[list[Any], str]:
    """Call a function of a module on ranks; what each of them returns, and the output of all."""
    with tempfile.TemporaryDirectory() as directory:
        call = Path(directory) / "call"
        call.write_bytes(pickle.dumps((function, args)))
        output = run_ranks(CALL, call, ranks=ranks)
        return [torch.load(call.with_suffix(f".{rank}"), weights_only=False) for rank in range(ranks)], output


def run_waiting(script: Path | str, *args: object, ranks: int = 2, timeout: float = PATIENCE) -> tuple[int, str]:
    """Run ``script`` on ranks, and wait for all of them; exit code and output.

    A rank that fails takes the others with it, as under the launcher.
    """
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PATH": _path()}
    program = f"from {__name__} import _run_script; _run_script()"
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        running = [
            start_python(program, script, *args, cwd=ROOT, out=log, err=log, environment={**environment, **of_rank})
            for of_rank in ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
        ]
        code, end = 0, time.monotonic() + timeout
        while running:
            wait([rank.sentinel for rank in running], timeout=1.0)
            for rank in [rank for rank in running if rank.exitcode is not None]:
                running.remove(rank)
                if rank.exitcode:  # a signal's number is below 0 and says more than what came of it on other ranks
                    code = min(code, rank.exitcode) if code else rank.exitcode
                    end = min(end, time.monotonic() + GRACE)
            if time.monotonic() > end:
                code = code or -signal.SIGKILL
                for rank in running:
                    rank.kill()
        return code, log.read_text(errors="replace")


def _path() -> str:
    """Return PATH with the folder of this Python, which has the launcher and ninja."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def _run_script() -> None:
    """Run what the launcher's process would from its first line on; on a rank."""
    _, script, *arguments = sys.argv
    for seeder in (random.seed, np.random.seed):
        seeder(seed_of(f"{Path(script).name} {os.environ['RANK']}"))
    sys.argv = [script, f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
