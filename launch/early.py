"""What a script does before it imports torch and DeepSpeed, which takes many seconds: a wrong ``model.path`` ends it,
and Ctrl-C while it imports, or a transformers that is too old, is one line.

A wrong path is the mistake that people make most. All else is found by reading the recipe
(:mod:`engine.config.reading`), which knows every option; what cannot be understood here is left to that.
"""

import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from types import TracebackType

import yaml

from engine.config.errors import checkpoint_problems

GRACE_SECONDS = 1.0  # for the rank that prints, before another's end makes the launcher end them all


def end_quietly() -> None:
    """From here on Ctrl-C, and a transformers that is too old, end the process with a line of local rank 0's, instead
    of the traceback of an import.

    Any other exception that nobody catches has its traceback.
    """
    sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A path says that transformers was found, and broke.
    too_old = isinstance(error, ImportError) and error.name == "transformers" and error.path is None
    if not too_old and not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}" if too_old else "\ninterrupted", file=sys.stderr, flush=True)


def check_model_path(argv: Sequence[str] | None = None) -> None:
    """Exit with code 2, and one line of local rank 0's, unless the last ``model.path`` is a directory with config.json.

    Several machines are left to the reading of the recipe: what one of them lacks, the others must hear.
    """
    arguments = sys.argv[1:] if argv is None else argv
    world = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world)) != world:
        return
    path = _model_path(arguments)
    if path is None or {"-h", "--help", "--print_config"} & set(arguments):
        return
    if problems := list(checkpoint_problems("model.path", path)):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr, flush=True)
        else:
            time.sleep(GRACE_SECONDS)
        raise SystemExit(2)


def _model_path(arguments: Sequence[str]) -> str | None:
    """What the command line says of ``model.path``, the last that does; None where it is not plain."""
    found = None
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in pairwise(words):
        if option == "--model":
            return None
        if option == "--model.path":
            found = value
        elif option == "--config":
            if not os.path.isfile(value):  # a pipe would be read for ever
                return None
            try:
                with open(value, encoding="utf-8") as file:
                    found = yaml.safe_load(file)["model"]["path"]
            except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
                return None
    return found if isinstance(found, str) else None
