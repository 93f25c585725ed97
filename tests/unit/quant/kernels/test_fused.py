"""Norms and SwiGLU with quantized results: against quant/reference.py bit for bit, gradients against fp64, and
how far both are from what torch computes without fusing."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quant import kernels, reference
from quant.formats import packing
from quant.scale import Quantizer, Scale
from quant.spec import FP8_TENSOR
from tests.unit.quant.kernels.cases import DTYPES, every_value, random_layout, special_values
from tests.unit.quant.kernels.comparing import assert_same, check_same

pytestmark = pytest.mark.usefixtures("compiled")

EPS = 1e-6
# Loops over 8, 32 and 64 elements, steps of 2,048 and the longest segment.
FEATURES = (8, 16, 24, 40, 64, 72, 128, 256, 1024, 2040, 2048, 2056, 4096, 6152, 16376, 16384)
ROWS = (0, 1, 2, 3, 31, 32, 33, 64, 70)


def random_rows(dtype: torch.dtype, wild: bool, *, most: int = 200_000) -> list[Tensor]:
    """Four tensors of one shape: an input, a second one, a gradient, and weights of its features."""
    features = random.choice(FEATURES)
    rows = random.choice([count for count in ROWS if count * features <= most])
    shape = (rows, features) if rows % 2 or rows == 0 else (2, rows // 2, features)
    found = []
    for scale in (random.choice((0.01, 1.0, 30.0)), 1.0, 1.0):
        values = (scale * torch.randn(rows * features)).to(dtype)
        found.append(random_layout(special_values(values, 1.0) if wild and rows else values, shape))
    return [*found, (1 + 0.3 * torch.randn(features)).to(dtype)]


def check_layers(dtype: torch.dtype, wild: bool, same: Callable[..., list[Tensor]]) -> None:
    """Call ``same`` for the operators of norms and SwiGLU."""
    x, up, grad, weight = random_rows(dtype, wild)
    s0, grid = torch.tensor([random.choice((0.002, 0.02, 0.1))]), random.choice((0, 8))
    how, what = (s0, grid, dtype if grid else torch.float32), f"{tuple(x.shape)} {dtype} grid {grid}"
    for wanted in (False, True):
        norm = same("rms_norm_quantize", x, weight, EPS, *how, wanted, wanted, what=what)
        swiglu = same("silu_mul_quantize", x, up, *how, wanted, wanted, what=what)
    for wanted in (False, True):
        same("rms_norm_backward", grad, x, weight, norm[3], norm[1], wanted, what=what)
    same("silu_mul_backward", grad, x, up, swiglu[1], what=what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wild", [False, True])
def test_kernels_equal_the_reference(dtype, wild, seed):
    for _ in range(12):
        check_layers(dtype, wild, check_same)


def smallest(dtype: torch.dtype) -> float:
    """Allowed error of results near zero: the spacing of subnormal numbers."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


# What a rounding of the results to their dtype may change, and of dweight the roundings of h in the forward.
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_norm_in_fp64(dtype, seed):
    """Errors of dx are relative to the gradient before the projection, which may cancel nearly all of a short row."""
    for _ in range(6):
        x, _, grad, weight = random_rows(dtype, False, most=70_000)
        if x.numel() == 0:
            continue
        inside = torch.rand(x.shape) < 0.9
        quantizer = Quantizer(Scale(torch.tensor([0.02])), FP8_TENSOR, dtype)
        *_, rstd = kernels.rms_norm_quantize(x, weight, EPS, quantizer, mask=True, values=False)
        found = kernels.rms_norm_backward(grad, x, weight, rstd, packing.pack_bits(inside), weight_gradient=True)
        wide, w = (one.double().requires_grad_() for one in (x.contiguous(), weight))
        y = w * (wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt())
        dy = grad.double() * inside
        dx, of_weight = torch.autograd.grad(y, (wide, w), dy)
        before = (w * dy / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()).norm(dim=-1)
        floor = smallest(dtype) * x.shape[-1] ** 0.5
        error = (found[0].double() - dx).norm(dim=-1)
        assert (error <= 2 * ROUNDING[dtype] * before + floor).all(), (tuple(x.shape), (error / before).max())
        assert (found[1].double() - of_weight).norm() <= 2 * ROUNDING[dtype] * of_weight.norm() + floor


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_swiglu_in_fp64(dtype, seed):
    """Relative to the terms, as those of the gate cancel near -1.28; sigma, in fp32, counts ``gate`` times. What
    underflows is off by a subnormal number, which dy multiplies."""
    for _ in range(6):
        gate, up, grad, _ = random_rows(dtype, False, most=70_000)
        inside = torch.rand(gate.shape) < 0.9
        found = kernels.silu_mul_backward(grad, gate, up, packing.pack_bits(inside))
        wide = [one.double().contiguous().requires_grad_() for one in (gate, up)]
        dy, (a, b) = (grad.double() * inside).contiguous(), (one.detach() for one in wide)
        expected, sigma = torch.autograd.grad(F.silu(wide[0]) * wide[1], wide, dy), a.sigmoid()
        rounded = ROUNDING[dtype] * (dy * b * sigma * (1 + a.abs() * (1 - sigma))).norm()
        of_sigma = ROUNDING[torch.float32] * (dy * b * sigma * a).norm()
        bounds = 2 * (rounded + of_sigma), 2 * ROUNDING[dtype] * expected[1].norm()
        floor = smallest(dtype) * (1 + dy.abs()).norm()
        for ours, exact, bound in zip(found, expected, bounds, strict=True):
            assert (ours.double() - exact).norm() <= bound + floor


@pytest.mark.parametrize(("dtype", "few"), [(torch.bfloat16, 1e-3), (torch.float16, 5e-3), (torch.float32, 1.0)])
def test_swiglu_is_torchs_but_for_the_exponential(dtype, few, seed):
    """Every bf16 gate and random others; where the exponential decides a rounding, the result is the next number."""
    gate = torch.arange(-30, 30, 60 / 2**18).to(dtype)
    if dtype == torch.bfloat16:
        gate = every_value(dtype)[every_value(dtype).abs() < 100]
    up, grad = torch.randn(len(gate)).to(dtype), torch.randn(len(gate)).to(dtype)
    all_inside = packing.pack_bits(torch.ones(gate.shape, dtype=torch.bool))
    ours = reference._silu(gate) * up, *kernels.silu_mul_backward(grad, gate, up, all_inside)
    leaves = [one.clone().requires_grad_() for one in (gate, up)]
    y = F.silu(leaves[0]) * leaves[1]
    for one, other in zip(ours, (y.detach(), *torch.autograd.grad(y, leaves, grad)), strict=True):
        finite = one.isfinite() & other.isfinite()
        assert torch.equal(one.isnan(), other.isnan())
        assert (one != other)[finite].float().mean() <= few
        assert torch.allclose(one[finite], other[finite], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    one_scale = Quantizer(Scale(torch.ones(1)), FP8_TENSOR, dtype)
    codes, *_ = kernels.silu_mul_quantize(gate, up, one_scale, mask=False, values=False)
    assert_same(codes, reference.quantize(ours[0], torch.ones(1), FP8_TENSOR))


def test_the_exponential(seed):
    x = torch.cat([torch.linspace(-103, 88.7, 2**20), 30 * torch.randn(2**18).clamp(-3, 2.9)])
    exact = x.double().exp()
    normal = exact > torch.finfo(torch.float32).tiny
    ulp = 2.0 ** (exact.log2().floor() - 23)
    assert ((reference.exponential(x).double() - exact) / ulp).abs()[normal].max() < 2
    ends = reference.exponential(torch.tensor([-torch.inf, -200.0, 0.0, 200.0, torch.inf, torch.nan]))
    assert ends[:5].tolist() == [0, 0, 1, torch.inf, torch.inf] and ends[5].isnan()
