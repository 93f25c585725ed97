"""The weight of a layer where it lies, with the adapter that is merged into it."""

import torch
from torch import Tensor

from model.zero import full_shape, local_data, local_range, whole_values
from quant import QuantLayer
from quant.adapter import merge


def local_weight(layer: QuantLayer) -> tuple[int, Tensor]:
    """Where this rank's range of a layer's weight begins, and its elements as the forward quantises them, flat.

    A collective where the layer has an adapter that is merged, and then a copy; else the memory of the weight itself.
    """
    start, stop = local_range(layer.weight)
    merges = layer.adapter is not None and layer.adapter.merges
    return start, _merged(layer, start, stop) if merges else local_data(layer.weight)


@torch.no_grad()
def _merged(layer: QuantLayer, start: int, stop: int) -> Tensor:
    """The elements ``[start, stop)`` of the weight with its adapter, in the bits that the whole sum has."""
    adapter, own = layer.adapter, local_data(layer.weight)
    assert adapter is not None
    pair = (adapter.lora_a, adapter.lora_b)
    values = whole_values(pair)  # on every rank, also one that holds nothing of the weight
    lora_a, lora_b = (
        value.view(full_shape(one)).to(own.device, one.dtype) for value, one in zip(values, pair, strict=True)
    )
    columns, out = layer.in_features, layer.out_features
    first, end = start // columns, -(-stop // columns)  # rows, of all experts behind one another
    rows = own.new_zeros(max(0, end - first) * columns)
    rows[start - first * columns : stop - first * columns] = own
    by_expert = zip(lora_a.view(-1, *lora_a.shape[-2:]), lora_b.view(-1, *lora_b.shape[-2:]), strict=True)
    parts = [rows[:0]]
    for expert, (a, b) in enumerate(by_expert):
        begin, stop_row = max(first, expert * out), min(end, (expert + 1) * out)
        if begin < stop_row:
            part = rows[(begin - first) * columns : (stop_row - first) * columns].view(-1, columns)
            parts.append(merge(part, a, b[begin - expert * out : stop_row - expert * out], adapter.scaling).view(-1))
    return torch.cat(parts)[start - first * columns : stop - first * columns]
