"""Chat templates that write a turn in more than one way, and special tokens that are spelled out in chats."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.chat import Counts
from data.samples import IGNORE, DataError
from data.template import SpecialTexts
from data.text import read_text
from tests.lib.tiny import TEXT, tiny_tokenizer
from tests.unit.data.chats import (
    END,
    GOOD,
    KINDS,
    THINKING,
    learned,
    learned_turns,
    messages,
    read,
    templated,
    text,
    turns,
    whole,
    words_tokenizer,
)

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
{{- '<|im_start|>A:' + (m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>' }}
{%- else %}{{ '<|im_start|>Q:' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>A:<think>\n' }}{% endif %}"""
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 30}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds é", "parameters": {"type": "object"}}}
CALLED = '\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'


def read_rows(tmp_path: Path, template: str, *rows: object, **options: Any) -> tuple[list[list[str]], Counts]:
    tokenizer = templated(template)
    samples, counts = read(tmp_path, tokenizer, *rows, **options)
    return [learned_turns(sample, tokenizer) for sample in samples], counts


def test_thinking_is_learned_where_the_whole_conversation_has_it(tmp_path):
    said = (("user", "42?"), ("assistant", "<think>\nuser\n</think>\n\n42"), ("user", "42"))
    thought = turns(*said, ("assistant", "<think>x</think>42"))
    separate = turns(("user", "42?"), ("assistant", "42"), ("user", "42"), ("assistant", "42"))
    for index, reasoning in ((1, "user"), (3, "x")):
        separate["messages"][index]["reasoning_content"] = reasoning
    last = f"<think>\nx\n</think>\n\n42{END}"
    assert read_rows(tmp_path, QWEN, thought, separate)[0] == [[last]] * 2
    found, counts = read_rows(tmp_path, QWEN, thought, separate, loss_on="all")
    assert found == [[f"42{END}", last]] * 2
    assert counts.cut == 2  # the first turn of each: alone it would have its thinking
    plain = turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert read_rows(tmp_path, QWEN, plain, loss_on="all")[0] == [[f"b{END}", f"<think>\n\n</think>\n\nd{END}"]]


def test_thinking_that_the_prompt_opens(tmp_path):
    row = turns(("user", "Q:b"), ("assistant", "<think>b</think>b"), ("user", "b"), ("assistant", "b b"))
    found, counts = read_rows(tmp_path, OPENED, row, loss_on="all")
    assert found == [[f"b{END}", f"b b{END}"]] and (counts.by_content, counts.cut) == (2, 1)
    assert read_rows(tmp_path, OPENED, row)[0] == [[f"b b{END}"]]


def test_reasoning_is_learned_where_only_its_content_shows_its_place(tmp_path):
    template = OPENED.replace("+ (m.content", "+ '<think>' + (m.reasoning_content or '') + '</think>' + (m.content")
    row = {"messages": [*messages(("user", "b")), {"role": "assistant", "content": "b", "reasoning_content": "b?"}]}
    found, counts = read_rows(tmp_path, template, row)
    assert found == [[f"b?</think>b{END}"]] and counts.by_content == 1


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (CALL, {"content": None}),
        (CALL["function"], {}),
        ({**CALL, "function": {"name": "add", "arguments": '{"a": 12, "b": 30}'}}, {"content": ""}),
    ],
)
def test_tools(call, content, tmp_path):
    row = {
        "messages": [
            *messages(("user", "12 plus 30?")),
            {"role": "assistant", **content, "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1", "name": "add"},
            *messages(("assistant", "It is 42.")),
        ],
        "tools": [TOOL],
    }
    final = f"<think>\n\n</think>\n\nIt is 42.{END}"
    assert read_rows(tmp_path, QWEN, row)[0] == [[final]]
    # The call is behind the last question: alone it would open with an empty thought.
    assert read_rows(tmp_path, QWEN, row, loss_on="all")[0] == [[f"{CALLED}{END}", final]]
    row["messages"] = row["messages"][:2]
    expected = [[f"<think>\n\n</think>\n\n{CALLED}{END}"]]
    assert read_rows(tmp_path, QWEN, row)[0] == expected
    (sample,), _ = read(tmp_path, templated(QWEN), row)
    assert "Adds é" in whole(sample, tiny_tokenizer())
    # Arguments are JSON for templates that write them as they are.
    as_they_are = QWEN.replace("{{- call.arguments | tojson }}", "{{- call.arguments + '' }}")
    assert read_rows(tmp_path, as_they_are, row)[0] == expected


EARLIER = turns(("user", "a"), ("assistant", "Abc"), ("user", "a"), ("assistant", "d"))
TOGETHER = "{% for m in messages %}{{ m.content if m.role == 'assistant' else '. ' ~ m.content ~ ' ' }}{% endfor %}"


@pytest.mark.parametrize(
    ("tokenizer", "row", "message"),
    [
        *(
            (templated(THINKING.replace("CONTENT", f"({content})").replace("<think>\n", "")), EARLIER, message)
            for content, message in (
                (
                    "m['content'].replace('A', 'Z') if not loop.last else m['content']",
                    "found a chat template that changes the content of turn 1 ",
                ),
                (
                    "m['content'] ~ ('!' if loop.last else '')",
                    r"found a chat template that writes for the assistant's turn 1 '!<\|im_end\|>' after its text on",
                ),
            )
        ),
        (
            words_tokenizer(TOGETHER),
            turns(("user", "12"), ("assistant", "f"), ("assistant", "ox")),
            "found one token for ' fox', the end of an answer and the beginning",
        ),
        (
            templated(QWEN),
            {**GOOD, "tools": [{"type": "function", "function": {"name": "add", "description": "\ud83d"}}]},
            "found half of a surrogate pair at character",
        ),
    ],
)
def test_answers_that_cannot_be_located_are_refused(tokenizer, row, message, tmp_path):
    with pytest.raises(DataError, match=rf"a\.jsonl:1: {message}"):
        read(tmp_path, tokenizer, row, loss_on="all")


LISTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOTH = LISTS.replace("{% for part", "{% if m.content is string %}{{ m.content }}{% else %}{% for part").replace(
    "{{ '<|im_end|>", "{% endif %}{{ '<|im_end|>"
)


@pytest.mark.parametrize(("template", "joined"), [(None, "b\nc"), (LISTS, "bc"), (BOTH, "bc")])
def test_text_parts_are_joined_or_passed_on_as_the_template_takes_them(template, joined, tmp_path):
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    tokenizer = templated(template) if template else tiny_tokenizer()
    several = turns(("user", parts("a", "x")), ("assistant", parts("b", "c")))
    samples, _ = read(tmp_path, tokenizer, several, GOOD)
    assert [learned(sample, tokenizer) for sample in samples] == [joined + END, "42" + END]
    user = joined.replace("b", "a").replace("c", "x")
    assert whole(samples[0], tokenizer) == f"<|im_start|>user\n{user}{END}\n<|im_start|>assistant\n{joined}{END}"
    assert "What is 12 plus 30?" in whole(samples[1], tokenizer)


# ---- special tokens that are spelled out


SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
SPELLED = r"1 bad line .*\n.*a\.jsonl:1: found the special token '{}' spelled"


def spelled(rng: random.Random) -> str:
    """Text with special tokens in it, next to each other and at both ends too."""
    return "".join(rng.choice([text(rng, 1), rng.choice(SPECIAL)]) for _ in range(rng.randint(1, 5)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_as_text_nothing_but_the_template_writes_special_tokens(kind, loss_on, tmp_path, rng):
    """Targets have the same characters, and the special tokens of chats without spelled ones."""
    tokenizer, _ = kind()
    chats = [messages(("user", spelled(rng)), ("assistant", spelled(rng) + ".")) * rng.randint(1, 3) for _ in range(40)]
    rows = [{"messages": chat} for chat in chats]
    plain = [{"messages": [{**turn, "content": "x"} for turn in chat]} for chat in chats]
    kept, counts = read(tmp_path, tokenizer, *rows, loss_on=loss_on)
    as_text, none = read(tmp_path, tokenizer, *rows, loss_on=loss_on, special_tokens="text")
    expected, _ = read(tmp_path, tokenizer, *plain, loss_on=loss_on)
    special = list(SpecialTexts(tokenizer).ids)

    def special_tokens(sample):
        return [token for token in (*sample.input_ids.tolist(), int(sample.labels[-1])) if token in special]

    assert counts.spelled == sum(
        len(special_tokens(a)) - len(special_tokens(b)) for a, b in zip(kept, as_text, strict=True)
    )
    assert counts.spelled > 0 and none.spelled == none.spelled_targets == 0
    assert "special tokens spelled out in the chats and kept" in counts.summary() and "spelled" not in none.summary()
    for with_tokens, sample, like in zip(kept, as_text, expected, strict=True):
        assert special_tokens(sample) == special_tokens(like)
        assert whole(sample, tokenizer).rstrip() == whole(with_tokens, tokenizer).rstrip()
        targets = sample.labels[sample.labels != IGNORE].tolist()
        texts = [
            tokenizer.decode(t[t != IGNORE], skip_special_tokens=False) for t in (sample.labels, with_tokens.labels)
        ]
        assert texts[0].rstrip() == texts[1].rstrip()
        assert sum(token in special for token in targets) == sum(token in special for token in like.labels.tolist())


def test_an_answer_that_spells_its_end_has_two(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = {"input": f"What is {END}?", "output": f"This{END}"}, GOOD
    for treatment, ends in (("keep", 2), ("text", 1)):
        samples, counts = read(tmp_path, tokenizer, *rows, special_tokens=treatment)
        assert learned(samples[0], tokenizer) == f"This{END}{END}"
        assert samples[0].labels.tolist().count(tokenizer.eos_token_id) == ends
        if treatment == "keep":
            assert (counts.spelled, counts.spelled_targets) == (2, 1)
            assert counts.summary().endswith(
                "; 2 special tokens spelled out in the chats and kept (data.special_tokens); 1 of them targets"
            )
    with pytest.raises(DataError, match=SPELLED.format(r"<\|im_end\|>")):
        read(tmp_path, tokenizer, *rows, special_tokens="refuse")


EVERYTHING = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n'}}"
    "{{ m['reasoning_content'] or '' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}{{ m['tool_calls'] | tojson if "
    "m['tool_calls'] else '' }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


@pytest.mark.parametrize(
    ("user", "answer", "more", "count"),
    [
        ({}, {}, {"tools": [{"name": "f", "description": f"ends with {END}"}]}, 1),
        ({}, {"tool_calls": [{"name": "f", "arguments": {f"x{END}": [END]}}]}, {}, 2),
        ({"content": [{"type": "text", "text": f"{END} a"}]}, {}, {}, 1),
        ({}, {"reasoning_content": f"hm {END}"}, {}, 1),
    ],
)
def test_special_tokens_in_every_place_are_found(user, answer, more, count, tmp_path):
    tokenizer = templated(EVERYTHING)
    row = turns(("user", "a"), ("assistant", "b")) | more
    row["messages"][0] |= user
    row["messages"][1] |= answer
    assert read(tmp_path, tokenizer, row)[1].spelled == count
    (sample,), counts = read(tmp_path, tokenizer, row, special_tokens="text")
    assert counts.spelled == 0
    ids = [*sample.input_ids.tolist(), int(sample.labels[-1])]
    assert ids.count(tokenizer.eos_token_id) == 2, "one per turn"
    with pytest.raises(DataError, match="found the special token"):
        read(tmp_path, tokenizer, row, special_tokens="refuse")


def think_tokenizer(change) -> PreTrainedTokenizerFast:
    """A tokenizer with the special token ``[/THINK]`` and a changed template."""
    tokenizer = templated(change(tiny_tokenizer().chat_template))
    tokenizer.add_tokens([AddedToken("[/THINK]", special=True)], special_tokens=True)
    return tokenizer


def test_a_template_that_asks_for_special_tokens(tmp_path):
    """It strips what is in front of one, so without it writes another text: counted, and not to be read as text."""
    tokenizer = think_tokenizer(lambda template: template.replace("m['content']", "m['content'].split('[/THINK]')[-1]"))
    row = {"input": "a[/THINK]b", "output": "c"}
    (sample,), counts = read(tmp_path, tokenizer, row)
    assert "a" not in whole(sample, tokenizer).split("user")[1].split(END)[0] and counts.spelled == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*as the chat template writes the conversation otherwise"):
        read(tmp_path, tokenizer, row, special_tokens="text")


def test_a_template_that_does_without_no_special_token(tmp_path):
    """It refuses the conversation that has none: what is spelled out is counted all the same."""
    asks = "{% if '[/THINK]' not in messages[0]['content'] %}{{ raise_exception('think first') }}{% endif %}"
    tokenizer = think_tokenizer(lambda template: asks + template)
    row = {"input": f"a[/THINK]b{END}", "output": "c"}
    assert read(tmp_path, tokenizer, row)[1].spelled == 2
    with pytest.raises(DataError, match=SPELLED.format(r"\[/THINK\]")):
        read(tmp_path, tokenizer, row, special_tokens="refuse")


def test_a_tokenizer_that_looks_beyond_special_tokens_cannot_read_them_as_text(tmp_path):
    backend = Tokenizer(models.BPE(unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["?", *SPECIAL], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = tiny_tokenizer().chat_template
    row = {"input": f"a{END}b", "output": "c"}
    assert read(tmp_path, tokenizer, row)[1].spelled == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*tokens between two special tokens depend on"):
        read(tmp_path, tokenizer, row, special_tokens="text")


def test_deeply_nested_tools(tmp_path):
    deep: object = END
    for _ in range(400):
        deep = [deep]
    row = turns(("user", "a"), ("assistant", "b")) | {"tools": [{"name": "f", "parameters": deep}]}
    tokenizer = templated("{{ tools[0]['function']['name'] }}" + tiny_tokenizer().chat_template)
    assert read(tmp_path, tokenizer, row)[1].spelled == 0, "the template writes the tool's name alone"


def test_plain_text(tmp_path):
    tokenizer, path, other = tiny_tokenizer(), tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("one\ntwo<|endoftext|>three\n")
    other.write_text(f"four{END} five")
    special = list(SpecialTexts(tokenizer).ids)
    for treatment, count in (("keep", 3), ("text", 1)):  # the EOS between the files counts
        samples = read_text([path, other], tokenizer, 4, treatment)
        assert sum(int(np.isin(sample.input_ids, special).sum()) for sample in samples) == count
    with pytest.raises(DataError, match=r"a\.txt:2: found the special token '<\|endoftext\|>' spelled out"):
        read_text([path], tokenizer, 4, "refuse")
