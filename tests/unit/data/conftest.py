"""Random numbers for the tests of data."""

import random

import pytest


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator with the test's own seed."""
    return random.Random(seed)
