"""Measure the cost of quantizing each part of a model alone: the KL divergence of the logits, in place under any ZeRO
stage."""

import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from data.loader import MicroBatch
from engine.session.context import samples_on_all_ranks
from model.ranks import reduce_over_ranks
from model.zero import forward_only
from quant import Quantization
from quant.formats.compressed_tensors import packed_shapes
from quant.linear import linears_of
from quant.rules import fused_sets
from tools.allocation.allocation import Option, Part

_TOKENS = 512  # log-probabilities compared at a time: [512, vocabulary] in fp32, several times
_OF_NO_WEIGHT = ("input_scale", "input_global_scale", "weight_shape")  # tensors beside the weight and its scales


def parts_of(model: nn.Module, quantization: Quantization, scheme: str, dtype: torch.dtype) -> list[Part]:
    """List the parts of a model whose layers have ``scheme``, with their sizes; costs are NaN.

    Layers that serving fuses are a part, and so are all experts of a MoE layer. Layers with a scheme of their own
    (lm_head, embeddings) are not included.

    Args:
        model: quantized by ``quant.prepare``.
        quantization: result of ``quant.prepare``.
        scheme: name of the scheme.
        dtype: of the model, possibly of the scales too.
    """
    schemes = {name: layer.scheme for name, layer in quantization.layers.items() if layer.scheme.name == scheme}
    members: dict[str, list[str]] = {}
    for names in fused_sets(schemes, dict(model.named_modules()), across_experts=False):
        before, experts, _ = names[0].rpartition(".experts.")
        members.setdefault(f"{before}.experts" if experts else names[0], []).extend(names)
    return [_part(quantization, tuple(names), dtype) for names in members.values()]


def _part(quantization: Quantization, names: tuple[str, ...], dtype: torch.dtype) -> Part:
    linears, bits, weights = [], 0, 0
    for name in names:
        layer = quantization.layers[name]
        for linear in linears_of(name, layer):
            linears.append(linear.name)
            weights += linear.out_features * linear.in_features
            shapes = packed_shapes(linear.in_features, linear.out_features, layer.scheme, dtype)
            sizes = {suffix: kind.itemsize * math.prod(shape) for suffix, (kind, shape) in shapes.items()}
            bits += 8 * sum(size for suffix, size in sizes.items() if suffix not in _OF_NO_WEIGHT)
    return Part(names, tuple(linears), weights, {quantization.layers[names[0]].scheme.name: Option(bits, math.nan)})


@torch.no_grad()
def divergences(
    engine: nn.Module,
    quantization: Quantization,
    sets: Sequence[Sequence[str]],
    batches: Iterable[MicroBatch],
    device: torch.device,
) -> list[float]:
    """Measure the mean KL divergence per token, in nats, of the logits with some layers quantized from those with none;
    a collective.

    Args:
        engine: the engine; called with input_ids alone.
        quantization: its quantization; switches are restored afterwards.
        sets: names of layers to quantize together, with their inputs; one forward per set and sample.
        batches: the same number on every rank.
        device: where the batches go.
    """
    was_training = engine.training
    engine.eval()
    sums, tokens = torch.zeros(len(sets), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    try:
        for ids, counts in samples_on_all_ranks(batches):
            with quantization.paused():
                expected = _logits(engine, ids.to(device))
                for index, names in enumerate(sets):
                    quantization.set_fake_quant(True, True, "|".join(map(re.escape, names)))
                    found = _logits(engine, ids.to(device))
                    quantization.set_fake_quant(False, False)
                    if counts:
                        sums[index] += _divergence(expected, found)
            tokens += ids.numel() if counts else 0
    finally:
        engine.train(was_training)
    whole = reduce_over_ranks(tokens)
    return (reduce_over_ranks(sums) / whole).tolist()


def _logits(engine: nn.Module, ids: Tensor) -> Tensor:
    """Compute the logits [T, vocabulary] of a sample."""
    with forward_only(engine):
        logits: Tensor = engine(input_ids=ids, use_cache=False).logits
    return logits[0]


def _divergence(expected: Tensor, found: Tensor) -> float:
    """Sum KL(p || q) over tokens, from logits [T, vocabulary] of p and q."""
    total = 0.0
    for one, other in zip(expected.split(_TOKENS), found.split(_TOKENS), strict=True):
        p, q = one.float().log_softmax(-1), other.float().log_softmax(-1)
        total += kl_div(q, p, reduction="sum", log_target=True).item()
    return total
