"""The error of a bad recipe, and what its options declare of the values that they take.

A option declares its values where it stands, ``lr: float = field(default=1e-5, metadata=at_least(0))``, and
:meth:`engine.config.config.Recipe.validate` holds a recipe against what its options declare.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quant.rules import pattern_problem

LONGEST_PROBLEM = 1500  # characters; the longest that names every preset has some 600
SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FP32_MAX = (2 - 2**-23) * 2.0**127
CHECK = "check"  # the key in a field's metadata: value -> what was expected instead, or None


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


def values(expected: str, good: Callable[[Any], object]) -> dict[str, Any]:
    """Metadata of a field whose values are ``good``."""
    return {CHECK: lambda value: None if good(value) else expected}


def at_least(lowest: float, most: float = FP32_MAX) -> dict[str, Any]:
    """Metadata of a number that is finite, and of an integer that 64 bits hold; of none above ``most``."""
    held = "fp32 holds" if most == FP32_MAX else f"is at most {most:.10g}"
    return _numbers(f"at least {lowest}", lambda value: value >= lowest, held, most=most)


def _numbers(
    expected: str, good: Callable[[Any], bool], held: str, least: float = -FP32_MAX, most: float = FP32_MAX
) -> dict[str, Any]:
    def check(value: float) -> str | None:
        whole = isinstance(value, int) and most == FP32_MAX
        fits = -(2**63) <= value < 2**63 if whole else least <= value <= most
        return None if fits and good(value) else expected + _beyond(whole, held) * good(value)

    return {CHECK: check}


def _beyond(whole: bool, held: str) -> str:
    return f", and a number that {'64 bits hold' if whole else held}"


# Of a learning rate. AdamW divides it by 1 - beta, which fp32 must hold, and moves weights by as much, which fp16 must.
RATE = at_least(0, 1e4)
# Of the weight of a loss. fp32 must hold its product with the loss and, in fp16, with the loss scale.
LOSS_WEIGHT = at_least(0, 1e15)
# Of a number above 0 that is squared, or divided by: fp32 must hold its square and its inverse.
FACTOR = _numbers("a number above 0", lambda value: value > 0, "lies between 1e-15 and 1e+15", 1e-15, 1e15)


def not_empty(expected: str) -> dict[str, Any]:
    """Metadata of a text, which may be a path: without NUL, and of names that a disk takes."""

    def good(value: str) -> bool:
        names = [len(os.fsencode(name)) for name in value.split("/")] if "\0" not in value else [0]
        return value != "" and "\0" not in value and max(names) <= 255 and sum(names) <= 4000

    return values(f"{expected}, in names of at most 255 bytes without NUL", good)


def regex() -> dict[str, Any]:
    """Metadata of a regular expression that ends soon on every name."""
    return {CHECK: lambda value: (found := pattern_problem(value)) and f"a regular expression ({found})"}


def parse_size(text: str) -> int | None:
    """Bytes in a size like ``5GB`` (10^9), ``500MB`` or ``2GiB`` (2^30), at least one; None: it is something else.

    Without a unit the number is bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * SIZE_UNITS.get(match[2].upper(), 0) if match else 0
    return int(size) if 1 <= size < 2**63 else None


def size() -> dict[str, Any]:
    """Metadata of a text with a size in bytes."""
    return values("a positive number and a unit, like 5GB, 500MB or 2GiB", parse_size)


def each(of_items: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a list whose items take the values of other metadata."""
    return {CHECK: of_items[CHECK], "each": True}


def value_problems(key: str, value: Any, declared: Mapping[str, Any]) -> Iterator[str]:
    """A problem line if a value is none of those that metadata declares; null is good where the type has it."""
    if CHECK in declared and value is not None and (expected := declared[CHECK](value)):
        yield from need(False, key, value[:200] if isinstance(value, str) else value, expected)
