"""Templates that write a turn in more than one way: thinking, tools, lists of text."""

from pathlib import Path

import pytest

from data.chat import Counts, read_chat
from data.samples import DataError
from tests.lib.tiny import tiny_tokenizer
from tests.unit.data.chats import END, GOOD, THINKING, learned_turns, messages, whole, words_tokenizer, write

# Like Qwen 3's: thinking is written for the last turn (an empty block where there is none) and for those behind the
# last question, and left out of the turns before it.
QWEN = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}
  {%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- set content = m.content if m.content is string else '' %}
  {%- if m.role == 'assistant' %}
    {%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
    {%- if '</think>' in content %}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
      {%- set call = call.function or call %}
      {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
      {{- call.arguments | tojson }}{{ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like the R1 distillations': the prompt opens the thinking, finished turns have none.
OPENED = """\
{%- for m in messages %}{% if m.role == 'assistant' %}
{{- '<|im_start|>A:' + m.content.split('</think>')[-1] + '<|im_end|>' }}
{%- else %}{{ '<|im_start|>Q:' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>A:<think>\n' }}{% endif %}"""
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds é", "parameters": {"type": "object"}}}
CALLED = '\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'


def read_rows(tmp_path: Path, template: str, *rows: object, **settings: object) -> tuple[list[list[str]], Counts]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    samples, counts = read_chat([write(tmp_path / "a.jsonl", *rows)], tokenizer, max_length=10_000, **settings)
    return [learned_turns(sample, tokenizer) for sample in samples], counts


def test_thinking_is_learned_where_the_whole_conversation_has_it(tmp_path):
    thought = messages(
        ("user", "42?"),
        ("assistant", "<think>\nuser\n</think>\n\n42"),
        ("user", "42"),
        ("assistant", "<think>x</think>42"),
    )
    separate = [
        *messages(("user", "42?")),
        {"role": "assistant", "content": "42", "reasoning_content": "user"},
        *messages(("user", "42")),
        {"role": "assistant", "content": "42", "reasoning_content": "x"},
    ]
    rows = [{"messages": thought}, {"messages": separate}]
    last = f"<think>\nx\n</think>\n\n42{END}"
    assert read_rows(tmp_path, QWEN, *rows)[0] == [[last]] * 2
    found, counts = read_rows(tmp_path, QWEN, *rows, loss_on="all")
    assert found == [[f"42{END}", last]] * 2
    assert counts.by_content == 2  # the first turn of each: alone it would have its thinking
    plain = {"messages": messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))}
    assert read_rows(tmp_path, QWEN, plain, loss_on="all")[0] == [[f"b{END}", f"<think>\n\n</think>\n\nd{END}"]]


def test_thinking_that_the_prompt_opens(tmp_path):
    rows = {
        "messages": messages(("user", "Q:b"), ("assistant", "<think>b</think>b"), ("user", "b"), ("assistant", "b b"))
    }
    found, counts = read_rows(tmp_path, OPENED, rows, loss_on="all")
    assert found == [[f"b{END}", f"b b{END}"]] and counts.by_content == 2
    assert read_rows(tmp_path, OPENED, rows)[0] == [[f"b b{END}"]]


def test_reasoning_is_learned_where_only_its_content_shows_its_place(tmp_path):
    template = OPENED.replace(
        "+ m.content.split", "+ '<think>' + (m.reasoning_content or '') + '</think>' + m.content.split"
    )
    row = {"messages": [*messages(("user", "b")), {"role": "assistant", "content": "b", "reasoning_content": "b?"}]}
    found, counts = read_rows(tmp_path, template, row)
    assert found == [[f"b?</think>b{END}"]] and counts.by_content == 1


@pytest.mark.parametrize(
    "call", [CALL, CALL["function"], {**CALL, "function": {"name": "add", "arguments": '{"a": 12, "b": 30}'}}]
)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_tools(call, content, tmp_path):
    turns = [
        *messages(("user", "12 plus 30?")),
        {"role": "assistant", **content, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": "It is 42."},
    ]
    row = {"messages": turns, "tools": [TOOL]}
    final = f"<think>\n\n</think>\n\nIt is 42.{END}"
    assert read_rows(tmp_path, QWEN, row)[0] == [[final]]
    # The call is behind the last question: by itself it would open with an empty thought.
    assert read_rows(tmp_path, QWEN, row, loss_on="all")[0] == [[f"{CALLED}{END}", final]]
    assert read_rows(tmp_path, QWEN, {**row, "messages": turns[:2]})[0] == [[f"<think>\n\n</think>\n\n{CALLED}{END}"]]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN
    (sample,), _ = read_chat([tmp_path / "a.jsonl"], tokenizer, max_length=10_000)
    assert "Adds é" in whole(sample, tokenizer)


def test_arguments_are_json_for_templates_that_write_them_as_they_are(tmp_path):
    template = QWEN.replace("{{- call.arguments | tojson }}", "{{- call.arguments + '' }}")
    turns = [*messages(("user", "a")), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert read_rows(tmp_path, template, {"messages": turns})[0] == [[f"<think>\n\n</think>\n\n{CALLED}{END}"]]


def test_what_the_template_would_leave_out_is_an_error(tmp_path):
    def refused(template: str, row: object, message: str) -> None:
        with pytest.raises(DataError, match=rf"a\.jsonl:1: {message}"):
            read_rows(tmp_path, template, row)

    simple = tiny_tokenizer().chat_template
    refused(simple, {**GOOD, "tools": [TOOL]}, "found the tool 'add', which the chat template does not write")
    called = [*messages(("user", "a")), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    refused(simple, {"messages": called}, "found turn 1's call of 'add', which the chat template does not write")
    thinking = [*messages(("user", "a")), {"role": "assistant", "content": "b", "reasoning_content": "Hm."}]
    refused(
        simple, {"messages": thinking}, "found turn 1's 'reasoning_content' 'Hm.', which the chat template does not"
    )
    surrogate = {**TOOL, "function": {"name": "add", "description": "\ud83d"}}
    refused(QWEN, {**GOOD, "tools": [surrogate]}, "found half of a surrogate pair at character")
    refused(
        "{{ messages[0].content.nothing.at_all() }}", GOOD, r"found the roles \['user', 'assistant'\], which .* refuses"
    )
    refused("{{ 1 // 0 }}", GOOD, "found the roles .* refuses: integer division")


@pytest.mark.parametrize(
    "content",
    ["m['content'].replace('A', 'Z') if not loop.last else m['content']", "m['content'] ~ ('!' if loop.last else '')"],
)
def test_an_earlier_answer_that_cannot_be_located_is_an_error(content, tmp_path):
    template = THINKING.replace("CONTENT", f"({content})").replace("<think>\n", "")
    row = {"messages": messages(("user", "a"), ("assistant", "Abc"), ("user", "a"), ("assistant", "d"))}
    with pytest.raises(DataError, match=r"a\.jsonl:1: found a chat template whose generation prompt .* turn 1, "):
        read_rows(tmp_path, template, row, loss_on="all")


def test_one_token_for_an_answer_and_what_follows_is_an_error(tmp_path):
    tokenizer = words_tokenizer(
        "{% for m in messages %}{{ m.content if m.role == 'assistant' else '. ' ~ m.content ~ ' ' }}{% endfor %}"
    )
    row = {"messages": messages(("user", "12"), ("assistant", "f"), ("assistant", "ox"))}
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: found one token for ' fox', the end of an answer and the beginning"
    ):
        read_chat([write(tmp_path / "a.jsonl", row)], tokenizer, max_length=99, loss_on="all")


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


LISTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOTH = LISTS.replace("{% for part", "{% if m.content is string %}{{ m.content }}{% else %}{% for part").replace(
    "{{ '<|im_end|>", "{% endif %}{{ '<|im_end|>"
)


@pytest.mark.parametrize(("template", "joined"), [(None, "b\nc"), (LISTS, "bc"), (BOTH, "bc")])
def test_text_parts_are_joined_or_passed_on_as_the_template_takes_them(template, joined, tmp_path):
    template = template or tiny_tokenizer().chat_template
    several = {
        "messages": [{"role": "user", "content": parts("a", "x")}, {"role": "assistant", "content": parts("b", "c")}]
    }
    found, _ = read_rows(tmp_path, template, several, GOOD)
    assert found == [[joined + END], ["42" + END]]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    samples, _ = read_chat([tmp_path / "a.jsonl"], tokenizer, max_length=1000, loss_on="all")
    user = joined.replace("b", "a").replace("c", "x")
    assert whole(samples[0], tokenizer) == f"<|im_start|>user\n{user}{END}\n<|im_start|>assistant\n{joined}{END}"
    assert "What is 12 plus 30?" in whole(samples[1], tokenizer)
