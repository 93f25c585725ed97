"""NaN and infinities in parameters: refused by name when a model is read, and before anything of it is written."""

import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quant
from model.build import build_model
from model.checkpoint.load import check_finite, load_weights
from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_scales
from model.ranks import RankError
from model.save import export_model
from model.save.peft_adapter import PeftFolder
from model.scales import load_scales, renew_weight_scales
from quant import SCHEMES
from quant.formats.layouts import Layout
from quant.lora import Adapter
from quant.packed_weight import PackedCodes
from quant.spec import PRESETS, Preset, Scheme
from tests.lib.checkpoints import exported
from tests.lib.tiny import tiny_checkpoint
from tests.unit.model.quantized.test_round_trip import ENGINE
from tools.compressed import load_compressed

NOT_FINITE = (math.nan, math.inf, -math.inf)
CPU = torch.device("cpu")


def plain(source: Path) -> nn.Module:
    model = build_model(source, ENGINE, dtype=torch.bfloat16, device=CPU, experts="per_expert")
    load_weights(model, source, progress=False)
    return model


@torch.no_grad()
def broken(tensor: Tensor) -> None:
    """Make one element of it NaN or infinite; of bytes that are no floats of torch, what their format has for NaN."""
    place = random.randrange(tensor.numel())
    if tensor.itemsize == 1:
        tensor.view(torch.uint8).view(-1)[place] = 255 if tensor.dtype == torch.uint8 else random.choice((127, 255))
    else:
        tensor.view(-1)[place] = random.choice(NOT_FINITE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_parameter_is_looked_at_and_no_scale_that_nobody_has_filled(dtype, seed):
    """Weights, quantized or not, biases, learned scales and adapters; frozen ones too."""
    model = nn.Sequential(nn.Embedding(7, 48), nn.Linear(48, 16), nn.LayerNorm(16), nn.Linear(16, 5)).to(dtype)
    quant.prepare(model, SCHEMES["fp8_static"], exempt=("3",), learn_weight_scale=True, learn_input_scale=True)
    pair = (nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((2, 48), (16, 2)))
    model[1].attach_adapter(Adapter(*pair, 1.0))
    model[1].weight.requires_grad_(False)
    assert model[1].weight_s0.isnan().all() and model[1].input_s0.isnan().all()
    check_finite(model, "nothing is wrong")
    for name, parameter in model.named_parameters():
        if name.endswith("_s0"):
            continue
        kept = parameter.detach().clone()
        broken(parameter)
        with pytest.raises(RankError) as found:
            check_finite(model, "it is so")
        assert str(found.value) == f"it is so: NaN or Inf in {name}"
        parameter.data.copy_(kept)
    largest = torch.finfo(dtype).max
    model[1].weight.data.fill_(largest)  # their sum is infinite
    check_finite(model, "nothing is wrong")


def test_bytes_of_codes_are_no_numbers():
    model = nn.Linear(8, 8).bfloat16()
    model.weight.data.fill_(torch.nan)
    model.weight.held = PackedCodes(SCHEMES["fp8_dynamic"].weights, (8, 16))
    check_finite(model, "nothing is wrong")


def tensors_of(directory: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    for file in directory.glob("*.safetensors"):
        yield file, load_file(file)


def break_on_disk(directory: Path, chosen) -> str:
    """Break one tensor whose key is chosen; returns its key."""
    keys = [(file, key) for file, tensors in tensors_of(directory) for key in tensors if chosen(key, tensors[key])]
    file, key = random.choice(sorted(keys))
    tensors = load_file(file)
    broken(tensors[key])
    save_file(tensors, file, metadata={"format": "pt"})
    return key


def test_a_plain_checkpoint_that_holds_one_is_not_read(tmp_path, seed):
    """Also where the tensor would not be quantized, like a row of the embeddings that no sample looks up."""
    source = tiny_checkpoint(tmp_path / "source", random.choice(("qwen3", "qwen3_moe")), even=True)
    key = break_on_disk(source, lambda key, tensor: True)
    with pytest.raises(RankError, match="are not all numbers: NaN or Inf in") as found:
        plain(source)
    assert key in str(found.value) and str(source) in str(found.value)


def representatives() -> list:
    """Every preset, of which one for each kind of code and stored scale is tested always."""
    seen, cases = set(), []
    for name, preset in PRESETS.items():
        scheme = preset.linear
        weights, stored = (None, None) if scheme is None else (scheme.weights, scheme.stored_input)
        kind = (weights and (weights.dtype, weights.scale_format, weights.symmetric), stored and stored.dtype)
        known = (*kind, preset.kv_cache) in seen
        seen.add((*kind, preset.kv_cache))
        cases.append(pytest.param(name, marks=[pytest.mark.full] if known else []))
    return cases


@pytest.mark.parametrize("name", representatives())
def test_a_quantized_checkpoint_that_holds_one_is_not_read(name, tmp_path, seed):
    """In codes, in scales of any kind, or in what is not quantized: neither by the reader of exports, nor as
    model.path, nor, where it is a scale, as quant.scales of the model that it was made from."""
    preset = PRESETS[name]
    exported(tmp_path, "qwen3", preset.linear, kv_cache=preset.kv_cache, wide=True)
    export, work = tmp_path / "export", tmp_path / "work"
    able = {
        key: key.rpartition(".")[2]
        for _, tensors in tensors_of(export)
        for key, tensor in tensors.items()
        if tensor.is_floating_point() or (tensor.dtype == torch.uint8 and key.endswith("_scale"))
    }
    for kind in sorted(set(able.values())):
        shutil.copytree(export, work)
        key = break_on_disk(work, lambda key, tensor, kind=kind: able.get(key) == kind)
        for reader in (as_export, as_source, as_scales):
            if reader is as_export or (preset.linear is not None and (reader is as_source or kind.endswith("_scale"))):
                with pytest.raises(RankError) as found:
                    reader(work, tmp_path / "source", preset)
                assert key.rpartition(".")[0] in str(found.value), (reader, key, str(found.value))
        shutil.rmtree(work)


def as_export(directory: Path, source: Path, preset: Preset) -> None:
    load_compressed(directory, dtype=torch.float32, device=CPU)


def as_source(directory: Path, source: Path, preset: Preset) -> None:
    """Weights, and then scales, of keys and values too; in fp32, which holds what any codes stand for."""
    model = build_model(directory, {}, dtype=torch.float32, device=CPU)
    load_weights(model, directory, progress=False)
    take_scales(model, prepared(model, preset, named=source_schemes(model, directory)), directory)


def as_scales(directory: Path, source: Path, preset: Preset) -> None:
    model = plain(source)
    load_scales(model, prepared(model, preset), directory)


def prepared(model: nn.Module, preset: Preset, named: dict[str, Scheme] | None = None) -> quant.Quantization:
    options = {"learn_weight_scale": True, "learn_input_scale": False, "kv_cache": preset.kv_cache}
    return quant.prepare(model, preset.linear if named is None else None, named=named, **options)


LAYOUTS: dict[Layout, str] = {
    "compressed": "nvfp4",
    "vllm_fp8": "fp8_block",
    "dequantized": "w3a16_g32",
    "mlx": "w4a16_g32",
    "executorch": "8da4w",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_holds_one_is_not_written(layout, tmp_path, seed):
    """Quantized weights, embeddings, norms or lm_head: named, and nothing is left of the export."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3", even=True, wide=True)
    model = plain(source)
    scheme = SCHEMES[LAYOUTS[layout]]
    quantization = quant.prepare(model, scheme, learn_weight_scale=True, learn_input_scale=False)
    renew_weight_scales(quantization)
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name in random.sample(sorted(named), 3):
        kept = named[name].detach().clone()
        broken(named[name])
        with pytest.raises(RankError, match=rf"the model diverged.*NaN or Inf in {re.escape(name)}"):
            export_model(model, quantization, source, tmp_path / "export", layout=layout)
        named[name].data.copy_(kept)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    export_model(model, quantization, source, tmp_path / "export", layout=layout)


def test_an_adapter_alone_that_holds_one_is_not_written(tmp_path, seed):
    tensors = {f"layer.lora_{part}.weight": torch.randn(4, 4).bfloat16() for part in "AB"}
    broken(tensors["layer.lora_B.weight"])
    with pytest.raises(RankError, match=r"the model diverged.*NaN or Inf in layer\.lora_B\.weight"):
        PeftFolder(tensors, {}, "base").publish(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())
