"""Compare the loaded weights with the codes in the checkpoint from which scales are read: if the scales belong to these
weights, codes times scales equal the weights up to rounding.

Each rank decodes its own range of a weight, a few rows at a time, and sums products (:func:`local_products`). From
their sums over all ranks :func:`other_weights` compares the distance between the decoded and the loaded weight with two
other distances: the error of rounding with the same scales, and the distance of the codes with the scales that fit them
best.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from model.checkpoint.safetensors import FLOATS, DiskTensor, Reader
from model.quantized.tensor import read_codes, row_chunks
from quant.formats.compressed_tensors import scales_of_rows
from quant.formats.packing import packed_columns
from quant.linear import LinearPart
from quant.reference import dequantize, fake_quant, inside_range
from quant.spec import TensorSpec

# Largest squared distance between the decoded and the loaded weight, relative to the squared error of rounding with the
# same scales; GPTQ's codes have up to 3.6 at 3 bits. At 2 bits, where rounding alone is an eighth of the squared
# weights, codes of ``quant.init: blockwise`` have up to 4.3 (SmolLM2-135M). Up to TRAINED times the squared weights is
# accepted too, as for weights that training changed by 30% of their size. More than FARTHEST times the squares is never
# accepted: codes of other weights have about 2.
FAR, FAR_AT_2_BITS, TRAINED, FARTHEST = 4.0, 6.0, 0.12, 1.5
# Largest squared distance, relative to the squared distance with the scales that fit the codes best, for weights inside
# the range. Trained scales have up to 2.4 at 2 bits and up to 2 at more bits; scales that are twice too large, or of
# other rows, exceed the limit.
REFITTED = 2.5

_TOTALS = 4  # sums over a whole Linear


class FileWeight(NamedTuple):
    """Weight of one Linear in a checkpoint.

    Attributes:
        tensor: the weight's codes, or its values if the file has them unquantized beside the scale.
        scale, zero: scale in the file (divided by the global scale, if there is one) and zero points (or None), fp32 in
            the scheme's shape.
    """

    tensor: DiskTensor
    scale: Tensor
    zero: Tensor | None


def file_weight(
    name: str, part: LinearPart, spec: TensorSpec, tensors: Mapping[str, DiskTensor], scale: Tensor, zero: Tensor | None
) -> FileWeight | None:
    """Find the codes (or plain values) of the Linear ``part``, called ``name`` on disk, in ``tensors``, the headers by
    key, and join them with its ``scale`` and ``zero`` from the files; None if the files only have scales. Raises
    ValueError if the tensor does not have the dtype or the size of codes of ``spec``."""
    found = tensors.get(f"{name}.weight_packed") or tensors.get(f"{name}.weight")
    if found is None:
        return None
    rows, columns = part.out_features, part.in_features
    packed = found.key.endswith("_packed") or found.dtype == torch.uint8
    dtypes: tuple[torch.dtype, ...]
    if spec.dtype == "int":
        dtypes = (torch.int32,) if packed else (torch.int8,)
    elif spec.dtype == "fp4_e2m1":
        dtypes = (torch.uint8,)
    else:
        dtypes = (torch.float8_e4m3fn,)
    width = columns
    if packed:
        width = columns // 2 if spec.dtype == "fp4_e2m1" else packed_columns(columns, spec.bits)
    elif found.dtype in FLOATS:
        dtypes = FLOATS
    if found.dtype not in dtypes or found.shape != (rows, width):
        raise ValueError(
            f"{found.file}: {found.key} is {found.kind} {list(found.shape)}, expected "
            f"{' or '.join(str(dtype) for dtype in dtypes)} {[rows, width]}, as its scales are those of {spec.dtype} "
            f"codes with {spec.bits} bits: the file mixes two schemes, use another checkpoint"
        )
    shape = spec.scale_shape((rows, columns))
    return FileWeight(found, scale.reshape(shape), None if zero is None else zero.float().reshape(shape))


def count_of_sums(part: LinearPart, spec: TensorSpec) -> int:
    """Return the number of sums that :func:`local_products` returns."""
    return _TOTALS + _by_scale(spec) * math.prod(_scales_of(part, spec))


def local_products(
    file: FileWeight, part: LinearPart, spec: TensorSpec, local: Tensor, start: int, rows: int, reader: Reader
) -> Tensor:
    """Sum products of loaded, rounded and decoded weights over this rank's elements of a Linear: fp64 ``[n]`` on the
    CPU, to be added over ranks. :func:`add_products` lists the sums.

    Args:
        file, part: weight of the Linear in the file, and the Linear as a slice of its layer.
        spec: quantization of the layer.
        local: this rank's range of the layer's weight, flat.
        start: first element of the range in the row-major weight.
        rows: number of rows of one expert's weight in a stack; otherwise of the layer's weight.
        reader: reader of the files.
    """
    size = part.in_features
    sums = torch.zeros(count_of_sums(part, spec), dtype=torch.float64, device=local.device)
    begin = ((part.expert or 0) * rows + part.first_row) * size
    first, last = max(start - begin, 0), min(start + local.numel() - begin, part.out_features * size)
    down = spec.rows_per_scale
    each = size * down  # elements of rows that share scales
    end = min(-(-last // each) * each, part.out_features * size)
    for chunk in row_chunks(first // each * each, end, size, together=down):
        codes = read_codes(file.tensor, chunk, size, spec, reader).to(local.device)
        low, high = max(first, chunk.start * size), min(last, chunk.stop * size)
        inside = slice(low - chunk.start * size, high - chunk.start * size)
        mine = local[begin + low - start : begin + high - start]
        scale, zero = scales_of_rows(chunk, file.scale, file.zero, spec)
        scale, zero = scale.to(local.device), None if zero is None else zero.to(local.device)
        plain = codes.dtype in FLOATS
        decoded = codes.float() if plain else dequantize(codes, scale, spec, torch.float32, zero)
        weight = torch.zeros_like(decoded)
        weight.view(-1)[inside] = mine.float()
        values = Values(weight, fake_quant(weight, scale, spec, zero), decoded, inside_range(weight, scale, spec, zero))
        add_products(sums, part, spec, chunk.start, inside, values)
    return sums.cpu()


class Values(NamedTuple):
    """Values of some rows of a Linear, fp32 ``[rows, in_features]``.

    Attributes:
        weight: the loaded weight.
        rounded: ``weight`` rounded with the file's scales.
        decoded: the file's codes decoded with these scales.
        fits: bool, True where the weight is inside the range of these scales.
    """

    weight: Tensor
    rounded: Tensor
    decoded: Tensor
    fits: Tensor


def add_products(sums: Tensor, part: LinearPart, spec: TensorSpec, row: int, inside: slice, values: Values) -> None:
    """Add the products of some rows of a Linear to ``sums``, in place.

    Args:
        sums: fp64 ``[n]``. First the 4 totals of w w, w d, (w - r)^2 and (w - d)^2, with w, r and d the ``weight``,
            ``rounded`` and ``decoded`` of :class:`Values`. Then per scale, without clipped weights: all sums of w w,
            then all of w d, then all of d d; with zero points also of w, d and 1.
        part, spec: the Linear, and its quantization.
        row: index in the Linear of the first of these rows.
        inside: range of the flattened rows' elements that this rank has; rows may begin or end on another rank.
        values: values of these rows.
    """
    beside = torch.ones_like(values.fits)
    beside.view(-1)[inside] = False
    weight, rounded, decoded = (each.masked_fill(beside, 0) for each in values[:3])
    totals = weight * weight, weight * decoded, (weight - rounded).square(), (weight - decoded).square()
    sums[:_TOTALS] += torch.stack([total.sum(dtype=torch.float64) for total in totals])
    # The distance of clipped weights depends on the scales only, which are checked without codes.
    clipped = ~values.fits & ((decoded - rounded).abs() <= 2**-7 * rounded.abs())
    weight, decoded = weight.masked_fill(clipped, 0), decoded.masked_fill(clipped, 0)
    products = (weight * weight, weight * decoded, decoded * decoded, weight, decoded, (~(clipped | beside)).float())
    down, across = _scales_of(part, spec)
    together = part.out_features if spec.granularity == "tensor" else spec.rows_per_scale  # rows that share scales
    index = torch.arange(row, row + len(weight), device=sums.device) // together
    lacking = together * across - part.in_features if spec.granularity == "block" else 0  # columns the last block lacks
    for total, product in zip(sums[_TOTALS:].view(-1, down, across), products, strict=False):
        groups = pad(product, (0, lacking)).view(len(weight), across, -1)
        total.index_add_(0, index, groups.sum(-1, dtype=torch.float64))


def _by_scale(spec: TensorSpec) -> int:
    """Return the number of sums per scale."""
    return 6 if spec.has_zero_points else 3


def _scales_of(part: LinearPart, spec: TensorSpec) -> tuple[int, int]:
    """Return the number of scales of a Linear along its rows and along its columns."""
    shape = spec.scale_shape((part.out_features, part.in_features))
    return (1, 1) if len(shape) == 1 else (shape[0], shape[1])


def other_weights(sums: Tensor, spec: TensorSpec) -> str | None:
    """Return the reason why codes times scales in the files are not the loaded weight, which is another one or whose
    scales were changed; None if they may be. ``sums`` are those of :func:`local_products`, added over all ranks."""
    squares, product, rounding, distance = sums[:_TOTALS].tolist()
    if squares == 0:
        return "model.path has zeros where the codes are of other weights" if distance > 0 else None
    far = FAR_AT_2_BITS if spec.bits == 2 else FAR
    most = min(max(far * rounding, TRAINED * squares), FARTHEST * squares)
    kept, fitted = _refitted(sums[_TOTALS:].view(_by_scale(spec), -1))
    if kept > REFITTED * fitted and fitted <= most:
        numbers = "scales or zero points" if spec.has_zero_points else "scales"
        return (
            f"the codes times the scales are {product / squares:.2g} times the weights of model.path; the squared "
            f"distance is {distance / squares:.2g} of the squared weights, {fitted / squares:.2g} with the {numbers} "
            f"that fit the codes best: the {numbers} were changed, or are in another order"
        )
    if distance > most or product <= 0 or kept > REFITTED * fitted:
        return (
            f"the codes beside it are of other weights than those of model.path: the squared distance is "
            f"{distance / squares:.2g} of the squared weights, rounding alone causes {rounding / squares:.2g}. Set "
            "model.path to the checkpoint that was quantized: another one, or one whose weights were smoothed (AWQ, "
            "SmoothQuant)"
        )
    return None


def _refitted(sums: Tensor) -> tuple[float, float]:
    """Compute the squared distance of unclipped weights from their decoded codes: with the given scales, and with the
    scales (and zero points, if there are any) that minimize it. ``sums`` are those per scale."""
    weights, products, decoded = sums[:3]
    kept = float((weights - 2 * products + decoded).sum())
    if len(sums) > 3:  # and with the best zero points
        weight, mean, count = sums[3:]
        count = count.clamp(min=1)
        weights, products, decoded = (
            weights - weight * weight / count,
            products - weight * mean / count,
            decoded - mean * mean / count,
        )
    best = weights - products.square() / decoded.clamp(min=1e-30)
    return kept, float(best.clamp(min=0).sum())
