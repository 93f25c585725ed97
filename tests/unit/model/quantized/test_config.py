"""Configurations of quantized checkpoints: read, or refused by name from config.json alone."""

import json
import re

import pytest

from launch.memory import main
from model.quantized.quantization_config import check_readable, find_quantization_config, is_quantized, kv_cache_of
from quant import SCHEMES
from quant.formats.config_groups import quantization_config
from quant.spec import FP8_TENSOR
from tests.lib.checkpoints import edit_json
from tests.lib.recipes import bare_recipe as recipe
from tests.lib.tiny import tiny_config

COMPRESSED = quantization_config({"model.layers.0.mlp.up_proj": SCHEMES["w4a16_g32"]}, ["lm_head"])
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
GPTQ = {"quant_method": "gptq", "bits": 4}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
ROUND = {"quant_method": "auto-round", "bits": 4}


def group(**values) -> dict:
    """A configuration with one group of static fp8 and other values in it."""
    whole = {"targets": ["Linear"], "weights": FP8, "input_activations": FP8, **values}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": whole}}


def int4(**weights) -> dict:
    """The int4 configuration with other values of its weights."""
    config = json.loads(json.dumps(COMPRESSED))
    config["config_groups"]["group_0"]["weights"].update(weights)
    return config


REFUSED = {
    "no object": (3, "has a quantization_config that is a int, expected an object"),
    # Patterns and lists, of any method.
    "ignore without end": ({"ignore": ["re:(a+)+b"]}, "quantization_config.ignore: 're:(a+)+b', expected a regular"),
    "ignore of no regex": ({"ignore": ["lm_head", "re:("]}, "quantization_config.ignore: 're:(', expected a regular"),
    "targets without end": (group(targets=["Linear", "re:(.|_.)*x"]), "group_0.targets: 're:(.|_.)*x', expected"),
    "ignore, a text": ({"ignore": "re:a"}, "quantization_config.ignore: re:a, expected a list"),
    "ignore of numbers": ({"quant_method": "modelopt", "ignore": [3]}, "ignore: [3], expected a list of names"),
    "list of groups": ({"config_groups": [1]}, "config_groups: [1], expected groups by name"),
    "targets, a number": (group(targets=7), "targets: 7, expected a list"),
    # Types of what a quantizer is made of.
    "weights of NaN": (group(weights=float("nan")), "group_0.weights is nan, expected an object"),
    "inputs of a list": (group(input_activations=[1]), "group_0.input_activations is [1], expected an object"),
    "bits of None": (group(weights={"num_bits": None}), "num_bits is None, expected an integer"),
    "bits of bool": (group(input_activations={"num_bits": True}), "num_bits is True, expected an integer"),
    "bits of text": (group(weights={"num_bits": "4"}), "num_bits is '4', expected an integer"),
    "symmetric of 3": (group(weights=FP8 | {"symmetric": 3}), "symmetric is 3, expected true or false"),
    "half a group": (group(weights=FP8 | {"group_size": 1.5}), "group_size is 1.5, expected an integer or null"),
    # Methods and numerics that are not read.
    "none": ({"bits": 4}, "quant_method is None"),
    "hqq": ({"quant_method": "hqq", "bits": 4}, "quant_method is 'hqq', whose codes cannot be read"),
    "modelopt": ({"quant_method": "modelopt"}, "quant_algo is None"),
    "groups of 32": ({**NVFP4, "group_size": 32}, "group_size is 32, expected 16 for NVFP4: quantize again"),
    "one layer": (
        {
            **NVFP4,
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.b": NVFP4, "a.c": {"quant_algo": "W4A8_AWQ"}},
        },
        "a.c: quant_algo is 'W4A8_AWQ', which has inputs multiplied by pre_quant_scale, and weights rounded to int4 "
        "and again to fp8: start from the unquantized checkpoint, for example with quant.scheme w4a8_fp8",
    ),
    "W4A8 of NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "w4a8_nvfp4_fp8", "group_size": 32},
        "quant_algo is 'w4a8_nvfp4_fp8', which has weights in groups of 32 rounded to fp4 and again to fp8: start from",
    ),
    "W4A8 in groups of 16": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8", "group_size": 16},
        "group_size is 16, expected 32 for W4A8_MXFP4_FP8: quantize again",
    ),
    "AWQ": ({**NVFP4, "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ', expected FP8, FP8_PER_CHANNEL_PER_TOKEN"),
    "an expert": (
        {
            **NVFP4,
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a.experts.0.up": NVFP4, "a.experts.11.up": {"quant_algo": "FP8"}},
        },
        "a.experts.11.up: quant_algo is 'FP8', but other experts of this layer have another one",
    ),
    "order": (int4(actorder="group"), "weights.actorder is 'group'"),
    "9 bits": (int4(num_bits=9), "config_groups.group_0.weights: int codes have 2 to 8 bits, got dtype=int, bits=9"),
    "rotated": ({**COMPRESSED, "transform_config": {"u": 1}}, "transform_config is set"),
    "format": (group(format="marlin-24"), "format is 'marlin-24', expected '"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "desc_act": ({**GPTQ, "desc_act": True}, "desc_act is true"),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
    "awq 8": ({"quant_method": "awq", "bits": 8}, "bits is 8, expected 4"),
    "mixed": ({**GPTQ, "dynamic": {"+:.*down": {"bits": 8}}}, "has a scheme of its own"),
    "mixed, auto-round": ({**ROUND, "extra_config": {"a": {"bits": 8}}}, "has a scheme of its own"),
    "groups of text": ({**GPTQ, "group_size": "x"}, "group_size is 'x', expected a number"),
    "groups of 0": ({**GPTQ, "group_size": 0}, "group_size is 0, expected a number"),
    "float bits": ({**GPTQ, "bits": 4.0}, "bits is 4.0, expected 2 or 3"),
    "list of layers": ({**GPTQ, "dynamic": [1]}, "a value has another type than in files of 'gptq'"),
    "text of input bits": ({**ROUND, "act_bits": "x"}, "a value has another type than in files of 'auto-round'"),
    "inputs": ({**ROUND, "act_bits": 8}, "act_bits 8, expected 'int' and 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(tmp_path, case):
    config, text = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        check_readable(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_configurations_of_modelopt_that_differ_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": NVFP4}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json has quant_algo 'FP8', but .*config\.json has 'NVFP4'"):
        check_readable(tmp_path)
    edit_json(tmp_path / "hf_quant_config.json", quantization={"quant_algo": "NVFP4", "group_size": 16})
    check_readable(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "\x00"])
def test_a_configuration_that_is_none_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is"):
        find_quantization_config(tmp_path)


def test_plain_ones_and_compressed_ones_are_read(tmp_path):
    for config in ({}, {"quantization_config": None}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert not is_quantized(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=COMPRESSED)
    assert is_quantized(tmp_path)
    check_readable(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": COMPRESSED}}))
    assert find_quantization_config(tmp_path) == COMPRESSED


def test_memory_of_a_quantized_checkpoint_is_predicted_from_its_configuration(tmp_path, capsys):
    """As of the same scheme by its name, where another one has other scales; or the method is refused."""

    def predicted(config: dict, scheme: str) -> str:
        recipe(tmp_path)
        tiny_config("qwen3").save_pretrained(tmp_path / "model")
        edit_json(tmp_path / "model" / "config.json", quantization_config=config)
        options = ["--config", str(tmp_path / "recipe.yaml"), "--ranks", "2", "--strategies", "zero3"]
        main([*options, "--quant.scheme", scheme])
        return capsys.readouterr().out.partition("|")[2]

    fp8 = quantization_config({"Linear": SCHEMES["fp8_static"]}, ["lm_head"])
    source, same, other = (predicted(fp8, scheme) for scheme in ("source", "fp8_static", "w4a16_channel"))
    assert "zero3" in source
    assert source == same != other
    with pytest.raises(SystemExit):
        predicted({"quant_method": "hqq", "bits": 4}, "w4a16_channel")
    assert "whose codes cannot be read" in capsys.readouterr().err


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CACHES = {
    "of this project": (COMPRESSED | {"kv_cache_scheme": KV}, FP8_TENSOR),
    "none": (COMPRESSED | {"kv_cache_scheme": None}, None),
    "cache alone, weights in bf16": ({**COMPRESSED, "config_groups": {}, "kv_cache_scheme": KV}, FP8_TENSOR),
    "per head": (COMPRESSED | {"kv_cache_scheme": KV | {"strategy": "attn_head"}}, "kv_cache_scheme"),
    "integers": (COMPRESSED | {"kv_cache_scheme": KV | {"type": "int"}}, "expected one stored scale of fp8"),
    "dynamic": (COMPRESSED | {"kv_cache_scheme": KV | {"dynamic": True}}, "kv_cache_scheme"),
    "4 bits": (COMPRESSED | {"kv_cache_scheme": KV | {"num_bits": 4}}, "fp4_e2m1 has groups"),
    "no object": (COMPRESSED | {"kv_cache_scheme": "fp8"}, "kv_cache_scheme"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, FP8_TENSOR),
    "modelopt, NVFP4": ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "is 'NVFP4', expected 'FP8'"),
}


@pytest.mark.parametrize("case", CACHES)
def test_quantized_keys_and_values_are_read_or_named(case):
    config, expected = CACHES[case]
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            kv_cache_of(config)
    else:
        assert kv_cache_of(config) == expected
