"""Training engine on DeepSpeed. Its import checks that ``data``, ``launch``, ``model`` and ``quant`` belong to DeepQAT,
and lets other libraries print only errors.

Python searches the script's directory first, so a user's ``model.py`` or a folder ``data`` of another project would be
imported in place of DeepQAT's package.
"""

import importlib.util
import logging
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("data", "launch", "model", "quant")
LIBRARY_LOGS = "DEEPQAT_LIBRARY_LOGS"
"""Environment variable; 1 leaves the messages of other libraries as they are."""
_TALKATIVE = r"(accelerate|compressed_tensors|deepspeed|torch|transformers)(\.|$)"


def check_folders() -> None:
    """Refuse modules that shadow DeepQAT's packages. Raises ImportError, which names the shadowing file."""
    for name in FOLDERS:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None) if module is not None else importlib.util.find_spec(name)
        file = getattr(module, "__file__", None) or (spec.origin if spec is not None else None)
        if file is None or not Path(file).resolve().is_relative_to(ROOT / name):
            raise ImportError(
                f"DeepQAT's folder {ROOT / name} is shadowed: 'import {name}' finds {file or 'a folder'}. Rename that, "
                "or run your script from a directory without it; scripts in launch/ always find DeepQAT's own"
            )


def quiet_libraries() -> None:
    """Let DeepSpeed, torch (with gloo and NCCL) and transformers print only errors; call it before their import."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", module=_TALKATIVE)


check_folders()
if os.environ.get(LIBRARY_LOGS) != "1":
    quiet_libraries()
