"""Evaluation while training: losses on held-out samples, with fake quant as the model would be served now."""

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from data.loader import MicroBatch, valid_tokens
from engine.state import LoopState
from model.ranks import reduce_over_ranks


@torch.no_grad()
def evaluate(state: LoopState, losses: Callable[[MicroBatch], Tensor]) -> dict[str, float]:
    """Means over the valid tokens of all held-out samples, of all ranks; a collective.

    A run that never quantises is evaluated as it is; in every other one all layers are fake-quantised, with scales
    measured again where they fit an earlier model. Nothing that trains is changed.

    Args:
        state: of the run; it has held-out samples.
        losses: a micro-batch to the sums [lm, kd, ...] over its valid tokens.

    Returns:
        ``eval/lm`` and ``eval/perplexity``, and with a teacher ``eval/kd`` and ``eval/total``.
    """
    assert state.held_out is not None
    session, levers = state.session, state.session.levers
    never = state.recipe.quant.fake_quant_start == -1 and not state.quant.enabled
    calibration = itertools.islice(state.held_out, max(1, state.recipe.quant.calibration_batches))
    session.engine.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=session.device)
    with nullcontext() if never else state.quant.as_served(calibration):
        for batch in state.held_out:
            lm, kd, *_ = losses({name: tensor.to(session.device) for name, tensor in batch.items()})
            sums += torch.stack(
                [lm.double(), kd.double(), torch.tensor(float(valid_tokens([batch])), device=lm.device)]
            )
    session.engine.train()
    lm, kd, valid = reduce_over_ranks(sums).tolist()
    found = {"eval/lm": lm / valid, "eval/perplexity": math.exp(min(lm / valid, 700.0))}
    if levers.kd_weight > 0:
        found |= {"eval/kd": kd / valid, "eval/total": (levers.lm_weight * lm + levers.kd_weight * kd) / valid}
    return found
