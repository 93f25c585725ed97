"""The training loop. ``Loop.run`` and :func:`engine.step.train_step` are the algorithm: batches, losses, backward,
step, log. Everything else is a schedule event.

A user's own schedule is a few lines of Python, run by the same launcher (``deepspeed --num_gpus 8 my_schedule.py``)::

    loop = Loop.from_recipe("launch/recipes/qwen3_4b.yaml")

    @loop.at(step=0)
    def off(state): state.quant.disable()

    @loop.at(step=1000)
    def on(state): state.quant.enable()

    @loop.when(lambda state: state.last.losses["loss/total"] < 2)
    def slower(state): state.set_peak_rates(weights=1e-6)

    @loop.every(50)
    def probe(state): state.log({"my/value": ...})

    loop.run()

The recipe's section ``schedule`` takes the same events.

Actions run on every rank, so they may use collectives; they must take the same branches on every rank.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.checkpoint.save import SaveError
from engine.checks import sum_where_ranks_agree
from engine.cluster.job import RunLock
from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from engine.losses.objective import DIAGNOSTICS, ROUTER_AUX, NamedTokenLoss, TokenLoss
from engine.report import RunReport
from engine.schedule import Schedule, add_recipe_events, checkpoints, evaluate_held_out, evaluate_start, save
from engine.session_export import export_trained
from engine.start import start_run
from engine.state import Action, LoopState, NoSamplesError
from engine.step import train_step
from model.ranks import RankError, say


class Loop:
    """One training run: a recipe, and a schedule of Python functions (actions) that change the run at given steps."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.schedule = Schedule()
        self.token_losses: list[NamedTokenLoss] = []
        add_recipe_events(self.schedule, recipe)

    @classmethod
    def from_recipe(cls, path: str | Path) -> "Loop":
        """Create a loop from a YAML recipe. Raises RecipeError if the recipe is bad."""
        return cls(load_recipe(path))

    def at(self, step: int) -> Callable[[Action], Action]:
        """Decorator: run the action when ``step`` optimizer steps are done, before the next begins. Raises ValueError
        if ``step`` is below 0."""
        return _registers(partial(self.schedule.at, step))

    def every(self, steps: int) -> Callable[[Action], Action]:
        """Decorator: run the action after every ``steps``-th step. Raises ValueError if ``steps`` is below 1."""
        return _registers(partial(self.schedule.every, steps))

    def when(self, condition: Callable[[LoopState], bool]) -> Callable[[Action], Action]:
        """Decorator: run the action once, after the first step at which the condition holds. The condition must be the
        same on every rank, as losses are."""
        return _registers(partial(self.schedule.when, condition))

    def token_loss(self, name: str, *, weight: float) -> Callable[[TokenLoss], TokenLoss]:
        """Decorator: add a loss per token with a weight. The function takes a LossChunk (engine/losses/objective.py);
        the loss is logged as ``loss/<name>``. Raises ValueError if another loss or diagnostic has this name."""
        taken = ("total", "lm", "kd", ROUTER_AUX, *DIAGNOSTICS, *(loss.name for loss in self.token_losses))
        if name in taken:
            raise ValueError(f"loss {name!r}: expected another name than {', '.join(taken)}")

        def register(function: TokenLoss) -> TokenLoss:
            self.token_losses.append(NamedTokenLoss(name, weight, function))
            return function

        return register

    def run(self) -> LoopState:
        """Set up, train, export; return the state after the last step. A signal (engine/cluster/job.py) ends the run
        after the current step, with a checkpoint and without an export. Raises RecipeError for a problem that is found
        before the process group starts, RankError on every rank for any later one."""
        try:
            self.schedule.check(self.recipe.train.steps)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        with RunLock() as run_lock:
            state = start_run(self.recipe, self.schedule, self.token_losses, run_lock)
            with state.stop_requests, state.metrics:
                report = RunReport(state)
                self._train(state, report)
                failure = _finish(state)
                state.stop_requests.work_alone()
                report.end(state, checkpoints(self.recipe))
        if failure is not None:
            raise failure
        return state

    def _train(self, state: LoopState, report: RunReport) -> None:
        """Evaluate the starting point if there is held-out data, then run steps until the last one or a stop. If the
        next step has no samples, save a checkpoint unless one was saved at this step, then raise NoSamplesError."""
        if state.held_out is not None:
            evaluate_start(state, self.schedule)
        while state.step < self.recipe.train.steps and not state.stopped:
            self.schedule.run_before(state.step, state)
            if state.quant.forgets:
                state.quant.forget()
            started = time.perf_counter()
            try:
                state.last = train_step(state)
            except NoSamplesError as error:
                if state.step == (state.saved_step or 0):
                    raise
                save(state)
                saved = f"step {state.step} is saved; --train.resume true goes on from there"
                raise NoSamplesError(f"{error}; {saved}") from error
            state.step += 1
            report.step(state, time.perf_counter() - started)
            self.schedule.run_after(state.step, state)
            if state.last.stop_requested:
                break
        sum_where_ranks_agree(state)  # raises if only some ranks stop: the others run it in their next step
        report.trained(state)


def _registers(add: Callable[[Action], None]) -> Callable[[Action], Action]:
    """Return a decorator that adds its action to the schedule."""

    def register(action: Action) -> Action:
        add(action)
        return action

    return register


def _finish(state: LoopState) -> RankError | None:
    """Evaluate, save a checkpoint and export after the last step; after a signal only save the checkpoint.

    Returns:
        The error to raise after the final report, if any: every step was skipped, or the export was written but
        saving the checkpoint failed.
    """
    recipe, unsaved = state.recipe, None
    asked_to_stop = state.last is not None and state.last.stop_requested
    if not asked_to_stop:
        if state.last is not None and state.session.engine.skipped_steps >= state.step:
            return RankError(
                f"all {state.step} steps were left out: their loss or gradients were not finite. The model is as it "
                "was, and no export was written; look at the samples that are named above"
            )
        evaluate_held_out(state)
    if state.step != state.saved_step and (asked_to_stop or recipe.train.checkpoint_every):
        try:
            save(state)
        except SaveError as error:
            if asked_to_stop or not recipe.export.enabled:
                raise
            unsaved = error  # the export needs a fraction of the space
            say(f"warning: {error}; the export follows")
    if asked_to_stop:
        say(f"asked to stop: step {state.step} is saved; --train.resume true goes on from there")
    elif recipe.export.enabled:
        _export(state)
    return unsaved


def _export(state: LoopState) -> None:
    """Export the trained model. If this fails in a run without checkpoints, save one, then raise the error."""
    try:
        batches = state.loader.first(max(1, state.recipe.quant.calibration_batches))
        export_trained(state.session, state.quant, batches)
    except RankError as error:
        if not state.recipe.train.checkpoint_every:
            say("the export failed; saving a training checkpoint for launch/export.py")
            try:
                save(state)
            except RankError as unsaved:
                raise RankError(f"{error}\n{unsaved}") from error
        raise
