"""Run tests of a tree in forks of a process that has imported torch, transformers and DeepSpeed."""

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tests.mutants.sites import FOLDERS

HEAVY = (
    *("torch", "numpy", "pytest", "hypothesis", "transformers", "deepspeed", "safetensors.torch", "tokenizers", "yaml"),
    *("compressed_tensors.quantization", "deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.tensorboard"),
    *("torch.utils.cpp_extension", "transformers.models.llama.modeling_llama", "jsonargparse", "jinja2", "psutil"),
    *("transformers.models.auto.tokenization_auto", "transformers.convert_slow_tokenizer", "typeshed_client"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
)
MEMORY, FILE = 8 << 30, 2 << 30  # bytes that a mutant may take, and write to a file
PATIENCE = 4  # other programs may have the processors
PR_SET_CHILD_SUBREAPER = 36


@dataclass(eq=False)
class Plugin:
    """pytest's hooks: keep the tests of ``wanted``, in its order, and tell the outcome of each."""

    tell: Callable[..., None]
    wanted: Sequence[str] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.wanted:
            place = {name: index for index, name in enumerate(self.wanted)}
            items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.tell(test=report.nodeid, outcome="error", seconds=0.0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration
        if report.outcome != "passed" or name not in self.outcomes:
            self.outcomes[name] = report.outcome
        if report.when == "teardown":
            self.tell(test=name, outcome=self.outcomes[name], seconds=round(self.seconds[name], 3))


def prepare(tree: Path, scratch: Path) -> None:
    """Copy a tree, compile it so that a change of any file is noticed, and import what is heavy."""
    shutil.rmtree(scratch, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", "build", "runs", "__pycache__", ".*_cache", ".venv*")
    shutil.copytree(tree, scratch, ignore=left_out, symlinks=True)
    folders = [folder for folder in (*FOLDERS, "tests") if (scratch / folder).exists()]
    python = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*python, *folders], cwd=scratch, check=True)
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1")
    os.environ["PYTHONPATH"] = str(scratch)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(scratch.parent / "kernels")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a mutant leaves behind is found below this process
    for name in HEAVY:
        importlib.import_module(name)


def run_tests(
    scratch: Path,
    arguments: Sequence[str],
    wanted: Sequence[str],
    limit: float,
    plugins: Sequence[Callable[..., Any]] = (),
) -> tuple[int | None, list[dict[str, Any]]]:
    """Run pytest on ``scratch`` in a fork; its exit code, and what was told of tests.

    The code is None after ``limit`` seconds of computing, or PATIENCE times as many of waiting.
    """
    told, log = scratch.parent / "told.jsonl", scratch.parent / "log.txt"
    told.write_text("")
    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit)))
        _become(scratch, arguments, Plugin(_teller(told), wanted), log, plugins)
    end, code = time.monotonic() + PATIENCE * limit, None
    while code is None and time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.0 if ended else 0.03)
    _kill_children()
    shutil.rmtree(scratch.parent / "tmp", ignore_errors=True)
    code = None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
    return code, [json.loads(line) for line in told.read_text().splitlines() if line.endswith("}")]


def _teller(path: Path) -> Callable[..., None]:
    def tell(**message: Any) -> None:
        with path.open("a") as file:
            print(json.dumps(message), file=file)

    return tell


def _become(
    scratch: Path, arguments: Sequence[str], plugin: Plugin, log: Path, plugins: Sequence[Callable[..., Any]]
) -> None:
    """In the fork: forget the modules of this tree, run pytest on the other one."""
    code: int = 3
    try:
        with log.open("w") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
        for kind, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_FSIZE, FILE)):
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
        os.chdir(scratch)
        here = str(Path(__file__).resolve().parents[2])
        sys.path[:] = [str(scratch), *(path for path in sys.path if path not in ("", here))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", *FOLDERS)]:
            del sys.modules[name]
        _fork_instead()
        import pytest

        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ["-q", "-x", "-m", "not full", "-p", "no:cacheprovider", "--tb=short"]
        options += [f"--rootdir={scratch}", f"--basetemp={scratch.parent / 'tmp'}"]
        made = [make(plugin.tell) for make in plugins]
        code = int(pytest.main([*options, *arguments], plugins=[plugin, *made]))
    finally:
        os._exit(code)


def _fork_instead() -> None:
    """Let processes that tests take from a fork server be forks of the test's: all that is heavy is imported there."""
    forks = multiprocessing.get_context("fork")
    forks.set_forkserver_preload = lambda names: [importlib.import_module(name) for name in names]  # type: ignore
    of_method = multiprocessing.get_context
    multiprocessing.get_context = lambda name=None: forks if name == "forkserver" else of_method(name)  # type: ignore
    forkserver.ensure_running = lambda: None


def _kill_children() -> None:
    """End every process below this one."""
    import psutil

    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        try:
            while os.waitpid(-1, 0)[0]:
                pass
        except ChildProcessError:
            pass
