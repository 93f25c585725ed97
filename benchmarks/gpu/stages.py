"""The jobs of the three stages of half_hour.py, in the order of what is worth knowing first."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = "benchmarks/gpu"


@dataclass(frozen=True)
class Place:
    """Where a stage runs.

    Attributes:
        out: folder of what is kept.
        work: folder of models and exports.
        dry: everything tiny, on the CPU.
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


PASSED = r".* (passed|skipped|failed)|FAILED"


def stage_a(place: Place) -> list[Job]:
    """Is it right? How fast are GEMMs, kernels, a step?"""
    step = [*_benchmark(place, "step"), "--rounds"]
    return [
        _build(place),
        Job("tests", 200, _tests(place, "tests/gpu", "--ignore", "tests/gpu/test_compile.py"), PASSED),
        Job("gemms", 80, _python("gemms.py", *_dry(place)), r".*TFLOP/s|copy"),
        Job("experts", 60, _python("experts.py", *_dry(place)), r".*TFLOP/s|.*: (yes|no)"),
        Job(
            "kernels", 130, [*_benchmark(place, "quant_kernels"), "--no-compile", "--rounds", "15"], r".*missed|Met by"
        ),
        Job("step_layer", 100, [*step, "20", "--layer-only", *_into(place, "layer")], r"\| .*|.*missed"),
        Job("step_model", 120, [*step, "12", "--model-only", *_into(place, "model")], r"\| .*|.*missed"),
    ]


# Options of a run by its name. What is compared with bf16 differs from it in nothing else.
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
    """How fast does a model of 3.5e9 parameters train under ZeRO-3, and where does the time go?"""
    limits = {"bf16": 80, "fp8": 100}
    return [
        _build(place),
        _model(place),
        *(_training(place, name, limits.get(name, 70), options) for name, options in TRAININGS.items()),
    ]


def stage_c(place: Place) -> list[Job]:
    """What is left: races, counters, compiled layers, losses, the host's time of a layer, the quickstart."""
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
        Job("host", 40, _python("host.py", *_dry(place)), r".* us"),
        Job("losses", 100, losses, r"\| .*|.*missed"),
        _model(place),
        *(_training(place, name, 110, options) for name, options in MORE_TRAININGS.items()),
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
    return Job("model", 90, _python("random_model.py", str(place.work / "model"), *_dry(place)), r".*parameters")


def _training(place: Place, name: str, limit: int, options: tuple[str, ...]) -> Job:
    command = _python("train.py", name, "--work", str(place.work), *_dry(place), *options)
    return Job(name, limit, command, "step |profile|  [a-z]")


def _tests(place: Place, *which: str) -> list[str]:
    """Tests of the GPU, in a few processes."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not full", "--maxfail", "30"]
    return [*command, "-n", "0" if place.dry else "4", *which]


def _python(script: str, *arguments: str) -> list[str]:
    return [sys.executable, f"{HERE}/{script}", *arguments]


def _benchmark(place: Place, name: str) -> list[str]:
    quick = ["--quick"] if place.dry else []
    return [sys.executable, f"benchmarks/{name}.py", "--device", place.device, *quick, *_into(place, name)]


def _into(place: Place, name: str) -> list[str]:
    return ["--results", str(place.out / name)]


def _dry(place: Place) -> list[str]:
    return ["--dry"] if place.dry else []
