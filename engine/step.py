"""One optimizer step: count tokens, accumulate gradients, update, report."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from data.loader import MicroBatch, on_device, real_tokens, valid_tokens
from engine.checks import check_layers_ran, sum_where_ranks_agree, watch_gradients
from engine.fake_quant import measure, observed
from engine.losses.objective import Objective
from engine.micro_batch import micro_batch_losses
from engine.session.optimizer import SCALE_GROUPS, lr_factor, trained_scales
from engine.state import LoopState, StepResult
from model.ranks import RankError, raise_everywhere, reduce_over_ranks, world_size
from model.zero import backward, global_gradient_norm, gradient_norm
from quant import weights_changed
from quant.observers import recomputing


def train_step(state: LoopState) -> StepResult:
    """Run one optimizer step: forward and backward of every micro-batch, then the update; a collective. Raises
    RankError on every rank if no token has a target, or too many steps in a row were skipped."""
    batches = state.loader.step(state.step)
    valid, tokens = _count(state, batches)
    _set_learning_rates(state)
    objective = state.objective()
    measures = _is_due(state, state.recipe.train.quant_stats_every) and state.quant.enabled
    with observed(state.quant) if measures else nullcontext():
        seen = state.session.quantization.seen()
        sums = _accumulate(state, batches, objective, valid)
        update = _update(state, measures=measures)
        own = torch.stack(list(sums.values()))
        scale = state.session.loss_scale
        lowered = scale is not None and scale.stepped(overflow=update.skipped)
        if update.skipped:
            # Inputs of a skipped step may be NaN, which would stay in the observers' maxima.
            state.session.quantization.restore_seen(seen)
            state.skipped.record(state.step, own, state.loader, lowered=lowered)
        else:
            state.quant.stepped()
            state.skipped.in_a_row = 0
        statistics = measure(state.session.quantization) if measures else None
    means, stop_requested, grad_norm = _reduce(state, own, valid)
    losses = objective.report(dict(zip(sums, means, strict=True)))
    return StepResult(
        losses,
        valid_tokens=valid,
        tokens=tokens,
        grad_norm=grad_norm,
        **update._asdict(),
        stop_requested=stop_requested,
        quantization=statistics,
    )


def _is_due(state: LoopState, every: int) -> bool:
    """Tell if the number of the current step, from 1, is a multiple of ``every``; False if ``every`` is 0."""
    return every > 0 and (state.step + 1) % every == 0


def _count(state: LoopState, batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Count the step's tokens over all ranks: (tokens with a target, tokens without padding); a collective."""
    valid, tokens = sum_where_ranks_agree(state, (valid_tokens(batches), sum(map(real_tokens, batches))))
    tokens //= state.recipe.parallel.sequence  # each of the ranks that share a row has counted all of it
    if valid == 0:  # the same on every rank, after the reduction
        raise RankError(
            f"step {state.step}: no token of any rank has a target, expected at least one: look at the data, "
            "its answers are empty or truncated"
        )
    return valid, tokens


def _set_learning_rates(state: LoopState) -> None:
    """Set the schedule's learning rate of this step in every parameter group. Scales have rate 0 while their fake quant
    is off or they are frozen. They warm up when their fake quant starts."""
    optim, overrides = state.recipe.optim, state.session.overrides
    total = state.recipe.train.steps
    warmup = optim.warmup(total)
    factor = lr_factor(
        state.step,
        total=total,
        warmup=warmup,
        kind=optim.schedule,
        min_ratio=optim.min_lr_ratio,
        decay=optim.decay_steps,
    )
    # From the recipe, not from the optimizer's state: a resumed run follows the recipe that it is given.
    peaks = overrides.peaks()
    for group in state.session.engine.optimizer.param_groups:
        name = group["name"]
        if name in SCALE_GROUPS:
            warm = (state.quant.scale_steps[name] + 1) / max(1, warmup)
            group["lr"] = peaks[name] * min(factor, warm) * state.quant.learning(name)
        else:
            group["lr"] = peaks[name] * factor


def _accumulate(state: LoopState, batches: Sequence[MicroBatch], objective: Objective, valid: int) -> dict[str, Tensor]:
    """Run forward and backward of every micro-batch; return the sums of this rank's losses by part."""
    session, engine = state.session, state.session.engine
    # The sum of the losses is divided by the valid tokens of the whole step only: this factor undoes DeepSpeed's
    # divisions by accumulation steps and ranks.
    scale = world_size() * state.recipe.train.gradient_accumulation_steps / valid
    diagnostics = _is_due(state, state.recipe.loss.diagnostics_every)
    if session.loss_scale is not None:
        engine.optimizer.loss_scale = session.loss_scale.value
    sums: dict[str, Tensor] = {}
    untouched = watch_gradients(session.model) if state.last is None else None
    for batch in (on_device(each, session.device) for each in batches):
        losses = micro_batch_losses(session, batch, objective, scale=scale, diagnostics=diagnostics)
        if state.last is None:
            check_layers_ran(session.quantization)
        sums = {name: sums.get(name, 0) + value for name, value in losses.sums.items()}
        with recomputing():
            backward(engine, nan_unless_finite(losses.total))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()  # counts the micro-batch; after the last micro-batch _update calls it
    if untouched is not None:
        raise_everywhere(untouched())
    return sums


def nan_unless_finite(loss: Tensor) -> Tensor:
    """Return the loss unchanged if it is finite, else NaN with NaN gradients. An infinite loss may have finite
    gradients. With NaN in every gradient DeepSpeed skips the step on all ranks, without another collective."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class Update(NamedTuple):
    """Outcome of an optimizer update; its fields become those of :class:`engine.state.StepResult`."""

    scale_grad_norm: float | None
    skipped: bool
    loss_scale: float | None


def _update(state: LoopState, *, measures: bool) -> Update:
    """Step the optimizer; with ``measures`` also measure the norm of the scales' gradients; a collective."""
    session, engine = state.session, state.session.engine
    loss_scale = session.loss_scale.value if session.loss_scale is not None else None
    skipped_before = engine.skipped_steps
    for finish in session.after_backward:
        finish()
    scale_norm = gradient_norm(trained_scales(session.model)) / (loss_scale or 1.0) if measures else None
    engine.step()
    weights_changed(session.model)
    return Update(scale_norm, engine.skipped_steps > skipped_before, loss_scale)


def _reduce(state: LoopState, sums: Tensor, valid: int) -> tuple[list[float], bool, float | None]:
    """Reduce the loss means, the stop flag and the gradient norm over ranks, with one host wait."""
    wish = sums.new_full((1,), float(state.stop_requests.requested))
    reduced = reduce_over_ranks(torch.cat([sums / valid, wish])).double()
    norm = global_gradient_norm(state.session.engine, sums.device)
    *means, wishes, total = torch.cat([reduced, reduced[:1] if norm is None else norm]).tolist()
    return means, wishes > 0, None if norm is None else total
