"""Weights that are held as packed codes: nothing is lost, and a layer computes what it computes from the weight."""

import pytest
import torch
from torch import nn

from quant import SCHEMES, Quantizer, QuantLinear, Scale, TensorSpec, kernels, replace_layers
from quant.autograd import UsedWeightFunction
from quant.linear import StackedLinear
from quant.packed_weight import (
    PackedCodes,
    codes_of_placeholder,
    is_placeholder,
    packed_codes,
    placeholder,
    store_packed,
)
from tests.lib.scales import fill_scales

OUT, IN, EXPERTS = 128, 256, 3


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [64, 37])
def test_all_integers_come_back(bits, columns, seed):
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1])
    held = PackedCodes(TensorSpec("int", bits, "channel"), (5, columns))
    packed = held.pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (5, held.row_bytes)
    if columns == 64:
        assert held.row_bytes == columns * bits / 8
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parameter = packed.view(-1).view(dtype).view(held.packed_shape(dtype)).clone()
        assert torch.equal(held.unpack(parameter), codes)


def test_all_bytes_of_floats_come_back():
    every = torch.arange(256, dtype=torch.uint8)
    eight = PackedCodes(TensorSpec("fp8_e4m3", 8, "tensor"), (2, 4, 32))
    packed = eight.pack(every.view(torch.float8_e4m3fn).view(8, 32)).view(torch.bfloat16)
    assert torch.equal(eight.unpack(packed).view(torch.uint8), every.view(2, 4, 32))
    four, nibbles = PackedCodes(SCHEMES["nvfp4"].weights, (4, 128)), torch.stack((every & 15, every >> 4), dim=-1)
    nibbles = nibbles.view(4, 128)
    assert torch.equal(four.unpack(four.pack(nibbles).view(torch.bfloat16)), nibbles)


def linear(stacked: bool, dtype: torch.dtype) -> nn.Module:
    if not stacked:
        return nn.Linear(IN, OUT, bias=True, dtype=dtype)
    weight = nn.Parameter(torch.randn(EXPERTS, OUT, IN, dtype=dtype) / 16)
    return StackedLinear(weight, (EXPERTS, OUT, IN), ("up_proj",))


def pair(name: str, stacked: bool, dtype: torch.dtype) -> tuple[QuantLinear, QuantLinear]:
    """A layer with a weight that is on the grid, and the same with its codes."""
    layers, meta = [], linear(stacked, dtype).to("meta")
    store_packed(meta.get_submodule(""), SCHEMES[name].weights, tuple(meta.weight.shape))
    for one in (linear(stacked, dtype), meta):
        inner = nn.ModuleDict({"experts": nn.ModuleDict({"gate_up_proj": one})} if stacked else {"q_proj": one})
        quantization = replace_layers(inner, SCHEMES[name], learn_weight_scale=False, learn_input_scale=False)
        if not layers:
            fill_scales(quantization)
        layers += quantization.layers.values()
    plain, held = layers
    with torch.no_grad():
        quantizer = Quantizer(plain.scale_of_weight, plain.scheme.weights, dtype)
        codes, _ = kernels.quantize(plain.weight, quantizer)
        plain.weight.copy_(kernels.dequantize(codes, quantizer))
        packed = held.held.pack(codes.view(-1, IN)).contiguous().view(-1).view(dtype).view(held.weight.shape)
        for key, own in plain.named_parameters():
            value = packed if key == "weight" else own.detach()
            setattr(held, key, nn.Parameter(value, requires_grad=key == "bias"))
    return plain, held


@pytest.mark.parametrize(
    ("name", "stacked", "fp8_gemm", "dtype"),
    [
        *((name, stacked, False, torch.bfloat16) for name in SCHEMES for stacked in (False, True)),
        *(("fp8_static", stacked, True, torch.bfloat16) for stacked in (False, True)),
        *((name, False, False, torch.float32) for name in ("fp8_static", "w4a16_g32", "w4a16_asym", "nvfp4")),
    ],
)
def test_a_layer_computes_what_it_computes_from_the_weight(name, stacked, fp8_gemm, dtype, seed):
    """Forward, gradients of the input and of the bias, with and without fake quant, and the weight itself; codes are
    multiplied as they are by the fp8 GEMM, and by its gradient."""
    plain, held = pair(name, stacked, dtype)
    plain.fp8_gemm = held.fp8_gemm = fp8_gemm
    assert packed_codes(held.weight) is None and held.held is not None  # the test made a new Parameter
    assert held.weight.nbytes == plain.weight.numel() * SCHEMES[name].weights.bits / 8
    offsets = torch.tensor([16, 16, 32], dtype=torch.int32) if stacked else None
    given, grad = (torch.randn(32, size, dtype=dtype) for size in (IN, OUT))
    for weights in (True, False):
        results = []
        for layer in (plain, held):
            layer.weight_fake_quant = weights
            layer.zero_grad()
            x = given.clone().requires_grad_()
            output = layer(x, offsets)
            output.backward(grad)
            bias = None if layer.bias is None else layer.bias.grad
            results.append((output, x.grad, bias, layer.merged_weight()))
        for own, expected in zip(*results, strict=True):
            assert (own is None and expected is None) or torch.equal(own, expected)


@pytest.mark.parametrize(
    ("name", "stacked", "fp8_gemm", "dtype"),
    [
        ("fp8_static", False, True, torch.bfloat16),
        ("fp8_static", True, True, torch.bfloat16),
        ("fp8_static", True, False, torch.float32),
        ("w4a16_channel", False, False, torch.bfloat16),
        ("w8a8_static", False, False, torch.float32),
    ],
)
def test_a_layer_computes_the_same_from_codes_that_stand_in_for_its_weight(name, stacked, fp8_gemm, dtype, seed):
    """The output and the input's gradient bit for bit. The weight gets the gradient of what was multiplied, clipped or
    not, and theta zeros: the rank that has the weight completes both."""
    layer = linear(stacked, dtype)
    model = nn.ModuleDict({"gate_up_proj" if stacked else "up_proj": layer})
    scales = {"learn_weight_scale": True, "learn_input_scale": False, "fp8_gemm": fp8_gemm}
    layer = next(iter(replace_layers(model, SCHEMES[name], exempt=(), **scales).layers.values()))
    largest = layer.weight.detach().abs().max().float() / layer.scheme.weights.qmax
    layer.weight_s0.data = largest * (0.4 + torch.rand(layer.weight_s0.shape) / 5)  # clips some weights
    if layer.input_s0 is not None:
        layer.input_s0.data = torch.full((1,), 0.005)
    offsets = torch.tensor([3, 3, 40], dtype=torch.int32) if stacked else None
    x, grad = (torch.randn(40, size, dtype=dtype) for size in (IN, OUT))
    whole, inputs, outputs, gradients = layer.weight.data, [], [], []
    for standing in (False, True):
        if standing:
            codes = kernels.quantize(whole, layer._weight_quantizer())[0]
            layer.weight.data = placeholder(codes.view(torch.uint8), layer.weight_shape, dtype)
            assert torch.equal(codes_of_placeholder(layer.weight, layer.scheme.weights), codes)
            assert layer.weight.isnan().all(), "reading it as a weight must show"
        inputs.append(x.clone().requires_grad_())
        outputs.append(layer(inputs[-1], offsets))
        outputs[-1].backward(grad)
        gradients.append((layer.weight.grad, layer.weight_theta.grad))
        layer.weight.grad = layer.weight_theta.grad = None
    assert torch.equal(*outputs) and torch.equal(inputs[0].grad, inputs[1].grad)
    assert gradients[0][1].any() and not gradients[1][1].any()
    masked = gradients[1][0].clone()
    kernels.fake_quantize_backward_(masked, whole, layer._weight_quantizer(), factor=1.0, theta_gradient=False)
    assert torch.equal(masked, gradients[0][0]) and not torch.equal(masked, gradients[1][0])


def test_a_used_weight_comes_from_codes_that_stand_in_for_it(seed):
    """That of lm_head."""
    spec, weight = TensorSpec("int", 4, "channel"), torch.randn(6, 10)
    scale = (torch.rand(6, 1) / 4 + 0.1, nn.Parameter(torch.zeros(6, 1)), None, None)
    used = UsedWeightFunction.apply(spec, 0.1, nn.Parameter(weight), *scale)
    codes = kernels.quantize(weight, Quantizer(Scale(*scale), spec, torch.float32))[0]
    standing = nn.Parameter(placeholder(codes.view(torch.uint8), (6, 10), torch.float32))
    again = UsedWeightFunction.apply(spec, 0.1, standing, *scale)
    assert torch.equal(used, again)
    grad = torch.randn(6, 10)
    again.backward(grad)
    assert torch.equal(standing.grad, grad) and not scale[1].grad.any()


def test_nothing_else_is_taken_for_codes():
    spec = TensorSpec("fp8_e4m3", 8, "tensor")
    plain, expanded = [torch.zeros(size) for size in ((4, 4), (1,), ())], torch.zeros(1).expand(4, 4)
    for one in (*plain, expanded, torch.zeros(9)[1].expand(4)):
        with pytest.raises(ValueError, match="expected a placeholder with codes"):
            codes_of_placeholder(one, spec)
    assert not any(map(is_placeholder, plain))
