"""The recipe's ``loss`` section: the weights of the losses, the kind of distillation, and the teacher."""

from dataclasses import dataclass, field
from typing import Literal

from engine.config.errors import FACTOR, LOSS_WEIGHT, at_least, not_empty
from engine.losses.kd import Distillation
from engine.losses.objective import NamedTokenLoss, Objective

TeacherKind = Literal["none", "self", "cache", "model"]
"""Whose distributions the student is distilled from: nobody's, its own without fake quant, those that a cache on disk
holds, or those of a model of its own in memory."""


@dataclass
class LossRecipe:
    """total = lm_weight * lm + kd_weight * kd, means over the valid tokens of the optimizer step."""

    lm_weight: float = field(default=1.0, metadata=LOSS_WEIGHT)
    """Weight of the language modeling loss."""
    kd_weight: float = field(default=0.0, metadata=LOSS_WEIGHT)
    """Weight of the distillation loss; 0 loads no teacher."""
    kd: Literal["kl", "rkl", "mse", "cakld", "kd", "kl_top_k", "r_kl_top_k"] = "cakld"
    """kl: KL(teacher||student); rkl: KL(student||teacher); cakld: both, mixed by the teacher's confidence in the label;
    kd: kl at loss.temperature; mse: squared difference of the logits; kl_top_k: kl on the teacher's loss.top_k most
    likely tokens; r_kl_top_k: rkl on the student's. engine/losses/kd.py has the formulas."""
    temperature: float = field(default=1.0, metadata=FACTOR)
    """Temperature of kd: kd; the other kinds have none."""
    top_k: int | None = field(default=None, metadata=at_least(1))
    """Tokens of kl_top_k and r_kl_top_k, and that launch/cache_teacher.py keeps per position; like 100."""
    tail: bool = False
    """kl_top_k, r_kl_top_k: one more bucket for all other tokens, instead of renormalizing without them."""
    teacher: str | None = None
    """Directory of the teacher's checkpoint, often model.path. It is frozen, and sharded too under stage 3. self: the
    student without fake quant, which takes no memory and needs frozen weights, norms and routers."""
    teacher_cache: str | None = field(default=None, metadata=not_empty("a directory"))
    """Directory that launch/cache_teacher.py wrote: training reads the teacher's loss.top_k tokens from there and loads
    no teacher. Only for kl_top_k."""
    diagnostics_every: int = field(default=0, metadata=at_least(0))
    """Steps between two measurements of kd/forward_kl, kd/backward_kl and kd/top1_agreement, whatever loss.kd is; 0:
    never. Needs a teacher in memory."""
    chunk_tokens: int | None = field(default=None, metadata=at_least(1))
    """Tokens whose logits exist at once, of student and teacher: 2 * chunk_tokens * vocabulary * 2 bytes in bf16.
    null: 4096 on a GPU, where few large GEMMs are faster, and 512 on a CPU."""

    def named_teacher(self) -> TeacherKind:
        """Which teacher this section names, whether or not the run distils (that is :meth:`Recipe.teacher_kind`)."""
        if self.teacher_cache is not None:
            return "cache"  # the teacher that wrote it may be named too
        if self.teacher == "self":
            return "self"
        return "model" if self.teacher else "none"

    def objective(self, *, lm: float, kd: float, token_losses: tuple[NamedTokenLoss, ...] = ()) -> Objective:
        """What is minimized, with the weights ``lm`` and ``kd``, which events may have changed since, and a user's own
        losses."""
        distillation = Distillation(self.kd, self.temperature, self.top_k or 1, self.tail)
        return Objective(lm, kd, distillation, token_losses, self.chunk_tokens)
