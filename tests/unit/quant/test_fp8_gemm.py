"""The GEMM of codes against fp64 and against simulation, and where it is not taken."""

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.linear import QuantLinear
from quant.reference import fake_quant, quantize
from quant.spec import TensorSpec, get_scheme
from tests.unit.quant.attention import DTYPES, assert_equal, bytes_saved, fill_scales, results

pytestmark = pytest.mark.usefixtures("prepared")

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")


def single(
    out: int, in_: int, *, dtype=torch.bfloat16, learn: bool = False, bias: bool = False, power_of_two: bool = False
) -> QuantLinear:
    model = nn.Sequential(nn.Linear(in_, out, bias=bias)).to(dtype)
    q = quant.prepare(model, get_scheme("fp8_static"), learn_weight_scale=learn, learn_input_scale=learn, fp8_gemm=True)
    fill_scales(q)
    layer = model[0]
    assert isinstance(layer, QuantLinear)
    if power_of_two:
        with torch.no_grad():
            for s0, theta in ((layer.weight_s0, layer.weight_theta), (layer.input_s0, layer.input_theta)):
                s0.copy_(torch.exp2(s0.log2().round()))
                if theta is not None:
                    theta.zero_()
    return layer


def exact_product(layer: QuantLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of the exact fake-quantized operands in fp64, and the sum of the magnitudes of its terms."""
    x64 = quantize(x, layer.input_scale(), FP8).double() * layer.input_scale().double()
    scale = layer.weight_scale()
    weight64 = quantize(layer.weight.detach(), scale, FP8).double() * scale.double()
    bias = layer.bias.detach().double() if layer.bias is not None else torch.zeros(layer.out_features).double()
    return x64 @ weight64.t() + bias, x64.abs() @ weight64.t().abs() + bias.abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("learn", (False, True))
def test_both_computations_against_fp64(learn, bias, dtype, seed):
    """Within what rounding allows, of an output y with terms of magnitudes S, in a dtype with unit roundoff u:

    * both add n + 1 terms in fp32, off by at most (n + 2) 2^-24 S, and round the result by u |y|;
    * fp8_gemm multiplies exact codes and then by both scales (and adds the bias): 4 more roundings of 2^-24 S;
    * simulate rounds each operand to the dtype first: (1 + u)^2 - 1, at most 2.01 u S. This is what fp8_gemm does not
      have: in bf16 it lies well below simulate's bound.
    """
    layer = single(48, 256, dtype=dtype, learn=learn, bias=bias)
    x = torch.randn(40, 256).to(dtype)
    exact, size = exact_product(layer, x)
    u, fp32 = torch.finfo(dtype).eps / 2, 2.0**-24
    gemm = 1.01 * ((256 + 2 + 4) * fp32 * size + u * exact.abs()) + u * fp32
    simulate = gemm + 1.02 * 2.01 * u * size
    off = {}
    for fp8_gemm, bound in ((True, gemm), (False, simulate)):
        layer.fp8_gemm = fp8_gemm
        output = layer(x)
        assert output.dtype == dtype
        off[fp8_gemm] = (output.double() - exact).abs()
        assert (off[fp8_gemm] <= bound).all(), f"fp8_gemm {fp8_gemm}: {(off[fp8_gemm] / bound).max()} times the bound"
    if dtype == torch.bfloat16:
        assert off[False].mean() > off[True].mean(), "rounded operands must show, or the bounds tell nothing"


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_computations_agree_with_powers_of_two(dtype, seed):
    """No operand is rounded then: only the order of additions, and one rounding of the result, may differ."""
    layer = single(48, 256, dtype=dtype, power_of_two=True)
    x = torch.randn(40, 256).to(dtype)
    exact, size = exact_product(layer, x)
    outputs = []
    for layer.fp8_gemm in (True, False):
        outputs.append(layer(x).double())
        assert torch.equal(fake_quant(x, layer.input_scale(), FP8).double(), exact_operand(x, layer.input_scale()))
    accumulation = 2 * 1.01 * 258 * 2.0**-24 * size
    rounding = torch.finfo(dtype).eps * exact.abs() * 1.01
    assert ((outputs[0] - outputs[1]).abs() <= accumulation + rounding).all()
    # In bf16 the rounded results are nearly all the same: the accumulation is 65,536 times finer.
    if dtype == torch.bfloat16:
        assert (outputs[0] == outputs[1]).double().mean() > 0.95


def exact_operand(x: Tensor, scale: Tensor) -> Tensor:
    return quantize(x, scale, FP8).double() * scale.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("learn", (False, True))
def test_gradients_are_the_same_in_both(learn, dtype, seed):
    """Backward is one computation: given the same gradient of the output, bit for bit; the same bytes are kept."""
    layer = single(48, 64, dtype=dtype, learn=learn, bias=True)
    x, grad = torch.randn(3, 7, 64).to(dtype), torch.randn(3, 7, 48).to(dtype)
    found, kept = [], []
    for layer.fp8_gemm in (True, False):
        values = results(layer, x, grad)
        del values["output"]
        found.append(values)
        with bytes_saved(layer) as saved:
            output = layer(x.clone().requires_grad_())
        kept.append(sorted(saved.values(), key=str))
        assert output.shape == (3, 7, 48)
    assert_equal(*found)
    assert {"x", "weight", "bias"} <= found[0].keys() and ("weight_theta" in found[0]) == learn
    assert kept[0] == kept[1] and len(kept[0]) == (1 if learn else 2)


@pytest.mark.parametrize("bias", (False, True))
@pytest.mark.parametrize("tokens", ((0,), (0, 5), (2, 0)), ids=str)
def test_no_tokens(tokens, bias, seed):
    """An expert that no token chose: zero gradients, not None."""
    layer = single(48, 64, learn=True, bias=bias)
    x = torch.empty(*tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    output = layer(x)
    assert output.shape == (*tokens, 48) and output.dtype == torch.bfloat16
    output.sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or not parameter.grad.any(), name


def test_layers_that_the_gemm_cannot_take_simulate(seed):
    """Sides that 16 does not divide: listed, and computed as without fp8_gemm."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fits = nn.Linear(64, 48)
            self.narrow = nn.Linear(48, 40)
            self.other = nn.Linear(40, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.narrow(self.fits(x)))

    models = {}
    for fp8_gemm in (True, False):
        torch.manual_seed(seed)
        model = Odd().bfloat16()
        q = quant.prepare(
            model,
            get_scheme("fp8_static"),
            learn_weight_scale=False,
            learn_input_scale=False,
            fp8_gemm=fp8_gemm,
        )
        fill_scales(q)
        models[fp8_gemm] = model
        assert q.simulated == (["narrow", "other"] if fp8_gemm else [])
        assert [layer.fp8_gemm for layer in q.layers.values()] == [fp8_gemm, False, False]
    x = torch.randn(5, 64).bfloat16()
    assert models[True](x).shape == (5, 64)
    hidden = torch.randn(5, 48).bfloat16()
    assert torch.equal(models[True].narrow(hidden), models[False].narrow(hidden))
    assert torch.equal(models[True].other(hidden[:, :40]), models[False].other(hidden[:, :40]))


def test_the_gemm_only_while_both_operands_are_quantized(seed):
    """With either switch off the layer is what it is without fp8_gemm."""
    layer = single(48, 64)
    x = torch.randn(5, 64).bfloat16()
    for weights, inputs in ((True, False), (False, True), (False, False)):
        layer.weight_fake_quant, layer.input_fake_quant = weights, inputs
        layer.fp8_gemm = True
        output = layer(x)
        layer.fp8_gemm = False
        assert torch.equal(output, layer(x))
