"""Learning-rate curves at their corners, and the order of events."""

import itertools

import pytest

from engine.schedule import Schedule, lr_factor


def curve(kind, total=10, warmup=0, min_ratio=0.1):
    return [lr_factor(step, total=total, warmup=warmup, kind=kind, min_ratio=min_ratio) for step in range(total)]


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_starts_at_the_peak_and_ends_at_the_minimum(kind):
    values = curve(kind)
    assert values[0] == 1.0 and values[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(values))


def test_linear_and_cosine_meet_half_way():
    assert curve("linear", total=11)[5] == pytest.approx(0.55) and curve("cosine", total=11)[5] == pytest.approx(0.55)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warmup_is_linear_and_moves_from_the_first_step(kind):
    values = curve(kind, warmup=4)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0] and values[4] == 1.0


def test_one_step_run():
    assert curve("cosine", total=1) == [1.0] and curve("linear", total=1, warmup=1) == [1.0]


def test_unknown_kind():
    with pytest.raises(ValueError, match="constant, linear or cosine"):
        lr_factor(0, total=1, warmup=0, kind="sine", min_ratio=0)


def test_events_run_at_their_steps_in_order():
    schedule: Schedule[list] = Schedule()
    schedule.at(2, lambda seen: seen.append("at 2"))
    schedule.at(2, lambda seen: seen.append("then"))
    schedule.every(2, lambda seen: seen.append("every 2"))
    seen: list = []
    for step in range(5):
        schedule.run_before(step, seen)
        seen.append(step)
        schedule.run_after(step + 1, seen)
    assert seen == [0, 1, "every 2", "at 2", "then", 2, 3, "every 2", 4]


def test_impossible_events():
    schedule: Schedule[list] = Schedule()
    with pytest.raises(ValueError, match="count from 0"):
        schedule.at(-1, print)
    with pytest.raises(ValueError, match="1 or more"):
        schedule.every(0, print)
