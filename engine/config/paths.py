"""Paths of a recipe that lead nowhere. It imports nothing, so that a script can ask before anything heavy is loaded."""

import os
from collections.abc import Iterator

MOST_JSON_BYTES = 2**28  # a tokenizer has 35 MB; what is read takes many times as much memory, on every rank


def not_there(path: str) -> str:
    """A path for an error message; beside a relative one stands the directory that it is relative to."""
    return repr(path) if os.path.isabs(path) else f"{path!r} (in {os.getcwd()})"


def checkpoint_problems(key: str, path: str) -> Iterator[str]:
    """A problem line if there is no directory with config.json at ``path``."""
    if not os.path.isdir(path):
        yield f"{key}: {not_there(path)}, expected a directory with config.json (a local Hugging Face checkpoint)"
    elif not os.path.isfile(os.path.join(path, "config.json")):
        yield f"{key}: {not_there(path)}, expected config.json in that directory (a Hugging Face checkpoint)"
    else:
        for entry in os.scandir(path):
            if entry.name.endswith(".json") and entry.is_file() and entry.stat().st_size > MOST_JSON_BYTES:
                yield f"{key}: {entry.path!r} has {entry.stat().st_size:,} bytes, expected at most {MOST_JSON_BYTES:,}"
