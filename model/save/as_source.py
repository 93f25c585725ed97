"""Exports in the format of the checkpoint that the model was read from.

If an export has the source's format, and each layer is quantized as in the source, then the source's configuration
describes the export, too, and is kept. So are the things that training does not determine: codes of tensors outside of
the model, the names of scales of keys and values, the shape of a single scale (``[]`` or ``[1]``), the dtype of scales
that training has not changed, and several scales of inputs where the model has one. Tensors without codes have the
source's dtype, too; if the model's dtype has rounded one on loading, its elements that training has not changed are
written with the source's values.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from model.checkpoint.names import Names, module_name_on_disk, own_tensors
from model.checkpoint.safetensors import CheckpointError, DiskTensor
from model.quantized.checkpoint import SourceCheckpoint, parts_of
from model.quantized.quantization_config import source_layout
from model.quantized.scales import read_small_scales
from model.ranks import errors_on_all_ranks, reduce_over_ranks
from model.scales.grouping import INPUT_GLOBAL_SCALE, INPUT_SCALE, INVERSE, WEIGHT_SCALE, arrange, cache_keys
from model.zero import local_data, local_range
from quant import Quantization, ScaleGroup, Scheme
from quant.formats.compressed_tensors import Shapes
from quant.formats.layouts import Layout
from quant.linear import linears_of
from quant.rotation import rotated_layers

_COUNTED = 2**24  # elements compared at a time


def is_as_source(
    model: PreTrainedModel,
    quantization: Quantization | None,
    checkpoint: SourceCheckpoint,
    directory: Path,
    layout: Layout,
) -> bool:
    """Return True if an export of ``model`` in ``layout`` will have the format of the quantized ``checkpoint`` in
    ``directory``, and the same schemes in every layer and in the KV cache; False if ``model`` or
    ``checkpoint`` is not quantized, or if layers of ``model`` are rotated. Schemes may differ in narrow or full
    range."""
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


def dtypes_on_disk(checkpoint: SourceCheckpoint) -> dict[str, torch.dtype]:
    """Return the dtypes of the source's floating-point tensors without codes, by key."""
    plain = ((key, one.dtype) for key, one in checkpoint.tensors.items() if isinstance(one, DiskTensor))
    return {key: dtype for key, dtype in plain if dtype is not None and dtype.is_floating_point}


def has_dtypes_of(checkpoint: SourceCheckpoint, shapes: Shapes) -> bool:
    """Return True if every tensor of an export (``shapes``: dtype and shape by key) whose key the source has, too, has
    the source's dtype."""
    stored = [one for one in (*checkpoint.tensors.values(), *checkpoint.beside.values()) if isinstance(one, DiskTensor)]
    return all(one.key not in shapes or shapes[one.key][0] == one.dtype for one in stored)


def stored_dtypes(
    model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint
) -> dict[str, torch.dtype]:
    """Return, by key, the source's dtypes that an export can keep because they round no value of the model: for tensors
    without codes that the source stores in another dtype than the model, and for scales. Learned scales are left out
    once a step has changed them. A collective."""
    found: list[tuple[list[str], torch.dtype]] = []
    changed: list[torch.Tensor] = []
    for one, other, count in _in_other_dtypes(model, checkpoint):
        changed.append(count)
        found.append(([one], other))
    for group in (*quantization.weight_groups, *quantization.input_groups):
        tensors = [checkpoint.beside[key] for key in _keys(model, quantization, group) if key in checkpoint.beside]
        dtypes = {one.dtype for one in tensors}
        own = {"float32": torch.float32, "model": model.dtype}.get(group.spec.scale_format)
        if own is None or len(dtypes) != 1:
            continue
        dtype = tensors[0].dtype
        assert dtype is not None
        scale, theta = local_data(group.s0), group.theta
        count = (scale.to(own).to(dtype).float() != scale).sum()
        changed.append(count.cpu() if theta is None else (count + local_data(theta).count_nonzero()).cpu())
        found.append(([one.key for one in tensors], dtype))
    if not found:
        return {}
    counts = reduce_over_ranks(torch.stack(changed)).tolist()
    return {key: dtype for (keys, dtype), count in zip(found, counts, strict=True) if not count for key in keys}


def _in_other_dtypes(
    model: PreTrainedModel, checkpoint: SourceCheckpoint
) -> Iterator[tuple[str, torch.dtype, torch.Tensor]]:
    """Yield the keys that the source stores in another dtype than the model, this dtype, and how many of this rank's
    elements the dtype would round."""
    names, own = Names(model, {key: one.shape for key, one in checkpoint.tensors.items()}), own_tensors(model)
    dtypes = dtypes_on_disk(checkpoint)
    for key in sorted(dtypes, key=dot_natural_key):  # some of transformers' rules depend on this order
        layout, dtype = names.layout(key), dtypes[key]
        pieces = [piece for piece in layout.pieces if own[piece.name].dtype != dtype] if layout is not None else []
        count = torch.zeros((), dtype=torch.int64)
        for piece in pieces:
            tensor = own[piece.name]
            if torch.promote_types(dtype, tensor.dtype) != dtype:
                first, _ = local_range(tensor)
                begin, end = (max(0, at - first) for at in (piece.start, piece.start + piece.numel))
                for part in local_data(tensor)[begin:end].split(_COUNTED):
                    count += (part.to(dtype).to(part.dtype) != part).sum().cpu()
        if pieces:
            yield key, dtype, count


def several_input_scales(
    model: PreTrainedModel, quantization: Quantization, checkpoint: SourceCheckpoint
) -> dict[str, DiskTensor]:
    """Return, by key, the source's input scales to write in place of the model's: of layers that have different ones in
    the source and share one in the model, if this one is still as computed from them. A collective. Raises RankError
    if a file cannot be read."""
    with errors_on_all_ranks(OSError, CheckpointError):
        stored = read_small_scales(model, quantization, checkpoint, {})
    found, changed = [], []
    for scale in arrange(model, quantization, stored).inputs:
        of_files = scale.stored
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
