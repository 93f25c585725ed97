"""One micro-batch through student and teacher to its losses."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from data.loader import MicroBatch, model_inputs
from engine.losses.chunked import LossResult, Teacher, chunked_losses
from engine.losses.objective import Objective
from engine.offload import OnHost
from engine.session.session import Session
from model.ranks import raise_everywhere


class ForwardResult(NamedTuple):
    """``total``: scaled, attached to the graph; ``sums``: see :class:`engine.losses.chunked.LossResult`; ``output``:
    HF's."""

    total: Tensor
    sums: dict[str, Tensor]
    output: ModelOutput


def forward_losses(
    session: Session,
    batch: MicroBatch,
    objective: Objective,
    *,
    scale: float = 1.0,
    distil: bool = True,
    diagnostics: bool = False,
) -> ForwardResult:
    """The losses of a micro-batch, see :func:`engine.losses.chunked.chunked_losses`; a collective.

    Args:
        session: the run.
        batch: of the loader, on the device.
        objective: which losses.
        scale: factor of the total.
        distil: ask the teacher, if there is one.
        diagnostics: measure the distance to the teacher.
    """
    inputs: dict[str, Any] = {**model_inputs(batch), "use_cache": False}
    asked = session.teacher.look(inputs, batch) if session.teacher is not None and distil else None
    result: LossResult | None = None
    gradient_scale = session.loss_scale.value if session.loss_scale is not None else 1.0

    def losses(hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: Teacher | None) -> LossResult:
        return chunked_losses(
            hidden,
            weight,
            bias,
            batch["labels"],
            teacher,
            objective,
            scale=scale,
            gradient_scale=gradient_scale,
            diagnostics=diagnostics and teacher is not None,
        )

    def task(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal result
        if asked is None:
            result = losses(hidden, weight, bias, None)
        else:
            with asked(weight, bias) as teacher:
                result = losses(hidden, weight, bias, teacher)
        return result.total

    assert session.head is not None, "losses need a session for training"
    offload = session.recipe.train.activation_offload and torch.is_grad_enabled()
    with session.head.computing(task), OnHost() if offload else nullcontext():
        output = session.engine(**inputs)
    assert result is not None, "the model's forward does not end in its lm_head"
    if not session.head_checked:
        # A model that goes on from its logits (a softcap, a factor) in a way that its configuration does not show.
        same = torch.equal(output.logits.detach(), result.total.detach()) or not result.total.isfinite()
        raise_everywhere(
            None
            if same
            else f"{type(session.model).__name__} changes its logits after lm_head: losses from the hidden states are "
            "not supported for it"
        )
        session.head_checked = True
    # The output, not what the task returned: under stage 3 the engine's hooks hang on it.
    return ForwardResult(output.logits, result.sums, output)
