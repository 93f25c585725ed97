"""Patterns of module names: those of recipes and exports are refused where one may take for ever, ours are made here.

Python's engine tries every way in which a pattern may share a name out among its repetitions. One repetition inside
another has exponentially many ways, and each further one in a row multiplies them by the length of the name: with four,
a name of 80 characters has some two million, which is a hundredth of a second.
"""

import re
from collections.abc import Iterable
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MOST_CHARACTERS, MOST_REPEATS = 2000, 4
MANY = 16  # a repetition that may come so often counts as one without end
_DIGITS = frozenset({(_constants.CATEGORY, _constants.CATEGORY_DIGIT), (_constants.RANGE, (48, 57))})
# A component of a module name that is the number of a layer or an expert.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# What may stand before a name that begins where the model of text does.
ANYWHERE = r"(?:.*\.)?"


def pattern_problem(text: str) -> str | None:
    """What is wrong with a regular expression; None if it compiles and ends soon on every name of a module."""
    if len(text) > MOST_CHARACTERS:
        return f"it has {len(text):,} characters, at most {MOST_CHARACTERS:,} are allowed"
    try:
        re.compile(text)
        parsed = _parser.parse(text)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error) or type(error).__name__
    repeats = _repeats(parsed, inside=False)
    if repeats is None:
        return "it repeats what holds a repetition or alternatives, which may take for ever; name the parts one by one"
    if repeats > MOST_REPEATS:
        return f"it has {repeats} repetitions like .*, at most {MOST_REPEATS} are allowed: more may take for ever"
    return None


def _repeats(parsed: Any, *, inside: bool) -> int | None:
    """How many repetitions without end a name may be shared out among; None if one holds another, or alternatives.

    Digits alone do not count: a name has few in a row. Of alternatives all count.
    """
    count = 0
    for operation, argument in parsed:
        if operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            _, most, body = argument
            many = int(most) >= MANY
            if many and inside:
                return None
            below = _repeats(body, inside=inside or many or int(most) > 1)
            if below is None:
                return None
            digits = all(kind is _constants.IN and set(choice) <= _DIGITS for kind, choice in body)
            count += below + (many and not digits)
        elif operation is _constants.BRANCH and inside:
            return None
        else:
            for part in _parts(operation, argument):
                below = _repeats(part, inside=inside)
                if below is None:
                    return None
                count += below
    return count


def _parts(operation: Any, argument: Any) -> list[Any]:
    """The patterns inside an element that is no repetition."""
    if operation is _constants.BRANCH:
        return list(argument[1])
    if operation is _constants.SUBPATTERN:
        return [argument[-1]]
    if operation in (_constants.ASSERT, _constants.ASSERT_NOT):
        return [argument[1]]
    if operation is _constants.ATOMIC_GROUP:
        return [argument]
    if operation is _constants.GROUPREF_EXISTS:
        return [part for part in argument[1:] if part is not None]
    return []


def name_patterns(names: Iterable[str], others: Iterable[str], end: str = "", *, anywhere: bool = False) -> list[str]:
    """A short list for ``targets`` or ``ignore`` that matches all of ``names`` and none of ``others``.

    Names that differ only in numbers (of layers, of experts) share an anchored pattern: for all numbers if no other
    name is like them, else for the numbers of their layers: a list of every expert of every layer would be megabytes.

    Args:
        names: module names.
        others: module names.
        end: a regex that follows each name.
        anywhere: whether readers may have the modules inside another one: there are patterns only, for any place.
    """
    others = list(others)
    alike, strangers = _by_numbers(names), _by_numbers(others)
    exact = not end and not anywhere
    entries = []
    for parts, numbers in alike.items():
        taken = strangers.get(parts, {})
        layers = dict.fromkeys(number[:1] for number in numbers)
        if len(parts) == 1 and exact:
            entries.append(parts[0])
        elif not taken:
            entries.append(_pattern(parts, [r"\d+"] * (len(parts) - 1), end))
        elif len(numbers) > 1 and not layers.keys() & {number[:1] for number in taken}:
            listed = "|".join(number for (number,) in layers)
            entries.append(_pattern(parts, [f"(?:{listed})", *[r"\d+"] * (len(parts) - 2)], end))
        elif not exact:
            entries += [_pattern(parts, number, end) for number in numbers]
        else:
            entries += ["".join(_woven(parts, number)) for number in numbers]
    if not anywhere:
        return entries
    entries = [entry.replace("re:", f"re:{ANYWHERE}", 1) for entry in entries]
    for entry in entries:
        if caught := next((other for other in others if re.match(entry.removeprefix("re:"), other)), None):
            raise ValueError(f"no pattern tells {entry.removeprefix('re:')} from {caught}: give both one scheme")
    return entries


def _by_numbers(names: Iterable[str]) -> dict[tuple[str, ...], dict[tuple[str, ...], None]]:
    """The numbers in the names, by what lies between them."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for name in names:
        found.setdefault(tuple(_NUMBER.split(name)), {})[tuple(_NUMBER.findall(name))] = None
    return found


def _pattern(parts: Iterable[str], numbers: Iterable[str], end: str) -> str:
    return "re:" + "".join(_woven([re.escape(part) for part in parts], numbers)) + end + "$"


def _woven(parts: Iterable[str], numbers: Iterable[str]) -> list[str]:
    between = iter(numbers)
    return [text for part in parts for text in (part, next(between, ""))]
