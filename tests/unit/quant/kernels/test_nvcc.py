"""What the CUDA compiler makes of the kernels; needs nvcc, but no GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

from quant.kernels.build import NVCC_FLAGS, SOURCES

FLAGS = (*COMMON_NVCC_FLAGS, *NVCC_FLAGS, "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror")
ARCHITECTURES = ("80", "90", "100")
USAGE = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc in PATH")


def run(*command: str | Path) -> str:
    """What a command prints; a test fails with it if the command does."""
    result = subprocess.run(
        [str(word) for word in command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


# The compiler takes half a minute per architecture; `make test-nvcc` runs this by itself.
@pytest.mark.full
@pytest.mark.parametrize("source", sorted(SOURCES.rglob("*.cu")), ids=lambda source: source.name)
def test_kernels_compile_without_warnings_and_stay_in_registers(source, tmp_path):
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    report = run("nvcc", "--threads=0", *FLAGS, *targets, "-Xptxas", "-v", "-c", source, "-o", tmp_path / "kernels.o")
    kernels = [len(re.findall(f"Compiling entry function '.*' for 'sm_{arch}'", report)) for arch in ARCHITECTURES]
    usage = USAGE.findall(report)
    assert kernels[0] > 0 and kernels == kernels[:1] * len(ARCHITECTURES) and len(usage) == sum(kernels)
    assert set(usage) == {("0", "0", "0")}


@pytest.mark.full
@pytest.mark.parametrize("step", [251, 1])
def test_instructions_that_convert_agree_with_the_arithmetic(step, tmp_path):
    source = Path(__file__).parent / "cuda_emulation" / "conversions.cu"
    run("nvcc", *FLAGS, "-I", SOURCES, source, "-o", tmp_path / "conversions")
    run(tmp_path / "conversions", str(step))
