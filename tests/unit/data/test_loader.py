"""The loader: every sample once per epoch, the same stream however it is split, resumable at any step."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from data.loader import Loader, valid_tokens
from data.samples import IGNORE, DataError, Sample

PAD = 9


def make(rng: random.Random, n: int) -> list[Sample]:
    """Samples of random lengths whose first input is their number; the labels have random holes."""
    samples = []
    for number in range(n):
        rest = [rng.randrange(1000) for _ in range(rng.randint(0, 9))]
        labels = [rng.choice([IGNORE, rng.randrange(1000)]) for _ in range(len(rest) + 1)]
        samples.append(Sample(np.array([number, *rest], dtype=np.int32), np.array(labels, dtype=np.int32)))
    return samples


def numbers(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(number) for batch in batches for number in batch["input_ids"][:, 0]]


def shape(rng: random.Random) -> dict[str, int]:
    return {
        "micro_batch_size": rng.randint(1, 4),
        "gradient_accumulation_steps": rng.randint(1, 4),
        "world": rng.randint(1, 5),
        "seed": rng.randrange(2**32),
    }


def ranks(samples: list[Sample], args: dict[str, int], **more: Any) -> list[Loader]:
    return [Loader(samples, rank=rank, pad_token_id=PAD, **args, **more) for rank in range(args["world"])]


def per_step(args: dict[str, int]) -> int:
    return args["micro_batch_size"] * args["gradient_accumulation_steps"] * args["world"]


def test_every_sample_once_per_epoch(rng):
    for _ in range(30):
        args = shape(rng)
        n = per_step(args) + rng.randint(0, 60)
        loaders = ranks(make(rng, n), args)
        steps = 4 * n // per_step(args) + 1
        # Within a step the order over ranks is free, so epochs are counted by the whole steps and the shared ones.
        seen: Counter[int] = Counter()
        for k in range(steps):
            batches = [loader.step(k) for loader in loaders]
            assert all(len(b) == args["gradient_accumulation_steps"] for b in batches)
            assert all(len(batch["labels"]) == args["micro_batch_size"] for b in batches for batch in b)
            taken = [number for b in batches for number in numbers(b)]
            assert len(taken) == per_step(args)
            seen.update(taken)
            done = (k + 1) * per_step(args) // n
            # After whole epochs plus a part of the next: everyone was seen `done` times, those of the part once more.
            assert min(seen.values()) == done if len(seen) == n else done == 0
            assert max(seen.values()) <= done + 1
            assert sum(seen.values()) == (k + 1) * per_step(args)


def test_an_epoch_is_a_permutation_and_the_next_another(rng):
    n = rng.randint(20, 60)
    args = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "world": 1, "seed": rng.randrange(2**32)}
    (loader,) = ranks(make(rng, n), args)
    epochs = [[numbers(loader.step(epoch * n + i))[0] for i in range(n)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    # Equal only by chance, at most 3 in 20!; likewise another seed.
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(n))
    (other,) = ranks(make(rng, n), args | {"seed": args["seed"] + 1})
    assert [numbers(other.step(i))[0] for i in range(n)] != epochs[0]


def test_a_step_takes_the_same_samples_however_it_is_split(rng):
    for _ in range(20):
        factors = [rng.choice([1, 2, 3]) for _ in range(3)]
        samples = make(rng, np.prod(factors) + rng.randint(0, 40))
        seed = rng.randrange(2**32)
        streams = []
        for micro, accumulation, world in [factors, factors[::-1], [1, 1, np.prod(factors)], [np.prod(factors), 1, 1]]:
            args = {"micro_batch_size": int(micro), "gradient_accumulation_steps": accumulation, "world": int(world)}
            loaders = ranks(samples, args | {"seed": seed})
            steps = [[loader.step(k) for loader in loaders] for k in range(6)]
            # In the order of the stream: micro-batch by micro-batch, in each of them rank by rank.
            streams.append([numbers([b for group in zip(*step, strict=True) for b in group]) for step in steps])
        assert all(stream == streams[0] for stream in streams)


def test_resume_from_any_step(rng):
    for _ in range(10):
        args = shape(rng)
        samples = make(rng, per_step(args) + rng.randint(0, 40))
        straight = [[loader.step(k) for k in range(8)] for loader in ranks(samples, args)]
        start = rng.randint(1, 7)
        resumed = [[loader.step(k) for k in range(start, 8)] for loader in ranks(samples, args)]
        for before, after in zip(straight, resumed, strict=True):
            for step, again in zip(before[start:], after, strict=True):
                for batch, same in zip(step, again, strict=True):
                    assert batch.keys() == same.keys() and all(torch.equal(batch[key], same[key]) for key in batch)


def test_padding_and_valid_tokens(rng):
    args = shape(rng) | {"micro_batch_size": 4}
    samples = make(rng, per_step(args) + 5)
    for loader in ranks(samples, args):
        batches = loader.step(rng.randrange(10))
        expected = 0
        for batch in batches:
            rows = [samples[int(number)] for number in batch["input_ids"][:, 0]]
            longest = max(len(row.input_ids) for row in rows)
            per_row = {name: batch[name] for name in ("input_ids", "labels", "attention_mask")}
            assert all(value.shape == (4, longest) for value in per_row.values())
            assert all(value.dtype == torch.int64 for value in batch.values())
            for index, row in enumerate(rows):
                length = len(row.input_ids)
                assert batch["input_ids"][index].tolist() == row.input_ids.tolist() + [PAD] * (longest - length)
                assert batch["labels"][index].tolist() == row.labels.tolist() + [IGNORE] * (longest - length)
                assert batch["attention_mask"][index].tolist() == [1] * length + [0] * (longest - length)
                expected += int((row.labels != IGNORE).sum())
        assert valid_tokens(batches) == expected


def test_epoch_of(rng):
    args = shape(rng)
    n = per_step(args) + 3
    loader = ranks(make(rng, n), args)[0]
    assert loader.epoch_of(0) == 0
    assert loader.epoch_of(n) == per_step(args)  # n steps take n samples per_step times over
    assert loader.epoch_of(1) == pytest.approx(per_step(args) / n)


def test_errors(rng):
    args = {"micro_batch_size": 2, "gradient_accumulation_steps": 3, "world": 2, "seed": 0}
    samples = make(rng, 11)
    with pytest.raises(DataError, match="found 11 samples, expected at least the 12 that one step takes"):
        Loader(samples, rank=0, pad_token_id=PAD, **args)
    for wrong in (
        {"micro_batch_size": 0},
        {"gradient_accumulation_steps": -1},
        {"world": 0},
        {"seed": -1},
        {"rank": 2},
    ):
        with pytest.raises(DataError, match="expected sizes of at least 1"):
            Loader(samples, pad_token_id=PAD, **({"rank": 0} | args | wrong))
