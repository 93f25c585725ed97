"""Run tests of a copied tree in forks of a process that has imported torch, transformers and DeepSpeed."""

import contextlib
import ctypes
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil
import pytest

from tests.mutants.sites import FOLDERS

HEAVY = ("torch", "hypothesis", "transformers", "deepspeed", "safetensors.torch", "compressed_tensors.quantization")
HEAVY += (
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "jsonargparse",
)
MEMORY, FILE = 8 << 30, 2 << 30  # bytes that a mutant may take, and write to a file
PATIENCE = 4  # other programs may have the processors
PR_SET_CHILD_SUBREAPER = 36


class Plugin:
    """pytest's hooks: keep the tests of ``wanted``, in its order, and tell the outcome of each; with ``calls``, a file,
    also the functions that it calls, in forks too."""

    def __init__(self, tell: Callable[..., None], wanted: Sequence[str], calls: Path | None) -> None:
        self._tell, self._wanted, self._calls = tell, wanted, calls
        self._seconds: dict[str, float] = {}
        self._seen: set[CodeType] = set()
        self._root = f"{os.getcwd()}/"  # a test may change the directory
        if calls is not None:
            calls.write_bytes(b"")
            self._file, self._read = os.open(calls, os.O_APPEND | os.O_WRONLY), 0
            os.register_at_fork(after_in_child=self._seen.clear)
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _trace(self, frame: FrameType, *_: Any) -> None:
        code = frame.f_code
        if code not in self._seen:
            self._seen.add(code)
            name = code.co_filename.removeprefix(self._root)
            if name.startswith(FOLDERS):
                qualname = re.sub(r"(^|\.)<(?!locals).*", "", code.co_qualname).replace(".<locals>", "")
                os.write(self._file, f"{name}:{qualname}\n".encode())

    def _take(self, test: str) -> None:
        if self._calls is not None:
            text = self._calls.read_bytes()[self._read :]
            self._read += len(text)
            self._seen.clear()
            self._tell(test=test, calls=sorted(set(text.decode().split())))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        self._take("")
        try:
            yield
        finally:
            self._take(item.nodeid)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._wanted:
            place = {name: index for index, name in enumerate(self._wanted)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call":
            self._tell(test=name, outcome=report.outcome, seconds=round(self._seconds[name], 3))


def prepare(tree: Path, scratch: Path) -> None:
    """Copy a tree, compile it so that a change of any file is noticed, and import what is heavy."""
    shutil.rmtree(scratch, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", "build", "runs", "__pycache__", ".*_cache", ".venv*")
    shutil.copytree(tree, scratch, ignore=left_out, symlinks=True)
    python = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*python, *FOLDERS, "tests"], cwd=scratch, check=True)
    (kernels := scratch.parent / "kernels").mkdir(exist_ok=True)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1")
    os.environ.update(PYTHONPATH=str(scratch), TORCH_EXTENSIONS_DIR=str(kernels), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a mutant leaves behind is found below this process
    for name in HEAVY:
        importlib.import_module(name)


def run_tests(
    scratch: Path, arguments: Sequence[str], wanted: Sequence[str], limit: float, *, trace: bool = False
) -> tuple[int | None, list[dict[str, Any]]]:
    """Run pytest on ``scratch`` in a fork; return its exit code, and what was told of tests.

    The code is None after ``limit`` seconds of computing, or PATIENCE times as many of waiting.
    """
    told = scratch.parent / "told.jsonl"
    told.write_text("")
    if (pid := os.fork()) == 0:
        try:
            for kind, most in (("CPU", int(limit)), ("DATA", MEMORY), ("FSIZE", FILE)):
                resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
            _become(scratch, arguments, wanted, told, trace)
        finally:
            os._exit(3)
    end, status = time.monotonic() + PATIENCE * limit, None
    while status is None and time.monotonic() < end:
        ended, found = os.waitpid(pid, os.WNOHANG)
        status = found if ended else None
        time.sleep(0.0 if ended else 0.03)
    _kill_children()
    shutil.rmtree(scratch.parent / "tmp", ignore_errors=True)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    code = None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
    return code, [json.loads(line) for line in told.read_text().splitlines() if line.endswith("}")]


def _become(scratch: Path, arguments: Sequence[str], wanted: Sequence[str], told: Path, trace: bool) -> None:
    """In the fork: forget the modules of this tree, run pytest on the other one."""
    with (scratch.parent / "log.txt").open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    here = str(Path.cwd())
    os.chdir(scratch)
    sys.path[:] = [str(scratch), *(path for path in sys.path if path not in ("", here))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", *FOLDERS)]:
        del sys.modules[name]

    def tell(**message: Any) -> None:
        with told.open("a") as file:
            print(json.dumps(message), file=file)

    plugin = Plugin(tell, wanted, scratch.parent / "calls.txt" if trace else None)
    options = ["-q", "-x", "-m", "not full", "-p", "no:cacheprovider", "--tb=short"]
    options += [f"--rootdir={scratch}", f"--basetemp={scratch.parent / 'tmp'}"]
    os._exit(int(pytest.main([*options, *arguments], plugins=[plugin])))


def _kill_children() -> None:
    """End every process below this one."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, 0)[0]:
                pass
