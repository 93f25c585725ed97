"""Launched on every rank: collectives of a step, and scales that every rank holds whole.

    scripts/collectives.py DIRECTORY

``DIRECTORY/config.json`` is a MoE. Each rank writes ``<rank>.json``: calls by way, persistence threshold and kind, and
what a write to scales left.
"""

import json
import sys
from pathlib import Path

import torch

from benchmarks.moe import engine_of, logged
from engine.session.context import init_ranks
from model.ranks import rank
from model.zero import forward_only, gathered, is_whole
from quant import QuantLayer


def written(model) -> dict:
    """Each rank writes another number to all frozen scales, rank 0's is to hold; and how many of them are whole."""
    scales = [layer.weight_s0 for layer in model.modules() if isinstance(layer, QuantLayer)]
    with gathered(scales, modifier_rank=0), torch.no_grad():
        before = [scale.clone() for scale in scales]
        for scale in scales:
            scale.fill_(rank() + 1)
    with gathered(scales):
        values = {float(value) for scale in scales for value in scale}
    with gathered(scales, modifier_rank=0), torch.no_grad():
        for scale, value in zip(scales, before, strict=True):
            scale.copy_(value)
    return {"values": sorted(values), "whole": sum(map(is_whole, scales)), "scales": len(scales)}


def main() -> None:
    """The plain model comes last: see benchmarks/moe.py."""
    (directory,) = (Path(argument) for argument in sys.argv[1:] if not argument.startswith("--local_rank"))
    init_ranks()
    found = {}
    for way in ("stacked", "plain"):
        for threshold in (None, 0):
            # At 0 nothing is kept from forward to backward either, as in a model that does not fit.
            options = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 300_000} if threshold == 0 else {}
            engine, after_step = engine_of(way, directory, threshold, **options)
            if way == "stacked":
                found[f"written {threshold}"] = written(engine.module)
            generator = torch.Generator().manual_seed(rank())
            for _ in range(4):
                logged()
                ids = torch.randint(0, 2048, (1, 32), generator=generator)
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
                after_step()
            found[f"{way} {threshold}"] = logged()[0]
            # What a forward without backward has set out to gather must not be in the way of gathering all of it.
            with forward_only(engine), torch.no_grad():
                engine(input_ids=ids)
            with gathered(engine.module.parameters()):
                found[f"gathered {way} {threshold}"] = all(p.numel() for p in engine.module.parameters())
            engine.destroy()
    (directory / f"{rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
