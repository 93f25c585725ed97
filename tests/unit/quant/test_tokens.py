"""Dynamic inputs against the definition written out token by token in numpy, and their gradient."""

import random

import numpy as np
import pytest
import torch

from quant import kernels, reference
from quant.reference import fake_quantize_tokens, fake_quantize_tokens_backward, quantize_tokens
from quant.spec import TensorSpec
from tests.unit.quant.oracle import DTYPES, round_oracle

ASYMMETRIC = TensorSpec("int", 8, "token", symmetric=False, dynamic=True)
SPECS = [
    ASYMMETRIC,
    TensorSpec("int", 8, "token", dynamic=True),
    TensorSpec("fp8_e4m3", 8, "token", dynamic=True),
    TensorSpec("fp8_e4m3", 8, "group", 16, dynamic=True),
    TensorSpec("int", 8, "group", 16, dynamic=True),
    TensorSpec("int", 4, "token", symmetric=False, dynamic=True),
]


class Oracle:
    """One token, or group of one, by the formulas of the definition: fp32 scale and v, the rest in fp64."""

    def __init__(self, x: np.ndarray, spec: TensorSpec) -> None:
        low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
        if spec.symmetric:
            half_range = 448 if spec.dtype == "fp8_e4m3" else (2**spec.bits - 1) / 2
            self.scale, self.zero_point = max(-low, high) / np.float32(half_range), 0.0
        else:
            self.scale = (high - low) / np.float32(2**spec.bits - 1)
            unclamped = spec.qmin - np.rint(np.float64(low * (np.float32(1) / self.scale)))
            self.zero_point = min(max(unclamped, spec.qmin), spec.qmax)
        v = x * (np.float32(1) / self.scale)
        rounded = round_oracle(v, spec) + self.zero_point
        self.codes = rounded.clip(spec.qmin, spec.qmax)
        self.inside = rounded == self.codes
        self.values = (self.codes - self.zero_point).astype(np.float32) * self.scale


def random_input(dtype: torch.dtype) -> torch.Tensor:
    """Tokens of many sizes, some of one sign, in one to three dimensions and any layout."""
    shape = (*random.choice(((7,), (2, 5), ())), 16 * random.randint(1, 8))
    x = torch.randn(shape) * 10 ** torch.empty(*shape[:-1], 1).uniform_(-4, 3) + random.choice((0.0, 0.0, 3.0, -3.0))
    if random.random() < 0.3:
        x = torch.cat([x, x], dim=-1)[..., ::2]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_values_and_gradients_against_the_oracle(spec, dtype, seed):
    """Exact, by the reference and by the kernels: codes, scales, zero points, values, and who has a gradient."""
    clipped = 0
    for _ in range(10):
        x = random_input(dtype)
        grad = torch.randn_like(x)
        groups = x.float().reshape(-1, spec.group_size or x.shape[-1]).numpy()
        expected = [Oracle(group, spec) for group in groups]
        # One scale per token, or one for every group of it.
        scale_shape = (*x.shape[:-1], x.shape[-1] // spec.group_size if spec.group_size else 1)

        def stack(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.from_numpy(np.stack([getattr(one, name) for one in expected])).reshape(shape)  # noqa: B023

        inside = stack("inside", x.shape)
        clipped += int((~inside).sum())
        for module in (reference, kernels):
            codes, scale, zero_point = module.quantize_tokens(x, spec)
            assert codes.dtype == (torch.float8_e4m3fn if spec.dtype == "fp8_e4m3" else torch.int8)
            assert scale.dtype == torch.float32 and zero_point.dtype == torch.int8
            assert torch.equal(codes.double(), stack("codes", x.shape))
            assert torch.equal(scale, stack("scale", scale_shape))
            assert torch.equal(zero_point.double(), stack("zero_point", scale_shape).double())
            values = module.fake_quantize_tokens(x, spec)
            assert values.dtype == dtype and torch.equal(values, stack("values", x.shape).to(dtype))
            assert torch.equal(module.fake_quantize_tokens_backward(grad, x, spec), torch.where(inside, grad, 0))
    if spec.symmetric:  # integers have no code for absmax / scale = 127.5, e4m3 has one for 448
        assert (clipped > 0) == (spec.dtype == "int")


def test_a_tie_at_both_ends_clips():
    """-127.5 and 127.5 are rounded apart, to 257 codes: one element of an asymmetric token is outside after all."""
    x = torch.tensor([[-127.5, 0.3, 127.5]])
    codes, scale, zero_point = quantize_tokens(x, ASYMMETRIC)
    assert (codes.tolist(), scale.item(), zero_point.item()) == ([[-128, 0, 127]], 1.0, 0)
    assert fake_quantize_tokens(x, ASYMMETRIC).tolist() == [[-128, 0, 127]]
    assert fake_quantize_tokens_backward(torch.ones(1, 3), x, ASYMMETRIC).tolist() == [[1, 1, 0]]


class TokenSurrogate:
    """``s * clamp(v + e, qmin - z, qmax - z)`` in fp64 with scale, zero point and rounding error e held fixed at those
    of ``x``: the gradient is that of this function."""

    def __init__(self, x: torch.Tensor, spec: TensorSpec) -> None:
        _, scale, zero_point = quantize_tokens(x, spec)
        size = spec.group_size or x.shape[-1]
        self.scale, z = (t.repeat_interleave(size, -1).double() for t in (scale, zero_point))
        v = x.float() * (1 / self.scale.float())
        rounded = torch.from_numpy(round_oracle(v.numpy(), spec))
        self.error = rounded - x.double() / self.scale
        self.bounds = spec.qmin - z, spec.qmax - z
        # Towards the middle of the grid: an element that rounds to an end of it is inside.
        self.inwards = torch.where(rounded + z > (spec.qmin + spec.qmax) / 2, -1.0, 1.0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.clamp(x / self.scale + self.error, *self.bounds)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_gradient_against_finite_differences(spec, seed):
    """Of the :class:`TokenSurrogate`, piecewise linear in x: differences are exact but for the rounding of fp64, 1e-16
    of up to 1e3 codes over a step of 1e-7."""
    for _ in range(10):
        x = random_input(torch.float32)
        grad = torch.randn_like(x)
        surrogate = TokenSurrogate(x, spec)
        step = 1e-7 * surrogate.scale * surrogate.inwards
        by_x = (surrogate(x.double() + step) - surrogate(x.double())) / step * grad
        torch.testing.assert_close(fake_quantize_tokens_backward(grad, x, spec).double(), by_x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_tokens_without_a_range(spec):
    """Zeros stay zeros under a scale of 1; what is not finite makes NaN of its token or group, and only of that."""
    x = torch.zeros(4, 32)
    x[1:] = torch.linspace(-1, 2, 32)
    x[2, 3], x[3, 4] = torch.nan, torch.inf
    codes, scale, zero_point = quantize_tokens(x, spec)
    assert (scale[0] == 1).all() and torch.equal(codes[0].float(), zero_point[0, 0].float().expand(32))
    size = spec.group_size or 32
    values, grad = fake_quantize_tokens(x, spec), fake_quantize_tokens_backward(torch.ones(4, 32), x, spec)
    assert not values[0].any() and (grad[0] == 1).all()
    assert values[1].isfinite().all()
    for row in (2, 3):
        assert values[row, :size].isnan().all() and values[row, size:].isfinite().all()
        assert scale[row, 0].isnan() and zero_point[row, 0] == 0
        assert not grad[row, :size].any() and (size == 32 or grad[row, size:].any())
        bad = codes[row, :size].float()
        assert bad.isnan().all() if spec.dtype == "fp8_e4m3" else not bad.any()
