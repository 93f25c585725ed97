"""Fixtures of the unit tests."""

import random

import pytest
import torch


@pytest.fixture
def seed():
    """A fresh seed for every run, shown when a test fails; torch and random are seeded with it."""
    value = random.SystemRandom().randrange(2**31)
    torch.manual_seed(value)
    random.seed(value)
    print(f"seed {value}")
    return value
