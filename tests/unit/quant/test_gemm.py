"""Products of a stack of weights, and of codes, against fp64."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quant
from quant import gemm
from quant.linear import QuantLinear
from quant.reference import quantize
from quant.spec import get_scheme
from tests.lib.saved import kept_for_backward, kinds
from tests.lib.scales import fill_scales
from tests.unit.quant.attention import DTYPES, assert_equal, results
from tests.unit.quant.one_linear import quantized_linear
from tests.unit.quant.oracle import FP8

pytestmark = pytest.mark.usefixtures("prepared")


SIDES = [(16, 24), (5, 7), (8, 9), (64, 8)]  # whole 16 bytes in every dtype, and not


def codes(*shape: int) -> Tensor:
    return (40 * torch.randn(shape)).clamp(-448, 448).to(torch.float8_e4m3fn)


def of_experts(rows: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """The rows of each expert times its weight, transposed."""
    parts = zip(rows.split(counts.tolist()), weight, strict=True)
    return torch.cat([part @ one.t() for part, one in parts])


class Called(TorchDispatchMode):
    """Keeps the arguments of every operator that is called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, list] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.arguments.setdefault(func._schema.name, []).append([*args, *kwargs.values()])
        return func(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_products_and_gradients_are_those_of_each_expert(dtype, sides, rows, seed):
    experts, (wide, narrow) = 5, sides
    counts = torch.bincount(torch.randint(0, experts - 1, (rows,)), minlength=experts)  # the last one gets nothing
    x = torch.randn(rows, narrow).to(dtype).requires_grad_()
    weight = (torch.randn(experts, wide, narrow) / 4).to(dtype).requires_grad_()
    grad = torch.randn(rows, wide).to(dtype)
    output = gemm.linear(x, weight, None, counts.cumsum(0).int())
    output.backward(grad)

    exact_x, exact_weight, exact_grad = (one.detach().double() for one in (x, weight, grad))
    parts = zip(*(one.split(counts.tolist()) for one in (exact_grad, exact_x)), strict=True)
    # Of a sum of at most 64 terms of size about 1, in the dtype's rounding.
    eps = max(torch.finfo(dtype).eps, 1e-12)
    for ours, theirs in (
        (output, of_experts(exact_x, counts, exact_weight)),
        (x.grad, of_experts(exact_grad, counts, exact_weight.transpose(1, 2))),
        (weight.grad, torch.stack([g.t() @ part for g, part in parts])),
    ):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=4 * eps, atol=40 * eps)
    assert not weight.grad[-1].any()


def test_only_what_is_needed_is_computed(seed):
    offsets = torch.tensor([2, 3], dtype=torch.int32)
    for trains_x, trains_weight in ((True, False), (False, True)):
        x, weight = torch.randn(3, 8, requires_grad=trains_x), torch.randn(2, 8, 8, requires_grad=trains_weight)
        gemm.linear(x, weight, None, offsets).sum().backward()
        assert (x.grad is not None) == trains_x and (weight.grad is not None) == trains_weight


def test_operands_in_pieces_are_multiplied_together_too(seed):
    """Neither a gradient that was expanded, nor a view of every second column, falls back to one expert at a time."""
    offsets = torch.tensor([3, 3, 10], dtype=torch.int32)
    x = torch.randn(10, 32).bfloat16()[:, ::2].requires_grad_()
    weight = torch.randn(3, 16, 8).bfloat16().transpose(1, 2).requires_grad_()
    with Called() as called:
        output = gemm.linear(x, weight, None, offsets)
        output.sum().backward()
    assert len(called.arguments["aten::_grouped_mm"]) == 3
    torch.testing.assert_close(output, of_experts(x, torch.tensor([3, 0, 7]), weight), rtol=2**-7, atol=2**-7)


def test_gradients_of_experts_without_rows_are_zeros_whatever_the_memory_held(seed):
    gradient = torch.randn(5, 8, 16).bfloat16()
    kept = gradient[[1, 3]].clone()
    gradient[[0, 2, 4]] = torch.nan  # what pytorch#172439 leaves there
    offsets = torch.tensor([0, 2, 2, 7, 7], dtype=torch.int32)
    assert gemm.zero_where_empty_(gradient, offsets) is gradient
    assert torch.equal(gradient[[1, 3]], kept) and not gradient[[0, 2, 4]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_codes_of_a_stack_are_multiplied_expert_by_expert(rows, dtype, seed):
    """Sums of at most 64 products, which are exact, in fp32, then one rounding to the dtype."""
    experts = 4
    counts = torch.bincount(torch.randint(1, experts, (rows,)), minlength=experts)  # the first one gets nothing
    x, weight = codes(rows, 64), codes(experts, 32, 64)
    x_scale, weight_scale = torch.rand(1) + 0.1, torch.rand(experts) + 0.1
    output = gemm.scaled_linear(x, x_scale, weight, weight_scale, None, dtype, counts.cumsum(0).int())
    exact_x, exact_weight = x.double() * x_scale.double(), weight.double() * weight_scale.double()[:, None, None]
    exact, size = of_experts(exact_x, counts, exact_weight), of_experts(exact_x.abs(), counts, exact_weight.abs())
    assert output.shape == (rows, 32) and output.dtype == dtype
    assert ((output.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 68 * 2.0**-24 * size).all()


# ---- layers that multiply codes


def single(out: int, in_: int, *, learn: bool = False, **options) -> QuantLinear:
    learns = {"learn_weight_scale": learn, "learn_input_scale": learn}
    return quantized_linear("fp8_static", out, in_, fp8_gemm=True, **learns, **options)


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
        with Called() as called:
            output = layer(x)
        if bias and fp8_gemm:  # CUDA's kernel adds the bias itself in bf16; in fp32 it refuses it
            given = [one.data_ptr() for one in called.arguments["aten::_scaled_mm"][0] if isinstance(one, Tensor)]
            assert (layer.bias.data_ptr() in given) == (dtype == torch.bfloat16)
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
        kept.append(kinds(saved))
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
        q = quant.replace_layers(model, get_scheme("fp8_static"), **learn, fp8_gemm=fp8_gemm)
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
