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

Whether a model needs an attention mask for rows that are padded behind their sample: tried at the start of a run.

In a causal model no token sees the padding behind it, so that what is computed of a sample needs no mask. transformers
asks the device what stands in one, for which the host waits in every forward, and where anything is padded it gives
attention a mask of T x T, which flash kernels do not take. But a class may read the mask for something else: it
attends both ways, counts positions by it, mixes other tokens in. No configuration says so, so the model is asked, with
its weights, on rows as long as those of training. It runs

    with a mask, and behind the samples one token or another    what rounding alone moves, of experts above all
    without a mask, and behind the samples one or the other     what tokens see of the padding: shapes are the same
    without a mask, and a sample alone                          what other shapes move

and the hidden states of the samples are compared. It is the mask that stays in doubt. On a CPU it stays always: nobody
waits there, and gradients of attention have other last bits without it.

Without a mask transformers still asks the device once per forward, whether positions begin anew in a row as they do in
packed ones; not so for an implementation of attention that it knows no masks for. Under a name of its own sdpa is one.
Where transformers would make a mask all the same (a sliding window that the row exceeds) the window would be lost: so
that name stays only where the very bits of the hidden states do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from data.loader import MicroBatch, model_inputs, on_device, pack_rows, pad
from data.samples import IGNORE, Sample
from engine.losses.chunked import TeacherHidden
from engine.losses.teacher import ModelTeacher, SelfTeacher, Teacher
from engine.session.session import Session
from model.moe.experts import ExpertMLPs
from model.ranks import gather_objects, raise_everywhere, say

# Differences are lengths of hidden states' differences over their own length, in the mean over tokens. Over 120 random
# models of transformers' families in fp32 and bf16, causal dense ones that keep samples apart differ by exactly 0 where
# shapes are the same. What is seen of another sample moves the first tokens of B by 1e-3 to 1.1; of trained weights,
# which attend to more than random ones, by 0.04 and more.
FIRST = 16  # tokens behind a border: what passes it shows there most
SEEN = 1e-4
SEEN_BY_EXPERTS = 0.2  # by what follows: a choice of experts that rounding turns may move a token by that much
MOVED = 0.05  # by another place in the row
TIMES = 4.0  # so much more than rounding alone


def check_sequence_boundaries(session: Session, samples: Sequence[Sample]) -> None:
    """Refuse to pack for a student or a teacher that would see across the borders of samples; a collective.

    Runs forwards only, with quantization paused: rounding to codes would make much of little.

    Raises:
        RankError: on every rank, with the option that switches packing off.
    """
    settings = session.recipe.data
    sizes = {"rows": settings.micro_batch_size, "length": settings.max_length}
    for asked in models_to_ask(session):
        problem = boundary_problem(asked.forward, vocabulary_of(samples), **sizes, exact=asked.exact)
        raise_everywhere(None if problem is None else f"data.packing: true, expected false: {asked.name}: {problem}")


class Asked(NamedTuple):
    """A model that is tried at the start of a run.

    Attributes:
        name: the option that names it, and its directory.
        model: itself.
        forward: a micro-batch to hidden states [rows, tokens, H], with quantization paused; a collective.
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
            found = model.forward({**model_inputs(given), "use_cache": False}, given).teacher
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
def boundary_problem(
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


CAUSAL = "sdpa_without_masks"
ROUNDINGS = 4.0  # of the dtype, in the mean over tokens: kernels with and without a mask add up in other orders


def with_checked_rows(session: Session, samples: Sequence[Sample]) -> Session:
    """The session, its model tried on rows as those of training; a collective. RankError: see
    ``check_sequence_boundaries``."""
    if session.recipe.data.packing:
        check_sequence_boundaries(session, samples)
    elif session.device.type != "cpu":
        return replace(session, mask=needs_mask(session, samples))
    return session


def needs_mask(session: Session, samples: Sequence[Sample]) -> bool:
    """Whether the run's padded rows come with an attention mask; a collective. Runs forwards only, nothing quantized.

    A router that trains needs it: its auxiliary loss counts tokens by it.
    """
    if session.recipe.learnable.router:
        return True
    settings, vocabulary = session.recipe.data, vocabulary_of(samples)
    rows, length = settings.micro_batch_size, settings.max_length
    for asked in models_to_ask(session):
        found = gather_objects(mask_problem(asked.forward, vocabulary, rows=rows, length=length, exact=asked.exact))
        problem = next((one for one in found if one is not None), None)
        if problem is not None:
            say(f"attention masks stay, for which the host waits in every forward: {asked.name}: without one {problem}")
            return True
    for asked in models_to_ask(session):
        stop_asking(asked.model, asked.forward, _without(_padded(vocabulary, rows, length)[0]))
    return False


def stop_asking(model: PreTrainedModel, forward: Callable[[MicroBatch], Tensor], batch: MicroBatch) -> bool:
    """Let no forward of ``model`` ask the device for borders, where it computes the same then; whether it does; a
    collective.

    Args:
        model: the model, with attention by sdpa; with any other it stays as it is.
        forward: its forward to hidden states, of a ``batch`` as large as any.
    """
    if model.config.get_text_config()._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(CAUSAL, AttentionInterface()["sdpa"])
    with torch.no_grad():
        before, again = forward(batch), forward(batch)
        model.set_attn_implementation(CAUSAL)
        same = difference(before, forward(batch)) <= difference(before, again)
    if not all(gather_objects(same)):
        model.set_attn_implementation("sdpa")
        return False
    return True


@torch.no_grad()
def mask_problem(
    forward: Callable[[MicroBatch], Tensor], vocabulary: Tensor, *, rows: int, length: int, exact: bool
) -> str | None:
    """What a model computes otherwise of padded rows without an attention mask, as a clause; None for nothing.

    Args:
        forward: a padded micro-batch, with ``attention_mask`` or without, to hidden states [rows, length, H]; it is
            called five times.
        vocabulary: [n] tokens that samples and padding are made of.
        rows, length: of a micro-batch.
        exact: the model has no experts, so that only what a token sees can move it.
    """
    given, other, first = _padded(vocabulary, rows, length)
    masked, masked_other = forward(given), forward(other)
    bare, bare_other = forward(_without(given)), forward(_without(other))
    alone = forward(_without(first))
    whole = given["attention_mask"].bool()
    last = whole & (torch.arange(length) >= whole.sum(-1, keepdim=True) - FIRST)
    smallest = SEEN if exact else max(SEEN, torch.finfo(bare.dtype).eps)
    for tokens in (last.to(bare.device), whole.to(bare.device)):
        seen = difference(bare[tokens], bare_other[tokens])
        if seen > smallest + TIMES * difference(masked[tokens], masked_other[tokens]):
            return f"its tokens see the padding behind them (hidden states move by {seen:.1%})"
    moved = difference(bare[whole.to(bare.device)], masked[whole.to(bare.device)])
    rounding = difference(bare[0, : alone.shape[1]], alone[0])
    if moved > (max(SEEN, ROUNDINGS * torch.finfo(bare.dtype).eps) if exact else MOVED) + TIMES * rounding:
        return f"its hidden states are others (by {moved:.1%})"
    return None


def _padded(vocabulary: Tensor, rows: int, length: int) -> tuple[MicroBatch, MicroBatch, MicroBatch]:
    """Samples of even steps up to ``length`` in padded rows, the same with another padding, and the first alone."""
    sizes = [max(1, length * (row + 1) // rows) for row in range(rows)]
    samples = [Sample(ids.numpy(), torch.full_like(ids, IGNORE).numpy()) for ids in random_samples(vocabulary, sizes)]
    all_of_them = [[row] for row in range(rows)]
    given, other = (pad(samples, all_of_them, int(vocabulary[at])) for at in (0, -1))
    return given, other, pad(samples, [[0]], 0)


def _without(batch: MicroBatch) -> MicroBatch:
    return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
