"""Samples to the micro-batches of a step, as a pure function of the step's number.

There is no state to save: a resumed run asks for step k and gets what the interrupted one would have got. Behind it
lies one endless stream of rows (`data.order`: epoch after epoch, each in an order of its own), of which a step takes
the next

    rows_per_step = micro_batch_size * gradient_accumulation_steps * world

so an epoch's tail that does not fill a step is completed from the next epoch, and within an epoch nothing is left out
or doubled. Which rows a step takes does not depend on how they are split over ranks and micro-batches. Nothing is
sorted by length: that would couple the order of the data to its content.

A row is a sample, padded on the right to the longest of its micro-batch; or, packed, a bin of whole samples
(`data.packing`). In a packed row ``position_ids`` start again at 0 with every sample. That is what transformers reads
the borders from, when it gets no attention mask and no cache (``find_packed_sequence_indices`` of its masking_utils):
attention is then causal within each sample, and blind beyond it. Padding at the end of a packed row is a sample of its
own to it, so nobody attends to padding, and padding attends to nobody. Flash attention reads the same borders only in
batches of one row. The experts of a MoE compute padding in both kinds of batch; its router's auxiliary loss leaves
padding out where there is an attention mask, so it counts the few padding positions of packed rows.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch

from data.order import Order
from data.samples import IGNORE, DataError, Sample, digest_of_samples

MicroBatch = dict[str, torch.Tensor]
"""What one forward and backward takes, int64 tensors:

- ``input_ids``, ``labels`` [B, T]: labels are shifted (see `data.samples`), -100 where nothing is predicted;
- ``attention_mask`` [B, T], 1 on the sample and 0 on padding; in packed batches instead of it
- ``position_ids`` [B, T], from 0 in every sample and in the padding behind the last;
- ``sample_ids`` [n]: index of each sample in the list that the loader was given, by row, and by place in the row;
- ``spans`` [n, 3]: row, first position and one past the last position of each of these samples;
- ``positions`` [N], from `data.device` on: where there are labels.
"""

NOT_FOR_THE_MODEL = ("labels", "sample_ids", "spans", "positions")
SHOWN = 32  # samples that an error names; the rest are counted


class Loader:
    """The micro-batches of one rank.

    Args:
        samples: the same on every rank, in the same order.
        micro_batch_size: rows per rank and micro-batch.
        gradient_accumulation_steps: micro-batches per rank and step.
        rank, world: this rank's index in the data-parallel group, and the group's size.
        seed: of the order; another one gives another order.
        pad_token_id: fills ``input_ids`` behind samples (masked, never predicted).
        packed_length: positions of a packed row; None pads each sample to the longest of its micro-batch.
        weights: each file's share of an epoch, by `Sample.file` (see `data.order`); None takes every sample once.

    Raises:
        DataError: a size is not positive, a sample does not fit a packed row, weights do not fit the files, or an epoch
            has fewer rows than one step takes.
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
        packed_length: int | None = None,
        weights: Mapping[str, float] | None = None,
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
        self.rows_per_step = micro_batch_size * gradient_accumulation_steps * world
        rows = "samples" if packed_length is None else f"packed rows of {packed_length:,} tokens"
        found = len(samples)
        if samples:
            self._order = Order(samples, seed=seed, weights=weights, packed_length=packed_length)
            found = self._order.rows_in_epoch(0)
        if found < self.rows_per_step:
            raise DataError(
                f"found {found:,} {rows}, expected at least the {self.rows_per_step:,} that one step takes "
                f"({sizes}): give more data or smaller steps"
            )
        self.samples = samples
        self._micro_batch_size = micro_batch_size
        self._accumulation = gradient_accumulation_steps
        self._rank = rank
        self._world = world
        self._pad = pad_token_id
        self._packed_length = packed_length

    def step(self, k: int) -> list[MicroBatch]:
        """This rank's micro-batches of step ``k`` (from 0), as many as gradient_accumulation_steps."""
        if self._packed_length is None:
            return [pad(self.samples, rows, self._pad) for rows in self._rows(k)]
        return [pack_rows(self.samples, rows, self._pad, self._packed_length) for rows in self._rows(k)]

    def first(self, count: int) -> Iterator[MicroBatch]:
        """This rank's first ``count`` micro-batches of the run, for calibration; as many on every rank."""
        steps = (self.step(k) for k in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(steps), count)

    def epoch_of(self, step: int) -> float:
        """How many epochs have been seen before ``step``; its whole part is the epoch of the step's first row."""
        return self._order.epoch_at(step * self.rows_per_step)

    @cached_property
    def digest(self) -> str:
        """Of all samples, in their order: what a checkpoint keeps, so that a resumed run goes on with the same."""
        return digest_of_samples(self.samples)

    def describe(self, step: int) -> str:
        """The samples of this rank in a step, for error messages: number, and file and line where known."""
        ids = [i for rows in self._rows(step) for row in rows for i in row]
        names = [f"{i} ({where})" if (where := self.samples[i].where()) else str(i) for i in ids[:SHOWN]]
        more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
        return f"rank {self._rank}, step {step}, samples {', '.join(names)}{more}"

    def _rows(self, step: int) -> list[list[list[int]]]:
        """Sample ids by micro-batch and row."""
        size = self._micro_batch_size
        first = step * self.rows_per_step + self._rank * size
        starts = (first + index * size * self._world for index in range(self._accumulation))
        return [[self._order.row(start + offset) for offset in range(size)] for start in starts]


def pad(samples: Sequence[Sample], rows: Sequence[Sequence[int]], pad_token_id: int) -> MicroBatch:
    """One sample per row, in rows as long as the longest."""
    batch = _fill(samples, rows, pad_token_id, max(len(samples[i].input_ids) for (i,) in rows))
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    for row, start, end in batch["spans"].tolist():
        batch["attention_mask"][row, start:end] = 1
    return batch


def pack_rows(samples: Sequence[Sample], rows: Sequence[Sequence[int]], pad_token_id: int, length: int) -> MicroBatch:
    """Several samples per row, one behind the other, in rows of ``length`` positions."""
    batch = _fill(samples, rows, pad_token_id, length)
    positions = torch.arange(length).repeat(len(rows), 1)
    for row, _, end in batch["spans"].tolist():  # in order: each restarts the count behind it, padding included
        positions[row, end:] = torch.arange(length - end)
    batch["position_ids"] = positions
    return batch


def _fill(samples: Sequence[Sample], rows: Sequence[Sequence[int]], pad_token_id: int, length: int) -> MicroBatch:
    """The keys that padded and packed batches share."""
    input_ids = torch.full((len(rows), length), pad_token_id, dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORE, dtype=torch.int64)
    spans = []
    for row, ids in enumerate(rows):
        end = 0
        for sample in (samples[i] for i in ids):
            start, end = end, end + len(sample.input_ids)
            input_ids[row, start:end] = torch.from_numpy(sample.input_ids)
            labels[row, start:end] = torch.from_numpy(sample.labels)
            spans.append((row, start, end))
    return {
        "input_ids": input_ids,
        "labels": labels,
        "sample_ids": torch.tensor([i for ids in rows for i in ids], dtype=torch.int64),
        "spans": torch.tensor(spans, dtype=torch.int64).reshape(-1, 3),
    }


def model_inputs(batch: MicroBatch) -> MicroBatch:
    """What goes to the model's forward. Packed batches need ``use_cache=False`` beside it: with a cache transformers
    does not look for the borders of samples."""
    return {name: tensor for name, tensor in batch.items() if name not in NOT_FOR_THE_MODEL}


def sample_inputs(batch: MicroBatch) -> Iterator[torch.Tensor]:
    """The ``input_ids`` [1, T] of each sample by itself, without padding."""
    for row, start, end in batch["spans"].tolist():
        yield batch["input_ids"][row : row + 1, start:end]


def real_tokens(batch: MicroBatch) -> int:
    """How many positions hold a token of a sample; the others are padding."""
    return int((batch["spans"][:, 2] - batch["spans"][:, 1]).sum())


def valid_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """How many positions of the micro-batches have a label: this rank's share of the mean's denominator."""
    return sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)
