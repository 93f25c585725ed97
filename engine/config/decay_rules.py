"""The rule of weight decay beside learning rates, in the form of :mod:`engine.config.rules`."""

from engine.config.events import DECAYING
from engine.config.rules import Rule, Sections


def _rate(recipe: Sections) -> float:
    """The highest peak learning rate of what decays, events included."""
    optim = recipe.optim
    by_events = [rates.get(group) for rates in (event.lr or {} for event in recipe.schedule) for group in DECAYING]
    return max(rate for rate in (optim.lr, optim.embedding_lr, optim.adapter_lr, *by_events) if rate is not None)


RULES_OF_DECAY = (
    Rule(
        "decay leaves weights their signs",
        "optim.weight_decay",
        lambda r: r.optim.weight_decay * _rate(r) > 1,
        lambda r: (
            f"at most {1 / _rate(r):g}: a step takes so much of every weight times its learning rate, {_rate(r):g}"
        ),
    ),
)
