"""Steps whose loss or gradients are not finite are counted and left out, and leave nothing behind."""

import math

import pytest
import torch

from tests.distributed.engine.scripts.variants import POISONED
from tests.lib.plain import load_result
from tests.lib.variants import NO_TEACHER, Variant, run_variants

POISON = {"train": {"steps": 3, "gradient_accumulation_steps": 1}, "loss": NO_TEACHER, "optim": {"lr": 1e-2}}
POISONED_RUNS = {
    **{f"poison_{stage}": Variant({**POISON, "stage": stage}, dtype="bfloat16", action="poison") for stage in range(4)},
    **{f"poison_fp32_{stage}": Variant({**POISON, "stage": stage}, action="poison") for stage in (0, 3)},
}
RUNS = {
    **POISONED_RUNS,
    "blind": Variant(
        {"stage": 3, "loss": NO_TEACHER, "quant": {"fake_quant_start": 3}}, dtype="bfloat16", action="poison_observers"
    ),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """One launch for all runs."""
    return run_variants(tmp_path_factory.mktemp("skipped"), RUNS)


@pytest.mark.parametrize("name", POISONED_RUNS)
def test_a_step_that_is_not_finite_is_counted_and_not_taken(paths, name):
    found = load_result(paths[name])
    assert found["skipped"] == [0] * POISONED + [1] * (len(found["skipped"]) - POISONED)
    before, after = found["seen"]["before"], found["seen"]["after"]
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(not torch.equal(after[key], found["weights"][key]) for key in after)
    assert all(weight.isfinite().all() for weight in found["weights"].values())
    assert math.isfinite(found["losses"][-1]["loss/total"])


def test_a_step_that_is_left_out_leaves_nothing_in_the_observers(paths):
    found = load_result(paths["blind"])
    assert found["skipped"] == [0, 1, 1, 1, 1]
    scales = [value for name, value in found["weights"].items() if name.endswith("input_s0")]
    assert scales and all(bool(scale.isfinite().all()) for scale in scales)
