"""Whether the parameters of a model are numbers: those with NaN or infinities are found where they lie, and named.

A forward shows few of them. Quantised, an infinity is the largest value of its grid, and NaN has a code on one grid
alone; and nobody looks up each row of an embedding. So a model is looked at when it has been read, and before anything
of it is written. That is a collective, in which each rank looks at what it holds; no parameter is gathered. A reduction
of maxima may drop NaN, and Inf survives it.

Frozen scales are left out, which are NaN until somebody fills them and are checked wherever they are read or written;
and so are codes that a parameter holds in place of a weight.
"""

import torch
import torch.distributed as dist
from torch import nn

from model.ranks import RankError, listed, reduce_over_ranks
from model.zero import local_data
from quant import SCALE_PARAMETERS
from quant.held import held_codes
from quant.kernels import amax


def check_finite(model: nn.Module, said: str) -> None:
    """Refuse such a model by a RankError, on every rank, that begins with ``said`` and names parameters."""
    named = {
        name: own
        for name, own in model.named_parameters()
        if held_codes(own) is None and (own.requires_grad or not name.endswith(SCALE_PARAMETERS))
    }
    largest = torch.cat([amax(local_data(own)) for own in named.values()]).nan_to_num(torch.inf, torch.inf)
    finite = reduce_over_ranks(largest, dist.ReduceOp.MAX).isfinite().tolist()
    if broken := [name for name, good in zip(named, finite, strict=True) if not good]:
        raise RankError(f"{said}: NaN or Inf in {listed(broken, 5)}")
