"""Compile the operators' C++ and CUDA sources at first use, or fall back to the reference, with a single warning.

On the CPU, the operators are the compiled kernels, or the reference if there is no C++ compiler. On CUDA, they are the
compiled kernels; without nvcc, the reference through ``torch.compile``; without Triton or a C compiler, the reference
in eager mode.

Libraries are cached in torch's extension folder (``TORCH_EXTENSIONS_DIR``, by default in the home folder), under a name
with a digest of the sources, the flags and torch's version: any change triggers a build, and a cached library loads in
milliseconds. A single process builds; other processes on the same machine, or on a machine that shares the folder,
wait. A killed build leaves no file that looks complete. Loading a corrupt library (for example after a power loss)
would crash the process with a bus error, so the library's checksum, stored next to it, is compared first. A library
that is corrupt or does not load is built again.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from quant.kernels.operators import OPERATORS, REFERENCE

SOURCES = Path(__file__).parent
LIBRARY = "deepqat_kernels"
CPP = ("bindings.cpp", "cpu/quantizers.cpp", "cpu/fused.cpp")
CUDA = ("cuda/quantizers.cu", "cuda/fused.cu")

# Contracting a*b+c to one rounding would make CPU, GPU and reference differ in the last bit.
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
# In outputs of g++, nvcc, the linker and ninja; a compiler that needs too much memory is killed.
_ERROR = re.compile(r"\berror\b|undefined reference|cannot find|killed|No space left", re.IGNORECASE)
_LONGEST = 300


@dataclass(frozen=True)
class Build:
    """Result of a build.

    Attributes:
        library: the shared library, None if nothing could be built.
        cuda: the library contains the CUDA kernels.
        why: reason for missing kernels, or empty.
    """

    library: Path | None
    cuda: bool
    why: str


_ready: list[bool] = []  # not empty when the kernels can be called


# By default, inductor skips the reference's intermediate rounding to a dtype, and approximates 1/scale.
_AS_EAGER: dict[str, str | int | bool | Callable[..., Any]] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}


@cache
def prepare_kernels() -> str:
    """Compile and load the kernels, or register the fallback.

    The first use of an operator calls this function. Call it earlier to choose the time of the first build, which takes
    half a minute. Returns a text about slower fallbacks with the reason; empty if no fallback is used.
    """
    built = build()
    remarks = []
    if built.library is None:
        _implement("CPU", lambda reference: reference)
        remarks.append(f"fake quantization runs in eager mode on the CPU, many times slower: {built.why}")
    if torch.cuda.is_available() and not built.cuda:
        compilable = find_spec("triton") is not None and any(map(shutil.which, ("cc", "gcc", "clang")))
        if compilable:
            _implement("CUDA", lambda reference: torch.compile(reference, dynamic=True, options=_AS_EAGER))
            remarks.append(f"fake quantization on CUDA runs the reference through torch.compile, slower: {built.why}")
        else:
            _implement("CUDA", lambda reference: reference)
            remarks.append(
                f"fake quantization on CUDA runs in eager mode, many times slower: {built.why}; "
                "torch.compile needs triton and a C compiler"
            )
    _ready.append(True)
    return "; ".join(remarks)


def _implement(key: str, made_of: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    for name, reference in REFERENCE.items():
        OPERATORS.impl(name, made_of(reference), key)


def ensure_ready() -> None:
    """Prepare the kernels if needed, and warn about slower fallbacks."""
    if not _ready:
        remark = prepare_kernels()
        if remark:
            warnings.warn(remark, stacklevel=3)


def build() -> Build:
    """Compile the kernels that this machine supports, or use the cached library."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return Build(None, False, f"there is no C++ compiler ({compiler!r} is not in PATH; CXX names one, no options)")
    cuda, why = _can_build_cuda() if torch.cuda.is_available() else (False, "")
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
    """Return whether the CUDA kernels can be built, and the reason if not; requires a GPU."""
    if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        return False, "there is no nvcc (CUDA_HOME names the CUDA toolkit)"
    oldest = min(torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count()))
    if oldest < (8, 0):
        return False, f"the kernels need compute capability 8.0, a GPU here has {oldest[0]}.{oldest[1]}"
    return True, ""


def _compiled(cuda: bool) -> Path:
    """Return the path of the shared library, with CUDA kernels if ``cuda``; builds it if needed. Raises RuntimeError,
    with the compiler's first error, if the build fails."""
    sources = [SOURCES / name for name in (*CPP, *(CUDA if cuda else ()))]
    cxx_flags = [*CXX_FLAGS, *_VECTORS.get(torch.backends.cpu.get_cpu_capability(), ())]
    cxx_flags += ["-DDEEPQAT_CUDA"] if cuda else []
    architectures = _architectures() if cuda else []
    name = f"{LIBRARY}_{_digest([*cxx_flags, *architectures])}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    library = root / name / f"{name}.so"
    with _locked(root / f"{name}.lock"):
        if not _loaded(library):
            scratch = root / f"{name}.build"
            shutil.rmtree(scratch, ignore_errors=True)  # left by a killed build, whose lock ended with its process
            scratch.mkdir()
            try:
                cpp_extension.load(
                    name,
                    [str(source) for source in sources],
                    extra_cflags=cxx_flags,
                    extra_cuda_cflags=[*NVCC_FLAGS, *architectures],
                    extra_ldflags=["-fopenmp", *(_cuda_runtime(scratch) if cuda else [])],
                    build_directory=str(scratch),
                    is_python_module=False,
                )
            except RuntimeError as error:
                raise RuntimeError(_in_one_line(str(error), root / f"{name}.log")) from error
            _move(scratch / f"{name}.so", library)
            shutil.rmtree(scratch)
    return library


def _in_one_line(output: str, file: Path) -> str:
    """Shorten the output of a failed build to its first error; if there is more, write all of it to ``file``."""
    _, *rest = lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    found = next(filter(_ERROR.search, rest), lines[-1])[:_LONGEST]
    if rest:
        with suppress(OSError):  # a full disk must not hide the error
            file.write_text(output, encoding="utf-8")
            found += f" (the whole output is in {file})"
    return found


def _cuda_runtime(scratch: Path) -> list[str]:
    """Return the linker option for the CUDA runtime loaded by torch, through a link in ``scratch``.

    torch links ``-lcudart`` from ``CUDA_HOME/lib64``. The runtime is missing there if nvcc is a wrapper or was
    installed by pip, and the runtime that pip installs with torch is only named ``libcudart.so.13``.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    mapped = {name for line in lines for name in line.split(maxsplit=5)[5:]}
    runtimes = sorted(name for name in mapped if Path(name).name.startswith("libcudart.so"))
    if not runtimes:
        return []
    (scratch / "libcudart.so").symlink_to(runtimes[0])
    return [f"-L{scratch}"]


def _loaded(library: Path) -> bool:
    """Load the library if its file exists, is intact and can be loaded here; return True on success."""
    try:
        if _checksum_file(library).read_text() != _checksum(library):
            return False
        torch.ops.load_library(library)
    except OSError:
        return False
    return True


def _move(built: Path, library: Path) -> None:
    """Move a library to its final name, with its checksum in a second file, after both are flushed to disk."""
    library.parent.mkdir(exist_ok=True)
    with open(built, "rb") as file:
        os.fsync(file.fileno())
    with open(_checksum_file(library), "w") as record:
        record.write(_checksum(built))
        record.flush()
        os.fsync(record.fileno())
    os.replace(built, library)


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _architectures() -> list[str]:
    """Return nvcc options for the GPUs of this machine, instead of TORCH_CUDA_ARCH_LIST, which container images set for
    many GPUs."""
    found = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
    return [f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}" for major, minor in sorted(found)]


def _digest(flags: list[str]) -> str:
    """Compute a digest of everything that the library depends on."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*.[ch]*")):
        if source.suffix in (".h", ".cpp", ".cu"):
            digest.update(source.read_bytes())
    digest.update(repr((flags, NVCC_FLAGS, torch.__version__, torch.version.cuda)).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Take an exclusive file lock, which the system releases when its process dies, unlike the lock files of
    cpp_extension."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
