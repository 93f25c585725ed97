"""Compare an exported checkpoint with transformers in fp32: does it load there, and compute what training saw?

Two readers of one directory get the same tokens: transformers, which lets compressed-tensors decompress, and our
own forward (``tools.compressed``), whose fake quantization gives the codes on disk bit for bit. Where their arithmetic
differs by definition, the difference is not waved through by a loose tolerance but taken out and put back:

1. *same arithmetic*: our model with each known difference replaced by what transformers does. Both then perform the
   same operations on the same numbers, so logits agree to the rounding of matrix products, and on one machine usually
   bit for bit. Whatever is wrong with a checkpoint (a code, a scale, a key, an ignored layer) shows here.
2. *our forward*: with the differences back in. How large they are is measured and bounded.

``tools/verify/reader.py`` lists the known differences. How much they move the logits:

- Where ``x/s`` is within a rounding of a boundary between codes, dividing and multiplying give different codes. In
  fp32 that is one element in some millions, but each such step (1/16 of the value) moves the values behind it, and
  further codes flip: through 6 layers the logits differ by 0.2 at most and by 0.002 in the mean, 1% of what quantizing
  them cost, which *inputs as given* shows: our forward without quantized inputs, keys and values. With scales that are
  powers of two both are exact, and agree.
- Experts' inputs are not quantized in transformers. Both comparisons leave that off here too, and *full forward* shows
  our complete one (what vLLM computes) beside it, without a bound.
- Weights that it holds in bf16 are rounded so in the bf16 forward of training too.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from model.peft import say_left_out
from model.save import fused_there, is_expert, not_loaded
from tools.compressed import load_compressed
from tools.verify.comparison import LogitComparison, Report, logits_of
from tools.verify.export_files import problems_of_files
from tools.verify.reader import inputs_left, inputs_of_experts_left, load_theirs, their_arithmetic

# Mean KL divergence under the same arithmetic, nats per token. Measured: 0 for dense models, where the same kernels see
# the same numbers. Of a MoE transformers multiplies gate and up at once and we one after the other: 1e-6 of a logit,
# and where an input is that close to a boundary its fp8 code flips: 2.5e-8 mostly, up to 3e-5 where that code is a
# large one (3 of 10,000 small exports were beyond 1e-5). A scale or a layer read wrongly gives 1e-3 and more.
SAME_ARITHMETIC_KL = 1e-5
SAME_ARITHMETIC_KL_ROUTED = 1e-4  # of a MoE whose inputs, keys or values are quantized
# The same of our forward. Measured: 1.4e-5 with static fp8 inputs, 0 without them and with weights that bf16 holds,
# 2e-5 for NVFP4. Where a choice of experts hangs on a rounding the token's logits are those of other weights: 4e-3 with
# random routers (1.2e-2 on 66 tokens, where one token shows).
OUR_FORWARD_KL = 1e-3
OUR_FORWARD_KL_ROUTED = 1e-2
# Dynamic inputs come to lie on boundaries: of symmetric int8 the largest value of each token is at 127.5 codes, and
# the two readers round every tenth negative one to another code. Measured: up to 0.73 of what it costs to quantize
# these inputs at all, which bounds the difference where it is larger than the figures above. On the grid of NVFP4
# inputs flipped codes make further ones flip, the sooner as transformers has its weights rounded to bf16: 0.4 to 0.65
# through two layers of a random model. Two roundings that have nothing in common any more differ by twice what one of
# them costs, which is as far as it can go in a model of many layers.
FOUR_BIT_INPUTS = 2.5


@torch.no_grad()
def compare_with_transformers(directory: Path, batches: Iterable[Tensor], *, trust_remote_code: bool = False) -> Report:
    """Load an export twice, as transformers does and as we do, and compare, in one process on CPU.

    Args:
        directory: what ``model.save.export_model`` wrote.
        batches: input_ids [B, T], T at least 2; each is one forward.
        trust_remote_code: whether Python code in the directory may be run.

    Raises:
        RankError: the directory is no compressed checkpoint or its keys or shapes are wrong (see ``load_compressed``).
    """
    say_left_out(directory)
    model, quantization = load_compressed(directory, trust_remote_code=trust_remote_code)
    layers, is_fused = quantization.layers, fused_there(model)
    problems = problems_of_files(directory, model, quantization)
    theirs, loading = load_theirs(directory, model, quantization, trust_remote_code=trust_remote_code)
    schemes = [layer.scheme.name for layer in layers.values()] + ["fp8 KV cache"] * bool(quantization.caches)
    report = Report("transformers", ", ".join(dict.fromkeys(schemes)), len(layers), problems=problems + loading)
    if note := not_loaded(model, quantization):
        report.note = f"{note}: compared with its plain model, filled with what compressed-tensors decompresses"

    quantization.set_fake_quant(weights=True, activations=True)
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "same arithmetic": lambda: their_arithmetic(directory, model, quantization),
        "our forward": lambda: inputs_of_experts_left(model, quantization),
    }
    fused = {is_fused(name) for name, layer in layers.items() if layer.input_fake_quant}
    if False in fused or quantization.caches:
        ways["inputs as given"] = lambda: inputs_left(quantization)
    if True in fused:
        ways["full forward"] = nullcontext
    report.logits = {name: LogitComparison() for name in ways}
    for ids in batches:
        expected = logits_of(theirs, ids)
        for name, way in ways.items():
            with way():
                report.logits[name].add(logits_of(model, ids), expected, ids)

    routed = any(is_expert(name) for name in layers)
    inputs = [layer.scheme.activations for layer in layers.values() if layer.scheme.activations]
    rounded = bool(inputs or quantization.caches)
    ours = OUR_FORWARD_KL_ROUTED if routed else OUR_FORWARD_KL
    if given := report.logits.get("inputs as given"):
        ours = max(ours, (FOUR_BIT_INPUTS if any(spec.bits == 4 for spec in inputs) else 1.0) * given.kl)
    report.require_kl("same arithmetic", SAME_ARITHMETIC_KL_ROUTED if routed and rounded else SAME_ARITHMETIC_KL)
    report.require_kl("our forward", ours)
    return report
