"""Compares an exported checkpoint with transformers in fp32: does it load there, and compute what training saw?

Two readers of one directory get the same tokens: transformers, which lets compressed-tensors decompress, and our
own forward (``tools.compressed``), whose fake quantization gives the codes on disk bit for bit. Where their arithmetic
differs by definition, the difference is not waved through by a loose tolerance but taken out and put back:

1. *same arithmetic*: our model with each known difference replaced by what transformers does. Both then perform the
   same operations on the same numbers, so logits agree to the rounding of matrix products, and on one machine usually
   bit for bit. Whatever is wrong with a checkpoint (a code, a scale, a key, an ignored layer) shows here.
2. *our forward*: with the differences back in. How large they are is measured and bounded.

``tools/verify/reader.py`` lists the known differences. How much they move the logits:

- Where ``x/s`` lies within a rounding of a boundary between codes, dividing and multiplying give different codes. In
  fp32 that is one element in some millions, but each such step (1/16 of the value) moves the values behind it, and
  further codes flip: through 6 layers the logits differ by 0.2 at most and by 0.002 in the mean, 1% of what quantizing
  them cost. With scales that are powers of two both are exact, and agree.
- Experts' inputs are not quantized in transformers. Both comparisons leave that off here too, and a third line, *full
  forward*, shows our complete one (what vLLM computes) beside it, without a bound.
- Weights that it holds in bf16 are rounded so in the bf16 forward of training too.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.peft import say_left_out
from model.save import fused_there, is_expert, not_loaded
from tools.compressed import load_compressed
from tools.verify.files import check_files
from tools.verify.reader import inputs_of_experts_left, load_theirs, their_arithmetic

# Mean KL divergence under the same arithmetic, nats per token. Measured: 0 for dense models, where the same kernels see
# the same numbers. Of a MoE transformers multiplies gate and up at once and we one after the other: 1e-6 of a logit,
# and where an input lies that close to a boundary its fp8 code flips: 2.5e-8 mostly, up to 3e-5 where that code is a
# large one (3 of 10,000 small exports were beyond 1e-5). A scale or a layer read wrongly gives 1e-3 and more.
SAME_ARITHMETIC_KL = 1e-5
SAME_ARITHMETIC_KL_ROUTED = 1e-4  # of a MoE whose inputs, keys or values are quantized
# The same of our forward. Measured: 1.4e-5 with static fp8 inputs, 0 without them and with weights that bf16 holds,
# 2e-5 for NVFP4. Where a choice of experts hangs on a rounding the token's logits are those of other weights: 4e-3 with
# random routers (1.2e-2 on 66 tokens, where one token shows).
OUR_FORWARD_KL = 1e-3
OUR_FORWARD_KL_ROUTED = 1e-2
# Dynamic inputs come to lie on boundaries: of symmetric int8 the largest value of each token stands at 127.5 codes, and
# the two readers round every tenth negative one to another code. Measured: up to 0.73 of what it costs to quantize
# these inputs at all, which bounds the difference where it is larger than the figures above. On the grid of NVFP4
# inputs flipped codes make further ones flip, the sooner as transformers has its weights rounded to bf16: 0.4 to 0.65
# through two layers of a random model. Two roundings that have nothing in common any more differ by twice what one of
# them costs, which is as far as it can go in a model of many layers.
FOUR_BIT_INPUTS = 2.5


@dataclass
class Comparison:
    """The differences between two models' logits, accumulated over windows. The KL's reference is the other model."""

    name: str
    max_abs: float = 0.0
    abs_sum: float = 0.0
    kl_sum: float = 0.0
    agree: int = 0
    tokens: int = 0
    logits: int = 0
    square_sum: float = 0.0
    nll: dict[str, float] = field(default_factory=lambda: {"ours": 0.0, "theirs": 0.0})
    predicted: int = 0

    def add(self, ours: Tensor, theirs: Tensor, ids: Tensor) -> None:
        """Add a window: the logits [B, T, V] of both models for ``ids`` [B, T]."""
        difference = (ours - theirs).abs()
        self.max_abs = max(self.max_abs, difference.max().item()) if difference.isfinite().all() else math.inf
        self.abs_sum += difference.sum(dtype=torch.float64).item()
        self.square_sum += (theirs - theirs.mean()).square().sum(dtype=torch.float64).item()
        self.logits += theirs.numel()
        log_p, log_q = theirs.log_softmax(-1), ours.log_softmax(-1)
        self.kl_sum += (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64).item()
        self.agree += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.tokens += ids.numel()
        for side, logits in (("ours", ours), ("theirs", theirs)):
            self.nll[side] += F.cross_entropy(
                logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            ).item()
        self.predicted += ids[:, 1:].numel()

    @property
    def mean_abs(self) -> float:
        """Mean absolute difference of the logits."""
        return self.abs_sum / self.logits

    @property
    def relative_max(self) -> float:
        """Largest absolute difference, in standard deviations of the logits."""
        return self.max_abs / math.sqrt(self.square_sum / self.logits)

    @property
    def kl(self) -> float:
        """Mean KL(theirs || ours), nats per token."""
        return self.kl_sum / self.tokens

    @property
    def top1(self) -> float:
        """Share of positions where both predict the same token."""
        return self.agree / self.tokens

    def perplexity(self, side: str) -> float:
        """Perplexity per token; ``side``: ``"ours"`` or ``"theirs"``."""
        return math.exp(self.nll[side] / self.predicted)

    def row(self) -> str:
        """The line of :meth:`Report.table` for this comparison."""
        return (
            f"{self.name:<17} {self.max_abs:>10.3g} {self.mean_abs:>10.3g} {self.kl:>10.3g} {100 * self.top1:>8.3f}% "
            f"{self.perplexity('ours'):>10.4f} {self.perplexity('theirs'):>12.4f}"
        )


@dataclass(frozen=True)
class Report:
    """What :func:`compare_with_transformers` found.

    Attributes:
        scheme: names of the schemes in the checkpoint's config.
        layers: number of quantized Linears.
        same_arithmetic: our model with the known differences taken out.
        our_forward: our model with the known differences.
        inputs_as_given: our forward without quantized inputs, keys and values, which shows what quantizing them costs;
            None where they are not quantized.
        full_forward: for a MoE with quantized inputs, our forward with its experts' inputs quantized too, as they are
            when it is served. It has no bound.
        problems: everything that is wrong; empty if the checkpoint is good.
        note: the reason why the other model is not the one that transformers loads; None where it is.
    """

    scheme: str
    layers: int
    same_arithmetic: Comparison
    our_forward: Comparison
    inputs_as_given: Comparison | None
    full_forward: Comparison | None
    problems: list[str]
    note: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def table(self) -> str:
        """The comparison as a table for people, with the problems below it."""
        others = [row for row in (self.inputs_as_given, self.full_forward) if row is not None]
        rows = [self.same_arithmetic, self.our_forward, *others]
        head = f"{'against':<17} {'max |diff|':>10} {'mean':>10} {'KL':>10} {'top-1':>9} {'ppl, ours':>10} "
        head += f"{'transformers':>12}"
        title = f"{self.scheme}: {self.layers} quantized layers, {rows[0].tokens} tokens, logits in fp32"
        lines = [title, head, *(row.row() for row in rows), *([f"note: {self.note}"] if self.note else [])]
        lines += [f"PROBLEM: {problem}" for problem in self.problems]
        return "\n".join([*lines, "ok" if self.ok else "NOT ok"])


def windows(token_ids: list[int], length: int) -> list[Tensor]:
    """Cut ids into pieces [1, T], T at most ``length``; a last piece of one token predicts nothing and is left out."""
    return [piece.unsqueeze(0) for piece in torch.tensor(token_ids).split(length) if len(piece) > 1]


@torch.no_grad()
def compare_with_transformers(
    export_dir: str | Path, batches: Iterable[Tensor], *, trust_remote_code: bool = False
) -> Report:
    """Load ``export_dir`` twice, as transformers does and as we do, and compare, in one process on CPU.

    Args:
        export_dir: what ``model.save.export_model`` wrote.
        batches: input_ids [B, T], T at least 2; each is one forward.
        trust_remote_code: whether Python code in the directory may be run.

    Raises:
        RankError: the directory is no compressed checkpoint or its keys or shapes are wrong (see ``load_compressed``).
    """
    directory = Path(export_dir)
    say_left_out(directory)
    model, quantization = load_compressed(directory, trust_remote_code=trust_remote_code)
    problems = check_files(directory, model, quantization)
    theirs, loading = load_theirs(directory, model, quantization, trust_remote_code=trust_remote_code)
    problems += loading

    quantization.set_fake_quant(weights=True, activations=True)
    same, ours, given, full = Comparison("same arithmetic"), Comparison("our forward"), None, None
    is_fused = fused_there(model)
    quantized_inputs = {is_fused(name) for name, layer in quantization.layers.items() if layer.input_fake_quant}
    if False in quantized_inputs or quantization.caches:
        given = Comparison("inputs as given")
    if True in quantized_inputs:
        full = Comparison("full forward")
    for ids in batches:
        expected = theirs(input_ids=ids, use_cache=False).logits
        with their_arithmetic(directory, model, quantization):
            same.add(model(input_ids=ids, use_cache=False).logits, expected, ids)
        with inputs_of_experts_left(model, quantization):
            ours.add(model(input_ids=ids, use_cache=False).logits, expected, ids)
        if full is not None:
            full.add(model(input_ids=ids, use_cache=False).logits, expected, ids)
        if given is not None:
            quantization.set_fake_quant(weights=True, activations=False)
            given.add(model(input_ids=ids, use_cache=False).logits, expected, ids)
            quantization.set_fake_quant(weights=True, activations=True)

    routed = any(is_expert(name) for name in quantization.layers)
    inputs = [layer.scheme.activations for layer in quantization.layers.values() if layer.scheme.activations]
    share = FOUR_BIT_INPUTS if any(spec.bits == 4 for spec in inputs) else 1.0
    our_bound = max(OUR_FORWARD_KL_ROUTED if routed else OUR_FORWARD_KL, 0.0 if given is None else share * given.kl)
    rounded = bool(inputs or quantization.caches)
    same_bound = SAME_ARITHMETIC_KL_ROUTED if routed and rounded else SAME_ARITHMETIC_KL
    for comparison, bound in ((same, same_bound), (ours, our_bound)):
        if not comparison.kl <= bound:  # a NaN is not
            problems.append(
                f"{comparison.name}: KL from transformers is {comparison.kl:.3g} nats per token, at most {bound:.2g} "
                f"expected; the largest logit difference is {comparison.max_abs:.3g}"
            )
    note = not_loaded(model, quantization)
    if note is not None:
        note += ": compared with its plain model, filled with what compressed-tensors decompresses"
    schemes = dict.fromkeys(layer.scheme.name for layer in quantization.layers.values())
    if quantization.caches:
        schemes["fp8 KV cache"] = None
    return Report(", ".join(schemes), len(quantization.layers), same, ours, given, full, problems, note)
