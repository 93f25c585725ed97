"""Write a safetensors file tensor by tensor, as they arrive.

Names, dtypes and shapes are known before the first tensor, so the header is written first and every tensor goes to its
own offset; no file is collected in memory. A thread syncs written data to disk while the next tensors are computed.
Tensors have the same order as in files of the safetensors library, so that both write the same bytes.
"""

import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from model.checkpoint.safetensors import DTYPES, INDEX
from model.ranks import naming
from model.save.aside import write_json
from quant.formats.compressed_tensors import Shapes

# In the library's order: wide elements first, so that each tensor begins at a multiple of its element's size.
ORDER = ("I64", "F64", "F32", "U32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
KINDS = {DTYPES[kind]: kind for kind in ORDER}
SYNC_BYTES = 64 * 2**20


def write_index(directory: Path, files: Mapping[str, Iterable[str]], total: int) -> None:
    """Write model.safetensors.index.json, which maps each key to its file, in ``directory``; nothing for a single file.
    ``files`` has the keys of each file; ``total`` is the number of bytes of all tensors."""
    if len(files) > 1:
        places = {key: file for file, keys in files.items() for key in keys}
        write_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, directory / INDEX)


class ShardWriter:
    """Writer of one file. Always call :meth:`close`; the file is complete only after :meth:`finish`.

    Args:
        path: the file, which must not exist.
        shapes: dtype and shape of every tensor, by key.
        head: first bytes of the file, and offset of each tensor in the file by key, for another format or metadata.
            None creates a safetensors header without metadata.

    Raises:
        OSError: the file cannot be created.
        ValueError: ``head`` is None, and safetensors files cannot store a dtype.
    """

    def __init__(self, path: Path, shapes: Shapes, head: tuple[bytes, Mapping[str, int]] | None = None) -> None:
        header, self._begin = head or safetensors_head(shapes)
        self._shapes = shapes
        self._left = {key: math.prod(shape) for key, (_, shape) in shapes.items()}  # elements to write
        self._path, self._size = path, len(header) + sum(_bytes_of(*shape) for shape in shapes.values())
        self._unsynced = 0
        self._syncing: threading.Thread | None = None
        self._failure: OSError | None = None
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._put(memoryview(header), 0)
        except OSError:
            self.close()  # the caller has no object to close
            raise

    def write(self, key: str, tensor: Tensor) -> None:
        """Write a whole tensor of the planned shape and dtype, contiguous in CPU memory; errors: :meth:`write_part`."""
        if tuple(tensor.shape) != self._shapes[key][1]:
            self._reject(key, tensor, 0)
        self.write_part(key, 0, tensor)

    def write_part(self, key: str, start: int, part: Tensor) -> None:
        """Write the elements of ``part``, contiguous in CPU memory, to the tensor ``key`` from element ``start`` on.

        The parts of a tensor may come in any order, each once. ``part`` may be changed afterwards.

        Raises:
            OSError: the disk is full, or failed; the error may be about an earlier tensor.
            KeyError: the tensor is not planned, or was written already.
            ValueError: the part does not have the planned dtype, or does not fit into the tensor.
        """
        left = self._left[key] - part.numel()
        dtype, shape = self._shapes[key]
        if part.dtype != dtype or left < 0 or start + part.numel() > math.prod(shape):
            self._reject(key, part, start)
        self._left[key] = left
        if not left:
            del self._left[key]
        if part.numel():
            data = memoryview(part.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            self._put(data, self._begin[key] + start * dtype.itemsize)

    def _reject(self, key: str, part: Tensor, start: int) -> NoReturn:
        dtype, shape = self._shapes[key]
        raise ValueError(
            f"{self._path}: {key} at element {start} is {part.dtype} {list(part.shape)}, planned {dtype} {list(shape)}"
        )

    def finish(self) -> None:
        """Check that every tensor was written, and wait until everything is on disk. Raises ValueError if tensors are
        missing, and OSError if the disk is full, or failed."""
        if self._left:
            raise ValueError(
                f"{self._path}: {len(self._left)} planned tensors were not written, for example {min(self._left)}"
            )
        self._wait()
        with naming(self._path, self._size):
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._syncing is not None:
            self._syncing.join()
        os.close(self._file)

    def _put(self, data: memoryview, at: int) -> None:
        self._unsynced += len(data)
        with naming(self._path, self._size):
            while data:
                written = os.pwrite(self._file, data, at)
                data, at = data[written:], at + written
        if self._unsynced >= SYNC_BYTES and (self._syncing is None or not self._syncing.is_alive()):
            self._wait()
            self._unsynced = 0
            self._syncing = threading.Thread(target=self._sync, daemon=True)
            self._syncing.start()

    def _sync(self) -> None:
        try:
            with naming(self._path, self._size):
                os.fdatasync(self._file)
        except OSError as error:
            self._failure = error

    def _wait(self) -> None:
        if self._syncing is not None:
            self._syncing.join()
        if self._failure is not None:
            raise self._failure


def _bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def safetensors_head(shapes: Shapes, metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """Build the header of a safetensors file, with ``metadata`` in addition to ``format: pt``. Returns its bytes, and
    the offset of each tensor in the file by key. Raises ValueError for a dtype that the format lacks."""
    if unknown := sorted({str(dtype) for dtype, _ in shapes.values() if dtype not in KINDS}):
        raise ValueError(f"safetensors files cannot store the dtypes {', '.join(unknown)}")
    places: dict[str, dict[str, object]] = {}
    begin: dict[str, int] = {}
    end = 0
    for key in sorted(shapes, key=lambda key: (ORDER.index(KINDS[shapes[key][0]]), key)):
        dtype, shape = shapes[key]
        begin[key], end = end, end + _bytes_of(dtype, shape)
        places[key] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [begin[key], end]}
    text = json.dumps(
        {"__metadata__": {"format": "pt", **(metadata or {})}, **places}, separators=(",", ":"), ensure_ascii=False
    ).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, {key: len(header) + offset for key, offset in begin.items()}
