"""Every operator once, in odd sizes and from odd addresses too, for compute-sanitizer and ncu.

python benchmarks/gpu/operators.py [--large]
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from quant.kernels import prepare_kernels

SHAPES = [(64, 96), (33, 77), (3, 5000), (2, 16384 * 3 + 5)]
LARGE = [(4096, 8192)]
GRIDS = (0, 1, 4)  # e4m3, e2m1, int4; see quant/kernels/arithmetic.h
TOKENS = ((0, True), (8, True), (8, False))  # grid, symmetric
GROUP = 32


def main() -> None:
    """Run them all, and wait for the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="one large shape, aligned: for counters")
    large = parser.parse_args().large
    prepare_kernels()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in LARGE if large else SHAPES:
        for offset in (0,) if large else (0, 1):
            numel = shape[0] * shape[1]
            x, grad = (torch.randn(numel + offset, device=device).bfloat16()[offset:].view(shape) for _ in range(2))
            fixed_grids(x, grad)
            dynamic_grids(x, grad)
            rows_of_experts(x)
            norms_and_swiglu(x, grad)
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("ok")


def fixed_grids(x: Tensor, grad: Tensor) -> None:
    """Scales per tensor, per row and, where the sizes allow it, per group."""
    ops, rows, columns = torch.ops.deepqat, *x.shape
    shapes = [(1,), (rows, 1), *([(rows, columns // GROUP)] if columns % GROUP == 0 else [])]
    for shape in shapes:
        s0 = torch.full(shape, 0.01, device=x.device)
        theta = torch.zeros_like(s0).bfloat16()
        for grid in GRIDS:
            arguments = (s0, theta, grid, torch.float32)
            ops.effective_scale(s0, theta, torch.float32)
            ops.quantize(x, *arguments, False, False, True)
            codes, mask, *_ = ops.quantize(x, *arguments, True, True, False)
            ops.fake_quantize(x, *arguments)
            for zeros in (False, True):
                ops.dequantize(codes, s0, theta, torch.float32, torch.bfloat16, zeros)
            ops.masked_(grad.clone(), mask)
            ops.dequantize_and_mask_(grad.clone(), mask, codes, s0, theta, torch.float32)
            for wanted in (False, True):
                ops.fake_quantize_backward_(grad.clone(), x, *arguments, 1.0, wanted)
        ops.multiply_runs(x, theta)
        ops.sum_products(x, grad, theta, 1.0)
        ops.amax(x, s0.numel())


def dynamic_grids(x: Tensor, grad: Tensor) -> None:
    """Scales that are measured of each token."""
    ops = torch.ops.deepqat
    ops.keep_tokens(x, 0, False)
    for tokens in TOKENS:
        ops.fake_quantize_tokens(x, *tokens)
        ops.fake_quantize_tokens_and_mask_(grad.clone(), x, *tokens, True)


def rows_of_experts(x: Tensor) -> None:
    """Sums of two rows for each token; in the middle of an odd number of them one row comes twice."""
    places = torch.arange(len(x), device=x.device)
    torch.ops.deepqat.sum_rows(x, torch.stack([places, places.flip(0)], dim=1))


def norms_and_swiglu(x: Tensor, grad: Tensor) -> None:
    """With the quantization of their results; a norm has rows of a multiple of eight, of at most 16,384."""
    ops, s0 = torch.ops.deepqat, torch.full((1,), 0.01, device=x.device)
    for grid in (0, 8):
        for wanted in (False, True):
            _, mask, _ = ops.silu_mul_quantize(x, grad, s0, grid, torch.float32, True, wanted)
            ops.silu_mul_backward(grad, x, grad, mask)
            if x.shape[1] % 8 == 0 and x.shape[1] <= 16384:
                weight = grad[0].contiguous()
                _, mask, _, rstd = ops.rms_norm_quantize(x, weight, 1e-6, s0, grid, torch.float32, True, wanted)
                ops.rms_norm_backward(grad, x, weight, rstd, mask, wanted)


if __name__ == "__main__":
    main()
