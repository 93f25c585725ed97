"""Who the student is distilled from: another model, the student itself without fake quant, or a cache on disk.

:meth:`Teacher.forward` runs whatever forward a micro-batch takes, before the student's, and keeps hidden states, not
logits. The losses are computed inside the student's lm_head, from what it returned. Under ZeRO stage 3 the lm_head of
another model is gathered there, once per micro-batch, by all ranks, whether they have a valid token or not.
"""

from abc import ABC, abstractmethod
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
from engine.losses.kd import TopK
from model.head import HiddenStates, LMHead, hidden_states
from model.zero import forward_only
from quant import Quantization, QuantLinear
from quant.lora import without_adapters


class TeacherOutput(NamedTuple):
    """What a teacher says about a micro-batch.

    Attributes:
        teacher: as :func:`engine.losses.chunked.chunked_losses` takes it.
        parameters: what has to be gathered around that call, beyond the student's lm_head.
    """

    teacher: losses.Teacher
    parameters: Sequence[Parameter] = ()


class Teacher(ABC):
    """A source of distributions over the vocabulary."""

    @abstractmethod
    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """See what the teacher has to say about a micro-batch; a collective.

        Args:
            inputs: what the student's forward gets.
            batch: the micro-batch, on the device.
        """


@dataclass
class ModelTeacher(Teacher):
    """A model of its own, frozen.

    Attributes:
        module: the model (an engine under stage 3), without its lm_head.
        head_proxy: what stands there in its lm_head's place.
        head: its lm_head, which is gathered only while the losses are computed with what :meth:`look` returns.
        vocabulary: see :class:`engine.losses.chunked.TeacherHidden`.
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
class SelfTeacher(Teacher):
    """The student without fake quant and adapters: what it was at the start, as long as its weights are frozen.

    Costs a second forward and no memory for weights.
    """

    engine: nn.Module
    head: LMHead
    quantization: Quantization

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Run the student as it was: eval mode, nothing quantized, no observer watching; then all as before."""
        logits = unquantized_forward(self.engine, self.head, self.quantization, inputs)
        hidden = self.head.collect(logits, "the student")
        # The head's own weight, not the one that the student's losses are computed with, which may be quantized. It is
        # whole where they are computed, and no gradient flows to it through a teacher.
        function = self.head.function
        return TeacherOutput(losses.TeacherHidden(hidden, self.head.weight, self.head.bias, function=function))


@torch.no_grad()
def unquantized_forward(
    engine: nn.Module, head: LMHead, quantization: Quantization, inputs: dict[str, Any]
) -> torch.Tensor:
    """What the student in training returns as its logits where its lm_head gives hidden states; a collective.

    It runs in eval mode, nothing is quantized, adapters are off and no observer watches; then all is as before.
    """
    was_training = engine.training
    engine.eval()
    try:
        with quantization.paused(), without_adapters(quantization), head.computing(hidden_states), forward_only(engine):
            logits: torch.Tensor = engine(**inputs).logits
    finally:
        engine.train(was_training)
    return logits


@dataclass
class CachedTeacher(Teacher):
    """What ``launch/cache_teacher.py`` wrote of the training samples; no model in memory."""

    cache: TeacherCache

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Read the rows of the batch's samples: their valid positions, in order, are those of the batch.

        Raises:
            ValueError: the batch's labels are not those of the samples that were cached.
        """
        positions = len(batch["positions"])
        rows = self.cache.rows(batch["sample_ids"].tolist())
        if positions == 0:  # a batch whose targets someone took out
            rows = rows[:0]
        if len(rows) != positions:
            raise ValueError(
                f"samples {batch['sample_ids'].tolist()} have {positions} targets in this batch, but {len(rows)} "
                f"in the teacher's cache {self.cache.directory}"
            )
        log_probs, indices, log_tail = (
            without_wait(tensor, batch["labels"].device) for tensor in self.cache.top_k(rows)
        )
        top = TopK(log_probs, indices, log_tail)
        return TeacherOutput(losses.TeacherTopK(top, self.cache.manifest.vocabulary))


def first_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """The first token id that means different things to two tokenizers, as a sentence; None if there is none."""
    first, second = ({id: token for token, id in each.get_vocab().items()} for each in (ours, theirs))
    for id in sorted(first.keys() | second.keys()):
        if first.get(id) != second.get(id):
            return f"token {id} is {first.get(id)!r} to the student and {second.get(id)!r} to the teacher"
    return None


def common_vocabulary(tokenizer: PreTrainedTokenizerBase, student: int, teacher: int) -> int | None:
    """How many token ids two models of one tokenizer are compared on; None if on all, as they have equally many.

    Models pad their vocabularies beyond the tokenizer's, and what they say of that padding means nothing. Where both
    have the same size it is compared all the same: then the losses are those of whole distributions.

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
