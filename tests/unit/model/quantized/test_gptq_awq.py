"""GPTQ's and AWQ's layouts: ranges of weights against their readers' formula, and files that do not fit."""

import json
import random
import re

import pytest
import torch
from safetensors.torch import save_file

from model.checkpoint.safetensors import CheckpointError, Reader, read_headers
from model.quantized.checkpoint import read_columns
from model.quantized.quantization_config import packing_of, rules_of
from model.ranks import RankError
from model.save.export_model import export_model
from model.scales.loading import load_scales
from tests.lib.checkpoints import CPU, edit_checkpoint, edit_json, load_model, quantize, read_tensors
from tests.lib.published import NAME, config_of, gptq_checkpoint, packed_linear
from tests.lib.tiny import tiny_checkpoint

CASES = [("gptq", bits, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)]
CASES += [(kind, 4, symmetric) for kind in ("auto-round", "auto-round awq", "awq") for symmetric in (True, False)]
CASES += [("gptq_v2", 4, False)]


@pytest.mark.parametrize(("kind", "bits", "symmetric"), CASES)
def test_any_range_is_what_the_formula_says(tmp_path, monkeypatch, kind, bits, symmetric):
    monkeypatch.setattr("model.quantized.tensor._CHUNK", 900)
    rows, columns, size = 32 * random.randrange(2, 4), 128, 32
    tensors, expected = packed_linear(kind, bits, rows, columns, size, symmetric)
    save_file(tensors, tmp_path / "model.safetensors")
    config = config_of(kind, bits, size, symmetric)
    packing = packing_of(config)
    assert packing is not None
    coded, beside, problems = read_columns(read_headers(tmp_path), rules_of(config), packing)
    assert not problems, problems
    assert beside.keys() == tensors.keys()
    (tensor,) = coded.values()
    spec = tensor.scheme.weights
    assert (tensor.shape, spec.bits, spec.symmetric) == ((rows, columns), bits, symmetric)
    start = random.randrange(rows * columns - 1)
    with Reader() as reader:
        chunks = tensor.values(reader, start, rows * columns - start, torch.float32, CPU)
        found = torch.cat([chunk for _, chunk in chunks])
        assert torch.equal(found, expected.view(-1)[start:])
        scale = torch.cat([tensor.scales(reader, 0, 7), tensor.scales(reader, 7, rows * 4 - 7)])
    assert torch.equal(scale.view(rows, 4), tensors[f"{NAME}.scales"].t().float())


BAD = {
    "another order": ("g_idx", lambda t: t.flip(0), "g_idx: the columns were quantized in another order"),
    "other groups": ("scales", lambda t: t[:2].contiguous(), r"scales is F16 \[2, 64\], expected"),
    "other bits": ("qweight", lambda t: t[:8].contiguous(), "qzeros is|scales is"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_a_problem(tmp_path, case):
    end, change, text = BAD[case]
    tensors, _ = packed_linear("gptq", 4, 64, 128, 32, symmetric=True)
    tensors[f"{NAME}.{end}"] = change(tensors[f"{NAME}.{end}"])
    save_file(tensors, tmp_path / "model.safetensors")
    rules = rules_of(config_of("gptq", 4, 32, symmetric=True))
    coded, _, (problem,) = read_columns(read_headers(tmp_path), rules, "gptq")
    assert not coded and re.search(text, problem), problem


def test_zero_points_that_contradict_the_configuration_are_refused(tmp_path):
    """In a file that says symmetric, and in one whose zero point readers disagree on: 15 + 1 is 16 or 0."""
    tensors, _ = packed_linear("gptq", 4, 64, 128, 32, symmetric=True)
    for symmetric, word, text in (
        (True, 0x66666666, "expected 8, as the scheme is symmetric"),
        (False, -1, "expected 0 to 15"),
    ):
        tensors[f"{NAME}.qzeros"][1, 2] = word
        save_file(tensors, tmp_path / "model.safetensors")
        coded, _, _ = read_columns(read_headers(tmp_path), rules_of(config_of("gptq", 4, 32, symmetric)), "gptq")
        with Reader() as reader, pytest.raises(CheckpointError, match=text):
            list(coded[f"{NAME}.weight"].values(reader, 0, 64 * 128, torch.float32, CPU))


@pytest.mark.parametrize("kind", ["gptq", "awq", "auto-round awq"])
def test_where_only_scales_are_read_the_error_names_what_reads_the_codes(tmp_path, kind):
    """By what config.json says, and by the tensors where there is none."""
    model = load_model(tiny_checkpoint(tmp_path / "model", "llama", even=True))
    quantization = quantize(model, "w4a16_g32", measure=False)
    directory, _ = gptq_checkpoint(tmp_path, kind)
    method = kind.split()[0]
    with pytest.raises(RankError, match=rf"quant_method is '{method}'.*; give this directory as quant\.start instead"):
        load_scales(model, quantization, directory)
    (directory / "config.json").unlink()
    with pytest.raises(RankError, match=r"has qweight, .*: give it, with its config\.json, as quant\.start instead of"):
        load_scales(model, quantization, directory)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_biases_of_zeros_that_the_model_lacks_are_left_out(tmp_path, value):
    """AutoGPTQ writes one for each Linear."""
    directory, weights = gptq_checkpoint(tmp_path, "gptq")
    name = next(iter(weights))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}.bias"] = torch.full((len(weights[name]),), value, dtype=torch.float16)

    edit_checkpoint(directory, add)
    if value:
        with pytest.raises(RankError, match=rf"unexpected: {name}\.bias"):
            load_model(directory, torch.float16)
        return
    model = load_model(directory, torch.float16)
    assert torch.equal(model.get_parameter(f"{name}.weight"), weights[name].half())
    export_model(model, quantize(model, "w4a16_g32"), directory, tmp_path / "export")
    assert f"{name}.bias" not in read_tensors(tmp_path / "export")


@pytest.mark.parametrize(("kind", "file"), [("gptq", "quantize_config.json"), ("awq", "quant_config.json")])
def test_codes_that_only_a_file_of_the_quantizer_describes_are_read(tmp_path, kind, file):
    """Early versions of AutoGPTQ and AutoAWQ did not write into config.json. The same file beside plain weights says
    nothing of them."""
    directory, weights = gptq_checkpoint(tmp_path, kind)
    config = edit_json(directory / "config.json").pop("quantization_config")
    edit_json(directory / "config.json", lambda whole: whole.pop("quantization_config"))
    (directory / file).write_text(json.dumps({key: value for key, value in config.items() if key != "quant_method"}))
    model = load_model(directory, torch.float16)
    for name, expected in weights.items():
        assert torch.equal(model.get_parameter(f"{name}.weight"), expected.half()), name
    edit_json(directory / file, desc_act=True)
    if kind == "gptq":
        with pytest.raises(RankError, match=r"quantize_config\.json: desc_act is true"):
            load_model(directory)
    (directory / file).write_text("{")
    with pytest.raises(RankError, match=rf"{file} is not readable JSON"):
        load_model(directory)
    (tmp_path / "source" / file).write_text(json.dumps(config))
    load_model(tmp_path / "source")
