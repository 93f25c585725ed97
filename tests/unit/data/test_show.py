"""Samples as text: the parts are what is learned and what is not, in every kind of tokenizer."""

import re

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from data.loader import Loader
from data.samples import IGNORE
from data.show import Detokenizer, described
from data.text import read_text
from tests.lib.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.unit.data.chats import END, KINDS, chatml, conversation, messages, read, turns, whole


def sentencepiece() -> tuple[PreTrainedTokenizerFast, str]:
    """As Llama 2: spaces are a letter, characters that are not in the vocabulary are bytes, the first space is lost."""
    letters = ["▁", *map(chr, range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256)), "▁t", "th"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", END, "<|im_start|>", *letters])}
    model = models.BPE(vocabulary, [("▁", "t"), ("t", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token="<unk>")
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped, END


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_what_the_loader_trains(kind, tmp_path, rng):
    """Their text is that of all tokens, and the targets those of the labels in every micro-batch of an epoch."""
    tokenizer, _ = kind()
    samples, _ = read(tmp_path, tokenizer, *({"messages": conversation(rng)} for _ in range(40)), loss_on="all")
    loader = Loader(samples, micro_batch_size=3, gradient_accumulation_steps=1, rank=0, world=1, seed=1, pad_token_id=0)
    seen = set()
    for batch in (batch for step in range(20) for batch in loader.step(step)):
        for index, (row, start, end) in zip(batch["sample_ids"].tolist(), batch["spans"].tolist(), strict=True):
            parts = Detokenizer(tokenizer).parts(samples[index])
            labels = batch["labels"][row, start:end].tolist()
            runs, learned = [], [label != IGNORE for label in labels]
            for position in (place for place, one in enumerate(learned) if one):
                runs += [] if position and learned[position - 1] else [[]]
                runs[-1].append(labels[position])
            assert [part.text for part in parts if part.target] == [tokenizer.decode(run) for run in runs]
            assert "".join(part.text for part in parts) == whole(samples[index], tokenizer)
            assert not any(part.cut for part in parts)
            seen.add(index)
    assert len(seen) == 40


def test_spaces_and_bytes_of_sentencepiece(tmp_path):
    """The spaces at the beginning of an answer stay, which a decoder strips from the beginning of a text."""
    tokenizer, _ = sentencepiece()
    answers = ["the", " the thing", "  é😀 the", "日", "\n\nth"]
    rows = [turns(("user", "the?"), ("assistant", one), ("user", "😀"), ("assistant", one)) for one in answers]
    samples, _ = read(tmp_path, tokenizer, *rows, loss_on="all")
    for sample, answer in zip(samples, answers, strict=True):
        parts = Detokenizer(tokenizer).parts(sample)
        assert [part.text for part in parts if part.target] == [answer + END] * 2
        assert "".join(part.text for part in parts) == whole(sample, tokenizer)


@pytest.mark.parametrize("kind", [chatml, sentencepiece])
def test_a_character_that_is_cut_is_shown_as_bytes(kind, tmp_path):
    tokenizer, end = kind()
    starts = set()
    for cut in range(4):
        ((sample,), counts) = read(
            tmp_path, tokenizer, {"input": "😀" * 20, "output": "😀"}, max_length=60 - cut, too_long="truncate"
        )
        context, answer = Detokenizer(tokenizer).parts(sample)
        assert counts.truncated == 1 and "\ufffd" not in context.text + answer.text
        assert answer.text.strip() == "😀" + end and not answer.cut
        assert context.cut == context.text.startswith("\\x")
        starts.add(context.text.partition("😀")[0])
    assert starts == {"", r"\x80", r"\x98\x80", r"\x9f\x98\x80"}


def test_blocks_of_text_are_shown_whole(tmp_path):
    """Every token is learned but the first of a block, also where a block ends inside of a character."""
    (tmp_path / "a.txt").write_text(text := "the 日本語 quick 😀 brown fox\n" * 9, encoding="utf-8")
    shown, cut = "", 0
    for sample in read_text([tmp_path / "a.txt"], tiny_tokenizer(), 7):
        first, rest = Detokenizer(tiny_tokenizer()).parts(sample)
        assert (first.target, rest.target) == (False, True)
        shown += first.text * (not shown) + rest.text
        cut += rest.cut
    found = re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), shown.encode())
    assert found.decode() == text and cut > 3


def test_brackets_are_none_of_the_text(tmp_path):
    rows = [turns(("user", "a[[0]]"), ("assistant", "[1]\x1b[31m\u202e"))]
    samples, _ = read(tmp_path, tiny_tokenizer(), *rows)
    said = "\n".join(described({"train": samples}, Detokenizer(tiny_tokenizer()), 1))
    assert "between [[[ and ]]]" in said and rf"[[[[1]\x1b[31m\u202e{END}]]]" in said


def test_colors_in_place_of_brackets(tmp_path):
    samples, _ = read(tmp_path, tiny_tokenizer(), {"messages": messages(("user", "a"), ("assistant", "b"))})
    said = "\n".join(described({"train": samples}, Detokenizer(tiny_tokenizer()), 1, color=True))
    assert "[[" not in said and f"\x1b[30;42mb{END}\x1b[0m" in said
