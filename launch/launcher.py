"""Where DeepSpeed's launcher is."""

import os
import shutil
import sys
from pathlib import Path


def find_launcher() -> str:
    """The path of ``deepspeed``: beside the interpreter, whose environment need not be active, or in PATH.

    Raises:
        FileNotFoundError: it is in neither.
    """
    folder = Path(sys.executable).parent
    found = shutil.which("deepspeed", path=os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)]))
    if found is None:
        raise FileNotFoundError(
            f"there is no deepspeed launcher in {folder} or in PATH: pip install -r requirements.txt"
        )
    return found
