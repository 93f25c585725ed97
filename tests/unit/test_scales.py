"""Scales that another writer left, as each format stores them; one process."""

import pytest
import torch
from safetensors.torch import save_file

from model.ranks import RankError
from model.scales import load_scales, measure_weight_scales, renew_weight_scales
from quant import get_scheme, prepare
from quant.reference import fake_quant
from tests.tiny import tiny_model

# Exponents of powers of two, bf16 numbers of either sign.
STORED = ("mxfp4", "w4a16_g32", "w8a16_channel", "w2a16_g32")
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def quantized(seed: int, scheme: str = "nvfp4"):
    """q's weights are 64 times larger than those it shares a global scale with."""
    model = tiny_model("qwen3", even=True, layers=1, seed=seed)
    model.get_submodule(QKV[0]).weight.data *= 64
    return model, prepare(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=False)


def random_scales(quantization, scheme: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of every layer: what lies on the disk, and what a code is multiplied with."""
    disk, meant = {}, {}
    for name, layer in quantization.layers.items():
        shape = layer.weight_s0.shape
        if scheme == "mxfp4":
            exponents = torch.randint(-9, 3, shape)
            disk[f"{name}.weight_scale"], meant[name] = (exponents + 127).to(torch.uint8), 2.0**exponents
            continue
        scale = torch.rand(shape) * 0.1 + 1e-3
        if scheme == "w2a16_g32":
            scale = torch.where(torch.rand(shape) < 0.5, -scale, scale)
        stored = scale.to(torch.bfloat16)
        # Per channel some write one dimension, some two.
        disk[f"{name}.weight_scale"] = stored.squeeze(1) if scheme == "w8a16_channel" else stored
        meant[name] = stored.float()
    return disk, meant


@pytest.mark.parametrize("scheme", STORED)
def test_scales_are_what_the_files_mean(tmp_path, seed, scheme):
    model, quantization = quantized(seed, scheme)
    disk, meant = random_scales(quantization, scheme)
    save_file(disk, tmp_path / "model.safetensors")
    report = load_scales(model, quantization, tmp_path)
    assert sorted(report.weights_loaded) == sorted(meant) and not report.weights_measured
    for name, scale in meant.items():
        layer = quantization.layers[name]
        assert torch.equal(layer.weight_scale(), scale), name
        assert torch.equal(layer.used_weight(), fake_quant(layer.weight, scale, layer.scheme.weights)), name


@pytest.mark.parametrize("scheme", STORED)
def test_scales_that_are_missing_or_wrong_are_told(tmp_path, seed, scheme):
    model, quantization = quantized(seed, scheme)
    disk, meant = random_scales(quantization, scheme)
    key, whole = f"{QKV[1]}.weight_scale", disk[f"{QKV[1]}.weight_scale"]
    save_file({name: scale for name, scale in disk.items() if name != key}, tmp_path / "model.safetensors")
    report = load_scales(model, quantization, tmp_path)
    assert report.weights_measured == [QKV[1]] and QKV[1] in report.summary()
    measured = measure_weight_scales(quantization, {QKV[1]})[QKV[1]]
    assert torch.equal(quantization.layers[QKV[1]].weight_s0, measured) and not torch.equal(measured, meant[QKV[1]])
    wrong = {"shape": whole[1:]}
    if whole.dim() == 2:
        wrong["shape of the other order"] = whole.t()
    if whole.is_floating_point():
        wrong |= {"not 0": torch.zeros_like(whole), "finite": torch.full_like(whole, torch.nan)}
    before = {name: layer.weight_s0.clone() for name, layer in quantization.layers.items()}
    for what, scale in wrong.items():
        save_file({**disk, key: scale.contiguous()}, tmp_path / "model.safetensors")
        with pytest.raises(RankError, match=rf"{key} .*{what.split()[0]}"):
            load_scales(model, quantization, tmp_path)
        assert all(torch.equal(layer.weight_s0, before[name]) for name, layer in quantization.layers.items())


def file_scales(quantization) -> dict[str, torch.Tensor]:
    """As stored, each layer with a global scale of its own."""
    scales = {}
    for owner, scale in measure_weight_scales(quantization).items():
        g = 448 / scale.max()
        scales |= {f"{owner}.weight_scale": (scale * g).to(torch.float8_e4m3fn), f"{owner}.weight_global_scale": g}
    return scales


def test_layers_that_share_a_global_scale_take_the_smallest(tmp_path, seed):
    """With a larger one the scales of the layer that has the smallest are beyond e4m3, and all of them become 448."""
    model, quantization = quantized(seed)
    scales = file_scales(quantization)
    save_file(scales, tmp_path / "model.safetensors")
    load_scales(model, quantization, tmp_path)
    shared = min(scales[f"{name}.weight_global_scale"] for name in QKV)
    assert [float(quantization.layers[name].weight_global) for name in QKV] == [float(shared)] * 3
    expected = scales[f"{QKV[0]}.weight_scale"].float() / shared
    torch.testing.assert_close(quantization.layers[QKV[0]].weight_scale(), expected, rtol=1e-6, atol=0)


def test_scales_without_their_global_one_are_refused(tmp_path, seed):
    """Other writers spell it in other ways (weight_scale_2); as they are the numbers would be taken for the scales."""
    model, quantization = quantized(seed)
    scales = {key.replace("global_scale", "scale_2"): scale for key, scale in file_scales(quantization).items()}
    save_file(scales, tmp_path / "model.safetensors")
    with pytest.raises(RankError, match=r"no weight_global_scale beside the weight_scale of model.layers.0.self_attn"):
        load_scales(model, quantization, tmp_path)
    assert all(group.s0.isnan().all() for group in quantization.weight_groups)


def test_weights_of_zeros_have_a_global_scale(seed):
    """Any would do; that of their largest magnitude is infinite."""
    model, quantization = quantized(seed)
    for name in QKV:
        model.get_submodule(name).weight.data.zero_()
    renew_weight_scales(quantization)
    layer = quantization.layers[QKV[0]]
    assert layer.weight_global.item() == 1.0 and layer.weight_scale().isfinite().all()
    assert not layer(torch.randn(3, layer.in_features, dtype=torch.bfloat16)).any()
