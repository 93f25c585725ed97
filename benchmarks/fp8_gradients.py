"""What GEMMs of gradients in fp8 would change: not built; this is the figure that decides whether they should be.

    python benchmarks/fp8_gradients.py --model DIR --train FILE --text FILE [--out DIR] [--seeds 2]

Where the forward of ``fp8_static`` multiplies codes, backward could too: the gradient of a layer's output is quantised
per tensor, with a scale of its own in every step, and multiplied with the codes of weight and input that the forward
made, ``dX = (g_q @ W_q) * s_g * s_w`` and ``dW = (g_q^T @ X_q) * s_g * s_x``. Two formats: e4m3 with four bits of
precision over a range of 2^18, e5m2 with three bits over 2^32::

    s = max|g| / largest of the format (1 of a gradient of zeros),  g_q = cast(g * (1 / s)),  g becomes g_q * s in bf16

A hook on the output of every quantised layer does this to its gradient; the GEMMs stay in bf16, whose products of such
values differ from those of the codes by the rounding of operands to bf16. First the errors on one batch: of what is
quantised, the share of it that becomes 0, and those of the weights' gradients, where errors of all layers above have
come together. Then short runs, with perplexities of their exports. Writes ``benchmarks/results/fp8_gradients.md``.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.recovery import Bench, Size
from engine.loop import Loop
from engine.state import LoopState

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SIZE = Size(steps=20, rows=4, length=128, warmup=2, tokens=20_000)
QUICK = Size(steps=2, rows=2, length=16, warmup=1, tokens=100)
RATE = 3e-4


def quantised(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient through fp8 and back, in its own dtype: per tensor, scaled so that the largest magnitude fits."""
    largest = torch.finfo(dtype).max
    scale = grad.abs().max().float() / largest
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    codes = (grad.float() * (1 / scale)).clamp(-largest, largest).to(dtype)
    return (codes.float() * scale).to(grad.dtype)


def with_gradients(change: Callable[[Tensor], Tensor], loop: Loop) -> None:
    """Have every quantised layer of a run see its output's gradient changed."""

    @loop.at(step=0)
    def hook(state: LoopState) -> None:
        for layer in state.quant.quantization.layers.values():
            layer.register_forward_hook(partial(_change_gradient, change))


def _change_gradient(change: Callable[[Tensor], Tensor], module: nn.Module, inputs: object, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(change)


def in_e4m3(loop: Loop) -> None:
    """Gradients in e4m3."""
    with_gradients(partial(quantised, dtype=FORMATS["e4m3"]), loop)


def in_e5m2(loop: Loop) -> None:
    """Gradients in e5m2."""
    with_gradients(partial(quantised, dtype=FORMATS["e5m2"]), loop)


class Errors:
    """What quantising the gradients of a step does to them, summed over all layers that are hooked."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.off = self.size = self.lost = self.all = 0.0

    def __call__(self, grad: Tensor) -> Tensor:
        found = quantised(grad, self.dtype)
        self.off += (found - grad).double().square().sum().item()
        self.size += grad.double().square().sum().item()
        self.lost += ((found == 0) & (grad != 0)).sum().item()
        self.all += grad.count_nonzero().item()
        return found

    def row(self) -> str:
        """Relative error by norms, and the share of elements that became 0."""
        return f"{100 * (self.off / self.size) ** 0.5:.2f}% | {100 * self.lost / self.all:.2f}%"


def errors(bench: Bench) -> list[str]:
    """Of one batch: what is quantised, and the gradients of the weights that come of it."""
    lines = ["| format | error of a gradient | of it becomes 0 | error of the weights' gradients |", "| --- " * 4 + "|"]
    exact: dict[str, Tensor] = {}
    for name, dtype in {"bf16": None, **FORMATS}.items():
        counted = None if dtype is None else Errors(dtype)
        found = gradients(bench, counted)
        exact = exact or found
        off = sum((found[key] - one).double().square().sum().item() for key, one in exact.items())
        size = sum(one.double().square().sum().item() for one in exact.values())
        if counted is not None:
            lines.append(f"| {name} | {counted.row()} | {100 * (off / size) ** 0.5:.2f}% |")
    return lines


def gradients(bench: Bench, change: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
    """The weights' gradients in the first step of a run."""
    found: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as directory:
        one_step = {"train.steps": 1, "optim.warmup_steps": 1, "export.enabled": False}
        settings = bench._settings("fp8_static", RATE, 0) | one_step
        loop = Loop(bench._recipe(settings, Path(directory)))

        @loop.at(step=0)
        def hook(state: LoopState) -> None:
            for name, layer in state.quant.quantization.layers.items():
                if change is not None:
                    layer.register_forward_hook(partial(_change_gradient, change))
                layer.weight.register_hook(partial(_keep, found, name))

        loop.run()
    return found


def _keep(found: dict[str, Tensor], name: str, grad: Tensor) -> None:
    found[name] = grad.detach().clone()


def runs(bench: Bench, seeds: int) -> list[str]:
    """Perplexities after training."""
    lines = [
        "| gradients | " + " | ".join(f"seed {seed}" for seed in range(seeds)) + " |",
        "| --- " * (1 + seeds) + "|",
    ]
    for name, change in (("bf16", None), ("e4m3", in_e4m3), ("e5m2", in_e5m2)):
        found = [
            bench.trained("fp8_static", RATE, seed, "" if change is None else name, change) for seed in range(seeds)
        ]
        lines.append(f"| {name} | " + " | ".join(f"{one:.3f}" for one in found) + " |")
    return lines


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--train", "--text"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--out", type=Path, help="keep the models there, and what is there already")
    parser.add_argument("--seeds", type=int, default=2, help="of each run; 0: none is made")
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
