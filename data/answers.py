"""Locate the assistant's turns in the output of a chat template.

The whole conversation is rendered once, and that text is trained on. To find a turn in it, the conversation is rendered
again with a unique word, a *mark*, in place of each string of the turn: its content, its reasoning, the names, keys and
values of its tool calls. If every mark is replaced by its string, the second rendering must equal the first. So it is
known which characters of the turn come from the data and which from the template, and a template that changes, repeats
or omits a string is refused.

- **Content with thinking.** A template may divide the content at tags (``<think>``, ``</think>``) and write the parts
  at different places. Then each part between such tags (those in the template's source) gets a mark, and the whitespace
  beside the tags may differ.
- **Beginning.** A turn begins where the preceding conversation, rendered with the generation prompt, ends: that is the
  model's input in serving. If the whole rendering does not begin with that text, the template writes the context or the
  beginning of a turn differently in serving: it strips the thinking of earlier turns, or opens ``<think>`` only in the
  generation prompt. Then only the text after the preceding turn is compared, and the turn begins after the words and
  tags that it shares with the generation prompt.
- **End.** A turn ends with its end-of-turn token: the first special token after its last string, or an adjacent one if
  generation stops only there (``<|end|>\\n<|endoftext|>``). Later text (an EOS after the conversation, the next turn's
  header) is not part of the turn. If a template writes that token only when no turn follows, the targets of an earlier
  answer end before it.

The template must write all strings of the last turn. It may omit reasoning or content of an earlier turn when later
turns follow, as in serving (`Answer.cut`). Words that it writes inside a turn only when later turns follow are refused.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from data.jsonl import BadLineError, Conversation, Turn
from data.template import MARKER, Span, Template, any_of, is_blank, plain, shown_again

LossOn = Literal["last", "all"]

REASONING, CONTENT, NAME, ARGUMENT, TOOL = "reasoning_content", "content", "call of", "argument", "tool"
TEXTS = (REASONING, CONTENT)
MARK, NUMBER = "deepqat{:06}mark", 73_195_000_000
_MARKS = re.compile(r"deepqat\d{6}mark|73195\d{6}(?:\.0)?")
_WORDS = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\w+|\s+|.")
_SPACE = re.compile(r"\s*")
NO_TAGS = any_of([])


@dataclass(frozen=True, slots=True)
class Answer:
    """Assistant turn: characters ``[start, end)`` of the text."""

    start: int
    end: int
    by_content: bool
    """The text in front of it is not the model's input in serving."""
    cut: bool
    """The template leaves out a part of it because other turns follow."""
    unindented: bool = False
    """The template leaves out the spaces before its first word, as of code."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Rendered conversation, and the assistant turns to train on, in order."""

    text: str
    answers: list[Answer]
    spelled: list[Span] = field(default_factory=list)
    """Positions of special tokens spelled out in contents, in order."""
    unplaced: int = 0
    """Number of further spelled-out tokens, if the template renders a content differently without them."""
    behind: int = 0
    """Number of turns behind the last answer to train on."""
    passed: int = 0
    """Number of assistant turns that are not learned because they are empty or open the conversation."""


def render(template: Template, conversation: Conversation, loss_on: LossOn) -> Rendering:
    """Render a conversation that ends with an assistant turn, and locate the turns to train on.

    These are the last assistant turn, or with ``loss_on="all"`` every assistant turn, except turns flagged as not
    learned. A turn without text and tool calls has no content to train on, and a turn that opens the conversation has
    no prompt: both are skipped. If no turn is left, the rendering is empty. Raises BadLineError if the template refuses
    the conversation, changes or omits a part of it, or a turn cannot be located exactly.
    """
    turns = [template.formatted(message.turn) for message in conversation.messages]
    wanted = [
        i
        for i, (turn, message) in enumerate(zip(turns, conversation.messages, strict=True))
        if turn["role"] == "assistant" and message.learned is not False and (loss_on == "all" or i == len(turns) - 1)
    ]
    chosen = [i for i in wanted if i and not is_blank(turns[i])]
    if not chosen:
        return Rendering("", [])
    writing = _Writing(template, turns, conversation)
    writing.check_context(chosen)
    answers = [writing.answer(i) for i in chosen]
    for one, other in pairwise(answers):
        if one.end > other.start:
            raise BadLineError(
                "found a chat template that mixes assistant turns, expected one turn after the other: correct the "
                "template"
            )
    behind = len(turns) - 1 - chosen[-1]
    return Rendering(writing.text, answers, *writing.spelled(), behind, len(wanted) - len(chosen))


def render_prompt(template: Template, conversation: Conversation) -> Rendering:
    """Render a conversation with the generation prompt, as a server does. The result has one empty answer at the end; a
    conversation without turns results in no text and no answer. Raises BadLineError if the template refuses the
    conversation, or omits a part of it."""
    turns = [template.formatted(message.turn) for message in conversation.messages]
    if not turns:
        return Rendering("", [])
    writing = _Writing(template, turns, conversation, prompt=True)
    writing.check_context([])
    end = len(writing.text)
    return Rendering(writing.text, [Answer(end, end, by_content=False, cut=False)], *writing.spelled())


# ---- marks


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Location of a mark (a unique word), or of the string that it replaces: characters ``[start, end)`` of a text."""

    mark: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Marked:
    """A rendered text with marks (unique words in place of a turn's strings), and the locations of the marks."""

    text: str
    pieces: list[Occurrence]

    def behind(self) -> str:
        """Return the text after the last mark; empty without marks."""
        return self.text[self.pieces[-1].end :] if self.pieces else ""

    def literal(self, start: int, end: int) -> str:
        """Return characters ``[start, end)`` without the marks in them."""
        inside = [piece for piece in self.pieces if start <= piece.start < end]
        edges = [start, *(edge for piece in inside for edge in (piece.start, piece.end)), end]
        return "".join(self.text[left:right] for left, right in zip(edges[::2], edges[1::2], strict=True))


class Marks:
    """Marks, unique words that replace the strings of one or several turns to locate them in rendered text. ``tags``
    is a pattern of tags at which the content is divided, and which get no mark."""

    def __init__(self, tags: re.Pattern[str] = NO_TAGS) -> None:
        self._tags = tags
        self._escaped = False
        self._index = -1
        self.forms: dict[str, tuple[str, ...]] = {}
        """The forms in which a template may write each mark's string: unchanged, or escaped in JSON."""
        self.kinds: dict[str, tuple[str, int]] = {}
        """For each mark, the part of a turn that it replaces (content, reasoning, ...), and the turn's index."""
        self.parts: list[str] = []
        """The content's marks and tags, in order."""
        self.unlike: str | None = None
        """The first mark whose string the last call of `find` missed; None if it found all."""

    def turn(self, turn: Turn, index: int) -> Turn:
        """Return a turn with marks in place of its strings; blank strings, and whitespace around strings, do not
        change."""
        marked, self._index, self._escaped = dict(turn), index, turn["role"] == "tool"
        if REASONING in turn:
            marked[REASONING] = self._string(turn[REASONING], REASONING)
        if isinstance(turn[CONTENT], list):
            marked[CONTENT] = [{**part, "text": self._content(part["text"])} for part in turn[CONTENT]]
        elif turn[CONTENT]:
            marked[CONTENT] = self._content(turn[CONTENT])
        if "tool_calls" in turn:
            marked["tool_calls"] = [self._call(call) for call in turn["tool_calls"]]
        return marked

    def tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Return a function schema with a mark (a unique word) in place of its name."""
        function = tool["function"]
        return {**tool, "function": {**function, "name": self._string(function["name"], TOOL)}}

    def marked(self, text: str) -> _Marked:
        """Find the marks in a text; return the text with their locations."""
        return _Marked(text, [Occurrence(m[0], *m.span()) for m in _MARKS.finditer(text) if m[0] in self.forms])

    def find(self, marked: str, text: str) -> list[Occurrence] | None:
        """Return where the marks' strings are in ``text``, in order; None unless ``text`` equals ``marked`` with every
        mark replaced by its string."""
        self.unlike = next((mark for mark in self.forms if mark not in marked), None)
        pieces = []
        at = end = 0
        for mark in self.marked(marked).pieces:
            before = marked[at : mark.start]
            start = end + len(before)
            form = next((form for form in self.forms[mark.mark] if text.startswith(form, start)), None)
            if form is None or not text.startswith(before, end):
                self.unlike = mark.mark if text.startswith(before, end) else self.unlike
                return None
            at, end = mark.end, start + len(form)
            pieces.append(Occurrence(mark.mark, start, end))
        return pieces if text[end:] == marked[at:] else None

    def content_end(self, pieces: list[Occurrence], text: str) -> int | None:
        """Return the index in ``text`` after the last of ``parts`` (the marks of the content, and the template's tags
        around them); 0 if ``pieces``, the result of `find` for ``text``, have no mark of the content.

        Return None if ``text`` lacks a part, or has more than whitespace between two. Only the first parts may be
        missing: templates omit the thinking of earlier turns.
        """
        found = [piece for piece in pieces if piece.mark in self.parts]
        if not found:
            return 0
        first = self.parts.index(found[0].mark)
        if self.forms.keys().isdisjoint(self.parts[:first]):  # only tags are in front of the first mark
            before = text[: found[0].start] if first else ""
            for tag in reversed(self.parts[:first]):
                if not before.rstrip().endswith(tag):
                    return None
                before = before.rstrip().removesuffix(tag)
        end = found[0].end
        for part in self.parts[first + 1 :]:
            string, space = self.forms.get(part, (part,))[0], _SPACE.match(text, end)
            if space is None or not text.startswith(string, space.end()):
                return None
            end = space.end() + len(string)
        return end if end >= found[-1].end else None

    def _content(self, text: str) -> str:
        result, at = "", 0
        for tag in self._tags.finditer(text):
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
        return text.replace(core, mark, 1)

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
        """Replace strings, numbers and keys of a JSON value by marks. Marks of keys sort like the keys, as a template
        may sort by key."""
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
    """Yield the forms in which a template may write a string, longest first: JSON inside of JSON, JSON, Python's repr,
    unchanged."""
    for ascii_only in (True, False):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        yield json.dumps(once, ensure_ascii=ascii_only)[1:-1]
        yield once
    yield repr(text)[1:-1]
    yield text


# ---- turns


@dataclass(frozen=True, slots=True)
class _Found:
    """Location of a turn: its strings in the rendering of the whole conversation, and its marks (words in their place)
    in the rendering that ends with this turn."""

    pieces: list[Occurrence]
    end: int
    """Character behind the last string."""
    alone: _Marked
    kept: list[Occurrence]
    """The marks of the pieces in ``alone``, which may have more."""


class _Writing:
    """One conversation and its renderings by the chat template, in which turns are located."""

    def __init__(
        self, template: Template, turns: list[Turn], conversation: Conversation, *, prompt: bool = False
    ) -> None:
        self.template = template
        self.prompt = prompt
        self.turns = turns
        self.tools = conversation.tools
        self.variables = conversation.variables
        self.text = self._write(turns, add_generation_prompt=prompt)
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:  # in tools or tool calls, whose strings are not checked before
            raise BadLineError(
                f"found half of a surrogate pair at character {error.start} of what the template writes, expected text"
            ) from error

    def _write(self, turns: list[Turn], *, add_generation_prompt: bool = False) -> str:
        return self.template.write(turns, self.tools, self.variables, add_generation_prompt=add_generation_prompt)

    def spelled(self) -> tuple[list[Span], int]:
        """Return the positions of special tokens that the conversation spells out, and 0; or no positions and their
        number, if they cannot be located."""
        special, conversation = self.template.special, [self.turns, self.tools, self.variables]
        if special.first_in(*conversation) is None:
            return [], 0
        try:
            hidden = self.template.write(*special.hidden(conversation), add_generation_prompt=self.prompt)
            text, spans = shown_again(hidden)
            if text == self.text:
                return spans, 0
        except (BadLineError, RecursionError):  # a template may search for a special token that was replaced
            pass
        return [], special.count_in(*conversation)

    def check_context(self, learned: list[int]) -> None:
        """Raise BadLineError if the template omits a tool or a turn that is not trained on, as the answers may depend
        on them, or repeats a tag of such a turn. ``learned`` are the indices of the turns that are trained on.

        A template may omit reasoning, and the content of earlier turns with tool calls, which often is reasoning.
        """
        marks = Marks()
        tools = [marks.tool(tool) for tool in self.tools or ()]
        turns = [turn if index in learned else marks.turn(turn, index) for index, turn in enumerate(self.turns)]
        needed = {
            mark: marks.forms[mark]
            for mark, (kind, index) in marks.kinds.items()
            if kind in (NAME, TOOL) or (kind == CONTENT and "tool_calls" not in self.turns[index])
        }
        try:
            text = self.template.write(turns, tools or None, self.variables)
            pieces = marks.marked(text).pieces
            written = {piece.mark for piece in pieces}
        except BadLineError:  # a template may look for a name among the tools
            pieces, strings = [], [forms[-1] for forms in needed.values()]
            if len(self.turns) - 1 in learned:
                strings += [plain(self.turns[-1][CONTENT]), self.turns[-1].get(REASONING, "")]
            written = {
                mark
                for mark, forms in needed.items()
                if sum(map(self.text.count, forms)) >= sum(string.count(forms[-1]) for string in strings)
            }
        if missing := [mark for mark in needed if mark not in written]:
            raise self._omitted(marks, missing[0])
        for piece in pieces:
            tag, (kind, index) = self.template.tags.match(marks.forms[piece.mark][-1]), marks.kinds[piece.mark]
            counted = tag and tag[0] in self.template.special.texts  # where special tokens are spelled
            if tag and not counted and kind == CONTENT and text[: piece.start].rstrip().endswith(tag[0]):
                raise _repeated(index, tag[0])

    def answer(self, index: int) -> Answer:
        """Locate assistant turn ``index`` in the rendered text. Raises BadLineError if it cannot be located exactly, or
        if generation would stop inside it."""
        found = self._found(index)
        for piece in found.pieces:
            tag = self.template.tags.match(self.text, piece.start, piece.end)
            special = tag and tag[0] in self.template.special.texts
            if tag and not special and self.text[: piece.start].rstrip().endswith(tag[0]):
                raise _repeated(index, tag[0])
        prompt = self._write(self.turns[:index], add_generation_prompt=True)
        exact = self.text.startswith(prompt)
        start = self._behind_prompt(index, found, prompt) if exact else self._behind_turn_before(index)
        stop, end = self._end(index, found)
        edges = [start, *(edge for piece in found.pieces for edge in (piece.start, piece.end)), stop]
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            if early := self.template.ends.first_stop(self.text[left:right]):
                raise BadLineError(
                    f"found {self.text[left:right][slice(*early)]!r}, at which generation stops, before the last part "
                    f"of turn {index} (assistant), expected it after the turn: correct the chat template or the turn"
                )
        content = plain(self.turns[index][CONTENT])
        core = content.lstrip()
        indent = content[: len(content) - len(core)].rpartition("\n")[2]
        unindented = bool(core and indent) and indent + core.splitlines()[0] not in self.text[start:end]
        return Answer(
            start, end, by_content=not exact, cut=len(found.kept) < len(found.alone.pieces), unindented=unindented
        )

    def _found(self, index: int) -> _Found:
        """Find a turn's strings in the whole rendering: all of them for the last turn, those that the template writes
        for an earlier turn."""
        before, after = self.turns[:index], self.turns[index + 1 :]
        for tags in (NO_TAGS, self.template.tags):
            marks = Marks(tags)
            try:
                turn = marks.turn(self.turns[index], index)
                whole = self._write([*before, turn, *after])
                alone = marks.marked(self._write([*before, turn]) if after else whole)
            except BadLineError:  # a template may ask for a part of a content
                continue
            pieces = marks.find(whole, self.text)
            if pieces is None:
                continue
            pieces, kept = self._of_turn(marks, pieces, alone, index)
            content_end = marks.content_end(pieces, self.text)
            if content_end is not None:
                return _Found(pieces, max(pieces[-1].end, content_end), alone, kept)
        raise self._changed(index, marks)

    def _of_turn(
        self, marks: Marks, pieces: list[Occurrence], alone: _Marked, index: int
    ) -> tuple[list[Occurrence], list[Occurrence]]:
        """Check that the template writes a turn's strings once and in order; return the locations of strings and of
        marks.

        Names and keys of tool calls may be repeated, also after the turn, like a function's name beside its result.
        """
        counts = Counter(piece.mark for piece in alone.pieces)
        written = {piece.mark for piece in pieces}
        for mark, (kind, _) in marks.kinds.items():
            if not counts[mark] or (mark not in written and kind not in TEXTS):
                raise self._omitted(marks, mark)
            if counts[mark] > 1 and kind in TEXTS:
                raise self._otherwise(index, f"{marks.forms[mark][-1][:60]!r} {counts[mark]} times")
        kept = [piece for piece in alone.pieces if piece.mark in written]
        pieces = pieces[: len(kept)]
        in_order = [piece.mark for piece in pieces] == [piece.mark for piece in kept]
        if not (kept and in_order and kept[-1] == alone.pieces[-1]):
            raise self._otherwise(index, "parts in another order if later turns follow")
        for (one, other), (left, right) in zip(pairwise(pieces), pairwise(kept), strict=True):
            self._check_words(index, self.text[one.end : other.start], alone.literal(left.end, right.start))
        return pieces, kept

    def _behind_prompt(self, index: int, found: _Found, prompt: str) -> int:
        """Return where a turn begins: at the end of ``prompt``, which ends with the generation prompt. The whole
        rendering must begin with ``prompt``. Raises BadLineError if the turn begins with other text than in serving."""
        start, first = len(prompt), found.pieces[0]
        if start >= first.end:
            raise self._otherwise(index, f"{self.text[first.start : first.end][:60]!r} in the generation prompt, too")
        shared = _common(prompt, found.alone.text)
        self._check_words(index, self.text[start : first.start], found.alone.literal(shared, found.kept[0].start))
        return start

    def _behind_turn_before(self, index: int) -> int:
        """Return where a turn begins, by comparing the text after the preceding turn in the whole rendering and in
        serving."""
        marks = Marks(self.template.tags)
        before = [*self.turns[: index - 1], marks.turn(self.turns[index - 1], index - 1)]
        theirs = set(marks.forms)
        turn = marks.turn(self.turns[index], index)
        prompt = marks.marked(self._write(before, add_generation_prompt=True))
        alone = marks.marked(self._write([*before, turn]))
        pieces = marks.find(self._write([*before, turn, *self.turns[index + 1 :]]), self.text) or []
        # In front of the turn's first mark: the last one of the turn before.
        previous, first = _border(pieces, theirs)
        prior, _ = _border(alone.pieces, theirs)
        if not (
            prompt.pieces and previous and first and prior and prior.mark == previous.mark == prompt.pieces[-1].mark
        ):
            raise self._otherwise(index, "another text than the generation prompt before it")
        header = prompt.behind()
        added = header[_common(header, marks.marked(self._write(before)).behind()) :]
        between = self.text[previous.end : first.start]
        if self.text.startswith(header, previous.end):
            start = previous.end + len(header)
        elif added and added in between:
            start = previous.end + between.index(added) + len(added)
        else:
            start = previous.end + _common(header, between)
        kept = next(piece for piece in alone.pieces if piece.mark == first.mark)
        self._check_words(index, self.text[start : first.start], alone.literal(prior.end, kept.start))
        return start

    def _end(self, index: int, found: _Found) -> Span:
        """Return the characters of the special token that ends a turn, as (start, stop); empty if there is none. Raises
        BadLineError if the template ends the turn with text alone, or with other text when turns follow."""
        last = found.pieces[-1].end
        behind = found.alone.behind()
        own = self.text[last : last + len(behind)]
        own = own[: _common(own, behind)]
        stop = self._stop(index, own, found.end - last)
        if stop is None and (missing := self.template.ends.first(behind)):
            if behind[: missing[0]].strip() != own.strip():
                raise self._otherwise(index, f"{behind[: missing[1]][-60:]!r} after its text only if no turn follows")
            end = max(found.end, last + len(own.rstrip()))
            return end, end
        if stop is None:  # generation may stop at the token that begins the next turn
            at = max(found.end, last + len(own))
            at += len(self.text[at:]) - len(self.text[at:].lstrip())
            if (following := self.template.ends.first_stop(self.text, at)) and following[0] == at:
                return following
        if stop is None and (not behind.strip() or self._followed(index).startswith(behind.rstrip())):
            return last + len(own), last + len(own)
        if stop is None or self._begins_turn(own[found.end - last : stop[1]]):
            raise BadLineError(
                f"found {behind[:60]!r} after turn {index} (assistant), and no special token that ends it, expected a "
                "chat template that ends a turn with a special token or with nothing: correct the template"
            )
        return last + stop[0], last + stop[1]

    def _begins_turn(self, own: str) -> bool:
        """Return True if ``own``, the text after a turn's last string, has a special token that begins turns.

        Tokens that begin turns are the first ones of a conversation, and the last one of the generation prompt. So the
        text already belongs to the next turn.
        """
        ends = self.template.ends
        if not (tokens := ends.texts_in(own)):
            return False
        question = [self.template.formatted({"role": "user", "content": MARKER})]
        before = self._write(question).partition(MARKER)[0]
        prompt = self._write(question, add_generation_prompt=True).rpartition(MARKER)[2].rstrip()
        return any(token in ends.leading(before) or prompt.endswith(token) for token in tokens)

    def _stop(self, index: int, own: str, start: int) -> Span | None:
        """Find the end-of-turn token in ``own``, the text after a turn's last string."""
        ends = self.template.ends
        if "tool_calls" in self.turns[index]:
            # Special tokens may close the calls, so see how a turn without them ends.
            try:
                answer = self.template.formatted({"role": "assistant", "content": MARKER})
                behind = self._write([*self.turns[:index], answer]).rpartition(MARKER)[2]
            except BadLineError:
                behind = ""
            if (stop := ends.first(behind)) and (place := own.find(behind[slice(*stop)], start)) >= 0:
                return place, place + stop[1] - stop[0]
            return ends.first_stop(own, start) or ends.last(own, start)
        return ends.first(own, start)

    def _followed(self, index: int) -> str:
        """Return the text that the template writes after a turn if a user's turn follows it."""
        marks = Marks()
        question = self.template.formatted({"role": "user", "content": "?"})
        return marks.marked(self._write([*self.turns[:index], marks.turn(self.turns[index], index), question])).behind()

    def _check_words(self, index: int, written: str, alone: str) -> None:
        """Raise BadLineError for words inside a turn that the template writes only if later turns follow: the words may
        belong to the later turns."""
        words = iter(_WORDS.findall(alone))
        if not all(word in words for word in _WORDS.findall(written) if word.strip()):
            raise self._otherwise(index, f"{written[:60]!r} in it, and {alone[:60]!r} if no turn follows")

    def _otherwise(self, index: int, what: str) -> BadLineError:
        return BadLineError(
            f"found a chat template that writes for the assistant's turn {index} {what}, expected the turn's text "
            "once, and the same text with and without later turns: correct the template, or set data.loss_on: last and "
            "give each answer a line that ends with it"
        )

    def _omitted(self, marks: Marks, mark: str) -> BadLineError:
        kind, index = marks.kinds[mark]
        part = "the tool" if kind == TOOL else f"turn {index}'s {repr(kind) if kind in TEXTS else kind}"
        return BadLineError(
            f"found {part} {marks.forms[mark][-1][:60]!r}, which the chat template does not write, expected the "
            "template to write it: correct the template, or remove this part from the line"
        )

    def _changed(self, index: int, marks: Marks) -> BadLineError:
        kind = marks.kinds[marks.unlike][0] if marks.unlike else CONTENT
        changed = kind if kind in TEXTS else "tool_calls"
        value = self.turns[index][changed]
        text = plain(value) if kind in TEXTS else json.dumps(value, ensure_ascii=False)
        text = text if len(text) <= 60 else text[:57] + "..."
        return BadLineError(
            f"found a chat template that changes the {changed} of turn {index} (assistant), and not only whitespace "
            f"around it, expected {text!r} as it is: correct the template or the turn"
        )


def _border(pieces: list[Occurrence], theirs: set[str]) -> tuple[Occurrence | None, Occurrence | None]:
    """Return the last string of other turns (with a mark in ``theirs``) before this turn's first string, and that first
    string; both are None if no such pair exists."""
    for one, other in pairwise(pieces):
        if one.mark in theirs and other.mark not in theirs:
            return one, other
    return None, None


def _common(one: str, other: str) -> int:
    """Return the length of the beginning that two texts share, in whole words and tags."""
    shared = 0
    for mine, theirs in zip(_WORDS.finditer(one), _WORDS.finditer(other), strict=False):
        if mine[0] != theirs[0]:
            break
        shared = mine.end()
    return shared


def _repeated(index: int, tag: str) -> BadLineError:
    return BadLineError(
        f"found {tag!r} at the beginning of a text of turn {index}, which the chat template writes there, too, "
        "expected it once: remove it, and the tag that closes it, from the line"
    )
