"""Load a compressed checkpoint as a plain model in one process, to evaluate and verify exports.

The files have codes and scales, but the forward of training needs weights and scales. So the model's weights are set to
the dequantized codes. Quantizing them again with the same scale results in the same codes: ``code * s * (1/s)`` is off
by a few roundings, and the next boundary between codes is at least 1/30 of the code away. So the model computes with
exactly the codes on disk, by the same functions as in training.

Supported are exports of this project and files of llm-compressor with the same numerics: compressed-tensors, with one
scheme or several.
"""

import re
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from model.build import build_model
from model.checkpoint.load import check_finite, keys_left_unread, missing_keys
from model.checkpoint.names import Names, TensorSlice, module_name_on_disk, own_tensors
from model.checkpoint.safetensors import (
    Checkpoint,
    CheckpointError,
    Reader,
    read_headers,
    read_tensor,
    warn_of_zero_tails,
)
from model.console import progress_bar
from model.quantized.checkpoint import Found, SourceCheckpoint, coded_linear
from model.quantized.quantization_config import read_quantization_config
from model.quantized.scales import take_scales
from model.quantized.tensor import row_chunks
from model.ranks import errors_on_all_ranks, listed
from model.scales.grouping import cache_keys
from quant import kernels
from quant.formats.compressed_tensors import packed_shapes
from quant.formats.config_groups import kv_cache_from_config, rules_from_config
from quant.linear import QuantLayer, QuantLinear
from quant.quantization import Quantization, replace_layers
from quant.rotation import KEY, RotatedInputs, rotated_layers, rotations_from_config
from quant.rules import Rule
from quant.spec import Scheme, TensorSpec


def load_compressed(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Quantization]:
    """Build the model of a compressed checkpoint, whole on every rank, and load its weights; a collective. Return the
    model in eval mode, and its quantization, with all fake quantization on and scales frozen. Exception: 8-bit weights
    with zero points in bf16 are not fake-quantized, as they already are the dequantized codes.

    If layers share a scale and the file has several values (another writer's checkpoint), the largest is used and the
    weights are quantized again with it, as serving engines do when they fuse these layers.

    Args:
        dtype: dtype of the weights and of the computation. In bf16 dequantized weights are rounded as in training.
        device: device of the model, CPU by default. On the meta device only the headers of the files are compared with
            the model.

    Raises:
        RankError: there is no quantization_config, or its numerics are not supported; a file is damaged; keys are
            missing, unexpected or of another shape (the message names all); a scale is not finite, zero, or negative
            (allowed for integers); or a weight is not finite.
    """
    directory, device = Path(directory), device or torch.device("cpu")
    with errors_on_all_ranks(OSError, ValueError):
        rules, kv_cache, rotations = _numerics(directory)
    engine = {"bf16": {"enabled": dtype == torch.bfloat16}, "fp16": {"enabled": dtype == torch.float16}}
    model = build_model(
        directory,
        engine,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        experts="per_expert",  # as on disk
        rotated=True,
    )
    with errors_on_all_ranks(OSError, ValueError):
        schemes = _schemes(model, rules)
        if not schemes and kv_cache is None:
            file = directory / "config.json"
            raise ValueError(
                f"{file}: quantization_config quantizes no layer of {type(model).__name__}: correct its targets and "
                "ignore, or use another checkpoint"
            )
        quantization = replace_layers(
            model,
            None,
            named=schemes,
            exempt=(),
            learn_weight_scale=False,
            learn_input_scale=False,
            kv_cache=kv_cache,
        )
        _rotate(model, quantization, rotations)
        found = _fill(model, quantization, read_headers(directory), kv_cache)
        if device.type == "meta":
            return model.eval(), quantization
        warn_of_zero_tails(directory)
    take_scales(model, quantization, directory, found)
    check_finite(model, f"the weights in {directory} are not all numbers")
    return model.eval(), quantization


def _numerics(directory: Path) -> tuple[list[Rule], TensorSpec | None, list[RotatedInputs]]:
    """Read the rules of layers, the quantization of keys and values, and the rotated inputs from config.json. Raises
    ValueError if they are not supported."""
    config = read_quantization_config(directory)
    try:
        rotations = rotations_from_config(config.get("transform_config"))
        return rules_from_config({**config, "transform_config": None}), kv_cache_from_config(config), rotations
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: quantization_config: {error}") from error


def is_ignored(names: list[str], ignore: list[str]) -> bool:
    """Return True if compressed-tensors ignores a module that is known by each of ``names`` (in the model, on disk). An
    entry of ``ignore`` is a name, or ``re:`` and a pattern that matches names from their start."""
    return any(
        re.match(entry.removeprefix("re:"), name) if entry.startswith("re:") else entry == name
        for entry in ignore
        for name in names
    )


def _schemes(model: PreTrainedModel, rules: list[Rule]) -> dict[str, Scheme]:
    """Find the scheme of every quantized layer, by name: the first rule that matches the layer's name in the model or
    on disk."""
    schemes = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        names = {name, module_name_on_disk(model, name)}
        # Only a Linear is meant where a rule names no layers.
        able = (rule for rule in rules if rule.layers is not None or isinstance(module, nn.Linear))
        rule = next((rule for rule in able if any(rule.matches(spelling, 0) for spelling in names)), None)
        if rule is not None and rule.scheme is not None:
            schemes[name] = rule.scheme
    return schemes


def _rotate(model: PreTrainedModel, quantization: Quantization, rotations: list[RotatedInputs]) -> None:
    """Switch on the rotation of inputs for the layers that the file lists. Raises ValueError if a listed layer is not
    quantized, is an expert, or has inputs that the blocks do not divide."""
    linears = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, QuantLinear))}
    for targets, ignore, block in rotations:
        for name in linears:
            names = [name, module_name_on_disk(model, name)]
            if not ("Linear" in targets or is_ignored(names, targets)) or is_ignored(names, ignore):
                continue
            layer = quantization.layers.get(name)
            if not isinstance(layer, QuantLinear) or layer.in_features % block:
                raise ValueError(
                    f"transform_config rotates the inputs of {name} in blocks of {block}, expected a quantized Linear "
                    f"whose inputs are divisible by {block}"
                )
            layer.rotation = block


def quantized_keys(model: PreTrainedModel, name: str, layer: QuantLayer) -> dict[str, str]:
    """Return the keys on disk of one quantized Linear's weight and scales, by suffix."""
    suffixes = packed_shapes(layer.in_features, layer.out_features, layer.scheme, torch.float32)
    prefix = module_name_on_disk(model, name)
    return {suffix: f"{prefix}.{suffix}" for suffix in suffixes}


def _fill(
    model: PreTrainedModel, quantization: Quantization, checkpoint: Checkpoint, kv_cache: TensorSpec | None
) -> SourceCheckpoint:
    """Load the checkpoint into the model: unquantized tensors, and dequantized weights. On the meta device, only
    compare the headers. Return the quantized tensors. Raises CheckpointError if tensors are missing, unexpected or
    of another shape."""
    tensors = checkpoint.tensors
    keys = {name: quantized_keys(model, name, layer) for name, layer in quantization.layers.items()}
    spellings = [cache_keys(model, name) for name in quantization.caches]
    caches = [next((key for key in one if key in tensors), one[0]) for one in spellings]
    packed = {*caches, *(key for own in keys.values() for key in own.values())}
    plain = _plain_tensors(model, quantization, checkpoint, packed)
    total = sum(tensor.end - tensor.begin for tensor in tensors.values())
    found = Found({}, {key: tensors[key] for key in packed}, [])
    with progress_bar(total, "weights", "B") as bar, Reader(bar.update) as reader, torch.no_grad():
        for name, layer in quantization.layers.items():
            parts = {suffix: tensors[key] for suffix, key in keys[name].items()}
            codes, disk = parts.get("weight_packed") or parts["weight"], module_name_on_disk(model, name)
            with found.problem_of(disk, codes):
                linear = found.coded[name] = coded_linear(disk, codes, parts, layer.scheme, reader)
                if linear.shape != layer.weight_shape:
                    raise ValueError(
                        f"the weight has shape {linear.shape} on disk, but {layer.weight_shape} in the model: use "
                        "another checkpoint"
                    )
        if found.problems:
            raise CheckpointError("\n".join(found.problems))
        for key, targets in plain.items() if model.device.type != "meta" else ():
            values = read_tensor(reader, tensors[key]).view(-1)
            for piece, target in targets:
                target.view(-1)[piece.start :][: piece.numel].copy_(piece.of(values[piece.offset :]))
        for name, linear in found.coded.items() if model.device.type != "meta" else ():
            layer, weight = quantization.layers[name], quantization.layers[name].weight
            for rows in row_chunks(0, weight.numel(), layer.in_features):
                weight[rows] = kernels.dequantize(*linear.rows(reader, rows, weight.dtype, weight.device))
            if linear.zero is not None:
                # Far from 0 the dtype may not distinguish neighboring codes (255 codes in bf16), so that quantizing
                # again could change a code. The weight is already quantized: its fake quantization is switched off.
                levels = layer.scheme.weights.qmax - layer.scheme.weights.qmin
                layer.weight_fake_quant = levels * torch.finfo(weight.dtype).eps / 2 < 0.5
    return SourceCheckpoint({linear.key: linear for linear in found.coded.values()}, [], set(), found.beside, kv_cache)


def _plain_tensors(
    model: PreTrainedModel, quantization: Quantization, checkpoint: Checkpoint, packed: set[str]
) -> dict[str, list[tuple[TensorSlice, torch.Tensor]]]:
    """Map keys of unquantized tensors on disk to the parameters and buffers, or slices of them, that each tensor fills.
    ``packed`` are keys of codes and scales. Raises CheckpointError if any keys are missing, unexpected or of another
    shape; the message names all of them."""
    names = Names(model, {key: tensor.shape for key, tensor in checkpoint.tensors.items()})
    quantized = {f"{name}.weight" for name in quantization.layers}
    own = {name: tensor for name, tensor in own_tensors(model).items() if name not in quantized}
    # The stored matrices of layers that rotate their inputs are known without reading them.
    matrices = {f"{module_name_on_disk(model, name)}.{KEY}" for name in rotated_layers(quantization)}
    layouts = {key: names.layout(key) for key in (checkpoint.tensors.keys() | checkpoint.lost) - packed - matrices}
    for key, layout in layouts.items():
        if layout is not None and any(piece.name in quantized for piece in layout.pieces):
            layouts[key] = None  # a plain weight of a layer that has codes
    unread = keys_left_unread(model)
    unexpected = [key for key, found in layouts.items() if found is None and not unread.search(key)]
    problems = list(checkpoint.problems)
    for kind, found in (
        ("missing", [*(packed - checkpoint.tensors.keys() - checkpoint.lost), *missing_keys(names, own, layouts)]),
        ("unexpected", [key for key in unexpected if not names.is_left_out(key)]),
    ):
        if found:
            problems.append(f"{kind}: {listed(sorted(found))}")
    for key, layout in layouts.items():
        if layout is not None and key in checkpoint.tensors and checkpoint.tensors[key].shape != layout.shape:
            tensor = checkpoint.tensors[key]
            problems.append(f"{tensor.file}: {key} has shape {tensor.shape}, expected {layout.shape}")
    if problems:
        raise CheckpointError("\n".join(problems))
    return {key: [(piece, own[piece.name]) for piece in layout.pieces] for key, layout in layouts.items() if layout}
