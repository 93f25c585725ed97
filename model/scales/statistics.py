"""Statistics of weights and scales, for monitoring."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.peft import local_weight
from model.ranks import reduce_over_ranks
from model.scales.in_place import scale_buckets
from model.zero import gathered, is_partitioned
from quant import Quantization, QuantLayer, ScaleGroup, partial_clipped, partial_squares


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of one layer's weights with their current scales."""

    clipped: float
    """Fraction of the weights outside the range."""
    error: float
    """Squared quantization error over the squared weights."""
    scale: float
    """Geometric mean of the magnitudes of the effective scales."""


def weight_statistics(quantization: Quantization) -> dict[str, WeightStatistics]:
    """Compute the statistics of every layer's weight, by the layer's name; a collective.

    Every rank uses its own partition, with the scales of the forward. Scales are gathered, weights are not.
    """
    groups = quantization.weight_groups
    if not groups:
        return {}
    names, sums, scales = [], [], []
    for bucket in scale_buckets(groups):
        parameters = [p for group in bucket for p in group.parameters]
        parameters += _global_scales_of(quantization, bucket)
        with gathered(parameters), torch.no_grad():
            for name in (name for group in bucket for name in group.members):
                layer = quantization.layers[name]
                names.append(name)
                sums.append(_local_sums(layer))
                scales.append(layer.weight_scale().abs().log().mean().cpu())
    whole = torch.stack(sums)
    # Without partitioning, every rank has counted all weights.
    if is_partitioned(groups[0].s0):
        whole = reduce_over_ranks(whole)
    return {
        name: WeightStatistics(
            clipped / math.prod(quantization.layers[name].weight_shape),
            error / energy if energy else 0.0,
            math.exp(scale),
        )
        for name, (clipped, error, energy), scale in zip(names, whole.tolist(), scales, strict=True)
    }


def _global_scales_of(quantization: Quantization, bucket: Sequence[ScaleGroup]) -> list[nn.Parameter]:
    """List the global scales on which the effective scales of these groups depend, each once."""
    used = [quantization.layers[name].weight_global for group in bucket for name in group.members]
    return list({id(scale): scale for scale in used if scale is not None}.values())


def input_scales(quantization: Quantization) -> dict[str, float]:
    """Return every effective activation scale, by owner of its group; a collective under ZeRO-3."""
    groups, modules = quantization.input_groups, quantization.modules
    found = {}
    for bucket in scale_buckets(groups):
        with gathered([p for group in bucket for p in group.parameters]), torch.no_grad():
            for group in bucket:
                scale = modules[group.owner].input_scale()
                assert scale is not None
                found[group.owner] = scale.item()
    return found


def _local_sums(layer: QuantLayer) -> Tensor:
    """Compute the number of clipped weights, squared errors and squared weights of this rank's range, fp64 [3] on the
    CPU; zeros for a packed weight, which is on the grid."""
    if layer.held is not None:
        return torch.zeros(3, dtype=torch.float64)
    start, local = local_weight(layer)
    spec, shape = layer.scheme.weights, layer.weight_shape
    # An offloaded partition is on the CPU, gathered scales are on the GPU.
    scale = layer.weight_scale().to(local.device)
    zero = None if layer.weight_zero is None else layer.weight_zero.to(local.device)
    clipped = partial_clipped(local, start, shape, scale, spec, zero)
    return torch.cat([clipped.double().view(1), partial_squares(local, start, shape, scale, spec, zero)]).cpu()
