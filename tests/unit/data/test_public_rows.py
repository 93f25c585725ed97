"""Rows as public files have them: what is learned of each, and which keys are not used; or the words of the refusal."""

import json
import re
from typing import Any

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
NO_CHOICE = "of preference data"


def chat(*texts: Any, keys: tuple[str, str] = ("role", "content"), system: str | None = None) -> list[dict[str, Any]]:
    """Turns of user and assistant by turns; an object is a turn as it is."""
    roles = ("user", "assistant") if keys[0] == "role" else ("human", "gpt")
    first = [{keys[0]: "system", keys[1]: system}] if system else []
    return first + [t if isinstance(t, dict) else {keys[0]: roles[i % 2], keys[1]: t} for i, t in enumerate(texts)]


def shared(*texts: Any, system: str | None = None) -> list[dict[str, Any]]:
    return chat(*texts, keys=("from", "value"), system=system)


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
CALLED = 'weather {"city": "Bonn"}'
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "18 C"}
NULLS = {"tool_calls": None, "tool_call_id": None, "name": None, "weight": None}
ARROW_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": None}, "amount": None, "currency": None},
            "required": None,
        },
    },
}
ARROW_CALL = {"name": "weather", "arguments": {"city": "Bonn", "amount": None, "currency": None}}
ARROW = chat(
    {"role": "user", "content": "q", **NULLS},
    {
        "role": "assistant",
        "content": None,
        **NULLS,
        "tool_calls": [{"id": "c1", "type": "function", "function": ARROW_CALL}],
    },
    {"role": "tool", "content": "18 C", **NULLS, "tool_call_id": "c1", "name": "weather"},
    {"role": "assistant", "content": "a", **NULLS, "tool_calls": []},
)
WILD = {"country": "X", "hashed_ip": "h", "header": {"user-agent": "u"}, "language": "English", "toxic": False}

# name: the row, its field map, the learned turns or the refusal, and the keys that are not used.
ROWS: dict[str, tuple[dict[str, Any], dict[str, str] | None, list[str] | str, str]] = {
    "OpenAI": (
        {"messages": chat("q", {"role": "assistant", "content": "a", "weight": 0}, "r", "b", system="s")},
        None,
        ["b"],
        "",
    ),
    "OpenAI, tools": (
        {
            "messages": chat("q", {"role": "assistant", "tool_calls": [CALL]}, RESULT, "a"),
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
        None,
        [CALLED, "a"],
        "messages.tool_call_id messages.tool_calls.id parallel_tool_calls",
    ),
    "OpenAI, functions": (
        {
            "messages": chat(
                "q",
                {"role": "assistant", "content": None, "function_call": CALL["function"]},
                {"role": "function", "name": "weather", "content": "18 C"},
                "a",
            ),
            "functions": [TOOL["function"]],
        },
        None,
        [CALLED, "a"],
        "",
    ),
    "OpenAI, an answer as the server gives it": (
        {
            "messages": chat(
                "q",
                {
                    "role": "assistant",
                    "content": "a",
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                    "reasoning": None,
                },
            ),
            "finish_reason": "stop",
        },
        None,
        ["a"],
        "finish_reason",
    ),
    "OpenAI, spoken": (
        {"messages": chat("q", {"role": "assistant", "content": "a", "audio": {"id": "x"}})},
        None,
        r"messages\[1\]\.audio: found an object",
        "",
    ),
    "OpenAI, preferences": (
        {"input": {"messages": chat("q")}, "preferred_output": chat("q")},
        None,
        KEYS,
        "",
    ),
    "ShareGPT": ({"id": "1", "conversations": shared("q", "a", "r", "b")}, None, ["a", "b"], "id"),
    "ShareGPT that begins with an answer": (
        {"conversations": [{"from": "gpt", "value": "z"}, *shared("q", "a", "r")]},
        None,
        ["a"],
        "",
    ),
    "ShareGPT, other speakers": (
        {
            "conversations": [
                {"from": "user", "value": "q"},
                {"from": "chatgpt", "value": "a"},
                *shared("r"),
                {"from": "bing", "value": "b"},
            ]
        },
        None,
        ["a", "b"],
        "",
    ),
    "ShareGPT's keys in messages": ({"messages": shared("q", "a")}, None, ["a"], ""),
    "OpenAI's keys in conversations": ({"conversations": chat("q", "a", system="s")}, None, ["a"], ""),
    "LMSYS-Chat-1M": (
        {"conversation_id": "1", "model": "m", "conversation": chat("q", "a"), "turn": 1, "redacted": False},
        None,
        KEYS,
        "",
    ),
    "WildChat": (
        {"conversation_hash": "1", "conversation": [{**turn, **WILD} for turn in chat("q", "a")], "toxic": False},
        {"messages": "conversation"},
        ["a"],
        "conversation.country conversation.hashed_ip conversation.header conversation.language conversation.toxic "
        "conversation_hash toxic",
    ),
    "Alpaca": ({"instruction": "i", "input": "", "output": "a", "text": "i a"}, None, ["a"], "text"),
    "Alpaca from Arrow": ({"instruction": "i", "input": None, "output": "a", "system": None}, None, ["a"], ""),
    "Alpaca, many answers": ({"instruction": "i", "output": ["a", "b"]}, None, "'output': found a list", ""),
    "LLaMA-Factory, Alpaca": (
        {"instruction": "r", "input": "", "output": "b", "system": "s", "history": [["q", "a"]]},
        None,
        ["a", "b"],
        "",
    ),
    "LLaMA-Factory, tools": (
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
        None,
        [CALLED, "a"],
        "",
    ),
    "LLaMA-Factory, a call that is no JSON": (
        {"conversations": [*shared("q"), {"from": "function_call", "value": "weather(Bonn)"}]},
        None,
        r"conversations\[1\]\.value: found a string .*, expected an object, or one as JSON",
        "",
    ),
    "LLaMA-Factory, KTO": ({"messages": chat("q", "a"), "label": False}, None, "label: found false", ""),
    "LLaMA-Factory, KTO, a good one": ({"messages": chat("q", "a"), "label": True}, None, ["a"], "label"),
    "LLaMA-Factory, DPO": (
        {"conversations": shared("q"), "chosen": shared("q", "a")[1], "rejected": shared("q", "b")[1]},
        None,
        NO_CHOICE,
        "",
    ),
    "LLaMA-Factory, images": (
        {"messages": chat("<image>q", "a"), "images": ["x.jpg"]},
        None,
        "images: found a list",
        "",
    ),
    "TRL, prompt and completion": ({"prompt": "q", "completion": "a"}, None, KEYS, ""),
    "TRL, prompt and completion, mapped": (
        {"prompt": "q", "completion": "a"},
        {"input": "prompt", "output": "completion"},
        ["a"],
        "",
    ),
    "TRL, conversational": ({"prompt": chat("q", "a", "r"), "completion": chat("q", "b")[1:]}, None, ["b"], ""),
    "TRL, preferences": (
        {"chosen": chat("q", "a"), "rejected": chat("q", "b"), "score_chosen": 1.0},
        None,
        NO_CHOICE,
        "",
    ),
    "TRL, KTO": (
        {"prompt": chat("q"), "completion": chat("q", "a")[1:], "label": False},
        None,
        "label: found false",
        "",
    ),
    "TRL, steps": ({"prompt": "q", "completions": ["a"], "labels": [True]}, None, KEYS, ""),
    "TRL, variables": (
        {
            "messages": chat("q", "a"),
            "chat_template_kwargs": {"enable_thinking": False, "custom_instructions": ""},
            "source": "x",
        },
        None,
        ["a"],
        "source",
    ),
    "UltraChat": ({"id": "1", "data": ["q", "a"]}, None, KEYS, ""),
    "UltraChat 200k": ({"prompt": "q", "prompt_id": "1", "messages": chat("q", "a")}, None, ["a"], "prompt prompt_id"),
    "UltraFeedback": (
        {"prompt": "q", "messages": chat("q", "a"), "chosen": chat("q", "a"), "rejected": chat("q", "b")},
        None,
        NO_CHOICE,
        "",
    ),
    "OpenHermes 2.5": (
        {"conversations": shared("q", "a"), "system_prompt": "s", "skip_prompt_formatting": False, "idx": None},
        None,
        ["a"],
        "skip_prompt_formatting system_prompt",
    ),
    "SlimOrca": (
        {
            "conversations": [
                {"from": f, "value": v, "weight": w}
                for f, v, w in (("system", "s", None), ("human", "q", 0.0), ("gpt", "a", 1.0))
            ]
        },
        None,
        ["a"],
        "",
    ),
    "OpenOrca": ({"id": "1", "system_prompt": "s", "question": "q", "response": "a"}, None, KEYS, ""),
    "OpenOrca, mapped": (
        {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        {"system": "system_prompt", "input": "question", "output": "response"},
        ["a"],
        "id",
    ),
    "OASST, a message": ({"message_id": "1", "parent_id": None, "text": "q", "role": "prompter"}, None, KEYS, ""),
    "OASST, a tree": ({"message_tree_id": "1", "prompt": {"text": "q", "replies": []}}, None, KEYS, ""),
    "Dolly": ({"instruction": "i", "context": "c", "response": "a", "category": "x"}, None, KEYS, ""),
    "Dolly, mapped": (
        {"instruction": "i", "context": "c", "response": "a", "category": "x"},
        {"instruction": "instruction", "input": "context", "output": "response"},
        ["a"],
        "category",
    ),
    "GSM8K": ({"question": "q", "answer": "a #### 1"}, {"input": "question", "output": "answer"}, ["a #### 1"], ""),
    "Magpie": (
        {"uuid": "1", "instruction": "q", "response": "a", "conversations": shared("q", "a"), "min_similar": 0.1},
        None,
        ["a"],
        "instruction min_similar response uuid",
    ),
    "LIMA": (
        {"conversations": ["q", "a"], "source": "x"},
        None,
        r"conversations\[0\]: found a string \"q\", expected an object",
        "",
    ),
    "no_robots": (
        {"prompt": "q", "prompt_id": "1", "messages": chat("q", "a"), "category": "c"},
        None,
        ["a"],
        "category prompt prompt_id",
    ),
    "SmolTalk": ({"messages": chat("q", "a"), "source": "x", "full_topic": None}, None, ["a"], "source"),
    "Nemotron": (
        {
            "uuid": "1",
            "reasoning": "on",
            "messages": [{**turn, "tool_calls": []} for turn in chat("q", "a")],
            "metadata": "{}",
        },
        None,
        ["a"],
        "metadata reasoning uuid",
    ),
    "Nemotron, a list of turns as input": ({"input": chat("q"), "output": "a"}, None, "'input': found a list", ""),
    "Hermes, function calling": (
        {"id": "1", "conversations": shared("q", "<tool_call>x</tool_call>", system="s"), "tools": json.dumps([TOOL])},
        None,
        ["<tool_call>x</tool_call>"],
        "id",
    ),
    "xLAM": ({"id": 1, "query": "q", "answers": "[]", "tools": "[]"}, None, KEYS, ""),
    "ToolACE": (
        {
            "system": "s",
            "conversations": [
                {"from": r, "value": v}
                for r, v in (("user", "q"), ("assistant", "[f()]"), ("tool", "[1]"), ("assistant", "a"))
            ],
        },
        None,
        ["[f()]", "a"],
        "",
    ),
    "APIGen-MT": (
        {
            "conversations": [
                *shared("q"),
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "18 C"},
                {"from": "gpt", "value": "a"},
            ],
            "tools": json.dumps([TOOL["function"]]),
            "system": "s",
        },
        None,
        [CALLED, "a"],
        "",
    ),
    "Glaive": ({"system": "SYSTEM: s", "chat": "USER: q ASSISTANT: a"}, None, KEYS, ""),
    "ms-swift, tools": (
        {
            "messages": chat(
                "q",
                {"role": "tool_call", "content": json.dumps(CALL["function"])},
                {"role": "tool_response", "content": "18 C"},
                "a",
            ),
            "tools": json.dumps([TOOL]),
        },
        None,
        [CALLED, "a"],
        "",
    ),
    "ms-swift, losses": (
        {"messages": chat("q", {"role": "assistant", "content": "a", "loss": False}, "r", "b"), "images": []},
        None,
        ["b"],
        "",
    ),
    "ms-swift, preferences": ({"messages": chat("q", "a"), "rejected_response": "b"}, None, NO_CHOICE, ""),
    "LLaVA": (
        {"id": "1", "image": "x.jpg", "conversations": shared("<image>\nq", "a")},
        None,
        'image: found a string "x.jpg"',
        "",
    ),
    "LLaVA, text alone": ({"id": "1", "conversations": shared("q", "a"), "model": ""}, None, ["a"], "id"),
    "images in parts": (
        {
            "messages": chat(
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "q"}]}, "a"
            )
        },
        None,
        r"messages\[0\]\.content\[0\]: found an object",
        "",
    ),
    "OpenR1": (
        {"problem": "p", "solution": "s", "messages": chat("p", "<think>t</think>a"), "generations": ["g"]},
        None,
        ["<think>t</think>a"],
        "generations problem solution",
    ),
    **{
        f"reasoning as {key}": (
            {"messages": chat("q", {"role": "assistant", "content": "a", key: "t"})},
            None,
            ["<think>t</think>a"],
            "",
        )
        for key in ("reasoning_content", "reasoning", "thinking")
    },
    "axolotl": (
        {
            "conversations": [
                {"from": f, "value": v, "train": t}
                for f, v, t in (("human", "q", False), ("gpt", "a", False), ("human", "r", False), ("gpt", "b", True))
            ]
        },
        None,
        ["b"],
        "",
    ),
    "axolotl, parts of turns": (
        {
            "conversations": shared(
                "q", {"from": "gpt", "value": "a", "train_detail": [{"begin_offset": 0, "train": False}]}
            )
        },
        None,
        r"conversations\[1\]\.train_detail: found a list",
        "",
    ),
    "torchtune": (
        {
            "messages": [
                {**turn, "masked": masked, "ipython": False, "eot": True}
                for turn, masked in zip(chat("q", "a", "r", "b"), (True, True, True, False), strict=True)
            ]
        },
        None,
        ["b"],
        "messages.eot messages.ipython",
    ),
    "NeMo": (
        {
            "mask": "User",
            "system": "s",
            "conversations": [{"from": "User", "value": "q"}, {"from": "Assistant", "value": "a"}],
        },
        None,
        ["a"],
        "mask",
    ),
    "Gemma": ({"messages": [{"role": "user", "content": "q"}, {"role": "model", "content": "a"}]}, None, ["a"], ""),
    "Capybara": (
        {"source": "x", "conversation": [{"input": "q", "output": "a"}]},
        {"messages": "conversation"},
        r"conversation\[0\]: found the keys \['input', 'output'\], expected 'role' and 'content'",
        "",
    ),
    "Arrow": (
        {"messages": ARROW, "tools": [ARROW_TOOL], "source": None},
        None,
        [CALLED, "a"],
        "messages.tool_call_id messages.tool_calls.id",
    ),
    "Arrow, no tools": (
        {"messages": chat("q", {"role": "assistant", "content": "a", **NULLS}), "tools": None},
        None,
        ["a"],
        "",
    ),
    "Arrow, parts": (
        {
            "messages": [
                {"role": role, "content": [{"type": "text", "text": text, "image_url": None}]}
                for role, text in (("user", "q"), ("assistant", "a"))
            ]
        },
        None,
        ["a"],
        "",
    ),
    "Arrow, JSON in columns": (
        {
            "messages": chat("q", {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}),
            "tools": [json.dumps(TOOL | {"function": TOOL["function"] | {"parameters": json.dumps(PARAMETERS)}})],
        },
        None,
        [CALLED],
        "messages.tool_calls.id",
    ),
    "no tools as text": ({"messages": chat("q", "a"), "tools": "[]"}, None, ["a"], ""),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_public_files(name, tmp_path):
    row, fields, expected, unused = ROWS[name]
    tokenizer = templated(TEMPLATE)
    if isinstance(expected, str):
        with pytest.raises(DataError) as caught:
            read(tmp_path, tokenizer, row, fields=fields)
        first, said = str(caught.value).split("\n")
        assert first == "1 bad line in the data:" and re.search(expected, said)
        return
    (sample,), counts = read(tmp_path, tokenizer, row, fields=fields, loss_on="all")
    assert [text.removesuffix("<|im_end|>") for text in learned_turns(sample, tokenizer)] == expected
    (keys,) = counts.keys.values()
    assert " ".join(sorted(keys.unused | keys.unwritten)) == unused
