"""Check that the header of a GGUF file fits into the file.

Its counts and lengths are 64-bit numbers, which the package gguf trusts: a file of 100 bytes could keep it busy for
centuries.

According to ggml's docs/gguf.md: magic, version, counts of tensors and of metadata; each metadata entry has a key, a
type and a value; each tensor a name, its dimensions, a type and an offset.
"""

import os
import struct
from pathlib import Path
from typing import BinaryIO

# Bytes of a value by its type; 8 is a string, 9 an array.
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS


def check_header(path: Path) -> None:
    """Walk over the header of a little-endian GGUF file.

    Raises:
        ValueError: not a GGUF file, or shorter than its header announces.
    """
    with path.open("rb") as file:
        walk = _Walk(file)
        if file.read(4) != b"GGUF" or walk.number("<I") not in (2, 3):
            raise ValueError("it does not begin as one of version 2 or 3 does")
        tensors, metadata = walk.number("<Q"), walk.number("<Q")
        for _ in range(metadata):
            walk.text()
            walk.value(walk.number("<I"))
        for _ in range(tensors):
            walk.text()
            dimensions = walk.number("<I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
            walk.skip(8 * dimensions + 4)
            if walk.number("<Q") > walk.size:
                raise ValueError("a tensor begins behind the end of the file")


class _Walk:
    """Cursor in a file that never passes its end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = os.fstat(file.fileno()).st_size

    def number(self, kind: str) -> int:
        """Read the next number, in a format of :mod:`struct`."""
        self._expect(struct.calcsize(kind))
        return int(struct.unpack(kind, self.file.read(struct.calcsize(kind)))[0])

    def skip(self, count: int) -> None:
        """Skip ``count`` bytes."""
        self._expect(count)
        self.file.seek(count, os.SEEK_CUR)

    def text(self) -> None:
        """Skip a string: a length, and as many bytes."""
        self.skip(self.number("<Q"))

    def value(self, kind: int) -> None:
        """Skip a value of metadata."""
        if kind == _TEXT:
            self.text()
        elif kind == _ARRAY:
            inner, count = self.number("<I"), self.number("<Q")
            if inner == _TEXT:
                self._expect(8 * count)
                for _ in range(count):
                    self.text()
            else:
                self.skip(self._bytes(inner) * count)
        else:
            self.skip(self._bytes(kind))

    def _bytes(self, kind: int) -> int:
        if kind not in _BYTES:
            raise ValueError(f"a value of metadata has type {kind}, which is not known here")
        return _BYTES[kind]

    def _expect(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise ValueError(f"its header announces {count:,} bytes behind byte {self.file.tell():,} of {self.size:,}")
