"""Run a script on two real ranks, on CPU with gloo.

`launch` does it as a user would, through the ``deepspeed`` launcher. `run_ranks` takes ranks that wait for jobs, in the
environment that the launcher gives (see waiting.py). `on_ranks` calls a function of a test file on these.
"""

import fcntl
import functools
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from launch.scripts import find_launcher
from tests.lib.patience import PATIENCE
from tests.lib.processes import CPU
from tests.lib.root import ROOT
from tests.lib.waiting import RANKS, WaitingRanks

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


def launch(
    script: Path | str, *args: object, ranks: int = 2, timeout: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Run ``script`` under the launcher and return what came of it: output of both streams together, exit code."""
    return subprocess.run(
        [*_command(ranks), str(script), *map(str, args)],
        cwd=ROOT,
        env=_environment(),
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
    )


def run_ranks(script: Path | str, *args: object, timeout: float = PATIENCE) -> str:
    """Run ``script`` on two waiting ranks; its output, or an AssertionError with the end of it unless it succeeds."""
    code, output = run_waiting(script, *args, timeout=timeout)
    assert code == 0, f"{script} {' '.join(map(str, args))} failed with {code}:\n{output[-8000:]}"
    return output


def on_ranks(function: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> tuple[list[Any], str]:
    """Call a function of a module on two waiting ranks; what each of them returns, and the output of both."""
    with tempfile.TemporaryDirectory() as directory:
        call = Path(directory) / "call"
        call.write_bytes(pickle.dumps((function, args)))
        output = run_ranks(CALL, call, timeout=timeout)
        return [torch.load(call.with_suffix(f".{rank}"), weights_only=False) for rank in range(RANKS)], output


def run_waiting(script: Path | str, *args: object, timeout: float = PATIENCE) -> tuple[int, str]:
    """Run ``script`` on two waiting ranks; exit code and output of both."""
    environment = {**_environment(), **CPU, "MASTER_PORT": str(free_port())}
    return _waiting().run([str(script), *map(str, args)], environment, timeout)


@functools.cache
def _waiting() -> WaitingRanks:
    return WaitingRanks()


def _command(ranks: int) -> list[str]:
    return [find_launcher(), "--num_gpus", str(ranks), "--master_port", str(free_port())]


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
    }
