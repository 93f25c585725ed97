"""Collectives of a step of QAT and of the same model without quantization, on two ranks under ZeRO-3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.moe import engine_of, logged, write_config
from engine.session.context import init_ranks
from model.ranks import rank
from model.zero import forward_only, gathered, is_whole
from quant import QuantLayer
from tests.lib.launcher import on_ranks

pytestmark = pytest.mark.full  # half a minute and more


def written(model: nn.Module) -> dict[str, Any]:
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


def count(directory: Path) -> dict[str, Any]:
    """Calls of the last step by way, threshold and kind. The plain model comes last: see benchmarks/moe.py."""
    init_ranks()
    found: dict[str, Any] = {}
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
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("collectives")
    # Every weight of a Linear is above the persistence threshold that DeepSpeed has by default, 100,000 elements.
    write_config(directory, layers=3, experts=32, hidden=256, inner=16)
    (first, second), _ = on_ranks(count, directory)
    assert first == second
    return first


@pytest.mark.parametrize("threshold", [None, 0])
def test_quantized_stacks_make_no_more_collectives_than_the_plain_model(found, threshold):
    """By kind, from the third step on; learned scales included. Frozen scales are whole, and rank 0 writes them."""
    plain, stacked = found[f"plain {threshold}"], found[f"stacked {threshold}"]
    assert plain["all_gather_into_tensor"] > 0 and plain["reduce_scatter_tensor"] > 0
    assert {kind: count for kind, count in stacked.items() if count > plain.get(kind, 0)} == {}
    # After a forward without backward, which an evaluation is, before the export.
    assert found[f"gathered stacked {threshold}"]
    scales = 3 * (4 + 2)
    assert found[f"written {threshold}"] == {"values": [1.0], "whole": scales, "scales": scales}
