"""Objective of training: weighted losses, with values and gradients from the logits of some tokens.

Logits are computed in :mod:`engine.losses.chunked`, a chunk of tokens at a time; distillation losses are in
:mod:`engine.losses.kd`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from engine.losses.kd import Distillation, TopK, distil, forward_kl, reverse_kl

# Distances between student and teacher, measured every ``loss.diagnostics_every`` steps, without weight in the total.
DIAGNOSTICS = ("forward_kl", "backward_kl", "top1_agreement")
# Auxiliary loss of a MoE's router, computed by the model with the weight from its configuration.
ROUTER_AUX = "router_aux"


def router_loss_factor(model: PreTrainedModel) -> float:
    """Look up the factor of the load-balancing auxiliary loss in a transformers model.

    Raises:
        ValueError: neither the model nor its config has the factor.
    """
    for owner in (model, model.config.get_text_config()):
        if (factor := getattr(owner, "router_aux_loss_coef", None)) is not None:
            return float(factor)
    raise ValueError(
        f"learnable.router: {type(model).__name__} computes an auxiliary loss, but has no router_aux_loss_coef; set "
        "router_aux_loss_coef in its config.json"
    )


class LossChunk(NamedTuple):
    """Input of a user's loss: some valid tokens.

    Attributes:
        student: logits fp32 [C, V], a leaf that requires grad; do not change it in place.
        teacher: logits fp32 [C, V'] of the tokens in both vocabularies; None without a teacher in memory.
        labels: int64 [C], the tokens to predict.
    """

    student: Tensor
    teacher: Tensor | None
    labels: Tensor


TokenLoss = Callable[[LossChunk], Tensor]
"""A user's loss per token, [C]. Each token's loss may depend on its own row only, as chunk boundaries are arbitrary."""


@dataclass(frozen=True)
class NamedTokenLoss:
    """A user's loss, added with a weight and logged as ``loss/<name>``."""

    name: str
    weight: float
    function: TokenLoss


# Each chunk reads and writes the whole fp32 gradient of lm_head. At 512 tokens that takes a GPU half as long as the
# chunk's GEMMs, at 4,096 a sixteenth (8 bytes an element at 4 TB/s, 6 operations an element and token at 0.7 PFLOP/s;
# counted, not measured). Plans without a device assume a GPU.
CPU_TOKENS, GPU_TOKENS = 512, 4096


def tokens_at_a_time(chosen: int | None, device: torch.device) -> int:
    """Return the number of tokens per chunk: ``chosen``, or the default of the device."""
    return chosen or (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS)


@dataclass(frozen=True)
class Objective:
    """total = lm_weight * lm + kd_weight * kd + the user's own losses with their weights + the router's auxiliary loss.

    Attributes:
        lm_weight: weight of the language modeling loss.
        kd_weight: weight of the distillation loss.
        kd: kind and options of the distillation loss.
        token_losses: the user's own losses.
        chunk_tokens: tokens per chunk of logits; None: the default of :func:`tokens_at_a_time`.
    """

    lm_weight: float = 1.0
    kd_weight: float = 0.0
    kd: Distillation = field(default_factory=Distillation)
    token_losses: tuple[NamedTokenLoss, ...] = ()
    chunk_tokens: int | None = None

    def weights(self) -> dict[str, float]:
        """Map each loss that is computed from logits to its weight."""
        return {"lm": self.lm_weight, "kd": self.kd_weight, **{loss.name: loss.weight for loss in self.token_losses}}

    def parts(self, *, distils: bool, diagnostics: bool) -> list[str]:
        """List the names of all losses and diagnostics that :func:`block_losses` computes, in its order."""
        own = [loss.name for loss in self.token_losses]
        return ["lm", *(["kd"] if distils else []), *own, *(DIAGNOSTICS if diagnostics else ())]

    def tag(self, part: str) -> str:
        """Return the tag of a loss in the log, like ``loss/lm``, ``loss/kd/cakld`` or ``kd/forward_kl``."""
        if part in DIAGNOSTICS:
            return f"kd/{part}"
        return f"loss/kd/{self.kd.kind}" if part == "kd" else f"loss/{part}"

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Convert means by name to logged values: the total first, then every loss under its tag."""
        weights = {**self.weights(), ROUTER_AUX: 1.0}
        total = sum(weight * means[part] for part, weight in weights.items() if weight and part in means)
        return {"loss/total": total, **{self.tag(part): value for part, value in means.items()}}


def block_losses(
    objective: Objective,
    student: Tensor,
    teacher: Tensor | TopK | None,
    labels: Tensor,
    values: Tensor,
    *,
    common: int | None,
    gradient: Tensor | None,
    factor: float,
    diagnostics: bool,
) -> None:
    """Compute all losses of R tokens, and the gradient of their weighted sum with respect to the student's logits.

    Args:
        objective: the losses and their weights.
        student: logits [R, V], fp32 (fp64 for a model in fp64).
        teacher: logits [R, V'] in the same dtype, the top K of a cache, or None without distillation.
        labels: int64 [R].
        values: [losses, R]; the losses are written here, in the order of :meth:`Objective.parts`.
        common: student and teacher are compared on token ids below this number; None: on all token ids.
        gradient: [R, V]; ``factor`` times the gradient is added to it. None: no gradient is computed.
        factor: see ``gradient``.
        diagnostics: also write the :data:`DIAGNOSTICS`, which need the teacher's logits.

    Raises:
        ValueError: see :func:`_token_loss`.
    """
    teacher_logits = teacher if isinstance(teacher, Tensor) else None
    row = iter(values)
    targets = labels.unsqueeze(-1)
    log_q = F.log_softmax(student, dim=-1)
    next(row).copy_(log_q.gather(-1, targets).squeeze(-1).neg_())
    if gradient is not None and objective.lm_weight:
        weight = objective.lm_weight * factor
        gradient.add_(log_q.exp(), alpha=weight)
        gradient.scatter_add_(-1, targets, targets.new_full(targets.shape, -weight, dtype=gradient.dtype))
    if teacher is not None:
        common = common or student.shape[-1]
        ours = student[:, :common]
        log_q = log_q if common == student.shape[-1] else F.log_softmax(ours, dim=-1)
        weight = objective.kd_weight * factor
        within = gradient[:, :common] if gradient is not None and weight else None
        next(row).copy_(distil(objective.kd, ours, log_q, teacher, labels, gradient=within, weight=weight))
    for loss in objective.token_losses:
        next(row).copy_(_token_loss(loss, LossChunk(student, teacher_logits, labels), gradient, factor))
    if diagnostics:
        assert teacher_logits is not None, "diagnostics compare with a teacher in memory"
        log_p = F.log_softmax(teacher_logits, dim=-1)
        next(row).copy_(forward_kl(log_p, log_q))
        next(row).copy_(reverse_kl(log_p, log_q))
        next(row).copy_(log_p.argmax(-1) == log_q.argmax(-1))


def _token_loss(loss: NamedTokenLoss, chunk: LossChunk, gradient: Tensor | None, factor: float) -> Tensor:
    """Compute a user's loss of R tokens, and add its gradient from autograd to ``gradient``.

    Raises:
        ValueError: the loss is not a tensor [R], or does not depend on the student's logits.
    """
    leaf = chunk.student.detach().requires_grad_()
    with torch.enable_grad():
        value = loss.function(chunk._replace(student=leaf))
    if not isinstance(value, Tensor) or value.shape != chunk.labels.shape:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"loss {loss.name!r} returned {found}, expected a tensor {list(chunk.labels.shape)}: one per token"
        )
    if gradient is not None:
        if not value.requires_grad:
            raise ValueError(f"loss {loss.name!r} does not depend on the student's logits, so that nothing can learn")
        (of_logits,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        gradient.add_(of_logits, alpha=loss.weight * factor)
    return value.detach()
