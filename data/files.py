"""Check data files (errors in their lines, and files of another kind: archives, pickles, pointers, web pages), and
read their rows: of JSONL, Parquet, and data sets that ``save_to_disk`` of Hugging Face datasets wrote.

Rows of tables are dictionaries like the objects of JSONL, with null for each key that only other rows have. Imports
only the standard library, and pyarrow for tables, so that a script can check files before it loads torch.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple

MAX_PROBLEMS = 20
"""Limit of the kinds of bad lines that one error names; the rest are only counted."""
_NAMED = 4  # more lines of one kind that an error names
_VALUES = re.compile(r'"(?:[^"\\]|\\.)*"|\d+')
"""Texts and numbers in a problem, in which bad lines of one kind differ."""

GZIP, ZSTD, PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
STATE = "state.json"
"""File in a folder of `datasets.Dataset.save_to_disk`."""
_SPLITS = "dataset_dict.json"
_HEAD = 4096  # bytes of a file that are looked at
LINE_BYTES = 2**26  # more than any real conversation; reading, decoding and rendering take a multiple of it
_ROWS = 1024  # of a table that are converted at a time
_JQ = " (jq 1.7 or later, as earlier ones round long numbers)"
_AS_ROWS = "write its rows as JSONL, one object per line"
# First bytes, the name of what has them, and what to do to get the file that was meant.
_BEGINNINGS: list[tuple[bytes, str, str]] = [
    (b"version https://git-lfs", "a git-lfs pointer, not the file itself", "run git lfs pull in its repository"),
    (GZIP, "gzip-compressed", "decompress it with gunzip"),
    (ZSTD, "zstd-compressed", "decompress it with unzstd"),
    *((b"BZh%d" % level, "bzip2-compressed", "decompress it with bunzip2") for level in range(1, 10)),
    (b"\xfd7zXZ\0", "xz-compressed", "decompress it with unxz"),
    (b"\x04\x22\x4d\x18", "lz4-compressed", "decompress it with unlz4"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes too", "unpack it, or convert it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (PARQUET, "a Parquet file", _AS_ROWS),
    (b"ARROW1", "an Arrow file", _AS_ROWS),
    (b"\xff\xff\xff\xff", "an Arrow stream, as datasets.save_to_disk writes", "name its folder"),
    (b"SQLite format 3\0", "an SQLite database", _AS_ROWS),
    (b"\x89HDF\r\n", "an HDF5 file", "convert it"),
    (b"\x93NUMPY", "a NumPy array", "convert it"),
    *((b"GGUF%c" % version, "a GGUF file", "take the checkpoint that it was made from") for version in range(1, 4)),
    (b"%PDF-", "a PDF document", "convert it to text"),
    *((b"\x80%c" % protocol, "a Python pickle", "convert it; unpickling can run code") for protocol in range(2, 6)),
    (b"\xff\xfe", "UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it with iconv -f UTF-16 -t UTF-8"),
]


class DataError(ValueError):
    """Error in the files or in their description; the message names file, line and remedy."""


class Problems:
    """Collect bad lines of a file by the kind of their problem, so that one run shows all kinds."""

    def __init__(self) -> None:
        self.kinds: dict[str, tuple[int, str, list[int], int]] = {}
        """For each kind, at most `MAX_PROBLEMS` of them: line number and problem of its first line, line numbers of a
        few further lines, and how many lines it has."""
        self.count = 0  # of all kinds

    def add(self, line: int, what: str) -> None:
        """Add the problem ``what`` of the line with this number; 0 for a problem of the file itself."""
        self.count += 1
        kind = _VALUES.sub("", what)
        if kind in self.kinds:
            first, problem, others, count = self.kinds[kind]
            self.kinds[kind] = (first, problem, [*others, line][:_NAMED], count + 1)
        elif len(self.kinds) < MAX_PROBLEMS:
            self.kinds[kind] = (line, what, [], 1)

    def as_json(self) -> dict[str, Any]:
        """Return the bad lines as plain JSON."""
        return {"problems": [*self.kinds.values()], "bad_lines": self.count}


def raise_bad_lines(files: Mapping[Path, Mapping[str, Any]]) -> None:
    """Raise `DataError` if files have bad lines. ``files`` maps each file to the result of its `Problems.as_json`. The
    message has a line for each kind of problem, at most `MAX_PROBLEMS`, and the number of bad lines not covered."""
    count, texts, shown = sum(facts["bad_lines"] for facts in files.values()), list[str](), 0
    for path, facts in files.items():
        for line, what, others, alike in facts["problems"][: MAX_PROBLEMS - len(texts)]:
            more = f" and {alike - 1 - len(others):,} more" * (alike - 1 > len(others))
            also = f" (also line{'s' * (alike > 2)} {', '.join(map(str, others))}{more})" if others else ""
            texts.append(f"{path}:{line}: {what}{also}" if line else f"{path}: {what}")
            shown += alike
    if count:
        rest = [f"... and {count - shown:,} more bad lines"] if count > shown else []
        lines = "1 bad line" if count == 1 else f"{count:,} bad lines"
        raise DataError("\n".join([f"{lines} in the data:", *texts, *rest]))


def check_files(files: Sequence[str | Path], *, plain: bool = False) -> list[Path]:
    """Check files and return their paths; ``plain``: expect plain text, not chats. Raises DataError if there is no
    file, or if files are missing, empty or of another kind (:func:`data_problem`); the message names all such files."""
    paths = [Path(file) for file in files]
    wrong = [f"{path}: {problem}" for path in paths if (problem := _file_problem(path, plain))]
    if wrong or not paths:
        raise DataError("\n".join(wrong) or "no data files given, expected at least one path")
    return paths


def _file_problem(path: Path, plain: bool) -> str | None:
    if not path.exists():
        return "no such file"
    return "the file is empty" if path.is_file() and not path.stat().st_size else data_problem(path, plain=plain)


def data_problem(path: str | PathLike[str], *, plain: bool) -> str | None:
    """Return a clause that says why the existing ``path`` is no data file, and what to do about it (``is a tar archive:
    unpack it``); None if it is a data file. A data file is plain text if ``plain``, else JSONL, and may be compressed
    with gzip or zstd. A Parquet file and the folder of a data set are data files, too."""
    path = Path(path)
    if path.is_dir():
        return _folder_problem(path, plain)
    if not path.is_file():
        return "is no file, expected the path of a file"
    head = first_bytes(path)
    if head.startswith((GZIP, ZSTD)):
        if head.startswith(ZSTD) and (missing := _missing()):
            return f"is zstd-compressed, {missing}, or decompress it with unzstd"
        try:
            with opened(path) as (file, _):
                head = file.read(_HEAD)
                problem = _content_problem(path, head, plain)
        except DataError as error:
            return str(error).removeprefix(f"{path}: ")
        return problem and f"is compressed, and its content {problem}"
    if head.startswith(PARQUET) and not plain:
        missing = _missing()
        return missing and f"is a Parquet file, {missing}, or {_AS_ROWS}"
    return _content_problem(path, head, plain)


def _content_problem(path: Path, head: bytes, plain: bool) -> str | None:
    if plain and re.search(r"\.jsonl?\b", path.name) and re.match(rb"(\xef\xbb\xbf)?\s*[{\[]", head):
        return (
            "has rows of JSON, expected plain text: data.kind chat reads rows; to learn texts in them, write these "
            "into a file (jq -r .text FILE); to learn the JSON itself, give the file another ending"
        )
    return _kind_problem(head, plain) or (None if plain else _json_problem(head))


def _json_problem(head: bytes) -> str | None:
    """Return a clause with the problem if ``head``, the first bytes of a file, is JSON but not one object per line."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"\[\s*\{", text):
        return "is one JSON list, expected one object per line: convert it with jq -c '.[]' FILE" + _JQ
    if re.match(rb"\{[ \t]*\r?\n", text):
        return "has JSON objects of several lines, expected one object per line: convert it with jq -c . FILE" + _JQ
    return None


def _folder_problem(path: Path, plain: bool) -> str | None:
    try:
        known = json.loads((path / _SPLITS).read_text()) if (path / _SPLITS).is_file() else {}
        if splits := known.get("splits"):
            return f"has the splits {', '.join(splits)}, expected one of them, such as {path / splits[0]}"
        state: Any = json.loads((path / STATE).read_text()) if (path / STATE).is_file() else None
        files = [file["filename"] for file in state["_data_files"]] if state else []
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        return f"is a data set whose {_SPLITS} or {STATE} is damaged ({error}): save it again"
    if state is None:
        return f"is a folder without {STATE}, expected a file, or a folder that save_to_disk of datasets wrote"
    if plain:
        return "is a data set, expected a file of plain text (data.kind)"
    if not files or (lost := [name for name in files if not (path / name).is_file()]):
        return f"is a data set without {', '.join(lost) if files else 'files'}: save it again"
    missing = _missing()
    return missing and f"is a data set, {missing}, or {_AS_ROWS}"


def _missing() -> str | None:
    return None if find_spec("pyarrow") else "which needs the package pyarrow: pip install -e '.[arrow]'"


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes] | gzip.GzipFile, Callable[[], int]]]:
    """Open a file to read its bytes; gzip and zstd files are decompressed. Yields the stream, and a function that
    returns how many bytes of the file on disk have been read. Raises DataError if compressed bytes are damaged."""
    with open(path, "rb") as raw:
        head = raw.read(len(ZSTD))
        raw.seek(0)
        try:
            if head.startswith(GZIP):
                yield gzip.GzipFile(fileobj=raw), raw.tell
            elif head == ZSTD:
                import pyarrow

                yield io.BufferedReader(pyarrow.input_stream(raw, compression="zstd")), raw.tell
            else:
                yield raw, raw.tell
        except (OSError, EOFError, zlib.error) as error:
            if getattr(error, "errno", None) is not None:  # of the disk
                raise
            raise DataError(f"{path}: is damaged, its bytes cannot be decompressed ({error}): get it again") from error


def first_bytes(path: str | PathLike[str]) -> bytes:
    """Return the first bytes of a file, by which its kind is recognized (4 KiB at most)."""
    with open(path, "rb") as file:
        return file.read(_HEAD)


def other_kind(path: str | PathLike[str]) -> str | None:
    """Return a clause with the kind of a file and the remedy (``is gzip-compressed: ...``) if its first bytes are those
    of a compressed file, an archive, an HTML page or another known kind; else None."""
    return _kind_problem(first_bytes(path), plain=False)


def _kind_problem(head: bytes, plain: bool) -> str | None:
    for beginning, kind, remedy in _BEGINNINGS:
        if head.startswith(beginning):
            return f"is {kind}: {remedy}"
    if head.startswith(b"ustar", 257):
        return "is a tar archive: unpack it"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "is an HTML page, as a failed download leaves: download the file again"
    if plain and b"\0" in head:
        return f"is not text: byte {head.index(0)} is zero"
    return None


# ---- rows


class Row(NamedTuple):
    """Row of a file: its number from 1, its line or its values, and its size in bytes, for tables an estimate."""

    number: int
    value: bytes | dict[str, Any]
    size: int
    done: int
    """Bytes of the file up to the end of this row."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes, int]]:
    """Yield the number of each line (from 1), its bytes, and how many bytes of the file have been read. Splits at
    newline bytes only: JSON strings may contain unescaped U+2028.

    A line longer than ``LINE_BYTES`` is cut after one more byte, so that `data.jsonl.conversation_of` refuses it.
    """
    with opened(path) as (file, tell):
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, tell()  # a byte order mark
            while len(line) > LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES + 1)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file. Raises DataError if the file is damaged."""
    if path.is_dir() or first_bytes(path).startswith(PARQUET):
        yield from _table_rows(path)
    else:
        for number, line, done in lines_of(path):
            yield Row(number, line, len(line), done)


def _table_rows(path: Path) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for batch, done in _saved_batches(path) if path.is_dir() else _parquet_batches(path):
            names = batch.schema.names
            if repeated := {name for name in names if names.count(name) > 1}:
                raise DataError(f"{path}: found the columns {sorted(repeated)} more than once, expected each once")
            for start in range(0, batch.num_rows, _ROWS):
                part = batch.slice(start, _ROWS)
                size = part.nbytes // part.num_rows
                for value in part.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    yield Row(number, value, size, done)
    except (pyarrow.ArrowException, ValueError, OSError, KeyError) as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        words = " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read behind row {number}, it is damaged ({words}): get it again") from error


def _parquet_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield record batches, each with the estimated number of the file's bytes up to its end."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, page_checksum_verification=True) as file:
        rows, size, before = max(file.metadata.num_rows, 1), path.stat().st_size, 0
        for batch in file.iter_batches(batch_size=_ROWS):
            before += batch.num_rows
            yield batch, size * before // rows


def _saved_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield record batches of the files and columns that ``state.json`` names, each with the bytes read so far."""
    import pyarrow

    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    before = 0
    for file in state["_data_files"]:
        with pyarrow.OSFile(str(path / file["filename"])) as source, pyarrow.ipc.open_stream(source) as batches:
            for batch in batches:
                if (columns := state.get("_format_columns")) and not state.get("_output_all_columns"):
                    batch = batch.select(columns)
                yield batch, before + source.tell()
        before += (path / file["filename"]).stat().st_size
