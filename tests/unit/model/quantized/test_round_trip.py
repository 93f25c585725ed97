"""In one process: what is loaded from codes is exported as the same codes, of formats that are not our default."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config.errors import RecipeError
from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_scales
from model.ranks import RankError
from model.save import export_model
from model.scales.loading import ScaleReport
from quant import SCHEMES, Quantization, prepare
from quant.formats.layouts import Layout
from tests.lib.checkpoints import exported, quantized
from tests.lib.tiny import tiny_checkpoint
from tests.unit.tools.memory.test_memory import recipe

pytestmark = pytest.mark.usefixtures("seed")

ENGINE = {"bf16": {"enabled": True}, "fp16": {"enabled": False}}


def loaded(directory: Path, scheme: str = "source") -> tuple[torch.nn.Module, Quantization, ScaleReport]:
    """The model of a quantized checkpoint, with its own schemes, or with one for all layers."""
    model = build_model(directory, ENGINE, dtype=torch.bfloat16, device=torch.device("cpu"))
    load_weights(model, directory, progress=False)
    source = scheme == "source"
    quantization = prepare(
        model,
        None if source else SCHEMES[scheme],
        named=source_schemes(model, directory) if source else {},
        learn_weight_scale=True,
        learn_input_scale=False,
    )
    return model, quantization, take_scales(model, quantization, directory, inputs_calibrated_later=True)


def files(directory: Path) -> dict[str, bytes]:
    """What the weight files and config.json hold."""
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.suffix in (".json", ".safetensors")}


@pytest.mark.parametrize("scheme", ["fp8_static", "fp8_block"])
def test_fp8_as_vllm_and_deepseek_have_it_comes_back(tmp_path, scheme):
    """With ``weight_scale_inv`` for blocks; byte for byte, config.json too."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe", seed=random.randrange(2**31), wide=True)
    batches = [torch.randint(0, 301, (2, 64))]
    model, quantization = quantized(source, SCHEMES[scheme], batches)
    layout: Layout = "vllm_fp8"
    export_model(model, quantization, source, tmp_path / "first", layout=layout)
    again, its, report = loaded(tmp_path / "first")
    assert not report.weights_measured
    assert not report.inputs_missing
    assert not report.merged
    export_model(again, its, tmp_path / "first", tmp_path / "second", layout=layout)
    assert files(tmp_path / "first") == files(tmp_path / "second")


def edited(directory: Path, edit) -> None:
    """Change the tensors of a checkpoint, file by file."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def test_layers_in_other_schemes_keep_the_weights_and_are_measured(tmp_path):
    """fp8 to int4: the weights are the codes times the scales, the scales are those of the weights."""
    export, *_ = exported(tmp_path, "qwen3", SCHEMES["fp8_static"])
    model, _, report = loaded(export, "w4a16_channel")
    assert not report.weights_loaded
    assert not report.inputs_loaded
    tensors = {key: tensor for file in export.glob("*.safetensors") for key, tensor in load_file(file).items()}
    name = "model.layers.1.mlp.down_proj"
    expected = (tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]).bfloat16()
    assert torch.equal(model.get_submodule(name).weight, expected)


def test_what_is_not_quantized_stays_so_and_what_shares_a_scale_is_said(tmp_path):
    """Another writer's file: one layer plain, the scales of q, k and v each their own."""
    export, *_ = exported(tmp_path, "qwen3", SCHEMES["fp8_static"])
    plain, q = "model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.q_proj"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if f"{plain}.weight" in tensors:
            tensors[f"{plain}.weight"] = tensors[f"{plain}.weight"].bfloat16()
            del tensors[f"{plain}.weight_scale"], tensors[f"{plain}.input_scale"]
        if f"{q}.weight_scale" in tensors:
            tensors[f"{q}.weight_scale"] *= 2

    edited(export, edit)
    for file in export.glob("*.index.json"):
        index = json.loads(file.read_text())
        for kind in ("weight_scale", "input_scale"):
            del index["weight_map"][f"{plain}.{kind}"]
        file.write_text(json.dumps(index))
    _, quantization, report = loaded(export)
    assert plain not in quantization.layers
    assert q in quantization.layers
    assert report.merged == [q]
    assert "their codes are made anew (model.layers.0.self_attn.q_proj)" in report.summary()
    assert "model.layers.0.mlp.gate_proj" in report.weights_loaded


def test_scales_that_the_models_dtype_rounds_are_said(tmp_path):
    export, *_ = exported(tmp_path, "qwen3", SCHEMES["w4a16_channel"])

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for key in tensors:
            if key.endswith("weight_scale"):
                tensors[key] = tensors[key].half()

    edited(export, edit)
    _, _, report = loaded(export)
    assert not report.weights_measured
    assert "those of the files are torch.float16, and are rounded" in report.summary()


def test_a_tensor_beside_the_codes_that_is_not_known_is_named(tmp_path):
    export, *_ = exported(tmp_path, "qwen3", SCHEMES["w4a16_channel"])
    name = "model.layers.1.mlp.up_proj"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if f"{name}.weight_packed" in tensors:
            tensors[f"{name}.pre_quant_scale"] = torch.ones(48)

    edited(export, edit)
    for file in export.glob("*.index.json"):
        index = json.loads(file.read_text())
        index["weight_map"][f"{name}.pre_quant_scale"] = index["weight_map"][f"{name}.weight_packed"]
        file.write_text(json.dumps(index))
    with pytest.raises(RankError, match=rf"unexpected: {name}\.pre_quant_scale$"):
        loaded(export)


def test_the_scheme_source_is_written_into_the_recipe(tmp_path):
    """So that a run's own recipe says what it did; and of a plain checkpoint there is none."""
    export, *_ = exported(tmp_path, "qwen3", SCHEMES["fp8_static"])
    (tmp_path / "recipe").mkdir()
    found = recipe(tmp_path / "recipe", quant={"scheme": "source"}, model={"path": str(export)}).quant
    assert found.default_scheme() is None
    (scheme,) = found.linear_schemes()
    assert (scheme.weights, scheme.activations) == (SCHEMES["fp8_static"].weights, SCHEMES["fp8_static"].activations)
    assert found.stores_input_scales()
    with pytest.raises(RecipeError, match=r"quant\.rules: .*, expected nothing beside quant\.scheme source"):
        recipe(
            tmp_path / "recipe",
            quant={"scheme": "source", "rules": [{"scheme": "none", "first": 1}]},
            model={"path": str(export)},
        )
    with pytest.raises(RecipeError, match=r"quant\.fake_quant_start: 3, expected 0: with quant\.scheme source"):
        recipe(tmp_path / "recipe", quant={"scheme": "source", "fake_quant_start": 3}, model={"path": str(export)})
    with pytest.raises(RecipeError, match=r"quant\.scheme: 'source'.* has no quantization_config"):
        recipe(tmp_path / "recipe", quant={"scheme": "source"})
