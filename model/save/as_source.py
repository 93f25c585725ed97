"""Exports in the format of the checkpoint that the model was read from.

If an export has the source's format, and each layer is quantized as in the source, then the source's configuration
describes the export, too, and is kept. So are the things that training does not determine: codes of tensors outside of
the model, the names of scales of keys and values, and the shape of a single scale (``[]`` or ``[1]``).
"""

from pathlib import Path

from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.quantized.checkpoint import SourceCheckpoint, parts_of
from model.quantized.quantization_config import source_layout
from quant import Quantization, Scheme
from quant.formats.layouts import Layout
from quant.linear import linears_of
from quant.rotation import rotated_layers


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
