"""Whether a model keeps packed samples apart: tried at the start of a run, with its weights, on rows as long as those
of training.

No configuration says it. transformers finds the borders of samples where ``position_ids`` start again (data/loader.py),
but not every class passes them to its mask, layers that carry a state or a convolution from token to token know no
borders, and an attention implementation may look for them in batches of one row alone. So the model is asked. With
samples A, A', B of random tokens, what it says about B is compared in the rows

    A B        A' B        B A        B A'        B

- behind A with behind A': what differs is what B sees of another sample. Shapes and kernels are the same, so a dense
  model that keeps samples apart gives equal results. The experts of a MoE get other numbers of tokens, and round in
  another way; that shows before A and before A' too, where a causal model cannot know what follows.
- behind A with before A: what differs is what the place in the row changes. Sums have another order there; that shows
  before A and alone, too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.device import on_device
from data.loader import MicroBatch, model_inputs, pack_rows
from data.samples import IGNORE, Sample
from engine.losses.chunked import TeacherHidden
from engine.losses.teacher import ModelTeacher, SelfTeacher, Teacher
from engine.session.session import Session
from model.experts import ExpertMLPs
from model.ranks import raise_everywhere

# Differences are lengths of hidden states' differences over their own length, in the mean over tokens. Over 120 random
# models of transformers' families in fp32 and bf16, causal dense ones that keep samples apart differ by exactly 0 where
# shapes are the same. What is seen of another sample moves the first tokens of B by 1e-3 to 1.1; of trained weights,
# which attend to more than random ones, by 0.04 and more.
FIRST = 16  # tokens behind a border: what passes it shows there most
SEEN = 1e-4
SEEN_BY_EXPERTS = 0.2  # by what follows: a choice of experts that rounding turns may move a token by that much
MOVED = 0.05  # by another place in the row
TIMES = 4.0  # so much more than rounding alone


def check_borders(session: Session, samples: Sequence[Sample]) -> None:
    """Refuse to pack for a student or a teacher that would see across the borders of samples; a collective.

    Runs forwards only, with quantisation paused: rounding to codes would make much of little.

    Raises:
        RankError: on every rank, with the knob that switches packing off.
    """
    settings = session.recipe.data
    sizes = {"rows": settings.micro_batch_size, "length": settings.max_length}
    for asked in models_to_ask(session):
        problem = border_problem(asked.forward, vocabulary_of(samples), **sizes, exact=asked.exact)
        raise_everywhere(None if problem is None else f"data.packing: true, expected false: {asked.name}: {problem}")


class Asked(NamedTuple):
    """A model that is tried at the start of a run.

    Attributes:
        name: the knob that names it, and its directory.
        model: itself.
        forward: a micro-batch to hidden states [rows, tokens, H], with quantisation paused; a collective.
        exact: it has no experts, so that only what a token sees can move it.
    """

    name: str
    model: PreTrainedModel
    forward: Callable[[MicroBatch], Tensor]
    exact: bool


def models_to_ask(session: Session) -> Iterator[Asked]:
    """The student, and a teacher with a model of its own."""
    assert session.head is not None, "packed and padded rows are for training"
    student = SelfTeacher(session.engine, session.head, session.quantization)
    models: dict[str, Teacher] = {f"model.path: {session.recipe.model.path}": student}
    if isinstance(session.teacher, ModelTeacher):
        models[f"loss.teacher: {session.recipe.loss.teacher}"] = session.teacher
    for name, model in models.items():
        own: Any = model.module if isinstance(model, ModelTeacher) else session.model
        own = own if isinstance(own, PreTrainedModel) else own.module  # of an engine

        def forward(batch: MicroBatch, model: Teacher = model) -> Tensor:
            given = on_device(batch, session.device)
            found = model.look({**model_inputs(given), "use_cache": False}, given).teacher
            assert isinstance(found, TeacherHidden)
            return found.hidden

        yield Asked(name, own, forward, not any(isinstance(module, ExpertMLPs) for module in own.modules()))


def vocabulary_of(samples: Sequence[Sample]) -> Tensor:
    """[n] tokens of the first of the samples."""
    return torch.from_numpy(np.unique(np.concatenate([sample.input_ids for sample in samples[:1000]])))


def random_samples(vocabulary: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Random tokens, as many as each of ``sizes`` says, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return [vocabulary[torch.randint(len(vocabulary), (size,), generator=generator)] for size in sizes]


@torch.no_grad()
def border_problem(
    forward: Callable[[MicroBatch], Tensor], vocabulary: Tensor, *, rows: int, length: int, exact: bool
) -> str | None:
    """What a model sees across the borders of packed samples, as a clause; None where it keeps them apart.

    Args:
        forward: a packed micro-batch to hidden states [rows, length, H]; it is called six times.
        vocabulary: [n] tokens that samples are made of.
        rows, length: of a micro-batch.
        exact: the model has no experts, so that only what a token sees can move it.
    """
    size = length // 2
    drawn = random_samples(vocabulary, [tokens for tokens in (size, size, length - size) for _ in range(rows)])
    first, other, second = (drawn[start : start + rows] for start in range(0, 3 * rows, rows))
    behind, behind_other = (forward(_packed(left, second))[:, size:] for left in (first, other))
    before, before_other, again = (
        forward(_packed(second, right))[:, : length - size] for right in (first, other, first)
    )
    alone = forward(_packed(second))
    chance = difference(before, again)  # kernels that add up in any order
    for tokens in (slice(None, FIRST), slice(None)):
        follows = difference(before[:, tokens], before_other[:, tokens])
        if follows > (SEEN + TIMES * chance if exact else SEEN_BY_EXPERTS):
            return f"its tokens see those that follow them (hidden states move by {follows:.1%}): it is not causal"
        seen = difference(behind[:, tokens], behind_other[:, tokens])
        smallest = SEEN if exact else max(SEEN, torch.finfo(behind.dtype).eps)
        if seen > smallest + TIMES * (follows + chance):
            return f"its samples see the one before them in a row (hidden states move by {seen:.1%})"
    moved = difference(behind, before)
    if moved > MOVED + TIMES * difference(before, alone):
        return f"its samples depend on their place in a row (hidden states move by {moved:.1%})"
    return None


def _packed(*parts: Sequence[Tensor]) -> MicroBatch:
    """Rows that hold the n-th sample of every part, one behind the other."""
    flat = [Sample(ids.numpy(), np.full(len(ids), IGNORE)) for part in parts for ids in part]
    rows = [[row + index * len(parts[0]) for index in range(len(parts))] for row in range(len(parts[0]))]
    return pack_rows(flat, rows, 0, sum(len(part[0]) for part in parts))


def difference(one: Tensor, another: Tensor) -> float:
    """How far hidden states [..., H] are apart, over their own length, in the mean."""
    one, another = one.float(), another.float()
    return ((one - another).norm(dim=-1) / another.norm(dim=-1).clamp(min=1e-30)).mean().item()
