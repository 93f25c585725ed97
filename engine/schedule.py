"""Schedule of a run: actions at given steps, from Python and from the recipe (``schedule``, evaluation, checkpoints).

Steps are optimizer steps, counted from 0: an event ``at`` step N runs when N steps are done and before step N begins;
an event ``every`` N steps runs after each N-th step; an event ``when`` a condition holds is checked after each step and
runs once, the first time. One line of YAML under ``schedule`` has the effect of one line of Python.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from data.cache import digest
from data.loader import HeldOut, on_device, valid_tokens
from engine.checkpoint.save import BestMetric, SaveError, mark_best, save_checkpoint
from engine.config.config import Recipe
from engine.config.sections import EventRecipe, parse_condition
from engine.losses.objective import Objective
from engine.state import Action, LoopState, StateCondition
from engine.step import micro_batch_losses
from model.console import figure, perplexity, progress_bar
from model.ranks import reduce_over_ranks, say
from model.zero import forward_only
from quant import Quantization


@dataclass
class Schedule:
    """Actions that run before a given step, after every N-th step, or once when a condition holds.

    After a step the periodic actions run first, then the conditional actions, then the actions added with ``last``;
    each kind in the order in which its actions were added.
    """

    before: list[tuple[int, Action]] = field(default_factory=list)
    after: list[tuple[int, Action]] = field(default_factory=list)
    last: list[tuple[int, Action]] = field(default_factory=list)
    conditional: list[tuple[StateCondition, Action]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Names of the conditional actions, made when these were added; equal ones are numbered."""
    met: list[int] = field(default_factory=list)
    """Positions in ``conditional`` of the actions that have run."""

    def state_dict(self) -> dict[str, list[str]]:
        """Return for a checkpoint the names of all conditional actions, and of those that have run. A resumed run does
        not repeat an action that has run, even if its schedule has other events before that action."""
        return {"events": self.names, "met_events": [self.names[index] for index in self.met]}

    def load_state_dict(self, state: Mapping[str, list[str]]) -> None:
        """Restore the result of :meth:`state_dict`. If actions had run before the checkpoint, also print each action of
        this schedule that the checkpoint does not know by name: it may run, even if it is only the edited form of
        an action that has run."""
        self.met = [index for index, name in enumerate(self.names) if name in state["met_events"]]
        for name in (name for name in self.names if state["met_events"] and name not in state["events"]):
            event = name.rpartition(" ")[0]
            say(f"resumed: the checkpoint does not know the event {event!r}, which may run from now on")

    def at(self, step: int, action: Action) -> None:
        """Run ``action(state)`` once, when ``step`` optimizer steps are done and before the next begins. Raises
        ValueError if ``step`` is below 0."""
        if step < 0:
            raise ValueError(f"an event at step {step}: expected 0 or more, as steps count from 0")
        self.before.append((step, action))

    def every(self, steps: int, action: Action, *, last: bool = False) -> None:
        """Run ``action(state)`` after every ``steps``-th optimizer step. ``last``: after all other events of the step,
        so that the action sees their changes. Raises ValueError if ``steps`` is below 1."""
        if steps < 1:
            raise ValueError(f"an event every {steps} steps: expected 1 or more")
        (self.last if last else self.after).append((steps, action))

    def when(self, condition: StateCondition, action: Action) -> None:
        """Run ``action(state)`` once, after the first step at which ``condition(state)`` is true."""
        name = f"{_condition_name(condition)}: {_name(action)}"
        alike = sum(other.rpartition(" ")[0] == name for other in self.names)
        self.names.append(f"{name} {alike}")
        self.conditional.append((condition, action))

    def check(self, total: int) -> None:
        """Raise ValueError for an event at a step that a run of ``total`` steps never reaches. If ``total`` is 0, the
        number of steps is not known yet, and nothing is checked."""
        late = [step for step, _ in self.before if step >= total > 0]
        if late:
            raise ValueError(
                f"an event at step {late[0]}, expected at most {total - 1}: train.steps is {total}, and steps count "
                "from 0"
            )

    def described(self) -> list[str]:
        """Describe every event: its kind; its step, interval or condition; and the name of its action."""
        return [
            f"{kind} {when if isinstance(when, int) else _name(when)}: {_name(action)}"
            for kind in ("before", "after", "last", "conditional")
            for when, action in getattr(self, kind)
        ]

    def run_before(self, step: int, state: LoopState) -> None:
        """Run the events that are due before ``step``."""
        for due, action in self.before:
            if due == step:
                action(state)

    def run_after(self, done: int, state: LoopState) -> None:
        """Run the events due after ``done`` steps."""
        for interval, action in self.after:
            if done % interval == 0:
                action(state)
        self._run_conditional(state, range(len(self.conditional)))
        for interval, action in self.last:
            if done % interval == 0:
                action(state)

    def run_evaluated(self, state: LoopState) -> None:
        """Run the recipe's events whose condition on a result of the evaluation (``eval/...``) holds now. This is for
        an evaluation that comes after the other events of its step. Conditions of a script are checked only after the
        next step: they may read ``state.last``, which a resumed run does not have yet."""
        of_evaluations = [index for index, (one, _) in enumerate(self.conditional) if _reads_evaluation(one)]
        self._run_conditional(state, of_evaluations)

    def _run_conditional(self, state: LoopState, indices: Iterable[int]) -> None:
        for index in indices:
            condition, action = self.conditional[index]
            if index not in self.met and condition(state):
                self.met.append(index)
                action(state)


def _name(action: object) -> str:
    """Return a name that is the same on every rank and in a resumed run: the name of a recipe's event is its
    content, and the name of a lambda includes a digest of its code."""
    if isinstance(action, partial):
        return repr(action.args) if action.func in (apply_event, holds) else _name(action.func)
    name = str(getattr(action, "__qualname__", type(action).__qualname__))
    if isinstance(action, FunctionType) and action.__name__ == "<lambda>":
        return f"{name} {digest(_code(action.__code__))[:8]}"
    return name


def _code(code: CodeType) -> list[object]:
    """Return a function's bytecode, constants and names as plain JSON, without line numbers and file names."""
    constants: list[object] = [
        _code(one) if isinstance(one, CodeType) else sorted(map(repr, one)) if isinstance(one, frozenset) else repr(one)
        for one in code.co_consts
    ]
    return [code.co_code.hex(), constants, [code.co_names, code.co_varnames, code.co_freevars]]


def _reads_evaluation(condition: StateCondition) -> bool:
    """Tell if a condition comes from the recipe and reads a result of the evaluation."""
    return isinstance(condition, partial) and condition.func is holds and condition.args[0].startswith("eval/")


def _condition_name(condition: StateCondition) -> str:
    """Return a condition's name (:func:`_name`), followed by the numbers and texts that it holds now: arguments of a
    partial, defaults, and variables of the function around it."""
    values: list[object] = []
    if isinstance(condition, partial):
        values = [*condition.args, *condition.keywords.values()]
    elif isinstance(condition, FunctionType):
        cells = [cell.cell_contents for cell in condition.__closure__ or () if cell != CellType()]
        values = [*(condition.__defaults__ or ()), *(condition.__kwdefaults__ or {}).values(), *cells]
    plain = [repr(value) for value in values if isinstance(value, str | int | float)]
    return " ".join([_name(condition), *plain])


RELATIONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def add_recipe_events(schedule: Schedule, recipe: Recipe) -> None:
    """Add all events of a recipe. An evaluation is the first event of its step, so that other events see its results. A
    checkpoint is the last event, so that it includes the changes of all others."""
    start = recipe.quant.fake_quant_start
    if start != 0:
        # A run that never quantizes has no observers.
        schedule.at(0, lambda state: state.quant.disable(observe=not recipe.never_quantizes()))
    if start > 0:
        schedule.at(start, lambda state: state.quant.enable())
    if recipe.eval.every:
        schedule.every(recipe.eval.every, _evaluate_unless_stopping)
    for event in recipe.schedule:
        add_event(schedule, event)
    if recipe.train.checkpoint_every:
        schedule.every(recipe.train.checkpoint_every, _try_to_save, last=True)


def evaluate_held_out(state: LoopState) -> None:
    """Measure the held-out losses with serving numerics (unquantized if the run never quantizes), and store them in the
    state and the curves; a collective. No effect without evaluation, or if this step is evaluated already."""
    if not state.recipe.eval.every or state.evaluations.step == state.step or state.held_out is None:
        return
    objective = state.objective()
    means = _held_out_means(state, state.held_out, objective)
    losses = objective.report(means)
    results = {name.replace("loss/", "eval/"): value for name, value in losses.items()}
    results["eval/perplexity"] = perplexity(means["lm"])
    state.evaluations.record(state.step, results, objective.weights())
    state.log(results)
    figures = ", ".join(f"{name.removeprefix('eval/')} {figure(value)}" for name, value in results.items())
    say(f"step {state.step}: held-out {figures}")


@torch.no_grad()
def _held_out_means(state: LoopState, held_out: HeldOut, objective: Objective) -> dict[str, float]:
    """Compute loss means over the valid tokens of all held-out samples and ranks, by loss; a collective.

    All layers are fake-quantized, with outdated scales measured again, unless the run never quantizes. Only outdated
    scales change.
    """
    session = state.session
    # Outdated input scales are measured on training samples: held-out batches are ordered by length, and short samples
    # would give small scales.
    calibration = state.loader.first(max(1, state.recipe.quant.calibration_batches))
    never = state.recipe.never_quantizes() and not state.quant.enabled
    session.engine.eval()
    sums: dict[str, Tensor] = {}
    valid = 0
    with nullcontext() if never else state.quant.as_served(calibration):
        for batch in progress_bar(desc="evaluation", unit="batch", over=held_out):
            with forward_only(session.engine):
                found = micro_batch_losses(session, on_device(batch, session.device), objective, held_out=True).sums
            sums = {name: sums.get(name, 0) + value.double() for name, value in found.items()}
            valid += valid_tokens([batch])
    session.engine.train()
    own = torch.stack([*sums.values(), torch.tensor(float(valid), dtype=torch.float64, device=session.device)])
    *whole, tokens = reduce_over_ranks(own).tolist()
    return {name: value / tokens for name, value in zip(sums, whole, strict=True)}


def evaluate_start(state: LoopState, schedule: Schedule) -> None:
    """Evaluate the starting point; a collective. A new run evaluates the PTQ model, unless the run never quantizes.
    A resumed run evaluates if ``eval.every`` divides the number of steps done, then marks the checkpoint if it is the
    best. If this step was not evaluated before the resume, as after a signal, events that read the results run now."""
    if state.saved_step is None:
        if not state.recipe.never_quantizes():
            evaluate_held_out(state)
    elif state.recipe.eval.every and state.step % state.recipe.eval.every == 0 and state.evaluations.step != state.step:
        evaluate_held_out(state)
        keep = state.recipe.train.keep_checkpoints
        mark_best(checkpoints(state.recipe), state.step, _measured(state), keep=keep)
        if state.evaluations.before != state.step:
            schedule.run_evaluated(state)


def _evaluate_unless_stopping(state: LoopState) -> None:
    assert state.last is not None
    if not state.last.stop_requested:
        evaluate_held_out(state)


def checkpoints(recipe: Recipe) -> Path:
    """Return the directory of a run's training checkpoints."""
    return Path(recipe.output_dir) / "checkpoints"


def save(state: LoopState) -> None:
    """Save a training checkpoint, and mark it as the best if its evaluation is the best so far; a collective. Raises on
    every rank: SaveError if the checkpoint could not be written, RankError if parameters are not finite."""
    save_checkpoint(
        state.session,
        state.stateful,
        checkpoints(state.recipe),
        state.step,
        keep=state.recipe.train.keep_checkpoints,
        samples=state.loader.digest,
        measured=_measured(state),
    )
    state.saved_step = state.step


def _measured(state: LoopState) -> BestMetric | None:
    """Return the metric that selects the best checkpoint; None if this step has no value of it. Values are comparable
    only for the same held-out samples, except for lm the same distillation, for the total the same weights of the
    losses, and if all were measured with quantization or all without."""
    best, loss, objective = state.recipe.eval.best, state.recipe.loss, state.objective()
    metric = f"eval/kd/{loss.kd}" if best == "kd" else f"eval/{best}"
    if state.held_out is None or state.evaluations.step != state.step or metric not in state.evaluation:
        return None
    of: list[Any] = [state.held_out.samples.key]
    of += [asdict(objective.kd), Path(loss.teacher or "").name] if best != "lm" else []
    of += [state.evaluations.weights] if best == "total" else []
    of += ["unquantized"] if state.recipe.never_quantizes() and not state.quant.enabled else []
    return BestMetric(metric, state.evaluation[metric], digest(of))


def _try_to_save(state: LoopState) -> None:
    """Save a checkpoint, unless this is the last step. If writing fails (disk full), warn and go on with training."""
    train = state.recipe.train
    if state.step == train.steps:
        return  # the end of the run saves the last one
    try:
        save(state)
    except SaveError as error:
        at = state.step + train.checkpoint_every
        say(f"warning: {error}; training goes on, the next attempt is at step {min(at, train.steps)}")


def add_event(schedule: Schedule, event: EventRecipe) -> None:
    """Add a recipe's event to the schedule."""
    act = partial(apply_event, event)
    if event.at is not None:
        schedule.at(event.at, act)
    elif event.every is not None:
        schedule.every(event.every, act)
    else:
        schedule.when(partial(holds, event.when or ""), act)


def check_events(
    events: Sequence[EventRecipe], quantization: Quantization, groups: Sequence[str], metrics: Sequence[str]
) -> None:
    """Refuse, before the first step, events that would fail or have no effect later.

    Args:
        groups: names of the optimizer's parameter groups.
        metrics: names that conditions may use.

    Raises:
        ValueError: a pattern matches no layer, a rate is set for a group without trained parameters, or a condition
            names a metric that is never measured.
    """
    for index, event in enumerate(events):
        try:
            quantization.matching(event.layers)
        except ValueError as error:
            raise ValueError(f"schedule[{index}].layers: {error}") from error
        if (condition := parse_condition(event.when or "")) and condition[0] not in metrics:
            raise ValueError(f"schedule[{index}].when: {event.when!r}, expected one of {', '.join(metrics)}")
        for name in event.lr or {}:
            if name not in groups:
                raise ValueError(
                    f"schedule[{index}].lr: no parameter of the group {name} trains, expected "
                    f"one of {', '.join(groups)} (see learnable)"
                )


def apply_event(event: EventRecipe, state: LoopState) -> None:
    """Apply a recipe's event."""
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
    """Tell if a condition like ``loss/lm < 2.5`` holds; False while its metric is not measured."""
    condition = parse_condition(text)
    assert condition is not None, text
    metric, relation, bound = condition
    value = state.value_of(metric)
    return value is not None and RELATIONS[relation](value, bound)
