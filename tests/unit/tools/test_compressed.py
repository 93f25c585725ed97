"""Compressed checkpoints that are read back: scales that no quantizer can have are refused by name."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from model.ranks import RankError
from quant import SCHEMES
from tests.lib.checkpoints import edit_json, edit_tensors, exported
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
    export = shutil.copytree(exports[scheme], tmp_path / "export")
    key = f"model.layers.1.mlp.up_proj.{suffix}"
    edit_tensors(export, key, lambda tensors: tensors[key].view(-1)[-1:].fill_(BAD[value]))
    fits = (scheme, value) == ("w3a16_channel", "negative")
    with nullcontext() if fits else pytest.raises(RankError, match=rf"{key} must be finite and "):
        load_compressed(export, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("ignore", [None, []])
def test_a_plain_weight_where_the_configuration_has_codes_is_named(exports, tmp_path, ignore) -> None:
    export = shutil.copytree(exports["w3a16_channel"], tmp_path / "export")
    edit_json(export / "config.json", lambda config: config["quantization_config"].update(ignore=ignore))
    with pytest.raises(RankError, match=r"missing: lm_head\.weight_packed.*\nunexpected: lm_head\.weight$"):
        load_compressed(export)


def test_codes_of_another_shape_are_named(exports, tmp_path) -> None:
    export = shutil.copytree(exports["w3a16_channel"], tmp_path / "export")
    key = "model.layers.0.mlp.down_proj.weight_packed"
    edit_tensors(export, key, lambda tensors: tensors.update({key: tensors[key].unsqueeze(-1).contiguous()}))
    with pytest.raises(RankError, match=r"model\.layers\.0\.mlp\.down_proj\.weight_packed has shape"):
        load_compressed(export)
