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
    with pytest.raises(DataError, match=rf"(?s)^1 bad line in the training data:\n\S*/bad\.jsonl:3: {message}"):
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
    assert lines[0] == f"{len(BAD_LINES) + 1} bad lines in the training data:"
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
