"""Split off held-out samples, and batch them for evaluation.

The split is drawn from the seed alone, so it is the same on every rank, in every resumed run and at any world size.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from data.loader import MicroBatch, pad
from data.samples import IGNORE, DataError, Sample, digest_of_samples

SPLIT = 3  # random stream separate from every epoch's, see data.loader


def split_held_out(samples: Sequence[Sample], held_out: int | float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Split samples into training and held-out samples, each in their original order.

    Args:
        samples: all of them.
        held_out: number of samples to hold out, or, between 0 and 1, their fraction (at least one sample).
        seed: of the random choice.

    Raises:
        DataError: no sample would be left to train on.
    """
    count = max(1, round(held_out * len(samples))) if isinstance(held_out, float) else held_out
    if count >= len(samples):
        raise DataError(
            f"data.held_out: {held_out} is {count:,} of {len(samples):,} samples, expected some to be left to train on"
        )
    chosen = np.zeros(len(samples), dtype=bool)
    chosen[np.random.default_rng((seed, 0, SPLIT)).permutation(len(samples))[:count]] = True
    training = [sample for sample, out in zip(samples, chosen, strict=True) if not out]
    return training, [sample for sample, out in zip(samples, chosen, strict=True) if out]


def seen_in_training(training: Iterable[Sample], held_out: Sequence[Sample]) -> dict[int, Sample]:
    """Find held-out samples with equal tokens and labels in training: index in ``held_out`` -> training sample."""
    places: dict[str, list[int]] = {}
    for index, sample in enumerate(held_out):
        places.setdefault(digest_of_samples([sample]), []).append(index)
    found: dict[int, Sample] = {}
    for sample in training if places else ():
        for index in places.get(digest_of_samples([sample]), ()):
            found.setdefault(index, sample)
    return found


class HeldOut:
    """This rank's evaluation batches: each sample is in one batch of one rank; all ranks have as many batches.

    Samples are ordered by length, so that rows of a batch need little padding and the ranks have equal work
    (``sample_ids`` are indices in ``samples``). A rank that has run out gets a batch of one row without labels, whose
    ``sample_ids`` are empty: a forward under ZeRO-3 is a collective.

    Args:
        samples: the same on every rank, in the same order.
        micro_batch_size: rows of a batch; the last one may have fewer.
        rank, world: this rank's index in the data-parallel group, and the group's size.
        pad_token_id: pads ``input_ids`` on the right.

    Raises:
        DataError: there are no samples.
    """

    def __init__(
        self, samples: Sequence[Sample], *, micro_batch_size: int, rank: int, world: int, pad_token_id: int
    ) -> None:
        if not samples:
            raise DataError("found no samples to evaluate on, expected at least one")
        self.samples = samples
        self._by_length = np.argsort([len(sample.input_ids) for sample in samples], kind="stable").tolist()
        self._size = micro_batch_size
        self._rank = rank
        self._world = world
        self._pad = pad_token_id

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.samples) / self._size) / self._world)

    def __iter__(self) -> Iterator[MicroBatch]:
        for index in range(len(self)):
            start = (index * self._world + self._rank) * self._size
            ids = self._by_length[start : start + self._size]
            yield pad(self.samples, [[i] for i in ids], self._pad) if ids else self._nothing()

    def _nothing(self) -> MicroBatch:
        """Return a batch of the shortest sample without labels."""
        batch = pad(self.samples, [self._by_length[:1]], self._pad)
        batch["labels"].fill_(IGNORE)
        return batch | {"sample_ids": batch["sample_ids"][:0], "spans": batch["spans"][:0]}
