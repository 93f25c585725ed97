"""Rows of compressed files, Parquet files and saved data sets: the samples and counts of the same rows as JSONL."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from data import files
from data.chat import read_chat
from data.files import DataError
from data.samples import samples_of
from data.text import read_text
from tests.lib.tiny import TEXT, tiny_tokenizer
from tests.unit.data.chats import conversation, write

TOKENIZER = tiny_tokenizer()


def rows_of(rng: random.Random, count: int = 40) -> list[dict[str, Any]]:
    """Rows of which each has keys that others have not, as null in a table."""
    kinds: list[dict[str, Any]] = [
        {"messages": conversation(rng), "id": 3},
        {"input": "a?", "output": "b", "system": "be"},
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}],
            "score": 0.5,
        },
    ]
    return [rng.choice(kinds) for _ in range(count)]


def content(path: Path, **options: Any) -> Any:
    """All that a run takes from a file, without its name."""
    samples, counts = read_chat([path], TOKENIZER, **{"max_length": 300, "loss_on": "all", **options})
    notes = [note.replace(str(path), "") for note in counts.notes()]
    return samples_of([*samples]).key, [sample.line for sample in samples], counts.summary(), notes


def test_compressed_files_are_read_by_their_first_bytes(tmp_path, rng):
    plain, packed, two = (tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"))
    write(plain, *rows_of(rng), "", *rows_of(rng))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    half = plain.read_bytes().index(b"\n") + 1  # as two files that were joined
    two.write_bytes(gzip.compress(plain.read_bytes()[:half]) + gzip.compress(plain.read_bytes()[half:]))
    assert content(plain) == content(packed) == content(two)
    (tmp_path / "a.txt").write_text(TEXT * 3)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(TEXT.encode() * 3))
    blocks = [samples_of(read_text([tmp_path / name], TOKENIZER, 16)).key for name in ("a.txt", "b.txt.gz")]
    assert blocks[0] == blocks[1]


def test_damaged_compressed_files_are_errors(tmp_path, rng):
    """Wherever they are damaged: no part of them becomes samples."""
    path, rows = tmp_path / "a.jsonl.gz", rows_of(rng)
    plain = write(tmp_path / "a.jsonl", *rows)
    expected, whole = content(plain), gzip.compress(plain.read_bytes())
    seen = set()
    for _ in range(60):
        damaged, place = bytearray(whole), rng.randrange(3, len(whole))
        if cut := rng.random() < 0.5:
            del damaged[place:]
        else:
            damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert content(path) == expected and not cut  # a bit of the header that says nothing
        except DataError as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error), error
            seen.add("is damaged" in str(error))
    assert True in seen


def test_what_is_inside_of_a_compressed_file_is_checked_too(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"<html>"))
    for read in (lambda: content(path), lambda: read_text([path], TOKENIZER, 8)):
        with pytest.raises(DataError, match=r"a\.jsonl\.gz: is compressed, and its content is an HTML page"):
            read()


@pytest.mark.parametrize("head", [b"PAR1\x15\x04", b"\x28\xb5\x2f\xfd123"])
def test_a_file_that_needs_a_package_says_so(tmp_path, monkeypatch, head):
    (tmp_path / "a.jsonl").write_bytes(head)
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"which needs the package pyarrow: pip install -e '\.\[arrow\]', or "):
        content(tmp_path / "a.jsonl")


@pytest.fixture
def pyarrow():
    return pytest.importorskip("pyarrow", reason="the extra arrow: make test-arrow")


def saved(folder: Path, table: Any, **state: Any) -> Path:
    """Write a table as `datasets.Dataset.save_to_disk` does, in two files."""
    import pyarrow

    folder.mkdir()
    half, names = table.num_rows // 2, ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part, max_chunksize=7)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], **state}))
    return folder


def forms(directory: Path, rows: list[dict[str, Any]]) -> list[Path]:
    import pyarrow
    from pyarrow import parquet

    keys = list(dict.fromkeys(key for row in rows for key in row))
    filled = [{key: row.get(key) for key in keys} for row in rows]
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.Table.from_pylist(filled).schema)
    parquet.write_table(table, directory / "a.parquet", row_group_size=9)
    with pyarrow.output_stream(str(directory / "a.jsonl.zst"), compression="zstd") as stream:
        stream.write(write(directory / "b.jsonl", *rows).read_bytes())
    return [directory / "a.parquet", saved(directory / "saved", table), directory / "a.jsonl.zst"]


def test_tables_give_what_their_rows_give_as_lines(pyarrow, tmp_path, rng):
    rows = rows_of(rng)
    expected = content(write(tmp_path / "a.jsonl", *rows))
    mapped = {"fields": {"input": "question", "output": "answer"}}
    for path in forms(tmp_path, rows):
        assert content(path) == expected, path
    (folder := tmp_path / "mapped").mkdir()
    pairs = [{"question": f"{n}?", "answer": str(n), "other": None if n % 2 else n} for n in range(9)]
    expected = content(write(tmp_path / "c.jsonl", *pairs), **mapped)
    for path in forms(folder, pairs):
        assert content(path, **mapped) == expected, path


def test_bad_rows_of_tables_are_named(pyarrow, tmp_path):
    rows = [{"input": "a", "output": "b"}, {"input": None, "output": "b"}, {"input": "c", "output": "d"}]
    for path in forms(tmp_path, rows):
        with pytest.raises(DataError, match=rf"^1 bad line in the data:\n{path}:2: found the keys"):
            content(path)


def test_damaged_tables_are_errors_in_a_line(pyarrow, tmp_path, rng):
    rows = rows_of(rng)
    paths = forms(tmp_path, rows)
    paths[1:2] = [paths[1] / "data-00001-of-00002.arrow", paths[1] / "state.json"]
    refused = 0
    for _ in range(40):
        file = rng.choice(paths)
        path = file.parent if file.parent.name == "saved" else file
        whole = file.read_bytes()
        file.write_bytes(whole[: rng.randrange(4, len(whole))] if rng.random() < 0.7 else whole[:4] + rng.randbytes(50))
        try:
            content(path)
        except DataError as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error), (file, error)
        file.write_bytes(whole)
    assert refused > 30


def test_folders_and_columns_that_are_not_one_data_set(pyarrow, tmp_path):
    table = pyarrow.Table.from_pylist([{"input": "a", "output": "b", "more": 1}] * 4)
    both = tmp_path / "both"
    both.mkdir()
    (both / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    saved(both / "train", table)
    twice = saved(tmp_path / "twice", pyarrow.table([["a"], ["b"], ["c"]], names=["input", "output", "input"]))
    for path, said in (
        (both, f"has the splits train, test, expected one of them, such as {both / 'train'}"),
        (tmp_path, r"is a folder without state\.json"),
        (twice, r"found the columns \['input'\] more than once"),
    ):
        with pytest.raises(DataError, match=f"^{path}: {said}"):
            content(path)
    with pytest.raises(DataError, match=r"is a data set, expected a file of plain text"):
        read_text([both / "train"], TOKENIZER, 8)
    (_, _, _, notes), chosen = (
        content(both / "train"),
        saved(tmp_path / "chosen", table, _format_columns=["input", "output"]),
    )
    assert '"more"' in notes[0] and not content(chosen)[3]
    formatted = saved(tmp_path / "formatted", table, _format_columns=["input", "output"], _output_all_columns=True)
    assert content(formatted)[3] == notes
    dated = pyarrow.table([["a"], pyarrow.array([0], pyarrow.timestamp("s"))], names=["input", "output"])
    with pytest.raises(DataError, match=r"dated:1: .*1970-01-01 00:00:00"):
        content(saved(tmp_path / "dated", dated))
