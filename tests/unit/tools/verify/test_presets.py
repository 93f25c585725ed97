"""Every preset, dense and MoE: quantized, exported, read back by transformers and by us; and the other layouts."""

import json
import random
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear, _dequantize_fp8_weight

from model.ranks import RankError
from model.save.export_model import export_model
from quant import Quantization
from quant.formats.compressed_tensors import input_suffix, unpack_scale, unpack_weight, unpack_zero
from quant.formats.layouts import Layout, check_layout
from quant.formats.modelopt import ALGORITHMS, DYNAMIC
from quant.reference import fake_quant, quantize
from quant.rules import Rule
from quant.spec import PRESETS, SCHEMES, Scheme, TensorSpec
from tests.lib.checkpoints import Export, edit_tensors, exported, quantized, read_tensors
from tests.lib.published import plain_deepseek
from tools.compressed import load_compressed, quantized_keys
from tools.verify.check import compare_with_transformers, decompress, problems_of_files
from tools.verify.comparison import Report

KINDS = ("qwen3", "qwen3_moe")
# One of each format and kind of input, of a MoE of every second; the others differ in a number.
OTHERS = ("q4_0", "q8_0", "w8a16_g128", "w8a16_g32", "w4a16_g32", "w4a16_channel", "w3a16_g128", "w3a16_g32")
OTHERS += ("w2a16_g128", "w2a16_channel", "w4a8_int8", "w8a16_asym")
SOME = [scheme for scheme in SCHEMES if scheme not in OTHERS]
# Schemes of other writers that are no presets.
OWN = {one.name: one for one in (ALGORITHMS["W4A8_MXFP4_FP8"], *DYNAMIC.values())}
TAKEN = {*(("qwen3", name) for name in (*SOME, *OWN)), *(("qwen3_moe", name) for name in SOME[::2])}
CASES = [
    pytest.param(kind, scheme, id=f"{kind}-{name}", marks=[] if (kind, name) in TAKEN else [pytest.mark.full])
    for kind in KINDS
    for name, scheme in (SCHEMES | OWN).items()
]
# Experts that transformers does not load (tools/verify/check.py).
NOT_LOADED = {"fp8_block", "int8_dynamic", "w8a8_static", "nvfp4", "nvfp4_w4a4", "mxfp8", "w4a16_asym", "w8a16_asym"}


def made(directory: Path, kind: str, scheme: Scheme | None, rules=(), **options) -> Export:
    """Experts in the form that the reader has, whose logits are equal to the bit; the files are those of either form.
    All are used: with a choice, a random router sends a token in a thousand elsewhere wherever a rounding differs."""
    options = {"experts": "per_expert", "every_expert": kind == "qwen3_moe", "wide": True, "rules": rules, **options}
    return exported(directory, kind, scheme, **options)


def served(export: Export) -> tuple[Report, Quantization]:
    """Compare with transformers: logits differ by the rounding of matrix products and no more (measured: not at all).
    Our reader computes the logits of the exported model to the bit."""
    report = compare_with_transformers(export.directory, export.batches)
    assert report.ok, report.table()
    assert report.logits["same arithmetic"].relative_max < 1e-5, report.table()
    again, read = load_compressed(export.directory, dtype=torch.bfloat16)
    ids = export.batches[0]
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, export.model(input_ids=ids).logits)
    return report, read


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_what_is_served_is_what_was_trained(kind, scheme, tmp_path, seed):
    """Codes and scales on disk are those of the forward; compressed-tensors decompresses them to the weights that it
    multiplied with; transformers and our reader compute its logits."""
    export = made(tmp_path, kind, scheme)
    directory, _, model, quantization = export
    tensors = read_tensors(directory)
    for name, layer in quantization.layers.items():
        state = {suffix: tensors[key] for suffix, key in quantized_keys(model, name, layer).items()}
        scale = layer.weight_scale()
        assert torch.equal(unpack_scale(state["weight_scale"], scheme.weights, state.get("weight_global_scale")), scale)
        expected = quantize(layer.weight, scale, scheme.weights, layer.weight_zero)
        assert torch.equal(unpack_weight(state, scheme).view(torch.int8), expected.view(torch.int8)), name
        values = fake_quant(layer.weight, scale, scheme.weights, layer.weight_zero)
        assert torch.equal(decompress(state, scheme).bfloat16(), values), name
        if not scheme.weights.symmetric:
            assert torch.equal(unpack_zero(state, scheme), layer.weight_zero), name
            assert layer.weight_zero.unique().numel() > 1, "of weights that are off the center"
        if scheme.stored_input is not None:
            stored = state[input_suffix(scheme.stored_input)]
            assert torch.equal(unpack_scale(stored, scheme.stored_input), layer.input_scale())
    assert len(quantization.layers) == (14 if kind == "qwen3" else 38)
    report, _ = served(export)
    assert (report.note is not None) == (kind == "qwen3_moe" and scheme.name in NOT_LOADED)


def test_blocks_that_do_not_divide_a_weight(tmp_path, seed):
    """DeepSeek's latent attention: compressed-tensors decompresses smaller last blocks, and so does the function that
    transformers has for weights in its own fp8, whose layers have parameters of these shapes."""
    source = plain_deepseek(tmp_path / "source", random.randrange(2**31), first_k_dense_replace=2)
    batches = [torch.randint(0, 301, (2, 64)) for _ in range(2)]
    model, quantization = quantized(source, SCHEMES["fp8_block"], batches)
    export_model(model, quantization, source, tmp_path / "export")
    report, _ = served(Export(tmp_path / "export", batches, model, quantization))
    assert report.note is None and report.contents == "fp8_block"
    export_model(model, quantization, source, tmp_path / "native", layout="vllm_fp8")
    tensors, smaller = read_tensors(tmp_path / "native"), set()
    for name, layer in quantization.layers.items():
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
        assert FP8Linear(layer.in_features, layer.out_features, (128, 128)).weight_scale_inv.shape == scale.shape
        values = _dequantize_fp8_weight(codes, scale, [128, 128], torch.float32)
        assert torch.equal(values.bfloat16(), layer.quantized_weight()), name
        smaller |= {name.rpartition(".")[2]} if layer.out_features % 128 else set()
    assert smaller == {"q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}


@pytest.mark.parametrize(
    ("kind", "preset"), [("qwen3", "fp8_kv"), ("qwen3_moe", "fp8_static_kv"), ("qwen3", "nvfp4_w4a4_kv")]
)
def test_a_quantized_cache(kind, preset, tmp_path, seed):
    """Scales of keys and values on disk are those of the forward, and transformers uses them."""
    scheme, cache = PRESETS[preset].linear, PRESETS[preset].kv_cache
    export = made(tmp_path, kind, scheme, kv_cache=cache)
    tensors, caches = read_tensors(export.directory), export.quantization.caches
    for name, module in caches.items():
        stored = tensors[name.replace("_cache", "_scale")]
        assert (stored.dtype, stored.shape) == (torch.float32, (1,))
        assert torch.equal(stored, module.input_scale()), name
    assert len(caches) == 4
    report, read = served(export)
    assert read.caches.keys() == caches.keys()
    assert report.contents == ("fp8 KV cache" if scheme is None else f"{scheme.name}, fp8 KV cache")
    # Codes of 4-bit inputs flip more often (tools/verify/check.py).
    coarse = scheme is not None and scheme.activations.bits == 4
    assert report.logits["inputs as given"].kl > (1 if coarse else 10) * report.logits["our forward"].kl, report.table()


def test_scales_of_a_cache_as_other_writers_store_them(tmp_path):
    """llm-compressor writes bf16, and other keys are read too: an export in the form of its source keeps both."""
    directory = made(tmp_path, "qwen3", None, kv_cache=PRESETS["fp8_kv"].kv_cache).directory
    key, other = (f"model.layers.0.self_attn.k_{name}" for name in ("scale", "cache.scale"))
    edit_tensors(directory, key, lambda tensors: tensors.update({other: tensors.pop(key).bfloat16().view(())}))
    assert problems_of_files(directory, *load_compressed(directory)) == []
    edit_tensors(directory, other, lambda tensors: tensors.update({other: tensors[other].to(torch.float8_e4m3fn)}))
    assert problems_of_files(directory, *load_compressed(directory)) == [
        f"{other} is torch.float8_e4m3fn [], expected torch.float32 [1]"
    ]


FP8, INT4, INT8 = SCHEMES["fp8_dynamic"], SCHEMES["w4a16_g32"], SCHEMES["int8_dynamic"]
OUTER = [Rule(FP8, first=1), Rule(None, r".*\.1\.self_attn\..*")]
TABLES = {"model.embed_tokens": INT4, "lm_head": INT4}
ONE_SCHEME = "transformers decodes all experts with one scheme"
# What transformers does not load, or decodes in another way; vLLM reads all of it.
NOTED = {
    "experts, and a cache": ("qwen3_moe", INT8, (), {"kv_cache": PRESETS["fp8_kv"].kv_cache}, ""),
    "embeddings": ("qwen3", INT4, (), {"named": TABLES}, "transformers does not load quantized embeddings"),
    "experts of several schemes": ("qwen3_moe", INT4, [Rule(SCHEMES["w2a16_g32"], last=1)], {}, ONE_SCHEME),
    "experts that are left": ("qwen3_moe", INT4, [Rule(None, first=1)], {}, ONE_SCHEME),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_transformers_does_not_load_is_noted_and_compared_with_its_plain_model(case, tmp_path, seed):
    """Modules that are no Linear, embeddings and lm_head, are named in the configuration."""
    kind, scheme, rules, options, note = NOTED[case]
    export = made(tmp_path, kind, scheme, rules, **options)
    report, _ = served(export)
    assert report.note is not None and report.note.startswith(note)
    if case == "embeddings":
        config = config_of(export.directory)["quantization_config"]
        assert config["ignore"] == []
        assert config["config_groups"]["group_0"]["targets"] == ["Linear", *TABLES, "Embedding"]


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_schemes(kind, tmp_path, seed):
    """The first layer in fp8, of the last one attention as it is, lm_head in int8, int4 elsewhere. Of a MoE the experts
    of both layers have one scheme, which is what transformers can read."""
    rules = OUTER if kind == "qwen3" else [Rule(INT4, r".*\.experts\..*"), *OUTER]
    export = made(tmp_path, kind, INT4, rules, named={"lm_head": SCHEMES["w8a16_channel"]})
    config = config_of(export.directory)["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [group["weights"]["num_bits"] for group in config["config_groups"].values()] == [8, 4, 8]
    assert (r"re:.*mlp\.gate$" in config["ignore"]) == (kind == "qwen3_moe")
    report, read = served(export)
    assert report.note is None
    assert set(report.contents.split(", ")) == {"fp8_dynamic", "w4a16_g32", "w8a16_channel"}
    mine = {name: layer.scheme for name, layer in export.quantization.layers.items()}
    assert {name: layer.scheme for name, layer in read.layers.items()} == mine


@pytest.mark.parametrize(("kind", "name"), [("qwen3", "w8a8_static"), ("qwen3_moe", "nvfp4")])
def test_a_dequantized_export_is_a_plain_checkpoint_of_the_fake_quantized_weights(kind, name, tmp_path, seed):
    directory, batches, model, quantization = made(tmp_path, kind, SCHEMES[name], layout="dequantized")
    assert "quantization_config" not in config_of(directory)
    options = {"experts_implementation": "eager"} if kind == "qwen3_moe" else {}
    theirs, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    quantization.set_fake_quant(weights=True, activations=False)
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=batches[0]).logits, model(input_ids=batches[0]).logits)


@pytest.mark.parametrize(("kind", "name"), [("qwen3", "fp8_static"), ("qwen3_moe", "fp8_block")])
def test_vllm_fp8_holds_the_tensors_of_the_compressed_export(kind, name, tmp_path, seed):
    """Under the names of vLLM's own fp8 loader; blocks load in transformers too, which has that configuration."""
    directory, _, model, quantization = made(tmp_path, kind, SCHEMES[name])
    export_model(model, quantization, tmp_path / "source", tmp_path / "native", layout="vllm_fp8")
    compressed, native = read_tensors(directory), read_tensors(tmp_path / "native")
    if name == "fp8_block":
        compressed = {key.replace("weight_scale", "weight_scale_inv"): tensor for key, tensor in compressed.items()}
    assert native.keys() == compressed.keys()
    assert all(torch.equal(native[key].view(torch.uint8), compressed[key].view(torch.uint8)) for key in native)
    routers = [f"model.layers.{i}.mlp.gate" for i in range(2)] if kind == "qwen3_moe" else []
    assert config_of(tmp_path / "native")["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "static" if name == "fp8_static" else "dynamic",
        **({} if name == "fp8_static" else {"weight_block_size": [128, 128]}),
        "ignored_layers": [*routers, "lm_head"],
    }


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("vllm_fp8", "holds fp8_static or fp8_block or fp8 with dynamic inputs for all quantized layers, got"),
        ("gpt_oss", "holds mxfp4 or mxfp4_mxfp8 for all quantized layers, got w4a16_g32"),
        (
            "onnx",
            "unknown layout 'onnx'; known: compressed, vllm_fp8, gpt_oss, modelopt, dequantized, gguf, mlx, executorch",
        ),
    ],
)
def test_a_layout_that_cannot_hold_the_model_is_refused(layout, message, tmp_path):
    with pytest.raises(RankError, match=message):
        made(tmp_path, "qwen3", INT4, layout=layout)
    assert not (tmp_path / "export").exists()


def test_a_scheme_without_a_format_is_refused_in_every_layout():
    scheme = Scheme("int8-per-block", TensorSpec("int", 8, "block", 128))
    for layout in get_args(Layout):
        with pytest.raises(ValueError, match="'int8-per-block' has no export format"):
            check_layout(layout, [INT4, scheme])
