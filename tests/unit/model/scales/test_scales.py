"""Scales that another writer left, as each format stores them, and zero points; one process."""

import math
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from model.ranks import RankError
from model.scales.in_place import (
    follow_weights,
    input_scales,
    measure_weight_scales,
    renew_weight_scales,
    weight_statistics,
)
from model.scales.loading import load_scales
from quant import SCHEMES, Scheme, TensorSpec
from quant.formats.packing import pack_zero_points
from quant.reference import fake_quant, inside_range
from tests.lib.checkpoints import quantize
from tests.lib.patience import ends
from tests.lib.tiny import tiny_model

# Exponents of powers of two, bf16 numbers of either sign.
STORED = ("mxfp4", "w4a16_g32", "w8a16_channel", "w2a16_g32")
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
ASYM = Scheme("w4a16_g32_asym", TensorSpec("int", 4, "group", 32, symmetric=False))


def quantized(seed: int, scheme: str = "nvfp4"):
    """q's weights are 64 times larger than those it shares a global scale with."""
    model = tiny_model("qwen3", even=True, layers=1, seed=seed)
    model.get_submodule(QKV[0]).weight.data *= 64
    return model, quantize(model, scheme, measure=False)


def load(tensors, model, quantization, directory, **options):
    save_file({key: value.contiguous() for key, value in tensors.items()}, directory / "model.safetensors")
    return load_scales(model, quantization, directory, **options)


def random_scales(quantization, scheme: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Scales near the weights' own, as they are on disk, and as codes are multiplied with them."""
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
    report = load(disk, model, quantization, tmp_path)
    assert sorted(report.weights_loaded) == sorted(meant) and not report.weights_measured
    for name, scale in meant.items():
        layer = quantization.layers[name]
        assert torch.equal(layer.weight_scale(), scale), name
        assert torch.equal(layer.used_weight(), fake_quant(layer.weight, scale, layer.scheme.weights)), name


def file_scales(quantization, kind: str = "") -> dict[str, torch.Tensor]:
    """As stored, each layer with a global scale of its own; or its reciprocal, as ModelOpt writes it.

    Global scales are reciprocals of numbers: 1 / (1 / G) may differ from another G, and a scale of a group that is
    halfway between two of e4m3 then be the other.
    """
    scales = {}
    for owner, scale in measure_weight_scales(quantization).items():
        second = 1 / (448 / scale.max())
        scales[f"{owner}.weight_scale"] = (scale / second).to(torch.float8_e4m3fn)
        scales |= (
            {f"{owner}.weight_scale_2": second} if kind == "modelopt" else {f"{owner}.weight_global_scale": 1 / second}
        )
    return scales


def test_layers_that_share_a_global_scale_take_the_smallest(tmp_path, seed):
    """With a larger one the scales of the layer that has the smallest are beyond e4m3, and all of them become 448.
    ModelOpt's reciprocals of them mean the same."""
    model, quantization = quantized(seed)
    scales = file_scales(quantization)
    load(scales, model, quantization, tmp_path)
    shared = min(scales[f"{name}.weight_global_scale"] for name in QKV)
    assert [float(quantization.layers[name].weight_global) for name in QKV] == [float(shared)] * 3
    expected = scales[f"{QKV[0]}.weight_scale"].float() / shared
    torch.testing.assert_close(quantization.layers[QKV[0]].weight_scale(), expected, rtol=1e-6, atol=0)
    found = {name: layer.weight_scale() for name, layer in quantization.layers.items()}
    load(file_scales(quantization, "modelopt"), model, quantization, tmp_path)
    assert all(torch.equal(layer.weight_scale(), found[name]) for name, layer in quantization.layers.items())


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_pipe_among_the_files_is_named(make, tmp_path, seed):
    make(tmp_path / "x.safetensors")
    with ends(make), pytest.raises(RankError, match=r"x.safetensors: expected a safetensors file, found something"):
        load_scales(*quantized(seed), tmp_path)


@pytest.mark.parametrize("writer", ["compressed-tensors", "modelopt"])
def test_global_scales_of_inputs_are_read(tmp_path, seed, writer):
    """ModelOpt writes the reciprocal under the name of a scale of fp8. Of layers that read one tensor the smallest
    is taken, below which none of their inputs saturates. A scheme without inputs passes them over."""
    model, quantization = quantized(seed, "nvfp4_w4a4")
    weights = file_scales(quantization, writer)
    above = {name: torch.empty(1).uniform_(100, 900) for name in quantization.layers}
    inputs = {f"{name}.input_scale": 1 / scale for name, scale in above.items()}
    if writer != "modelopt":
        inputs = {f"{name}.input_global_scale": scale for name, scale in above.items()}
    report = load(weights | inputs, model, quantization, tmp_path)
    assert not report.inputs_missing and not report.unused
    for group in quantization.input_groups:
        smallest = torch.stack([above[name] for name in group.members]).amin(0)
        for name in group.members:
            torch.testing.assert_close(quantization.layers[name].input_scale(), smallest, rtol=1e-6, atol=0)
    load(weights | inputs, *quantized(seed, "nvfp4"), tmp_path)
    for options, message in (
        ({}, "has no input scale for"),
        ({"initial_input_scale": 0.01}, "quant.initial_input_scale cannot set the global scale of the inputs of"),
    ):
        with pytest.raises((RankError, ValueError), match=message):
            load(weights, model, quantization, tmp_path, **options)


def test_weights_of_zeros_have_a_global_scale(seed):
    """Any would do; that of their largest magnitude is infinite."""
    model, quantization = quantized(seed)
    for name in QKV:
        model.get_submodule(name).weight.data.zero_()
    renew_weight_scales(quantization)
    layer = quantization.layers[QKV[0]]
    assert layer.weight_global.item() == 1.0 and layer.weight_scale().isfinite().all()
    assert not layer(torch.randn(3, layer.in_features, dtype=torch.bfloat16)).any()


def asymmetric(seed: int):
    """A model with zero points; a row of positive weights, one of negative and one of none among them."""
    model = tiny_model("qwen3", even=True, layers=1, seed=seed)
    weight = model.get_submodule(QKV[0]).weight.data
    weight[0].abs_()
    weight[1].abs_().neg_()
    weight[2] = 0
    return model, quantize(model, ASYM, measure=False)


def test_zero_points_are_measured_followed_and_counted(seed):
    """From the weights as they are, for any theta; statistics are those of the values that the forward uses."""
    _, quantization = asymmetric(seed)
    layer, spec = quantization.layers[QKV[0]], ASYM.weights
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


def zero_point_file(quantization, packed: bool = False) -> dict[str, torch.Tensor]:
    """As pack-quantized has zero points, or one by one, as other formats do."""
    file = {}
    for owner, (scale, zero) in measure_weight_scales(quantization).items():
        stored = pack_zero_points(zero, ASYM.weights.bits) if packed else zero.to(torch.int8)
        file |= {f"{owner}.weight_scale": scale, f"{owner}.weight_zero_point": stored}
    return file


@pytest.mark.parametrize("packed", [True, False])
def test_zero_points_of_a_checkpoint_are_read(packed, tmp_path, seed):
    model, quantization = asymmetric(seed)
    found = measure_weight_scales(quantization)
    report = load(zero_point_file(quantization, packed), model, quantization, tmp_path)
    assert report.weights_measured == []
    for owner, (scale, zero) in found.items():
        layer = quantization.layers[owner]
        assert torch.equal(layer.weight_s0, scale) and torch.equal(layer.weight_zero, zero)


ZERO = f"{QKV[0]}.weight_zero_point"
BAD_ZERO_POINTS = {
    "none": (lambda file: file.pop(ZERO), rf"q_proj.weight_scale but no .*{ZERO}, expected both"),
    "shape": (
        lambda file: file.update({ZERO: torch.zeros(3, 1, dtype=torch.int8)}),
        r"q_proj.weight_zero_point is torch.int8 \(3, 1\), expected \(\d+, \d\), or packed int32",
    ),
    "no code": (
        lambda file: file[ZERO].fill_(100),
        r"the zero points beside .*q_proj.weight_scale must be integers from -8 to 7, got 100",
    ),
    "of inputs": (
        lambda file: file.update({f"{QKV[0]}.input_zero_point": torch.ones(1)}),
        r"input_zero_point is not 0, but the scheme of its layer in the recipe is symmetric: use other",
    ),
}


@pytest.mark.parametrize("case", BAD_ZERO_POINTS)
def test_bad_zero_points_are_named(case, tmp_path, seed):
    change, message = BAD_ZERO_POINTS[case]
    model, quantization = asymmetric(seed)
    file = zero_point_file(quantization)
    change(file)
    with pytest.raises(RankError, match=message):
        load(file, model, quantization, tmp_path)
    assert all(group.s0.isnan().all() and group.zero.isnan().all() for group in quantization.weight_groups)


@pytest.mark.parametrize("scheme", ["fp8_static", "w4a16_g32"])
def test_weight_statistics_are_of_the_effective_scales(scheme, seed):
    """With a theta that is not 0: what is clipped and how large the error is follow the scale that the forward uses."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 96)).bfloat16()
    learn = SCHEMES[scheme].activations is not None
    quantization = quantize(model, scheme, learn_input_scale=learn, input_scale=0.02)
    with torch.no_grad():
        for group in (*quantization.weight_groups, *quantization.input_groups):
            group.theta.fill_(-0.5)
    found = weight_statistics(quantization)
    assert found.keys() == quantization.layers.keys()
    for name, layer in quantization.layers.items():
        weight, scale, spec = layer.weight.detach().float(), layer.weight_scale().detach(), layer.scheme.weights
        error = (fake_quant(weight, scale, spec) - weight).double().square().sum() / weight.double().square().sum()
        assert found[name].error == pytest.approx(float(error), rel=1e-6)
        assert found[name].clipped == pytest.approx(float((~inside_range(weight, scale, spec)).double().mean()))
        assert found[name].clipped > 0
        assert found[name].scale == pytest.approx(math.exp(float(scale.double().log().mean())), rel=1e-5)
    expected = 0.02 * math.exp(-0.5)
    assert all(scale == pytest.approx(expected, rel=1e-5) for scale in input_scales(quantization).values())
