"""Scales of quantized layers, measured on their weights and chosen for their inputs."""

from collections.abc import Mapping

import torch

from model.scales.in_place import renew_weight_scales
from quant import Quantization


def fill_scales(
    quantization: Quantization,
    largest: float | Mapping[str, float] = 2.5,
    *,
    clip: float = 1.0,
    theta: float = -0.125,
) -> None:
    """Fill the scales of weights, times ``clip``, of inputs, and learned corrections.

    Args:
        quantization: returned by ``quant.replace_layers``.
        largest: largest magnitude of inputs that is not clipped, for all or by the last name of a group's owner.
        clip: less than 1 clips some of the weights.
        theta: value of every theta.
    """
    renew_weight_scales(quantization)
    with torch.no_grad():
        for group in quantization.weight_groups:
            group.s0.mul_(clip)
        for group in quantization.input_groups:
            size = largest if isinstance(largest, float) else largest[group.owner.rpartition(".")[2]]
            group.s0.fill_(448 * 6 / size if group.spec.has_global_scale else size / group.spec.qmax)
        for group in (*quantization.weight_groups, *quantization.input_groups):
            if group.theta is not None:
                group.theta.fill_(theta)
