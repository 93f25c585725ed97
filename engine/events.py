"""The events of a recipe as actions of the loop: one line of YAML does what one line of Python would."""

import operator
from collections.abc import Iterable, Sequence

from engine.recipe.events import EventRecipe, parse_condition
from engine.schedule import Schedule
from engine.state import LoopState
from quant import Quantization

RELATIONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def add_event(schedule: Schedule[LoopState], event: EventRecipe) -> None:
    """Add a recipe's event to the schedule."""

    def act(state: LoopState) -> None:
        apply_event(event, state)

    if event.at is not None:
        schedule.at(event.at, act)
    elif event.every is not None:
        schedule.every(event.every, act)
    else:
        schedule.when(lambda state: holds(event.when or "", state), act)


def check_events(
    events: Sequence[EventRecipe], quantization: Quantization, groups: Iterable[str], metrics: Sequence[str]
) -> None:
    """Refuse, before the first step, events that would fail or do nothing when their time comes.

    Args:
        events: of the recipe.
        quantization: knows the layers.
        groups: names of the optimizer's parameter groups.
        metrics: what conditions may look at.

    Raises:
        ValueError: a pattern matches no layer, nothing trains of a group whose rate is to change, or nothing of the
            name in a condition is ever measured.
    """
    known = list(groups)
    for index, event in enumerate(events):
        try:
            quantization.matching(event.layers)
        except ValueError as error:
            raise ValueError(f"schedule[{index}].layers: {error}") from error
        if (condition := parse_condition(event.when or "")) and condition[0] not in metrics:
            raise ValueError(f"schedule[{index}].when: {event.when!r}, expected one of {', '.join(metrics)}")
        for name in event.lr or {}:
            if name not in known:
                raise ValueError(f"schedule[{index}].lr: nothing of {name} trains, only {', '.join(known)} (learnable)")


def apply_event(event: EventRecipe, state: LoopState) -> None:
    """Do what the event says."""
    if event.fake_quant is False:
        state.quant.disable(layers=event.layers, observe=event.observe is not False)
    elif event.fake_quant is not None:
        state.quant.enable(
            weights=event.fake_quant in (True, "weights"),
            activations=event.fake_quant in (True, "activations"),
            layers=event.layers,
        )
    if event.observe is not None and event.fake_quant is not False:
        state.quant.observe(event.observe)
    if event.freeze_scales is not None:
        state.quant.freeze_scales(event.freeze_scales)
    if event.lr is not None:
        state.set_peak_rates(**event.lr)
    if event.loss is not None:
        state.set_loss_weights(**event.loss)


def holds(text: str, state: LoopState) -> bool:
    """Whether a condition like ``loss/lm < 2.5`` holds; False while there is no such value."""
    condition = parse_condition(text)
    assert condition is not None, text
    metric, relation, bound = condition
    value = state.value_of(metric)
    return value is not None and RELATIONS[relation](value, bound)
