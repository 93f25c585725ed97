"""Exports whose inputs are rotated while the model runs, read by compressed-tensors' own transforms in transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.session.student import rotate_weights
from model.ranks import RankError
from model.save.export_model import export_model
from model.scales.in_place import renew_weight_scales, write_scales
from quant import SCHEMES, replace_layers
from quant.rotation import KEY, rotate_inputs
from quant.scale import first_input_scale
from tests.lib.checkpoints import edit_json, edit_tensors, load_model, read_tensors
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed
from tools.verify.check import compare_with_transformers

# Scheme, patterns and block: outliers meet inputs of 4 and 8 bits, and layers beside them that are not rotated.
CASES = {
    "nvfp4": ("nvfp4_w4a4", [r".*\.down_proj"], 256),
    "mx": ("mxfp4_mxfp8", [r".*\.(down|o)_proj"], 64),
    "static": ("fp8_static", [r".*\.layers\.1\.mlp\.down_proj"], 256),
    "weights": ("w4a16_g32", [r".*\.down_proj"], 64),
}


def exported(directory: Path, case: str) -> Path:
    """A quantized export of random weights, after checking that rotating them does not change the function."""
    scheme, patterns, block = CASES[case]
    source = tiny_checkpoint(directory / "source", "qwen3", wide=True, seed=torch.initial_seed())
    model = load_model(source).eval()
    quantization = replace_layers(model, SCHEMES[scheme], learn_weight_scale=True, learn_input_scale=False)
    rotate_inputs(quantization, patterns, block)
    assert rotate_weights(model, quantization) == sum(one.rotation is not None for one in quantization.layers.values())
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    ids = torch.randint(0, 301, (2, 40))
    quantization.set_fake_quant(weights=False, activations=False)
    with torch.no_grad():
        before, after = plain(ids).logits.float(), model(ids).logits.float()
    # Rotated weights are rounded to bf16 once more.
    assert (before - after).square().mean() < 1e-3 * before.var()
    quantization.set_fake_quant(weights=True, activations=True)
    renew_weight_scales(quantization)
    scale = {g.owner: first_input_scale(torch.tensor([4.0]), g.spec) for g in quantization.input_groups}
    write_scales(quantization.input_groups, scale)
    export_model(model, quantization, source, directory / "export")
    return directory / "export"


@pytest.mark.parametrize("case", CASES)
def test_compressed_tensors_computes_the_logits_of_our_forward(case, tmp_path, seed):
    export, block = exported(tmp_path, case), CASES[case][2]
    report = compare_with_transformers(export, [torch.randint(0, 301, (2, 64))])
    assert report.ok, report.table()
    matrices = [tensor for key, tensor in read_tensors(export).items() if key.endswith(KEY)]
    assert matrices and all(tensor.shape == (block, block) and tensor.dtype == torch.bfloat16 for tensor in matrices)
    _, quantization = load_compressed(export)
    config = json.loads((export / "config.json").read_text())["quantization_config"]["transform_config"]
    assert [group["head_dim"] for group in config["config_groups"].values()] == [block]
    assert sum(layer.rotation is not None for layer in quantization.layers.values()) == len(matrices)


def test_lost_transforms_are_refused_and_another_matrix_is_a_problem(tmp_path, seed):
    """Without the entry a reader would compute noise: the matrices beside the layers say that there was one."""
    export = exported(tmp_path, "nvfp4")
    key = next(key for key in read_tensors(export) if key.endswith(KEY))
    edit_tensors(export, key, lambda tensors: tensors.update({key: tensors[key].flip(0).contiguous()}))
    report = compare_with_transformers(export, [torch.randint(0, 301, (1, 8))])
    assert any("is not the matrix" in problem for problem in report.problems)
    edit_json(export / "config.json", lambda config: config["quantization_config"].pop("transform_config"))
    with pytest.raises(RankError, match=f"unexpected: .*{KEY}"):
        load_compressed(export)
