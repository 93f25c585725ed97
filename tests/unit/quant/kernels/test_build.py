"""Build the kernels at first use: once, with others that build or were killed, and not where it is impossible.

cpp_extension is asked to build nothing here but in a test of the large counts: it copies the library that is there.
"""

import json
import mmap
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from quant.kernels import build as module
from quant.kernels.build import _architectures, _cuda_runtime, _loaded, _move, build
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import run_python

# Calls operators before and after an explicit prepare, and prints the result.
CHILD = """
import json, warnings
import torch
from quant import Quantizer, Scale, kernels, reference
from quant.spec import TensorSpec

spec = TensorSpec("int", 4, "channel")
x, s0, theta = torch.randn(4, 40, requires_grad=True), torch.rand(4, 1) * 0.2 + 0.1, torch.zeros(4, 1)
theta.requires_grad_()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    values = kernels.fake_quantize(x, Quantizer(Scale(s0, theta), spec, torch.float32))
    values.sum().backward()
    kernels.amax(x)
    remark = kernels.prepare_kernels()
right = torch.equal(values, reference.fake_quant(x.detach(), s0, spec)) and bool(theta.grad.any())
right = right and torch.equal(x.grad, reference.inside_range(x.detach(), s0, spec).float())
try:
    kernels.amax(x.double())
    compiled = False
except RuntimeError:  # the kernels know three dtypes, the reference all
    compiled = True
said = [str(warning.message) for warning in said if "fake quantization" in str(warning.message)]
print(json.dumps(dict(right=right, said=said, remark=remark, compiled=compiled)))
"""


class Builds:
    """An empty extension folder, and a cpp_extension that copies the library of this machine there."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder, self.library, self.count, self.go = folder, library, 0, threading.Event()
        self.go.set()
        self.error: BaseException | None = None

    def load(self, name: str, sources: list[str], *, build_directory: str, **_: object) -> None:
        """Stand in for cpp_extension.load: wait for ``go``, then copy the library, or half of it and raise."""
        self.count += 1
        assert self.go.wait(PATIENCE)
        assert os.listdir(build_directory) == [] and all(Path(source).exists() for source in sources)
        content = self.library.read_bytes()
        half = len(content) // 2 if self.error is not None else None
        (Path(build_directory) / f"{name}.so").write_bytes(content[:half])
        if self.error is not None:
            raise self.error

    def libraries(self) -> list[Path]:
        """Those that look complete."""
        return [path for path in self.folder.glob("deepqat_kernels_*/*.so") if path.parent.suffix != ".build"]


@pytest.fixture
def builds(tmp_path, monkeypatch):
    built = build()
    if built.library is None:
        pytest.skip(built.why)
    made = Builds(tmp_path / "extensions", built.library)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(made.folder))
    monkeypatch.setattr(cpp_extension, "load", made.load)
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    return made


def test_two_build_once_and_a_damaged_library_is_built_again(builds, monkeypatch):
    """The second waits for the first. A library that was cut off would be a bus error in every process."""
    waiting, flock = [], module.fcntl.flock
    monkeypatch.setattr(module.fcntl, "flock", lambda *given: (waiting.append(1), flock(*given)))
    builds.go.clear()
    found = []
    both = [threading.Thread(target=lambda: found.append(build())) for _ in range(2)]
    for thread in both:
        thread.start()
    until(lambda: len(waiting) == 2 and builds.count == 1, lambda: "both come to the lock")
    assert builds.libraries() == []
    builds.go.set()
    for thread in both:
        thread.join()
    (library,) = builds.libraries()
    assert [one.library for one in (*found, build())] == [library] * 3 and builds.count == 1
    content = library.read_bytes()
    library.write_bytes(content[: len(content) // 3])
    assert build().library == library and library.read_bytes() == content and builds.count == 2


def test_a_build_that_is_killed_leaves_nothing_that_looks_complete(builds):
    builds.error = SystemExit()
    with pytest.raises(SystemExit):
        build()
    assert builds.libraries() == [] and list(builds.folder.glob("*.build/*.so"))
    builds.error = None
    assert build().library is not None and len(builds.libraries()) == 1
    assert list(builds.folder.glob("*.build")) == []


def test_where_nothing_can_be_built_there_is_a_reason(builds, tmp_path, monkeypatch):
    """Once the compiler works again, the next process builds."""
    for builds.error in (RuntimeError("quantizers.cpp:12:34: error: expected"), OSError("no space left")):
        found = build()
        assert found.library is None and f"compiling the kernels failed: {builds.error}" in found.why
        assert builds.libraries() == []
    builds.error = None
    assert build().library is not None
    shutil.rmtree(builds.folder)
    builds.folder.write_text("a file where the folder should be")
    assert "extensions" in build().why
    monkeypatch.setenv("CXX", "no-compiler")
    assert build().why.startswith("there is no C++ compiler ('no-compiler' is not in PATH")


def test_without_kernels_the_reference_computes(tmp_path):
    """This is said once, with the reason; with them nothing is said."""
    for environment in ({}, {"CXX": "/bin/false", "TORCH_EXTENSIONS_DIR": str(tmp_path)}):
        result = run_python(CHILD, **environment)
        found = json.loads(result.stdout.splitlines()[-1])
        fails = bool(environment) or build().library is None
        assert found["right"] and found["compiled"] != fails, result.stderr
        assert found["said"] == ([found["remark"]] if fails else []) and fails == bool(found["remark"])
        assert not fails or "eager mode on the CPU, many times slower: " in found["remark"]


@pytest.mark.full
def test_the_compiler_itself(tmp_path, monkeypatch):
    """A build from nothing, by the compiler that is here."""
    if build().library is None:
        pytest.skip(build().why)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library = build().library
    assert library is not None and library.is_relative_to(tmp_path)


def test_only_what_was_written_is_loaded(tmp_path, monkeypatch):
    """Nothing of a damaged file is mapped; a whole one that the machine cannot load does not end the process either."""
    built, library = tmp_path / "built", tmp_path / "name" / "name.so"
    content = b"no library" * 3000
    synced, mapped = [], []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").resolve()))

    def write() -> None:
        built.write_bytes(content)
        _move(built, library)
        assert library.read_bytes() == content and not built.exists()
        assert synced[-2:] == [built, library.with_suffix(".sha256")], "on the disk before it has its name"

    write()
    assert not _loaded(library), "no library at all, but what was written"
    monkeypatch.setattr(torch.ops, "load_library", mapped.append)
    for damaged in (content[:20_000], b"", content[:9000] + bytes(5000) + content[14_000:]):
        write()
        library.write_bytes(damaged)
        assert not _loaded(library)
    write()
    library.with_suffix(".sha256").unlink()
    assert not _loaded(library)
    library.unlink()
    assert not _loaded(library) and not mapped


def test_nvcc_compiles_for_the_gpus_that_are_there(monkeypatch):
    """Not for those that an image of a container names."""
    capabilities = [(9, 0), (8, 9), (9, 0)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert _architectures() == ["-gencode=arch=compute_89,code=sm_89", "-gencode=arch=compute_90,code=sm_90"]
    # torch adds none of its own to a command that has some.
    assert cpp_extension._get_cuda_arch_flags(_architectures()) == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA runtime is loaded already")
def test_the_cuda_runtime_that_is_linked_is_the_one_that_torch_has_loaded(tmp_path):
    """Here a file of that name, in a folder whose name has spaces; without one there is no option."""
    scratch, runtime = tmp_path / "scratch", tmp_path / "nvidia cu13" / "libcudart.so.13"
    scratch.mkdir()
    runtime.parent.mkdir()
    assert _cuda_runtime(scratch) == []
    runtime.write_bytes(bytes(mmap.PAGESIZE))
    with open(runtime, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert _cuda_runtime(scratch) == [f"-L{scratch}"]
        assert (scratch / "libcudart.so").resolve() == runtime
