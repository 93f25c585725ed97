"""Lines and files of chats that are bad: every one is named, or counted; nothing else ever comes out."""

import json
import re

import pytest

from data import files, jsonl
from data.chat import read_chat
from data.files import MAX_PROBLEMS, DataError
from tests.lib.tiny import tiny_tokenizer
from tests.unit.data.chats import END, GOOD, conversation, learned, messages, read, turns, with_flags, write


def pair(**changes: object) -> dict[str, object]:
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}


def asked(content: object = "a", **more: object) -> dict[str, object]:
    """A row whose user says ``content``."""
    return {"messages": [{"role": "user", "content": content, **more}, {"role": "assistant", "content": "b"}]}


def answered(**more: object) -> dict[str, object]:
    """A row whose answer has other keys."""
    return {"messages": [*messages(("user", "a")), {"role": "assistant", "content": "b", **more}]}


def called(call: object, **more: object) -> dict[str, object]:
    return answered(content=None, tool_calls=[call], **more)


DEEP = "[" * 100_000
NAMELESS = [{}, 3, "f", {"function": {}}, {"function": "f"}, {"function": {"name": ""}}, {"name": 1}]
SAID = r"messages\[0\]\.content"
FUNCTION = "found .*, expected an object(, or one as JSON| with 'function' and its 'name')"
# A line, and what the error says of it.
BAD_LINES: list[tuple[object, str]] = [
    ("{'input': 1}", "found invalid JSON .*expected one object per line"),
    ('{"input": "a", "output": "b"', "found invalid JSON"),
    ('{"input": "a", "output": "b"} {}', "found invalid JSON .*Extra data"),
    ("NaN,", "found invalid JSON"),
    ('{"input": "a\x01b", "output": "c"}', "found invalid JSON"),
    (DEEP, "found invalid JSON .*expected one object"),
    ('{"input": ' + "9" * 5000 + ', "output": "b"}', "found invalid JSON"),
    ('["a", "b"]', r'found a list \["a", "b"\], expected an object'),
    ("null", "found null, expected an object"),
    ('{"input": "a", "output": "b", "output": "c"}', 'found the key a string "output" twice in one object'),
    (json.dumps(asked()).replace('{"role"', '{"role": "tool", "role"', 1), 'found the key a string "role" twice'),
    ({}, r"found the keys \[\], expected exactly one of 'messages'.*data\.fields"),
    (pair(output=...), r"found the keys \['input'\]"),
    (pair(input=...), r"found the keys \['output'\]"),
    ({**asked(), **GOOD}, "found the keys .*expected exactly one of"),
    (pair(output=42), "'output': found a number 42, expected a string"),
    (pair(input=["a"]), r"'input': found a list \[\"a\"\], expected a string"),
    (pair(input=None), r"found the keys \['input', 'output'\] \(without a value: \['input'\]\), expected exactly one"),
    (pair(system=False), "'system': found a boolean false, expected a string"),
    (pair(output="\ud83d"), "'output': found half of a surrogate pair at character 0"),
    ({"messages": []}, r"'messages': found a list \[\], expected a list of at least"),
    ({"messages": {"role": "user"}}, "'messages': found an object .*expected a list"),
    ({"messages": ["hello"]}, r"messages\[0\]: found a string \"hello\", expected an object with 'role' and 'content'"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\]: found the keys \['role'\], expected 'role' and 'content'"),
    (turns(("user", "a"), ("asistant", "b")), r"messages\[1\]\.role: found a string \"asistant\", expected one of"),
    (turns((["user"], "a"), ("assistant", "b")), r"messages\[0\]\.role: found a list"),
    (answered(content=None), r"messages\[1\]\.content: found null, expected a string, or tool_calls"),
    (asked(None), rf"{SAID}: found null, expected a string"),
    (asked(3), rf"{SAID}: found a number 3, expected a string"),
    (asked("a\ud83d"), rf"{SAID}: found half of a surrogate pair at character 1"),
    (asked([]), rf"{SAID}: found an empty list"),
    (asked([{"type": "text"}]), rf"{SAID}\[0\]: found an object"),
    (asked([{"type": "thinking", "text": "a"}]), rf"{SAID}\[0\]: found an object .*, expected a text part"),
    (asked(["a"]), rf"{SAID}\[0\]: found a string"),
    (asked([{"type": "text", "text": 3}]), rf"{SAID}\[0\]\.text: found a number 3, expected a string"),
    (turns(("user", "a"), ("user", "b")), r"found the roles \['user', 'user'\], expected an assistant turn"),
    (turns(("assistant", "a"), ("user", "b")), "found nothing before the last assistant turn"),
    (
        {**turns(("system", "a"), ("user", "b"), ("assistant", "c")), "system": "d"},
        "found two system prompts: a system turn, and",
    ),
    ({"conversations": [{"from": "robot", "value": "a"}]}, r"conversations\[0\]\.from: found a string \"robot\""),
    ({"conversations": [{"user": "a"}]}, r"conversations\[0\]: found the keys \['user'\], expected 'role' and"),
    ({"conversations": "hello"}, "'conversations': found a string \"hello\", expected a list"),
    (asked() | {"tools": "add"}, r"'tools': found a string \"add\", expected an object, or one as JSON"),
    (asked() | {"tools": {"name": "add"}}, r"'tools': found an object .*, expected a list of function schemas"),
    *((asked() | {"tools": [tool]}, rf"'tools'\[0\]: {FUNCTION}") for tool in NAMELESS),
    (asked() | {"tools": [{"name": "add"}]}, "found the tool 'add', which the chat template does not write"),
    (asked(tool_calls=[{"name": "f"}]), r"messages\[0\]: found 'tool_calls' in a turn of role 'user'"),
    *((answered(content=None, tool_calls=bad), r"messages\[1\]") for bad in ([], {}, "f", 3)),
    *((called(call), rf"messages\[1\]\.tool_calls\[0\]: {FUNCTION}") for call in NAMELESS),
    *(
        (called({"name": "f", "arguments": bad}), r"messages\[1\]\.tool_calls\[0\]\.arguments: found .*an object, or")
        for bad in ("{a", "[1]", 3)
    ),
    (answered(tool_calls=[{"name": "add"}]), "found turn 1's call of 'add', which the chat template does not write"),
    *(
        (answered(reasoning_content=bad), r"messages\[1\]\.reasoning_content: found .*expected a string")
        for bad in (3, ["a"], True)
    ),
    (answered(reasoning_content="Well."), "found turn 1's 'reasoning_content' 'Well.', which the chat template does"),
    # Fields that are not supported.
    *(
        (with_flags({}, {"weight": weight}, {}, {}), r"messages\[1\]\.weight: found .*, expected 0 or 1")
        for weight in (0.5, 2, -1, "1", [1])
    ),
    (with_flags({"weight": 1}, {}, {}, {}), r"messages\[0\]: found a flag \(weight\) that marks a turn of role 'user'"),
    (
        with_flags({}, {"weight": 1, "train": False}, {}, {}),
        r"messages\[1\]: found 'weight' and 'train' that contradict",
    ),
    (
        with_flags({}, {"train_on_turn": False}, {}, {}),
        r"messages\[1\]\.train_on_turn: found a boolean false, expected",
    ),
    (with_flags({}, {"prefix": True}, {}, {}), r"messages\[1\]\.prefix: found a boolean true"),
    *(
        (
            called({"name": "f", key: {"x": 1}}),
            rf"messages\[1\]\.tool_calls\[0\]: found the keys \['name', '{key}'\], exp",
        )
        for key in ("parameters", "args", "input")
    ),
    (GOOD | {"train": "false"}, r"the row\.train: found a string \"false\", expected 0 or 1"),
    (
        answered(content="<think>\nt\n</think>b", reasoning_content="t"),
        r"messages\[1\]: found the reasoning of 'reasoning_content' in 'content' too",
    ),
    (GOOD | {"image_path": "a.jpg"}, "image_path: found a string"),
    (
        asked([{"type": "text", "text": "q", "image": "a.jpg"}]),
        r"messages\[0\]\.content\[0\]\.image: found a string",
    ),
    ({"messages": "[{}]"}, r"messages\[0\]: found the keys \[\], expected"),
    ({"messages": "[1"}, r"'messages': found a string .*expected an object, or one as JSON"),
    (GOOD | {"weight": 0.5}, r"the row\.weight: found a number 0\.5, expected 0 or 1"),
    (GOOD | {"image": "a.jpg"}, "image: found a string \"a.jpg\", expected text only: remove 'image'"),
    (with_flags({"images": ["a.jpg"]}, {}, {}, {}), r"messages\[0\]\.images: found a list"),
    (GOOD | {"history": ["a"]}, "'history': found a list .*, expected a list of pairs"),
]
NOT_UTF8 = [b'{"input": "caf\xe9", "output": "b"}', json.dumps(GOOD).encode("utf-16")]


def test_bad_lines_are_named_with_what_was_found(tmp_path):
    """Among good lines and blank ones."""
    tokenizer = tiny_tokenizer()
    for line, message in BAD_LINES:
        with pytest.raises(DataError) as caught:
            read(tmp_path, tokenizer, GOOD, "", line, " \t", GOOD)
        first, said = str(caught.value).split(f"\n{tmp_path}/a.jsonl:")
        assert first == "1 bad line in the data:" and re.match(f"3: {message}", said) and len(said) < 600, said


def test_bad_lines_of_one_kind_are_named_together(tmp_path):
    """They differ in texts and numbers, and hide no other kind behind them."""
    undesired = [{"input": str(n), "output": "x", "label": 0} for n in range(300)]
    media = {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}
    others = [{**GOOD, "images": ["x.png"]}, media, {"messages": [GOOD, *media["messages"]]}, {"a": 1}, {"b": 1}]
    with pytest.raises(DataError) as caught:
        read(tmp_path, tiny_tokenizer(), *undesired, *others)
    path, lines = tmp_path / "a.jsonl", str(caught.value).splitlines()
    assert lines[0] == "305 bad lines in the data:" and len(lines) == 7
    assert lines[1].startswith(f"{path}:1: label: found 0, which marks an undesired answer, ")
    assert lines[1].endswith(" (also lines 2, 3, 4, 5 and 295 more)")
    assert [line.split(": ")[0] for line in lines[2:]] == [f"{path}:{n}" for n in range(301, 306)]


def test_bad_lines_of_several_files_are_reported_together(tmp_path):
    kinds = [{f"key {'x' * n}": n} for n in range(MAX_PROBLEMS + 5)]
    path, other = write(tmp_path / "bad.jsonl", *kinds, kinds[0]), write(tmp_path / "other.jsonl", GOOD, "{")
    with pytest.raises(DataError) as caught:
        read_chat([path, other], tiny_tokenizer(), max_length=100)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{len(kinds) + 2} bad lines in the data:"
    assert [line.split(": ")[0] for line in lines[1:-1]] == [f"{path}:{n}" for n in range(1, MAX_PROBLEMS + 1)]
    assert lines[1].endswith(f" (also line {len(kinds) + 1})") and lines[-1] == "... and 6 more bad lines"
    with pytest.raises(DataError, match=rf"^1 bad line in the data:\n{other}:2: "):
        read_chat([other], tiny_tokenizer(), max_length=100)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *NOT_UTF8]))
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: found bytes that are not UTF-8 .* at byte 14.*\n.*:3: found byte"
    ):
        read_chat([path], tiny_tokenizer(), max_length=100)


def test_damaged_bytes_give_samples_or_a_named_line(rng, tmp_path):
    tokenizer, path = tiny_tokenizer(), tmp_path / "a.jsonl"
    outcomes = set()
    for _ in range(200):
        row = rng.choice([{"messages": conversation(rng)}, GOOD])
        line = bytearray(json.dumps(row, ensure_ascii=rng.random() < 0.5).encode())
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(line))
            line[place : place + rng.randrange(3)] = bytes(b for b in rng.randbytes(rng.randrange(3)) if b != 10)
        path.write_bytes(bytes(line) + b"\n")
        try:
            read_chat([path], tokenizer, max_length=300, loss_on="all")
            outcomes.add("samples")
        except DataError as error:
            assert f"{path}:1: " in str(error) or "no sample is left" in str(error)
            outcomes.add("named")
    assert outcomes == {"samples", "named"}


def test_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"input": "a\u2028b\u0085c", "output": "d\u2029e"}, ensure_ascii=False), json.dumps(GOOD)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(rows).encode())
    tokenizer = tiny_tokenizer()
    samples, counts = read_chat([path], tokenizer, max_length=100)
    assert counts.lines == 2
    assert [learned(sample, tokenizer) for sample in samples] == [f"d\u2029e{END}", f"42{END}"]


def test_a_line_without_end_is_refused_by_name(tmp_path, monkeypatch):
    """As a file that is one JSON list. The lines behind it have their numbers."""
    for module in (files, jsonl):
        monkeypatch.setattr(module, "LINE_BYTES", 1 << 10)
    with pytest.raises(DataError) as caught:
        read(tmp_path, tiny_tokenizer(), GOOD, "[" + "1, " * 2000 + "1]", GOOD, "{", '"' + "x" * 3000 + '"')
    lines = str(caught.value).splitlines()
    path = tmp_path / "a.jsonl"
    assert [line.split(": ")[0] for line in lines[1:]] == [f"{path}:{number}" for number in (2, 4)]
    assert "in one line, expected one conversation per line" in lines[1] and lines[1].endswith(" (also line 5)")


def test_files_that_are_not_there(tmp_path):
    empty, blank = write(tmp_path / "empty.jsonl"), write(tmp_path / "blank.jsonl", "", " ")
    good, tokenizer = write(tmp_path / "good.jsonl", GOOD), tiny_tokenizer()
    with pytest.raises(DataError) as caught:
        read_chat([good, empty, tmp_path / "none.jsonl", tmp_path], tokenizer, max_length=100)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        str(path) for path in (empty, tmp_path / "none.jsonl", tmp_path)
    ]
    no_answer = write(tmp_path / "a.jsonl", GOOD | {"output": ""})
    for paths, message in (
        ([good, blank], r"blank\.jsonl: found no rows, .* blank lines do not count"),
        ([], "no data files given"),
        ([no_answer], r"no sample is left of .*1 without target"),
    ):
        with pytest.raises(DataError, match=message):
            read_chat(paths, tokenizer, max_length=100)
