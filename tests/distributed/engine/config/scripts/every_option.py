"""One rank that runs recipes one after the other, and writes of each what can be seen of it.

    scripts/every_option.py RECIPE...  (with a + before those whose calls are counted, which takes twice as long)

Writes for each ``RECIPE`` a file beside it that ends in ``.json``: under ``results`` what the run made (losses, rates,
gradient norms, weights, files, TensorBoard), under ``calls`` how often each function of the project was called; under
``refused`` the line with which it ended instead.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from model.ranks import RankError
from tests.distributed.engine.scripts.train import whole_parameters
from tests.lib.garbage import collect
from tests.lib.root import ROOT

MEASURED = re.compile("time|second|memory|per_s|perf")  # of TensorBoard: what no two runs have the same of


def main() -> None:
    """Recipes in the order given."""
    for argument in sys.argv[1:]:
        path = Path(argument.removeprefix("+"))
        calls: dict[str, int] = {}

        def count(frame: FrameType, event: str, _: Any, calls: dict[str, int] = calls) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(f"{ROOT}/") and "/recipe/" not in code.co_filename:
                name = f"{code.co_filename}:{code.co_qualname}"
                calls[name] = calls.get(name, 0) + 1

        sys.setprofile(count if argument.startswith("+") else None)
        try:
            seen: dict[str, Any] = {"results": results(path), "calls": calls}
        except (RankError, RecipeError) as error:
            seen = {"refused": str(error)}
        finally:
            sys.setprofile(None)
        path.with_suffix(".json").write_text(json.dumps(seen))
        collect()


def results(path: Path) -> list[str]:
    """Run a recipe; texts that are equal where everything that it made is."""
    loop, steps = Loop(load_recipe(path)), []

    @loop.every(1)
    def keep(state: LoopState) -> None:
        assert state.last is not None
        rates = {group["name"]: group["lr"] for group in state.session.engine.optimizer.param_groups}
        steps.append((state.last.losses, state.last.grad_norm, state.last.scale_grad_norm, rates))

    state = loop.run()
    weights = [(name, tensor.float().tolist()) for name, tensor in whole_parameters(state.model).items()]
    state.session.engine.destroy()
    output = Path(loop.recipe.output_dir)
    files = {
        str(file.relative_to(output)): digest(file.read_bytes())
        if file.suffix in (".safetensors", ".json") and file.name != "memory.json"
        else ""
        for file in sorted(output.rglob("*"))
        if file.is_file() and file.parent.name != "tensorboard"
    }
    return [str(steps), digest(str(weights).encode()), str(files), str(logged(output / "tensorboard"))]


def digest(data: bytes) -> str:
    """Some bytes that tell data apart."""
    return hashlib.sha256(data).hexdigest()[:16]


def logged(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard has: steps and values by tag, and of what is measured the steps."""
    events = EventAccumulator(str(directory))
    events.Reload()
    scalars = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    images = {tag: [(image.step, 0.0) for image in events.Images(tag)] for tag in events.Tags()["images"]}
    return {
        tag: [(step, 0.0 if MEASURED.search(tag) else value) for step, value in points]
        for tag, points in sorted({**scalars, **images}.items())
    }


if __name__ == "__main__":
    main()
