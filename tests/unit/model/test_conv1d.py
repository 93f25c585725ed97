"""GPT-2 as it is published: its matrices lie turned, its keys have no prefix, and its masks are among them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from model.build import build_model
from model.checkpoint.load import load_weights
from model.ranks import RankError
from model.save import check_plan, export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, prepare
from tests.families.variants import VARIANTS

CPU = torch.device("cpu")


@pytest.fixture
def published(tmp_path: Path, seed: int) -> Path:
    """A checkpoint with the keys of the first GPT-2 of the hub."""
    path = VARIANTS["gpt2"].checkpoint(tmp_path / "source", seed=seed)
    tensors = load_file(path / "model.safetensors")
    tensors = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def loaded(path: Path, dtype: torch.dtype = torch.bfloat16):
    ds_config = {"bf16": {"enabled": dtype == torch.bfloat16}}
    model = build_model(path, ds_config, dtype=dtype, device=CPU).eval()
    load_weights(model, path, progress=False)
    return model


def of(directory: Path, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The logits of transformers' own model of a directory."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=dtype)
    assert not any(info.values()), info
    return model.eval()(input_ids=ids).logits


def test_its_logits_are_those_of_transformers_and_it_comes_back_bit_for_bit(published: Path, tmp_path: Path):
    ids = torch.randint(7, 300, (2, 16))
    ours, theirs = loaded(published, torch.float32)(input_ids=ids).logits, of(published, ids, torch.float32)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.std()
    export_model(loaded(published), None, published, tmp_path / "plain")
    before, after = (load_file(directory / "model.safetensors") for directory in (published, tmp_path / "plain"))
    # The mask is no part of the model, and copied as all such tensors are.
    named = {key if key == "h.0.attn.bias" else f"transformer.{key}": tensor for key, tensor in before.items()}
    assert after.keys() == named.keys() and all(torch.equal(after[key], tensor) for key, tensor in named.items())


def test_what_was_trained_is_exported_as_weights_alone(published: Path, tmp_path: Path):
    model = loaded(published)
    quantization = prepare(model, SCHEMES["w4a16_g32"], learn_weight_scale=False, learn_input_scale=False)
    renew_weight_scales(quantization)
    assert "transformer.h.0.attn.c_attn" in quantization.layers
    with pytest.raises(RankError, match=r"c_attn: .* a Conv1D here, which .*: set export\.format to dequantized$"):
        check_plan(model, quantization, published)
    export_model(model, quantization, published, tmp_path / "weights", layout="dequantized")
    written = load_file(tmp_path / "weights" / "model.safetensors")
    for name, layer in quantization.layers.items():
        assert torch.equal(written[f"{name}.weight"], layer.used_weight().t().to(torch.bfloat16)), name
    ids = torch.randint(7, 300, (2, 16))
    with torch.no_grad():
        ours, theirs = model(input_ids=ids).logits.float(), of(tmp_path / "weights", ids, torch.bfloat16).float()
    assert (ours - theirs).abs().max() < 0.05 * theirs.std()


def test_a_matrix_that_lies_as_ours_do_is_named(published: Path):
    tensors = load_file(published / "model.safetensors")
    tensors["h.1.mlp.c_fc.weight"] = tensors["h.1.mlp.c_fc.weight"].t().contiguous()
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankError, match=r"of another shape: h\.1\.mlp\.c_fc\.weight is \[96, 64\], the model has"):
        loaded(published)
