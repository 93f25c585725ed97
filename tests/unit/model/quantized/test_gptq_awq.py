"""GPTQ's and AWQ's layouts, packed by hand after AutoGPTQ's and AutoAWQ's sources: code by code, with no function of
ours."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.build import build_model
from model.checkpoint.load import load_weights
from model.checkpoint.safetensors import CheckpointError, Reader, read_headers
from model.quantized.checkpoint import source_schemes
from model.quantized.foreign_layouts import read_columns
from model.quantized.quantization_config import packing_of, rules_of
from model.quantized.scales import take_scales
from model.ranks import RankError
from model.scales import load_scales
from quant import SCHEMES, prepare
from quant.reference import fake_quant
from tests.lib.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("seed")

NAME = "model.layers.0.mlp.up_proj"
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble, as AutoAWQ's AWQ_ORDER


def signed(words: list[int]) -> list[int]:
    return [word - 2**32 if word >= 2**31 else word for word in words]


def stream(codes: list[int], bits: int) -> list[int]:
    """A little-endian stream of codes in words of 32 bits."""
    whole = sum(code << (index * bits) for index, code in enumerate(codes))
    return signed([(whole >> (32 * index)) & 0xFFFFFFFF for index in range(len(codes) * bits // 32)])


def nibbles(codes: list[int]) -> list[int]:
    """Eight codes in a word, in AWQ's order."""
    return signed(
        [
            sum(codes[begin + column] << (4 * place) for place, column in enumerate(AWQ_NIBBLES))
            for begin in range(0, len(codes), 8)
        ]
    )


def written(kind: str, bits: int, rows: int, columns: int, size: int, symmetric: bool) -> tuple[dict, torch.Tensor]:
    """The tensors of one Linear, and the fp32 weight ``[out, in]`` that they are by the formula of their readers."""
    codes = torch.randint(0, 2**bits, (columns, rows))
    groups = columns // size
    # GPTQ stores the zero point less one; 0 has no code there.
    zero = torch.randint(1, 2**bits, (groups, rows))
    if symmetric:
        zero = torch.full((groups, rows), 2 ** (bits - 1))
    scale = (torch.rand(groups, rows) * 0.01 + 0.001).half()
    if kind == "auto-round" and symmetric:  # half of its scales are negative, so that the lowest code is used
        scale *= torch.randint(0, 2, scale.shape) * 2 - 1
    index = torch.arange(columns) // size
    weight = (codes - zero[index]).float() * scale.float()[index]
    tensors = {f"{NAME}.scales": scale}
    if kind.endswith("awq"):
        tensors[f"{NAME}.qweight"] = torch.tensor([nibbles(row) for row in codes.tolist()]).int()
        tensors[f"{NAME}.qzeros"] = torch.tensor([nibbles(row) for row in zero.tolist()]).int()
    else:
        tensors[f"{NAME}.qweight"] = torch.tensor([stream(row, bits) for row in codes.t().tolist()]).t().int()
        minus = 0 if kind == "gptq_v2" else 1
        tensors[f"{NAME}.qzeros"] = torch.tensor([stream(row, bits) for row in (zero - minus).tolist()]).int()
        tensors[f"{NAME}.g_idx"] = index.int()
    return {key: tensor.contiguous() for key, tensor in tensors.items()}, weight.t().contiguous()


def config_of(kind: str, bits: int, size: int, symmetric: bool) -> dict:
    if kind == "awq":
        method = {"quant_method": "awq", "version": "gemm", "zero_point": not symmetric}
    elif kind.startswith("auto-round"):
        layout = "auto_round:auto_awq" if kind.endswith("awq") else "auto_round:auto_gptq"
        method = {"quant_method": "auto-round", "packing_format": layout, "sym": symmetric}
        method["extra_config"] = {"lm_head": {"bits": 16, "data_type": "float"}}
    else:
        method = {"quant_method": "gptq", "checkpoint_format": kind, "sym": symmetric, "desc_act": False}
    return method | {"bits": bits, "group_size": size}


CASES = [
    *(("gptq", bits, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)),
    ("gptq_v2", 4, False),
    *(("auto-round", bits, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)),
    ("auto-round awq", 4, True),
    ("auto-round awq", 4, False),
    ("awq", 4, True),
    ("awq", 4, False),
]


@pytest.mark.parametrize(("kind", "bits", "symmetric"), CASES)
def test_any_range_is_what_the_formula_says(tmp_path, monkeypatch, kind, bits, symmetric):
    monkeypatch.setattr("model.quantized.tensor._CHUNK", 900)
    rows, columns, size = 32 * random.randrange(2, 4), 128, 32
    tensors, expected = written(kind, bits, rows, columns, size, symmetric)
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
        chunks = tensor.values(reader, start, rows * columns - start, torch.float32, torch.device("cpu"))
        found = torch.cat([chunk for _, chunk in chunks])
        assert torch.equal(found, expected.view(-1)[start:])
        scale = torch.cat([tensor.scales(reader, 0, 7), tensor.scales(reader, 7, rows * 4 - 7)])
    assert torch.equal(scale.view(rows, 4), tensors[f"{NAME}.scales"].t().float())


BAD = {
    "another order": ("g_idx", lambda t: t.flip(0), "g_idx: its columns were quantized in another order"),
    "other groups": ("scales", lambda t: t[:2].contiguous(), r"scales is F16 \[2, 64\], expected"),
    "other bits": ("qweight", lambda t: t[:8].contiguous(), "qzeros is|scales is"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_a_problem(tmp_path, case):
    end, change, text = BAD[case]
    tensors, _ = written("gptq", 4, 64, 128, 32, symmetric=True)
    tensors[f"{NAME}.{end}"] = change(tensors[f"{NAME}.{end}"])
    save_file(tensors, tmp_path / "model.safetensors")
    config = config_of("gptq", 4, 32, symmetric=True)
    coded, _, (problem,) = read_columns(read_headers(tmp_path), rules_of(config), "gptq")
    assert not coded
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(problem)


def test_zero_points_that_contradict_the_configuration_are_refused(tmp_path):
    """Of a file that says symmetric, and of one whose zero point readers disagree on: 15 + 1 is 16 or 0."""
    tensors, _ = written("gptq", 4, 64, 128, 32, symmetric=True)
    for symmetric, word, text in ((True, 0x66666666, "expected the middle"), (False, -1, "expected one of 16 codes")):
        tensors[f"{NAME}.qzeros"][1, 2] = word
        save_file(tensors, tmp_path / "model.safetensors")
        config = config_of("gptq", 4, 32, symmetric)
        coded, _, _ = read_columns(read_headers(tmp_path), rules_of(config), "gptq")
        with Reader() as reader, pytest.raises(CheckpointError, match=text):
            list(coded[f"{NAME}.weight"].values(reader, 0, 64 * 128, torch.float32, torch.device("cpu")))


REFUSED = {
    "marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act is true"),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'"),
    "awq 8": ({"quant_method": "awq", "bits": 8}, "bits is 8, expected 4"),
    "mixed": ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}}, "has a scheme of its own"),
    "mixed ar": ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 8}}}, "has a scheme of"),
    "a text as group": ({"quant_method": "gptq", "bits": 4, "group_size": "x"}, "group_size is 'x', expected a number"),
    "no group": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, expected a number"),
    "half a bit": ({"quant_method": "gptq", "bits": 4.0}, "bits is 4.0, expected 2 or 3"),
    "a list of layers": ({"quant_method": "gptq", "dynamic": [1]}, "not of the kind that 'gptq' has"),
    "a text of bits": ({"quant_method": "auto-round", "act_bits": "x"}, "not of the kind that 'auto-round' has"),
    "inputs": ({"quant_method": "auto-round", "bits": 4, "act_bits": 8}, "data_type or act_bits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(case):
    config, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        rules_of(config)


def gptq_checkpoint(directory: Path, kind: str = "gptq") -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny Llama of which every MLP is as GPTQ, or AWQ, writes it; and the weights that these are."""
    source = tiny_checkpoint(directory / "source", "llama", even=True, dtype=torch.float16)
    out = directory / kind
    shutil.copytree(source, out)
    (file,) = out.glob("*.safetensors")
    tensors, weights = load_file(file), {}
    for key in [key for key in tensors if ".mlp." in key]:
        rows, columns = tensors.pop(key).shape
        name = key.removesuffix(".weight")
        own, weights[name] = written(kind, 4, rows, columns, 32, symmetric=False)
        tensors |= {each.replace(NAME, name): tensor for each, tensor in own.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = config_of(kind, 4, 32, symmetric=False)
    (out / "config.json").write_text(json.dumps(config))
    return out, weights


def test_the_quantized_forward_uses_the_files_weights(tmp_path):
    """In fp16, the dtype of GPTQ's scales: weights as loaded, and as the forward quantizes them."""
    directory, weights = gptq_checkpoint(tmp_path)
    model = build_model(directory, {"fp16": {"enabled": True}}, dtype=torch.float16, device=torch.device("cpu"))
    load_weights(model, directory, progress=False)
    quantization = prepare(
        model, None, named=source_schemes(model, directory), learn_weight_scale=True, learn_input_scale=False
    )
    report = take_scales(model, quantization, directory)
    assert quantization.layers.keys() == weights.keys()
    assert not report.weights_measured
    assert report.rounded is None
    for name, layer in quantization.layers.items():
        assert torch.equal(layer.weight, weights[name].half())
        used = fake_quant(layer.weight, layer.weight_scale(), layer.scheme.weights, layer.weight_zero)
        assert torch.equal(used, weights[name].half())


@pytest.mark.parametrize("kind", ["gptq", "awq", "auto-round awq"])
def test_where_only_scales_are_read_the_error_names_what_reads_the_codes(tmp_path, kind):
    """By what config.json says, and by the tensors where there is none."""
    source = tiny_checkpoint(tmp_path / "model", "llama", even=True)
    model = build_model(source, {"bf16": {"enabled": True}}, dtype=torch.bfloat16, device=torch.device("cpu"))
    load_weights(model, source, progress=False)
    quantization = prepare(model, SCHEMES["w4a16_g32"], learn_weight_scale=True, learn_input_scale=False)
    directory, _ = gptq_checkpoint(tmp_path, kind)
    method = kind.split()[0]
    with pytest.raises(RankError, match=rf"quant_method is '{method}'.*; give this directory as quant\.start instead"):
        load_scales(model, quantization, directory)
    (directory / "config.json").unlink()
    with pytest.raises(RankError, match=r"has qweight, .*: give it, with its config\.json, as quant\.start instead of"):
        load_scales(model, quantization, directory)
