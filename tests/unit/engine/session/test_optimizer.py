"""The loss scale of fp16: when it halves, when it doubles, and what a checkpoint keeps."""

import pytest

from engine.session.optimizer import LossScale


def values(scale: LossScale, overflows: list[bool]) -> list[float]:
    found = []
    for overflow in overflows:
        scale.stepped(overflow=overflow)
        found.append(scale.value)
    return found


def test_an_overflow_halves_it_and_a_window_of_good_steps_doubles_it():
    scale = LossScale.from_config({"enabled": True, "initial_scale_power": 3, "loss_scale_window": 2})
    assert scale.value == 8
    assert values(scale, [True, False, True, False, False, False, False]) == [4, 4, 2, 2, 4, 4, 8]
    scale = LossScale.from_config({"initial_scale_power": 2, "min_loss_scale": 2})
    assert [scale.stepped(overflow=True) for _ in range(3)] == [True, False, False]
    assert scale.value == 2 and not scale.stepped(overflow=False)
    static = LossScale.from_config({"loss_scale": 128, "initial_scale_power": 3})
    assert values(static, [True, *[False] * 3000]) == [128.0] * 3001
    default = LossScale.from_config({"enabled": True})
    assert (default.value, default.window, default.least) == (2.0**16, 1000, 1.0)


@pytest.mark.parametrize("stop", range(6))
def test_going_on_from_its_state_is_as_if_it_had_not_stopped(stop):
    overflows = [False, False, True, False, False, False]
    config = {"initial_scale_power": 4, "loss_scale_window": 3}
    first, whole = LossScale.from_config(config), values(LossScale.from_config(config), overflows)
    begun = values(first, overflows[:stop])
    second = LossScale.from_config(config)
    second.load_state_dict(first.state_dict())
    assert begun + values(second, overflows[stop:]) == whole
