"""AngelSlim's two verified scenarios under ZeRO-3, as published, on small models: converted, calibrated, trained."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.lib.launcher import launch, run_ranks
from tests.lib.processes import run_python
from tests.lib.recipes import write_chats
from tests.lib.root import ROOT
from tests.lib.tiny import tiny_checkpoint
from tests.unit.launch.test_convert_recipe import SCALES_ONLY, SCALES_ONLY_4B

CONVERT = "from launch.convert_recipe import main; main()"
WIDER = 2.0  # than the scales that the run itself would measure, with codes of half the size
# Of both forms: the base model, the samples and the scales of PTQ.
MODELS = ("Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B")
SAMPLES = ("./dataset/sharegpt_gpt4_qwen/sharegpt_gpt4-qwen3_a22B_output.jsonl", "sharegpt.jsonl")
SCALES = ("./output_ptq/qwen3-4b_fp8_static", "./output_ptq_30b/qwen3-a3b_fp8_static")
OUTPUTS = ("./output_4b_zero3", "./output")


def local(form: str, base: Path, kind: str) -> dict:
    """A published configuration, with paths of this machine."""
    contents = yaml.safe_load(form)
    qat = contents["compression"]["QAT"]
    assert contents["model"]["model_path"] in MODELS and contents["dataset"]["data_path"] in SAMPLES
    assert qat["from_ptq_ckpt"] in SCALES and contents["global"]["save_path"] in OUTPUTS
    contents["model"]["model_path"] = str(tiny_checkpoint(base / "model", kind, even=True))
    contents["dataset"]["data_path"] = str(write_chats(base / "chats.jsonl"))
    qat["from_ptq_ckpt"] = str(base / "ptq" / "export")
    contents["global"]["save_path"] = str(base / "out")
    return contents


@pytest.mark.parametrize(
    ("form", "kind", "steps"), [(SCALES_ONLY_4B, "qwen3", 5), (SCALES_ONLY, "qwen3_moe", 3)], ids=["4B", "30B-A3B"]
)
def test_scales_alone_follow_the_model_itself_from_those_of_ptq(tmp_path, form, kind, steps):
    theirs, recipe = tmp_path / "angelslim.yaml", tmp_path / "recipe.yaml"
    theirs.write_text(yaml.safe_dump(local(form, tmp_path, kind)))
    converted = run_python(CONVERT, theirs)
    assert converted.returncode == 0, converted.stderr
    recipe.write_text(converted.stdout)

    ptq = ["--config", recipe, "--quant.scales", "null", "--output_dir", tmp_path / "ptq"]
    run_ranks(ROOT / "launch" / "calibrate.py", *ptq)
    file = tmp_path / "ptq" / "export" / "model.safetensors"
    first = load_file(file)
    for name in [name for name in first if name.endswith(".weight_scale")]:
        codes = name.removesuffix("_scale")
        first[name] *= WIDER
        first[codes] = (first[codes].float() / WIDER).to(torch.float8_e4m3fn)
    save_file(first, file, metadata={"format": "pt"})

    if kind == "qwen3":  # as a user starts it
        ended = launch(ROOT / "launch" / "train.py", "--config", recipe)
        assert ended.returncode == 0, ended.stdout[-8000:]
    else:
        run_ranks(ROOT / "launch" / "train.py", "--config", recipe)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss/total" in line] == [*range(1, steps + 1)]
    assert all(line["loss/total"] == pytest.approx(line["loss/lm"] + line["loss/kd/cakld"]) for line in lines)

    model, last = (load_file(tmp_path / part / "model.safetensors") for part in ("model", "out/export"))
    moved = []
    for name, tensor in last.items():
        if name.endswith(".weight_scale"):
            moved.append((tensor.float() / first[name].float()).log().abs().max().item())
        elif name.endswith(".input_scale"):
            assert torch.equal(tensor, first[name]), name
        elif tensor.dtype != torch.float8_e4m3fn:
            assert torch.equal(tensor, model[name]), name
    assert len(moved) > 10 and 0 < max(moved) < math.fsum([1e-3] * (steps + 1)), moved
