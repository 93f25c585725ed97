"""Stored scales of a decoder layer's inputs, for as long as it is tuned: of the largest magnitudes in some samples.

The scales that training starts with are measured in the whole model afterwards, as the recipe says. Those that are
there already (``quant.initial_input_scale``) are not measured afterwards, and not here.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

from model.first_codes.samples import Samples
from model.ranks import raise_everywhere, reduce_over_ranks
from model.scales import input_scales, write_scales
from model.zero import gathered
from quant import Quantization
from quant.scale import first_input_scale


def measure_inputs(quantization: Quantization, block: nn.Module, name: str, samples: Samples) -> None:
    """Write scales that are not there yet, of inputs that reach the Linears of a decoder layer as it is now; a
    collective.

    Args:
        quantization: watches nothing.
        block, name: the decoder layer.
        samples: with the hidden states before it.

    Raises:
        RankError: on every rank: inputs with NaN or Inf.
    """
    there = input_scales(quantization)
    groups = [
        group
        for group in quantization.input_groups
        if math.isnan(there[group.owner])
        and any(one.startswith(f"{name}.") and one in quantization.layers for one in group.members)
    ]
    if not groups:
        return
    quantization.observe(True)
    with gathered(block.parameters()):
        for index, hidden in enumerate(samples.hidden):
            samples.run(block, name, index, hidden)
    seen = torch.stack([group.observer.absmax.cpu() for group in groups if group.observer is not None])
    quantization.observe(False)
    largest = reduce_over_ranks(seen.nan_to_num(nan=torch.inf), dist.ReduceOp.MAX)
    bad = [group.owner for group, most in zip(groups, largest.tolist(), strict=True) if most == torch.inf]
    raise_everywhere(f"inputs with NaN or Inf: {', '.join(bad)}" if bad else None)
    largest = largest.clamp(min=1e-6)  # of an expert that no token reached
    scales = {
        group.owner: first_input_scale(most, group.spec) for group, most in zip(groups, largest.split(1), strict=True)
    }
    write_scales(quantization.input_groups, scales)
