"""Load the first scales of a model from the quantized checkpoint that its weights were read from.

No check is needed here: the weights are these codes times these scales, and :mod:`model.quantized.tensor` has checked
that the codes come back. Scales finer than one per weight are read directly into each rank's own range; the few others
are arranged as for a PTQ checkpoint (:mod:`model.scales.grouping`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import CheckpointError, Reader
from model.quantized.checkpoint import SourceCheckpoint, read_checkpoint
from model.quantized.narrow_range import check_weights
from model.quantized.tensor import QuantizedTensor
from model.ranks import errors_on_all_ranks, listed
from model.scales.grouping import ArrangedScales, GroupScale, arrange, scales_per_head
from model.scales.in_place import check_scale, check_values, fill_scales, measure_global_scales, measure_weight_scales
from model.scales.loading import ScaleReport, given_scales
from model.scales.read import GLOBAL_SCALE, WEIGHT_SCALE, StoredScales, cache_keys, input_ending
from model.zero import forget_secondary_copies, local_data, local_range
from quant import Quantization, ScaleGroup, TensorSpec
from quant.linear import linears_of


def take_scales(
    model: PreTrainedModel,
    quantization: Quantization,
    directory: str | Path,
    *,
    initial_input_scale: float | None = None,
    inputs_calibrated_later: bool = False,
    decoded: bool = True,
) -> ScaleReport:
    """Fill the scales of ``model`` from the quantized checkpoint that its weights were read from; a collective.

    A layer takes the scales of its Linears if all of them are quantized in the files as in the layer. Other scales are
    measured from the weights, which are exact either way.

    Args:
        model, quantization: the quantized model; the weights are loaded.
        directory: the checkpoint.
        initial_input_scale, inputs_calibrated_later: as in :func:`model.scales.load_scales`.
        decoded: True if the weights are the decoded codes, False if other weights only take the scales.

    Raises:
        RankError: on every rank: an invalid scale, missing input scales without a way to get them, or codes outside of
            the narrow range of their layer.
    """
    with errors_on_all_ranks(OSError, ValueError):
        checkpoint = read_checkpoint(Path(directory), model)
        taken = _taken(model, quantization, checkpoint.coded)
        stored = _small_scales(model, quantization, checkpoint, taken)
        arranged = arrange(model, quantization, stored)
        for scale in arranged.inputs:
            for one in (one for of_layer in scale.layers for one in of_layer):
                check_scale(one.key, one.value, one.shape, scale.group)
        _check_packed(quantization, taken, _merged(arranged))
        missing_inputs = [scale.group.owner for scale in arranged.inputs if not scale.layers]
        if missing_inputs and initial_input_scale is None and not inputs_calibrated_later:
            raise ValueError(
                f"{directory} has no input scale for {listed(missing_inputs)}. Set quant.calibration_batches to "
                "measure them in place, or quant.initial_input_scale"
            )
    with errors_on_all_ranks(OSError, CheckpointError):
        _fill_fine(quantization, taken)
    forget_secondary_copies(model)
    report = _fill_others(quantization, arranged, set(taken), initial_input_scale)
    if decoded:
        check_weights(quantization, taken)
    linears = [one for members in taken.values() for of_layer in members.values() for one in of_layer]
    per_head = scales_per_head(arranged)
    return replace(report, merged=_merged(arranged), rounded=_rounded(linears, model.dtype), per_head=per_head)


def _taken(
    model: PreTrainedModel, quantization: Quantization, coded: Mapping[str, QuantizedTensor]
) -> dict[str, dict[str, list[QuantizedTensor]]]:
    """Linears on disk of each member of a group, by the owner of the group, for groups of weights whose every Linear is
    quantized in the files as here."""
    found = {}
    for group in quantization.weight_groups:
        members = {
            name: [
                coded.get(module_name_on_disk(model, part.name)) for part in linears_of(name, quantization.layers[name])
            ]
            for name in group.members
        }
        fitting = {
            name: [one for one in linears if one is not None and group.spec.takes(one.scheme.weights)]
            for name, linears in members.items()
        }
        if all(len(fitting[name]) == len(linears) for name, linears in members.items()):
            found[group.owner] = fitting
    for above in quantization.global_groups:  # groups under one global scale: all of them or none
        if any(name not in found for name in above.members):
            for name in above.members:
                found.pop(name, None)
    return found


def _check_packed(quantization: Quantization, taken: Iterable[str], merged: Sequence[str]) -> None:
    """Reject scales other than the file's for packed weights: their codes would decode to other weights."""
    layers, groups = quantization.layers, (*quantization.weight_groups, *quantization.global_groups)
    weights = {group.owner for group in quantization.weight_groups}
    other = [group for group in groups if group.owner in merged or group.owner in weights - {*taken}]
    if names := [name for group in other for name in group.members if layers[name].held is not None]:
        raise ValueError(
            f"adapter.base: quantized: {listed(names, 3)} do not have the scales of the checkpoint here, which "
            "are several "
            "where there is one, or are missing: set adapter.base to weights"
        )


def _merged(arranged: ArrangedScales) -> list[str]:
    """Owners of the groups of weights that get one scale in place of several."""
    return [
        scale.group.owner
        for scale in (*arranged.weights, *arranged.globals)
        # Experts of a stack have a scale each, which gate and up of an expert share.
        if any(
            len({one.value.item() for of_layer in scale.layers for one in of_layer[first : first + together]}) > 1
            for together in [scale.projections or 1]
            for first in range(0, max(map(len, scale.layers), default=0), together)
        )
    ]


def _rounded(linears: Iterable[QuantizedTensor], dtype: torch.dtype) -> str | None:
    """Dtype of the files' scales of integers that ``dtype`` cannot represent, if any."""
    kinds = {one.scale.dtype for one in linears if one.scheme.weights.scale_format == "model"}
    digits = torch.finfo(dtype).eps
    return next((str(kind) for kind in kinds if kind is not None and torch.finfo(kind).eps < digits), None)


def _is_fine(spec: TensorSpec) -> bool:
    """Return True if a weight has several scales; then no two Linears share one."""
    return spec.granularity != "tensor"


def _fill_fine(quantization: Quantization, taken: Mapping[str, Mapping[str, Sequence[QuantizedTensor]]]) -> None:
    """Write every scale of a row, group or block, and the zero points, into this rank's range."""
    with Reader() as reader, torch.no_grad():
        for group in quantization.weight_groups:
            if group.owner in taken and _is_fine(group.spec):
                (linears,) = taken[group.owner].values()
                _fill_ranges(group.s0, linears, reader, zero=False)
                if group.zero is not None:
                    _fill_ranges(group.zero, linears, reader, zero=True)


def _fill_ranges(target: Tensor, linears: Sequence[QuantizedTensor], reader: Reader, *, zero: bool) -> None:
    """Write this rank's range of the scales (or zero points) of consecutive Linears."""
    (start, stop), local = local_range(target), local_data(target)
    begin = 0
    for linear in linears:
        rows, across = linear.scheme.weights.scale_shape(linear.shape)
        low, high = max(start, begin), min(stop, begin + rows * across)
        if low < high:
            into = local[low - start : high - start]
            if zero:
                first, last = (low - begin) // across, -(-(high - begin) // across)
                values = linear.zero_of_rows(reader, slice(first, last))
                assert values is not None
                into.copy_(values.view(-1)[low - begin - first * across :][: high - low])
            else:
                into.copy_(linear.scales(reader, low - begin, high - low))
        begin += rows * across


def _small_scales(
    model: PreTrainedModel,
    quantization: Quantization,
    checkpoint: SourceCheckpoint,
    taken: Mapping[str, Mapping[str, Sequence[QuantizedTensor]]],
) -> StoredScales:
    """Read the chosen scales of whole weights, global scales, and those of inputs, keys and values."""
    stored = StoredScales({}, {}, {}, {})
    with Reader() as reader:
        for group in quantization.weight_groups:
            for linear in (one for linears in taken.get(group.owner, {}).values() for one in linears):
                if not _is_fine(group.spec):
                    stored.scales[linear.name + WEIGHT_SCALE] = linear.scales(reader, 0, 1)
                if linear.above is not None:
                    stored.scales[linear.name + GLOBAL_SCALE] = linear.read_above(reader)
        for key in _input_keys(model, quantization, checkpoint):
            if (tensor := checkpoint.beside.get(key)) is not None and tensor.dtype is not None:
                stored.scales[key] = torch.empty(tensor.shape, dtype=torch.float32)
                reader.read(tensor, 0, stored.scales[key].view(-1))
    return stored


def _input_keys(model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint) -> Iterator[str]:
    """Yield possible keys of scales of inputs, keys and values that are quantized in the files as here."""
    coded = checkpoint.coded
    for name, layer in quantization.layers.items():
        for part in linears_of(name, layer) if layer.scheme.stored_input is not None else ():
            disk = module_name_on_disk(model, part.name)
            if disk in coded and coded[disk].scheme.stored_input == layer.scheme.stored_input:
                yield disk + input_ending(layer.scheme)
    for name, cache in quantization.caches.items():
        if cache.spec == checkpoint.kv_cache:
            yield from cache_keys(model, name)


def _fill_others(
    quantization: Quantization, arranged: ArrangedScales, taken: set[str], initial_input_scale: float | None
) -> ScaleReport:
    """Write the scales that are not fine, and measure those missing in the files; a collective."""
    fine = {group.owner for group in quantization.weight_groups if group.owner in taken and _is_fine(group.spec)}
    measured = {group.owner for group in quantization.weight_groups} - taken
    without_global = {scale.group.owner for scale in arranged.globals if not scale.layers}
    inputs: dict[str, Tensor] = {}
    if initial_input_scale is not None:
        inputs = given_scales([scale.group for scale in arranged.inputs if not scale.layers], initial_input_scale)
    kinds: Iterator[tuple[list[ScaleGroup], list[GroupScale], dict[str, Tensor]]] = iter(
        (
            (
                quantization.weight_groups,
                [scale for scale in arranged.weights if scale.group.owner not in fine],
                measure_weight_scales(quantization, measured) if measured else {},
            ),
            (
                quantization.global_groups,
                arranged.globals,
                measure_global_scales(quantization, without_global) if without_global else {},
            ),
            (quantization.input_groups, arranged.inputs, inputs),
        )
    )
    for groups, read, other in kinds:
        values = {scale.group.owner: scale.value() for scale in read if scale.layers} | other
        with errors_on_all_ranks(ValueError):
            check_values(groups, values)
        fill_scales(groups, values)
    return ScaleReport(
        weights_loaded=[group.owner for group in quantization.weight_groups if group.owner in taken],
        weights_measured=[group.owner for group in quantization.weight_groups if group.owner not in taken],
        inputs_loaded=[scale.group.owner for scale in arranged.inputs if scale.layers],
        inputs_initial=list(inputs),
        inputs_missing=[
            scale.group.owner for scale in arranged.inputs if not scale.layers and scale.group.owner not in inputs
        ],
        unused=[],
    )
