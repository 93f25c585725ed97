"""Seeds of the tests: the same ones in each run, or those of another number in the variable DEEPQAT_TEST_SEED.

`make test-full` sets it to "fresh": the number is drawn, and shown where a test fails.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "DEEPQAT_TEST_SEED"

if os.environ.get(VARIABLE) == "fresh":  # all processes of the run inherit the one number
    os.environ[VARIABLE] = str(random.SystemRandom().randrange(1, 2**31))


def seed_of(name: str) -> int:
    """A seed below 2^31 that only ``name`` and the variable decide."""
    text = f"{os.environ.get(VARIABLE) or 0} {name}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def seed_all(seed: int) -> None:
    """Seed random, numpy and torch."""
    import numpy as np
    import torch

    for seeder in (random.seed, np.random.seed, torch.manual_seed):
        seeder(seed)


@contextmanager
def drawing(name: str) -> Iterator[None]:
    """Random numbers of ``name`` within; after it those that come without it."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_all(seed_of(name))
    try:
        yield
    finally:
        for restore, state in zip((random.setstate, np.random.set_state, torch.set_rng_state), states, strict=True):
            restore(state)
