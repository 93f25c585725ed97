"""Perplexity against a direct computation, whatever the windows and batches; and the definitions of word and byte."""

import math

import pytest
import torch

from engine.evaluate import Perplexity, evaluate_text, read_eval_text
from tests.tiny import tiny_model, tiny_tokenizer

TEXT = "The quick brown fox.\n  It jumps — twice!  Then 12 plus 30\tis 42.\n"


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", dtype=torch.float32).eval()


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return read_eval_text(tmp_path / "text.txt", tiny_tokenizer())


def test_counts_words_and_bytes(text):
    assert text.words == len(TEXT.split()) and text.bytes == len(TEXT.encode("utf-8"))
    assert tiny_tokenizer().decode(text.token_ids) == TEXT


@pytest.mark.parametrize("length", [1, 5, 16, 1000])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_one_token_at_a_time(model, text, length, batch_size):
    stream = [text.prefix, *text.token_ids]
    expected = 0.0
    for index, token in enumerate(text.token_ids):
        window = index - index % length
        context = torch.tensor([stream[window : index + 1]])
        with torch.no_grad():
            expected += model(context).logits[0, -1].double().log_softmax(-1)[token].item()
    result = evaluate_text(
        lambda ids, mask: model(ids, attention_mask=mask).logits, text, length=length, batch_size=batch_size
    )
    assert result.tokens == len(text.token_ids)
    # fp32 forwards of different batch shapes; each token's log-likelihood agrees to about 1e-6.
    assert result.log_likelihood == pytest.approx(expected, rel=1e-5)


def test_definitions():
    # 8 tokens with probability 1/2 each, 4 words, 16 bytes
    result = Perplexity(tokens=8, words=4, bytes=16, log_likelihood=-8 * math.log(2))
    assert result.per_token == pytest.approx(2) and result.per_word == pytest.approx(4)
    assert result.per_byte == pytest.approx(math.sqrt(2)) and result.bits_per_byte == pytest.approx(0.5)


def test_first_tokens_only(tmp_path, text):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    first = read_eval_text(path, tiny_tokenizer(), max_tokens=7)
    assert first.token_ids == text.token_ids[:7]
    assert first.bytes == len(tiny_tokenizer().decode(first.token_ids).encode())


def test_bad_files(tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"empty\.txt: no text"):
        read_eval_text(empty, tiny_tokenizer())
    with pytest.raises(ValueError, match=r"binary\.txt: not a UTF-8"):
        read_eval_text(binary, tiny_tokenizer())
