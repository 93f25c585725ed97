"""Read the rows of data files: JSONL, Parquet, and data sets that ``save_to_disk`` of Hugging Face datasets wrote.

Rows of tables are dictionaries like the objects of JSONL, with null for each key that only other rows have.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.files import PARQUET, STATE, DataError, first_bytes
from data.jsonl import lines_of

_ROWS = 1024  # of a table that are converted at a time


class Row(NamedTuple):
    """Row of a file: its number from 1, its line or its values, and its size in bytes, for tables an estimate."""

    number: int
    value: bytes | dict[str, Any]
    size: int
    done: int
    """Bytes of the file up to the end of this row."""


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
    """Yield record batches, and the bytes up to their ends, about."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, page_checksum_verification=True) as file:
        rows, size, before = max(file.metadata.num_rows, 1), path.stat().st_size, 0
        for batch in file.iter_batches(batch_size=_ROWS):
            before += batch.num_rows
            yield batch, size * before // rows


def _saved_batches(path: Path) -> Iterator[tuple[Any, int]]:
    """Yield record batches of the files that ``state.json`` names, of the columns that it names."""
    import pyarrow

    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    before = 0
    for file in state["_data_files"]:
        with pyarrow.OSFile(str(path / file["filename"])) as source, pyarrow.ipc.open_stream(source) as batches:
            for batch in batches:
                if columns := state.get("_format_columns"):
                    batch = batch.select(columns)
                yield batch, before + source.tell()
        before += (path / file["filename"]).stat().st_size
