"""Choose a scheme for each part of a model, within a budget of bits per weight (mixed precision).

A part is a set of layers that get the same scheme. The cost of a scheme for a part is the KL divergence of the logits
when only this part is quantized. Costs are measured on the loaded model, under any ZeRO stage. They are assumed to add
up, as in HAWQ-V2 (Dong et al. 2020, arXiv 1911.03852, section 3.2). The choice is a multiple-choice knapsack, solved
greedily on the lower convex hull of each part's sizes and costs. All parts start at their smallest size. Then the step
that saves the most cost per bit, and still fits, is taken until no step fits. The result misses the optimum by less
than one step's savings (Sinha and Zoltners 1979, "The multiple-choice knapsack problem", theorem 4).
"""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from data.loader import MicroBatch
from engine.session.context import samples_on_all_ranks
from model.console import progress_bar
from model.ranks import RankError, listed, reduce_over_ranks
from model.zero import forward_only
from quant import Quantization
from quant.formats.compressed_tensors import packed_shapes
from quant.linear import linears_of
from quant.rules import exempt_line, fused_sets


class Option(NamedTuple):
    """Size in bits (with scales) and cost of a part under one scheme."""

    bits: int
    cost: float


@dataclass(frozen=True)
class LayerSet:
    """Part of a model: layers that get the same scheme, as serving fuses them, or as experts of one MoE layer.
    ``layers`` has module names, ``linears`` names of Linears in a checkpoint, ``options`` size and cost by scheme."""

    layers: tuple[str, ...]
    linears: tuple[str, ...]
    weights: int
    options: Mapping[str, Option]

    def __str__(self) -> str:
        parents = dict.fromkeys(name.rpartition(".")[0] for name in self.layers)
        if len(parents) > 1:
            return f"{self.layers[0]} and {len(self.layers) - 1} more"
        return f"{next(iter(parents))}: {', '.join(name.rpartition('.')[2] for name in self.layers)}"

    def costing(self, scheme: str, cost: float) -> "LayerSet":
        """Return a copy in which the cost of the scheme ``scheme`` is ``cost``."""
        return replace(self, options={**self.options, scheme: self.options[scheme]._replace(cost=cost)})


def check_budget(parts: Sequence[LayerSet], budget_bits: float) -> None:
    """Raise ValueError, naming the required budget, if all smallest options exceed ``budget_bits`` per weight."""
    weights = sum(part.weights for part in parts)
    least = sum(min(option.bits for option in part.options.values()) for part in parts)
    if least > budget_bits * weights * (1 + 1e-12):
        enough = math.ceil(least / weights * 1e4) / 1e4  # rounded up, so that the printed budget is accepted
        raise ValueError(
            f"{budget_bits:g} bits per weight, expected {enough:.4f} or more: the smallest schemes need them"
        )


def allocate(parts: Sequence[LayerSet], budget_bits: float) -> list[str]:
    """Choose a scheme for each part, so that the sum of the options' costs is small and all weights together have at
    most ``budget_bits`` bits on average; return the schemes' names. The choice is greedy: it starts from the smallest
    options, and takes the step that saves the most cost per bit until no step fits. Raises ValueError if the smallest
    options do not fit; the message names the required budget."""
    check_budget(parts, budget_bits)
    hulls = [_hull(part.options) for part in parts]
    chosen = [0] * len(parts)
    weights = sum(part.weights for part in parts)
    left = budget_bits * weights - sum(hull[0][1].bits for hull in hulls)
    while steps := [
        (_saved_per_bit(hull[index], hull[index + 1]), part)
        for part, (hull, index) in enumerate(zip(hulls, chosen, strict=True))
        if index + 1 < len(hull) and hull[index + 1][1].bits - hull[index][1].bits <= left
    ]:
        part = max(steps, key=lambda step: (step[0], -step[1]))[1]
        hull, index = hulls[part], chosen[part]
        left -= hull[index + 1][1].bits - hull[index][1].bits
        chosen[part] += 1
    return [hull[index][0] for hull, index in zip(hulls, chosen, strict=True)]


def _hull(options: Mapping[str, Option]) -> list[tuple[str, Option]]:
    """Return the options on the lower convex hull of size and cost, from the smallest to the least costly."""
    hull: list[tuple[str, Option]] = []
    for name, option in sorted(options.items(), key=lambda item: item[1]):
        if hull and option.cost >= hull[-1][1].cost:
            continue
        if hull and option.bits == hull[-1][1].bits:
            hull.pop()
        while len(hull) > 1 and _saved_per_bit(hull[-2], hull[-1]) <= _saved_per_bit(hull[-1], (name, option)):
            hull.pop()
        hull.append((name, option))
    return hull


def _saved_per_bit(smaller: tuple[str, Option], larger: tuple[str, Option]) -> float:
    return (smaller[1].cost - larger[1].cost) / (larger[1].bits - smaller[1].bits)


def rules_of_choice(parts: Sequence[LayerSet], schemes: Sequence[str]) -> tuple[str, list[dict[str, str]]]:
    """Convert ``schemes``, the chosen scheme of each part, to ``quant.scheme`` (the scheme that has the most weights)
    and ``quant.rules`` for the layers of other schemes."""
    size: dict[str, int] = defaultdict(int)
    names: dict[str, list[str]] = defaultdict(list)
    for part, scheme in zip(parts, schemes, strict=True):
        size[scheme] += part.weights
        names[scheme] += part.linears
    most = max(size, key=lambda scheme: size[scheme])
    return most, [
        {"scheme": scheme, "layers": pattern}
        for scheme in names
        if scheme != most
        for pattern in patterns(names[scheme])
    ]


def patterns(names: Iterable[str]) -> list[str]:
    """Create regexes that match these layer names, but no names in other decoder layers.

    Names share a regex if they differ only in their first number (the decoder layer's) and in experts' numbers. The
    regex lists decoder layers, and accepts any expert, as ``names`` must have all experts of a layer or none.
    """
    numbers: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        first = next((index for index, word in enumerate(parts) if word.isdigit()), -1)
        words = [
            "LAYER" if index == first else r"\d+" if word.isdigit() and before == "experts" else re.escape(word)
            for index, (before, word) in enumerate(zip(["", *parts], parts, strict=False))
        ]
        found = numbers.setdefault(r"\.".join(words), [])
        if first >= 0 and (number := name.split(".")[first]) not in found:
            found.append(number)
    return [
        pattern.replace("LAYER", f"({'|'.join(found)})" if len(found) > 1 else "".join(found))
        for pattern, found in numbers.items()
    ]


_TOKENS = 512  # log-probabilities compared at a time: [512, vocabulary] in fp32, several times
_OF_NO_WEIGHT = ("input_scale", "input_global_scale", "weight_shape")  # tensors other than the weight and its scales


def layer_sets(
    model: nn.Module, quantization: Quantization, scheme: str, own: Collection[str], dtype: torch.dtype
) -> list[LayerSet]:
    """List the parts of a model whose layers have ``scheme``, with their sizes; costs are NaN.

    Layers that serving fuses form one part, and so do all experts of a MoE layer. ``own`` names layers to leave out:
    their scheme does not depend on ``quant.scheme`` (it comes from a rule, or they are lm_head or embeddings), even if
    it equals ``scheme``. ``dtype`` is the dtype of the model, and of scales without a fixed dtype.
    """
    layers = quantization.layers.items()
    schemes = {name: layer.scheme for name, layer in layers if layer.scheme.name == scheme and name not in own}
    members: dict[str, list[str]] = {}
    for names in fused_sets(schemes, dict(model.named_modules()), across_experts=False):
        before, experts, _ = names[0].rpartition(".experts.")
        members.setdefault(f"{before}.experts" if experts else names[0], []).extend(names)
    return [_part(quantization, tuple(names), dtype) for names in members.values()]


def _part(quantization: Quantization, names: tuple[str, ...], dtype: torch.dtype) -> LayerSet:
    linears, bits, weights = [], 0, 0
    for name in names:
        layer = quantization.layers[name]
        for linear in linears_of(name, layer):
            linears.append(linear.name)
            weights += linear.out_features * linear.in_features
            shapes = packed_shapes(linear.in_features, linear.out_features, layer.scheme, dtype)
            sizes = {suffix: kind.itemsize * math.prod(shape) for suffix, (kind, shape) in shapes.items()}
            bits += 8 * sum(size for suffix, size in sizes.items() if suffix not in _OF_NO_WEIGHT)
    return LayerSet(names, tuple(linears), weights, {quantization.layers[names[0]].scheme.name: Option(bits, math.nan)})


@torch.no_grad()
def divergences(
    engine: nn.Module,
    quantization: Quantization,
    sets: Sequence[Sequence[str]],
    batches: Iterable[MicroBatch],
    device: torch.device,
) -> list[float]:
    """Measure the effect of quantizing each of ``sets`` (layer names) alone, weights and inputs: the mean KL divergence
    per token, in nats, from the logits of the unquantized model; a collective. Takes one forward per set and sample,
    and one unquantized forward per sample; every rank needs equally many ``batches``. Afterwards the same layers as
    before are fake-quantized. Raises RankError on every rank if a divergence is not finite."""
    was_training = engine.training
    engine.eval()
    sums, tokens = torch.zeros(len(sets), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    try:
        samples = list(samples_on_all_ranks(batches))
        for ids, counts in progress_bar(desc="measuring", unit="sample", over=samples):
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
    means: list[float] = (reduce_over_ranks(sums) / whole).tolist()
    for names, value in zip(sets, means, strict=True):
        if not math.isfinite(value):
            raise RankError(
                f"the KL divergence with only {listed(names, 3)} quantized is {value}: logits or inputs overflow; set "
                f"model.dtype to bfloat16, or {exempt_line(names)}"
            )
    return means


def _logits(engine: nn.Module, ids: Tensor) -> Tensor:
    """Compute the logits [T, vocabulary] of one sample, ``ids`` [1, T]."""
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
