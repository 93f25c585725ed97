"""Scales measured from the weights where they lie.

Each rank takes the largest values of its own range of a weight, and one all-reduce of the maxima (a few bytes per
scale) gives the scale. No weight is gathered.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from model.adapters import local_weight
from model.ranks import listed, raise_everywhere, reduce_over_ranks
from model.scales.write import scale_buckets, write_scales, write_zero_points
from model.zero import gathered
from quant import (
    Quantization,
    Ranges,
    ScaleGroup,
    combine,
    partial_errors,
    partial_stats,
    scales_from_errors,
    scales_from_stats,
    zero_points_from_stats,
)
from quant.reference import global_scale
from quant.spec import FP8_TENSOR, TensorSpec


def renew_weight_scales(quantization: Quantization, owners: set[str] | None = None) -> None:
    """Measure weights as they are now and write their scales, global ones too; a collective.

    Args:
        quantization: what ``quant.prepare`` returned.
        owners: of the weight groups to measure; all of them by default.

    Raises:
        RankError: a weight holds NaN or Inf (on every rank, naming the layers).
    """
    write_scales(quantization.weight_groups, measure_weight_scales(quantization, owners))
    if quantization.global_groups:
        write_scales(quantization.global_groups, measure_global_scales(quantization, owners))


def follow_weights(quantization: Quantization) -> None:
    """Make every s0 the absmax scale of the weight as it is now, whatever theta is, and zero points those of its range;
    a collective under ZeRO-3.

    With a theta that learns, ``exp(theta)`` is then the share of the range that is kept: learnable weight clipping
    (OmniQuant, Shao et al. 2024, section 3.2, where a sigmoid stands for the exponential).
    """
    for bucket in scale_buckets(quantization.weight_groups):
        stats = _bucket_stats(quantization, bucket)
        written = [p for group in bucket for p in (group.s0, group.zero) if p is not None]
        with gathered(written, modifier_rank=0), torch.no_grad():
            for group, stat in zip(bucket, stats, strict=True):
                scales = scales_from_stats(stat, group.spec, signed=quantization.ranges.signs(group.spec))
                group.s0.copy_(write_zero_points(group, _with_zero_points(scales, stat, group.spec)))
    write_scales(quantization.global_groups, measure_global_scales(quantization))


def measure_weight_scales(
    quantization: Quantization, owners: set[str] | None = None, ranges: Ranges | None = None
) -> dict[str, Tensor]:
    """Initial scales of the weights as they are now, by owner of the scale group; a collective.

    Args:
        quantization: what ``quant.prepare`` returned.
        owners: measure these groups only; all of them by default.
        ranges: what they fit; ``quantization.ranges`` by default.

    Returns:
        fp32 tensors of the groups' scale shapes (with zero points ``[2, *scale shape]``), equal on every rank. Write
        them with :func:`write_scales`.

    Raises:
        RankError: a weight holds NaN or Inf (on every rank, naming the layers).
    """
    ranges = ranges or quantization.ranges
    groups = [group for group in quantization.weight_groups if owners is None or group.owner in owners]
    values: dict[str, Tensor] = {}
    bad: list[str] = []
    for bucket in scale_buckets(groups):
        for group, stats in zip(bucket, _bucket_stats(quantization, bucket), strict=True):
            if not bool(torch.isfinite(stats).all()):
                bad.append(group.owner)
                continue
            if ranges.searches(group.spec):
                scales = _searched(quantization, group, stats, signed=ranges.signs(group.spec))
            else:
                scales = scales_from_stats(stats, group.spec, signed=ranges.signs(group.spec))
            values[group.owner] = _with_zero_points(scales, stats, group.spec)
    raise_everywhere(f"weights with NaN or Inf cannot be quantised: {listed(bad)}" if bad else None)
    return values


def _with_zero_points(scales: Tensor, stats: Tensor, spec: TensorSpec) -> Tensor:
    """What :func:`write_scales` takes."""
    zero = zero_points_from_stats(stats, spec)
    return scales if zero is None else torch.stack([scales, zero])


def _bucket_stats(quantization: Quantization, bucket: Sequence[ScaleGroup]) -> list[Tensor]:
    """Statistics of whole weights, one tensor per group; a collective."""
    stats = [_local_stats(quantization, group) for group in bucket]
    flat = reduce_over_ranks(torch.cat([stat.flatten() for stat in stats]), dist.ReduceOp.MAX)
    parts = flat.split([stat.numel() for stat in stats])
    return [part.view_as(stat) for part, stat in zip(parts, stats, strict=True)]


def measure_global_scales(quantization: Quantization, owners: set[str] | None = None) -> dict[str, Tensor]:
    """NVFP4's second scales, one for each set of layers that serving fuses, by owner; a collective.

    With ``448 * 6 / absmax``, as compressed-tensors stores it, the largest scale of a group becomes 448.

    Args:
        quantization: what ``quant.prepare`` returned.
        owners: measure the sets that have one of these layers only; all of them by default.
    """
    groups = [g for g in quantization.global_groups if owners is None or not owners.isdisjoint(g.members)]
    if not groups:
        return {}
    absmax = [_local_stats(quantization, group, FP8_TENSOR).amax(0) for group in groups]
    reduced = reduce_over_ranks(torch.cat(absmax), dist.ReduceOp.MAX).split([one.numel() for one in absmax])
    return {group.owner: global_scale(one, group.spec) for group, one in zip(groups, reduced, strict=True)}


def _searched(quantization: Quantization, group: ScaleGroup, stats: Tensor, *, signed: bool) -> Tensor:
    """Scales of the smallest squared error over all ranks' ranges; ``stats`` are of the whole weights. A collective."""
    spec, errors = group.spec, torch.zeros((), device=stats.device)
    for name in group.members:
        layer = quantization.layers[name]
        start, flat = local_weight(layer)
        errors = errors + partial_errors(flat, start, layer.weight_shape, stats, spec, signed=signed)
    # Where weights are not partitioned every rank adds the same errors: the smallest stays the smallest.
    return scales_from_errors(stats, reduce_over_ranks(errors), spec, signed=signed)


def _local_stats(quantization: Quantization, group: ScaleGroup, spec: TensorSpec | None = None) -> Tensor:
    """Statistics of this rank's share of the group's weights, for its spec or another one; NaN counts as Inf so that a
    MAX reduction keeps it."""
    total: Tensor | None = None
    for name in group.members:
        layer = quantization.layers[name]
        start, flat = local_weight(layer)
        stat = partial_stats(flat, start, layer.weight_shape, spec or group.spec)
        stat = torch.where(torch.isnan(stat), torch.inf, stat)
        total = stat if total is None else combine(total, stat)
    assert total is not None, f"the scale group of {group.owner} has no members"
    return total
