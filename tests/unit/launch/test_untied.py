"""lm_head and embeddings of a tied checkpoint, quantized: as if its file had both weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.lib.processes import run_python
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed

IDS = torch.arange(24).view(2, 12)


def exported(checkpoint: Path, out: Path, **quant) -> Path:
    recipe = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "quant": {"scheme": "w4a16_g32", "weight_range": "absmax", **quant},
        "data": {"kind": "text", "train": [str(checkpoint / "text.txt")], "max_length": 16},
        "train": {"steps": 1},
        "output_dir": str(out),
        "deepspeed": "zero0",
    }
    file = checkpoint / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    done = run_python("from launch.calibrate import main; main()", "--config", file)
    if done.returncode:
        raise RuntimeError(done.stderr)
    assert ("each gets its own weight" in done.stdout) == (checkpoint.name == "tied")
    return out / "export"


def changed(checkpoint: Path, out: Path, edit) -> Path:
    """A copy of a checkpoint with other weights, whose config.json says that it is not tied."""
    (checkpoint / "text.txt").write_text("the quick brown fox " * 50)
    shutil.copytree(checkpoint, out)
    weights = load_file(out / "model.safetensors")
    edit(weights)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return out


@pytest.mark.parametrize(
    "quant", [{"embedding": "w4a16_g32", "lm_head": "w8a16_channel"}, {"lm_head": "w8a16_channel"}], ids=str
)
def test_the_export_is_that_of_the_untied_checkpoint(tmp_path: Path, quant):
    tied = tiny_checkpoint(tmp_path / "tied", "llama", tied=True, even=True)
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")

    def copy_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    untied = changed(tied, tmp_path / "untied", copy_head)
    found, expected = exported(tied, tmp_path / "a", **quant), exported(untied, tmp_path / "b", **quant)
    for name in ("model.safetensors", "config.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes()
    assert json.loads((found / "config.json").read_text())["tie_word_embeddings"] is False
    ours, theirs = (load_compressed(one, dtype=torch.float32)[0](input_ids=IDS).logits for one in (found, expected))
    assert torch.equal(ours, theirs)


def test_a_head_that_is_lost_is_not_the_embeddings(tmp_path: Path):
    whole = tiny_checkpoint(tmp_path / "whole", "llama", even=True)
    broken = changed(whole, tmp_path / "broken", lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(RuntimeError, match=r"missing: lm_head\.weight"):
        exported(broken, tmp_path / "out", lm_head="w8a16_channel")
