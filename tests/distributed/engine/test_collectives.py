"""What a step of QAT sends, against a step of the same model without quantization, on two ranks under ZeRO-3."""

import json
from pathlib import Path

import pytest

from benchmarks.moe import write_config
from tests.lib.launcher import run_ranks

pytestmark = pytest.mark.full  # half a minute and more
SCRIPT = Path(__file__).parent / "scripts" / "collectives.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("collectives")
    # Every weight of a Linear is above the persistence threshold that DeepSpeed has by default, 100,000 elements.
    write_config(directory, layers=3, experts=32, hidden=256, inner=16)
    run_ranks(SCRIPT, str(directory))
    ranks = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    return ranks[0]


@pytest.mark.parametrize("threshold", [None, 0])
def test_quantized_stacks_make_no_more_collectives_than_the_plain_model(found, threshold):
    """By kind, from the third step on; learned scales included."""
    plain, stacked = found[f"plain {threshold}"], found[f"stacked {threshold}"]
    assert plain["all_gather_into_tensor"] > 0 and plain["reduce_scatter_tensor"] > 0
    assert {kind: count for kind, count in stacked.items() if count > plain.get(kind, 0)} == {}


@pytest.mark.parametrize("threshold", [None, 0])
def test_parameters_are_gathered_after_a_forward_without_backward(found, threshold):
    """Which an evaluation is, before the export."""
    assert found[f"gathered stacked {threshold}"]


@pytest.mark.parametrize("threshold", [None, 0])
def test_frozen_scales_are_whole_on_every_rank_and_rank_0_writes_them(found, threshold):
    written = found[f"written {threshold}"]
    assert written == {"values": [1.0], "whole": written["scales"], "scales": 3 * (4 + 2)}
