"""Weights that are quantized as an ordinary checkpoint is read: against the same weights, loaded and then quantized."""

import random
from pathlib import Path

import pytest
import torch

from model.quantized import quantize_on_load as made
from model.quantized import tensor as coded
from model.quantized.quantize_on_load import fill_quantize_on_load_scales
from model.ranks import RankError
from quant import SCHEMES, Ranges, Scheme, TensorSpec, kernels
from quant.packed_weight import store_packed
from quant.rules import assign, schemes_of_layers
from tests.lib.checkpoints import edit_checkpoint, load_model, quantize, same_bits
from tests.lib.published import plain_deepseek
from tests.lib.tiny import tiny_checkpoint

BF16, FP32, RANGES = torch.bfloat16, torch.float32, Ranges()
# Schemes whose scales are of rows, groups or blocks: the presets, and some that a recipe composes.
MADE = {name: one for name, one in SCHEMES.items() if made.can_quantize_on_load(one.weights)}
MADE["narrow"] = Scheme("narrow", TensorSpec("int", 4, "group", 32, narrow=True))
MADE["asymmetric"] = Scheme("asymmetric", TensorSpec("int", 3, "group", 32, symmetric=False))


def loaded(source: Path, name: str, dtype: torch.dtype = BF16, ranges=RANGES, *, packed: bool = True, **options):
    """A model and its quantization, whose weights are quantized as they are read, or loaded and measured."""
    scheme = MADE[name]

    def hold(model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        for name, one in schemes_of_layers(assign(model, scheme)[0], modules).items():
            store_packed(modules[name], one.weights, tuple(modules[name].weight.shape), ranges)

    model = load_model(source, dtype, hold=hold if packed else None, **options)
    quantization = quantize(model, scheme, learn=False, ranges=ranges, measure=not packed)
    if packed:
        owners = {group.owner for group in quantization.weight_groups}
        assert fill_quantize_on_load_scales(model, quantization) == owners
    return model, quantization


def assert_both_ways_give_the_same(source: Path, *arguments, **options) -> None:
    """Scales, zero points and codes, bit for bit; and what every layer multiplies, but for signs of zeros."""
    plain, packed = (loaded(source, *arguments, packed=one, **options)[1] for one in (False, True))
    assert plain.layers.keys() == packed.layers.keys()
    for name, layer in packed.layers.items():
        own = plain.layers[name]
        assert layer.held is not None and layer.weight.nbytes < own.weight.nbytes, name
        assert same_bits(own.weight_s0, layer.weight_s0), name
        assert (own.weight_zero is None) == (layer.weight_zero is None), name
        assert own.weight_zero is None or same_bits(own.weight_zero, layer.weight_zero), name
        codes, _ = kernels.quantize(own.weight, own._weight_quantizer())
        assert same_bits(codes, layer.held.unpack(layer.weight)), name
        assert torch.equal(own.quantized_weight(), layer.quantized_weight()), name


@pytest.mark.parametrize("name", MADE)
def test_codes_and_scales_are_those_of_the_loaded_weights(tmp_path, monkeypatch, name):
    """Dense, and of experts in stacks and apart, in chunks of a few rows."""
    spec, kind = MADE[name].weights, random.choice(["llama", "qwen3_moe"])
    source = tiny_checkpoint(tmp_path / "source", kind, seed=random.randrange(2**31), wide=True, layers=1)
    # 8 bits above a zero point do not come back from bf16.
    dtype = FP32 if name == "w8a16_asym" else random.choice([BF16, FP32])
    experts = random.choice(["stacked", "per_expert"])
    monkeypatch.setattr(coded, "_CHUNK", random.choice([2**11, 2**13, 2**20]))
    signed = spec.dtype == "int" and spec.symmetric and not spec.narrow and random.random() < 0.5
    ranges = Ranges(random.choice(["auto", "absmax", "mse"]), signed=signed)
    print(kind, experts, dtype, ranges, coded._CHUNK)
    assert_both_ways_give_the_same(source, name, dtype, ranges, experts=experts)


def test_last_blocks_that_are_not_full(tmp_path, monkeypatch):
    monkeypatch.setattr(coded, "_CHUNK", random.choice([2**11, 2**13, 2**20]))
    source = plain_deepseek(tmp_path / "source", random.randrange(2**31))
    assert_both_ways_give_the_same(source, "fp8_block", random.choice([BF16, FP32]))


def test_weights_of_another_dtype_are_rounded_first(tmp_path):
    """An fp32 checkpoint in a model of bf16."""
    source = tiny_checkpoint(tmp_path / "source", "llama", wide=True)
    edit_checkpoint(
        source, lambda t: t.update({key: value.float() + 1e-4 * torch.randn(value.shape) for key, value in t.items()})
    )
    assert_both_ways_give_the_same(source, "w3a16_g32")


def test_no_more_of_a_weight_is_there_than_a_few_rows(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "source", "llama", wide=True)
    monkeypatch.setattr(coded, "_CHUNK", 512)
    most, measured = [], made.measured_scales

    def watched(weights: list[torch.Tensor], *others):
        most.append(weights[0].numel())
        return measured(weights, *others)

    monkeypatch.setattr(made, "measured_scales", watched)
    loaded(source, "w4a16_g32")
    assert 0 < max(most) <= 512 and len(most) > 100


@pytest.mark.parametrize(
    ("scheme", "value"),
    [
        *(("w2a16_g32", torch.nan), ("fp8_dynamic", torch.inf), ("mxfp4", -torch.inf)),
        *(("w4a16_asym", value) for value in (torch.nan, torch.inf, -torch.inf)),
    ],
)
def test_weights_that_are_not_finite_are_refused(tmp_path, scheme, value):
    source, name = tiny_checkpoint(tmp_path / "source", "llama", wide=True), "model.layers.1.self_attn.o_proj.weight"
    edit_checkpoint(source, lambda tensors: tensors[name][3, 5:6].fill_(value))
    with pytest.raises(RankError, match=rf"NaN or Inf cannot be quantized: {name}"):
        loaded(source, scheme)


def test_codes_that_do_not_come_back_are_refused(tmp_path):
    """As they are where they are read."""
    source = tiny_checkpoint(tmp_path / "source", "llama", wide=True)
    with pytest.raises(RankError, match=r"model.*: \d+ of \d+ codes change if they are decoded to torch.bfloat16"):
        loaded(source, "w8a16_asym")
