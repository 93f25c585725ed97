"""Products of a stack of weights against one product per expert in fp64."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quant import SCHEMES, gemm, prepare

SIDES = [(16, 24), (5, 7), (8, 9), (64, 8)]  # whole 16 bytes in every dtype, and not


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_products_and_gradients_are_those_of_each_expert(dtype, sides, rows, seed):
    experts, (wide, narrow) = 5, sides
    chosen = torch.randint(0, experts - 1, (rows,))  # the last one gets nothing
    counts = torch.bincount(chosen, minlength=experts)
    offsets = counts.cumsum(0).int()
    x = torch.randn(rows, narrow).to(dtype).requires_grad_()
    weight = (torch.randn(experts, wide, narrow) / 4).to(dtype).requires_grad_()
    grad = torch.randn(rows, wide).to(dtype)
    output = gemm.linear(x, weight, None, offsets)
    output.backward(grad)

    parts, whole = x.detach().double().split(counts.tolist()), weight.detach().double()
    grads = grad.double().split(counts.tolist())
    expected = torch.cat([part @ one.t() for part, one in zip(parts, whole, strict=True)])
    grad_x = torch.cat([part @ one for part, one in zip(grads, whole, strict=True)])
    grad_weight = torch.stack([g.t() @ part for g, part in zip(grads, parts, strict=True)])
    # Of a sum of at most 64 terms of size about 1, in the dtype's rounding.
    eps = max(torch.finfo(dtype).eps, 1e-12)
    for ours, theirs in ((output, expected), (x.grad, grad_x), (weight.grad, grad_weight)):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=4 * eps, atol=40 * eps)
    assert not weight.grad[-1].any()


def test_only_what_is_needed_is_computed_and_kept(seed):
    """A frozen weight gets no gradient, and an input that needs none is not asked for."""
    offsets = torch.tensor([2, 3], dtype=torch.int32)
    for trains_x, trains_weight in ((True, False), (False, True)):
        x, weight = torch.randn(3, 8, requires_grad=trains_x), torch.randn(2, 8, 8, requires_grad=trains_weight)
        gemm.linear(x, weight, None, offsets).sum().backward()
        assert (x.grad is not None) == trains_x and (weight.grad is not None) == trains_weight


class Called(TorchDispatchMode):
    """Keeps the arguments of every operator that is called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, list] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.arguments.setdefault(func._schema.name, []).append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_operands_in_pieces_are_multiplied_together_too(seed):
    """Neither a gradient that was expanded, nor a view of every second column, falls back to one expert at a time."""
    offsets = torch.tensor([3, 3, 10], dtype=torch.int32)
    x = torch.randn(10, 32).bfloat16()[:, ::2].requires_grad_()
    weight = torch.randn(3, 16, 8).bfloat16().transpose(1, 2).requires_grad_()
    with Called() as called:
        output = gemm.linear(x, weight, None, offsets)
        output.sum().backward()
    assert len(called.arguments["aten::_grouped_mm"]) == 3
    exact = torch.cat([x[:3] @ weight[0].t(), x[3:] @ weight[2].t()])
    torch.testing.assert_close(output, exact, rtol=2**-7, atol=2**-7)


def test_gradients_of_experts_without_rows_are_zeros_whatever_the_memory_held(seed):
    gradient = torch.randn(5, 8, 16).bfloat16()
    kept = gradient[[1, 3]].clone()
    gradient[[0, 2, 4]] = torch.nan  # what pytorch#172439 leaves there
    offsets = torch.tensor([0, 2, 2, 7, 7], dtype=torch.int32)
    assert gemm.zero_where_empty_(gradient, offsets) is gradient
    assert torch.equal(gradient[[1, 3]], kept) and not gradient[[0, 2, 4]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bias_of_a_result_in_fp32_is_added_apart(dtype, seed):
    """CUDA's kernel refuses it there, and adds it itself in bf16."""
    x, weight, bias, scale = codes(16, 32), codes(48, 32), torch.randn(48).to(dtype), torch.rand(1)
    with Called() as called:
        output = gemm.scaled_linear(x, scale, weight, scale, bias, dtype)
    (args, kwargs), *_ = called.arguments["aten::_scaled_mm"]
    given = [one for one in (*args, *kwargs.values()) if one is bias]
    assert bool(given) == (dtype == torch.bfloat16)
    exact = x.double() @ weight.double().t() * scale.double() ** 2 + bias.double()
    size = x.double().abs() @ weight.double().abs().t() * scale.double() ** 2 + bias.double().abs()
    # 32 exact products added up in fp32, the scales and the bias; then one rounding to the dtype.
    assert ((output.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 36 * 2.0**-24 * size).all()


def codes(*shape: int) -> torch.Tensor:
    return (40 * torch.randn(shape)).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_codes_of_a_stack_are_multiplied_expert_by_expert(rows, dtype, seed):
    """Sums of at most 64 products, which are exact, in fp32, then one rounding to the dtype."""
    experts = 4
    counts = torch.bincount(torch.randint(1, experts, (rows,)), minlength=experts)  # the first one gets nothing
    x, weight = codes(rows, 64), codes(experts, 32, 64)
    x_scale, weight_scale = torch.rand(1) + 0.1, torch.rand(experts) + 0.1
    output = gemm.scaled_linear(x, x_scale, weight, weight_scale, None, dtype, counts.cumsum(0).int())
    parts = zip(x.double().split(counts.tolist()), weight.double(), weight_scale.double(), strict=True)
    exact = torch.cat([part @ one.t() * scale for part, one, scale in parts]) * x_scale.double()
    parts = zip(x.double().abs().split(counts.tolist()), weight.double().abs(), weight_scale.double(), strict=True)
    size = torch.cat([part @ one.t() * scale for part, one, scale in parts]) * x_scale.double()
    assert output.shape == (rows, 32) and output.dtype == dtype
    assert ((output.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 68 * 2.0**-24 * size).all()


def test_the_grouped_gemm_of_codes_takes_what_it_is_given(seed):
    """Without a GPU: torch's own checks of shapes, strides and dtypes, which run on the meta device."""
    x, weight = codes(50, 64).to("meta"), codes(4, 32, 64).to("meta")
    scales = torch.ones(1, device="meta"), torch.ones(4, device="meta")
    offsets = torch.zeros(4, dtype=torch.int32, device="meta")
    assert gemm.takes_codes_of_stacks(weight.to(torch.bfloat16))
    output = gemm.scaled_linear(x, scales[0], weight, scales[1], None, torch.bfloat16, offsets)
    assert output.shape == (50, 32) and output.dtype == torch.bfloat16


def test_the_layer_says_how_its_gemm_adds_and_a_cpu_does_not_care(seed):
    outputs = []
    for fast in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"up_proj": nn.Linear(64, 32, dtype=torch.bfloat16)})
        scales = {"learn_weight_scale": False, "learn_input_scale": False}
        prepare(model, SCHEMES["fp8_static"], **scales, fp8_gemm=True, fast_accum=fast)
        for name in ("weight_s0", "input_s0"):
            getattr(model["up_proj"], name).data.fill_(0.01)
        with Called() as called:
            outputs.append(model["up_proj"](torch.randn(16, 64).bfloat16()))
        (args, kwargs), *_ = called.arguments["aten::_scaled_mm"]
        assert any(one is True for one in [*args, *kwargs.values()]) == fast
    assert torch.equal(*outputs) and outputs[0].isfinite().all()
