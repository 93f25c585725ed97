"""Options that scripts share, and functions that run other scripts."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any

from engine import ROOT
from engine.config.errors import RecipeError, expected_path, not_there
from engine.config.hub import HubError, local_paths

# ---- options


def option_parser(doc: str | None, *, ranks: bool = False) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a script's docstring; options cannot be abbreviated. With ``ranks`` it
    accepts and ignores ``--local_rank``, which the deepspeed launcher appends."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    if ranks:
        parser.add_argument("--local_rank", action=_Ignored, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


class _Ignored(argparse.Action):
    """Accept an option and its value, and keep neither."""

    def __call__(self, *_: Any) -> None:
        """Do nothing: ranks come from the environment."""


def add_plain_model(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` and ``--out``, the options of scripts that write a changed copy of a checkpoint."""
    parser.add_argument(
        "--model",
        type=CheckpointName,
        required=True,
        help="checkpoint, not quantized; a directory or a name on the Hugging Face Hub",
    )
    parser.add_argument("--out", type=path_option, required=True, help="directory to make")


def int_from(least: int) -> Callable[[str], int]:
    """Return the ``type`` of an option whose values are whole numbers of at least ``least``."""

    def parsed(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}, expected {least} or more")
        return int(text)

    return parsed


def path_option(text: str) -> Path:
    """Parse a path. Raises ArgumentTypeError for an empty text and ``true``, which are not paths in a recipe either."""
    if (expected := expected_path("a path", text)) is not None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}")
    return Path(text)


class CheckpointName(str):
    """Value of an option: the directory of a checkpoint, or its name on the Hugging Face Hub, which
    :func:`fetch_checkpoints` replaces by a directory."""


def fetch_checkpoints(
    arguments: argparse.Namespace, *, weights: bool = True, code: bool = False, known: Collection[str] = ()
) -> None:
    """Replace every :class:`CheckpointName` in the options by a local directory; names in ``known`` stay.

    ``weights`` and ``code``: see :func:`engine.config.hub.local_paths`. Raises RecipeError if a checkpoint cannot be
    fetched.
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
        """Add one option. Raises ArgumentError if it is not ``NAME=DIR``, or repeats a name."""
        name, equals, directory = text.partition("=")
        found = getattr(namespace, self.dest) or {}
        if not (name and equals and directory):
            raise argparse.ArgumentError(self, f"{text!r}, expected NAME=DIR, where NAME is the name of a scheme")
        if name in found:
            raise argparse.ArgumentError(self, f"{name}: given twice, {found[name]} and {directory}")
        setattr(namespace, self.dest, {**found, name: CheckpointName(directory)})


# ---- other scripts


def find_launcher() -> str:
    """Return the path of the launcher ``deepspeed``: from the interpreter's folder (so its environment need not be
    active), else from PATH. Raises FileNotFoundError if the launcher is in neither."""
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
    """Print a command, run it and return its exit code. A word ``launch/NAME.py`` stands for this project's script.
    ``stdout``, ``stderr``: files for its output, by default the terminal. Raises FileNotFoundError if the program does
    not exist."""
    print(f"$ {shlex.join(shown)}", flush=True)
    command = [str(ROOT / word) if re.fullmatch(r"launch/\w+\.py", word) else word for word in shown[1:]]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    # Python's path has a script's own folder, but the project's root only if it is installed.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return subprocess.run(
        [program(shown[0]), *command], check=False, env=environment, stdout=stdout, stderr=stderr
    ).returncode
