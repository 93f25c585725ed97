"""Building the kernels at first use: once, whoever else builds, whatever was killed, and not at all where it cannot be.

What compiles here is a script that says what it was asked for and copies the library that this machine has built
before: what is tested is the build, not the compiler. One test of the large counts compiles in earnest.
"""

import json
import mmap
import os
import shutil
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from quant.kernels.build import CPP, _architectures, _cuda_runtime, _loaded, _move, build
from tests.lib.patience import PATIENCE, until
from tests.lib.processes import start_python

# Calls operators before and after an explicit prepare, and says what came of it.
CHILD = """
import json, sys, warnings
import torch
import quant
from quant import kernels, reference
from quant.formats import packing
from quant.spec import TensorSpec

torch.set_num_threads(1)
spec = TensorSpec("int", 4, "channel")
x, s0, theta = torch.randn(4, 40, requires_grad=True), torch.rand(4, 1) * 0.2 + 0.1, torch.zeros(4, 1)
theta.requires_grad_()
quantizer = quant.Quantizer(quant.Scale(s0, theta), spec, torch.float32)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    values = kernels.fake_quantize(x, quantizer)
    values.sum().backward()
    codes, mask = kernels.quantize(x, quantizer, mask=True)
    kernels.amax(x)
    remark = kernels.prepare_kernels()
    model = torch.nn.Sequential(torch.nn.Linear(32, 32)).bfloat16()
    q = quant.prepare(model, quant.get_scheme("fp8_static"), learn_weight_scale=True, learn_input_scale=False)
    for group in (*q.weight_groups, *q.input_groups):
        group.s0.data.fill_(0.25)
    tokens = torch.randn(3, 32).bfloat16().requires_grad_()
    model(tokens).sum().backward()
right = torch.equal(values, reference.fake_quant(x.detach(), s0, spec))
right = right and torch.equal(x.grad, reference.inside_range(x.detach(), s0, spec).float())
right = right and torch.equal(packing.unpack_bits(mask, x.shape), x.grad.bool()) and bool(theta.grad.any())
right = right and torch.isfinite(tokens.grad).all().item() and bool(model[0].weight.grad.any())
try:
    kernels.amax(x.double())
    compiled = False
except RuntimeError:  # the kernels know three dtypes, the reference all
    compiled = True
said = [str(warning.message) for warning in said if "fake quantization" in str(warning.message)]
print(json.dumps(dict(right=right, said=said, remark=remark, compiled=compiled)))
"""

# In place of the compiler. $MODE: `copy` makes the outputs; `wait` does so once $GO exists; `hang_compile` and
# `hang_link` leave half an output and stay; `broken` fails like a compiler.
COMPILER = """#!/bin/sh
kind=other
for argument in "$@"; do
    case $argument in
        -c) kind=compile ;;
        -shared) kind=link ;;
    esac
    test "$previous" = -o && output=$argument
    previous=$argument
done
test $kind = other && exec {real} "$@"
echo $kind $$ >> "$LOG"
case $MODE in
    wait) while ! test -e "$GO"; do sleep 0.05; done ;;
    hang_$kind) echo half > "$output"; exec sleep 100000 ;;
    broken) echo "quantizers.cpp:12:34: error: expected something else" >&2; exit 1 ;;
esac
case $kind in
    compile) echo object > "$output" ;;
    link) cp {library} "$output" ;;
esac
"""


class Machine:
    """An empty extension folder, a compiler that keeps a log, and processes that build."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.extensions, self.log, self.go = folder / "extensions", folder / "log", folder / "go"
        self.compiler = folder / "c++"
        real = shutil.which(cpp_extension.get_cxx_compiler())
        self.compiler.write_text(COMPILER.format(real=real, library=library))
        self.compiler.chmod(0o755)
        self.processes: list[ForkServerProcess] = []

    def start(self, mode: str = "copy", **environment: str) -> int:
        """Start a process that calls the operators; its number."""
        number = len(self.processes)
        env = {"TORCH_EXTENSIONS_DIR": str(self.extensions), "CXX": str(self.compiler)}
        env |= {"MODE": mode, "LOG": str(self.log), "GO": str(self.go), **environment}
        out, err = self.folder / f"out{number}", self.folder / f"err{number}"
        self.processes.append(start_python(CHILD, cwd=self.folder, out=out, err=err, environment=env))
        return number

    def result(self, number: int) -> dict:
        """What the process said at its end."""
        self.processes[number].join(PATIENCE)
        assert self.processes[number].exitcode == 0, (self.folder / f"err{number}").read_text()
        return json.loads((self.folder / f"out{number}").read_text().splitlines()[-1])

    def run(self, mode: str = "copy", **environment: str) -> dict:
        return self.result(self.start(mode, **environment))

    def asked(self, kind: str) -> int:
        """How often the compiler was asked to ``compile`` or to ``link``."""
        return self._log().count(kind)

    def at_the_lock(self, number: int) -> bool:
        """Whether the process has opened the file that builds are locked by: it holds the lock or waits for it."""
        files = Path(f"/proc/{self.processes[number].pid}/fd").iterdir()
        return any(os.path.realpath(file).endswith(".lock") for file in files)

    def libraries(self) -> list[Path]:
        """Those that look complete."""
        return [path for path in self.extensions.glob("deepqat_kernels_*/*.so") if path.parent.suffix != ".build"]

    def kill(self, number: int) -> None:
        """The process and its group; compilers are in groups of their own and live on."""
        os.killpg(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].join()

    def clean_up(self) -> None:
        for number, process in enumerate(self.processes):
            if process.exitcode is None:
                self.kill(number)
        for pid in self._log()[1::2]:
            try:
                if str(self.folder) in Path(f"/proc/{pid}/environ").read_text():
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:  # it ended long ago
                pass

    def _log(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path):
    built = build()
    if built.library is None:
        pytest.skip(built.why)
    made = Machine(tmp_path, built.library)
    yield made
    made.clean_up()


def test_built_once_by_two_processes_and_loaded_by_the_next(machine):
    """The second one waits for the first; a third one asks for no compiler at all."""
    both = [machine.start("wait") for _ in range(2)]
    until(lambda: machine.asked("compile") and all(map(machine.at_the_lock, both)), lambda: "both come to the lock")
    assert machine.libraries() == []
    machine.go.touch()
    for number in both:
        result = machine.result(number)
        assert result["right"] and result["compiled"] and result["said"] == [] and result["remark"] == ""
    assert (machine.asked("compile"), machine.asked("link")) == (len(CPP), 1)
    assert len(machine.libraries()) == 1
    result = machine.run("broken")
    assert result["right"] and result["compiled"] and result["said"] == [] and result["remark"] == ""
    assert (machine.asked("compile"), machine.asked("link")) == (len(CPP), 1)


def test_a_build_that_is_killed(machine):
    """While compiling, then while linking: nothing looks complete, and the next one neither hangs nor takes a half.

    The compilers of the killed build still run while the next one builds.
    """
    for mode, kind in (("hang_compile", "compile"), ("hang_link", "link")):
        number = machine.start(mode)
        until(lambda: machine.asked(kind), lambda: kind)  # noqa: B023 (called within this iteration)
        machine.kill(number)
        assert machine.libraries() == []
    result = machine.run()
    assert result["right"] and result["compiled"] and result["remark"] == ""
    assert len(machine.libraries()) == 1
    assert [path.name for path in machine.extensions.iterdir() if path.name.endswith(".build")] == []


def test_a_library_that_is_cut_off_is_built_anew(machine):
    """Loaded, it would be a bus error in every process."""
    assert machine.run()["compiled"]
    (library,) = machine.libraries()
    content = library.read_bytes()
    library.write_bytes(content[: len(content) // 3])
    result = machine.run()
    assert result["right"] and result["compiled"] and result["remark"] == ""
    assert library.read_bytes() == content and machine.asked("link") == 2


def test_only_what_was_written_is_loaded(tmp_path, monkeypatch):
    """Nothing of a damaged file is mapped; a whole one that the machine cannot load is no end of the process either."""
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


def test_without_a_compiler(machine):
    """The reference computes, and this is said once, with the reason."""
    empty = machine.folder / "empty"
    empty.mkdir()
    result = machine.run(CXX="c++", PATH=str(empty))
    assert result["right"] and not result["compiled"]
    assert result["said"] == [result["remark"]]
    assert "eager mode on the CPU" in result["remark"] and "'c++' is not in PATH" in result["remark"]
    assert not machine.extensions.exists() or machine.libraries() == []


def test_a_compiler_that_fails(machine):
    """The reason is the compiler's. Once it works again, the next process builds."""
    result = machine.run("broken")
    assert result["right"] and not result["compiled"] and machine.libraries() == []
    assert result["said"] == [result["remark"]]
    assert "eager mode on the CPU" in result["remark"] and "compiling the kernels failed" in result["remark"]
    assert "quantizers.cpp:12:34: error: expected something else" in result["remark"]
    result = machine.run(CXX="/bin/false")
    assert result["right"] and not result["compiled"] and result["said"] == [result["remark"]]
    assert "compiling the kernels failed" in result["remark"] and "/bin/false" in result["remark"]
    assert machine.run()["compiled"]


def test_a_folder_that_cannot_be_written(machine):
    """A home of someone else's, a full disk: the reference computes."""
    machine.extensions.write_text("a file where the folder should be")
    result = machine.run()
    assert result["right"] and not result["compiled"]
    assert result["said"] == [result["remark"]] and "extensions" in result["remark"]


@pytest.mark.full
def test_the_compiler_itself(machine):
    """A build from nothing, by what compiles here."""
    result = machine.run(CXX=cpp_extension.get_cxx_compiler())
    assert result["right"] and result["compiled"] and result["remark"] == ""
    assert len(machine.libraries()) == 1 and machine.asked("compile") == 0


def test_nvcc_compiles_for_the_gpus_that_are_there(monkeypatch):
    """Whatever an image of a container sets for those that it may meet."""
    capabilities = [(9, 0), (8, 9), (9, 0)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert _architectures() == ["-gencode=arch=compute_89,code=sm_89", "-gencode=arch=compute_90,code=sm_90"]
    # torch adds none of its own to a command that has some.
    assert cpp_extension._get_cuda_arch_flags(_architectures()) == []


def test_the_cuda_runtime_that_is_linked_is_the_one_that_torch_has_loaded(tmp_path):
    """Here it is a file of that name, in a folder whose name has spaces; without one nothing is said."""
    scratch, folder = tmp_path / "scratch", tmp_path / "nvidia cu13"
    scratch.mkdir()
    folder.mkdir()
    if torch.version.cuda is None:
        assert _cuda_runtime(scratch) == []
    runtime = folder / "libcudart.so.13"
    runtime.write_bytes(bytes(mmap.PAGESIZE))
    with open(runtime, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        if torch.version.cuda is None:
            assert _cuda_runtime(scratch) == [f"-L{scratch}"]
            assert (scratch / "libcudart.so").resolve() == runtime
