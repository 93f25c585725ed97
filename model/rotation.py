"""Weights turned in place for layers that turn their inputs while the model runs (:mod:`quant.hadamard`)."""

import torch
from transformers import PreTrainedModel

from model.ranks import is_main
from model.zero import forget_secondary_copies, gathered
from quant import Quantization
from quant.hadamard import rotate
from quant.rotation import rotated_layers

CHUNK = 2**25  # values in fp64 at a time: 256 MB, and a copy or two of them


@torch.no_grad()
def rotate_weights(model: PreTrainedModel, quantization: Quantization) -> int:
    """Turn the weights of all layers that turn their inputs, so that the model stays the same function; a collective.

    Each value is computed in fp64 and rounded once to the weight's dtype. One weight is whole at a time. Before
    ``deepspeed.initialize``, after the weights are loaded and before scales are measured from them.

    Returns:
        How many layers there are.
    """
    turned = rotated_layers(quantization)
    for name, block in turned.items():
        layer = quantization.layers[name]
        with gathered([layer.weight], modifier_rank=0):
            if is_main():
                for rows in layer.weight.split(max(1, CHUNK // layer.in_features)):
                    rows.copy_(rotate(rows.double(), block))
    if turned:
        forget_secondary_copies(model)
    return len(turned)
