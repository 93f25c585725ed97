"""Composite checkpoints: which part is trained, and that an export contains the rest."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from model.families import Tower, left_out, text_part
from model.ranks import RankError
from model.save.export_model import export_model
from quant import SCHEMES
from quant.rules import Rule
from tests.families.variants import COMPOSITE, VARIANTS
from tests.lib.checkpoints import assert_same_tensors, build, edit_checkpoint, load_model, quantize, read_tensors
from tools.verify.check import compare_with_transformers

# Those whose experts or lm_head are not supported yet have tests of their own.
KINDS = ["qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4", "mistral3", "llava", "llava_next"]


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return load_model(path, dtype, attn_implementation="eager").eval()


def class_of(directory: Path) -> type[PreTrainedModel]:
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    return getattr(transformers, name)


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def matches(entries: list[str], name: str) -> bool:
    return any(re.match(entry.removeprefix("re:"), name) for entry in entries)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_composite_model_is_trained_and_the_rest_passed_through(kind: str, tmp_path: Path, seed: int):
    source = VARIANTS[kind].checkpoint(tmp_path / "source", seed=seed, dtype=torch.float32)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = class_of(source).from_pretrained(source, **options).eval()
    ours = load(source, torch.float32)
    assert type(ours) is type(theirs) and text_part(ours) and left_out(ours)
    towers = tuple(left_out(ours))
    assert not any(name.startswith(towers) for name, _ in ours.named_parameters())
    ids = torch.randint(10, 300, (2, 17))
    positions = torch.arange(17).expand(2, 17)  # which training gives, for it packs
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        result = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    # Gate and up of experts are two products in one and one in the other.
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)

    source = VARIANTS[kind].checkpoint(tmp_path / "bf16", seed=seed)
    ours = load(source)
    export_model(ours, None, source, tmp_path / "plain")
    assert_same_tensors(tmp_path / "plain", source)

    quantization = quantize(ours, "fp8_static", learn=False, input_scale=0.02)
    assert not any(name.startswith(towers) for name in quantization.layers)
    export_model(ours, quantization, source, tmp_path / "fp8")
    before, after = read_tensors(source), read_tensors(tmp_path / "fp8")
    # Keys that no parameter of the text model has, found by the names in the files alone.
    kept = [key for key in before if {part.rpartition(".")[2] for part in towers} & set(key.split("."))]
    assert kept and all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in kept)
    model, info = class_of(tmp_path / "fp8").from_pretrained(tmp_path / "fp8", output_loading_info=True)
    # transformers dequantizes experts, and has no use for the scales of their inputs.
    assert not [key for keys in info.values() for key in keys if not re.search(r"experts.*input_scale$", str(key))]
    names = [name for name, _ in model.named_parameters() if name.startswith(towers)]
    assert names and not any("scale" in name.rpartition(".")[2] for name in names), "a tower was quantized"
    report = compare_with_transformers(tmp_path / "fp8", [ids[:1]])
    assert report.ok, report.table()


def test_several_schemes_name_their_layers_for_every_place_that_readers_have_them_in(tmp_path: Path, seed: int):
    source = VARIANTS["qwen3_5"].checkpoint(tmp_path / "source", seed=seed)
    ours = load(source)
    rules = [Rule(SCHEMES["w4a16_g32"], r".*layers\.0\.mlp\.down_proj")]
    quantization = quantize(ours, "fp8_static", rules=rules, learn=False, input_scale=0.02)
    export_model(ours, quantization, source, tmp_path / "mixed")
    config = config_of(tmp_path / "mixed")
    fp8, int4 = (group["targets"] for group in config["config_groups"].values())
    for text in ("model.language_model", "language_model.model"):  # transformers, vLLM
        assert matches(int4, f"{text}.layers.0.mlp.down_proj") and not matches(fp8, f"{text}.layers.0.mlp.down_proj")
        assert matches(fp8, f"{text}.layers.1.mlp.down_proj") and not matches(int4, f"{text}.layers.1.mlp.down_proj")
        assert not matches(config["ignore"], f"{text}.layers.1.mlp.down_proj")
    for tower in ("model.visual", "visual"):
        assert matches(config["ignore"], f"{tower}.blocks.0.attn.qkv")
    report = compare_with_transformers(tmp_path / "mixed", [torch.arange(10, 40)[None]])
    assert report.ok, report.table()


def test_heads_for_speculative_decoding_are_passed_through_and_a_lost_tower_is_found(tmp_path: Path, seed: int):
    source, export = VARIANTS["qwen3_5"].checkpoint(tmp_path / "source", seed=seed), tmp_path / "export"
    heads = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.layers.0.mlp.up_proj.weight": torch.randn(96, 64)}
    edit_checkpoint(source, lambda tensors: tensors.update(heads))
    ours = load(source)
    report = export_model(ours, quantize(ours, "w4a16_g32", learn=False), source, export)
    assert set(report.copied) == {"model.visual", "mtp"}
    after = read_tensors(export)
    assert all(torch.equal(after[key], value) for key, value in heads.items())
    assert matches(config_of(export)["ignore"], "mtp.layers.0.mlp.up_proj")
    edit_checkpoint(export, lambda t: [t.pop(key) for key in list(t) if key.startswith("model.visual.blocks.1.")])
    report = compare_with_transformers(export, [torch.arange(10, 40)[None]])
    assert any("missing_keys: model.visual.blocks.1" in problem for problem in report.problems), report.table()


def test_a_source_that_lacks_a_tower_is_refused_before_anything_is_written(tmp_path: Path, seed: int):
    source = VARIANTS["llava"].checkpoint(tmp_path / "source", seed=seed)
    edit_checkpoint(source, lambda t: [t.pop(key) for key in list(t) if "multi_modal_projector" in key])
    ours = load(source)
    with pytest.raises(RankError, match=r"names LlavaForConditionalGeneration.*missing: model\.multi_modal_projector"):
        export_model(ours, None, source, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_tower_says_its_name_to_a_forward_that_needs_it():
    tower = Tower("model.embed_vision", "Gemma3nMultimodalEmbedder")
    with pytest.raises(AttributeError, match=r"reads \.vocab_offset of model\.embed_vision \(Gemma3n"):
        _ = tower.vocab_offset
    with pytest.raises(RuntimeError, match=r"calls model\.embed_vision \(Gemma3nMultimodalEmbedder\)"):
        tower(torch.zeros(1))


def test_every_composite_family_of_the_zoo_has_its_towers_taken_out(tmp_path: Path, seed: int):
    for variant in COMPOSITE:
        if variant.name != "llama4":  # refused for its experts
            variant.model(seed=seed).config.save_pretrained(tmp_path)
            assert left_out(build(tmp_path, torch.float32, attn_implementation="eager")), variant.name
