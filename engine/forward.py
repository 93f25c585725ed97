"""One micro-batch through student and teacher to its losses."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from data.loader import MicroBatch, model_inputs
from engine.losses.chunked import LossResult, chunked_losses
from engine.losses.objective import Objective
from engine.losses.teacher import Sight
from engine.offload import OnHost
from engine.session.session import Session
from model.zero import gathered


class ForwardResult(NamedTuple):
    """``total``: scaled, attached to the graph; ``sums``: see :class:`engine.losses.chunked.LossResult`; ``output``:
    HF's."""

    total: Tensor
    sums: dict[str, Tensor]
    output: ModelOutput


@dataclass
class _LossesAtHead:
    """The task of the student's lm_head: the losses of a micro-batch, computed while its weight is whole."""

    labels: Tensor
    asked: Sight | None
    objective: Objective
    scale: float
    gradient_scale: float
    diagnostics: bool
    result: LossResult | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The total, to be differentiated; ``result`` has the rest."""
        with gathered(self.asked.parameters if self.asked is not None else ()):
            self.result = chunked_losses(
                hidden,
                weight,
                bias,
                self.labels,
                self.asked.teacher if self.asked is not None else None,
                self.objective,
                scale=self.scale,
                gradient_scale=self.gradient_scale,
                diagnostics=self.diagnostics,
            )
        return self.result.total


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
    gradient_scale = session.loss_scale.value if session.loss_scale is not None else 1.0
    task = _LossesAtHead(batch["labels"], asked, objective, scale, gradient_scale, diagnostics and asked is not None)
    assert session.head is not None, "losses need a session for training"
    offload = session.recipe.train.activation_offload and torch.is_grad_enabled()
    with session.head.computing(task), OnHost() if offload else nullcontext():
        output = session.engine(**inputs)
    assert task.result is not None, "the model's forward does not end in its lm_head"
    session.head.check(output.logits, type(session.model).__name__)
    # The output, not what the task returned: under stage 3 the engine's hooks hang on it.
    return ForwardResult(output.logits, task.result.sums, output)
