"""One optimizer step: count tokens, accumulate gradients, update, report."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from data.loader import MicroBatch, model_inputs, on_device, real_tokens, valid_tokens
from engine.checks import check_layers_ran, check_weights, sum_where_ranks_agree, watch_gradients
from engine.fake_quant import measure, observed, observing_tokens
from engine.losses.chunked import LossResult, chunked_losses
from engine.losses.objective import ROUTER_AUX, Objective
from engine.session.optimizer import SCALE_GROUPS, lr_factor, trained_scales
from engine.session.session import Session
from engine.session.teacher import CachedTeacher
from engine.state import LoopState, StepResult
from model.ranks import RankError, raise_everywhere, reduce_over_ranks, world_size
from model.zero import backward, drop_gradients, gathered, global_gradient_norm, gradient_norm
from quant import weights_changed
from quant.observers import recomputing


def train_step(state: LoopState) -> StepResult:
    """Run one optimizer step: forward and backward of every micro-batch, then the update; a collective. Raises
    RankError on every rank if no token has a target, events have set different values on the ranks, too many steps in a
    row were skipped, a layer did not run or a trained parameter got no gradient in the first step, there is no
    loss or no teacher, or the server of ``data.kind: on_policy`` wrote no answers."""
    batches = state.loader.step(state.step)
    valid, tokens = _count(state, batches)
    _set_learning_rates(state)
    objective = state.objective()
    check_weights(state, objective)
    measures = _is_due(state, state.recipe.train.quant_stats_every) and state.quant.enabled
    with observed(state.quant) if measures else nullcontext():
        seen = state.session.quantization.seen()
        sums = _accumulate(state, batches, objective, valid)
        scale_grad_norm, skipped, loss_scale = _update(state, measures=measures)
        own = torch.stack(list(sums.values()))
        scale = state.session.loss_scale
        lowered = scale is not None and scale.stepped(overflow=skipped)
        if skipped:
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
        scale_grad_norm=scale_grad_norm,
        skipped=skipped,
        stop_requested=stop_requested,
        loss_scale=loss_scale,
        quantization=statistics,
    )


def _is_due(state: LoopState, every: int) -> bool:
    """Tell if the number of the current step, from 1, is a multiple of ``every``; False if ``every`` is 0."""
    return every > 0 and (state.step + 1) % every == 0


def _count(state: LoopState, batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Count the step's tokens over all ranks: (tokens with a target, tokens without padding); a collective. Raises
    RankError on every rank if no token has a target."""
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
    is off or while they are frozen. The rate of scales warms up when their fake quant starts."""
    optim, total = state.recipe.optim, state.recipe.train.steps
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
    peaks = state.session.overrides.peaks()
    for group in state.session.engine.optimizer.param_groups:
        name = group["name"]
        if name in SCALE_GROUPS:
            warm = (state.quant.scale_steps[name] + 1) / max(1, warmup)
            group["lr"] = peaks[name] * min(factor, warm) * state.quant.learning(name)
        else:
            group["lr"] = peaks[name] * factor


def _accumulate(state: LoopState, batches: Sequence[MicroBatch], objective: Objective, valid: int) -> dict[str, Tensor]:
    """Run forward and backward of every micro-batch; return this rank's sums of losses by name; a collective. Raises
    RankError on every rank if, in the first step, a quantized layer did not run or a Parameter got no gradient."""
    session, engine = state.session, state.session.engine
    # The sum of the losses is divided by the valid tokens of the whole step only: this factor undoes DeepSpeed's
    # divisions by accumulation steps and ranks.
    scale = world_size() * state.recipe.train.gradient_accumulation_steps / valid
    diagnostics = _is_due(state, state.recipe.loss.diagnostics_every)
    if session.loss_scale is not None:
        engine.optimizer.loss_scale = session.loss_scale.value
    sums: dict[str, Tensor] = {}
    untouched = watch_gradients(session.model) if state.last is None else None
    for given in batches:
        batch = on_device(given, session.device)
        with observing_tokens(session, given):
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


def _update(state: LoopState, *, measures: bool) -> tuple[float | None, bool, float | None]:
    """Step the optimizer; a collective. Return the norm of the scales' gradients (None without ``measures``), True if
    the step was skipped, and the loss scale of the step (None without loss scaling)."""
    session, engine = state.session, state.session.engine
    loss_scale = session.loss_scale.value if session.loss_scale is not None else None
    skipped_before = engine.skipped_steps
    for finish in session.after_backward:
        finish()
    scale_norm = gradient_norm(trained_scales(session.model)) / (loss_scale or 1.0) if measures else None
    engine.step()
    if skipped := engine.skipped_steps > skipped_before:
        drop_gradients(engine.optimizer)
    weights_changed(session.model)
    return scale_norm, skipped, loss_scale


def _reduce(state: LoopState, sums: Tensor, valid: int) -> tuple[list[float], bool, float | None]:
    """Return the loss means, stop flag and gradient norm (or None) over all ranks, with one host wait; a collective."""
    wish = sums.new_full((1,), float(state.stop_requests.requested))
    reduced = reduce_over_ranks(torch.cat([sums / valid, wish])).double()
    norm = global_gradient_norm(state.session.engine, sums.device)
    *means, wishes, total = torch.cat([reduced, reduced[:1] if norm is None else norm]).tolist()
    return means, wishes > 0, None if norm is None else total


# ---- a micro-batch


def micro_batch_losses(
    session: Session,
    batch: MicroBatch,
    objective: Objective,
    *,
    scale: float = 1.0,
    diagnostics: bool = False,
    held_out: bool = False,
) -> LossResult:
    """Compute the losses of a micro-batch; a collective.

    Args:
        batch: the micro-batch, on the device (:func:`data.loader.on_device`).
        scale: factor on the total, not on the sums.
        diagnostics: also measure the distance to the teacher, if there is a teacher.
        held_out: the batch has held-out samples, for which a cached teacher has no output.

    Returns:
        The total with its graph, and the sums of the losses named by :meth:`engine.losses.objective.Objective.parts`
        and, with ``learnable.router``, of the router's auxiliary loss.
    """
    head = session.head
    assert head is not None, "losses need a session for training"
    inputs: dict[str, Any] = {**model_inputs(batch, mask=session.mask), "use_cache": False}
    teacher = session.teacher if objective.kd_weight > 0 else None
    if held_out and isinstance(teacher, CachedTeacher):
        teacher = None
    teacher_output = teacher.forward(inputs, batch) if teacher is not None else None
    result: LossResult | None = None

    def losses_at_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the losses inside the student's lm_head, while its weight is gathered; return the total."""
        nonlocal result
        with gathered(teacher_output.parameters if teacher_output is not None else ()):
            result = chunked_losses(
                hidden,
                weight,
                bias,
                batch["labels"],
                teacher_output.teacher if teacher_output is not None else None,
                objective,
                scale=scale,
                gradient_scale=session.loss_scale.value if session.loss_scale is not None else 1.0,
                diagnostics=diagnostics and teacher_output is not None,
                function=head.function,
                positions=batch["positions"],
            )
        return result.total

    to_host = session.recipe.train.activation_offload
    with head.computing(losses_at_head), OnHost() if to_host else nullcontext():
        output = session.engine(**inputs)
    assert result is not None, "the model's forward does not end in its lm_head"
    total, sums = head.collect(output.logits, type(session.model).__name__), result.sums
    if session.recipe.learnable.router:
        sums[ROUTER_AUX] = torch.zeros_like(sums["lm"])
        if (aux := getattr(output, "aux_loss", None)) is not None:
            # transformers defines a mean over the micro-batch; weight it by tokens like the other losses.
            aux = aux * _router_loss_factor(session.model) * len(batch["positions"])
            sums[ROUTER_AUX] = aux.detach().float()
            total = total + aux * scale
    return LossResult(total, sums)


def _router_loss_factor(model: PreTrainedModel) -> float:
    """Look up the factor of the load-balancing auxiliary loss in a transformers model. Raises ValueError if neither the
    model nor its config has the factor."""
    for owner in (model, model.config.get_text_config()):
        if (factor := getattr(owner, "router_aux_loss_coef", None)) is not None:
            return float(factor)
    raise ValueError(
        f"learnable.router: {type(model).__name__} computes an auxiliary loss, but has no router_aux_loss_coef; set "
        "router_aux_loss_coef in its config.json"
    )


class OnHost(saved_tensors_hooks):
    """Context around a forward that keeps tensors saved for backward in host memory; on a CPU nothing is copied.

    With activation checkpointing (non-reentrant) a recomputed block saves only its input, through the saved-tensor
    hooks active around the block. So this context keeps that input in host memory, pinned on CUDA. Tensors that a block
    saves while it is recomputed in backward are saved outside of this context and stay on the device.

    ``torch.autograd.graph.save_on_cpu`` would also copy Parameters to the host and back, such as the whole weight of a
    quantized lm_head. transformers' ``offload=True`` (5.23) wraps each block in ``save_on_cpu``, and asks for pinned
    memory even on a CPU, which has none.
    """

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        """Return the device of a saved tensor, and its copy in host memory; a Parameter itself, without a copy."""
        if isinstance(tensor, nn.Parameter):
            return tensor.device, tensor
        return tensor.device, self.to_host(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy ``tensor`` to host memory, unless it is there already."""
        if tensor.device.type == "cpu":
            return tensor
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return kept.copy_(tensor, non_blocking=True)  # on the stream that wrote it, before backward's copy back

    def unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        """Copy the tensor back to its device."""
        device, tensor = packed
        return tensor.to(device, non_blocking=True)
