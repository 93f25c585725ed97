"""What the sections of a recipe check their values with."""

import math
import os
import re
from collections.abc import Iterator


class RecipeError(ValueError):
    """What is wrong with a recipe: one line per problem, each opening with the key's path."""


def need(good: bool, key: str, value: object, expected: str) -> Iterator[str]:
    """The one problem line if a value is not good."""
    if not good:
        yield f"{key}: {value!r}, expected {expected}"


def at_least(key: str, value: float, lowest: float) -> Iterator[str]:
    """The problem line of a number below ``lowest``."""
    yield from need(math.isfinite(value) and value >= lowest, key, value, f"at least {lowest}")


def positive(key: str, value: float) -> Iterator[str]:
    """The problem line of a number that is not above 0."""
    yield from need(math.isfinite(value) and value > 0, key, value, "a number above 0")


def pattern(key: str, value: str) -> Iterator[str]:
    """The problem line of a text that is no regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        yield f"{key}: {value!r}, expected a regular expression ({error})"


def not_there(path: str) -> str:
    """A path as an error names it: relative ones with the directory that they are relative to."""
    return repr(path) if os.path.isabs(path) else f"{path!r} (in {os.getcwd()})"
