"""The speed of the fused quantizers: against the reference in eager mode and compiled, torchao, and a plain copy.

    python benchmarks/quant_kernels.py [--device cuda] [--threads 1] [--rounds 15] [--no-compile]

Every operator gets the arguments of its reference (``quant/kernels/operators.py``), and must give the same
forward results before it is timed. "of copy" is the rate of the bytes that an operation must read and write, over that
of a copy of the tensor. torchao computes other functions (it divides by the scale, and has no theta); its backward is
timed on a graph that is kept.

On CUDA it is the device's time, after a read of more memory than the L2 cache holds. On the CPU glibc is told to keep
freed memory, as clearing the pages of a result takes longer than some operations. Writes
``benchmarks/results/quant_kernels.md``, on CUDA ``quant_kernels_cuda.md``.
"""

import ctypes
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
from quant.kernels import grid_of, prepare_kernels, stored_dtype
from quant.kernels.operators import REFERENCE
from quant.reference import absmax_scale
from quant.spec import TensorSpec

# On CUDA also the smallest that the bars are for, 64 MB in bf16, where a launch weighs most.
SHAPES = {"cpu": [(4096, 4096)], "cuda": [(8192, 8192), (4096, 8192)], "quick": [(64, 64)]}
FASTER_THAN_EAGER = 4.0  # the CPU's bar, of forward and backward
OF_COPY = {"forward": 0.90, "backward": 0.85}  # the bars of CUDA
FORWARD, BACKWARD, SCALE_BACKWARD = "forward", "backward", "backward, scale gradient"


@dataclass(frozen=True)
class Case:
    """A tensor of ``dtype``, quantized by ``spec``; where that is dynamic, each token by its own scale."""

    name: str
    spec: TensorSpec
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case("fp8 per tensor, bf16", TensorSpec("fp8_e4m3", 8, "tensor")),
    Case("fp8 per tensor, fp32", TensorSpec("fp8_e4m3", 8, "tensor"), torch.float32),
    Case("int4, groups of 32, bf16", TensorSpec("int", 4, "group", 32)),
    Case("int4 per channel, bf16", TensorSpec("int", 4, "channel")),
    Case("e2m1, groups of 32, bf16", TensorSpec("fp4_e2m1", 4, "group", 32)),
    Case("int8 per token, bf16", TensorSpec("int", 8, "token", symmetric=False, dynamic=True)),
    Case("fp8 per token, bf16", TensorSpec("fp8_e4m3", 8, "token", dynamic=True)),
)


@dataclass(frozen=True)
class Operation:
    """One operator, which a function in operators.py defines, and the bytes that it must move."""

    title: str
    name: str
    arguments: tuple[Any, ...]
    bytes: float


def operations(case: Case, x: Tensor, grad: Tensor) -> list[Operation]:
    """All that training does to ``x``, and to the gradient of its quantized form."""
    n, size = x.numel(), x.element_size()
    grid, stored = grid_of(case.spec), stored_dtype(case.spec, x.dtype)
    if case.spec.dynamic:
        how = (grid, case.spec.symmetric)
        return [
            Operation(FORWARD, "fake_quantize_tokens", (x, *how), 2 * n * size),
            Operation(BACKWARD, "fake_quantize_tokens_and_mask_", (grad, x, *how, False), 3 * n * size),
        ]
    s0, theta = scales(case.spec, x)
    scale = (s0, theta, grid, stored)
    codes, mask, *_ = torch.ops.deepqat.quantize(x, *scale, True, False, False)
    read = s0.numel() * (s0.element_size() + theta.element_size())
    rows = [
        (FORWARD, "fake_quantize", (x, *scale), 2 * n * size),
        ("quantize, mask", "quantize", (x, *scale, True, False, False), n * (size + 1 + 1 / 8)),
        ("quantize, mask, values", "quantize", (x, *scale, True, True, False), n * (2 * size + 1 + 1 / 8)),
        ("dequantize", "dequantize", (codes, s0, theta, stored, x.dtype, False), n * (1 + size)),
        (BACKWARD, "fake_quantize_backward_", (grad, x, *scale, 1.0, False), 3 * n * size),
        (SCALE_BACKWARD, "fake_quantize_backward_", (grad, x, *scale, 1.0, True), 3 * n * size),
        ("backward by mask", "masked_", (grad, mask), n * (2 * size + 1 / 8)),
        ("amax", "amax", (x, s0.numel()), n * size),
    ]
    return [Operation(title, name, arguments, moved + read) for title, name, arguments, moved in rows]


def scales(spec: TensorSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """s0 and theta, a little too small: some values of every large block clip."""
    shape = (x.shape[0], x.shape[1])
    rows = x.reshape(-1, spec.elements_per_scale(shape))
    s0 = absmax_scale(0.8 * rows.abs().amax(1).float(), spec).reshape(spec.scale_shape(shape))
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
        # Its Float8FakeQuantizer measures the scale in every forward; these are the parts of it that follow.
        scale = nn.Parameter(scales(case.spec, x)[0].reshape(1, 1))

        def fake_quantize() -> Tensor:
            codes = quant_primitives._quantize_affine_float8(leaf, scale)
            return quant_primitives._dequantize_affine_float8(codes, scale, x.dtype)

    elif not case.spec.dynamic:
        granularity = PerGroup(case.spec.group_size) if case.spec.group_size else PerAxis(0)
        learned = qat.IntxFakeQuantizeConfig(torch.int4, granularity, is_dynamic=False, range_learning=True)
        quantizer: Any = qat.FakeQuantizerBase.from_config(learned)
        quantizer._initialized = True  # it wants to see a tensor first, as initialize_fake_quantizers shows it one
        with torch.no_grad():
            quantizer(leaf)
        scale, fake_quantize = quantizer.scale, partial(quantizer, leaf)
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


class Clock:
    """Seconds of one call; results and their memory are dropped before the next."""

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
        fused, reference = getattr(torch.ops.deepqat, operation.name), REFERENCE[operation.name]
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
        times = timing.interleave({name: partial(clock, way) for name, way in ways.items()}, rounds, warmup=2)
        rate, copied = operation.bytes / times["fused"].median, 2 * x.nbytes / times["copy"].median
        cells = [f"{case.name}, {shape[0]} x {shape[1]}", operation.title, f"{times['fused'].median * 1e3:.3f}"]
        cells += [f"{rate / 1e9:.1f}", f"{rate / copied:.3f}"]
        rows.append(
            cells + [times[w].text(times["fused"]) if w in times else "" for w in ("eager", "compiled", "torchao")]
        )
    return rows


def check_equal(ours: Any, reference: Any, operation: Operation) -> None:
    """End the run where an operator and its reference differ."""
    for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, reference)), strict=True):
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            raise SystemExit(f"{operation.name} and its reference differ")


def misses(rows: list[list[str]], device: torch.device) -> list[str]:
    """Rows below the bar."""
    found = []
    for name, title, _, _, share, faster, *_ in rows:
        bar = OF_COPY.get(title.split(",")[0]) if device.type == "cuda" else None
        if bar is not None and float(share) < bar:
            found.append(f"- missed by {name}, {title}: {share} of the copy's bandwidth, below {bar:.2f}")
        if device.type == "cpu" and title in (FORWARD, BACKWARD, SCALE_BACKWARD):
            times = float(faster.split()[0])
            if times < FASTER_THAN_EAGER:
                found.append(f"- missed by {name}, {title}: {times} times as fast as eager, below {FASTER_THAN_EAGER}")
    return found


def keep_freed_memory() -> None:
    """Tell glibc to serve large blocks from its heap and never to shrink it; other libcs do not know of this."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    parser = timing.options_of(__doc__, rounds=15)
    parser.add_argument("--shape", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="of the tensors")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    options = parser.parse_args()
    device = timing.device_of(options)
    keep_freed_memory()
    remark = prepare_kernels()
    shapes = [tuple(options.shape)] if options.shape else SHAPES["quick" if options.quick else options.device]
    clock, rounds, rows = Clock(device), 2 if options.quick else options.rounds, []
    for case in CASES:
        for shape in shapes:
            rows += measure(case, shape, clock, rounds, not options.no_compile)
        print(f"{case.name}: done", flush=True)
    bar = "0.90 of the copy's bandwidth forward, 0.85 backward" if device.type == "cuda" else "4 times as fast as eager"
    timing.write(
        options.results,
        "quant_kernels",
        device,
        f"# Fused quantizers against plain PyTorch, {device.type.upper()}",
        "Medians, ways in turn; how many times as long the others take, with quartiles of single rounds. compiled: the "
        f"reference through torch.compile.\n{timing.head(device, 'torchao')}",
        f"Note: {remark}." if remark else "",
        timing.table(("tensor", "operation", "fused, ms", "GB/s", "of copy", "eager", "compiled", "torchao"), rows),
        f"Bar of forward and backward: {bar}.\n" + ("\n".join(misses(rows, device)) or "Met by all rows."),
    )


if __name__ == "__main__":
    main()
