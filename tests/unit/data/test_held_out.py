"""What is held out is never trained on, and evaluated once."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from data.loader import HeldOut, model_inputs, split_held_out, valid_tokens
from data.samples import IGNORE, DataError, Sample


def make(rng: random.Random, n: int) -> list[Sample]:
    """Samples of random lengths whose tokens are their numbers."""
    return [Sample(*(np.full(rng.randint(1, 12), i, np.int32),) * 2) for i in range(n)]


def numbers_of(samples: list[Sample]) -> list[int]:
    return [int(sample.input_ids[0]) for sample in samples]


def test_the_split(rng):
    for _ in range(10):
        samples = make(rng, rng.randint(2, 80))
        held_out = rng.choice([rng.randint(1, len(samples) - 1), rng.uniform(0.01, 0.49)])
        seed = rng.randrange(1000)
        training, out = split_held_out(samples, held_out, seed)
        assert len(out) == (max(1, round(held_out * len(samples))) if isinstance(held_out, float) else held_out)
        numbers = [numbers_of(part) for part in (training, out)]
        assert sorted([*numbers[0], *numbers[1]]) == list(range(len(samples)))
        assert all(part == sorted(part) for part in numbers)
        assert [numbers_of(part) for part in split_held_out(samples, held_out, seed)] == numbers
    samples = make(rng, 300)
    chosen = [set(numbers_of(split_held_out(samples, 0.5, seed)[1])) for seed in range(3)]
    assert chosen[0] != chosen[1] != chosen[2]  # by chance once in 10^88


def test_something_must_be_left_to_train_on(rng):
    for held_out in (5, 6, 0.95):
        with pytest.raises(
            DataError, match=rf"data\.held_out: {held_out} is \d of 5 samples, expected some to be left"
        ):
            split_held_out(make(rng, 5), held_out, 0)
    with pytest.raises(DataError, match="no samples to evaluate on"):
        HeldOut([], micro_batch_size=1, rank=0, world=1, pad_token_id=0)


def test_every_held_out_sample_counts_once_over_all_ranks(rng):
    for _ in range(30):
        samples = make(rng, rng.randint(1, 40))
        size, world = rng.randint(1, 5), rng.randint(1, 5)
        ranks = [HeldOut(samples, micro_batch_size=size, rank=r, world=world, pad_token_id=99) for r in range(world)]
        batches = [list(rank) for rank in ranks]
        assert len({len(b) for b in batches}) == len({len(rank) for rank in ranks}) == 1
        assert all(len(b) == len(rank) for b, rank in zip(batches, ranks, strict=True))
        assert len(batches[0]) == math.ceil(len(samples) / (size * world))
        every = [batch for b in batches for batch in b]
        seen = Counter(i for batch in every for i in batch["sample_ids"].tolist())
        assert seen == dict.fromkeys(range(len(samples)), 1)
        assert valid_tokens(every) == sum(len(sample.labels) for sample in samples)
        for batch in every:
            assert set(model_inputs(batch)) == {"input_ids", "attention_mask"}
            assert len(batch["input_ids"]) <= size and batch["attention_mask"].any(1).all()
            for i, (row, start, end) in zip(batch["sample_ids"].tolist(), batch["spans"].tolist(), strict=True):
                assert batch["labels"][row, start:end].tolist() == samples[i].labels.tolist()
            if not len(batch["sample_ids"]):
                assert len(batch["input_ids"]) == 1 and (batch["labels"] == IGNORE).all()
