"""Scales into the partitions of their Parameters, and what can be one."""

import math
from collections.abc import Iterator, Mapping, Sequence

import deepspeed
import torch
from torch import Tensor

from model.batches import batches
from model.zero import full_numel, full_shape, gathered, release
from quant import ADAPTER_PARAMETERS, SCALE_PARAMETERS, Quantization, ScaleGroup
from quant.export import bad_zero_points
from quant.spec import TensorSpec

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


def check_values(groups: Sequence[ScaleGroup], values: Mapping[str, Tensor]) -> None:
    """Check scales that come from a measurement or a recipe.

    Args:
        groups: scale groups; those whose owner has no value are left out.
        values: by owner, see :func:`model.scales.write.write_scales`.

    Raises:
        ValueError: a scale that is not finite and positive (or, of integer weights, not 0), a zero point that is none
            of the codes, or another shape.
    """
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
            check_codes(name, zero, group.spec)
        check_scale(name, value, shape, group)


def check_scale(name: str, value: Tensor, shape: tuple[int, ...], group: ScaleGroup) -> None:
    """Refuse what has another shape, give or take dimensions of size 1, or cannot be a scale of the group."""
    # As many elements in another order of dimensions are scales of other weights.
    if [side for side in value.shape if side != 1] != [side for side in shape if side != 1]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but this scheme has {math.prod(shape)} scale(s) there, of shape "
            f"{shape}"
        )
    may_be_negative = group.observer is None and group.spec.dtype == "int" and group.spec.symmetric
    usable = torch.isfinite(value) & ((value != 0) if may_be_negative else (value > 0))
    if not bool(usable.all()):
        expected = "finite and not 0" if may_be_negative else "finite and positive"
        raise ValueError(f"{name} must be {expected}, got {value[~usable].flatten()[:4].tolist()}")


def check_codes(name: str, zero: Tensor, spec: TensorSpec) -> None:
    if problem := bad_zero_points(zero.float(), spec):
        raise ValueError(f"the zero point beside {name} {problem}")


def release_scales(engine: deepspeed.DeepSpeedEngine, quantization: Quantization) -> None:
    """Let ZeRO-3 gather scales and adapters on the way, with the weights that come next, not each after every step."""
    release(
        engine,
        (
            parameter
            for module in quantization.modules.values()
            for name, parameter in module.named_parameters(recurse=False)
            if name in (*SCALE_PARAMETERS, *ADAPTER_PARAMETERS)
        ),
    )
