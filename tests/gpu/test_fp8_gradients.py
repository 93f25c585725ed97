"""fp8 GEMMs on a device against fp64: how the forward adds up, and gradients that are multiplied as codes."""

import pytest
import torch
from torch import nn

from quant import gemm
from quant.function import Plan, quant_linear
from quant.reference import fake_quant, fake_quant_backward
from quant.reference_gradient import FORMATS, quantize_gradient
from quant.scale import Scale
from tests.gpu.test_gradients import FP8, close, poison, view
from tests.unit.conftest import seed  # noqa: F401  (a fixture)

# tokens, in, out. A CPU takes the first two alone.
SHAPES = [(33, 64, 48), (16, 32, 16), (777, 4096, 1024), (2048, 14336, 4096)]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_how_the_fp8_gemm_adds_up(shape, fast, device, fp8, seed):  # noqa: F811
    """Of sums of either sign: in fp32 within its rounding, fast ones within 14 bits of the largest partial sums
    (docs/how_a_layer_computes.md), which grow as the root of their number."""
    if device.type == "cpu" and shape not in SHAPES[:2]:
        pytest.skip("on a GPU")
    tokens, width, out = shape
    x, weight = (torch.randn(*size, device=device).to(torch.float8_e4m3fn) for size in ((tokens, width), (out, width)))
    one = torch.ones(1, device=device)
    ours = gemm.scaled_linear(x, one, weight, one, None, torch.bfloat16, fast_accum=fast)
    exact = x.double() @ weight.double().t()
    bits = 2.0**-13 if fast else 2.0**-23
    bound = 2.0**-8 * exact.abs() + bits * width * exact.std()
    assert ((ours.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("layout", ["whole", "columns", "transposed", "odd"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_in_fp8_against_fp64(shape, kind, layout, device, fp8, seed):  # noqa: F811
    """Those of the gradient's own codes, in memory that held NaN before."""
    if device.type == "cpu" and shape not in SHAPES[:2]:
        pytest.skip("on a GPU")
    tokens, width, out = shape
    make = {"device": device, "dtype": torch.bfloat16}
    x, grad = torch.randn(tokens, width, **make).requires_grad_(), torch.randn(tokens, out, **make)
    weight, bias = nn.Parameter(0.02 * torch.randn(out, width, **make)), nn.Parameter(torch.randn(out, **make))
    weight_s0, input_s0 = (torch.tensor([largest / 448], device=device) for largest in (0.05, 3.0))
    plan = Plan(FP8, FP8, weight.numel(), width, True, gradients=FORMATS[kind])
    poison(device)
    output = quant_linear(x, weight, bias, Scale(weight_s0), Scale(input_s0), plan)
    poison(device)
    given = grad if layout == "whole" else view(grad, layout)
    ours = torch.autograd.grad(output, [x, weight, bias], given)

    codes, scale = quantize_gradient(grad.cpu(), FORMATS[kind])
    exact = (codes.double() * scale.double()).to(device)
    exact_x, exact_weight = x.detach().double(), weight.detach().double()
    used_x, used_weight = fake_quant(exact_x, input_s0.double(), FP8), fake_quant(exact_weight, weight_s0.double(), FP8)
    grad_x, _ = fake_quant_backward(exact @ used_weight, exact_x, input_s0.double(), FP8, scale_gradient=False)
    of_used = exact.t() @ used_x
    grad_weight, _ = fake_quant_backward(of_used, exact_weight, weight_s0.double(), FP8, scale_gradient=False)
    close(ours[0], grad_x, exact.abs() @ used_weight.abs(), "x")
    close(ours[1], grad_weight, exact.abs().t() @ used_x.abs(), "weight")
    close(ours[2], grad.double().sum(0), grad.double().abs().sum(0), "bias")


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bad, device, fp8, seed):  # noqa: F811
    x = torch.randn(17, 64, device=device).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(48, 64, device=device).bfloat16())
    s0 = torch.tensor([0.01], device=device)
    plan = Plan(FP8, FP8, weight.numel(), 64, True, gradients=torch.float8_e5m2)
    grad = torch.randn(17, 48, device=device).bfloat16()
    grad[3, 5] = bad
    found = torch.autograd.grad(quant_linear(x, weight, None, Scale(s0), Scale(s0), plan), [x, weight], grad)
    assert not any(one.isfinite().all() for one in found)
