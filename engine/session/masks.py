"""Whether a model needs an attention mask for rows that are padded behind their sample: tried at the start of a run.

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
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from data.loader import MicroBatch, pad
from data.samples import IGNORE, Sample
from engine.session.borders import (
    FIRST,
    MOVED,
    SEEN,
    TIMES,
    check_borders,
    difference,
    models_to_ask,
    random_samples,
    vocabulary_of,
)
from engine.session.session import Session
from model.ranks import gather_objects, say

ROUNDINGS = 4.0  # of the dtype, in the mean over tokens: kernels with and without a mask add up in other orders


def with_checked_rows(session: Session, samples: Sequence[Sample]) -> Session:
    """The session, whose model keeps packed samples apart, or whose padded rows need a mask or none; a collective.

    Raises:
        RankError: see :func:`engine.session.borders.check_borders`.
    """
    if session.recipe.data.packing:
        check_borders(session, samples)
    elif session.device.type != "cpu":
        return replace(session, mask=needs_mask(session, samples))
    return session


def needs_mask(session: Session, samples: Sequence[Sample]) -> bool:
    """Whether the run's padded rows come with an attention mask; a collective. Runs forwards only, nothing quantised.

    A router that trains needs it: its auxiliary loss counts tokens by it.
    """
    if session.recipe.learnable.router:
        return True
    settings = session.recipe.data
    sizes = {"rows": settings.micro_batch_size, "length": settings.max_length}
    for name, forward, exact in models_to_ask(session):
        found = gather_objects(mask_problem(forward, vocabulary_of(samples), **sizes, exact=exact))
        problem = next((one for one in found if one is not None), None)
        if problem is not None:
            say(f"attention masks stay, for which the host waits in every forward: {name}: without one {problem}")
            return True
    return False


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
    sizes = [max(1, length * (row + 1) // rows) for row in range(rows)]
    samples = [Sample(ids.numpy(), torch.full_like(ids, IGNORE).numpy()) for ids in random_samples(vocabulary, sizes)]
    given, other = (pad(samples, [[row] for row in range(rows)], int(vocabulary[at])) for at in (0, -1))
    masked, masked_other = forward(given), forward(other)
    bare, bare_other = forward(_without(given)), forward(_without(other))
    alone = forward(_without(pad(samples, [[0]], 0)))
    whole = given["attention_mask"].bool()
    place = torch.arange(length)
    last = whole & (place >= torch.tensor(sizes)[:, None] - FIRST)
    smallest = SEEN if exact else max(SEEN, torch.finfo(bare.dtype).eps)
    for tokens in (last.to(bare.device), whole.to(bare.device)):
        seen = difference(bare[tokens], bare_other[tokens])
        if seen > smallest + TIMES * difference(masked[tokens], masked_other[tokens]):
            return f"its tokens see the padding behind them (hidden states move by {seen:.1%})"
    moved = difference(bare[whole.to(bare.device)], masked[whole.to(bare.device)])
    rounding = difference(bare[0, : sizes[0]], alone[0])
    if moved > (max(SEEN, ROUNDINGS * torch.finfo(bare.dtype).eps) if exact else MOVED) + TIMES * rounding:
        return f"its hidden states are others (by {moved:.1%})"
    return None


def _without(batch: MicroBatch) -> MicroBatch:
    return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
