"""Predict the memory of ``quant.init``: bytes in addition to the weights while codes are chosen, before there is an
optimizer.

Decoder layers are processed one after the other (:mod:`model.ptq_init`). For each layer the following exist at a time:

- the hidden states of all samples of the rank, and the position embeddings of each sample;
- under stage 3 the gathered layer, or, while the samples are recorded, the gathered modules outside of the layers;
- Gram matrices in fp64, ``8 in^2`` bytes each: one for each input tensor of the Linears that are quantized together,
  and one for each expert of stacked experts;
- weights, codes and scales of the rows whose codes were chosen;
- for one Linear at a time either the temporary memory of ``quant.gptq.choose`` (five more matrices of the Gram matrix's
  size, and the rows in fp32), or the errors of its rows in fp64.

Before codes are chosen, groups of samples run through the layer, as many samples at a time as a micro-batch has rows.
The forward of a group is assumed to need the widest tensor of the layer three times and hidden states four times. With
stacked experts it may need more: inputs, outputs and :data:`COPIES` hidden states for each stack and each expert of a
token. All these numbers were measured with torch's profiler (tests/unit/tools/memory/test_ptq_init.py).

Tuning a layer (``blockwise``, :mod:`model.ptq_init.blockwise`) follows, and needs:

- the hidden states of the original model, too;
- for the rank's elements of the layer's weights, two copies, an fp32 master, Adam's moments, and in Adam's step two
  more fp32 tensors; for the whole layer, the fp32 sums of gradients, and the gradient of one weight as it is computed;
- the tensors that autograd keeps from a group's forward. They are assumed to be all inputs and outputs of the Linears
  in the model's dtype, times :data:`KEPT_OF_LINEARS`. For stacked experts they are assumed to be inputs, outputs and
  :data:`KEPT_COPIES` hidden states for each stack and each expert of a token (also measured).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import nn
from transformers import PreTrainedConfig

from model.ptq_init.layer_samples import decoder_layers
from model.ptq_init.layerwise import quantized_together
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


def bytes_of_ptq_init(student: MetaStudent, settings: Settings, rows: int) -> int:
    """Return the most bytes that a rank needs in addition to its parameters while codes are chosen; 0 for ``rtn``. The
    samples are ``quant.calibration_batches`` micro-batches of ``rows`` rows."""
    recipe = student.recipe
    if recipe.quant.init == "rtn":
        return 0
    tunes = recipe.quant.init == "blockwise"
    config, size = student.model.config.get_text_config(), next(student.model.parameters()).element_size()
    together = rows * recipe.data.max_length  # tokens that run through a layer at a time
    samples = max(1, recipe.quant.calibration_batches) * together
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden = samples * ((1 + tunes) * config.hidden_size + 2 * head) * size
    blocks = decoder_layers(student.model, student.quantization)
    inside = {id(parameter) for block in blocks.values() for parameter in block.parameters()}
    outside = [parameter for parameter in student.model.parameters() if id(parameter) not in inside]
    share = settings.ranks if settings.partitions else 1
    most = 0
    for name, block in blocks.items():
        layers = {path: one for path, one in student.quantization.layers.items() if path.startswith(f"{name}.")}
        widest = max((max(p.shape[-1], p.shape[-2]) for p in block.parameters() if p.dim() > 1), default=0)
        of_stacks = together * size * _features_of_stacks(layers, config, COPIES)
        running = max(together * size * (3 * widest + 4 * config.hidden_size), round(of_stacks))
        steps = [
            _of_step([[layers[one] for one in names] for names in sets], share, running)
            for sets in quantized_together(student.model, student.quantization, name)
        ]
        work = max([running + _gathered(outside, settings), *steps])
        if tunes:
            features = KEPT_OF_LINEARS * _features_of_linears(layers, config)
            features += _features_of_stacks(layers, config, KEPT_COPIES)
            work = max(work, _of_tuning(layers, share, round(together * size * features)))
        most = max(most, _gathered(block.parameters(), settings) + work)
    return hidden + most


def _gathered(parameters: Iterable[nn.Parameter], settings: Settings) -> int:
    """Compute the bytes of gathered parameters; 0 if parameters are not partitioned."""
    return sum(p.numel() * p.element_size() for p in parameters) if settings.partitions else 0


def _experts_of(config: PreTrainedConfig, count: int) -> int:
    """Return how many of ``count`` experts a token is routed to; all if the configuration has no such number."""
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    found = next((found for name in names if (found := getattr(config, name, None)) is not None), None)
    return min(found or count, count)


def _features_of_stacks(layers: Mapping[str, QuantLayer], config: PreTrainedConfig, copies: float) -> float:
    """Count the elements per token that stacked experts need: inputs, outputs and ``copies`` hidden states, for each
    stack and each expert of the token."""
    return sum(
        _experts_of(config, one.num_experts) * (one.in_features + one.out_features + copies * config.hidden_size)
        for one in layers.values()
        if one.projections
    )


def _features_of_linears(layers: Mapping[str, QuantLayer], config: PreTrainedConfig) -> int:
    """Count the elements per token in inputs and outputs of Linears outside of stacks. Of experts that are separate
    modules, only as many count as a token is routed to."""
    alike: dict[str, list[QuantLayer]] = defaultdict(list)
    for name, one in layers.items():
        if not one.projections:
            alike[re.sub(r"\.\d+\.", ".*.", name)].append(one)
    return sum(_experts_of(config, len(ones)) * (ones[0].in_features + ones[0].out_features) for ones in alike.values())


def _of_step(sets: list[list[QuantLayer]], share: int, running: int) -> int:
    """Compute the peak bytes while the codes of ``sets`` of Linears are chosen: the Gram matrices, and the larger of
    two. One is a forward (``running``), with inputs added to a Gram matrix. The other is all rows with chosen codes,
    and the temporary memory for one Linear. A rank has a fraction 1 / ``share`` of each Linear."""
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


def _of_tuning(layers: Mapping[str, QuantLayer], share: int, kept: int) -> int:
    """Compute the peak bytes while a decoder layer is tuned. A rank has 1 / ``share`` of the layer's weights, and
    autograd keeps ``kept`` bytes of activations."""
    weights = sum(layer.weight.numel() for layer in layers.values())
    largest = max(layer.weight.numel() for layer in layers.values())
    own = weights // share
    return TUNED * own + max(GRADIENTS * weights + FP32 * largest + kept, STEPPING * own + FP32 * weights)
