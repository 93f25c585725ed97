"""Compare an exported checkpoint with transformers in fp32: does transformers load it, and compute the same as
training?

Two readers of one directory get the same tokens: transformers, in which compressed-tensors decompresses weights, and
this project's forward (``tools.compressed``, "our forward"), whose fake quantization computes exactly the codes on
disk. Where their arithmetic differs by definition, the difference is not covered by a loose tolerance. Instead there
are two comparisons, without and with the difference:

1. *same arithmetic*: our forward, with transformers' arithmetic in place of each known difference. Both readers then
   perform the same operations on the same numbers, so logits agree to the rounding of matrix products, and on one
   machine usually bit for bit. Any error of a checkpoint (a code, a scale, a key, an ignored layer) shows here.
2. *our forward*: our forward unchanged. The size of the differences is measured and bounded.

``tools/verify/reader.py`` lists the known differences. How much they move the logits:

- Where ``x/s`` is within a rounding of a boundary between codes, dividing and multiplying result in different codes. In
  fp32 this is one element in some millions, but each such step (1/16 of the value) changes later values, so that more
  codes differ. Through 6 layers the logits differ by 0.2 at most and by 0.002 in the mean. This is 1% of the cost of
  quantizing the inputs, which *inputs as given* shows: our forward without quantized inputs, keys and values. With
  scales that are powers of two, both operations are exact and agree.
- Experts' inputs are not quantized in transformers. Both comparisons leave them unquantized in our forward too. *full
  forward* also shows our complete forward (the same as vLLM computes), without a bound.
- transformers keeps some weights in bf16. The bf16 forward of training rounds them in the same way.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from pathlib import Path

import torch
from torch import Tensor

from model.console import progress_bar, working
from model.peft import say_left_out
from model.save import fused_there, is_expert, not_loaded
from tools.compressed import load_compressed
from tools.verify.comparison import LogitComparison, Report, logits_of
from tools.verify.export_files import problems_of_files
from tools.verify.reader import inputs_left, inputs_of_experts_left, load_theirs, their_arithmetic

# Mean KL divergence under the same arithmetic, nats per token. Measured: 0 for dense models, where the same kernels get
# the same numbers. In a MoE transformers multiplies gate and up at once, our forward one after the other. This changes
# logits by 1e-6, and an input that is this close to a boundary gets another fp8 code: the divergence is mostly 2.5e-8,
# and up to 3e-5 if the code is large (3 of 10,000 small exports exceeded 1e-5). A wrong scale or layer causes 1e-3 and
# more.
SAME_ARITHMETIC_KL = 1e-5
SAME_ARITHMETIC_KL_ROUTED = 1e-4  # of a MoE whose inputs, keys or values are quantized
# Mean KL divergence of our forward. Measured: 1.4e-5 with static fp8 inputs, 0 without quantized inputs and with
# weights that bf16 represents, 2e-5 for NVFP4. If the choice of experts depends on a rounding, the token's logits come
# from other weights: 4e-3 with random routers (1.2e-2 on 66 tokens, where a single token counts much).
OUR_FORWARD_KL = 1e-3
OUR_FORWARD_KL_ROUTED = 1e-2
# With dynamic scales, inputs are often on boundaries: in symmetric int8 the largest value of each token is at 127.5
# codes, and the two readers round a tenth of the negative ones to different codes. Measured: up to 0.73 of the cost of
# quantizing these inputs, which is the bound if it is larger than the bounds above. With NVFP4 inputs different codes
# cause further different codes, even more so as transformers rounds the weights to bf16: 0.4 to 0.65 through two layers
# of a random model. In a model of many layers the limit is two unrelated roundings, which differ by twice the cost of
# one.
FOUR_BIT_INPUTS = 2.5
# Reasons and meanings in the report.
SUMS = "products are added up in another order, and some logits are almost equal"
FLIPS = (
    "transformers divides by a scale and training multiplies by its reciprocal, so that a value on the border of two "
    "codes gets one code here and the other there"
)
MEANINGS = {
    "inputs as given": "our forward without quantized inputs, keys and values, to show how much these change; no bound",
    "full forward": "with quantized inputs of experts, which transformers does not quantize; no bound",
}


@torch.no_grad()
def compare_with_transformers(directory: Path, batches: Sequence[Tensor], *, trust_remote_code: bool = False) -> Report:
    """Load an export with transformers and with this project, and compare both, in one process on CPU.

    Args:
        directory: directory written by ``model.save.export_model``.
        batches: input_ids [B, T], T at least 2; each is one forward.
        trust_remote_code: allow running Python code in the directory.

    Raises:
        RankError: the directory is no compressed checkpoint or its keys or shapes are wrong (see ``load_compressed``).
    """
    say_left_out(directory)
    model, quantization = load_compressed(directory, trust_remote_code=trust_remote_code)
    layers, is_fused = quantization.layers, fused_there(model)
    problems = problems_of_files(directory, model, quantization)
    with working("loading in transformers"), redirect_stderr(io.StringIO()):  # bars of compressed-tensors
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
    for ids in progress_bar(desc="verify", unit="window", over=batches):
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
    same = SAME_ARITHMETIC_KL_ROUTED if routed and rounded else SAME_ARITHMETIC_KL
    report.require_kl("same arithmetic", same)
    report.require_kl("our forward", ours)
    report.explain("same arithmetic", same, SUMS)
    report.explain("our forward", ours, FLIPS if rounded else SUMS)
    report.remarks += [f"{name}: {MEANINGS[name]}" for name in ways if name in MEANINGS]
    return report
