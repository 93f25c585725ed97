"""What GEMMs of gradients in fp8 (``quant.fp8_gradients``) change in training; on the CPU, where it saves no time.

    python benchmarks/fp8_gradients.py --model DIR --train FILE --text FILE [--out DIR] [--seeds 1]

Three ways to train ``fp8_static``, all of which multiply codes forward: gradients in bf16, in e4m3 and in e5m2, as
:mod:`quant.reference_gradient` defines them. First the errors on one batch: of what is quantised, the share of it that
becomes 0, and those of the weights' gradients, where errors of all layers above have come together. Then short runs,
with perplexities of their exports. Writes ``benchmarks/results/fp8_gradients.md``.
"""

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.recovery_runs import Bench, Size
from engine.loop import Loop
from engine.state import LoopState
from quant import kernels
from quant.reference_gradient import FORMATS

CODES = {"quant.compute": "fp8_gemm"}  # the forward that all have
WAYS: dict[str, dict[str, str]] = {"bf16": CODES} | {kind: CODES | {"quant.fp8_gradients": kind} for kind in FORMATS}
SIZE = Size(steps=60, rows=4, length=128, warmup=4, tokens=20_000)
QUICK = Size(steps=2, rows=2, length=16, warmup=1, tokens=100)
RATE = 3e-4


class Errors:
    """What quantising the gradients of a step does to them, summed over all layers; a hook, which changes none."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.off = self.size = self.lost = self.all = 0.0

    def __call__(self, grad: Tensor) -> None:
        codes, _, scale = kernels.quantize_gradient(grad.flatten(0, -2), self.dtype)
        found = (codes.float() * scale).view(grad.shape)
        self.off += (found - grad).double().square().sum().item()
        self.size += grad.double().square().sum().item()
        self.lost += ((found == 0) & (grad != 0)).sum().item()
        self.all += grad.count_nonzero().item()

    def row(self) -> str:
        """Relative error by norms, and the share of elements that became 0."""
        return f"{100 * (self.off / self.size) ** 0.5:.2f}% | {100 * self.lost / self.all:.2f}%"


def errors(bench: Bench) -> list[str]:
    """Of one batch: what is quantised, and the gradients of the weights that come of it."""
    lines = ["| format | error of a gradient | of it becomes 0 | error of the weights' gradients |", "| --- " * 4 + "|"]
    exact = gradients(bench, "bf16")
    for kind, dtype in FORMATS.items():
        counted = Errors(dtype)
        found = gradients(bench, kind, counted)
        off = sum((found[key] - one).double().square().sum().item() for key, one in exact.items())
        size = sum(one.double().square().sum().item() for one in exact.values())
        lines.append(f"| {kind} | {counted.row()} | {100 * (off / size) ** 0.5:.2f}% |")
    return lines


def gradients(bench: Bench, way: str, watch: Errors | None = None) -> dict[str, Tensor]:
    """The weights' gradients in the first step of a run; those of outputs are shown to ``watch``."""
    found: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as directory:
        one_step = {"train.steps": 1, "optim.warmup_steps": 1, "export.enabled": False}
        settings = bench._settings("fp8_static", RATE, 0) | one_step | WAYS[way]
        loop = Loop(bench._recipe(settings, Path(directory)))

        @loop.at(step=0)
        def hook(state: LoopState) -> None:
            for name, layer in state.quant.quantization.layers.items():
                if watch is not None:
                    layer.register_forward_hook(partial(_watch, watch))
                layer.weight.register_hook(partial(_keep, found, name))

        loop.run()
    return found


def _watch(watch: Errors, module: nn.Module, inputs: object, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(watch)


def _keep(found: dict[str, Tensor], name: str, grad: Tensor) -> None:
    found[name] = grad.detach().clone()


def runs(bench: Bench, seeds: int) -> list[str]:
    """Perplexities after training."""
    lines = [
        "| gradients | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " |",
        "| --- " * (1 + seeds) + "|",
    ]
    for name, way in WAYS.items():
        label = "" if name == "bf16" else name
        found = [bench.trained("fp8_static", RATE, seed, label, way) for seed in range(seeds)]
        lines.append(f"| {name} | " + " | ".join(f"{one:.3f}" for one in found) + " |")
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--train", "--text"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--out", type=Path, help="keep the models there, and what is there already")
    parser.add_argument("--seeds", type=int, default=1, help="of each run; 0: none is made")
    parser.add_argument("--quick", action="store_true", help="two tiny steps; write nothing")
    arguments = parser.parse_args()
    size, load = QUICK if arguments.quick else SIZE, os.getloadavg()
    with tempfile.TemporaryDirectory() as scratch:
        out = arguments.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        bench = Bench(arguments.model, arguments.train, arguments.text, size, out)
        before = f"The checkpoint itself: {bench.untrained():.3f}."
        parts = [*errors(bench), "", *(runs(bench, arguments.seeds) if arguments.seeds else ["No run was made."])]
    head = ["# Gradients in fp8", "", timing.machine(torch.device("cpu"), load, "transformers", "deepspeed"), ""]
    head += [f"`{timing.command()}`: {size}, learning rate {RATE}; perplexities on held-out text.", "", before, ""]
    page = "\n".join([*head, *parts, ""])
    if arguments.quick:
        print(page)
    else:
        timing.write(timing.RESULTS, "fp8_gradients", torch.device("cpu"), page)


if __name__ == "__main__":
    main()
