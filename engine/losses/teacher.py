"""Teachers: another model, the student itself without fake quant, or a cache on disk.

``forward(inputs, batch)`` of a teacher runs it on a micro-batch before the student, with the arguments ``inputs`` of
the student's forward; a collective. It returns hidden states, not logits; the losses are computed from them inside the
student's lm_head. Under ZeRO stage 3 the lm_head of a teacher model is gathered while the losses are computed, once per
micro-batch, by all ranks, including ranks without a valid token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Parameter
from transformers import PreTrainedTokenizerBase

from data.loader import MicroBatch, without_wait
from data.teacher_cache import TeacherCache
from engine.losses import chunked as losses
from engine.losses.objective import TopK
from model.head import HiddenStates, LMHead, hidden_states
from model.zero import forward_only
from quant import Quantization, QuantLinear
from quant.adapters import without_adapters


class TeacherOutput(NamedTuple):
    """Teacher's output for a micro-batch.

    Attributes:
        teacher: the argument ``teacher`` of :func:`engine.losses.chunked.chunked_losses`.
        parameters: parameters to gather around the call of chunked_losses, besides the student's lm_head.
    """

    teacher: losses.TeacherTargets
    parameters: Sequence[Parameter] = ()


@dataclass
class ModelTeacher:
    """Teacher that is a frozen model beside the student.

    Attributes:
        module: the model (an engine under stage 3), without its lm_head.
        head_proxy: module in lm_head's place, which makes the model return hidden states.
        head: the model's lm_head, gathered only while the losses are computed.
        vocabulary: losses compare token ids below this number; None: all.
    """

    module: nn.Module
    head_proxy: HiddenStates
    head: nn.Linear | QuantLinear
    vocabulary: int | None

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Run the model; a collective under stage 3."""
        with torch.no_grad(), self.head_proxy.catching():
            logits = self.module(**inputs).logits
        hidden = self.head_proxy.collect(logits, "the teacher")  # [B, T, H]
        teacher = losses.TeacherHidden(
            hidden, self.head.weight, self.head.bias, self.vocabulary, self.head_proxy.function
        )
        return TeacherOutput(teacher, list(self.head.parameters()))


@dataclass
class SelfTeacher:
    """Teacher that is the student without fake quant and adapters: the initial model, as long as weights are frozen.
    Costs a second forward and no memory for weights."""

    engine: nn.Module
    head: LMHead
    quantization: Quantization

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Run the student without fake quant and adapters; a collective."""
        logits = unquantized_forward(self.engine, self.head, self.quantization, inputs)
        hidden = self.head.collect(logits, "the student")
        # The unquantized weight of lm_head; the student's losses may use a quantized one. It is gathered while the
        # losses are computed, and gets no gradient from the teacher.
        function = self.head.function
        return TeacherOutput(losses.TeacherHidden(hidden, self.head.weight, self.head.bias, function=function))


@torch.no_grad()
def unquantized_forward(
    engine: nn.Module, head: LMHead, quantization: Quantization, inputs: dict[str, Any]
) -> torch.Tensor:
    """Run the student without quantization, and return the ``logits`` of its output, which are hidden states here; a
    collective. Runs in eval mode, with fake quant, adapters and observers off; all are restored afterwards."""
    was_training = engine.training
    engine.eval()
    try:
        with quantization.paused(), without_adapters(quantization), head.computing(hidden_states), forward_only(engine):
            logits: torch.Tensor = engine(**inputs).logits
    finally:
        engine.train(was_training)
    return logits


@dataclass
class CachedTeacher:
    """Teacher whose outputs for the training samples are read from a cache of ``launch/cache_teacher.py``; no model in
    memory."""

    cache: TeacherCache

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Read the cache's rows of the batch's samples, one per valid position, in the order of the batch; ``inputs``
        are not used. Raises ValueError if the batch and the cache have different numbers of targets for these
        samples."""
        rows = self.cache.rows(batch["sample_ids"].tolist())
        own = batch.get("own_targets")  # of rows that ranks share
        targets = len(batch["positions"]) if own is None else len(own)
        if targets == 0:  # a batch with all targets removed
            rows = rows[:0]
        if len(rows) != targets:
            raise ValueError(
                f"samples {batch['sample_ids'].tolist()} have {targets} targets in this batch, expected {len(rows)}, "
                f"as in the teacher's cache {self.cache.directory}"
            )
        if own is not None:
            rows = rows[own.numpy()]
        log_probs, indices, log_tail = (
            without_wait(tensor, batch["labels"].device) for tensor in self.cache.top_k(rows)
        )
        top = TopK(log_probs, indices, log_tail)
        return TeacherOutput(losses.TeacherTopK(top, self.cache.manifest.vocabulary))


Teacher = ModelTeacher | SelfTeacher | CachedTeacher


def first_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """Describe the first token id that differs between two tokenizers; None if there is none."""
    first, second = ({id: token for token, id in each.get_vocab().items()} for each in (ours, theirs))
    for id in sorted(first.keys() | second.keys()):
        if first.get(id) != second.get(id):
            return f"token {id} is {first.get(id)!r} to the student and {second.get(id)!r} to the teacher"
    return None


def common_vocabulary(tokenizer: PreTrainedTokenizerBase, student: int, teacher: int) -> int | None:
    """Return the number of token ids, counted from 0, on which two models are compared: None (all) if both have equally
    many logits, else the number of the tokenizer's tokens.

    Models pad their vocabularies beyond the tokenizer's, and logits of that padding are meaningless. At equal sizes the
    padding is compared too, so that losses compare whole distributions.

    Args:
        tokenizer: tokenizer of both models.
        student, teacher: numbers of logits.

    Raises:
        ValueError: one of the models has no logit for a token.
    """
    if student == teacher:
        return None
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > min(student, teacher):
        raise ValueError(
            f"the tokenizer has {tokens} tokens, the student {student} logits and the teacher {teacher}: expected at "
            "least one logit for each token in both"
        )
    return tokens
