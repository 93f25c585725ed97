"""How the quantisation of a model fares while it trains: scales, what they clip, and the error of every weight."""

import re
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from engine.metrics import Metrics
from model.ranks import reduce_over_ranks
from model.scales import WeightStatistics, input_scales, weight_statistics
from quant import Quantization

_LAYER = re.compile(r"(?:.*\.)?layers\.(?P<index>\d+)\.(?P<place>.+)")
_EXPERT = re.compile(r"\.\d+\.")


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


def log(stats: QuantStats, metrics: Metrics, step: int) -> None:
    """Histograms over the layers, the worst of them as scalars, and a picture of the weights' errors by layer.

    A model has hundreds of layers, and with experts thousands: a card for each would be read by nobody.
    """
    errors = {name: decibels(one.error) for name, one in stats.weights.items()}
    clipped = {name: one.clipped for name, one in stats.weights.items()}
    by_tag = {
        "quant/weight_scales_log2": [np.log2(one.scale) for one in stats.weights.values()],
        "quant/input_scales_log2": [np.log2(scale) for scale in stats.input_scales.values()],
        "quant/clipped_weights": list(clipped.values()),
        "quant/clipped_inputs": list(stats.clipped_inputs.values()),
        "quant/weight_error_db": list(errors.values()),
    }
    for tag, values in by_tag.items():
        metrics.histogram(tag, values, step)
    worst = {}
    if stats.weights:  # not where the KV cache alone is quantised
        worst = {
            "quant/weight_error_db_worst": max(errors.values()),
            "quant/clipped_weights_most": max(clipped.values()),
        }
        metrics.picture("quant/weight_error_by_layer", lambda: error_picture(errors, step), step)
    if stats.clipped_inputs:
        worst["quant/clipped_inputs_most"] = max(stats.clipped_inputs.values())
    metrics.log(worst, step)


def decibels(relative_error: float) -> float:
    """A ratio of squares in dB; -100 and less are shown as -100 (an error of 0)."""
    return float(10 * np.log10(max(relative_error, 1e-10)))


def error_picture(errors: dict[str, float], step: int) -> Figure:
    """Weights' errors in dB: decoder layers from left to right, the places of a layer below each other.

    Experts of a layer share a square, which shows their mean. Layers outside of the decoder (lm_head) are left out.
    """
    squares: dict[tuple[str, int], list[float]] = {}
    for name, error in errors.items():
        if match := _LAYER.fullmatch(name):
            squares.setdefault((_EXPERT.sub(".*.", match["place"]), int(match["index"])), []).append(error)
    places = list(dict.fromkeys(place for place, _ in squares))
    depth = 1 + max((index for _, index in squares), default=0)
    values = np.full((max(1, len(places)), depth), np.nan)
    for (place, index), found in squares.items():
        values[places.index(place), index] = np.mean(found)
    figure = Figure(figsize=(max(5.5, 3 + 0.2 * depth), 1.2 + 0.35 * len(places)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(places)), places)
    axes.set_xlabel("decoder layer")
    axes.set_title(f"error of the weights, step {step}", fontsize="medium")
    figure.colorbar(image, ax=axes, label="dB")
    return figure
