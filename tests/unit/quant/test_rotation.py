"""Inputs and weights that a Hadamard matrix turns: the same function, its gradient, compressed-tensors' own result."""

import math
import random

import pytest
import torch
from compressed_tensors.transform import TransformFactory, TransformScheme
from torch import nn

from quant import DEFAULT_EXEMPT, SCHEMES, Quantization, reference, replace_layers
from quant.gemm import BLOCKS, hadamard, rotate
from quant.rotation import rotate_inputs, rotations_from_config, transform_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", BLOCKS)
def test_matrix_is_orthogonal_and_exact_in_every_dtype(block):
    wide = hadamard(block, torch.float64, CPU)
    assert torch.equal(wide @ wide, block * torch.eye(block, dtype=torch.float64))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rows = rotate(torch.eye(block, dtype=dtype), block)
        assert torch.equal(rows.double(), wide / math.sqrt(block))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_is_the_transform_of_compressed_tensors(dtype, seed):
    """In fp64 to rounding. Of 16 bits both have the sum in fp32 and round it once: the same number, or a neighbor
    where another order of the sum lies on the other side of a boundary."""
    block, runs = random.choice(BLOCKS), random.randint(1, 4)
    linear = nn.Linear(block * runs, 3, dtype=dtype)
    x = torch.randn(5, block * runs, dtype=dtype)
    x[:, 3] *= 100
    scheme = TransformScheme.model_validate(transform_config(["Linear"], block)["config_groups"]["rotated"])
    scheme.precision = torch.float64 if dtype == torch.float64 else torch.float32
    seen = []
    linear.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    TransformFactory.from_scheme(scheme, name="rotated").apply_to_model(nn.Sequential(linear), use_tqdm=False)
    linear(x)
    ours = rotate(x, block)
    step = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else block)
    assert (ours - seen[0]).abs().max() <= step * seen[0].abs().max()
    if dtype.itemsize == 2:
        assert (ours == seen[0]).float().mean() > 0.99
        exact = rotate(x.double(), block).to(dtype)
        assert (ours == exact).float().mean() > 0.99


def test_gradient_and_modes(seed):
    """The gradient is the transposed product; autocast and inference mode change nothing."""
    x = torch.randn(2, 3, 128, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, 64), x)
    x = torch.randn(4, 64)
    expected = rotate(x, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotate(x, 64), expected)
    with torch.inference_mode():
        assert torch.equal(rotate(x.clone(), 64), expected)
    assert rotate(torch.empty(2, 64, device="meta"), 64).shape == (2, 64)


def quantized(scheme: str, *, bias: bool = False) -> Quantization:
    block = {name: nn.Linear(64, 256, bias=False) for name in ("up_proj", "gate_proj")}
    block["down_proj"] = nn.Linear(256, 64, bias=bias)
    learn = {"learn_weight_scale": False, "learn_input_scale": False}
    return replace_layers(nn.Sequential(nn.ModuleDict(block)), SCHEMES[scheme], exempt=DEFAULT_EXEMPT, **learn)


def test_a_rotated_layer_is_the_same_function_and_quantizes_the_rotated_input(seed):
    """Without fake quant the product is that of before; with it, each operand is quantized after it is rotated."""
    quantization = quantized("mxfp4_mxfp8")
    x = torch.randn(7, 256) * torch.where(torch.rand(256) < 0.02, 30.0, 1.0)
    layer = quantization.layers["0.down_proj"]
    before = layer.weight.detach().clone()
    rotate_inputs(quantization, [r".*\.down_proj"], 64)
    with torch.no_grad():
        layer.weight.copy_(rotate(before.double(), 64))
    quantization.set_fake_quant(weights=False, activations=False)
    assert torch.allclose(layer(x), x @ before.T, atol=1e-4)

    quantization.set_fake_quant(weights=False, activations=True)
    spec = layer.scheme.activations
    assert spec is not None
    expected = reference.fake_quantize_tokens(rotate(x, 64), spec) @ layer.weight.T
    assert torch.allclose(layer(x), expected, atol=1e-5)
    spike = torch.zeros(1, 256)
    spike[0, 70] = 8.0
    assert rotate(spike, 64).abs().unique().tolist() == [0.0, 1.0], "one value becomes 64 of an eighth"


@pytest.mark.parametrize(
    ("scheme", "block", "patterns", "bias", "text"),
    [
        ("mxfp8", 64, [r".*\.nothing"], False, "matches no quantized layer"),
        ("mxfp8", 64, [r".*\.up_proj"], False, "shares its input with gate_proj, up_proj"),
        ("mxfp8", 64, [r".*\.down_proj"], True, "has a bias"),
        ("mxfp8", 1024, [r".*\.down_proj"], False, "has 256 inputs, not divisible by quant.rotate_block 1024"),
        ("nvfp4_w4a4", 64, [r".*\.down_proj"], False, "set quant.rotate_block 256 or 1024"),
    ],
)
def test_what_a_server_would_compute_otherwise_is_refused(scheme, block, patterns, bias, text):
    quantization = quantized(scheme, bias=bias)
    with pytest.raises(ValueError, match=text):
        rotate_inputs(quantization, patterns, block)
    assert all(layer.rotation is None for layer in quantization.layers.values())


def test_config_comes_back_and_others_are_refused():
    config = transform_config(["re:.*down_proj$"], 256)
    ((targets, ignore, block),) = rotations_from_config(config)
    assert (targets, ignore, block) == (["re:.*down_proj$"], [], 256)
    assert rotations_from_config(None) == []
    offline = {"targets": ["re:.*"], "location": "weight_input", "inverse": True}
    config["config_groups"]["rotated"]["apply"].append(offline)
    assert len(rotations_from_config(config)) == 1
    for change, text in (
        ({"type": "random-hadamard"}, "type is 'random-hadamard'"),
        ({"randomize": True}, "randomize is True"),
        ({"head_dim": None}, "head_dim is None"),
        ({"head_dim": 128}, "head_dim is 128"),
        ({"apply": [{"targets": ["re:.*attn"], "location": "q_attn"}]}, "location 'q_attn'"),
    ):
        group = {**config["config_groups"]["rotated"], **change}
        with pytest.raises(ValueError, match=text):
            rotations_from_config({"config_groups": {"rotated": group}})
