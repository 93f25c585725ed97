"""Language-model and distillation losses, as sums over the valid tokens.

Every function returns a **sum**; the loop divides by the number of valid tokens of the whole optimizer step, over all
ranks and micro-batches, so that no split into micro-batches changes the loss (a mean of means would weight tokens by
how empty their micro-batch is).

With ``p`` the teacher's and ``q`` the student's distribution over the vocabulary, per valid token:

======== ==========================================================================================
kind      loss
======== ==========================================================================================
``kl``    KL(p || q) = sum_v p (log p - log q), forward KL (Hinton et al. 2015, arXiv:1503.02531)
``rkl``   KL(q || p), reverse KL (Gu et al. 2023, MiniLLM, arXiv:2306.08543)
``cakld`` c KL(q || p) + (1 - c) KL(p || q), c = p(label), detached (Du et al. 2024, BitDistiller,
          arXiv:2402.10631; there c is a mean over a data set, here it is taken per token)
``kd``    T^2 KL(p_T || q_T) with both softmaxes at temperature T (Hinton et al. 2015)
``mse``   mean over the vocabulary of the squared difference of the logits
======== ==========================================================================================

All arithmetic is fp32. The logits come in the model's dtype and are worked through in chunks of tokens whose fp32
copies are recomputed in backward, so that no fp32 tensor of the size of the logits exists.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from data.samples import IGNORE

KD_KINDS = ("kl", "rkl", "cakld", "kd", "mse")


class LossSums(NamedTuple):
    """Sums over the valid tokens, fp32 scalars attached to the student's graph. ``kd`` is 0 without a teacher."""

    lm: Tensor
    kd: Tensor


def loss_sums(
    logits: Tensor,
    labels: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    kd_kind: str = "cakld",
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> LossSums:
    """Sum of the LM and the distillation loss over the tokens whose label is not -100.

    Args:
        logits: ``[..., V]``, the student's, any float dtype.
        labels: ``[...]`` int64, already shifted: the token that each position should predict, -100 where there is none.
        teacher_logits: ``[..., V]`` without a graph, or None.
        kd_kind: one of ``KD_KINDS``.
        temperature: used by ``kd`` alone.
        chunk_tokens: tokens per chunk; three fp32 ``[chunk_tokens, V]`` tensors live at a time.

    Raises:
        ValueError: shapes that do not belong together, or an unknown kind.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} differ in their leading dimensions"
        )
    if teacher_logits is not None and teacher_logits.shape != logits.shape:
        raise ValueError(
            f"the teacher's logits are {tuple(teacher_logits.shape)}, the student's {tuple(logits.shape)}: "
            "distillation needs the same vocabulary size (see vocab_size in the two config.json)"
        )
    if kd_kind not in KD_KINDS:
        raise ValueError(f"unknown distillation loss {kd_kind!r}, expected one of {', '.join(KD_KINDS)}")
    vocabulary = logits.shape[-1]
    student_chunks = logits.reshape(-1, vocabulary).split(chunk_tokens)
    label_chunks = labels.reshape(-1).split(chunk_tokens)
    teacher_chunks: tuple[Tensor | None, ...] = (None,) * len(student_chunks)
    if teacher_logits is not None:
        teacher_chunks = teacher_logits.detach().reshape(-1, vocabulary).split(chunk_tokens)

    lm = logits.new_zeros((), dtype=torch.float32)
    kd = logits.new_zeros((), dtype=torch.float32)
    for student, label, teacher in zip(student_chunks, label_chunks, teacher_chunks, strict=True):
        chunk_lm, chunk_kd = checkpoint(
            _chunk_sums, student, label, teacher, kd_kind, temperature, use_reentrant=False, preserve_rng_state=False
        )
        lm, kd = lm + chunk_lm, kd + chunk_kd
    return LossSums(lm, kd)


def _chunk_sums(
    student: Tensor, labels: Tensor, teacher: Tensor | None, kd_kind: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """LM and KD sums of one chunk: ``student``, ``teacher`` [C, V], ``labels`` [C]."""
    valid = labels != IGNORE  # [C]
    targets = labels.clamp(min=0).unsqueeze(-1)  # [C, 1]; any index will do where the position is not valid
    student = student.float()
    log_q = F.log_softmax(student, dim=-1)
    lm = -log_q.gather(-1, targets).squeeze(-1)
    # where, not a product: 0 * inf is NaN, and a position without a target may hold anything.
    lm_sum = torch.where(valid, lm, 0.0).sum()
    if teacher is None:
        return lm_sum, torch.zeros_like(lm_sum)
    kd = _token_kd(student, log_q, teacher.float(), targets, kd_kind, temperature)
    return lm_sum, torch.where(valid, kd, 0.0).sum()


def _token_kd(
    student: Tensor, log_q: Tensor, teacher: Tensor, targets: Tensor, kind: str, temperature: float
) -> Tensor:
    """Distillation loss per token, [C]; the table in the module's docstring."""
    if kind == "mse":
        return (student - teacher).square().mean(-1)
    if kind == "kd":
        log_q = F.log_softmax(student / temperature, dim=-1)
        log_p = F.log_softmax(teacher / temperature, dim=-1)
        return temperature**2 * _kl(log_p, log_q)
    log_p = F.log_softmax(teacher, dim=-1)
    if kind == "kl":
        return _kl(log_p, log_q)
    if kind == "rkl":
        return _kl(log_q, log_p)
    confidence = log_p.gather(-1, targets).squeeze(-1).exp()
    return confidence * _kl(log_q, log_p) + (1 - confidence) * _kl(log_p, log_q)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension, from log-probabilities."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)
