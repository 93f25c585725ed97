"""The files of a training checkpoint: written through to the disk, with a checksum, and never raising on one rank only.
Reading one runs no code (:func:`read_object`), whoever wrote it.

DeepSpeed writes through a checkpoint engine, an interface that it offers for other storage. :class:`CheckedFiles` is
one for plain files that does three things more than DeepSpeed's own:

- it counts bytes and a CRC-32 as they are written, which the checkpoint's manifest then holds. CRC-32 finds what
  storage does to a file (cut short, a block of zeros, a flipped bit) at more than 1 GB/s per rank; it is not against
  anybody's intent;
- it calls fsync before it counts a file as written: after a power loss, a renamed directory may else hold empty files;
- it keeps an error to itself. ``engine.save_checkpoint`` is a collective, and a rank that raised in the middle of it
  (its disk is full) would leave the others waiting. The caller asks all ranks after it
  (:attr:`CheckedFiles.failure`).
"""

import os
import re
import zlib
from pathlib import Path
from typing import IO, Any, cast

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from model.zero import CHECKPOINT_GLOBALS, LeftOut

CHUNK_BYTES = 1 << 24


class _Stream:
    """A file that ``torch.save`` writes to. After the first error it only counts bytes, so that torch.save comes to its
    end.

    An exception inside torch.save would come out as a RuntimeError about an unexpected position in the archive.
    """

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
        """Do nothing: :meth:`close` writes everything through."""

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self.error = self.error or error
        try:
            self._file.close()  # tries once more to write what is left in its buffer
        except OSError as error:
            self.error = self.error or error


class CheckedFiles(CheckpointEngine):
    """Writes the files of one checkpoint on one rank, and remembers what became of them.

    Args:
        left_out: the parameters that the checkpoint does not hold.

    Attributes:
        written: bytes and CRC-32 of every file, by its name.
        bytes: what all files take, those that could not be written too.
        failure: the first error, with the file's name; None if there was none.
    """

    def __init__(self, left_out: LeftOut) -> None:
        super().__init__()
        self.left_out = left_out
        self.written: dict[str, tuple[int, int]] = {}
        self.bytes = 0
        self.failure: str | None = None

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Write an object to a file. An ``OSError`` ends in :attr:`failure`, any other exception is raised."""
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
            path.unlink(missing_ok=True)  # room for the others; the checkpoint is lost anyway

    def fail(self, name: str, error: OSError) -> None:
        """Remember an error."""
        self.failure = self.failure or f"{name}: {error.strerror or error}"

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read an object for DeepSpeed, see :func:`read_object`."""
        state = read_object(Path(path), map_location=map_location)
        self.left_out.put_in(state)
        return state

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: the directory is there."""

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: the caller renames the directory."""
        return True


def read_object(path: Path, *, map_location: Any = None, mmap: bool = False) -> Any:
    """Read what ``torch.save`` wrote into a file: tensors, plain values and the few classes that DeepSpeed keeps.

    A pickle is a program. torch's restricted unpickler runs none: it makes only what is on a list, which has no
    function that does anything.

    Args:
        path: the file.
        map_location: as of ``torch.load``.
        mmap: map tensors into memory instead of reading them.

    Raises:
        ValueError: the file cannot be read, or holds anything else; names the file and what that is.
    """
    try:
        with torch.serialization.safe_globals(CHECKPOINT_GLOBALS):
            return torch.load(path, map_location=map_location, mmap=mmap, weights_only=True)
    except Exception as error:  # a file of any content leads the unpickler anywhere
        found = re.search(r"GLOBAL (\S+)", str(error))
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
        what = f"asks for {found[1]}" if found else f"cannot be read ({said})"
        raise ValueError(
            f"{path} {what}: expected tensors and plain values, as DeepQAT writes them; anything else could run code, "
            "and is not loaded"
        ) from error


def sync_directory(directory: Path) -> None:
    """Make names in a directory (new files, renames) last through a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a text file through to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Give a file a new text in one rename: whoever reads it sees the old one or the new one, and so does a crash."""
    aside = path.with_name(f"{path.name}.partial")
    aside.unlink(missing_ok=True)  # it may be somebody's link to a file elsewhere
    write_text(aside, text)
    os.replace(aside, path)
    sync_directory(path.parent)


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's bytes, read in chunks. Raises OSError."""
    crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32
