"""The GEMM of codes against fp64 and against simulation, and where it is not taken."""

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.linear import QuantLinear
from quant.reference import quantize
from quant.spec import TensorSpec, get_scheme
from tests.lib.saved import kept_for_backward, storages
from tests.unit.quant.attention import DTYPES, assert_equal, fill_scales, results

pytestmark = pytest.mark.usefixtures("prepared")

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")


def single(out: int, in_: int, *, dtype=torch.bfloat16, learn: bool = False, bias: bool = False) -> QuantLinear:
    model = nn.Sequential(nn.Linear(in_, out, bias=bias)).to(dtype)
    q = quant.prepare(model, get_scheme("fp8_static"), learn_weight_scale=learn, learn_input_scale=learn, fp8_gemm=True)
    fill_scales(q)
    return model[0]


def exact_product(layer: QuantLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of the exact fake-quantized operands in fp64, and the sum of the magnitudes of its terms."""
    used_x, used_weight = (
        quantize(one.detach(), scale, FP8).double() * scale.double()
        for one, scale in ((x, layer.input_scale()), (layer.weight, layer.weight_scale()))
    )
    bias = layer.bias.detach().double() if layer.bias is not None else torch.zeros(layer.out_features).double()
    return used_x @ used_weight.t() + bias, used_x.abs() @ used_weight.t().abs() + bias.abs()


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
@pytest.mark.parametrize("learn", (False, True))
def test_gradients_are_the_same_in_both(learn, dtype, seed):
    """Backward is one computation: given the same gradient of the output, bit for bit; the same bytes are kept. Without
    tokens gradients are zeros, not None."""
    layer = single(48, 64, dtype=dtype, learn=learn, bias=True)
    x, grad = torch.randn(3, 7, 64).to(dtype), torch.randn(3, 7, 48).to(dtype)
    found, kept = [], []
    for layer.fp8_gemm in (True, False):
        found.append(results(layer, x, grad))
        with kept_for_backward(layer.parameters()) as saved:
            output = layer(x.clone().requires_grad_())
        kept.append(sorted((str(saved[at].dtype), size) for at, size in storages(saved).items()))
        assert found[-1].pop("output").shape == output.shape == (3, 7, 48)
    assert_equal(*found)
    assert {"x", "weight", "bias"} <= found[0].keys() and ("weight_theta" in found[0]) == learn
    assert kept[0] == kept[1] and len(kept[0]) == (1 if learn else 2)
    layer.fp8_gemm = True
    for tokens in ((0,), (0, 5), (2, 0)):
        nothing = results(layer, torch.empty(*tokens, 64, dtype=dtype), torch.empty(*tokens, 48, dtype=dtype))
        assert nothing.pop("output").shape == (*tokens, 48) and nothing.keys() == found[0].keys()
        assert not any(gradient.any() for gradient in nothing.values())


def test_where_the_gemm_is_not_taken_layers_simulate(seed):
    """Sides that 16 does not divide are listed; with either switch off a layer is as without fp8_gemm."""
    models = []
    for fp8_gemm in (True, False):
        torch.manual_seed(seed)
        sizes = {"fits": (64, 48), "narrow": (48, 40), "other": (40, 64)}
        model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}).bfloat16()
        learn = {"learn_weight_scale": False, "learn_input_scale": False}
        q = quant.prepare(model, get_scheme("fp8_static"), **learn, fp8_gemm=fp8_gemm)
        fill_scales(q)
        models.append(model)
        assert q.simulated == (["narrow", "other"] if fp8_gemm else [])
        assert [layer.fp8_gemm for layer in q.layers.values()] == [fp8_gemm, False, False]
    fits = [("fits", *on) for on in ((True, False), (False, True), (False, False))]
    for name, weights, inputs in (("narrow", True, True), ("other", True, True), *fits):
        x = torch.randn(5, sizes[name][0]).bfloat16()
        for model in models:
            model[name].weight_fake_quant, model[name].input_fake_quant = weights, inputs
        assert torch.equal(*(model[name](x) for model in models))
