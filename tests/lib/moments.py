"""Error of the updates of Adam with 8-bit moments, compared with Adam in fp64.

Gradients are noise with a mean (``steady``), also falling by 2% per step (``falling``), zero from step 100 on for every
other element (``half stops``), or not zero in 5% of the steps (``rare``). The logarithms of their sizes within a block
have a standard deviation of 2. Fields of `Followed`, over all elements and steps:

error: root of the mean squared difference from the exact updates, divided by theirs.
gain: slope of the sum of an element's updates by the exact sum; 1 without a bias.
largest: largest update, divided by the largest exact update.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from engine.session.adamw8bit import MOMENT_BLOCK, decode

KINDS = ("steady", "falling", "half stops", "rare")
BLOCKS, STEPS, STOP, LR = 32, 200, 100, 1e-3


@dataclass(frozen=True)
class Followed:
    """Figures of one optimizer: see the docstring of this file; ``second``: mean of v / exact v, both above 1e-6 of the
    largest of a block."""

    error: float
    gain: float
    largest: float
    second: float


def gradients(kind: str, step: int, sizes: Tensor, rng: torch.Generator) -> Tensor:
    """Draw the gradients of a step."""
    noise = torch.randn(len(sizes), generator=rng)
    if kind == "falling":
        return sizes * (noise + 0.2) * 0.98**step
    if kind == "half stops":
        return sizes * (noise + 0.2) * ((torch.arange(len(sizes)) % 2 == 0) | (step < STOP))
    if kind == "rare":
        return sizes * noise * (torch.rand(len(sizes), generator=rng) < 0.05)
    return sizes * (noise + 0.2)


def follow(kind: str, beta2: float, seed: int, make: Callable[..., Optimizer], device: str = "cpu") -> Followed:
    """Compare the updates of an optimizer with those of Adam in fp64 on the same gradients."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(BLOCKS * MOMENT_BLOCK, generator=rng)) * 1e-5
    own, exact = (torch.zeros_like(sizes, dtype=dtype, device=device) for dtype in (torch.float32, torch.float64))
    options = {"lr": LR, "betas": (0.9, beta2), "weight_decay": 0.0, "eps": 1e-15}
    ours, theirs = make([{"params": [own], "moments": "8bit"}], **options), AdamW([exact], **options)
    error = square = largest = largest_exact = 0.0
    sums = torch.zeros(2, len(sizes), dtype=torch.float64, device=device)
    for step in range(STEPS):
        own.grad = gradients(kind, step, sizes, rng).to(device)
        exact.grad = own.grad.double()
        own.zero_()
        exact.zero_()
        ours.step()
        theirs.step()
        error += float((own - exact).square().sum())
        square += float(exact.square().sum())
        largest, largest_exact = max(largest, float(own.abs().max())), max(largest_exact, float(exact.abs().max()))
        sums += torch.stack([own.double(), exact])
    gain = float(sums[0] @ sums[1] / sums[1].square().sum())
    state, expected = ours.state[own], theirs.state[exact]["exp_avg_sq"].view(BLOCKS, MOMENT_BLOCK)
    second = decode(state["exp_avg_sq_codes"], state["exp_avg_sq_scales"], False)
    inside = expected > 1e-6 * expected.amax(1, keepdim=True)
    mean = float((second.view(BLOCKS, MOMENT_BLOCK) / expected)[inside].mean())
    return Followed(math.sqrt(error / square), gain, largest / largest_exact, mean)
