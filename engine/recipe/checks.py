"""The error of a bad recipe, and the checks that its sections have in common."""

import math
import os
from collections.abc import Iterator

from quant.patterns import pattern_problem

LONGEST_PROBLEM = 1500  # characters; the longest that names every preset has some 600


class RecipeError(ValueError):
    """A bad recipe. Its text has one line per problem, which opens with the path of the key, like ``optim.lr``."""

    def __init__(self, problems: str) -> None:
        super().__init__("\n".join(map(_printable, problems.split("\n"))))


def _printable(line: str) -> str:
    """A line that a terminal shows as it is, whatever the file holds: no control characters, no book in the middle."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    half = LONGEST_PROBLEM // 2
    return line if len(line) <= LONGEST_PROBLEM else f"{line[:half]} ... {line[-half:]}"


def need(good: bool, key: str, value: object, expected: str) -> Iterator[str]:
    """Yields the problem line of ``key`` unless the value is good."""
    if not good:
        yield f"{key}: {value!r}, expected {expected}"


def at_least(key: str, value: float, lowest: float) -> Iterator[str]:
    """Yields a problem line if a number is below ``lowest``, not finite, or too large for 64 bits."""
    yield from need(_fits(value) and value >= lowest, key, value, f"at least {lowest}{_BELOW * (value > lowest)}")


def positive(key: str, value: float) -> Iterator[str]:
    """Yields a problem line if a number is not above 0, or not finite."""
    yield from need(_fits(value) and value > 0, key, value, f"a number above 0{_BELOW * (value > 0)}")


_BELOW = ", and a number that 64 bits hold"


def _fits(value: float) -> bool:
    """Whether an integer fits into 64 bits, or a number is finite; Python's integers may exceed every float."""
    return -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)


def pattern(key: str, value: str) -> Iterator[str]:
    """Yields a problem line if a text is no regular expression, or one that may take for ever."""
    if problem := pattern_problem(value):
        yield f"{key}: {value[:200]!r}, expected a regular expression ({problem})"


def not_there(path: str) -> str:
    """A path for an error message; beside a relative one stands the directory that it is relative to."""
    return repr(path) if os.path.isabs(path) else f"{path!r} (in {os.getcwd()})"
