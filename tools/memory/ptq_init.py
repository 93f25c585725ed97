"""Predict the memory of ``quant.init``: bytes in addition to the weights while codes are chosen, before there is an
optimizer.

Decoder layers are processed one after the other (:mod:`model.ptq_init`). For each layer the following exist at a time:

- the hidden states of all samples of the rank, and the position embeddings of each sample;
- under stage 3 the gathered layer, or, while the samples are recorded, the gathered modules outside of the layers;
- a Gram matrix in fp64, ``8 in^2`` bytes, for each tensor that Linears quantized together read, and for each expert of
  a stack;
- weights, codes and scales of the rows whose codes were chosen;
- for one Linear at a time either the temporary memory of ``quant.gptq.choose`` (five more matrices of the Gram matrix's
  size, and the rows in fp32), or the errors of its rows in fp64.

Before codes are chosen, one group of samples runs through the layer, as many samples as a micro-batch has rows. Its
forward is assumed to need the widest tensor of the layer three times and hidden states four times. With stacked experts
it needs inputs and outputs for each expert of a token, with the token's hidden states :data:`COPIES` times. All these
numbers were measured with torch's profiler (tests/unit/tools/memory/test_ptq_init.py).

Tuning a layer (``blockwise``, :mod:`model.ptq_init.blockwise`) follows, and needs:

- the hidden states of the original model, too;
- for the rank's elements of the layer's weights, two copies, an fp32 master, Adam's moments, and in Adam's step two
  more fp32 tensors; for the whole layer, the fp32 sums of gradients, and the gradient of one weight as it is computed;
- the tensors that autograd keeps from a group's forward. They are assumed to be all inputs and outputs of the Linears
  in the model's dtype, times :data:`KEPT_OF_LINEARS`; with stacked experts, inputs and outputs once for each expert of
  a token, with the token's hidden states :data:`KEPT_COPIES` times (also measured).
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
CHOOSING, ERRORS = 6, 26  # bytes per element of a Linear while codes are chosen, and while errors are measured
TUNED = 2 + 2 + 4 + 8  # bytes per own element while a layer is tuned: two copies, master, moments
STEPPING = 2 * FP32  # further bytes per own element in Adam's step
GRADIENTS = FP32 + 2  # bytes per element of the whole layer: the sum, and the gradient of one backward
KEPT_OF_LINEARS = 1.8
# Copies of a token's hidden states for each of its experts and each stack: in a forward, and for its backward.
COPIES, KEPT_COPIES = 1.0, 2.35
KEPT = 3  # bytes per element of a row whose codes were chosen: its bf16 weight and its code


@dataclass(frozen=True)
class _Samples:
    """Samples of one rank: number of tokens, and the largest group that runs through a layer together."""

    tokens: int
    together: int


def bytes_of_ptq_init(student: MetaStudent, settings: Settings, rows: int) -> int:
    """Return the most bytes that a rank needs in addition to its parameters while codes are chosen; 0 for ``rtn``.

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
        experts: number of experts of a token; None if unknown: all are then counted.
    """

    of_feature: int
    hidden: int
    experts: int | None

    def chosen(self, count: int) -> int:
        """Return to how many of ``count`` experts a token goes."""
        return min(self.experts or count, count)

    def of_experts(self, layers: Iterable[QuantLayer], copies: float) -> int:
        """Compute the bytes of inputs and outputs of stacked experts, with ``copies`` of the hidden states for each
        stack."""
        features = [
            self.chosen(one.num_experts) * (one.in_features + one.out_features + copies * self.hidden)
            for one in layers
            if one.projections
        ]
        return round(sum(features) * self.of_feature)

    def of_linears(self, layers: Mapping[str, QuantLayer]) -> int:
        """Compute the bytes of inputs and outputs of layers that are not stacks; experts that are separate modules get
        some of the tokens."""
        alike: dict[str, list[QuantLayer]] = defaultdict(list)
        for name, one in layers.items():
            if not one.projections:
                alike[re.sub(r"\.\d+\.", ".*.", name)].append(one)
        features = [self.chosen(len(ones)) * (ones[0].in_features + ones[0].out_features) for ones in alike.values()]
        return sum(features) * self.of_feature


def _of_step(sets: list[list[QuantLayer]], share: int, running: int) -> int:
    """Compute the bytes of the Gram matrices of some sets of layers, plus the larger of two: a forward, or the rows
    whose codes were chosen with the worst moment of choosing one more Linear. A rank has one of ``share`` parts of a
    Linear."""
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
    """Compute the bytes while the weights of a decoder layer are tuned, of which a rank has one of ``share`` parts."""
    weights = sum(layer.weight.numel() for layer in layers.values())
    largest = max(layer.weight.numel() for layer in layers.values())
    own = weights // share
    kept = round(KEPT_OF_LINEARS * tokens.of_linears(layers)) + tokens.of_experts(layers.values(), KEPT_COPIES)
    return TUNED * own + max(GRADIENTS * weights + FP32 * largest + kept, STEPPING * own + FP32 * weights)


def _experts_per_token(config: PreTrainedConfig) -> int | None:
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def _widest(block: nn.Module) -> int:
    """Return the largest number of features of a tensor inside a decoder layer."""
    return max((max(p.shape[-1], p.shape[-2]) for p in block.parameters() if p.dim() > 1), default=0)


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
