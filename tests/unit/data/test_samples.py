"""A checkpoint's tokenizer is read, or the error names the checkpoint and is one line."""

import pytest

from data.samples import DataError, load_tokenizer
from tests.tiny import tiny_checkpoint, tiny_tokenizer


def test_the_tokenizer_of_a_checkpoint(tmp_path):
    path = tiny_checkpoint(tmp_path / "model")
    text = "What it says."
    assert load_tokenizer(path)(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", "null", '{"model": {"type": "BPE"}}', "\x00\xff"])
def test_one_that_is_not_there_or_damaged_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError) as raised:
        load_tokenizer(tmp_path)
    text = str(raised.value)
    assert text.startswith(f"{tmp_path}: expected a tokenizer") and "\n" not in text
