"""Fail early, before the slow import of torch and DeepSpeed: check ``model.path``, and reduce Ctrl-C or a transformers
that is too old to one line.

A wrong path is the most frequent mistake. All other options are checked by reading the recipe
(:mod:`engine.config.reading`); command lines that this module cannot parse are left to it.
"""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

import yaml

from engine.config.errors import checkpoint_problems


def end_quietly() -> None:
    """Install an excepthook: Ctrl-C, or a transformers that is too old, ends the process with one line on local rank 0.

    Any other uncaught exception keeps its traceback.
    """
    sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A path means that transformers was found, but its import failed.
    too_old = isinstance(error, ImportError) and error.name == "transformers" and error.path is None
    if not too_old and not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}" if too_old else "\ninterrupted", file=sys.stderr, flush=True)


def check_model_path(argv: Sequence[str] | None = None) -> None:
    """Exit with code 2 unless the last ``model.path`` is a directory with config.json and weights.

    Launches of several ranks are checked when the recipe is read: a file that one rank lacks is then reported to all.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    path = _model_path(arguments)
    if path is None or {"-h", "--help", "--print_config"} & set(arguments):
        return
    if problems := list(checkpoint_problems("model.path", path, weights=True)):
        print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
        raise SystemExit(2)


def _model_path(arguments: Sequence[str]) -> str | None:
    """Return the last ``model.path`` of the command line; None if it cannot be determined."""
    found = None
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in pairwise(words):
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
