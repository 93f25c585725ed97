"""Local weights with merged adapters, and initialization of adapters from the quantization error."""

import torch
from torch import Tensor

from model.ranks import errors_on_all_ranks, is_main
from model.zero import full_shape, gathered, local_data, local_range, whole_values
from quant import Quantization, QuantLayer
from quant.lora import merge

LOST = 0.1  # relative to an adapter's norm: more than rounding loses, less than over- and underflow lose


def local_weight(layer: QuantLayer) -> tuple[int, Tensor]:
    """Return the start of this rank's range of a layer's weight, and its elements as the forward quantizes them, flat.

    With a merged adapter, a collective that returns a copy; else the memory of the weight itself.
    """
    assert layer.held is None, "a rule of the recipe"
    start, stop = local_range(layer.weight)
    merges = layer.adapter is not None and layer.adapter.merges
    return start, _merged(layer, start, stop) if merges else local_data(layer.weight)


@torch.no_grad()
def _merged(layer: QuantLayer, start: int, stop: int) -> Tensor:
    """Merge the adapter into elements ``[start, stop)`` of the weight, bit-equal to merging the whole weight."""
    adapter, own = layer.adapter, local_data(layer.weight)
    assert adapter is not None
    pair = (adapter.lora_a, adapter.lora_b)
    values = whole_values(pair)  # on every rank, even without any part of the weight
    lora_a, lora_b = (
        value.view(full_shape(one)).to(own.device, one.dtype) for value, one in zip(values, pair, strict=True)
    )
    columns, out = layer.in_features, layer.out_features
    first, end = start // columns, -(-stop // columns)  # rows, of all experts concatenated
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


@torch.no_grad()
def start_from_error(quantization: Quantization) -> None:
    """Initialize every unmerged adapter from the error of quantization: ``scaling * lora_b @ lora_a`` becomes the best
    approximation of its rank to ``W - Q(W)`` (the first step of LoftQ, Li et al. 2023, arXiv:2310.08659; LoRC, Yao et
    al. 2023, arXiv:2303.08302). Scales must be filled. A collective, in which one layer is gathered at a time and rank
    0 computes.

    Raises:
        RankError: the adapter's dtype cannot represent the factors, because ``adapter.alpha`` is too small or large.
    """
    for name, layer in quantization.layers.items():
        if layer.adapter is None or layer.adapter.merges:
            continue
        pair = (layer.adapter.lora_a, layer.adapter.lora_b)
        others = [own for own in layer.parameters(recurse=False) if all(own is not one for one in pair)]
        with gathered(others), gathered(pair, modifier_rank=0), errors_on_all_ranks(ValueError):
            if is_main():
                error = (layer.weight - layer.quantized_weight()).float() / layer.adapter.scaling
                if not (error.isfinite().all() and _filled(pair, _factors(error, pair[0].shape[0]))):
                    raise ValueError(
                        f"adapter.init error: {name}: {pair[0].dtype} cannot hold an adapter whose product times "
                        f"{layer.adapter.scaling:g} is the error of quantization; expected an adapter.alpha nearer to "
                        "adapter.rank"
                    )


def _filled(pair: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> bool:
    """Copy values into an adapter, and return True if its dtype holds them up to rounding."""
    for own, value in zip(pair, values, strict=True):
        own.copy_(value)
    norms = [((own.float() - value).norm(), value.norm()) for own, value in zip(pair, values, strict=True)]
    return all(bool(away <= LOST * size) for away, size in norms)


def _factors(matrix: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors ``a [rank, in]`` and ``b [out, rank]`` of equal sizes, with ``b @ a`` close to ``matrix [out, in]``."""
    # Same seed in every run; extra directions and iterations, because errors do not have a few dominant ones.
    with torch.random.fork_rng([matrix.device] if matrix.is_cuda else []):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix, q=min(rank + 16, *matrix.shape), niter=8)
    root = s[:rank].sqrt()
    return (v[:, :rank] * root).t(), u[:, :rank] * root
