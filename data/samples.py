"""Shared parts of both readers: the sample, the errors, and a tokenizer with reliable offsets.

Labels of a sample are already shifted: position t of ``input_ids`` sees the tokens up to t and predicts ``labels[t]``.
Neither the loader nor the model shifts them again.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.files import DataError

IGNORE = -100
"""Label of a position that predicts nothing (the ``ignore_index`` of torch's cross entropy)."""

MAX_TOKEN_ID = 2**22
"""Limit of a tokenizer's ids: copying a tokenizer takes time and memory for every id up to the highest, used or not."""


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


def digest_of_samples(samples: Iterable[Sample]) -> str:
    """Hash tokens and labels of all samples, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(sample.input_ids, dtype="<i4").data)
        digest.update(np.ascontiguousarray(sample.labels, dtype="<i4").data)
    return digest.hexdigest()


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
    a token of the answer. The caller's tokenizer is not changed.
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
