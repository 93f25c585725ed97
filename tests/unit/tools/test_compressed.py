"""Compressed checkpoints that are read back: scales that no quantizer can have are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.ranks import RankError
from quant import SCHEMES
from tests.lib.checkpoints import exported
from tools.compressed import load_compressed

BAD = {"zero": 0.0, "NaN": float("nan"), "infinite": float("inf"), "negative": -1.0}


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of each kind of scale: per tensor with inputs, of integers."""
    return {
        name: exported(tmp_path_factory.mktemp(name), "qwen3", SCHEMES[name])[0]
        for name in ("fp8_static", "w3a16_channel")
    }


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [("fp8_static", "weight_scale"), ("fp8_static", "input_scale"), ("w3a16_channel", "weight_scale")],
)
def test_scales_that_cannot_be_are_refused_by_name(exports, tmp_path, scheme: str, suffix: str, value: str) -> None:
    """One scale of a layer is bad; those of integers may be negative."""
    for file in exports[scheme].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    key = f"model.layers.1.mlp.up_proj.{suffix}"
    file = next(file for file in tmp_path.glob("*.safetensors") if key in load_file(file))
    tensors = load_file(file)
    tensors[key].view(-1)[-1] = BAD[value]
    save_file(tensors, file, metadata={"format": "pt"})

    def load() -> None:
        load_compressed(tmp_path, dtype=torch.float32, device=torch.device("cpu"))

    if (scheme, value) == ("w3a16_channel", "negative"):
        load()
        return
    with pytest.raises(RankError, match=rf"{key} must be finite and "):
        load()


@pytest.mark.parametrize("ignore", [None, []])
def test_a_plain_weight_where_the_configuration_has_codes_is_named(exports, tmp_path, ignore) -> None:
    directory = tmp_path / "export"
    shutil.copytree(exports["w3a16_channel"], directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["ignore"] = ignore
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(RankError, match=r"missing: lm_head\.weight_packed.*\nunexpected: lm_head\.weight$"):
        load_compressed(directory)


def test_codes_of_another_shape_are_named(exports, tmp_path) -> None:
    directory, key = tmp_path / "export", "model.layers.0.mlp.down_proj.weight_packed"
    shutil.copytree(exports["w3a16_channel"], directory)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if key in tensors:
            save_file({**tensors, key: tensors[key].unsqueeze(-1).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(RankError, match=r"model\.layers\.0\.mlp\.down_proj: weight_packed has shape"):
        load_compressed(directory)
