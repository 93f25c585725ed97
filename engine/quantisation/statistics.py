"""How the quantisation of a model fares while it trains: scales, what they clip, and the error of every weight."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.quantisation.switches import FakeQuant
from model.ranks import reduce_over_ranks
from model.scales import WeightStatistics, input_scales, weight_statistics
from quant import Quantization


@dataclass(frozen=True)
class QuantStats:
    """Statistics by layer (weights) and by owner of the scale group (inputs, and keys and values)."""

    weights: dict[str, WeightStatistics]
    input_scales: dict[str, float]
    clipped_inputs: dict[str, float]
    """Fraction of the inputs' elements outside the range, of the groups that were watched."""


def measure(quantization: Quantization) -> QuantStats:
    """Statistics of the weights as they are now and of what the observers saw; a collective."""
    return QuantStats(weight_statistics(quantization), input_scales(quantization), _clipped_inputs(quantization))


def _clipped_inputs(quantization: Quantization) -> dict[str, float]:
    groups = quantization.input_groups
    if not groups:
        return {}
    observers = [group.observer for group in groups if group.observer is not None]
    counts = torch.tensor([[int(observer.clipped), observer.total] for observer in observers], dtype=torch.float64)
    reduced = reduce_over_ranks(counts).tolist()
    return {group.owner: clipped / total for group, (clipped, total) in zip(groups, reduced, strict=True) if total}


@dataclass
class Watch:
    """What :func:`watching` found; None until its block has ended."""

    stats: QuantStats | None = None


@contextmanager
def watching(quant: FakeQuant) -> Iterator[Watch]:
    """Watch the inputs of the block's forwards, and measure the quantisation when the block ends; a collective then.

    Where inputs are watched already (a user's script does it, or a schedule that will switch fake quant on), the
    observers keep what they have seen and go on.
    """
    watch = Watch()
    own = not quant.quantization.observing
    if own:
        quant.observe(True)
    try:
        yield watch
        watch.stats = measure(quant.quantization)
    finally:
        if own:
            quant.observe(False)
