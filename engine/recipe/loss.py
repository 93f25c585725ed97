"""The recipe's ``loss`` section: the weights of the losses, the kind of distillation, and the teacher."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.losses.kd import CACHED_KINDS, TOP_K_KINDS, Distillation
from engine.losses.objective import NamedTokenLoss, Objective
from engine.recipe.checks import at_least, need, positive

TeacherKind = Literal["none", "self", "cache", "model"]
"""Whose distributions the student is distilled from: nobody's, its own without fake quant, those that a cache on disk
holds, or those of a model of its own in memory."""


@dataclass
class LossRecipe:
    """total = lm_weight * lm + kd_weight * kd, means over the valid tokens of the optimizer step."""

    lm_weight: float = 1.0
    """Weight of the language modelling loss."""
    kd_weight: float = 0.0
    """Weight of the distillation loss; 0 loads no teacher."""
    kd: Literal["kl", "rkl", "mse", "cakld", "kd", "kl_top_k", "r_kl_top_k"] = "cakld"
    """kl: KL(teacher||student); rkl: KL(student||teacher); cakld: both, mixed by the teacher's confidence in the label;
    kd: kl at loss.temperature; mse: squared difference of the logits; kl_top_k: kl on the teacher's loss.top_k most
    likely tokens; r_kl_top_k: rkl on the student's. engine/losses/kd.py has the formulas."""
    temperature: float = 1.0
    """Temperature of kd: kd; the other kinds have none."""
    top_k: int | None = None
    """Tokens of kl_top_k and r_kl_top_k, and that launch/cache_teacher.py keeps per position; like 100."""
    tail: bool = False
    """kl_top_k, r_kl_top_k: one more bucket for all other tokens, instead of renormalising without them."""
    teacher: str | None = None
    """Directory of the teacher's checkpoint, often model.path. It is frozen, and sharded too under stage 3. self: the
    student without fake quant, which takes no memory and needs frozen weights, norms and routers."""
    teacher_cache: str | None = None
    """Directory that launch/cache_teacher.py wrote: training reads the teacher's loss.top_k tokens from there and loads
    no teacher. Only for kl_top_k."""
    diagnostics_every: int = 0
    """Steps between two measurements of kd/forward_kl, kd/backward_kl and kd/top1_agreement, whatever loss.kd is; 0:
    never. Needs a teacher in memory."""
    chunk_tokens: int = 512
    """Tokens whose logits exist at once, of student and teacher: 2 * chunk_tokens * vocabulary * 2 bytes in bf16."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        yield from at_least("loss.lm_weight", self.lm_weight, 0)
        yield from at_least("loss.kd_weight", self.kd_weight, 0)
        if self.lm_weight == 0 and self.kd_weight == 0:
            yield "loss.lm_weight, loss.kd_weight: both 0, expected at least one above 0: there is no loss"
        if self.kd_weight > 0 and self.named_teacher() == "none":
            yield f"loss.teacher: {self.teacher!r}, expected a directory since loss.kd_weight is {self.kd_weight}"
        yield from positive("loss.temperature", self.temperature)
        if self.kd != "kd":
            expected = f"1.0: loss.kd {self.kd} has no temperature (loss.kd kd has)"
            yield from need(self.temperature == 1, "loss.temperature", self.temperature, expected)
        if self.kd in TOP_K_KINDS:
            expected = f"a number of tokens, like 100: loss.kd is {self.kd}"
            yield from need(self.top_k is not None, "loss.top_k", self.top_k, expected)
        elif self.tail:
            yield f"loss.tail: {self.tail}, expected false: loss.kd {self.kd} is of the whole vocabulary"
        if self.top_k is not None:
            yield from at_least("loss.top_k", self.top_k, 1)
        yield from at_least("loss.diagnostics_every", self.diagnostics_every, 0)
        if self.teacher_cache is not None:
            yield from self._cache_problems()
        yield from at_least("loss.chunk_tokens", self.chunk_tokens, 1)

    def named_teacher(self) -> TeacherKind:
        """Which teacher this section names, whether or not the run distils (that is :meth:`Recipe.teacher_kind`)."""
        if self.teacher_cache is not None:
            return "cache"  # the teacher that wrote it may be named too
        if self.teacher == "self":
            return "self"
        return "model" if self.teacher else "none"

    def objective(self, *, lm: float, kd: float, token_losses: tuple[NamedTokenLoss, ...] = ()) -> Objective:
        """What is minimised, with the weights ``lm`` and ``kd``, which events may have changed since, and a user's own
        losses."""
        distillation = Distillation(self.kd, self.temperature, self.top_k or 1, self.tail)
        return Objective(lm, kd, distillation, token_losses, self.chunk_tokens)

    def _cache_problems(self) -> Iterator[str]:
        """One line per setting that needs more than a cache holds: the teacher's most likely tokens and no others."""
        yield from need(self.teacher_cache != "", "loss.teacher_cache", self.teacher_cache, "a directory")
        expected = "kl_top_k: with loss.teacher_cache only the teacher's most likely tokens are known"
        yield from need(self.kd in CACHED_KINDS, "loss.kd", self.kd, expected)
        expected = "a directory or null: loss.teacher_cache is there so that no teacher runs"
        yield from need(self.teacher != "self", "loss.teacher", self.teacher, expected)
        expected = "0: loss.teacher_cache does not hold the distributions that are compared"
        yield from need(self.diagnostics_every == 0, "loss.diagnostics_every", self.diagnostics_every, expected)
