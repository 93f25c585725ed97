"""Where the assistant's turns stand in what a chat template writes.

The whole conversation is rendered once, and that text is what is learned from. The place of an assistant turn in it
comes from the template's own output: it begins where the conversation before it, rendered with the generation prompt,
ends, because that is what the model is given when it serves; and it ends where the conversation up to and with it,
rendered by itself, ends. Both renderings must be the beginning of the whole one.

Where one is not, a template writes a turn otherwise once it is finished or once others follow: it opens ``<think>`` in
the generation prompt and not in the turn, or strips the thinking of earlier turns. What counts then is the whole
rendering. The turn's place in it is found by rendering everything once more with a marker in place of the turn's
content: what stands between the template's own text before and after must be a part of the content. What the template
writes behind the content (tool calls, the end-of-turn token) must be what it writes there when the turn is the last
one. If any of this does not hold, the turn cannot be found exactly, and the line is an error.

Special tokens that people spelled out: ``<|im_end|>`` in an answer, ``<s>`` in a question about HTML.

What a chat template writes is one text, and a tokenizer makes a control token of every place in it that reads like one,
whoever wrote that place. So a content can end a turn or begin another one. Here such places are found: every special
token in the conversation is exchanged for a plain word, the template writes the conversation once more, and where the
plain words stand is where people spelled a special token. All others are the template's own.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from data.jsonl import BadLineError, Conversation, Turn

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


MARKER = "deepqat-answer-5b1e"

LossOn = Literal["last", "all"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An assistant turn: characters ``[start, end)`` of the text."""

    start: int
    end: int
    by_content: bool


@dataclass(frozen=True, slots=True)
class Rendering:
    """The whole conversation as the template writes it, and the assistant turns to learn, in order."""

    text: str
    answers: list[Answer]
    spelled: list[Span] = field(default_factory=list)
    """Where people spelled special tokens out, in order; see `data.special`."""
    unplaced: int = 0
    """So many more that they spelled, where a template writes a content otherwise without them."""


class Template:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = SpecialTexts(tokenizer)

    def render(self, conversation: Conversation, loss_on: LossOn) -> Rendering:
        """Write a conversation that ends with an assistant turn, and find the turns to learn.

        These are the last assistant turn, or with ``all`` each one. A turn without text and tool calls has nothing to
        learn, and one that opens the conversation answers nothing: neither is among them.

        Raises:
            BadLineError: the template refuses the conversation, leaves out what it was given, or a turn cannot be
                located exactly.
        """
        turns = [self._formatted(turn) for turn in conversation.turns]
        chosen = [i for i, turn in enumerate(turns) if i and turn["role"] == "assistant" and not is_blank(turn)]
        if loss_on == "last":
            chosen = [i for i in chosen if i == len(turns) - 1]
        if not chosen:
            return Rendering("", [])
        writing = _Writing(self._tokenizer, turns, conversation.tools)
        writing.check_tools()
        answers = [writing.answer(i) for i in chosen]
        assert all(one.end <= other.start for one, other in pairwise(answers)), "turns overlap"
        return Rendering(writing.text, answers, *writing.spelled(self._special))

    def special_token_in(self, conversation: Conversation) -> str | None:
        """A special token that somebody spelled out in a conversation, the first one; None if nobody did."""
        found = self._special.first_in(conversation.turns, conversation.tools)
        return found and found[0]

    def _formatted(self, turn: Turn) -> Turn:
        """The turn with its content and the arguments of its calls in a form that the template writes."""
        if "tool_calls" in turn and not self._takes_objects:
            turn = {**turn, "tool_calls": [_with_text_arguments(call) for call in turn["tool_calls"]]}
        content = turn["content"]
        if isinstance(content, list) and not self._takes_parts:
            # A newline between parts, as vLLM has it for such templates.
            return {**turn, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and not self._takes_strings and self._takes_parts:
            return {**turn, "content": [{"type": "text", "text": content}]}
        return turn

    @cached_property
    def _takes_strings(self) -> bool:
        return MARKER in self._tried({"role": "user", "content": MARKER})

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a list of text parts is written as text, and not as Python or JSON shows a list."""
        parts = [{"type": "text", "text": f"{MARKER}{i}"} for i in range(2)]
        written = self._tried({"role": "user", "content": parts})
        return all(f"{MARKER}{i}" in written for i in range(2)) and "'text'" not in written and '"text"' not in written

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether arguments of calls may be objects: some templates write them as they are, and want their JSON."""
        call = {"id": "000000000", "type": "function", "function": {"name": MARKER, "arguments": {}}}
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": None}
        objects = self._tried(question, {**answer, "tool_calls": [call]})
        return MARKER in objects or MARKER not in self._tried(
            question, {**answer, "tool_calls": [_with_text_arguments(call)]}
        )

    def _tried(self, *turns: Turn) -> str:
        try:
            return _write(self._tokenizer, list(turns), None)
        except BadLineError:
            return ""


class _Writing:
    """One conversation, rendered as often as it takes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: list[Turn], tools: list[Any] | None) -> None:
        self.tokenizer = tokenizer
        self.turns = turns
        self.tools = tools
        self.text = self._write(turns)
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:  # in tools or tool calls, whose strings nobody has looked at
            raise BadLineError(
                f"found half of a surrogate pair at character {error.start} of what the template writes, expected text"
            ) from error

    def _write(self, turns: list[Turn], *, add_generation_prompt: bool = False) -> str:
        return _write(self.tokenizer, turns, self.tools, add_generation_prompt=add_generation_prompt)

    def spelled(self, special: SpecialTexts) -> tuple[list[Span], int]:
        """Where in the text people spelled special tokens out; or none, and how many they spelled."""
        conversation = [self.turns, self.tools]
        if special.first_in(*conversation) is None:
            return [], 0
        try:
            turns, tools = special.hidden(conversation)
            text, spans = shown_again(_write(self.tokenizer, turns, tools))
        except (BadLineError, RecursionError):  # a template may look for a special token, and miss it
            return [], special.count_in(*conversation)
        return (spans, 0) if text == self.text else ([], special.count_in(*conversation))

    def check_tools(self) -> None:
        """A template without tools writes a prompt without them, and nobody would notice."""
        for tool in self.tools or ():
            self._check_written("the tool", tool.get("function", tool)["name"], 0, len(self.text))

    def answer(self, index: int) -> Answer:
        """The place of one assistant turn."""
        prompt = self._write(self.turns[:index], add_generation_prompt=True)
        finished = self.text if index == len(self.turns) - 1 else self._write(self.turns[: index + 1])
        begins, ends = self.text.startswith(prompt), self.text.startswith(finished)
        start, end = len(prompt), len(finished)
        if not (begins and ends):
            place = self._place(index, "content")
            if place is None:
                raise self._not_found(index, "")
            reasoning = self._place(index, "reasoning_content") if "reasoning_content" in self.turns[index] else None
            if not begins:
                start = min(place[0], reasoning[0]) if reasoning else place[0]
            if not ends:
                end = place[1] + self._behind_content(index, place[1])
        if not self.text[start:end].strip():
            raise BadLineError(
                f"found nothing after the generation prompt of turn {index}, expected the chat template to write the "
                "answer"
            )
        self._check_answer(index, start, end)
        return Answer(start, end, by_content=not (begins and ends))

    def _place(self, index: int, key: str) -> tuple[int, int] | None:
        """From where to where the template writes what a turn has under ``key``; None if it does not write it."""
        value = plain(self.turns[index][key])
        marked = self._write(self._marked(index, key))
        before, _, after = marked.partition(MARKER)
        start, end = len(before), len(self.text) - len(after)
        if marked.count(MARKER) == 0:
            return None
        written = self.text[start:end]
        exact = marked.count(MARKER) == 1 and self.text.startswith(before) and self.text.endswith(after)
        if not exact or start > end or written not in value or (value.strip() and not written.strip()):
            raise self._not_found(index, written)
        return start, end

    def _marked(self, index: int, key: str) -> list[Turn]:
        parts = isinstance(self.turns[index][key], list)
        marker = [{"type": "text", "text": MARKER}] if parts else MARKER
        return [*self.turns[:index], {**self.turns[index], key: marker}, *self.turns[index + 1 :]]

    def _behind_content(self, index: int, end: int) -> int:
        """How many characters behind a turn's content belong to it: those that stand there when nothing follows."""
        alone = self._write(self._marked(index, "content")[: index + 1])
        behind = alone.partition(MARKER)[2]
        if alone.count(MARKER) != 1 or not self.text.startswith(behind, end):
            raise self._not_found(index, self.text[end : end + len(behind)])
        return len(behind)

    def _not_found(self, index: int, written: str) -> BadLineError:
        return BadLineError(
            "found a chat template whose generation prompt is not how it begins the finished turn, or which writes a "
            f"turn otherwise when others follow, and which writes {written[:60]!r} for the assistant's turn {index}, "
            "expected (a part of) its content and the same end: the loss mask cannot be exact, mend the template or "
            "the turn"
        )

    def _check_answer(self, index: int, start: int, end: int) -> None:
        """What the template leaves out of the turn would silently not be learned."""
        turn = self.turns[index]
        for call in turn.get("tool_calls", ()):
            self._check_written(f"turn {index}'s call of", call.get("function", call)["name"], start, end)
        # Of earlier turns templates strip the thinking on purpose.
        if index == len(self.turns) - 1 and "reasoning_content" in turn:
            self._check_written(f"turn {index}'s 'reasoning_content'", turn["reasoning_content"].strip(), start, end)

    def _check_written(self, what: str, text: str, start: int, end: int) -> None:
        if text not in self.text[start:end]:
            raise BadLineError(
                f"found {what} {text[:60]!r}, which the chat template does not write, expected a template that does "
                "(or the text in the turn's content)"
            )


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    text = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": text} if "function" in call else text


def plain(content: Any) -> str:
    """The text of a content: a string, a list of text parts, or None."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def is_blank(turn: Turn) -> bool:
    """Whether a turn says nothing and calls nothing."""
    return not plain(turn["content"]).strip() and "tool_calls" not in turn and "reasoning_content" not in turn


def _write(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[Turn],
    tools: list[Any] | None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except Exception as error:  # a template is a program: what it raises for a conversation is up to it
        roles = [turn["role"] for turn in turns]
        raise BadLineError(f"found the roles {roles}, which the chat template refuses: {error}") from error
