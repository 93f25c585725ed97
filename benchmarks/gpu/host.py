"""Time that the host takes for one layer, forward and backward, where the device has nothing to do: what Python,
autograd and launches cost. Decides below which size a step is bound by the host.

    python benchmarks/gpu/host.py [--dry]
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from benchmarks.timing import synchronize
from quant import SCHEMES, prepare, prepare_kernels

SIDE, WARM_UP, ROUNDS = 64, 30, 300
WAYS = (("fp8_static", True), ("fp8_static", False), ("w4a16_g32", False), ("8da4w", False))  # scheme, fp8 GEMM


def main() -> None:
    """Print a line for an nn.Linear, and one for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU")
    device = torch.device("cpu" if parser.parse_args().dry else "cuda")
    prepare_kernels()
    print(f"nn.Linear: {microseconds(layer(device), device):.0f} us")
    for scheme, fp8_gemm in WAYS:
        model = nn.ModuleDict({"up_proj": layer(device)})
        quantization = prepare(
            model, SCHEMES[scheme], learn_weight_scale=True, learn_input_scale=False, fp8_gemm=fp8_gemm
        )
        with torch.no_grad():
            for group in (*quantization.weight_groups, *quantization.input_groups):
                group.s0.fill_(0.01)
        print(f"{scheme}{', fp8 GEMM' if fp8_gemm else ''}: {microseconds(model['up_proj'], device):.0f} us")


def layer(device: torch.device) -> nn.Linear:
    """A Linear in bf16, ``SIDE`` wide on both sides."""
    return nn.Linear(SIDE, SIDE, bias=False, device=device, dtype=torch.bfloat16)


def microseconds(module: nn.Module, device: torch.device) -> float:
    """Forward and backward of one layer, in the mean over many."""
    x = torch.randn(SIDE, SIDE, device=device).bfloat16().requires_grad_()
    grad = torch.ones(SIDE, SIDE, device=device).bfloat16()
    for round in range(WARM_UP + ROUNDS):
        if round == WARM_UP:
            synchronize(device)
            began = time.perf_counter()
        module(x).backward(grad)
    synchronize(device)
    return 1e6 * (time.perf_counter() - began) / ROUNDS


if __name__ == "__main__":
    main()
