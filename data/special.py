"""Special tokens that people spelled out: ``<|im_end|>`` in an answer, ``<s>`` in a question about HTML.

What a chat template writes is one text, and a tokenizer makes a control token of every place in it that reads like one,
whoever wrote that place. So a content can end a turn or begin another one. Here such places are found: every special
token in the conversation is exchanged for a plain word, the template writes the conversation once more, and where the
plain words stand is where people spelled a special token. All others are the template's own.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

SpecialTokens = Literal["keep", "text", "refuse"]
"""What becomes of a special token that is spelled out: it stays one, it becomes plain text, or the line is an error."""

Span = tuple[int, int]
"""Characters ``[start, end)`` of a text."""

_WORD = "deepqat5b1e{}z"
_WORDS = re.compile(_WORD.format("([0-9a-f]+)"))


class SpecialTexts:
    """The texts that a tokenizer takes for special tokens.

    Attributes:
        ids: of the special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ids = frozenset(special)
        # Of two that begin alike the longer one is meant.
        texts = sorted({token.content for token in special.values() if token.content}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def first_in(self, *values: Any) -> re.Match[str] | None:
        """The first special token in the strings of some JSON values, its keys too."""
        return next(filter(None, map(self._pattern.search, _strings(values))), None)

    def count_in(self, *values: Any) -> int:
        """How many special tokens the strings of some JSON values spell."""
        return sum(1 for text in _strings(values) for _ in self._pattern.finditer(text))

    def hidden(self, value: Any) -> Any:
        """A JSON value with a plain word in place of each special token that its strings spell."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _WORD.format(match[0].encode().hex()), value)
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(item) for key, item in value.items()}
        return [self.hidden(item) for item in value] if isinstance(value, list) else value


def shown_again(text: str) -> tuple[str, list[Span]]:
    """A text with the special tokens that `SpecialTexts.hidden` hid, and where these stand in it."""
    parts: list[str] = []
    spans: list[Span] = []
    length = end = 0
    for match in _WORDS.finditer(text):
        before, token = text[end : match.start()], bytes.fromhex(match[1]).decode()
        parts += (before, token)
        spans.append((length + len(before), length + len(before) + len(token)))
        length, end = spans[-1][1], match.end()
    return "".join([*parts, text[end:]]), spans


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """All strings of JSON values, keys of objects too. Not recursive: JSON from elsewhere may be nested deeply."""
    waiting = list(values)[::-1]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for key, item in reversed(value.items()):
                waiting += (item, key)
        elif isinstance(value, list):
            waiting += reversed(value)
