"""A checkpoint's tokenizer is read, or the error names the checkpoint and is one line."""

import json

import pytest

from data.samples import DataError, load_tokenizer
from tests.lib.tiny import tiny_checkpoint, tiny_tokenizer


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


AUTO_MAP = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoProcessor": "evil.Evil", "AutoConfig": "evil.Evil"}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "processor_config.json", "config.json"])
@pytest.mark.parametrize(
    "asked", [{"auto_map": AUTO_MAP}, {"auto_map": ["evil.Evil", None]}, {"auto_map": "evil.Evil"}, {"auto_map": 3}]
)
def test_code_that_a_tokenizer_asks_for_does_not_run(tmp_path, name, asked):
    path = tiny_checkpoint(tmp_path / "model")
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((path / name).read_text()) if (path / name).exists() else {}
    classes = {"tokenizer_class": "Evil", "processor_class": "Evil"} if name != "config.json" else {}
    (path / name).write_text(json.dumps({**config, **asked, **classes}))
    try:
        assert load_tokenizer(path)("Two words")["input_ids"] == tiny_tokenizer()("Two words")["input_ids"]
    except DataError as error:
        assert str(error).startswith(f"{path}: expected a tokenizer") and "\n" not in str(error)
    assert not (tmp_path / "ran").exists()
