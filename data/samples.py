"""What both readers share: the sample, the errors, and a tokenizer whose offsets can be trusted.

A sample is stored with its labels already shifted, because only the reader knows which token of the text is the last
one worth reading: position t of ``input_ids`` sees the tokens up to t and has to predict ``labels[t]``. Nobody
downstream shifts again.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

IGNORE = -100
"""Label of a position that predicts nothing (the ``ignore_index`` of torch's cross entropy)."""

MAX_PROBLEMS = 20
"""So many bad lines are named in one error; the rest are only counted."""


class DataError(ValueError):
    """Something in the files or in how they are described is wrong; the text names file, line and remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """``input_ids`` int32 [T] and ``labels`` int32 [T]: the token to predict at each position, `IGNORE` where none."""

    input_ids: np.ndarray
    labels: np.ndarray
    file: str = ""
    """Where it comes from: one string object per file, so that a million samples stay small."""
    line: int = 0
    """Line in the file, from 1; 0 where a sample is no line of it."""

    def where(self) -> str:
        """``file:line`` as far as it is known, for error messages."""
        return f"{self.file}:{self.line}" if self.line else self.file


def digest_of_samples(samples: Iterable[Sample]) -> str:
    """Of tokens and labels, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(sample.input_ids, dtype="<i4").data)
        digest.update(np.ascontiguousarray(sample.labels, dtype="<i4").data)
    return digest.hexdigest()


class Problems:
    """Collects what is wrong with single lines, so that one run shows all of it."""

    def __init__(self) -> None:
        self.count = 0
        self._texts: list[str] = []

    def add(self, where: str, what: str) -> None:
        """Note one bad line; ``where`` is ``file:line``."""
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


def check_files(files: Sequence[str | Path]) -> list[Path]:
    """The paths, all of them existing, non-empty files; otherwise one `DataError` that names every other one."""
    paths = [Path(file) for file in files]
    wrong = [path for path in paths if not path.is_file() or not path.stat().st_size]
    if wrong or not paths:
        raise DataError("\n".join(map(_file_problem, wrong)) or "no data files given, expected at least one path")
    return paths


def _file_problem(path: Path) -> str:
    if not path.exists():
        return f"{path}: no such file"
    if not path.is_file():
        return f"{path}: found something else than a file (a folder?), expected the path of a file"
    return f"{path}: the file is empty"


def load_tokenizer(directory: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except BaseException as error:
        _refuse(directory, error)


def _refuse(directory: str | Path, error: BaseException) -> NoReturn:
    """`DataError` for what transformers or the tokenizers library raise about a tokenizer's files.

    A panic of the latter, which is written in Rust, is no `Exception`.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    why = " ".join(str(error).split())
    raise DataError(
        f"{directory}: expected a tokenizer (tokenizer.json, tokenizer_config.json) that transformers reads: {why}"
    ) from error


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of the fast tokenizer that adds nothing to the text, cuts nothing, and reports untrimmed offsets.

    The post-processor is what adds BOS and EOS, which a chat template writes by itself, and what reports " word" as if
    it began at the "w" (``trim_offsets``, in GPT-2-like tokenizers): a token that begins in the prompt would pass for
    one of the answer. The copy has none. The caller's tokenizer is left as it is.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise DataError(
            f"{type(tokenizer).__name__} reports no character offsets of its tokens, expected a fast tokenizer "
            "(a model directory with a tokenizer.json)"
        )
    try:
        copy = Tokenizer.from_str(backend.to_str())
    except BaseException as error:  # an added token may have taken the place of one that a merge names
        _refuse(tokenizer.name_or_path, error)
    copy.post_processor = None
    copy.no_truncation()
    copy.no_padding()
    return copy
