"""Read and write files of a training checkpoint: with fsync, checksums and deferred errors; reading runs no code.

DeepSpeed writes through a checkpoint engine, its interface for other storage. :class:`CheckedFiles` is a checkpoint
engine for plain files with three additions to DeepSpeed's own:

- it computes size and CRC-32 of each file while writing, for the checkpoint's manifest. CRC-32 detects storage errors
  (truncation, a block of zeros, a flipped bit) at more than 1 GB/s per rank, but no tampering;
- it calls fsync on each file: otherwise a renamed directory may hold empty files after a power loss;
- it stores errors instead of raising. ``engine.save_checkpoint`` is a collective, and a rank that raised in it (disk
  full) would leave the others waiting. The caller gathers :attr:`CheckedFiles.failure` of all ranks afterwards.
"""

import os
import re
import zlib
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from model.checkpoint.safetensors import AGAIN
from model.ranks import naming
from model.save.aside import sync
from model.zero import CHECKPOINT_GLOBALS, LeftOut

_CHUNK_BYTES = 1 << 24


class _Stream:
    """Output file for ``torch.save``. After the first error it only counts bytes, so that torch.save finishes.
    torch.save would turn an exception into a RuntimeError about an unexpected position in the archive."""

    def __init__(self, path: Path) -> None:
        self.bytes = self.crc32 = 0
        self.error: OSError | None = None
        self._file = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            self.error = error

    def write(self, data: memoryview | bytes) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        if self.error is None and self._file is not None:
            self.crc32 = zlib.crc32(data, self.crc32)
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return size

    def flush(self) -> None:
        """Do nothing: :meth:`close` flushes."""

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.error = self.error or error
        try:
            self._file.close()  # tries again to write the rest of the buffer
        except OSError as error:
            self.error = self.error or error


class CheckedFiles(CheckpointEngine):
    """Checkpoint engine for the files of one checkpoint on one rank; stores their checksums and the first error.

    Args:
        left_out: parameters that the checkpoint does not contain.

    Attributes:
        written: bytes and CRC-32 of every file, by its name.
        bytes: total size of all files, including those that failed.
        failure: the first error, with the file's name; None if there was none.
    """

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__()
        self.left_out = left_out
        self.written: dict[str, tuple[int, int]] = {}
        self.bytes = 0
        self.failure: str | None = None

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Remove the left-out parameters from ``state_dict`` in place, and write it to a file. An ``OSError`` is stored
        in :attr:`failure`, any other exception is raised."""
        path = Path(path)
        self.left_out.leave_out(state_dict)
        stream = _Stream(path)
        torch.save(state_dict, cast(IO[bytes], stream))
        stream.close()
        self.bytes += stream.bytes
        if stream.error is None:
            self.written[path.name] = (stream.bytes, stream.crc32)
        else:
            self.fail(path.name, stream.error)
            path.unlink(missing_ok=True)  # free the space; the checkpoint is lost anyway

    def adopt(self, path: Path, target: Path) -> None:
        """Move ``path``, which DeepSpeed has written, to ``target`` in the checkpoint, with fsync and checksum. An
        ``OSError`` is stored in :attr:`failure`."""
        try:
            path.rename(target)
            with target.open("rb") as file:
                os.fsync(file.fileno())
            self.written[target.name] = (target.stat().st_size, file_crc32(target))
        except OSError as error:
            self.fail(target.name, error)

    def fail(self, name: str, error: OSError) -> None:
        """Store an error of the file ``name`` in :attr:`failure`, unless one is stored already."""
        self.failure = self.failure or f"{name}: {error.strerror or error}"

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a saved state for DeepSpeed without running code in the file (:func:`read_object`), and put back the
        parameters that were left out of it when it was saved (:attr:`left_out`). ``map_location`` is that of
        ``torch.load``. Raises ValueError if the file cannot be read, or holds other objects than DeepSpeed saves."""
        state = read_object(Path(path), map_location=map_location)
        self.left_out.put_in(state)
        return state

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: the directory exists."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing and return True: the caller renames the directory."""
        return True


def read_object(path: Path, *, map_location: Any = None, mmap: bool = False) -> Any:
    """Read a file of ``torch.save`` without running code: tensors, plain values and the few classes DeepSpeed saves.

    A pickle can run code; torch's restricted unpickler builds only classes of an allowlist without side effects.

    Args:
        map_location: device of the tensors, as for ``torch.load``.
        mmap: map tensors into memory instead of reading them.

    Raises:
        ValueError: the file cannot be read, or contains other objects; the message names the file and the reason.
    """
    try:
        with torch.serialization.safe_globals(CHECKPOINT_GLOBALS):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except Exception as error:  # arbitrary content can raise any exception
        found = re.search(r"GLOBAL (\S+)", str(error))
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
        if found is None:
            raise ValueError(f"{path} cannot be read ({said}): expected a file of torch.save: {AGAIN}") from error
        raise ValueError(
            f"{path} asks for {found[1]}: expected tensors and plain values, as DeepQAT writes them; anything else "
            "could run code, and is not loaded"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file and flush it to disk (fsync)."""
    with naming(path), path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text atomically by a rename: readers see the old or the new text, also after a crash."""
    aside = path.with_name(f"{path.name}.partial")
    aside.unlink(missing_ok=True)  # it may be a link, and writing would change its target
    write_text(aside, text)
    os.replace(aside, path)
    sync(path.parent)


def file_crc32(path: Path) -> int:
    """Compute the CRC-32 of a file. Raises OSError if it cannot be read."""
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32
