"""Scales that another writer left, as each format stores them, and zero points; one process."""

import pytest
import torch
from safetensors.torch import save_file

from model.ranks import RankError
from model.scales import follow_weights, load_scales, measure_weight_scales, renew_weight_scales, weight_statistics
from quant import Scheme, TensorSpec, get_scheme, prepare
from quant.formats.packing import pack_zero_points
from quant.reference import fake_quant, inside_range
from tests.lib.tiny import tiny_model

# Exponents of powers of two, bf16 numbers of either sign.
STORED = ("mxfp4", "w4a16_g32", "w8a16_channel", "w2a16_g32")
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
SHIFTED = Scheme("w4a16_g32_asym", TensorSpec("int", 4, "group", 32, symmetric=False))


def quantized(seed: int, scheme: str = "nvfp4"):
    """q's weights are 64 times larger than those it shares a global scale with."""
    model = tiny_model("qwen3", even=True, layers=1, seed=seed)
    model.get_submodule(QKV[0]).weight.data *= 64
    return model, prepare(model, get_scheme(scheme), learn_weight_scale=True, learn_input_scale=False)


def random_scales(quantization, scheme: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of every layer: what lies on the disk, and what a code is multiplied with. They are near the weights' own."""
    disk, meant = {}, {}
    for name, own in measure_weight_scales(quantization).items():
        if scheme == "mxfp4":
            exponents = own.log2() - torch.randint(0, 2, own.shape)
            disk[f"{name}.weight_scale"], meant[name] = (exponents + 127).to(torch.uint8), 2.0**exponents
            continue
        scale = own * (0.8 + 0.3 * torch.rand(own.shape))
        if scheme == "w2a16_g32":
            # Of both signs, those that fit: the code -2 has no counterpart, and is for the largest value of a group.
            groups = quantization.layers[name].weight.detach().unflatten(1, (-1, 32))
            largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
            scale = torch.where(largest > 0, -scale, scale)
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
    """Without it the numbers would be taken for the scales."""
    model, quantization = quantized(seed)
    scales = {key.replace("global_scale", "above"): scale for key, scale in file_scales(quantization).items()}
    scales = {key: scale for key, scale in scales.items() if not key.endswith("above")}
    save_file(scales, tmp_path / "model.safetensors")
    with pytest.raises(RankError, match=r"no weight_global_scale beside the weight_scale of model.layers.0.self_attn"):
        load_scales(model, quantization, tmp_path)
    assert all(group.s0.isnan().all() for group in quantization.weight_groups)


def test_a_second_scale_that_multiplies_is_read(tmp_path, seed):
    """As ModelOpt writes it: the reciprocal, under another name. Global scales here are reciprocals of numbers, since
    1 / (1 / G) may differ from another G, and a scale of a group that lies between two of e4m3 then be the other."""
    model, quantization = quantized(seed)
    scales = file_scales(quantization)
    reciprocals = {k.replace("global_scale", "scale_2"): 1 / s for k, s in scales.items() if k.endswith("global_scale")}
    scales |= {k.replace("scale_2", "global_scale"): 1 / s for k, s in reciprocals.items()}
    save_file(scales, tmp_path / "model.safetensors")
    load_scales(model, quantization, tmp_path)
    expected = {name: layer.weight_scale() for name, layer in quantization.layers.items()}
    scales = {k: s for k, s in scales.items() if not k.endswith("global_scale")} | reciprocals
    save_file(scales, tmp_path / "model.safetensors")
    load_scales(model, quantization, tmp_path)
    for name, layer in quantization.layers.items():
        assert torch.equal(layer.weight_scale(), expected[name])


@pytest.mark.parametrize("writer", ["compressed-tensors", "modelopt"])
def test_global_scales_of_inputs_are_read(tmp_path, seed, writer):
    """ModelOpt writes the reciprocal under the name of a scale of fp8. Of layers that read one tensor the smallest
    is taken, below which none of their inputs saturates. A scheme without inputs passes them over."""
    model, quantization = quantized(seed, "nvfp4_w4a4")
    scales = file_scales(quantization)
    above = {name: torch.empty(1).uniform_(100, 900) for name in quantization.layers}
    if writer == "modelopt":
        scales |= {k.replace("global_scale", "scale_2"): 1 / s for k, s in scales.items() if k.endswith("global_scale")}
        scales = {key: scale for key, scale in scales.items() if not key.endswith("global_scale")}
        scales |= {f"{name}.input_scale": 1 / scale for name, scale in above.items()}
    else:
        scales |= {f"{name}.input_global_scale": scale for name, scale in above.items()}
    save_file(scales, tmp_path / "model.safetensors")
    report = load_scales(model, quantization, tmp_path)
    assert not report.inputs_missing and not report.unused
    for group in quantization.input_groups:
        smallest = torch.stack([above[name] for name in group.members]).amin(0)
        for name in group.members:
            torch.testing.assert_close(quantization.layers[name].input_scale(), smallest, rtol=1e-6, atol=0)
    weights_only, its = quantized(seed, "nvfp4")
    load_scales(weights_only, its, tmp_path)
    scales = {key: scale for key, scale in scales.items() if ".input_" not in key}
    save_file(scales, tmp_path / "model.safetensors")
    for options, message in (
        ({}, "has no input scale for"),
        ({"initial_input_scale": 0.01}, "quant.initial_input_scale is no global scale of the inputs of"),
    ):
        with pytest.raises((RankError, ValueError), match=message):
            load_scales(model, quantization, tmp_path, **options)


def test_weights_of_zeros_have_a_global_scale(seed):
    """Any would do; that of their largest magnitude is infinite."""
    model, quantization = quantized(seed)
    for name in QKV:
        model.get_submodule(name).weight.data.zero_()
    renew_weight_scales(quantization)
    layer = quantization.layers[QKV[0]]
    assert layer.weight_global.item() == 1.0 and layer.weight_scale().isfinite().all()
    assert not layer(torch.randn(3, layer.in_features, dtype=torch.bfloat16)).any()


def shifted(seed: int):
    """A model with zero points; a row of positive weights, one of negative and one of none among them."""
    model = tiny_model("qwen3", even=True, layers=1, seed=seed)
    weight = model.get_submodule(QKV[0]).weight.data
    weight[0].abs_()
    weight[1].abs_().neg_()
    weight[2] = 0
    return model, prepare(model, SHIFTED, learn_weight_scale=True, learn_input_scale=False)


def test_zero_points_are_measured_followed_and_counted(seed):
    """Of the weights as they are, whatever theta is; statistics are those of the values that the forward uses."""
    _, quantization = shifted(seed)
    layer, spec = quantization.layers[QKV[0]], SHIFTED.weights
    assert layer.weight_zero.isnan().all()
    renew_weight_scales(quantization)
    assert (layer.weight_zero[0] == spec.qmin).all() and (layer.weight_zero[1] == spec.qmax).all()
    assert (layer.weight_s0[2] == 1).all()
    for theta in (0.0, -0.3):
        layer.weight_theta.data.fill_(theta)
        scale, zero = layer.weight_scale(), layer.weight_zero
        assert torch.equal(layer.used_weight(), fake_quant(layer.weight, scale, spec, zero))
        found = weight_statistics(quantization)[QKV[0]]
        clipped = (~inside_range(layer.weight, scale, spec, zero)).float().mean().item()
        assert found.clipped == pytest.approx(clipped) and (clipped > 0.01) == (theta < 0)
        weight = layer.weight.detach().float()  # errors of the bf16 that the values become are left out
        error = (fake_quant(weight, scale, spec, zero) - weight).square().sum() / weight.square().sum()
        assert found.error == pytest.approx(error.item(), rel=1e-5)
    before = layer.weight_zero.clone()
    layer.weight.data.neg_()
    follow_weights(quantization)
    assert (layer.weight_zero[0] == spec.qmax).all() and (layer.weight_zero[1] == spec.qmin).all()
    # -1 - z is the mirror of z, but where a half was rounded to even.
    assert ((layer.weight_zero[3:] + 1 + before[3:]).abs() <= 1).all() and layer.weight_theta.any()


@pytest.mark.parametrize("form", ["packed", "plain"])
def test_zero_points_of_a_checkpoint_are_read(form, tmp_path, seed):
    """As pack-quantized has them, or one by one, as other formats do."""
    model, quantization = shifted(seed)
    found = measure_weight_scales(quantization)
    file = {}
    for owner, (scale, zero) in found.items():
        stored = pack_zero_points(zero, SHIFTED.weights.bits) if form == "packed" else zero.to(torch.int8)
        file |= {f"{owner}.weight_scale": scale.contiguous(), f"{owner}.weight_zero_point": stored}
    save_file(file, tmp_path / "model.safetensors")
    report = load_scales(model, quantization, tmp_path)
    assert report.weights_measured == []
    for owner, (scale, zero) in found.items():
        layer = quantization.layers[owner]
        assert torch.equal(layer.weight_s0, scale) and torch.equal(layer.weight_zero, zero)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda file, key: file.pop(f"{key}_zero_point"),
            r"q_proj.weight_scale without .*q_proj.weight_zero_point: expected both",
        ),
        (
            lambda file, key: file.update({f"{key}_zero_point": torch.zeros(3, 1, dtype=torch.int8)}),
            r"q_proj.weight_zero_point is torch.int8 \(3, 1\), expected \(\d+, \d\), or packed int32",
        ),
        (
            lambda file, key: file[f"{key}_zero_point"].fill_(100),
            r"the zero point beside .*q_proj.weight_scale has 100, expected integers from -8 to 7",
        ),
        (
            lambda file, key: file.update({"model.layers.0.self_attn.q_proj.input_zero_point": torch.ones(1)}),
            r"input_zero_point is not 0, but what it belongs to has a symmetric scheme here",
        ),
    ],
)
def test_bad_zero_points_are_named(change, message, tmp_path, seed):
    model, quantization = shifted(seed)
    file = {}
    for owner, (scale, zero) in measure_weight_scales(quantization).items():
        file |= {f"{owner}.weight_scale": scale.contiguous(), f"{owner}.weight_zero_point": zero.to(torch.int8)}
    change(file, f"{QKV[0]}.weight")
    save_file(file, tmp_path / "model.safetensors")
    with pytest.raises(RankError, match=message):
        load_scales(model, quantization, tmp_path)
    assert all(group.s0.isnan().all() and group.zero.isnan().all() for group in quantization.weight_groups)
