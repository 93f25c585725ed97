"""Python programs in processes of their own, forked from one that has imported everything: a second each, not six.

For programs of which the imports are no part of what is tested. The process that they come from is started by the
first of them, and ends with this one.
"""

import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.patience import PATIENCE
from tests.root import ROOT

# Nothing here may compile the kernels, load them or start a thread.
COMMON = ("tests.processes", "torch.utils.cpp_extension", "quant", "launch.train", "launch.compare")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(list(COMMON))


def start_python(
    program: str, *argv: object, cwd: Path, out: Path, err: Path, environment: Mapping[str, str]
) -> ForkServerProcess:
    """Start what ``python -c PROGRAM ARGV`` would run, in a session of its own.

    Args:
        program: the text of the program.
        argv: its arguments.
        cwd: where it runs.
        out: file for its standard output.
        err: file for its standard error.
        environment: beside that of this process.
    """
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    process = _FORKS.Process(
        target=_become, args=(program, ["-c", *map(str, argv)], cwd, out, err, everything), daemon=True
    )
    process.start()
    return process


def run_python(program: str, *argv: object, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run what ``python -c PROGRAM ARGV`` would; its exit code and what it wrote."""
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory) / "out", Path(directory) / "err"
        process = start_python(program, *argv, cwd=cwd, out=out, err=err, environment=environment)
        process.join(PATIENCE)
        assert process.exitcode is not None, f"{argv} has not ended"
        return subprocess.CompletedProcess(argv, process.exitcode, out.read_text(), err.read_text())


def _become(program: str, argv: list[str], cwd: Path, out: Path, err: Path, environment: dict[str, str]) -> None:
    """In the child: what a new interpreter would do."""
    os.setsid()
    for path, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
        setattr(
            sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", write_through=True)
        )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.path[0] = argv, ""
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
