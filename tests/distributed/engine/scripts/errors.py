"""Launched on every rank: run recipes that cannot work, and keep how each of them ended.

    scripts/errors.py RECIPE...

Each rank writes ``<recipe>_<rank>.json`` beside a recipe: type and text of the error, and how many steps came before.
"""

import json
import sys
from pathlib import Path

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.ranks import rank
from model.zero import local_data
from tests.lib.garbage import collect


def main() -> None:
    """Recipes in the order given, one process group for all of them: an error must leave it usable."""
    for path in map(Path, (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank"))):
        kind, text, steps = "none", "", []
        try:
            loop = Loop(load_recipe(path))
            loop.schedule.at(0, steps.append)  # called before the first step
            if path.stem == "diverges":
                loop.schedule.every(2, spoil)
            loop.run()
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        found = {"type": kind, "text": text, "steps": len(steps)}
        path.with_name(f"{path.stem}_{rank()}.json").write_text(json.dumps(found))
        collect()


def spoil(state: LoopState) -> None:
    """Make a weight infinite, as a run that diverges does. No recipe that is accepted does so within two steps."""
    weight = next(weight for name, weight in state.model.named_parameters() if ".0.self_attn." in name)
    local_data(weight).fill_(float("inf"))


if __name__ == "__main__":
    main()
