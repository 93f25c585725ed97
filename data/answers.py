"""Locate the assistant's turns in what a chat template writes.

The whole conversation is rendered once, and that text is trained on. To find a turn in it, the conversation is rendered
again with a word of ours, a mark, in place of each string of the turn: its content, its reasoning, the names, keys and
values of its calls. The whole rendering has to be the marked one with every mark replaced by its string. So each
character of the turn is known to be the author's or the template's, and a template that changes, repeats or leaves out
a string is refused.

- **Content with thinking.** A template may divide a content at tags (``<think>``, ``</think>``) and write the parts at
  different places. Then each part between tags that the template's source names gets a mark of its own, and the
  whitespace beside these tags may differ.
- **Beginning.** A turn begins where the preceding conversation, rendered with the generation prompt, ends: that is the
  model's input in serving. If the whole rendering does not begin with it, the template writes the context or the
  beginning of a turn differently in serving: it strips the thinking of earlier turns, or opens ``<think>`` in the
  generation prompt alone. Then what follows the turn before is compared instead, and the turn begins behind the words
  and tags that the generation prompt shares with it.
- **End.** A turn ends with its end-of-turn token: the first special token behind its last string, or one next to that
  if generation stops only there (``<|end|>\\n<|endoftext|>``). What a template writes behind it is not the turn's: an
  EOS after the conversation, or the next turn's header.

All strings of the last turn must be written. Of an earlier turn, a template may leave out reasoning or content once
others follow, as it does in serving (`Answer.cut`). Words that it writes only if others follow are refused.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from data.jsonl import Conversation
from data.marks import CONTENT, NAME, REASONING, TEXTS, TOOL, Marked, Marks, Piece
from data.template import MARKER, Span, Template, is_blank, plain, shown_again
from data.turns import BadLineError, Turn

LossOn = Literal["last", "all"]

_WORDS = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\w+|\s+|.")


@dataclass(frozen=True, slots=True)
class Answer:
    """Assistant turn: characters ``[start, end)`` of the text."""

    start: int
    end: int
    by_content: bool
    """The text in front of it is not the model's input in serving."""
    cut: bool
    """The template leaves out a part of it because other turns follow."""


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


def render(template: Template, conversation: Conversation, loss_on: LossOn) -> Rendering:
    """Render a conversation that ends with an assistant turn, and locate the turns to train on.

    These are the last assistant turn, or with ``all`` every assistant turn. A turn without text and tool calls has no
    content to train on, and a turn that opens the conversation has no prompt: both are skipped.

    Raises:
        BadLineError: the template refuses the conversation, changes or omits a part of it, or a turn cannot be located
            exactly.
    """
    turns = [template.formatted(turn) for turn in conversation.turns]
    chosen = [
        i
        for i, turn in enumerate(turns)
        if i and turn["role"] == "assistant" and not is_blank(turn) and conversation.learned[i] is not False
    ]
    if loss_on == "last":
        chosen = [i for i in chosen if i == len(turns) - 1]
    if not chosen:
        return Rendering("", [])
    writing = _Writing(template, turns, conversation)
    writing.check_context(chosen)
    answers = [writing.answer(i) for i in chosen]
    for one, other in pairwise(answers):
        if one.end > other.start:
            raise BadLineError("found a chat template that mixes assistant turns, expected one turn behind the other")
    return Rendering(writing.text, answers, *writing.spelled(), len(turns) - 1 - chosen[-1])


@dataclass(frozen=True, slots=True)
class _Found:
    """A turn's strings in the whole rendering, and its marks in the rendering that ends with it."""

    pieces: list[Piece]
    end: int
    """Character behind the last string."""
    alone: Marked
    kept: list[Piece]
    """The marks of the pieces in ``alone``, which may have more."""
    cut: bool


class _Writing:
    """One conversation with its renderings."""

    def __init__(self, template: Template, turns: list[Turn], conversation: Conversation) -> None:
        self.template = template
        self.turns = turns
        self.tools = conversation.tools
        self.variables = conversation.variables
        self.text = self._write(turns)
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:  # in tools or tool calls, whose strings are not checked before
            raise BadLineError(
                f"found half of a surrogate pair at character {error.start} of what the template writes, expected text"
            ) from error

    def _write(self, turns: list[Turn], *, add_generation_prompt: bool = False) -> str:
        return self.template.write(turns, self.tools, self.variables, add_generation_prompt=add_generation_prompt)

    def spelled(self) -> tuple[list[Span], int]:
        """Return the positions of spelled-out special tokens and 0; if they are not found, no positions and a count."""
        special, conversation = self.template.special, [self.turns, self.tools, self.variables]
        if special.first_in(*conversation) is None:
            return [], 0
        try:
            text, spans = shown_again(self.template.write(*special.hidden(conversation)))
        except (BadLineError, RecursionError):  # a template may search for a special token that was replaced
            return [], special.count_in(*conversation)
        return (spans, 0) if text == self.text else ([], special.count_in(*conversation))

    def check_context(self, learned: list[int]) -> None:
        """Refuse a conversation if the template omits a tool, or a turn that is not learned: they change the answer.

        A template may leave out reasoning, and the content beside earlier calls, which often is reasoning.
        """
        marks, turns = Marks(), list[Turn]()
        tools = [marks.tool(tool) for tool in self.tools or ()]
        for index, turn in enumerate(self.turns):
            turns.append(turn if index in learned else marks.turn(turn, index))
        try:
            text = self.template.write(turns, tools or None, self.variables)
            written = {piece.mark for piece in marks.marked(text).pieces}
        except BadLineError:  # a template may look for a name among the tools
            written = {mark for mark, forms in marks.forms.items() if any(form in self.text for form in forms)}
        for mark, (kind, index) in marks.kinds.items():
            beside_calls = kind == CONTENT and "tool_calls" in self.turns[index]
            if mark not in written and (kind in (NAME, TOOL) or (kind == CONTENT and not beside_calls)):
                raise self._omitted(marks, mark)

    def answer(self, index: int) -> Answer:
        """Locate one assistant turn."""
        found = self._found(index)
        prompt = self._write(self.turns[:index], add_generation_prompt=True)
        exact = self.text.startswith(prompt)
        start = self._behind_prompt(index, found, prompt) if exact else self._behind_turn_before(index, found)
        stop, end = self._end(index, found)
        edges = [start, *(edge for piece in found.pieces for edge in (piece.start, piece.end)), stop]
        for left, right in zip(edges[::2], edges[1::2], strict=True):
            if early := self.template.ends.first_stop(self.text[left:right]):
                raise BadLineError(
                    f"found {self.text[left:right][slice(*early)]!r}, at which generation stops, in front of the last "
                    f"part of turn {index} (assistant), expected it behind the turn: mend the chat template or the turn"
                )
        return Answer(start, end, by_content=not exact, cut=found.cut)

    def _found(self, index: int) -> _Found:
        """Find a turn's strings: all of the last turn, and those that the template writes of an earlier one."""
        before, after = self.turns[:index], self.turns[index + 1 :]
        for tags in (None, self.template.tags):
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
            content = marks.content_in(pieces, self.text)
            if content is not None:
                cut = len(kept) < len(alone.pieces)
                return _Found(pieces, max(pieces[-1].end, content[1]), alone, kept, cut)
        raise self._changed(index)

    def _of_turn(self, marks: Marks, pieces: list[Piece], alone: Marked, index: int) -> tuple[list[Piece], list[Piece]]:
        """Check that a turn's strings are written once and in order; return their places, and those of their marks.

        Names and keys of calls may be repeated, also behind the turn: the name of a function beside its result.
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
        if (
            not kept
            or [piece.mark for piece in pieces] != [piece.mark for piece in kept]
            or kept[-1] != alone.pieces[-1]
        ):
            raise self._otherwise(index, "parts in another order if other turns follow")
        for (one, other), (left, right) in zip(pairwise(pieces), pairwise(kept), strict=True):
            self._check_words(index, self.text[one.end : other.start], alone.literal(left.end, right.start))
        return pieces, kept

    def _behind_prompt(self, index: int, found: _Found, prompt: str) -> int:
        """Return the end of the generation prompt, with which the whole rendering begins."""
        start, first = len(prompt), found.pieces[0]
        if start >= first.end:
            raise self._otherwise(index, f"{self.text[first.start : first.end][:60]!r} in the generation prompt, too")
        shared = _common(prompt, found.alone.text)
        self._check_words(index, self.text[start : first.start], found.alone.literal(shared, found.kept[0].start))
        return start

    def _behind_turn_before(self, index: int, found: _Found) -> int:
        """Return where a turn begins, from what follows the turn before it in serving and in the whole rendering."""
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
            raise self._otherwise(index, "something else in front than the generation prompt")
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

    def _end(self, index: int, found: _Found) -> tuple[int, int]:
        """Return the range of a turn's last token; an empty range at the turn's end if no special token ends it."""
        last = found.pieces[-1].end
        behind = found.alone.behind()
        own = self.text[last : last + len(behind)]
        own = own[: _common(own, behind)]
        stop = self._stop(index, own, found.end - last)
        if stop is None and (missing := self.template.ends.first(behind)):
            raise self._otherwise(index, f"{behind[: missing[1]][-60:]!r} behind it only if no turn follows")
        if stop is None and (not behind.strip() or self._followed(index).startswith(behind.rstrip())):
            return last + len(own), last + len(own)
        if stop is None or self._begins_turn(own[found.end - last : stop[1]]):
            raise BadLineError(
                f"found {behind[:60]!r} behind turn {index} (assistant), and no special token that ends it, expected a "
                "chat template that ends a turn with one, or writes nothing of the next turn"
            )
        return last + stop[0], last + stop[1]

    def _begins_turn(self, own: str) -> bool:
        """Tell if the text behind a turn has a special token that begins turns: it is not this turn's.

        Those are the first ones of a conversation, and the last one of the generation prompt.
        """
        ends = self.template.ends
        if not (tokens := ends.texts_in(own)):
            return False
        question = [self.template.formatted({"role": "user", "content": MARKER})]
        before = self._write(question).partition(MARKER)[0]
        prompt = self._write(question, add_generation_prompt=True).rpartition(MARKER)[2].rstrip()
        return any(token in ends.leading(before) or prompt.endswith(token) for token in tokens)

    def _stop(self, index: int, own: str, start: int) -> Span | None:
        """Find the end-of-turn token in the text behind a turn's last string."""
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
            if stop := ends.first_stop(own, start):
                return stop
        return ends.first(own, start)

    def _followed(self, index: int) -> str:
        """Return what the template writes behind a turn if a question follows it."""
        marks = Marks()
        question = self.template.formatted({"role": "user", "content": "?"})
        marked = marks.marked(self._write([*self.turns[:index], marks.turn(self.turns[index], index), question]))
        return marked.behind()

    def _check_words(self, index: int, written: str, alone: str) -> None:
        """Refuse words inside of a turn that the template writes only if others follow: they may be the others'."""
        words = iter(_WORDS.findall(alone))
        if not all(word in words for word in _WORDS.findall(written) if word.strip()):
            raise self._otherwise(index, f"{written[:60]!r} in it, and {alone[:60]!r} if no turn follows")

    def _otherwise(self, index: int, what: str) -> BadLineError:
        return BadLineError(
            f"found a chat template that writes for the assistant's turn {index} {what}, expected its text once, and "
            "the same with and without turns behind it: mend the template, or set data.loss_on: last"
        )

    def _omitted(self, marks: Marks, mark: str) -> BadLineError:
        kind, index = marks.kinds[mark]
        part = "the tool" if kind == TOOL else f"turn {index}'s {repr(kind) if kind in TEXTS else kind}"
        return BadLineError(
            f"found {part} {marks.forms[mark][-1][:60]!r}, which the chat template does not write, expected it in the "
            "text: mend the template, or remove it from the line"
        )

    def _changed(self, index: int) -> BadLineError:
        """Name the part of a turn that the template changes."""
        turn, changed = self.turns[index], CONTENT
        for key in (REASONING, "tool_calls"):
            if key in turn:
                marks = Marks()
                marked = {**turn, key: marks.turn({"role": "assistant", "content": None, key: turn[key]}, index)[key]}
                try:
                    whole = self._write([*self.turns[:index], marked, *self.turns[index + 1 :]])
                except BadLineError:
                    whole = ""
                if marks.find(whole, self.text) is None:
                    changed = key
                    break
        return BadLineError(
            f"found a chat template that changes the {changed} of turn {index} (assistant), and not only whitespace "
            f"around it, expected {_beginning(turn[changed])} as it is: mend the template or the turn"
        )


def _border(pieces: list[Piece], theirs: set[str]) -> tuple[Piece | None, Piece | None]:
    """Return the last piece of another turn in front of this one's first piece, and that piece."""
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


def _beginning(value: Any) -> str:
    """Return the beginning of a text or of calls, for an error."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list) and "text" not in value[0] else plain(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")
