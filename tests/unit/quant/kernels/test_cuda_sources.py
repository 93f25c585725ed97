"""The CUDA kernels without a GPU: compiled by nvcc, and compiled for the CPU and run there thread by thread."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

from quant.kernels.build_kernels import NVCC_FLAGS, SOURCES

EMULATION = Path(__file__).parent / "cuda_emulation"
# Unoptimized: the compiler takes most of the time. The sanitizers see accesses beyond a tensor and misaligned words.
GCC_FLAGS = (
    "-std=c++20",
    "-O0",
    "-g1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",  # which nvcc does not assume either
    "-fsanitize=address,alignment,bounds,shift,signed-integer-overflow",
    "-fno-sanitize-recover=all",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
)
FLAGS = (*COMMON_NVCC_FLAGS, *NVCC_FLAGS, "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror")
ARCHITECTURES = ("80", "90", "100")
USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

# The compilers take minutes; `make test-nvcc` runs a part.
pytestmark = pytest.mark.full


def run(*command: str | Path) -> str:
    """The output of a command; a test fails with it if the command does, and is skipped without it."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} in PATH")
    words = [str(word) for word in command]
    result = subprocess.run(words, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def compare(tmp_path_factory) -> Path:
    """The program that compares CUDA kernels with the CPU's; see its source for its arguments."""
    program = tmp_path_factory.mktemp("cuda_emulation") / "compare"
    run("g++", *GCC_FLAGS, f"-I{EMULATION}", f"-I{SOURCES}", EMULATION / "compare.cpp", "-o", program)
    return program


@pytest.mark.parametrize("rounds", [pytest.param(4, id="few"), pytest.param(100, id="many")])
def test_emulated_cuda_kernels_equal_the_cpu_kernels(compare, rounds, seed):
    run(compare, str(seed), str(rounds))


@pytest.mark.parametrize("source", sorted(SOURCES.rglob("*.cu")), ids=lambda source: source.name)
def test_kernels_compile_without_warnings_and_stay_in_registers(source, tmp_path):
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    report = run("nvcc", "--threads=0", *FLAGS, *targets, "-Xptxas", "-v", "-c", source, "-o", tmp_path / "kernels.o")
    kernels = [len(re.findall(f"Compiling entry function '.*' for 'sm_{arch}'", report)) for arch in ARCHITECTURES]
    usage = USAGE.findall(report)
    assert kernels[0] > 0 and kernels == kernels[:1] * len(ARCHITECTURES) and len(usage) == sum(kernels)
    assert set(usage) == {("0", "0", "0")}


@pytest.mark.parametrize("step", [251, 1])
def test_instructions_that_convert_agree_with_the_arithmetic(step, tmp_path):
    run("nvcc", *FLAGS, "-I", SOURCES, EMULATION / "conversions.cu", "-o", tmp_path / "conversions")
    run(tmp_path / "conversions", str(step))
