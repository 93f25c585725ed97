"""Files of another kind than text are named by their first bytes, and texts are taken whatever they begin with."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from data.chat import read_chat
from data.files import DataError, data_problem, other_kind
from data.text import read_text
from tests.lib.tiny import tiny_tokenizer

ROW = json.dumps({"input": "What?", "output": "That."}).encode() + b"\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n"


def archive(kind: str) -> bytes:
    """Put a data file into an archive, or a container, as the usual program does."""
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("train.jsonl", ROW)
    elif kind == "tar":
        with tarfile.open(fileobj=file, mode="w") as packed:
            entry = tarfile.TarInfo("train.jsonl")
            entry.size = len(ROW)
            packed.addfile(entry, io.BytesIO(ROW))
    elif kind == "torch":
        torch.save({"weight": torch.ones(2)}, file)
    elif kind == "numpy":
        np.save(file, np.ones(3))
    return file.getvalue()


FILES = {
    "is compressed, and its content is a tar archive: unpack it": gzip.compress(archive("tar")),
    "is compressed, and its content is gzip-compressed": gzip.compress(gzip.compress(ROW)),
    "is bzip2-compressed": bz2.compress(ROW),
    "is xz-compressed": lzma.compress(ROW),
    "is a zip archive": archive("zip"),
    "is a zip archive, as torch.save writes too": archive("torch"),
    "is a tar archive: unpack it": archive("tar"),
    "is an Arrow file": b"ARROW1\0\0",
    "is an Arrow stream": b"\xff\xff\xff\xff\x08\x01\0\0",
    "is a NumPy array": archive("numpy"),
    "is a GGUF file": b"GGUF\x03\0\0\0",
    "is a Python pickle": pickle.dumps({"a": 1}),
    "is UTF-16 text": ROW.decode().encode("utf-16"),
    "is a git-lfs pointer, not the file itself: run git lfs pull": POINTER,
    "is an HTML page, as a failed download leaves: download the file": b"\n<!DOCTYPE html><html>Not found</html>",
    "is an HTML page": b"\xef\xbb\xbf <HTML>",
}


@pytest.mark.parametrize("said", FILES)
def test_a_file_of_another_kind_is_named_by_both_readers(tmp_path: Path, said: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(FILES[said])
    for read in (
        lambda: read_chat([path], tiny_tokenizer(), max_length=64),
        lambda: read_text([path], tiny_tokenizer(), 8),
    ):
        with pytest.raises(DataError) as raised:
            read()
        assert str(raised.value).startswith(f"{path}: {said}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" + ROW + b"," + ROW + b"]", "is one JSON list, expected one object per line"),
        (json.dumps([json.loads(ROW)], indent=2).encode(), "is one JSON list"),
        (b"\xef\xbb\xbf" + json.dumps(json.loads(ROW), indent=2).encode(), "has JSON objects of several lines"),
        (gzip.compress(b" [" + ROW + b"]", mtime=0), "is compressed, and its content is one JSON list"),
    ],
)
def test_json_that_is_not_one_object_per_line_is_named_once(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "train.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_chat([path], tiny_tokenizer(), max_length=64)
    assert str(raised.value).startswith(f"{path}: {said}") and "FILE (jq 1.7" in str(raised.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_rows_of_json_are_no_plain_text(tmp_path: Path, name: str) -> None:
    """Else the model would learn braces and keys; a file of another name may be JSON."""
    for path in (tmp_path / name, tmp_path / "json.txt"):
        path.write_bytes(gzip.compress(ROW * 9) if path.suffix == ".gz" else ROW * 9)
    with pytest.raises(
        DataError, match=rf"{name}: .*has rows of JSON, expected plain text: data\.kind chat reads rows; .*jq -r"
    ):
        read_text([tmp_path / name], tiny_tokenizer(), 8)
    assert read_text([tmp_path / "json.txt"], tiny_tokenizer(), 8)


def test_zero_bytes_are_no_plain_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"some words\0\0\0")
    with pytest.raises(DataError, match=r"text\.txt: is not text: byte 10 is zero"):
        read_text([path], tiny_tokenizer(), 8)


@pytest.mark.parametrize(
    "text", ["GGUF is a format.", "PK is short for", "BZh, he said", "PAR2", "7z", "version 2", "", "On <html> tags"]
)
def test_a_text_that_begins_alike_is_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text)
    assert data_problem(path, plain=True) is None and other_kind(path) is None
