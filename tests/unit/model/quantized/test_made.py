"""Codes that are made of an ordinary checkpoint as it is read: against the same weights, loaded and then quantized."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.build import build_model
from model.checkpoint.load import load_weights
from model.quantized import quantize_on_load as made
from model.quantized import tensor as coded
from model.quantized.quantize_on_load import fill_quantize_on_load_scales
from model.ranks import RankError
from model.save import export_model
from model.scales import renew_weight_scales
from quant import SCHEMES, Quantization, Ranges, Scheme, TensorSpec, kernels, prepare
from quant.packed_weight import store_packed
from quant.rules import assign, schemes_of_layers
from tests.lib.tiny import tiny_checkpoint

pytestmark = pytest.mark.usefixtures("seed")

CPU = torch.device("cpu")
LEARN = {"learn_weight_scale": False, "learn_input_scale": False}
NARROW = Scheme("narrow", TensorSpec("int", 4, "group", 32, narrow=True))
ASYMMETRIC = Scheme("asymmetric", TensorSpec("int", 3, "group", 32, symmetric=False))
# Whose scales are of rows, groups or blocks; all that there are of these, and some that a recipe composes.
MADE = {name: one for name, one in SCHEMES.items() if made.can_quantize_on_load(one.weights)}
MADE |= {"narrow": NARROW, "asymmetric": ASYMMETRIC}


def loaded(source: Path, scheme: Scheme, ranges: Ranges, *, held: bool, dtype: torch.dtype, **options):
    """A model and its quantization, whose weights are codes that were made, or were loaded and measured."""

    def hold(model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        chosen = assign(model, scheme).schemes
        for name, one in schemes_of_layers(chosen, modules).items():
            store_packed(modules[name], one.weights, tuple(modules[name].weight.shape), ranges)

    engine = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    model = build_model(source, engine, hold=hold if held else None, dtype=dtype, device=CPU, **options)
    load_weights(model, source, progress=False)
    quantization = prepare(model, scheme, ranges=ranges, **LEARN)
    if held:
        assert fill_quantize_on_load_scales(model, quantization) == {
            group.owner for group in quantization.weight_groups
        }
    else:
        renew_weight_scales(quantization)
    return model, quantization


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Bit for bit, NaN too."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_the_same(plain: Quantization, held: Quantization) -> None:
    """Scales, zero points and codes, bit for bit; and what every layer multiplies, but for signs of zeros."""
    assert plain.layers.keys() == held.layers.keys()
    for name, layer in held.layers.items():
        own = plain.layers[name]
        assert layer.held is not None and layer.weight.nbytes < own.weight.nbytes, name
        assert same(own.weight_s0, layer.weight_s0) and same(own.weight_zero, layer.weight_zero), name
        codes, _ = kernels.quantize(own.weight, own._weight_quantizer())
        assert same(codes, layer.held.unpack(layer.weight)), name
        assert torch.equal(own.quantized_weight(), layer.quantized_weight()), name


def some_ranges(scheme: Scheme) -> Ranges:
    """Any way to choose first scales that the scheme may have."""
    signed = scheme.weights.dtype == "int" and scheme.weights.symmetric and not scheme.weights.narrow
    return Ranges(random.choice(["auto", "absmax", "mse"]), signed=signed and random.random() < 0.5)


@pytest.mark.parametrize("name", MADE)
def test_codes_and_scales_are_those_of_the_loaded_weights(tmp_path, monkeypatch, name):
    """Of every scheme that can be made, dense and of experts in stacks and apart, with pieces of a few rows."""
    scheme, kind = MADE[name], random.choice(["llama", "qwen3_moe"])
    source = tiny_checkpoint(tmp_path / "source", kind, seed=random.randrange(2**31), wide=True, layers=1)
    # 8 bits above a zero point do not come back from bf16.
    dtype = torch.float32 if name == "w8a16_asym" else random.choice([torch.bfloat16, torch.float32])
    options = {"experts": random.choice(["stacked", "per_expert"]), "dtype": dtype}
    monkeypatch.setattr(coded, "_CHUNK", random.choice([2**9, 2**13, 2**20]))
    ranges = some_ranges(scheme)
    print(kind, options, ranges, coded._CHUNK)
    assert_the_same(*(loaded(source, scheme, ranges, held=held, **options)[1] for held in (False, True)))


def test_weights_of_another_dtype_are_rounded_first(tmp_path):
    """An fp32 checkpoint in a model of bf16."""
    source, scheme = tiny_checkpoint(tmp_path / "source", "llama", wide=True), SCHEMES["w3a16_g32"]
    file = source / "model.safetensors"
    tensors = {key: value.float() + 1e-4 * torch.randn(value.shape) for key, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    ranges, dtype = Ranges(), torch.bfloat16
    assert_the_same(*(loaded(source, scheme, ranges, held=held, dtype=dtype)[1] for held in (False, True)))


@pytest.mark.parametrize("scheme", ["w4a16_g32", "w2a16_channel", "mxfp4", "fp8_dynamic"])
def test_an_export_is_that_of_two_steps(tmp_path, scheme):
    """Byte for byte what the loaded weights give, from which training would read the codes that are held."""
    source = tiny_checkpoint(tmp_path / "source", "qwen3_moe", seed=random.randrange(2**31), wide=True)
    written = []
    for held in (False, True):
        written.append(tmp_path / str(held))
        model, quantization = loaded(source, SCHEMES[scheme], Ranges(), held=held, dtype=torch.bfloat16)
        export_model(model, quantization, source, written[-1])
    files = [one / "model.safetensors" for one in written]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_no_more_of_a_weight_is_there_than_a_few_rows(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "source", "llama", wide=True)
    monkeypatch.setattr(coded, "_CHUNK", 512)
    most, measured = [], made.measured_scales

    def watched(rows: torch.Tensor, *others):
        most.append(rows.numel())
        return measured(rows, *others)

    monkeypatch.setattr(made, "measured_scales", watched)
    loaded(source, SCHEMES["w4a16_g32"], Ranges(), held=True, dtype=torch.bfloat16)
    assert 0 < max(most) <= 512 and len(most) > 100


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("scheme", ["w2a16_g32", "fp8_dynamic", "w4a16_asym", "mxfp4"])
def test_weights_that_are_not_finite_are_refused(tmp_path, scheme, value):
    source = tiny_checkpoint(tmp_path / "source", "llama", wide=True)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankError, match=r"NaN or Inf cannot be quantized: model.layers.1.self_attn.o_proj.weight"):
        loaded(source, SCHEMES[scheme], Ranges(), held=True, dtype=torch.bfloat16)


def test_codes_that_do_not_come_back_are_refused(tmp_path):
    """As they are where they are read."""
    source = tiny_checkpoint(tmp_path / "source", "llama", wide=True)
    with pytest.raises(RankError, match=r"codes of model.* do not come back from its values in torch.bfloat16"):
        loaded(source, SCHEMES["w8a16_asym"], Ranges(), held=True, dtype=torch.bfloat16)
