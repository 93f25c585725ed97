"""Matrices that are transposed, or split, in transformers' files: read and written unchanged."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from model.checkpoint.load import _Read, _transfer, load_weights
from model.checkpoint.names import TensorSlice, own_tensors
from model.checkpoint.safetensors import Reader, read_headers
from model.ranks import RankError
from model.save.export_model import check_plan, export_model
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import assert_same_tensors, build, edit_checkpoint, load_model, quantize, read_tensors


def checkpoint(kind: str, directory: Path, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """As transformers saves it; or Qwen3-VL as it was published, which transformers transposes as it loads."""
    variant = VARIANTS[kind.partition(",")[0]]
    if "published" not in kind:
        return variant.checkpoint(directory, seed=seed, dtype=dtype)
    # Gate and up are square else, and never transposed.
    text = {**variant.parts["text_config"], "moe_intermediate_size": 40}
    replace(variant, parts={**variant.parts, "text_config": text}).checkpoint(directory, seed=seed, dtype=dtype)
    edit_checkpoint(directory, lambda t: t.update({key: t[key].transpose(1, 2) for key in t if ".experts." in key}))
    return directory


KINDS = ["gpt_oss", "llama4_text", "aria_text", "dbrx", "qwen3_vl_moe", "qwen3_vl_moe, published"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_written_as_it_was(kind: str, tmp_path: Path, seed: int):
    """By both ways of reading, and with quantized layers whose values are exported in place of the weights."""
    source = checkpoint(kind, tmp_path / "source", seed)
    model = load_model(source)
    export_model(model, None, source, tmp_path / "plain")
    assert_same_tensors(tmp_path / "plain", source)
    other = build(source)
    load_weights(other, source, method="rank0")
    for (name, value), (_, found) in zip(own_tensors(model).items(), own_tensors(other).items(), strict=True):
        assert torch.equal(value, found), name

    quantization = quantize(model, "w8a16_channel", learn=False, measure=False)
    for layer in quantization.layers.values():  # multiples of the scale, so that nothing is rounded
        layer.weight_s0.data.fill_(2**-9)
        layer.weight.data = (layer.weight.data / 2**-9).round().clamp(-127, 127) * 2**-9
    export_model(model, quantization, source, tmp_path / "values", layout="dequantized")
    found = own_tensors(load_model(tmp_path / "values"))
    for name, value in own_tensors(model).items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path, seed: int):
    """Read from the same file, in fp64 from then on; attention and norms have parts in fp32."""
    source = checkpoint(kind, tmp_path, seed, torch.float32)
    variant = VARIANTS[kind.partition(",")[0]]
    cls = variant.class_of(variant.config())
    theirs: PreTrainedModel = cls.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").double()
    theirs.set_experts_implementation("eager")
    ids = torch.randint(7, 300, (2, 21))
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        for form in ("stacked", "per_expert"):
            found = load_model(source, torch.float32, experts=form).eval().double()(input_ids=ids).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_any_range_of_a_transposed_matrix_is_read(tmp_path: Path, seed: int):
    """As ranks hold them: a partition begins and ends anywhere."""
    experts, rows, columns = 3, 5, 4
    whole = torch.randn(experts, columns, rows)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    ours = whole.transpose(1, 2).reshape(-1)
    source = read_headers(tmp_path).tensors["w"]
    size = rows * columns
    pieces = [TensorSlice("w", expert * size, (rows, columns), expert * size, rows) for expert in range(experts)]
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


@pytest.fixture
def published_gpt2(tmp_path: Path, seed: int) -> Path:
    """A checkpoint with the keys of the first GPT-2 of the hub."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()

    path = VARIANTS["gpt2"].checkpoint(tmp_path / "source", seed=seed)
    edit_checkpoint(path, rename)
    return path


@torch.no_grad()
def logits_of(directory: Path, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=dtype)
    assert not any(info.values()), info
    return model.eval()(input_ids=ids).logits.float()


def test_gpt2_logits_are_those_of_transformers_and_it_comes_back_bit_for_bit(published_gpt2: Path, tmp_path: Path):
    ids = torch.randint(7, 300, (2, 16))
    theirs = logits_of(published_gpt2, ids, torch.float32)
    ours = load_model(published_gpt2, torch.float32).eval()(input_ids=ids).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()
    export_model(load_model(published_gpt2), None, published_gpt2, tmp_path / "plain")
    before, after = read_tensors(published_gpt2), read_tensors(tmp_path / "plain")
    # The mask is no part of the model, and copied as all such tensors are.
    named = {key if key == "h.0.attn.bias" else f"transformer.{key}": tensor for key, tensor in before.items()}
    assert after.keys() == named.keys() and all(torch.equal(after[key], tensor) for key, tensor in named.items())


def test_what_was_trained_is_exported_as_weights_alone(published_gpt2: Path, tmp_path: Path):
    model = load_model(published_gpt2).eval()
    quantization = quantize(model, "w4a16_g32", learn=False)
    assert "transformer.h.0.attn.c_attn" in quantization.layers
    with pytest.raises(RankError, match=r"c_attn: .* a Conv1D here, which .*: set export\.format to dequantized$"):
        check_plan(model, quantization, published_gpt2)
    export_model(model, quantization, published_gpt2, tmp_path / "weights", layout="dequantized")
    written = read_tensors(tmp_path / "weights")
    for name, layer in quantization.layers.items():
        assert torch.equal(written[f"{name}.weight"], layer.used_weight().t().to(torch.bfloat16)), name
    ids = torch.randint(7, 300, (2, 16))
    with torch.no_grad():
        ours, theirs = model(input_ids=ids).logits.float(), logits_of(tmp_path / "weights", ids, torch.bfloat16)
    assert (ours - theirs).abs().max() < 0.05 * theirs.std()


def test_a_matrix_that_is_not_transposed_is_named(published_gpt2: Path):
    key = "h.1.mlp.c_fc.weight"
    edit_checkpoint(published_gpt2, lambda tensors: tensors.update({key: tensors[key].t()}))
    with pytest.raises(RankError, match=r"of another shape: h\.1\.mlp\.c_fc\.weight is \[96, 64\], the model has"):
        load_model(published_gpt2)
