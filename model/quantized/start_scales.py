"""Train the original weights with the scales, and optionally in the rounding bins, of their quantized checkpoint.

``model.path`` is the original, and ``quant.start`` (from GPTQ, AWQ, AutoRound, ...) has codes of its weights, rounded
by some good method. After checking that the codes belong to these weights (:mod:`model.scales.codes`), the scales are
loaded as for a quantized ``model.path`` (:mod:`model.quantized.scales`). Original weights in the rounding bins of the
file's codes (:mod:`quant.scale`) are fake-quantized to the file's weights.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.checkpoint.safetensors import CheckpointError, Reader
from model.quantized.checkpoint import read_checkpoint
from model.quantized.narrow_range import check_codes
from model.quantized.scales import take_scales
from model.quantized.tensor import QuantizedTensor, row_chunks
from model.ranks import errors_on_all_ranks, listed, raise_everywhere, reduce_over_ranks, say
from model.scales.codes import Values, add_products, count_of_sums, other_weights
from model.scales.loading import ScaleReport
from model.zero import forget_secondary_copies, is_partitioned, local_data, local_range
from quant import Quantization, Quantizer, QuantLayer, kernels
from quant.linear import LinearPart, linears_of
from quant.reference import inside_range
from quant.scale import snap_to_codes

_MOST = 5  # Linears that an error describes

ReadLinears = dict[str, list[tuple[LinearPart, QuantizedTensor]]]  # by layer


class _Chunk(NamedTuple):
    """Some rows of a Linear, fp32 or in the model's dtype.

    Attributes:
        first: first row.
        mine: this rank's elements of the layer's weight in these rows, a flat view.
        at: their range in the flattened rows.
        codes, quantizer: from the file, ``[rows, in]``.
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
    """Fill the scales of ``model``, which has its original weights, from its quantized checkpoint; a collective, before
    ``deepspeed.initialize``.

    Args:
        model, quantization: the quantized model; the weights are loaded.
        directory: the quantized checkpoint.
        inside: replace each weight that would be rounded to another code by its code's value.
        initial_input_scale, inputs_calibrated_later: as in :func:`model.scales.load_scales`.

    Raises:
        RankError: on every rank: a layer without codes in the files, or of another shape or scheme; codes of other
            weights; or ``inside``, if layers that share a scale have several in the files.
    """
    with errors_on_all_ranks(OSError, ValueError):
        checkpoint = read_checkpoint(Path(directory), model)
        if checkpoint.problems:
            raise ValueError("\n".join(checkpoint.problems[:_MOST]))
        linears = _linears(model, quantization, checkpoint.coded, directory)
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
                f"quant.snap_to_codes: true, expected false: {listed(report.merged, _MOST)} and the layers that are "
                f"served with them have several scales in {directory}, of which one is taken, so that codes change"
            )
        moved, whole = _move(quantization, linears)
        forget_secondary_copies(model)
        say(f"start: {moved / max(1, whole):.2%} of the weights were moved into the cells of the codes")
    return report


def _linears(
    model: PreTrainedModel, quantization: Quantization, coded: dict[str, QuantizedTensor], directory: str | Path
) -> ReadLinears:
    """Pair the Linears of every quantized layer with their codes.

    Raises:
        ValueError: codes are missing, of another shape, or quantized differently.
    """
    found: ReadLinears = {}
    for name, layer in quantization.layers.items():
        found[name] = []
        for part in linears_of(name, layer):
            disk, shape, spec = module_name_on_disk(model, part.name), _shape(part), layer.scheme.weights
            linear = coded.get(disk)
            if linear is None:
                raise ValueError(f"quant.start: {directory} has no codes of {disk}, which is quantized here")
            if linear.shape != shape:
                raise ValueError(
                    f"quant.start: {linear.file}: {disk} has the shape {list(linear.shape)}, expected {list(shape)} as "
                    "in model.path"
                )
            if not spec.takes(linear.scheme.weights):
                raise ValueError(
                    f"quant.start: {linear.file}: {disk} is quantized as {linear.scheme.weights}, but scheme "
                    f"{layer.scheme.name!r} has {spec}: set quant.scheme to source"
                )
            found[name].append((part, linear))
    return found


def _shape(part: LinearPart) -> tuple[int, int]:
    return part.out_features, part.in_features


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
    """Reject codes that do not belong to the loaded weights; a collective."""
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
                failure = str(error)
            if is_partitioned(layer.weight):  # else every rank has the whole sums
                sums = reduce_over_ranks(sums)
            for (_, linear), own in zip(parts, sums.split(sizes), strict=True):
                problem = other_weights(own, layer.scheme.weights)
                problems += [f"{linear.codes.key}: {problem}"] if problem is not None else []
    raise_everywhere(failure)
    if problems:
        more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        head = f"quant.start: {directory} is not a quantized form of model.path"
        raise_everywhere("\n".join([head, *problems[:_MOST], *more]))


def _products(layer: QuantLayer, part: LinearPart, linear: QuantizedTensor, reader: Reader) -> Tensor:
    """Compute this rank's part of the sums of :func:`model.scales.codes.local_products`."""
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
    """Move this rank's weights into their rounding bins; returns moved and total counts of all ranks. A collective."""
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
