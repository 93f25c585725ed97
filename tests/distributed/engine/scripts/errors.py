"""Launched on every rank: run recipes that cannot work, and keep how each of them ended.

    scripts/errors.py RECIPE...

Each rank writes ``<recipe>_<rank>.json`` beside a recipe: type and text of the error, and the seconds that it took.
"""

import json
import sys
import time
from pathlib import Path

from engine.loop import Loop
from engine.recipe.reading import load_recipe
from model.ranks import rank
from tests.distributed.garbage import collect


def main() -> None:
    """Recipes in the order given, one process group for all of them: an error must leave it usable."""
    for path in map(Path, (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))):
        began = time.perf_counter()
        kind, text = "none", ""
        try:
            Loop(load_recipe(path)).run()
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        found = {"type": kind, "text": text, "seconds": time.perf_counter() - began}
        path.with_name(f"{path.stem}_{rank()}.json").write_text(json.dumps(found))
        collect()


if __name__ == "__main__":
    main()
