"""What quantization-aware training costs: a QAT step against the bf16 step of the same code, in time and in memory.

    python benchmarks/step.py [--device cuda] [--layer-only | --model-only] [--rounds 40] [--processes 8] [--fp8-gemm]

A step is forward and backward. The optimizer is left out: it does the same for both, apart from the few scales, and
would only bring their ratio closer to 1. Each way has weights of its own, equal at the start, and quantizes them in
every step; the layer gets the gradient of its input as well, as in the middle of a model. Gradients are dropped after
each step, outside of the time.

- bf16: nn.Linear
- our schemes, by simulation and by the fp8 GEMM, which the CPU has no fast kernel for: there only with --fp8-gemm
- 4-bit inputs in groups with scales of their own, also with their codes kept for backward
- the same fp8 fake quantization as plain PyTorch writes it, and torchao's QAT where torchao is installed

``step_ways.py`` has them. On a CPU the ratios of one process are its own: which physical pages its weights got, and how
often its allocator asks the system for pages again, stay as they are for all of its rounds (two processes of the same
code said 1.01 and 1.11). So the rounds are shared out over several processes, one after the other, and medians are over
all; and before each step that is timed there is one of the same way that is not, as there is in training.

"kept" is what autograd keeps for backward: every storage once, parameters excluded. "peak" is the most that torch's
allocator gave out during a step beyond what was there before it. Writes ``benchmarks/results/step.md``, on CUDA
``step_cuda.md``.
"""

import copy
import itertools
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM, initialization
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from benchmarks import timing
from benchmarks.step_ways import FOUR_BITS, GEMM, KEPT, make_ways
from quant import SCHEMES, prepare_kernels
from quant.fused import LAYERS

MIB = 2**20
MOST_KEPT = 0.9  # of bf16's bytes, by ways that keep codes of dynamic inputs
# Of bf16's step, at most: by device, computation and activation checkpointing. The CPU has no fast GEMM of codes.
BARS = {
    ("cpu", "simulate", False): 1.08,
    ("cpu", "simulate", True): 1.10,
    ("cpu", "4-bit inputs", False): 1.25,
    ("cpu", "4-bit inputs", True): 1.25,
    ("cuda", "simulate", False): 1.05,
    ("cuda", "simulate", True): 1.05,
    ("cuda", "fp8_gemm", False): 0.95,
    ("cuda", "fp8_gemm", True): 0.88,
}


@dataclass(frozen=True)
class Size:
    """Shapes of one part; Qwen3's names for them."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    samples: int
    tokens: int
    layers: int = 4
    vocabulary: int = 4096

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, intermediate {self.intermediate}, {self.heads} heads, {self.kv_heads} KV heads of "
            f"{self.head_dim}, {self.samples} x {self.tokens} tokens"
        )

    def config(self) -> Qwen3Config:
        """Qwen3 of these shapes."""
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.tokens,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )


SIZES = {
    "cpu": Size(512, 1536, 8, 2, 64, samples=4, tokens=256),
    "cuda": Size(4096, 12288, 32, 8, 128, samples=4, tokens=2048),
    "quick": Size(64, 96, 4, 2, 16, samples=2, tokens=16, layers=2, vocabulary=128),
}


class Layer(nn.Module):
    """One decoder layer, with what a model would hand it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        config = size.config()
        self.layer = Qwen3DecoderLayer(config, 0)
        self.rotary = Qwen3RotaryEmbedding(config)
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        run = partial(self.layer, position_embeddings=self.rotary(x, positions))
        return checkpoint(run, x, use_reentrant=False) if self.checkpointing else run(x)


@dataclass
class Part:
    """What is trained for a step: a layer or a model, and its batch.

    Attributes:
        title: for the result.
        module: with plain Linears.
        batch: arguments of the forward.
        gradient: of the output; None where the output is a loss.
    """

    title: str
    module: nn.Module
    batch: dict[str, Tensor]
    gradient: Tensor | None

    def forward(self, module: nn.Module) -> Tensor:
        """The layer's output, or the model's loss."""
        output = module(**self.batch)
        return output if isinstance(output, Tensor) else output.loss

    def with_checkpointing(self) -> nn.Module:
        """A copy that recomputes its layers in backward."""
        module = copy.deepcopy(self.module)
        if isinstance(module, Layer):
            module.checkpointing = True
        else:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return module


def make_part(name: str, size: Size, device: torch.device) -> Part:
    """The ``layer`` or the ``model``, with weights of the size that a trained model has."""
    shape = (size.samples, size.tokens)
    with initialization.no_init_weights():
        module: nn.Module = Layer(size) if name == "layer" else Qwen3ForCausalLM(size.config())
    module.to(device, torch.bfloat16).train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1) if parameter.dim() == 1 else parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
    if name == "layer":
        x = torch.randn(*shape, size.hidden, device=device, dtype=torch.bfloat16)
        return Part("One decoder layer", module, {"x": x.requires_grad_()}, torch.randn_like(x))
    ids = torch.randint(size.vocabulary, shape, device=device)
    title = f"A model of {size.layers} layers, vocabulary of {size.vocabulary}, lm_head in bf16, with its loss"
    return Part(title, module, {"input_ids": ids, "labels": ids}, None)


# ---- measuring


@dataclass(frozen=True)
class Measured:
    """Of one way: its times, bytes kept for backward, and peak bytes of a step."""

    time: timing.Timing
    kept: int
    peak: int


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    name: str
    size: Size
    checkpointing: bool
    fp8_gemm: bool
    rounds: int
    device: torch.device
    threads: int


def measure(job: Job) -> tuple[str, dict[str, Measured]]:
    """The part's title, and all ways of its step in turn."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    prepare_kernels()
    device, checkpointing = job.device, job.checkpointing
    part = make_part(job.name, job.size, device)
    modules = {}
    norms = any(type(one).__name__ in LAYERS for one in part.module.modules())
    for name, convert in make_ways(job.fp8_gemm, norms).items():
        module = part.with_checkpointing() if checkpointing else copy.deepcopy(part.module)
        if convert is not None:
            convert(module, partial(part.forward, module))
        modules[name] = module

    def step(module: nn.Module) -> None:
        part.forward(module).backward(part.gradient)

    def forget(module: nn.Module) -> None:
        for tensor in (*module.parameters(), *part.batch.values()):
            tensor.grad = None

    def timed(module: nn.Module) -> float:
        if device.type == "cpu":  # the last step was another way's, of which caches and page tables are full
            step(module)
            forget(module)
        seconds = timing.seconds_of(partial(step, module), device)
        forget(module)
        return seconds

    times = timing.interleave({name: partial(timed, m) for name, m in modules.items()}, job.rounds, warmup=2)
    measured = {}
    for name, module in modules.items():
        kept = kept_bytes(partial(part.forward, module), module)
        measured[name] = Measured(times[name], kept, peak_bytes(partial(step, module), device))
        forget(module)
    return part.title, measured


def measure_in(processes: int, job: Job) -> tuple[str, dict[str, Measured]]:
    """:func:`measure` with its rounds shared out over ``processes``, one after the other; 1 is this one."""
    if processes == 1:
        return measure(job)
    shares = [replace(job, rounds=len(range(index, job.rounds, processes))) for index in range(processes)]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        (title, first), *others = pool.map(measure, shares)
    measured = {}
    for name, one in first.items():
        times = [one.time, *(other[name].time for _, other in others)]
        measured[name] = replace(one, time=timing.Timing([second for time in times for second in time.seconds]))
    return title, measured


def kept_bytes(forward: Callable[[], Tensor], module: nn.Module) -> int:
    """Bytes that autograd keeps between forward and backward."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}
    alive = []  # a storage that is freed could give its address to the next

    def note(tensor: Tensor) -> Tensor:
        if is_traceable_wrapper_subclass(tensor):  # torchao's: it has no storage of its own
            for name in tensor.__tensor_flatten__()[0]:
                note(getattr(tensor, name))
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(storages.values())


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """How far what torch's allocator has given out grows during ``step``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The CPU's allocator keeps no statistics, but tells the profiler of every block.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# ---- reporting


def table(measured: dict[str, Measured], checkpointing: bool) -> list[str]:
    """One row per way, bf16 first."""
    base = measured["bf16"]
    rows = [
        "| way | ms | least | of bf16 | quartiles | by the least | kept, MiB | of bf16's | peak, MiB | of its peak |",
        f"|{' --- |' * 10}",
    ]
    for name, result in measured.items():
        time = result.time
        first, third = time.spread(base.time)
        cells = [name, f"{time.median * 1e3:.1f}", f"{time.least * 1e3:.1f}"]
        cells += [f"{time.ratio(base.time):.3f}", f"{first:.3f} to {third:.3f}", f"{time.least / base.time.least:.3f}"]
        cells += ["", ""] if checkpointing else [f"{result.kept / MIB:.1f}", f"{result.kept / base.kept:.3f}"]
        cells += [f"{result.peak / MIB:.1f}", f"{result.peak / base.peak:.3f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def how(name: str) -> str:
    """Which of the bars is for a way of ours."""
    if name.endswith(GEMM):
        return "fp8_gemm"
    return "4-bit inputs" if name.startswith(FOUR_BITS) else "simulate"


def misses(measured: dict[str, Measured], device: torch.device, checkpointing: bool) -> list[str]:
    """Our ways that are slower than the bar, or keep more than bf16, or on CUDA take more memory."""
    base, found = measured["bf16"], []
    for name, result in measured.items():
        if not name.startswith(tuple(SCHEMES)):
            continue
        bar = BARS.get((device.type, how(name), checkpointing))
        ratio = result.time.ratio(base.time)
        if bar is not None and ratio > bar:
            found.append(f"{name}: {ratio:.3f} of bf16's step, bar {bar:.2f}")
        most = MOST_KEPT if name.endswith(KEPT) else 1
        if not checkpointing and result.kept > most * base.kept:
            found.append(f"{name}: keeps {result.kept / base.kept:.3f} of bf16's bytes, bar {most}")
        if device.type == "cuda" and name.endswith(GEMM) and result.peak > base.peak:
            found.append(f"{name}: takes {result.peak / base.peak:.3f} of bf16's peak, bar 1")
    return found


def report(sections: list[str], size: Size, rounds: str, device: torch.device, head: str, remark: str) -> str:
    """The result as Markdown."""
    bars = [
        f"{computed}{', checkpointing' if checkpointing else ''} {bar:.2f}"
        for (kind, computed, checkpointing), bar in BARS.items()
        if kind == device.type
    ]
    lines = [
        f"# A QAT step against the bf16 step, {'CUDA' if device.type == 'cuda' else 'CPU'}",
        "",
        f"Qwen3 in bf16, {size}. {head} Rounds: {rounds}.",
        f"`{timing.command()}`",
        *([f"Note: {remark}."] if remark else []),
        "",
        "Forward and backward, no optimizer. ms and ratio: medians over rounds in which all ways take turns; least:",
        "the round that other jobs disturbed least; quartiles: of the ratios of single rounds. kept: by autograd from",
        "forward to backward, parameters excluded; peak: what torch's allocator gave out during a step beyond what was",
        f"there before it. {timing.clock_text(device)}",
        f"Bars, of bf16's step: {', '.join(bars)}; of the bytes kept: 1, with codes kept {MOST_KEPT}.",
        *sections,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write."""
    parser = timing.arguments_of(__doc__, rounds=40)
    parser.add_argument("--fp8-gemm", action="store_true", help="on the CPU too, where its kernel is slow")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layer-only", action="store_true")
    which.add_argument("--model-only", action="store_true")
    parser.add_argument("--processes", type=int, help="that share the rounds; default 8 on the CPU, 1 on CUDA")
    arguments = parser.parse_args()
    device = timing.chosen_device(arguments.device)
    load = os.getloadavg()
    torch.set_num_threads(arguments.threads)
    remark = prepare_kernels()
    size = SIZES["quick" if arguments.quick else arguments.device]
    rounds = 2 if arguments.quick else arguments.rounds
    processes = arguments.processes or (1 if arguments.quick or device.type == "cuda" else min(8, rounds))
    if not 1 <= processes <= rounds:
        parser.error(f"--processes {processes}: expected 1 to {rounds}, the number of rounds")
    fp8_gemm = arguments.fp8_gemm or device.type == "cuda"
    names = ["layer"] if arguments.layer_only else ["model"] if arguments.model_only else ["layer", "model"]
    sections: list[str] = []
    for name, checkpointing in itertools.product(names, (False, True)):
        job = Job(name, size, checkpointing, fp8_gemm, rounds, device, arguments.threads)
        title, measured = measure_in(processes, job)
        sections += ["", f"## {title}{', activation checkpointing' if checkpointing else ''}", ""]
        sections += [*table(measured, checkpointing), ""]
        missed = misses(measured, device, checkpointing)
        sections += [f"- missed by {miss}" for miss in missed] or ["The bar is met."]
    head = timing.machine(device, load, "transformers", "torchao")
    how_many = f"{rounds}, in {processes} processes" if processes > 1 else f"{rounds}"
    timing.write(arguments.results, "step", device, report(sections, size, how_many, device, head, remark))


if __name__ == "__main__":
    main()
