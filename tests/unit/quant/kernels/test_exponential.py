"""The exponential of the CPU kernels, which makes a scale of theta: correctly rounded."""

import decimal
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.quant.kernels.cases import DTYPES
from tests.unit.quant.kernels.comparing import OPS, assert_same

pytestmark = pytest.mark.usefixtures("compiled")


def exponentials(theta: Tensor) -> Tensor:
    """The kernel's fp32 ``exp(theta)``: of a code 1 with s0 = 1."""
    ones = torch.ones(theta.numel(), dtype=torch.int8)
    return OPS.dequantize(ones, torch.ones(theta.numel()), theta, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential(dtype, seed):
    """The correctly rounded fp32 number: for every 16-bit theta, and for a million fp32 ones around 0 and beyond.

    Where e^theta lies within 2^-50 of itself from a tie between two fp32 numbers, either may come out: fp64 is not
    exact. One in some 2^26 random arguments does.
    """
    if dtype == torch.float32:
        theta = torch.cat([scale * torch.randn(250_000) for scale in (0.01, 1.0, 20.0, 80.0)])
    else:
        theta = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ours, exact = exponentials(theta), theta.double().exp()
    either = torch.stack([(exact * (1 + side * 2.0**-50)).float() for side in (-1, 1)])
    wrong = ~((ours == either).any(0) | (ours.isnan() & theta.isnan()))
    assert not wrong.any(), f"{wrong.sum()}, such as exp({theta[wrong][0]}) = {ours[wrong][0]}"
    assert (ours != exact.float()).logical_and(~theta.isnan()).sum() <= 2  # expected: 1e6 / 2^26


def test_the_exponential_in_decimal(seed):
    """Against an exponential that shares nothing with fp64: 40 decimal digits."""
    with decimal.localcontext(prec=40):
        theta = torch.cat([0.1 * torch.randn(100), 10 * torch.randn(100), torch.linspace(-103.9, 88.7, 100)])
        for t, ours in zip(theta.tolist(), exponentials(theta).tolist(), strict=True):
            exact = decimal.Decimal(t).exp()
            size = np.float32(ours)
            step = decimal.Decimal(float(np.spacing(size)))
            assert abs(decimal.Decimal(ours) - exact) <= step * decimal.Decimal("0.50000001"), t


def test_the_exponential_of_special_values():
    """1 exactly at 0, the limits of fp32, what is not finite."""
    up, down = np.float32(np.inf), np.float32(-np.inf)
    largest, smallest = np.float32(88.72283), np.float32(-103.97208)  # ln of 2^128 and of 2^-150, rounded down
    pairs = [
        (0.0, 1.0),
        (-0.0, 1.0),
        (1e-45, 1.0),
        (largest, np.float32(np.exp(np.float64(largest)))),
        (np.nextafter(largest, up), math.inf),
        (np.nextafter(smallest, down), 0.0),
        (np.nextafter(smallest, up), 2.0**-149),
        (88.0, np.float32(np.exp(88.0))),
        (-88.0, np.float32(np.exp(-88.0))),
        (104.0, math.inf),
        (-104.0, 0.0),
        *((sign * size, math.inf if sign > 0 else 0.0) for sign in (1, -1) for size in (199.9, 201.0, 1e9, 3e38)),
        (math.inf, math.inf),
        (-math.inf, 0.0),
        (math.nan, math.nan),
    ]
    theta, expected = (torch.tensor([float(pair[i]) for pair in pairs]) for i in (0, 1))
    assert_same(exponentials(theta), expected)
