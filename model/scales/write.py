"""Scales into the partitions of their Parameters."""

from collections.abc import Iterator, Mapping, Sequence

import deepspeed
import torch
from torch import Tensor

from model.batches import batches
from model.scales.check import check_values
from model.zero import full_numel, gathered, release
from quant import SCALE_PARAMETERS, Quantization, ScaleGroup

# Scales held at full size at a time while measuring or writing. Group scales are 1/32 of the weights' number or fewer.
BUCKET_ELEMENTS = 16 * 2**20


def scale_buckets(groups: Sequence[ScaleGroup]) -> Iterator[list[ScaleGroup]]:
    """Consecutive groups of at most ``BUCKET_ELEMENTS`` scales: one collective each, and bounded memory."""
    return batches(groups, lambda group: full_numel(group.s0), BUCKET_ELEMENTS)


def write_scales(groups: Sequence[ScaleGroup], values: Mapping[str, Tensor]) -> None:
    """Make each group's scale ``values[group.owner]`` by writing its s0; a collective under ZeRO-3.

    Theta is left as it is and s0 takes the rest, ``s0 = value / exp(theta)``: theta has an fp32 master copy and moments
    in the optimizer, which a write here would not reach. Before training theta is 0 and s0 is the value itself.

    Args:
        groups: scale groups; those whose owner has no value are left as they are.
        values: fp32 tensors of the group's scale shape (with zero points ``[2, *scale shape]``), on any device. Only
            rank 0's are used, but every rank must pass the same owners.

    Raises:
        ValueError: a scale that is not finite and positive (or, of integer weights, not 0), a zero point that is none
            of the codes, or another shape; before anything is written.
    """
    check_values(groups, values)
    fill_scales(groups, values)


def fill_scales(groups: Sequence[ScaleGroup], values: Mapping[str, Tensor]) -> None:
    """:func:`write_scales` of values that were checked."""
    chosen = [group for group in groups if group.owner in values]
    for bucket in scale_buckets(chosen):
        with gathered([p for group in bucket for p in group.parameters], modifier_rank=0), torch.no_grad():
            for group in bucket:
                value = write_zero_points(group, values[group.owner].to(group.s0.device))
                group.s0.copy_(value if group.theta is None else value / group.theta.float().exp())


def write_zero_points(group: ScaleGroup, value: Tensor) -> Tensor:
    """Write the zero points of a group that has them, which is gathered; returns the scales beside them."""
    if group.zero is None:
        return value
    group.zero.copy_(value[1])
    return value[0]


def release_scales(engine: deepspeed.DeepSpeedEngine, quantization: Quantization) -> None:
    """Let ZeRO-3 gather scales on the way, beside the weights that come next, not each by itself after every step."""
    release(
        engine,
        (
            parameter
            for module in quantization.modules.values()
            for name, parameter in module.named_parameters(recurse=False)
            if name in SCALE_PARAMETERS
        ),
    )
