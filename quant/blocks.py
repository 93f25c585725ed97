"""Scales per block as scales of runs.

The quantizers compute a scale for each of many equal runs of consecutive elements. A block of ``size x size`` elements
covers runs in ``size`` rows, so its scale is repeated for each of them, and what is computed per run is combined per
block. The last blocks of a weight's rows and columns may be smaller. If ``size`` does not divide the length of a row,
a run has the greatest common divisor of both as its length (:meth:`quant.spec.TensorSpec.run_length`): 64 for rows of
576 in blocks of 128.
"""

from torch import Tensor
from torch.nn.functional import pad

from quant.spec import TensorSpec


def per_run(scale: Tensor, shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    """Repeat the scales of the blocks of a weight of ``shape [..., out, in]`` for every run: ``[..., ceil(out / size),
    ceil(in / size)]`` to ``[..., out, in / run]``, contiguous. Scales that are not per block are returned unchanged."""
    if spec.granularity != "block":
        return scale
    scale = scale.repeat_interleave(spec.rows_per_scale, -2).narrow(-2, 0, shape[-2])
    return per_run_of_rows(scale, shape[-1], spec)


def per_run_of_rows(scale: Tensor, in_features: int, spec: TensorSpec) -> Tensor:
    """Repeat the block scales of each row, ``[..., ceil(in / size)]``, for every run of the row: ``[..., in / run]``,
    contiguous."""
    size, run = spec.rows_per_scale, spec.run_length((1, in_features))
    if run < size:
        scale = scale.repeat_interleave(size // run, -1).narrow(-1, 0, in_features // run)
    return scale.contiguous()


def per_block(values: Tensor, shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    """Arrange values of the runs of a weight ``[..., out, in]`` by block: ``[..., out, in / run]`` to ``[..., ceil(out
    / size), runs of a block, ceil(in / size)]``, with zeros for the runs that smaller blocks lack."""
    *_, rows, columns = shape
    size, run = spec.rows_per_scale, spec.run_length(shape)
    down, across, beside = -(-rows // size), -(-columns // size), size // run
    if down * size > rows or across * size > columns:
        values = pad(values, (0, across * beside - columns // run, 0, down * size - rows))
    values = values.unflatten(-2, (down, size))
    return values if beside == 1 else values.unflatten(-1, (across, beside)).transpose(-1, -2).flatten(-3, -2)
