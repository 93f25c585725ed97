"""Launched on every rank: train as each recipe says, and keep what steps really held and sent.

For each recipe, rank 0 writes ``<output_dir>/measured.json``: bytes of parameters, gradients and optimizer, the most
that torch's allocator gave out during a step, and the collectives of a step by DeepSpeed's own log. Gloo's threads may
free late what a finished collective held, so the peak is that of the step which held least.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed.comm as comm
import torch

from benchmarks.timing import most_allocated
from engine.config.reading import load_recipe
from engine.loop import Loop, LoopState
from engine.report import MEASURED, read_measured
from model.ranks import is_main

MEASURED_STEPS = range(3, 11)  # from the first whose gathers follow a complete trace


def live_bytes() -> int:
    """Return the bytes of all tensors alive, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def run(loop: Loop) -> dict[str, Any]:
    """Steps of which all are measured from the fourth on."""
    peaks: list[int] = []
    sent: dict[str, list[list[int]]] = {}
    earlier = live_bytes()  # DeepSpeed keeps an engine of stage 3 in a global list, so that runs before leave theirs
    before, profile = 0, None

    @loop.every(1)
    def measure(state: LoopState) -> None:
        nonlocal before, profile
        log = comm.comm.comms_logger.comms_dict
        if profile is not None:
            profile.stop()
            peaks.append(before - earlier + most_allocated(profile))
            for kind, sizes in log.items():
                sent[kind] = [[size, of_size[0]] for size, of_size in sizes.items()]
        if state.step in MEASURED_STEPS:
            before = live_bytes()
            log.clear()
            profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
            profile.start()

    state = loop.run()
    items = read_measured(Path(loop.recipe.output_dir, MEASURED)).items if is_main() else {}
    state.session.engine.destroy()
    assert len(peaks) == len(MEASURED_STEPS)
    return {"peak": min(peaks), "peaks": peaks, "items": items, "collectives": sent}


def main() -> None:
    """Recipes in the order given, one process group for all of them."""
    for path in (argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")):
        recipe = load_recipe(path)
        measured = run(Loop(recipe))
        if is_main():
            Path(recipe.output_dir, "measured.json").write_text(json.dumps(measured))
        gc.collect()


if __name__ == "__main__":
    main()
