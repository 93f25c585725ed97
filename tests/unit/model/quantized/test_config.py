"""A quantized checkpoint whose codes are not read is refused from its config.json alone, in one line."""

import json
import re
from pathlib import Path

import pytest

from launch.memory import main
from model.quantized.quantization_config import check_readable, find_quantization_config, is_quantized, kv_cache_of
from quant import SCHEMES
from quant.formats.config_groups import quantization_config
from quant.spec import FP8_TENSOR
from tests.lib.tiny import tiny_config
from tests.unit.tools.memory.test_memory import recipe

COMPRESSED = quantization_config({"model.layers.0.mlp.up_proj": SCHEMES["w4a16_g32"]}, ["lm_head"])


def changed(**weights: object) -> dict:
    """An int4 configuration with other weights."""
    config = json.loads(json.dumps(COMPRESSED))
    config["config_groups"]["group_0"]["weights"].update(weights)
    return config


REFUSED = {
    "hqq": ({"quant_method": "hqq", "bits": 4}, "quant_method is 'hqq', whose codes are not read"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
    "modelopt": ({"quant_method": "modelopt"}, "quant_algo is None"),
    "modelopt's NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "quant_algo is 'NVFP4', whose codes are not read: expected 'FP8'",
    ),
    "modelopt's names": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [3]},
        "ignore: [3], expected a list of names",
    ),
    "none": ({"bits": 4}, "quant_method is None"),
    "no object": (3, "has a quantization_config that is a int, expected an object"),
    "order": (changed(actorder="group"), "weights.actorder is 'group'"),
    "bits": (changed(num_bits=9), "config_groups.group_0.weights: int codes have 2 to 8 bits, got bits=9"),
    "rotated": ({**COMPRESSED, "transform_config": {"u": 1}}, "transform_config is set"),
    "format": (
        json.loads(json.dumps(COMPRESSED).replace("pack-quantized", "marlin-24")),
        "format is 'marlin-24', expected 'pack-quantized'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(tmp_path, case):
    config, text = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        check_readable(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_ones_and_compressed_ones_are_read(tmp_path):
    for config in ({}, {"quantization_config": None}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert not is_quantized(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": COMPRESSED}))
    assert is_quantized(tmp_path)
    check_readable(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": COMPRESSED}}))
    assert find_quantization_config(tmp_path) == COMPRESSED


def memory_of(tmp_path: Path, config: dict, scheme: str = "w4a16_channel") -> None:
    """``launch/memory.py`` of a model with this quantization_config."""
    recipe(tmp_path)
    tiny_config("qwen3").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    main(["--config", str(tmp_path / "recipe.yaml"), "--ranks", "2", "--strategies", "zero3", "--quant.scheme", scheme])


def test_memory_is_predicted_from_a_quantized_checkpoint(tmp_path, capsys):
    memory_of(tmp_path, COMPRESSED)
    assert "zero3" in capsys.readouterr().out


def test_memory_knows_the_schemes_of_a_quantized_checkpoint(tmp_path, capsys):
    """From config.json alone: as of the same scheme by its name, where another one has other scales."""
    config = quantization_config({"Linear": SCHEMES["fp8_static"]}, ["lm_head"])
    tables = {}
    for scheme in ("source", "fp8_static", "w4a16_channel"):
        memory_of(tmp_path, config, scheme)
        tables[scheme] = capsys.readouterr().out.partition("|")[2]
    assert tables["source"] == tables["fp8_static"] != tables["w4a16_channel"]


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


def test_memory_of_what_is_not_read_is_refused_by_name(tmp_path, capsys):
    with pytest.raises(SystemExit):
        memory_of(tmp_path, {"quant_method": "hqq", "bits": 4})
    assert "whose codes are not read" in capsys.readouterr().err
