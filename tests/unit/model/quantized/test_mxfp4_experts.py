"""gpt-oss with its experts in MXFP4 as it is published; transformers decodes the same files itself."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from model.build import build_model
from model.checkpoint.load import load_weights
from model.checkpoint.safetensors import Reader
from model.quantized.checkpoint import read_checkpoint, source_schemes
from model.quantized.scales import take_scales
from model.ranks import RankError
from model.save import check_plan, export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, Rule, prepare
from tests.families.variants import VARIANTS

CPU = torch.device("cpu")
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
# As openai/gpt-oss-20b has it.
CONFIG = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def published(directory: Path, seed: int) -> Path:
    """A tiny gpt-oss whose experts are any codes, with scales of all sizes that trained weights may have."""
    source = VARIANTS["gpt_oss"].checkpoint(directory, seed=seed)
    tensors = load_file(source / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{key}_scales"] = torch.randint(112, 123, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}, indent=2) + "\n")
    return source


def loaded(source: Path, experts="stacked"):
    model = build_model(source, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=CPU, experts=experts)
    load_weights(model, source, progress=False)
    return model


def as_the_source(model, source: Path):
    options = {"learn_weight_scale": True, "learn_input_scale": False}
    quantization = prepare(model, None, named=source_schemes(model, source), **options)
    return quantization, take_scales(model, quantization, source)


def theirs_of(source: Path):
    """The model that transformers loads, with experts that are decoded as they come."""
    options = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
    options |= {"experts_implementation": "eager", "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(source, **options)
    assert not any(info.values()), info
    return model.eval()


def edited(source: Path, edit) -> None:
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("experts", ["stacked", "per_expert"])
def test_the_experts_are_those_that_transformers_decodes(tmp_path, seed, experts):
    """Bit for bit, and in the forward with fake quantization too: the scales are those of the file."""
    source = published(tmp_path / "source", seed)
    theirs = theirs_of(source)
    model = loaded(source, experts)
    mine = dict(model.named_parameters())
    for name, parameter in theirs.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            assert torch.equal(parameter, mine[name]), name
        elif experts == "stacked":
            assert torch.equal(parameter.transpose(1, 2), mine[f"{name}.weight"]), name
        else:
            parent, _, stack = name.rpartition(".")
            for index, matrix in enumerate(parameter):
                assert torch.equal(matrix.t(), mine[f"{parent}.{index}.{stack}.weight"]), name
    quantization, report = as_the_source(model, source)
    assert all(".experts." in name for name in quantization.layers)
    assert len(report.weights_loaded) == len(quantization.layers) == (4 if experts == "stacked" else 16)
    assert not report.weights_measured
    ids = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        expected = theirs(ids).logits.float()
        # Sums of bf16 products in another order.
        torch.testing.assert_close(model.eval()(ids).logits.float(), expected, rtol=0.05, atol=0.05)


def test_what_was_not_trained_comes_back_byte_for_byte(tmp_path, seed):
    """In gpt-oss' own layout: files and config.json, which transformers loads."""
    source = published(tmp_path / "source", seed)
    model = loaded(source)
    quantization, _ = as_the_source(model, source)
    with pytest.raises(RankError, match=r"no quantized form in layout 'compressed'.*with 'gpt_oss'"):
        check_plan(model, quantization, source)
    check_plan(model, quantization, source, layout="gpt_oss")
    export_model(model, quantization, source, tmp_path / "export", layout="gpt_oss")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "export" / file).read_bytes() == (source / file).read_bytes(), file
    theirs_of(tmp_path / "export")


def test_trained_experts_are_written_as_the_forward_has_them(tmp_path, seed):
    """From a plain gpt-oss; and with anything else quantized, or not all of them, the layout is refused."""
    source = VARIANTS["gpt_oss"].checkpoint(tmp_path / "source", seed=seed)
    model = loaded(source)
    rule = Rule(SCHEMES["mxfp4"], r".*\.experts\..+")
    options = {"learn_weight_scale": True, "learn_input_scale": False}
    quantization = prepare(model, None, rules=(rule,), **options)
    renew_weight_scales(quantization)
    export_model(model, quantization, source, tmp_path / "export", layout="gpt_oss")
    theirs = theirs_of(tmp_path / "export")
    for name, layer in quantization.layers.items():
        assert torch.equal(theirs.get_parameter(name).transpose(1, 2), layer.used_weight())
    everything = loaded(source)
    quantization = prepare(everything, SCHEMES["mxfp4"], **options)
    renew_weight_scales(quantization)
    with pytest.raises(RankError, match=r"layout 'gpt_oss' holds .* not go with model\.layers\.0\.self_attn"):
        check_plan(everything, quantization, source, layout="gpt_oss")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{GATE_UP}_scales"), r"gate_up_proj: scales missing beside its blocks"),
        (lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:, 1:].contiguous()}), r"its scales are U8"),
        (lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].flatten(2)}), r"its blocks are U8"),
        (lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].float()}), r"its blocks are F32"),
        (lambda t: t[f"{GATE_UP}_scales"].view(-1)[7:8].fill_(255), r"gate_up_proj_scales must be finite"),
        (lambda t: t.pop(f"{GATE_UP}_blocks"), r"unexpected: .*gate_up_proj_scales"),
        (
            lambda t: [t.update({key: t[key][1:].contiguous()}) for key in t if GATE_UP in key and "bias" not in key],
            r"missing: .*experts\.3\.gate_up_proj",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(tmp_path, seed, edit, message):
    source = published(tmp_path / "source", seed)
    edited(source, edit)
    with pytest.raises(RankError, match=message):
        loaded(source)


def test_every_range_is_read_by_itself(tmp_path, seed):
    """What a rank reads of an expert, begins and ends anywhere."""
    source = published(tmp_path / "source", seed)
    model = loaded(source)
    coded = read_checkpoint(source, model).coded
    whole = model.get_parameter(f"{GATE_UP}.weight")
    with Reader() as reader:
        for expert in range(4):
            one = coded[f"model.layers.1.mlp.experts.{expert}.gate_up_proj"]
            start = random.randrange(whole[0].numel())
            count = random.randrange(whole[0].numel() - start) + 1
            for offset, values in one.values(reader, start, count, torch.bfloat16, CPU):
                assert torch.equal(whole[expert].flatten()[start + offset :][: len(values)], values)
