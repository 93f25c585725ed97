"""Tensors without codes in an export in the format of its source: dtypes that the model does not have, and what no
reader uses."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.quantized.checkpoint import read_checkpoint
from model.quantized.quantization_config import _WRITTEN, source_layout
from model.save.export_model import dtypes_on_disk, export_model
from quant import SCHEMES, Rule
from tests.families.variants import VARIANTS
from tests.lib.checkpoints import edit_checkpoint, load_quantized, quantized, read_tensors, same_bits, with_low_bits
from tests.lib.native import layouts
from tests.lib.tiny import tiny_checkpoint

A_LOG = "model.language_model.layers.0.linear_attn.A_log"
LAYOUTS = {name: layout for name, layout in layouts().items() if name.partition(":")[0] in _WRITTEN}


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


def in_other_dtypes(path: Path) -> None:
    """Store some plain tensors of a checkpoint in fp32 or fp16, with bits that bf16 does not have."""
    keys = dtypes_on_disk(read_checkpoint(path, None))

    def edit(tensors: dict[str, Tensor]) -> None:
        for key in keys & tensors.keys():
            if (dtype := random.choice([None, torch.float32, torch.float16])) is not None:
                tensors[key] = with_low_bits(tensors[key], dtype)

    edit_checkpoint(path, edit)


def assert_comes_back(path: Path, out: Path, dtype: torch.dtype = torch.bfloat16, **options) -> None:
    """Check that an export without a step has the bytes of a checkpoint."""
    model, quantization, _ = load_quantized(path, dtype, **options)
    export_model(model, quantization, path, out, layout=source_layout(path))
    different = [file.name for file in path.iterdir() if (out / file.name).read_bytes() != file.read_bytes()]
    read, found = read_tensors(path), read_tensors(out)
    assert not different, [key for key, one in read.items() if key not in found or not same_bits(one, found[key])]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_back_with_any_dtype_of_a_plain_tensor(tmp_path, name):
    path = LAYOUTS[name].write(tmp_path / "source")
    in_other_dtypes(path)
    # Values of 8 bits with a zero point are refused in bf16.
    assert_comes_back(path, tmp_path / "again", torch.float32 if name.endswith("w8a16_asym") else torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["compressed-tensors: w4a16_asym", "fp8: DeepSeek-V3"])
def test_a_source_in_bf16_comes_back_from_a_model_in_another_dtype(tmp_path, name, dtype):
    path = LAYOUTS[name].write(tmp_path / "source")
    assert_comes_back(path, tmp_path / "again", dtype)


# Experts one by one on disk, in one tensor, in one transposed tensor; tensors in several parts; a recurrence.
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "qwen3_vl_moe", "kimi_linear", "nemotron_h"])
def test_experts_and_parts_of_tensors_come_back_in_any_dtype(tmp_path, family):
    source = VARIANTS[family].checkpoint(tmp_path / "source", seed=random.randrange(2**31))
    rules = [Rule(None, r".*\.experts\..*")]
    model, quantization = quantized(source, SCHEMES["fp8_dynamic"], rules=rules)
    export_model(model, quantization, source, tmp_path / "export")
    in_other_dtypes(tmp_path / "export")
    for form in ("stacked",) if family in ("granitemoe", "qwen3_vl_moe") else ("stacked", "per_expert"):
        assert_comes_back(tmp_path / "export", tmp_path / form, experts=form)


def test_what_the_model_does_not_use_comes_back(tmp_path):
    """A tied weight that is stored twice, a rotary table, a config.json that is laid out in another way, and the
    configurations of processors of images."""
    source = tiny_checkpoint(tmp_path / "source", tied=True, seed=random.randrange(2**31))
    model, quantization = quantized(source, SCHEMES["fp8_dynamic"])
    path = tmp_path / "export"
    export_model(model, quantization, source, path)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)

    in_other_dtypes(path)  # fp16 may round the table to other values of bf16
    edit_checkpoint(path, edit)
    for name in ("preprocessor", "video_preprocessor", "processor"):
        (path / f"{name}_config.json").write_text("{}")
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()), indent=4))
    assert_comes_back(path, tmp_path / "again")
