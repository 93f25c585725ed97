"""The training loop. ``Loop.run`` and ``_train_step`` are the algorithm; everything else hangs on schedule events.

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

The same events can stand in the recipe, under ``schedule``.

Actions run on every rank, so they may use collectives; they must take the same branches on every rank.
"""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from data.loader import MicroBatch, real_tokens, valid_tokens
from engine.checkpoint.save import CheckpointError, mark_if_best, save_checkpoint
from engine.evaluation.held_out import evaluate
from engine.events import add_event
from engine.export import export_trained
from engine.faults import nan_unless_finite
from engine.forward import forward_losses
from engine.losses.objective import DIAGNOSTICS, NamedTokenLoss, TokenLoss
from engine.memory.measured import MemoryWatch, resident_bytes, write_measured
from engine.metrics import Progress, Summary
from engine.quantisation import statistics as quant_stats
from engine.recipe.checks import RecipeError
from engine.recipe.reading import load_recipe
from engine.recipe.recipe import Recipe
from engine.report import report_end, report_step
from engine.schedule import Schedule, lr_factor
from engine.session.levers import Levers
from engine.session.optimizer import SCALE_GROUPS, trained_scales
from engine.start import start_run
from engine.state import Action, LoopState, StepResult
from model.ranks import RankError, is_main, reduce_over_ranks, say, world_size
from model.zero import backward, global_gradient_norm, gradient_norm
from quant import recomputing, weights_changed


class Loop:
    """One training run: a recipe and a schedule of actions."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.schedule: Schedule[LoopState] = Schedule()
        self.token_losses: list[NamedTokenLoss] = []
        start = recipe.quant.fake_quant_start
        if start != 0:
            # Observers have nobody to watch for in a run that never quantises.
            self.schedule.at(0, lambda state: state.quant.disable(observe=not recipe.never_quantises()))
        if start > 0:
            self.schedule.at(start, lambda state: state.quant.enable())
        for event in recipe.schedule:
            add_event(self.schedule, event)

    @classmethod
    def from_recipe(cls, path: str | Path) -> "Loop":
        """A loop from a YAML recipe. Raises RecipeError if it is not a good one."""
        return cls(load_recipe(path))

    def at(self, step: int) -> Callable[[Action], Action]:
        """Decorator: run the action when ``step`` optimizer steps are done, before the next begins."""

        def register(action: Action) -> Action:
            self.schedule.at(step, action)
            return action

        return register

    def every(self, steps: int) -> Callable[[Action], Action]:
        """Decorator: run the action after every ``steps``-th optimizer step."""

        def register(action: Action) -> Action:
            self.schedule.every(steps, action)
            return action

        return register

    def when(self, condition: Callable[[LoopState], bool]) -> Callable[[Action], Action]:
        """Decorator: run the action once, after the first step at which the condition holds.

        The condition must be the same on every rank, as losses are.
        """

        def register(action: Action) -> Action:
            self.schedule.when(condition, action)
            return action

        return register

    def token_loss(self, name: str, *, weight: float) -> Callable[[TokenLoss], TokenLoss]:
        """Decorator: add a loss per token with a weight, logged as ``loss/<name>``; see
        engine.losses.objective.TokenLoss.

        Raises:
            ValueError: the name is taken.
        """
        taken = ("total", "lm", "kd", "router_aux", *DIAGNOSTICS, *(loss.name for loss in self.token_losses))
        if name in taken:
            raise ValueError(f"loss {name!r}: expected another name than {', '.join(taken)}")

        def register(function: TokenLoss) -> TokenLoss:
            self.token_losses.append(NamedTokenLoss(name, weight, function))
            return function

        return register

    def run(self) -> LoopState:
        """Set up, train, export. Returns the state after the last step.

        A signal (see engine/cluster/signals.py) ends it after the step it came in, with a checkpoint and without an
        export.
        """
        try:
            self.schedule.check(self.recipe.train.steps)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        resident = resident_bytes()
        state = start_run(self.recipe, self.schedule, [loss.name for loss in self.token_losses])
        unsaved: CheckpointError | None = None
        with state.stop_requests:
            summary = self._train(state, resident)
            asked_to_stop = state.last is not None and state.last.stop_requested
            if not asked_to_stop:
                self._evaluate(state)
            if state.step != state.saved_step and (asked_to_stop or self.recipe.train.checkpoint_every):
                try:
                    self._save(state)
                except CheckpointError as error:
                    if asked_to_stop or not self.recipe.export.enabled:
                        raise
                    unsaved = error  # the export needs a fraction of the room
                    say(f"warning: {error}; the export follows")
            if asked_to_stop:
                say(f"asked to stop: step {state.step} is saved; --train.resume true goes on from there")
            elif self.recipe.export.enabled:
                self._export(state)
        report_end(state, summary, self._checkpoints)
        if unsaved is not None:
            raise unsaved
        return state

    def _train(self, state: LoopState, resident: int) -> Summary:
        """Steps until the last one, or until somebody stops them. ``resident``: bytes before there was a model."""
        recipe, total = self.recipe, self.recipe.train.steps
        summary, progress = Summary(), Progress.start(total, state.step)
        memory: MemoryWatch | None = None
        if state.saved_step is None and not recipe.never_quantises():
            self._evaluate(state)  # what training starts from: PTQ
        while state.step < total and not state.stopped:
            self.schedule.run_before(state.step, state)
            started = time.perf_counter()
            state.last = self._train_step(state)
            state.step += 1
            memory = memory or MemoryWatch(state.model, state.session.engine.optimizer)  # from the second step on
            summary.step(state.last.losses, state.last.tokens, state.last.valid_tokens)
            report_step(state, progress, time.perf_counter() - started)
            if recipe.eval.every and state.step % recipe.eval.every == 0 and not state.last.stop_requested:
                self._evaluate(state)
            self.schedule.run_after(state.step, state)
            every = recipe.train.checkpoint_every
            if every and state.step % every == 0 and state.step < total:  # run() saves the last
                self._try_to_save(state)
            if state.last.stop_requested:
                break
        progress.close()
        if memory is not None and is_main():
            write_measured(Path(recipe.output_dir), memory, state.session.device, resident)
        return summary

    def _train_step(self, state: LoopState) -> StepResult:
        """One optimizer step: every micro-batch forward and backward, then the update."""
        session = state.session
        engine, device = session.engine, session.device
        batches = state.loader.step(state.step)
        counts = torch.tensor([valid_tokens(batches), sum(map(real_tokens, batches))], device=device)
        valid, tokens = reduce_over_ranks(counts).tolist()
        if valid == 0:  # the same on every rank, after the reduction
            raise RankError(f"step {state.step}: no token of any rank has a target (N = 0): nothing to learn from")
        _set_learning_rates(state)
        measures = _measures_quantization(state)
        # A script that watches the inputs itself keeps what its observers saw.
        watch = measures and not state.quant.quantization.observing
        if watch:
            state.quant.observe(True)

        scale_norm = None
        loss_scale = session.loss_scale.value if session.loss_scale is not None else 1.0
        if session.loss_scale is not None:
            engine.optimizer.loss_scale = loss_scale
        seen = state.quant.seen()
        skipped_before = engine.skipped_steps
        sums: dict[str, Tensor] = {}
        for batch in batches:
            total, parts = self._loss(state, {name: tensor.to(device) for name, tensor in batch.items()}, valid)
            sums = {name: sums.get(name, 0) + value for name, value in parts.items()}
            with recomputing():
                backward(engine, nan_unless_finite(total))
            last = engine.is_gradient_accumulation_boundary()
            for finish in session.after_backward if last else ():
                finish()
            if last and measures:
                scale_norm = gradient_norm(trained_scales(session.model)) / loss_scale
            engine.step()
        weights_changed(session.model)
        norm = global_gradient_norm(engine)
        skipped = engine.skipped_steps > skipped_before
        if skipped:
            state.quant.restore_seen(seen)
        else:
            state.quant.stepped()
        lowered = session.loss_scale is not None and session.loss_scale.stepped(overflow=skipped)
        state.skipped.record(state.step, skipped, torch.stack(list(sums.values())), state.loader, lowered=lowered)
        if measures:
            quant_stats.log(quant_stats.measure(state.quant.quantization), state.metrics, state.step + 1)
        if watch:
            state.quant.observe(False)

        # One reduction for the losses and the ranks' wishes to stop.
        wish = float(state.stop_requests.requested)
        own = torch.stack(list(sums.values()))
        *means, wishes = reduce_over_ranks(torch.cat([own / valid, own.new_tensor([wish])])).tolist()
        losses = dict(zip(sums, means, strict=True))
        losses = {"loss/total": self._total(session.levers, losses), **losses}
        used = None if session.loss_scale is None else loss_scale
        return StepResult(losses, valid, tokens, norm, scale_norm, skipped, wishes > 0, used)

    def _loss(self, state: LoopState, batch: MicroBatch, valid: int) -> tuple[Tensor, dict[str, Tensor]]:
        """What to differentiate for one micro-batch, and the sums over its tokens, by the names that are logged.

        DeepSpeed divides by the accumulation steps and averages over the ranks; ``valid`` already counts both.
        """
        loss, session = self.recipe.loss, state.session
        levers = session.levers
        scale = world_size() * self.recipe.train.gradient_accumulation_steps / valid
        objective = loss.objective(lm=levers.lm_weight, kd=levers.kd_weight, token_losses=tuple(self.token_losses))
        trains = torch.is_grad_enabled()
        # A cache holds training samples, none of those that are held out.
        known = trains or self.recipe.teacher_kind() != "cache"
        distil = session.teacher is not None and levers.kd_weight > 0 and known
        every = loss.diagnostics_every
        diagnostics = trains and distil and every > 0 and (state.step + 1) % every == 0
        found = forward_losses(session, batch, objective, scale=scale, distil=distil, diagnostics=diagnostics)
        names = {"kd": f"loss/kd/{loss.kd}", **{name: f"kd/{name}" for name in DIAGNOSTICS}}
        sums = {names.get(name, f"loss/{name}"): value for name, value in found.sums.items()}
        total = found.total
        if self.recipe.learnable.router:
            aux = getattr(found.output, "aux_loss", None)
            sums["loss/router_aux"] = torch.zeros_like(sums["loss/lm"])
            if aux is not None:
                # A mean over the micro-batch, as transformers defines it; weighted by its tokens like the rest.
                aux = aux * session.model.router_aux_loss_coef * valid_tokens([batch])
                sums["loss/router_aux"] = aux.detach().float()
                total = total + aux * scale
        return total, sums

    def _total(self, levers: Levers, losses: Mapping[str, float]) -> float:
        """The total of logged losses, with their weights."""
        weights = {"loss/lm": levers.lm_weight, f"loss/kd/{self.recipe.loss.kd}": levers.kd_weight}
        weights |= {f"loss/{loss.name}": loss.weight for loss in self.token_losses} | {"loss/router_aux": 1.0}
        return sum(weight * losses[name] for name, weight in weights.items() if weight and name in losses)

    def _evaluate(self, state: LoopState) -> None:
        """Losses on the held-out samples as the model would be served now, into the state and TensorBoard."""
        if not self.recipe.eval.every or state.evaluated_step == state.step or state.held_out is None:
            return
        means = evaluate(state, lambda batch: self._loss(state, batch, 1)[1])
        means = {"loss/total": self._total(state.session.levers, means), **means}
        state.evaluation = {name.replace("loss/", "eval/"): value for name, value in means.items()}
        state.evaluation["eval/perplexity"] = math.exp(min(means["loss/lm"], 700.0))
        state.first_evaluation = state.first_evaluation or state.evaluation
        state.evaluated_step = state.step
        state.log(state.evaluation)
        figures = ", ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in state.evaluation.items())
        say(f"step {state.step}: held-out {figures}")

    @property
    def _checkpoints(self) -> Path:
        return Path(self.recipe.output_dir) / "checkpoints"

    def _export(self, state: LoopState) -> None:
        """Export; if that fails, a training checkpoint keeps the work."""
        try:
            batches = state.loader.first(max(1, self.recipe.quant.calibration_batches))
            export_trained(state.session, state.quant, batches)
        except RankError:
            if not self.recipe.train.checkpoint_every:
                say("the export failed; saving a training checkpoint for launch/export.py")
                self._save(state)
            raise

    def _save(self, state: LoopState) -> None:
        levers = state.session.levers
        levers.evaluation, levers.left_out = state.evaluation, state.skipped.in_a_row
        save_checkpoint(state.session, self._checkpoints, state.step, keep=self.recipe.train.keep_checkpoints)
        state.saved_step = state.step
        state.metrics.flush()
        best = self.recipe.eval.best
        metric = f"eval/kd/{self.recipe.loss.kd}" if best == "kd" else f"eval/{best}"
        if state.evaluated_step == state.step and metric in state.evaluation:
            keep = self.recipe.train.keep_checkpoints
            mark_if_best(self._checkpoints, state.step, metric, state.evaluation[metric], keep=keep)

    def _try_to_save(self, state: LoopState) -> None:
        """A checkpoint on the way: the run and the checkpoints before outlive its failure (a full disk)."""
        try:
            self._save(state)
        except CheckpointError as error:
            at = state.step + self.recipe.train.checkpoint_every
            say(f"warning: {error}; training goes on, the next attempt is at step {min(at, self.recipe.train.steps)}")


def _measures_quantization(state: LoopState) -> bool:
    """Whether the step that begins is one that measures quantisation."""
    every = state.recipe.train.quant_stats_every
    return state.quant.enabled and every > 0 and (state.step + 1) % every == 0


def _set_learning_rates(state: LoopState) -> None:
    """The schedule's learning rate of this step, into every parameter group.

    Scales rest while their fake quant is off or they are frozen, and warm up from the step in which it starts.
    """
    optim, levers = state.recipe.optim, state.session.levers
    factor = lr_factor(
        state.step,
        total=state.recipe.train.steps,
        warmup=optim.warmup_steps,
        kind=optim.schedule,
        min_ratio=optim.min_lr_ratio,
        decay=optim.decay_steps,
    )
    # From the recipe, not from the optimizer's state: a resumed run follows the recipe that it is given.
    peaks = levers.peaks()
    for group in state.session.engine.optimizer.param_groups:
        name = group["name"]
        if name in SCALE_GROUPS:
            warm = (levers.scale_steps[name] + 1) / max(1, optim.warmup_steps)
            group["lr"] = peaks[name] * min(factor, warm) * state.quant.learning(name)
        else:
            group["lr"] = peaks[name] * factor
