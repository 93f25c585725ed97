"""Who the student is distilled from: another model, the student itself without fake quant, or a cache on disk.

Each teacher is asked twice per micro-batch. :meth:`Teacher.look` runs whatever forward it takes, before the student's,
and keeps hidden states, not logits. What it returns is entered inside the student's lm_head, where the losses are
computed, and gives the teacher as :func:`engine.losses.chunked.chunked_losses` takes it. Under ZeRO stage 3 a model's
lm_head is gathered there, once per micro-batch, and by all ranks, whether they have a valid token or not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from data.loader import MicroBatch
from data.samples import IGNORE
from data.teacher_cache import TeacherCache
from engine.losses import chunked as losses
from engine.losses.kd import TopK
from model.head import LMHead
from model.zero import forward_only, gathered
from quant import Quantization

AtHead = Callable[[Tensor, Tensor | None], AbstractContextManager[losses.Teacher]]
"""weight and bias of the student's lm_head -> the teacher, for the time of a block"""


class Teacher(ABC):
    """A source of distributions over the vocabulary."""

    @abstractmethod
    def look(self, inputs: dict[str, Any], batch: MicroBatch) -> AtHead:
        """See what the teacher has to say about a micro-batch; a collective.

        Args:
            inputs: what the student's forward gets.
            batch: the micro-batch, on the device.
        """


@dataclass
class ModelTeacher(Teacher):
    """A model of its own, frozen.

    Attributes:
        module: the model (an engine under stage 3), without its lm_head: it returns hidden states as logits.
        head: its lm_head, which nothing gathers but this class.
        vocabulary: see :class:`engine.losses.chunked.TeacherHidden`.
    """

    module: nn.Module
    head: LMHead
    vocabulary: int | None

    def look(self, inputs: dict[str, Any], batch: MicroBatch) -> AtHead:
        """Run the model."""
        hidden = self.hidden(inputs)
        return lambda weight, bias: self.at_head(hidden)

    @torch.no_grad()
    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """What goes into lm_head, [B, T, H]; a collective under stage 3."""
        return self.module(**inputs).logits

    @contextmanager
    def at_head(self, hidden: Tensor) -> Iterator[losses.TeacherHidden]:
        """lm_head whole inside the block; a collective under stage 3."""
        with gathered(self.head.parameters()):
            yield losses.TeacherHidden(hidden, self.head.weight, self.head.bias, self.vocabulary)


@dataclass
class SelfTeacher(Teacher):
    """The student without fake quant: what it computed before quantisation, as long as its weights are frozen.

    Costs a second forward and no memory for weights.
    """

    engine: nn.Module
    head: LMHead
    quantization: Quantization

    @torch.no_grad()
    def look(self, inputs: dict[str, Any], batch: MicroBatch) -> AtHead:
        """Run the student as it was: eval mode, nothing quantised, no observer watching; then all as before."""
        modules = self.quantization.modules
        state = self.quantization.fake_quant_state()
        observers = {name: module.input_observer for name, module in modules.items()}
        was_training = self.engine.training
        self.engine.eval()
        self.quantization.set_fake_quant(weights=False, activations=False)
        for module in modules.values():
            module.input_observer = None
        try:
            with self.head.computing(lambda hidden, weight, bias: hidden), forward_only(self.engine):
                hidden = self.engine(**inputs).logits
        finally:
            for name, module in modules.items():
                module.input_observer = observers[name]
            self.quantization.restore_fake_quant(state)
            self.engine.train(was_training)
        # The head's own weight, not the one that the student's losses are computed with, which may be quantised.
        return lambda weight, bias: nullcontext(
            losses.TeacherHidden(hidden, self.head.weight.detach(), _detached(bias))
        )


@dataclass
class CachedTeacher(Teacher):
    """What ``launch/cache_teacher.py`` wrote of the training samples; no model in memory."""

    cache: TeacherCache

    def look(self, inputs: dict[str, Any], batch: MicroBatch) -> AtHead:
        """Read the rows of the batch's samples: their valid positions, in order, are those of the batch.

        Raises:
            ValueError: the batch's labels are not those of the samples that were cached.
        """
        labels = batch["labels"]
        positions = int((labels != IGNORE).sum())
        rows = self.cache.rows(batch["sample_ids"].tolist())
        if positions == 0:  # a batch whose targets someone took out
            rows = rows[:0]
        if len(rows) != positions:
            raise ValueError(
                f"samples {batch['sample_ids'].tolist()} have {positions} targets in this batch, but {len(rows)} "
                f"in the teacher's cache {self.cache.directory}"
            )
        log_probs, indices, log_tail = (tensor.to(labels.device) for tensor in self.cache.top_k(rows))
        top = TopK(log_probs, indices, log_tail)
        tokens = self.cache.manifest.vocabulary
        return lambda weight, bias: nullcontext(losses.TeacherTopK(top, tokens if tokens != len(weight) else None))


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def first_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """Where two tokenizers disagree on what a token id means: the first such id, None if there is none."""
    first, second = ({id: token for token, id in each.get_vocab().items()} for each in (ours, theirs))
    for id in sorted(first.keys() | second.keys()):
        if first.get(id) != second.get(id):
            return f"token {id} is {first.get(id)!r} to the student and {second.get(id)!r} to the teacher"
    return None


def common_vocabulary(tokenizer: PreTrainedTokenizerBase, student: int, teacher: int) -> int | None:
    """How many token ids two models of one tokenizer are compared on; None: all, as they have equally many.

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
