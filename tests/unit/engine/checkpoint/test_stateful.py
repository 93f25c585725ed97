"""State that a rank saves in addition to DeepSpeed's: every owner gets its own back."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint.resume import check_stateful, load_stateful, merge_ranks, restore_random_states
from engine.checkpoint.save import StatefulStates, random_states
from engine.fake_quant import FakeQuant
from engine.schedule import Schedule
from engine.session.optimizer import LossScale
from engine.session.session import Overrides
from engine.state import HeldOutResults, SkippedSteps
from quant import Quantization, get_scheme, replace_layers
from tests.lib.recipes import minimal
from tests.lib.tiny import tiny_model

INPUT = "model.layers.0.self_attn.q_proj"


def quantization() -> Quantization:
    return replace_layers(
        tiny_model("llama"), get_scheme("fp8_static"), learn_weight_scale=True, learn_input_scale=True
    )


def stateful() -> dict[str, Any]:
    """All that a run in fp16 has, as it is built."""
    overrides = Overrides(minimal())
    session = SimpleNamespace(quantization=quantization(), overrides=overrides, uncalibrated=frozenset({"a"}))
    events = Schedule()
    for _ in range(2):
        events.when(max, print)  # type: ignore[arg-type]
    return {
        "overrides": session.overrides,
        "quantization": session.quantization,
        "loss_scale": LossScale(8.0, 2, 1.0),
        "fake_quant": FakeQuant(session),  # type: ignore[arg-type]
        "events": events,
        "evaluations": HeldOutResults(),
        "skipped_steps": SkippedSteps(3),
    }


def saved_state(first: Quantization, absmax: float, clipped: int) -> dict[str, Any]:
    """A rank's file, in the middle of a run."""
    seen = {"absmax": torch.tensor(absmax), "clipped": torch.tensor(clipped), "total": torch.tensor(10)}
    other = {"absmax": torch.tensor(0.0), "clipped": torch.tensor(0), "total": torch.tensor(0)}
    return {
        "stateful": {
            "overrides": {"loss_weights": {"lm": 0.5}, "peak_rates": {"weights": 1e-3}, "frozen": {"act_scales"}},
            "quantization": {
                "fake_quant": {layer: (layer == INPUT, False) for layer in first.modules},
                "observing": True,
                "observers": {group.owner: seen if group.owner == INPUT else other for group in first.input_groups},
            },
            "fake_quant": {
                "forgets": True,
                "scale_steps": {"weight_scales": 3, "act_scales": 2},
                "stale": {"weight": {"b"}, "input": set()},
            },
            "events": {"events": ["max: print 0", "max: print 1"], "met_events": ["max: print 1"]},
            "evaluations": {"last": {"eval/lm": 2.5}, "step": 2},
            "skipped_steps": {"in_a_row": 2},
            "loss_scale": {"value": 4.0, "good_steps": 1},
        },
        "random": {},
        "pieces": [("name", 0, 1, 2, 3)],
    }


def check_loaded(found: StatefulStates, absmax: float, clipped: int) -> None:
    run: Any = SimpleNamespace(**found)
    assert run.overrides.loss_weights == {"lm": 0.5} and run.overrides.peaks()["weights"] == 1e-3
    assert run.overrides.frozen == {"act_scales"}
    assert {name for name, on in run.quantization.fake_quant_state().items() if on[0]} == {INPUT}
    assert run.quantization.observing
    observer = next(group.observer for group in run.quantization.input_groups if group.owner == INPUT)
    assert (observer.absmax, observer.clipped) == (absmax, clipped)
    assert (run.loss_scale.value, run.loss_scale.good_steps) == (4.0, 1)
    assert run.fake_quant.forgets and run.fake_quant.scale_steps == {"weight_scales": 3, "act_scales": 2}
    assert run.fake_quant.stale == {"weight": {"b"}, "input": set()}
    assert run.events.met == [1] and run.skipped_steps.in_a_row == 2
    assert run.evaluations.last == {"eval/lm": 2.5}
    assert (run.evaluations.before, run.evaluations.step) == (2, None)


def test_every_owner_gets_its_state_and_gives_it_again():
    first, second = stateful(), stateful()
    state = saved_state(first["quantization"], 2.0, 4)
    check_stateful(first, state)
    load_stateful(first, state)
    check_loaded(first, 2.0, 4)
    again = {"stateful": {name: owner.state_dict() for name, owner in first.items()}, "random": {}, "pieces": []}
    load_stateful(second, again)
    check_loaded(second, 2.0, 4)
    second["overrides"].frozen.clear()
    second["fake_quant"].stale["weight"].clear()
    check_loaded(first, 2.0, 4)  # nothing is shared with what was saved


def test_another_number_of_ranks_gets_what_all_of_them_saw():
    first = stateful()
    states = [saved_state(first["quantization"], *seen) for seen in ((2.0, 4), (3.0, 1), (1.0, 0))]
    load_stateful(first, merge_ranks(states))
    check_loaded(first, 3.0, 5)  # outside of a process group this is rank 0


def test_an_owner_whose_state_is_not_there_is_named():
    state = saved_state(quantization(), 2.0, 4)
    del state["stateful"]["events"]
    with pytest.raises(ValueError, match="keeps no state of events: another version has written it"):
        check_stateful(stateful(), state)
    check_stateful({"overrides": stateful()["overrides"]}, state)  # an export has no schedule


def test_random_numbers_go_on_where_they_were_saved():
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    state = random_states()
    before = draw()
    assert draw() != before
    restore_random_states(state)
    assert draw() == before
