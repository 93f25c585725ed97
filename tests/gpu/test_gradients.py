"""Gradients of quantized layers against fp64, in memory that held NaN before, with operands that are views.

Both ways of computing have one backward: that simulate and the fp8 GEMM agree (test_linear.py) says nothing of whether
it is right.
"""

import pytest
import torch
from torch import Tensor, nn

from quant import gemm
from quant.autograd import Plan, quant_linear
from quant.reference import fake_quant, fake_quant_backward, inside_range
from quant.scale import Scale
from quant.spec import TensorSpec

FP8, INT4 = TensorSpec("fp8_e4m3", 8, "tensor"), TensorSpec("int", 4, "channel")
WAYS = {"fp8_gemm": (FP8, FP8, True), "simulate": (FP8, FP8, False), "w4": (INT4, None, False)}
# tokens, in, out. A CPU takes the first two alone.
SHAPES = [(33, 64, 48), (1, 16, 16), (777, 4096, 1024), (2048, 14336, 4096)]
EPS = 2.0**-8  # of bf16


def poison(device: torch.device) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    garbage = [torch.full((size,), torch.nan, device=device) for size in (2**10, 2**16, 2**20, 2**22) for _ in range(4)]
    del garbage


def view(x: Tensor, kind: str) -> Tensor:
    """The same values in another layout: every second column of a tensor, a transposed one, or from an odd address."""
    if kind == "columns":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    if kind == "transposed":
        return x.t().contiguous().t()
    flat = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def close(ours: Tensor, exact: Tensor, size: Tensor, what: str) -> None:
    """Within rounding: operands and result are rounded to bf16, sums of products ``size`` large are in fp32."""
    assert ours.isfinite().all(), what
    bound = 4 * EPS * exact.abs() + (3 * EPS + 2.0**-13) * size
    assert ((ours.double() - exact).abs() <= bound).all(), f"{what}: {(ours.double() - exact).abs().max()}"


@pytest.mark.parametrize("layout", ["whole", "columns", "transposed", "odd"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_against_fp64(way, shape, layout, device, fp8, seed):
    if device.type == "cpu" and shape not in SHAPES[:2]:
        pytest.skip("on a GPU")
    weight_spec, input_spec, fp8_gemm = WAYS[way]
    tokens, width, out = shape
    make = {"device": device, "dtype": torch.bfloat16}
    x, grad = torch.randn(tokens, width, **make), torch.randn(tokens, out, **make)
    weight, bias = 0.02 * torch.randn(out, width, **make), torch.randn(out, **make)
    if layout != "whole":
        x, grad, weight = (view(one, layout) for one in (x, grad, weight))
    x, weight, bias = x.requires_grad_(), nn.Parameter(weight), nn.Parameter(bias)
    # Some values are clipped.
    weight_s0 = torch.full((out, 1) if weight_spec is INT4 else (1,), 0.05 / weight_spec.qmax, device=device)
    theta = nn.Parameter(torch.zeros_like(weight_s0).bfloat16())
    input_s0 = None if input_spec is None else torch.tensor([3.0 / 448], device=device)
    plan = Plan(weight_spec, input_spec, width, width, fp8_gemm)
    poison(device)
    output = quant_linear(x, weight, bias, Scale(weight_s0, theta), None if input_s0 is None else Scale(input_s0), plan)
    poison(device)
    ours = torch.autograd.grad(output, [x, weight, bias, theta], grad)

    exact_x, exact_weight, exact_grad = (one.detach().double() for one in (x, weight, grad))
    used_x = exact_x if input_s0 is None else fake_quant(exact_x, input_s0.double(), FP8)
    used_weight = fake_quant(exact_weight, weight_s0.double(), weight_spec)
    close(output, used_x @ used_weight.t() + bias.double(), used_x.abs() @ used_weight.abs().t(), "output")
    grad_x, size_x = exact_grad @ used_weight, exact_grad.abs() @ used_weight.abs()
    if input_s0 is not None:
        grad_x, _ = fake_quant_backward(grad_x, exact_x, input_s0.double(), FP8, scale_gradient=False)
    close(ours[0], grad_x, size_x, "x")
    of_used, size = exact_grad.t() @ used_x, exact_grad.abs().t() @ used_x.abs()
    grad_weight, grad_scale = fake_quant_backward(
        of_used, exact_weight, weight_s0.double(), weight_spec, scale_gradient=True
    )
    close(ours[1], grad_weight, size, "weight")
    close(ours[2], exact_grad.sum(0), exact_grad.abs().sum(0), "bias")
    # LSQ's factor is written out here: 1 / sqrt(weights that share a scale, as the plan says, times qmax).
    # Of theta thousands of terms of either sign are added up: what rounding moves each of them by adds up as its root.
    inside = inside_range(exact_weight, weight_s0.double(), weight_spec)
    terms = (used_weight - exact_weight * inside) / weight_s0.double()
    squares = terms**2 * (exact_grad.t() ** 2 @ used_x**2)
    noise = (squares.sum(-1, keepdim=True) if weight_spec is INT4 else squares.sum().view(1)).sqrt()
    factor = (1 / (width * weight_spec.qmax) ** 0.5) * weight_s0.double()
    assert grad_scale is not None
    error = (ours[3].double() - grad_scale * factor).abs()
    assert (error <= EPS * (grad_scale.abs() + 8 * noise) * factor).all(), "theta"


@pytest.mark.parametrize("counts", [[0, 5, 16, 0], [300, 0, 77, 130], [0, 0, 0, 1]])
@pytest.mark.parametrize("width", [64, 4096])
def test_gradients_of_stacked_experts_against_fp64(counts, width, device, seed):
    """Experts without rows get zeros, whatever the memory held before."""
    if device.type == "cpu" and width > 64:
        pytest.skip("on a GPU")
    make = {"device": device, "dtype": torch.bfloat16}
    x, weight = torch.randn(sum(counts), width, **make), 0.02 * torch.randn(len(counts), 48, width, **make)
    grad, offsets = torch.randn(sum(counts), 48, **make), torch.tensor(counts, device=device).cumsum(0).int()
    for layout in ("whole", "columns", "odd"):
        operands = (x, weight) if layout == "whole" else (view(x, layout), view(weight, layout))
        leaves = [one.detach().requires_grad_() for one in operands]
        poison(device)
        output = gemm.linear(*leaves, None, offsets)
        poison(device)
        grad_x, grad_weight = torch.autograd.grad(output, leaves, grad)
        parts, grads = x.double().split(counts), grad.double().split(counts)
        for e, (rows, of_rows, one) in enumerate(zip(parts, grads, weight.double(), strict=True)):
            where = slice(sum(counts[:e]), sum(counts[: e + 1]))
            close(output[where], rows @ one.t(), rows.abs() @ one.abs().t(), f"output, {layout}")
            close(grad_x[where], of_rows @ one, of_rows.abs() @ one.abs(), f"x, {layout}")
            close(grad_weight[e], of_rows.t() @ rows, of_rows.abs().t() @ rows.abs(), f"weight, {layout}")
