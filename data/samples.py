"""Shared parts of both readers: the sample, the errors, and a tokenizer with reliable offsets.

Labels of a sample are already shifted, because only the reader can tell the last useful token of a text: position t of
``input_ids`` sees the tokens up to t and predicts ``labels[t]``. Nothing downstream shifts again.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data.file_kinds import other_kind

IGNORE = -100
"""Label of a position that predicts nothing (the ``ignore_index`` of torch's cross entropy)."""

MAX_PROBLEMS = 20
"""Limit of the bad lines that one error names; the rest are only counted."""


MAX_TOKEN_ID = 2**22
"""Limit of a tokenizer's ids: copying a tokenizer takes time and memory for every id up to the highest, used or not."""


Bars = Callable[[int, str, str], tqdm]
"""Creates a progress bar from the total, a description and the unit."""


def no_bar(total: int, description: str, unit: str) -> tqdm:
    """Create a progress bar that shows nothing."""
    return tqdm(total=total, disable=True)


class DataError(ValueError):
    """Error in the files or in their description; the text names file, line and remedy."""


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
    """Digest tokens and labels, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(sample.input_ids, dtype="<i4").data)
        digest.update(np.ascontiguousarray(sample.labels, dtype="<i4").data)
    return digest.hexdigest()


class Problems:
    """Collect errors in lines, so that one run shows all of them."""

    def __init__(self) -> None:
        self.count = 0
        self._texts: list[str] = []

    def add(self, where: str, what: str) -> None:
        """Add a bad line; ``where`` is ``file:line``."""
        self.count += 1
        if len(self._texts) < MAX_PROBLEMS:
            self._texts.append(f"{where}: {what}")

    def raise_if_any(self) -> None:
        """Raise `DataError` with the first `MAX_PROBLEMS` lines and the number of the others."""
        if not self.count:
            return
        more = self.count - len(self._texts)
        rest = [f"... and {more:,} more bad lines"] if more else []
        lines = "1 bad line" if self.count == 1 else f"{self.count:,} bad lines"
        raise DataError("\n".join([f"{lines} in the data:", *self._texts, *rest]))


def check_files(files: Sequence[str | Path], *, plain: bool = False) -> list[Path]:
    """Return the paths of ``files``.

    ``plain``: they are plain text, see :func:`data.file_kinds.other_kind`.

    Raises:
        DataError: files are missing, empty, folders or of another kind (compressed, a table); the text names all of
            them.
    """
    paths = [Path(file) for file in files]
    wrong = [f"{path}: {problem}" for path in paths if (problem := _file_problem(path, plain))]
    if wrong or not paths:
        raise DataError("\n".join(wrong) or "no data files given, expected at least one path")
    return paths


def _file_problem(path: Path, plain: bool) -> str | None:
    if not path.exists():
        return "no such file"
    if not path.is_file():
        return "found something else than a file (a folder?), expected the path of a file"
    return other_kind(path, plain=plain) if path.stat().st_size else "the file is empty"


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    Raises:
        DataError: the tokenizer is missing or cannot be read.
    """
    try:
        found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except BaseException as error:
        _refuse(directory, error)
    if len(found) <= len(found.added_tokens_decoder):  # transformers makes an empty one if the files are missing
        _refuse(directory, ValueError("found no vocabulary"))
    return found


def _refuse(directory: str | Path, error: BaseException) -> NoReturn:
    """Raise `DataError` for errors of a tokenizer's files in transformers or the tokenizers library.

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

    The post-processor is dropped: it adds BOS and EOS, which a chat template writes already, and makes " word" begin at
    the "w" (``trim_offsets``, in GPT-2-like tokenizers), so that a token that begins in the prompt would look like a
    token of the answer. The caller's tokenizer is not changed.
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
