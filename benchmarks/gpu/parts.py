"""Rates of the GEMMs of a layer and of stacks of experts, and the host's time for a layer.

    python benchmarks/gpu/parts.py {gemms,experts,host} [--dry]

gemms    TFLOP/s of a Qwen3-8B layer's: bf16 in its three directions, fp8 with sums in fp32 and with fast ones, and the
         errors of both against fp64. Decides whether fast accumulation pays, and what it costs.
experts  TFLOP/s of stacks: bf16, fp8 with sums in fp32 and with fast ones. Decides whether stacks pay in fp8. Then: is
         the weight gradient of an expert without rows zero in memory that held NaN before?
host     Microseconds of the host for one layer, forward and backward, where the device has nothing to do. Decides below
         which size a step is bound by Python, autograd and launches.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from benchmarks.timing import synchronize
from quant import SCHEMES, gemm, prepare_kernels, replace_layers

TOKENS = 8192
SHAPES = [(4096, 4096), (1024, 4096), (6144, 4096), (12288, 4096), (24576, 4096), (4096, 12288)]  # out, in
ROWS = 64  # that are compared with fp64
STACK = (128, 2048, 1536, 65536)  # gate and up of Qwen3-30B-A3B: experts, width, out, rows
EMPTY = 3  # the expert without rows
SIDE = 64  # of the layer of ``host``
WAYS = (("fp8_static", True), ("fp8_static", False), ("w4a16_g32", False), ("8da4w", False))  # scheme, fp8 GEMM


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Median of 20 calls by the device's clock, after 5. What is read is not in its cache unless it fits there."""
    times = []
    for index in range(25):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            synchronize(device)
            taken = begin.elapsed_time(end)
        else:
            began = time.perf_counter()
            function()
            taken = 1e3 * (time.perf_counter() - began)
        times += [taken] if index >= 5 else []
    return statistics.median(times)


def rates(ways: Mapping[str, Callable[[], object]], flop: int, device: torch.device) -> str:
    """TFLOP/s of each way."""
    return ", ".join(f"{name} {flop / milliseconds(way, device) / 1e9:.0f}" for name, way in ways.items()) + " TFLOP/s"


def gemms(device: torch.device, dry: bool) -> None:
    """Print a line for each shape, then what a copy of memory reaches."""
    for out, width in [(32, 64)] if dry else SHAPES:
        tokens = 64 if dry else TOKENS
        shapes = ((tokens, width), (out, width), (tokens, out))
        x, weight, grad = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
        codes, weight_codes, one = (
            x.to(torch.float8_e4m3fn),
            weight.to(torch.float8_e4m3fn),
            torch.ones(1, device=device),
        )

        def fp8(fast: bool, x: Tensor = codes, weight: Tensor = weight_codes, one: Tensor = one) -> Tensor:
            return torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

        ways: dict[str, Callable[[], Tensor]] = {
            "bf16": lambda x=x, weight=weight: x @ weight.t(),
            "dX": lambda grad=grad, weight=weight: grad @ weight,
            "dW": lambda grad=grad, x=x: grad.t() @ x,
            "fp8": lambda fp8=fp8: fp8(False),
            "fp8 fast": lambda fp8=fp8: fp8(True),
        }
        exact = codes[:ROWS].double() @ weight_codes.double().t()
        errors = [((fp8(fast)[:ROWS].double() - exact).norm() / exact.norm()).item() for fast in (False, True)]
        text = rates(ways, 2 * tokens * out * width, device)
        print(f"{tokens}x{out}x{width}: {text}; error {errors[0]:.1e}, fast {errors[1]:.1e}", flush=True)
    source = torch.empty(2**20 if dry else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    print(f"copy {2 * source.nbytes / milliseconds(lambda: target.copy_(source), device) / 1e6:.0f} GB/s")


def experts(device: torch.device, dry: bool) -> None:
    """Print rates, then answers; exit code 1 where a gradient is wrong."""
    count, width, out, rows = (4, 64, 32, 200) if dry else STACK
    sizes = torch.multinomial(torch.rand(count, device=device) ** 3, rows, replacement=True).bincount(minlength=count)
    sizes[0] += sizes[EMPTY].clone()
    sizes[EMPTY] = 0
    offsets = sizes.cumsum(0).int()
    x, weight = (
        torch.randn(rows, width, device=device).bfloat16(),
        0.02 * torch.randn(count, out, width, device=device).bfloat16(),
    )
    codes, weight_codes = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    scale, scales = torch.ones(1, device=device), torch.rand(count, device=device) + 0.5

    def fp8(fast: bool) -> Tensor:
        return gemm.scaled_linear(codes, scale, weight_codes, scales, None, torch.bfloat16, offsets, fast_accum=fast)

    ways = {"bf16": lambda: gemm.linear(x, weight, None, offsets)}
    ways |= {"fp8": lambda: fp8(False), "fp8 fast": lambda: fp8(True)}
    with torch.no_grad():
        print(rates(ways, 2 * rows * width * out, device))
        grad = torch.randn(rows, out, device=device).bfloat16()
        garbage = [torch.full_like(weight, torch.nan) for _ in range(2)]
        del garbage  # the gradient gets its memory
        gradient = gemm.weight_gradient(grad, x, offsets)
    right = not gradient[EMPTY].any() and bool(gradient.isfinite().all())
    print(f"the gradient of an expert without rows is zero: {'yes' if right else 'no'}")
    sys.exit(not right)


def host(device: torch.device, dry: bool) -> None:
    """Print a line for an nn.Linear, and one for each way."""
    prepare_kernels()
    print(f"nn.Linear: {microseconds(linear(device), device):.0f} us")
    for scheme, fp8_gemm in WAYS:
        model = nn.ModuleDict({"up_proj": linear(device)})
        learn = {"learn_weight_scale": True, "learn_input_scale": False}
        quantization = replace_layers(model, SCHEMES[scheme], **learn, fp8_gemm=fp8_gemm)
        with torch.no_grad():
            for group in (*quantization.weight_groups, *quantization.input_groups):
                group.s0.fill_(0.01)
        print(f"{scheme}{', fp8 GEMM' if fp8_gemm else ''}: {microseconds(model['up_proj'], device):.0f} us")


def linear(device: torch.device) -> nn.Linear:
    """Make a layer so small that only the host's time counts."""
    return nn.Linear(SIDE, SIDE, bias=False, device=device, dtype=torch.bfloat16)


def microseconds(module: nn.Module, device: torch.device) -> float:
    """Forward and backward of one layer, mean of 300 after 30."""
    x = torch.randn(SIDE, SIDE, device=device).bfloat16().requires_grad_()
    grad = torch.ones(SIDE, SIDE, device=device).bfloat16()
    for index in range(330):
        if index == 30:
            synchronize(device)
            began = time.perf_counter()
        module(x).backward(grad)
    synchronize(device)
    return 1e6 * (time.perf_counter() - began) / 300


def main() -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("gemms", "experts", "host"))
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    part = {"gemms": gemms, "experts": experts, "host": host}[options.part]
    part(torch.device("cpu" if options.dry else "cuda"), options.dry)


if __name__ == "__main__":
    main()
