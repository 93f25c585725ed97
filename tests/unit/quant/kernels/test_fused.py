"""Norms and SwiGLU with the quantization of their result: kernels against quant/fused_reference.py bit for bit,
gradients against fp64, and how far both are from what torch computes without fusing."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quant import fused_reference, kernels, reference
from quant.formats import packing
from quant.kernels import eager
from quant.scale import Quantizer, Scale
from quant.spec import FP8_TENSOR, TensorSpec
from tests.unit.quant.kernels.cases import DTYPES, random_layout, special_values
from tests.unit.quant.kernels.comparing import OPS, assert_same

pytestmark = pytest.mark.usefixtures("compiled")

EPS = 1e-6
# Loops over 8, 32 and 64 elements, steps of 2,048 and the longest segment.
FEATURES = (8, 16, 24, 40, 64, 72, 128, 256, 1024, 2040, 2048, 2056, 4096, 6152, 16376, 16384)
ROWS = (0, 1, 2, 3, 31, 32, 33, 64, 70)
SPECS = (FP8_TENSOR, TensorSpec("int", 8, "tensor"))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wild", [False, True])
def test_norms_equal_the_reference(dtype, wild, seed):
    for _ in range(12):
        x, _, grad, weight = random_rows(dtype, wild)
        spec, s0 = random.choice(SPECS), torch.tensor([random.choice((0.002, 0.02, 0.1))])
        quantizer = Quantizer(Scale(s0), spec, dtype)
        codes, mask, values, rstd = kernels.rms_norm_quantize(x, weight, EPS, quantizer, mask=True, values=True)
        scale = kernels.effective_scale(quantizer)
        their_codes, inside, their_values, their_rstd = fused_reference.rms_norm_quantize(x, weight, EPS, scale, spec)
        what = f"{tuple(x.shape)} {dtype} {spec.dtype}"
        assert_same(rstd, their_rstd, what)
        assert_same(codes, their_codes, what)
        assert_same(values, their_values, what)
        assert torch.equal(packing.unpack_bits(mask, x.shape), inside), what
        found = kernels.rms_norm_backward(grad, x, weight, rstd, mask, weight_gradient=True)
        expected = fused_reference.rms_norm_backward(grad, x, weight, rstd, inside)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs.contiguous(), what)
        alone, none = kernels.rms_norm_backward(grad, x, weight, rstd, mask, weight_gradient=False)
        assert none is None
        assert_same(alone, found[0])
        bare = kernels.rms_norm_quantize(x, weight, EPS, quantizer, mask=False, values=False)
        assert_same(bare[0], codes)
        assert bare[1].numel() == bare[2].numel() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wild", [False, True])
def test_swiglu_equals_the_reference(dtype, wild, seed):
    for _ in range(12):
        gate, up, grad, _ = random_rows(dtype, wild)
        spec = random.choice(SPECS)
        quantizer = Quantizer(Scale(torch.tensor([0.02])), spec, dtype)
        codes, mask, values = kernels.silu_mul_quantize(gate, up, quantizer, mask=True, values=True)
        scale = kernels.effective_scale(quantizer)
        their_codes, inside, their_values = fused_reference.silu_mul_quantize(gate, up, scale, spec)
        what = f"{tuple(gate.shape)} {dtype} {spec.dtype}"
        assert_same(codes, their_codes, what)
        assert_same(values, their_values, what)
        assert torch.equal(packing.unpack_bits(mask, gate.shape), inside), what
        found = kernels.silu_mul_backward(grad, gate, up, mask)
        expected = fused_reference.silu_mul_backward(grad, gate, up, inside)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs.contiguous(), what)


def all_inside(x: Tensor) -> Tensor:
    return packing.pack_bits(torch.ones(x.shape, dtype=torch.bool))


def smallest(dtype: torch.dtype) -> float:
    """What a result near zero may be off by, however small it is: the spacing of subnormal numbers."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def gradients(outputs: Tensor, grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((outputs * grad).sum(), inputs)


# What a rounding of the results to their dtype may change, and of dweight the roundings of h in the forward.
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_norm_in_fp64(dtype, seed):
    """Of dx in parts of the gradient before the projection, which may cancel nearly all of a row of few features."""
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
        (dx, of_weight), dy = gradients(y, grad.double() * inside, wide, w), grad.double() * inside
        before = (w * dy / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()).norm(dim=-1)
        floor = smallest(dtype) * x.shape[-1] ** 0.5
        error = (found[0].double() - dx).norm(dim=-1)
        assert (error <= 2 * ROUNDING[dtype] * before + floor).all(), (tuple(x.shape), (error / before).max())
        assert (found[1].double() - of_weight).norm() <= 2 * ROUNDING[dtype] * of_weight.norm() + floor


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_swiglu_in_fp64(dtype, seed):
    """In parts of the terms, as those of the gate cancel near -1.28; sigma, in fp32, counts ``gate`` times. What
    underflows is off by a subnormal number, which dy multiplies."""
    for _ in range(6):
        gate, up, grad, _ = random_rows(dtype, False, most=70_000)
        inside = torch.rand(gate.shape) < 0.9
        found = kernels.silu_mul_backward(grad, gate, up, packing.pack_bits(inside))
        wide = [one.double().contiguous().requires_grad_() for one in (gate, up)]
        dy, (a, b) = (grad.double() * inside).contiguous(), (one.detach() for one in wide)
        expected, sigma = gradients(F.silu(wide[0]) * wide[1], dy, *wide), a.sigmoid()
        rounded = ROUNDING[dtype] * (dy * b * sigma * (1 + a.abs() * (1 - sigma))).norm()
        of_sigma = ROUNDING[torch.float32] * (dy * b * sigma * a).norm()
        bounds = 2 * (rounded + of_sigma), 2 * ROUNDING[dtype] * expected[1].norm()
        floor = smallest(dtype) * (1 + dy.abs()).norm()
        for ours, exact, bound in zip(found, expected, bounds, strict=True):
            assert (ours.double() - exact).norm() <= bound + floor


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_differs_from_torchs_in_its_last_bit_and_rarely(dtype, seed):
    """Here by the order of a sum and a root alone."""
    x, weight = torch.randn(200, 1024).to(dtype), (1 + 0.3 * torch.randn(1024)).to(dtype)
    one = Quantizer(Scale(torch.tensor([2.0**-6])), FP8_TENSOR, dtype)
    codes, *_ = kernels.rms_norm_quantize(x, weight, EPS, one, mask=False, values=False)
    wide = x.float()
    theirs = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(dtype)
    other, _ = kernels.quantize(theirs, one)
    differs = codes.view(torch.uint8) != other.view(torch.uint8)
    assert differs.float().mean() < 2e-3
    assert (codes.float() - other.float()).abs()[differs].le(32).all()  # neighbors on the grid


def torchs_swiglu(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = F.silu(gate) * up
    y.backward(grad)
    assert gate.grad is not None and up.grad is not None
    return y.detach(), gate.grad, up.grad


@pytest.mark.parametrize(("dtype", "few"), [(torch.bfloat16, 1e-3), (torch.float16, 5e-3), (torch.float32, 1.0)])
def test_swiglu_is_torchs_but_for_the_exponential(dtype, few, seed):
    """Every bf16 gate and random others; where the exponential decides a rounding, the result is the next number."""
    gate = torch.arange(-30, 30, 60 / 2**18).to(dtype) if dtype != torch.bfloat16 else every_bfloat16()
    up, grad = torch.randn(len(gate)).to(dtype), torch.randn(len(gate)).to(dtype)
    wide = TensorSpec("fp8_e4m3", 8, "tensor")
    ours = fused_reference._silu(gate) * up, *kernels.silu_mul_backward(grad, gate, up, all_inside(gate))
    for one, other in zip(ours, torchs_swiglu(gate, up, grad), strict=True):
        finite = one.isfinite() & other.isfinite()
        assert torch.equal(one.isnan(), other.isnan())
        assert (one != other)[finite].float().mean() <= few
        assert torch.allclose(one[finite], other[finite], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    one_scale = Quantizer(Scale(torch.ones(1)), wide, dtype)
    codes, *_ = kernels.silu_mul_quantize(gate, up, one_scale, mask=False, values=False)
    assert_same(codes, reference.quantize(ours[0], torch.ones(1), wide))


def every_bfloat16() -> Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    return values[values.abs() < 100]


def test_the_exponential(seed):
    x = torch.cat([torch.linspace(-103, 88.7, 2**20), 30 * torch.randn(2**18).clamp(-3, 2.9)])
    exact = x.double().exp()
    normal = exact > torch.finfo(torch.float32).tiny
    ulp = 2.0 ** (exact.log2().floor() - 23)
    assert ((fused_reference.exponential(x).double() - exact) / ulp).abs()[normal].max() < 2
    ends = fused_reference.exponential(torch.tensor([-torch.inf, -200.0, 0.0, 200.0, torch.inf, torch.nan]))
    assert ends[:5].tolist() == [0, 0, 1, torch.inf, torch.inf] and ends[5].isnan()


def test_the_number_of_threads_changes_nothing(seed):
    x, grad, weight = torch.randn(300, 1000), torch.randn(300, 1000), torch.randn(1000)
    quantizer = Quantizer(Scale(torch.tensor([0.02])), FP8_TENSOR, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            codes, mask, _, rstd = kernels.rms_norm_quantize(x, weight, EPS, quantizer, mask=True, values=False)
            of_norm = kernels.rms_norm_backward(grad, x, weight, rstd, mask, weight_gradient=True)
            found.append((codes.float(), mask, rstd, *of_norm, *kernels.silu_mul_backward(grad, x, x, mask)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


X, WEIGHT, S0, RSTD, MASK = torch.randn(4, 16), torch.ones(16), torch.ones(1), torch.ones(4), all_inside(torch.ones(64))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rms_norm_quantize", (X[:, :12], WEIGHT[:12], EPS, S0, 0, torch.float32, True, True), "a multiple of 8 and"),
        ("rms_norm_quantize", (X, WEIGHT[:8], EPS, S0, 0, torch.float32, True, True), r"weight is \[8\] Float on cpu"),
        ("rms_norm_quantize", (X, WEIGHT.half(), EPS, S0, 0, torch.float32, True, True), r"expected \[16\] Float on"),
        ("rms_norm_quantize", (X, WEIGHT, EPS, torch.ones(4), 0, torch.float32, True, True), "one scale, got 4"),
        ("rms_norm_quantize", (X, WEIGHT, EPS, S0.half(), 0, torch.float32, True, True), "s0 is Half, expected float"),
        ("rms_norm_backward", (X[:2], X, WEIGHT, RSTD, MASK, True), r"grad is \[2, 16\] Float on cpu, expected"),
        ("rms_norm_backward", (X, X, WEIGHT, RSTD[:2], MASK, True), "rstd must be float32, contiguous and one per row"),
        ("rms_norm_backward", (X, X, WEIGHT, RSTD, MASK[:2], True), "a mask of 2 bytes"),
        ("silu_mul_quantize", (X, X[:2], S0, 0, torch.float32, True, True), r"up is \[2, 16\] Float on cpu"),
        ("silu_mul_backward", (X.half(), X, X, MASK), r"grad is \[4, 16\] Half on cpu, expected \[4, 16\] Float"),
    ],
)
def test_errors_name_what_is_wrong(name, arguments, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(OPS, name)(*arguments)


def test_the_reference_can_stand_in(seed):
    """Without a compiler."""
    arguments = (X, WEIGHT, EPS, torch.tensor([0.01]), 0, torch.float32, True, False)
    for ours, theirs in zip(OPS.rms_norm_quantize(*arguments), eager.rms_norm_quantize(*arguments), strict=True):
        assert_same(ours, theirs)
