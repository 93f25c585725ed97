"""What "fast accumulation" (``quant.fp8_fast_accum``) costs in precision, by an **emulation**: no GPU was there.

    python benchmarks/fast_accum.py [--write]

Hopper's fp8 tensor cores do not add in fp32. As DeepSeek-V3's report describes it (arXiv 2412.19437, sections 3.3.2
and 3.5.2), an instruction aligns 32 products, and what has been summed so far, to the largest exponent among them,
keeps the highest 14 bits of each and truncates the rest; the sum is kept in as many bits. *Fast* accumulation leaves
all of K to these sums. Without it CUTLASS and cuBLAS add them up in fp32 after every 128 elements. This file does the
same in fp64, which holds every such sum exactly, and compares with the exact product in fp64. The order within an
instruction plays no part in this model. What the hardware does beyond the description is not known to it; other
generations of it may differ.

The table has the relative error ``|y - exact| / |exact|``, by norms: of the sums alone, before they are rounded to
bf16, beside what that rounding, and what the codes themselves, change.
"""

import argparse
import sys
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import RESULTS
from quant.reference import absmax_scale, quantize
from quant.spec import FP8_TENSOR

INSTRUCTION = 32  # products that an fp8 instruction of Hopper adds at a time
PROMOTION = 128  # elements of K after which sums go to fp32 without fast accumulation
BITS = 14  # that are kept of an aligned product, the leading one included
ROWS = COLUMNS = 96
INNER = (1024, 4096, 8192, 16384)


def emulated(x: Tensor, weight: Tensor, *, fast: bool) -> Tensor:
    """``x @ weight.t()`` of e4m3 numbers as the tensor cores of Hopper are described to add it up.

    Args:
        x, weight: ``[M, K]`` and ``[N, K]``, fp64, numbers of e4m3; K is a multiple of 128.
        fast: with fast accumulation.

    Returns:
        fp64 ``[M, N]``; numbers of fp32, or of 14 bits with ``fast``.
    """
    promoted = torch.zeros(len(x), len(weight), dtype=torch.float32)
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for begin in range(0, x.shape[1], INSTRUCTION):
        rows, columns = x[:, begin : begin + INSTRUCTION], weight[:, begin : begin + INSTRUCTION]
        terms = torch.cat([rows[:, None] * columns[None], total[..., None]], dim=-1)
        total = _truncated(_truncated(terms, terms.abs().amax(-1, keepdim=True)).sum(-1))
        if not fast and (begin + INSTRUCTION) % PROMOTION == 0:
            promoted += total.float()
            total.zero_()
    return total if fast else promoted.double()


def _truncated(terms: Tensor, largest: Tensor | None = None) -> Tensor:
    """The highest bits of each term, from the leading one of the largest (default: its own) on; the rest is cut off."""
    _, exponent = torch.frexp(terms if largest is None else largest)
    return torch.ldexp(torch.ldexp(terms, BITS - exponent).trunc(), exponent - BITS)


def operands(kind: str, inner: int) -> tuple[Tensor, Tensor]:
    """Inputs ``[ROWS, inner]`` and weights ``[COLUMNS, inner]`` in fp64, before they are quantized.

    ``gaussian``; ``outliers``: one in 256 features of the input is 30 times as large, as in the residual stream of
    large models; ``positive``: magnitudes, whose sum grows with K, the worst case for sums of few bits.
    """
    x, weight = torch.randn(ROWS, inner).double(), torch.randn(COLUMNS, inner).double()
    if kind == "outliers":
        x[:, ::256] *= 30
    return (x.abs(), weight.abs()) if kind == "positive" else (x, weight)


def codes_of(values: Tensor) -> Tensor:
    """The codes of a tensor that is scaled to its largest magnitude, as numbers in fp64; and so are the values."""
    scale = absmax_scale(values.abs().max().float().view(1), FP8_TENSOR)
    return quantize(values.float(), scale, FP8_TENSOR).double()


def relative(found: Tensor, exact: Tensor) -> float:
    """Relative error by norms."""
    return ((found - exact).norm() / exact.norm()).item()


def rows() -> list[str]:
    """The table."""
    lines = [
        "| operands | K | sums in fp32 every 128 | fast | rounding to bf16 | quantization to fp8 |",
        "| --- " * 6 + "|",
    ]
    for kind in ("gaussian", "outliers", "positive"):
        for inner in INNER:
            torch.manual_seed(inner)
            values = operands(kind, inner)
            x, weight = map(codes_of, values)
            exact = x @ weight.t()
            scales = [absmax_scale(one.abs().max().float().view(1), FP8_TENSOR) for one in values]
            unquantized = values[0] @ values[1].t() / (scales[0] * scales[1]).double()
            errors = [relative(emulated(x, weight, fast=fast), exact) for fast in (False, True)]
            errors += [relative(exact.bfloat16().double(), exact), relative(exact, unquantized)]
            lines.append(f"| {kind} | {inner} | " + " | ".join(f"{100 * error:.3f}%" for error in errors) + " |")
    return lines


def main() -> None:
    """Print the table; write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS / 'fast_accum.md'}")
    head = [
        "# Sums of fp8 products in few bits",
        "",
        f"{date.today()}, torch {torch.__version__.partition('+')[0]}. An **emulation** on the CPU of Hopper's sums as "
        "they are published, not a measurement: see `benchmarks/fast_accum.py`.",
        "",
    ]
    arguments = parser.parse_args()
    page = "\n".join([*head, *rows(), ""])
    print(page)
    if arguments.write:
        (RESULTS / "fast_accum.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
