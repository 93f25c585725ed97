"""Regular expressions of recipes and of exports' configurations: refused where one may take for ever.

Python's engine tries every way in which a pattern may share a name out among its repetitions. One repetition inside
another has exponentially many ways, and each further one in a row multiplies them by the length of the name: with four,
a name of 80 characters has some two million, which is a hundredth of a second.
"""

import re
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

MOST_CHARACTERS, MOST_REPEATS = 2000, 4
MANY = 16  # a repetition that may come so often counts as one without end
_DIGITS = frozenset({(_constants.CATEGORY, _constants.CATEGORY_DIGIT), (_constants.RANGE, (48, 57))})


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
