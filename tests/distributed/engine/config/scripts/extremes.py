"""One rank that makes a step or two of recipes with extreme numbers, and writes of each how it ended.

    scripts/extremes.py RECIPE...

Writes for each ``RECIPE`` a file beside it that ends in ``.json``: the ``steps`` that it made, and, where it had one,
its ``error``, with the ``kind``.
"""

import json
import sys
from pathlib import Path

from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.checkpoint.load import check_finite
from tests.lib.garbage import collect

STEPS = 2


class Enough(Exception):
    """Longer runs show no more."""


def main() -> None:
    """Recipes in the order given."""
    for argument in sys.argv[1:]:
        path = Path(argument)
        states: list[LoopState] = []
        seen = {"kind": "", "error": ""}
        try:
            run(path, states)
        except Enough:
            pass
        except Exception as error:
            seen = {"kind": type(error).__name__, "error": str(error)}
        path.with_suffix(".json").write_text(json.dumps({"steps": len(states), **seen}))
        if states:
            states[0].session.engine.destroy()
        states.clear()
        collect()


def run(path: Path, states: list[LoopState]) -> None:
    """Some steps, after each of which all parameters are numbers."""
    loop = Loop(load_recipe(path))

    @loop.every(1)
    def look(state: LoopState) -> None:
        states.append(state)
        check_finite(state.model, "after a step")
        if len(states) == STEPS:
            raise Enough

    loop.run()


if __name__ == "__main__":
    main()
