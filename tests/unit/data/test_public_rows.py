"""Rows as public files have them: what is learned of each, and which keys are not used; or the words of the refusal."""

import json
import re
from typing import Any, NamedTuple

import pytest

from data.samples import DataError
from tests.unit.data.chats import learned_turns, read, templated

TEMPLATE = """\
{% for t in tools or [] %}{{ t | tojson }}{{ '\n' }}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{%- if m.content %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ c.function.name + ' ' + c.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
{%- if enable_thinking is undefined %}{% endif %}"""
KEYS = "found the keys .*, expected exactly one of"


def chat(*texts: Any, keys: tuple[str, str] = ("role", "content"), system: str | None = None) -> list[dict[str, Any]]:
    """Turns of user and assistant by turns; an object is a turn as it is."""
    roles = ("user", "assistant") if keys[0] == "role" else ("human", "gpt")
    first = [{keys[0]: "system", keys[1]: system}] if system else []
    return first + [t if isinstance(t, dict) else {keys[0]: roles[i % 2], keys[1]: t} for i, t in enumerate(texts)]


def said(content: Any, **more: Any) -> dict[str, Any]:
    """An assistant turn with more keys."""
    return {"role": "assistant", "content": content, **more}


def shared(*texts: Any) -> list[dict[str, Any]]:
    return chat(*texts, keys=("from", "value"))


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
CALLED = 'weather {"city": "Bonn"}'
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "18 C"}
SERVED = said("a", refusal=None, annotations=[], audio=None, function_call=None)
NULLS = {"tool_calls": None, "tool_call_id": None, "name": None, "weight": None}
PROPERTIES = {"city": {"type": "string", "description": None}, "amount": None, "currency": None}
ARROW_PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": None}
ARROW_TOOL = TOOL | {"function": TOOL["function"] | {"parameters": ARROW_PARAMETERS}}
ARROW_CALL = {"name": "weather", "arguments": {"city": "Bonn", "amount": None, "currency": None}}
ARROW = chat(
    {"role": "user", "content": "q", **NULLS},
    said(None, **NULLS | {"tool_calls": [{"id": "c1", "type": "function", "function": ARROW_CALL}]}),
    {"role": "tool", "content": "18 C", **NULLS, "tool_call_id": "c1", "name": "weather"},
    said("a", **NULLS | {"tool_calls": []}),
)
WILD = {"country": "X", "hashed_ip": "h", "header": {"user-agent": "u"}, "language": "English", "toxic": False}


class Case(NamedTuple):
    """A row, its learned turns or the refusal, the keys that are not used or not written, and its field map."""

    row: dict[str, Any]
    expected: list[str] | str
    unused: str = ""
    fields: dict[str, str] | None = None


ROWS = {
    "OpenAI": Case({"messages": chat("q", said("a", weight=0), "r", "b", system="s")}, ["b"]),
    "OpenAI, tools": Case(
        {
            "messages": chat("q", {"role": "assistant", "tool_calls": [CALL]}, RESULT, "a"),
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
        [CALLED, "a"],
        "messages.tool_call_id messages.tool_calls.id parallel_tool_calls",
    ),
    "OpenAI, functions": Case(
        {
            "messages": chat(
                "q",
                said(None, function_call=CALL["function"]),
                {"role": "function", "name": "weather", "content": "18 C"},
                "a",
            ),
            "functions": [TOOL["function"]],
        },
        [CALLED, "a"],
        "messages.name",  # not written, though the call has the same name
    ),
    "OpenAI, an answer as the server gives it": Case(
        {"messages": chat("q", SERVED), "finish_reason": "stop"}, ["a"], "finish_reason"
    ),
    "OpenAI, spoken": Case(
        {"messages": chat("q", said("a", audio={"id": "x"}))}, r"messages\[1\]\.audio: found an object"
    ),
    "OpenAI, developer, and a system turn in the middle": Case(
        {
            "messages": [
                {"role": "developer", "content": "d"},
                *chat({"role": "user", "name": "bob", "content": "q"}, "a"),
                {"role": "system", "content": "s"},
                *chat("r", "b"),
            ]
        },
        ["a", "b"],
        "messages.name",
    ),
    "Bedrock": Case({"messages": chat("q", said([{"text": "a"}]))}, r"messages\[1\]\.content\[0\]: found an object"),
    "TRL, a text and a list": Case({"prompt": chat("q"), "completion": "a"}, KEYS),
    "ShareGPT, other speakers": Case(
        {
            "conversations": [
                {"from": "user", "value": "q"},
                {"from": "chatgpt", "value": "a"},
                *shared("r"),
                {"from": "bing", "value": "b"},
            ]
        },
        ["a", "b"],
    ),
    "ShareGPT's keys in messages": Case({"messages": shared("q", "a")}, ["a"]),
    "OpenAI's keys in conversations": Case({"conversations": chat("q", "a", system="s")}, ["a"]),
    "WildChat": Case(
        {"conversation_hash": "1", "conversation": [{**turn, **WILD} for turn in chat("q", "a")], "toxic": False},
        ["a"],
        "conversation.country conversation.hashed_ip conversation.header conversation.language conversation.toxic "
        "conversation_hash toxic",
        fields={"messages": "conversation"},
    ),
    "Alpaca from Arrow": Case({"instruction": "i", "input": None, "output": "a", "system": None}, ["a"]),
    "LLaMA-Factory, tools": Case(
        {
            "conversations": [
                *shared("q"),
                {"from": "function_call", "value": json.dumps(ARROW_CALL | {"arguments": {"city": "Bonn"}})},
                {"from": "observation", "value": "18 C"},
                {"from": "gpt", "value": "a"},
            ],
            "system": "s",
            "tools": json.dumps([TOOL["function"]]),
        },
        [CALLED, "a"],
    ),
    "LLaMA-Factory, a call that is no JSON": Case(
        {"conversations": [*shared("q"), {"from": "function_call", "value": "weather(Bonn)"}]},
        r"conversations\[1\]\.value: found a string .*, expected an object, or one as JSON",
    ),
    "TRL, prompt and completion": Case({"prompt": "q", "completion": "a"}, KEYS),
    "TRL, conversational": Case(
        {"prompt": chat("q", "a", "r"), "completion": chat("q", "b", "s", "c")[1:]}, ["b", "c"]
    ),
    "TRL, preferences": Case(
        {"chosen": chat("q", "a"), "rejected": chat("q", "b"), "score_chosen": 1.0}, "of preference data"
    ),
    "TRL, variables": Case(
        {
            "messages": chat("q", "a"),
            "chat_template_kwargs": {"enable_thinking": False, "custom_instructions": ""},
            "source": "x",
        },
        ["a"],
        "source",
    ),
    "OpenOrca, mapped": Case(
        {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        ["a"],
        "id",
        fields={"system": "system_prompt", "input": "question", "output": "response"},
    ),
    "Dolly, mapped": Case(
        {"instruction": "i", "context": "c", "response": "a", "category": "x"},
        ["a"],
        "category",
        fields={"instruction": "instruction", "input": "context", "output": "response"},
    ),
    "Magpie": Case(
        {"uuid": "1", "instruction": "q", "response": "a", "conversations": shared("q", "a"), "min_similar": 0.1},
        ["a"],
        "instruction min_similar response uuid",
    ),
    "ms-swift, tools": Case(
        {
            "messages": chat(
                "q",
                {"role": "tool_call", "content": json.dumps(CALL["function"])},
                {"role": "tool_response", "content": "18 C"},
                "a",
            ),
            "tools": json.dumps([TOOL]),
        },
        [CALLED, "a"],
    ),
    "ms-swift, losses": Case({"messages": chat("q", said("a", loss=False), "r", "b"), "images": []}, ["b"]),
    **{
        f"reasoning as {key}": Case(
            {"messages": chat("q", {"role": "assistant", "content": "a", key: "t"})}, ["<think>t</think>a"]
        )
        for key in ("reasoning_content", "reasoning", "thinking")
    },
    "axolotl, parts of turns": Case(
        {
            "conversations": shared(
                "q", {"from": "gpt", "value": "a", "train_detail": [{"begin_offset": 0, "train": False}]}
            )
        },
        r"conversations\[1\]\.train_detail: found a list",
    ),
    "NeMo": Case(
        {
            "mask": "User",
            "system": "s",
            "conversations": [{"from": "User", "value": "q"}, {"from": "Assistant", "value": "a"}],
        },
        ["a"],
        "mask",
    ),
    "Gemma": Case({"messages": [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}]}, ["a"]),
    "Arrow": Case(
        {"messages": ARROW, "tools": [ARROW_TOOL], "source": None},
        [CALLED, "a"],
        "messages.name messages.tool_call_id messages.tool_calls.id",
    ),
    "Arrow, no tools": Case({"messages": chat("q", said("a", **NULLS)), "tools": None}, ["a"]),
    "Arrow, parts": Case(
        {
            "messages": [
                {"role": role, "content": [{"type": "text", "text": text, "image_url": None}]}
                for role, text in (("user", "q"), ("assistant", "a"))
            ]
        },
        ["a"],
    ),
    "Arrow, JSON in columns": Case(
        {
            "messages": chat("q", said("", tool_calls=json.dumps([CALL]))),
            "tools": [json.dumps(TOOL | {"function": TOOL["function"] | {"parameters": json.dumps(PARAMETERS)}})],
        },
        [CALLED],
        "messages.tool_calls.id",
    ),
    "no tools as text": Case({"messages": chat("q", "a"), "tools": "[]"}, ["a"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_public_files(name, tmp_path):
    row, expected, unused, fields = ROWS[name]
    tokenizer = templated(TEMPLATE)
    if isinstance(expected, str):
        with pytest.raises(DataError) as caught:
            read(tmp_path, tokenizer, row, fields=fields)
        first, said = str(caught.value).split("\n")
        assert first == "1 bad line in the data:" and re.search(expected, said)
        return
    (sample,), counts = read(tmp_path, tokenizer, row, fields=fields, loss_on="all")
    assert [text.removesuffix("<|im_end|>") for text in learned_turns(sample, tokenizer)] == expected
    assert " ".join(sorted(counts.unused | counts.unwritten)) == unused
