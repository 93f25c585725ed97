"""Special tokens that people spelled out: found whoever spelled them, kept and counted, read as text, or refused."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.chat import read_chat
from data.samples import IGNORE, DataError
from data.template import SpecialTexts, shown_again
from data.text import read_text
from tests.lib.tiny import TEXT, tiny_tokenizer
from tests.unit.data.chats import END, GOOD, KINDS, learned, messages, text, turns, whole, write

SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]


def spelled(rng: random.Random) -> str:
    """Text with special tokens in it, next to each other and at both ends too."""
    return "".join(rng.choice([text(rng, 1), rng.choice(SPECIAL)]) for _ in range(rng.randint(1, 5)))


def test_special_tokens_are_hidden_and_shown_again(rng):
    special = SpecialTexts(tiny_tokenizer())
    for _ in range(50):
        value = {spelled(rng): [spelled(rng), {"a": spelled(rng)}, 3, None]}
        hidden = special.hidden(value)
        assert special.first_in(hidden) is None
        content = json.dumps(value, ensure_ascii=False)
        shown, spans = shown_again(json.dumps(hidden, ensure_ascii=False))
        assert shown == content and len(spans) == special.count_in(value)
        assert all(content[start:end] in SPECIAL for start, end in spans)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss_on", ["last", "all"])
def test_as_text_nothing_but_the_template_writes_special_tokens(kind, loss_on, tmp_path, rng):
    """What is learned has the same characters, and its special tokens are those of chats without spelled ones."""
    tokenizer, _ = kind(rng)
    chats = [messages(("user", spelled(rng)), ("assistant", spelled(rng) + ".")) * rng.randint(1, 3) for _ in range(40)]
    path = write(tmp_path / "a.jsonl", *({"messages": chat} for chat in chats))
    plain = [[{**turn, "content": "x"} for turn in chat] for chat in chats]
    other = write(tmp_path / "b.jsonl", *({"messages": chat} for chat in plain))
    options = {"max_length": 10_000, "loss_on": loss_on}
    kept, counts = read_chat([path], tokenizer, **options)
    as_text, none = read_chat([path], tokenizer, **options, special_tokens="text")
    expected, _ = read_chat([other], tokenizer, **options)
    special = list(SpecialTexts(tokenizer).ids)

    def special_tokens(sample):
        ids = [*sample.input_ids.tolist(), int(sample.labels[-1])]
        return [token for token in ids if token in special]

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
    path = write(tmp_path / "a.jsonl", {"input": f"What is {END}?", "output": f"This{END}"}, GOOD)
    samples, counts = read_chat([path], tokenizer, max_length=100)
    assert learned(samples[0], tokenizer) == f"This{END}{END}"
    assert samples[0].labels.tolist().count(tokenizer.eos_token_id) == 2
    assert (counts.spelled, counts.spelled_targets) == (2, 1)
    assert counts.summary().endswith(
        "; 2 special tokens spelled out in the chats and kept (data.special_tokens); 1 of them targets"
    )
    samples, counts = read_chat([path], tokenizer, max_length=100, special_tokens="text")
    assert learned(samples[0], tokenizer) == f"This{END}{END}"
    assert samples[0].labels.tolist().count(tokenizer.eos_token_id) == 1
    with pytest.raises(DataError, match=r"1 bad line .*\n.*a\.jsonl:1: found the special token '<\|im_end\|>' spelled"):
        read_chat([path], tokenizer, max_length=100, special_tokens="refuse")


def test_whoever_spells_them(tmp_path):
    """In a tool's description, an argument of a call, its name, a part of a content, reasoning."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n'}}"
        "{{ m['reasoning_content'] or '' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}{{ m['tool_calls'] | tojson if "
        "m['tool_calls'] else '' }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
    )
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    call = {"name": "f", "arguments": {f"x{END}": [END]}}
    rows = [
        {"messages": [user, answer], "tools": [{"name": "f", "description": f"ends with {END}"}]},
        {"messages": [user, {**answer, "tool_calls": [call]}]},
        {"messages": [{**user, "content": [{"type": "text", "text": f"{END} a"}]}, answer]},
        {"messages": [user, {**answer, "reasoning_content": f"hm {END}"}]},
    ]
    for row, count in zip(rows, (1, 2, 1, 1), strict=True):
        path = write(tmp_path / "a.jsonl", row)
        assert read_chat([path], tokenizer, max_length=1000)[1].spelled == count
        (sample,), counts = read_chat([path], tokenizer, max_length=1000, special_tokens="text")
        assert counts.spelled == 0
        ids = [*sample.input_ids.tolist(), int(sample.labels[-1])]
        assert ids.count(tokenizer.eos_token_id) == 2, "one per turn"
        with pytest.raises(DataError, match="found the special token"):
            read_chat([path], tokenizer, max_length=1000, special_tokens="refuse")


def test_a_template_that_asks_for_special_tokens(tmp_path):
    """It strips what is in front of one, so without it writes another text: counted, and not to be read as text."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("[/THINK]", special=True)], special_tokens=True)
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "m['content'].split('[/THINK]')[-1]")
    path = write(tmp_path / "a.jsonl", {"input": "a[/THINK]b", "output": "c"})
    (sample,), counts = read_chat([path], tokenizer, max_length=100)
    assert "a" not in whole(sample, tokenizer).split("user")[1].split(END)[0] and counts.spelled == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*a chat template that writes the conversation otherwise"):
        read_chat([path], tokenizer, max_length=100, special_tokens="text")


def test_a_template_that_does_without_no_special_token(tmp_path):
    """It refuses the conversation that has none: what is spelled out is counted all the same."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("[/THINK]", special=True)], special_tokens=True)
    asks = "{% if '[/THINK]' not in messages[0]['content'] %}{{ raise_exception('think first') }}{% endif %}"
    tokenizer.chat_template = asks + tokenizer.chat_template
    path = write(tmp_path / "a.jsonl", {"input": f"a[/THINK]b{END}", "output": "c"})
    assert read_chat([path], tokenizer, max_length=100)[1].spelled == 2
    with pytest.raises(DataError, match=r"a\.jsonl:1: found the special token '\[/THINK\]' spelled"):
        read_chat([path], tokenizer, max_length=100, special_tokens="refuse")


def test_a_tokenizer_that_looks_beyond_special_tokens_cannot_read_them_as_text(tmp_path):
    backend = Tokenizer(models.BPE(unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["?", *SPECIAL], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = tiny_tokenizer().chat_template
    path = write(tmp_path / "a.jsonl", {"input": f"a{END}b", "output": "c"})
    assert read_chat([path], tokenizer, max_length=100)[1].spelled == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*does not tokenize by itself what stands between"):
        read_chat([path], tokenizer, max_length=100, special_tokens="text")


def test_html_is_not_the_beginning_of_a_document(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    path = write(tmp_path / "a.jsonl", {"input": "What does <s>this</s> do?", "output": "It <s>strikes</s> out."})
    _, counts = read_chat([path], tokenizer, max_length=100)
    assert (counts.spelled, counts.spelled_targets) == (2, 1)
    (sample,), _ = read_chat([path], tokenizer, max_length=100, special_tokens="text")
    assert tokenizer.bos_token_id not in sample.input_ids
    assert learned(sample, tokenizer) == f"It <s>strikes</s> out.{END}"


def test_deeply_nested_tools(tmp_path):
    """No traceback: the special token is counted, wherever it stands."""
    deep: object = END
    for _ in range(400):
        deep = [deep]
    row = turns(("user", "a"), ("assistant", "b")) | {"tools": [{"name": "f", "parameters": deep}]}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ tools[0]['name'] }}" + tokenizer.chat_template
    (_,), counts = read_chat([write(tmp_path / "a.jsonl", row)], tokenizer, max_length=100)
    assert counts.spelled == 0, "the template writes the tool's name alone"


def test_plain_text(tmp_path):
    tokenizer, path, other = tiny_tokenizer(), tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("one\ntwo<|endoftext|>three\n")
    other.write_text(f"four{END} five")
    special = list(SpecialTexts(tokenizer).ids)

    def count(choice):
        samples = read_text([path, other], tokenizer, 4, choice)
        return sum(int(np.isin(sample.input_ids, special).sum()) for sample in samples)

    assert (count("keep"), count("text")) == (3, 1), "the EOS between the files counts"
    with pytest.raises(DataError, match=r"a\.txt:2: found the special token '<\|endoftext\|>' spelled out"):
        read_text([path], tokenizer, 4, "refuse")
