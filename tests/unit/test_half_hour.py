"""The half hour on a new GPU: its driver, and that its jobs ask for what there is (`make test-half-hour` runs them)."""

import re
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import operators
from benchmarks.gpu.half_hour import Stage
from benchmarks.gpu.kernel_times import kind_of
from benchmarks.gpu.stages import MORE_TRAININGS, STAGES, TRAININGS, Job, Place
from benchmarks.gpu.train import recipe_of
from engine.config.reading import parse_recipe
from quant.kernels import prepare_kernels
from quant.kernels.registration import SCHEMAS
from tests.root import ROOT
from tests.tiny import tiny_checkpoint


@pytest.fixture
def place(tmp_path) -> Place:
    for name in ("out/logs", "work/model"):
        (tmp_path / name).mkdir(parents=True)
    return Place(tmp_path / "out", tmp_path / "work", dry=True)


def python(name: str, code: str, limit: int = 60, shown: str = "good") -> Job:
    return Job(name, limit, [sys.executable, "-c", code], shown)


def test_what_fails_does_not_stop_the_rest_and_what_hangs_is_ended_with_all_that_it_started(place):
    child = place.work / "child"
    hangs = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"])
open({str(child)!r}, "w").write(str(child.pid))
time.sleep(100000)
"""
    jobs = [
        python("fails", "import sys; print('bad'); sys.exit(3)"),
        python("hangs", hangs, limit=5),
        python("works", "print('good news'); print('the rest')"),
    ]
    failed = Stage("X", place, limit=120).run(jobs)
    assert failed == ["fails", "hangs"]
    summary = (place.out / "summary_X.txt").read_text()
    assert re.sub(r"\d+ s", "n s", summary).splitlines() == [
        "[fails] exit code 3, n s",
        "    bad",
        "[hangs] exit code 124, n s",
        "[works] exit code 0, n s",
        "    good news",
        "stage X: n s; failed or left out: fails, hangs",
    ]
    assert (place.out / "logs" / "X_works.log").read_text() == "good news\nthe rest\n"
    until = time.monotonic() + 10
    while Path(f"/proc/{child.read_text()}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert "sleep" not in _command_of(child.read_text())


def _command_of(pid: str) -> str:
    """Of a process that lives; one that nobody has waited for has none."""
    file = Path(f"/proc/{pid}/cmdline")
    return file.read_text() if file.exists() else ""


def test_what_has_no_time_left_is_left_out(place):
    assert Stage("X", place, limit=1).run([python("late", "")]) == ["late"]
    assert "[late] left out: 1 s left" in (place.out / "summary_X.txt").read_text()


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_jobs_ask_for_what_there_is(stage, dry, tmp_path):
    """Scripts and tests exist; names are unique; limits leave no job without its time where all others are quick."""
    jobs = STAGES[stage](Place(tmp_path / "out", tmp_path / "work", dry))
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        words = [word for word in job.command if word.endswith(".py") or word.startswith("tests/")]
        assert words and all((ROOT / word).exists() for word in words), job.command
        assert 0 < job.limit < 570 and re.compile(job.shown)


@pytest.mark.parametrize("name", [*TRAININGS, *MORE_TRAININGS])
def test_the_options_of_every_training_are_those_of_a_recipe(name, place):
    tiny_checkpoint(place.work / "model" / "random", even=True)
    (place.work / "model" / "train.txt").write_text("text")
    path = place.work / "recipe.yaml"
    path.write_text(str(recipe_of(name, place.work, dry=True)).replace("True", "true").replace("False", "false"))
    options = [option for option in {**TRAININGS, **MORE_TRAININGS}[name] if option != "--profile"]
    parse_recipe(["--config", str(path), *options])


class Names(TorchDispatchMode):
    """Keeps the names of our operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        self.called |= {name} if space == "deepqat" else set()
        return func(*args, **(kwargs or {}))


def test_sanitizers_see_every_operator():
    prepare_kernels()
    x, grad = torch.randn(2, 3, 64).bfloat16()
    with Names() as names:
        operators.fixed_grids(x, grad)
        operators.dynamic_grids(x, grad)
        operators.rows_of_experts(x)
        operators.norms_and_swiglu(x, grad)
        operators.gradients_in_fp8(grad)
    assert {schema.partition("(")[0] for schema in SCHEMAS} == names.called


def test_kernels_are_sorted_by_what_they_are_for():
    kinds = {
        "void deepqat::elementwise<...>": "our kernels",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT": "GEMM",
        "pytorch_flash::flash_fwd_kernel": "attention",
        "ncclDevKernel_AllGather_RING_LL": "communication",
        "multi_tensor_apply_kernel": "optimizer",
        "Memcpy HtoD (Pinned -> Device)": "copy and fill",
        "vectorized_elementwise_kernel": "elementwise and rest",
    }
    assert {name: kind_of(name) for name in kinds} == kinds
