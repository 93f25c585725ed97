"""Find DeepSpeed's launcher, and prepare starting other scripts."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from engine import ROOT


def find_launcher() -> str:
    """Find ``deepspeed`` in the interpreter's folder, whose environment need not be active, or in PATH.

    Raises:
        FileNotFoundError: the launcher is in neither.
    """
    folder = Path(sys.executable).parent
    found = shutil.which("deepspeed", path=os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise FileNotFoundError(
            f"there is no deepspeed launcher in {folder} or in PATH: pip install -r requirements.txt"
        )
    return found


def program(command: Sequence[str]) -> str:
    """Return the path of a command's program; ``deepspeed`` and ``python`` come from this environment.

    Raises:
        FileNotFoundError: there is no such program.
    """
    name = command[0]
    if name in ("deepspeed", "python"):
        return find_launcher() if name == "deepspeed" else sys.executable
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name!r}: there is no such program in PATH")
    return found


def environment() -> dict[str, str]:
    """Build the environment variables for another script of this project."""
    found = {"OMP_NUM_THREADS": "1", **os.environ}
    # Python's path has a script's own folder, but the project's root only if it is installed.
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH")]))
    return found
