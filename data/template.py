"""Locate the assistant's turns in the output of a chat template.

The whole conversation is rendered once, and that text is trained on. Two more renderings show the position of an
assistant turn in it. The turn begins where the preceding conversation, rendered with the generation prompt, ends: that
is the model's input in serving. The turn ends where the conversation ends if it is rendered without the later turns.
Both renderings must be prefixes of the whole rendering.

If one of them is not, the template writes a turn differently once it is finished or once others follow: it opens
``<think>`` in the generation prompt and not in the turn, or strips the thinking of earlier turns. The whole rendering
is then authoritative. To locate the turn in it, everything is rendered once more with a marker in place of the turn's
content. The text before and after the marker must also begin and end the whole rendering, and the rest of the whole
rendering must be a part of the content. The template's text after the content (tool calls, the end-of-turn token) must
be the same as if the turn were the last. If any of this does not hold, the turn cannot be located exactly, and the line
is an error.

Special tokens spelled out in contents: ``<|im_end|>`` in an answer, ``<s>`` in a question about HTML.

A tokenizer makes a control token of every match in the rendered text, whether the template or a content wrote it, so a
content can end a turn or begin another one. To find such matches, every special token in the conversation is replaced
by a plain word, and the template renders the conversation once more: the plain words show where special tokens are
spelled out. All other special tokens are the template's own.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from data.jsonl import Conversation
from data.keys import reads_of
from data.turns import BadLineError, Turn

SpecialTokens = Literal["keep", "text", "refuse"]
"""Treatment of a spelled-out special token: it stays special, it becomes plain text, or the line is an error."""

Span = tuple[int, int]
"""Characters ``[start, end)`` of a text."""

_WORD = "deepqat5b1e{}z"
_WORDS = re.compile(_WORD.format("([0-9a-f]+)"))


class SpecialTexts:
    """Texts that a tokenizer matches as special tokens.

    Attributes:
        ids: ids of the special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ids = frozenset(special)
        # Longest first: if two begin alike, the longer one is matched.
        texts = sorted({token.content for token in special.values() if token.content}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def first_in(self, *values: Any) -> re.Match[str] | None:
        """Find the first special token in the strings of JSON values, keys included."""
        return next(filter(None, map(self._pattern.search, _strings(values))), None)

    def count_in(self, *values: Any) -> int:
        """Count the special tokens spelled in the strings of JSON values."""
        return sum(1 for text in _strings(values) for _ in self._pattern.finditer(text))

    def hidden(self, value: Any) -> Any:
        """Replace each special token in the strings of a JSON value by a plain word."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _WORD.format(match[0].encode().hex()), value)
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(item) for key, item in value.items()}
        return [self.hidden(item) for item in value] if isinstance(value, list) else value


def shown_again(text: str) -> tuple[str, list[Span]]:
    """Restore the special tokens that `SpecialTexts.hidden` replaced; return the text and their positions."""
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
    """Yield all strings of JSON values, keys included. Not recursive: foreign JSON may be nested deeply."""
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
    """Assistant turn: characters ``[start, end)`` of the text."""

    start: int
    end: int
    by_content: bool


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


class Template:
    """Chat template of a tokenizer.

    Attributes:
        reads: names that it reads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.reads = reads_of(tokenizer)
        self._tokenizer = tokenizer
        self._special = SpecialTexts(tokenizer)

    def render(self, conversation: Conversation, loss_on: LossOn) -> Rendering:
        """Render a conversation that ends with an assistant turn, and locate the turns to train on.

        These are the last assistant turn, or with ``all`` every assistant turn. A turn without text and tool calls has
        no content to train on, and a turn that opens the conversation has no prompt: both are skipped.

        Raises:
            BadLineError: the template refuses the conversation, omits a part of it, or a turn cannot be located
                exactly.
        """
        turns = [self._formatted(turn) for turn in conversation.turns]
        chosen = [
            i
            for i, turn in enumerate(turns)
            if i and turn["role"] == "assistant" and not is_blank(turn) and conversation.learned[i] is not False
        ]
        if loss_on == "last":
            chosen = [i for i in chosen if i == len(turns) - 1]
        if not chosen:
            return Rendering("", [])
        writing = _Writing(self._tokenizer, turns, conversation.tools, conversation.variables)
        writing.check_tools()
        answers = [writing.answer(i) for i in chosen]
        assert all(one.end <= other.start for one, other in pairwise(answers)), "turns overlap"
        return Rendering(writing.text, answers, *writing.spelled(self._special), len(turns) - 1 - chosen[-1])

    def special_token_in(self, conversation: Conversation) -> str | None:
        """Find the first special token that is spelled out in a conversation; None if there is none."""
        found = self._special.first_in(conversation.turns, conversation.tools, conversation.variables)
        return found and found[0]

    def _formatted(self, turn: Turn) -> Turn:
        """Convert the turn's content and the arguments of its calls to a form that the template renders."""
        if "tool_calls" in turn and not self._takes_objects:
            turn = {**turn, "tool_calls": [_with_text_arguments(call) for call in turn["tool_calls"]]}
        content = turn["content"]
        if isinstance(content, list) and not self._takes_parts:
            # Join parts with newlines, as vLLM does for such templates.
            return {**turn, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and not self._takes_strings and self._takes_parts:
            return {**turn, "content": [{"type": "text", "text": content}]}
        return turn

    @cached_property
    def _takes_strings(self) -> bool:
        return MARKER in self._tried({"role": "user", "content": MARKER})

    @cached_property
    def _takes_parts(self) -> bool:
        """Tell if a list of text parts is rendered as text, and not as its Python or JSON form."""
        parts = [{"type": "text", "text": f"{MARKER}{i}"} for i in range(2)]
        written = self._tried({"role": "user", "content": parts})
        return all(f"{MARKER}{i}" in written for i in range(2)) and "'text'" not in written and '"text"' not in written

    @cached_property
    def _takes_objects(self) -> bool:
        """Tell if arguments of calls may be objects: some templates insert them verbatim, and need JSON strings."""
        call = {"id": "000000000", "type": "function", "function": {"name": MARKER, "arguments": {}}}
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": None}
        objects = self._tried(question, {**answer, "tool_calls": [call]})
        return MARKER in objects or MARKER not in self._tried(
            question, {**answer, "tool_calls": [_with_text_arguments(call)]}
        )

    def _tried(self, *turns: Turn) -> str:
        try:
            return _write(self._tokenizer, list(turns), None, {})
        except BadLineError:
            return ""


class _Writing:
    """One conversation with its renderings."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turns: list[Turn],
        tools: list[Any] | None,
        variables: dict[str, Any],
    ) -> None:
        self.tokenizer = tokenizer
        self.turns = turns
        self.tools = tools
        self.variables = variables
        self.text = self._write(turns)
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:  # in tools or tool calls, whose strings are not checked before
            raise BadLineError(
                f"found half of a surrogate pair at character {error.start} of what the template writes, expected text"
            ) from error

    def _write(self, turns: list[Turn], *, add_generation_prompt: bool = False) -> str:
        return _write(self.tokenizer, turns, self.tools, self.variables, add_generation_prompt=add_generation_prompt)

    def spelled(self, special: SpecialTexts) -> tuple[list[Span], int]:
        """Return the positions of spelled-out special tokens and 0; if they are not found, no positions and a count."""
        conversation = [self.turns, self.tools, self.variables]
        if special.first_in(*conversation) is None:
            return [], 0
        try:
            text, spans = shown_again(_write(self.tokenizer, *special.hidden(conversation)))
        except (BadLineError, RecursionError):  # a template may search for a special token that was replaced
            return [], special.count_in(*conversation)
        return (spans, 0) if text == self.text else ([], special.count_in(*conversation))

    def check_tools(self) -> None:
        """Refuse tools if the template does not support them: it would silently omit them from the prompt."""
        for tool in self.tools or ():
            self._check_written("the tool", tool.get("function", tool)["name"], 0, len(self.text))

    def answer(self, index: int) -> Answer:
        """Locate one assistant turn."""
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
        """Locate a turn's value of ``key`` in the rendering; None if the template does not write it."""
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
        """Count a turn's characters after its content: the text that the template writes there if no turn follows."""
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
        """Refuse a turn if the template omits a part of it, which would silently not be trained on."""
        turn = self.turns[index]
        for call in turn.get("tool_calls", ()):
            self._check_written(f"turn {index}'s call of", call.get("function", call)["name"], start, end)
        # Templates strip the thinking of earlier turns on purpose.
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
    """Return the text of a content: a string, a list of text parts, or None."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def is_blank(turn: Turn) -> bool:
    """Return True if a turn has neither text nor tool calls."""
    return not plain(turn["content"]).strip() and "tool_calls" not in turn and "reasoning_content" not in turn


def _write(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[Turn],
    tools: list[Any] | None,
    variables: dict[str, Any],
    *,
    add_generation_prompt: bool = False,
) -> str:
    # transformers names a turn's reasoning for templates that read "thinking", but not for those that read "reasoning".
    turns = [
        {"reasoning": turn["reasoning_content"], **turn} if "reasoning_content" in turn else turn for turn in turns
    ]
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        )
    except Exception as error:  # a template is a program and may raise anything
        roles = [turn["role"] for turn in turns]
        raise BadLineError(f"found the roles {roles}, which the chat template refuses: {error}") from error
