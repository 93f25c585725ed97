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

Without a mask transformers still asks the device once per forward, whether positions begin anew in a row as they do in
packed ones; not so for an implementation of attention that it knows no masks for. Under a name of its own sdpa is one.
Where transformers would make a mask all the same (a sliding window that the row exceeds) the window would be lost: so
that name stays only where the very bits of the hidden states do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

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

CAUSAL = "sdpa_without_masks"
ROUNDINGS = 4.0  # of the dtype, in the mean over tokens: kernels with and without a mask add up in other orders


def with_checked_rows(session: Session, samples: Sequence[Sample]) -> Session:
    """The session, its model tried on rows as those of training; a collective. RankError: see ``check_borders``."""
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
