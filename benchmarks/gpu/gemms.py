"""TFLOP/s of the GEMMs of a Qwen3-8B layer: bf16 in its three directions, fp8 with sums in fp32 and with fast ones, and
the errors of the forward's against fp64. Decides whether fast accumulation pays, and what it costs.

    python benchmarks/gpu/gemms.py [--dry]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.gpu.clock import milliseconds

TOKENS = 8192
SHAPES = [(4096, 4096), (1024, 4096), (6144, 4096), (12288, 4096), (24576, 4096), (4096, 12288)]  # out, in
ROWS = 64  # that are compared with fp64


def main() -> None:
    """Print a line for each shape, then what a copy of memory reaches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="one tiny shape, on the CPU")
    dry = parser.parse_args().dry
    device = torch.device("cpu" if dry else "cuda")
    for out, width in [(32, 64)] if dry else SHAPES:
        print(line_of(64 if dry else TOKENS, out, width, device), flush=True)
    source = torch.empty(2**20 if dry else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    print(f"copy {2 * source.nbytes / milliseconds(lambda: target.copy_(source), device) / 1e6:.0f} GB/s")


def line_of(tokens: int, out: int, width: int, device: torch.device) -> str:
    """Rates and errors of one shape."""
    x, weight, grad = (
        torch.randn(shape, device=device).bfloat16() for shape in ((tokens, width), (out, width), (tokens, out))
    )
    codes, weight_codes = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    one = torch.ones(1, device=device)

    def fp8(fast: bool) -> Tensor:
        scales = {"scale_a": one, "scale_b": one}
        return torch._scaled_mm(codes, weight_codes.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    ways: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: x @ weight.t(),
        "dX": lambda: grad @ weight,
        "dW": lambda: grad.t() @ x,
        "fp8": lambda: fp8(False),
        "fp8 fast": lambda: fp8(True),
    }
    flop = 2 * tokens * out * width
    rates = ", ".join(f"{name} {flop / milliseconds(way, device) / 1e9:.0f}" for name, way in ways.items())
    exact = codes[:ROWS].double() @ weight_codes.double().t()
    errors = ((fp8(fast)[:ROWS].double() - exact).norm() / exact.norm() for fast in (False, True))
    return f"{tokens}x{out}x{width}: {rates} TFLOP/s; error " + ", fast ".join(f"{one.item():.1e}" for one in errors)


if __name__ == "__main__":
    main()
