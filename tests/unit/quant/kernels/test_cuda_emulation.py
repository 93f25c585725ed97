"""The CUDA kernels, compiled for the CPU and run thread by thread, against the CPU kernels bit for bit."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quant.kernels.build import SOURCES

EMULATION = Path(__file__).parent / "cuda_emulation"

# Unoptimized: the compiler takes most of the time. The sanitizers see accesses beyond a tensor and misaligned words.
FLAGS = (
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

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ in PATH")


@pytest.fixture(scope="module")
def compare(tmp_path_factory) -> Path:
    """The program that compares the two; see its source for what it is given and how it ends."""
    program = tmp_path_factory.mktemp("cuda_emulation") / "compare"
    command = ["g++", *FLAGS, f"-I{EMULATION}", f"-I{SOURCES}", str(EMULATION / "compare.cpp"), "-o", str(program)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return program


# The compiler takes a minute; `make test-nvcc` runs the few rounds by themselves.
@pytest.mark.full
@pytest.mark.parametrize("rounds", [pytest.param(4, id="few"), pytest.param(100, id="many")])
def test_emulated_cuda_kernels_equal_the_cpu_kernels(compare, rounds, seed):
    result = subprocess.run([str(compare), str(seed), str(rounds)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
