"""Export of a prepared model from memory, against the export of the project's own loop."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.moe.arrange import arrange_experts
from model.ranks import RankError
from model.save.export_model import export_model
from model.save.save_quantized import save_quantized
from quant.prepared import convert, prepare
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import assert_same_tensors, load_model, quantize
from tests.lib.tiny import tiny_checkpoint, tiny_model

IDS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("kind", "scheme", "tied", "loads"),
    [
        ("llama", "w4a16_g32", True, True),
        ("qwen3", "fp8_static", False, True),
        ("llama", "w8a16_asym", False, False),  # transformers needs an option for zero points
        ("qwen3_moe", "fp8_dynamic", False, True),
    ],
)
def test_the_files_are_those_of_the_loop(tmp_path: Path, kind: str, scheme: str, tied: bool, loads: bool) -> None:
    source = tiny_checkpoint(tmp_path / "source", kind, tied=tied, wide=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if kind == "qwen3_moe":
        arrange_experts(model, "stacked")
    prepare(model, scheme, learn_weight_scale=True, calibrate=lambda model: model(IDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    ours = load_model(source)
    quantization = quantize(ours, scheme)
    ours.load_state_dict(model.state_dict())
    export_model(ours, quantization, source, tmp_path / "ours")
    tokenizer = AutoTokenizer.from_pretrained(source)
    report = save_quantized(model, tmp_path / "trained", tokenizer)
    assert report is not None and report.path == tmp_path / "trained"
    save_quantized(convert(model), tmp_path / "codes", tokenizer, max_shard_size=200_000)
    for found in ("trained", "codes"):
        assert_same_tensors(tmp_path / found, tmp_path / "ours")
        configs = [json.loads((tmp_path / one / "config.json").read_text()) for one in (found, "ours")]
        assert configs[0] == configs[1]
    files, expected = ({path.name for path in (tmp_path / one).iterdir()} for one in ("trained", "ours"))
    assert files == expected and "generation_config.json" in files and "chat_template.jinja" in files
    assert len(list((tmp_path / "codes").glob("*.safetensors"))) > 1
    if loads:
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=torch.bfloat16)
        with torch.no_grad():
            found, kept = (one(IDS).logits.float() for one in (back, model))
        assert (found - kept).square().mean() < 0.01 * kept.square().mean()  # transformers divides by scales


def test_layers_with_rows_for_each_expert_are_written(tmp_path: Path) -> None:
    """Heads may be as many as experts. Experts that transformers reads as one tensor have a layout of their own."""
    for name, layout in (("laguna", "compressed"), ("granitemoe", "dequantized")):
        model = VARIANTS[name].model(dtype=torch.bfloat16)
        arrange_experts(model, "stacked")
        prepare(model, "int8_dynamic")
        report = save_quantized(model, tmp_path / name, layout=layout)
        assert report is not None and report.tensors > 20


def test_it_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    plain = prepare(nn.Sequential(nn.Linear(32, 32)), "w4a16_g32")
    experts = prepare(tiny_model("qwen3_moe", even=True), "w4a16_g32", exempt_more=[r".*\.mlp\.experts"])
    apart = prepare(tiny_model("llama", even=True, tied=True), "w4a16_g32")
    apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.clone())
    for model, said in (
        (tiny_model("llama"), "LlamaForCausalLM has no quantized layer: call prepare first"),
        (plain, "the model is a Sequential, expected one of transformers"),
        (experts, r"mlp.experts is a Qwen3MoeExperts .* call arrange_experts"),
        (apart, r"LlamaForCausalLM ties .*: tie them, or set tie_word_embeddings"),
    ):
        with pytest.raises(ValueError, match=said):
            save_quantized(model, tmp_path / "export")
    broken = prepare(tiny_model("llama", even=True), "w4a16_g32")
    broken.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(RankError, match=r"NaN or Inf in lm_head.weight"):
        save_quantized(broken, tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layout", "scheme", "dtype", "expected"),
    [
        ("mlx", "w4a16_g32", torch.float32, "bfloat16 or float16: layout 'mlx'"),
        ("executorch", "8da4w", torch.float32, "bfloat16: layout 'executorch'"),
        ("executorch", "8da4w", torch.float16, "bfloat16: layout 'executorch'"),
    ],
)
def test_scales_that_a_reader_would_round_are_refused(tmp_path: Path, layout, scheme, dtype, expected) -> None:
    """XNNPACK keeps scales in bf16; MLX adds a bias to a product, which fp32 rounds."""
    model = prepare(tiny_model("llama", even=True, dtype=dtype), scheme)
    with pytest.raises(RankError, match=f"q_proj is {str(dtype).removeprefix('torch.')}, expected {expected}"):
        save_quantized(model, tmp_path / "export", layout=layout)
    assert not (tmp_path / "export").exists()
    save_quantized(model.bfloat16(), tmp_path / "export", layout=layout)
