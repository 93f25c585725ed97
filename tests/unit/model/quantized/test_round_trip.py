"""Quantized checkpoints: codes that stay codes in memory, or are of other schemes than the model has."""

import json
import random
from pathlib import Path

import pytest
import torch

from engine.config.errors import RecipeError
from engine.config.quant import QuantRecipe
from engine.config.reading import resolve_source
from engine.session_export import check_export, layout_of
from model.checkpoint.safetensors import read_headers
from model.quantized.checkpoint import source_schemes
from model.quantized.quantization_config import check_readable, is_quantized
from model.quantized.scales import take_scales
from model.ranks import RankError
from model.save.export_model import check_plan, export_model
from model.scales.loading import load_scales
from quant import SCHEMES
from quant.formats.modelopt import ALGORITHMS, DYNAMIC
from quant.spec import PRESETS, Preset
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import (
    assert_same_tensors,
    edit_checkpoint,
    edit_json,
    hold_packed,
    load_model,
    load_quantized,
    quantize,
    read_tensors,
)
from tests.lib.published import deepseek, gpt_oss, gptq_checkpoint, modelopt, modelopt_checkpoint
from tests.lib.recipes import bare_recipe as recipe
from tests.lib.tiny import tiny_checkpoint

Q, OUT, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj"


def exported(directory: Path, scheme: str, kind: str = "qwen3", **options) -> Path:
    """An export of random weights, in several files."""
    source = tiny_checkpoint(directory / "source", kind, seed=random.randrange(2**31), wide=True)
    model = load_model(source)
    export_model(model, quantize(model, scheme), source, directory / "export", max_shard_size=200_000, **options)
    return directory / "export"


def test_layers_in_other_schemes_keep_the_weights_and_are_measured(tmp_path):
    """fp8 to int4: the weights are the codes times the scales, the scales are those of the weights."""
    export = exported(tmp_path, "fp8_static")
    model = load_model(export)
    report = take_scales(model, quantize(model, "w4a16_channel", measure=False), export, inputs_calibrated_later=True)
    assert not report.weights_loaded and not report.inputs_loaded
    tensors = read_tensors(export)
    expected = (tensors[f"{UP}.weight"].float() * tensors[f"{UP}.weight_scale"]).bfloat16()
    assert torch.equal(model.get_submodule(UP).weight, expected)


def test_what_is_not_quantized_stays_so_and_what_shares_a_scale_is_said(tmp_path):
    """Another writer's file: one layer plain, the scales of q, k and v each their own."""
    export = exported(tmp_path, "fp8_static")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if f"{OUT}.weight" in tensors:
            tensors[f"{OUT}.weight"] = tensors[f"{OUT}.weight"].bfloat16()
            del tensors[f"{OUT}.weight_scale"], tensors[f"{OUT}.input_scale"]
        if f"{Q}.weight_scale" in tensors:
            tensors[f"{Q}.weight_scale"] *= 2

    edit_checkpoint(export, edit)
    _, quantization, report = load_quantized(export)
    assert OUT not in quantization.layers and Q in quantization.layers
    assert report.merged == [Q] and f"their codes are computed again ({Q})" in report.summary()
    assert "model.layers.0.mlp.gate_proj" in report.weights_loaded


def test_layers_whose_inputs_do_not_fill_groups_are_left_and_said(tmp_path, capsys):
    """o_proj stays unquantized: groups of 128 do not divide its inputs. kv_a_proj_with_mqa, whose last block of
    rows is smaller, is quantized."""
    path = deepseek(tmp_path, 0, v_head_dim=56)
    _, quantization, report = load_quantized(path)
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in quantization.layers and not report.weights_measured
    assert not any(name.endswith("o_proj") for name in quantization.layers)
    left = "model.layers.0.self_attn.o_proj, model.layers.1.self_attn.o_proj"
    assert f"not quantized, as groups do not divide their sizes: {left}" in capsys.readouterr().out


def test_scales_that_the_models_dtype_rounds_are_said(tmp_path):
    export = exported(tmp_path, "w4a16_channel")
    edit_checkpoint(export, lambda t: t.update({key: t[key].half() for key in t if key.endswith("weight_scale")}))
    _, _, report = load_quantized(export)
    assert not report.weights_measured
    assert "those of the files are torch.float16, and are rounded" in report.summary()


def test_a_tensor_beside_the_codes_that_is_not_known_is_named(tmp_path):
    export = exported(tmp_path, "w4a16_channel")
    unknown = {f"{UP}.pre_quant_scale": torch.ones(48)}
    edit_checkpoint(export, lambda tensors: tensors.update(unknown if f"{UP}.weight_packed" in tensors else {}))
    with pytest.raises(RankError, match=rf"unexpected: {UP}\.pre_quant_scale$"):
        load_quantized(export)


def test_the_scheme_source_is_written_into_the_recipe(tmp_path):
    """So that a run's own recipe says what it did; and of a plain checkpoint there is none."""
    model = {"path": str(exported(tmp_path, "fp8_static"))}
    found = recipe(tmp_path, quant={"scheme": "source"}, model=model).quant
    assert found.default_scheme() is None and found.stores_input_scales()
    (scheme,) = found.linear_schemes()
    assert (scheme.weights, scheme.activations) == (SCHEMES["fp8_static"].weights, SCHEMES["fp8_static"].activations)
    rules = {"rules": [{"scheme": "none", "first": 1}]}
    for more, message in (
        (rules, r"quant\.rules: .*, expected \[\] with quant\.scheme source"),
        ({"fake_quant_start": 3}, r"quant\.fake_quant_start: 3, expected 0: with quant\.scheme source"),
    ):
        with pytest.raises(RecipeError, match=message):
            recipe(tmp_path, quant={"scheme": "source", **more}, model=model)
    with pytest.raises(RecipeError, match=r"has no quantization_config.* \(quant\.scheme source takes"):
        recipe(tmp_path, quant={"scheme": "source"})
    file = Path(model["path"]) / "config.json"
    file.write_text(file.read_text().replace('"float-quantized"', '"float-quantised"'))
    with pytest.raises(RecipeError, match=rf"{file}: quantization_config: .*float-quantised"):
        recipe(tmp_path, quant={"scheme": "source"}, model=model)


FORMATS = {
    "mxfp4 of gpt-oss": lambda path: gpt_oss(path, random.randrange(2**31)),
    "fp8 of ModelOpt": lambda path: modelopt(path, "fp8_static", inside=True)[1],
    "fp8 of vLLM": lambda path: exported(path, "fp8_static", "qwen3_moe", layout="vllm_fp8"),
    "blocks of DeepSeek": lambda path: exported(path, "fp8_block", "qwen3_moe", layout="vllm_fp8"),
    "NVFP4 of ModelOpt": lambda path: modelopt_checkpoint(path, "qwen3_moe", lambda _: "W4A16_NVFP4"),
    "W4A8 of ModelOpt": lambda path: modelopt_checkpoint(path, "qwen3_moe", lambda _: "W4A8_MXFP4_FP8"),
    "blocks that are not full": lambda path: deepseek(path, random.randrange(2**31)),
    "GPTQ": lambda path: gptq_checkpoint(path)[0],  # transposed, with zero points
}


@pytest.mark.parametrize(
    ("kind", "experts", "dtype"),
    [
        *((kind, experts, torch.bfloat16) for kind in [*FORMATS][:-1] for experts in ("stacked", "per_expert")),
        ("GPTQ", "stacked", torch.float16),
        ("GPTQ", "stacked", torch.float32),
    ],
)
def test_packed_weights_are_those_that_are_decoded(tmp_path, kind, experts, dtype):
    """Every layer's weight and output, bit for bit, also of a stack of experts."""
    source = FORMATS[kind](tmp_path)
    plain, packed = (
        load_quantized(source, dtype, learn=False, hold=hold, experts=experts)[1]
        for hold in (None, hold_packed(source))
    )
    assert plain.layers.keys() == packed.layers.keys()
    for name, layer in packed.layers.items():
        own = plain.layers[name]
        assert layer.held is not None and layer.weight.nbytes < own.weight.nbytes, name
        assert torch.equal(own.weight, layer.merged_weight()), name
        assert torch.equal(own.quantized_weight(), layer.quantized_weight()), name
        rows = torch.randn(4, layer.in_features, dtype=layer.weight.dtype)
        many = layer.num_experts
        offsets = torch.arange(4 - many + 1, 5, dtype=torch.int32).clamp(min=0) if many else None
        with torch.no_grad():
            assert torch.equal(own(rows, offsets), layer(rows, offsets)), name


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("fp8 of vLLM", "vllm_fp8"),
        ("mxfp4 of gpt-oss", "gpt_oss"),
        ("NVFP4 of ModelOpt", "modelopt"),
        ("compressed", "compressed"),
        ("GPTQ", None),
    ],
)
def test_a_run_from_a_checkpoint_writes_its_format_unless_it_says_another(tmp_path, kind, layout):
    """If that format can be written. Otherwise it is refused where the recipe asks for it."""
    path = FORMATS.get(kind, lambda path: exported(path, "w4a16_g32"))(tmp_path)
    same = {"model": {"path": str(path)}, "quant": {"scheme": "source"}}
    found = recipe(tmp_path, **same)
    assert layout_of(found) == (layout or "compressed")
    assert found.export.format == ("compressed" if layout is None else "source")
    assert recipe(tmp_path, **same, export={"format": "dequantized"}).export.format == "dequantized"
    never = {**same, "quant": {"scheme": "source", "fake_quant_start": -1}}
    assert recipe(tmp_path, **never).export.format == "compressed"  # a plain checkpoint
    asked = recipe(tmp_path, **same, export={"format": "source"})
    if layout is not None:
        check_export(asked)
        return
    with pytest.raises(RecipeError, match=r"^export\.format: 'source', .*gptq has quant_method 'gptq', which is not"):
        check_export(asked)


def test_the_format_of_a_checkpoint_that_is_not_quantized_is_refused(tmp_path):
    asked = recipe(tmp_path, export={"format": "source"})
    with pytest.raises(RecipeError, match=r"^export\.format: 'source', .*config\.json has no quantization_config"):
        check_export(asked)


def with_caches(directory: Path):
    model, preset = load_model(directory), PRESETS["fp8_static_kv"]
    return model, quantize(model, preset.linear, kv_cache=preset.kv_cache, measure=False)


@pytest.mark.parametrize("inside", [False, True])
def test_modelopts_fp8_with_keys_and_values_comes_back(tmp_path, inside):
    """As our own export, bit for bit, scales of inputs, keys and values too."""
    export, theirs = modelopt(tmp_path, "fp8_static_kv", inside=inside)
    assert is_quantized(theirs)
    check_readable(theirs)
    model, quantization = with_caches(theirs)
    report = take_scales(model, quantization, theirs)
    assert not report.inputs_missing and not report.weights_measured and not report.merged
    export_model(model, quantization, theirs, tmp_path / "again")
    assert_same_tensors(tmp_path / "again", export)
    assert (tmp_path / "again" / "config.json").read_text() == (export / "config.json").read_text()
    with pytest.raises(RecipeError, match=r"\(or kv_cache_quant_algo\) is set, which 'source' does"):
        resolve_source(QuantRecipe(scheme="source"), str(theirs))


def test_vllms_fp8_with_keys_and_values_comes_back(tmp_path):
    """Its quantization_config names no format of keys and values."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3", seed=random.randrange(2**31), wide=True)
    model, quantization = with_caches(source)
    for group in [*quantization.weight_groups, *quantization.input_groups]:
        group.s0.data.uniform_(0.01, 0.1)
    export_model(model, quantization, source, tmp_path / "export", layout="vllm_fp8")
    model, quantization = with_caches(tmp_path / "export")
    report = take_scales(model, quantization, tmp_path / "export")
    assert not report.inputs_missing and not report.weights_measured
    export_model(model, quantization, tmp_path / "export", tmp_path / "again", layout="vllm_fp8")
    assert_same_tensors(tmp_path / "again", tmp_path / "export")


def test_another_format_keeps_no_configuration_of_the_source(tmp_path):
    """Wherever a composite model has it; the format of the source keeps it there."""
    source = VARIANTS["qwen3_5"].checkpoint(tmp_path / "source", seed=random.randrange(2**31))
    model = load_model(source)
    export_model(model, quantize(model, "w4a16_g32"), source, tmp_path / "export")

    def move(config: dict) -> None:
        config["text_config"]["quantization_config"] = config.pop("quantization_config")

    edit_json(tmp_path / "export" / "config.json", move)
    model, quantization, _ = load_quantized(tmp_path / "export")
    for layout, kept in (("dequantized", False), ("compressed", True)):
        export_model(model, quantization, tmp_path / "export", tmp_path / layout, layout=layout)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        assert "quantization_config" not in config
        assert ("quantization_config" in config["text_config"]) == kept


LINEAR = {"weight_scale": ("F32", []), "input_scale": ("F32", [])}
NVFP4 = {"weight": ("U8", [256, 64]), "weight_scale": ("F8_E4M3", [256, 8]), "weight_scale_2": ("F32", [])}
MXFP4 = {"weight": ("U8", [256, 64]), "weight_scale": ("U8", [256, 4])}
# Tensors of up_proj, [256, 128], as vLLM's modelopt.py registers them; those of MXFP4 as ModelOpt writes them.
MODELOPT = {
    "fp8_static_kv": {"weight": ("F8_E4M3", [256, 128]), **LINEAR},
    "fp8_dynamic": {"weight": ("F8_E4M3", [256, 128]), "weight_scale": ("F32", [256])},
    "nvfp4": NVFP4,
    "nvfp4_w4a4_kv": {**NVFP4, "input_scale": ("F32", [])},
    "FP8_PB_WO": {"weight": ("F8_E4M3", [256, 128]), "weight_scale": ("F32", [2, 1, 1, 1])},
    "W4A8_MXFP4_FP8": {**MXFP4, "input_scale": ("F32", [])},
    "W4A8_MXFP4_FP8_DYNAMIC": MXFP4,
}


@pytest.mark.parametrize("scheme", MODELOPT)
def test_what_is_written_as_modelopt_does_is_read_and_written_again(tmp_path, scheme, seed):
    """Byte for byte, with both configurations; scales from such an export pass for the weights, too."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3", seed=random.randrange(2**31), wide=True)
    others = ALGORITHMS | {one.name: one for one in DYNAMIC.values()}
    preset = PRESETS.get(scheme) or Preset(others[scheme])
    model = load_model(source)
    quantization = quantize(model, preset.linear, kv_cache=preset.kv_cache)
    export_model(model, quantization, source, tmp_path / "export", layout="modelopt")
    tensors = read_headers(tmp_path / "export").tensors
    found = {key: (one.kind, list(one.shape)) for key, one in tensors.items() if key.startswith(f"{UP}.")}
    assert found == {f"{UP}.{suffix}": expected for suffix, expected in MODELOPT[scheme].items()}
    caches = [key for key in tensors if key.endswith("v_proj.v_scale") and tensors[key].shape == ()]
    assert len(caches) == (2 if preset.kv_cache else 0)

    again = load_model(tmp_path / "export")
    named = source_schemes(again, tmp_path / "export")
    read = quantize(again, measure=False, named=named, kv_cache=preset.kv_cache)
    report = take_scales(again, read, tmp_path / "export")
    assert not report.weights_measured and not report.inputs_missing and not report.merged
    export_model(again, read, tmp_path / "export", tmp_path / "again", layout="modelopt")
    for name in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "export" / name).read_bytes(), name
    load_scales(model, quantization, tmp_path / "export")


@pytest.mark.parametrize("calibrated", [True, False])
def test_modelopts_w4a8_comes_back_with_or_without_scales_of_inputs(tmp_path, calibrated):
    """Byte for byte, with its zeros, which have the code of -0, and a group of zeros, whose scale is 2^-127."""
    path = modelopt_checkpoint(tmp_path, "qwen3", lambda _: "W4A8_MXFP4_FP8", input_scale=calibrated)

    def clear(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.weight"][0, :16] = 0x88
        tensors[f"{UP}.weight_scale"][0, 0] = 0

    edit_checkpoint(path, clear)
    model, quantization, report = load_quantized(path)
    assert report.weights_loaded and not report.weights_measured and not report.inputs_missing
    assert not model.get_submodule(UP).weight[0, :32].any()
    assert {layer.scheme.stored_input is not None for layer in quantization.layers.values()} == {calibrated}
    export_model(model, quantization, path, tmp_path / "again", layout="modelopt")
    for name in ("model.safetensors", "config.json", "hf_quant_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes(), name


@pytest.mark.parametrize("read", [take_scales, load_scales])
def test_of_scales_per_head_the_largest_is_taken(tmp_path, seed, read):
    """And a line says so; those of another number of heads are an error."""
    _, theirs = modelopt(tmp_path, "fp8_static_kv", inside=False)
    key = "model.layers.1.self_attn.k_proj.k_scale"
    edit_checkpoint(theirs, lambda tensors: tensors.update({key: torch.tensor([0.01, 0.04, 0.02, 0.03]).view(4, 1, 1)}))
    model, quantization = with_caches(theirs)
    report = read(model, quantization, theirs)
    assert report.per_head == [key]
    assert "1 of keys and values have one for each head in the files, of which the largest is" in report.summary()
    assert quantization.caches["model.layers.1.self_attn.k_cache"].input_scale().item() == torch.tensor(0.04).item()

    edit_checkpoint(theirs, lambda tensors: tensors.update({key: torch.ones(3)}))
    model, quantization = with_caches(theirs)
    with pytest.raises(RankError, match=rf"{key} has shape \(3,\), expected \(1,\) for the layer's scheme"):
        read(model, quantization, theirs)


def test_a_file_of_modelopt_that_says_nothing_is_named(tmp_path):
    for name in ("config.json", "hf_quant_config.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"hf_quant_config.json has no object 'quantization', in which ModelOpt"):
        check_readable(tmp_path)


@pytest.mark.parametrize("theirs", [True, False])
def test_several_input_scales_come_back_unless_the_one_in_their_place_changed(tmp_path, theirs):
    """q, k and v, and experts, each have an input scale of their own in the file (compressed-tensors, fp8)."""
    export = exported(tmp_path, "fp8_static", "qwen3_moe")
    edit_checkpoint(
        export,
        lambda t: t.update({key: t[key] * (1 + torch.rand(1)) for key in t if key.endswith("input_scale")}),
    )
    model, quantization, _ = load_quantized(export)
    read, largest = read_tensors(export), {group.owner: group.s0.item() for group in quantization.input_groups}
    if not theirs:
        for group in quantization.input_groups:
            group.s0.data *= 2
    export_model(model, quantization, export, tmp_path / "again")
    found = read_tensors(tmp_path / "again")
    keys = [key for key in found if key.endswith("input_scale")]
    assert keys and all(torch.equal(found[key], read[key]) == theirs for key in keys)
    if not theirs:
        assert {one.item() for one in map(found.get, keys)} == {2 * one for one in largest.values()}


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_weight_that_an_export_has_twice_is_one_again_if_config_json_says_so(tmp_path, tied):
    """lm_head and embeddings with the same codes and scales; both ways give the same files again."""
    source, export = tiny_checkpoint(tmp_path / "source", tied=True, wide=True), tmp_path / "export"
    model = load_model(source)
    named = dict.fromkeys(("model.embed_tokens", "lm_head"), SCHEMES["w8a16_g32"])
    export_model(model, quantize(model, named=named), source, export)
    config = (export / "config.json").read_bytes()
    edit_json(export / "config.json", tie_word_embeddings=tied)
    model, quantization, report = load_quantized(export)
    assert quantization.ties_layers == tied and not report.weights_measured
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    export_model(model, quantization, export, tmp_path / "again")
    assert_same_tensors(tmp_path / "again", export)
    assert (tmp_path / "again" / "config.json").read_bytes() == config


@pytest.mark.parametrize("theirs", [True, False])
def test_a_routing_bias_keeps_the_dtype_of_the_source_unless_it_changed(tmp_path, theirs):
    """The model computes with it in fp32, while some checkpoints of DeepSeek-V3's architecture store it in bf16."""
    path, key = deepseek(tmp_path, random.randrange(2**31)), "model.layers.1.mlp.gate.e_score_correction_bias"

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = torch.randn(tensors[key].shape).bfloat16()

    edit_checkpoint(path, shorten)
    model, quantization, _ = load_quantized(path)
    bias = model.get_buffer(key)
    assert bias.dtype == torch.float32
    if not theirs:
        bias += 2**-20
    export_model(model, quantization, path, tmp_path / "again", layout="vllm_fp8")
    read, found = read_tensors(path), read_tensors(tmp_path / "again")
    assert found[key].dtype == (torch.bfloat16 if theirs else torch.float32)
    assert torch.equal(found.pop(key), bias.to(torch.bfloat16 if theirs else torch.float32))
    del read[key]
    assert read.keys() == found.keys()
    assert all(torch.equal(read[one], found[one]) and read[one].dtype == found[one].dtype for one in read)
    if theirs:
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("rounds", [True, False])
def test_scales_that_readers_would_round_are_not_asked_to_be(tmp_path, capsys, rounds):
    """DeepSeek-V3.1 says scale_fmt ue8m0. Readers then round scales of inputs, and scales that training has moved."""
    path = deepseek(tmp_path, random.randrange(2**31))
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    if rounds:
        edit_json(path / "config.json", quantization_config={**config, "scale_fmt": "ue8m0"})
    model, quantization, _ = load_quantized(path)
    check_plan(model, quantization, path, layout="vllm_fp8")
    assert ("scale_fmt: ue8m0" in capsys.readouterr().out) == rounds
    export_model(model, quantization, path, tmp_path / "again", layout="vllm_fp8")
    written = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert written == config  # all but scale_fmt
    assert_same_tensors(tmp_path / "again", path)


@pytest.mark.parametrize("scheme", ["fp8_dynamic", "fp8_static", "w4a16_asym", "mxfp4_w4a4", "nvfp4_w4a4"])
def test_tensors_that_an_export_would_lack_or_training_rounds_are_named(tmp_path, capsys, scheme):
    """A run names an input scale that the scheme does not use, and a norm in fp32; it names nothing of our exports."""
    source, export = tiny_checkpoint(tmp_path / "source", wide=True), tmp_path / "export"
    model = load_model(source)
    export_model(model, quantize(model, scheme), source, export)
    model, quantization, _ = load_quantized(export)
    check_plan(model, quantization, export)
    assert "has" not in capsys.readouterr().out
    if scheme == "fp8_dynamic":
        norm = "model.norm.weight"
        edit_checkpoint(export, lambda tensors: tensors.update({f"{UP}.input_scale": torch.ones(1)}))
        edit_checkpoint(export, lambda tensors: tensors.update({norm: tensors[norm].float()}))
        model, quantization, _ = load_quantized(export)
        check_plan(model, quantization, export)
        said = capsys.readouterr().out
        assert f"warning: {export} has {UP}.input_scale, which its configuration" in said
        assert f"{export} has {norm} in a dtype that model.dtype rounds: the export will have the" in said
