"""TFLOP/s of stacks of experts: bf16, fp8 with every expert's rows moved apart to multiples of 16 (as quant/gemm.py
does it), and fp8 in place. Decides whether rows have to be moved, and whether stacks pay in fp8 at all.

    python benchmarks/gpu/experts.py [--dry]

Then two questions with an answer: whether both fp8 ways give the same bits, and whether the weight gradient of an
expert without rows is zero in memory that held NaN before.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.gpu.clock import milliseconds
from quant import gemm

FULL = {"experts": 128, "width": 2048, "out": 1536, "rows": 65536}  # gate and up of Qwen3-30B-A3B
TINY = {"experts": 4, "width": 64, "out": 32, "rows": 200}
EMPTY = 3  # the expert without rows


def main() -> None:
    """Print rates, then answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU, without the way that a CPU lacks")
    dry = parser.parse_args().dry
    device, size = torch.device("cpu" if dry else "cuda"), TINY if dry else FULL
    experts, width, out, rows = size.values()
    offsets = some_offsets(experts, rows, device)
    x = torch.randn(rows, width, device=device).bfloat16()
    weight = 0.02 * torch.randn(experts, out, width, device=device).bfloat16()
    codes, weight_codes = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    scale, scales = torch.ones(1, device=device), torch.rand(experts, device=device) + 0.5

    def apart() -> Tensor:
        return gemm.scaled_linear(codes, scale, weight_codes, scales, None, torch.bfloat16, offsets)

    def in_place(fast: bool = False) -> Tensor:
        of_rows, of_weight = scale.expand(rows).contiguous(), scales[:, None].expand(experts, out).contiguous()
        options = {"offs": offsets, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return torch._scaled_grouped_mm(codes, weight_codes.transpose(-2, -1), of_rows, of_weight, **options)

    ways = {"bf16": lambda: gemm.linear(x, weight, None, offsets), "fp8 moved apart": apart}
    if not dry:
        ways |= {"fp8 in place": in_place, "fp8 in place, fast": lambda: in_place(True)}
    with torch.no_grad():
        rates = {name: 2 * rows * width * out / milliseconds(way, device) / 1e9 for name, way in ways.items()}
        print(", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()), "TFLOP/s")
        if not dry:
            print(f"in place gives the bits of moved apart: {answer(torch.equal(apart(), in_place()))}")
        gradient = poisoned_gradient(x, weight, offsets)
    right = not gradient[EMPTY].any() and bool(gradient.isfinite().all())
    print(f"the gradient of an expert without rows is zero: {answer(right)}")
    sys.exit(not right)


def some_offsets(experts: int, rows: int, device: torch.device) -> Tensor:
    """Where the rows of each expert end: uneven, and none for :data:`EMPTY`."""
    chosen = torch.multinomial(torch.rand(experts, device=device) ** 3, rows, replacement=True)
    sizes = chosen.bincount(minlength=experts)
    sizes[0] += sizes[EMPTY].clone()
    sizes[EMPTY] = 0
    return sizes.cumsum(0).int()


def poisoned_gradient(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The weights' gradient, in memory that the allocator hands out again with NaN in it."""
    grad = torch.randn(x.shape[0], weight.shape[1], device=x.device).bfloat16()
    garbage = [torch.full_like(weight, torch.nan) for _ in range(2)]
    del garbage
    return gemm.weight_gradient(grad, x, offsets)


def answer(right: bool) -> str:
    """For a cell of a table."""
    return "yes" if right else "no"


if __name__ == "__main__":
    main()
