"""Losses of one micro-batch: forward of the teacher, then of the student, whose lm_head computes the losses."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from data.loader import MicroBatch, model_inputs
from engine.losses.chunked import LossResult, chunked_losses
from engine.losses.objective import ROUTER_AUX, Objective
from engine.losses.teacher import CachedTeacher
from engine.session.session import Session
from model.zero import gathered


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
        session: the run.
        batch: the micro-batch, on the device (:func:`data.loader.on_device`).
        objective: losses and their weights.
        scale: factor on the total.
        diagnostics: also measure the distance to the teacher, if there is a teacher.
        held_out: the batch has held-out samples, for which a cached teacher has no output.

    Returns:
        The total with its graph, and the sums of the losses named by :meth:`engine.losses.objective.Objective.parts`
        and of the router's auxiliary loss.
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
