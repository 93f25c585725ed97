"""Measure scales from the partitions of weights, write them into the scales' partitions, and compute statistics of both
for logging. Each rank computes the maxima of its own range of a weight; after one all-reduce of a few bytes per scale
the scale is computed from the maxima of all ranks. No weight is gathered."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from model.peft import local_weight
from model.ranks import listed, raise_everywhere, reduce_over_ranks
from model.zero import batches, full_numel, full_shape, gathered, is_partitioned, release
from quant import SCALE_PARAMETERS, Quantization, QuantLayer, Ranges, ScaleGroup
from quant.formats.compressed_tensors import bad_scales, bad_zero_points
from quant.linear import ADAPTER_PARAMETERS
from quant.observers import (
    partial_clipped,
    partial_errors,
    partial_fit,
    partial_stats,
    scales_from_errors,
    scales_from_stats,
    zero_points_from_stats,
)
from quant.reference import global_scale
from quant.spec import FP8_TENSOR, TensorSpec


def renew_weight_scales(quantization: Quantization, owners: set[str] | None = None) -> None:
    """Measure the scales of the current weights, including global scales, and write them into the model; a collective.
    ``owners``: owners of the groups to renew, all by default. Raises RankError, naming the layers, if a weight has NaN
    or Inf."""
    write_scales(quantization.weight_groups, measure_weight_scales(quantization, owners))
    if quantization.global_groups:
        write_scales(quantization.global_groups, measure_global_scales(quantization, owners))


def follow_weights(quantization: Quantization) -> None:
    """Set every weight's s0 to the absmax scale of the current weight, not divided by ``exp(theta)``, and the zero
    points and global scales to those of the current weights; a collective. With a learned theta, ``exp(theta)`` is then
    the fraction of the range that is kept: learnable weight clipping (OmniQuant, Shao et al. 2024, section 3.2, which
    has a sigmoid in place of ``exp``)."""
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
    """Measure scales of the current weights, without writing them. A collective. Raises RankError, naming the layers,
    if a weight has NaN or Inf.

    Args:
        quantization: the quantized layers. Those that are fused in serving (q, k, v) form a scale group, and one of
            them, its owner, has the scale.
        owners: owners of the groups that are measured; all by default.
        ranges: how scales are chosen (absmax or search, signed or not); ``quantization.ranges`` by default.

    Returns:
        Scales by owner, fp32 in the scale's shape, equal on every rank, for :func:`write_scales`. With zero points
            ``[2, *scale shape]``: scales, then zero points.
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
    raise_everywhere(f"weights with NaN or Inf cannot be quantized: {listed(bad)}" if bad else None)
    return values


def _with_zero_points(scales: Tensor, stats: Tensor, spec: TensorSpec) -> Tensor:
    """Stack scales with zero points, if the scheme has any, for :func:`write_scales`."""
    zero = zero_points_from_stats(stats, spec)
    return scales if zero is None else torch.stack([scales, zero])


def _bucket_stats(quantization: Quantization, bucket: Sequence[ScaleGroup]) -> list[Tensor]:
    """Compute the largest value and largest negated value per scale, one tensor ``[2, *scale shape]`` per group; a
    collective."""
    stats = [_local_stats(quantization, group) for group in bucket]
    flat = reduce_over_ranks(torch.cat([stat.flatten() for stat in stats]), dist.ReduceOp.MAX)
    parts = flat.split([stat.numel() for stat in stats])
    return [part.view_as(stat) for part, stat in zip(parts, stats, strict=True)]


def measure_global_scales(quantization: Quantization, owners: set[str] | None = None) -> dict[str, Tensor]:
    """Measure NVFP4's global scales, without writing them: one for each set of layers that serving fuses, by owner of
    the set; a collective. ``owners`` limits this to sets that contain one of these layers. A global scale is
    ``448 * 6 / absmax``, as compressed-tensors stores it, so that the largest scale of a group of elements is 448."""
    groups = [g for g in quantization.global_groups if owners is None or not owners.isdisjoint(g.members)]
    if not groups:
        return {}
    absmax = [_local_stats(quantization, group, FP8_TENSOR).amax(0) for group in groups]
    reduced = reduce_over_ranks(torch.cat(absmax), dist.ReduceOp.MAX).split([one.numel() for one in absmax])
    return {group.owner: global_scale(one, group.spec) for group, one in zip(groups, reduced, strict=True)}


def _searched(quantization: Quantization, group: ScaleGroup, stats: Tensor, *, signed: bool) -> Tensor:
    """Search the scales with the smallest squared error over all ranks; ``stats`` are the largest values of the whole
    weights. A collective."""
    spec, errors = group.spec, torch.zeros((), device=stats.device)
    for name in group.members:
        layer = quantization.layers[name]
        start, flat = local_weight(layer)
        errors = errors + partial_errors(flat, start, layer.weight_shape, stats, spec, signed=signed)
    # If weights are not partitioned every rank adds the same errors, which does not move the minimum.
    return scales_from_errors(stats, reduce_over_ranks(errors), spec, signed=signed)


def _local_stats(quantization: Quantization, group: ScaleGroup, spec: TensorSpec | None = None) -> Tensor:
    """Compute the largest value and largest negated value per scale, ``[2, *scale shape]``, over this rank's part of
    the group's weights. NaN becomes Inf, which a MAX reduction keeps."""
    total: Tensor | None = None
    for name in group.members:
        layer = quantization.layers[name]
        start, flat = local_weight(layer)
        stat = partial_stats(flat, start, layer.weight_shape, spec or group.spec)
        stat = torch.where(torch.isnan(stat), torch.inf, stat)
        total = stat if total is None else torch.maximum(total, stat)
    assert total is not None, f"the scale group of {group.owner} has no members"
    return total


# Scales gathered at a time for measuring or writing. The finest preset, NVFP4, has one scale for 16 weights.
BUCKET_ELEMENTS = 16 * 2**20


def scale_buckets(groups: Sequence[ScaleGroup]) -> Iterator[list[ScaleGroup]]:
    """Split scale groups into lists with at most ``BUCKET_ELEMENTS`` scales in total (or a single larger group), to
    bound the memory of one collective per list."""
    return batches(groups, lambda group: full_numel(group.s0), BUCKET_ELEMENTS)


def write_scales(groups: Sequence[ScaleGroup], values: Mapping[str, Tensor]) -> None:
    """Set each group's scale to ``values[group.owner]`` by writing its s0; a collective.

    Theta does not change, so ``s0 = value / exp(theta)``: theta has an fp32 master copy and moments in the optimizer,
    which this function could not change. Before training theta is 0 and s0 is the value. Raises ValueError, and writes
    nothing, if a scale or zero point is invalid or misshapen (:func:`check_values`).

    Args:
        groups: scale groups; groups whose owner has no value do not change.
        values: fp32 tensors of the group's scale shape (with zero points ``[2, *scale shape]``), on any device. Only
            the values of rank 0 are used, but every rank must pass the same owners.
    """
    check_values(groups, values)
    fill_scales(groups, values)


def fill_scales(groups: Sequence[ScaleGroup], values: Mapping[str, Tensor]) -> None:
    """Write scales as :func:`write_scales` does, from the same arguments but without checking them; a collective."""
    chosen = [group for group in groups if group.owner in values]
    for bucket in scale_buckets(chosen):
        with gathered([p for group in bucket for p in group.parameters], modifier_rank=0), torch.no_grad():
            for group in bucket:
                value = write_zero_points(group, values[group.owner].to(group.s0.device))
                group.s0.copy_(value if group.theta is None else value / group.theta.float().exp())


def write_zero_points(group: ScaleGroup, value: Tensor) -> Tensor:
    """Write the zero points ``value[1]`` into a gathered scale group, and return the scales ``value[0]``; without zero
    points return ``value``."""
    if group.zero is None:
        return value
    group.zero.copy_(value[1])
    return value[0]


def check_values(groups: Sequence[ScaleGroup], values: Mapping[str, Tensor]) -> None:
    """Check scales ``values``, by owner of the scale group; groups without a value are ignored. Raises ValueError if a
    scale is not finite and positive (for symmetric integer weights, which may have signed scales: 0 or not finite), a
    zero point is not a code, or a shape is wrong."""
    for group in groups:
        if group.owner not in values:
            continue
        name, value, shape = f"the scale of {group.owner}", values[group.owner], tuple(full_shape(group.s0))
        if group.zero is not None:
            if value.shape != (2, *shape):
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, expected scales and zero points {(2, *shape)}"
                )
            value, zero = value
            check_zero_points(name, zero, group.spec)
        check_scale(name, value, shape, group)


def check_scale(name: str, value: Tensor, shape: tuple[int, ...], group: ScaleGroup) -> None:
    """Raise ValueError, beginning with ``name``, if ``value`` cannot be a scale of the group, or if its shape is not
    ``shape``, ignoring dimensions of size 1."""
    # The same number of elements in another order of dimensions would be scales of other weights.
    if [side for side in value.shape if side != 1] != [side for side in shape if side != 1]:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape} for the layer's scheme")
    may_be_negative = group.observer is None and group.spec.dtype == "int" and group.spec.symmetric
    if problem := bad_scales(value, group.spec if may_be_negative else None):
        raise ValueError(f"{name} {problem}")


def check_zero_points(name: str, zero: Tensor, spec: TensorSpec) -> None:
    """Raise ValueError if zero points are no codes of ``spec``; ``name`` is the name of their scale for the error."""
    if problem := bad_zero_points(zero.float(), spec):
        raise ValueError(f"the zero points beside {name} {problem}")


def release_scales(engine: deepspeed.DeepSpeedEngine, quantization: Quantization) -> None:
    """Make ZeRO-3 gather scales and adapters when they are used, in one collective with weights, instead of each in its
    own collective after every step (:func:`model.zero.release`)."""
    release(
        engine,
        (
            parameter
            for module in quantization.modules.values()
            for name, parameter in module.named_parameters(recurse=False)
            if name in (*SCALE_PARAMETERS, *ADAPTER_PARAMETERS)
        ),
    )


@dataclass(frozen=True)
class WeightStatistics:
    """Statistics of one layer's weight with its current scales, for the log."""

    clipped: float
    """Fraction of the weights outside the range."""
    error: float
    """Squared quantization error over the squared weights."""
    scale: float
    """Geometric mean of the magnitudes of the scales that the forward uses."""


def weight_statistics(quantization: Quantization) -> dict[str, WeightStatistics]:
    """Compute the statistics of the layers' weights, by the layer's name; a collective. Every rank uses its own
    partition of a weight, with the scales of the forward, which are gathered. Scale groups with a packed weight into
    which an adapter is merged are left out: only the forward has the sum of the two. Empty if no group is left."""
    groups = [
        group
        for group in quantization.weight_groups
        if not any(
            (one := quantization.layers[name]).held and one.adapter and one.adapter.merges for name in group.members
        )
    ]
    if not groups:
        return {}
    names, sums, scales = [], [], []
    for bucket in scale_buckets(groups):
        members = [name for group in bucket for name in group.members]
        parameters = [p for group in bucket for p in group.parameters]
        above = [quantization.layers[name].weight_global for name in members]
        parameters += dict.fromkeys(scale for scale in above if scale is not None)
        with gathered(parameters), torch.no_grad():
            for name in members:
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


def input_scales(quantization: Quantization) -> dict[str, float]:
    """Return every stored scale of inputs, keys and values as the forward uses it, theta included, by owner of its
    scale group; NaN if it is not set yet. A collective under ZeRO-3."""
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
    sums = partial_fit(local, start, shape, scale, spec, zero).flatten(1).sum(1)
    return torch.cat([clipped.double().view(1), sums]).cpu()
