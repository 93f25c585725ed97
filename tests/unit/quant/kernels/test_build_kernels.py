"""Build the kernels at first use: once, with others that build or were killed, and not where it is impossible.

cpp_extension is asked to build nothing here but in a test of the large counts: it copies the library that is there.
"""

import json
import mmap
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from quant.kernels import build_kernels as module
from quant.kernels.build_kernels import _architectures, _cuda_runtime, build
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import run_python

# Calls operators before and after an explicit prepare, and prints the result.
CHILD = """
import json, warnings
import torch
from quant import Quantizer, Scale, kernels, reference
from quant.spec import TensorSpec

spec = TensorSpec("int", 4, "channel")
x, grad, s0, theta = torch.randn(4, 40), torch.ones(4, 40), torch.rand(4, 1) * 0.2 + 0.1, torch.zeros(4, 1)
quantizer = Quantizer(Scale(s0, theta), spec, torch.float32)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    values = kernels.fake_quantize(x, quantizer)
    of_theta = kernels.fake_quantize_backward_(grad, x, quantizer, factor=1.0, theta_gradient=True)
    kernels.amax(x)
    remark = kernels.prepare_kernels()
right = torch.equal(values, reference.fake_quant(x, s0, spec)) and bool(of_theta.any())
right = right and torch.equal(grad, reference.inside_range(x, s0, spec).float())
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
        self.folder, self.content, self.go = folder, library.read_bytes(), threading.Event()
        self.go.set()
        self.count, self.error, self.misfits = 0, None, 0

    def build(self, name: str, sources: list[str], *, build_directory: str, **_: object) -> None:
        """Stand in for cpp_extension.load: wait for ``go``, then write the library, or half of it and raise."""
        self.count += 1
        assert self.go.wait(PATIENCE)
        assert os.listdir(build_directory) == [] and all(Path(source).exists() for source in sources)
        half = len(self.content) // 2 if self.error is not None else None
        (Path(build_directory) / f"{name}.so").write_bytes(self.content[:half])
        if self.error is not None:
            raise self.error

    def load(self, library: Path) -> None:
        """Stand in for load_library, which must get nothing damaged: it would be a bus error in every process."""
        assert library.read_bytes() == self.content
        self.misfits -= 1
        if self.misfits >= 0:
            raise OSError("made for another machine")

    def libraries(self) -> list[Path]:
        """Libraries that look complete."""
        return [path for path in self.folder.glob("deepqat_kernels_*/*.so") if path.parent.suffix != ".build"]


@pytest.fixture
def builds(tmp_path, monkeypatch):
    built = build()
    if built.library is None:
        pytest.skip(built.why)
    made = Builds(tmp_path / "extensions", built.library)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(made.folder))
    monkeypatch.setattr(cpp_extension, "load", made.build)
    monkeypatch.setattr(torch.ops, "load_library", made.load)
    return made


def test_two_build_once(builds, monkeypatch):
    """The second waits for the first; a third finds the library, which was on the disk before it had its name."""
    waiting, synced, flock = [], [], module.fcntl.flock
    monkeypatch.setattr(module.fcntl, "flock", lambda *given: (waiting.append(1), flock(*given)))
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").resolve().suffix))
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
    assert synced == [".so", ".sha256"] and library.read_bytes() == builds.content


def test_what_is_damaged_or_does_not_fit_is_built_again(builds):
    library, content = build().library, builds.content
    assert library is not None
    for damage in (
        lambda: library.write_bytes(content[: len(content) // 3]),
        lambda: library.write_bytes(b""),
        lambda: library.write_bytes(content[:9000] + bytes(5000) + content[14_000:]),
        lambda: library.with_suffix(".sha256").unlink(),
        library.unlink,
        lambda: setattr(builds, "misfits", 1),
    ):
        before = builds.count
        damage()
        assert build().library == library and library.read_bytes() == content and builds.count == before + 1
        assert build().library == library and builds.count == before + 1


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
    output = "\n".join(["Error building extension", *["[1/3] c++ -c x.cpp"] * 200, "x.cpp:1:2: error: y", *["z"] * 280])
    builds.error = RuntimeError(output)
    found = re.fullmatch(
        r"compiling the kernels failed: x\.cpp:1:2: error: y \(the whole output is in (.*)\)", build().why
    )
    assert found is not None and Path(found[1]).read_text() == output
    Path(found[1]).unlink()
    Path(found[1]).mkdir()  # nor can the file be written
    assert build().why == "compiling the kernels failed: x.cpp:1:2: error: y"
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
