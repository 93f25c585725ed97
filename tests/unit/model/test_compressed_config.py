"""The configuration of a downloaded export is data: what is in it is named, and never taken on trust."""

import json

import pytest

from model.quantized.quantization_config import read_quantization_config
from quant.formats.config_groups import rules_from_config


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


@pytest.mark.parametrize("part", ["weights", "input_activations"])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (float("nan"), "nan, expected an object"),
        ([1], "expected an object"),
        ({"num_bits": None}, "num_bits is None, expected an integer"),
        ({"num_bits": True}, "num_bits is True, expected an integer"),
        ({"num_bits": "4"}, "num_bits is '4', expected an integer"),
        ({"symmetric": 3}, "symmetric is 3, expected true or false"),
        ({"group_size": 1.5}, "group_size is 1.5, expected an integer or null"),
    ],
)
def test_what_a_quantizer_is_made_of_has_types(part, arguments, named):
    good = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": ["Linear"], "weights": good, "input_activations": good, part: arguments}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    with pytest.raises(ValueError, match=rf"^config_groups\.group_0\.{part}.*{named}"):
        rules_from_config(config)


@pytest.mark.parametrize("text", ["[]", "{", '{"quantization_config": 3}', "\x00"])
def test_a_configuration_that_is_none_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_quantization_config(tmp_path)
