"""The training loop. ``Loop.run`` and ``_train_step`` are the algorithm; everything else hangs on schedule events.

A user's own schedule is a few lines of Python, run by the same launcher (``deepspeed --num_gpus 8 my_schedule.py``)::

    loop = Loop.from_recipe("launch/recipes/qwen3_4b_fp8.yaml")

    @loop.at(step=0)
    def off(state): state.quant.disable()

    @loop.at(step=1000)
    def on(state): state.quant.enable()

    @loop.every(50)
    def probe(state): state.log({"my/value": ...})

    loop.run()

Actions run on every rank, so they may use collectives; they must take the same branches on every rank.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from data.loader import Loader, valid_tokens
from engine.calibrate import calibrate_inputs
from engine.checkpoint import (
    LATEST,
    Checkpoint,
    CheckpointError,
    check_resumable,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from engine.export import check_export_dir, export_trained
from engine.fake_quant import FakeQuant
from engine.faults import SkippedSteps, nan_unless_finite
from engine.losses import loss_sums
from engine.metrics import Metrics, Progress, clipped_fractions, peak_memory_bytes
from engine.optim import peak_learning_rates
from engine.recipe import Recipe, RecipeError, load_recipe, save_recipe
from engine.schedule import Schedule, lr_factor
from engine.setup import Session, build_loader, say, set_up, start_ranks
from engine.signals import StopRequests
from model.ranks import RankError, errors_on_all_ranks, is_main, reduce_over_ranks, world_size
from quant import weights_changed

Batch = Mapping[str, Tensor]


@dataclass
class StepResult:
    """Means over the valid tokens of one optimizer step, of all ranks."""

    losses: dict[str, float]
    valid_tokens: int
    tokens: int
    grad_norm: float | None
    """Before clipping; None on stage 0 in fp32, where DeepSpeed clips without keeping it."""
    clipped: dict[str, float]
    """Clipped fractions by layer, in the steps that measure them."""
    stop_requested: bool = False
    """A signal asked at least one rank to stop; the same on all ranks."""


@dataclass
class LoopState:
    """What an action gets: the run as it stands, and its levers."""

    session: Session
    quant: FakeQuant
    loader: Loader
    metrics: Metrics
    step: int = 0
    """Optimizer steps done."""
    last: StepResult | None = None
    """Result of the last step."""
    stopped: bool = False
    saved_step: int | None = None
    """Step of the checkpoint that this run wrote last, or was resumed from."""
    stop_requests: StopRequests = field(default_factory=StopRequests)
    skipped: SkippedSteps = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = SkippedSteps(self.recipe.train.max_skipped_steps)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.session.recipe

    @property
    def model(self) -> torch.nn.Module:
        """The student; under stage 3 its Parameters are partitioned."""
        return self.session.model

    def log(self, values: Mapping[str, float]) -> None:
        """Write values to TensorBoard at the current step."""
        self.metrics.log(values, self.step)

    def stop(self) -> None:
        """End the run after this step; what follows the last step (export) still happens."""
        self.stopped = True


class Loop:
    """One training run: a recipe and a schedule of actions."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.schedule: Schedule[LoopState] = Schedule()
        start = recipe.quant.fake_quant_start
        if start != 0:
            # Observers have nobody to watch for in a run that never quantises.
            self.schedule.at(0, lambda state: state.quant.disable(observe=start > 0))
        if start > 0:
            self.schedule.at(start, lambda state: state.quant.enable())

    @classmethod
    def from_recipe(cls, path: str | Path) -> "Loop":
        """A loop from a YAML recipe. Raises RecipeError if it is not a good one."""
        return cls(load_recipe(path))

    def at(self, step: int) -> Callable[[Callable[[LoopState], object]], Callable[[LoopState], object]]:
        """Decorator: run the action when ``step`` optimizer steps are done, before the next begins."""

        def register(action: Callable[[LoopState], object]) -> Callable[[LoopState], object]:
            self.schedule.at(step, action)
            return action

        return register

    def every(self, steps: int) -> Callable[[Callable[[LoopState], object]], Callable[[LoopState], object]]:
        """Decorator: run the action after every ``steps``-th optimizer step."""

        def register(action: Callable[[LoopState], object]) -> Callable[[LoopState], object]:
            self.schedule.every(steps, action)
            return action

        return register

    def run(self) -> LoopState:
        """Set up, train, export. Returns the state after the last step.

        A signal (see engine/signals.py) ends it after the step it came in, with a checkpoint and without an export.
        """
        self.schedule.check(self.recipe.train.steps)
        state = self._start()
        with state.stop_requests:
            self._train(state)
            asked_to_stop = state.last is not None and state.last.stop_requested
            if state.step != state.saved_step and (asked_to_stop or self.recipe.train.checkpoint_every):
                self._save(state)
            if asked_to_stop:
                say(f"asked to stop: step {state.step} is saved; --train.resume true goes on from there")
            elif self.recipe.export.enabled:
                self._export(state)
        state.metrics.close()
        return state

    def _train(self, state: LoopState) -> None:
        """Steps until the last one, or until somebody stops them."""
        recipe, total = self.recipe, self.recipe.train.steps
        progress = Progress.start(total, state.step)
        asked_to_stop = False
        while state.step < total and not state.stopped and not asked_to_stop:
            self.schedule.run_before(state.step, state)
            started = time.perf_counter()
            state.last = self._train_step(state)
            state.step += 1
            self._report(state, progress, time.perf_counter() - started)
            self.schedule.run_after(state.step, state)
            asked_to_stop = state.last.stop_requested
            every = recipe.train.checkpoint_every
            if every and state.step % every == 0 and state.step < total:  # run() saves the last
                self._try_to_save(state)
        progress.close()

    def _train_step(self, state: LoopState) -> StepResult:
        """One optimizer step: every micro-batch forward and backward, then the update."""
        session, recipe = state.session, self.recipe
        engine, device = session.engine, session.device
        batches = state.loader.step(state.step)
        counts = torch.tensor(
            [valid_tokens(batches), sum(int(b["attention_mask"].sum()) for b in batches)], device=device
        )
        valid, tokens = reduce_over_ranks(counts).tolist()
        if valid == 0:  # the same on every rank, after the reduction
            raise RankError(f"step {state.step}: no token of any rank has a target (N = 0): nothing to learn from")
        _set_learning_rates(state)
        quantized = state.quant.enabled
        state.quant.stale |= not quantized
        every = recipe.train.clip_stats_every
        clip_stats = quantized and every > 0 and (state.step + 1) % every == 0
        # A script that watches the inputs itself keeps what its observers saw.
        watch = clip_stats and not state.quant.quantization.observing
        if watch:
            state.quant.quantization.observe(True)

        skipped_before = engine.skipped_steps
        sums = torch.zeros(3, device=device)
        for batch in batches:
            total, parts = self._loss(session, {name: tensor.to(device) for name, tensor in batch.items()})
            sums += parts
            # DeepSpeed divides by the accumulation steps and averages over the ranks; N already counts both.
            engine.backward(
                nan_unless_finite(total) * (world_size() * recipe.train.gradient_accumulation_steps / valid)
            )
            engine.step()
        weights_changed(session.model)
        norm = engine.get_global_grad_norm()

        skipped = engine.skipped_steps > skipped_before
        session.scale_steps += quantized and not skipped
        state.skipped.record(state.step, skipped, sums, state.loader)

        clipped = {}
        if clip_stats:
            clipped = clipped_fractions(state.quant.quantization)
        if watch:
            state.quant.quantization.observe(False)
        # One reduction for the losses and the ranks' wishes to stop.
        wish = sums.new_tensor([state.stop_requests.requested])
        lm, kd, aux, wishes = reduce_over_ranks(torch.cat([sums, wish])).tolist()
        losses = self._named_losses(lm / valid, kd / valid, aux / valid)
        return StepResult(losses, valid, tokens, None if norm is None else float(norm), clipped, wishes > 0)

    def _loss(self, session: Session, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of one micro-batch as a sum over its tokens, and its parts [lm, kd, router aux], detached."""
        loss = self.recipe.loss
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        teacher_logits = None
        if session.teacher is not None:
            with torch.no_grad():
                teacher_logits = session.teacher(**inputs).logits
        output = session.engine(**inputs)
        sums = loss_sums(
            output.logits,
            batch["labels"],
            teacher_logits,
            kd_kind=loss.kd,
            temperature=loss.temperature,
            chunk_tokens=loss.chunk_tokens,
        )
        total = loss.lm_weight * sums.lm + loss.kd_weight * sums.kd
        aux = torch.zeros_like(sums.lm)
        if self.recipe.learnable.router and getattr(output, "aux_loss", None) is not None:
            # A mean over the micro-batch, as transformers defines it; weighted by its tokens like the rest.
            aux = output.aux_loss * session.model.router_aux_loss_coef * valid_tokens([dict(batch)])
            total = total + aux
        return total, torch.stack([sums.lm.detach(), sums.kd.detach(), aux.detach().float()])

    def _named_losses(self, lm: float, kd: float, aux: float) -> dict[str, float]:
        loss = self.recipe.loss
        named = {"loss/total": loss.lm_weight * lm + loss.kd_weight * kd + aux, "loss/lm": lm}
        if loss.kd_weight:
            named[f"loss/kd/{loss.kd}"] = kd
        if self.recipe.learnable.router:
            named["loss/router_aux"] = aux
        return named

    def _start(self) -> LoopState:
        """Everything before the first step."""
        recipe = self.recipe
        output = Path(recipe.output_dir)
        checkpoint = _check_destinations(recipe, output / "checkpoints")
        context = start_ranks(recipe)
        if checkpoint is not None:
            verify_checkpoint(checkpoint)
        with errors_on_all_ranks(OSError):
            if is_main():
                output.mkdir(parents=True, exist_ok=True)
        # Before the weights: a bad line in a file should not cost the minutes that a large model takes to load.
        loader = build_loader(recipe, context.tokenizer)
        session, uncalibrated = set_up(recipe, context)
        with errors_on_all_ranks(OSError):
            if is_main():
                save_recipe(recipe, output / "recipe.yaml")
        quant = FakeQuant(session)
        if uncalibrated and recipe.quant.fake_quant_start == 0 and not recipe.train.resume:
            say(f"calibrating activations on {recipe.quant.calibration_batches} micro-batches per rank")
            batches = loader.first(recipe.quant.calibration_batches)
            calibrate_inputs(session.engine, session.quantization, uncalibrated, batches, session.device)
        metrics = Metrics(output / "tensorboard", output / "recipe.yaml")
        session.engine.train()
        state = LoopState(session, quant, loader, metrics)
        if checkpoint is not None:
            state.step = state.saved_step = load_checkpoint(session, checkpoint)
            quant.stale = not quant.enabled
        return state

    def _export(self, state: LoopState) -> None:
        """Export; if that fails, a training checkpoint keeps the work."""
        try:
            export_trained(state.session, state.quant)
        except RankError:
            if not self.recipe.train.checkpoint_every:
                say("the export failed; saving a training checkpoint for launch/export.py")
                self._save(state)
            raise

    def _save(self, state: LoopState) -> None:
        directory = Path(self.recipe.output_dir) / "checkpoints"
        save_checkpoint(state.session, directory, state.step, keep=self.recipe.train.keep_checkpoints)
        state.saved_step = state.step

    def _try_to_save(self, state: LoopState) -> None:
        """A checkpoint on the way: the run and the checkpoints before outlive its failure (a full disk)."""
        try:
            self._save(state)
        except CheckpointError as error:
            at = state.step + self.recipe.train.checkpoint_every
            say(f"warning: {error}; training goes on, the next attempt is at step {min(at, self.recipe.train.steps)}")

    def _report(self, state: LoopState, progress: Progress, seconds: float) -> None:
        """The step's figures to the progress bar and TensorBoard."""
        last = state.last
        assert last is not None
        speed = last.tokens / world_size() / seconds
        progress.step({"loss": last.losses["loss/total"], "tok/s/dev": speed})
        state.log(last.clipped)
        if state.step % self.recipe.train.log_every:
            return
        engine = state.session.engine
        rates = {f"lr/{group['name']}": group["lr"] for group in engine.optimizer.param_groups}
        state.log(
            {
                **last.losses,
                **rates,
                **({} if last.grad_norm is None else {"train/grad_norm": last.grad_norm}),
                "train/tokens_per_second_per_device": speed,
                "train/peak_memory_gib": peak_memory_bytes(state.session.device) / 2**30,
                "train/skipped_steps": engine.skipped_steps,
                "train/epoch": state.loader.epoch_of(state.step),
            }
        )


def _check_destinations(recipe: Recipe, checkpoints: Path) -> Checkpoint | None:
    """Refuse before any work what would fail, or destroy something, after it. Raises RecipeError on every rank.

    Returns:
        The checkpoint to resume from, if there is to be one.
    """
    if recipe.export.enabled:
        check_export_dir(recipe)
    if recipe.train.resume:
        return check_resumable(recipe, checkpoints)
    if (checkpoints / LATEST).exists():
        raise RecipeError(
            f"output_dir: {recipe.output_dir!r} has checkpoints of an earlier run; "
            "set train.resume to continue it, or name another one"
        )
    return None


def _set_learning_rates(state: LoopState) -> None:
    """The schedule's learning rate of this step, into every parameter group.

    Scales rest while fake quant is off, and warm up from the step in which it starts.
    """
    optim = state.recipe.optim
    factor = lr_factor(
        state.step,
        total=state.recipe.train.steps,
        warmup=optim.warmup_steps,
        kind=optim.schedule,
        min_ratio=optim.min_lr_ratio,
    )
    # From the recipe, not from the optimizer's state: a resumed run follows the recipe that it is given.
    peaks = peak_learning_rates(optim)
    scale_factor = min(factor, (state.session.scale_steps + 1) / max(1, optim.warmup_steps))
    for group in state.session.engine.optimizer.param_groups:
        if group["name"] == "scales":
            group["lr"] = peaks["scales"] * scale_factor * state.quant.enabled
        else:
            group["lr"] = peaks[group["name"]] * factor
