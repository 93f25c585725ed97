"""Memory of ``quant.init``: what choosing codes holds beside the weights, before there is an optimizer.

For each decoder layer in turn (:mod:`model.ptq_init`) these live at a time:

- the hidden states of all samples of the rank, and the position embeddings that each is called with;
- under stage 3 the layer, gathered, or what is outside the layers while the samples are recorded;
- of Linears that are quantized together a Gram matrix in fp64 for each tensor that they read, of stacked experts for
  each expert: ``8 in^2`` bytes;
- of the rows that were chosen their weights, codes and scales;
- for one Linear at a time either what ``quant.gptq.choose`` works in, five more matrices of that size and its rows in
  fp32, or the errors of its rows in fp64.

Before these rows there is the forward of one group of samples, as many as a micro-batch has rows. It is taken to hold
the widest tensor of the layer three times and hidden states four times, or of stacked experts their inputs and outputs
for each expert that a token goes to, with the token's hidden states :data:`COPIES` times. All these were counted by
torch's profiler (tests/unit/tools/memory/test_ptq_init.py).

Tuning a layer (``blockwise``, :mod:`model.ptq_init.blockwise`) comes after that:

- the hidden states of the original, too;
- of the rank's elements of the layer's weights two copies, an fp32 master and Adam's moments, and while it steps two
  more fp32 tensors; of the whole layer its gradients, summed up in fp32, and one weight's as it is computed;
- what autograd keeps of a group's forward, taken to be all inputs and outputs of the Linears in the model's dtype,
  times :data:`KEPT_OF_LINEARS`, or, of stacked experts, once for each expert that a token goes to, with the token's
  hidden states :data:`KEPT_COPIES` times (counted, too).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from engine.config.config import Recipe
from model.ptq_init import decoder_layers, quantized_together
from quant import QuantLayer
from quant.linear import linears_of
from tools.memory.model import MetaStudent
from tools.memory.zero import FP32, FP64, Settings

MATRICES = 5  # of the size of a Gram matrix, in which codes are chosen
ADDING = FP32 + FP64  # bytes per element of a Gram matrix to which some inputs are added
CHOOSING, ERRORS = 6, 26  # bytes per element of a Linear that are chosen at once, whose errors are measured
TUNED = 2 + 2 + 4 + 8  # bytes per own element while a layer is tuned: two copies, master, moments
STEPPING = 2 * FP32  # and in Adam's step
GRADIENTS = FP32 + 2  # per element of the whole layer: the sum, and what comes out of a backward
KEPT_OF_LINEARS = 1.8
# Of a token's hidden states for each of its experts and each stack of these: in a forward, and for its backward.
COPIES, KEPT_COPIES = 1.0, 2.35
KEPT = 3  # bytes per element of a row that was chosen: its bf16 weight and its code


@dataclass(frozen=True)
class _Samples:
    """Samples of one rank: number of tokens, and the largest group that runs through a layer together."""

    tokens: int
    together: int


def bytes_of_ptq_init(student: MetaStudent, settings: Settings, rows: int) -> int:
    """Return the most bytes that a rank holds besides its parameters while codes are chosen; 0 for ``rtn``.

    Args:
        student: the model and its quantized layers, on the meta device.
        settings: the ZeRO settings.
        rows: rows of a micro-batch; ``quant.calibration_batches`` micro-batches are the samples.
    """
    recipe = student.recipe
    if recipe.quant.init == "rtn":
        return 0
    tunes = recipe.quant.init == "blockwise"
    blocks = decoder_layers(student.model, student.quantization)
    samples, config = _samples(recipe, rows), student.model.config.get_text_config()
    size = next(student.model.parameters()).element_size()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden = samples.tokens * ((1 + tunes) * config.hidden_size + 2 * head) * size
    partitioned = settings.stage == 3 and settings.ranks > 1
    inside = {id(parameter) for block in blocks.values() for parameter in block.parameters()}
    outside = sum(_bytes(p) for p in student.model.parameters() if id(p) not in inside) if partitioned else 0
    most = 0
    for name, block in blocks.items():
        gathered = sum(map(_bytes, block.parameters())) if partitioned else 0
        layers = {path: one for path, one in student.quantization.layers.items() if path.startswith(f"{name}.")}
        tokens = _Tokens(samples.together * size, config.hidden_size, _experts_per_token(config))
        running = max(
            tokens.of_feature * (3 * _widest(block) + 4 * config.hidden_size),
            tokens.of_experts(layers.values(), COPIES),
        )
        share = settings.ranks if partitioned else 1
        steps = [
            _of_step([[layers[one] for one in names] for names in sets], share, running)
            for sets in quantized_together(student.model, student.quantization, name)
        ]
        work = max([running + outside, *steps])
        if tunes:
            work = max(work, _of_tuning(layers, share, tokens))
        most = max(most, gathered + work)
    return hidden + most


def _samples(recipe: Recipe, rows: int) -> _Samples:
    together = rows * recipe.data.max_length
    return _Samples(max(1, recipe.quant.calibration_batches) * together, together)


@dataclass(frozen=True)
class _Tokens:
    """A group of samples in a decoder layer.

    Attributes:
        of_feature: bytes of one feature of all its tokens.
        hidden: features of the hidden states.
        experts: how many a token goes to; None if unknown, which counts all.
    """

    of_feature: int
    hidden: int
    experts: int | None

    def chosen(self, count: int) -> int:
        """To how many of ``count`` experts a token goes."""
        return min(self.experts or count, count)

    def of_experts(self, layers: Iterable[QuantLayer], copies: float) -> int:
        """Bytes of inputs and outputs of stacked experts, with ``copies`` of the hidden states for each stack."""
        features = [
            self.chosen(one.num_experts) * (one.in_features + one.out_features + copies * self.hidden)
            for one in layers
            if one.projections
        ]
        return round(sum(features) * self.of_feature)

    def of_linears(self, layers: Mapping[str, QuantLayer]) -> int:
        """Bytes of inputs and outputs of the others; experts that are modules of their own have some of the tokens."""
        alike: dict[str, list[QuantLayer]] = defaultdict(list)
        for name, one in layers.items():
            if not one.projections:
                alike[re.sub(r"\.\d+\.", ".*.", name)].append(one)
        features = [self.chosen(len(ones)) * (ones[0].in_features + ones[0].out_features) for ones in alike.values()]
        return sum(features) * self.of_feature


def _of_step(sets: list[list[QuantLayer]], share: int, running: int) -> int:
    """Gram matrices of some sets of layers, and beside them either a forward or the rows that were chosen, and the
    worst moment of choosing one more Linear, of which a rank has one of ``share`` parts."""
    grams = kept = worst = 0
    for layers in sets:
        experts = layers[0].num_experts if layers[0].projections else 1
        grams += FP64 * experts * layers[0].in_features ** 2
        for layer in layers:
            kept += KEPT * layer.weight.numel() // share
            for part in linears_of("", layer):
                own, gram = part.out_features * part.in_features // share, part.in_features**2
                worst = max(worst, MATRICES * FP64 * gram + CHOOSING * own, FP32 * gram + ERRORS * own)
    adding = ADDING * max(layers[0].in_features ** 2 for layers in sets)
    return grams + max(running + adding, kept + worst)


def _of_tuning(layers: Mapping[str, QuantLayer], share: int, tokens: _Tokens) -> int:
    """While the weights of a decoder layer are tuned, of which a rank has one of ``share`` parts."""
    weights = sum(layer.weight.numel() for layer in layers.values())
    largest = max(layer.weight.numel() for layer in layers.values())
    own = weights // share
    kept = round(KEPT_OF_LINEARS * tokens.of_linears(layers)) + tokens.of_experts(layers.values(), KEPT_COPIES)
    return TUNED * own + max(GRADIENTS * weights + FP32 * largest + kept, STEPPING * own + FP32 * weights)


def _experts_per_token(config: PreTrainedConfig) -> int | None:
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def _widest(block: nn.Module) -> int:
    """The most features of a tensor inside a decoder layer."""
    return max((max(p.shape[-1], p.shape[-2]) for p in block.parameters() if p.dim() > 1), default=0)


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
