"""Plain text: every token predicted once, whatever the pieces and blocks."""

import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.samples import IGNORE, DataError, plain_backend
from data.text import read_text, split_text
from tests.lib.tiny import TEXT, tiny_tokenizer

WORDS = ["the", "quick", "42", " ", "  ", "\n", "\n", "\n\n", "\r\n", ".", "é", "日本", "😀", "\u2028", "/", "_"]
WORDS += ["can't"]


def text(rng: random.Random, words: int) -> str:
    return "".join(rng.choices(WORDS, k=words)) + "x"


def test_every_token_is_predicted_once(tmp_path, rng):
    tokenizer = tiny_tokenizer()
    # A post-processor that adds tokens must not show in the stream.
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    for _ in range(20):
        texts = [text(rng, rng.randint(1, 200)) for _ in range(rng.randint(1, 4))]
        paths = [tmp_path / f"{index}.txt" for index in range(len(texts))]
        for path, content in zip(paths, texts, strict=True):
            path.write_bytes(content.encode())
        joined = [tokenizer(content, add_special_tokens=False).input_ids for content in texts]
        stream = [token for ids in joined for token in (tokenizer.eos_token_id, *ids)][1:]
        block = rng.randint(1, len(stream) + 3)
        if len(stream) < 2:
            continue
        samples = read_text(paths, tokenizer, block)
        assert np.concatenate([sample.input_ids for sample in samples]).tolist() == stream[:-1]
        assert np.concatenate([sample.labels for sample in samples]).tolist() == stream[1:]
        lengths = [len(sample.input_ids) for sample in samples]
        assert lengths[:-1] == [block] * (len(lengths) - 1) and 1 <= lengths[-1] <= block
        assert all(
            len(s.labels) == len(s.input_ids) and s.labels.dtype == s.input_ids.dtype == np.int32 for s in samples
        )
        assert all((sample.labels != IGNORE).all() for sample in samples)


def byte_level() -> Tokenizer:
    return plain_backend(tiny_tokenizer())


def prefixing() -> Tokenizer:
    """As Llama 2: a prefix goes before every text, so two pieces have one more than their whole."""
    backend = plain_backend(tiny_tokenizer())
    backend.normalizer = normalizers.Prepend("▁")
    return backend


def across_lines() -> Tokenizer:
    """No pre-tokenizer at a newline: merges may reach over it."""
    backend = plain_backend(tiny_tokenizer())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


@pytest.mark.parametrize("backend", [byte_level, prefixing, across_lines])
def test_pieces_give_the_tokens_of_the_whole(backend, rng):
    backend = backend()
    count = 0
    for _ in range(30):
        content = text(rng, 300)
        size = rng.randint(1, 50)
        pieces = list(split_text([content], backend, size))
        ends = sorted(rng.choices(range(len(content)), k=rng.randint(0, 5)))
        parts = [content[start:end] for start, end in pairwise([0, *ends, len(content)])]
        assert list(split_text(parts, backend, size)) == pieces, "where a file's text is read in parts"
        assert "".join(pieces) == content and all(len(piece) >= size for piece in pieces[:-1])
        apart = [token for piece in pieces for token in backend.encode(piece, add_special_tokens=False).ids]
        assert apart == backend.encode(content, add_special_tokens=False).ids
        count += len(pieces)
    assert (count == 30) == (backend.normalizer is not None), "only the tokenizer with a prefix cannot be cut"


def test_long_lines_are_cut_between_words(rng):
    backend = byte_level()
    content = " ".join(rng.choice(["quick", "the", "12", "plus", "é", "fox."]) for _ in range(3000))
    pieces = list(split_text([content], backend, 50))
    assert "".join(pieces) == content and max(map(len, pieces)) < 2 * 50 + 100
    apart = [token for piece in pieces for token in backend.encode(piece, add_special_tokens=False).ids]
    assert apart == backend.encode(content, add_special_tokens=False).ids


def test_large_files_are_read_in_pieces(tmp_path, rng, monkeypatch):
    path, tokenizer = tmp_path / "a.txt", tiny_tokenizer()
    path.write_text(text(rng, 3000), newline="")
    whole = read_text([path], tokenizer, 64)
    monkeypatch.setattr("data.text.PIECE", 20)
    monkeypatch.setattr("data.text._CHUNK", 7)  # bytes: characters of several bytes are read in two parts
    monkeypatch.setattr("data.text.WINDOW", 100)
    pieces = read_text([path], tokenizer, 64)
    assert [s.labels.tolist() for s in whole] == [s.labels.tolist() for s in pieces]


def test_a_long_text_that_cannot_be_cut_is_refused_by_name(tmp_path, monkeypatch):
    path, tokenizer = tmp_path / "a.txt", tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("▁")
    path.write_text("one two\n" * 400)
    assert read_text([path], tokenizer, 64)
    monkeypatch.setattr("data.text.PIECE", 50)
    monkeypatch.setattr("data.text._CHUNK", 1000)
    monkeypatch.setattr("data.text.LONGEST", 3000)
    with pytest.raises(DataError, match=r"/a\.txt: found 3,\d+ characters that can only be tokenized together"):
        read_text([path], tokenizer, 64)


def test_newlines_stay_and_a_byte_order_mark_goes(tmp_path):
    path, tokenizer = tmp_path / "a.txt", tiny_tokenizer()
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    (sample,) = read_text([path], tokenizer, 100)
    assert tokenizer.decode([*sample.input_ids, sample.labels[-1]]) == "a\r\nb\rc\n"


def test_errors(tmp_path):
    good, bad, empty, none, one = (tmp_path / name for name in ("good", "bad", "empty", "none", "one"))
    good.write_text("some text\n")
    bad.write_bytes(b"one\ntwo\ncaf\xe9\n")
    empty.write_bytes(b"")
    one.write_text("x")
    no_eos, words = tiny_tokenizer(), Tokenizer(models.WordLevel({"some": 0}, unk_token="?"))
    no_eos.eos_token = None
    assert read_text([good], no_eos, 8)
    for files, tokenizer, block, message in (
        ([good, bad], tiny_tokenizer(), 8, r"/bad:3: found bytes that are not UTF-8"),
        ([good, empty, none], tiny_tokenizer(), 8, r"/empty: the file is empty\n.*/none: no such file"),
        ([one], tiny_tokenizer(), 8, r"/one: found 1 tokens, expected at least 2"),
        ([good, good], no_eos, 8, "no EOS token to join 2 files"),
        (
            [good],
            PreTrainedTokenizerFast(tokenizer_object=words),
            8,
            "/good: found text that the tokenizer does not take: .*UNK",
        ),
    ):
        with pytest.raises(DataError, match=message):
            read_text(files, tokenizer, block)


def test_a_block_belongs_to_the_file_of_its_first_token(tmp_path):
    tokenizer = tiny_tokenizer()
    paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    expected = []
    for path, text in zip(paths, ("12 plus 30", "is", "42, said the fox."), strict=True):
        path.write_text(text)
        # The EOS between two files counts for the first.
        expected += [str(path)] * (len(tokenizer(text, add_special_tokens=False).input_ids) + (path != paths[-1]))
    samples = read_text(paths, tokenizer, 1)
    assert [sample.where() for sample in samples] == expected[:-1]


def test_the_tokens_are_in_memory_once_and_a_file_never_whole(tmp_path, monkeypatch):
    """Four bytes a token, and a few pieces beside them, of a text whose characters have four bytes."""
    monkeypatch.setattr("data.text.PIECE", 1 << 13)
    monkeypatch.setattr("data.text._CHUNK", 1 << 16)
    (tmp_path / "large.txt").write_text(f"😀 {TEXT}" * 20_000, encoding="utf-8")
    tokenizer = tiny_tokenizer()
    tracemalloc.start()
    try:
        samples = read_text([tmp_path / "large.txt"], tokenizer, 4096)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    size = 4 * sum(len(sample.input_ids) for sample in samples)
    assert 3_000_000 < size < peak < 1.6 * size
