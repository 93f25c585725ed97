"""What no option of a recipe shows alone: values that are each in bounds and do not go together.

engine/config/rules.py lists what is said in one line; adapter_rules.py, input_rules.py, gradient_rules.py,
ptq_init_rules.py, unquantized_rules.py, idle_rules.py and decay_rules.py those of one feature each. Here are the
rules of events, which take more than one: functions whose name and docstring say what must hold, and which yield a line
per violation.
"""

from collections.abc import Callable, Iterator

from engine.config.adapter_rules import RULES_OF_ADAPTERS
from engine.config.decay_rules import RULES_OF_DECAY
from engine.config.errors import need
from engine.config.gradient_rules import RULES_OF_GRADIENTS
from engine.config.idle_rules import RULES_OF_IDLE
from engine.config.input_rules import RULES_OF_INPUTS
from engine.config.ptq_init_rules import RULES_OF_INIT
from engine.config.rules import RULES, RULES_OF_SCHEMES, Sections
from engine.config.unquantized_rules import RULES_OF_UNQUANTIZED

FEATURES = (
    *RULES_OF_ADAPTERS,
    *RULES_OF_INPUTS,
    *RULES_OF_GRADIENTS,
    *RULES_OF_INIT,
    *RULES_OF_UNQUANTIZED,
    *RULES_OF_IDLE,
    *RULES_OF_DECAY,
)


def contradictions(recipe: Sections) -> Iterator[str]:
    """One line per rule that a recipe breaks."""
    rules = (*RULES, *FEATURES, *(RULES_OF_SCHEMES if recipe.quant.known() else ()))
    yield from (rule.text(recipe) for rule in rules if rule.broken(recipe))
    for walk in WALKS_OF_EVENTS if recipe.schedule else ():
        yield from walk(recipe)


def events_happen_during_the_run(recipe: Sections) -> Iterator[str]:
    """An event's step is one that the run begins, and what happens every so many steps happens at all."""
    steps = recipe.train.steps
    for index, event in enumerate(recipe.schedule):
        if event.at is not None and event.at >= steps > 0:
            yield f"schedule[{index}].at: {event.at}, expected below train.steps ({steps})"
        if event.every is not None and event.every > steps > 0:
            yield f"schedule[{index}].every: {event.every}, expected at most train.steps ({steps})"


def events_leave_a_loss(recipe: Sections) -> Iterator[str]:
    """At no step have both losses the weight 0, whenever the events with a condition come."""
    changes = {index: event for index, event in enumerate(recipe.schedule) if event.loss}
    fixed = sorted((event.at, index) for index, event in changes.items() if event.at is not None)
    free = [index for index, event in changes.items() if event.at is None]
    start = (recipe.loss.lm_weight > 0, recipe.loss.kd_weight > 0)
    if not any(start):
        return  # a problem of the section loss
    reached, refused = {start}, set[int]()

    def follow(states: set[tuple[bool, bool]], index: int) -> set[tuple[bool, bool]]:
        """What an event makes of these pairs: whether lm has a weight, and whether kd has."""
        given = changes[index].loss or {}
        after = {(given.get("lm", lm) > 0, given.get("kd", kd) > 0) for lm, kd in states}
        if (False, False) in after:
            refused.add(index)
        return {(lm, kd) for lm, kd in after if lm or kd}

    for index in (None, *(index for _, index in fixed)):
        reached = reached if index is None else follow(reached, index)
        before: set[tuple[bool, bool]] = set()
        while reached != before:  # an event without a step may come now, or not
            before = reached
            reached = reached.union(*(follow(reached, other) for other in free))
    for index in sorted(refused):
        yield (
            f"schedule[{index}].loss: {changes[index].loss}, expected a weight above 0 for the other loss in the same "
            "event: at that time it may be 0 too, and there would be no loss"
        )


def events_switch_what_the_scheme_quantizes(recipe: Sections) -> Iterator[str]:
    """An event switches on fake quant only of weights or activations that the scheme quantizes."""
    quant = recipe.quant
    if not quant.known():
        return
    for index, event in enumerate(recipe.schedule):
        key = f"schedule[{index}].fake_quant"
        if event.fake_quant == "activations":
            expected = f"weights or false: quant.scheme {quant.scheme} quantizes no activations"
            yield from need(quant.quantizes_activations(), key, event.fake_quant, expected)
        if event.fake_quant == "weights":
            expected = f"true, activations or false: quant.scheme {quant.scheme} quantizes no weights"
            yield from need(bool(quant.linear_schemes()), key, event.fake_quant, expected)


WALKS_OF_EVENTS: tuple[Callable[[Sections], Iterator[str]], ...] = (
    events_happen_during_the_run,
    events_leave_a_loss,
    events_switch_what_the_scheme_quantizes,
)
