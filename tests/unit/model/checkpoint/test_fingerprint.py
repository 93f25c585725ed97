"""A number for each frozen weight: which differences it sees, and that it does not depend on who holds what."""

import random

import pytest
import torch
from torch import nn

from model.checkpoint import fingerprint as frozen
from model.checkpoint.fingerprint import fingerprints, frozen_weights


def model_of(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        setattr(model, name, nn.Parameter(tensor, requires_grad=False))
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_and_every_place_counts(dtype, monkeypatch):
    """One that changes, two that change places, a sign of 0, and what comes in other pieces."""
    tensor = torch.randn(37, 11).to(dtype)
    tensor[3, 4] = 0.0
    first = fingerprints(model_of(weight=tensor.clone()), ["weight"])
    assert first == fingerprints(model_of(weight=tensor.clone()), ["weight"])
    bits = tensor.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    changed = []
    for bit in range(8 * dtype.itemsize - 1):
        other = bits.clone()
        other.view(-1)[random.randrange(other.numel())] ^= 1 << bit
        changed.append(other.view(dtype))
    minus = tensor.clone()
    minus[3, 4] = -0.0
    swapped = tensor.clone()
    swapped[0, 0], swapped[36, 10] = 1.0, 2.0
    back = swapped.clone()
    back[0, 0], back[36, 10] = 2.0, 1.0
    numbers = [fingerprints(model_of(weight=one), ["weight"])["weight"] for one in (*changed, minus, swapped, back)]
    assert len({*numbers, first["weight"]}) == len(numbers) + 1
    monkeypatch.setattr(frozen, "_CHUNK", 13)
    assert first == fingerprints(model_of(weight=tensor.clone()), ["weight"])


def test_what_is_frozen_and_of_the_files():
    model = model_of(weight=torch.ones(3), weight_s0=torch.ones(1), other=torch.ones(2))
    model.other.requires_grad_(True)
    assert frozen_weights(model) == ["weight"]
    assert fingerprints(model, []) == {}
