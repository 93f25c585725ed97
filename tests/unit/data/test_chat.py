"""Chat JSONL: exactly the answer is learned, and every bad line is named."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from data.chat import Counts, read_chat
from data.samples import IGNORE, MAX_PROBLEMS, DataError, Sample
from tests.tiny import TEXT, tiny_tokenizer

END = "<|im_end|>"
GOOD = {"input": "What is 12 plus 30?", "output": "42"}
WORDS = [
    "quick",
    " the",
    "12",
    "\n",
    "\n\n",
    "  ",
    "é",
    "e\u0301",
    "日本語",
    "😀",
    "👩‍👩‍👧",
    "\u2028",
    "<think>",
    "?",
    "\t",
    "assistant\n",
]


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def learned(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text of the targets, after checking that they are one run at the end and agree with the inputs."""
    valid = sample.labels != IGNORE
    first = int(valid.argmax())
    assert valid[first:].all() and not valid[:first].any()
    assert (sample.labels[first:-1] == sample.input_ids[first + 1 :]).all()
    return tokenizer.decode(sample.labels[first:], skip_special_tokens=False)


def whole(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode([*sample.input_ids, sample.labels[-1]], skip_special_tokens=False)


def text(rng: random.Random, least: int = 0) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(least, 12)))


def conversation(rng: random.Random) -> list[dict[str, str]]:
    system = [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 else []
    turns = [
        {"role": role, "content": text(rng, 1) + "."}
        for _ in range(rng.randint(1, 4))
        for role in ("user", "assistant")
    ]
    return system + turns


def chatml(rng: random.Random) -> tuple[PreTrainedTokenizerFast, str]:
    return tiny_tokenizer(), END


def trimmed_offsets(rng: random.Random) -> tuple[PreTrainedTokenizerFast, str]:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer, END


def writes_bos(rng: random.Random) -> tuple[PreTrainedTokenizerFast, str]:
    """As Llama 3: the template writes BOS, and so would the tokenizer; the header of a turn ends with two newlines."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n\n' + m['content'] + '<|im_end|>'}}"
        "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n\n'}}{% endif %}"
    )
    return tokenizer, END


def swallows_whitespace(rng: random.Random) -> tuple[PreTrainedTokenizerFast, str]:
    """As Phi 3: the tokens of the template take the whitespace behind them along."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<|a|>", rstrip=True), AddedToken("<|e|>", rstrip=True)], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{('<|a|>' if m['role'] == 'assistant' else '<|im_start|>') + '\n' + m['content'] + "
        "'<|e|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|a|>\n'}}{% endif %}"
    )
    return tokenizer, "<|e|>"


def normalising(rng: random.Random) -> tuple[PreTrainedTokenizerFast, str]:
    """As Qwen: text is composed (NFC) before it is tokenised, so tokens have fewer characters than the text."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer, END


KINDS = [chatml, trimmed_offsets, writes_bos, swallows_whitespace, normalising]


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
        if kind is normalising:
            answer = normalizers.NFC().normalize_str(answer)
        assert learned(sample, tokenizer).rstrip("\n" if kind is swallows_whitespace else "") == answer + end
        rendered = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False).input_ids
        assert ids[: len(sample.input_ids) + 1] == [*sample.input_ids, sample.labels[-1]]
        assert not tokenizer.decode(ids[len(sample.input_ids) + 1 :]).strip()
    assert counts.targets == sum(int((s.labels != IGNORE).sum()) for s in samples)
    assert counts.tokens == sum(len(s.input_ids) for s in samples)


def learned_turns(sample: Sample, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each run of targets, after checking that they agree with the inputs."""
    valid = (sample.labels != IGNORE).tolist()
    assert valid[-1]
    runs: list[list[int]] = []
    for position, label in enumerate(sample.labels.tolist()):
        if not valid[position]:
            continue
        assert position + 1 == len(valid) or sample.input_ids[position + 1] == label
        if not (position and valid[position - 1]):
            runs.append([])
        runs[-1].append(label)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


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
        if kind is normalising:
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


def messages(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def shared(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": speaker, "value": value} for speaker, value in pairs]


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
    with pytest.raises(DataError, match=r"data\.fields maps"):
        read_chat([write(tmp_path / "a.jsonl", GOOD)], tiny_tokenizer(), max_length=100, fields=fields)


def words_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer with " the" as one token, so that the space at the end of a prompt merges with the answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # would hide that a token begins in the prompt
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 9, trainer)
    assert tokenizer.encode(" the").tokens == ["Ġthe"]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = template
    return wrapped


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


THINKING = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + CONTENT + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n<think>\n'}}{% endif %}"
)


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


def pair(**changes: object) -> dict[str, object]:
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}


def turns(*roles_and_texts: tuple[object, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in roles_and_texts]}


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
    monkeypatch.setattr("data.chat.BATCH", 7)
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


# ------------------------------------------------------------------- templates that write a turn in more than one way

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
