"""Everything that may be wrong with scales, looked for once and before any of them is written."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model.ranks import listed
from model.scales.arrange import ArrangedScales, ZeroPoints
from model.zero import full_shape
from quant import ScaleGroup
from quant.export import bad_zero_points
from quant.spec import TensorSpec


def check_stored(arranged: ArrangedScales, directory: Path) -> None:
    """Check the scales of a checkpoint.

    Raises:
        ValueError: the files have no scale of a layer that is quantised here, as with a wrong prefix; one without the
            global scale or the zero points that belong to it; one of another shape or not finite, or that is zero or
            negative (of integer weights: zero); zero points that are no codes, or not 0 where the scheme is symmetric.
    """
    if arranged.none_used:
        raise ValueError(
            f"{directory} has no scale of a quantised layer: expected keys like {arranged.expected}, "
            f"found {listed(arranged.unused) or 'no weight_scale and no input_scale'}"
        )
    if arranged.without_global:  # other writers spell it in another way
        raise ValueError(
            f"{directory} has no weight_global_scale beside the weight_scale of {listed(arranged.without_global)}: "
            "expected both, as compressed-tensors writes NVFP4"
        )
    for key in arranged.not_symmetric[:1]:
        raise ValueError(f"{key} is not 0, but what it belongs to has a symmetric scheme here")
    for scale in (*arranged.weights, *arranged.globals, *arranged.inputs):
        for stored in (one for of_layer in scale.layers for one in of_layer):
            _check_scale(stored.key, stored.value, stored.shape, scale.group)
            if stored.zero_points is not None:
                _check_zero_points(stored.key, stored.zero_points, scale.group.spec)


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
            _check_codes(name, zero, group.spec)
        _check_scale(name, value, shape, group)


def _check_scale(name: str, value: Tensor, shape: tuple[int, ...], group: ScaleGroup) -> None:
    """Refuse what has another shape, give or take dimensions of size 1, or cannot be a scale of the group."""
    # As many elements in another order of dimensions are scales of other weights.
    if [side for side in value.shape if side != 1] != [side for side in shape if side != 1]:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, but this scheme has {math.prod(shape)} scale(s) there, of shape "
            f"{shape}"
        )
    may_be_negative = group.observer is None and group.spec.dtype == "int"
    if not bool((torch.isfinite(value) & ((value != 0) if may_be_negative else (value > 0))).all()):
        expected = "finite and not 0" if may_be_negative else "finite and positive"
        raise ValueError(f"{name} must be {expected}, got {value.flatten()[:4].tolist()}")


def _check_zero_points(key: str, zero: ZeroPoints, spec: TensorSpec) -> None:
    """Refuse zero points of a file that are missing, of another shape or no codes; ``key`` is of the scale."""
    if zero.values is None:
        raise ValueError(f"there is {key} without {zero.key}: expected both")
    if tuple(zero.values.shape) != zero.shape:
        raise ValueError(
            f"{zero.key} is {zero.values.dtype} {tuple(zero.values.shape)}, expected {zero.shape}, or packed int32 "
            f"{zero.packed_shape}"
        )
    _check_codes(key, zero.values, spec)


def _check_codes(name: str, zero: Tensor, spec: TensorSpec) -> None:
    if problem := bad_zero_points(zero.float(), spec):
        raise ValueError(f"the zero point beside {name} {problem}")
