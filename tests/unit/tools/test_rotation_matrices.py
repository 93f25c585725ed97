"""The matrices are orthogonal, their entries are all as large, and turning by factors is the product with the whole."""

import math

import pytest
import torch

from tools.rotate_checkpoint import paley, rotation

# Hidden sizes and heads of published models, and orders of each construction; 52 has none here.
ORDERS = {1: 1, 2: 2, 12: 12, 20: 20, 28: 28, 36: 36, 60: 60, 64: 64, 96: 96, 128: 128, 384: 384, 896: 896}
ORDERS |= {1536: 1536, 2560: 2560, 2880: 2880, 52: 4, 13: 1, 50: 2, 208: 208}


@pytest.mark.parametrize(("size", "order"), ORDERS.items())
def test_rotation_is_hadamard(size: int, order: int) -> None:
    found = rotation(size, seed=size)
    assert (found.size, found.order) == (size, order)
    whole = found.turn(torch.eye(size, dtype=torch.float64), 1)
    assert torch.allclose(whole @ whole.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    for start in range(0, size, order):
        block = whole[start : start + order, start : start + order]
        assert torch.allclose(block.abs(), torch.full_like(block, 1 / math.sqrt(order)), atol=1e-12)


def test_turns_runs_along_an_axis() -> None:
    found, other = rotation(24, seed=3), rotation(24, seed=4)
    whole = found.turn(torch.eye(24, dtype=torch.float64), 1)
    values = torch.randn(72, 5, dtype=torch.float64)
    expected = torch.cat([whole.T @ part for part in values.split(24)])
    assert torch.allclose(found.turn(values, 0), expected, atol=1e-12)
    assert torch.allclose(found.turn(values.T, 1), expected.T, atol=1e-12)
    assert not torch.equal(found.signs, other.signs)


def test_orders_of_paley() -> None:
    """Those without a construction are none, not a matrix that is not orthogonal."""
    for order in range(1, 150):
        if (matrix := paley(order)) is not None:
            assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64)), order
    assert [order for order in (4, 8, 12, 20, 24, 28, 36, 92, 52) if paley(order) is None] == [92, 52]
