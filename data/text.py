"""Read plain text for language modeling: every token of the files is predicted once.

The files are tokenized, joined with the EOS token, and cut into contiguous blocks of ``block_length`` inputs. Labels
are the next tokens of the stream, so a block's last label is the next block's first input: of N tokens, N - 1 are
predicted, each exactly once. The last block may be shorter; it is kept (it has at least one input and one label), so
nothing is dropped. No BOS is added: a block begins anywhere, and blocks of training and evaluation should look alike.
"""

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from data.cache import ArrayWriter, TokenCache, digest
from data.files import DataError, check_files, opened
from data.samples import Bars, Flat, Samples, no_bar, plain_backend
from data.template import SpecialTexts, SpecialTokens
from data.tokens import named_errors

PIECE = 1 << 17  # characters: a whole file in one call would use one core, and some 200 bytes of memory per character
PIECES = max(8, len(os.sched_getaffinity(0)))  # tokenized in one call, on all cores
_CHUNK = 1 << 20  # bytes of a file read at a time
LONGEST = 1 << 26  # characters without a safe cut: some 13 GB of memory on every rank
WINDOW = 1 << 12  # most characters on each side of a cut that are tokenized together and apart
TRIES = 100  # cuts tried between words before the rest stays in one piece: a tokenizer may allow none
LINE_ENDS = re.compile(r"(?<=\S\n)(?=[^\W_])")
WORD_ENDS = re.compile(r"(?<=\S\n)(?=[^\W_])|(?<=[^\W_])(?= [^\W_])")


class TogetherError(DataError):
    """Error of a text that is too long to be tokenized as a whole, and cannot be cut (see :func:`split_text`)."""


def read_text(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    special_tokens: SpecialTokens = "keep",
    *,
    progress: Bars = no_bar,
    cache: TokenCache | None = None,
) -> Samples:
    """Read UTF-8 text files into blocks of ``block_length`` positions, in order. ``special_tokens``: treatment of
    special tokens that the files spell out (keep, text or refuse). ``cache`` keeps the tokens of each file. Raises
    DataError if a file is missing, empty or not UTF-8; if its text has a special token that is refused, fails in the
    tokenizer, or is long without a place to cut it; without an EOS to join files with; and below two tokens."""
    paths = check_files(files, plain=True)
    eos = tokenizer.eos_token_id
    if len(paths) > 1 and not isinstance(eos, int):
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no EOS token to join {len(paths)} files with, "
            "expected one: take another tokenizer, or a single file"
        )
    cache = cache or TokenCache()
    about = cache.about(tokenizer, {"kind": "text", "special_tokens": special_tokens}, chat=False)
    tokenize = _Tokenize(tokenizer, special_tokens, progress)
    eos_between, parts, digests = np.array([eos or 0], np.int32), list[np.ndarray](), list[dict[str, str]]()
    highest, spelled = eos or 0, 0
    ends = []  # of the files but the last, each with its EOS
    for index, path in enumerate(paths):
        if index:
            parts.append(eos_between)
            ends.append(sum(map(len, parts)))

        shard = cache.shard(path, about, {"tokens": "<i4"}, partial(tokenize, path))
        parts.append(shard.arrays["tokens"])
        digests.append(shard.digests)
        highest = max(highest, shard.facts["highest"])
        spelled += shard.facts["spelled"]
    parts = [part for part in parts if len(part)]
    length = sum(map(len, parts)) - 1
    if length < 1:
        raise DataError(
            f"{', '.join(map(str, paths))}: found {length + 1} tokens, expected at least 2 (one to predict)"
        )
    starts = np.arange(0, length, block_length)
    lengths = np.minimum(block_length, length - starts)
    return Samples(
        inputs=Flat([*parts[:-1], parts[-1][:-1]]),
        labels=Flat([parts[0][1:], *parts[1:]]),
        starts=starts,
        lengths=lengths,
        targets=lengths,
        lines=np.zeros(len(starts), np.int64),
        # A block belongs to the file of its first token; the EOS between two files belongs to the first of them.
        codes=np.searchsorted(ends, starts, side="right"),
        files=[str(path) for path in paths],
        highest=highest,
        key=digest([digests, eos, block_length]),
        cache=cache,
        spelled=spelled,
    )


class _Tokenize:
    """Callable that tokenizes a file and writes its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special_tokens: SpecialTokens, progress: Bars) -> None:
        self._tokenizer, self._special_tokens, self._progress = tokenizer, special_tokens, progress

    @cached_property
    def _backend(self) -> Tokenizer:
        backend = plain_backend(self._tokenizer)
        backend.encode_special_tokens = self._special_tokens == "text"
        return backend

    def __call__(self, path: Path, out: ArrayWriter) -> dict[str, Any]:
        """Write a file's tokens; return the facts: the highest id, and the number of special tokens."""
        special = SpecialTexts(self._tokenizer)
        if self._special_tokens == "refuse":
            _refuse_special_tokens(path, self._backend, special)
        pieces, highest, spelled, ids_of_special = _pieces(path, self._backend), 0, 0, list(special.ids)
        with self._progress(path.stat().st_size, path.name, "B") as bar:
            while group := list(islice(pieces, PIECES)):
                with named_errors(f"{path}: "):
                    encodings = self._backend.encode_batch_fast(group, add_special_tokens=False)
                for encoding in encodings:
                    out.add(tokens=(ids := np.array(encoding.ids, np.int32)))
                    highest = max(highest, int(ids.max(initial=0)))
                    spelled += int(np.isin(ids, ids_of_special).sum())
                bar.update(sum(len(piece.encode()) for piece in group))
        return {"highest": highest, "spelled": spelled}


def _refuse_special_tokens(path: Path, backend: Tokenizer, special: SpecialTexts) -> None:
    """Raise DataError if a file spells out a special token."""
    line = 1
    for piece in _pieces(path, backend):
        if token := special.first_in(piece):
            raise DataError(
                f"{path}:{line + piece.count(chr(10), 0, token.start())}: found the special token {token[0]!r} "
                "spelled out, expected none: remove it, or set data.special_tokens to keep or text"
            )
        line += piece.count("\n")


def _pieces(path: Path, backend: Tokenizer) -> Iterator[str]:
    """Yield the file's text in pieces, with only a few in memory. No piece ends inside a special token. Raises
    DataError if the text is not UTF-8, or is long without a place to cut it."""
    try:
        yield from split_text(_texts(path), backend, PIECE)
    except TogetherError as error:
        raise DataError(f"{path}: {error}") from None


def _texts(path: Path) -> Iterator[str]:
    # utf-8-sig: a byte order mark is no text. Decoded from bytes: text mode would change the newlines.
    decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
    with opened(path) as (file, _):
        for raw in chain(iter(lambda: file.read(_CHUNK), b""), [b""]):
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise DataError(
                    f"{path}:{line}: found bytes that are not UTF-8 ({error.reason}), expected UTF-8 text"
                ) from error
            line += text.count("\n")
            yield text


def split_text(texts: Iterable[str], backend: Tokenizer, size: int) -> Iterator[str]:
    """Cut a text, given in parts, into pieces of at least ``size`` characters that tokenize as the whole text does.

    Cuts between a newline and a following letter or digit, or, if no line ends within twice ``size``, between a word
    and the space after it: there, common pre-tokenizers split too. A cut is made only if the text around it tokenizes
    to the same ids as a whole and in two parts. Tokenizers that add a prefix to every text fail this test, so the text
    is not cut. Raises TogetherError if more than `LONGEST` characters would stay in one piece.
    """
    held, start = "", 0
    for text in chain(texts, [None]):
        held, start = held[max(start - WINDOW, 0) :] + (text or ""), min(start, WINDOW)
        while (cut := _next_cut(held, start, size, backend, last=text is None)) is not None:
            yield held[start:cut]
            start = cut
        if len(held) - start > LONGEST:
            raise TogetherError(
                f"found {len(held) - start:,} characters that can only be tokenized together, as they have no words or "
                f"this tokenizer allows no cut, expected at most {LONGEST:,}: split the text into several files"
            )
    yield held[start:]


def _next_cut(text: str, start: int, size: int, backend: Tokenizer, *, last: bool) -> int | None:
    """Find the end of the piece that begins at ``start``: at least ``size`` characters later, and such that the pieces
    have the tokens of the whole text. Return None if ``text`` has no such place. ``last``: no more text follows."""
    known = len(text) if last else len(text) - WINDOW
    if known < start + 2 * size and not last:
        return None
    line_ends = LINE_ENDS.finditer(text, start + size, start + 2 * size)
    for match in chain(line_ends, islice(WORD_ENDS.finditer(text, start + 2 * size), TRIES)):
        if match.start() > known:
            return None
        if _same_apart(text, match.start(), backend):
            return match.start()
    return None


def _same_apart(text: str, cut: int, backend: Tokenizer) -> bool:
    begin = max(text.rfind("\n", 0, cut - 1) + 1, cut - WINDOW)
    end = min(text.find("\n", cut) + 1 or len(text), cut + WINDOW)
    left, right, both = (
        backend.encode(part, add_special_tokens=False).ids for part in (text[begin:cut], text[cut:end], text[begin:end])
    )
    return left + right == both
