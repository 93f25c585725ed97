"""The files of a tokenizer that somebody made to do harm, or damaged: an error by name or a tokenizer that reads data;
no code, no other exception, no hang."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data.chat import read_chat
from data.samples import DataError, load_tokenizer
from data.text import read_text
from tests.lib.patience import ends
from tests.lib.tiny import TEXT, tiny_checkpoint

FILES = ("tokenizer.json", "tokenizer_config.json")
VALUES = [None, [], {}, "", 0, -1, 2**63, float("inf"), "x" * 10**5, [[[[]]]], True, {"a": {"b": 1}}, "../../x", "\0"]


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


def reads(folder: Path, directory: Path) -> bool:
    """Whether data is read with a tokenizer; False where it is an error by name."""
    try:
        tokenizer = load_tokenizer(folder)
        read_text([directory / "text.txt"], tokenizer, 16)
        read_chat([directory / "chats.jsonl"], tokenizer, max_length=128)
    except DataError:
        return False
    return True


def write_data(directory: Path) -> None:
    (directory / "text.txt").write_text(TEXT)
    (directory / "chats.jsonl").write_text(json.dumps({"input": "What is this?", "output": "That is that."}) + "\n")


def with_prefix(source: Path, prefix: str) -> Any:
    """The tokenizer of a checkpoint with a prefix of all parts of a word but the first."""
    tokenizer = json.loads((source / FILES[0]).read_text())
    return {**tokenizer, "model": {**tokenizer["model"], "continuing_subword_prefix": prefix}}


def test_files_that_are_made_to_do_harm(source, tmp_path):
    write_data(tmp_path)
    mark, config = tmp_path / "mark", json.loads((source / FILES[1]).read_text())
    code = f"import os; os.mkdir({str(mark)!r})".encode()
    cases: list[tuple[dict[str, bytes | None], bool]] = [
        ({FILES[0]: b"[" * 100_000}, False),
        ({FILES[1]: b'{"a":' * 100_000}, False),
        ({FILES[0]: b"\xff\xfe"}, False),
        ({FILES[0]: None}, False),
        ({"chat_template.jinja": b"\xff"}, False),
        ({FILES[0]: None, "tokenizer.model": pickle.dumps(Evil(mark))}, False),
        ({"tokenizer.model": pickle.dumps(Evil(mark))}, True),
        # Longer than a merged token: a panic of the tokenizers library.
        ({FILES[0]: json.dumps(with_prefix(source, "x" * 100)).encode()}, False),
        (
            {
                FILES[1]: json.dumps({**config, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}).encode(),
                "evil.py": code,
            },
            True,
        ),
        (
            {FILES[1]: json.dumps({**config, "vocab_file": "/etc/passwd", "tokenizer_file": "/etc/passwd"}).encode()},
            True,
        ),
    ]
    for index, (files, expected) in enumerate(cases):
        with ends(list(files)):
            assert reads(damaged(source, tmp_path / str(index), files), tmp_path) == expected, (index, list(files))
        assert not mark.exists(), index


def mutations(content: Any, rng: random.Random) -> Iterator[Any]:
    """A value of a JSON file replaced or removed, again and again."""
    places: list[list[Any]] = []

    def walk(value: Any, path: list[Any]) -> None:
        places.append(path)
        if isinstance(value, dict | list):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                walk(inner, [*path, key])

    walk(content, [])
    while True:
        changed, path = json.loads(json.dumps(content)), rng.choice(places[1:])
        *above, last = path
        place = changed
        for key in above:
            place = place[key]
        if rng.random() < 0.3:
            del place[last]
        else:
            place[last] = rng.choice(VALUES)
        yield changed


@pytest.mark.parametrize("count", (30, pytest.param(500, marks=pytest.mark.full)))
def test_mutated_files_are_errors_or_tokenizers(source, tmp_path, count, seed):
    write_data(tmp_path)
    rng = random.Random(seed)
    drawn = {name: mutations(json.loads((source / name).read_text()), rng) for name in FILES}
    for index in range(count):
        name = rng.choice(FILES)
        content = json.dumps(next(drawn[name]))
        folder = damaged(source, tmp_path / str(index), {name: content.encode()})
        with ends(f"{name} {index} of seed {seed}"):
            reads(folder, tmp_path)
        shutil.rmtree(folder)
