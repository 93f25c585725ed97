"""Compiles the operators' C++ and CUDA at first use, and says once what it could not do.

The result is kept in torch's extension folder (``TORCH_EXTENSIONS_DIR``, by default in the home folder), in a folder
whose name is a digest of the sources, the flags and torch's version: a change of any of them builds anew, and a library
that is there is loaded in milliseconds. Only one process builds; the others, on the same machine or on one that shares
the folder, wait for it. A build that is killed leaves nothing that looks complete.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent
LIBRARY = "deepqat_kernels"

# Contracting a*b+c to one rounding would part CPU and GPU, and both from the reference, in the last bit.
CXX_FLAGS = (
    "-O3",
    "-std=c++20",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
NVCC_FLAGS = ("-O3", "-std=c++20", "--fmad=false")

# Not -march=native: the folder may be shared by machines with different processors.
_VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mf16c"),
}


_BUILD_ERRORS = (subprocess.CalledProcessError, RuntimeError, OSError)


@dataclass(frozen=True)
class Build:
    """What was built, or why not.

    Attributes:
        library: the shared library, None where nothing could be built.
        cuda: whether it serves CUDA tensors.
        why: why something is missing, empty where nothing is.
    """

    library: Path | None
    cuda: bool
    why: str


def build() -> Build:
    """Compile what this machine can compile, unless it has been compiled before."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return Build(None, False, f"there is no C++ compiler ({compiler!r} is not in PATH; CXX names one, no options)")
    cuda, why = _can_build_cuda()
    if cuda:
        try:
            return Build(_compiled(cuda=True), True, "")
        except _BUILD_ERRORS as error:
            why = f"compiling the CUDA kernels failed: {error}"
    try:
        return Build(_compiled(cuda=False), False, why)
    except _BUILD_ERRORS as error:
        return Build(None, False, f"compiling the kernels failed: {error}")


def _can_build_cuda() -> tuple[bool, str]:
    """Whether to build the CUDA half; if a GPU goes without it, why."""
    if not torch.cuda.is_available():
        return False, ""
    if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        return False, "there is no nvcc (CUDA_HOME names the CUDA toolkit)"
    oldest = min(torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))
    if oldest < (8, 0):
        return False, f"the kernels need compute capability 8.0, a GPU here has {oldest[0]}.{oldest[1]}"
    return True, ""


def _compiled(cuda: bool) -> Path:
    """The shared library, built if it is not there yet."""
    sources = [SOURCES / "bindings.cpp", SOURCES / "cpu.cpp"]
    cxx_flags = [*CXX_FLAGS, *_VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())]
    if cuda:
        sources.append(SOURCES / "cuda.cu")
        cxx_flags.append("-DDEEPQAT_CUDA")
    architectures = _architectures() if cuda else []
    name = f"{LIBRARY}_{_digest([*cxx_flags, *architectures])}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    library = root / name / f"{name}.so"
    with _locked(root / f"{name}.lock"):
        if not library.exists():
            scratch = root / f"{name}.build"
            shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed; its lock went with its process
            scratch.mkdir()
            cpp_extension.load(
                name,
                [str(source) for source in sources],
                extra_cflags=cxx_flags,
                extra_cuda_cflags=[*NVCC_FLAGS, *architectures],
                extra_ldflags=["-fopenmp"],
                build_directory=str(scratch),
                is_python_module=False,
            )
            (root / name).mkdir(exist_ok=True)
            os.replace(scratch / f"{name}.so", library)
            shutil.rmtree(scratch)
        else:
            torch.ops.load_library(library)
    return library


def _architectures() -> list[str]:
    """nvcc's options for the GPUs of this machine. torch would take TORCH_CUDA_ARCH_LIST, which images of containers
    set for every GPU that they may meet, or for others."""
    found = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
    return [f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}" for major, minor in sorted(found)]


def _digest(flags: list[str]) -> str:
    """A digest of everything that the library depends on."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]*")):
        if source.suffix in (".h", ".cpp", ".cu"):
            digest.update(source.read_bytes())
    digest.update(repr((flags, NVCC_FLAGS, torch.__version__, torch.version.cuda)).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock that the system gives back when its holder dies, unlike the lock files of cpp_extension."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
