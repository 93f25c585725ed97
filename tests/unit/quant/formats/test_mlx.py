"""MLX's affine groups: what mlx.core makes of them is what our forward multiplies, bit for bit."""

import random

import pytest
import torch

from quant import SCHEMES
from quant.formats.layouts import check_layout, layout_config, linear_shapes, linear_tensors
from quant.formats.mlx import affine_config
from quant.scale import Scale

HELD = ["w2a16_g32", "w3a16_g128", "w4a16_g32", "w4a16_g128", "w4a16_asym", "w8a16_g32", "w8a16_g128"]


def linear(scheme, dtype: torch.dtype):
    """A Linear's tensors for MLX, and the fp32 weight of its forward."""
    spec = scheme.weights
    rows, columns = random.randint(1, 9), spec.group_size * random.randint(1, 4)
    weight = torch.randn(rows, columns).to(dtype)
    shape = (rows, columns // spec.group_size)
    scale = (torch.rand(shape) / 2 ** (spec.bits - 1) + 1e-3).to(dtype).float()
    if spec.symmetric:
        scale *= torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)
    zero = None if spec.symmetric else torch.randint(-8, 8, shape).float()
    forward = Scale(s0=scale, zero=zero) if zero is not None else Scale(s0=scale)
    found = {
        layout: linear_tensors(layout, "a", weight, forward, None, None, scheme, kind)
        for layout, kind in (("mlx", dtype), ("dequantized", torch.float32))
    }
    shapes = linear_shapes("mlx", columns, rows, scheme, dtype)
    made = {key.removeprefix("a."): tensor for key, tensor in found["mlx"].items()}
    assert {suffix: (tensor.dtype, tuple(tensor.shape)) for suffix, tensor in made.items()} == shapes
    return made, found["dequantized"]["a.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HELD)
def test_the_words_are_a_stream_of_bits_that_means_the_weight(name: str, dtype: torch.dtype, seed: int):
    """By the definition alone, where MLX is not installed."""
    scheme = SCHEMES[name]
    made, expected = linear(scheme, dtype)
    bits = scheme.weights.bits
    octets = made["weight"].view(torch.uint8).int()
    stream = (octets.unsqueeze(-1) >> torch.arange(8) & 1).flatten(1)  # lowest bit first
    q = (stream.unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1)
    groups = q.double().unflatten(1, (-1, scheme.weights.group_size))
    found = made["scales"].double().unsqueeze(-1) * groups + made["biases"].double().unsqueeze(-1)
    assert torch.equal(found.flatten(1), expected.double())


@pytest.mark.parametrize("name", HELD)
def test_mlx_reads_it(name: str, seed: int):
    mx = pytest.importorskip("mlx.core", reason="pip install -e '.[mlx]'")
    scheme = SCHEMES[name]
    made, expected = linear(scheme, torch.bfloat16)
    weight, scales, biases = (
        mx.array(tensor.numpy()) for tensor in (made["weight"], made["scales"].float(), made["biases"].float())
    )
    found = mx.dequantize(weight, scales, biases, group_size=scheme.weights.group_size, bits=scheme.weights.bits)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("8da4w", "w4a16_g32"),
        ("w4a16_channel", "w4a16_g128"),
        ("w8a16_asym", "w8a16_g128"),
        ("fp8_static", "w8a16_g128"),
        ("nvfp4", "w4a16_g128"),
        ("mxfp4", "w4a16_g32"),
        ("mxfp8", "w8a16_g32"),
    ],
)
def test_other_schemes_are_refused_and_the_nearest_is_named(name: str, nearest: str):
    with pytest.raises(ValueError, match=rf"inputs are not quantized, got {name}; the nearest is {nearest}$"):
        check_layout("mlx", [SCHEMES["w4a16_g32"], SCHEMES[name]])


def test_the_configuration_has_the_usual_groups_and_those_of_other_layers():
    layers = {"a": SCHEMES["w4a16_g32"], "b": SCHEMES["w8a16_g128"], "c": SCHEMES["w4a16_g32"]}
    usual, other = ({"group_size": size, "bits": bits, "mode": "affine"} for size, bits in ((32, 4), (128, 8)))
    assert affine_config(layers) == {**usual, "b": other}
    assert layout_config("mlx", layers, [], []) is None  # no quantization_config, which other readers know
