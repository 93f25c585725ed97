"""Texts to tokens with the characters that each stands for, a bounded number of characters at a time.

A tokenizer takes about 200 bytes of memory per character while it works, some 400 where its tokens are single
characters. So what is tokenized together is bounded, and a text that is far too long to be a sample is found out from
its beginning.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from data.jsonl import BadLineError
from data.samples import DataError, plain_backend
from data.template import Span, SpecialTexts

T = TypeVar("T")

TEXTS = 1024  # tokenized at a time: enough for all cores
CHARACTERS = 2**20  # tokenized at a time, where not one text alone is longer


class TokenizerError(DataError):
    """A tokenizer does not take a text."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text's tokens, and the characters ``[left, right)`` of each; `Encoding` builds both anew at every access."""

    ids: list[int]
    offsets: list[Span]


class OffsetTokenizer:
    """A fast tokenizer that adds nothing to a text.

    Args:
        tokenizer: the model's.
        spelled_as_text: take special tokens that people spelled out as the text that they are.

    Attributes:
        special: ids of the special tokens. What may end a turn is among them: ``<|im_end|>`` is a special token in
            Qwen's tokenizers even where EOS is another one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, spelled_as_text: bool = False) -> None:
        self.special = SpecialTexts(tokenizer).ids
        self._backend = plain_backend(tokenizer)
        self._as_text = None
        if spelled_as_text:
            self._as_text = plain_backend(tokenizer)
            self._as_text.encode_special_tokens = True

    def batch(self, texts: list[str]) -> Iterator[Tokens]:
        """The tokens of several texts, on all cores, special tokens that are spelled out kept.

        Raises:
            TokenizerError: one of them is refused.
        """
        with named_errors():
            return map(_tokens, self._backend.encode_batch(texts, add_special_tokens=False))

    def is_longer(self, text: str, tokens: int) -> bool:
        """Whether a text has more than ``tokens`` tokens for certain, seen without tokenizing all of a long one.

        The beginning of a text may have other tokens than the text, at its end, but not twice as many.
        """
        size = max(CHARACTERS, 8 * tokens)
        return len(text) > size and len(self.one(text[:size]).ids) > 2 * tokens

    def one(self, text: str, spelled: Sequence[Span] = ()) -> Tokens:
        """The tokens of a text. Raises TokenizerError as above, and BadLineError as below."""
        with named_errors():
            tokens = _tokens(self._backend.encode(text, add_special_tokens=False))
        return self.with_text(text, tokens, spelled)

    def with_text(self, text: str, tokens: Tokens, spelled: Sequence[Span]) -> Tokens:
        """The tokens of a text with the special tokens at ``spelled`` taken as text, if that is wanted.

        Between two special tokens a text is tokenized by itself, so only there it is tokenized anew.

        Raises:
            BadLineError: this tokenizer looks beyond special tokens.
        """
        theirs = set(self.spelled_at(tokens, spelled)) if self._as_text is not None else set()
        if not theirs:
            return tokens
        ids, offsets = list[int](), list[Span]()
        borders = [index for index, token in enumerate(tokens.ids) if token in self.special and index not in theirs]
        for first, end in pairwise([-1, *borders, len(tokens.ids)]):
            piece = Tokens(tokens.ids[first + 1 : end], tokens.offsets[first + 1 : end])
            if not theirs.isdisjoint(range(first + 1, end)):
                start = tokens.offsets[first][1] if first >= 0 else 0
                stop = tokens.offsets[end][0] if end < len(tokens.ids) else len(text)
                piece = self._as_text_alone(text[start:stop], start, piece.ids)
            ids += piece.ids + tokens.ids[end : end + 1]
            offsets += piece.offsets + tokens.offsets[end : end + 1]
        return Tokens(ids, offsets)

    def spelled_at(self, tokens: Tokens, spelled: Sequence[Span]) -> list[int]:
        """The indices of the special tokens that people spelled out: ``spelled`` says where, in order."""
        starts = [start for start, _ in spelled]

        def spelled_out(left: int, right: int) -> bool:
            before = bisect_left(starts, right)  # so many begin before this token ends
            return before > 0 and spelled[before - 1][1] > left

        return [
            index
            for index, (token, offsets) in enumerate(zip(tokens.ids, tokens.offsets, strict=True))
            if token in self.special and spelled_out(*offsets)
        ]

    def _as_text_alone(self, text: str, shift: int, expected: list[int]) -> Tokens:
        """What stands between two special tokens of the template, as text; ``expected``: its ids as it is now."""
        assert self._as_text is not None
        if self._backend.encode(text, add_special_tokens=False).ids != expected:
            raise BadLineError(
                "found a special token spelled out, and a tokenizer that does not tokenize by itself what stands "
                "between two special tokens, expected data.special_tokens keep or refuse"
            )
        return _tokens(self._as_text.encode(text, add_special_tokens=False), shift)


def in_groups(texts: Iterable[T], count: int, characters: int, length: Callable[[Any], int] = len) -> Iterator[list[T]]:
    """Texts in groups of at most ``count``, and of at most so many characters where not one alone has more."""
    group: list[T] = []
    total = 0
    for text in texts:
        if group and (len(group) == count or total + length(text) > characters):
            yield group
            group, total = [], 0
        group.append(text)
        total += length(text)
    if group:
        yield group


@contextmanager
def named_errors(where: str = "") -> Iterator[None]:
    """Turn what a tokenizer raises into `TokenizerError`."""
    try:
        yield
    except BaseException as error:  # where it panics, its error is no Exception
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        what = str(error) or type(error).__name__
        raise TokenizerError(f"{where}found text that the tokenizer does not take: {what}") from error


def _tokens(encoding: Encoding, shift: int = 0) -> Tokens:
    return Tokens(encoding.ids, [(left + shift, right + shift) for left, right in encoding.offsets])
