"""Chat JSONL: exactly the answer is learned."""

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data import tokens
from data.answers import render
from data.chat import read_chat
from data.jsonl import conversation_of, expected_fields
from data.samples import IGNORE, DataError, Sample
from data.template import Template
from data.tokens import OffsetTokenizer, in_groups
from tests.lib.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.data.chats import (
    END,
    GOOD,
    KINDS,
    THINKING,
    chatml,
    conversation,
    learned,
    learned_turns,
    messages,
    normalizing,
    read,
    swallows_whitespace,
    templated,
    text,
    turns,
    whole,
    words_tokenizer,
    write,
    writes_bos,
)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_answers_are_learned(kind, tmp_path, rng):
    tokenizer, end = kind()
    conversations = [conversation(rng) for _ in range(60)]
    rows = [{"messages": chat} for chat in conversations]
    read_both = {mode: read(tmp_path, tokenizer, *rows, loss_on=mode) for mode in ("last", "all")}
    for samples, counts in read_both.values():
        assert counts.samples == counts.lines == len(samples) == 60
        assert counts.without_end == counts.by_content == 0
        assert counts.targets == sum(int((s.labels != IGNORE).sum()) for s in samples)
        assert counts.tokens == sum(len(s.input_ids) for s in samples)
    newline = "\n" if kind is swallows_whitespace else ""
    for chat, sample, every in zip(conversations, read_both["last"][0], read_both["all"][0], strict=True):
        answers = [turn["content"] for turn in chat if turn["role"] == "assistant"]
        if kind is swallows_whitespace:  # whitespace is part of the <|a|> token, which is given
            answers = [answer.lstrip() for answer in answers]
        if kind is normalizing:
            answers = [normalizers.NFC().normalize_str(answer) for answer in answers]
        assert [run.rstrip(newline) for run in learned_turns(every, tokenizer)] == [answer + end for answer in answers]
        assert learned(sample, tokenizer).rstrip(newline) == answers[-1] + end
        assert every.input_ids.tolist() == sample.input_ids.tolist()
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        assert ids[: len(sample.input_ids) + 1] == [*sample.input_ids, sample.labels[-1]]
        assert not tokenizer.decode(ids[len(sample.input_ids) + 1 :]).strip()
    assert tokenizer("x").input_ids == kind()[0]("x").input_ids, "the caller's tokenizer was changed"


def test_blank_and_opening_answers_are_context(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [
        turns(("assistant", "Hello."), ("user", "a"), ("assistant", "b")),
        turns(("user", "a"), ("assistant", " "), ("user", "c"), ("assistant", "d"), ("user", "e")),
        turns(("user", "a"), ("assistant", "")),
        turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "\n")),
    ]
    samples, counts = read(tmp_path, tokenizer, *rows, loss_on="all")
    path = tmp_path / "a.jsonl"
    assert [learned_turns(sample, tokenizer) for sample in samples] == [["b" + END], ["d" + END], ["b" + END]]
    assert (counts.lines, counts.without_target, counts.passed) == (4, 1, 3)
    assert "3 answers that are empty or open a chat, not learned" in counts.summary()
    assert [(sample.file, sample.line) for sample in samples] == [(str(path), 1), (str(path), 2), (str(path), 4)]
    assert samples[2].where() == f"{path}:4" and samples[0].file is samples[1].file
    _, counts = read(tmp_path, tokenizer, *rows)
    assert (counts.samples, counts.without_target) == (2, 2)


def test_three_forms_give_the_same_sample(tmp_path):
    def shared(*pairs: tuple[str, str]) -> dict[str, Any]:
        return {"conversations": [{"from": speaker, "value": value} for speaker, value in pairs]}

    system, user, answer = "Be brief.", "Is it\nso?", "It is."
    beside = {"system": system}
    rows = [
        turns(("system", system), ("user", user), ("assistant", answer)),
        beside | turns(("user", user), ("assistant", answer)),
        shared(("system", system), ("human", user), ("gpt", answer)),
        beside | shared(("user", user), ("assistant", answer)),
        beside | {"input": user, "output": answer, "id": 7},
        beside | {"instruction": "Is it", "input": "so?", "output": answer},
        beside | {"instruction": user, "input": "", "output": answer},
        beside | {"instruction": user, "output": answer},
        # Turns after the last answer have nothing to say about it.
        beside | shared(("human", user), ("gpt", answer), ("human", "?")),
    ]
    tokenizer = tiny_tokenizer()
    samples, _ = read(tmp_path, tokenizer, *rows)
    expected = f"<|im_start|>system\n{system}{END}\n<|im_start|>user\n{user}{END}\n<|im_start|>assistant\n{answer}{END}"
    assert [whole(sample, tokenizer) for sample in samples] == [expected] * 9
    assert [learned(sample, tokenizer) for sample in samples] == [answer + END] * 9


def test_field_map(tmp_path):
    tokenizer = tiny_tokenizer()
    row = {"question": "Why?", "answer": "So.", "input": "ignored", "messages": 3, "sys": None}
    (sample,), _ = read(
        tmp_path, tokenizer, row, fields={"input": "question", "output": "answer", "system": "sys"}, max_length=100
    )
    assert whole(sample, tokenizer) == f"<|im_start|>user\nWhy?{END}\n<|im_start|>assistant\nSo.{END}"
    for fields, message in (
        ({"input": "text", "output": "answer"}, r"a\.jsonl:1: found the keys .* expected \['text'\] of data\.fields"),
        ({"messages": "messages"}, r"a\.jsonl:1: 'messages': found a number 3, expected a list"),
    ):
        with pytest.raises(DataError, match=message):
            read(tmp_path, tokenizer, row, fields=fields)
    for wrong in (
        {},
        {"input": "q"},
        {"output": "a"},
        {"prompt": "q", "output": "a"},
        {"messages": "m", "input": "q", "output": "a"},
        {"messages": "m", "output": "a"},
    ):
        assert str(expected_fields(wrong)).startswith("names out of messages, ")
    assert expected_fields(None) is expected_fields({"messages": "m", "system": "s"}) is None


def test_a_token_across_the_boundary_is_a_target_and_counted(tmp_path):
    tokenizer = words_tokenizer(
        "Q: {{ messages[0]['content'] }}\nA: "
        "{% if not add_generation_prompt %}{{ messages[1]['content'] + '<|im_end|>' }}{% endif %}"
    )
    rows = {"input": "12?", "output": "the fox"}, {"input": "12?", "output": "<|im_end|>"}
    samples, counts = read(tmp_path, tokenizer, *rows)
    assert learned(samples[0], tokenizer) == f" the fox{END}"
    assert learned(samples[1], tokenizer) == END + END
    assert counts.straddling == 1
    assert "1 answers that begin inside a token" in counts.summary()


def test_answer_is_found_by_content_where_the_prompt_is_no_prefix(tmp_path):
    tokenizer = templated(THINKING.replace("CONTENT", "m['content'].split('</think>')[-1].strip()"))
    rows = [{"input": "user", "output": " 42 \n"}, {"input": "42", "output": "42"}]  # the prompt has the same text
    samples, counts = read(tmp_path, tokenizer, *rows)
    assert [learned(sample, tokenizer) for sample in samples] == [f"42{END}", f"42{END}"]
    assert counts.by_content == 2 and "2 answers found by their content" in counts.summary()
    for answer in ("<think>user, 42?</think> 42", "\nuser, 42?</think>42"):
        with pytest.raises(
            DataError, match=r"a\.jsonl:1: found turn 1's 'content' 'user, 42\?', which the chat template"
        ):
            read(tmp_path, tokenizer, {"input": "user", "output": answer})


CHANGED, OMITTED = "a chat template that changes the content", "turn 1's 'content' .* does not write"
UNLOCATED = {
    "m['content'].replace('A', 'Z')": CHANGED,
    "m['content'] | upper": CHANGED,
    "'fixed'": OMITTED,
    "m['content'] ~ m['content']": "a chat template that writes for the assistant's turn 1 'Abc' 2 times",
    "m['content'] | length": CHANGED,
}
SIMPLE = tiny_tokenizer().chat_template
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system here') }}{% endif %}" + SIMPLE


@pytest.mark.parametrize(
    ("template", "message"),
    [
        *(
            (
                SIMPLE.replace("m['content']", f"(({content}) if m['role'] == 'assistant' else m['content']) | string"),
                f":1: found {message}",
            )
            for content, message in UNLOCATED.items()
        ),
        (NO_SYSTEM, ":2: .*'system'.*refuses: No system here"),
        (
            "{{ messages[0].content.nothing.at_all() }}",
            r":1: found the roles \['user', 'assistant'\], which .* refuses",
        ),
        ("{{ 1 // 0 }}", ":1: found the roles .* refuses: integer division"),
        ("{{ messages[0]['content'] }}", ":1: found turn 1's 'content' 'Abc', which the chat template does not write"),
        (
            "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}{% endif %}",
            ":1: found turn 0's 'content' 'What\\?', which the chat template does not write",
        ),
        (None, "no chat template"),
    ],
)
def test_templates_that_cannot_be_trained_on_are_refused(template, message, tmp_path):
    row = {"input": "What?", "output": "Abc"}
    with pytest.raises(DataError, match=message):
        read(tmp_path, templated(template), row, {"system": "x", **row})


def test_answers_that_lose_their_indentation_are_counted(tmp_path):
    """Llama 3's template strips contents, so code that begins indented would be learned without it."""
    strips, rows = SIMPLE.replace("m['content']", "m['content'].strip()"), ["  if x:\n    y", "\n\nif x:", "if  x"]
    for template, lost in ((SIMPLE, 0), (strips, 1)):
        _, counts = read(tmp_path, templated(template), *({"input": "a", "output": row} for row in rows))
        assert counts.unindented == lost
    assert "1 answers of which the chat template leaves out the spaces at the beginning" in counts.summary()


def test_answer_without_end_token_keeps_its_own_whitespace(tmp_path):
    tokenizer = templated(SIMPLE.replace("+'<|im_end|>\n'", ""))
    (sample,), counts = read(tmp_path, tokenizer, {"input": "a", "output": "b\n\n"})
    assert learned(sample, tokenizer) == "b\n\n"
    assert counts.without_end == 1 and "1 answers without an end-of-turn token" in counts.summary()


def cut(sample: Sample, limit: int, bos: int | None) -> tuple[list[int], list[int]] | None:
    """Inputs and labels that are left where the beginning is cut off; None where the last answer has no room.

    The last answer stays whole; an earlier one stays a target if its first token's predecessor is still there.
    """
    ids, labels = sample.input_ids.tolist(), sample.labels.tolist()
    excess = len(ids) - limit
    if excess <= 0:
        return ids, labels
    last = max(i for i, label in enumerate(labels) if label != IGNORE and (not i or labels[i - 1] == IGNORE))
    if excess > last:
        return None
    keeps_bos = int(ids[0] == bos and excess < last)
    begin = end = excess + keeps_bos
    if labels[begin - 1] != IGNORE:  # the cut goes through an answer, which is lost whole
        while labels[end] != IGNORE:
            end += 1
    left = [IGNORE] * (end - begin) + labels[end:]
    return ids[:1] * keeps_bos + ids[begin:], [IGNORE] * keeps_bos + left


@pytest.mark.parametrize("loss_on", ["last", "all"])
@pytest.mark.parametrize("kind", [chatml, writes_bos])
def test_too_long(kind, loss_on, tmp_path, rng):
    """At every length, dropped and truncated."""
    tokenizer, _ = kind()
    short = messages(("user", "a"), ("assistant", "b"))
    rows = [{"messages": [*short, *conversation(rng)[-2:], *short]}, {"messages": short}]
    rows += [{"messages": conversation(rng)[-4:]} for _ in range(2)] + [{"input": "x", "output": " "}]
    full, counts = read(tmp_path, tokenizer, *rows, loss_on=loss_on)
    assert (counts.lines, counts.samples, counts.without_target, counts.too_long) == (5, 4, 1, 0)
    for limit in range(len(full[1].input_ids), max(len(sample.input_ids) for sample in full)):
        fitting = [sample for sample in full if len(sample.input_ids) <= limit]
        for mode, expected in (
            ("drop", [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in fitting]),
            ("truncate", [left for sample in full if (left := cut(sample, limit, tokenizer.bos_token_id))]),
        ):
            samples, counts = read(tmp_path, tokenizer, *rows, loss_on=loss_on, max_length=limit, too_long=mode)
            assert [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in samples] == expected
            assert (counts.samples, counts.too_long) == (len(expected), 4 - len(expected))
            assert counts.truncated == len(expected) - len(fitting)
            kept = [sample for sample in full if mode == "truncate" and cut(sample, limit, tokenizer.bos_token_id)]
            targets = [sum(int((s.labels != IGNORE).sum()) for s in some) for some in (kept or fitting, samples)]
            assert counts.targets_cut == targets[0] - targets[1]
            assert not counts.targets_cut or f"{counts.targets_cut:,} targets cut away with it" in counts.summary()
    with pytest.raises(DataError, match=r"no sample is left of .*a\.jsonl: 0 samples of 5 lines.* dropped 4 too long"):
        read(tmp_path, tokenizer, *rows, loss_on=loss_on, max_length=1, too_long="truncate")


def test_a_slow_tokenizer_is_refused(tmp_path):
    slow = ByT5Tokenizer()
    slow.chat_template = SIMPLE
    with pytest.raises(DataError, match="ByT5Tokenizer reports no character offsets"):
        read(tmp_path, slow, GOOD)


def test_a_chat_of_many_turns_is_dropped_before_each_answer_is_located(tmp_path, monkeypatch):
    """Each takes time in proportion to all turns."""
    tokenizer = tiny_tokenizer()
    row = turns(*(pair for n in range(150) for pair in (("user", f"a{n}"), ("assistant", "b"))))
    asked = []
    monkeypatch.setattr("data.chat.render", lambda *args: asked.append(args[-1]) or render(*args))
    (one,), counts = read(tmp_path, tokenizer, row, GOOD, loss_on="all", max_length=300)
    assert learned(one, tokenizer) == "42" + END and counts.too_long == 1 and asked == ["last", "all"]
    (_, _), counts = read(tmp_path, tokenizer, row, GOOD, loss_on="all", max_length=30_000)
    assert counts.too_long == 0 and asked == ["last", "all", "last", "all", "all"]


def test_a_key_with_half_of_a_surrogate_pair_is_printed(tmp_path):
    (note,) = read(tmp_path, tiny_tokenizer(), GOOD | {"k\ud83d": "x"})[1].notes()
    assert note.encode("utf-8").endswith(rb'has "k\ud83d", which is not used')


def test_order_over_files_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokens.TEXTS_AT_ONCE", 7)
    paths = [
        write(tmp_path / f"{start}.jsonl", *({"input": "n", "output": str(n)} for n in range(start, start + 25)))
        for start in (0, 25)
    ]
    tokenizer = tiny_tokenizer()
    samples, counts = read_chat(paths, tokenizer, max_length=100)
    assert [learned(sample, tokenizer) for sample in samples] == [f"{n}{END}" for n in range(50)]
    assert counts.files == 2


# ---- bounded memory


def test_groups_are_bounded_by_number_and_characters(rng, monkeypatch):
    texts = ["x" * rng.randint(0, 30) for _ in range(rng.randint(0, 60))]
    count, characters = rng.randint(1, 9), rng.randint(1, 50)
    monkeypatch.setattr(tokens, "TEXTS_AT_ONCE", count)
    monkeypatch.setattr(tokens, "CHARACTERS", characters)
    groups = list(in_groups(iter(texts), len))
    assert [one for group in groups for one in group] == texts and all(groups)
    assert all(len(group) <= count for group in groups)
    assert all(sum(map(len, group)) <= characters or len(group) == 1 for group in groups)


def test_little_is_tokenized_at_a_time(tmp_path, rng, monkeypatch):
    """A thousand lines of 64 KB took 3 GB in one call. Of a line that is far too long only the beginning is tokenized;
    what is not certainly too long is tokenized whole, and kept."""
    calls: list[int] = []

    class Counting(OffsetTokenizer):
        def one(self, text, spelled=()):
            calls.append(len(text))
            return super().one(text, spelled)

        def batch(self, texts):
            calls.append(sum(map(len, texts)))
            return super().batch(texts)

    monkeypatch.setattr("data.chat.OffsetTokenizer", Counting)
    monkeypatch.setattr(tokens, "CHARACTERS", 2000)
    tokenizer = tiny_tokenizer()
    samples, _ = read(tmp_path, tokenizer, *[{"input": "x" * 300, "output": "42"}] * 20)
    assert len(samples) == 20 and 1600 < max(calls) <= 2000 and sum(calls) > 20 * 300
    rows = [GOOD, {"input": text(rng, 5) * 500, "output": "42"}, {"input": "x" * 2100, "output": "42"}]
    for too_long in ("drop", "truncate"):
        samples, counts = read(tmp_path, tokenizer, *rows, max_length=100, too_long=too_long)
        assert (counts.too_long, len(samples)) == (2, 1) and max(calls) == 2000
    (_, long), counts = read(tmp_path, tokenizer, rows[0], rows[2], max_length=5000)
    assert counts.too_long == 0 and len(long.input_ids) > 2000


def test_text_that_a_tokenizer_does_not_take_is_named(tmp_path):
    """Without a token for unknown words the tokenizer raises, for a whole batch of lines."""
    words = {word: index for index, word in enumerate(["user", "assistant", "a", "b"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "")
    good, bad = {"input": "a", "output": "b"}, {"input": "a", "output": "c"}
    assert read(tmp_path, tokenizer, good, good)[0]
    with pytest.raises(DataError, match=r"/a\.jsonl:2: found text that the tokenizer does not take: .*UNK"):
        read(tmp_path, tokenizer, good, bad, good)


@pytest.mark.parametrize("names", [("messages", "role", "content"), ("conversations", "from", "value")])
def test_the_first_chat_of_very_many_turns_is_named_with_its_cost(tmp_path, names):
    """Each answer is located in renderings of its own: with twice the turns, twice as many of twice the size."""
    key, role, value = names
    short, long = ([{role: ("user", "assistant")[i % 2], value: f"{i}."} for i in range(turns)] for turns in (20, 202))
    said: list[str] = []
    read(tmp_path, tiny_tokenizer(), {key: short}, {key: long}, {key: long}, loss_on="all", say=said.append)
    (line,) = said
    where = re.escape(f"data.loss_on all: {tmp_path}/a.jsonl:2")
    assert re.match(rf"{where} has some 202 turns: .* in 303 renderings with 1,\d\d\d,\d\d\d characters", line), line
    read(tmp_path, tiny_tokenizer(), {key: long}, say=said.append)
    assert said == [line]


@pytest.mark.parametrize("turns", [10, 100])
def test_renderings_of_a_chat_grow_as_it_is_said(turns, monkeypatch):
    template, written = Template(tiny_tokenizer()), list[str]()
    write = template.write

    def counted(*args: Any, **options: Any) -> str:
        written.append(write(*args, **options))
        return written[-1]

    monkeypatch.setattr(template, "write", counted)
    row = {"messages": [{"role": ("user", "assistant")[i % 2], "content": f"{i} is a number."} for i in range(turns)]}
    found = render(template, conversation_of(json.dumps(row).encode(), None, template.reads), "all")
    assert len(written) - 2 == 1.5 * turns
    assert sum(map(len, written)) == pytest.approx(turns * len(found.text), rel=0.2)
