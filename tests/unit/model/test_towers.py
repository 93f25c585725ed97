"""Composite checkpoints: what is trained of them, and what an export has of the rest."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from model.build import build_model
from model.checkpoint.load import load_weights
from model.families import Tower, left_out, text_part
from model.ranks import RankError
from model.save import export_model
from model.scales import renew_weight_scales, write_scales
from quant import SCHEMES, prepare
from quant.rules import Rule
from tests.families.variants import COMPOSITE, VARIANTS
from tools.verify.check import compare_with_transformers

CPU = torch.device("cpu")
# Those whose experts or lm_head are not supported yet have tests of their own.
KINDS = ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4", "mistral3", "llava", "llava_next"]


def build(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = {"bf16": {"enabled": dtype == torch.bfloat16}}
    model = build_model(path, config, dtype=dtype, device=CPU, attn_implementation="eager").eval()
    load_weights(model, path, progress=False)
    return model


def quantized(model: PreTrainedModel, scheme: str, rules=()):
    quantization = prepare(model, SCHEMES[scheme], rules=rules, learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    write_scales(quantization.input_groups, {group.owner: torch.tensor([0.02]) for group in quantization.input_groups})
    return quantization


def class_of(directory: Path) -> type[PreTrainedModel]:
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    return getattr(transformers, name)


def tower_keys(model: PreTrainedModel, disk: dict) -> list[str]:
    """Keys on disk that no parameter of the text model has, found by the values in the files alone."""
    ends = {part.rpartition(".")[2] for part in left_out(model)}
    return [key for key in disk if ends & set(key.split("."))]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_composite_model_is_trained_and_the_rest_passed_through(kind: str, tmp_path: Path, seed: int):
    source = VARIANTS[kind].checkpoint(tmp_path / "source", seed=seed, dtype=torch.float32)
    theirs = (
        class_of(source).from_pretrained(source, attn_implementation="eager", experts_implementation="eager").eval()
    )
    ours = build(source)
    assert type(ours) is type(theirs) and text_part(ours) and left_out(ours)
    for name, _ in ours.named_parameters():
        assert not any(name.startswith(part) for part in left_out(ours)), name
    ids = torch.randint(10, 300, (2, 17), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(17).expand(2, 17)  # which training gives, for it packs
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        result = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    # Gate and up of experts are two products in one and one in the other.
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)

    source = VARIANTS[kind].checkpoint(tmp_path / "bf16", seed=seed)
    ours = build(source, torch.bfloat16)
    before = load_file(source / "model.safetensors")
    export_model(ours, None, source, tmp_path / "plain")
    after = load_file(tmp_path / "plain" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)

    quantization = quantized(ours, "fp8_static")
    assert not any(name.startswith(part) for name in quantization.layers for part in left_out(ours))
    export_model(ours, quantization, source, tmp_path / "fp8")
    after = load_file(tmp_path / "fp8" / "model.safetensors")
    kept = tower_keys(ours, before)
    assert kept and all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in kept)
    model, info = class_of(tmp_path / "fp8").from_pretrained(tmp_path / "fp8", output_loading_info=True)
    # transformers dequantizes experts, and has no use for the scales of their inputs.
    found = [key for keys in info.values() for key in keys if not re.search(r"experts.*input_scale$", str(key))]
    assert not found
    names = [name for name, _ in model.named_parameters() if name.startswith(tuple(left_out(ours)))]
    assert names and not any("scale" in name.rpartition(".")[2] for name in names), "a tower was quantized"
    report = compare_with_transformers(tmp_path / "fp8", [ids[:1]])
    assert report.ok, report.table()


def test_several_schemes_name_their_layers_for_every_place_that_readers_have_them_in(tmp_path: Path, seed: int):
    source = VARIANTS["qwen3_5"].checkpoint(tmp_path / "source", seed=seed)
    ours = build(source, torch.bfloat16)
    rules = [Rule(SCHEMES["w4a16_g32"], r".*layers\.0\.mlp\.down_proj")]
    export_model(ours, quantized(ours, "fp8_static", rules), source, tmp_path / "mixed")
    config = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]

    def matches(entries: list[str], name: str) -> bool:
        return any(re.match(entry.removeprefix("re:"), name) for entry in entries)

    fp8, int4 = (group["targets"] for group in config["config_groups"].values())
    for text in ("model.language_model", "language_model.model"):  # transformers, vLLM
        assert matches(int4, f"{text}.layers.0.mlp.down_proj") and not matches(fp8, f"{text}.layers.0.mlp.down_proj")
        assert matches(fp8, f"{text}.layers.1.mlp.down_proj") and not matches(int4, f"{text}.layers.1.mlp.down_proj")
        assert not matches(config["ignore"], f"{text}.layers.1.mlp.down_proj")
    for tower in ("model.visual", "visual"):
        assert matches(config["ignore"], f"{tower}.blocks.0.attn.qkv")
    report = compare_with_transformers(tmp_path / "mixed", [torch.arange(10, 40)[None]])
    assert report.ok, report.table()


def test_a_tower_that_an_export_lost_is_found_by_verify(tmp_path: Path, seed: int):
    source = VARIANTS["qwen3_5"].checkpoint(tmp_path / "source", seed=seed)
    ours = build(source, torch.bfloat16)
    export_model(ours, quantized(ours, "w4a16_g32"), source, tmp_path / "export")
    disk = load_file(tmp_path / "export" / "model.safetensors")
    save_file(
        {key: value for key, value in disk.items() if not key.startswith("model.visual.blocks.1.")},
        tmp_path / "export" / "model.safetensors",
        metadata={"format": "pt"},
    )
    report = compare_with_transformers(tmp_path / "export", [torch.arange(10, 40)[None]])
    assert any("missing_keys: model.visual.blocks.1" in problem for problem in report.problems), report.table()


def test_a_source_that_lacks_a_tower_is_refused_before_anything_is_written(tmp_path: Path, seed: int):
    source = VARIANTS["llava"].checkpoint(tmp_path / "source", seed=seed)
    disk = load_file(source / "model.safetensors")
    save_file(
        {key: value for key, value in disk.items() if "multi_modal_projector" not in key}, source / "model.safetensors"
    )
    ours = build(source, torch.bfloat16)
    with pytest.raises(RankError, match=r"names LlavaForConditionalGeneration.*missing: model\.multi_modal_projector"):
        export_model(ours, None, source, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_heads_for_speculative_decoding_are_passed_through_and_ignored(tmp_path: Path, seed: int):
    source = VARIANTS["qwen3_5"].checkpoint(tmp_path / "source", seed=seed)
    disk = load_file(source / "model.safetensors")
    heads = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.layers.0.mlp.up_proj.weight": torch.randn(96, 64)}
    save_file(disk | heads, source / "model.safetensors")
    ours = build(source, torch.bfloat16)
    report = export_model(ours, quantized(ours, "w4a16_g32"), source, tmp_path / "export")
    assert set(report.copied) == {"model.visual", "mtp"}
    after = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(after[key], value) for key, value in heads.items())
    ignore = json.loads((tmp_path / "export" / "config.json").read_text())["quantization_config"]["ignore"]
    assert any(re.match(entry.removeprefix("re:"), "mtp.layers.0.mlp.up_proj") for entry in ignore)


def test_a_tower_says_its_name_to_a_forward_that_needs_it():
    tower = Tower("model.embed_vision", "Gemma3nMultimodalEmbedder")
    with pytest.raises(AttributeError, match=r"reads \.vocab_offset of model\.embed_vision \(Gemma3n"):
        _ = tower.vocab_offset
    with pytest.raises(RuntimeError, match=r"calls model\.embed_vision \(Gemma3nMultimodalEmbedder\)"):
        tower(torch.zeros(1))


def test_every_composite_family_of_the_zoo_has_its_towers_taken_out(tmp_path: Path, seed: int):
    refused = {"llama4"}  # for its experts
    for variant in COMPOSITE:
        if variant.name not in refused:
            variant.model(seed=seed).config.save_pretrained(tmp_path)
            model = build_model(tmp_path, {}, dtype=torch.float32, device=CPU, attn_implementation="eager")
            assert left_out(model), variant.name
