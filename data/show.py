"""Show samples as text in which the targets are marked, from the token ids that training uses.

The text is cut where targets begin or end, and each part is decoded from the bytes of its own tokens. A byte-level
tokenizer may cut a character (an emoji has four bytes) at such a place, or where a sample begins or ends. The bytes of
such a character are shown as ``\\xf0\\x9f`` in both parts, so that the parts together are always the whole text.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

from data.samples import IGNORE, Sample, Samples, plain_backend, samples_of

Split = Literal["train", "skip", "held_out", "eval"]
USES: dict[Split, str] = {
    "train": "to train on",
    "skip": "named in data.skip, of which nothing is learned",
    "held_out": "held out by data.held_out to evaluate on, never trained on",
    "eval": "of data.eval to evaluate on, never trained on",
}
COLOR, END_OF_COLOR = "\x1b[30;42m", "\x1b[0m"  # the background, so that spaces are seen too
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in vocabularies of SentencePiece


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of consecutive tokens: either all are targets, or none is."""

    text: str
    target: bool
    cut: bool
    """True if the part has bytes of a character that is not whole in it."""


class Detokenizer:
    """Decode samples to text, special tokens included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = plain_backend(tokenizer)
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._byte_of = _byte_names() if "ByteLevel" in repr(self._backend.decoder) else {}

    def parts(self, sample: Sample) -> list[Segment]:
        """Return a sample's whole text in parts: its inputs, and the last target, which is only predicted."""
        ids, labels = sample.input_ids.tolist(), sample.labels.tolist()
        ids += [labels[-1]] * (labels[-1] != IGNORE)
        learned = [False, *(label != IGNORE for label in labels)][: len(ids)]
        assert all(label in (IGNORE, token) for label, token in zip(labels, ids[1:], strict=False)), sample.where()
        parts, start = list[Segment](), 0
        for target, run in groupby(learned):
            end = start + len(list(run))
            found = self._bytes(ids, start, end)
            text = found.decode("utf-8", "backslashreplace")
            parts.append(Segment(text, target, cut=text.encode() != found))
            start = end
        return parts

    def _bytes(self, ids: list[int], start: int, end: int) -> bytes:
        """Return the bytes of some tokens of a sample."""
        if self._byte_of:
            return b"".join(map(self._bytes_of, ids[start:end]))
        found = b""
        for byte, group in groupby(range(start, end), key=lambda index: self._byte(ids[index])):
            places = list(group)
            found += bytes([byte]) * len(places) if byte is not None else self._text(ids, places[0], places[-1] + 1)
        return found

    def _bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token of a byte-level tokenizer; added tokens are stored in the vocabulary as plain
        text."""
        name = self._backend.id_to_token(token) or ""
        known = token not in self._added and all(character in self._byte_of for character in name)
        return bytes(self._byte_of[character] for character in name) if known else name.encode()

    def _byte(self, token: int) -> int | None:
        match = _BYTE.fullmatch(self._backend.id_to_token(token) or "")
        return int(match[1], 16) if match else None

    def _text(self, ids: list[int], start: int, end: int) -> bytes:
        """Return the bytes of the tokens ``[start, end)``. The preceding token is decoded with them, because decoding
        drops the space of a text's first token."""
        before = ids[max(start - 1, 0) : start]
        known = len(self._backend.decode(before, skip_special_tokens=False))
        return self._backend.decode(before + ids[start:end], skip_special_tokens=False)[known:].encode()


def _byte_names() -> dict[str, int]:
    """Map the characters in byte-level vocabularies to bytes: printable ones are themselves, the others follow."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [name for name in names if ord(name) < 256]
    others = sorted({*range(256)} - {ord(name) for name in own})
    return {name: ord(name) for name in own} | dict(zip(names[len(own) :], others, strict=True))


def first_rows(samples: Samples, rows: int | None) -> Iterator[tuple[str, Samples, Samples]]:
    """Yield each file that has samples, all its samples, and the first ``rows`` of them (all if None)."""
    for code, file in enumerate(samples.files):
        if len(indices := np.flatnonzero(samples.codes == code)):
            its_own = samples.take(indices)
            yield file, its_own, its_own[:rows]


def described(
    splits: dict[Split, Samples], decoder: Detokenizer, rows: int | None, *, color: bool = False
) -> Iterator[str]:
    """Yield texts to print: for each file the numbers of samples, tokens and targets, then its first ``rows`` samples
    (all if None). Targets are marked, with ``color`` by a color instead of brackets. ``splits``: samples by use."""
    blocks: list[tuple[str, list[Segment]]] = []
    for split, samples in splits.items():
        for file, its_own, shown in first_rows(samples, rows):
            count = f"{len(its_own):,} sample{'s' * (len(its_own) != 1)}"
            blocks.append((f"{file}: {count} {USES[split]}: {_numbers(its_own)}", []))
            for sample in shown:
                parts = decoder.parts(sample)
                cut = r"; \x.. are bytes of a character that is cut in two" * any(part.cut for part in parts)
                blocks.append((f"--- {sample.where()}: {_numbers(samples_of([sample]))}{cut}", parts))
    before, after = (COLOR, END_OF_COLOR) if color else _marks([part.text for _, parts in blocks for part in parts])
    if any(parts for _, parts in blocks):
        marked = "colored text" if color else f"text between {before} and {after}"
        yield f"The model learns to write the {marked}: the targets"
    for head, parts in blocks:
        yield "\n" * (not parts) + head
        if parts:
            text = (before + _printable(part.text) + after if part.target else _printable(part.text) for part in parts)
            yield "".join(text)


def _numbers(samples: Samples) -> str:
    """Format the numbers of tokens and targets."""
    return f"{samples.lengths.sum():,} tokens, {samples.targets.sum():,} of them targets"


def _marks(texts: Sequence[str]) -> tuple[str, str]:
    """Return an opening and a closing mark of two or more brackets, more than any of the texts has in a row."""
    count = 2
    while any(bracket * count in text for text in texts for bracket in "[]"):
        count += 1
    return "[" * count, "]" * count


def _printable(text: str) -> str:
    """Escape characters that are invisible, control the terminal, or are missing in the terminal's encoding."""
    seen = (one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)
    encoding = sys.stdout.encoding or "utf-8"
    return "".join(seen).encode(encoding, "backslashreplace").decode(encoding)
