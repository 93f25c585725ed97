"""What training adapters costs: weights with merged adapters in int4 and fp8, beside full QAT, beside plain LoRA as
it is written out everywhere, and beside an adapter next to a fake-quantized base.

    python benchmarks/adapters.py [--device cuda] [--rounds 20] [--dtype float32]

A step is forward, backward and torch's AdamW on what trains. The model and its sizes are those of benchmarks/step.py;
each way has weights of its own, equal at the start. Without activation checkpointing.

- plain, LoRA beside: ``F.linear(x, W) + s * F.linear(F.linear(x, A), B)``, W frozen; it is served merged, unquantized
- beside: the same with a fake-quantized W, as torchao's recipe has it; merging leaves the grid
- merged: ``F.linear(x, Q(W + s B A))``, ours

"trained" is parameters; "held" is bytes by arithmetic, 18 per parameter that trains (bf16 weight, fp32 master, two
moments and gradient) and 2 per frozen one, as a run in bf16 has them. "peak" is the most that torch's allocator gave
out during forward and backward beyond what was there before: activations, and the gradients of what trains. Writes
``benchmarks/results/adapters.md``; a person's remarks stand beside it, in ``adapters_remarks.md``.
"""

import copy
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import timing
from benchmarks.step import MIB, SIZES, Part, make_part, peak_bytes
from benchmarks.step_ways import ours
from quant import QuantLinear, prepare_kernels
from quant.lora import Adapter

RANK, SCALING = 16, 2.0
PLAIN = "plain, LoRA beside"
BAR = 1.15  # of plain LoRA's step


class PlainLoRA(nn.Module):
    """A frozen Linear, quantized or not, with an adapter beside it."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        size = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.lora_a = nn.Parameter(torch.randn(RANK, int(linear.in_features), **size) / 32)
        self.lora_b = nn.Parameter(torch.zeros(int(linear.out_features), RANK, **size))

    def forward(self, x: Tensor) -> Tensor:
        """As ``peft`` computes it, without dropout."""
        return self.linear(x) + SCALING * F.linear(F.linear(x, self.lora_a), self.lora_b)


def frozen(module: nn.Module) -> None:
    """Nothing trains but scales."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("theta" in name)


def beside(module: nn.Module, kind: type[nn.Module]) -> None:
    """An adapter beside every layer of a kind but lm_head."""
    frozen(module)
    for name, linear in list(module.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if type(linear) is kind and leaf != "lm_head":
            setattr(module.get_submodule(parent), leaf, PlainLoRA(linear))


def merged(scheme: str, learn: bool, module: nn.Module, forward: Callable[[], Tensor]) -> None:
    """An adapter in the weight of every layer."""
    ours(scheme, module, forward, weight=learn, inputs=False)
    frozen(module)
    for layer in module.modules():
        if isinstance(layer, QuantLinear):
            size = {"dtype": layer.weight.dtype, "device": layer.weight.device}
            lora_a = torch.randn(RANK, layer.in_features, **size) / 32
            lora_b = torch.zeros(layer.out_features, RANK, **size)
            layer.attach_adapter(Adapter(nn.Parameter(lora_a), nn.Parameter(lora_b), SCALING))


def base_and_adapter(module: nn.Module, forward: Callable[[], Tensor]) -> None:
    """A fake-quantized base with an adapter beside it."""
    ours("w4a16_g32", module, forward, weight=False, inputs=False)
    beside(module, QuantLinear)


WAYS: dict[str, Callable[[nn.Module, Callable[[], Tensor]], None] | None] = {
    PLAIN: lambda module, _: beside(module, nn.Linear),
    "plain, all weights": None,
    "w4a16_g32, all weights and scales": partial(ours, "w4a16_g32", weight=True, inputs=False),
    "w4a16_g32, LoRA beside": base_and_adapter,
    "w4a16_g32, merged, scales fixed": partial(merged, "w4a16_g32", False),
    "w4a16_g32, merged, scales learned": partial(merged, "w4a16_g32", True),
    "fp8_static, merged, scales fixed": partial(merged, "fp8_static", False),
}


class Measured(NamedTuple):
    """Of one way: times of forward and backward, and of the whole step; parameters that train, and that do not; bytes
    of the peak."""

    passes: timing.Timing
    step: timing.Timing
    trained: int
    fixed: int
    peak: int


def measure(part: Part, rounds: int, device: torch.device) -> dict[str, Measured]:
    """All ways in turn."""
    modules, optimizers = {}, {}
    for name, convert in WAYS.items():
        modules[name] = copy.deepcopy(part.module)
        if convert is not None:
            convert(modules[name], partial(part.forward, modules[name]))
        trained = [parameter for parameter in modules[name].parameters() if parameter.requires_grad]
        optimizers[name] = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}

    def passes(name: str) -> None:
        part.forward(modules[name]).backward(part.gradient)

    def step(name: str) -> float:
        taken = timing.seconds_of(partial(passes, name), device)
        seconds[name].append(taken)
        taken += timing.seconds_of(optimizers[name].step, device)
        optimizers[name].zero_grad()
        return taken

    warmup = 3
    times = timing.interleave({name: partial(step, name) for name in WAYS}, rounds, warmup=warmup)
    found = {}
    for name, module in modules.items():
        numbers = [sum(p.numel() for p in module.parameters() if p.requires_grad is on) for on in (True, False)]
        peak = peak_bytes(partial(passes, name), device)
        found[name] = Measured(timing.Timing(seconds[name][warmup:]), times[name], *numbers, peak)
        optimizers[name].zero_grad()
    return found


def table(measured: dict[str, Measured]) -> list[str]:
    """One row per way, plain LoRA first."""
    base = measured[PLAIN]
    rows = [
        "| way | passes, ms | of LoRA's | quartiles | step, ms | of LoRA's | trained | held, MB | peak, MiB |",
        f"|{' --- |' * 9}",
    ]
    for name, one in measured.items():
        first, third = one.passes.spread(base.passes)
        cells = [name, f"{one.passes.median * 1e3:.1f}", f"{one.passes.ratio(base.passes):.3f}"]
        cells += [f"{first:.3f} to {third:.3f}", f"{one.step.median * 1e3:.1f}", f"{one.step.ratio(base.step):.3f}"]
        cells += [f"{one.trained:,}", f"{(18 * one.trained + 2 * one.fixed) / 1e6:,.1f}", f"{one.peak / MIB:.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = timing.arguments_of(__doc__, rounds=20)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32: no bf16 GEMM here"
    )
    arguments = parser.parse_args()
    device = timing.chosen_device(arguments.device)
    load = os.getloadavg()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    remark = prepare_kernels()
    size = SIZES["quick" if arguments.quick else arguments.device]
    rounds = 2 if arguments.quick else arguments.rounds
    part = make_part("model", size, device)
    part.module.to(getattr(torch, arguments.dtype))
    measured = measure(part, rounds, device)
    base = measured[PLAIN].step
    missed = [
        f"- the bar is missed: {name} takes {one.step.ratio(base):.2f} of {PLAIN}'s step, bar {BAR}"
        for name, one in measured.items()
        if "merged" in name and one.step.ratio(base) > BAR
    ]
    lines = [
        f"# Training adapters, {'CUDA' if device.type == 'cuda' else 'CPU'}",
        "",
        f"Qwen3 in {arguments.dtype}, {size}. {part.title}. Rank {RANK}.",
        timing.machine(device, load, "transformers"),
        f"Rounds: {rounds}. `{timing.command()}`",
        *([f"Note: {remark}."] if remark else []),
        "",
        "Medians over rounds in which all ways take turns; quartiles: of the ratios of single rounds. passes: forward",
        "and backward; step: with AdamW on what trains. held: by arithmetic, 18 bytes per parameter that trains and 2",
        f"per other one. peak: of both passes, beyond what was there before. {timing.clock_text(device)}",
        "Remarks on the run are in `adapters_remarks.md`.",
        "",
        *table(measured),
        "",
        *(missed or [f"The bar of {BAR} for merged adapters is met."]),
    ]
    timing.write(arguments.results, "adapters", device, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
