"""Error of a bad recipe, and metadata of its options: allowed values, required other options, derived defaults.

An option declares its metadata in its field, like ``tail: bool = field(default=False, metadata=only_with(TOP_K))``;
:meth:`engine.config.config.Recipe.validate` checks a recipe against the metadata. This module imports neither torch nor
DeepSpeed, so that a script can check ``model.path`` before it loads them.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, field
from functools import partial
from typing import Any, NamedTuple

from data.files import other_kind

LONGEST_PROBLEM = 1500  # characters; a problem that names every preset has some 600
SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# Words that YAML reads as a boolean or as null; on a command line they would name a directory.
_NOT_TEXT = ("true", "false", "yes", "no", "on", "off", "null", "none", "~")
FP32_MAX = (2 - 2**-23) * 2.0**127
MOST_JSON_BYTES = 2**28  # a tokenizer has 35 MB; parsed JSON takes many times as much memory, on every rank
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
# Files of weights that are not read, by the end of their names, and what to do instead.
_PICKLED = (
    "pickled weights can run code and are not read; if you trust them, load them with transformers and save them with "
    "save_pretrained, which writes safetensors"
)
NOT_READ = {
    ".gguf": "convert it with launch/convert_gguf.py --gguf FILE --out DIRECTORY, and name that directory here",
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt", ".pkl"), _PICKLED),
    ".h5": "weights of TensorFlow are not read: save the model as safetensors",
    ".msgpack": "weights of Flax are not read: save the model as safetensors",
    ".onnx": "ONNX is not read: start from the checkpoint that it was made from",
    ".npz": "weights of NumPy or MLX are not read: start from the checkpoint that they were made from",
    ".safetensors": "of another name; an index lists the files of a checkpoint in several files",
}
# Keys of a field's metadata.
CHECK = "check"  # value -> description of the expected values, or None for a good value
ONLY_WITH = "only_with"  # conditions without which another value than the default has no effect
DERIVED = "derived"  # recipe -> the default


class RecipeError(ValueError):
    """Error of a bad recipe or option: one line per problem, which begins with the key (``optim.lr``), option or
    file."""

    def __init__(self, problems: str) -> None:
        super().__init__("\n".join(map(_printable, problems.split("\n"))))


def _printable(line: str) -> str:
    """Escape control characters of a line, and shorten it to ``LONGEST_PROBLEM``."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
    half = LONGEST_PROBLEM // 2
    return line if len(line) <= LONGEST_PROBLEM else f"{line[:half]} ... {line[-half:]}"


class Condition(NamedTuple):
    """A condition on a recipe.

    Attributes:
        words: the condition as a clause; ``{optim.schedule}`` is replaced by the recipe's value of that key.
        holds: takes a :class:`engine.config.config.Recipe`, and returns a true value if the condition holds.
    """

    words: str
    holds: Callable[[Any], object]


def only_with(*conditions: Condition) -> dict[str, Any]:
    """Return metadata of a field that has an effect only if all conditions hold; otherwise it must have its default."""
    return {ONLY_WITH: conditions}


def derived(default: Callable[[Any], Any], metadata: Mapping[str, Any] | None = None) -> Any:
    """Declare a field whose default follows from the rest of the recipe, so that it contradicts no other value:
    ``default`` computes it from the recipe. The field is None (null) until :meth:`engine.config.config.Recipe.validate`
    sets it. ``metadata``: other metadata of the field."""
    return field(default=None, metadata={DERIVED: default, **(metadata or {})})


def default_of(item: Field[Any]) -> Any:
    """Return the default that a field declares: None if it is :func:`derived`, MISSING for a required option."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def need(good: bool, key: str, value: object, expected: str) -> Iterator[str]:
    """Yield the line "key: value, expected ..." unless ``good``."""
    if not good:
        yield f"{key}: {value!r}, expected {expected}"


def values(expected: str, good: Callable[[Any], object]) -> dict[str, Any]:
    """Return metadata of a field whose values must satisfy ``good``; ``expected`` describes good values in the
    error."""
    return {CHECK: lambda value: None if good(value) else expected}


def at_least(lowest: float, most: float = FP32_MAX) -> dict[str, Any]:
    """Return metadata of a finite number from ``lowest`` to ``most``. By default ``most`` is fp32's largest number;
    integers then must be below 2^63."""

    def check(value: float) -> str | None:
        if not value >= lowest:
            return f"at least {lowest}"
        if isinstance(value, int) and most == FP32_MAX:
            return None if value < 2**63 else f"at least {lowest}, and a number that 64 bits hold"
        held = "fp32 holds" if most == FP32_MAX else f"is at most {most:.10g}"
        return None if value <= most else f"at least {lowest}, and a number that {held}"

    return {CHECK: check}


# Learning rate. AdamW divides it by 1 - beta, in fp32, and changes fp16 weights by about the rate: both must be finite.
RATE = at_least(0, 1e4)
# Weight of a loss. Its product with the loss and, in fp16, with the loss scale must be within fp32's range.
LOSS_WEIGHT = at_least(0, 1e15)
# Number above 0 that is squared or a divisor: its square and its inverse must be within fp32's range.
FACTOR = at_least(1e-15, 1e15)


def path_or_name(expected: str) -> dict[str, Any]:
    """Return metadata of a text that may be a path: not empty, no boolean or null of YAML, without NUL, with names that
    fit in a file system. ``expected`` describes the option's values in the error."""

    return {CHECK: partial(expected_path, expected)}


def expected_path(expected: str, value: str) -> str | None:
    """Check that a text may be a path. Return None if so, else the description of the expected values, which begins
    with ``expected``."""
    if value.casefold() in _NOT_TEXT:
        return f"{expected} (./{value} for one of that name)"
    names = [len(os.fsencode(name)) for name in value.split("/")] if "\0" not in value else [0]
    good = value != "" and "\0" not in value and max(names) <= 255 and sum(names) <= 4000
    return None if good else f"{expected}, in names of at most 255 bytes without NUL"


def regex() -> dict[str, Any]:
    """Return metadata of a recipe's field for a regular expression; those that are slow on some names are refused."""

    def check(value: str) -> str | None:
        from quant.rules import pattern_problem  # imports torch

        return (found := pattern_problem(value)) and f"a regular expression ({found})"

    return {CHECK: check}


def parse_size(text: str) -> int | None:
    """Parse a size like ``5GB`` (10^9), ``500MB`` or ``2GiB`` (2^30) to bytes. Without a unit the number is bytes.
    Return None for a text that is no size, and for a size below 1 byte or of 2^63 bytes or more."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * SIZE_UNITS.get(match[2].upper(), 0) if match else 0
    return int(size) if 1 <= size < 2**63 else None


def each(of_items: dict[str, Any]) -> dict[str, Any]:
    """Return metadata of a field that holds a list, each item of which must satisfy the metadata ``of_items``."""
    return {CHECK: of_items[CHECK], "each": True}


def value_problems(key: str, value: Any, declared: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem line if the option's metadata ``declared`` does not allow the value; null is always allowed."""
    if CHECK in declared and value is not None and (expected := declared[CHECK](value)):
        yield from need(False, key, value[:200] if isinstance(value, str) else value, expected)


def not_there(path: str) -> str:
    """Quote a path for an error message; a relative path together with the current directory."""
    return repr(path) if os.path.isabs(path) else f"{path!r} (in {os.getcwd()})"


def checkpoint_problems(key: str, path: str, *, weights: bool = False) -> Iterator[str]:
    """Yield a problem line if ``path`` is not a directory with config.json, if a JSON file in it is too large, or if a
    .json or .safetensors file holds something else than its name says.

    Args:
        key: option to name in the lines.
        path: the checkpoint.
        weights: also demand safetensors files.
    """
    if not os.path.isdir(path):
        yield (
            f"{key}: {not_there(path)}, expected a directory with config.json (a local Hugging Face checkpoint)"
            f"{without_weights([path] if os.path.isfile(path) else [])}"
        )
        return
    entries = {entry.name: entry for entry in os.scandir(path) if entry.is_file()}
    without = without_weights(list(entries))
    if "config.json" not in entries:
        yield f"{key}: {not_there(path)}, expected config.json in that directory (a Hugging Face checkpoint){without}"
        return
    if weights and not any(name in entries for name in WEIGHT_FILES):
        yield f"{key}: {not_there(path)}, expected {' or '.join(WEIGHT_FILES)} in that directory{without}"
    for name, entry in sorted(entries.items()):
        size = entry.stat().st_size
        if name.endswith(".json") and size > MOST_JSON_BYTES:
            yield f"{key}: {entry.path!r} has {size:,} bytes, expected at most {MOST_JSON_BYTES:,}"
        elif name.endswith((".json", ".safetensors")) and (problem := other_kind(entry.path)):
            yield f"{key}: {entry.path!r} {problem}"


def without_weights(files: list[str]) -> str:
    """Return a clause that names the first file with weights in an unsupported format (``*.bin``, ...) and says what
    to do instead; empty if ``files`` (names or paths) has none."""
    for ending, why in NOT_READ.items():
        names = {os.path.basename(file) for file in files if file.lower().endswith(ending)}
        if found := sorted(names.difference(WEIGHT_FILES)):
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return f"; found {found[0]}{more}: {why}"
    return ""
