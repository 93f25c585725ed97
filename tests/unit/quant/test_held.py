"""Weights that are held as packed codes: nothing is lost, and a layer computes what it computes from the weight."""

import pytest
import torch
from torch import nn

from quant import SCHEMES, Quantizer, QuantLinear, TensorSpec, kernels, prepare
from quant.experts import StackedLinear
from quant.held import HeldCodes, held_codes, hold_codes

OUT, IN, EXPERTS = 128, 256, 3


def integers(bits: int) -> TensorSpec:
    return TensorSpec("int", bits, "channel")


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("columns", [64, 37])
def test_all_integers_come_back(bits, columns):
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns), dtype=torch.int8)
    codes[0, :2] = torch.tensor([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1])
    held = HeldCodes(integers(bits), (5, columns))
    packed = held.pack(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (5, held.row_bytes)
    if columns == 64:
        assert held.row_bytes == columns * bits / 8
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parameter = packed.view(-1).view(dtype).view(held.packed_shape(dtype)).clone()
        assert torch.equal(held.unpack(parameter), codes)


def test_all_bytes_of_floats_come_back():
    every = torch.arange(256, dtype=torch.uint8)
    eight, four = (
        HeldCodes(TensorSpec("fp8_e4m3", 8, "tensor"), (2, 4, 32)),
        HeldCodes(SCHEMES["nvfp4"].weights, (4, 128)),
    )
    codes = every.view(torch.float8_e4m3fn)
    packed = eight.pack(codes.view(8, 32)).view(torch.bfloat16)
    assert torch.equal(eight.unpack(packed).view(torch.uint8), every.view(2, 4, 32))
    nibbles = torch.stack((every & 15, every >> 4), dim=-1).view(4, 128)
    assert torch.equal(four.unpack(four.pack(nibbles).view(torch.bfloat16)), nibbles)


def test_rows_that_do_not_fill_elements_are_refused():
    with pytest.raises(ValueError, match=r"the 33 bytes of codes in a row of \[8, 33\] do not fill"):
        HeldCodes(TensorSpec("fp8_e4m3", 8, "tensor"), (8, 33)).packed_shape(torch.bfloat16)


def linear(stacked: bool, dtype: torch.dtype) -> nn.Module:
    if not stacked:
        return nn.Linear(IN, OUT, bias=True, dtype=dtype)
    weight = nn.Parameter(torch.randn(EXPERTS, OUT, IN, dtype=dtype) / 16)
    return StackedLinear(weight, (EXPERTS, OUT, IN), ("gate_proj", "up_proj"))


def pair(name: str, stacked: bool, dtype: torch.dtype) -> tuple[QuantLinear, QuantLinear]:
    """A layer with a weight that is on the grid, and the same with its codes."""
    layers, meta = [], linear(stacked, dtype).to("meta")
    hold_codes(meta.get_submodule(""), SCHEMES[name].weights, tuple(meta.weight.shape))
    for one in (linear(stacked, dtype), meta):
        inner = nn.ModuleDict({"experts": nn.ModuleDict({"gate_up_proj": one})} if stacked else {"q_proj": one})
        quantization = prepare(inner, SCHEMES[name], learn_weight_scale=False, learn_input_scale=False)
        layers += quantization.layers.values()
    plain, held = layers
    with torch.no_grad():
        for parameter in (plain.weight_s0, plain.weight_global, plain.weight_zero, plain.input_s0):
            if parameter is not None:
                parameter.fill_(2.0**-6 if parameter is not plain.weight_global else 1.0)
        if plain.weight_zero is not None:
            plain.weight_zero.copy_(torch.randint(-3, 3, plain.weight_zero.shape))
        quantizer = Quantizer(plain.scale_of_weight, plain.scheme.weights, dtype)
        codes, _ = kernels.quantize(plain.weight, quantizer)
        plain.weight.copy_(kernels.dequantize(codes, quantizer))
        packed = held.held.pack(codes.view(-1, IN)).contiguous().view(-1).view(dtype).view(held.weight.shape)
        for key, own in plain.named_parameters():
            value = packed if key == "weight" else own.detach()
            setattr(held, key, nn.Parameter(value, requires_grad=key == "bias"))
    return plain, held


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_computes_what_it_computes_from_the_weight(name, stacked, dtype):
    """Forward, gradients of the input and of the bias, with and without fake quant, and the weight itself."""
    plain, held = pair(name, stacked, dtype)
    assert held_codes(held.weight) is None and held.held is not None  # the test made a new Parameter
    bytes_per_weight = SCHEMES[name].weights.bits / 8
    assert held.weight.nbytes == plain.weight.numel() * bytes_per_weight
    torch.manual_seed(1)
    offsets = torch.tensor([4, 4, 11], dtype=torch.int32) if stacked else None
    for weights in (True, False):
        results = []
        for layer in (plain, held):
            layer.weight_fake_quant = weights
            layer.zero_grad()
            torch.manual_seed(2)
            x = torch.randn(11, IN, dtype=dtype, requires_grad=True)
            output = layer(x, offsets)
            output.backward(torch.randn_like(output))
            bias = None if layer.bias is None else layer.bias.grad
            results.append((output, x.grad, bias, layer.merged_weight()))
        for own, expected in zip(*results, strict=True):
            assert (own is None and expected is None) or torch.equal(own, expected)


@pytest.mark.parametrize("stacked", [False, True])
def test_codes_are_multiplied_as_they_are(stacked):
    """By the fp8 GEMM, and its gradient."""
    outputs, offsets = [], torch.tensor([16, 16, 32], dtype=torch.int32) if stacked else None
    for layer in pair("fp8_static", stacked, torch.bfloat16):
        layer.fp8_gemm = True
        torch.manual_seed(2)
        x = torch.randn(32, IN, dtype=torch.bfloat16, requires_grad=True)
        output = layer(x, offsets)
        output.backward(torch.randn_like(output))
        outputs += [output, x.grad]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
