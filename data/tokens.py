"""Tokenize texts with character offsets, a bounded number of characters at a time.

A tokenizer takes about 200 bytes of memory per character while it works, some 400 if its tokens are single characters.
So batches are bounded, and a text that is far too long for a sample is detected from its beginning.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from data.files import DataError
from data.jsonl import BadLineError
from data.samples import plain_backend
from data.template import Span, SpecialTexts

T = TypeVar("T")

TEXTS_AT_ONCE = 1024  # tokenized at a time: enough for all cores
CHARACTERS = 2**20  # tokenized at a time, unless a single text is longer


class TokenizerError(DataError):
    """Error of a text that the tokenizer refuses."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text, and the characters ``[left, right)`` of each token. Both lists are copied once from
    `Encoding`, which rebuilds its lists at every access."""

    ids: list[int]
    offsets: list[Span]


class OffsetTokenizer:
    """Fast tokenizer that adds no special tokens to a text. With ``spelled_as_text`` special tokens that are spelled
    out in contents become plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, spelled_as_text: bool = False) -> None:
        self.special = SpecialTexts(tokenizer).ids
        """Ids of the special tokens, including end-of-turn tokens: ``<|im_end|>`` is a special token in Qwen's
        tokenizers even if EOS is another one."""
        self._backend = plain_backend(tokenizer)
        self._as_text = None
        if spelled_as_text:
            self._as_text = plain_backend(tokenizer)
            self._as_text.encode_special_tokens = True

    def batch(self, texts: list[str]) -> Iterator[Tokens]:
        """Tokenize several texts on all cores; spelled-out special tokens stay special. Raises TokenizerError if the
        tokenizer refuses a text."""
        with named_errors():
            return map(_tokens, self._backend.encode_batch(texts, add_special_tokens=False))

    def is_longer(self, text: str, tokens: int) -> bool:
        """Return True if a text certainly has more than ``tokens`` tokens, without tokenizing a long text completely.

        A prefix may be tokenized differently at its end, but never has more than twice the tokens of the whole text.
        """
        size = max(CHARACTERS, 8 * tokens)
        return len(text) > size and len(self.one(text[:size]).ids) > 2 * tokens

    def one(self, text: str, spelled: Sequence[Span] = ()) -> Tokens:
        """Tokenize a text. ``spelled`` are the ranges, in order, of the special tokens that messages contain as text.
        These become plain text if the class got ``spelled_as_text=True``; otherwise they stay special. Raises
        TokenizerError if the tokenizer refuses the text, and BadLineError as :meth:`with_text`."""
        with named_errors():
            tokens = _tokens(self._backend.encode(text, add_special_tokens=False))
        return self.with_text(text, tokens, spelled)

    def with_text(self, text: str, tokens: Tokens, spelled: Sequence[Span]) -> Tokens:
        """Retokenize the special tokens at ``spelled`` as plain text if the class got ``spelled_as_text=True``;
        otherwise return ``tokens``, the tokens of ``text``, unchanged.

        Text between two special tokens is tokenized independently, so only these ranges are tokenized again. Raises
        BadLineError if this tokenizer merges across special tokens.
        """
        theirs = set(self.spelled_at(tokens, spelled)) if self._as_text is not None else set()
        if not theirs:
            return tokens
        ids, offsets = list[int](), list[Span]()
        template_tokens = [
            index for index, token in enumerate(tokens.ids) if token in self.special and index not in theirs
        ]
        for first, end in pairwise([-1, *template_tokens, len(tokens.ids)]):
            piece = Tokens(tokens.ids[first + 1 : end], tokens.offsets[first + 1 : end])
            if not theirs.isdisjoint(range(first + 1, end)):
                start = tokens.offsets[first][1] if first >= 0 else 0
                stop = tokens.offsets[end][0] if end < len(tokens.ids) else len(text)
                piece = self._as_text_alone(text[start:stop], start, piece.ids)
            ids += piece.ids + tokens.ids[end : end + 1]
            offsets += piece.offsets + tokens.offsets[end : end + 1]
        return Tokens(ids, offsets)

    def spelled_at(self, tokens: Tokens, spelled: Sequence[Span]) -> list[int]:
        """Return the indices in ``tokens`` of special tokens that are in one of the ranges ``spelled``, in order."""
        starts = [start for start, _ in spelled]

        def spelled_out(left: int, right: int) -> bool:
            before = bisect_left(starts, right)  # number of spans that begin before this token ends
            return before > 0 and spelled[before - 1][1] > left

        return [
            index
            for index, (token, offsets) in enumerate(zip(tokens.ids, tokens.offsets, strict=True))
            if token in self.special and spelled_out(*offsets)
        ]

    def _as_text_alone(self, text: str, shift: int, expected: list[int]) -> Tokens:
        """Tokenize the text between two special tokens of the template as plain text, without special tokens.
        ``expected``: ids of this text inside the whole text. Raises BadLineError if the text alone has other ids."""
        assert self._as_text is not None
        if self._backend.encode(text, add_special_tokens=False).ids != expected:
            raise BadLineError(
                "found a special token spelled out, which cannot be made plain text, as this tokenizer's tokens "
                "between two special tokens depend on the text around them: remove it, or set data.special_tokens to "
                "keep"
            )
        return _tokens(self._as_text.encode(text, add_special_tokens=False), shift)


def in_groups(texts: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Group texts in order: at most `TEXTS_AT_ONCE` in a group, and the sum of their ``length`` at most `CHARACTERS`. A
    text that is longer has a group of its own."""
    group: list[T] = []
    total = 0
    for text in texts:
        if group and (len(group) == TEXTS_AT_ONCE or total + length(text) > CHARACTERS):
            yield group
            group, total = [], 0
        group.append(text)
        total += length(text)
    if group:
        yield group


@contextmanager
def named_errors(where: str = "") -> Iterator[None]:
    """Convert exceptions of a tokenizer inside the block to `TokenizerError`, with ``where`` (file and line) in the
    text."""
    try:
        yield
    except BaseException as error:  # a panic is not an Exception
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        what = str(error) or type(error).__name__
        raise TokenizerError(f"{where}found text that the tokenizer does not take: {what}") from error


def _tokens(encoding: Encoding, shift: int = 0) -> Tokens:
    return Tokens(encoding.ids, [(left + shift, right + shift) for left, right in encoding.offsets])
