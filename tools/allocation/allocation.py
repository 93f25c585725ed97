"""Bits where they count: one of several schemes for each part of a model, so that the whole stays within a budget.

What a part costs under a scheme is measured with this part alone quantized (:mod:`tools.allocation.sensitivity`),
and costs are taken to add up, as in HAWQ-V2 (Dong et al. 2020, arXiv 1911.03852, section 3.2). Then the choice is a
knapsack with several sizes of every item. It is solved on the lower convex hull of each part's sizes and costs, from
the smallest sizes on: always the step that saves most per bit and still fits. What that misses of the best choice is
less than what one step saves (Sinha and Zoltners 1979, "The multiple-choice knapsack problem", theorem 4).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Option(NamedTuple):
    """A part under one scheme: its size in bits, with scales, and what it costs."""

    bits: int
    cost: float


@dataclass(frozen=True)
class Part:
    """Layers that have one scheme, since serving runs them as one.

    Attributes:
        layers: their names as modules.
        linears: the names of the Linears that a checkpoint has for them.
        weights: how many weights they have.
        options: by the name of the scheme.
    """

    layers: tuple[str, ...]
    linears: tuple[str, ...]
    weights: int
    options: Mapping[str, Option]

    def __str__(self) -> str:
        parents = dict.fromkeys(name.rpartition(".")[0] for name in self.layers)
        if len(parents) > 1:
            return f"{self.layers[0]} and {len(self.layers) - 1} more"
        return f"{next(iter(parents))}: {', '.join(name.rpartition('.')[2] for name in self.layers)}"

    def costing(self, scheme: str, cost: float) -> "Part":
        """The same part, whose option ``scheme`` has this cost."""
        return replace(self, options={**self.options, scheme: self.options[scheme]._replace(cost=cost)})


def check_budget(parts: Sequence[Part], budget_bits: float) -> None:
    """Raise ValueError if the smallest options do not fit; the text says what they need. Costs may be unknown."""
    weights = sum(part.weights for part in parts)
    least = sum(min(option.bits for option in part.options.values()) for part in parts)
    if least > budget_bits * weights * (1 + 1e-12):
        enough = math.ceil(least / weights * 1e4) / 1e4  # a budget of what is printed is not refused again
        raise ValueError(
            f"{budget_bits:g} bits per weight, expected {enough:.4f} or more: the smallest schemes need them"
        )


def allocate(parts: Sequence[Part], budget_bits: float) -> list[str]:
    """The scheme of each part, such that all weights together have at most ``budget_bits`` bits on average.

    Raises:
        ValueError: the smallest options do not fit; the text says what they need.
    """
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
    """The options on the lower convex hull of size and cost, from the smallest to that of the least cost."""
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


def rules_of(parts: Sequence[Part], schemes: Sequence[str]) -> tuple[str, list[dict[str, str]]]:
    """The choice as a recipe has it: ``quant.scheme``, that of the most weights, and ``quant.rules`` for the others."""
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
    """Regexes that match these names and none of other decoder layers: one for names that differ in numbers alone, of
    which the first is that of the layer and any others match (experts, all of which are there)."""
    numbers: dict[str, list[str]] = {}
    for name in names:
        first, *rest = [index for index, word in enumerate(name.split(".")) if word.isdigit()] or [-1]
        words = [
            "LAYER" if index == first else r"\d+" if index in rest else re.escape(word)
            for index, word in enumerate(name.split("."))
        ]
        found = numbers.setdefault(r"\.".join(words), [])
        if first >= 0 and (number := name.split(".")[first]) not in found:
            found.append(number)
    return [
        pattern.replace("LAYER", f"({'|'.join(found)})" if len(found) > 1 else "".join(found))
        for pattern, found in numbers.items()
    ]
