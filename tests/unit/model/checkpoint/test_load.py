"""NaN and infinities in parameters: refused by name when a model is read, and before it is written."""

import math
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from model.checkpoint.load import check_finite
from model.peft import PeftFolder
from model.quantized.checkpoint import source_schemes
from model.quantized.scales import take_scales
from model.ranks import RankError
from model.save.export_model import export_model
from model.scales.loading import load_scales
from quant import SCHEMES
from quant.adapters import Adapter
from quant.formats.layouts import Layout
from quant.packed_weight import PackedCodes
from quant.spec import PRESETS
from tests.lib.checkpoints import CPU, edit_checkpoint, load_model, quantize, read_tensors
from tests.lib.tiny import tiny_checkpoint
from tools.compressed import load_compressed


@torch.no_grad()
def damage(tensor: Tensor) -> None:
    """Make one element NaN or infinite; in one-byte formats, the format's code for NaN."""
    place = random.randrange(tensor.numel())
    if tensor.itemsize == 1:
        tensor.view(torch.uint8).view(-1)[place] = 255 if tensor.dtype == torch.uint8 else random.choice((127, 255))
    else:
        tensor.view(-1)[place] = random.choice((math.nan, math.inf, -math.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_parameter_is_checked_and_no_scale_that_is_not_filled(dtype, seed):
    """Weights, quantized or not, biases, learned scales and adapters; frozen ones too."""
    model = nn.Sequential(nn.Embedding(7, 48), nn.Linear(48, 16), nn.LayerNorm(16), nn.Linear(16, 5)).to(dtype)
    quantize(model, "fp8_static", exempt=("3",), learn_input_scale=True, measure=False)
    pair = (nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((2, 48), (16, 2)))
    model[1].attach_adapter(Adapter(*pair, 1.0))
    model[1].weight.requires_grad_(False)
    assert model[1].weight_s0.isnan().all() and model[1].input_s0.isnan().all()
    check_finite(model, "nothing is wrong")
    for name, parameter in model.named_parameters():
        if name.endswith("_s0"):
            continue
        kept = parameter.detach().clone()
        damage(parameter)
        with pytest.raises(RankError) as found:
            check_finite(model, "it is so")
        assert str(found.value) == f"it is so: NaN or Inf in {name}"
        parameter.data.copy_(kept)
    model[1].weight.data.fill_(torch.finfo(dtype).max)  # their sum is infinite
    check_finite(model, "nothing is wrong")


def test_bytes_of_codes_are_no_numbers():
    model = nn.Linear(8, 8).bfloat16()
    model.weight.data.fill_(torch.nan)
    model.weight.held = PackedCodes(SCHEMES["fp8_dynamic"].weights, (8, 16))
    check_finite(model, "nothing is wrong")


def damage_on_disk(directory: Path, keys: list[str]) -> str:
    """Damage one of these tensors; returns its key."""
    key = random.choice(sorted(keys))
    edit_checkpoint(directory, lambda tensors: damage(tensors[key]) if key in tensors else None)
    return key


def test_a_plain_checkpoint_that_holds_one_is_not_read(tmp_path, seed):
    """Also where the tensor would not be quantized, like a row of the embeddings that no sample looks up."""
    source = tiny_checkpoint(tmp_path / "source", random.choice(("qwen3", "qwen3_moe")), even=True)
    key = damage_on_disk(source, list(read_tensors(source)))
    with pytest.raises(RankError, match="are not all numbers: NaN or Inf in") as found:
        load_model(source, experts="per_expert")
    assert key in str(found.value) and str(source) in str(found.value)


# One of each kind of code and stored scale; the others come with the large counts.
ALWAYS = {"fp8_static", "fp8_dynamic", "int8_dynamic", "w8a8_static", "q4_0", "w4a16_asym", "nvfp4", "nvfp4_w4a4"}
ALWAYS |= {"mxfp4", "mxfp8", "fp8_kv", "fp8_static_kv", "nvfp4_w4a4_kv"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n not in ALWAYS)) for n in PRESETS])
def test_a_quantized_checkpoint_that_holds_one_is_not_read(name, tmp_path, seed):
    """In codes, in scales of any kind, or in what is not quantized: neither by the reader of exports, nor as
    model.path, nor, where it is a scale, as quant.scales of the model that it was made from."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3", seed=seed, wide=True)
    scheme, export, work = PRESETS[name].linear, tmp_path / "export", tmp_path / "work"
    options = {"kv_cache": PRESETS[name].kv_cache}

    def as_export() -> None:
        load_compressed(work, dtype=torch.float32, device=CPU)

    def as_source() -> None:
        """Weights, and then scales, of keys and values too; in fp32, which holds what any codes stand for."""
        model = load_model(work, torch.float32)
        take_scales(model, quantize(model, named=source_schemes(model, work), measure=False, **options), work)

    def as_scales() -> None:
        model = load_model(source)
        load_scales(model, quantize(model, scheme, measure=False, **options), work)

    model = load_model(source)
    export_model(model, quantize(model, scheme, **options), source, export, max_shard_size=200_000)
    able = {
        key: key.rpartition(".")[2]
        for key, tensor in read_tensors(export).items()
        if tensor.is_floating_point() or (tensor.dtype == torch.uint8 and key.endswith("_scale"))
    }
    for kind in sorted(set(able.values())):
        shutil.copytree(export, work)
        key = damage_on_disk(work, [key for key in able if able[key] == kind])
        readers = [as_export, *([as_source] * (scheme is not None))]
        readers += [as_scales] * (scheme is not None and kind.endswith("_scale"))
        for reader in readers:
            with pytest.raises(RankError) as found:
                reader()
            assert key.rpartition(".")[0] in str(found.value), (reader, key, str(found.value))
        shutil.rmtree(work)


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
    model = load_model(source)
    quantization = quantize(model, LAYOUTS[layout])
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name in random.sample(sorted(named), 3):
        kept = named[name].detach().clone()
        damage(named[name])
        with pytest.raises(RankError, match=rf"the model diverged.*NaN or Inf in {re.escape(name)}"):
            export_model(model, quantization, source, tmp_path / "export", layout=layout)
        named[name].data.copy_(kept)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    export_model(model, quantization, source, tmp_path / "export", layout=layout)


def test_an_adapter_is_written_with_the_same_bytes_each_time(tmp_path, seed):
    tensors = {f"{layer}.lora_{part}.weight": torch.randn(4, 4).bfloat16() for layer in "abcd" for part in "AB"}
    config = {"peft_type": "LORA", "target_modules": ["q_proj", "k_proj"]}
    for number in range(6):
        PeftFolder(dict(random.sample(sorted(tensors.items()), 8)), config, "base").publish(tmp_path / str(number))
    folders = [{file.name: file.read_bytes() for file in (tmp_path / str(number)).iterdir()} for number in range(6)]
    assert all(folder == folders[0] for folder in folders) and len(folders[0]) == 2
    with safe_open(tmp_path / "0" / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "base": "base"}
        assert all(torch.equal(file.get_tensor(key), tensor) for key, tensor in tensors.items())


def test_an_adapter_alone_that_holds_one_is_not_written(tmp_path, seed):
    tensors = {f"layer.lora_{part}.weight": torch.randn(4, 4).bfloat16() for part in "AB"}
    damage(tensors["layer.lora_B.weight"])
    with pytest.raises(RankError, match=r"the model diverged.*NaN or Inf in layer\.lora_B\.weight"):
        PeftFolder(tensors, {}, "base").publish(tmp_path / "adapter")
    assert not list(tmp_path.iterdir())
