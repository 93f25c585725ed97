"""Scripts, one per job, and what they do before the slow import of torch and DeepSpeed.

A wrong ``model.path`` is the most frequent mistake, so it is checked before torch is imported. Reading the recipe
(:mod:`engine.config.reading`) checks all other options, and command lines that `check_model_path` cannot parse.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import yaml

from engine.config.errors import checkpoint_problems, not_there
from engine.config.hub import parse_name


def end_quietly() -> None:
    """Install an excepthook: Ctrl-C, or a transformers that is too old, ends the process with one line on local rank 0.
    Any other uncaught exception keeps its traceback."""
    sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A path means that transformers was found, but its import failed.
    too_old = isinstance(error, ImportError) and error.name == "transformers" and error.path is None
    if not too_old and not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}" if too_old else "\ninterrupted", file=sys.stderr, flush=True)


def check_model_path(argv: Sequence[str] | None = None) -> None:
    """Exit with code 2 if ``model.path`` is a local path, but no directory with config.json and weights. ``argv``
    (default: the command line) may set it several times, as an option or in a recipe: the last one counts. The message
    names missing files of the recipe's data, too. With --help, --print_config or several ranks nothing is checked here:
    the recipe's own check reports a file that one rank lacks to all ranks."""
    arguments = sys.argv[1:] if argv is None else argv
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    path = _model_path(arguments)
    if path is None or parse_name(path) or {"-h", "--help", "--print_config"} & set(arguments):
        return
    if problems := list(checkpoint_problems("model.path", path, weights=True)):
        problems += _missing_data(arguments)
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
        raise SystemExit(2)


def _model_path(arguments: Sequence[str]) -> str | None:
    """Return the last ``model.path`` of the command line; None if it cannot be determined."""
    found = None
    for option, value in _pairs(arguments):
        if option == "--model":
            return None
        if option == "--model.path":
            found = value
        elif option == "--config":
            if not os.path.isfile(value):  # reading a pipe would block or consume it
                return None
            try:
                with open(value, encoding="utf-8") as file:
                    found = yaml.safe_load(file)["model"]["path"]
            except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
                return None
    return found if isinstance(found, str) else None


def _pairs(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Pair each word with the next one; ``--option=value`` is two words."""
    return pairwise(part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word]))


def _missing_data(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a line for each file of the last recipe's data that does not exist; none if options name other data."""
    if any(word.startswith("--data") for word in arguments):
        return
    recipes = [value for option, value in _pairs(arguments) if option == "--config"]
    try:
        data = yaml.safe_load(Path(recipes[-1]).read_text(encoding="utf-8"))["data"]
        files = [(f"data.{key}[{n}]", file) for key in ("train", "eval") for n, file in enumerate(data.get(key) or ())]
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, yaml.YAMLError):
        return
    for key, file in files:
        if isinstance(file, str) and not os.path.exists(file) and parse_name(file) is None:
            yield f"{key}: {not_there(file)}, expected a file"
