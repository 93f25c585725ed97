"""Checks around the optimizer step: in every step, ranks agree and there is a loss; in the first step, all quantized
layers run and all trained parameters get gradients."""

import json
import re
import zlib
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import nn

from data.loader import without_wait
from engine.losses.objective import Objective
from engine.state import LoopState
from model.ranks import RankError, gather_objects, listed, raise_everywhere, reduce_over_ranks, world_size
from quant import Quantization
from quant.rules import exempt_line, name_patterns


def sum_where_ranks_agree(state: LoopState, counts: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Sum both ``counts`` over all ranks, and check that events have set the same values on each rank; one all-reduce.

    A checksum of the settings is reduced with the counts. It is the same on every rank if and only if the sum of its
    squares, times the number of ranks, is the square of its sum. Ranks that have stopped also call this, with counts of
    0, so that ranks that have not stopped do not wait.

    Raises RankError on every rank if a setting differs between ranks; the message has its values on two ranks.
    """
    # Of 24 bits, so that a sum of squares over 2^15 ranks is exact in 64.
    checksum = zlib.crc32("\n".join(_settings(state).values()).encode()) >> 8
    numbers = without_wait(torch.tensor([*counts, checksum, checksum**2]), state.session.device)
    valid, tokens, checksums, squares = reduce_over_ranks(numbers).tolist()
    if squares * world_size() != checksums**2:
        raise RankError(_difference(state))
    return valid, tokens


def _settings(state: LoopState) -> dict[str, str]:
    """Collect the settings that schedule events may change and that every rank must share, as text by name."""
    overrides, quant = state.session.overrides, state.quant
    values: dict[str, Any] = {
        "loss weights": overrides.loss_weights,
        "peak rates": overrides.peak_rates,
        "frozen scales": overrides.frozen,
        "fake quant": quant.quantization.fake_quant_state(),
        "observing": quant.quantization.observing,
        "stale scales": quant.stale,
        "steps with fake quant": quant.scale_steps,
        "conditions that were met": state.stateful["events"].state_dict(),
        "losses of the script": [(loss.name, loss.weight) for loss in state.token_losses],
        "loss": vars(state.recipe.loss),
        "optim": vars(state.recipe.optim),
        "stopped": state.stopped,
    }
    plain = lambda value: sorted(value) if isinstance(value, set | frozenset) else repr(value)  # noqa: E731
    return {name: json.dumps(value, sort_keys=True, default=plain) for name, value in values.items()}


def _difference(state: LoopState) -> str:
    """Describe the first setting that differs between ranks, the same text on every rank; a collective."""
    found = gather_objects(_settings(state))
    first = found[0]
    rank, name = next((rank, name) for rank, own in enumerate(found) for name in own if own[name] != first[name])
    return (
        f"step {state.step}: the ranks differ in what events have set: {name} is {first[name]} on rank 0 and "
        f"{found[rank][name]} on rank {rank}. Conditions and actions must do the same on every rank: give them what is "
        "the same there, as losses are"
    )


def check_weights(state: LoopState, objective: Objective) -> None:
    """Check that lm or kd has a weight above 0, and that a teacher is loaded if kd has one. Raises RankError on every
    rank if not, which happens if weights that an event set before a resume do not fit the new recipe."""
    if objective.kd_weight > 0 and state.session.teacher is None:
        raise RankError(
            f"step {state.step}: the loss kd has the weight {objective.kd_weight:g}, which an event has set before the "
            "checkpoint, but no teacher is loaded: name one in loss.teacher and set loss.kd_weight, or set kd to 0 and "
            f"lm above 0 by an event at step {state.step}"
        )
    if objective.lm_weight == objective.kd_weight == 0:
        raise RankError(
            f"step {state.step}: the losses lm and kd have the weight 0, one in the recipe, the other by an event "
            f"before the checkpoint: set one of them above 0 by an event at step {state.step}"
        )


def check_layers_ran(quantization: Quantization) -> None:
    """Check after the first forward that the model called every quantized layer; a collective. Raises RankError on
    every rank if a layer was not called: code that reads its weight directly would train it without fake quant."""
    unused = [name for name, layer in quantization.layers.items() if not layer.trained]
    raise_everywhere(
        f"{listed(unused, 3)}: the model's forward did not call them, so that training would not quantize what the "
        f"export does; set {exempt_line(unused)}"
        if unused
        else None
    )


def watch_gradients(model: nn.Module) -> Callable[[], str | None]:
    """Record which trained Parameters receive a gradient.

    Returns:
        A function, a collective, that ends the recording. It returns a description of the trained Parameters that
        received no gradient on any rank (weight decay alone would move them), or None if all received one.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    without = dict.fromkeys(trained)
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: without.pop(name, None))
        for name, parameter in trained.items()
    ]

    def untouched() -> str | None:
        for hook in hooks:
            hook.remove()
        elsewhere = gather_objects(list(without))
        names = [name for name in without if all(name in others for others in elsewhere)]
        return _no_gradient(names, trained.keys() - set(names)) if names else None

    return untouched


def _no_gradient(names: Sequence[str], others: Set[str]) -> str:
    """Describe trained Parameters (``names``) that received no gradient, while ``others`` did."""
    patterns = name_patterns(names, others)
    quoted = [f"'{one.removeprefix('re:') if one.startswith('re:') else re.escape(one)}'" for one in patterns]
    return (
        f"{listed(names, 3)}: the loss of the first step did not depend on them (its rows may be too short to "
        "reach them), so that weight decay alone would move them; to leave them as they are, set "
        f"learnable.freeze: [{', '.join(quoted)}]"
    )
