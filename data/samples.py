"""Shared parts of the readers of chats and of text: samples, and a checkpoint's tokenizer with reliable offsets.

Labels of a sample are already shifted: position t of ``input_ids`` sees the tokens up to t and predicts ``labels[t]``.
Neither the loader nor the model shifts them again.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.cache import ArrayWriter, TokenCache, digest
from data.files import DataError

IGNORE = -100
"""Label of a position that predicts nothing (the ``ignore_index`` of torch's cross entropy)."""

MAX_TOKEN_ID = 2**22
"""Limit of a tokenizer's ids: copying a tokenizer takes time and memory for every id up to the highest, used or not."""


KEYED = {"inputs": "<i4", "labels": "<i4", "lengths": "<i8"}
"""Arrays that tell samples apart."""

_AT_ONCE = 1024  # samples read at a time when all are

Bars = Callable[[int, str, str], tqdm]
"""Creates a progress bar from the total, a description and the unit."""


def no_bar(total: int, description: str, unit: str) -> tqdm:
    """Create a progress bar that shows nothing."""
    return tqdm(total=total, disable=True)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """``input_ids`` int32 [T], and ``labels`` int32 [T]: the token to predict at each position, or `IGNORE`."""

    input_ids: np.ndarray
    labels: np.ndarray
    file: str = ""
    """Source file: one string object per file, to save memory over a million samples."""
    line: int = 0
    """Line in the file, from 1; 0 if the sample is not from a single line."""

    def where(self) -> str:
        """Return ``file:line`` as far as known, for error messages."""
        return f"{self.file}:{self.line}" if self.line else self.file


class Flat:
    """View of several arrays as one concatenated array, without a copy. Empty arrays are left out."""

    def __init__(self, parts: Iterable[np.ndarray]) -> None:
        self.parts = [part for part in parts if len(part)]
        self._ends = np.cumsum([0, *map(len, self.parts)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def between(self, start: int, end: int) -> np.ndarray:
        """Copy the elements ``[start, end)``."""
        index, found = int(np.searchsorted(self._ends, start, side="right")) - 1, []
        while start < end:
            first, stop = int(self._ends[index]), min(end, int(self._ends[index + 1]))
            found.append(self.parts[index][start - first : stop - first])
            start, index = stop, index + 1
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Copy the elements at the indices ``places``."""
        found, which = np.empty(len(places), np.int32), np.searchsorted(self._ends, places, side="right") - 1
        for index in np.unique(which):
            mine = which == index
            found[mine] = self.parts[index][places[mine] - self._ends[index]]
        return found

    def release(self) -> None:
        """Give back the memory of mapped files that were read; they stay readable."""
        for part in self.parts:
            owner: Any = part
            while isinstance(owner, np.ndarray):
                owner = owner.base
            if isinstance(owner, mmap.mmap):
                owner.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, eq=False)
class Samples(Sequence[Sample]):
    """Samples as flat arrays, in memory or mapped from a cache. Element i of an array [n] belongs to sample i."""

    inputs: Flat
    labels: Flat
    starts: np.ndarray  # int64 [n], where a sample begins in both; samples may overlap
    lengths: np.ndarray  # int64 [n], numbers of positions
    targets: np.ndarray  # int64 [n], numbers of labels that are not `IGNORE`
    lines: np.ndarray  # int64 [n], as in `Sample`
    codes: np.ndarray  # int64 [n], indices in ``files``
    files: list[str]
    highest: int  # upper bound of the token ids
    key: str
    """Digest of the tokens and labels, made from the digests of the tokenized files. So equal samples that were read
    from other files, or taken from other samples, may have another key."""
    cache: TokenCache = field(default_factory=TokenCache)  # keeps results that were computed from these samples
    spelled: int = 0  # number of special tokens that files of plain text spell out

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> "Samples": ...
    def __getitem__(self, index: int | slice) -> "Sample | Samples":
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        start = int(self.starts[index])
        end = start + int(self.lengths[index])
        file, line = self.files[self.codes[index]], int(self.lines[index])
        return Sample(self.inputs.between(start, end), self.labels.between(start, end), file, line)

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples. Neighbors are read at once, and share memory."""
        for first in range(0, len(self), _AT_ONCE):
            indices = range(first, min(first + _AT_ONCE, len(self)))
            starts, lengths = self.starts[first : indices.stop], self.lengths[first : indices.stop]
            low, high = int(starts.min()), int((starts + lengths).max())
            if high - low > 2 * lengths.sum():  # far apart
                yield from map(self.__getitem__, indices)
                continue
            inputs, labels = self.inputs.between(low, high), self.labels.between(low, high)
            for index, start, length in zip(indices, (starts - low).tolist(), lengths.tolist(), strict=True):
                span = slice(start, start + length)
                yield Sample(inputs[span], labels[span], self.files[self.codes[index]], int(self.lines[index]))
            self.inputs.release()
            self.labels.release()

    def take(self, indices: np.ndarray) -> "Samples":
        """Return the samples with these indices, in this order."""
        per_sample = ("starts", "lengths", "targets", "lines", "codes")
        arrays: dict[str, Any] = {name: getattr(self, name)[indices] for name in per_sample}
        taken = hashlib.blake2b(np.ascontiguousarray(indices, "<i8").data, digest_size=16).hexdigest()
        return replace(self, key=digest([self.key, taken]), **arrays)

    def __add__(self, other: "Samples") -> "Samples":
        """Concatenate this object's samples with the samples of ``other``."""
        if not len(self) or not len(other):
            return self if len(self) else other
        arrays: dict[str, Any] = {
            name: np.append(getattr(self, name), getattr(other, name)) for name in ("lengths", "targets", "lines")
        }
        return replace(
            self,
            inputs=Flat(self.inputs.parts + other.inputs.parts),
            labels=Flat(self.labels.parts + other.labels.parts),
            starts=np.append(self.starts, other.starts + len(self.inputs)),
            codes=np.append(self.codes, other.codes + len(self.files)),
            files=self.files + other.files,
            highest=max(self.highest, other.highest),
            key=digest([self.key, other.key]),
            **arrays,
        )

    def named(self, where: str) -> np.ndarray:
        """Return the indices of the samples of the line ``where``, a ``file:line`` as from :meth:`Sample.where`. The
        array is empty if there are none."""
        file, _, line = where.rpartition(":")
        number = int(line) if line.isdecimal() and line == str(int(line)) else 0
        codes = [code for code, name in enumerate(self.files) if name == file and number]
        return np.flatnonzero((self.lines == number) & np.isin(self.codes, codes))


def samples_of(given: Iterable[Sample]) -> Samples:
    """Copy samples into the flat arrays of a `Samples`; return a `Samples` unchanged."""
    if isinstance(given, Samples):
        return given
    samples, codes = list(given), dict[str, int]()
    lengths, targets, lines, where = (
        np.array(
            [
                (len(one.labels), (one.labels != IGNORE).sum(), one.line, codes.setdefault(one.file, len(codes)))
                for one in samples
            ],
            np.int64,
        )
        .reshape(-1, 4)
        .T
    )
    inputs, labels = Flat(one.input_ids for one in samples), Flat(one.labels for one in samples)
    highest = max((int(part.max()) for part in inputs.parts + labels.parts), default=0)
    starts = np.cumsum(lengths) - lengths
    digested = ArrayWriter(KEYED)
    digested.add(lengths=lengths)
    for one in samples:
        digested.add(inputs=one.input_ids, labels=one.labels)
    key = digest([digested.digests()])
    return Samples(inputs, labels, starts, lengths, targets, lines, where, list(codes), highest, key)


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint. Raises DataError if the tokenizer is missing or cannot be read."""
    try:
        found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except BaseException as error:
        _refuse(directory, error)
    if len(found) <= len(found.added_tokens_decoder):  # transformers makes an empty one if the files are missing
        _refuse(directory, ValueError("found no vocabulary"))
    return found


def _refuse(directory: str | Path, error: BaseException) -> NoReturn:
    """Convert an error of transformers or the tokenizers library about a tokenizer's files to `DataError`.

    A panic of the tokenizers library, which is written in Rust, is not an `Exception`.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    why = " ".join(str(error).split())
    raise DataError(
        f"{directory}: expected a tokenizer (tokenizer.json, tokenizer_config.json) that transformers reads: {why}"
    ) from error


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Copy the fast tokenizer, without additions to the text, without truncation, and with untrimmed offsets.

    The post-processor is dropped: it adds BOS and EOS, which a chat template writes already, and in GPT-2-like
    tokenizers trims offsets: " word" would begin at the "w", so that a token that begins in the prompt would look like
    a token of the answer. The caller's tokenizer is not changed. Raises DataError if the tokenizer is not fast, has ids
    above `MAX_TOKEN_ID`, or cannot be copied.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise DataError(
            f"{type(tokenizer).__name__} reports no character offsets of its tokens, expected a fast tokenizer "
            "(a model directory with a tokenizer.json)"
        )
    if (highest := max(backend.get_vocab().values(), default=0)) > MAX_TOKEN_ID:
        raise DataError(f"{tokenizer.name_or_path}: found the token id {highest:,}, expected at most {MAX_TOKEN_ID:,}")
    try:
        copy = Tokenizer.from_str(backend.to_str())
    except BaseException as error:  # an added token may have replaced a token that a merge names
        _refuse(tokenizer.name_or_path, error)
    copy.post_processor = None
    copy.no_truncation()
    copy.no_padding()
    return copy
