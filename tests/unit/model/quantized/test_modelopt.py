"""Checkpoints of ModelOpt in FP8, hand-made after vLLM's reader of them (`vllm/model_executor/layers/quantization/
modelopt.py` and the names that it remaps scales of keys and values from); no file of ModelOpt itself was at hand."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.errors import RecipeError
from engine.config.quant import QuantRecipe
from engine.config.reading import resolve_source
from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.quantization_config import check_readable, is_quantized
from model.quantized.scales import take_scales
from model.ranks import RankError
from model.save import export_model
from model.scales import load_scales, renew_weight_scales, write_scales
from quant import prepare
from quant.spec import PRESETS
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.quantized.test_round_trip import ENGINE, loaded

ATTENTION = "model.layers.1.self_attn"


def quantized(directory: Path, scheme: str):
    model = build_model(directory, ENGINE, dtype=torch.bfloat16, device=torch.device("cpu"))
    load_weights(model, directory, progress=False)
    preset = PRESETS[scheme]
    learn = {"learn_weight_scale": True, "learn_input_scale": False}
    return model, prepare(model, preset.linear, kv_cache=preset.kv_cache, **learn)


def written(directory: Path, scheme: str, *, inside: bool) -> tuple[Path, Path]:
    """An export of this project, and the same as ModelOpt has it: scalars, other names, what is left out with stars.

    ``inside``: whether config.json says it, as newer versions write it, or hf_quant_config.json alone.
    """
    source = tiny_checkpoint(directory / "source", "qwen3", seed=random.randrange(2**31), wide=True)
    model, quantization = quantized(source, scheme)
    renew_weight_scales(quantization)
    values = {group.owner: torch.rand(1) / 100 + 0.01 for group in quantization.input_groups}
    write_scales(quantization.input_groups, values)
    export_model(model, quantization, source, directory / "export")
    theirs = shutil.copytree(directory / "export", directory / "modelopt")
    tensors = load_file(theirs / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_scale")]:
        name, _, ending = key.rpartition(".")
        proj = f"{name}.{ending[0]}_proj.{ending}" if ending in ("k_scale", "v_scale") else key
        tensors[proj] = tensors.pop(key).reshape(()).clone()
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((theirs / "config.json").read_text())
    del config["quantization_config"]
    cache = "FP8" if scheme.endswith("kv") else None
    own = {"quant_algo": "FP8", "kv_cache_quant_algo": cache, "exclude_modules": ["lm_*"]}
    if inside:
        kv = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if cache else {}
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_*"], **kv}
    else:
        whole = {"producer": {"name": "modelopt", "version": "0.33.1"}, "quantization": own}
        (theirs / "hf_quant_config.json").write_text(json.dumps(whole))
    (theirs / "config.json").write_text(json.dumps(config))
    return directory / "export", theirs


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("scheme", ["fp8_static", "fp8_static_kv"])
def test_fp8_comes_back(tmp_path, scheme, inside):
    """As our own export, byte for byte, scales of inputs, keys and values too."""
    export, theirs = written(tmp_path, scheme, inside=inside)
    assert is_quantized(theirs)
    check_readable(theirs)
    if scheme == "fp8_static":
        model, quantization, report = loaded(theirs)
    else:
        model, quantization = quantized(theirs, scheme)
        report = take_scales(model, quantization, theirs)
        with pytest.raises(RecipeError, match=r"\(or kv_cache_quant_algo\) is set, which 'source' does"):
            resolve_source(QuantRecipe(scheme="source"), str(theirs))
    assert not report.inputs_missing and not report.weights_measured and not report.merged
    export_model(model, quantization, theirs, tmp_path / "again")
    names = {file.name for file in export.iterdir()}
    assert names == {file.name for file in (tmp_path / "again").iterdir()}
    assert not [name for name in names if (export / name).read_bytes() != (tmp_path / "again" / name).read_bytes()]


@pytest.mark.parametrize("read", [take_scales, load_scales])
def test_of_scales_per_head_the_largest_is_taken(tmp_path, read):
    """And a line says so; those of another number of heads are an error."""
    _, theirs = written(tmp_path, "fp8_static_kv", inside=False)
    tensors = load_file(theirs / "model.safetensors")
    tensors[f"{ATTENTION}.k_proj.k_scale"] = torch.tensor([0.01, 0.04, 0.02, 0.03]).view(4, 1, 1)
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    model, quantization = quantized(theirs, "fp8_static_kv")
    report = read(model, quantization, theirs)
    assert report.per_head == [f"{ATTENTION}.k_proj.k_scale"]
    assert "1 of keys and values have one for each head in the files, of which the largest is" in report.summary()
    assert quantization.caches[f"{ATTENTION}.k_cache"].input_scale().item() == torch.tensor(0.04).item()

    tensors[f"{ATTENTION}.k_proj.k_scale"] = torch.ones(3)
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    model, quantization = quantized(theirs, "fp8_static_kv")
    with pytest.raises(RankError, match=rf"{ATTENTION}.k_proj.k_scale has shape \(3,\), but this scheme has 1 scale"):
        read(model, quantization, theirs)


def test_a_file_that_says_nothing_is_named(tmp_path):
    _, theirs = written(tmp_path, "fp8_static", inside=False)
    (theirs / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"hf_quant_config.json has no quantization, expected what ModelOpt says"):
        check_readable(theirs)
