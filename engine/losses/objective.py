"""Objective of training: weighted losses; distillation losses per token, values and gradients in closed form.

Logits are computed in :mod:`engine.losses.chunked`, a chunk of tokens at a time. With ``z`` and ``t`` the student's and
the teacher's logits of one token, ``q = softmax(z)`` and ``p = softmax(t)``:

============== =====================================================================================================
kind           loss
============== =====================================================================================================
``kl``         KL(p || q) = sum_v p (log p - log q), forward KL (Hinton et al. 2015, arXiv:1503.02531)
``rkl``        KL(q || p), reverse KL (Gu et al. 2023, MiniLLM, arXiv:2306.08543)
``cakld``      c KL(q || p) + (1 - c) KL(p || q), c = p(label), detached (Du et al. 2024, BitDistiller,
               arXiv:2402.10631; there c is a mean over a data set, here and in AngelSlim it is the token's own)
``kd``         T^2 KL(p_T || q_T) with both softmaxes at temperature T (Hinton et al. 2015)
``mse``        mean over the vocabulary of (z - t)^2
``kl_top_k``   KL(p' || q') on S, the teacher's K most likely tokens, p' = p / p(S) and q' = q / q(S)
``r_kl_top_k`` KL(q' || p') on S, the student's K most likely tokens
============== =====================================================================================================

With ``tail`` the last two kinds are not renormalized: all tokens outside S form one more bucket, of mass p(tail) and
q(tail), and the divergence is taken over the K + 1 buckets. This penalizes a student that moves mass out of S.

The gradients with respect to z:

    KL(p || q)               q - p                          (kd: T (q_T - p_T))
    KL(q || p)               q (log q - log p - KL)
    mse                      2 (z - t) / V
    KL(p' || q') on S        q' - p' inside S, 0 outside; with a tail q - p inside S and q - q p(tail) / q(tail) outside
    KL(q' || p') on S        q' (log q' - log p' - KL) inside, 0 outside; with a tail q (log q(b) - log p(b) - KL),
                             b the token's bucket

AngelSlim (angelslim/compressor/distill/loss.py at 67394ce) defines the same kinds, with differences: K is in the name
(``kl_top_1000``), ``loss.top_k`` here; means are over a micro-batch, here over the whole optimizer step; there is no
tail; masked tokens are not specified.

Edge cases:

* **Ties** in the K most likely tokens: the lower token id comes first. bf16 logits tie often, and the order of
  ``torch.topk`` is unspecified, so a cache written on another machine could hold other tokens.
* **Logits of -inf** (masked vocabulary): in KL(a || b) a token with a = 0 counts 0 whatever b is, so both models may
  mask it. A token with only b = 0 makes the divergence +inf. For ``mse`` two masked logits differ by 0.
* **NaN** in any logit of a token makes its loss NaN.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KD_KINDS = ("kl", "rkl", "cakld", "kd", "mse", "kl_top_k", "r_kl_top_k")
TOP_K_KINDS = ("kl_top_k", "r_kl_top_k")
CACHED_KINDS = ("kl_top_k",)
"""Kinds possible with a cached teacher: a cache has only the total mass of the tokens outside its top K."""


# Distances between student and teacher, measured every ``loss.diagnostics_every`` steps, without weight in the total.
DIAGNOSTICS = ("forward_kl", "backward_kl", "top1_agreement")
# Auxiliary loss of a MoE's router, computed by the model with the weight from its configuration.
ROUTER_AUX = "router_aux"


@dataclass(frozen=True)
class Distillation:
    """Kind and options of the distillation loss.

    Attributes:
        kind: ``kl``, ``rkl``, ``cakld``, ``kd``, ``mse``, ``kl_top_k`` or ``r_kl_top_k``; see the module's docstring.
        temperature: temperature of kind ``kd``; unused by the other kinds.
        top_k: K of ``kl_top_k`` and ``r_kl_top_k``.
        tail: True for one more bucket for all other tokens, in ``kl_top_k`` and ``r_kl_top_k``.
    """

    kind: str = "cakld"
    temperature: float = 1.0
    top_k: int = 100
    tail: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KD_KINDS:
            raise ValueError(f"unknown distillation loss {self.kind!r}, expected one of {', '.join(KD_KINDS)}")
        if self.top_k < 1 or not self.temperature > 0:
            raise ValueError(
                f"top_k {self.top_k} and temperature {self.temperature}: expected at least 1 and a number above 0"
            )


class LossChunk(NamedTuple):
    """Input of a user's loss: C valid tokens.

    Attributes:
        student: logits fp32 [C, V], a leaf that requires grad; do not change it in place.
        teacher: logits fp32 [C, V'] of the first V' token ids, those in both vocabularies; None without a teacher in
            memory.
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
        """List the names of the losses and diagnostics that a step computes from logits, in the order in which
        chunked_losses returns their sums. ``distils``: there is a teacher, so ``kd`` is one of them; ``diagnostics``:
        the step also measures ``DIAGNOSTICS``."""
        own = [loss.name for loss in self.token_losses]
        return ["lm", *(["kd"] if distils else []), *own, *(DIAGNOSTICS if diagnostics else ())]

    def tag(self, part: str) -> str:
        """Return the tag in the log of a loss or diagnostic named ``part``, like ``loss/kd/cakld`` or
        ``kd/forward_kl``."""
        if part in DIAGNOSTICS:
            return f"kd/{part}"
        return f"loss/kd/{self.kd.kind}" if part == "kd" else f"loss/{part}"

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Convert the means of losses and diagnostics, by name, to logged values: first the weighted total, then each
        mean under its tag. No total if a weighted loss was not measured: a cached teacher has no output for held-out
        samples."""
        weights = {part: weight for part, weight in self.weights().items() if weight}
        tagged = {self.tag(part): value for part, value in means.items()}
        if weights.keys() - means.keys():
            return tagged
        router = {ROUTER_AUX: 1.0} if ROUTER_AUX in means else {}
        return {"loss/total": sum(weight * means[part] for part, weight in {**weights, **router}.items()), **tagged}


class TopK(NamedTuple):
    """K most likely tokens of R positions: ``log_probs`` [R, K], ``indices`` int64 [R, K], ``log_tail`` [R].

    Log-probabilities are over the whole vocabulary, in descending order; ``log_tail`` is the log-probability of all
    other tokens together.
    """

    log_probs: Tensor
    indices: Tensor
    log_tail: Tensor

    def first(self, k: int) -> "TopK":
        """Keep the first ``k`` tokens, and add the probability of the others to the tail; unchanged if there are no
        others."""
        if k >= self.log_probs.shape[-1]:
            return self
        rest = torch.cat([self.log_probs[:, k:], self.log_tail.unsqueeze(-1)], -1).logsumexp(-1)
        return TopK(self.log_probs[:, :k], self.indices[:, :k], rest)


def top_indices(logits: Tensor, k: int) -> Tensor:
    """Find the ids of the ``k`` largest ``logits`` [R, V], largest first, equal logits by id: int64 [R, min(k, V)]."""
    # Bits of a float, read as an integer, order like the float if it is positive, and in reverse if negative. Adding 0
    # gives -0 and +0 the same bits.
    bits = (logits.float() + 0.0).view(torch.int32)
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    vocabulary = logits.shape[-1]
    rank += torch.arange(vocabulary - 1, -1, -1, device=logits.device)
    return rank.topk(min(k, vocabulary), dim=-1).indices


def take_top_k(logits: Tensor, log_probs: Tensor, k: int) -> TopK:
    """Select the ``k`` largest ``logits`` [R, V], whose log-softmax is ``log_probs`` [R, V]."""
    indices = top_indices(logits, k)
    return TopK(log_probs.gather(-1, indices), indices, _log_tail(log_probs, indices))


def distil(
    spec: Distillation,
    student: Tensor,
    log_q: Tensor,
    teacher: Tensor | TopK,
    labels: Tensor,
    *,
    gradient: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    """Compute the distillation loss per token, [R].

    Args:
        spec: kind and options of the loss.
        student: logits [R, V], fp32.
        log_q: log-softmax of ``student``.
        teacher: logits [R, V], fp32, or for ``kl_top_k`` the top K of a cache.
        labels: int64 [R], each below V.
        gradient: [R, V]; ``weight`` times the gradient of each token's loss is added to its row.
        weight: factor of the gradients added to ``gradient``; the returned losses are unweighted.
    """
    if spec.kind in TOP_K_KINDS:
        return _on_top_k(spec, student, log_q, teacher, gradient, weight)
    assert isinstance(teacher, Tensor), f"{spec.kind} needs the teacher's logits"
    if spec.kind == "mse":
        return _mse(student, teacher, gradient, weight)
    if spec.kind == "kd":
        log_q = F.log_softmax(student / spec.temperature, dim=-1)
        log_p = F.log_softmax(teacher / spec.temperature, dim=-1)
        value = forward_kl(log_p, log_q, gradient, weight * spec.temperature)
        return value.mul_(spec.temperature**2)
    log_p = F.log_softmax(teacher, dim=-1)
    if spec.kind == "kl":
        return forward_kl(log_p, log_q, gradient, weight)
    if spec.kind == "rkl":
        return reverse_kl(log_p, log_q, gradient, weight)
    confidence = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1).exp_()
    reverse = reverse_kl(log_p, log_q, gradient, weight * confidence.unsqueeze(-1))
    forward = forward_kl(log_p, log_q, gradient, weight * (1 - confidence).unsqueeze(-1))
    return confidence * reverse + (1 - confidence) * forward


def forward_kl(log_p: Tensor, log_q: Tensor, gradient: Tensor | None = None, weight: float | Tensor = 1.0) -> Tensor:
    """Return KL(p || q) per row, from log-probabilities [R, V]. ``weight`` (a number, or [R, 1]) times its gradient
    with respect to the logits of q is added to ``gradient`` [R, V], if given."""
    p = log_p.exp()
    value = _log_ratio(p, log_p, log_q).mul_(p).sum(-1)
    if gradient is not None:
        gradient.add_(p.neg_().add_(log_q.exp()).mul_(weight))
    return value


def reverse_kl(log_p: Tensor, log_q: Tensor, gradient: Tensor | None = None, weight: float | Tensor = 1.0) -> Tensor:
    """Return KL(q || p) per row, from log-probabilities [R, V]. ``weight`` (a number, or [R, 1]) times its gradient
    with respect to the logits of q is added to ``gradient`` [R, V], if given."""
    q = log_q.exp()
    ratio = _log_ratio(q, log_q, log_p)
    value = (ratio * q).sum(-1)
    if gradient is not None:
        gradient.add_(ratio.sub_(value.unsqueeze(-1)).mul_(q).mul_(weight))
    return value


def _log_ratio(a: Tensor, log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return log a - log b, but 0 where a is 0: there the difference may be infinite, and its product with a is 0."""
    return torch.sub(log_a, log_b).masked_fill_(a == 0, 0.0)


def _mse(student: Tensor, teacher: Tensor, gradient: Tensor | None, weight: float) -> Tensor:
    difference = torch.sub(student, teacher)
    difference.masked_fill_((student == teacher) & student.isinf(), 0.0)
    vocabulary = student.shape[-1]
    value = difference.square().mean(-1)
    if gradient is not None:
        gradient.add_(difference, alpha=2 * weight / vocabulary)
    return value


def _on_top_k(
    spec: Distillation, student: Tensor, log_q: Tensor, teacher: Tensor | TopK, gradient: Tensor | None, weight: float
) -> Tensor:
    """Compute ``kl_top_k`` or ``r_kl_top_k``: the divergence over K tokens, or with a tail over K + 1 buckets."""
    if spec.kind == "r_kl_top_k":
        assert isinstance(teacher, Tensor), "the student's K tokens need the teacher's logits"
        log_p_all = F.log_softmax(teacher, dim=-1)
        indices = top_indices(student, spec.top_k)
        top = TopK(log_p_all.gather(-1, indices), indices, _log_tail(log_p_all, indices))
    elif isinstance(teacher, TopK):
        top = teacher.first(spec.top_k)
    else:
        top = take_top_k(teacher, F.log_softmax(teacher, dim=-1), spec.top_k)
    divergence = forward_kl if spec.kind == "kl_top_k" else reverse_kl
    inside = log_q.gather(-1, top.indices)  # [R, K]
    if not spec.tail:
        log_p, log_q_here = F.log_softmax(top.log_probs, dim=-1), F.log_softmax(inside, dim=-1)
        local = None if gradient is None else torch.zeros_like(inside)
        value = divergence(log_p, log_q_here, local, weight)
        if gradient is not None and local is not None:
            gradient.scatter_add_(-1, top.indices, local)
        return value
    log_q_tail = _log_tail(log_q, top.indices).unsqueeze(-1)
    log_p = torch.cat([top.log_probs, top.log_tail.unsqueeze(-1)], -1)  # [R, K + 1]
    buckets = torch.cat([inside, log_q_tail], -1)
    # Gradient of the buckets' logits; a token outside S gets its share q / q(tail) of the tail's gradient.
    local = None if gradient is None else torch.zeros_like(buckets)
    value = divergence(log_p, buckets, local, weight)
    if gradient is not None and local is not None:
        share = log_q.sub(log_q_tail).exp_().scatter_(-1, top.indices, 0.0)
        # Without tokens outside S the tail is empty: -inf - -inf is NaN.
        share.masked_fill_(log_q_tail == -torch.inf, 0.0)
        gradient.add_(share.mul_(local[:, -1:])).scatter_add_(-1, top.indices, local[:, :-1])
    return value


def _log_tail(log_probs: Tensor, indices: Tensor) -> Tensor:
    """Compute the log-probability [R] of all tokens except ``indices`` together, as a sum over them: ``log(1 - p(S))``
    would lose precision by cancellation."""
    return log_probs.scatter(-1, indices, -torch.inf).logsumexp(-1)
