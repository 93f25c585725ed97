"""Load the initial scales of a model from the quantized checkpoint that its weights were read from.

The weight scales need no check: the weights are the file's codes times its scales, and :mod:`model.quantized.tensor`
has checked that the weights are quantized to the same codes. Scales finer than one per weight are read directly into
each rank's own range; the few scales per tensor are arranged as for a PTQ checkpoint (:mod:`model.scales.grouping`).

The original weights can also be trained with the scales of a quantized checkpoint: ``model.path`` is then the original,
and ``quant.start`` the quantized checkpoint (from GPTQ, AWQ, AutoRound, ...). Optionally, the weights are moved into
the rounding bins of its codes. After checking that the codes belong to these weights (:mod:`model.scales.codes`), the
scales are loaded as for a quantized ``model.path``. Original weights in the rounding bins of the file's codes
(:mod:`quant.scale`) are fake-quantized to the file's weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import CheckpointError, Reader
from model.quantized.checkpoint import SourceCheckpoint, read_checkpoint
from model.quantized.narrow_range import check_codes, check_not_clipped
from model.quantized.tensor import QuantizedTensor, read_positive, row_chunks
from model.ranks import errors_on_all_ranks, listed, raise_everywhere, raise_problems, reduce_over_ranks, say, words_of
from model.scales.codes import Values, add_products, count_of_sums, other_weights
from model.scales.grouping import (
    GLOBAL_SCALE,
    INPUT_GLOBAL_SCALE,
    INPUT_SCALE,
    WEIGHT_SCALE,
    ArrangedScales,
    StoredScales,
    arrange,
    cache_keys,
    input_ending,
)
from model.scales.in_place import check_scale
from model.scales.loading import ScaleReport, complete, write_all
from model.zero import forget_secondary_copies, is_partitioned, local_data, local_range
from quant import Quantization, Quantizer, QuantLayer, TensorSpec, kernels
from quant.linear import LinearPart, linears_of
from quant.reference import inside_range
from quant.scale import snap_to_codes


def take_scales(
    model: PreTrainedModel,
    quantization: Quantization,
    directory: str | Path,
    checkpoint: SourceCheckpoint | None = None,
    *,
    initial_input_scale: float | None = None,
    inputs_calibrated_later: bool = False,
    decoded: bool = True,
) -> ScaleReport:
    """Fill the scales of ``model`` from the quantized checkpoint that its weights were read from; a collective.

    Layers that share a scale get the scales in the files if all their Linears are quantized in the files with the
    model's scheme. Otherwise weight scales are measured from the weights. The report says which scales came from where.

    Args:
        model, quantization: the quantized model; the weights are loaded.
        directory, checkpoint: the checkpoint, and its headers; None reads them.
        initial_input_scale: value of the input scales that are in no file; None if there is none.
        inputs_calibrated_later: True if calibration will measure the input scales that are in no file.
        decoded: True if the model's weights are the decoded codes; False if they are the original weights, which only
            get the scales.

    Raises:
        RankError: on every rank: a scale is invalid, an input scale is in no file and is neither calibrated nor set, a
            packed weight would get other scales than in the files, or codes are outside of their layer's narrow range.
    """
    with errors_on_all_ranks(OSError, ValueError):
        checkpoint = checkpoint or read_checkpoint(Path(directory), model)
        taken = _taken(model, quantization, checkpoint.coded)
        arranged = arrange(model, quantization, read_small_scales(model, quantization, checkpoint, taken))
        merged = _merged(arranged)
        for scale in arranged.inputs:
            for one in scale.stored:
                check_scale(one.key, one.value, one.shape, scale.group)
        _check_packed(quantization, taken, merged)
        missing_inputs = [scale.group.owner for scale in arranged.inputs if not scale.layers]
        if missing_inputs and initial_input_scale is None and not inputs_calibrated_later:
            raise ValueError(
                f"{directory} has no input scale for {listed(missing_inputs)}: set quant.calibration_batches to "
                "measure them in place, or quant.initial_input_scale"
            )
    with errors_on_all_ranks(OSError, CheckpointError):
        _fill_fine(quantization, taken)
    forget_secondary_copies(model)
    fine = [group.owner for group in quantization.weight_groups if group.owner in taken and _is_fine(group.spec)]
    values, report = complete(quantization, arranged, initial_input_scale, fine)
    write_all(quantization, values)
    if decoded:
        check_not_clipped(quantization, taken)
    integers = [one for linears in taken.values() for one in linears if one.scheme.weights.scale_format == "model"]
    digits = torch.finfo(model.dtype).eps
    kinds = {one.scale.dtype for one in integers}
    rounded = next((str(kind) for kind in kinds if kind is not None and torch.finfo(kind).eps < digits), None)
    return replace(report, merged=merged, rounded=rounded)


def _taken(
    model: PreTrainedModel, quantization: Quantization, coded: Mapping[str, QuantizedTensor]
) -> dict[str, list[QuantizedTensor]]:
    """Return, by owner, the Linears on disk of the scale groups of weights whose Linears are all quantized in the files
    with the model's scheme; of groups under one global scale all or none."""
    found = {}
    for group in quantization.weight_groups:
        parts = [part for name in group.members for part in linears_of(name, quantization.layers[name])]
        linears = [coded.get(module_name_on_disk(model, part.name)) for part in parts]
        fitting = [one for one in linears if one is not None and group.spec.takes(one.scheme.weights)]
        if len(fitting) == len(parts):
            found[group.owner] = fitting
    for above in quantization.global_groups:  # groups under one global scale: all of them or none
        if any(name not in found for name in above.members):
            for name in above.members:
                found.pop(name, None)
    return found


def _check_packed(quantization: Quantization, taken: Iterable[str], merged: Sequence[str]) -> None:
    """Raise ValueError for packed weights that would not get the file's scales, and so decode to other weights."""
    layers, groups = quantization.layers, (*quantization.weight_groups, *quantization.global_groups)
    weights = {group.owner for group in quantization.weight_groups}
    other = [group for group in groups if group.owner in merged or group.owner in weights - {*taken}]
    if names := [name for group in other for name in group.members if layers[name].held is not None]:
        raise ValueError(
            f"adapter.base: quantized, but {listed(names, 3)} cannot use the checkpoint's scales: these layers have "
            "none, or several where the model has one scale for all; set adapter.base to weights"
        )


def _merged(arranged: ArrangedScales) -> list[str]:
    """List the owners of scale groups of weights that have several scales in the files but one scale in the model."""
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


def _is_fine(spec: TensorSpec) -> bool:
    """Return True if the scales are finer than one per weight, so that no two Linears share a scale."""
    return spec.granularity != "tensor"


def _fill_fine(quantization: Quantization, taken: Mapping[str, Sequence[QuantizedTensor]]) -> None:
    """Write this rank's part of the scales per row, group or block of the groups in ``taken``, and of zero points."""
    with Reader() as reader, torch.no_grad():
        for group in quantization.weight_groups:
            if group.owner in taken and _is_fine(group.spec):
                _fill_ranges(group.s0, taken[group.owner], reader, zero=False)
                if group.zero is not None:
                    _fill_ranges(group.zero, taken[group.owner], reader, zero=True)


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


def read_small_scales(
    model: PreTrainedModel,
    quantization: Quantization,
    checkpoint: SourceCheckpoint,
    taken: Mapping[str, Sequence[QuantizedTensor]],
) -> StoredScales:
    """Read the scales per tensor (of weights, inputs, keys and values) and the weights' global scales. ``taken`` has
    the weights whose scales are read: by owner of the scale group, its quantized Linears in ``checkpoint``."""
    stored = StoredScales({}, {}, {}, {})
    with Reader() as reader:
        for group in quantization.weight_groups:
            for linear in taken.get(group.owner, ()):
                if not _is_fine(group.spec):
                    stored.scales[linear.name + WEIGHT_SCALE] = linear.scales(reader, 0, 1)
                if linear.above is not None:
                    stored.scales[linear.name + GLOBAL_SCALE] = linear.read_above(reader)
        for key in _input_keys(model, quantization, checkpoint):
            if key.endswith(INPUT_GLOBAL_SCALE) and key not in checkpoint.beside:
                name = key.removesuffix(INPUT_GLOBAL_SCALE)  # as ModelOpt has it
                if (tensor := checkpoint.beside.get(name + INPUT_SCALE)) is not None:
                    stored.scales[key] = 1 / read_positive(tensor, reader)
            if (tensor := checkpoint.beside.get(key)) is not None and tensor.dtype is not None:
                stored.scales[key] = torch.empty(tensor.shape, dtype=torch.float32)
                reader.read(tensor, 0, stored.scales[key].view(-1))
    return stored


def _input_keys(model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint) -> Iterator[str]:
    """Yield possible keys of scales of inputs, keys and values that are quantized in the files as in the model."""
    coded = checkpoint.coded
    for name, layer in quantization.layers.items():
        for part in linears_of(name, layer) if layer.scheme.stored_input is not None else ():
            disk = module_name_on_disk(model, part.name)
            if disk in coded and coded[disk].scheme.stored_input == layer.scheme.stored_input:
                yield disk + input_ending(layer.scheme)
    for name, cache in quantization.caches.items():
        if cache.spec == (checkpoint.kv_cache or checkpoint.implied_cache):
            yield from cache_keys(model, name)


_MOST = 5  # Linears that an error describes

ReadLinears = dict[str, list[tuple[LinearPart, QuantizedTensor]]]  # by layer


class _Chunk(NamedTuple):
    """Some rows of a Linear, of which this rank has elements.

    Attributes:
        first: first row.
        mine: this rank's elements of the layer's weight in these rows, a flat view.
        at: range of these elements in the flattened rows.
        codes, quantizer: codes ``[rows, in]`` in the file, and their scales.
        decoded: values of the codes, in the model's dtype.
    """

    first: int
    mine: Tensor
    at: slice
    codes: Tensor
    quantizer: Quantizer
    decoded: Tensor


def take_start(
    model: PreTrainedModel,
    quantization: Quantization,
    directory: str | Path,
    *,
    inside: bool,
    initial_input_scale: float | None = None,
    inputs_calibrated_later: bool = False,
) -> ScaleReport:
    """Fill the scales of ``model``, which has the original weights, from a quantized checkpoint of the same model
    (``quant.start``); a collective, before ``deepspeed.initialize``.

    Args:
        model, quantization: the quantized model; the weights are loaded.
        directory: the quantized checkpoint.
        inside: replace each original weight that would round to another code than the file's by the value of the
            file's code; False keeps all weights.
        initial_input_scale, inputs_calibrated_later: as in :func:`take_scales`.

    Raises:
        RankError: on every rank: as :func:`take_scales`; or a layer has no codes in the files, or codes of another
            shape, scheme or weight; or with ``inside``, layers that share a scale have several scales in the files.
    """
    linears = check_start(model, quantization, directory)
    _check_codes(quantization, linears, Path(directory))
    report = take_scales(
        model,
        quantization,
        directory,
        initial_input_scale=initial_input_scale,
        inputs_calibrated_later=inputs_calibrated_later,
        decoded=False,
    )
    if inside:
        if report.merged:
            raise_everywhere(
                f"quant.snap_to_codes: true, expected false: {listed(report.merged, _MOST)} and the layers fused with "
                f"them in serving have different scales in {directory}, and share one here, so their codes change"
            )
        moved, whole = _move(quantization, linears)
        forget_secondary_copies(model)
        say(f"start: {moved / max(1, whole):.2%} of the weights were moved into the rounding bins of the codes")
    return report


def check_start(model: PreTrainedModel, quantization: Quantization, directory: str | Path) -> ReadLinears:
    """Find the codes of every quantized layer in the headers of a quantized checkpoint; a collective. Returns, by
    layer, its Linears with their codes. Raises RankError if a Linear has no codes in the files, or codes of another
    shape or scheme, or if a file is damaged."""
    found: ReadLinears = {name: [] for name in quantization.layers}
    with errors_on_all_ranks(OSError, ValueError):
        checkpoint = read_checkpoint(Path(directory), model)
        if checkpoint.problems:
            raise ValueError("\n".join(checkpoint.problems[:_MOST]))
        coded = checkpoint.coded
        parts = [(name, part) for name, layer in quantization.layers.items() for part in linears_of(name, layer)]
        for name, part in parts:
            disk, scheme = module_name_on_disk(model, part.name), quantization.layers[name].scheme
            linear, shape = coded.get(disk), (part.out_features, part.in_features)
            if linear is None:
                raise ValueError(
                    f"quant.start: {directory} has no codes of {disk}, which the recipe quantizes: exempt it "
                    "(quant.exempt_more), or set quant.scheme to source"
                )
            if linear.shape != shape:
                raise ValueError(
                    f"quant.start: {linear.file}: {disk} has the shape {list(linear.shape)}, expected {list(shape)} as "
                    "in model.path: name a quantized form of that checkpoint"
                )
            if not scheme.weights.takes(linear.scheme.weights):
                raise ValueError(
                    f"quant.start: {linear.file}: {disk} is quantized as {linear.scheme.weights}, but scheme "
                    f"{scheme.name!r} has {scheme.weights}: set quant.scheme to source"
                )
            found[name].append((part, linear))
    return found


def _chunks(layer: QuantLayer, part: LinearPart, linear: QuantizedTensor, reader: Reader) -> Iterator[_Chunk]:
    """Yield this rank's part of a Linear, some rows at a time."""
    (start, stop), local, (_, size) = local_range(layer.weight), local_data(layer.weight), linear.shape
    begin = ((part.expert or 0) * layer.out_features + part.first_row) * size
    first, last = max(start - begin, 0), min(stop - begin, linear.shape[0] * size)
    for rows in row_chunks(first, last, size):
        codes, quantizer = linear.rows(reader, rows, layer.weight.dtype, local.device)
        check_codes(codes, layer.scheme.weights, linear)
        quantizer = quantizer._replace(spec=replace(quantizer.spec, narrow=layer.scheme.weights.narrow))
        low, high = max(first, rows.start * size), min(last, rows.stop * size)
        mine = local.view(-1)[begin + low - start : begin + high - start]
        at = slice(low - rows.start * size, high - rows.start * size)
        yield _Chunk(rows.start, mine, at, codes, quantizer, kernels.dequantize(codes, quantizer))


def _check_codes(quantization: Quantization, linears: ReadLinears, directory: Path) -> None:
    """Raise RankError on every rank if codes do not belong to the loaded weights or cannot be read; a collective."""
    problems: list[str] = []
    failure: str | None = None
    with Reader() as reader, torch.no_grad():
        for name, parts in linears.items():
            layer = quantization.layers[name]
            sizes = [count_of_sums(part, layer.scheme.weights) for part, _ in parts]
            sums = torch.zeros(sum(sizes), dtype=torch.float64)
            try:
                if failure is None:
                    sums = torch.cat([_products(layer, *each, reader) for each in parts])
            except (OSError, CheckpointError) as error:  # on this rank only: the others are about to reduce
                failure = words_of(error)
            if is_partitioned(layer.weight):  # else every rank has the whole sums
                sums = reduce_over_ranks(sums)
            for (_, linear), own in zip(parts, sums.split(sizes), strict=True):
                problem = other_weights(own, layer.scheme.weights)
                problems += [f"{linear.codes.key}: {problem}"] if problem is not None else []
    raise_everywhere(failure)
    raise_problems(f"quant.start: {directory} is not a quantized form of model.path", problems)


def _products(layer: QuantLayer, part: LinearPart, linear: QuantizedTensor, reader: Reader) -> Tensor:
    """Compute this rank's sums that show whether codes belong to the loaded weight
    (:func:`model.scales.codes.local_products`)."""
    spec = layer.scheme.weights
    sums = torch.zeros(count_of_sums(part, spec), dtype=torch.float64, device=local_data(layer.weight).device)
    for chunk in _chunks(layer, part, linear, reader):
        weight = torch.zeros_like(chunk.decoded)
        weight.view(-1)[chunk.at] = chunk.mine
        codes, _ = kernels.quantize(weight, chunk.quantizer)
        rounded, scale = kernels.dequantize(codes, chunk.quantizer), kernels.effective_scale(chunk.quantizer)
        fits = inside_range(weight, scale, chunk.quantizer.spec, chunk.quantizer.scale.zero)
        values = Values(weight.float(), rounded.float(), chunk.decoded.float(), fits)
        add_products(sums, part, spec, chunk.first, chunk.at, values)
    return sums.cpu()


def _move(quantization: Quantization, linears: ReadLinears) -> tuple[int, int]:
    """Move this rank's weights into the rounding bins of their codes; returns the numbers of moved and of all weights,
    over all ranks. A collective."""
    counts = torch.zeros(2, dtype=torch.int64)
    with Reader() as reader, torch.no_grad(), errors_on_all_ranks(OSError, CheckpointError):
        for name, parts in linears.items():
            layer = quantization.layers[name]
            for chunk in (chunk for each in parts for chunk in _chunks(layer, *each, reader)):
                weight = chunk.decoded.clone()
                weight.view(-1)[chunk.at] = chunk.mine
                inside = snap_to_codes(weight, chunk.decoded, chunk.codes, chunk.quantizer).view(-1)[chunk.at]
                counts += torch.tensor([int((inside != chunk.mine).sum()), inside.numel()])
                chunk.mine.copy_(inside)
    if any(is_partitioned(layer.weight) for layer in quantization.layers.values()):
        counts = reduce_over_ranks(counts)
    return int(counts[0]), int(counts[1])
