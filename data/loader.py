"""Batch samples into the micro-batches of a step, as a pure function of the step's number.

There is no state to save: a resumed run gets the same step k as an uninterrupted run. Steps draw from one endless
stream of rows (:class:`Order`: epoch after epoch, each shuffled separately), of which a step takes the next

    rows_per_step = micro_batch_size * gradient_accumulation_steps * world

rows. If the last rows of an epoch do not fill a step, it also takes rows of the next epoch; within an epoch no row is
skipped or repeated. The rows of a step do not depend on their split over ranks and micro-batches.

A row is a sample, padded on the right to the longest of its micro-batch; or, packed, a bin of whole samples (`pack`).
In a packed row ``position_ids`` restart at 0 with every sample. Without an attention mask and a cache, transformers
derives sequence boundaries from them (``find_packed_sequence_indices`` of its masking_utils): attention is then causal
within each sample and masked across samples. Padding at the end of a packed row counts as a separate sample. Flash
attention finds the same boundaries only in batches of one row. The router's auxiliary loss of a MoE excludes padding
only with an attention mask, so it counts the few padding positions of packed rows.

Packing is best fit: a sample goes into the fullest bin with room for it. Within `PACKING_WINDOW` consecutive samples
the long ones are placed first (best-fit decreasing), because short samples can fill the gaps. In rows of 512, 97.7% of
the positions have a token of GSM8K's chats. Samples are packed whole: the second half of a split sample would be
trained without its context.
"""

import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from data.files import DataError
from data.samples import IGNORE, Sample, Samples, samples_of

Share = Callable[[int], slice]
"""The tokens of a row that a rank computes, by the row's length, if several ranks share it."""
MicroBatch = dict[str, torch.Tensor]
"""Inputs of one forward and backward, int64 tensors (``own_targets`` bool):

- ``input_ids``, ``labels`` [B, T]: labels are shifted (see `data.samples`), -100 for no prediction; of rows that ranks
  share, the labels are those of this rank's tokens only;
- ``attention_mask`` [B, T], only in padded batches: 1 on the sample and 0 on padding;
- ``position_ids`` [B, T], only in packed batches: from 0 in every sample and in the padding after the last sample;
- ``sample_ids`` [n]: index in the loader's list of each sample that is learned, ordered by row and by position in the
  row;
- ``spans`` [n, 3]: row, first position and one past the last position of each of these samples;
- ``own_targets`` [M], only of shared rows: True for those of the rows' targets that are this rank's;
- ``positions`` [N], added by `on_device`: flat indices of positions with labels.
"""

NOT_FOR_THE_MODEL = ("labels", "sample_ids", "spans", "own_targets", "positions")
NAMED_SAMPLES = 32  # samples that an error names; the rest are only counted


class Loader:
    """Micro-batches of one rank.

    Args:
        samples: training samples, the same on every rank and in the same order.
        micro_batch_size: rows per rank and micro-batch.
        gradient_accumulation_steps: micro-batches per rank and step.
        rank, world: this rank's index in the data-parallel group, and the group's size.
        seed: seed of the order.
        pad_token_id: pads ``input_ids`` on the right (masked, never predicted).
        packed_length: positions of a packed row; None pads each sample to the longest of its micro-batch.
        weights: each file's share of an epoch, by `Sample.file` (see `Order`); None takes every sample once.
        share: maps the length of a row to the slice of tokens that this rank computes, if ranks share rows. ``rank``
            and ``world`` then count the ranks that share a row as one.
        together: number of ranks that share a row; a row has at least as many positions.
        skip: indices of samples whose targets are removed. They stay in the rows, so that the order of other samples
            does not change. A step with only such samples takes the rows of the next step that has others.

    Raises:
        DataError: a sample does not fit a packed row, weights do not fit the files, an epoch has fewer rows than one
            step takes, or all samples are skipped.
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
        skip: Collection[int] = (),
        share: Share | None = None,
        together: int = 1,
    ) -> None:
        assert rank < world, f"rank {rank} of {world}: ranks that share rows are fewer than {together}"
        self.rows_per_step = micro_batch_size * gradient_accumulation_steps * world
        rows = "samples" if packed_length is None else f"packed rows of {packed_length:,} tokens"
        self.samples = samples_of(samples)
        found = len(self.samples)
        if found:
            self._order = Order(self.samples, seed=seed, weights=weights, packed_length=packed_length)
            found = self._order.rows_in_epoch(0)
        if found < self.rows_per_step:
            ranks = f"{world} ranks" if together == 1 else f"{world} groups of ranks that share rows"
            raise DataError(
                f"found {found:,} {rows}, expected at least the {self.rows_per_step:,} that one step takes "
                f"(data.micro_batch_size {micro_batch_size} * train.gradient_accumulation_steps "
                f"{gradient_accumulation_steps} * {ranks}): give more data or smaller steps"
            )
        self._micro_batch_size = micro_batch_size
        self._accumulation = gradient_accumulation_steps
        self._rank = rank
        self._world = world
        self._pad = pad_token_id
        self._packed_length = packed_length
        self._share, self._together = share, together
        self._skip = frozenset(skip)
        self.curves: dict[str, float] = {}
        """Values of the last step for the run's curves, on rank 0."""
        if len(self._skip) == len(self.samples):
            raise DataError(
                f"data.skip: excludes all {len(self.samples):,} training samples, expected at least one left to learn: "
                "name fewer lines"
            )

    def step(self, k: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of step ``k`` (from 0), as many as gradient_accumulation_steps."""
        if self._packed_length is None:
            return self._own([pad(self.samples, rows, self._pad, self._together) for rows in self._rows(k)])
        return self._own([pack_rows(self.samples, rows, self._pad, self._packed_length) for rows in self._rows(k)])

    def _own(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """Remove the targets of skipped samples, and of tokens that other ranks compute."""
        for batch in batches if self._skip else ():
            learned = torch.tensor([sample not in self._skip for sample in batch["sample_ids"].tolist()])
            for row, start, end in batch["spans"][~learned].tolist():
                batch["labels"][row, start:end] = IGNORE
            batch |= {name: batch[name][learned] for name in ("sample_ids", "spans")}
        return batches if self._share is None else [with_own_labels(batch, self._share) for batch in batches]

    def steps_of(self, epochs: float) -> int:
        """Return the number of steps that use every row of ``epochs`` epochs; 1.5 is one epoch and half of the next."""
        whole, share = int(epochs), epochs - int(epochs)
        rows = sum(self._order.rows_in_epoch(epoch) for epoch in range(whole))
        if share:
            rows += math.ceil(share * self._order.rows_in_epoch(whole) - 1e-9)
        return max(1, math.ceil(rows / self.rows_per_step))

    def first(self, count: int) -> Iterator[MicroBatch]:
        """Yield this rank's first ``count`` micro-batches, for calibration; the same number on every rank. They contain
        ``samples`` as given, even if the :meth:`step` of a subclass returns other rows."""
        steps = (Loader.step(self, k) for k in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(steps), count)

    def epoch_of(self, step: int) -> float:
        """Return how many epochs are done before ``step``, as a fraction; its integer part is the epoch of the step's
        first row."""
        return self._order.epoch_at(step * self.rows_per_step)

    @property
    def digest(self) -> str:
        """Digest of all samples in order. A checkpoint stores it, and a resumed run must have the same."""
        return self.samples.key

    def describe(self, step: int) -> str:
        """Describe the samples of this rank in a step, for error messages: the indices of the first ones, with file and
        line where known, and the number of the others."""
        ids = [i for rows in self._rows(step) for row in rows for i in row]
        names = [f"{i} ({where})" if (where := self.samples[i].where()) else str(i) for i in ids[:NAMED_SAMPLES]]
        more = f" and {len(ids) - NAMED_SAMPLES} more" if len(ids) > NAMED_SAMPLES else ""
        return f"rank {self._rank * self._together}, step {step}, samples {', '.join(names)}{more}"

    def _rows(self, step: int) -> list[list[list[int]]]:
        """Return sample ids by micro-batch and row."""
        size, first = self._micro_batch_size, self._first(step)
        starts = (first + (index * self._world + self._rank) * size for index in range(self._accumulation))
        return [[self._order.row(start + offset) for offset in range(size)] for start in starts]

    def _first(self, step: int) -> int:
        """Return the index of a step's first row in the order of all rows."""
        first, total = step * self.rows_per_step, self.rows_per_step
        while self._skip and all(i in self._skip for p in range(first, first + total) for i in self._order.row(p)):
            first += total
        return first


def with_own_labels(batch: MicroBatch, share: Share) -> MicroBatch:
    """Cut the labels to the tokens that this rank computes, in rows that several ranks share; other tensors stay whole.

    ``share`` maps the length of a row to the slice of these tokens. The result also has ``own_targets``, bool, an
    element for each target of the whole rows: True if this rank computes it.
    """
    targets, own = batch["labels"] != IGNORE, share(batch["labels"].shape[1])
    mine = torch.zeros_like(targets)
    mine[:, own] = True
    return {**batch, "labels": batch["labels"][:, own], "own_targets": mine[targets]}


def pad(samples: Sequence[Sample], rows: Sequence[Sequence[int]], pad_token_id: int, shortest: int = 1) -> MicroBatch:
    """Batch one sample per row, padded to the longest of these samples and at least to ``shortest`` positions. A row of
    ``rows`` is a list with one index in ``samples``."""
    batch = _fill(samples, rows, pad_token_id, max(shortest, *(len(samples[i].input_ids) for (i,) in rows)))
    batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
    for row, start, end in batch["spans"].tolist():
        batch["attention_mask"][row, start:end] = 1
    return batch


def pack_rows(samples: Sequence[Sample], rows: Sequence[Sequence[int]], pad_token_id: int, length: int) -> MicroBatch:
    """Batch several samples per row, concatenated, in rows of ``length`` positions. A row of ``rows`` is a list of
    indices in ``samples``."""
    batch = _fill(samples, rows, pad_token_id, length)
    positions = torch.arange(length).repeat(len(rows), 1)
    for row, _, end in batch["spans"].tolist():  # in order: each sample restarts the count after its end
        positions[row, end:] = torch.arange(length - end)
    batch["position_ids"] = positions
    return batch


def _fill(samples: Sequence[Sample], rows: Sequence[Sequence[int]], pad_token_id: int, length: int) -> MicroBatch:
    """Build the tensors that padded and packed batches share (input_ids, labels, ...), in rows of ``length``
    positions."""
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


def model_inputs(batch: MicroBatch, *, mask: bool = True) -> MicroBatch:
    """Select the inputs of the model's forward; ``mask`` includes the attention mask. Packed batches also need
    ``use_cache=False``: with a cache transformers does not look for sequence boundaries."""
    left_out = NOT_FOR_THE_MODEL if mask else (*NOT_FOR_THE_MODEL, "attention_mask")
    return {name: tensor for name, tensor in batch.items() if name not in left_out}


def sample_inputs(batch: MicroBatch) -> Iterator[torch.Tensor]:
    """Yield the ``input_ids`` [1, T] of each sample alone, without padding."""
    for row, start, end in batch["spans"].tolist():
        yield batch["input_ids"][row : row + 1, start:end]


def token_positions(batch: MicroBatch) -> torch.Tensor | None:
    """Return the positions of a micro-batch that have tokens, bool [rows, T]; None if there is no padding."""
    if real_tokens(batch) == batch["input_ids"].numel():
        return None
    mask = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for row, start, end in batch["spans"].tolist():
        mask[row, start:end] = True
    return mask


def real_tokens(batch: MicroBatch) -> int:
    """Count the tokens of all samples in a micro-batch, without padding."""
    return int((batch["spans"][:, 2] - batch["spans"][:, 1]).sum())


def valid_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    """Count positions with a label in the micro-batches: this rank's part of the number by which losses are divided."""
    return sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)


# Further random streams of an epoch; the stream (seed, epoch) draws the epoch's permutation.
BINS, FILES = 1, 2


@dataclass(frozen=True)
class Epoch:
    """Rows of an epoch: row i consists of the samples ``ids[starts[i] : starts[i + 1]]``."""

    ids: np.ndarray  # int64 [samples of the epoch]
    starts: np.ndarray  # int64 [rows + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1


class Order:
    """Endless stream of rows, a pure function of the seed and the row's position.

    The stream is epoch 0, then epoch 1, and so on; each epoch is a list of rows, and a row is one sample or, with
    packing, a bin of several samples. Every epoch is drawn from ``(seed, epoch)``, so there is no state to save.

    Without weights an epoch has each of the N samples once. With weights w_f of the files, an epoch also has N entries,
    and file f contributes

        c_f = N * w_f / sum(w)        rounded so that they add up to N (largest remainder)

    entries: each of its n_f samples ``c_f // n_f`` times, and ``r = c_f mod n_f`` of its samples once more. These r
    samples are the next ones in a fixed cyclic permutation of the file, continued from the epoch before. So over any
    number of epochs, the uses of two samples of one file differ by at most one.

    With packing the epochs' numbers of rows differ, as the order changes how bins fill. So to find the row at a
    position, all epochs before it are packed once (about a second per epoch and million samples).

    The arguments are the same as in `Loader`. Raises DataError if a sample is longer than a bin, or weights and files
    do not fit each other.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        packed_length: int | None = None,
    ) -> None:
        samples = samples_of(samples)
        self._lengths = samples.lengths
        self._seed = seed
        self._packed_length = packed_length
        longest = int(self._lengths.argmax())
        if packed_length is not None and self._lengths[longest] > packed_length:
            raise DataError(
                f"{samples[longest].where() or f'sample {longest}'}: found {self._lengths[longest]:,} tokens, expected "
                f"at most the {packed_length:,} that a packed row holds"
            )
        self._files = None if weights is None else _files(samples, weights)
        self._ends = [0]  # rows before epoch 0, 1, ...; extended on demand
        # A step has rows of two epochs, rarely more; drawing an epoch for each row would repeat all of the work.
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def row(self, position: int) -> list[int]:
        """Return the ids of the samples in a row of the stream; a single id without packing."""
        epoch, index = self._locate(position)
        rows = self._epoch(epoch)
        return rows.ids[rows.starts[index] : rows.starts[index + 1]].tolist()

    def epoch_at(self, position: int) -> float:
        """Return the number of epochs before a position of the stream, as a fraction."""
        epoch, index = self._locate(position)
        return epoch + index / self.rows_in_epoch(epoch)

    def rows_in_epoch(self, epoch: int) -> int:
        """Return the number of rows in an epoch."""
        return len(self._lengths) if self._packed_length is None else len(self._epoch(epoch))

    def _locate(self, position: int) -> tuple[int, int]:
        """Return the epoch of a row, and the row's index in this epoch."""
        while position >= self._ends[-1]:
            self._ends.append(self._ends[-1] + self.rows_in_epoch(len(self._ends) - 1))
        epoch = bisect_right(self._ends, position) - 1
        return epoch, position - self._ends[epoch]

    def _draw(self, epoch: int) -> Epoch:
        ids = self._entries(epoch)
        ids = ids[np.random.default_rng((self._seed, epoch)).permutation(len(ids))]
        if self._packed_length is None:
            return Epoch(ids, np.arange(len(ids) + 1))
        bins = pack(self._lengths[ids], self._packed_length)
        counts = np.bincount(bins)
        # Best fit opens the bins of long samples first: shuffle, so that the order of rows does not depend on it.
        places = np.random.default_rng((self._seed, epoch, BINS)).permutation(len(counts))[bins]
        return Epoch(ids[np.argsort(places, kind="stable")], np.append(0, np.cumsum(np.bincount(places))))

    def _entries(self, epoch: int) -> np.ndarray:
        """Return the samples of an epoch before shuffling, some more than once if files have weights."""
        if self._files is None:
            return np.arange(len(self._lengths))
        parts = []
        for index, (ids, count) in enumerate(self._files):
            passes, rest = divmod(count, len(ids))
            cycle = np.random.default_rng((self._seed, index, FILES)).permutation(ids)
            parts += [np.repeat(ids, passes), cycle[(epoch * rest + np.arange(rest)) % len(ids)]]
        return np.concatenate(parts)


def _files(samples: Samples, weights: Mapping[str, float]) -> list[tuple[np.ndarray, int]]:
    """Return for each file the ids of its samples, and how many entries of an epoch come from this file. Raises
    DataError if a file has only a weight or only samples, or a weight too small for one entry."""
    codes = {file: code for code, file in enumerate(weights)}
    files = np.array([codes.get(file, -1) for file in samples.files])[samples.codes]
    ids = [np.flatnonzero(files == code) for code in codes.values()]
    empty = [file for file, mine in zip(weights, ids, strict=True) if not len(mine)]
    other = sorted({samples[i].file for i in np.flatnonzero(files == -1)[:1]})
    if empty or other:
        raise DataError(
            f"data.weights: files with a weight but no samples: {empty or 'none'}; files with samples but no weight: "
            f"{other or 'none'}; expected one weight for each file with samples: remove or add weights"
        )
    shares = np.array(list(weights.values()), dtype=np.float64)
    exact = len(samples) * shares / shares.sum()
    counts = np.floor(exact).astype(np.int64)
    short = len(samples) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    if not counts.all():
        none = [file for file, count in zip(weights, counts.tolist(), strict=True) if not count]
        raise DataError(
            f"data.weights: the weights of {none} are too small: none of an epoch's {len(samples):,} samples is from "
            "these files, expected at least one of each: raise their weights, or leave the files out"
        )
    return list(zip(ids, counts.tolist(), strict=True))


PACKING_WINDOW = 4096


def pack(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each sample, int64 [n], numbered from 0 without gaps; a pure function of the arguments.

    ``lengths``, int [n], are the samples' lengths, 1 to ``capacity``, the positions of a bin.
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    count = 0
    for start in range(0, len(lengths), PACKING_WINDOW):
        window = lengths[start : start + PACKING_WINDOW]
        placed = _best_fit_decreasing(window, capacity)
        bins[start : start + PACKING_WINDOW] = placed + count
        count += int(placed.max()) + 1
    return bins


def _best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Assign each sample of one window to a bin."""
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # sorted; free positions * PACKING_WINDOW + bin, so that bisection finds the tightest bin
    count = 0
    for sample, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        index = bisect_left(rooms, length * PACKING_WINDOW)
        if index < len(rooms):
            room, chosen = divmod(rooms.pop(index), PACKING_WINDOW)
        else:
            room, chosen, count = capacity, count, count + 1
        bins[sample] = chosen
        if room > length:
            insort(rooms, (room - length) * PACKING_WINDOW + chosen)
    return bins


READ_BY_THE_HOST = ("sample_ids", "spans", "own_targets")


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Move a loader's micro-batch to the device; add ``positions`` [N]: the indices in [B * T] that have a label.

    Tensors that the host reads stay on the host. Positions could also be computed from labels on a GPU, but their
    number depends on the data, so the host would wait for all queued GPU work.
    """
    batch = {**batch, "positions": (batch["labels"].flatten() != IGNORE).nonzero().squeeze(-1)}
    return batch if device.type == "cpu" else _moved(batch, lambda flat: without_wait(flat, device))


def without_wait(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, while the host does not wait for queued device work; on a CPU return the tensor itself."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _moved(batch: MicroBatch, copy: Callable[[Tensor], Tensor]) -> MicroBatch:
    """Copy a batch with one call of ``copy`` on its concatenated int64 tensors, and return views of the result; tensors
    in READ_BY_THE_HOST are not copied."""
    tensors = {name: tensor for name, tensor in batch.items() if name not in READ_BY_THE_HOST}
    parts = copy(torch.cat([tensor.flatten() for tensor in tensors.values()])).split(
        [tensor.numel() for tensor in tensors.values()]
    )
    moved = {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
    return {**batch, **moved}


_PLACES = 8  # tokens of a sample that are compared before all of them are
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_AT_ONCE = 2**14  # samples at a time, so that few pages of mapped files are in memory
SPLIT = 3  # random stream of the split, separate from the streams of all epochs


def split_held_out(samples: Sequence[Sample], held_out: int | float, seed: int) -> tuple[Samples, Samples]:
    """Split samples into training and held-out samples, each in their original order.

    ``held_out`` is the number of held-out samples, or as a float their share (at least one sample). The split depends
    only on samples and seed, so it is the same on every rank, in every resumed run and at any world size. Raises
    DataError if no sample would be left to train on.
    """
    count = max(1, round(held_out * len(samples))) if isinstance(held_out, float) else held_out
    if count >= len(samples):
        raise DataError(
            f"data.held_out: {held_out} is {count:,} of {len(samples):,} samples, expected some to be left to train on"
        )
    chosen = np.zeros(len(samples), dtype=bool)
    chosen[np.random.default_rng((seed, 0, SPLIT)).permutation(len(samples))[:count]] = True
    samples = samples_of(samples)
    return samples.take(np.flatnonzero(~chosen)), samples.take(np.flatnonzero(chosen))


def seen_in_training(training: Sequence[Sample], held_out: Sequence[Sample]) -> dict[int, Sample]:
    """Map the index of each held-out sample that training also contains (equal tokens and labels) to the training
    sample."""
    training, held_out = samples_of(training), samples_of(held_out)

    def pairs() -> list[tuple[int, int]]:
        places: dict[tuple[bytes, bytes], list[int]] = {}
        for index, sample in enumerate(held_out):
            places.setdefault((sample.input_ids.tobytes(), sample.labels.tobytes()), []).append(index)
        found: dict[int, int] = {}
        alike = np.flatnonzero(np.isin(_sizes(training), _sizes(held_out)))  # others are certainly different
        alike = alike[np.isin(_marks(training.take(alike)), _marks(held_out))]
        for position in alike.tolist():
            sample = training[position]
            for index in places.get((sample.input_ids.tobytes(), sample.labels.tobytes()), ()):
                found.setdefault(index, position)
        return list(found.items())

    found = training.cache.once(f"copies of {held_out.key} in {training.key}", pairs)
    return {index: training[position] for index, position in found}


def _sizes(samples: Samples) -> np.ndarray:
    return samples.lengths << 32 | samples.targets


def _marks(samples: Samples) -> np.ndarray:
    """Hash a few tokens of each sample to a number; equal samples have equal numbers."""
    marks = np.zeros(len(samples), np.uint64)
    for first in range(0, len(samples), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        for place in range(1, 2 * _PLACES, 2):
            spots = samples.starts[part] + samples.lengths[part] * place // (2 * _PLACES)
            marks[part] = marks[part] * _FACTOR + samples.inputs.at(spots).astype(np.uint64)
        samples.inputs.release()
    return marks


class HeldOut:
    """This rank's evaluation batches: each sample is in one batch of one rank; all ranks have the same number.

    Samples are ordered by length, so that rows of a batch need little padding and the ranks have equal work
    (``sample_ids`` are indices in ``samples``). A rank without samples left gets a batch of one row without labels,
    whose ``sample_ids`` are empty: a forward under ZeRO-3 is a collective.

    The arguments are the same as in `Loader`; the last batch may have fewer than ``micro_batch_size`` rows. Raises
    DataError if there are no samples.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        micro_batch_size: int,
        rank: int,
        world: int,
        pad_token_id: int,
        share: Share | None = None,
        together: int = 1,
    ) -> None:
        if not samples:
            raise DataError("found no samples to evaluate on, expected at least one in data.held_out or data.eval")
        self.samples = samples_of(samples)
        self._by_length = np.argsort(self.samples.lengths, kind="stable").tolist()
        self._size = micro_batch_size
        self._rank = rank
        self._world = world
        self._pad = pad_token_id
        self._share, self._together = share, together

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.samples) / self._size) / self._world)

    def __iter__(self) -> Iterator[MicroBatch]:
        for index in range(len(self)):
            start = (index * self._world + self._rank) * self._size
            ids = self._by_length[start : start + self._size]
            batch = pad(self.samples, [[i] for i in ids or self._by_length[:1]], self._pad, self._together)
            if not ids:
                batch["labels"].fill_(IGNORE)
                batch |= {"sample_ids": batch["sample_ids"][:0], "spans": batch["spans"][:0]}
            yield batch if self._share is None else with_own_labels(batch, self._share)
