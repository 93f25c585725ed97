"""Chat JSONL: exactly the answer is learned."""

import re
from pathlib import Path

import pytest
from tokenizers import normalizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data.chat import Counts, read_chat
from data.samples import IGNORE, DataError, Sample
from tests.lib.tiny import tiny_tokenizer
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
    shared,
    swallows_whitespace,
    text,
    whole,
    words_tokenizer,
    write,
    writes_bos,
)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_last_answer_is_learned(kind, tmp_path, rng):
    tokenizer, end = kind(rng)
    conversations = [conversation(rng) for _ in range(60)]
    path = write(tmp_path / "chat.jsonl", *({"messages": turns} for turns in conversations))
    samples, counts = read_chat([path], tokenizer, max_length=10_000)
    assert counts.samples == counts.lines == len(samples) == 60
    assert counts.without_end == counts.by_content == 0
    for turns, sample in zip(conversations, samples, strict=True):
        answer = turns[-1]["content"]
        if kind is swallows_whitespace:
            answer = answer.lstrip()  # part of the <|a|> token, which is given: nothing of it can be learned
        if kind is normalizing:
            answer = normalizers.NFC().normalize_str(answer)
        assert learned(sample, tokenizer).rstrip("\n" if kind is swallows_whitespace else "") == answer + end
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        assert ids[: len(sample.input_ids) + 1] == [*sample.input_ids, sample.labels[-1]]
        assert not tokenizer.decode(ids[len(sample.input_ids) + 1 :]).strip()
    assert counts.targets == sum(int((s.labels != IGNORE).sum()) for s in samples)
    assert counts.tokens == sum(len(s.input_ids) for s in samples)


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_all_answers_are_learned(kind, tmp_path, rng):
    tokenizer, end = kind(rng)
    conversations = [conversation(rng) for _ in range(60)]
    path = write(tmp_path / "chat.jsonl", *({"messages": turns} for turns in conversations))
    samples, counts = read_chat([path], tokenizer, max_length=10_000, loss_on="all")
    last, _ = read_chat([path], tokenizer, max_length=10_000)
    assert counts.samples == len(samples) == 60 and counts.without_end == counts.by_content == 0
    for turns, sample, only_last in zip(conversations, samples, last, strict=True):
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        if kind is swallows_whitespace:
            answers = [answer.lstrip() for answer in answers]
        if kind is normalizing:
            answers = [normalizers.NFC().normalize_str(answer) for answer in answers]
        found = [run.rstrip("\n" if kind is swallows_whitespace else "") for run in learned_turns(sample, tokenizer)]
        assert found == [answer + end for answer in answers]
        assert sample.input_ids.tolist() == only_last.input_ids.tolist()
        targets = only_last.labels != IGNORE
        assert sample.labels[targets].tolist() == only_last.labels[targets].tolist()
    assert counts.targets == sum(int((s.labels != IGNORE).sum()) for s in samples)


def test_blank_and_opening_answers_are_context(tmp_path):
    tokenizer = tiny_tokenizer()
    opening = messages(("assistant", "Hello."), ("user", "a"), ("assistant", "b"))
    blank = messages(("user", "a"), ("assistant", " "), ("user", "c"), ("assistant", "d"), ("user", "e"))
    nothing = messages(("user", "a"), ("assistant", ""))
    ends_blank = messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "\n"))
    path = write(tmp_path / "a.jsonl", *({"messages": turns} for turns in (opening, blank, nothing, ends_blank)))
    samples, counts = read_chat([path], tokenizer, max_length=1000, loss_on="all")
    assert [learned_turns(sample, tokenizer) for sample in samples] == [["b" + END], ["d" + END], ["b" + END]]
    assert (counts.lines, counts.without_target) == (4, 1)
    assert [(sample.file, sample.line) for sample in samples] == [(str(path), 1), (str(path), 2), (str(path), 4)]
    assert samples[2].where() == f"{path}:4" and samples[0].file is samples[1].file
    _, counts = read_chat([path], tokenizer, max_length=1000)
    assert (counts.samples, counts.without_target) == (2, 2)


def test_bos_stands_once(tmp_path, rng):
    tokenizer, _ = writes_bos(rng)
    (sample,), _ = read_chat([write(tmp_path / "a.jsonl", GOOD)], tokenizer, max_length=100)
    assert sample.input_ids[0] == tokenizer.bos_token_id
    assert (sample.input_ids == tokenizer.bos_token_id).sum() == 1
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id, "the caller's tokenizer was changed"


def test_three_forms_give_the_same_sample(tmp_path):
    system, user, answer = "Be brief.", "Is it\nso?", "It is."
    path = write(
        tmp_path / "forms.jsonl",
        {"messages": messages(("system", system), ("user", user), ("assistant", answer))},
        {"system": system, "messages": messages(("user", user), ("assistant", answer))},
        {"conversations": shared(("system", system), ("human", user), ("gpt", answer))},
        {"system": system, "conversations": shared(("user", user), ("assistant", answer))},
        {"system": system, "input": user, "output": answer, "id": 7},
        {"system": system, "instruction": "Is it", "input": "so?", "output": answer},
        {"system": system, "instruction": user, "input": "", "output": answer},
        {"system": system, "instruction": user, "output": answer},
        # Turns after the last answer have nothing to say about it.
        {"system": system, "conversations": shared(("human", user), ("gpt", answer), ("human", "?"))},
    )
    tokenizer = tiny_tokenizer()
    samples, _ = read_chat([path], tokenizer, max_length=1000)
    expected = f"<|im_start|>system\n{system}{END}\n<|im_start|>user\n{user}{END}\n<|im_start|>assistant\n{answer}{END}"
    assert [whole(sample, tokenizer) for sample in samples] == [expected] * 9
    assert [learned(sample, tokenizer) for sample in samples] == [answer + END] * 9


def test_field_map(tmp_path):
    tokenizer = tiny_tokenizer()
    path = write(
        tmp_path / "a.jsonl", {"question": "Why?", "answer": "So.", "input": "ignored", "messages": 3, "sys": None}
    )
    fields = {"input": "question", "output": "answer", "system": "sys"}
    (sample,), _ = read_chat([path], tokenizer, max_length=100, fields=fields)
    assert whole(sample, tokenizer) == f"<|im_start|>user\nWhy?{END}\n<|im_start|>assistant\nSo.{END}"
    with pytest.raises(DataError, match=r"a\.jsonl:1: found the keys .* expected \['text'\] of data\.fields"):
        read_chat([path], tokenizer, max_length=100, fields={"input": "text", "output": "answer"})
    wrong_type = {"messages": "messages"}
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'messages': found a number 3, expected a list"):
        read_chat([path], tokenizer, max_length=100, fields=wrong_type)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input": "q"},
        {"output": "a"},
        {"prompt": "q", "output": "a"},
        {"messages": "m", "input": "q", "output": "a"},
    ],
)
def test_field_maps_of_no_one_form_are_refused(fields, tmp_path):
    with pytest.raises(DataError, match=re.escape(f"data.fields: {fields}, expected names out of")):
        read_chat([write(tmp_path / "a.jsonl", GOOD)], tiny_tokenizer(), max_length=100, fields=fields)


def test_a_token_across_the_boundary_is_a_target_and_counted(tmp_path):
    tokenizer = words_tokenizer(
        "Q: {{ messages[0]['content'] }}\nA: "
        "{% if not add_generation_prompt %}{{ messages[1]['content'] + '<|im_end|>' }}{% endif %}"
    )
    path = write(tmp_path / "a.jsonl", {"input": "12?", "output": "the fox"}, {"input": "12?", "output": "<|im_end|>"})
    samples, counts = read_chat([path], tokenizer, max_length=100)
    assert learned(samples[0], tokenizer) == f" the fox{END}"
    assert learned(samples[1], tokenizer) == END + END
    assert counts.straddling == 1
    assert "1 answers that begin inside a token" in counts.summary()


def test_answer_is_found_by_content_where_the_prompt_is_no_prefix(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING.replace("CONTENT", "m['content'].split('</think>')[-1].strip()")
    path = write(
        tmp_path / "a.jsonl",
        {"input": "user", "output": "<think>user, 42?</think> 42 \n"},
        {"input": "42", "output": "42"},  # the same text stands in the prompt
        {"input": "12", "output": "<think>\nso</think>12"},
    )
    samples, counts = read_chat([path], tokenizer, max_length=100)
    assert [learned(sample, tokenizer) for sample in samples] == [f"42{END}", f"42{END}", f"12{END}"]
    assert counts.by_content == 3 and "3 answers found by their content" in counts.summary()


@pytest.mark.parametrize(
    "content",
    [
        "m['content'].replace('A', 'Z')",
        "m['content'] | upper",
        "'fixed'",
        "m['content'] ~ m['content']",
        "m['content'] | length",
    ],
)
def test_an_answer_that_cannot_be_located_is_an_error(content, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING.replace("CONTENT", f"({content}) | string")
    with pytest.raises(DataError, match=r"a\.jsonl:1: found a chat template whose generation prompt"):
        read_chat([write(tmp_path / "a.jsonl", GOOD | {"output": "Abc"})], tokenizer, max_length=100)


def test_what_the_template_refuses_or_leaves_out_is_an_error(tmp_path):
    tokenizer = tiny_tokenizer()
    path = write(tmp_path / "a.jsonl", GOOD, {"system": "x", **GOOD})
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system here') }}{% endif %}"
        + tokenizer.chat_template
    )
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*'system'.*refuses: No system here"):
        read_chat([path], tokenizer, max_length=100)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(DataError, match=r"a\.jsonl:1: found nothing after the generation prompt"):
        read_chat([path], tokenizer, max_length=100)
    tokenizer.chat_template = "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}{% endif %}"
    with pytest.raises(DataError, match=r"a\.jsonl:1: found the answer to begin at token 0"):
        read_chat([path], tokenizer, max_length=100)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        read_chat([path], tokenizer, max_length=100)


def test_answer_without_end_token_keeps_its_own_whitespace(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("+'<|im_end|>\n'", "")
    (sample,), counts = read_chat(
        [write(tmp_path / "a.jsonl", {"input": "a", "output": "b\n\n"})], tokenizer, max_length=99
    )
    assert learned(sample, tokenizer) == "b\n\n"
    assert counts.without_end == 1 and "1 answers without an end-of-turn token" in counts.summary()


@pytest.mark.parametrize("kind", [chatml, writes_bos])
def test_too_long(kind, tmp_path, rng):
    tokenizer, _ = kind(rng)
    bos = 1 if kind is writes_bos else 0
    rows = [{"input": text(rng, 3), "output": text(rng) + "x"} for _ in range(40)] + [{"input": "x", "output": " "}]
    path = write(tmp_path / "a.jsonl", *rows)
    full, counts = read_chat([path], tokenizer, max_length=10_000)
    assert (counts.lines, counts.samples, counts.without_target, counts.too_long) == (41, 40, 1, 0)
    limit = sorted(len(sample.input_ids) for sample in full)[rng.randrange(5, 35)]
    kept, counts = read_chat([path], tokenizer, max_length=limit)
    fitting = [sample for sample in full if len(sample.input_ids) <= limit]
    assert [s.labels.tolist() for s in kept] == [s.labels.tolist() for s in fitting]
    assert counts.too_long == 40 - len(fitting) and counts.samples == len(kept)

    cut, counts = read_chat([path], tokenizer, max_length=limit, too_long="truncate")
    answerable = [s for s in full if (s.labels != IGNORE).sum() <= limit]
    assert counts.too_long == 40 - len(answerable) and counts.truncated == len(answerable) - len(fitting)
    for sample, whole_sample in zip(cut, answerable, strict=True):
        assert len(sample.input_ids) == min(limit, len(whole_sample.input_ids))
        assert learned(sample, tokenizer) == learned(whole_sample, tokenizer)
        prompt = len(sample.input_ids) - int((sample.labels != IGNORE).sum()) + 1
        keeps_bos = bos if prompt > 1 else 0
        tail = len(sample.input_ids) - keeps_bos
        assert (
            sample.input_ids[keeps_bos:].tolist()
            == whole_sample.input_ids[len(whole_sample.input_ids) - tail :].tolist()
        )
        assert not keeps_bos or sample.input_ids[0] == tokenizer.bos_token_id
    with pytest.raises(
        DataError, match=r"no sample is left of .*a\.jsonl: 0 samples of 41 lines.* dropped 40 too long"
    ):
        read_chat([path], tokenizer, max_length=1, too_long="truncate")


def test_a_slow_tokenizer_and_bad_parameters_are_refused(tmp_path):
    path, slow = write(tmp_path / "a.jsonl", GOOD), ByT5Tokenizer()
    slow.chat_template = tiny_tokenizer().chat_template
    with pytest.raises(DataError, match="ByT5Tokenizer reports no character offsets"):
        read_chat([path], slow, max_length=100)
    with pytest.raises(DataError, match="max_length 0"):
        read_chat([path], tiny_tokenizer(), max_length=0)
    with pytest.raises(DataError, match="too_long 'cut'"):
        read_chat([path], tiny_tokenizer(), max_length=9, too_long="cut")  # type: ignore[arg-type]


def test_order_over_files_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("data.chat.TEXTS", 7)
    numbers = list(range(50))
    paths = [
        write(tmp_path / f"{start}.jsonl", *({"input": "n", "output": str(n)} for n in numbers[start : start + 25]))
        for start in (0, 25)
    ]
    tokenizer = tiny_tokenizer()
    samples, counts = read_chat(paths, tokenizer, max_length=100)
    assert [learned(sample, tokenizer) for sample in samples] == [f"{n}{END}" for n in numbers]
    assert counts.files == 2


def test_summary_is_one_line():
    counts = Counts(files=1, lines=1200, samples=1000, tokens=4000, targets=1000, too_long=150, without_target=50)
    assert counts.summary() == (
        "1,000 samples of 1,200 lines in 1 file, 4,000 tokens, 1,000 of them targets (25.0%); "
        "dropped 150 too long, 50 without target"
    )


@pytest.mark.parametrize("kind", [chatml, writes_bos])
def test_too_long_with_all_answers(kind, tmp_path, rng):
    """The last answer stays whole; an earlier one stays a target if its first token's predecessor is still there."""
    tokenizer, _ = kind(rng)
    bos = kind is writes_bos
    short = messages(("user", "a"), ("assistant", "b"))
    path = write(tmp_path / "a.jsonl", {"messages": short}, {"messages": [*short, *conversation(rng)[-2:], *short]})
    full, _ = read_chat([path], tokenizer, max_length=10_000, loss_on="all")
    for limit in range(len(full[0].input_ids), len(full[1].input_ids)):  # a cut at every place
        check_cut(path, tokenizer, limit, full, bos)


def check_cut(path: Path, tokenizer: PreTrainedTokenizerFast, limit: int, full: list[Sample], bos: bool) -> None:
    only_last, last_counts = read_chat([path], tokenizer, max_length=limit, too_long="truncate")
    samples, counts = read_chat([path], tokenizer, max_length=limit, loss_on="all", too_long="truncate")
    assert (counts.samples, counts.too_long, counts.truncated) == (
        last_counts.samples,
        last_counts.too_long,
        last_counts.truncated,
    )
    originals, lost = {sample.line: sample for sample in full}, 0
    for sample, last in zip(samples, only_last, strict=True):
        original = originals[sample.line]
        assert sample.input_ids.tolist() == last.input_ids.tolist()
        length = len(original.input_ids)
        if length <= limit:
            assert sample.labels.tolist() == original.labels.tolist()
            continue
        keeps_bos = bos and bool(sample.input_ids[0] == tokenizer.bos_token_id)
        cut = length - len(sample.labels) + keeps_bos
        expected = original.labels.copy()
        end = cut
        if cut and original.labels[cut - 1] != IGNORE:  # the cut goes through an answer, which is lost whole
            while original.labels[end] != IGNORE:
                end += 1
        expected[:end] = IGNORE
        assert sample.labels.tolist() == [IGNORE] * keeps_bos + expected[cut:].tolist()
        lost += int((original.labels != IGNORE).sum() - (sample.labels != IGNORE).sum())
    assert counts.targets_cut == lost
    assert not lost or f"{lost:,} targets cut away with it" in counts.summary()
    dropped, drop_counts = read_chat([path], tokenizer, max_length=limit, loss_on="all")
    assert len(dropped) == sum(len(sample.input_ids) <= limit for sample in full)
    assert drop_counts.targets_cut == 0 and drop_counts.too_long == len(full) - len(dropped)
