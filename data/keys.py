"""Keys of a row that do not reach the text: names that a chat template reads, and values that it does not write."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase

from data.samples import DataError

# Given by the reader or by transformers; only "documents" is a parameter of apply_chat_template that a row may give.
_GIVEN = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
_GIVEN |= {"messages", "raise_exception", "strftime_now", *DEFAULT_NAMESPACE}
_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag of transformers
_SHOWN = 20
_DATA = (".properties", ".arguments")
"""Ends of paths to objects whose keys are data: names of parameters."""


@dataclass(frozen=True, slots=True)
class Reads:
    """Names that a chat template reads: variables, and all names that it may look up in a turn."""

    variables: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()


def reads_of(tokenizer: PreTrainedTokenizerBase) -> Reads:
    """Find the names that a tokenizer's chat template reads; a tokenizer may have several templates.

    A variable that a template sets itself counts only if the template asks whether it is given.
    """
    variables: set[str] = set()
    keys: set[str] = set()
    template = tokenizer.chat_template
    for text in template.values() if isinstance(template, dict) else [template]:
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
        except TemplateError as error:
            raise DataError(
                f"the chat template of {tokenizer.name_or_path!r} is not valid ({error}), expected a Jinja template"
            ) from error
        stored = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        asked = {
            test.node.name
            for test in tree.find_all((nodes.Test, nodes.Filter))
            if test.name in ("defined", "undefined", "default", "d") and isinstance(test.node, nodes.Name)
        }
        variables |= find_undeclared_variables(tree) - (stored - asked) - _GIVEN
        keys |= {attribute.attr for attribute in tree.find_all(nodes.Getattr)}
        keys |= {constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
    return Reads(frozenset(name for name in variables if not name.endswith("_token")), frozenset(keys))


@dataclass
class FileKeys:
    """Numbers of a file's rows by key."""

    unused: Counter[str] = field(default_factory=Counter)
    """Keys that nothing reads."""
    unwritten: Counter[str] = field(default_factory=Counter)
    """Keys that are given to the chat template, which does not write (all of) their value."""
    taken: Counter[str] = field(default_factory=Counter)
    """Keys that the chat template takes as variables."""

    def notes(self) -> Iterator[str]:
        """Describe each kind of key in one line."""
        if self.unused:
            yield f"{_rows(self.unused)}, which {'are' if len(self.unused) > 1 else 'is'} not used"
        if self.unwritten:
            yield f"{_rows(self.unwritten)}, of which the chat template leaves out at least a part"
        if self.taken:
            yield f"{_rows(self.taken)}, which the chat template takes as variables"


def _rows(counts: Counter[str]) -> str:
    """Return ``300 rows have "id", 12 "messages.name" and 2 more keys``, the most frequent keys first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{rows:,} {json.dumps(key, ensure_ascii=False)}" for key, rows in ordered[:_SHOWN]]
    number, key = shown[0].split(" ", 1)
    shown[0] = f"{number} row{'s have' if number != '1' else ' has'} {key}"
    more = len(ordered) - _SHOWN
    return ", ".join(shown) + (f" and {more:,} more key{'s' * (more > 1)}" if more > 0 else "")


def is_empty(value: Any) -> bool:
    """Return True for null, an empty text, and lists and objects of nothing else: an absent value in Arrow's files."""
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return all(map(is_empty, value)) if isinstance(value, list) else value is None or value == ""


class Written:
    """A rendered text, in which values are searched for."""

    def __init__(self, text: str, reads: Reads) -> None:
        self._text = text
        self._reads = reads

    @cached_property
    def _squeezed(self) -> str:
        return _squeezed(self._text)

    def unwritten(self, path: str, value: Any, *, asked: bool = True) -> Iterator[str]:
        """Yield the path of each text or number in a JSON value that the text does not contain.

        Whitespace and case do not count: templates change them. Names of parameters are a star in the path.

        Args:
            path: the keys that lead to the value.
            value: the value.
            asked: False if neither the template nor the text has its key: then it may be in the text by chance only.
        """
        if isinstance(value, dict):
            data = path.endswith(_DATA)
            for name, item in value.items():
                if (name, item) != ("type", "function"):  # the only kind of tool
                    asked = data or name in self._text or name in self._reads.keys
                    yield from self.unwritten(f"{path}.{'*' if data else name}", item, asked=asked)
        elif isinstance(value, list):
            for item in value:
                yield from self.unwritten(path, item, asked=asked)
        elif not is_empty(value):
            forms = (value.strip(),) if isinstance(value, str) else (json.dumps(value), str(value))
            if not (asked and any(map(self._has, forms))):
                yield path

    def _has(self, text: str) -> bool:
        if text in self._text:
            return True
        forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1], repr(text)[1:-1])
        return any(_squeezed(form) in self._squeezed for form in forms)


def _squeezed(text: str) -> str:
    return "".join(text.split()).casefold()
