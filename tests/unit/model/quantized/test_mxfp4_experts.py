"""gpt-oss with its experts in MXFP4 as it is published; transformers decodes the same files itself."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config

from model.checkpoint.safetensors import Reader
from model.quantized.checkpoint import read_checkpoint
from model.ranks import RankError
from model.save.export_model import check_plan, export_model
from quant import SCHEMES, Rule
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import CPU, edit_checkpoint, load_model, load_quantized, quantize
from tests.lib.published import gpt_oss

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def theirs_of(source: Path):
    """The model that transformers loads, with experts that are decoded as they come."""
    options = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
    options |= {"experts_implementation": "eager", "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(source, **options)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("experts", ["stacked", "per_expert"])
def test_the_experts_are_those_that_transformers_decodes(tmp_path, seed, experts):
    """Bit for bit, and in the forward with fake quantization too: the scales are those of the file."""
    source = gpt_oss(tmp_path / "source", seed)
    theirs = theirs_of(source)
    model, quantization, report = load_quantized(source, experts=experts)
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
    assert all(".experts." in name for name in quantization.layers)
    assert len(report.weights_loaded) == len(quantization.layers) == (4 if experts == "stacked" else 16)
    assert not report.weights_measured
    ids = torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        expected = theirs(ids).logits.float()
        # Sums of bf16 products in another order.
        torch.testing.assert_close(model.eval()(ids).logits.float(), expected, rtol=0.05, atol=0.05)


def test_trained_experts_are_written_as_the_forward_has_them(tmp_path, seed):
    """From a plain gpt-oss; and with anything else quantized, or not all of them, the layout is refused."""
    source = VARIANTS["gpt_oss"].checkpoint(tmp_path / "source", seed=seed)
    model = load_model(source)
    quantization = quantize(model, rules=(Rule(SCHEMES["mxfp4"], r".*\.experts\..+"),))
    with pytest.raises(RankError, match=r"no quantized form in layout 'compressed'.*with 'gpt_oss'"):
        check_plan(model, quantization, source)
    check_plan(model, quantization, source, layout="gpt_oss")
    export_model(model, quantization, source, tmp_path / "export", layout="gpt_oss")
    theirs = theirs_of(tmp_path / "export")
    for name, layer in quantization.layers.items():
        assert torch.equal(theirs.get_parameter(name).transpose(1, 2), layer.used_weight())
    everything = load_model(source)
    with pytest.raises(RankError, match=r"layout 'gpt_oss' needs .* not so for model\.layers\.0\.self_attn"):
        check_plan(everything, quantize(everything, "mxfp4"), source, layout="gpt_oss")


BAD = {
    "no scales": (lambda t: t.pop(f"{GATE_UP}_scales"), r"gate_up_proj: _scales is missing beside _blocks"),
    "fewer scales": (lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:, 1:]}), r"_scales is U8"),
    "flat": (lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].flatten(2)}), r"_blocks is U8"),
    "floats": (lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].float()}), r"_blocks is F32"),
    "NaN": (lambda t: t[f"{GATE_UP}_scales"].view(-1)[7:8].fill_(255), r"gate_up_proj_scales must be finite"),
    "no blocks": (lambda t: t.pop(f"{GATE_UP}_blocks"), r"unexpected: .*gate_up_proj_scales"),
    "an expert too few": (
        lambda t: t.update({key: t[key][1:] for key in t if GATE_UP in key and "bias" not in key}),
        r"missing: .*experts\.3\.gate_up_proj",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_together_is_named(tmp_path, seed, case):
    edit, message = BAD[case]
    source = gpt_oss(tmp_path / "source", seed)
    edit_checkpoint(source, edit)
    with pytest.raises(RankError, match=message):
        load_model(source)


def test_any_range_of_an_expert_is_read(tmp_path, seed):
    """As ranks hold them: a partition begins and ends anywhere."""
    source = gpt_oss(tmp_path / "source", seed)
    model = load_model(source)
    coded = read_checkpoint(source, model).coded
    whole = model.get_parameter(f"{GATE_UP}.weight")
    with Reader() as reader:
        for expert in range(4):
            one = coded[f"model.layers.1.mlp.experts.{expert}.gate_up_proj"]
            start = random.randrange(whole[0].numel())
            count = random.randrange(whole[0].numel() - start) + 1
            for offset, values in one.values(reader, start, count, torch.bfloat16, CPU):
                assert torch.equal(whole[expert].flatten()[start + offset :][: len(values)], values)
