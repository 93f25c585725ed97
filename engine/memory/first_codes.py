"""Memory of ``quant.first_codes``: what choosing codes holds beside the weights, before there is an optimizer.

For each decoder layer in turn (:mod:`model.first_codes`) these live at a time:

- the hidden states of all samples of the rank, and the position embeddings that each is called with;
- under stage 3 the layer, gathered, or what lies outside the layers while the samples are recorded;
- of Linears that are quantised together a Gram matrix in fp64 for each tensor that they read, of stacked experts for
  each expert: ``8 in^2`` bytes;
- of the rows that were chosen their weights, codes and scales;
- for one Linear at a time either what ``quant.gptq.choose`` works in, five more matrices of that size and its rows in
  fp32, or the errors of its rows in fp64.

The last two were counted by torch's profiler (tests/unit/engine/memory/test_first_codes.py); a forward of one sample
through one layer is taken to hold the widest of its tensors four times.

Tuning a layer (``blocks``, :mod:`model.first_codes.tuning`) comes after that:

- the hidden states of the original, too;
- of the rank's elements of the layer's weights two copies, an fp32 master and Adam's moments, and while it steps two
  more fp32 tensors; of the whole layer its gradients, summed up in fp32;
- what autograd keeps of a sample's forward, taken to be all inputs and outputs of the Linears in the model's dtype,
  times :data:`KEPT_OF_LINEARS` or, of stacked experts, :data:`KEPT_OF_EXPERTS` (both counted, too).
"""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig

from engine.memory.meta_model import MetaStudent
from engine.memory.zero_states import FP32, Settings
from engine.recipe.recipe import Recipe
from model.first_codes import decoder_layers, quantised_together
from quant import QuantLayer
from quant.experts import linears_of

FP64 = 8
MATRICES = 5  # of the size of a Gram matrix, in which codes are chosen
CHOOSING, ERRORS = 6, 26  # bytes per element of a Linear that are chosen at once, whose errors are measured
TUNED = 2 + 2 + 4 + 8  # bytes per own element while a layer is tuned: two copies, master, moments
STEPPING = 2 * FP32  # and in Adam's step
GRADIENTS = FP32 + 2  # per element of the whole layer: the sum, and what comes out of a backward
KEPT_OF_LINEARS, KEPT_OF_EXPERTS = 2.0, 1.1
KEPT = 3  # bytes per element of a row that was chosen: its bf16 weight and its code


@dataclass(frozen=True)
class _Samples:
    """Of one rank: how many tokens, and the most of one sample."""

    tokens: int
    longest: int


def bytes_of_first_codes(student: MetaStudent, settings: Settings, rows: int) -> int:
    """The most bytes that a rank holds beside its parameters while codes are chosen; 0 where nothing asks for it.

    Args:
        student: the model and its quantised layers, on the meta device.
        settings: of ZeRO.
        rows: of a micro-batch, of which ``quant.calibration_batches`` are the samples.
    """
    recipe = student.recipe
    if recipe.quant.first_codes == "nearest":
        return 0
    tunes = recipe.quant.first_codes == "blocks"
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
        running = 4 * samples.longest * _widest(block) * size
        share = settings.ranks if partitioned else 1
        steps = [
            _of_step([[student.quantization.layers[one] for one in names] for names in sets], share)
            for sets in quantised_together(student.model, student.quantization, name)
        ]
        work = running + max([outside, *steps])
        if tunes:
            inside_block = [one for path, one in student.quantization.layers.items() if path.startswith(f"{name}.")]
            work = max(work, _of_tuning(inside_block, share, samples.longest * size, _experts_per_token(config)))
        most = max(most, gathered + work)
    return hidden + most


def _samples(recipe: Recipe, rows: int) -> _Samples:
    length = recipe.data.max_length
    return _Samples(max(1, recipe.quant.calibration_batches) * rows * length, length)


def _of_step(sets: list[list[QuantLayer]], share: int) -> int:
    """Gram matrices of some sets of layers, the rows that were chosen, and the worst moment of choosing one more
    Linear, of which a rank has one of ``share`` parts."""
    grams = kept = worst = 0
    for layers in sets:
        experts = layers[0].num_experts if layers[0].projections else 1
        grams += FP64 * experts * layers[0].in_features ** 2
        for layer in layers:
            kept += KEPT * layer.weight.numel() // share
            for part in linears_of("", layer):
                own, gram = part.out_features * part.in_features // share, part.in_features**2
                worst = max(worst, MATRICES * FP64 * gram + CHOOSING * own, FP32 * gram + ERRORS * own)
    return grams + kept + worst


def _of_tuning(layers: list[QuantLayer], share: int, sample: int, experts: int | None) -> int:
    """While the weights of a decoder layer are tuned, of which a rank has one of ``share`` parts.

    Args:
        layers: those that are tuned.
        share: see above.
        sample: bytes of one feature of the longest sample.
        experts: how many a token goes to; None where nobody knows, which counts all.
    """
    weights = sum(layer.weight.numel() for layer in layers)
    own, kept = weights // share, 0.0
    for layer in layers:
        features = layer.in_features + layer.out_features
        if layer.projections:
            kept += KEPT_OF_EXPERTS * features * min(experts or layer.num_experts, layer.num_experts)
        else:
            kept += KEPT_OF_LINEARS * features
    return TUNED * own + max(GRADIENTS * weights + round(kept * sample), STEPPING * own + FP32 * weights)


def _experts_per_token(config: PreTrainedConfig) -> int | None:
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
    return next((found for name in names if (found := getattr(config, name, None)) is not None), None)


def _widest(block: nn.Module) -> int:
    """The most features of a tensor inside a decoder layer."""
    return max((max(p.shape[-1], p.shape[-2]) for p in block.parameters() if p.dim() > 1), default=0)


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
