"""Dynamic inputs: scales and zero points by the formulas in numpy, the rest as with scales that are stored."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quant import kernels, reference
from quant.reference import fake_quantize_tokens, fake_quantize_tokens_backward, quantize_tokens
from quant.spec import TensorSpec
from tests.unit.quant.oracle import DTYPES

ASYMMETRIC = TensorSpec("int", 8, "token", symmetric=False, dynamic=True)
SPECS = [
    ASYMMETRIC,
    TensorSpec("int", 8, "token", dynamic=True),
    TensorSpec("fp8_e4m3", 8, "token", dynamic=True),
    TensorSpec("fp8_e4m3", 8, "group", 16, dynamic=True),
    TensorSpec("int", 8, "group", 16, dynamic=True),
    TensorSpec("int", 4, "token", symmetric=False, dynamic=True),
]


def random_input(dtype: torch.dtype) -> Tensor:
    """Tokens of many sizes, some of one sign, in one to three dimensions and any layout."""
    shape = (*random.choice(((7,), (2, 5), ())), 16 * random.randint(1, 8))
    x = torch.randn(shape) * 10 ** torch.empty(*shape[:-1], 1).uniform_(-4, 3) + random.choice((0.0, 0.0, 3.0, -3.0))
    if random.random() < 0.3:
        x = torch.cat([x, x], dim=-1)[..., ::2]
    return x.to(dtype)


def expected_grid(groups: np.ndarray, spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Scale, in fp32, and zero point of each row by the formulas of the definition."""
    low, high = np.minimum(groups.min(1), np.float32(0)), np.maximum(groups.max(1), np.float32(0))
    if spec.symmetric:
        half_range = 448 if spec.dtype == "fp8_e4m3" else (2**spec.bits - 1) / 2
        return np.maximum(-low, high) / np.float32(half_range), np.zeros_like(low)
    scale = (high - low) / np.float32(2**spec.bits - 1)
    zero = spec.qmin - np.rint((low * (np.float32(1) / scale)).astype(np.float64))
    return scale, zero.clip(spec.qmin, spec.qmax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_values_and_gradients(spec, dtype, seed):
    """Exact, by the reference and by the kernels: codes, scales, zero points, values and gradients. Those of stored
    scales are tested against an oracle and finite differences."""
    clipped, stored = 0, replace(spec, dynamic=False, granularity="group" if spec.group_size else "channel")
    for _ in range(10):
        x = random_input(dtype)
        grad = torch.randn_like(x)
        rows = x.reshape(-1, x.shape[-1])
        scale, zero = expected_grid(x.float().reshape(-1, spec.group_size or x.shape[-1]).numpy(), spec)
        scale, zero = (torch.from_numpy(one).float().reshape(len(rows), -1) for one in (scale, zero))
        grid = (scale, stored, None if spec.symmetric else zero)
        masked, _ = reference.fake_quant_backward(grad.view_as(rows), rows, *grid, scale_gradient=False)
        clipped += int((masked == 0).sum())
        # One scale per token, or one for every group of it.
        scale_shape = (*x.shape[:-1], x.shape[-1] // spec.group_size if spec.group_size else 1)
        for module in (reference, kernels):
            codes, its_scale, zero_point = module.quantize_tokens(x, spec)
            assert its_scale.dtype == torch.float32 and torch.equal(its_scale, scale.reshape(scale_shape))
            assert zero_point.dtype == torch.int8 and torch.equal(zero_point.float(), zero.reshape(scale_shape))
            assert codes.dtype == (torch.float8_e4m3fn if spec.dtype == "fp8_e4m3" else torch.int8)
            assert torch.equal(codes.float(), reference.quantize(rows, *grid).float().view(x.shape))
            assert torch.equal(module.fake_quantize_tokens(x, spec), reference.fake_quant(rows, *grid).view(x.shape))
            assert torch.equal(module.fake_quantize_tokens_backward(grad, x, spec), masked.view(x.shape))
    if spec.symmetric:  # integers have no code for absmax / scale = 127.5, e4m3 has one for 448
        assert (clipped > 0) == (spec.dtype == "int")


def test_a_tie_at_both_ends_clips():
    """-127.5 and 127.5 are rounded apart, to 257 codes: one element of an asymmetric token is outside after all."""
    x = torch.tensor([[-127.5, 0.3, 127.5]])
    codes, scale, zero_point = quantize_tokens(x, ASYMMETRIC)
    assert (codes.tolist(), scale.item(), zero_point.item()) == ([[-128, 0, 127]], 1.0, 0)
    assert fake_quantize_tokens(x, ASYMMETRIC).tolist() == [[-128, 0, 127]]
    assert fake_quantize_tokens_backward(torch.ones(1, 3), x, ASYMMETRIC).tolist() == [[1, 1, 0]]


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
