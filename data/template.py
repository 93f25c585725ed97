"""Render conversations with a tokenizer's chat template, in the form that the template takes.

A content may spell out special tokens: ``<|im_end|>`` in an answer, ``<s>`` in a question about HTML.

A tokenizer makes a control token of every match in the rendered text, whether the template or a content wrote it, so a
content can end a turn or begin another one. To find such matches, every special token in the conversation is replaced
by a plain word, and the template renders the conversation once more: the plain words show where special tokens are
spelled out. All other special tokens are the template's own.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, TemplateError, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from data.files import DataError
from data.jsonl import BadLineError, Conversation, Reads, Turn

SpecialTokens = Literal["keep", "text", "refuse"]
"""Treatment of a spelled-out special token: it stays special, it becomes plain text, or the line is an error."""

Span = tuple[int, int]
"""Characters ``[start, end)`` of a text."""

MARKER = "deepqat-answer-5b1e"
_WORD = "deepqat5b1e{}z"
_HIDDEN = re.compile(_WORD.format("([0-9a-f]+)"))

_TAGS = re.compile(r"</?[^<>\s'\"{}]+>|\[/?[A-Z_]+\]")
"""Tags that a template names: ``<think>``, ``[/THINK]``."""
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Tag of transformers, unknown to Jinja."""
# Given by the reader or by transformers; only "documents" is a parameter of apply_chat_template that a row may give.
_GIVEN = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
_GIVEN |= {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Build a pattern that matches any of these texts, and prefers the longest."""
    longest_first = sorted(filter(None, set(texts)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


class SpecialTexts:
    """Special tokens of a tokenizer: their ids, and the texts that it matches as such."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = {index: token.content for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.ids = frozenset(special)
        self.texts = frozenset(special.values())
        self._pattern = any_of(self.texts)

    def first_in(self, *values: Any) -> re.Match[str] | None:
        """Find the first special token in the strings of JSON values, keys included; None if there is none."""
        return next(filter(None, map(self._pattern.search, _strings(values))), None)

    def count_in(self, *values: Any) -> int:
        """Count the special tokens spelled in the strings of JSON values."""
        return sum(len(self._pattern.findall(text)) for text in _strings(values))

    def hidden(self, value: Any) -> Any:
        """Replace each special token in the strings of a JSON value by a plain word."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _WORD.format(match[0].encode().hex()), value)
        if isinstance(value, dict):
            return {self.hidden(key): self.hidden(item) for key, item in value.items()}
        return [self.hidden(item) for item in value] if isinstance(value, list) else value


def shown_again(text: str) -> tuple[str, list[Span]]:
    """Restore the special tokens that `SpecialTexts.hidden` replaced; return the text and their positions."""
    spans, shift = list[Span](), 0
    for match in _HIDDEN.finditer(text):
        start, length = match.start() - shift, len(bytes.fromhex(match[1]).decode())
        spans.append((start, start + length))
        shift += len(match[0]) - length
    return _HIDDEN.sub(lambda match: bytes.fromhex(match[1]).decode(), text), spans


def _strings(values: Iterable[Any]) -> Iterator[str]:
    """Yield all strings of JSON values, keys included. Not recursive, as JSON from files may be nested deeply."""
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


class Ends:
    """Tokens that may end a turn: special tokens, and those at which generation stops (the tokenizer's EOS, and those
    in the checkpoint's generation_config.json or, without that file, config.json, which servers read). Raises DataError
    if one of these files cannot be read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: SpecialTexts) -> None:
        self.stops = frozenset(_stop_ids(tokenizer))
        self._stops = {str(token) for token in tokenizer.convert_ids_to_tokens(sorted(self.stops)) if token}
        self._pattern = any_of(special.texts | self._stops)

    def first_stop(self, text: str, start: int = 0) -> Span | None:
        """Return the range of the first token in ``text``, from ``start`` on, at which generation stops; None if there
        is none."""
        return next((m.span() for m in self._pattern.finditer(text, start) if m[0] in self._stops), None)

    def texts_in(self, text: str) -> list[str]:
        """Return the special tokens in ``text``, in order, without those at which generation stops."""
        return [token for token in self._pattern.findall(text) if token not in self._stops]

    def leading(self, text: str) -> list[str]:
        """Return the special tokens at the start of ``text``, before its first word, without those at which generation
        stops."""
        match = re.search(r"\S", self._pattern.sub(lambda token: " " * len(token[0]), text))
        return self.texts_in(text[: match.start()] if match else text)

    def first(self, text: str, start: int = 0) -> Span | None:
        """Return the range of the token that ends a turn, from ``start`` on; None if there is none. This is the first
        token that may end a turn. If only whitespace and such tokens separate that token from one at which generation
        stops, the result is the stop token."""
        end = None
        for match in self._pattern.finditer(text, start):
            if end is not None and text[start : match.start()].strip():
                break
            if end is None or match[0] in self._stops:
                end = match.span()
            if match[0] in self._stops:
                break
            start = match.end()
        return end

    def last(self, text: str, start: int = 0) -> Span | None:
        """Return the range of the last token that may end a turn, from ``start`` on; None if there is none."""
        return max((match.span() for match in self._pattern.finditer(text, start)), default=None)


def _stop_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = Path(tokenizer.name_or_path) / name
        if not path.is_file():
            continue
        try:
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{path}: expected a JSON object ({error})") from error
        ids |= set(eos if isinstance(eos, list) else [eos])
        break
    return {index for index in ids if isinstance(index, int) and 0 <= index < len(tokenizer)}


def reads_of(tokenizer: PreTrainedTokenizerBase) -> Reads:
    """Find the variables and keys that a tokenizer's chat templates read.

    A variable that a template sets itself counts only if the template also tests whether it is defined. A test inside a
    macro that has a parameter of this name does not count. Raises DataError if a template is not valid Jinja.
    """
    variables, undeclared, keys = set[str](), set[str](), set[str]()
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
        except TemplateError as error:
            raise DataError(
                f"the chat template of {tokenizer.name_or_path!r} is not valid ({error}), expected a Jinja template"
            ) from error
        stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        parameters = {
            id(name)
            for macro in tree.find_all(nodes.Macro)
            for name in macro.find_all(nodes.Name)
            if name.name in {argument.name for argument in macro.args}
        }
        asked = {
            test.node.name
            for test in tree.find_all((nodes.Test, nodes.Filter))
            if test.name in ("defined", "undefined", "default", "d")
            and isinstance(test.node, nodes.Name)
            and id(test.node) not in parameters
        }
        free = find_undeclared_variables(tree) - _GIVEN
        variables |= free - (stored - asked)
        undeclared |= free - {argument.name for macro in tree.find_all(nodes.Macro) for argument in macro.args}
        keys |= {attribute.attr for attribute in tree.find_all(nodes.Getattr)}
        keys |= {constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
    named = (frozenset(name for name in names if not name.endswith("_token")) for names in (variables, undeclared))
    return Reads(next(named), frozenset(keys), next(named))


class Template:
    """Chat template of a tokenizer. Raises DataError if the template is not valid, or a file with stop tokens cannot be
    read."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.reads = reads_of(tokenizer)
        self.special = SpecialTexts(tokenizer)
        self.ends = Ends(tokenizer, self.special)
        self.tags = any_of(_TAGS.findall(str(tokenizer.chat_template)))
        """Tags in the template's source, at which it may split the content of a turn."""
        self._tokenizer = tokenizer

    def special_token_in(self, conversation: Conversation) -> str | None:
        """Find the first special token that is spelled out in a conversation; None if there is none."""
        turns = [message.turn for message in conversation.messages]
        found = self.special.first_in(turns, conversation.tools, conversation.variables)
        return found and found[0]

    def write(
        self,
        turns: list[Turn],
        tools: list[Any] | None,
        variables: dict[str, Any],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render turns. Raises BadLineError if the template refuses them."""
        # transformers names a turn's reasoning for templates that read "thinking", not for those that read "reasoning".
        turns = [
            {"reasoning": turn["reasoning_content"], **turn} if "reasoning_content" in turn else turn for turn in turns
        ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
                )
            )
        except Exception as error:  # a template is a program and may raise anything
            roles = [turn["role"] for turn in turns]
            raise BadLineError(
                f"found the roles {roles}, which the chat template refuses: {' '.join(str(error).split())}; expected "
                "turns that it takes"
            ) from error

    def formatted(self, turn: Turn) -> Turn:
        """Convert a turn's content and tool calls to the form that this template can render."""
        content = turn["content"]
        if "tool_calls" in turn:
            blank, as_text = self._form_of_calls
            turn = {**turn, "tool_calls": [_formatted_call(call, as_text=as_text) for call in turn["tool_calls"]]}
            if not plain(content):
                return {**turn, "content": blank}
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
        """Return True if the template renders a list of text parts as text, not as Python or JSON."""
        parts = [{"type": "text", "text": f"{MARKER}{i}"} for i in range(2)]
        written = self._tried({"role": "user", "content": parts})
        return all(f"{MARKER}{i}" in written for i in range(2)) and "'text'" not in written and '"text"' not in written

    @cached_property
    def _form_of_calls(self) -> tuple[str | None, bool]:
        """Return the content (None or "") that a turn with tool calls but no text needs, and True if arguments must be
        JSON strings.

        Some templates fail without a content, and some insert the arguments unchanged into the text.
        """
        function = {"name": MARKER, "arguments": {f"{MARKER}-key": MARKER}}
        call = {"type": "function", "id": "000000000", "function": function}
        question = {"role": "user", "content": "?"}
        forms: list[tuple[str | None, bool]] = [("", False), (None, False), ("", True), (None, True)]
        for blank, as_text in forms:
            calls = [_formatted_call(call, as_text=as_text)]
            written = self._tried(question, {"role": "assistant", "content": blank, "tool_calls": calls})
            # An object that is inserted as it is has Python's quotes.
            if written.count(MARKER) >= 3 and f"'{MARKER}-key': " not in written:
                return blank, as_text
        return "", False

    def _tried(self, *turns: Turn) -> str:
        try:
            return self.write(list(turns), None, {})
        except BadLineError:
            return ""


def _formatted_call(call: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, or with ``as_text`` a JSON string."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False) if as_text else function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}


def plain(content: Any) -> str:
    """Return the text of a content: a string, a list of text parts, or None (an empty text)."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def is_blank(turn: Turn) -> bool:
    """Return True if a turn has no text, no reasoning and no tool calls."""
    return not plain(turn["content"]).strip() and "tool_calls" not in turn and "reasoning_content" not in turn
