"""Launched on every rank: which functions of the project run from launch/train.py to the first optimizer step.

    scripts/story.py --config RECIPE

Rank 0 writes a file beside ``RECIPE`` that ends in ``.json``: for every file of the project in which a function ran,
how many lines those functions have. Docstrings and comments count too, since a reader passes them all the same.
"""

import ast
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from launch import train  # before the profiler, under which importing torch and transformers takes a minute
from tests.lib.root import ROOT

FOLDERS = ("data", "engine", "launch", "model", "quant")
STEP = "deepspeed/runtime/engine.py"


def lines_of(file: Path, firsts: set[int]) -> int:
    """Lines of the functions of ``file`` that begin (decorators first) on one of ``firsts``; nested ones once."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in firsts and node.end_lineno is not None:
                lines |= set(range(first, node.end_lineno + 1))
    return len(lines)


def main() -> None:
    """Run training below a profiler that ends with the engine's first step."""
    recipe = Path(sys.argv[-1])
    ran: dict[str, set[int]] = {}

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/") and code.co_name != "<module>":
            ran.setdefault(code.co_filename, set()).add(code.co_firstlineno)
        elif event == "return" and code.co_name == "step" and code.co_filename.endswith(STEP):
            sys.setprofile(None)
            if os.environ["RANK"] == "0":
                files = {Path(name): firsts for name, firsts in ran.items()}
                lines = {str(file.relative_to(ROOT)): lines_of(file, firsts) for file, firsts in files.items()}
                kept = {name: count for name, count in lines.items() if count and name.split("/")[0] in FOLDERS}
                recipe.with_suffix(".json").write_text(json.dumps(kept))

    sys.setprofile(watch)
    train.main()


if __name__ == "__main__":
    main()
