"""Check an export's files for readers other than transformers.

The rules follow from the loading code of vLLM and SGLang. It creates parameters of fixed dtypes and shapes and copies
the file's tensors into them, fuses q, k and v, or gate and up, into one layer with one scale per tensor (the largest of
several), and treats MoE routers as Linears.
"""

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.names import Names, module_name_on_disk, own_tensors
from model.checkpoint.safetensors import Checkpoint, Reader, read_headers, read_tensor
from model.quantized.quantization_config import read_quantization_config
from model.ranks import listed
from model.save import is_router
from model.scales import cache_keys
from quant import Quantization, QuantLayer, QuantLinear
from quant.formats.compressed_tensors import packed_shapes, unpack_weight, weight_codes
from quant.rotation import KEY, stored_matrix
from tools.compressed import is_ignored, quantized_keys

STORED = (torch.bfloat16, torch.float16, torch.float32)


def problems_of_files(directory: Path, model: PreTrainedModel, quantization: Quantization) -> list[str]:
    """Check the files of a checkpoint; return one sentence for each problem.

    It checks dtypes and shapes of all codes and scales, that layers which serving fuses have equal scales, that this
    project's forward computes the codes in the files, and that MoE routers are ignored. ``model`` and ``quantization``
    are the result of ``load_compressed(directory)``, in fp32.
    """
    checkpoint = read_headers(directory)
    model_dtype = dtype_on_disk(directory, model)
    problems: list[str] = []
    kinds = ("weight_scale", "weight_global_scale", "input_scale", "input_global_scale")
    stored: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
    with Reader() as reader:
        for name, layer in quantization.layers.items():
            keys = quantized_keys(model, name, layer)
            problems += _wrong_tensors(checkpoint, layer, keys, model_dtype)
            tensors = {suffix: read_tensor(reader, checkpoint.tensors[key]) for suffix, key in keys.items()}
            for suffix in stored.keys() & tensors.keys():
                stored[suffix][name] = tensors[suffix].float()
            codes = weight_codes(layer.weight, layer.weight_scale(), layer.scheme.weights, layer.weight_zero)
            if not torch.equal(codes.view(torch.int8), unpack_weight(tensors, layer.scheme).view(torch.int8)):
                problems.append(f"{name}: our forward quantizes the weight to other codes than those on disk")
            key = f"{module_name_on_disk(model, name)}.{KEY}"
            if isinstance(layer, QuantLinear) and layer.rotation is not None and key in checkpoint.tensors:
                matrix = read_tensor(reader, checkpoint.tensors[key]).float()
                if not torch.equal(matrix, stored_matrix(layer).float()):
                    problems.append(f"{key} is not the matrix by which our forward turns the input")
    for suffix, groups in (
        ("weight_scale", quantization.weight_groups),
        ("input_scale", quantization.input_groups),
        ("input_global_scale", quantization.input_groups),
        ("weight_global_scale", quantization.global_groups),
    ):
        for group in groups:
            scales = [stored[suffix][name] for name in group.members if name in stored[suffix]]
            if any(not torch.equal(scale, scales[0]) for scale in scales):
                problems.append(f"{', '.join(group.members)} are served with one {suffix}, but have several on disk")
    return problems + _wrong_caches(checkpoint, model, quantization) + _routers_not_ignored(directory, model)


def _wrong_tensors(
    checkpoint: Checkpoint, layer: QuantLayer, keys: dict[str, str], model_dtype: torch.dtype
) -> list[str]:
    """List the codes and scales that do not have the format's dtype or shape. An fp32 scale may be stored in a shorter
    dtype, as llm-compressor does: readers convert it to fp32, which changes no value."""
    expected = packed_shapes(layer.in_features, layer.out_features, layer.scheme, model_dtype)
    return [
        f"{key} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}"
        for (suffix, key), (dtype, shape) in zip(keys.items(), expected.values(), strict=True)
        if (found := checkpoint.tensors[key]).shape != shape
        or found.dtype not in (STORED if dtype == torch.float32 else (dtype,))
    ]


def _wrong_caches(checkpoint: Checkpoint, model: PreTrainedModel, quantization: Quantization) -> list[str]:
    """List the scales of keys or values that a server would not find, or would replace by 1."""
    problems = []
    for name, cache in quantization.caches.items():
        key = cache_keys(model, name)[0]
        found = checkpoint.tensors.get(key)
        if found is None or (found.dtype, found.shape) != (torch.float32, (1,)):
            what = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            problems.append(f"{key} {what}, expected torch.float32 [1]")
        elif not cache.input_scale().item() > 0:
            problems.append(f"{key} is {cache.input_scale().item()}, expected a positive number")
    return problems


def dtype_on_disk(directory: Path, model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of unquantized tensors: the dtype of most of these tensors in the checkpoint."""
    checkpoint = read_headers(directory)
    names = Names(model)
    found = (checkpoint.tensors.get(names.key(name)) for name, tensor in own_tensors(model).items())
    dtypes = Counter(each.dtype for each in found if each is not None and each.dtype in STORED)
    if not dtypes:
        raise ValueError(f"{directory} holds no tensor that is not quantized")
    return next(dtype for dtype, _ in dtypes.most_common() if dtype is not None)


def _routers_not_ignored(directory: Path, model: PreTrainedModel) -> list[str]:
    ignore = read_quantization_config(directory).get("ignore") or []
    routers = [module_name_on_disk(model, name) for name, module in model.named_modules() if is_router(module)]
    missing = [name for name in routers if not is_ignored([name], ignore)]
    return [f"ignore does not name the routers {listed(missing)}: vLLM would quantize them"] if missing else []
