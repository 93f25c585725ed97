"""Test a model at the start of a run, with its weights, on rows as long as those of training.

Packing: do samples of a packed row influence each other? No configuration tells. transformers detects sequence
boundaries where ``position_ids`` restart (data/loader.py), but not every class passes the positions to its mask,
recurrent and convolution layers ignore them, and an attention implementation may detect boundaries in batches of one
row only. So hidden states of B are compared between rows with samples A, A', B of random tokens:

    A B        A' B        B A        B A'        B

- after A and after A': the influence of another sample on B. Shapes and kernels are the same, so dense models that
  isolate samples return equal results. Experts get other numbers of tokens and round differently; the rows B A and B A'
  show by how much, as B cannot see what follows;
- after A and before A: the influence of the position in the row, and other rounding, which is compared with that
  between B A and B alone.

Padding: do rows padded after their sample need an attention mask? In a causal model no token sees the padding after it.
With a mask, transformers reads its content from the device, for which the host waits in every forward, and if there is
any padding it passes attention a T x T mask, which flash kernels do not support. But a class may attend in both
directions, count positions by the mask, or mix in other tokens. So hidden states are compared between forwards

    with a mask, padded with one token or another       changes by rounding only, mainly of experts
    without a mask, padded with one token or another    influence of the padding, at equal shapes
    without a mask, and a sample alone                  changes by other shapes

In doubt the mask stays. On a CPU it always stays: the host never waits there, and gradients of attention would differ
in their last bits.

Without a mask transformers still checks on the device, once per forward, if positions restart within a row, except for
attention implementations without registered masks. sdpa registered under another name is such an implementation. Under
that name transformers creates no masks at all, not even those that a model needs (a sliding window shorter than the
row), so the name is kept only if hidden states change no more than they do between repeated forwards.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from data.loader import MicroBatch, model_inputs, on_device, pack_rows, pad
from data.samples import IGNORE, Sample
from engine.losses.chunked import TeacherHidden
from engine.session.context import rows_of
from engine.session.session import Session
from engine.session.teacher import ModelTeacher, SelfTeacher, Teacher
from model.console import working
from model.moe.experts import ExpertMLPs
from model.ranks import gather_objects, raise_everywhere, say

if TYPE_CHECKING:
    from model.sequence import SharedRows

# Differences are relative norms of differences of hidden states, averaged over tokens. Over 120 random models of
# transformers' families in fp32 and bf16, causal dense models that isolate samples differ by exactly 0 at equal shapes.
# Leaks from another sample change the first tokens of B by 1e-3 to 1.1, with trained weights by 0.04 and more, as these
# attend to other tokens more than random weights do.
FIRST = 16  # tokens after a boundary, where leaks are largest
SEEN = 1e-4
SEEN_BY_EXPERTS = 0.2  # limit for following tokens: rounding may change a token's experts, and so the token by as much
MOVED = 0.05  # limit for another position in the row
TIMES = 4.0  # factor on differences by rounding only


class Asked(NamedTuple):
    """Model to test at the start of a run.

    Attributes:
        name: the option that names the model, and the model's directory.
        model: the model.
        forward: maps a micro-batch to hidden states [rows, tokens, H], with quantization paused; a collective.
        exact: True without experts: then a token's hidden state depends on its context only.
    """

    name: str
    model: PreTrainedModel
    forward: Callable[[MicroBatch], Tensor]
    exact: bool


def models_to_ask(session: Session) -> Iterator[Asked]:
    """Yield the student, and the teacher if it is another model in memory."""
    assert session.head is not None, "packed and padded rows are for training"
    rows = rows_of(session.recipe)
    student = SelfTeacher(session.engine, session.head, session.quantization)
    models: dict[str, Teacher] = {f"model.path: {session.recipe.model.path}": student}
    if isinstance(session.teacher, ModelTeacher):
        models[f"loss.teacher: {session.recipe.loss.teacher}"] = session.teacher
    for name, model in models.items():
        own: Any = model.module if isinstance(model, ModelTeacher) else session.model
        own = own if isinstance(own, PreTrainedModel) else own.module  # model in an engine

        def forward(batch: MicroBatch, model: Teacher = model) -> Tensor:
            given = on_device(batch, session.device)
            found = model.forward({**model_inputs(given), "use_cache": False}, given).teacher
            assert isinstance(found, TeacherHidden)
            return found.hidden if rows is None else rows.whole(found.hidden)

        yield Asked(name, own, forward, not any(isinstance(module, ExpertMLPs) for module in own.modules()))


def vocabulary_of(samples: Sequence[Sample]) -> Tensor:
    """Collect the token ids [n] of the first 1000 samples, each once."""
    return torch.from_numpy(np.unique(np.concatenate([sample.input_ids for sample in samples[:1000]])))


def random_samples(vocabulary: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Draw samples of random tokens with lengths ``sizes``, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return [vocabulary[torch.randint(len(vocabulary), (size,), generator=generator)] for size in sizes]


@torch.no_grad()
def boundary_problem(
    forward: Callable[[MicroBatch], Tensor], vocabulary: Tensor, *, rows: int, length: int, exact: bool
) -> str | None:
    """Describe a leak across boundaries of packed samples, as a clause; None if the model isolates samples.

    Args:
        forward: maps a packed micro-batch to hidden states [rows, length, H]; called six times.
        vocabulary: token ids [n] to draw samples from.
        rows, length: shape of a micro-batch.
        exact: True if the model has no experts.
    """
    size = length // 2
    drawn = random_samples(vocabulary, [tokens for tokens in (size, size, length - size) for _ in range(rows)])
    first, other, second = (drawn[start : start + rows] for start in range(0, 3 * rows, rows))
    behind, behind_other = (forward(_packed(left, second))[:, size:] for left in (first, other))
    before, before_other, again = (
        forward(_packed(second, right))[:, : length - size] for right in (first, other, first)
    )
    alone = forward(_packed(second))
    chance = difference(before, again)  # of kernels with nondeterministic order of sums
    for tokens in (slice(None, FIRST), slice(None)):
        follows = difference(before[:, tokens], before_other[:, tokens])
        if follows > (SEEN + TIMES * chance if exact else SEEN_BY_EXPERTS):
            return f"its tokens see the tokens after them (hidden states move by {follows:.1%}): it is not causal"
        seen = difference(behind[:, tokens], behind_other[:, tokens])
        smallest = SEEN if exact else max(SEEN, torch.finfo(behind.dtype).eps)
        if seen > smallest + TIMES * (follows + chance):
            return f"its samples see the one before them in a row (hidden states move by {seen:.1%})"
    moved = difference(behind, before)
    if moved > MOVED + TIMES * difference(before, alone):
        return f"its samples depend on their place in a row (hidden states move by {moved:.1%})"
    return None


def _packed(*parts: Sequence[Tensor]) -> MicroBatch:
    """Pack the n-th samples of all parts into row n."""
    flat = [Sample(ids.numpy(), np.full(len(ids), IGNORE)) for part in parts for ids in part]
    rows = [[row + index * len(parts[0]) for index in range(len(parts))] for row in range(len(parts[0]))]
    return pack_rows(flat, rows, 0, sum(len(part[0]) for part in parts))


def difference(one: Tensor, another: Tensor) -> float:
    """Compute the mean over tokens of ``|one - another| / |another|``, for hidden states [..., H] with norms over H."""
    return _by_token(one, another).mean().item()


def _by_token(one: Tensor, another: Tensor) -> Tensor:
    one, another = one.float(), another.float()
    return (one - another).norm(dim=-1) / another.norm(dim=-1).clamp(min=1e-30)


SHARED_TOKENS = 512  # tokens of the rows that test if ranks can share rows


@torch.no_grad()
def sharing_problem(asked: Asked, rows: "SharedRows", vocabulary: Tensor, *, longest: int, packing: bool) -> str | None:
    """Describe, as a clause, how hidden states change if ranks share rows; None if only by rounding. A collective.

    Args:
        asked: the model and how it is run.
        rows: switches between shared and whole rows.
        vocabulary: token ids to draw random samples from.
        longest: length of the run's longest rows.
        packing: True if rows have several samples.
    """
    # All ranks have equally many tokens, so that code that fails on shares fails on all ranks.
    length = max(min(longest, SHARED_TOKENS) // rows.ranks, 1) * rows.ranks
    (ids,) = random_samples(vocabulary, [length])
    row = {"input_ids": ids[None], "labels": torch.full((1, length), IGNORE)}
    positions, cut, first = torch.arange(length), length * 3 // 8, rows.share(length, 0)
    # Positions reach those of the longest rows, by which some classes scale RoPE; as there, the first rank's are small.
    # With a mask, the gap between them is no boundary of samples.
    far = torch.cat([positions[first], positions[first.stop :] + longest - length])[None]
    tested = {
        "": row,
        f" of {longest:,} tokens": {**row, "position_ids": far, "attention_mask": torch.ones_like(row["input_ids"])},
    }
    if packing:  # with a boundary inside a share
        packed = torch.cat([positions[:cut], positions[: length - cut]])[None]
        tested[" of packed samples"] = {**row, "position_ids": packed}
    with rows.apart(asked.model):
        whole = {name: asked.forward(batch) for name, batch in tested.items()}
        twice = asked.forward({name: tensor.expand(2, -1) for name, tensor in row.items()})
        alone = asked.forward({name: tensor[:, first] for name, tensor in row.items()})
    # The first share alone has the shapes of shared rows, and in a causal model the same context.
    rounding = _most([_typical(alone, whole[""][:, first], exact=asked.exact)])
    if rounding > MOVED:
        return f"its tokens depend on those after them, or on the row's length (hidden states move by {rounding:.1%})"
    rounding = _most([rounding, _typical(twice[:1], whole[""], exact=asked.exact)])
    limit = max(SEEN, torch.finfo(twice.dtype).eps) + TIMES * rounding
    for name, batch in tested.items():
        try:
            found = asked.forward(batch)
        except Exception as error:  # of any kind: the model's code meets shapes that it was not written for
            why = " ".join(str(error).split())
            return f"its forward fails if ranks share rows{name}: {type(error).__name__}: {why}"
        shares = [rows.share(length, index) for index in range(rows.ranks)]
        parts = [slice(start, start + FIRST) for start in (cut, *(share.start for share in shares))] + shares
        differs = _most(_typical(found[:, part], whole[name][:, part], exact=asked.exact) for part in parts)
        if differs > limit:
            where = _first_apart(asked, rows, batch, limit)
            return (
                f"its hidden states differ by {differs:.1%} if ranks share rows{name}, first in {where}: it mixes "
                "tokens outside of attention, or depends on the row's length"
            )
    return None


def _most(differences: Iterable[float]) -> float:
    """Return the largest difference on any rank; infinite if one is NaN. A collective."""
    return max(gather_objects(max(math.inf if math.isnan(one) else one for one in differences)))


def _first_apart(asked: Asked, rows: "SharedRows", batch: MicroBatch, limit: float) -> str:
    """Name the first module whose output for this rank's tokens differs between whole and shared rows, while its inputs
    agree; a collective."""

    def passed() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
        """Return the inputs and the output of every module that have the shape of hidden states."""
        found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

        def keep(name: str, inputs: Iterable[Any], result: Any) -> None:
            given = (inputs, [result[0] if isinstance(result, tuple) else result])
            own, out = ([one for one in each if isinstance(one, Tensor) and one.dim() == 3] for each in given)
            found.setdefault(name, (own, out))

        hooks = [
            module.register_forward_hook(
                lambda _, args, options, result, name=name: keep(name, [*args, *options.values()], result),
                with_kwargs=True,
            )
            for name, module in asked.model.named_modules()
        ]
        asked.forward(batch)
        for hook in hooks:
            hook.remove()
        return found

    with rows.apart(asked.model):
        whole = passed()
    share = rows.share(batch["input_ids"].shape[1])

    def apart(own: list[Tensor], other: list[Tensor]) -> bool:
        pairs = [(one, another[:, share]) for one, another in zip(own, other, strict=False)]
        ends = [(one[:, :FIRST], another[:, :FIRST]) for one, another in pairs]
        return any(a.shape == b.shape and _typical(a, b, exact=asked.exact) > limit for a, b in pairs + ends)

    found = [
        (index, f"{name} ({type(asked.model.get_submodule(name)).__name__})")
        for index, (name, (inputs, outputs)) in enumerate(passed().items())
        if name in whole and apart(outputs, whole[name][1]) and not apart(inputs, whole[name][0])
    ]
    return min((one[0] for one in gather_objects(found[:1]) if one), default=(0, "an unknown module"))[1]


def _typical(one: Tensor, another: Tensor, *, exact: bool) -> float:
    """Compute the mean relative difference of hidden states. With experts, compute the difference that a quarter of the
    tokens exceed, as rounding may send single tokens to other experts."""
    return difference(one, another) if exact else _by_token(one, another).quantile(0.75).item()


CAUSAL = "sdpa_without_masks"
ROUNDINGS = 4.0  # in eps of the dtype, mean over tokens: kernels with and without a mask sum in other orders


@working("testing the models on rows of this run")
def with_checked_rows(session: Session, samples: Sequence[Sample]) -> Session:
    """Test the models on random rows of the run's shape, with tokens of ``samples``; a collective. Return the session,
    whose ``mask`` is False if padded rows were found to need no attention mask, else True.

    Runs forwards only, with quantization paused: quantization would amplify tiny differences. Raises RankError on every
    rank if packed samples influence each other, or shared rows give other results, in the student or the teacher.
    """
    settings, rows = session.recipe.data, rows_of(session.recipe)
    if rows is not None:
        for asked in models_to_ask(session):
            rows_of_run: dict[str, Any] = {"longest": settings.max_length, "packing": settings.packing}
            found = gather_objects(sharing_problem(asked, rows, vocabulary_of(samples), **rows_of_run))
            problem = next((one for one in found if one is not None), None)
            key = f"parallel.sequence: {rows.ranks}, expected 1"
            raise_everywhere(problem and f"{key}: {asked.name}: {problem}")
    if settings.packing:
        sizes = {"rows": settings.micro_batch_size, "length": settings.max_length}
        for asked in models_to_ask(session):
            problem = boundary_problem(asked.forward, vocabulary_of(samples), **sizes, exact=asked.exact)
            raise_everywhere(problem and f"data.packing: true, expected false: {asked.name}: {problem}")
    elif session.device.type != "cpu":
        return replace(session, mask=needs_mask(session, samples))
    return session


def needs_mask(session: Session, samples: Sequence[Sample]) -> bool:
    """Tell if the run's padded rows need an attention mask; a collective. Runs forwards with quantization paused. A
    trainable router always needs the mask: its auxiliary loss counts tokens by it. If no mask is needed, the models'
    attention may be replaced (:func:`stop_asking`)."""
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
    """Stop transformers from reading sequence boundaries from the device in every forward, unless this changes results
    more than repeating a forward does; a collective.

    Args:
        model: the model; unchanged unless its attention is sdpa.
        forward: maps a micro-batch to the model's hidden states.
        batch: a batch of maximal size.

    Returns:
        True if the model was changed.
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
    """Describe, as a clause, how hidden states of padded rows change without an attention mask; None if only by
    rounding.

    Args:
        forward: maps a padded micro-batch, with ``attention_mask`` or without, to hidden states [rows, length, H];
            called five times.
        vocabulary: token ids [n] to draw samples and padding from.
        rows, length: shape of a micro-batch.
        exact: True if the model has no experts.
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
        return f"its hidden states differ by {moved:.1%}"
    return None


def _padded(vocabulary: Tensor, rows: int, length: int) -> tuple[MicroBatch, MicroBatch, MicroBatch]:
    """Make padded rows of evenly spaced lengths, the same rows with another padding token, and only the first row."""
    sizes = [max(1, length * (row + 1) // rows) for row in range(rows)]
    samples = [Sample(ids.numpy(), torch.full_like(ids, IGNORE).numpy()) for ids in random_samples(vocabulary, sizes)]
    all_of_them = [[row] for row in range(rows)]
    given, other = (pad(samples, all_of_them, int(vocabulary[at])) for at in (0, -1))
    return given, other, pad(samples, [[0]], 0)


def _without(batch: MicroBatch) -> MicroBatch:
    return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
