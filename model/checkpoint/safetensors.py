"""Read safetensors files by byte ranges.

A safetensors file consists of a length, a JSON header with the offsets of every tensor, and the tensors' bytes,
row-major. A partition is a contiguous run of a row-major tensor, and so of bytes in a file. It is read straight into
its final memory, without mapping the file (mapped pages count as this process's memory) and without a temporary tensor.
Only if the dtype differs, or the memory is on a GPU, the bytes pass through a buffer of one chunk.
"""

import gc
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.ranks import is_main, listed, naming, say, words_of
from model.zero import on_cuda

CHUNK_BYTES = 64 * 2**20
PAGE_BYTES = 4096  # unit that a file system writes or loses
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U32": torch.uint32,
    "BOOL": torch.bool,
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # of unquantized weights

_HALF_PAIR = re.compile(r"[\ud800-\udfff]")
AGAIN = "copy or download it again"  # how errors of damaged files end


class CheckpointError(ValueError):
    """Error for a checkpoint that cannot be read; the message names the file."""


class DamagedError(CheckpointError):
    """Error for a file that has lost or changed bytes; appends :data:`AGAIN`, the remedy, to the text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"{text}: {AGAIN}")


class DiskTensor(NamedTuple):
    """Tensor in bytes [begin, end) of ``file``; ``kind`` is its dtype in the format's spelling (``BF16``)."""

    key: str
    file: Path
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Torch dtype; None if torch has none or it is not supported (floats of fewer than 8 bits and their scales)."""
        return DTYPES.get(self.kind)

    def bytes_of(self, count: int) -> int:
        """Return the number of bytes of ``count`` elements."""
        return (self.end - self.begin) * count // max(1, math.prod(self.shape))


@dataclass
class Checkpoint:
    """Headers of all files of a checkpoint.

    Attributes:
        tensors: tensors by key, in the order of the files and of the tensors in them.
        problems: problems of the files, one sentence each, which names the file.
        lost: keys whose file, according to the index, cannot be read or does not contain them. They do not count as
            missing, as ``problems`` names the file.
    """

    tensors: dict[str, DiskTensor]
    problems: list[str]
    lost: set[str]


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON; every kind of bad text raises ValueError.

    Python's ``json`` itself raises a RecursionError for deep nesting, keeps the last of two values of one key, and
    reads keys and values that are no text (half of a surrogate pair), on which any later output or file name would
    fail.
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{double!r} occurs twice in one object")
    for text in (one for pair in pairs for one in pair if isinstance(one, str)):
        if half := _HALF_PAIR.search(text):
            around = text[max(0, half.start() - 60) : half.end() + 20]
            raise ValueError(f"a key or value has half of a surrogate pair: {around!r}")
    return values


def read_headers(directory: Path) -> Checkpoint:
    """Read the header of every safetensors file of a checkpoint, and no tensor. Damaged files become ``problems``.
    Raises CheckpointError if there is no safetensors checkpoint in ``directory``, or its index is invalid."""
    index: dict[str, str] = {}
    if (directory / SINGLE).is_file():
        files = [SINGLE]
    elif (directory / INDEX).is_file():
        index = _read_index(directory / INDEX)
        files = sorted(set(index.values()))
    else:
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
        only = (
            f", only {', '.join(pickles)}: pickled weights can run code and are not read. "
            "Save them as safetensors first (save_pretrained does)"
        )
        raise CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}{only if pickles else ''}")
    checkpoint = Checkpoint({}, [], set())
    for file in files:
        try:
            for tensor in read_header(directory / file):
                other = checkpoint.tensors.setdefault(tensor.key, tensor)
                if other is not tensor:
                    checkpoint.problems.append(f"{tensor.key} is in two files, {other.file} and {tensor.file}: {AGAIN}")
        except (CheckpointError, OSError) as error:
            checkpoint.problems.append(words_of(error))
            checkpoint.lost.update(key for key, where in index.items() if where == file)
    for key, file in index.items():
        found = checkpoint.tensors.get(key)
        if key not in checkpoint.lost and (found is None or found.file.name != file):
            checkpoint.problems.append(f"{directory / INDEX} maps {key} to {file}, which does not contain it: {AGAIN}")
            checkpoint.lost.add(key)
    return checkpoint


def read_header(file: Path) -> Iterator[DiskTensor]:
    """Read the header of one safetensors file and yield its tensors in file order. Raises CheckpointError if the file
    is no safetensors file, or is shorter or longer than its header implies."""
    if not file.is_file():
        raise DamagedError(f"{file} does not exist")
    size = file.stat().st_size
    with naming(file), file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0] if size >= 8 else 0
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedError(
                f"{file} is truncated or not a safetensors file: it has {size} bytes, and begins with {length} as the "
                "length of its header"
            )
        try:
            entries: dict[str, Any] = parse_json(stream.read(length))
            if any(not isinstance(value, str) for value in entries.pop("__metadata__", {}).values()):
                raise ValueError("__metadata__ has a value that is no string")
            ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
            tensors = [_entry(file, 8 + length, key, entry) for key, entry in ordered]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{file} has a damaged header: {error}") from error
    end = 8 + length
    for tensor in tensors:
        if tensor.begin != end:
            raise DamagedError(
                f"{file} has a damaged header: {tensor.key} begins at byte {tensor.begin}, expected {end}, where the "
                "tensor before it ends"
            )
        end = tensor.end
    if size != end:
        kind = "truncated" if size < end else "too long"
        raise DamagedError(f"{file} is {kind}: it has {size} bytes, expected {end} according to its header")
    yield from tensors


def _entry(file: Path, data: int, key: str, entry: dict[str, Any]) -> DiskTensor:
    """Parse one entry of a header; ``data`` is the offset of the first tensor. Raises ValueError for invalid
    numbers."""
    (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise ValueError(f"{key} has shape {list(shape)} and data_offsets {[begin, end]}, expected integers >= 0")
    tensor = DiskTensor(key, file, str(entry["dtype"]), shape, data + begin, data + end)
    if tensor.dtype is not None and end - begin != math.prod(tensor.shape) * tensor.dtype.itemsize:
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        raise ValueError(
            f"{key} has shape {list(tensor.shape)} and dtype {tensor.kind}, which take {size} bytes, but data_offsets "
            f"{[begin, end]}"
        )
    return tensor


def warn_of_zero_tails(directory: Path) -> None:
    """Warn on rank 0 of checkpoint files that end in zeros, a page or more and over a tenth of a matrix. Raises
    CheckpointError as :func:`read_headers`.

    A file system that lost the end of a file in a crash may fill it with zeros: sizes and headers are right, but the
    weights are lost. A model may have matrices of zeros too (a fresh output of a residual block) and rows of zeros
    (vocabulary padding), so this is no error, and zeros in less than a tenth of a matrix are ignored.
    """
    tensors = read_headers(directory).tensors.values() if is_main() else ()
    for file in sorted({tensor.file for tensor in tensors}):
        size, zeros = file.stat().st_size, _zeros_at_end(file)
        gone = [
            tensor.key
            for tensor in tensors
            if tensor.file == file
            and len(tensor.shape) > 1
            and 10 * (tensor.end - size + zeros) > tensor.end - tensor.begin
        ]
        if zeros >= PAGE_BYTES and gone:
            say(
                f"warning: the last {zeros:,} bytes of {file} are zeros, and with them {listed(gone, 3)}: a file that "
                f"lost its end in a crash looks like this; compare its checksum with that of the original, or {AGAIN}"
            )


def _zeros_at_end(file: Path) -> int:
    """Count the zero bytes at the end of a file."""
    end = size = file.stat().st_size
    with file.open("rb", buffering=0) as stream:
        while end:
            begin = max(0, end - PAGE_BYTES)
            stream.seek(begin)
            kept = len(stream.read(end - begin).rstrip(b"\0"))
            if kept:
                return size - begin - kept
            end = begin
    return size


def _read_index(file: Path) -> dict[str, str]:
    """Read the file name of each key. Raises CheckpointError for an invalid index or files outside its directory."""
    try:
        index: dict[str, str] = parse_json(file.read_bytes())["weight_map"]
        outside = [name for name in set(index.values()) if Path(name).name != name or name == ".."]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{file} is no index of a checkpoint, expected a JSON object with a weight_map: {error}"
        ) from error
    if outside:
        raise DamagedError(f"{file} names files outside its directory: {', '.join(sorted(outside))}")
    return index


class Reader:
    """Reader of ranges of tensors into memory, with one open file at a time. Use it as a context manager.

    Args:
        progress: called with the number of bytes of each chunk that was read; None for no calls.
        chunk_bytes: maximum bytes per read.

    Attributes:
        bytes: total bytes read so far.
    """

    def __init__(self, progress: Callable[[int], object] | None = None, chunk_bytes: int = CHUNK_BYTES):
        self.bytes = 0
        self._chunk_bytes = chunk_bytes
        self._progress = progress
        self._file: Path | None = None
        self._descriptor: int | None = None
        self._buffer: Tensor | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self, tensor: DiskTensor, start: int, into: Tensor) -> None:
        """Fill the flat tensor ``into`` with the elements of ``tensor`` from ``start`` on, cast to the dtype of
        ``into``. Raises OSError or CheckpointError if the file cannot be read or ends early, or if torch lacks the
        dtype."""
        if into.device.type == "cpu" and into.dtype == tensor.dtype:
            for offset, size in self._spans(into.numel(), into.dtype):
                self._fill(tensor, start + offset, into[offset : offset + size])
        else:
            for offset, values in self.chunks(tensor, start, into.numel()):
                into[offset : offset + values.numel()].copy_(values)

    def chunks(self, tensor: DiskTensor, start: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield ``(offset, values)`` for elements [start, start + count), in the dtype on disk and on the CPU, with the
        offset from ``start``. The next chunk overwrites the values. Raises as :meth:`read`."""
        dtype = tensor.dtype
        if dtype is None:
            raise CheckpointError(
                f"{tensor.file}: {tensor.key} has dtype {tensor.kind}, expected one of {', '.join(DTYPES)}"
            )
        if self._buffer is None:
            # Pinned, so that the copy to a GPU needs no staging by the driver.
            size = max(self._chunk_bytes, 8)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda())
        for offset, size in self._spans(count, dtype):
            values = self._buffer[: size * dtype.itemsize].view(dtype)
            self._fill(tensor, start + offset, values)
            yield offset, values

    def _spans(self, count: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
        """Split ``count`` elements into chunks of at most ``chunk_bytes``: yields ``(offset, size)`` in elements."""
        step = max(1, self._chunk_bytes // dtype.itemsize)
        return ((offset, min(step, count - offset)) for offset in range(0, count, step))

    def _fill(self, tensor: DiskTensor, start: int, values: Tensor) -> None:
        """Read into ``values``, on the CPU and in the dtype on disk, from element ``start`` of ``tensor`` on. Raises
        OSError if the file cannot be read, DamagedError if it ends early."""
        # By identity first: comparing paths takes as long as reading 100 kB.
        if self._descriptor is None or (tensor.file is not self._file and tensor.file != self._file):
            self._close()
            self._file, self._descriptor = tensor.file, os.open(tensor.file, os.O_RDONLY)
        if not values.numel():
            return
        target = memoryview(values.view(torch.uint8).numpy())  # type: ignore[arg-type]  # an ndarray is a buffer
        at = tensor.begin + start * values.itemsize
        with naming(tensor.file):
            while target:
                got = os.preadv(self._descriptor, [target], at)
                if not got:
                    raise DamagedError(f"{tensor.file} ended while {tensor.key} was read")
                target, at = target[got:], at + got
        self.bytes += values.nbytes
        if self._progress is not None:
            self._progress(values.nbytes)


def read_tensor(reader: Reader, tensor: DiskTensor) -> Tensor:
    """Read the whole tensor, in its dtype on disk. Raises CheckpointError if torch has no such dtype."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    reader.read(tensor, 0, whole.view(-1))
    return whole


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Pause Python's cyclic garbage collector in a block or decorated function that creates many objects and keeps them
    until its end. As their number grows, the collector repeatedly scans all objects of the process, a million with
    transformers' modules: 0.25 s each time, and a fifth of the time of writing ten thousand tensors."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
