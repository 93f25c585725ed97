"""Store a teacher's top-k log-probabilities for every target on disk, to train later without a teacher.

Position p is the p-th target (label that is not -100), counted through all samples in order. The positions of sample i
begin at ``offsets[i]`` and end before ``offsets[i + 1]``. A directory contains flat arrays, little endian and
memory-mapped, so that a rank reads only the rows of its batch; 8 K + 12 bytes per position:

=================== ============== =================================================================================
file                type, shape    content
=================== ============== =================================================================================
``offsets``         int64 [n + 1]  see above
``indices``         int32 [P, K]   ids of the K most likely tokens, most likely first, ties by id
``log_probs``       fp32 [P, K]    their log-probabilities
``log_tail``        fp32 [P]       log of the probability of all other tokens
``logsumexp``       fp32 [P]       logsumexp of the logits: added to a log-probability it gives the logit
``label_log_probs`` fp32 [P]       log-probability of the target itself
``manifest.json``                  sizes, checksums, and digests of the inputs
=================== ============== =================================================================================

The manifest is written last, and then the directory is renamed: a directory with the final name is complete.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.cache import digest
from data.samples import Sample, samples_of

FORMAT = 1
MANIFEST = "manifest.json"
CACHE_DTYPES = {
    "offsets": "<i8",
    "indices": "<i4",
    "log_probs": "<f4",
    "log_tail": "<f4",
    "logsumexp": "<f4",
    "label_log_probs": "<f4",
}
_TOLERANCE = 1e-3  # tolerance above 0 of a log-probability, which is the difference of two rounded numbers
CHECKED_BYTES = 2**26  # per checksum, so that ranks can share the checking
_AGAIN = "write it again with launch/cache_teacher.py"


class CacheError(ValueError):
    """Error of an unusable cache; the message names the directory, the problem and the remedy."""


@dataclass(frozen=True)
class Manifest:
    """Sizes and inputs of a cache."""

    top_k: int  # K
    vocabulary: int  # number of token ids that the probabilities cover, from 0
    samples: int  # n
    positions: int  # P
    samples_digest: str
    tokenizer_digest: str
    teacher_digest: str
    teacher: str  # directory, as it was given
    checksums: dict[str, list[int]]  # CRC-32 of each block of ``CHECKED_BYTES`` bytes, by file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays."""
        wide, flat = (self.positions, self.top_k), (self.positions,)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(CACHE_DTYPES, flat)
        return shapes | {"offsets": (self.samples + 1,), "indices": wide, "log_probs": wide}

    def bytes_of(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return math.prod(self.shapes()[name]) * np.dtype(CACHE_DTYPES[name]).itemsize


# ---- digests


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary: which text each token id stands for."""
    return digest(sorted(tokenizer.get_vocab().items()))


def offsets_of(samples: Sequence[Sample]) -> np.ndarray:
    """Return the first position of each sample, and one past the last: int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(samples_of(samples).targets)])


# ---- writing


def create(directory: Path, manifest: Manifest) -> None:
    """Allocate the files in ``directory`` at their final size; call it in one process only. Raises OSError if the disk
    has not enough space for them."""
    for name in CACHE_DTYPES:
        size = manifest.bytes_of(name)
        with open(directory / name, "wb") as stream:
            if size:
                os.posix_fallocate(stream.fileno(), 0, size)


class Writer:
    """Writer of rows into the files made by :func:`create`. Several processes may write, each with its own Writer."""

    def __init__(self, directory: Path) -> None:
        self._files = {name: os.open(directory / name, os.O_WRONLY) for name in CACHE_DTYPES}

    def write(self, start: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write rows of the named arrays to their files; the first row has the position ``start``."""
        for name, array in arrays.items():
            data = np.ascontiguousarray(array, dtype=CACHE_DTYPES[name])
            row = data.itemsize * int(np.prod(data.shape[1:]))
            view, at = memoryview(data.tobytes()), start * row
            while view:
                written = os.pwrite(self._files[name], view, at)
                view, at = view[written:], at + written

    def close(self) -> None:
        """Flush everything to disk, and close the files. Raises OSError if the disk refuses data."""
        for file in self._files.values():
            os.fsync(file)
            os.close(file)


def checksums(directory: Path, manifest: Manifest, share: int, of: int) -> dict[str, dict[int, int]]:
    """Compute the CRC-32 of every ``of``-th block of all files, beginning with block ``share``; map file to block index
    to CRC-32. A block has ``CHECKED_BYTES`` bytes."""
    blocks = [(name, index) for name in CACHE_DTYPES for index in range(-(-manifest.bytes_of(name) // CHECKED_BYTES))]
    found: dict[str, dict[int, int]] = {name: {} for name in CACHE_DTYPES}
    for name, index in blocks[share::of]:
        with open(directory / name, "rb") as stream:
            stream.seek(index * CHECKED_BYTES)
            found[name][index] = zlib.crc32(stream.read(CHECKED_BYTES))
    return found


def finish(directory: Path, manifest: Manifest) -> None:
    """Write the manifest. Call it last: it marks the cache as complete."""
    with open(directory / MANIFEST, "w", encoding="utf-8") as stream:
        json.dump({"format": FORMAT, **asdict(manifest)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


# ---- reading


class TeacherCache:
    """Cache in ``directory``, opened for reading. Raises CacheError if it is incomplete or of another format, or a
    file's size differs from the manifest's."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.manifest = _read_manifest(self.directory)
        self._arrays: dict[str, np.ndarray] = {}
        for name, shape in self.manifest.shapes().items():
            path = self.directory / name
            size = self.manifest.bytes_of(name)
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is not there" if found is None else f"has {found:,} bytes"
                raise CacheError(f"{path} {state}, expected {size:,} bytes: the cache is damaged, {_AGAIN}")
            # An empty file cannot be mapped.
            self._arrays[name] = (
                np.memmap(path, CACHE_DTYPES[name], "r", shape=shape) if size else np.empty(shape, CACHE_DTYPES[name])
            )

    def verify(self, share: int, of: int) -> None:
        """Verify one of ``of`` equal shares of the cache, number ``share`` from 0: checksums and values. Raises
        CacheError if a file differs or contains invalid values; the message names the first such file."""
        for name, blocks in checksums(self.directory, self.manifest, share, of).items():
            expected = self.manifest.checksums.get(name, [])
            for index, found in blocks.items():
                if index >= len(expected) or expected[index] != found:
                    raise CacheError(
                        f"{self.directory / name}: bytes {index * CHECKED_BYTES:,} onwards are not what was written: "
                        f"the cache is damaged, {_AGAIN}"
                    )
        step = max(1, CHECKED_BYTES // (8 * self.manifest.top_k))
        for start in range(share * step, self.manifest.positions, of * step):
            self._check_values(slice(start, start + step))

    def _check_values(self, rows: slice) -> None:
        """Raise CacheError for token ids outside of the vocabulary, and for values that are no log-probabilities.
        (Checksums do not detect errors of the program that wrote the cache.)"""
        indices = self._arrays["indices"][rows]
        if ((indices < 0) | (indices >= self.manifest.vocabulary)).any():
            raise CacheError(
                f"{self.directory / 'indices'} has token ids that are negative or too large, expected ids below "
                f"{self.manifest.vocabulary:,}: the cache is damaged, {_AGAIN}"
            )
        for name in ("log_probs", "log_tail"):
            values = self._arrays[name][rows]
            if not (values <= _TOLERANCE).all():  # NaN is not
                raise CacheError(
                    f"{self.directory / name} holds {values[~(values <= _TOLERANCE)][0]}, expected log-probabilities: "
                    f"the cache is damaged, {_AGAIN}"
                )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise CacheError unless the cache was made with this tokenizer."""
        if self.manifest.tokenizer_digest != digest_of_tokenizer(tokenizer):
            raise CacheError(f"{self.directory} was made with another tokenizer than the recipe's: {_AGAIN}")

    def check_samples(self, samples: Sequence[Sample]) -> None:
        """Raise CacheError, which names the difference, unless the cache was made from these samples and targets."""
        if self.manifest.samples != len(samples):
            raise CacheError(
                f"{self.directory} has {self.manifest.samples:,} samples, expected {len(samples):,}, as the recipe's "
                f"data has: {_AGAIN}"
            )
        if self.manifest.samples_digest != samples_of(samples).key:
            raise CacheError(
                f"{self.directory} was made from other samples than the recipe's data (files, data.max_length, "
                f"data.too_long, data.loss_on, data.special_tokens, data.held_out, chat template): {_AGAIN}"
            )
        if not np.array_equal(self._arrays["offsets"], offsets_of(samples)):
            raise CacheError(f"{self.directory / 'offsets'} does not fit the samples: the cache is damaged, {_AGAIN}")

    def check_teacher(self, teacher: str, digest: str) -> None:
        """Raise CacheError unless the cache was made by the checkpoint ``teacher``, whose digest is ``digest``."""
        if self.manifest.teacher_digest != digest:
            raise CacheError(
                f"{self.directory} was made by another teacher ({self.manifest.teacher}) than loss.teacher, "
                f"{teacher}: {_AGAIN}"
            )

    def rows(self, sample_ids: Sequence[int]) -> np.ndarray:
        """Return the positions of all targets of the samples with these indices, concatenated, int64 [R]."""
        offsets = self._arrays["offsets"]
        spans = [np.arange(offsets[i], offsets[i + 1]) for i in sample_ids]
        return np.concatenate(spans) if spans else np.empty(0, np.int64)

    def top_k(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``log_probs`` fp32 [R, K], ``indices`` int64 [R, K] and ``log_tail`` fp32 [R] at the positions
        ``rows``, int [R]."""
        log_probs, indices, log_tail = (
            torch.from_numpy(np.array(self._arrays[name][rows])) for name in ("log_probs", "indices", "log_tail")
        )
        return log_probs, indices.long(), log_tail


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    if not path.is_file():
        raise CacheError(f"{directory} has no {MANIFEST}, expected a directory that launch/cache_teacher.py wrote")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values.pop("format")
        if found != FORMAT:
            raise CacheError(f"{path} is of format {found!r}, expected {FORMAT}: {_AGAIN}")
        manifest = Manifest(**values)
        for name, least in {"top_k": 1, "vocabulary": 1, "samples": 0, "positions": 0}.items():
            value = getattr(manifest, name)
            if type(value) is not int or not least <= value < 2**40:
                raise ValueError(f"{name} is {str(value)[:40]}, expected a number from {least} on")
        if not all(isinstance(sums, list) for sums in manifest.checksums.values()):
            raise ValueError("checksums holds something else than lists")
        return manifest
    except CacheError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CacheError(f"{path} is damaged ({error}): {_AGAIN}") from error
