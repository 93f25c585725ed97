"""Learning-rate curves at their corners, events in order, and what events may set."""

import itertools
import re
import tempfile

import pytest
from torch import nn

from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.config.sections import EVENT_RATES, parse_condition
from engine.schedule import Schedule, check_events
from engine.session.optimizer import lr_factor, peak_learning_rates
from engine.session.overrides import Overrides
from quant import get_scheme, prepare


def curve(kind, total=10, warmup=0, min_ratio=0.1):
    return [lr_factor(step, total=total, warmup=warmup, kind=kind, min_ratio=min_ratio) for step in range(total)]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_starts_at_the_peak_and_ends_at_the_minimum(kind):
    values = curve(kind)
    assert values[0] == 1.0 and values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(values))


def test_linear_and_cosine_meet_half_way():
    assert curve("linear", total=11)[5] == pytest.approx(0.55) and curve("cosine", total=11)[5] == pytest.approx(0.55)


def test_wsd_is_flat_and_then_a_straight_line():
    values = [lr_factor(step, total=10, warmup=2, kind="wsd", min_ratio=0.2, decay=4) for step in range(10)]
    assert values == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warmup_is_linear_and_moves_from_the_first_step(kind):
    values = curve(kind, warmup=4)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0] and values[4] == 1.0


def test_one_step_run():
    assert curve("cosine", total=1) == [1.0] and curve("linear", total=1, warmup=1) == [1.0]


def test_unknown_kind():
    with pytest.raises(ValueError, match="constant, linear, cosine, wsd"):
        lr_factor(0, total=1, warmup=0, kind="sine", min_ratio=0)


def test_events_run_at_their_steps_in_order():
    schedule: Schedule[list] = Schedule()
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


def test_impossible_events():
    schedule: Schedule[list] = Schedule()
    with pytest.raises(ValueError, match="count from 0"):
        schedule.at(-1, print)
    with pytest.raises(ValueError, match="1 or more"):
        schedule.every(0, print)


def test_a_condition_acts_once_when_it_holds_and_not_again_in_a_resumed_run():
    def schedule(met):
        events: Schedule[list] = Schedule(met=met)
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


def test_levers_refuse_what_would_do_nothing_or_harm():
    recipe = load("loss: {kd_weight: 0.5, teacher: t}")
    overrides = Overrides(recipe)
    overrides.set_peak_rates(weights=0.0, act_scales=1e-2)
    overrides.set_loss_weights(lm=0.0)
    assert overrides.peaks()["weights"] == 0.0 and overrides.peaks()["norms"] == recipe.optim.lr
    assert (overrides.lm_weight, overrides.kd_weight) == (0.0, 0.5)
    again = Overrides(recipe)
    again.load_state_dict(overrides.state_dict())
    assert again == overrides
    for call, message in [
        (lambda: overrides.set_peak_rates(scales=1.0), "scales: 1.0, expected 0 or more, of a group out of weights,"),
        (lambda: overrides.set_peak_rates(weights=float("nan")), "weights: nan"),
        (lambda: overrides.set_loss_weights(kl=1.0), "kl: 1.0, expected 0 or more, of lm or kd"),
        (lambda: overrides.set_loss_weights(kd=0.0), "both 0"),
        (lambda: Overrides(load("")).set_loss_weights(kd=1.0), "no teacher is loaded"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert (overrides.lm_weight, overrides.kd_weight) == (0.0, 0.5)


def load(more):
    """A recipe whose files need not exist."""
    text = f"model: {{path: m}}\ndata: {{train: [d]}}\ntrain: {{steps: 9}}\noutput_dir: o\n{more}\n"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return load_recipe(file.name)


def test_events_of_a_recipe_are_read_in_all_their_forms():
    events = load(
        "schedule:\n"
        "  - {at: 0, fake_quant: off}\n"
        "  - {at: 2, fake_quant: on, layers: '.*mlp.*'}\n"
        "  - {every: 3, fake_quant: weights, observe: false}\n"
        "  - {when: loss/lm<=2.5, freeze_scales: true, lr: {weights: 1e-6}, loss: {lm: 2}}\n"
    ).schedule
    assert [event.fake_quant for event in events] == [False, True, "weights", None]
    assert (events[2].every, events[2].observe, events[1].layers) == (3, False, ".*mlp.*")
    assert parse_condition(events[3].when) == ("loss/lm", "<=", 2.5)
    assert (events[3].freeze_scales, events[3].lr, events[3].loss) == (True, {"weights": 1e-6}, {"lm": 2.0})


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("{fake_quant: on}", "schedule[0]: no time, expected exactly one of at, every, when"),
        ("{at: 1, every: 2, fake_quant: on}", "expected exactly one of at, every, when"),
        ("{at: 1}", "schedule[0]: nothing happens"),
        ("{at: 9, fake_quant: on}", "schedule[0].at: 9, expected below train.steps (9)"),
        ("{at: -1, fake_quant: on}", "schedule[0].at: -1, expected at least 0"),
        ("{every: 0, fake_quant: on}", "schedule[0].every: 0, expected at least 1"),
        ("{when: loss falls, fake_quant: on}", "schedule[0].when: 'loss falls', expected like loss/lm < 2.5"),
        ("{when: loss/lm < x, fake_quant: on}", "schedule[0].when: 'loss/lm < x'"),
        ("{at: 1, layers: a, observe: on}", "schedule[0].layers: 'a', expected fake_quant beside it"),
        ("{at: 1, layers: '(', fake_quant: on}", "schedule[0].layers: '(', expected a regular expression"),
        ("{at: 1, lr: {scales: 1}}", "schedule[0].lr: 'scales', expected one of weights"),
        ("{at: 1, lr: {weights: -1}}", "schedule[0].lr.weights: -1.0, expected at least 0"),
        ("{at: 1, loss: {kl: 1}}", "schedule[0].loss: 'kl', expected one of lm, kd"),
        ("{at: 1, loss: {kd: 1}}", "loss.teacher: None, expected a directory since an event under schedule sets kd"),
        ("{at: 1, fake_quant: sometimes}", "schedule"),
        ("{at: 1, fakequant: on}", "fakequant"),
    ],
)
def test_bad_events_are_named(event, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        load(f"schedule: [{event}]")


def test_events_that_contradict_the_rest_are_named():
    with pytest.raises(RecipeError, match=re.escape("quant.fake_quant_start: 2, expected 0 or -1")):
        load("quant: {fake_quant_start: 2}\nschedule: [{at: 3, fake_quant: on}]")
    with pytest.raises(RecipeError, match=re.escape("schedule[0].fake_quant: 'activations', expected weights or")):
        load("quant: {scheme: w4a16_g32}\nschedule: [{at: 3, fake_quant: activations}]")
    keys_and_values = "quant: {scheme: fp8_kv}\nschedule: [{at: 3, fake_quant: %s}]"
    load(keys_and_values % "activations")
    with pytest.raises(RecipeError, match=re.escape("schedule[0].fake_quant: 'weights', expected true, activations")):
        load(keys_and_values % "weights")


def test_every_group_of_an_event_is_one_of_the_optimizer():
    assert set(EVENT_RATES) == set(peak_learning_rates(load("").optim))


def test_a_run_whose_events_start_fake_quant_does_quantize():
    assert load("quant: {fake_quant_start: -1}").never_quantizes()
    assert load("quant: {fake_quant_start: -1}\nschedule: [{at: 3, fake_quant: off}]").never_quantizes()
    assert not load("quant: {fake_quant_start: -1}\nschedule: [{at: 3, fake_quant: weights}]").never_quantizes()
    assert not load("").never_quantizes()


def test_a_condition_on_what_is_never_measured_is_an_error():
    model = nn.Sequential(nn.Linear(32, 32))
    quantization = prepare(model, get_scheme("w4a16_g32"), learn_weight_scale=True, learn_input_scale=False)
    events = load("schedule: [{at: 1, fake_quant: off}, {when: loss/ml < 2, fake_quant: on}]").schedule
    check_events(events, quantization, [], ["loss/ml"])
    with pytest.raises(
        ValueError, match=re.escape("schedule[1].when: 'loss/ml < 2', expected one of loss/lm, eval/lm")
    ):
        check_events(events, quantization, [], ["loss/lm", "eval/lm"])
