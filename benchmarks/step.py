"""The time and memory of a QAT step against the bf16 step of the same code.

    python benchmarks/step.py [--device cuda] [--layer-only | --model-only] [--rounds 40] [--processes 8]

A step is forward and backward; the optimizer, which does the same for both, is left out. Each way (:func:`ways_of`) has
weights of its own, equal at the start. ``--fp8-gemm`` adds the GEMM of codes on the CPU, where its kernel is slow.

On a CPU a process has a ratio of its own for all of its rounds, by the physical pages that its weights got: two of the
same code said 1.01 and 1.11. So the rounds are shared out over several processes, and before each step that is timed
there is one of the same way that is not, as in training. Writes ``benchmarks/results/step.md``.
"""

import copy
import itertools
import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM, initialization
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from benchmarks import timing
from model.scales.in_place import renew_weight_scales
from quant import SCHEMES, QuantLinear, prepare_kernels, replace_layers
from quant.fused import LAYERS, fuse
from quant.scale import first_input_scale
from quant.spec import FP8_MAX

Convert = Callable[[nn.Module, Callable[[], Tensor]], None]
GEMM, FUSED, KEPT = ", fp8_gemm", ", norms fused", ", codes kept"  # end the names of ways
FOUR_BITS = ("mxfp4_w4a4", "nvfp4_w4a4")  # of inputs, in groups

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
    """One decoder layer, with the positions that a model would hand it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layer, self.rotary = Qwen3DecoderLayer(size.config(), 0), Qwen3RotaryEmbedding(size.config())
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        run = partial(self.layer, position_embeddings=self.rotary(x, positions))
        return checkpoint(run, x, use_reentrant=False) if self.checkpointing else run(x)


@dataclass
class Part:
    """A layer or a model with its batch; ``gradient`` is that of the output, None where the output is a loss."""

    module: nn.Module
    batch: dict[str, Tensor]
    gradient: Tensor | None

    def forward(self, module: nn.Module) -> Tensor:
        output = module(**self.batch)
        return output if isinstance(output, Tensor) else output.loss

    def copied(self, checkpointing: bool) -> nn.Module:
        """A copy, which recomputes its layers in backward or does not."""
        module = copy.deepcopy(self.module)
        if isinstance(module, Layer):
            module.checkpointing = checkpointing
        elif checkpointing:
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
        return Part(module, {"x": x.requires_grad_()}, torch.randn_like(x))
    ids = torch.randint(size.vocabulary, shape, device=device)
    return Part(module, {"input_ids": ids, "labels": ids}, None)


@dataclass(frozen=True)
class Measured:
    """Times of one way, bytes kept for backward, and peak bytes of a step."""

    time: timing.Timing
    kept: int
    peak: int


@dataclass(frozen=True)
class Job:
    """Work of one process."""

    name: str
    size: Size
    checkpointing: bool
    fp8_gemm: bool
    rounds: int
    device: torch.device
    threads: int


def measure(job: Job) -> dict[str, Measured]:
    """All ways of a part's step in turn."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    prepare_kernels()
    part, modules = make_part(job.name, job.size, job.device), {}
    for name, convert in ways_of(part.module, job.fp8_gemm).items():
        modules[name] = part.copied(job.checkpointing)
        if convert is not None:
            convert(modules[name], partial(part.forward, modules[name]))

    def step(module: nn.Module) -> None:
        part.forward(module).backward(part.gradient)

    def forget(module: nn.Module) -> None:
        for tensor in (*module.parameters(), *part.batch.values()):
            tensor.grad = None

    def timed(module: nn.Module) -> float:
        if job.device.type == "cpu":  # the last step was another way's, of which caches and page tables are full
            step(module)
            forget(module)
        seconds = timing.seconds_of(partial(step, module), job.device)
        forget(module)
        return seconds

    times = timing.interleave({name: partial(timed, m) for name, m in modules.items()}, job.rounds, warmup=2)
    measured = {}
    for name, module in modules.items():
        kept = timing.kept_bytes(partial(part.forward, module), module)
        measured[name] = Measured(times[name], kept, timing.peak_bytes(partial(step, module), job.device))
        forget(module)
    return measured


def measure_in(processes: int, job: Job) -> dict[str, Measured]:
    """:func:`measure` with its rounds shared out over processes, one after the other; 1 is this one."""
    if processes == 1:
        return measure(job)
    shares = [replace(job, rounds=len(range(index, job.rounds, processes))) for index in range(processes)]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = list(pool.map(measure, shares))
    seconds = {name: [one for each in found for one in each[name].time.seconds] for name in found[0]}
    return {name: replace(one, time=timing.Timing(seconds[name])) for name, one in found[0].items()}


def section(measured: dict[str, Measured], job: Job) -> str:
    """One row per way, bf16 first, and the bars that are missed."""
    base, rows, missed = next(iter(measured.values())), [], []
    for name, result in measured.items():
        ratio = result.time.ratio(base.time)
        kept = "" if job.checkpointing else f"{result.kept / timing.MIB:.1f} ({result.kept / base.kept:.3f})"
        cells = [name, f"{result.time.median * 1e3:.1f}", f"{result.time.least * 1e3:.1f}", result.time.text(base.time)]
        rows.append([*cells, kept, f"{result.peak / timing.MIB:.1f} ({result.peak / base.peak:.3f})"])
        if not name.startswith(tuple(SCHEMES)):
            continue
        how = "4-bit inputs" if name.startswith(FOUR_BITS) else "fp8_gemm" if name.endswith(GEMM) else "simulate"
        bar = BARS.get((job.device.type, how, job.checkpointing), math.inf)
        most = MOST_KEPT if name.endswith(KEPT) else 1
        if ratio > bar:
            missed.append(f"- missed by {name}: {ratio:.3f} of the step, bar {bar:.2f}")
        if kept and result.kept > most * base.kept:
            missed.append(f"- missed by {name}: keeps {result.kept / base.kept:.3f} of bf16's bytes, bar {most}")
        if job.device.type == "cuda" and how == "fp8_gemm" and result.peak > base.peak:
            missed.append(f"- missed by {name}: takes {result.peak / base.peak:.3f} of bf16's peak, bar 1")
    columns = ("way", "ms", "least", "of bf16 (quartiles)", "kept, MiB", "peak, MiB")
    title = "One decoder layer" if job.name == "layer" else "A model with its loss"
    parts = (f"## {title}{', recomputed' if job.checkpointing else ''}", timing.table(columns, rows))
    return "\n\n".join([*parts, "\n".join(missed) or "The bars are met."])


def ours(
    scheme: str,
    module: nn.Module,
    forward: Callable[[], Tensor],
    *,
    weight: bool = False,
    inputs: bool = False,
    fp8_gemm: bool = False,
    keep_codes: bool = False,
    fused: bool = False,
) -> None:
    """QuantLinears with absmax scales of the weights and of the inputs of one batch."""
    quantization = replace_layers(
        module, SCHEMES[scheme], learn_weight_scale=weight, learn_input_scale=inputs, fp8_gemm=fp8_gemm
    )
    assert not quantization.simulated, quantization.simulated
    for layer in quantization.layers.values():
        if isinstance(layer, QuantLinear):
            layer.dynamic_codes = keep_codes
    if fused:
        fuse(module)
    with torch.no_grad():
        renew_weight_scales(quantization)
        if not quantization.input_groups:
            return
        quantization.set_fake_quant(weights=False, activations=False)
        quantization.observe(True)
        forward()
        quantization.observe(False)
        for group in quantization.input_groups:
            assert group.observer is not None
            group.s0.copy_(first_input_scale(group.observer.absmax.reshape(1), group.spec))
        quantization.set_fake_quant(weights=True, activations=True)


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace every Linear but lm_head."""
    for name, linear in list(module.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if type(linear) is nn.Linear and leaf != "lm_head":
            setattr(module.get_submodule(parent), leaf, make(linear))


class EagerLinear(nn.Linear):
    """fp8 fake quantization by PyTorch's own operators and their autograd, with learned scales."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        # Of the weights and the unit inputs of this benchmark; no time depends on them.
        scales = (linear.weight.detach().abs().amax().float() / FP8_MAX, torch.tensor(5 / FP8_MAX))
        self.weight_scale, self.input_scale = (nn.Parameter(s.to(linear.weight.device)) for s in scales)

    @staticmethod
    def fake_quant(x: Tensor, scale: Tensor) -> Tensor:
        """Clamp, round straight-through, scale back."""
        v = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
        v = v + (v.to(torch.float8_e4m3fn).float() - v).detach()
        return (v * scale).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fake_quant(x, self.input_scale), self.fake_quant(self.weight, self.weight_scale))


def torchao(kind: str, module: nn.Module, forward: Callable[[], Tensor]) -> None:
    """torchao's QAT: int4 weights in groups of 32, without or with int8 inputs per token; or MXFP4 on both sides."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    int4 = IntxFakeQuantizeConfig(torch.int4, PerGroup(32), is_symmetric=True)
    int8 = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if kind == "int8" else None
    weights, inputs = int4, int8
    if kind == "mx":
        from torchao.prototype.qat.mx import MXFakeQuantizeConfig

        weights = inputs = MXFakeQuantizeConfig()  # its GEMM is emulated
    config = QATConfig(activation_config=inputs, weight_config=weights, step="prepare")
    quantize_(module, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and not name.endswith("lm_head"))


def ways_of(module: nn.Module, fp8_gemm: bool) -> dict[str, Convert | None]:
    """Name and conversion of each way; None for bf16, which stays as it is."""
    learned = {
        "weight scale learned": {"weight": True},
        "both learned": {"weight": True, "inputs": True},
        "both fixed": {},
    }
    ways: dict[str, Convert | None] = {"bf16": None}
    for gemm in (False, True) if fp8_gemm else (False,):
        for name, scales in learned.items():
            ways[f"fp8_static, {name}{GEMM * gemm}"] = partial(ours, "fp8_static", **scales, fp8_gemm=gemm)
        if any(type(one).__name__ in LAYERS for one in module.modules()):
            fused = partial(ours, "fp8_static", weight=True, fp8_gemm=gemm, fused=True)
            ways[f"fp8_static, weight scale learned{FUSED}{GEMM * gemm}"] = fused
    ways["w4a16_g32, learned"] = partial(ours, "w4a16_g32", weight=True)
    ways["w4a16_g32, fixed"] = partial(ours, "w4a16_g32")
    for scheme in FOUR_BITS:
        ways[f"{scheme}, fixed"] = partial(ours, scheme)
        ways[f"{scheme}, fixed{KEPT}"] = partial(ours, scheme, keep_codes=True)
    ways["plain PyTorch: fp8 static, both learned"] = lambda module, forward: replace_linears(module, EagerLinear)
    if timing.installed("torchao"):
        ways["torchao: int4 weights in groups of 32"] = partial(torchao, "int4")
        ways["torchao: the same, int8 inputs per token"] = partial(torchao, "int8")
        ways["torchao: MXFP4 on both sides"] = partial(torchao, "mx")
    return ways


def main() -> None:
    """Measure, print, write."""
    parser = timing.options_of(__doc__, rounds=40)
    parser.add_argument("--fp8-gemm", action="store_true", help="on the CPU too, where its kernel is slow")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--layer-only", action="store_true")
    which.add_argument("--model-only", action="store_true")
    parser.add_argument("--processes", type=int, help="that share the rounds; default 8 on the CPU, 1 on CUDA")
    options = parser.parse_args()
    device = timing.device_of(options)
    size = SIZES["quick" if options.quick else options.device]
    rounds = 2 if options.quick else options.rounds
    processes = options.processes or (1 if options.quick or device.type == "cuda" else min(8, rounds))
    if not 1 <= processes <= rounds:
        parser.error(f"--processes {processes}: expected 1 to {rounds}, the number of rounds")
    fp8_gemm = options.fp8_gemm or device.type == "cuda"
    names = ["layer"] if options.layer_only else ["model"] if options.model_only else ["layer", "model"]
    remark = prepare_kernels()
    sections = []
    for name, checkpointing in itertools.product(names, (False, True)):
        job = Job(name, size, checkpointing, fp8_gemm, rounds, device, options.threads)
        sections.append(section(measure_in(processes, job), job))
    timing.write(
        options.results,
        "step",
        device,
        f"# A QAT step against the bf16 step, {device.type.upper()}",
        f"Qwen3 in bf16, {size}. Forward and backward, {rounds} rounds in {processes} processes, ways in turn. kept: "
        "by autograd for backward, parameters excluded; peak: of torch's allocator, beyond what was there before; "
        f"both with their ratio to bf16's.\n{timing.head(device, 'transformers', 'torchao')}",
        f"Note: {remark}." if remark else "",
        *sections,
    )


if __name__ == "__main__":
    main()
