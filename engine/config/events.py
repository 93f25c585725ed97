"""The recipe's ``schedule`` section: a list of events, each a change at some time of the run."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from engine.config.errors import LOSS_WEIGHT, RATE, at_least, need, regex, value_problems, values

CONDITION = re.compile(r"(?P<metric>\S+)\s*(?P<relation><=|>=|<|>)\s*(?P<value>\S+)")

# Parameter groups of engine.session.optimizer, which imports this module.
EVENT_RATES = ("weights", "embeddings", "norms", "biases", "weight_scales", "act_scales", "adapters")
DECAYING = ("weights", "embeddings", "adapters")


_WHEN = values("like loss/lm < 2.5", lambda text: parse_condition(text) is not None)


@dataclass
class EventRecipe:
    """One change during the run: when it happens (one of at, every, when), and what (at least one of the others)."""

    at: int | None = field(default=None, metadata=at_least(0))
    """Once, when so many optimizer steps are done and before the next begins."""
    every: int | None = field(default=None, metadata=at_least(1))
    """After each so many optimizer steps."""
    when: str | None = field(default=None, metadata=_WHEN)
    """Once, after the first step at which this holds: a loss or a result of the evaluation (loss/total, loss/lm,
    eval/perplexity, ...), one of < <= > >=, and a number."""
    fake_quant: bool | Literal["weights", "activations"] | None = None
    """true: of weights and activations; weights, activations: of these alone; false: off."""
    layers: str | None = field(default=None, metadata=regex())
    """Regex: fake_quant of the layers whose whole module name matches only."""
    observe: bool | None = None
    """Whether observers watch the inputs; starting forgets what they saw. While off they watch unless this is false."""
    freeze_scales: bool | None = None
    """true: learned scales rest from now on; false: they train again."""
    lr: dict[str, float] | None = None
    """Peak learning rates from now on, by group: weights, embeddings, norms, biases, weight_scales, act_scales,
    adapters."""
    loss: dict[str, float] | None = None
    """Weights of the losses from now on: lm, kd."""

    def problems(self, key: str) -> Iterator[str]:
        """One line per contradiction in this event, whose path is ``key``."""
        times = {name: getattr(self, name) for name in ("at", "every", "when") if getattr(self, name) is not None}
        if len(times) != 1:
            yield f"{key}: {times or 'no time'}, expected exactly one of at, every, when"
        actions = (self.fake_quant, self.observe, self.freeze_scales, self.lr, self.loss)
        if all(action is None for action in actions):
            yield f"{key}: nothing happens, expected one of fake_quant, observe, freeze_scales, lr, loss"
        if self.layers is not None:
            yield from need(self.fake_quant is not None, f"{key}.layers", self.layers, "fake_quant beside it")
        for name, known, declared in (("lr", EVENT_RATES, RATE), ("loss", ("lm", "kd"), LOSS_WEIGHT)):
            given = getattr(self, name)
            yield from need(given is None or len(given) > 0, f"{key}.{name}", given, f"one of {', '.join(known)}")
            for what, value in (getattr(self, name) or {}).items():
                yield from need(what in known, f"{key}.{name}", what, f"one of {', '.join(known)}")
                yield from value_problems(f"{key}.{name}.{what}", value, declared)


def parse_condition(text: str) -> tuple[str, str, float] | None:
    """Metric, relation and number of a condition like ``loss/lm < 2.5``; None if it is something else."""
    match = CONDITION.fullmatch(text.strip())
    try:
        number = float(match["value"]) if match else math.nan
    except ValueError:
        return None
    return (match["metric"], match["relation"], number) if match and math.isfinite(number) else None
