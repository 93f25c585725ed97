"""Exports that transformers would not find its weights in are refused, whatever the family."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from model.quantized.checkpoint import read_checkpoint
from model.ranks import RankError
from model.save.export_model import check_plan, export_model
from model.save.loadable import check_written, not_loaded, weights_read
from model.save.plan import plan_shards
from quant import Quantization
from quant.rules import DEFAULT_EXEMPT
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import assert_same_tensors, edit_checkpoint, load_model, quantize, read_tensors
from tests.lib.tiny import tiny_checkpoint
from tools.verify.check import compare_with_transformers

# Their experts are one tensor on disk.
FUSED = ["granitemoe", "granitemoeshared", "granitemoehybrid"]


def quantized(source: Path, scheme: str = "w4a16_g32", exempt=(), **options):
    """The model of a checkpoint, quantized but for more layers."""
    model = load_model(source, **options)
    return model, quantize(model, scheme, learn=False, exempt=(*DEFAULT_EXEMPT, *exempt))


def loads(directory: Path):
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def check_export(model, quantization: Quantization, source: Path, out: Path) -> None:
    """Export, and compare with transformers' model of the export."""
    export_model(model, quantization, source, out)
    report = compare_with_transformers(out, [torch.arange(10, 60)[None]])
    assert report.ok, report.table()


@pytest.mark.parametrize("kind", FUSED)
def test_experts_that_are_one_tensor_on_disk_stay_one(kind: str, tmp_path: Path, seed: int):
    """If they are exempt, they go beside quantized layers."""
    source = VARIANTS[kind].checkpoint(tmp_path / "source", seed=seed)
    model = load_model(source)
    export_model(model, None, source, tmp_path / "plain")
    assert_same_tensors(tmp_path / "plain", source)

    model, quantization = quantized(source)
    refusal = r"block_sparse_moe\.experts.*one tensor, .*input_linear\.weight, which has no quantized.*quant\.exempt"
    with pytest.raises(RankError, match=refusal):
        check_plan(model, quantization, source)
    with pytest.raises(RankError, match=r"experts\.0\.gate_proj.*one tensor.*set model\.experts to stacked"):
        check_plan(load_model(source, experts="per_expert"), None, source)
    export_model(model, quantization, source, tmp_path / "values", layout="dequantized")
    assert read_tensors(tmp_path / "values").keys() == read_tensors(source).keys()
    quantization.set_fake_quant(weights=True, activations=False)
    ids = torch.arange(10, 60)[None]
    with torch.no_grad():
        expected = loads(tmp_path / "values")(ids).logits
        # Sums of bf16 products in another order. An expert in another's place changes logits in the first digit.
        torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=0.05, atol=0.05)
    check_export(*quantized(source, exempt=[r".*\.experts\..+"]), source, tmp_path / "attention")


@pytest.mark.parametrize("kind", ["gpt_oss", "dbrx"])
def test_quantized_experts_that_no_class_reads_are_refused_with_what_to_do(kind: str, tmp_path: Path, seed: int):
    source = VARIANTS[kind].checkpoint(tmp_path / "source", seed=seed)
    message = r"experts\.gate_up_proj: .*no quantized.* set quant\.exempt_more: \[.*\]"
    with pytest.raises(RankError, match=message) as error:
        check_plan(*quantized(source), source)
    advised = yaml.safe_load(re.search(r"exempt_more: (\[.*\])", str(error.value))[1])
    check_export(*quantized(source, exempt=advised), source, tmp_path / "export")


@pytest.mark.parametrize("exempt", [[], [r".*\.experts\..+"]], ids=("all", "attention"))
def test_llama_4_has_linears_for_experts_where_it_is_quantized(exempt: list[str], tmp_path: Path, seed: int):
    """transformers puts them in the place of its experts then, whether these are quantized or not."""
    source = VARIANTS["llama4_text"].checkpoint(tmp_path / "source", seed=seed)
    model, quantization = quantized(source, exempt=exempt)
    check_plan(model, quantization, source)
    check_export(model, quantization, source, tmp_path / "export")
    suffix = "weight" if exempt else "weight_packed"
    assert f"model.layers.0.feed_forward.experts.3.gate_proj.{suffix}" in read_tensors(tmp_path / "export")


def test_the_source_decides_how_experts_are_written_where_transformers_reads_both(tmp_path: Path, seed: int):
    tiny_checkpoint(tmp_path / "each", "qwen3_moe", seed=seed)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "each", dtype=torch.bfloat16)
    theirs.config.save_pretrained(tmp_path / "fused")
    save_file({k: v.contiguous() for k, v in theirs.state_dict().items()}, tmp_path / "fused" / "model.safetensors")
    for source in (tmp_path / "each", tmp_path / "fused"):
        export_model(load_model(source), None, source, tmp_path / f"{source.name} export")
        assert_same_tensors(tmp_path / f"{source.name} export", source)
        export_model(*quantized(source, "w8a16_channel"), source, tmp_path / f"{source.name} int8")
        loads(tmp_path / f"{source.name} int8")


def test_a_class_that_would_not_find_its_weights_is_named(tmp_path: Path, seed: int):
    """A family that no list has: config.json names a class with other keys than the export has."""
    source = tiny_checkpoint(tmp_path / "source", "llama", seed=seed)
    model, config = load_model(source), source / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamaForSequenceClassification"))
    with pytest.raises(RankError, match=r"names LlamaForSequenceCl.*missing: score\.weight; unknown: lm_head"):
        check_plan(model, None, source)


@pytest.mark.parametrize(
    ("family", "first"),
    [
        ("nanochat", "layers.0.self_attn.o_proj"),  # its _init_weights gives this one a value
        ("falcon", "h.0.mlp.dense_4h_to_h"),  # as do Falcon's and GPT-BigCode's all
        ("gpt_bigcode", "h.0.attn.c_proj"),
        ("rwkv", "blocks.0.attention.key"),  # its forward divides some of them
    ],
)
def test_classes_that_read_packed_weights_are_known_not_to_load(family: str, first: str, tmp_path: Path, seed: int):
    source = VARIANTS[family].checkpoint(tmp_path / "source", seed=seed)
    model, quantization = quantized(source)
    reason = not_loaded(model, quantization)
    assert reason is not None and first in reason
    export_model(model, quantization, source, tmp_path / "int4")
    with pytest.raises(AttributeError, match="weight"):
        loads(tmp_path / "int4")(torch.zeros(1, 4, dtype=torch.long))

    if family not in ("falcon", "rwkv"):  # of which nothing would be left
        exempt = yaml.safe_load(re.search(r"quant\.exempt_more: (\[.*\])", reason)[1])
        model, quantization = quantized(source, exempt=exempt)
        assert not_loaded(model, quantization) is None
        export_model(model, quantization, source, tmp_path / "mended")
        loads(tmp_path / "mended")(torch.zeros(1, 4, dtype=torch.long))


class ReadsAWeight(transformers.LlamaForCausalLM):
    """Class whose forward reads the weight of a layer after attention."""

    def forward(self, input_ids=None, attention_mask=None, **options):
        found = super().forward(input_ids, attention_mask, **options)
        found.logits = found.logits * self.model.layers[1].mlp.down_proj.weight.dtype.itemsize
        return found


def test_a_forward_behind_a_causal_mask_is_searched_for_reads_of_packed_weights(tmp_path: Path, seed: int):
    config = load_model(tiny_checkpoint(tmp_path / "source", "llama", seed=seed)).config
    packed = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"]
    assert weights_read(transformers.LlamaForCausalLM(config), packed) == []
    assert weights_read(ReadsAWeight(config), packed) == packed
    assert weights_read(ReadsAWeight(config), packed[:1]) == []


@pytest.mark.parametrize(("scheme", "read"), [("fp8_dynamic", True), ("w4a16_channel", False)])
def test_parts_of_a_tensor_beside_packed_layers_are_known_not_to_load(scheme: str, read: bool, tmp_path: Path):
    """transformers decodes whatever it puts together as if it were packed, also convolutions."""
    source = VARIANTS["olmo_hybrid"].checkpoint(tmp_path / "source")
    model, quantization = quantized(source, scheme)
    assert (not_loaded(model, quantization) is None) == read
    export_model(model, quantization, source, tmp_path / "export")
    if read:
        loads(tmp_path / "export")
    else:
        with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
            loads(tmp_path / "export")


@pytest.mark.parametrize("exempt", (".*experts.*", r".*layers\.0.*experts.*", ".*self_attn.*"))
@pytest.mark.parametrize("scheme", ("w4a16_g32", "w8a16_channel", "fp8_dynamic", "mxfp4"))
def test_experts_beside_layers_of_another_kind_load_where_that_is_said(
    scheme: str, exempt: str, tmp_path: Path, seed: int
):
    """Some of the layers quantized and the rest not: transformers reads each weight, or it is known not to."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe", seed=seed, even=True)
    model, quantization = quantized(source, scheme, [exempt])
    reason = not_loaded(model, quantization)
    apart = quantized(source, scheme, [exempt], experts="per_expert")
    assert not_loaded(*apart) == reason
    export_model(model, quantization, source, tmp_path / "export")
    export_model(*apart, source, tmp_path / "apart")
    assert_same_tensors(tmp_path / "apart", tmp_path / "export")
    export_model(model, quantization, source, tmp_path / "weights", layout="dequantized")
    try:
        found = loads(tmp_path / "export").state_dict()
    except (RuntimeError, AttributeError):
        found = {}
    expected = loads(tmp_path / "weights").state_dict()
    reads = all(same(found, key, value) for key, value in expected.items())
    assert reads == (reason is None), reason


def same(found: dict[str, torch.Tensor], key: str, value: torch.Tensor) -> bool:
    """Compare a weight of a model that was loaded, or its codes and scales, with its value."""
    if key not in found:
        return False
    weight = found[key].float()
    if found[key].dtype == torch.float8_e4m3fn:
        weight = weight * found[f"{key}_scale"]
    return torch.allclose(weight, value.float(), rtol=0.02, atol=1e-6)


def test_files_that_are_not_as_planned_are_an_error(tmp_path: Path, seed: int):
    source = tiny_checkpoint(tmp_path / "source", "llama", seed=seed)
    (items,) = plan_shards(load_model(source), None, "compressed", 10**9, read_checkpoint(source, None))
    check_written(source, items)
    edit_checkpoint(source, lambda tensors: [tensors.pop(key) for key in list(tensors) if "norm" in key])
    with pytest.raises(ValueError, match=r"are not as planned: model\.layers\.0\.input_layernorm\.weight"):
        check_written(source, items)


@pytest.mark.parametrize(
    ("family", "entries"),
    [
        # A tensor of its projector begins with "model.", as all layers do in transformers.
        ("kimi_k25", {r"re:(?:.*\.)?mm_projector(?:\..*)?$"}),
        # Its routers have another name on disk, its projector another one in transformers.
        ("minimax_m3_vl", {r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$"}),
        ("step3p7", {r"re:(?:.*\.)?vit_large_projector(?:\..*)?$", r"re:(?:.*\.)?multi_modal_projector(?:\..*)?$"}),
    ],
)
def test_what_is_not_quantized_is_named_as_every_reader_has_it(family: str, entries: set[str], tmp_path: Path):
    source = VARIANTS[family].checkpoint(tmp_path / "source")
    model, quantization = quantized(source, "fp8_dynamic")
    check_plan(model, quantization, source)
    export_model(model, quantization, source, tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert entries <= set(config["quantization_config"]["ignore"])
    kind = getattr(transformers, config["architectures"][0])
    _, info = kind.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(info.values()), info
