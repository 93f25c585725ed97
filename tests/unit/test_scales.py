"""Scales of an NVFP4 checkpoint that another writer left, one process."""

import pytest
import torch
from safetensors.torch import save_file

from model.ranks import RankError
from model.scales import load_scales, measure_weight_scales, renew_weight_scales
from quant import get_scheme, prepare
from tests.tiny import tiny_model

QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def quantized(seed: int):
    """q's weights are 64 times larger than those it shares a global scale with."""
    model = tiny_model("qwen3", even=True, layers=1, seed=seed)
    model.get_submodule(QKV[0]).weight.data *= 64
    return model, prepare(model, get_scheme("nvfp4"), learn_weight_scale=True, learn_input_scale=False)


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
