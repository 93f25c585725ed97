"""Python programs in processes of their own, forked from one that has imported everything: no seconds of imports each.

For programs on the CPU, of which the imports are no part of what is tested. The process that they come from is started
by the first of them, and ends with this one.
"""

import functools
import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from tests.lib.patience import PATIENCE
from tests.lib.root import ROOT

# What nearly every one of them imports, ranks of jobs too. Nothing here may compile the kernels, load them, start a
# thread or touch an accelerator.
COMMON = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "launch.compare",
    "launch.evaluate",
    "launch.export",
    "launch.train",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorboard.plugins.hparams.metadata",
    "tests.families.variants",
    "tests.lib.processes",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "tests.lib.once",  # the last
)
CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def start_python(
    program: str, *argv: object, cwd: Path, out: Path, err: Path, environment: Mapping[str, str]
) -> ForkServerProcess:
    """Start what ``python -c PROGRAM ARGV`` would run, in a session of its own.

    Args:
        program: the text of the program.
        argv: its arguments.
        cwd: where it runs.
        out, err: files at the end of which its standard output and its standard error come.
        environment: beside that of this process, and ``CPU``.
    """
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **CPU, **environment}
    arguments = (program, ["-c", *map(str, argv)], cwd, out, err, everything)
    process = _forks().Process(target=_become, args=arguments, daemon=True)
    process.start()
    return process


def run_python(
    program: str, *argv: object, cwd: Path = ROOT, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run what ``python -c PROGRAM ARGV`` would; its exit code and what it wrote."""
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory) / "out", Path(directory) / "err"
        process = start_python(program, *argv, cwd=cwd, out=out, err=err, environment=environment)
        process.join(timeout)
        assert process.exitcode is not None, f"{program} {argv} does not end:\n{err.read_text()[-8000:]}"
        return subprocess.CompletedProcess(argv, process.exitcode, out.read_text(), err.read_text())


@functools.cache
def _forks() -> ForkServerContext:
    """Forks of a process that has imported everything, for which there is no GPU."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(list(COMMON))
    before = {name: os.environ.get(name) for name in CPU}
    os.environ.update(CPU)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return forks


def _become(program: str, argv: list[str], cwd: Path, out: Path, err: Path, environment: dict[str, str]) -> None:
    """In the child: what a new interpreter would do."""
    os.setsid()
    for path, number, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
        setattr(
            sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", write_through=True)
        )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.path[:0] = argv, ["", str(ROOT)]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
