"""The codes that a checkpoint holds beside its scales, against the weights that were loaded.

Scales are right for one weight, and a checkpoint mostly says for which: its codes times its scales are that weight, but
for rounding. So a rank decodes what lies in its own range of a weight, a few rows at a time, and adds up products by
column and by scale (:func:`local_products`); their sums over all ranks say whether the two are one weight
(:func:`other_weights`). A scale that was changed, or that lies where another one belongs, is one number too large or
too small for all of its codes, which rounding is not.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from model.checkpoint.safetensors import DiskTensor, Reader
from model.quantized.tensor import read_codes
from quant.formats.packing import packed_columns
from quant.linear import LinearPart
from quant.reference import dequantize, fake_quant
from quant.spec import TensorSpec

# The distance of codes over the weights' squares. Codes of other weights are about 2 away, and have nothing of the
# weights in them; those of GPTQ at 2 bits are up to 1.3 away where a few columns are large, but have all of the weights
# in them.
OTHER_FAR, OTHER_GAIN, FARTHEST = 0.5, 0.5, 1.5
# The decoded weight as a multiple of the weight rounded with the same scales: GPTQ's is within 2% of 1.
GAIN = (0.8, 1.25)
# Share of the weights' squares that a factor for each column explains; of the whole distance, too. Rounding, GPTQ and
# training leave columns as large as they are.
SMOOTHED, SMOOTHED_SHARE = 0.02, 0.3
# Share of the weights' squares that one number explains, added to all, and share of the distance that a number for each
# scale does: codes that are counted from another zero point. Codes of GPTQ have up to 0.07 of the latter.
SHIFTED, SHIFTED_SHARE = 0.02, 0.5
# Share of the weights' squares that a factor for each scale explains, between the decoded weight and the rounded one,
# which is clipped as it is; of the whole distance, too. Files of GPTQ and AutoRound have up to 0.05 of it, codes of
# GPTQ at 2 bits, of weights with large columns, up to 0.42. What is beyond SCALED_MOST times the squares is no factor.
SCALED, SCALED_SHARE, SCALED_MOST = 0.0002, 0.5, 4.0
# Share of the weights' squares under scales with which weights are rounded to so many times what the codes stand for,
# and that over the whole distance. Codes of GPTQ, and of weights and scales that trained, have up to 0.015 and 0.19.
SMALLER, SMALLER_MOST, SMALLER_SHARE = 1.4, 0.02, 0.35

_BY_COLUMN, _BY_SCALE = 4, 4  # sums
_CHUNK = 2**20  # weights that are decoded at a time
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class FileWeight(NamedTuple):
    """The weight of one Linear in a checkpoint.

    Attributes:
        tensor: its codes, or its values if it is stored as it is.
        scale: the effective scale that the file has for it, fp32 in the scheme's shape.
        zero: its zero points likewise, fp32; None where there are none.
    """

    tensor: DiskTensor
    scale: Tensor
    zero: Tensor | None


def file_weight(
    name: str, part: LinearPart, spec: TensorSpec, tensors: Mapping[str, DiskTensor], scale: Tensor, zero: Tensor | None
) -> FileWeight | None:
    """The codes of the Linear called ``name`` on disk, None if the files have scales alone.

    Raises:
        ValueError: they are no codes of ``spec`` or of a weight of this size.
    """
    found = tensors.get(f"{name}.weight_packed") or tensors.get(f"{name}.weight")
    if found is None:
        return None
    rows, columns = part.out_features, part.in_features
    packed = found.key.endswith("_packed")
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
    elif found.dtype in _PLAIN:
        dtypes = _PLAIN
    if found.dtype not in dtypes or found.shape != (rows, width):
        raise ValueError(
            f"{found.file}: {found.key} is {found.kind} {list(found.shape)}, but codes of {spec.bits} bits of "
            f"{spec.dtype} are {' or '.join(str(dtype) for dtype in dtypes)} {[rows, width]}: the scales beside it are "
            "of another scheme"
        )
    shape = spec.scale_shape((rows, columns))
    return FileWeight(found, scale.reshape(shape), None if zero is None else zero.float().reshape(shape))


def count_of_sums(part: LinearPart, spec: TensorSpec) -> int:
    """How many numbers :func:`local_products` gives."""
    return _BY_COLUMN * part.in_features + _BY_SCALE * math.prod(_scales_of(part, spec))


def local_products(
    file: FileWeight, part: LinearPart, spec: TensorSpec, local: Tensor, start: int, rows: int, reader: Reader
) -> Tensor:
    """Products of this rank's share of a Linear's weight w, of w rounded with the file's scales r, and of the decoded
    weight d; fp64, flat, on the CPU.

    Args:
        file, part: the Linear in the file, and in its layer.
        spec: how the layer is quantized.
        local: this rank's range of the layer's weight, flat.
        start: where the range begins in the row-major weight.
        rows: rows of one expert of a stack, or of the weight.
        reader: of the files.

    Returns:
        See :func:`add_products`; sums of all ranks' ranges add up.
    """
    size = part.in_features
    sums = torch.zeros(count_of_sums(part, spec), dtype=torch.float64, device=local.device)
    begin = ((part.expert or 0) * rows + part.first_row) * size
    first, last = max(start - begin, 0), min(start + local.numel() - begin, part.out_features * size)
    for chunk in _row_chunks(first, last, size, spec):
        codes = read_codes(file.tensor, chunk, size, spec, reader).to(local.device)
        low, high = max(first, chunk.start * size), min(last, chunk.stop * size)
        inside = slice(low - chunk.start * size, high - chunk.start * size)
        mine = local[begin + low - start : begin + high - start]
        scale, zero = (_of_rows(each, chunk, spec) for each in (file.scale, file.zero))
        assert scale is not None
        scale, zero = scale.to(local.device), None if zero is None else zero.to(local.device)
        plain = codes.dtype in _PLAIN
        decoded = codes.float() if plain else dequantize(codes, scale, spec, torch.float32, zero)
        weight = torch.zeros_like(decoded)
        weight.view(-1)[inside] = mine.float()
        add_products(sums, part, spec, chunk.start, inside, (weight, fake_quant(weight, scale, spec, zero), decoded))
    return sums.cpu()


def add_products(
    sums: Tensor, part: LinearPart, spec: TensorSpec, row: int, inside: slice, values: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add what some rows of a Linear give.

    Args:
        sums: by column, sums over rows of w w, w r, w d and (w - d)^2; then by scale those of w w, r d, d d and d - r.
        part, spec: the Linear, and how it is quantized.
        row: the first one.
        inside: which elements of the rows count, flat. Rows begin or end on another rank.
        values: w, r and d, fp32 ``[rows, in_features]``.
    """
    size = part.in_features
    beside = torch.ones(values[0].numel(), dtype=torch.bool, device=sums.device)
    beside[inside] = False
    weight, rounded, decoded = (each.masked_fill(beside.view(each.shape), 0.0) for each in values)
    by_column = weight * weight, weight * rounded, weight * decoded, (weight - decoded).square()
    columns = sums[: _BY_COLUMN * size].view(_BY_COLUMN, size)
    columns += torch.stack([product.sum(0, dtype=torch.float64) for product in by_column])
    down, across = _scales_of(part, spec)
    together = part.out_features // down  # rows that share scales
    index = torch.arange(row, row + len(weight), device=sums.device) // together
    by_scale = weight * weight, rounded * decoded, decoded * decoded, decoded - rounded
    for total, product in zip(sums[_BY_COLUMN * size :].view(_BY_SCALE, down, across), by_scale, strict=True):
        total.index_add_(0, index, product.view(len(weight), across, -1).sum(-1, dtype=torch.float64))


def _scales_of(part: LinearPart, spec: TensorSpec) -> tuple[int, int]:
    """How many scales a Linear has, down and across."""
    shape = spec.scale_shape((part.out_features, part.in_features))
    return (1, 1) if len(shape) == 1 else (shape[0], shape[1])


def squares_of(sums: Tensor, part: LinearPart) -> tuple[float, float, float]:
    """Sums of w w, w r and (w - d)^2 over a Linear."""
    squares, rounded, _, distance = sums[: _BY_COLUMN * part.in_features].view(_BY_COLUMN, -1).sum(1).tolist()
    return squares, rounded, distance


def other_weights(sums: Tensor, part: LinearPart) -> str | None:
    """Why codes are not those of the loaded weight, from the sums of :func:`local_products` over all ranks; None if
    they may be."""
    numel = part.out_features * part.in_features
    columns = sums[: _BY_COLUMN * part.in_features].view(_BY_COLUMN, -1)
    squares, rounded, decoded, distance = (float(each) for each in columns.sum(1))
    if squares == 0 or rounded <= 0:
        return None  # nothing, or scales that :mod:`quant.fit` refuses
    far, gain = distance / squares, decoded / rounded
    by_scale = sums[_BY_COLUMN * part.in_features :].view(_BY_SCALE, -1)
    shift = float(by_scale[3].sum())
    if shift * shift / numel > SHIFTED * squares:
        return (
            f"the codes are weights that lie {shift / numel:.2g} beside those of model.path: their zero points are "
            "other ones"
        )
    of_column = columns[0].clamp(min=1e-30)
    smoothed = float(((columns[2] - columns[1]).square() / of_column).sum()) / squares
    other = f"the codes beside it are of other weights than those of model.path: {far:.2g} of their squares lie between"
    if far > FARTHEST or (far > OTHER_FAR and gain < OTHER_GAIN):
        return other
    if not GAIN[0] <= gain <= GAIN[1]:
        return (
            f"the codes times the scales are {decoded / squares:.2g} times the weights of model.path: the scales were "
            "multiplied"
        )
    if smoothed > SMOOTHED and smoothed > SMOOTHED_SHARE * far:
        return (
            f"the codes are of weights whose columns have other sizes than those of model.path ({smoothed:.2g} of the "
            "squares): the weights were smoothed (AWQ, SmoothQuant). Name the smoothed checkpoint as model.path"
        )
    scaled, smaller = (share / squares for share in _of_other_scales(by_scale))
    too_small = smaller > SMALLER_MOST or smaller > max(SCALED, SMALLER_SHARE * far)
    if scaled > max(SCALED, SCALED_SHARE * far) or too_small:
        return (
            f"the codes are of weights that other scales belong to ({max(scaled, smaller):.2g} of the squares): the "
            "scales were changed, or are in another order"
        )
    shifted = float(by_scale[3].square().sum()) * by_scale.shape[1] / numel / squares
    if shifted > max(SCALED, SHIFTED_SHARE * far):
        return f"the codes are of weights that other zero points belong to ({shifted:.2g} of the squares)"
    return None


def _of_other_scales(by_scale: Tensor) -> tuple[float, float]:
    """Squares that factors of single scales explain, and those of weights whose scales are too small for the codes."""
    of_scale, with_rounded, with_itself, _ = by_scale
    larger = (with_rounded - with_itself).square() / with_itself.clamp(min=1e-30)
    below = of_scale * (1 - with_itself / with_rounded.clamp(min=1e-30)).square()
    explained = torch.where(with_rounded > with_itself, below, torch.minimum(larger, SCALED_MOST * of_scale))
    return float(explained.sum()), float(of_scale[with_rounded > SMALLER * with_itself].sum())


def _row_chunks(first: int, last: int, size: int, spec: TensorSpec) -> Iterator[slice]:
    """Rows that hold the elements [first, last), about ``_CHUNK`` elements at a time; whole blocks where there are
    such."""
    if first >= last:
        return
    together = spec.group_size or 1 if spec.granularity == "block" else 1
    step = max(1, _CHUNK // (size * together)) * together
    stop = math.ceil(last / size)
    stop += -stop % together
    for row in range(first // size // together * together, stop, step):
        yield slice(row, min(row + step, stop))


def _of_rows(scale: Tensor | None, rows: slice, spec: TensorSpec) -> Tensor | None:
    if scale is None or spec.granularity == "tensor":
        return scale
    size = spec.group_size or 1 if spec.granularity == "block" else 1
    return scale[rows.start // size : rows.stop // size]
