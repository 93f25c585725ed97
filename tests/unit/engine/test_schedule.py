"""Learning-rate curves at their corners, events in order, and what events may set."""

import itertools
import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from engine.checks import check_weights
from engine.config.sections import EVENT_RATES, EventRecipe, OptimRecipe
from engine.losses.objective import Objective
from engine.schedule import Schedule, _measured, add_event, check_events, evaluate_start
from engine.session.optimizer import lr_factor, peak_learning_rates
from engine.session.session import Overrides
from engine.state import HeldOutResults, LoopState
from model.ranks import RankError
from quant import get_scheme, replace_layers
from tests.lib.recipes import minimal
from tests.lib.root import ROOT


def curve(kind, total=10, warmup=0, min_ratio=0.1, **options):
    steps = range(total)
    return [lr_factor(step, total=total, warmup=warmup, kind=kind, min_ratio=min_ratio, **options) for step in steps]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_starts_at_the_peak_passes_the_middle_and_ends_at_the_minimum(kind):
    values = curve(kind, total=11)
    assert [values[0], values[5], values[-1]] == pytest.approx([1.0, 0.55, 0.1])
    assert all(a > b for a, b in itertools.pairwise(values))
    assert curve(kind, total=1) == curve(kind, total=1, warmup=1) == [1.0]


def test_wsd_is_flat_and_then_a_straight_line():
    values = curve("wsd", warmup=2, min_ratio=0.2, decay=4)
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warmup_is_linear_and_moves_from_the_first_step(kind):
    assert curve(kind, warmup=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("share", "steps", "warmup"), [(0.1, 40, 4), (0.07, 100, 7), (0.03, 10, 1), (1.0, 7, 7)])
def test_a_share_of_the_steps_warms_up_and_is_rounded_up(share, steps, warmup):
    """As in transformers, whose warmup_ratio it is."""
    assert OptimRecipe(warmup_ratio=share).warmup(steps) == warmup
    values = curve("constant", total=steps, warmup=OptimRecipe(warmup_ratio=share).warmup(steps))
    assert values == [min(1.0, (step + 1) / warmup) for step in range(steps)]


def test_unknown_kind():
    with pytest.raises(ValueError, match="constant, linear, cosine, wsd"):
        curve("sine")


def test_events_run_at_their_steps_in_order():
    schedule = Schedule()
    schedule.at(2, lambda seen: seen.append("at 2"))
    schedule.at(2, lambda seen: seen.append("then"))
    schedule.every(4, lambda seen: seen.append("last"), last=True)
    schedule.when(lambda seen: "then" in seen, lambda seen: seen.append("once"))
    schedule.every(2, lambda seen: seen.append("every 2"))
    seen: list = []
    for step in range(5):
        schedule.run_before(step, seen)
        seen.append(step)
        schedule.run_after(step + 1, seen)
    assert seen == [0, 1, "every 2", "at 2", "then", 2, "once", 3, "every 2", "last", 4]
    with pytest.raises(ValueError, match="count from 0"):
        schedule.at(-1, print)
    with pytest.raises(ValueError, match="1 or more"):
        schedule.every(0, print)


def test_a_condition_acts_once_when_it_holds_and_not_again_in_a_resumed_run():
    def schedule(met):
        events = Schedule(met=met)
        events.when(lambda seen: len(seen) >= 2, lambda seen: seen.append("two"))
        events.when(lambda seen: "two" in seen, lambda seen: seen.append("after"))
        return events

    seen: list = []
    events = schedule([])
    for step in range(4):
        events.run_after(step + 1, seen)
        seen.append(step)
    assert seen == [0, 1, "two", "after", 2, 3] and events.met == [0, 1]
    schedule([0]).run_after(5, seen)
    assert seen[-1] == "after" and seen.count("two") == 1


def test_a_resumed_run_knows_the_events_that_have_run_by_their_content():
    """Also if the recipe has other events before them, or one more like them."""
    first, second = (
        EventRecipe(when="loss/lm < 9", freeze_scales=True),
        EventRecipe(when="loss/lm < 9", lr={"norms": 0}),
    )

    def schedule(*events: EventRecipe) -> Schedule:
        made = Schedule()
        for event in events:
            add_event(made, event)
        made.when(len, print)
        return made

    run = schedule(first, first)
    run.met = [0, 2]
    for events, met in (((first, first), [0, 2]), ((second, first), [1, 2]), ((second, second), [2])):
        resumed = schedule(*events)
        resumed.load_state_dict(run.state_dict())
        assert resumed.met == met


def below(bound: float) -> Callable[[Any], bool]:
    return lambda state: state < bound


def test_conditions_of_a_script_are_told_apart_by_their_code_and_values(capsys):
    """Not by their order alone, which a condition that is added before them changes."""
    first = lambda state: state < 2  # noqa: E731
    others = [below(1.5), below(2.5), lambda state: state in {"a", "b"}, lambda state, least=1: state > least]
    others += [lambda state, least=2: state > least, partial(operator.lt, 1), partial(operator.lt, 2), len]
    run, resumed = Schedule(), Schedule()
    for condition in others:
        run.when(condition, print)
    assert len({name.rpartition(" ")[0] for name in run.names}) == len(others)
    run.met = [1, 4, 5]
    for condition in (first, *others[::-1]):
        resumed.when(condition, print)
    resumed.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert {resumed.conditional[index][0] for index in resumed.met} == {others[index] for index in run.met}
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("resumed: the checkpoint does not know the event 'test_conditions_of_a_script")
    assert said.endswith(": print', which may run from now on")


NAMES = """
from engine.schedule import Schedule
schedule, count = Schedule(), 0

def script():
    count = 0
    def counted(state):
        nonlocal count
        count += 1
        return False
    schedule.when(counted, print)
    schedule.when(lambda state: state in {"a", "b", "c"}, lambda state: [x for x in state])
    counted(1)
script()
print(schedule.names)
"""


def test_names_of_events_are_those_of_another_process(capsys):
    """Whatever the seed of hashes is, and what a condition has counted."""
    exec(NAMES, {})
    found = capsys.readouterr().out
    assert "script.<locals>.counted 0: print 0" in found
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", NAMES]
    assert subprocess.run(command, env=environment, check=True, text=True, capture_output=True).stdout == found


def test_overrides_refuse_what_would_do_nothing_or_harm():
    recipe = minimal(loss={"kd_weight": 0.5, "teacher": "t"})
    overrides = Overrides(recipe)
    overrides.set_peak_rates(weights=0.0, act_scales=1e-2)
    overrides.set_loss_weights(lm=0.0)
    assert overrides.peaks()["weights"] == 0.0 and overrides.peaks()["norms"] == recipe.optim.lr
    assert (overrides.lm_weight, overrides.kd_weight) == (0.0, 0.5)
    again = Overrides(recipe)
    again.load_state_dict(overrides.state_dict())
    assert again == overrides
    engine = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"name": "weights"}]))
    of_weights = SimpleNamespace(session=SimpleNamespace(engine=engine, overrides=overrides))
    for call, message in [
        (
            lambda: overrides.set_peak_rates(scales=1.0),
            "scales: 1.0, expected 0 or more, for one of the groups weights,",
        ),
        (lambda: overrides.set_peak_rates(weights=float("nan")), "weights: nan"),
        (
            lambda: LoopState.set_peak_rates(of_weights, weights=1e-3, adapters=1e-3),
            "learning rate adapters: no parameter of this group trains, expected one of weights",
        ),
        (lambda: overrides.set_loss_weights(kl=1.0), "kl: 1.0, expected lm or kd, with a weight"),
        (lambda: overrides.set_loss_weights(kd=0.0), "both 0"),
        (lambda: Overrides(minimal()).set_loss_weights(kd=1.0), "no teacher is loaded"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert (overrides.lm_weight, overrides.kd_weight) == (0.0, 0.5)
    assert set(EVENT_RATES) == set(peak_learning_rates(recipe.optim))


def test_a_condition_on_what_is_never_measured_is_an_error():
    model = nn.Sequential(nn.Linear(32, 32))
    quantization = replace_layers(model, get_scheme("w4a16_g32"), learn_weight_scale=True, learn_input_scale=False)
    events = [EventRecipe(at=1, fake_quant=False), EventRecipe(when="loss/ml < 2", fake_quant=True)]
    check_events(events, quantization, [], ["loss/ml"])
    said = "schedule[1].when: 'loss/ml < 2', expected one of loss/lm, eval/lm"
    with pytest.raises(ValueError, match=re.escape(said)):
        check_events(events, quantization, [], ["loss/lm", "eval/lm"])


def test_a_resumed_run_warns_of_options_that_events_have_replaced():
    before = minimal(loss={"kd_weight": 0.5, "teacher": "t"})
    recipe = minimal(loss={"lm_weight": 2.0, "kd_weight": 0.3, "teacher": "t"}, optim={"lr": 3e-6, "scale_lr": 1e-2})
    overrides = Overrides(recipe, {"kd": 0.3, "lm": 4.0}, {"weights": 1e-6, "act_scales": 5e-3})
    assert list(overrides.replaced(before)) == [
        "warning: peak learning rate of weights (was 1e-05, is 3e-06) has no effect: an event has set 1e-06",
        "warning: peak learning rate of act_scales (was 0.001, is 0.01) has no effect: an event has set 0.005",
        "warning: loss.lm_weight (was 1, is 2) has no effect: an event has set 4",
    ]


def test_weights_that_events_have_set_need_a_teacher_and_a_loss_in_a_resumed_run():
    state: Any = SimpleNamespace(step=7, session=SimpleNamespace(teacher=None))
    check_weights(state, Objective())
    with pytest.raises(RankError, match=r"step 7: the loss kd has the weight 0\.5, .* no teacher is loaded"):
        check_weights(state, Objective(1.0, 0.5))
    state.session.teacher = object()
    check_weights(state, Objective(0.0, 0.5))
    with pytest.raises(RankError, match="step 7: the losses lm and kd have the weight 0"):
        check_weights(state, Objective(0.0, 0.0))


def test_a_total_belongs_to_the_weights_that_it_was_measured_with():
    """An event of the same step, after the evaluation and before the checkpoint, may change them."""
    recipe = minimal(eval={"every": 1, "best": "total"}, data={"held_out": 4}, loss={"kd_weight": 0.5, "teacher": "t"})
    evaluations, objective = HeldOutResults(), recipe.loss.objective(lm=1.0, kd=0.5)
    evaluations.record(3, {"eval/total": 2.0}, objective.weights())
    held_out = SimpleNamespace(samples=SimpleNamespace(key="samples"))
    state: Any = SimpleNamespace(recipe=recipe, held_out=held_out, step=3, evaluations=evaluations)
    state.evaluation, state.objective = evaluations.last, lambda: objective
    before = _measured(state)
    objective = recipe.loss.objective(lm=1.0, kd=40.0)
    assert _measured(state) == before
    evaluations.record(3, {"eval/total": 2.0}, objective.weights())
    assert _measured(state) != before


def test_a_value_without_quantization_is_not_compared_with_one_with_it():
    """A run with fake_quant_start -1 may be resumed with fake quant."""
    held_out, found = SimpleNamespace(samples=SimpleNamespace(key="samples")), []
    for start, on in ((-1, False), (-1, True), (0, True), (0, False)):  # a script may switch it on at -1
        recipe = minimal(eval={"every": 1}, data={"held_out": 4}, quant={"fake_quant_start": start})
        evaluations = HeldOutResults()
        evaluations.record(3, {"eval/lm": 2.0}, {})
        state: Any = SimpleNamespace(recipe=recipe, held_out=held_out, step=3, evaluations=evaluations)
        state.evaluation, state.objective = evaluations.last, Objective
        state.quant = SimpleNamespace(enabled=on)
        found.append(_measured(state).of)
    assert found[1:] == [found[1]] * 3 and found[0] != found[1]


@pytest.mark.parametrize(("before", "late"), [(4, False), (2, True), (None, True)])
def test_events_wait_for_an_evaluation_that_a_signal_has_prevented(monkeypatch, before, late):
    """The resumed run makes up for it, and for the recipe's conditions on its results; others were checked."""
    schedule, seen = Schedule(), list[dict[str, float]]()
    add_event(schedule, EventRecipe(when="loss/lm < 3", lr={"weights": 0.0}))
    add_event(schedule, EventRecipe(when="eval/lm < 3", lr={"norms": 0.0}))
    schedule.when(lambda state: state.last.losses["loss/lm"] < 3, lambda state: seen.append({}))
    evaluations = HeldOutResults(before=before)
    state: Any = SimpleNamespace(step=4, saved_step=4, last=None, held_out=None, evaluations=evaluations)
    state.recipe, state.objective = minimal(eval={"every": 2}, data={"held_out": 4}), Objective
    state.value_of, state.set_peak_rates = {"eval/lm": 2.0, "loss/lm": 2.0}.get, lambda **rates: seen.append(rates)
    for name in ("evaluate_held_out", "mark_best"):
        monkeypatch.setattr(f"engine.schedule.{name}", lambda *_, **__: None)
    evaluate_start(state, schedule)
    assert seen == [{"norms": 0.0}] * late and schedule.met == [1] * late
