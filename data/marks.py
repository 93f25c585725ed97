"""Mark an author's strings in a turn, to find them in what a chat template writes.

A mark is a word that stands for a string while a template renders the turn. If the text that a template writes is the
marked one with every mark replaced by its string, the places of all strings in it are known, and the rest is the
template's own. See `data.template`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MARK = "deepqat{:06}mark"
REASONING, CONTENT, NAME, ARGUMENT, TOOL = "reasoning_content", "content", "call of", "argument", "tool"
TEXTS = (REASONING, CONTENT)
NUMBER = 73_195_000_000
_MARKS = re.compile(r"deepqat\d{6}mark|73195\d{6}(?:\.0)?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A mark, or the string that it stands for: characters ``[start, end)`` of a text."""

    mark: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Marked:
    """A text with marks."""

    text: str
    pieces: list[Piece]

    def behind(self) -> str:
        """Return the text behind the last mark; empty without marks."""
        return self.text[self.pieces[-1].end :] if self.pieces else ""

    def literal(self, start: int, end: int) -> str:
        """Return characters ``[start, end)`` without the marks in them."""
        inside = [piece for piece in self.pieces if start <= piece.start < end]
        edges = [start, *(edge for piece in inside for edge in (piece.start, piece.end)), end]
        return "".join(self.text[left:right] for left, right in zip(edges[::2], edges[1::2], strict=True))


class Marks:
    """Marks of one turn, or of several.

    Args:
        tags: divide the content at these matches, and leave them as they are; None marks the content as a whole.

    Attributes:
        forms: the forms in which a template may write a mark's string: as it is, or escaped in JSON.
        kinds: the part of a turn that a mark's string is, and the turn's index.
        parts: the content's marks and tags, in order.
    """

    def __init__(self, tags: re.Pattern[str] | None = None) -> None:
        self._tags = tags
        self._escaped = False
        self.forms: dict[str, tuple[str, ...]] = {}
        self.kinds: dict[str, tuple[str, int]] = {}
        self._index = -1
        self.parts: list[str] = []

    def turn(self, turn: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a turn with marks in place of its strings. Blank strings stay, and whitespace around others."""
        marked, self._index, self._escaped = dict(turn), index, turn["role"] == "tool"
        if "reasoning_content" in turn:
            marked["reasoning_content"] = self._string(turn["reasoning_content"], REASONING)
        if isinstance(turn["content"], list):
            marked["content"] = [{**part, "text": self._content(part["text"])} for part in turn["content"]]
        elif turn["content"]:
            marked["content"] = self._content(turn["content"])
        if "tool_calls" in turn:
            marked["tool_calls"] = [self._call(call) for call in turn["tool_calls"]]
        return marked

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Return a function schema with a mark in place of its name."""
        function = tool.get("function", tool)
        named = {**function, "name": self._string(function["name"], TOOL)}
        return {**tool, "function": named} if "function" in tool else named

    def find(self, marked: str, text: str) -> list[Piece] | None:
        """Find the strings in a text; None if it is not the marked text with every mark replaced by its string."""
        pieces = []
        at = end = 0
        for mark in self.marked(marked).pieces:
            before = marked[at : mark.start]
            start = end + len(before)
            form = next((form for form in self.forms[mark.mark] if text.startswith(form, start)), None)
            if form is None or not text.startswith(before, end):
                return None
            at, end = mark.end, start + len(form)
            pieces.append(Piece(mark.mark, start, end))
        return pieces if text[end:] == marked[at:] else None

    def marked(self, text: str) -> "Marked":
        """Return a text with the places of the marks in it."""
        return Marked(text, [Piece(m[0], *m.span()) for m in _MARKS.finditer(text) if m[0] in self.forms])

    def content_in(self, pieces: list[Piece], text: str) -> tuple[int, int] | None:
        """Return the range of the content with its tags; None if a tag is missing, or more than whitespace beside one.

        Parts in front may be missing: they are thinking that the template leaves out.
        """
        found = [piece for piece in pieces if piece.mark in self.parts]
        if not found:
            return 0, 0
        first = next(part for part in self.parts if part in self.forms)
        parts = self.parts if found[0].mark == first else self.parts[self.parts.index(found[0].mark) :]
        written = re.compile(r"\s*".join(re.escape(self.forms.get(part, (part,))[0]) for part in parts))
        left, right = found[0].start, found[-1].end
        return next((m.span() for m in written.finditer(text) if m.start() <= left and m.end() >= right), None)

    def _content(self, text: str) -> str:
        tags = [] if self._tags is None else list(self._tags.finditer(text))
        result, at = "", 0
        for tag in tags:
            result += self._part(text[at : tag.start()]) + tag[0]
            self.parts.append(tag[0])
            at = tag.end()
        return result + self._part(text[at:])

    def _part(self, text: str) -> str:
        marked = self._string(text, CONTENT)
        if text.strip():
            self.parts.append(marked.strip())
        return marked

    def _string(self, text: str, kind: str) -> str:
        core = text.strip()
        if not core:
            return text
        mark = MARK.format(len(self.forms))
        self.forms[mark] = tuple(dict.fromkeys(_escaped(core))) if kind == ARGUMENT or self._escaped else (core,)
        self.kinds[mark] = kind, self._index
        left = text.index(core)
        return text[:left] + mark + text[left + len(core) :]

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        name = self._string(function["name"], NAME)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            marked: Any = json.dumps(self._value(json.loads(arguments)), ensure_ascii=False)
        else:
            marked = self._value(arguments)
        return {**call, "function": {**function, "name": name, "arguments": marked}}

    def _value(self, value: Any) -> Any:
        """Mark strings, numbers and keys. Marks of keys are in the order of the keys, by which a template may sort."""
        if isinstance(value, str):
            return self._string(value, ARGUMENT)
        if isinstance(value, dict):
            keys = {key: self._string(key, ARGUMENT) for key in sorted(value, key=str.lower)}
            return {keys[key]: self._value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value:
            return value
        number = type(value)(NUMBER + len(self.forms))
        self.forms[str(number)] = (str(value),)
        self.kinds[str(number)] = ARGUMENT, self._index
        return number


def _escaped(text: str) -> Iterator[str]:
    """Yield a string's forms, longest first: in JSON in JSON, in JSON, in quotes of Python's, as it is."""
    for ascii_only in (True, False):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield json.dumps(once, ensure_ascii=ascii_only)[1:-1]
        yield once
    yield repr(text)[1:-1]
    yield text
