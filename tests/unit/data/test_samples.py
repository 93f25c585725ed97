"""A checkpoint's tokenizer is read, or refused by name in one line; files that are damaged or made to do harm run no
code, raise nothing else and do not hang."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.chat import read_chat
from data.samples import DataError, load_tokenizer
from data.text import read_text
from tests.lib.mutations import value
from tests.lib.patience import ends
from tests.lib.tiny import TEXT, tiny_checkpoint, tiny_tokenizer

FILES = TOKENIZER, CONFIG = ("tokenizer.json", "tokenizer_config.json")
AUTO_MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoProcessor": "evil.Evil", "AutoConfig": "evil.Evil"}


class Evil:
    """Pickled as a call that makes a directory."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tokenizer") / "source")


def damaged(source: Path, folder: Path, files: dict[str, bytes | None]) -> Path:
    """A copy of a checkpoint with other files, None for one that is missing."""
    shutil.copytree(source, folder)
    for name, content in files.items():
        (folder / name).unlink(missing_ok=True) if content is None else (folder / name).write_bytes(content)
    return folder


def reads(folder: Path) -> bool:
    """Read data with a tokenizer; return False if that is an error by name."""
    text, chats = folder / "text.txt", folder / "chats.jsonl"
    text.write_text(TEXT)
    chats.write_text(json.dumps({"input": "What is this?", "output": "That is that."}) + "\n")
    try:
        tokenizer = load_tokenizer(folder)
        read_text([text], tokenizer, 16)
        read_chat([chats], tokenizer, max_length=128)
    except DataError:
        return False
    return True


def test_the_tokenizer_of_a_checkpoint(source):
    text = "What it says."
    assert load_tokenizer(source)(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", "null", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_one_that_is_not_there_or_damaged_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / TOKENIZER).write_text(content, encoding="latin-1")
        (tmp_path / CONFIG).write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError) as raised:
        load_tokenizer(tmp_path)
    text = str(raised.value)
    assert text.startswith(f"{tmp_path}: expected a tokenizer") and "\n" not in text


@pytest.mark.parametrize("name", [CONFIG, "processor_config.json", "config.json"])
@pytest.mark.parametrize("auto_map", [AUTO_MAP, ["evil.Evil", None], "evil.Evil", 3])
def test_code_that_a_tokenizer_asks_for_does_not_run(source, tmp_path, name, auto_map):
    config = json.loads((source / name).read_text()) if (source / name).exists() else {}
    classes = {"tokenizer_class": "Evil", "processor_class": "Evil"} if name != "config.json" else {}
    content = json.dumps({**config, "auto_map": auto_map, **classes}).encode()
    evil = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n".encode()
    path = damaged(source, tmp_path / "model", {name: content, "evil.py": evil})
    try:
        assert load_tokenizer(path)("Two words")["input_ids"] == tiny_tokenizer()("Two words")["input_ids"]
    except DataError as error:
        assert str(error).startswith(f"{path}: expected a tokenizer") and "\n" not in str(error)
    assert not (tmp_path / "ran").exists()


def test_files_that_are_made_to_do_harm(source, tmp_path):
    mark, config = tmp_path / "mark", json.loads((source / CONFIG).read_text())
    passwords = {"vocab_file": "/etc/passwd", "tokenizer_file": "/etc/passwd"}
    prefixed, far = (json.loads((source / TOKENIZER).read_text()) for _ in range(2))
    far["model"]["vocab"]["zz"] = 2**31  # minutes, and memory for each id below it
    # Longer than a merged token: a panic of the tokenizers library.
    prefixed["model"]["continuing_subword_prefix"] = "x" * 100
    cases: list[tuple[dict[str, bytes | None], bool]] = [
        ({TOKENIZER: b"[" * 100_000}, False),
        ({CONFIG: b'{"a":' * 100_000}, False),
        ({TOKENIZER: b"\xff\xfe"}, False),
        ({TOKENIZER: None}, False),
        ({"chat_template.jinja": b"\xff"}, False),
        ({TOKENIZER: None, "tokenizer.model": pickle.dumps(Evil(mark))}, False),
        ({"tokenizer.model": pickle.dumps(Evil(mark))}, True),
        ({TOKENIZER: json.dumps(prefixed).encode()}, False),
        ({TOKENIZER: json.dumps(far).encode()}, False),
        ({CONFIG: json.dumps({**config, **passwords}).encode()}, True),
    ]
    for index, (files, expected) in enumerate(cases):
        with ends(list(files)):
            assert reads(damaged(source, tmp_path / str(index), files)) == expected, (index, list(files))
        assert not mark.exists(), index


@pytest.mark.parametrize("count", (30, pytest.param(500, marks=pytest.mark.full)))
def test_mutated_files_are_errors_or_tokenizers(source, tmp_path, count, rng):
    for index in range(count):
        folder = damaged(source, tmp_path / str(index), {})
        what = value(rng, folder / rng.choice(FILES))
        with ends(what):
            reads(folder)
        shutil.rmtree(folder)
