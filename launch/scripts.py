"""Parts that scripts share, without the slow import of torch and DeepSpeed: early errors, options, other scripts.

A wrong ``model.path`` is the most frequent mistake, so it is checked before torch is imported. All other options are
checked by reading the recipe (:mod:`engine.config.reading`); command lines that `check_model_path` cannot parse are
left to it.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from engine import ROOT
from engine.config.errors import RecipeError, checkpoint_problems, expected_path, not_there
from engine.config.hub import HubError, local_paths, parse_name

# ---- before the imports


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
    """Exit with code 2 unless the last ``model.path`` is a directory with config.json and weights. The message names
    missing files of the recipe's data, too. With several ranks nothing is checked here: the recipe's own check reports
    a file that one rank lacks to all ranks."""
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


# ---- options


def option_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a script's docstring; options cannot be abbreviated."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def int_from(least: int) -> Callable[[str], int]:
    """Return the ``type`` of an option that is a whole number from ``least`` on."""

    def parsed(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}, expected {least} or more")
        return int(text)

    return parsed


def path_option(text: str) -> Path:
    """Parse the value of an option that is a path, as options of a recipe are: ``true`` or an empty text is none."""
    if (expected := expected_path("a path", text)) is not None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
    return Path(text)


class CheckpointName(str):
    """Value of an option: the directory of a checkpoint, or a name on the Hugging Face Hub, until
    :func:`fetch_checkpoints`."""


def fetch_checkpoints(
    arguments: argparse.Namespace, *, weights: bool = True, code: bool = False, known: Collection[str] = ()
) -> None:
    """Replace every :class:`CheckpointName` in the options by a local directory; names in ``known`` stay.

    ``weights`` and ``code``: see :func:`engine.config.hub.local_paths`. Raises RecipeError.
    """

    def fetched(option: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fetched(option, one) for key, one in value.items()}
        if isinstance(value, list):
            return [fetched(option, one) for one in value]
        if not isinstance(value, CheckpointName) or value in known:
            return value
        try:
            return Path(local_paths(value, weights=weights, code=code)[0])
        except HubError as error:
            expected = "the directory of a checkpoint, or a name on the Hugging Face Hub"
            raise RecipeError(f"--{option}: {not_there(value)}, expected {expected}: {error}") from error

    for option, value in vars(arguments).items():
        setattr(arguments, option, fetched(option, value))


class NamedDirectories(argparse.Action):
    """Collect options like ``NAME=DIR``, which may be repeated, in a dictionary of :class:`CheckpointName`."""

    def __call__(self, _: Any, namespace: argparse.Namespace, text: Any, __: Any = None) -> None:
        """Add one option."""
        name, equals, directory = text.partition("=")
        found = getattr(namespace, self.dest) or {}
        if not (name and equals and directory):
            raise argparse.ArgumentError(self, f"{text!r}, expected NAME=DIR, where NAME is the name of a scheme")
        if name in found:
            raise argparse.ArgumentError(self, f"{name}: given twice, {found[name]} and {directory}")
        setattr(namespace, self.dest, {**found, name: CheckpointName(directory)})


# ---- other scripts


def find_launcher() -> str:
    """Find ``deepspeed`` in the interpreter's folder, whose environment need not be active, or in PATH. Raises
    FileNotFoundError if the launcher is in neither."""
    folder = Path(sys.executable).parent
    found = shutil.which("deepspeed", path=os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise FileNotFoundError(
            f"there is no deepspeed launcher in {folder} or in PATH: pip install -r requirements.txt"
        )
    return found


def program(name: str) -> str:
    """Return the path of a program; ``deepspeed`` and ``python`` come from this environment. Raises FileNotFoundError
    if there is no such program."""
    if name in ("deepspeed", "python"):
        return find_launcher() if name == "deepspeed" else sys.executable
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name!r}: there is no such program in PATH")
    return found


def run_command(shown: Sequence[str], stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> int:
    """Print a command, run it with this project's scripts, and return its exit code."""
    print(f"$ {shlex.join(shown)}", flush=True)
    command = [str(ROOT / word) if re.fullmatch(r"launch/\w+\.py", word) else word for word in shown[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Python's path has a script's own folder, but the project's root only if it is installed.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return subprocess.run(
        [program(shown[0]), *command], check=False, env=environment, stdout=stdout, stderr=stderr
    ).returncode
