"""The error of a bad recipe, and the checks that its sections have in common."""

import math
import os
from collections.abc import Iterator

from quant.patterns import pattern_problem


class RecipeError(ValueError):
    """A bad recipe. Its text has one line per problem, which opens with the path of the key, like ``optim.lr``."""


def need(good: bool, key: str, value: object, expected: str) -> Iterator[str]:
    """Yields the problem line of ``key`` unless the value is good."""
    if not good:
        yield f"{key}: {value!r}, expected {expected}"


def at_least(key: str, value: float, lowest: float) -> Iterator[str]:
    """Yields a problem line if a number is below ``lowest`` or not finite."""
    yield from need(math.isfinite(value) and value >= lowest, key, value, f"at least {lowest}")


def positive(key: str, value: float) -> Iterator[str]:
    """Yields a problem line if a number is not above 0, or not finite."""
    yield from need(math.isfinite(value) and value > 0, key, value, "a number above 0")


def pattern(key: str, value: str) -> Iterator[str]:
    """Yields a problem line if a text is no regular expression, or one that may take for ever."""
    if problem := pattern_problem(value):
        yield f"{key}: {value[:200]!r}, expected a regular expression ({problem})"


def not_there(path: str) -> str:
    """A path for an error message; beside a relative one stands the directory that it is relative to."""
    return repr(path) if os.path.isabs(path) else f"{path!r} (in {os.getcwd()})"
