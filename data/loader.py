"""Samples to the micro-batches of a step, as a pure function of the step's number.

There is no state to save: a resumed run asks for step k and gets what the interrupted one would have got. Behind it
lies one endless stream of samples: epoch 0 in the order of its permutation, then epoch 1 in the order of another,
and so on. With n samples, stream position p is entry ``p mod n`` of epoch ``p // n``'s permutation. A step takes the
next

    samples_per_step = micro_batch_size * gradient_accumulation_steps * world

positions, so an epoch's tail that does not fill a step is completed from the next epoch, and within an epoch no
sample is left out or doubled. Which samples a step takes does not depend on how they are split over ranks and
micro-batches. Nothing is sorted by length: that would couple the order of the data to its content.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from data.samples import IGNORE, DataError, Sample

MicroBatch = dict[str, torch.Tensor]
"""``input_ids``, ``attention_mask`` (1 on the sample, 0 on padding) and ``labels`` (shifted), each int64 [B, T]."""


class Loader:
    """The micro-batches of one rank.

    Args:
        samples: the same on every rank, in the same order.
        micro_batch_size: samples per rank and micro-batch.
        gradient_accumulation_steps: micro-batches per rank and step.
        rank, world: this rank's index in the data-parallel group, and the group's size.
        seed: of the permutations; another one gives another order.
        pad_token_id: fills ``input_ids`` on the right of shorter samples (masked, never predicted).

    Raises:
        DataError: a size is not positive, or there are fewer samples than one step takes.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        rank: int,
        world: int,
        seed: int,
        pad_token_id: int,
    ) -> None:
        sizes = {
            "micro_batch_size": micro_batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "world": world,
        }
        if min(sizes.values()) < 1 or not 0 <= rank < world or seed < 0:
            raise DataError(
                f"found {sizes}, rank {rank}, seed {seed}; expected sizes of at least 1, rank < world, seed >= 0"
            )
        self.samples_per_step = micro_batch_size * gradient_accumulation_steps * world
        if len(samples) < self.samples_per_step:
            raise DataError(
                f"found {len(samples):,} samples, expected at least the {self.samples_per_step:,} that one step takes "
                f"({sizes}): give more data or smaller steps"
            )
        self._samples = samples
        self._micro_batch_size = micro_batch_size
        self._accumulation = gradient_accumulation_steps
        self._rank = rank
        self._world = world
        self._seed = seed
        self._pad = pad_token_id

    def step(self, k: int) -> list[MicroBatch]:
        """This rank's micro-batches of step ``k`` (from 0), as many as gradient_accumulation_steps."""
        size = self._micro_batch_size
        first = k * self.samples_per_step + self._rank * size
        starts = (first + index * size * self._world for index in range(self._accumulation))
        return [self._collate([self._sample(start + offset) for offset in range(size)]) for start in starts]

    def first(self, count: int) -> Iterator[MicroBatch]:
        """This rank's first ``count`` micro-batches of the run, for calibration; as many on every rank."""
        steps = (self.step(k) for k in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(steps), count)

    def epoch_of(self, step: int) -> float:
        """How many epochs have been seen before ``step``; its whole part is the epoch of the step's first sample."""
        return step * self.samples_per_step / len(self._samples)

    def describe(self, step: int) -> str:
        """The samples of this rank in a step, for error messages: their numbers."""
        size = self._micro_batch_size
        first = step * self.samples_per_step + self._rank * size
        starts = (first + index * size * self._world for index in range(self._accumulation))
        ids = [self._index(start + offset) for start in starts for offset in range(size)]
        return f"rank {self._rank}, step {step}, samples {', '.join(map(str, ids))}"

    def _sample(self, position: int) -> Sample:
        return self._samples[self._index(position)]

    def _index(self, position: int) -> int:
        epoch, index = divmod(position, len(self._samples))
        return int(_permutation(self._seed, epoch, len(self._samples))[index])

    def _collate(self, samples: list[Sample]) -> MicroBatch:
        shape = (len(samples), max(len(sample.input_ids) for sample in samples))
        input_ids = torch.full(shape, self._pad, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORE, dtype=torch.int64)
        for row, sample in enumerate(samples):
            length = len(sample.input_ids)
            input_ids[row, :length] = torch.from_numpy(sample.input_ids)
            attention_mask[row, :length] = 1
            labels[row, :length] = torch.from_numpy(sample.labels)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def valid_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """How many positions of the micro-batches have a label: this rank's share of the mean's denominator."""
    return sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)


@lru_cache(maxsize=2)  # a step touches two epochs at most; drawing a permutation per sample would cost n of work each
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """Order of the samples in one epoch, int64 [n], the same for the same arguments."""
    order = np.random.default_rng((seed, epoch)).permutation(n)
    order.flags.writeable = False
    return order
