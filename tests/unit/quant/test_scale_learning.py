"""Learning a scale ends near the best one, from half and from twice of it."""

import pytest
import torch

from quant.reference import (
    fake_quant,
    fake_quant_backward,
)
from tests.unit.quant.oracle import NVFP4


@pytest.mark.parametrize(
    ("groups", "most"),
    [
        (1, 1.06),  # 1.18 with the gradient of integers
        # In groups of 32 luck decides where the best scale is. This is what absmax scales have; if elements between 6
        # and 7 had the gradient of normal numbers, the largest of every group would settle at 7, with 1.6.
        (1024, 1.35),
    ],
)
def test_learning_a_scale_of_e2m1(groups, most, seed):
    """Minimising the squared error from half and from twice the best scale ends near the error of the best.

    Not rounded to a format: the gradient is that of unrounded scales.
    """
    x = torch.randn(groups, 32 * 1024 // groups)
    absmax = x.abs().amax(1, keepdim=True)

    def errors(scale: torch.Tensor) -> torch.Tensor:
        return (fake_quant(x, scale, NVFP4) - x).square().sum(1, keepdim=True)

    candidates = torch.linspace(0.3, 1.05, 100).view(-1, 1, 1) * absmax / 6
    best = candidates.gather(0, torch.stack([errors(c) for c in candidates]).argmin(0, keepdim=True))[0]
    for beginning in (0.5, 2.0):
        scale = beginning * best
        for step in range(120):
            grad = fake_quant(x, scale, NVFP4) - x
            _, gradient = fake_quant_backward(grad, x, scale, NVFP4, scale_gradient=True)
            scale = scale * torch.exp(-0.05 * (1 - step / 120) * gradient.sign())
        assert errors(scale).sum() < most * errors(best).sum()
