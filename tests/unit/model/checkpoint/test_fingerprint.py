"""A number for each frozen weight: every difference changes it, and the size of the chunks does not."""

import random

import pytest
import torch
from torch import nn

from model.checkpoint import fingerprint as frozen
from model.checkpoint.fingerprint import fingerprints, frozen_weights


def model_of(**tensors: torch.Tensor) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
    return model


def number(tensor: torch.Tensor) -> int:
    return fingerprints(model_of(weight=tensor), ["weight"])["weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_and_every_place_counts(dtype, monkeypatch, seed):
    """One that changes, two that change places, a sign of 0, and what comes in other pieces."""
    tensor = torch.randn(37, 11).to(dtype)
    tensor[3, 4] = 0.0
    bits = tensor.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    changed = []
    for bit in range(8 * dtype.itemsize - 1):
        other = bits.clone()
        other.view(-1)[random.randrange(other.numel())] ^= 1 << bit
        changed.append(other.view(dtype))
    minus, swapped = tensor.clone(), tensor.clone()
    minus[3, 4] = -0.0
    swapped[0, 0], swapped[36, 10] = 1.0, 2.0
    back = swapped.clone()
    back[0, 0], back[36, 10] = 2.0, 1.0
    first, numbers = number(tensor), [number(one) for one in (*changed, minus, swapped, back)]
    assert len({*numbers, first}) == len(numbers) + 1
    assert first == number(tensor)
    monkeypatch.setattr(frozen, "_CHUNK", 13)
    assert first == number(tensor)


def test_what_is_frozen_and_of_the_files():
    model = model_of(weight=torch.ones(3), weight_s0=torch.ones(1), other=torch.ones(2))
    model.other.requires_grad_(True)
    assert frozen_weights(model) == ["weight"]
    assert fingerprints(model, []) == {}
