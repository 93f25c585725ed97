"""Tensors without codes that a quantized checkpoint stores in another dtype than the model computes in."""

import random
from pathlib import Path

import torch

from model.save.export_model import export_model
from quant import SCHEMES
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_checkpoint, load_quantized, quantized, read_tensors, same_bits, with_low_bits

A_LOG = "model.language_model.layers.0.linear_attn.A_log"


def qwen3_5(directory: Path) -> Path:
    """A tiny Qwen3.5 in fp8, with tensors of its linear attention in fp32 as they are published."""
    source = VARIANTS["qwen3_5"].checkpoint(directory / "source", seed=random.randrange(2**31))
    model, quantization = quantized(source, SCHEMES["fp8_dynamic"])
    export_model(model, quantization, source, directory / "qwen3_5")
    wide = ("linear_attn.A_log", "linear_attn.norm.weight")
    edit_checkpoint(
        directory / "qwen3_5",
        lambda tensors: tensors.update({key: with_low_bits(tensors[key]) for key in tensors if key.endswith(wide)}),
    )
    return directory / "qwen3_5"


def test_elements_that_changed_are_widened_and_others_keep_their_low_bits(tmp_path):
    path = qwen3_5(tmp_path)
    model, quantization, _ = load_quantized(path)
    values = next(own for name, own in model.named_parameters() if name.endswith("0.linear_attn.A_log"))
    with torch.no_grad():
        values[::2] += 1
    export_model(model, quantization, path, tmp_path / "again")
    read, found = read_tensors(path), read_tensors(tmp_path / "again")
    assert torch.equal(found[A_LOG][::2], values[::2].float()) and torch.equal(found[A_LOG][1::2], read[A_LOG][1::2])
    assert not torch.equal(values[1::2].float(), read[A_LOG][1::2])
    del read[A_LOG]
    assert all(same_bits(one, found[key]) for key, one in read.items())
