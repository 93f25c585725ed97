"""The configuration of a downloaded export is data: what is in it is named, and never taken on trust."""

import json

import pytest

from model.quantised.config import read_quantization_config


@pytest.mark.parametrize(
    "config",
    [
        {"ignore": ["re:(a+)+b"]},
        {"ignore": ["lm_head", "re:("]},
        {"config_groups": {"group_0": {"targets": ["Linear", "re:(.|_.)*x"]}}},
        {"ignore": "re:a"},
        {"ignore": [3]},
        {"config_groups": [1]},
        {"config_groups": {"group_0": {"targets": 7}}},
    ],
)
def test_an_exports_patterns_are_checked_before_they_are_used(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "x", **config}}))
    with pytest.raises(ValueError, match=r"config\.json: quantization_config\."):
        read_quantization_config(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"quantization_config": 3}', "\x00"])
def test_a_configuration_that_is_none_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_quantization_config(tmp_path)
