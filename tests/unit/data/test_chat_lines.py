"""Chat JSONL whose lines or files are bad: every one is named."""

import json

import pytest

from data.chat import read_chat
from data.samples import MAX_PROBLEMS, DataError
from tests.lib.tiny import tiny_tokenizer
from tests.unit.data.chats import END, GOOD, learned, pair, turns, write

BAD_LINES: list[tuple[object, str]] = [
    ("{'input': 1}", "found invalid JSON .*expected one object per line"),
    ('{"input": "a", "output": "b"', "found invalid JSON"),
    ('{"input": "a", "output": "b"} {}', "found invalid JSON .*Extra data"),
    ("[" * 100_000, "found invalid JSON .*expected one object"),
    ('["a", "b"]', r'found a list \["a", "b"\], expected an object'),
    ("null", "found null, expected an object"),
    ({}, r"found the keys \[\], expected exactly one of 'messages'.*data\.fields"),
    ({"question": "a", "answer": "b"}, r"found the keys \['question', 'answer'\], expected exactly one of"),
    (pair(output=...), r"found the keys \['input'\]"),
    (pair(input=...), r"found the keys \['output'\]"),
    ({**turns(("user", "a"), ("assistant", "b")), **GOOD}, "found the keys .*expected exactly one of"),
    ({"messages": [], "conversations": []}, "found the keys .*expected exactly one of"),
    (pair(output=42), "'output': found a number 42, expected a string"),
    (pair(input=["a"]), r"'input': found a list \[\"a\"\], expected a string"),
    (pair(instruction=None), "'instruction': found null, expected a string"),
    (pair(system=False), "'system': found a boolean false, expected a string"),
    (pair(output="\ud83d"), "'output': found half of a surrogate pair at character 0"),
    ({"messages": []}, r"'messages': found a list \[\], expected a list of at least"),
    ({"messages": {"role": "user"}}, "'messages': found an object .*expected a list"),
    ({"messages": ["hello"]}, r"messages\[0\]: found a string \"hello\", expected an object with 'role' and 'content'"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\]: found the keys \['role'\], expected 'role' and 'content'"),
    ({"messages": [{"from": "human", "value": "a"}]}, r"messages\[0\]: found the keys \['from', 'value'\]"),
    (turns(("user", "a"), ("asistant", "b")), r"messages\[1\]\.role: found a string \"asistant\", expected one of"),
    (turns((["user"], "a"), ("assistant", "b")), r"messages\[0\]\.role: found a list"),
    (turns(("user", "a"), ("assistant", None)), r"messages\[1\]\.content: found null, expected a string"),
    (turns(("user", [{"type": "text"}]), ("assistant", "b")), r"messages\[0\]\.content\[0\]: found an object"),
    (turns(("user", "a"), ("user", "b")), r"found the roles \['user', 'user'\], expected an assistant turn"),
    (turns(("assistant", "a"), ("user", "b")), "found nothing before the last assistant turn"),
    ({**turns(("system", "a"), ("user", "b"), ("assistant", "c")), "system": "d"}, "found a system turn and"),
    ({"conversations": [{"from": "robot", "value": "a"}]}, r"conversations\[0\]\.from: found a string \"robot\""),
    ({"conversations": "hello"}, "'conversations': found a string \"hello\", expected a list"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(line, message, tmp_path):
    good = write(tmp_path / "good.jsonl", GOOD)
    bad = write(tmp_path / "bad.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(DataError, match=rf"(?s)^1 bad line in the data:\n\S*/bad\.jsonl:3: {message}"):
        read_chat([good, bad], tiny_tokenizer(), max_length=100)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"input": "a", "output": "b"}\n{"input": "caf\xe9", "output": "b"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: found bytes that are not UTF-8 .* at byte 14"):
        read_chat([path], tiny_tokenizer(), max_length=100)


def test_bad_lines_are_reported_together(tmp_path):
    path = write(tmp_path / "bad.jsonl", *(line for line, _ in BAD_LINES))
    other = write(tmp_path / "other.jsonl", GOOD, "{")
    with pytest.raises(DataError) as caught:
        read_chat([path, other], tiny_tokenizer(), max_length=100)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{len(BAD_LINES) + 1} bad lines in the data:"
    assert [line.split(": ")[0] for line in lines[1:-1]] == [f"{path}:{n}" for n in range(1, MAX_PROBLEMS + 1)]
    assert lines[-1] == f"... and {len(BAD_LINES) + 1 - MAX_PROBLEMS} more bad lines"


def test_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"input": "a\u2028b\u0085c", "output": "d\u2029e"}, ensure_ascii=False), json.dumps(GOOD)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(rows).encode())
    tokenizer = tiny_tokenizer()
    samples, counts = read_chat([path], tokenizer, max_length=100)
    assert counts.lines == 2
    assert [learned(sample, tokenizer) for sample in samples] == [f"d\u2029e{END}", f"42{END}"]


def test_files_that_are_not_there(tmp_path):
    empty, blank = write(tmp_path / "empty.jsonl"), write(tmp_path / "blank.jsonl", "", " ")
    good, tokenizer = write(tmp_path / "good.jsonl", GOOD), tiny_tokenizer()
    with pytest.raises(DataError) as caught:
        read_chat([good, empty, tmp_path / "none.jsonl", tmp_path], tokenizer, max_length=100)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        str(path) for path in (empty, tmp_path / "none.jsonl", tmp_path)
    ]
    with pytest.raises(DataError, match=r"blank\.jsonl: found only blank lines"):
        read_chat([good, blank], tokenizer, max_length=100)
    with pytest.raises(DataError, match="no data files given"):
        read_chat([], tokenizer, max_length=100)
    with pytest.raises(DataError, match=r"no sample is left of .*1 without target"):
        read_chat([write(tmp_path / "a.jsonl", GOOD | {"output": ""})], tokenizer, max_length=100)
