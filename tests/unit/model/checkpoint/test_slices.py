"""Experts whose matrices lie turned, or apart, in transformers' files: read and written as they were."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from model.build import build_model
from model.checkpoint.load import _Read, _transfer, load_weights
from model.checkpoint.names import Names, own_tensors
from model.checkpoint.safetensors import Reader, read_headers
from model.checkpoint.slices import Piece
from model.moe.arrange import arrange_experts
from model.moe.experts import Form
from model.save import export_model
from quant import SCHEMES, prepare
from tests.families.variants import VARIANTS

CPU = torch.device("cpu")
FILE = "model.safetensors"


def loaded(source: Path, dtype: torch.dtype = torch.bfloat16, experts: Form = "stacked", method="direct"):
    config = {"bf16": {"enabled": dtype == torch.bfloat16}}
    model = build_model(source, config, dtype=dtype, device=CPU, experts=experts).eval()
    load_weights(model, source, progress=False, method=method)
    return model


def checkpoint(kind: str, directory: Path, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """As transformers saves it; of Qwen3-VL as it was published, which transformers turns as it loads."""
    variant = VARIANTS[kind]
    if kind == "qwen3_vl_moe":  # of which gate and up are square else, and never turned
        text = {**variant.parts["text_config"], "moe_intermediate_size": 40}
        variant = replace(variant, parts={**variant.parts, "text_config": text})
    variant.checkpoint(directory, seed=seed, dtype=dtype)
    if kind == "qwen3_vl_moe":
        tensors = load_file(directory / FILE)
        turned = {key: value.transpose(1, 2).contiguous() for key, value in tensors.items() if ".experts." in key}
        assert turned and all(value.shape != tensors[key].shape for key, value in turned.items())
        save_file({**tensors, **turned}, directory / FILE, metadata={"format": "pt"})
    return directory


def same_files(ours: Path, theirs: Path) -> None:
    after, before = load_file(ours / FILE), load_file(theirs / FILE)
    assert after.keys() == before.keys()
    assert not [key for key in before if not torch.equal(after[key], before[key])]


KINDS = ["gpt_oss", "llama4_text", "aria_text", "dbrx", "qwen3_vl_moe"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_written_as_it_was(kind: str, tmp_path: Path, seed: int):
    """By either way of reading, and with quantized layers whose values are written in the place of the weights."""
    source = checkpoint(kind, tmp_path / "source", seed)
    model = loaded(source)
    export_model(model, None, source, tmp_path / "plain")
    same_files(tmp_path / "plain", source)
    for one, other in zip(own_tensors(model).items(), own_tensors(loaded(source, method="rank0")).items(), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1]), one[0]

    quantization = prepare(model, SCHEMES["w8a16_channel"], learn_weight_scale=False, learn_input_scale=False)
    for layer in quantization.layers.values():  # multiples of the scale, so that nothing is rounded
        layer.weight_s0.data.fill_(2**-9)
        layer.weight.data = (layer.weight.data / 2**-9).round().clamp(-127, 127) * 2**-9
    export_model(model, quantization, source, tmp_path / "values", layout="dequantized")
    found = own_tensors(loaded(tmp_path / "values"))
    for name, value in own_tensors(model).items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path, seed: int):
    """Read from the same file, in fp64 from then on; attention and norms have parts in fp32."""
    source = checkpoint(kind, tmp_path, seed, torch.float32)
    cls = VARIANTS[kind].class_of(VARIANTS[kind].config())
    theirs: PreTrainedModel = cls.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").double()
    theirs.set_experts_implementation("eager")
    ids = torch.randint(7, 300, (2, 21))
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        for form in ("stacked", "per_expert"):
            found = loaded(source, torch.float32, form).double()(input_ids=ids).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_any_range_of_a_turned_matrix_is_read(tmp_path: Path, seed: int):
    """As ranks hold them: a partition begins and ends anywhere."""
    generator = torch.Generator().manual_seed(seed)
    experts, rows, columns = 3, 5, 4
    whole = torch.randn(experts, columns, rows, generator=generator)
    save_file({"w": whole}, tmp_path / FILE)
    ours = whole.transpose(1, 2).reshape(-1)
    source = read_headers(tmp_path).tensors["w"]
    size = rows * columns
    pieces = [Piece("w", expert * size, (rows, columns), expert * size, rows) for expert in range(experts)]
    with Reader() as reader:
        for start, stop in itertools.combinations(range(0, ours.numel() + 1, 7), 2):
            values = torch.full((stop - start,), torch.nan)
            for piece in pieces:
                assert _transfer(_Read(source, piece, values, None), reader, start, values)
            assert torch.equal(values, ours[start:stop]), (start, stop)
            for piece in pieces:  # a tied tensor is compared
                assert _transfer(_Read(source, piece, values, "other"), reader, start, values)
            values[-1] += 1
            assert not all(_transfer(_Read(source, piece, values, "other"), reader, start, values) for piece in pieces)


def test_where_the_shape_on_disk_says_it_qwen_3_vl_is_turned():
    with torch.device("meta"):
        variant = VARIANTS["qwen3_vl_moe"]
        model = variant.class_of(variant.config())._from_config(variant.config(), attn_implementation="eager")
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    arrange_experts(model, "stacked")
    as_is = Names(model).layout(name)
    turned = Names(model, {name: (as_is.shape[0], as_is.shape[2], as_is.shape[1])}).layout(name)
    assert not any(piece.turned for piece in as_is.pieces) and all(piece.turned for piece in turned.pieces)
    assert turned.shape == (as_is.shape[0], as_is.shape[2], as_is.shape[1])
