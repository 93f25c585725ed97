"""Chat JSONL: exactly the answer is learned."""

import re

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data import tokens
from data.chat import Counts, read_chat
from data.samples import IGNORE, DataError, Sample
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
    assert (counts.lines, counts.without_target) == (4, 1)
    assert [(sample.file, sample.line) for sample in samples] == [(str(path), 1), (str(path), 2), (str(path), 4)]
    assert samples[2].where() == f"{path}:4" and samples[0].file is samples[1].file
    _, counts = read(tmp_path, tokenizer, *rows)
    assert (counts.samples, counts.without_target) == (2, 2)


def test_bos_stands_once(tmp_path):
    tokenizer, _ = writes_bos()
    (sample,), _ = read(tmp_path, tokenizer, GOOD)
    assert sample.input_ids[0] == tokenizer.bos_token_id
    assert (sample.input_ids == tokenizer.bos_token_id).sum() == 1
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id, "the caller's tokenizer was changed"


def test_three_forms_give_the_same_sample(tmp_path):
    def shared(*pairs: tuple[str, str]) -> list[dict[str, str]]:
        return [{"from": speaker, "value": value} for speaker, value in pairs]

    system, user, answer = "Be brief.", "Is it\nso?", "It is."
    rows = [
        turns(("system", system), ("user", user), ("assistant", answer)),
        {"system": system, **turns(("user", user), ("assistant", answer))},
        {"conversations": shared(("system", system), ("human", user), ("gpt", answer))},
        {"system": system, "conversations": shared(("user", user), ("assistant", answer))},
        {"system": system, "input": user, "output": answer, "id": 7},
        {"system": system, "instruction": "Is it", "input": "so?", "output": answer},
        {"system": system, "instruction": user, "input": "", "output": answer},
        {"system": system, "instruction": user, "output": answer},
        # Turns after the last answer have nothing to say about it.
        {"system": system, "conversations": shared(("human", user), ("gpt", answer), ("human", "?"))},
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
        *(
            (wrong, re.escape(f"data.fields: {wrong}, expected names out of"))
            for wrong in (
                {},
                {"input": "q"},
                {"output": "a"},
                {"prompt": "q", "output": "a"},
                {"messages": "m", "input": "q", "output": "a"},
            )
        ),
    ):
        with pytest.raises(DataError, match=message):
            read(tmp_path, tokenizer, row, fields=fields)


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
    rows = [
        {"input": "user", "output": "<think>user, 42?</think> 42 \n"},
        {"input": "42", "output": "42"},  # the same text stands in the prompt
        {"input": "12", "output": "<think>\nso</think>12"},
    ]
    samples, counts = read(tmp_path, tokenizer, *rows)
    assert [learned(sample, tokenizer) for sample in samples] == [f"42{END}", f"42{END}", f"12{END}"]
    assert counts.by_content == 3 and "3 answers found by their content" in counts.summary()


UNLOCATED = ("m['content'].replace('A', 'Z')", "m['content'] | upper", "'fixed'", "m['content'] ~ m['content']")
UNLOCATED += ("m['content'] | length",)
SIMPLE = tiny_tokenizer().chat_template
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system here') }}{% endif %}" + SIMPLE


@pytest.mark.parametrize(
    ("template", "message"),
    [
        *(
            (THINKING.replace("CONTENT", f"({content}) | string"), ":1: found a chat template whose generation prompt")
            for content in UNLOCATED
        ),
        (NO_SYSTEM, ":2: .*'system'.*refuses: No system here"),
        (
            "{{ messages[0].content.nothing.at_all() }}",
            r":1: found the roles \['user', 'assistant'\], which .* refuses",
        ),
        ("{{ 1 // 0 }}", ":1: found the roles .* refuses: integer division"),
        ("{{ messages[0]['content'] }}", ":1: found nothing after the generation prompt"),
        (
            "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}{% endif %}",
            ":1: found the answer to begin at token 0",
        ),
        (None, "no chat template"),
    ],
)
def test_templates_that_cannot_be_trained_on_are_refused(template, message, tmp_path):
    row = {"input": "What?", "output": "Abc"}
    with pytest.raises(DataError, match=message):
        read(tmp_path, templated(template), row, {"system": "x", **row})


def test_answer_without_end_token_keeps_its_own_whitespace(tmp_path):
    tokenizer = templated(SIMPLE.replace("+'<|im_end|>\n'", ""))
    (sample,), counts = read(tmp_path, tokenizer, {"input": "a", "output": "b\n\n"})
    assert learned(sample, tokenizer) == "b\n\n"
    assert counts.without_end == 1 and "1 answers without an end-of-turn token" in counts.summary()


@pytest.mark.parametrize("kind", [chatml, writes_bos])
def test_too_long(kind, tmp_path, rng):
    tokenizer, _ = kind()
    bos = kind is writes_bos
    rows = [{"input": text(rng, 3), "output": text(rng) + "x"} for _ in range(40)] + [{"input": "x", "output": " "}]
    full, counts = read(tmp_path, tokenizer, *rows)
    assert (counts.lines, counts.samples, counts.without_target, counts.too_long) == (41, 40, 1, 0)
    limit = sorted(len(sample.input_ids) for sample in full)[rng.randrange(5, 35)]
    kept, counts = read(tmp_path, tokenizer, *rows, max_length=limit)
    fitting = [sample for sample in full if len(sample.input_ids) <= limit]
    assert [s.labels.tolist() for s in kept] == [s.labels.tolist() for s in fitting]
    assert counts.too_long == 40 - len(fitting) and counts.samples == len(kept)

    cut, counts = read(tmp_path, tokenizer, *rows, max_length=limit, too_long="truncate")
    answerable = [s for s in full if (s.labels != IGNORE).sum() <= limit]
    assert counts.too_long == 40 - len(answerable) and counts.truncated == len(answerable) - len(fitting)
    for sample, original in zip(cut, answerable, strict=True):
        length = len(sample.input_ids)
        assert length == min(limit, len(original.input_ids))
        assert learned(sample, tokenizer) == learned(original, tokenizer)
        prompt = length - int((sample.labels != IGNORE).sum()) + 1
        keeps_bos = int(bos and prompt > 1)
        tail = original.input_ids[len(original.input_ids) - (length - keeps_bos) :]
        assert sample.input_ids[keeps_bos:].tolist() == tail.tolist()
        assert not keeps_bos or sample.input_ids[0] == tokenizer.bos_token_id
    with pytest.raises(DataError, match=r"no sample is left of .*a\.jsonl: 0 samples of 41 lines.* dropped 40 too lon"):
        read(tmp_path, tokenizer, *rows, max_length=1, too_long="truncate")


@pytest.mark.parametrize("kind", [chatml, writes_bos])
def test_too_long_with_all_answers(kind, tmp_path, rng):
    """The last answer stays whole; an earlier one stays a target if its first token's predecessor is still there."""
    tokenizer, _ = kind()
    short = messages(("user", "a"), ("assistant", "b"))
    rows = [{"messages": short}, {"messages": [*short, *conversation(rng)[-2:], *short]}]
    full, _ = read(tmp_path, tokenizer, *rows, loss_on="all")
    originals = {sample.line: sample for sample in full}
    for limit in range(len(full[0].input_ids), len(full[1].input_ids)):  # a cut at every place
        options = {"max_length": limit, "too_long": "truncate"}
        only_last, last_counts = read(tmp_path, tokenizer, *rows, **options)
        samples, counts = read(tmp_path, tokenizer, *rows, **options, loss_on="all")
        for name in ("samples", "too_long", "truncated"):
            assert getattr(counts, name) == getattr(last_counts, name)
        lost = 0
        for sample, last in zip(samples, only_last, strict=True):
            original = originals[sample.line]
            assert sample.input_ids.tolist() == last.input_ids.tolist()
            assert sample.labels.tolist() == cut_labels(original, sample, limit, kind is writes_bos, tokenizer)
            lost += int((original.labels != IGNORE).sum() - (sample.labels != IGNORE).sum())
        assert counts.targets_cut == lost
        assert not lost or f"{lost:,} targets cut away with it" in counts.summary()
        dropped, counts = read(tmp_path, tokenizer, *rows, max_length=limit, loss_on="all")
        assert len(dropped) == sum(len(sample.input_ids) <= limit for sample in full)
        assert counts.targets_cut == 0 and counts.too_long == len(full) - len(dropped)


def cut_labels(original: Sample, sample: Sample, limit: int, bos: bool, tokenizer) -> list[int]:
    """The labels that are left of a sample when its beginning is cut off."""
    length = len(original.input_ids)
    if length <= limit:
        return original.labels.tolist()
    keeps_bos = bos and bool(sample.input_ids[0] == tokenizer.bos_token_id)
    cut = end = length - len(sample.labels) + keeps_bos
    labels = original.labels.copy()
    if cut and labels[cut - 1] != IGNORE:  # the cut goes through an answer, which is lost whole
        while original.labels[end] != IGNORE:
            end += 1
    labels[:end] = IGNORE
    return [IGNORE] * keeps_bos + labels[cut:].tolist()


def test_a_slow_tokenizer_and_bad_parameters_are_refused(tmp_path):
    slow = ByT5Tokenizer()
    slow.chat_template = SIMPLE
    with pytest.raises(DataError, match="ByT5Tokenizer reports no character offsets"):
        read(tmp_path, slow, GOOD)
    for options, message in (({"max_length": 0}, "max_length 0"), ({"too_long": "cut"}, "too_long 'cut'")):
        with pytest.raises(DataError, match=message):
            read(tmp_path, tiny_tokenizer(), GOOD, **options)


def test_order_over_files_and_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("data.chat.TEXTS", 7)
    paths = [
        write(tmp_path / f"{start}.jsonl", *({"input": "n", "output": str(n)} for n in range(start, start + 25)))
        for start in (0, 25)
    ]
    tokenizer = tiny_tokenizer()
    samples, counts = read_chat(paths, tokenizer, max_length=100)
    assert [learned(sample, tokenizer) for sample in samples] == [f"{n}{END}" for n in range(50)]
    assert counts.files == 2


def test_summary_is_one_line():
    counts = Counts(files=1, lines=1200, samples=1000, tokens=4000, targets=1000, too_long=150, without_target=50)
    assert counts.summary() == (
        "1,000 samples of 1,200 lines in 1 file, 4,000 tokens, 1,000 of them targets (25.0%); "
        "dropped 150 too long, 50 without target"
    )


# ---- bounded memory


def test_groups_are_bounded_by_number_and_characters(rng):
    texts = ["x" * rng.randint(0, 30) for _ in range(rng.randint(0, 60))]
    count, characters = rng.randint(1, 9), rng.randint(1, 50)
    groups = list(in_groups(iter(texts), count, characters))
    assert [one for group in groups for one in group] == texts and all(groups)
    assert all(len(group) <= count for group in groups)
    assert all(sum(map(len, group)) <= characters or len(group) == 1 for group in groups)


@pytest.fixture
def tokenized(monkeypatch) -> dict[str, list[list[int]]]:
    """Lengths of the texts that are tokenized in each call, by method; 2,000 characters are the most in one."""
    calls: dict[str, list[list[int]]] = {"one": [], "batch": []}

    class Counting(OffsetTokenizer):
        def one(self, text, spelled=()):
            calls["one"].append([len(text)])
            return super().one(text, spelled)

        def batch(self, texts):
            calls["batch"].append([len(text) for text in texts])
            return super().batch(texts)

    monkeypatch.setattr("data.chat.OffsetTokenizer", Counting)
    monkeypatch.setattr("data.chat.CHARACTERS", 2000)
    monkeypatch.setattr(tokens, "CHARACTERS", 2000)
    return calls


def test_lines_are_tokenized_together_up_to_a_number_of_characters(tmp_path, tokenized):
    """A thousand lines of 64 KB took 3 GB in one call."""
    samples, _ = read(tmp_path, tiny_tokenizer(), *[{"input": "x" * 300, "output": "42"}] * 20)
    together = [sum(lengths) for lengths in tokenized["batch"]]
    assert len(samples) == 20 and 1600 < max(together) <= 2000 and sum(together) > 20 * 300


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_a_line_that_is_far_too_long_is_not_tokenized(too_long, tmp_path, rng, tokenized):
    """Only its beginning is. What is not certainly too long is tokenized whole, and kept as before."""
    tokenizer = tiny_tokenizer()
    rows = [GOOD, {"input": text(rng, 5) * 500, "output": "42"}, {"input": "x" * 2100, "output": "42"}]
    samples, counts = read(tmp_path, tokenizer, *rows, max_length=100, too_long=too_long)
    assert (counts.too_long, len(samples)) == (2, 1)
    assert max(max(lengths) for lengths in (*tokenized["one"], *tokenized["batch"])) == 2000
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
