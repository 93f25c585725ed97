"""Exports in the format of the checkpoint that the model was read from.

If an export has the source's format, and each layer is quantized as in the source, then the source's configuration
describes the export, too, and is kept. So are the things that training does not determine: codes of tensors outside of
the model, the names of scales of keys and values, the shape of a single scale (``[]`` or ``[1]``), the dtype of routing
biases and of scales that training has not changed, and several scales of inputs where the model has one.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from model.checkpoint.names import Names, module_name_on_disk
from model.checkpoint.safetensors import CheckpointError, DiskTensor
from model.quantized.checkpoint import SourceCheckpoint, parts_of
from model.quantized.quantization_config import source_layout
from model.quantized.scales import read_small_scales
from model.ranks import errors_on_all_ranks, reduce_over_ranks
from model.scales.grouping import INPUT_GLOBAL_SCALE, INPUT_SCALE, INVERSE, WEIGHT_SCALE, arrange, cache_keys
from model.zero import local_data
from quant import Quantization, ScaleGroup, Scheme
from quant.formats.layouts import Layout
from quant.linear import linears_of
from quant.rotation import rotated_layers

_SHORT = {torch.bfloat16, torch.float16}


def is_as_source(
    model: PreTrainedModel,
    quantization: Quantization | None,
    checkpoint: SourceCheckpoint,
    directory: Path,
    layout: Layout,
) -> bool:
    """Return True if an export of ``model`` in ``layout`` is quantized in every layer as ``checkpoint``, which was read
    from ``directory``, and in its format."""
    coded = checkpoint.coded
    if quantization is None or not coded or rotated_layers(quantization):
        return False
    kv_cache = next((cache.spec for cache in quantization.caches.values()), None)
    if source_layout(directory) != layout or kv_cache != checkpoint.kv_cache:
        return False
    own = {part.name: layer.scheme for name, layer in quantization.layers.items() for part in linears_of(name, layer)}

    def formats(scheme: Scheme | None) -> object:
        return scheme and (scheme.weights.wide, scheme.activations)

    for part in parts_of(model):
        source = coded.get(module_name_on_disk(model, part.name))
        if formats(own.get(part.name)) != formats(None if source is None else source.scheme):
            return False
    return True


def stored_dtypes(
    model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint
) -> dict[str, torch.dtype]:
    """Find the fp32 scales and buffers (routing biases) that the source stores in a shorter dtype, and that have values
    of this dtype, by key. A collective. Scales that learn have such values only until the first step."""
    found: list[tuple[list[str], torch.dtype]] = []
    changed: list[torch.Tensor] = []
    names = Names(model)
    for name, buffer in model.named_buffers():
        one = checkpoint.tensors.get(names.key(name))
        if one is not None and buffer.dtype == torch.float32 and one.dtype in _SHORT:
            changed.append((buffer.to(one.dtype).float() != buffer).sum().cpu())
            found.append(([one.key], one.dtype))
    for group in (*quantization.weight_groups, *quantization.input_groups):
        tensors = [checkpoint.beside[key] for key in _keys(model, quantization, group) if key in checkpoint.beside]
        dtypes = {one.dtype for one in tensors}
        if group.spec.scale_format != "float32" or len(dtypes) != 1 or not dtypes <= _SHORT:
            continue
        dtype = tensors[0].dtype
        assert dtype is not None
        scale, theta = local_data(group.s0), group.theta
        count = (scale.to(dtype).float() != scale).sum()
        changed.append(count.cpu() if theta is None else (count + local_data(theta).count_nonzero()).cpu())
        found.append(([one.key for one in tensors], dtype))
    if not found:
        return {}
    counts = reduce_over_ranks(torch.stack(changed)).tolist()
    return {key: dtype for (keys, dtype), count in zip(found, counts, strict=True) if not count for key in keys}


def several_input_scales(
    model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint
) -> dict[str, DiskTensor]:
    """Find the scales of inputs in the source, by key, of layers that share one in the model and have several there, if
    the model still has the one that was taken of them. A collective."""
    with errors_on_all_ranks(OSError, CheckpointError):
        stored = read_small_scales(model, quantization, checkpoint, {})
    found, changed = [], []
    for scale in arrange(model, quantization, stored).inputs:
        of_files = [one for of_layer in scale.layers for one in of_layer]
        if scale.group.owner in quantization.caches or len({one.value.item() for one in of_files}) < 2:
            continue
        local, theta = local_data(scale.group.s0).cpu().view(-1), scale.group.theta
        count = (local != scale.value().view(-1)[: local.numel()]).sum()
        changed.append(count if theta is None else count + local_data(theta).count_nonzero().cpu())
        names = [one.key.rpartition(".")[0] for one in of_files]
        found.append([name + end for name in names for end in (INPUT_SCALE, INPUT_GLOBAL_SCALE)])
    if not found:
        return {}
    counts, beside = reduce_over_ranks(torch.stack(changed)).tolist(), checkpoint.beside
    same = [key for keys, count in zip(found, counts, strict=True) if not count for key in keys]
    return {key: beside[key] for key in same if key in beside}


def _keys(model: PreTrainedModel, quantization: Quantization, group: ScaleGroup) -> Iterator[str]:
    """Yield the keys that the scales of a group may have on disk."""
    for name in group.members:
        if name in quantization.caches:
            yield from cache_keys(model, name)
            continue
        for part in linears_of(name, quantization.layers[name]):
            disk = module_name_on_disk(model, part.name)
            yield from (disk + end for end in ([INPUT_SCALE] if group.observer else [WEIGHT_SCALE, INVERSE]))
