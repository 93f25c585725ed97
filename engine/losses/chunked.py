"""Language modeling and distillation losses from hidden states through lm_head, a chunk of tokens at a time.

Logits [T, V] are the largest tensors of a training step: at T = 4096 and V = 152k one such tensor takes 2.5 GB in fp32,
and a distillation loss of torch operators allocates several. Here no such tensor exists. The forward loops over the
positions with a target, ``chunk_tokens`` at a time: logits of student and teacher (GEMMs in the model's dtype), losses
and the gradient of the logits in closed form (fp32, see :mod:`engine.losses.objective`), then the gradients of hidden
states, weight and bias. The backward only multiplies these by the incoming gradient. No GEMM is computed twice. Memory
at any time, with C tokens per chunk:

    2 V C bytes of bf16 logits, for student and teacher each;
    a few fp32 blocks of ``BLOCK_ELEMENTS``, each for some rows of a chunk;
    the gradient of the hidden states, and if lm_head trains, its gradient: fp32 while several chunks add to it.

Every loss is a **sum** over valid tokens. ``scale`` multiplies the differentiated total: the loop passes
world * accumulation / N, with N valid tokens in the whole optimizer step, so that no split into micro-batches or over
ranks changes the loss (a mean of means would give more weight to tokens of micro-batches with fewer). Loss weights and
``scale`` multiply the gradient of the logits before it is rounded to the model's dtype. bf16 has the exponent range of
fp32, but fp16 has less. So in fp16 the gradient of the logits is multiplied by the loss scale (``gradient_scale``)
before that rounding, and the backward divides the incoming gradient by it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from data.samples import IGNORE
from engine.losses.objective import (
    LossChunk,
    NamedTokenLoss,
    Objective,
    TopK,
    distil,
    forward_kl,
    reverse_kl,
    tokens_at_a_time,
)
from model.head import UNCHANGED, LogitFunction

# Elements of one fp32 block, by device: small enough for a core's cache, large enough to hide launch overhead.
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
# Elements of lm_head's gradient that are accumulated at a time.
SLICE_ELEMENTS = 2**22


@dataclass(frozen=True)
class TeacherHidden:
    """Output of a teacher in memory: hidden states before lm_head [..., H'], lm_head's weight [V', H'] and bias [V'].

    ``vocabulary``: teacher and student are compared on token ids below this number, renormalized; None: on all ids,
    which requires vocabularies of equal size. ``function``: the factor and softcap by which the teacher computes its
    logits from lm_head's output.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    vocabulary: int | None = None
    function: LogitFunction = UNCHANGED


class TeacherTopK(NamedTuple):
    """Output of a cached teacher: a row of ``top`` for each position with a target, in row-major order. ``vocabulary``:
    compare teacher and student on token ids below this number, renormalized; None: on all ids."""

    top: TopK
    vocabulary: int | None = None


TeacherTargets = TeacherHidden | TeacherTopK


class LossResult(NamedTuple):
    """Scaled scalar ``total`` with its graph, and detached ``sums``: unweighted sums over the valid tokens, by name."""

    total: Tensor
    sums: dict[str, Tensor]


def chunked_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    teacher: TeacherTargets | None = None,
    objective: Objective | None = None,
    *,
    scale: float = 1.0,
    gradient_scale: float = 1.0,
    diagnostics: bool = False,
    function: LogitFunction = UNCHANGED,
    positions: Tensor | None = None,
) -> LossResult:
    """Compute all losses of the positions whose label is not -100, a chunk of positions at a time.

    Args:
        hidden: ``[..., H]``, the input of lm_head.
        weight: weight of lm_head, ``[V, H]``; gathered under ZeRO-3.
        bias: bias of lm_head, ``[V]``, or None.
        labels: ``[...]`` int64, already shifted: the token to predict at each position, or -100.
        teacher: output of the teacher; None without distillation.
        objective: the losses and their weights; only the language modeling loss by default.
        scale: factor on ``total`` (not on the sums).
        gradient_scale: factor by which the caller multiplies ``total`` before backward. Gradients are multiplied by it
            before they are rounded to the model's dtype, and divided by it in backward. Use a power of two, which
            changes no other rounding.
        diagnostics: also sum KL(p || q), KL(q || p) and top-1 agreement; they need a teacher in memory.
        function: the factor and softcap by which the student computes its logits from lm_head's output.
        positions: ``[N]`` flat indices of positions with a label; None: computed here, which makes the host wait for a
            GPU.

    Raises:
        ValueError: shapes do not match, or a user's loss is not one number per token that depends on the logits.
    """
    objective = objective or Objective()
    positions = (labels.flatten() != IGNORE).nonzero().squeeze(-1) if positions is None else positions
    _check(hidden, weight, labels, positions, teacher)
    wanted = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    ]
    names = objective.parts(distils=teacher is not None, diagnostics=diagnostics)
    job = _Job(objective, teacher, scale, gradient_scale, diagnostics, names, wanted, function)
    total, sums = _ChunkedLosses.apply(hidden, weight, bias, labels.flatten()[positions], positions, job)
    return LossResult(total, dict(zip(names, sums.unbind(), strict=True)))


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, positions: Tensor, teacher: TeacherTargets | None) -> None:
    """Refuse shapes that do not match. Raises ValueError."""
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden states are {tuple(hidden.shape)} and labels {tuple(labels.shape)}, expected the same leading "
            "dimensions"
        )
    if teacher is None:
        return
    ours = theirs = weight.shape[0]
    if isinstance(teacher, TeacherHidden):
        theirs = teacher.weight.shape[0]
        if teacher.hidden.shape[:-1] != labels.shape:
            raise ValueError(
                f"the teacher's hidden states are {tuple(teacher.hidden.shape)}, the student's "
                f"{tuple(hidden.shape)}: expected the same leading dimensions"
            )
    elif len(teacher.top.indices) != len(positions):
        raise ValueError(
            f"the teacher has {len(teacher.top.indices)} rows, expected one for each of the {len(positions)} valid "
            "positions"
        )
    if teacher.vocabulary is None and ours != theirs:
        raise ValueError(
            f"student and teacher have {ours} and {theirs} logits per token, expected equal numbers, or "
            "TeacherHidden.vocabulary"
        )
    if (teacher.vocabulary or 0) > min(ours, theirs):
        raise ValueError(
            f"TeacherHidden.vocabulary: {teacher.vocabulary} tokens, expected at most {min(ours, theirs)}, as many as "
            "both models have logits"
        )


class _Job(NamedTuple):
    """Non-tensor arguments of the autograd Function, most with the meaning that they have in :func:`chunked_losses`.

    Attributes:
        names: names of the computed losses, in their order.
        wanted: for hidden states, weight and bias, in this order: True if the gradient is needed.
    """

    objective: Objective
    teacher: TeacherTargets | None
    scale: float
    gradient_scale: float
    diagnostics: bool
    names: list[str]
    wanted: list[bool]
    function: LogitFunction


class _ChunkedLosses(torch.autograd.Function):
    """Autograd function of :func:`chunked_losses`. Its forward loops over the chunks and computes losses and gradients;
    its backward only multiplies these gradients by a number."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, positions: Tensor, job: _Job
    ) -> tuple[Tensor, Tensor]:
        flat = hidden.reshape(-1, hidden.shape[-1])
        gradients = _Gradients.like(hidden, weight, bias, len(positions), job)
        values = torch.empty(len(job.names), len(positions), dtype=_work_dtype(weight.dtype), device=weight.device)
        student, teacher = _Projection(weight, bias), job.teacher
        if isinstance(teacher, TeacherHidden):
            flat_teacher = teacher.hidden.reshape(-1, teacher.hidden.shape[-1])
            bias_of_teacher = teacher.bias[: teacher.vocabulary] if teacher.bias is not None else None
            project = _Projection(teacher.weight[: teacher.vocabulary], bias_of_teacher)
        size = tokens_at_a_time(job.objective.chunk_tokens, hidden.device)
        for start in range(0, len(positions), size):
            chunk = slice(start, start + size)
            rows = flat.index_select(0, positions[chunk])  # [C, H]
            logits = student(rows)  # [C, V]; overwritten by its gradient, block by block
            of_teacher: Tensor | TopK | None = None
            if isinstance(teacher, TeacherHidden):
                of_teacher = project(flat_teacher.index_select(0, positions[chunk]))
            elif teacher is not None:
                of_teacher = _rows(teacher.top, chunk)
            for block in row_blocks(logits):
                here = values[:, chunk][:, block]
                _losses_of_block(job, logits[block], _rows(of_teacher, block), labels[chunk][block], here)
            gradients.add(rows, logits, weight, positions[chunk])
        sums = values.sum(-1)
        total = sums.new_zeros(())
        for name, factor in job.objective.weights().items():
            if factor and name in job.names:  # 0 times an infinite loss would be NaN
                total += sums[job.names.index(name)] * (factor * job.scale)
        ctx.gradients, ctx.gradient_scale = gradients, job.gradient_scale
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of this loss were returned already: call backward once per forward")
        hidden, weight, bias = gradients.times(incoming / ctx.gradient_scale)
        return hidden, weight, bias, None, None, None


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the losses: fp32, or fp64 for a model in fp64."""
    return torch.promote_types(dtype, torch.float32)


def row_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield slices that split the rows of logits [C, V] into blocks of at most ``BLOCK_ELEMENTS`` elements; a longer
    row is a block of its own."""
    limit = BLOCK_ELEMENTS.get(logits.device.type, BLOCK_ELEMENTS["cuda"])
    size = max(1, limit // logits.shape[1])
    return (slice(start, start + size) for start in range(0, logits.shape[0], size))


class _Projection:
    """Product of hidden states and lm_head, in one buffer for all chunks: new memory would cost more than softmax."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.buffer: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Compute the logits [C, V] of ``rows`` [C, H], valid until the next call; C must not grow between calls."""
        if self.buffer is None:
            self.buffer = rows.new_empty(rows.shape[0], self.weight.shape[0])
        out = self.buffer[: rows.shape[0]]
        if self.bias is None:
            return torch.mm(rows, self.weight.t(), out=out)
        return torch.addmm(self.bias, rows, self.weight.t(), out=out)


def _rows(teacher: Tensor | TopK | None, rows: slice) -> Tensor | TopK | None:
    """Select rows of the teacher's output: logits, or the top K of a cache; None if there is no teacher."""
    if isinstance(teacher, TopK):
        return TopK(*(tensor[rows] for tensor in teacher))
    return None if teacher is None else teacher[rows]


def _losses_of_block(job: _Job, logits: Tensor, teacher: Tensor | TopK | None, labels: Tensor, values: Tensor) -> None:
    """Compute all losses of R tokens, and the gradient of their weighted sum with respect to lm_head's output.

    Args:
        job: the losses, their weights, and the factor of the gradient.
        logits: output of the student's lm_head [R, V]; overwritten by the gradient, if it is needed.
        teacher: output of the teacher's lm_head [R, V'], the top K of a cache, or None without distillation.
        labels: int64 [R].
        values: [losses, R]; the losses are written here, in the order of ``job.names``.

    Raises:
        ValueError: a user's loss does not return a tensor [R] that depends on the student's logits.
    """
    objective, factor = job.objective, job.scale * job.gradient_scale
    student = job.function(logits.to(_work_dtype(logits.dtype)))
    gradient = torch.zeros_like(student) if any(job.wanted) else None
    if isinstance(job.teacher, TeacherHidden) and isinstance(teacher, Tensor):
        teacher = job.teacher.function(teacher.to(_work_dtype(teacher.dtype)))
    row = iter(values)
    targets = labels.unsqueeze(-1)
    log_q = F.log_softmax(student, dim=-1)
    next(row).copy_(log_q.gather(-1, targets).squeeze(-1).neg_())
    if gradient is not None and objective.lm_weight:
        weight = objective.lm_weight * factor
        gradient.add_(log_q.exp(), alpha=weight)
        gradient.scatter_add_(-1, targets, targets.new_full(targets.shape, -weight, dtype=gradient.dtype))
    if job.teacher is not None and teacher is not None:
        common = job.teacher.vocabulary or student.shape[-1]
        ours = student[:, :common]
        log_q = log_q if common == student.shape[-1] else F.log_softmax(ours, dim=-1)
        weight = objective.kd_weight * factor
        within = gradient[:, :common] if gradient is not None and weight else None
        next(row).copy_(distil(objective.kd, ours, log_q, teacher, labels, gradient=within, weight=weight))
    teacher_logits = teacher if isinstance(teacher, Tensor) else None
    for loss in objective.token_losses:
        next(row).copy_(_token_loss(loss, LossChunk(student, teacher_logits, labels), gradient, factor))
    if job.diagnostics:
        assert teacher_logits is not None, "diagnostics compare with a teacher in memory"
        log_p = F.log_softmax(teacher_logits, dim=-1)
        next(row).copy_(forward_kl(log_p, log_q))
        next(row).copy_(reverse_kl(log_p, log_q))
        next(row).copy_(log_p.argmax(-1) == log_q.argmax(-1))
    if gradient is not None:
        job.function.chain_(gradient, student)
        logits.copy_(gradient)


def _token_loss(loss: NamedTokenLoss, chunk: LossChunk, gradient: Tensor | None, factor: float) -> Tensor:
    """Compute a user's loss of R tokens, and add its gradient from autograd to ``gradient``. Raises ValueError if the
    loss is not a tensor [R], or does not depend on the student's logits."""
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
            raise ValueError(
                f"loss {loss.name!r} does not depend on the student's logits, expected a gradient: compute it from "
                "chunk.student, without detach"
            )
        (of_logits,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        gradient.add_(of_logits, alpha=loss.weight * factor)
    return value.detach()


@dataclass
class _Gradients:
    """Gradients of hidden states, weight and bias; None if not needed.

    The gradient of the hidden states has the model's dtype. The gradients of weight and bias are fp32 until
    :meth:`times` if several chunks add to them, else in the model's dtype: they are rounded once in both cases (where
    no GEMM adds to fp32, as on CPU, the weight's also once per chunk).

    Attributes:
        shape: shape of the caller's hidden states.
        dtype: the model's dtype.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def like(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, positions: int, job: _Job) -> "_Gradients":
        """Allocate the gradients that ``job`` wants, filled with 0; ``positions`` is the number of positions with a
        label."""
        several = positions > tokens_at_a_time(job.objective.chunk_tokens, hidden.device)
        dtype = _work_dtype(weight.dtype) if several else weight.dtype
        flat = hidden.new_zeros(hidden.shape).view(-1, hidden.shape[-1]) if job.wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=dtype) if job.wanted[1] else None
        of_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and job.wanted[2] else None
        return cls(flat, of_weight, of_bias, hidden.shape, weight.dtype)

    def add(self, rows: Tensor, logits: Tensor, weight: Tensor, positions: Tensor) -> None:
        """Write the chunk's rows of :attr:`hidden`, and add its gradients to :attr:`weight` and :attr:`bias`.

        Args:
            rows: [C, H], input of lm_head.
            logits: [C, V], gradient of lm_head's output.
            weight: [V, H], weight of lm_head.
            positions: [C], indices of the rows among all hidden states.
        """
        if self.hidden is not None:
            self.hidden.index_copy_(0, positions, torch.mm(logits, weight))
        if self.weight is not None:
            if self.weight.dtype == logits.dtype:
                self.weight.addmm_(logits.t(), rows)
            else:
                _add_in_fp32(self.weight, logits.t(), rows)
        if self.bias is not None:
            self.bias.add_(logits.sum(0, dtype=_work_dtype(logits.dtype)))

    def times(self, factor: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients multiplied by a scalar, in the model's dtype, and free them; call it once."""
        hidden, weight, bias = (
            None if tensor is None else _multiplied(tensor, factor, self.dtype)
            for tensor in (self.hidden, self.weight, self.bias)
        )
        self.hidden = self.weight = self.bias = None
        return None if hidden is None else hidden.view(self.shape), weight, bias


def _add_in_fp32(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` (bf16 or fp16) to ``total`` (fp32), in place."""
    if _adds_in_fp32(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        # The product is rounded to the operands' dtype before the sum. Slices of rows save memory.
        size = _rows_of_slice(total)
        for part, rows in zip(total.split(size), left.split(size), strict=True):
            part.add_(torch.mm(rows, right))


@cache
def _adds_in_fp32(device: torch.device) -> bool:
    """Tell if the device has a GEMM with bf16 operands that adds to fp32: CUDA from torch 2.11 on, CPU not. The meta
    device of torch 2.11 mistakes the dtype for a factor: TypeError."""
    total, ones = torch.zeros(16, 16, device=device), torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def _rows_of_slice(tensor: Tensor) -> int:
    """Return the number of rows, at least 1, with at most ``SLICE_ELEMENTS`` elements."""
    return max(1, SLICE_ELEMENTS // max(1, tensor[0].numel()))


def _multiplied(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply ``tensor`` by a scalar in fp32, return it in ``dtype``; in place if it has that dtype. It works in
    slices: one operation would round the scalar to bf16 first, or allocate an fp32 copy of the tensor."""
    out = tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
    size = _rows_of_slice(tensor) if tensor.dim() > 1 and len(tensor) else SLICE_ELEMENTS
    for source, target in zip(tensor.split(size), out.split(size), strict=True):
        target.copy_(source.to(_work_dtype(source.dtype)) * factor)
    return out
