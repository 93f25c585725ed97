"""What changes over the steps: learning rates, and events at chosen steps.

Steps are optimizer steps, counted from 0: an event ``at`` step N runs when N steps are done and before step N begins;
an event ``every`` N steps runs after each N-th step; an event ``when`` something holds is asked after each step and
runs once, the first time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

State = TypeVar("State")
Action = Callable[[State], object]
Condition = Callable[[State], bool]

KINDS = ("constant", "linear", "cosine", "wsd")


def lr_factor(step: int, *, total: int, warmup: int, kind: str, min_ratio: float, decay: int = 0) -> float:
    """The share of the peak learning rate at ``step``.

    Linear warm-up over the first ``warmup`` steps (step 0 already moves: 1/warmup), then ``constant``; or ``linear`` or
    ``cosine`` decay from 1 to ``min_ratio``, which the last of ``total`` steps reaches; or ``wsd``, warm-up, stable,
    decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395): 1 until the last ``decay`` steps, which go down to ``min_ratio``
    in a straight line.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown learning-rate schedule {kind!r}, expected one of {', '.join(KINDS)}")
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant":
        return 1.0
    if kind == "wsd":
        done = step - (total - decay) + 1  # of the steps that decay, this one included
        return 1.0 - (1.0 - min_ratio) * min(1.0, max(0, done) / max(1, decay))
    progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    if kind == "linear":
        return 1.0 - (1.0 - min_ratio) * progress
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass
class Schedule(Generic[State]):
    """Events: actions that run before a given step, after every so many, or once when a condition holds.

    After a step come the events of every so many steps, then those with a condition, then those that asked to be last;
    each kind in the order in which they were added.
    """

    before: list[tuple[int, Action]] = field(default_factory=list)
    after: list[tuple[int, Action]] = field(default_factory=list)
    last: list[tuple[int, Action]] = field(default_factory=list)
    conditional: list[tuple[Condition, Action]] = field(default_factory=list)
    met: list[int] = field(default_factory=list)
    """Which of ``conditional`` have run, by position: a checkpoint keeps it, so that a resumed run does not repeat
    them."""

    def state_dict(self) -> dict[str, list[int]]:
        """Which events with a condition have run, for a checkpoint."""
        return {"met": list(self.met)}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.met = list(state["met"])

    def at(self, step: int, action: Action) -> None:
        """Run ``action(state)`` once, when ``step`` optimizer steps are done and before the next begins."""
        if step < 0:
            raise ValueError(f"an event at step {step}: steps count from 0")
        self.before.append((step, action))

    def every(self, steps: int, action: Action, *, last: bool = False) -> None:
        """Run ``action(state)`` after every ``steps``-th optimizer step.

        ``last``: after all other events of the step, so that it sees what they did.
        """
        if steps < 1:
            raise ValueError(f"an event every {steps} steps: expected 1 or more")
        (self.last if last else self.after).append((steps, action))

    def when(self, condition: Condition, action: Action) -> None:
        """Run ``action(state)`` once, after the first step at which ``condition(state)`` is true."""
        self.conditional.append((condition, action))

    def check(self, total: int) -> None:
        """Refuse an event at a step that a run of ``total`` steps never begins. Raises ValueError."""
        late = [step for step, _ in self.before if step >= total]
        if late:
            raise ValueError(
                f"an event at step {late[0]}, but train.steps is {total}: the last step to begin is {total - 1}"
            )

    def run_before(self, step: int, state: State) -> None:
        """Run the events that are due before ``step``."""
        for due, action in self.before:
            if due == step:
                action(state)

    def run_after(self, done: int, state: State) -> None:
        """Run the events that are due after ``done`` steps in all."""
        for interval, action in self.after:
            if done % interval == 0:
                action(state)
        for index, (condition, action) in enumerate(self.conditional):
            if index not in self.met and condition(state):
                self.met.append(index)
                action(state)
        for interval, action in self.last:
            if done % interval == 0:
                action(state)
