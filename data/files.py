"""Check data files: errors in their lines, and files of another kind (archives, tables, pickles, pointers, web pages).

Imports only the standard library, so that a script can check files before it loads torch.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

MAX_PROBLEMS = 20
"""Limit of the bad lines that one error names; the rest are only counted."""

_HEAD = 4096  # bytes of a file that are looked at
_AS_ROWS = "write its rows as JSONL, one object per line"
# First bytes, the name of what has them, and what to do to get the file that was meant.
_BEGINNINGS: list[tuple[bytes, str, str]] = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "run git lfs pull in its repository"),
    (b"\x1f\x8b", "gzip-compressed", "decompress it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "decompress it with unzstd"),
    *((b"BZh%d" % level, "bzip2-compressed", "decompress it with bunzip2") for level in range(1, 10)),
    (b"\xfd7zXZ\0", "xz-compressed", "decompress it with unxz"),
    (b"\x04\x22\x4d\x18", "lz4-compressed", "decompress it with unlz4"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes too", "unpack it, or convert it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"PAR1", "a Parquet file", _AS_ROWS),
    (b"ARROW1", "an Arrow file", _AS_ROWS),
    (b"\xff\xff\xff\xff", "an Arrow stream, as datasets.save_to_disk writes", _AS_ROWS),
    (b"SQLite format 3\0", "an SQLite database", _AS_ROWS),
    (b"\x89HDF\r\n", "an HDF5 file", "convert it"),
    (b"\x93NUMPY", "a NumPy array", "convert it"),
    *((b"GGUF%c" % version, "a GGUF file", "take the checkpoint that it was made from") for version in range(1, 4)),
    (b"%PDF-", "a PDF document", "convert it to text"),
    *((b"\x80%c" % protocol, "a Python pickle", "convert it; unpickling can run code") for protocol in range(2, 6)),
    (b"\xff\xfe", "UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
]
_TAR = (257, b"ustar")  # place of the name of the format in a tar archive


class DataError(ValueError):
    """Error in the files or in their description; the message names file, line and remedy."""


class Problems:
    """Collect errors in lines, so that one run shows all of them."""

    def __init__(self) -> None:
        self.count = 0
        self._texts: list[str] = []

    def add(self, where: str, what: str) -> None:
        """Add a bad line; ``where`` is ``file:line``."""
        self.count += 1
        if len(self._texts) < MAX_PROBLEMS:
            self._texts.append(f"{where}: {what}")

    def raise_if_any(self) -> None:
        """Raise `DataError` with the first `MAX_PROBLEMS` lines and the number of the others."""
        if not self.count:
            return
        more = self.count - len(self._texts)
        rest = [f"... and {more:,} more bad lines"] if more else []
        lines = "1 bad line" if self.count == 1 else f"{self.count:,} bad lines"
        raise DataError("\n".join([f"{lines} in the data:", *self._texts, *rest]))


def check_files(files: Sequence[str | Path], *, plain: bool = False) -> list[Path]:
    """Check files and return their paths; ``plain``: they are plain text, not JSONL. Raises DataError if files are
    missing, empty, folders or of another kind; the message names all of them."""
    paths = [Path(file) for file in files]
    wrong = [f"{path}: {problem}" for path in paths if (problem := _file_problem(path, plain))]
    if wrong or not paths:
        raise DataError("\n".join(wrong) or "no data files given, expected at least one path")
    return paths


def _file_problem(path: Path, plain: bool) -> str | None:
    if not path.exists():
        return "no such file"
    if not path.is_file():
        return "found something else than a file (a folder?), expected the path of a file"
    return other_kind(path, plain=plain) if path.stat().st_size else "the file is empty"


def other_kind(path: str | PathLike[str], *, plain: bool = False) -> str | None:
    """Return a clause with the kind of a file of a wrong kind and the remedy (``is gzip-compressed: ...``), by the
    file's first bytes; None for text. With ``plain``, zero bytes are refused too (in JSONL the reader refuses them,
    with their line)."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    for beginning, kind, remedy in _BEGINNINGS:
        if head.startswith(beginning):
            return f"is {kind}: {remedy}"
    if head[_TAR[0] :].startswith(_TAR[1]):
        return "is a tar archive: unpack it"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "is an HTML page, as a failed download leaves: download the file again"
    if plain and b"\0" in head:
        return f"is not text: byte {head.index(0)} is zero"
    return None
