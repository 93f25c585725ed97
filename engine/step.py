"""One optimizer step: count tokens, accumulate gradients, update, report; and the losses of one micro-batch."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from data.loader import MicroBatch, model_inputs, on_device, real_tokens, valid_tokens
from engine.checks import check_layers_ran, sum_where_ranks_agree, watch_gradients
from engine.fake_quant import Watch, watching
from engine.faults import nan_unless_finite
from engine.losses.chunked import LossResult, chunked_losses
from engine.losses.objective import ROUTER_AUX, Objective, router_loss_factor
from engine.losses.teacher import CachedTeacher, Teacher, TeacherOutput
from engine.session.optimizer import SCALE_GROUPS, lr_factor, trained_scales
from engine.session.session import Session
from engine.state import LoopState, StepResult
from model.head import LogitFunction
from model.ranks import RankError, raise_everywhere, reduce_over_ranks, world_size
from model.zero import backward, gathered, global_gradient_norm, gradient_norm
from quant import weights_changed
from quant.observers import recomputing


def train_step(state: LoopState) -> StepResult:
    """Run one optimizer step: forward and backward of every micro-batch, then the update; a collective.

    Raises:
        RankError: on every rank: no token has a target, or too many steps in a row were skipped.
    """
    batches = state.loader.step(state.step)
    valid, tokens = _count(state, batches)
    _set_learning_rates(state)
    objective = state.objective()
    measures = _is_due(state, state.recipe.train.quant_stats_every) and state.quant.enabled
    with watching(state.quant) if measures else nullcontext(Watch()) as watch:
        seen = state.session.quantization.seen()
        sums = _accumulate(state, batches, objective, valid)
        update = _update(state, measures=measures)
        if update.skipped:
            # Inputs of a skipped step may be NaN, which would stay in the observers' maxima.
            state.session.quantization.restore_seen(seen)
        else:
            state.quant.stepped()
        own = torch.stack(list(sums.values()))
        _record_skipped(state, own, skipped=update.skipped)
    means, stop_requested, grad_norm = _reduce(state, own, valid)
    losses = objective.report(dict(zip(sums, means, strict=True)))
    return StepResult(
        losses,
        valid_tokens=valid,
        tokens=tokens,
        grad_norm=grad_norm,
        **update._asdict(),
        stop_requested=stop_requested,
        quantization=watch.stats,
    )


def _is_due(state: LoopState, every: int) -> bool:
    """Tell if the number of the current step, from 1, is a multiple of ``every``; False if ``every`` is 0."""
    return every > 0 and (state.step + 1) % every == 0


def _count(state: LoopState, batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Count the step's tokens over all ranks: (tokens with a target, tokens without padding); a collective."""
    valid, tokens = sum_where_ranks_agree(state, (valid_tokens(batches), sum(map(real_tokens, batches))))
    if valid == 0:  # the same on every rank, after the reduction
        raise RankError(f"step {state.step}: no token of any rank has a target (N = 0): nothing to learn from")
    return valid, tokens


def _set_learning_rates(state: LoopState) -> None:
    """Set the schedule's learning rate of this step in every parameter group.

    Scales have rate 0 while their fake quant is off or they are frozen. They warm up when their fake quant starts.
    """
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
    diagnostics = _is_due(state, state.recipe.loss.diagnostics_every)
    if session.loss_scale is not None:
        engine.optimizer.loss_scale = session.loss_scale.value
    sums: dict[str, Tensor] = {}
    untouched = watch_gradients(session.model) if state.last is None else None
    for batch in (on_device(each, session.device) for each in batches):
        losses = training_losses(session, batch, objective, valid=valid, diagnostics=diagnostics)
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


class Update(NamedTuple):
    """Outcome of the update; see :class:`engine.state.StepResult`."""

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


def _record_skipped(state: LoopState, losses: Tensor, *, skipped: bool) -> None:
    """Update the loss scale and the count of skipped steps; a collective if this step was skipped."""
    scale = state.session.loss_scale
    lowered = scale is not None and scale.stepped(overflow=skipped)
    state.skipped.record(state.step, skipped, losses, state.loader, lowered=lowered)


def _reduce(state: LoopState, sums: Tensor, valid: int) -> tuple[list[float], bool, float | None]:
    """Reduce the loss means, the stop flag and the gradient norm over ranks, with one host wait."""
    wish = sums.new_full((1,), float(state.stop_requests.requested))
    reduced = reduce_over_ranks(torch.cat([sums / valid, wish])).double()
    norm = global_gradient_norm(state.session.engine, sums.device)
    *means, wishes, total = torch.cat([reduced, reduced[:1] if norm is None else norm]).tolist()
    return means, wishes > 0, None if norm is None else total


class MicroBatchLosses(NamedTuple):
    """Losses of a micro-batch.

    Attributes:
        total: scalar, weighted and scaled, attached to the graph.
        sums: unweighted sums over the valid tokens, detached, by loss: the names of
            :meth:`engine.losses.objective.Objective.parts`, and the router's auxiliary loss.
    """

    total: Tensor
    sums: dict[str, Tensor]


def training_losses(
    session: Session, batch: MicroBatch, objective: Objective, *, valid: int, diagnostics: bool = False
) -> MicroBatchLosses:
    """Compute the losses of a training micro-batch; a collective.

    Args:
        session: the run.
        batch: the micro-batch, on the device (:func:`data.loader.on_device`).
        objective: losses and their weights.
        valid: number of tokens with a target in the whole optimizer step, over all ranks and micro-batches. The sum of
            the losses is divided by this number only: DeepSpeed's divisions by accumulation steps and ranks are undone.
        diagnostics: also measure the distance to the teacher, if there is a teacher.
    """
    train = session.recipe.train
    return _micro_batch(
        session,
        batch,
        objective,
        session.teacher if objective.kd_weight > 0 else None,
        scale=world_size() * train.gradient_accumulation_steps / valid,
        diagnostics=diagnostics,
        to_host=train.activation_offload,
    )


@torch.no_grad()
def held_out_losses(session: Session, batch: MicroBatch, objective: Objective) -> dict[str, Tensor]:
    """Compute the loss sums of a held-out micro-batch, see :class:`MicroBatchLosses`; a collective."""
    # A cache holds training samples only.
    teacher = session.teacher if not isinstance(session.teacher, CachedTeacher) else None
    return _micro_batch(session, batch, objective, teacher if objective.kd_weight > 0 else None).sums


def _micro_batch(
    session: Session,
    batch: MicroBatch,
    objective: Objective,
    teacher: Teacher | None,
    *,
    scale: float = 1.0,
    diagnostics: bool = False,
    to_host: bool = False,
) -> MicroBatchLosses:
    """Run a micro-batch through the teacher, then through the student, whose lm_head computes the losses.

    Args:
        session, batch, objective: see :func:`training_losses`.
        teacher: None disables distillation.
        scale: factor on the total.
        diagnostics: measure the distance to the teacher.
        to_host: keep the inputs of recomputed blocks in host memory.
    """
    assert session.head is not None, "losses need a session for training"
    inputs: dict[str, Any] = {**model_inputs(batch, mask=session.mask), "use_cache": False}
    teacher_output = teacher.forward(inputs, batch) if teacher is not None else None
    gradient_scale = session.loss_scale.value if session.loss_scale is not None else 1.0
    task = _LossesAtHead(
        batch["labels"],
        batch["positions"],
        teacher_output,
        objective,
        scale,
        gradient_scale,
        diagnostics and teacher_output is not None,
        session.head.function,
    )
    with session.head.computing(task), OnHost() if to_host else nullcontext():
        output = session.engine(**inputs)
    assert task.result is not None, "the model's forward does not end in its lm_head"
    total = session.head.collect(output.logits, type(session.model).__name__)
    sums = task.result.sums
    if session.recipe.learnable.router:
        sums[ROUTER_AUX] = torch.zeros_like(sums["lm"])
        if (aux := getattr(output, "aux_loss", None)) is not None:
            # transformers defines a mean over the micro-batch; weight it by tokens like the other losses.
            aux = aux * router_loss_factor(session.model) * len(batch["positions"])
            sums[ROUTER_AUX] = aux.detach().float()
            total = total + aux * scale
    return MicroBatchLosses(total, sums)


@dataclass
class _LossesAtHead:
    """Loss computation of a micro-batch inside the student's lm_head, while its weight is gathered."""

    labels: Tensor
    positions: Tensor
    teacher_output: TeacherOutput | None
    objective: Objective
    scale: float
    gradient_scale: float
    diagnostics: bool
    function: LogitFunction
    result: LossResult | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the total for backward; keep the rest in ``result``."""
        with gathered(self.teacher_output.parameters if self.teacher_output is not None else ()):
            self.result = chunked_losses(
                hidden,
                weight,
                bias,
                self.labels,
                self.teacher_output.teacher if self.teacher_output is not None else None,
                self.objective,
                scale=self.scale,
                gradient_scale=self.gradient_scale,
                diagnostics=self.diagnostics,
                function=self.function,
                positions=self.positions,
            )
        return self.result.total


class OnHost(saved_tensors_hooks):
    """Context around a forward that keeps tensors saved for backward in host memory; on a CPU nothing is copied.

    With activation checkpointing (non-reentrant) a recomputed block saves only its input, through the saved-tensor
    hooks active around the block. So this input waits in host memory, pinned on CUDA. Tensors that a block saves while
    it is recomputed in backward are saved outside of this context and stay on the device.

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
