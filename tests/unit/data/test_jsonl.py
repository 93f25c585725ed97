"""Malformed lines, by the thousand: each is named with file and line, or counted; nothing else ever comes out."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from data.chat import read_chat
from data.samples import MAX_PROBLEMS, DataError
from tests.lib.tiny import tiny_tokenizer

MAX_LENGTH = 300


def text(rng: random.Random) -> str:
    words = ["quick", " fox", "12", "\n", "é", "日本", "😀", '"', "\\", "{", "<|im_end|>"]
    return "".join(rng.choices(words, k=5)) + "."


def chat(rng: random.Random) -> dict[str, Any]:
    """A good row with messages."""
    turns = [{"role": role, "content": text(rng)} for _ in range(rng.randint(1, 3)) for role in ("user", "assistant")]
    return {"messages": turns, "id": rng.randrange(99)}


def pair(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(["input", "instruction"]): text(rng), "output": text(rng)}


def good(rng: random.Random) -> dict[str, Any]:
    return rng.choice([chat, pair])(rng)


def dumped(row: object) -> bytes:
    return json.dumps(row).encode()


def other(rng: random.Random, *but: type) -> object:
    """A JSON value of a type that is not expected."""
    values = [None, True, 3, -0.5, "text", ["a"], [], {"a": 1}, {}]
    return rng.choice([value for value in values if type(value) not in but])


def changed(rng: random.Random, index: int, **values: object) -> bytes:
    """A chat with keys of one turn set, or removed where the value is ``...``."""
    row = chat(rng)
    turn = row["messages"][index]
    turn.update(values)
    row["messages"][index] = {key: value for key, value in turn.items() if value is not ...}
    return dumped(row)


def with_call(rng: random.Random, call: object) -> bytes:
    return changed(rng, -1, content=None, tool_calls=[call])


NAMELESS = [{}, 3, "f", {"function": {}}, {"function": "f"}, {"function": {"name": ""}}, {"name": 1}]

BAD: dict[str, Callable[[random.Random], bytes]] = {
    "cut off": lambda rng: (line := dumped(good(rng)))[: rng.randrange(1, len(line))],
    "two rows on a line": lambda rng: dumped(good(rng)) + rng.choice([b"", b" ", b","]) + dumped(good(rng)),
    "words behind the row": lambda rng: dumped(good(rng)) + b" # checked",
    "Python instead of JSON": lambda rng: repr(pair(rng) | {"x": None}).replace("'", "`").encode(),
    "not JSON at all": lambda rng: rng.choice([b"hello", b"question\tanswer", b"---", b"\x00", b"<row/>", b"NaN,"]),
    "a control character in a string": lambda rng: b'{"input": "a\tb", "output": "c"}'.replace(b"\t", b"\x01"),
    "no UTF-8": lambda rng: b'{"input": "caf' + bytes([rng.randrange(0x80, 0xC0)]) + b'", "output": "b"}',
    "UTF-16": lambda rng: json.dumps(pair(rng)).encode("utf-16").replace(b"\n", b""),
    "nested too deep": lambda rng: b'{"input": ' + b"[" * 100_000,
    "a number of 5,000 digits": lambda rng: b'{"input": ' + b"9" * 5000 + b', "output": "b"}',
    "not an object": lambda rng: dumped(other(rng, dict)),
    "a key twice": lambda rng: dumped(pair(rng))[:-1] + b', "output": "another"}',
    "a key twice in a turn": lambda rng: dumped(chat(rng)).replace(b'{"role"', b'{"role": "tool", "role"', 1),
    "no form": lambda rng: dumped({f"key{rng.randrange(9)}": text(rng) for _ in range(rng.randint(0, 3))}),
    "two forms": lambda rng: dumped(chat(rng) | pair(rng)),
    "half a pair": lambda rng: dumped({rng.choice(["input", "instruction", "output"]): text(rng)}),
    "a pair of something else": lambda rng: dumped(pair(rng) | {"output": other(rng, str)}),
    "messages of another type": lambda rng: dumped({"messages": other(rng, list)}),
    "no messages": lambda rng: dumped({rng.choice(["messages", "conversations"]): []}),
    "a message of another type": lambda rng: dumped({"messages": [*chat(rng)["messages"], other(rng, dict)]}),
    "no role": lambda rng: changed(rng, rng.choice([0, -1]), role=...),
    "an unknown role": lambda rng: changed(rng, 0, role=rng.choice(["bot", "User", "", "human"])),
    "a role of another type": lambda rng: changed(rng, -1, role=other(rng, str)),
    "no content": lambda rng: changed(rng, rng.choice([0, -1]), content=...),
    "null content": lambda rng: changed(rng, rng.choice([0, -1]), content=None),
    "content of another type": lambda rng: changed(rng, 0, content=other(rng, str, list)),
    "an empty list of parts": lambda rng: changed(rng, 0, content=[]),
    "an image": lambda rng: changed(rng, 0, content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
    "a part of another kind": lambda rng: changed(rng, 0, content=[{"type": "thinking", "text": text(rng)}]),
    "a part without text": lambda rng: changed(rng, 0, content=[{"type": "text"}]),
    "a part of another type": lambda rng: changed(rng, 0, content=[other(rng, dict)]),
    "a part's text of another type": lambda rng: changed(rng, 0, content=[{"type": "text", "text": other(rng, str)}]),
    "half a surrogate pair": lambda rng: changed(rng, 0, content="a\ud83d"),
    "no assistant": lambda rng: dumped({"messages": [{"role": "user", "content": text(rng)}] * rng.randint(1, 3)}),
    "nothing to answer": lambda rng: dumped({"messages": [{"role": "assistant", "content": text(rng)}]}),
    "two systems": lambda rng: changed(rng, 0, role="system").replace(b'{"messages', b'{"system": "b", "messages'),
    "a system of another type": lambda rng: dumped(pair(rng) | {"system": rng.choice([3, True, ["a"], {"a": 1}])}),
    "tools of another type": lambda rng: dumped(chat(rng) | {"tools": rng.choice(["[]", 3, {"a": 1}])}),
    "a tool without a name": lambda rng: dumped(chat(rng) | {"tools": [rng.choice(NAMELESS)]}),
    "tools that the template leaves out": lambda rng: dumped(chat(rng) | {"tools": [{"name": "add_numbers"}]}),
    "a user's tool call": lambda rng: changed(rng, 0, tool_calls=[{"name": "f"}]),
    "no tool calls": lambda rng: changed(rng, -1, content=None, tool_calls=rng.choice([[], {}, "f", 3])),
    "a call of nothing": lambda rng: with_call(rng, rng.choice(NAMELESS)),
    "a call with bad arguments": lambda rng: with_call(rng, {"name": "f", "arguments": rng.choice(["{a", "[1]", 3])}),
    "a call that the template leaves out": lambda rng: changed(rng, -1, tool_calls=[{"name": "add_numbers"}]),
    "reasoning of another type": lambda rng: changed(rng, -1, reasoning_content=rng.choice([3, ["a"], {"a": 1}, True])),
    "reasoning that the template leaves out": lambda rng: changed(rng, -1, reasoning_content="Well, let me see."),
    "a speaker of another form": lambda rng: dumped({"conversations": chat(rng)["messages"]}),
}  # fmt: skip


def test_a_thousand_bad_lines_are_named(rng, tmp_path):
    """Fifty files of twenty bad lines, as many as one error names, among good lines and blank ones."""
    tokenizer = tiny_tokenizer()
    kinds = list(BAD) * (1000 // len(BAD) + 1)
    rng.shuffle(kinds)
    for number in range(1000 // MAX_PROBLEMS):
        path, lines, bad = tmp_path / f"{number}.jsonl", [], {}
        for kind in kinds[number * MAX_PROBLEMS : (number + 1) * MAX_PROBLEMS]:
            lines += [rng.choice([dumped(good(rng)), b"", b" \t"]) for _ in range(rng.randrange(3))]
            lines.append(BAD[kind](rng))
            bad[len(lines)] = kind
        path.write_bytes(b"".join(line + rng.choice([b"\n", b"\r\n"]) for line in lines))
        with pytest.raises(DataError) as caught:
            read_chat([path], tokenizer, max_length=MAX_LENGTH, loss_on=rng.choice(["last", "all"]))
        named = re.findall(rf"^{re.escape(str(path))}:(\d+): (.*)", str(caught.value), re.M)
        found = {int(n): what for n, what in named}
        assert found.keys() == bad.keys(), {n: bad.get(n) or lines[n - 1] for n in found.keys() ^ bad.keys()}
        for n, what in found.items():
            assert "found" in what and ("expected" in what or "refuses" in what), (bad[n], what)
            assert len(what) < 600, (bad[n], what)


def test_lines_that_the_recipe_counts(rng, tmp_path):
    kinds: dict[str, Callable[[], bytes]] = {
        "samples": lambda: dumped(good(rng)),
        "without_target": lambda: changed(rng, -1, content=rng.choice(["", " ", "\n"])),
        "too_long": lambda: dumped(pair(rng) | {"output": "word " * MAX_LENGTH}),
    }
    chosen = rng.choices(list(kinds), k=200)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(kinds[kind]() for kind in chosen))
    _, counts = read_chat([path], tiny_tokenizer(), max_length=MAX_LENGTH)
    assert {kind: getattr(counts, kind) for kind in kinds} == {kind: chosen.count(kind) for kind in kinds}
    assert counts.lines == 200


def test_damaged_bytes_give_samples_or_a_named_line(rng, tmp_path):
    tokenizer, path = tiny_tokenizer(), tmp_path / "a.jsonl"
    outcomes = set()
    for _ in range(200):
        line = bytearray(json.dumps(good(rng), ensure_ascii=rng.random() < 0.5).encode())
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(line))
            line[place : place + rng.randrange(3)] = bytes(b for b in rng.randbytes(rng.randrange(3)) if b != 10)
        path.write_bytes(bytes(line) + b"\n")
        try:
            read_chat([path], tokenizer, max_length=MAX_LENGTH, loss_on="all")
            outcomes.add("samples")
        except DataError as error:
            assert f"{path}:1: " in str(error) or "no sample is left" in str(error)
            outcomes.add("named")
    assert outcomes == {"samples", "named"}
