"""Bounded memory: what is tokenized together, lines that are far too long, and text that a tokenizer does not take."""

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data import jsonl, tokens
from data.chat import read_chat
from data.samples import DataError
from data.text import read_text, split_text
from data.tokens import OffsetTokenizer, in_groups
from tests.lib.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.data.chats import GOOD, text, write


def test_groups_are_bounded_by_number_and_characters(rng):
    texts = ["x" * rng.randint(0, 30) for _ in range(rng.randint(0, 60))]
    count, characters = rng.randint(1, 9), rng.randint(1, 50)
    groups = list(in_groups(iter(texts), count, characters))
    assert [one for group in groups for one in group] == texts and all(groups)
    assert all(len(group) <= count for group in groups)
    assert all(sum(map(len, group)) <= characters or len(group) == 1 for group in groups)


def test_lines_are_tokenized_together_up_to_a_number_of_characters(tmp_path, monkeypatch):
    """A thousand lines of 64 KB took 3 GB in one call."""
    together: list[int] = []

    class Counting(OffsetTokenizer):
        def batch(self, texts):
            together.append(sum(map(len, texts)))
            return super().batch(texts)

    monkeypatch.setattr("data.chat.OffsetTokenizer", Counting)
    monkeypatch.setattr("data.chat.CHARACTERS", 2000)
    path = write(tmp_path / "a.jsonl", *[{"input": "x" * 300, "output": "42"}] * 20)
    samples, _ = read_chat([path], tiny_tokenizer(), max_length=1000)
    assert len(samples) == 20 and 1600 < max(together) <= 2000 and sum(together) > 20 * 300


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_a_line_that_is_far_too_long_is_not_tokenized(too_long, tmp_path, rng, monkeypatch):
    """Only its beginning is. What is not certainly too long is tokenized whole, and kept as before."""
    tokenizer = tiny_tokenizer()
    rows = [GOOD, {"input": text(rng, 5) * 500, "output": "42"}, {"input": "x" * 2100, "output": "42"}]
    path = write(tmp_path / "a.jsonl", *rows)
    seen: list[int] = []

    class Counting(OffsetTokenizer):
        def one(self, text, spelled=()):
            seen.append(len(text))
            return super().one(text, spelled)

        def batch(self, texts):
            seen.extend(map(len, texts))
            return super().batch(texts)

    monkeypatch.setattr("data.chat.OffsetTokenizer", Counting)
    monkeypatch.setattr(tokens, "CHARACTERS", 2000)
    samples, counts = read_chat([path], tokenizer, max_length=100, too_long=too_long)
    assert (counts.too_long, len(samples)) == (2, 1) and max(seen) == 2000
    (_, long), counts = read_chat([write(tmp_path / "b.jsonl", rows[0], rows[2])], tokenizer, max_length=5000)
    assert counts.too_long == 0 and len(long.input_ids) > 2000


def test_a_line_without_end_is_refused_by_name(tmp_path, monkeypatch):
    """As a file that is one JSON list. The lines behind it have their numbers."""
    monkeypatch.setattr(jsonl, "LINE_BYTES", 1 << 10)
    path = write(tmp_path / "a.jsonl", GOOD, "[" + "1, " * 2000 + "1]", GOOD, "{", '"' + "x" * 3000 + '"')
    with pytest.raises(DataError) as caught:
        read_chat([path], tiny_tokenizer(), max_length=100)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines[1:]] == [f"{path}:{number}" for number in (2, 4, 5)]
    assert "in one line, expected one conversation per line" in lines[1] and "in one line" in lines[3]


def test_text_that_a_tokenizer_does_not_take_is_named(tmp_path):
    """Without a token for unknown words the tokenizer raises, for a whole batch of lines."""
    words = {word: index for index, word in enumerate(["user", "assistant", "a", "b"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_start|>", "").replace("<|im_end|>", "")
    good, bad = {"input": "a", "output": "b"}, {"input": "a", "output": "c"}
    assert read_chat([write(tmp_path / "a.jsonl", good, good)], tokenizer, max_length=9)[0]
    path = write(tmp_path / "a.jsonl", good, bad, good)
    with pytest.raises(DataError, match=r"/a\.jsonl:2: found text that the tokenizer does not take: .*UNK"):
        read_chat([path], tokenizer, max_length=9)
    other = tmp_path / "a.txt"
    other.write_text("a b c")
    with pytest.raises(DataError, match=r"/a\.txt: found text that the tokenizer does not take: .*UNK"):
        read_text([other], tokenizer, 9)


def test_long_lines_of_text_are_cut_between_words():
    backend = OffsetTokenizer(tiny_tokenizer())._backend
    rng = random.Random(1)
    content = " ".join(rng.choice(["quick", "the", "12", "plus", "é", "fox."]) for _ in range(3000))
    pieces = list(split_text([content], backend, 50))
    assert "".join(pieces) == content and max(map(len, pieces)) < 2 * 50 + 100
    apart = [token for piece in pieces for token in backend.encode(piece, add_special_tokens=False).ids]
    assert apart == backend.encode(content, add_special_tokens=False).ids
