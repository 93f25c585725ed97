"""Files with weights: how often each sample comes, in every epoch and over all of them."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from data.loader import Loader, Order
from data.samples import DataError, Sample


def make(sizes: dict[str, int]) -> list[Sample]:
    one = np.zeros(3, dtype=np.int32)
    return [Sample(one, one, file, line) for file, size in sizes.items() for line in range(1, size + 1)]


def epochs(order: Order, count: int) -> list[list[int]]:
    ends = np.cumsum([0, *(order.rows_in_epoch(epoch) for epoch in range(count))]).tolist()
    return [[i for position in range(*span) for i in order.row(position)] for span in pairwise(ends)]


@pytest.mark.parametrize("packed_length", [None, 10])
def test_an_epoch_is_shared_out_by_weight(packed_length, rng):
    for _ in range(20):
        sizes = {f"{name}.jsonl": rng.randint(1, 60) for name in "abc"[: rng.randint(1, 3)]}
        samples, total = make(sizes), sum(sizes.values())
        weights = {file: rng.uniform(0.5, 2) * rng.choice([1, 10]) for file in sizes}
        exact = {file: total * weight / sum(weights.values()) for file, weight in weights.items()}
        if min(exact.values()) < 1:
            continue
        order = Order(samples, seed=rng.randrange(1000), weights=weights, packed_length=packed_length)
        uses: Counter[int] = Counter()
        for epoch in epochs(order, 4):
            assert len(epoch) == total
            here = Counter(epoch)
            shares = Counter(samples[i].file for i in epoch)
            for file, size in sizes.items():
                assert abs(shares[file] - exact[file]) < 1
                each = [here[i] for i, sample in enumerate(samples) if sample.file == file]
                assert set(each) <= {shares[file] // size, -(-shares[file] // size)}
            uses.update(here)
            for file in sizes:  # over the epochs, too, nobody is used more than once more than another
                each = [uses[i] for i, sample in enumerate(samples) if sample.file == file]
                assert max(each) - min(each) <= 1


def test_weights_in_the_ratio_of_the_sizes_take_every_sample_once(rng):
    sizes = {"a": rng.randint(5, 20), "b": rng.randint(5, 20)}
    order = Order(make(sizes), seed=0, weights={file: size / 7 for file, size in sizes.items()})
    assert all(sorted(epoch) == list(range(sum(sizes.values()))) for epoch in epochs(order, 3))


def test_another_epoch_and_another_seed_take_other_samples(rng):
    samples = make({"a": 200, "b": 20})
    seed = rng.randrange(1000)
    first, second = epochs(Order(samples, seed=seed, weights={"a": 1, "b": 1}), 2)
    (other,) = epochs(Order(samples, seed=seed + 1, weights={"a": 1, "b": 1}), 1)
    (again,) = epochs(Order(samples, seed=seed, weights={"a": 1, "b": 1}), 1)
    assert first == again
    for epoch in (second, other):
        # 110 of 200: equal by chance once in 10^58.
        assert {i for i in first if i < 200} != {i for i in epoch if i < 200}


def test_weights_that_do_not_fit_the_files_are_refused():
    samples = make({"a": 5, "b": 5})
    with pytest.raises(DataError, match=r"no sample of the files \['c'\] and no weight for \['b'\]"):
        Order(samples, seed=0, weights={"a": 1, "c": 1})
    with pytest.raises(DataError, match=r"weights that give \['b'\] none of an epoch's 10 samples"):
        Order(samples, seed=0, weights={"a": 1, "b": 0.01})


def test_a_step_is_described_by_its_lines():
    samples = [*make({"a.jsonl": 50}), Sample(np.zeros(1, np.int32), np.zeros(1, np.int32))]
    sizes = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "seed": 3, "pad_token_id": 0}
    for rank in range(2):
        loader = Loader(samples, rank=rank, world=2, **sizes)
        ids = [i for batch in loader.step(7) for i in batch["sample_ids"].tolist()]
        names = ", ".join(f"{i} (a.jsonl:{i + 1})" if i < 50 else "50" for i in ids)
        assert loader.describe(7) == f"rank {rank}, step 7, samples {names}"
    loader = Loader(samples, rank=0, world=1, **(sizes | {"micro_batch_size": 20}))
    assert loader.describe(0).endswith(" and 8 more") and loader.describe(0).count(", ") == 33
