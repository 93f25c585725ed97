"""Rotate weights in place for layers that rotate their inputs in the forward (:mod:`quant.hadamard`)."""

import torch
from transformers import PreTrainedModel

from model.ranks import is_main
from model.zero import forget_secondary_copies, gathered
from quant import Quantization
from quant.hadamard import rotate
from quant.rotation import rotated_layers

CHUNK = 2**25  # fp64 values at a time: 256 MB, and one or two copies


@torch.no_grad()
def rotate_weights(model: PreTrainedModel, quantization: Quantization) -> int:
    """Rotate the weights of all layers that rotate their inputs, which preserves the function; a collective.

    Each value is computed in fp64 and rounded once to the weight's dtype. One weight is gathered at a time. Call it
    before ``deepspeed.initialize``, after the weights are loaded and before scales are measured from them.

    Returns:
        Number of these layers.
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
