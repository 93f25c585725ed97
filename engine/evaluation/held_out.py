"""Evaluation while training: losses on held-out samples, with fake quant as the model would be served now."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from data.loader import MicroBatch, valid_tokens
from engine.state import LoopState
from model.ranks import reduce_over_ranks
from model.zero import forward_only


@torch.no_grad()
def evaluate(state: LoopState, losses: Callable[[MicroBatch], Mapping[str, Tensor]]) -> dict[str, float]:
    """Means over the valid tokens of all held-out samples, of all ranks; a collective.

    A run that never quantises is evaluated as it is; in every other one all layers are fake-quantised, with scales
    measured again where they fit an earlier model. Nothing that trains is changed.

    Args:
        state: of the run; it has held-out samples.
        losses: a micro-batch on the device to sums over its valid tokens, the same names on every rank.

    Returns:
        The means, by the names of the sums.
    """
    assert state.held_out is not None
    session = state.session
    never = state.recipe.never_quantises() and not state.quant.enabled
    # Of training: held-out batches are ordered by length, and short samples would give small scales.
    calibration = state.loader.first(max(1, state.recipe.quant.calibration_batches))
    session.engine.eval()
    sums: dict[str, Tensor] = {}
    valid = 0
    with nullcontext() if never else state.quant.as_served(calibration):
        for batch in state.held_out:
            with forward_only(session.engine):
                found = losses({name: tensor.to(session.device) for name, tensor in batch.items()})
            sums = {name: sums.get(name, 0) + value.double() for name, value in found.items()}
            valid += valid_tokens([batch])
    session.engine.train()
    own = torch.stack([*sums.values(), torch.tensor(float(valid), dtype=torch.float64, device=session.device)])
    *whole, tokens = reduce_over_ranks(own).tolist()
    return {name: value / tokens for name, value in zip(sums, whole, strict=True)}
