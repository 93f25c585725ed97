"""Weight of one Linear that is stored as codes and scales, and read as decoded values.

A :class:`QuantizedTensor` replaces a plain tensor among the tensors of a checkpoint. Reading a range of it returns
``code * scale``, decoded a few rows at a time: a rank reads and allocates no more than its own part of the weights and
a bounded number of rows. A :class:`ColumnTensor` is the same for the transposed weights of GPTQ and AWQ.

Values are rounded to the model's dtype. An export without a training step must write the file's codes again. So
everything that is read is checked: the decoded values, quantized with the same scale, must have the same codes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from model.checkpoint.safetensors import CheckpointError, DamagedError, DiskTensor, Reader
from quant import Quantizer, Scale, Scheme, TensorSpec, kernels
from quant.formats.compressed_tensors import bad_scales, unpack_scale
from quant.formats.packing import unpack_int32, unpack_nibbles, unpack_zero_points
from quant.spec import per_run_of_rows

_CHUNK = 2**20  # weights decoded at a time
_TOGETHER = 32  # codes that fill whole words for any width
Packing = Literal["gptq", "gptq_v2", "awq"]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight neighbors is in each nibble of a word, lowest first


@dataclass(frozen=True)
class QuantizedTensor:
    """Weight ``[out, in]`` in codes and scales of compressed-tensors, with the interface of a plain tensor on disk.

    Attributes:
        key: key that the plain weight would have, ``<name of the Linear>.weight``.
        shape: shape of the weight.
        scheme: scheme of the Linear.
        codes, scale: tensors on disk (``weight`` or ``weight_packed``, and ``weight_scale``).
        zero: packed zero points, if the scheme has any.
        above: global scale, if the scheme has one.
        reciprocal: True if ``above`` is the reciprocal of the global scale, as in files of ModelOpt.
    """

    key: str
    shape: tuple[int, ...]
    scheme: Scheme
    codes: DiskTensor
    scale: DiskTensor
    zero: DiskTensor | None = None
    above: DiskTensor | None = None
    reciprocal: bool = False

    kind = "codes"
    dtype = torch.float32

    @property
    def file(self) -> Path:
        """File of the codes."""
        return self.codes.file

    @property
    def name(self) -> str:
        """Name of the Linear on disk."""
        return self.key.removesuffix(".weight")

    def bytes_of(self, count: int) -> int:
        """Estimate the number of bytes to read for ``count`` values."""
        values = self.shape[0] * self.shape[1]
        return (self.codes.end - self.codes.begin + self.scale.end - self.scale.begin) * count // max(1, values)

    def values(
        self, reader: Reader, start: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(offset, values)``, flat, with the offset from ``start``, for elements [start, start + count) of the
        row-major weight, in ``dtype``, decoded on ``device``. Raises CheckpointError if a scale is invalid, or if the
        decoded values, quantized again, would have other codes."""
        columns = self.shape[1]
        for rows in row_chunks(start, start + count, columns):
            _, values = self.checked_rows(reader, rows, dtype, device)
            low, high = max(start, rows.start * columns), min(start + count, rows.stop * columns)
            yield low - start, values.view(-1)[low - rows.start * columns : high - rows.start * columns]

    def checked_rows(
        self, reader: Reader, rows: slice, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Read the codes of some rows, and decode them in ``dtype``. Returns codes and values, both ``[rows, in]``.
        Raises CheckpointError as :meth:`values` does."""
        codes, quantizer = self.rows(reader, rows, dtype, device)
        values = kernels.dequantize(codes, quantizer)
        again, _ = kernels.quantize(values, quantizer)
        check_return(codes, again, values, self.codes)
        return codes, values

    def rows(self, reader: Reader, rows: slice, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Quantizer]:
        """Read the codes ``[rows, in]`` of some rows, and a quantizer with their scales, for values in ``dtype``. The
        quantizer's range of codes is the full one, even if the scheme's is narrow."""
        spec = self.scheme.weights.wide  # narrow range was judged by a sample: :mod:`model.quantized.narrow_range`
        codes = self.codes_of_rows(reader, rows).to(device)
        scale = self.scale_of_rows(reader, rows).to(device)
        zero = self.zero_of_rows(reader, rows)
        above = None if self.above is None else self.read_above(reader).to(device)
        # The rows may be part of a block.
        whole = Scale(scale, global_=above, zero=None if zero is None else zero.to(device))
        return codes, Quantizer(whole, spec.of_runs, dtype)

    def codes_of_rows(self, reader: Reader, rows: slice) -> Tensor:
        """Read the codes of some rows, ``[rows, in]``, unpacked."""
        return read_codes(self.codes, rows, self.shape[1], self.scheme.weights, reader)

    def scale_of_rows(self, reader: Reader, rows: slice) -> Tensor:
        """Read the fp32 scales of some rows, ``[rows, n]`` with n scales per row (for blocks, one per run of a row,
        :func:`quant.spec.per_run_of_rows`), or ``(1,)`` for a scale per tensor."""
        spec = self.scheme.weights
        if spec.granularity == "tensor":
            return self.scales(reader, 0, 1)
        down = spec.rows_per_scale
        across = spec.scale_shape(self.shape)[1]
        first, last = rows.start // down, -(-rows.stop // down)
        scale = self.scales(reader, first * across, (last - first) * across).view(-1, across)
        if spec.granularity == "block":
            scale = scale.repeat_interleave(down, 0)[rows.start - first * down :][: rows.stop - rows.start]
            scale = per_run_of_rows(scale, self.shape[1], spec)
        return scale.contiguous()

    def scales(self, reader: Reader, start: int, count: int) -> Tensor:
        """Read the fp32 scales [start, start + count), row-major over the scheme's scale shape, already divided by the
        global scale if there is one. Raises CheckpointError for an invalid scale."""
        assert self.scale.dtype is not None
        stored = torch.empty(count, dtype=self.scale.dtype)
        reader.read(self.scale, start, stored)
        spec = self.scheme.weights
        return self._checked(unpack_scale(stored, spec, None if self.above is None else self.read_above(reader)))

    def _checked(self, scale: Tensor) -> Tensor:
        """Return the fp32 scales. Raises CheckpointError if one is invalid in its format (:func:`bad_scales`)."""
        if problem := bad_scales(scale, self.scheme.weights):
            raise DamagedError(f"{self.scale.file}: {self.scale.key} {problem}")
        return scale

    def read_above(self, reader: Reader) -> Tensor:
        """Read the fp32 global scale ``(1,)``, by which stored scales are divided; raises CheckpointError unless it is
        finite and positive."""
        assert self.above is not None
        above = read_positive(self.above, reader)
        return 1 / above if self.reciprocal else above

    def zero_of_rows(self, reader: Reader, rows: slice) -> Tensor | None:
        """Read the fp32 zero points ``[rows, n]`` of some rows; None if the scheme has none."""
        if self.zero is None:
            return None
        bits, across = self.scheme.weights.bits, self.zero.shape[1]
        first = rows.start // _TOGETHER
        stop = min(-(-rows.stop // _TOGETHER) * bits, self.zero.shape[0])
        words = torch.empty((stop - first * bits) * across, dtype=torch.int32)
        reader.read(self.zero, first * bits * across, words)
        begin = first * _TOGETHER
        return unpack_zero_points(words.view(-1, across), bits, rows.stop - begin)[rows.start - begin :].float()


@dataclass(frozen=True)
class ColumnTensor(QuantizedTensor):
    """Weight of GPTQ or AWQ, whose rows are columns on disk. ``codes``, ``scale`` and ``zero`` are the tensors qweight,
    scales and qzeros; ``packing`` is how qweight and qzeros pack codes (:mod:`model.quantized.checkpoint`)."""

    packing: Packing = "gptq"

    def codes_of_rows(self, reader: Reader, rows: slice) -> Tensor:
        """Read the codes of some rows of the weight, int8 ``[rows, in]``."""
        bits, columns = self.scheme.weights.bits, self.shape[1]
        if self.packing != "awq":
            return unpack_int32(_columns(self.codes, rows, reader).t().contiguous(), bits, columns)
        words = slice(rows.start // 8, -(-rows.stop // 8))
        codes = _awq(_columns(self.codes, words, reader)).t()
        return codes[rows.start - 8 * words.start :][: rows.stop - rows.start].contiguous()

    def scale_of_rows(self, reader: Reader, rows: slice) -> Tensor:
        """Read the fp32 scales of some rows, ``[rows, n]``."""
        return self._checked(_columns(self.scale, rows, reader).t().float().contiguous())

    def scales(self, reader: Reader, start: int, count: int) -> Tensor:
        """Read the fp32 scales [start, start + count) of ``[out, n]``, row-major."""
        across = self.scale.shape[0]
        rows = slice(start // across, -(-(start + count) // across))
        return self.scale_of_rows(reader, rows).view(-1)[start - rows.start * across :][:count]

    def zero_of_rows(self, reader: Reader, rows: slice) -> Tensor | None:
        """Read the fp32 zero points ``[rows, n]`` of some rows; None for a symmetric scheme, after a check. Raises
        CheckpointError if one is out of range or, for a symmetric scheme, not in the middle of the range."""
        assert self.zero is not None
        spec = self.scheme.weights
        together = 8 if self.packing == "awq" else _TOGETHER
        first, stop = rows.start // together, -(-rows.stop // together)
        each = together * spec.bits // 32  # words
        words = _columns(self.zero, slice(first * each, min(stop * each, self.zero.shape[1])), reader)
        known = min(stop * together, self.shape[0]) - first * together
        zero = _awq(words)[:, :known] if self.packing == "awq" else unpack_int32(words, spec.bits, known)
        zero = zero.t()[rows.start - first * together :][: rows.stop - rows.start].float()
        if self.packing == "gptq":
            zero = zero + 1
        wrong = (zero != 0) if spec.symmetric else (zero > spec.qmax)
        if bool(wrong.any()):
            expected = f"{-spec.qmin:g}, as the scheme is symmetric" if spec.symmetric else f"0 to {2**spec.bits - 1}"
            found = zero[wrong][0].item() - spec.qmin
            raise DamagedError(f"{self.file}: {self.zero.key} has the zero point {found:g}, expected {expected}")
        return None if spec.symmetric else zero.contiguous()


def read_positive(tensor: DiskTensor, reader: Reader) -> Tensor:
    """Read a single scale, fp32 ``(1,)``. Raises CheckpointError unless it is finite and positive."""
    value = torch.empty(1, dtype=torch.float32)
    reader.read(tensor, 0, value)
    if not bool(torch.isfinite(value) & (value > 0)):
        raise DamagedError(f"{tensor.file}: {tensor.key} must be finite and positive, got {value.item()}")
    return value


def _columns(tensor: DiskTensor, columns: slice, reader: Reader) -> Tensor:
    """Read ``tensor[:, columns]``, one row at a time."""
    assert tensor.dtype is not None
    height, width = tensor.shape
    found = torch.empty(height, columns.stop - columns.start, dtype=tensor.dtype)
    if found.shape[1] == width:
        reader.read(tensor, 0, found.view(-1))
        return found
    for row in range(height):
        reader.read(tensor, row * width + columns.start, found[row])
    return found


def _awq(words: Tensor) -> Tensor:
    """Unpack AWQ's words, int32 ``[n, m]``, to codes, int8 ``[n, 8 m]``."""
    codes = torch.empty(*words.shape, 8, dtype=torch.int8)
    for nibble, place in enumerate(AWQ_ORDER):
        codes[..., place] = ((words >> (4 * nibble)) & 0xF) - 8
    return codes.flatten(1)


def check_return(codes: Tensor, again: Tensor, values: Tensor, tensor: DiskTensor) -> None:
    """Raise CheckpointError, which names ``tensor``, unless ``values`` are finite, and ``again`` equals ``codes``: the
    codes were decoded to ``values`` in the model's dtype, which were quantized to ``again``."""
    differ = codes.view(torch.uint8) ^ again.view(torch.uint8)
    # A sum is finite only if all of its terms are, and testing each of them costs 40 times as much in bf16.
    if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
        raise DamagedError(
            f"{tensor.file}: {tensor.key} has NaN or Inf after decoding to {values.dtype}, expected finite weights"
        )
    if bool(differ.any()):
        raise CheckpointError(
            f"{tensor.file}: {tensor.key}: {int(differ.count_nonzero())} of {differ.numel()} codes change if they are "
            f"decoded to {values.dtype} and quantized again, so the model would differ from the file: set model.dtype "
            "to float32"
        )


def chunks_of(
    source: DiskTensor | QuantizedTensor, reader: Reader, start: int, like: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(offset, values)`` for elements of a tensor on disk, from ``start`` on, as many as ``like`` has: plain
    ones in the dtype on disk, decoded ones in the dtype and on the device of ``like``. Offsets count from ``start``."""
    if isinstance(source, DiskTensor):
        return reader.chunks(source, start, like.numel())
    return source.values(reader, start, like.numel(), like.dtype, like.device)


def fill(source: DiskTensor | QuantizedTensor, reader: Reader, start: int, into: Tensor) -> None:
    """Fill the flat tensor ``into`` with elements of a tensor on disk from element ``start`` on, cast to the dtype of
    ``into``."""
    if isinstance(source, DiskTensor):
        reader.read(source, start, into)
        return
    for offset, values in chunks_of(source, reader, start, into):
        into[offset : offset + values.numel()].copy_(values)


def row_chunks(first: int, last: int, columns: int, *, together: int = 1) -> Iterator[slice]:
    """Split the rows of a row-major matrix that contain its elements [first, last): yield slices of rows, of about
    ``_CHUNK`` elements each. Every slice except the last has a multiple of ``together`` rows."""
    if first >= last:
        return
    step, stop = max(1, _CHUNK // columns // together) * together, -(-last // columns)
    for row in range(first // columns, stop, step):
        yield slice(row, min(row + step, stop))


def read_codes(tensor: DiskTensor, rows: slice, columns: int, spec: TensorSpec, reader: Reader) -> Tensor:
    """Read rows of a weight's codes, and unpack packed ones, to ``[rows, columns]``."""
    width, count = tensor.shape[1], rows.stop - rows.start
    assert tensor.dtype is not None
    stored = torch.empty(count * width, dtype=tensor.dtype)
    reader.read(tensor, rows.start * width, stored)
    stored = stored.view(count, width)
    if spec.dtype == "fp4_e2m1" and tensor.dtype == torch.uint8:
        return unpack_nibbles(stored)
    return unpack_int32(stored, spec.bits, columns) if tensor.key.endswith("_packed") else stored
