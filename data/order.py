"""Which samples stand in which row of the endless stream: a pure function of the seed and the row's position.

The stream is epoch 0, then epoch 1, and so on; each epoch is a list of rows, and a row is one sample, or with packing
a bin of several. Every epoch is drawn anew from ``(seed, epoch)``, so there is no state to save.

Without weights an epoch holds every sample once. With weights w_f of the files, an epoch has as many samples as there
are, and file f gives

    c_f = N * w_f / sum(w)        rounded so that they add up to N (largest remainder)

of them: each of its n_f samples ``c_f // n_f`` times, and ``r = c_f mod n_f`` of them once more. Those are the next r
of a fixed cyclic permutation of the file, going on where the epoch before ended: over any number of epochs, the uses
of two samples of one file differ by at most one.

With packing the epochs' numbers of rows differ, as other neighbours fill the bins; to find the row at a position, the
epochs before it are packed too, once (about a second per epoch and million samples).
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.packing import pack
from data.samples import DataError, Sample

# Beside (seed, epoch), which draws the epoch's permutation, and apart from every epoch.
BINS, FILES = 1, 2


@dataclass(frozen=True)
class Epoch:
    """Row i holds the samples ``ids[starts[i] : starts[i + 1]]``."""

    ids: np.ndarray  # int64 [samples of the epoch]
    starts: np.ndarray  # int64 [rows + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1


class Order:
    """The stream of rows.

    Args:
        samples: what the ids number.
        seed: of all permutations.
        weights: by `Sample.file`; None takes every sample once per epoch.
        packed_length: positions of a bin; None makes every sample a row.

    Raises:
        DataError: a sample is longer than a bin, or weights and files do not fit each other.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        seed: int,
        weights: Mapping[str, float] | None = None,
        packed_length: int | None = None,
    ) -> None:
        self._lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        self._seed = seed
        self._packed_length = packed_length
        if packed_length is not None:
            _check_lengths(samples, self._lengths, packed_length)
        self._files = None if weights is None else _files(samples, weights)
        self._ends = [0]  # rows before epoch 0, 1, ...; grows as positions are asked for
        # A step touches two epochs, rarely more; drawing one per row would cost all of its work each time.
        self._epoch = lru_cache(maxsize=2)(self._draw)

    def row(self, position: int) -> list[int]:
        """The ids of the samples in a row of the stream; one without packing."""
        epoch, index = self._locate(position)
        rows = self._epoch(epoch)
        return rows.ids[rows.starts[index] : rows.starts[index + 1]].tolist()

    def epoch_at(self, position: int) -> float:
        """How many epochs lie before a position of the stream."""
        epoch, index = self._locate(position)
        return epoch + index / self.rows_in_epoch(epoch)

    def rows_in_epoch(self, epoch: int) -> int:
        """How many rows an epoch has."""
        return len(self._lengths) if self._packed_length is None else len(self._epoch(epoch))

    def _locate(self, position: int) -> tuple[int, int]:
        """Epoch, and index of the row in it."""
        if self._packed_length is None:
            return divmod(position, len(self._lengths))
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
        # Best fit opens the bins of long samples first; shuffled, a bin's place says nothing about what is in it.
        places = np.random.default_rng((self._seed, epoch, BINS)).permutation(len(counts))[bins]
        return Epoch(ids[np.argsort(places, kind="stable")], np.append(0, np.cumsum(np.bincount(places))))

    def _entries(self, epoch: int) -> np.ndarray:
        """The samples of an epoch, some more than once where files have weights, in no random order yet."""
        if self._files is None:
            return np.arange(len(self._lengths))
        parts = []
        for index, (ids, count) in enumerate(self._files):
            passes, rest = divmod(count, len(ids))
            cycle = np.random.default_rng((self._seed, index, FILES)).permutation(ids)
            parts += [np.repeat(ids, passes), cycle[(epoch * rest + np.arange(rest)) % len(ids)]]
        return np.concatenate(parts)


def _check_lengths(samples: Sequence[Sample], lengths: np.ndarray, packed_length: int) -> None:
    longest = int(lengths.argmax())
    if lengths[longest] > packed_length:
        raise DataError(
            f"{samples[longest].where() or f'sample {longest}'}: found {lengths[longest]:,} tokens, expected at most "
            f"the {packed_length:,} that a packed row holds"
        )


def _files(samples: Sequence[Sample], weights: Mapping[str, float]) -> list[tuple[np.ndarray, int]]:
    """Ids of each file's samples, and how many of them an epoch takes."""
    codes = {file: code for code, file in enumerate(weights)}
    files = np.fromiter((codes.get(sample.file, -1) for sample in samples), dtype=np.int64, count=len(samples))
    ids = [np.flatnonzero(files == code) for code in codes.values()]
    empty = [file for file, mine in zip(weights, ids, strict=True) if not len(mine)]
    other = sorted({samples[i].file for i in np.flatnonzero(files == -1)[:1]})
    if empty or other:
        raise DataError(
            f"data.weights: found no sample of the files {empty} and no weight for {other}, expected both for every "
            "file: the weights share an epoch out over the files"
        )
    shares = np.array(list(weights.values()), dtype=np.float64)
    exact = len(samples) * shares / shares.sum()
    counts = np.floor(exact).astype(np.int64)
    short = len(samples) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    if not counts.all():
        none = [file for file, count in zip(weights, counts.tolist(), strict=True) if not count]
        raise DataError(
            f"data.weights: found weights that give {none} none of an epoch's {len(samples):,} samples, expected at "
            "least one: raise the weight, or leave the file out"
        )
    return list(zip(ids, counts.tolist(), strict=True))
