"""The first half hour on a new GPU: correctness, the speed of the parts, the speed of training.

    python benchmarks/gpu/half_hour.py A --out runs/gpu        (then B, then C; docs/gpu.md says what each decides)

Each stage ends within ``--limit`` seconds, so that a machine that is lent for minutes at a time runs one after the
other. Its jobs are commands with limits of their own, the most telling first; one that fails does not stop the rest.
Their output goes to ``OUT/logs``, tables to ``OUT``, and the lines that count to ``OUT/summary_<stage>.txt``. With
``--dry`` all jobs run in tiny sizes on the CPU; with ``--only`` those that are named run, after a repair.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST = 15  # seconds: a job that has fewer is left out
ROOM = 40 * 2**30  # bytes that the model of stage B and its export take
SLOWER = 4  # limits of jobs on a CPU, where torch.compile has a C++ compiler to wait for
LINES = 12  # of a job that failed, for the summary
HERE = "benchmarks/gpu"
PASSED = r".* (passed|skipped|failed)|FAILED"


@dataclass(frozen=True)
class Place:
    """Folders and size of a stage.

    Attributes:
        out: folder of the results to keep.
        work: folder of models and exports.
        dry: True for tiny models, on the CPU.
    """

    out: Path
    work: Path
    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        limit: seconds after which it is stopped.
        shown: what the lines of its output that go to the summary begin with, a regular expression.
    """

    name: str
    limit: int
    command: list[str]
    shown: str = r"(?!)"  # none


def stage_a(place: Place) -> list[Job]:
    """Tests, then the speed of GEMMs, kernels and a step."""
    step = [*_benchmark(place, "step"), "--rounds"]
    return [
        _build(place),
        Job("tests", 260, _tests(place, "tests/gpu", "--ignore", "tests/gpu/test_compile.py"), PASSED),
        Job("gemms", 80, _python("parts.py", "gemms", *_dry(place)), r".*TFLOP/s|copy"),
        Job("experts", 60, _python("parts.py", "experts", *_dry(place)), r".*TFLOP/s|.*: (yes|no)"),
        Job(
            "kernels", 130, [*_benchmark(place, "quant_kernels"), "--no-compile", "--rounds", "15"], r".*missed|Met by"
        ),
        Job("step_layer", 100, [*step, "20", "--layer-only", *_into(place, "layer")], r"\| .*|.*missed"),
        Job("step_model", 120, [*step, "12", "--model-only", *_into(place, "model")], r"\| .*|.*missed"),
    ]


# Overrides of a run by its name. What is compared with bf16 differs from it in nothing else.
BF16 = ("--quant.fake_quant_start", "-1", "--learnable.weight_scale", "false")
RECOMPUTED = ("--train.activation_checkpointing", "true")
TRAININGS: dict[str, tuple[str, ...]] = {
    "bf16": ("--profile", *BF16),
    "fp8": ("--profile", "--export.enabled", "true"),
    "fp8_simulate": ("--quant.compute", "simulate"),
    "fp8_gather_codes": ("--quant.quantized_all_gather", "true"),
    "w4": ("--quant.scheme", "w4a16_g32"),
    "bf16_recomputed": (*BF16, *RECOMPUTED),
    "fp8_recomputed": RECOMPUTED,
    "fp8_chunk_512": ("--loss.chunk_tokens", "512"),
}
COMPILED = ("--deepspeed", "zero2", "--train.compile", "true")
MORE_TRAININGS: dict[str, tuple[str, ...]] = {
    "fp8_fuse_norms": ("--quant.fuse_norms", "true"),
    "bf16_compiled": (*BF16, *COMPILED),
    "fp8_compiled": COMPILED,
    "fp8_accumulated": (
        *("--deepspeed", "zero2", "--data.micro_batch_size", "1"),
        *("--train.gradient_accumulation_steps", "4"),
    ),
}


def stage_b(place: Place) -> list[Job]:
    """Training of a model of 2.8e9 parameters under ZeRO-3, and where its time goes."""
    limits = {"bf16": 80, "fp8": 100}
    return [
        _build(place),
        _model(place),
        *(_training(place, name, limits.get(name, 70), overrides) for name, overrides in TRAININGS.items()),
    ]


def stage_c(place: Place) -> list[Job]:
    """Races, counters, compiled layers, losses, the host's time of a layer, the quickstart."""
    once = _python("operators.py")
    tools = [Job("operators", 60, once, "ok")]
    if not place.dry:
        check = ["compute-sanitizer", "--error-exitcode", "9", "--tool"]
        tools = [
            Job("memcheck", 90, [*check, "memcheck", *once], "=+ .*ERROR SUMMARY"),
            Job("racecheck", 90, [*check, "racecheck", *once], "=+ .*RACECHECK SUMMARY"),
            Job("counters", 100, [*_COUNTERS, *once, "--large"], r'"ID"|"\d+"'),
        ]
    quickstart = [sys.executable, "launch/quickstart.py", "--out", str(place.work / "quickstart")]
    losses = [*_benchmark(place, "kd_loss"), "--vocabulary", "300" if place.dry else "151936", *_into(place, "losses")]
    return [
        _build(place),
        *tools,
        Job("compile", 150, _tests(place, "tests/gpu/test_compile.py"), PASSED),
        Job("host", 40, _python("parts.py", "host", *_dry(place)), r".* us"),
        Job("losses", 100, losses, r"\| .*|.*missed"),
        _model(place),
        *(_training(place, name, 110, overrides) for name, overrides in MORE_TRAININGS.items()),
        *([] if place.dry else [Job("quickstart", 190, quickstart, r"bf16|fp8_static|w2a16")]),
    ]


STAGES: dict[str, Callable[[Place], list[Job]]] = {"A": stage_a, "B": stage_b, "C": stage_c}
_METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct",
)
_COUNTERS = [
    *("ncu", "--clock-control", "none", "--csv", "--launch-count", "40", "--metrics", ",".join(_METRICS)),
    *("--kernel-name", "regex:elementwise|segments|short_runs|tokens|transposed"),
]


def _build(place: Place) -> Job:
    return Job("build", 300, _python("build.py", *_dry(place)), "torch|built|compute|GPU")


def _model(place: Place) -> Job:
    return Job("model", 90, _python("train.py", "model", "--work", str(place.work), *_dry(place)), r".*parameters")


def _training(place: Place, name: str, limit: int, overrides: tuple[str, ...]) -> Job:
    command = _python("train.py", name, "--work", str(place.work), *_dry(place), *overrides)
    return Job(name, limit, command, r"step |profile|  \w[\w ]*: .* calls")


def _tests(place: Place, *which: str) -> list[str]:
    """Tests of the GPU, in a few processes."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not full", "--maxfail", "30"]
    return [*command, "-n", "0" if place.dry else "8", *which]


def _python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, f"{HERE}/{script}", *arguments]


def _benchmark(place: Place, name: str) -> list[str]:
    quick = ["--quick"] if place.dry else []
    return [sys.executable, f"benchmarks/{name}.py", "--device", place.device, *quick, *_into(place, name)]


def _into(place: Place, name: str) -> list[str]:
    return ["--results", str(place.out / name)]


def _dry(place: Place) -> list[str]:
    return ["--dry"] if place.dry else []


def _room() -> Path:
    """Memory where there is enough: models are written and read more often than disks of such machines are fast."""
    memory = Path("/dev/shm")
    enough = memory.is_dir() and shutil.disk_usage(memory).free > ROOM
    return (memory if enough else Path.home()) / "deepqat_gpu"


class Stage:
    """Runs jobs one after the other, within a limit, and keeps a summary."""

    def __init__(self, name: str, place: Place, limit: int) -> None:
        self.name, self.place, self.limit = name, place, limit
        self.began = time.monotonic()
        self.summary = place.out / f"summary_{name}.txt"
        self.summary.write_text("")

    def run(self, jobs: list[Job]) -> list[str]:
        """Run all of them; the names of those that failed or were left out."""
        failed = [job.name for job in jobs if not self._run(job)]
        self.note(f"stage {self.name}: {self._elapsed():.0f} s; failed or left out: {', '.join(failed) or 'none'}")
        return failed

    def note(self, text: str) -> None:
        """Print a text, and keep it in the summary."""
        print(text, flush=True)
        with open(self.summary, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _run(self, job: Job) -> bool:
        left = self.limit - self._elapsed()
        if left < LEAST:
            self.note(f"[{job.name}] left out: {left:.0f} s left")
            return False
        log = self.place.out / "logs" / f"{self.name}_{job.name}.log"
        began = time.monotonic()
        code = self._end_of(job, log, min(job.limit * (SLOWER if self.place.dry else 1), left))
        self.note(f"[{job.name}] exit code {code}, {time.monotonic() - began:.0f} s")
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        shown = lines[-LINES:] if code else [line for line in lines if re.match(job.shown, line)]
        for line in shown:
            self.note(f"    {line[:200]}")
        return code == 0

    def _end_of(self, job: Job, log: Path, limit: float) -> int:
        """The job's exit code, 124 when it was stopped at its limit with all that it had started."""
        with open(log, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                job.command, cwd=ROOT, env=self._environment(), stdout=file, stderr=file, start_new_session=True
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return 124
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks and compilers that it left behind, too
                process.wait()

    def _environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1" if self.place.dry else "8",
            "DS_ACCELERATOR": "cpu" if self.place.dry else "cuda",
        }
        return {**os.environ, **own}


def main() -> None:
    """Run one stage; exit code 1 if a job of it failed or was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("--out", type=Path, required=True, help="folder for summary, tables and logs")
    parser.add_argument("--work", type=Path, help="folder for models, 40 GB (default: in /dev/shm if it is that large)")
    parser.add_argument("--limit", type=int, default=570, help="seconds of the stage")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="run these jobs of the stage")
    options = parser.parse_args()
    place = Place(options.out.resolve(), (options.work or _room()).resolve(), options.dry)
    for folder in (place.out / "logs", place.work):
        folder.mkdir(parents=True, exist_ok=True)
    jobs = STAGES[options.stage](place)
    unknown = sorted({*(options.only or ())} - {job.name for job in jobs})
    if unknown:
        parser.error(f"stage {options.stage} has {', '.join(job.name for job in jobs)}, not {', '.join(unknown)}")
    chosen = [job for job in jobs if not options.only or job.name in options.only]
    failed = Stage(options.stage, place, options.limit).run(chosen)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
