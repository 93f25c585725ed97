"""GGUF files: what llama.cpp's own reader finds in them, and what is refused."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from model.ranks import RankError
from model.save.export_model import check_plan, export_model
from model.save.gguf_names import GGUFNames
from quant import Ranges, reference
from quant.formats.gguf import blocks
from quant.formats.layouts import check_layout, linear_shapes
from quant.linear import linears_of
from quant.rules import Rule
from quant.spec import PRESETS, SCHEMES
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_json, load_model, quantize, read_tensors
from tests.lib.gguf_files import gguf_template, leaf_of, rotated, tiled
from tests.lib.gguf_files import tensors as tensors_of
from tests.lib.tiny import tiny_checkpoint
from tools.verify.check import OUR_FORWARD_KL
from tools.verify.comparison import Report, compare_with_compressed
from tools.verify.engines import GGUF, engine_logits, in_blocks, installed, rounded_inputs

gguf = pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")

Q4, Q8 = SCHEMES["w4a16_g32"], SCHEMES["w8a16_g32"]


def quantized(directory: Path, kind: str = "qwen3", scheme=Q4, **options):
    """A tiny model with measured, signed scales, and the checkpoint that it is of."""
    source = directory / "source"
    if not source.is_dir():
        tiny_checkpoint(source, kind, wide=True, tied=kind == "qwen3")
    model = load_model(source).eval()
    ranges = Ranges("absmax", not scheme.weights.mx)
    return source, model, quantize(model, scheme, learn=False, ranges=ranges, **options)


def written(directory: Path, source: Path, model, quantization) -> Path:
    """Export with the template of the model itself."""
    options = {"layout": "gguf", "template": gguf_template(source, directory / "base.gguf")}
    if quantization is not None:
        check_plan(model, quantization, source, **options)
    assert export_model(model, quantization, source, directory / "out", **options).files == ["model.gguf"]
    return directory / "out" / "model.gguf"


def compared(directory: Path) -> Report:
    return compare_with_compressed(GGUF(directory / "out"), directory / "compressed", ())


def read(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a GGUF file in fp32, as the package gguf dequantizes it."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(
            *map(int, reversed(tensor.shape))
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def divergences(file: Path, model) -> torch.Tensor:
    """Compute the KL divergence of each token's logits in llama.cpp from those of the model with inputs rounded as
    llama.cpp rounds them."""
    ids = torch.randint(7, 300, (1, 96), generator=torch.Generator().manual_seed(1))
    theirs = next(engine_logits(file, [ids]))
    engine = GGUF(file.parent)
    engine.model = model.float()
    with torch.no_grad(), rounded_inputs(model, torch.bfloat16, engine.exact_inputs()):
        ours = model(ids).logits
    return (ours.softmax(-1) * (ours.log_softmax(-1) - theirs.log_softmax(-1))).sum(-1)


def assert_logits_near(file: Path, model) -> None:
    assert divergences(file, model).mean() < OUR_FORWARD_KL


@torch.no_grad()
def forward_weights(model, quantization) -> dict[str, torch.Tensor]:
    """The weights of the last forward, by llama.cpp's names, in fp32 (a bf16 forward rounds them)."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, layer in quantization.layers.items():
        spec, scale = layer.scheme.weights, layer.weight_scale()
        for part in linears_of(name, layer):
            own = part.scale(scale, spec)
            codes = reference.quantize(part.weight(layer.weight), own, spec)
            weight = reference.dequantize(codes, own, spec, torch.float32)
            stem, _, leaf = part.name.rpartition(".")
            number = re.search(r"layers\.(\d+)\.", part.name)
            weight = rotated(model.config, leaf, weight)
            if ".linear_attn." in part.name:
                weight = tiled(model.config, leaf, weight)
            block = f"blk.{number[1]}." if number else ""
            halves = {"gate_proj": weight[0::2], "up_proj": weight[1::2]} if leaf == "gate_up_proj" else {leaf: weight}
            for one, half in halves.items():
                own = leaf_of(model.config, f"{stem}.{one}")[1] + ("" if part.expert is None else "_exps")
                if model.config.model_type == "gemma4_text":
                    own = re.sub("ffn_(gate|up)_exps", "ffn_gate_up_exps", own)
                found.setdefault(f"{block}{own}.weight", []).append(half)
    return {name: torch.stack(some) if "_exps" in name else some[0] for name, some in found.items()}


def test_a_tied_weight_is_one_tensor_where_the_reader_ties_it(tmp_path):
    """llama.cpp takes lm_head from the embeddings; a compressed checkpoint has both, from one weight and scale."""
    named = dict.fromkeys(("model.embed_tokens", "lm_head"), Q8)
    source, model, quantization = quantized(tmp_path, named=named)
    assert quantization.ties_layers and model.config.tie_word_embeddings
    weight, scale = model.lm_head.weight, model.lm_head.weight_scale()
    codes = reference.quantize(weight, scale, Q8.weights)
    found = {one.name: one for one in gguf.GGUFReader(written(tmp_path, source, model, quantization)).tensors}
    assert "output.weight" not in found and found["token_embd.weight"].tensor_type.name == "Q8_0"
    assert torch.equal(
        read(tmp_path / "out" / "model.gguf")["token_embd.weight"],
        reference.dequantize(codes, scale, Q8.weights, torch.float32),
    )
    export_model(model, quantization, source, tmp_path / "compressed")
    tensors = load_file(tmp_path / "compressed" / "model.safetensors")
    for suffix in ("weight_packed", "weight_scale"):
        assert torch.equal(tensors[f"lm_head.{suffix}"], tensors[f"model.embed_tokens.{suffix}"])
    assert json.loads((tmp_path / "compressed" / "config.json").read_text())["tie_word_embeddings"] is False
    assert compared(tmp_path).ok, compared(tmp_path).table()
    export_model(model, quantization, source, tmp_path / "plain", layout="dequantized")
    assert "lm_head.weight" not in load_file(tmp_path / "plain" / "model.safetensors")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_the_file_holds_the_weights_of_the_last_forward(tmp_path, kind):
    options = {"named": {"lm_head": Q8}} if kind == "llama" else {}
    source, model, quantization = quantized(tmp_path, kind, rules=[Rule(Q8, r".*\.o_proj")], **options)
    out = written(tmp_path, source, model, quantization)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base.gguf", "out", "source"]

    reader, base = gguf.GGUFReader(out), gguf.GGUFReader(tmp_path / "base.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    expected_kinds = {"attn_output": "Q8_0", "attn_v": "Q4_0"}
    expected_kinds |= {"ffn_gate_inp": "F32", "ffn_up_exps": "Q4_0"} if kind == "qwen3_moe" else {}
    expected_kinds = {f"blk.1.{name}.weight": found for name, found in expected_kinds.items()}
    expected_kinds |= {"token_embd.weight": "BF16", "output_norm.weight": "F32"}
    expected_kinds |= {"output.weight": "Q8_0"} if kind == "llama" else {}
    assert expected_kinds.items() <= kinds.items()
    assert {t.name: list(t.shape) for t in base.tensors} == {t.name: list(t.shape) for t in reader.tensors}
    for name, field in base.fields.items():  # the number of tensors is the same, too
        if name not in ("general.file_type", "GGUF.kv_count"):
            assert reader.fields[name].contents() == field.contents(), name
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0

    tensors, expected = read(out), forward_weights(model, quantization)
    assert len(expected) == sum(kind[0] == "Q" for kind in kinds.values())
    for name, weight in expected.items():
        assert torch.equal(tensors[name], weight), name
    state = model.state_dict()  # what is not quantized is as it was
    for name, own in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
    ):
        assert torch.equal(tensors[name], state[own].float())


FAMILIES = {"mistral": "q4_0", "mixtral": "mxfp4", "qwen2": "q8_0", "qwen3, yarn": "mxfp4", "gemma3_text": "q4_0"}
FAMILIES |= {"llama, rope of llama 3": "q4_0", "gpt_oss": "mxfp4", "lfm2": "q4_0", "gemma4_text": "q4_0"}
FAMILIES |= {"gemma4_text, keys are values": "q8_0", "gemma4_text, softcap": "q4_0"}
FAMILIES |= {"qwen3_5_text": "q4_0", "qwen3_5_moe_text": "q8_0", "lfm2_moe": "q4_0"}
FAMILIES |= {"gemma4_text, experts": "q4_0"}


@pytest.mark.parametrize(("kind", "scheme"), FAMILIES.items())
def test_other_families_are_written_as_llama_cpp_s_converter_writes_them(tmp_path, kind, scheme):
    names = ("head_dim", "linear_key_head_dim", "linear_value_head_dim")
    heads = dict.fromkeys(names, 32) if kind.startswith("qwen3_5") else {}
    replace(VARIANTS[kind], options={**VARIANTS[kind].options, **heads}).checkpoint(tmp_path / "source")
    if kind == "gpt_oss":  # as llama.cpp computes it
        rope = {"rope_theta": 1.5e5, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
        edit_json(tmp_path / "source" / "config.json", rope_parameters=rope | {"truncate": True})
    source, model, quantization = quantized(tmp_path, kind, SCHEMES[scheme])
    out = written(tmp_path, source, model, quantization)
    found, expected, weights = read(out), tensors_of(source), forward_weights(model, quantization)
    assert found.keys() == expected.keys() and len(weights) >= 12
    for name, tensor in found.items():
        assert torch.equal(tensor, weights.get(name, expected[name].float()).view_as(tensor)), name
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert {kinds[name] for name in weights} == {scheme.upper()}
    if installed():
        assert_logits_near(out, model)


@pytest.mark.skipif(not installed(), reason="make test-gguf")
def test_llama_cpp_rounds_the_inputs_of_experts_in_bf16(tmp_path):
    """Most tokens have our logits: the median of their divergence is 1e-9, and 2e-5 without this rounding. The mean
    depends on the few tokens for which last bits choose another expert."""
    tiny_checkpoint(tmp_path / "source", "qwen3_moe", wide=True, seed=2)
    source, model, quantization = quantized(tmp_path, "qwen3_moe", rules=[Rule(None, r".*\.experts\..*")])
    assert divergences(written(tmp_path, source, model, quantization), model).median() < 1e-5


@pytest.mark.skipif(not installed(), reason="make test-gguf")
def test_llama_cpp_does_not_round_the_inputs_of_weights_in_f32(tmp_path):
    """The gate of a shared expert is one row. Rounding its input changes the median from 1e-9 to 7e-6. Large weights
    leave out another difference: llama.cpp adds no epsilon to the norms of q and k in linear attention."""
    sizes = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32)
    variant = VARIANTS["qwen3_5_moe_text"]
    source = replace(variant, options={**variant.options, **sizes}).checkpoint(tmp_path / "source")
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.mul_(16 if re.search(r"shared_expert_gate|conv1d", name) else 1)
    plain.save_pretrained(source)
    source, model, quantization = quantized(tmp_path, "qwen3_5_moe_text", SCHEMES["q8_0"])
    assert divergences(written(tmp_path, source, model, quantization), model).median() < 1e-6


@pytest.mark.skipif(not installed(), reason="make test-gguf")
def test_llama_cpp_has_gelu_in_fp16(tmp_path):
    """The median is 1e-10, and 1e-4 with GELU in fp32."""
    VARIANTS["gemma3_text"].checkpoint(tmp_path / "source")
    source, model, quantization = quantized(tmp_path, "gemma3_text", SCHEMES["q4_0"])
    assert divergences(written(tmp_path, source, model, quantization), model).median() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_nvfp4_has_the_codes_and_scales_of_the_compressed_export(tmp_path, kind):
    source = tiny_checkpoint(tmp_path / "source", kind, wide=True)
    model = load_model(source).eval()
    named = {"lm_head": SCHEMES["nvfp4"]} if kind == "llama" else {}
    quantization = quantize(model, SCHEMES["nvfp4"], learn=False, ranges=Ranges("absmax"), named=named)
    out = written(tmp_path, source, model, quantization)
    export_model(model, quantization, source, tmp_path / "compressed")
    report = compared(tmp_path)
    assert report.ok and report.layers >= 14, report.table()
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    kept = read_tensors(tmp_path / "compressed")
    names, checked = GGUFNames(model.config), 0
    for key, packed in kept.items():
        if not key.endswith(".weight_packed"):
            continue
        stem = key.removesuffix("weight_packed")
        (place,) = names.places(f"{stem}weight")
        one, at = found[place.name], place.expert or 0
        data = torch.from_numpy((one.data if place.expert is None else one.data[at]).copy()).unflatten(1, (-1, 36))
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
        halves = data[..., 4:].unflatten(2, (4, 8))
        assert torch.equal(torch.cat([halves & 15, halves >> 4], -1).flatten(1), place.to_file(codes)), key
        scales = kept[f"{stem}weight_scale"].view(torch.uint8)
        assert torch.equal(data[..., :4].flatten(1), place.to_file(scales)), key
        scale = torch.from_numpy(found[place.name.replace(".weight", ".scale")].data.copy())[at]
        assert torch.equal(scale, 1 / kept[f"{stem}weight_global_scale"][0]), key
        checked += 1
    assert checked > 14
    if installed():
        assert_logits_near(out, model)
    # A scale of the tensor that differs by 2^-12 is another one.
    at = next(int(tensor.data_offset) for tensor in found.values() if tensor.name == "blk.1.attn_k.scale")
    bytes_ = bytearray(out.read_bytes())
    bytes_[at + 1] ^= 8
    out.write_bytes(bytes_)
    assert [line.split()[0] for line in compared(tmp_path).problems] == ["blk.1.attn_k.weight"]


def test_scales_of_nvfp4_in_experts_of_gemma_4_are_refused(tmp_path):
    """llama.cpp has another scale of each expert under their name."""
    variant = VARIANTS["gemma4_text, experts"]
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "hidden_size_per_layer_input"), 64)
    replace(variant, options={**variant.options, **sizes}).checkpoint(tmp_path / "source")
    source, model, quantization = quantized(tmp_path, "gemma4_text", SCHEMES["nvfp4"])
    template = gguf_template(source, tmp_path / "base.gguf")
    with pytest.raises(RankError, match=r"gemma4 cannot store model.layers.0.experts.0.gate_proj.scale, "):
        check_plan(model, quantization, source, layout="gguf", template=template)


def test_layers_with_a_part_of_an_nvfp4_block_are_refused():
    with pytest.raises(ValueError, match="in blocks of 64 weights, got a layer with 96 inputs: exempt such layers"):
        linear_shapes("gguf", 96, 32, SCHEMES["nvfp4"], torch.bfloat16)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4, experts", "qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_composite_one_is_written(tmp_path, kind):
    variant, own = VARIANTS[kind.removesuffix(", experts")], {"enable_moe_block": True} if "," in kind else {}
    if kind.startswith("qwen3_5"):
        own = dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32)
    parts = {**variant.parts, "text_config": {**variant.parts["text_config"], **own}}
    source = replace(variant, parts=parts).checkpoint(tmp_path / "source")
    text = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source).text_config)
    text.save_pretrained(tmp_path / "text")
    for file in source.glob("*token*"):
        shutil.copy(file, tmp_path / "text")
    template = gguf_template(tmp_path / "text", tmp_path / "base.gguf")
    model = load_model(source).eval()
    quantization = quantize(model, SCHEMES["q4_0"], learn=False, ranges=Ranges("absmax", True))
    options = {"layout": "gguf", "template": template}
    check_plan(model, quantization, source, **options)
    report = export_model(model, quantization, source, tmp_path / "out", **options)
    assert report.files == ["model.gguf"] and report.copied == []
    if kind.endswith("experts"):  # the compressed layout has none of Gemma 4
        return assert_logits_near(tmp_path / "out" / "model.gguf", model) if installed() else None
    export_model(model, quantization, source, tmp_path / "compressed")
    ids = torch.randint(7, 300, (1, 96), generator=torch.Generator().manual_seed(1))
    found = compare_with_compressed(GGUF(tmp_path / "out"), tmp_path / "compressed", [ids])
    assert found.ok and found.layers >= 14, found.table()
    assert bool(found.logits) is installed()


def test_a_byte_type_or_size_that_differs_from_the_compressed_export_is_found(tmp_path):
    source, model, quantization = quantized(tmp_path)
    out = written(tmp_path, source, model, quantization)
    export_model(model, quantization, source, tmp_path / "compressed")
    report, tensors = compared(tmp_path), gguf.GGUFReader(out).tensors
    assert report.ok and report.layers == len(quantization.layers) and len(tensors) <= report.equal, report.table()
    good = out.read_bytes()
    at = next(int(t.data_offset) for t in tensors if t.name == "blk.1.attn_k.weight") + 7
    out.write_bytes(good[:at] + bytes([good[at] ^ 3]) + good[at + 1 :])
    assert [line.split()[0] for line in compared(tmp_path).problems] == ["blk.1.attn_k.weight"]
    # Types and sizes that nothing dequantizes, or has so many experts, are tensors that differ.
    name = b"blk.1.attn_q.weight"
    at = good.index(name) + len(name)
    columns, rows, kind = at + 4, at + 12, at + 20
    for place, value in ((columns, bytes(8)), (rows, bytes(8)), (kind, b"\x10\0\0\0"), (kind, b"\x1e")):
        out.write_bytes(good[:place] + value + good[place + len(value) :])
        try:
            found = compared(tmp_path).problems
        except ValueError as error:  # where the package does not open it
            found = [str(error)]
        assert re.search("^blk.1.attn_q.weight does|model.gguf is not a GGUF", "\n".join(found), re.MULTILINE), found


def test_a_model_that_never_was_quantized_is_written_as_it_is(tmp_path):
    source, model, _ = quantized(tmp_path)
    tensors, state = read(written(tmp_path, source, model, None)), model.state_dict()
    assert torch.equal(tensors["blk.0.ffn_up.weight"], state["model.layers.0.mlp.up_proj.weight"].float())


def test_scales_that_are_trained_as_fp16_always_fit(tmp_path):
    """A model in fp32 has scales of 24 bits before they are rounded, and some that fp16 does not reach."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3", wide=True)
    model = load_model(source, torch.float32).eval()
    rules = [Rule(SCHEMES["q8_0"], r".*\.o_proj")]
    quantization = quantize(model, "q4_0", rules=rules, ranges=Ranges("absmax"))
    negative = 0
    with torch.no_grad():
        for layer in quantization.layers.values():
            layer.scale_of_weight.theta.normal_(std=0.1)
            layer.scale_of_weight.s0[3, :3] = torch.tensor([1e-9, -1e-7, 1e6])
            negative += int((layer.scale_of_weight.s0 < 0).sum())
    assert negative > 100, "of groups whose largest weight is positive"
    tensors = read(written(tmp_path, source, model, quantization))
    for name, weight in forward_weights(model, quantization).items():
        assert torch.equal(tensors[name], weight), name
    export_model(model, quantization, source, tmp_path / "compressed")
    report = compared(tmp_path)
    assert report.ok and "12 Q4_0" in report.contents and "2 Q8_0" in report.contents, report.table()


OF_ANOTHER_MODEL = {
    "qwen3": [
        ({"attention__head_count": 2}, "qwen3.attention.head_count is 2, expected 4"),
        ({"rope__freq_base": 5e5}, "qwen3.rope.freq_base is 500000.0, expected"),
        ({"rope__freq_base": float("nan")}, "qwen3.rope.freq_base is nan, expected"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "qwen3.*epsilon is nan, expected"),
        ({"without": ("blk.1.attn_k_norm.weight",)}, "the template lacks blk.1.attn_k_norm.weight"),
    ],
    "qwen3, yarn": [
        ({"rope__scaling__factor": 2.0}, "qwen3.rope.scaling.factor is 2.0, expected 4.0"),
        ({"rope__scaling__type": "linear"}, "qwen3.rope.scaling.type is linear, expected yarn"),
        ({"rope__scaling__yarn_beta_fast": 16.0}, "qwen3.rope.scaling.yarn_beta_fast is 16.0, expected 32.0"),
        ({"rope__scaling__original_context_length": 64}, ".*original_context_length is 64, expected 32"),
    ],
    "gemma3_text": [
        ({"rope__freq_base_swa": 5e5}, "gemma3.rope.freq_base_swa is 500000.0, expected 10000.0"),
        ({"attention__sliding_window": 16}, "gemma3.attention.sliding_window is 16, expected 8"),
        ({"final_logit_softcapping": 30.0}, "gemma3.final_logit_softcapping is 30.0, expected 0.0"),
    ],
    "gemma3_text, tied off, softcap": [
        (
            {"without": ("gemma3.final_logit_softcapping",)},
            ".*softcapping is missing, which is 0.0 in llama.cpp, expected 30.0",
        ),
    ],
    "gemma4_text": [
        (
            {"without": ("gemma4.final_logit_softcapping",)},
            ".*softcapping is missing, which is 30.0 in llama.cpp, expected 0.0",
        ),
    ],
    "gemma4_text, softcap": [
        ({"attention__head_count_kv": 4}, r"gemma4.attention.head_count_kv is 4, expected \[2, 2\]"),
        ({"attention__key_length_swa": 512}, "gemma4.attention.key_length_swa is 512, expected 16"),
        ({"attention__sliding_window_pattern": [True, True]}, r".*pattern is \[True, True\], expected \[True, False\]"),
        ({"rope__freq_base_swa": 1e6}, "gemma4.rope.freq_base_swa is 1000000.0, expected 10000.0"),
        ({"without": ("rope_freqs.weight",)}, "the template has no rope_freqs.weight, but rope_type is 'proportional'"),
    ],
    "qwen3_5_text": [
        ({"ssm__group_count": 4}, "qwen35.ssm.group_count is 4, expected 2"),
        ({"full_attention_interval": 4}, "qwen35.full_attention_interval is 4, expected 2"),
        ({"rope__dimension_count": 16}, "qwen35.rope.dimension_count is 16, expected 4"),
    ],
    "lfm2": [
        ({"attention__head_count_kv": [2, 2]}, r"lfm2.attention.head_count_kv is \[2, 2\], expected \[0, 2\]"),
        ({"feed_forward_length": 96}, "lfm2.feed_forward_length is 96, expected 256"),
        ({"shortconv__l_cache": 4}, "lfm2.shortconv.l_cache is 4, expected 3"),
    ],
}


@pytest.mark.parametrize("kind", OF_ANOTHER_MODEL)
def test_the_template_of_another_model_is_refused(tmp_path, kind):
    VARIANTS[kind].checkpoint(tmp_path / "source")
    source, model, quantization = quantized(tmp_path, kind)
    for changes, message in OF_ANOTHER_MODEL[kind]:
        template = gguf_template(source, tmp_path / "base.gguf", **changes)
        with pytest.raises(RankError, match=f"is the template of another model: {message}"):
            check_plan(model, quantization, source, layout="gguf", template=template)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama, rope of llama 3", {"factor": 32.0}),
        ("llama, rope of llama 3", {"original_max_position_embeddings": 256}),
        ("llama, rope of llama 3", {"high_freq_factor": 8.0}),
        ("gemma4_text", {"partial_rotary_factor": 0.5}),
    ],
)
def test_the_template_with_factors_of_other_positions_is_refused(tmp_path, kind, changes):
    """All its metadata and shapes are the same; llama.cpp would compute with the template's factors."""
    VARIANTS[kind].checkpoint(tmp_path / "source")
    template = gguf_template(tmp_path / "source", tmp_path / "base.gguf")
    source, model, quantization = quantized(tmp_path, kind)
    check_plan(model, quantization, source, layout="gguf", template=template)

    def edit(config: dict) -> None:
        rope = config["rope_parameters"]
        rope.get("full_attention", rope).update(changes)

    edit_json(source / "config.json", edit)
    _, model, quantization = quantized(tmp_path, kind)
    with pytest.raises(RankError, match=r"is the template of another model: rope_freqs\.weight was not computed from"):
        check_plan(model, quantization, source, layout="gguf", template=template)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("mistral, sliding window", {}, "it has sliding attention"),
        ("gemma3_text", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8, expected 16"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 6}, "not every 6th layer alone attends to all"),
        ("gemma4_text", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("qwen3_5_text", {"linear_value_head_dim": 8}, "linear_key_head_dim and linear_value_head_dim differ"),
        ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"]}, "not every nth layer alone attends"),
        ("lfm2", {"conv_bias": True}, "conv_bias is True, expected False"),
        ("lfm2_moe", {"routed_scaling_factor": 2.0}, "routed_scaling_factor is 2.0, expected 1"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation is 'silu', expected 'gelu_pytorch_tanh'"),
    ],
)
def test_what_llama_cpp_computes_differently_is_refused(tmp_path, kind, changes, message):
    VARIANTS[kind].checkpoint(tmp_path / "source")
    source, model, quantization = quantized(tmp_path, kind)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(RankError, match=message):
        check_plan(model, quantization, source, layout="gguf", template=tmp_path / "base.gguf")


def test_heads_in_another_order_that_are_smaller_than_a_block_are_refused(tmp_path):
    VARIANTS["qwen3_5_text"].checkpoint(tmp_path / "source")
    source, model, quantization = quantized(tmp_path, "qwen3_5_text")
    template = gguf_template(source, tmp_path / "base.gguf")
    with pytest.raises(RankError, match=r"out_proj.weight is Q4_0 .* with 4 heads, but .*: exempt this layer"):
        check_plan(model, quantization, source, layout="gguf", template=template)


def test_what_is_missing_or_unknown_is_refused_by_name(tmp_path):
    source, model, quantization = quantized(tmp_path)

    def refused(message: str, template: Path | None, **changes) -> None:
        for key, value in changes.items():
            setattr(model.config, key, value)
        with pytest.raises(RankError, match=message):
            export_model(model, quantization, source, tmp_path / "out", layout="gguf", template=template)
        assert not list(tmp_path.glob("out*"))

    template = gguf_template(source, tmp_path / "base.gguf")
    refused("needs a template", None)
    refused("is not a file, expected a GGUF file", tmp_path / "none.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF????")
    refused("broken.gguf is not a GGUF file", tmp_path / "broken.gguf")
    other = tiny_checkpoint(tmp_path / "llama", "llama", wide=True)
    refused("general.architecture is 'llama', expected 'qwen3'", gguf_template(other, tmp_path / "llama.gguf"))
    layer = next(iter(quantization.layers.values()))
    with torch.no_grad():
        layer.scale_of_weight.s0[3, 1] = 1e-9
    refused(r"weight_scale: fp16 does not hold 1 of \d+ scales, 9.968e-10 among them", template)
    refused("supports models of type llama, mistral, .*, got phi3", template, model_type="phi3")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_other_schemes_are_refused_with_the_nearest(name):
    scheme = PRESETS[name].linear
    if scheme in (Q4, Q8, SCHEMES["q4_0"], SCHEMES["q8_0"], SCHEMES["mxfp4"], SCHEMES["nvfp4"], None):
        check_layout("gguf", [scheme] if scheme else [])
        return
    nearest = "q4_0" if scheme.weights.bits <= 4 else "q8_0"
    if scheme.weights.dtype == "fp4_e2m1":
        nearest = "nvfp4" if scheme.weights.group_size == 16 else "mxfp4"
    with pytest.raises(ValueError, match=f"got {scheme.name}; the nearest is {nearest}"):
        check_layout("gguf", [scheme])


def test_inputs_are_rounded_as_ggml_rounds_them(seed):
    x = torch.randn(50, 128) * torch.exp(3 * torch.randn(50, 1))
    x[3, 32:64] = 0
    packed = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    ours = in_blocks(x)
    # Some of llama.cpp's kernels divide 127 by the largest magnitude, others invert d: a code in thousands differs.
    assert (ours == expected).float().mean() > 0.998
    assert (ours - expected).abs().max() <= 1.01 * x.abs().max() / 127


def test_groups_of_zeros_fit_under_any_scale():
    codes = torch.zeros(1, 64, dtype=torch.int8)
    codes[0, 32:] = torch.arange(-8, 8).repeat(2)
    packed = blocks("scale", codes, torch.tensor([[1e9, -0.5]]), "Q4_0")
    values = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType.Q4_0)
    assert torch.equal(torch.from_numpy(values), codes * torch.tensor(-0.5))
