"""How fast the fused quantizers are: against the reference in eager mode and compiled, torchao, and a plain copy.

    python benchmarks/quant_kernels.py [--device cuda] [--threads 1] [--rounds 15] [--no-compile]

Every operator is called with the arguments of the reference that defines it (``quant/kernels/eager.py``), and must give
the same forward results before it is timed. Beside them runs a copy of the tensor, for what memory allows: GB/s are the
bytes that an operation must read and write, whatever it moves in fact, and "of copy" is this rate over the copy's.

torchao computes other functions: it divides by the scale where we multiply by its reciprocal, and its learned scale has
no theta. Its backward is timed alone, on a graph that is kept.

On CUDA the time of the device is taken, after a read of more memory than the L2 cache holds. On the CPU glibc is told
to keep freed memory, as otherwise the operating system clears the pages of every large result, which takes longer than
some of the operations. Writes ``benchmarks/results/quant_kernels.md``, on CUDA ``quant_kernels_cuda.md``.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import timing
from quant.kernels import eager, prepare_kernels
from quant.kernels.ops import grid_of, stored_dtype
from quant.reference import absmax_scale
from quant.spec import TensorSpec

# On CUDA also the smallest that the bars are for, 64 MB in bf16: what a launch costs by itself weighs most there.
SHAPES = {"cpu": [(4096, 4096)], "cuda": [(8192, 8192), (4096, 8192)], "quick": [(64, 64)]}
FASTER_THAN_EAGER = 4.0  # the CPU's bar, of forward and backward
OF_COPY = {"forward": 0.90, "backward": 0.85}  # the bars of CUDA
FORWARD, QUANTIZE, DEQUANTIZE = "forward", "quantize", "dequantize"
BACKWARD, SCALE_BACKWARD, MASK_BACKWARD = "backward", "backward, scale gradient", "backward by mask"


@dataclass(frozen=True)
class Case:
    """What is quantized: a tensor of ``dtype``, by ``spec``; if that is dynamic, each token by its own grid."""

    name: str
    spec: TensorSpec
    dtype: torch.dtype


CASES = (
    Case("fp8 per tensor, bf16", TensorSpec("fp8_e4m3", 8, "tensor"), torch.bfloat16),
    Case("fp8 per tensor, fp32", TensorSpec("fp8_e4m3", 8, "tensor"), torch.float32),
    Case("int4, groups of 32, bf16", TensorSpec("int", 4, "group", 32), torch.bfloat16),
    Case("int4 per channel, bf16", TensorSpec("int", 4, "channel"), torch.bfloat16),
    Case("e2m1, groups of 32, bf16", TensorSpec("fp4_e2m1", 4, "group", 32), torch.bfloat16),
    Case("int8 per token, bf16", TensorSpec("int", 8, "token", symmetric=False, dynamic=True), torch.bfloat16),
    Case("fp8 per token, bf16", TensorSpec("fp8_e4m3", 8, "token", dynamic=True), torch.bfloat16),
)


@dataclass(frozen=True)
class Operation:
    """One operator with its arguments.

    Attributes:
        title: for the table.
        name: of the operator, and of the function of eager.py that defines it.
        arguments: of both.
        bytes: that it must read and write.
    """

    title: str
    name: str
    arguments: tuple[Any, ...]
    bytes: float


def operations(case: Case, x: Tensor, grad: Tensor) -> list[Operation]:
    """Everything that training does to ``x``, and to the gradient of its quantized form."""
    n, size = x.numel(), x.element_size()
    grid, stored = grid_of(case.spec), stored_dtype(case.spec, x.dtype)
    if case.spec.dynamic:
        tokens, how = x.shape[0], (grid, case.spec.symmetric)
        return [
            Operation(FORWARD, "fake_quantize_tokens", (x, *how), 2 * n * size),
            Operation(QUANTIZE, "quantize_tokens", (x, *how), n * (size + 1) + tokens * 5),
            Operation(BACKWARD, "fake_quantize_tokens_backward", (grad, x, *how), 3 * n * size),
        ]
    s0, theta = scales(case.spec, x)
    scale = (s0, theta, grid, stored)
    codes, mask = torch.ops.deepqat.quantize(x, *scale, True)
    read = s0.numel() * (s0.element_size() + theta.element_size())
    written = s0.numel() * theta.element_size()
    return [
        Operation(FORWARD, "fake_quantize", (x, *scale), 2 * n * size + read),
        Operation(f"{QUANTIZE}, mask", "quantize", (x, *scale, True), n * (size + 1 + 1 / 8) + read),
        Operation(
            f"{QUANTIZE}, mask, values", "quantize_with_values", (x, *scale, True), n * (2 * size + 1 + 1 / 8) + read
        ),
        Operation(DEQUANTIZE, "dequantize", (codes, s0, theta, stored, x.dtype), n * (1 + size) + read),
        Operation(BACKWARD, "fake_quantize_backward", (grad, x, *scale, 1.0, False), 3 * n * size + read),
        Operation(
            SCALE_BACKWARD, "fake_quantize_backward", (grad, x, *scale, 1.0, True), 3 * n * size + read + written
        ),
        Operation(MASK_BACKWARD, "masked", (grad, mask), n * (2 * size + 1 / 8)),
        Operation("amax", "amax", (x, s0.numel()), n * size + s0.numel() * 4),
    ]


def scales(spec: TensorSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """s0 and theta, a little too small: some values of every large block clip."""
    rows = x.reshape(-1, spec.elements_per_scale((x.shape[0], x.shape[1])))
    s0 = absmax_scale(0.8 * rows.abs().amax(1).float(), spec).reshape(spec.scale_shape((x.shape[0], x.shape[1])))
    return s0, 0.1 * torch.randn(s0.shape, device=x.device).to(x.dtype)


def torchao_operations(case: Case, x: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
    """torchao's fake quantizers with static scales where it has them, by the titles of :func:`operations`."""
    if case.spec.dtype == "fp4_e2m1" or (case.spec.dtype == "fp8_e4m3" and case.spec.dynamic):
        return {}
    from torchao.quantization import qat, quant_primitives
    from torchao.quantization.granularity import PerAxis, PerGroup

    scale: Tensor | None = None
    leaf = x.detach().requires_grad_()
    if case.spec.dtype == "fp8_e4m3":
        # Its Float8FakeQuantizer measures the scale anew in every forward; these are the parts of it that follow.
        scale = nn.Parameter(scales(case.spec, x)[0].reshape(1, 1))

        def fake_quantize() -> Tensor:
            codes = quant_primitives._quantize_affine_float8(leaf, scale)
            return quant_primitives._dequantize_affine_float8(codes, scale, x.dtype)

    elif not case.spec.dynamic:
        granularity = PerGroup(case.spec.group_size) if case.spec.group_size else PerAxis(0)
        learned = qat.IntxFakeQuantizeConfig(torch.int4, granularity, is_dynamic=False, range_learning=True)
        quantizer = _initialized(qat.FakeQuantizerBase.from_config(learned), leaf)
        scale = quantizer.scale
        fake_quantize = partial(quantizer, leaf)
    else:
        dynamic = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        fake_quantize = partial(qat.FakeQuantizerBase.from_config(dynamic), leaf)

    with torch.enable_grad():
        output = fake_quantize()
    backward = partial(torch.autograd.grad, output, grad_outputs=grad, retain_graph=True)
    found: dict[str, Callable[[], object]] = {FORWARD: fake_quantize, BACKWARD: partial(backward, inputs=[leaf])}
    if scale is not None:
        found[SCALE_BACKWARD] = partial(backward, inputs=[leaf, scale])
    return found


def _initialized(quantizer: Any, x: Tensor) -> Any:
    """A quantizer whose scale learns wants to see a tensor first, as ``initialize_fake_quantizers`` shows it one."""
    quantizer._initialized = True
    with torch.no_grad():
        quantizer(x)
    return quantizer


class Clock:
    """Seconds of one call, results and their memory dropped before the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            # Read, not written: dirty lines would go back to memory on the time of what is measured.
            cached = torch.cuda.get_device_properties(device).L2_cache_size
            self.flush = torch.zeros(cached, dtype=torch.int32, device=device)
            self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, work: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            return timing.seconds_of(work, self.device)
        self.flush.sum()  # runs for longer than a launch takes, so that the next ones queue up behind it
        self.begin.record()
        work()
        self.end.record()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3


def measure(case: Case, shape: tuple[int, int], clock: Clock, rounds: int, compiled: bool) -> list[list[str]]:
    """The rows of one case."""
    x, grad = (torch.randn(shape, device=clock.device).to(case.dtype) for _ in range(2))
    its = torchao_operations(case, x, grad) if timing.installed("torchao") else {}
    rows = []
    for operation in operations(case, x, grad):
        fused = getattr(torch.ops.deepqat, operation.name)
        reference = getattr(eager, operation.name)
        if not operation.title.startswith("backward"):
            check_equal(fused(*operation.arguments), reference(*operation.arguments), operation)
        ways = {
            "copy": partial(torch.empty_like(x).copy_, x),
            "fused": partial(fused, *operation.arguments),
            "eager": partial(reference, *operation.arguments),
        }
        if compiled:
            torch._dynamo.reset()  # it compiles one function for a few arguments only
            ways["compiled"] = partial(torch.compile(reference, dynamic=False), *operation.arguments)
        if operation.title in its:
            ways["torchao"] = its[operation.title]
        timed = {name: partial(clock, way) for name, way in ways.items()}
        name = f"{case.name}, {shape[0]} x {shape[1]}"
        rows.append(row(name, operation, timing.interleave(timed, rounds, warmup=2), 2 * x.nbytes))
    return rows


def check_equal(ours: Any, reference: Any, operation: Operation) -> None:
    """What gives other results needs no timing."""
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, reference)), strict=True):
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            raise SystemExit(f"{operation.name} and its reference differ")


def row(name: str, operation: Operation, times: dict[str, timing.Timing], copied: int) -> list[str]:
    """Cells of the table; those of a way that there is none of are empty."""
    fused = times["fused"]
    rate, copy_rate = operation.bytes / fused.median / 1e9, copied / times["copy"].median / 1e9
    cells = [name, operation.title, f"{fused.median * 1e3:.3f}", f"{fused.least * 1e3:.3f}"]
    cells += [f"{rate:.1f}", f"{rate / copy_rate:.3f}"]
    for way in ("eager", "compiled", "torchao"):
        if way not in times:
            cells += ["", ""]
            continue
        first, third = times[way].spread(fused)
        cells += [f"{times[way].median * 1e3:.2f}", f"{times[way].ratio(fused):.1f} ({first:.1f} to {third:.1f})"]
    return cells


def misses(rows: list[list[str]], device: torch.device) -> list[str]:
    """Rows below the bar."""
    found = []
    for name, title, _, _, _, share, _, faster, *_ in rows:
        if device.type == "cuda":
            bar = OF_COPY.get(title.split(",")[0])
            if bar is not None and float(share) < bar:
                found.append(f"{name}, {title}: {share} of the copy's bandwidth, below {bar:.2f}")
        elif title in (FORWARD, BACKWARD, SCALE_BACKWARD) and float(faster.split()[0]) < FASTER_THAN_EAGER:
            found.append(f"{name}, {title}: {faster.split()[0]} times as fast as eager, below {FASTER_THAN_EAGER:.0f}")
    return found


def report(rows: list[list[str]], device: torch.device, head: str, remark: str) -> str:
    """The result as Markdown."""
    if device.type == "cuda":
        bar = "90% of the copy's bandwidth forward, 85% backward, of tensors of 64 MB and more"
    else:
        bar = "forward and backward at least 4 times as fast as the eager reference, on one thread"
    titles = ["tensor", "operation", "fused, ms", "least", "GB/s", "of copy"]
    for name in ("eager", "compiled", "torchao"):
        titles += [f"{name}, ms", "fused is faster by"]
    missed = misses(rows, device)
    lines = [
        f"# Fused quantizers on {'CUDA' if device.type == 'cuda' else 'the CPU'}",
        "",
        head,
        f"`{timing.command()}`",
        *([f"Note: {remark}."] if remark else []),
        "",
        f"| {' | '.join(titles)} |",
        f"|{' --- |' * len(titles)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
        "",
        "Medians over rounds in which the ways take turns, with the least beside ours; in brackets the quartiles of",
        "the ratios of single rounds. GB/s: bytes that the operation must read and write, per second. of copy: these",
        "GB/s over those of `y.copy_(x)` in the same rounds; more than 1 can be: less may be written than read.",
        "compiled: the reference through torch.compile. torchao: its fake quantizer of the same kind.",
        "Times are those of the device." if device.type == "cuda" else timing.clock_text(device),
        "",
        f"Bar: {bar}.",
        *([f"- missed by {miss}" for miss in missed] or ["Met by all rows."]),
    ]
    return "\n".join(lines) + "\n"


def keep_freed_memory() -> None:
    """Tell glibc to serve large blocks from its heap and never to shrink it; other libcs do not know of this."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    parser = timing.arguments_of(__doc__, rounds=15)
    parser.add_argument("--shape", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="of the tensors")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    arguments = parser.parse_args()
    device = timing.chosen_device(arguments.device)
    load = os.getloadavg()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    remark = prepare_kernels()
    shapes = [tuple(arguments.shape)] if arguments.shape else SHAPES["quick" if arguments.quick else arguments.device]
    clock = Clock(device)
    rows = []
    for case in CASES:
        for shape in shapes:
            rows += measure(case, shape, clock, 2 if arguments.quick else arguments.rounds, not arguments.no_compile)
        print(f"{case.name}: done", flush=True)
    head = timing.machine(device, load, "torchao")
    timing.write(arguments.results, "quant_kernels", device, report(rows, device, head, remark))


if __name__ == "__main__":
    main()
