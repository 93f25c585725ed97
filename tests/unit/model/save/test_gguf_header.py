"""Headers of GGUF files that announce more than there is are refused; the package gguf would read for ever."""

import struct
from pathlib import Path

import pytest

from model.save.gguf_file import check_header

HUGE = 2**60


def begin(tensors: int, metadata: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, metadata)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def strings(count: int, *values: str) -> bytes:
    return text("tokens") + struct.pack("<IIQ", 9, 8, count) + b"".join(map(text, values))


SMALL = text("a") + struct.pack("<If", 6, 1.0)
TENSOR = text("t") + struct.pack("<IQQIQ", 2, 3, 5, 0, 0)


def test_what_fits_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(
        begin(1, 3) + SMALL + strings(2, "one", "") + text("b") + struct.pack("<I", 8) + text("x") + TENSOR
    )
    check_header(path)


@pytest.mark.parametrize(
    ("data", "said"),
    {
        "nothing": (b"", "does not begin"),
        "another file": (b"PK\x03\x04" + bytes(40), "does not begin"),
        "another version": (begin(0, 0, version=2**31), "does not begin"),
        "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "does not begin"),
        "tensors": (begin(HUGE, 0), "announces 8 bytes after"),
        "metadata": (begin(0, 2**64 - 1) + SMALL, "announces 8 bytes after"),
        "a key": (begin(0, 1) + struct.pack("<Q", HUGE) + b"abc", "announces 1,152,921,504,606,846,976 bytes"),
        "a text": (begin(0, 1) + text("a") + struct.pack("<IQ", 8, HUGE), "announces 1,152,921,504,606,846,976"),
        "an array": (begin(0, 1) + text("a") + struct.pack("<IIQ", 9, 4, HUGE), "announces 4,611,686,018,427,387,904"),
        "texts": (begin(0, 1) + strings(HUGE, "a", "b"), "announces 8 bytes after"),
        "arrays of arrays": (begin(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "has the unknown type 9"),
        "an unknown type": (begin(0, 1) + text("a") + struct.pack("<I", 77), "has the unknown type 77"),
        "dimensions": (begin(1, 0) + text("t") + struct.pack("<I", 2**31), "has 2147483648 dimensions"),
        "an offset": (begin(1, 0) + TENSOR[:-8] + struct.pack("<Q", HUGE), "begins after the end"),
    }.values(),
)
def test_what_does_not_fit_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=said):
        check_header(path)
