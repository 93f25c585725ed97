"""Checks and file metadata of a checkpoint for ExecuTorch."""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from model.checkpoint.names import module_name_on_disk
from model.save.plan import Item
from model.save.shard_writer import ShardWriter, safetensors_head
from model.save.write import Writers
from quant import Quantization, QuantLayer
from quant.formats.torchao import PLAIN, TENSOR_NAMES, check_intx_of, intx_metadata
from quant.linear import QuantEmbedding

# Model types that transformers loads with torchao's tensors, that torch.export traces and that XNNPACK computes:
# tests/distributed/engine/test_executorch.py lowers each with ExecuTorch 1.5.1.
EXECUTORCH_MODELS = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2")


def check_executorch(model: PreTrainedModel, quantization: Quantization) -> None:
    """Reject models that transformers would not load for ExecuTorch, or that ExecuTorch would not lower.

    Raises:
        ValueError: the model has an untested type, a Linear whose inputs are not quantized, or a quantized embedding
            tied to the head.
    """
    kind = model.config.model_type
    if kind not in EXECUTORCH_MODELS:
        raise ValueError(
            f"layout 'executorch' is known to be lowered for {', '.join(EXECUTORCH_MODELS)}, and not for {kind}: set "
            "export.format to dequantized and quantize it with torchao, which chooses codes of its own"
        )
    for name, layer in quantization.layers.items():
        embedding = isinstance(layer, QuantEmbedding)
        check_intx_of(name, layer.scheme, embedding=embedding)
        if embedding and model.get_output_embeddings().weight is layer.weight:
            raise ValueError(
                f"{name}: the model's head has the same weight, which ExecuTorch has no operator for with codes of an "
                "embedding: set quant.embedding to null"
            )
        if (on_disk := module_name_on_disk(model, name)) != name:
            raise ValueError(f"{name}: layout 'executorch' has transformers' names, and this layer's is {on_disk}")


def torchao_files(shards: Sequence[Sequence[Item]]) -> Writers:
    """Create the writer of files. The metadata of each file names all tensors of the model, as readers merge the
    metadata and keep only one list of names."""
    items = list(chain(*shards))
    kinds: dict[str, str] = {}
    for item in items:
        for name, part in item.linears.items():
            assert isinstance(item.module, QuantLayer)
            kinds[f"{name}.weight"] = intx_metadata(item.module.scheme, part.in_features, item.module.weight.dtype)
            kinds |= {key: PLAIN for key in [f"{name}.bias"] if key in item.shapes}
        kinds |= dict.fromkeys(() if item.linears else item.shapes, PLAIN)
    metadata = {**kinds, TENSOR_NAMES: json.dumps(list(kinds))}

    def writer(path: Path, items: list[Item]) -> ShardWriter:
        shapes = {key: shape for item in items for key, shape in item.shapes.items()}
        return ShardWriter(path, shapes, safetensors_head(shapes, metadata))

    return writer
