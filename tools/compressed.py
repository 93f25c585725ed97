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
from model.quantized.quantization_config import read_quantization_config
from model.ranks import errors_on_all_ranks, listed
from model.scales import cache_keys
from quant.formats.compressed_tensors import (
    bad_scales,
    dequantized_weight,
    input_suffix,
    packed_shapes,
    unpack_scale,
    unpack_weight,
    unpack_zero,
)
from quant.formats.config_groups import kv_cache_from_config, rules_from_config
from quant.linear import QuantLayer, QuantLinear
from quant.quantization import Quantization, ScaleGroup, replace_layers
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
    """Build the model of a compressed checkpoint and fill it. It is in eval mode, with all fake quantization on and
    scales frozen. Exception: 8-bit weights with zero points in bf16 are not fake-quantized; they are the dequantized
    codes.

    If layers share a scale and the file has several values (another writer's checkpoint), the largest is used and the
    weights are quantized again with it, as serving engines do when they fuse these layers.

    Args:
        directory: checkpoint with config.json (which has a ``quantization_config``) and the safetensors files.
        dtype: dtype of the weights and of the computation. In bf16 dequantized weights are rounded as in training.
        device: device of the model, CPU by default. On the meta device only the headers of the files are compared with
            the model.
        trust_remote_code: allow running Python code in ``directory``.

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
            raise ValueError(f"{file}: quantization_config has targets for no layer of {type(model).__name__}")
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
        _fill(model, quantization, read_headers(directory))
        if device.type == "meta":
            return model.eval(), quantization
        warn_of_zero_tails(directory)
    check_finite(model, f"the weights in {directory} are not all numbers")
    return model.eval(), quantization


def _numerics(directory: Path) -> tuple[list[Rule], TensorSpec | None, list[RotatedInputs]]:
    """Read the rules of layers, the quantization of keys and values, and the rotated inputs from config.json."""
    config = read_quantization_config(directory)
    try:
        rotations = rotations_from_config(config.get("transform_config"))
        return rules_from_config({**config, "transform_config": None}), kv_cache_from_config(config), rotations
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: quantization_config: {error}") from error


def is_ignored(names: list[str], ignore: list[str]) -> bool:
    """Return True if compressed-tensors ignores a module of these names. An entry of ``ignore`` is a name, or ``re:``
    and a pattern that matches names from their start."""
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


def _fill(model: PreTrainedModel, quantization: Quantization, checkpoint: Checkpoint) -> None:
    """Copy every tensor on disk into the model; each key must be used once. A model on the meta device is only
    compared."""
    keys = {name: quantized_keys(model, name, layer) for name, layer in quantization.layers.items()}
    caches = {name: _cache_key(cache_keys(model, name), checkpoint) for name in quantization.caches}
    packed = {*caches.values(), *(key for own in keys.values() for key in own.values())}
    plain = _plain_tensors(model, quantization, checkpoint, packed)
    if model.device.type == "meta":
        return
    kinds = ("weight_scale", "weight_zero_point", "input", "weight_global_scale")
    scales: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
    total = sum(tensor.end - tensor.begin for tensor in checkpoint.tensors.values())
    with progress_bar(total, "weights", "B") as bar, Reader(bar.update) as reader, torch.no_grad():
        for key, targets in plain.items():
            values = read_tensor(reader, checkpoint.tensors[key]).view(-1)
            for piece, target in targets:
                target.view(-1)[piece.start :][: piece.numel].copy_(piece.of(values[piece.offset :]))
        for name, key in caches.items():
            scale = read_tensor(reader, checkpoint.tensors[key]).float()
            quantization.caches[name].input_s0.copy_(_usable(key, scale, (1,)))
        for name, layer in quantization.layers.items():
            tensors = {suffix: read_tensor(reader, checkpoint.tensors[key]) for suffix, key in keys[name].items()}
            try:
                _fill_layer(name, layer, tensors, scales)
            except CheckpointError:
                raise
            except ValueError as error:  # of the functions that unpack tensors, which know no names
                raise CheckpointError(f"{name}: {error}") from error
        _fill_scales(quantization.weight_groups, scales["weight_scale"])
        for group in quantization.weight_groups:
            if group.zero is not None:
                group.zero.copy_(scales["weight_zero_point"][group.owner])
        stored_inputs = [group for group in quantization.input_groups if group.owner in quantization.layers]
        _fill_scales(stored_inputs, scales["input"])
        # The smallest of several global scales is used, so that no scale of a group exceeds the range of e4m3.
        for group in quantization.global_groups:
            group.s0.copy_(torch.stack([scales["weight_global_scale"][name] for name in group.members]).amin(0))


def _cache_key(spellings: list[str], checkpoint: Checkpoint) -> str:
    """Return the one of several possible keys that the checkpoint has; the first one if it has none of them."""
    return next((key for key in spellings if key in checkpoint.tensors), spellings[0])


def _plain_tensors(
    model: PreTrainedModel, quantization: Quantization, checkpoint: Checkpoint, packed: set[str]
) -> dict[str, list[tuple[TensorSlice, torch.Tensor]]]:
    """Map keys of unquantized tensors on disk to the parameters and buffers, or slices of them, that each tensor fills.

    Args:
        model, quantization, checkpoint: contents of the directory.
        packed: keys of codes and scales, which the checkpoint must have too.

    Raises:
        CheckpointError: keys are missing, unexpected or of another shape; the message names all of them.
    """
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


def _fill_layer(name: str, layer: QuantLayer, tensors: dict[str, torch.Tensor], scales: dict[str, dict]) -> None:
    """Copy the dequantized weight into ``layer``; add its effective scales, fp32 in the scheme's shape, to
    ``scales``."""
    spec, shape = layer.scheme.weights, (layer.out_features, layer.in_features)
    _check_dtypes(name, layer, tensors)
    global_scale = None
    if "weight_global_scale" in tensors:
        global_scale = _usable(f"{name}.weight_global_scale", tensors["weight_global_scale"].float(), (1,))
        scales["weight_global_scale"][name] = global_scale
    scale = unpack_scale(tensors["weight_scale"], spec, global_scale)
    scales["weight_scale"][name] = _usable(f"{name}.weight_scale", scale, spec.scale_shape(shape), spec)
    if layer.scheme.stored_input is not None:
        suffix = input_suffix(layer.scheme.stored_input)
        scale = unpack_scale(tensors[suffix], layer.scheme.stored_input)
        scales["input"][name] = _usable(f"{name}.{suffix}", scale, (1,))
    codes = unpack_weight(tensors, layer.scheme)
    if tuple(codes.shape) != shape:
        raise CheckpointError(f"{name} has a weight of shape {tuple(codes.shape)} on disk, expected {shape}")
    zero = unpack_zero(tensors, layer.scheme)
    if zero is not None:
        scales["weight_zero_point"][name] = zero
        # Far from 0 the dtype may not distinguish neighboring codes (255 codes in bf16), so that quantizing again could
        # change a code. The weight is already quantized, so its fake quantization is switched off then.
        layer.weight_fake_quant = (spec.qmax - spec.qmin) * torch.finfo(layer.weight.dtype).eps / 2 < 0.5
    weight = dequantized_weight(codes, scales["weight_scale"][name], spec, layer.weight.dtype, zero)
    layer.weight.copy_(weight)


def _check_dtypes(name: str, layer: QuantLayer, tensors: dict[str, torch.Tensor]) -> None:
    """Reject codes and scales of another dtype than their scheme's, which would be read as other numbers. Scales in a
    float type of 16 bits or more may have any such type, as it depends on the model's dtype."""
    for suffix, (dtype, _) in packed_shapes(layer.in_features, layer.out_features, layer.scheme, torch.float32).items():
        found, wide = tensors[suffix].dtype, dtype.is_floating_point and dtype.itemsize > 1
        counted = suffix == "weight_shape" and not found.is_floating_point
        if not (counted or found == dtype or (wide and found.is_floating_point and found.itemsize > 1)):
            expected = "a float of 16 bits or more" if wide else str(dtype)
            raise CheckpointError(f"{name}.{suffix} is {found}, expected {expected} for {layer.scheme.name}")


def _usable(key: str, scale: torch.Tensor, shape: tuple[int, ...], weight: TensorSpec | None = None) -> torch.Tensor:
    """Return a scale in ``shape``. Raises an error if it is invalid (not finite, zero, negative) or does not fit.

    ``weight`` is the format of the weight if the scale belongs to a weight.
    """
    if scale.numel() != torch.Size(shape).numel():
        raise CheckpointError(f"{key} has shape {tuple(scale.shape)}, expected {shape}")
    if problem := bad_scales(scale, weight):
        raise CheckpointError(f"{key} {problem}")
    return scale.reshape(shape)


def _fill_scales(groups: list[ScaleGroup], values: dict[str, torch.Tensor]) -> None:
    for group in groups:
        stored = torch.stack([values[name] for name in group.members])
        group.s0.copy_(stored.amin(0) if group.observer is not None and group.spec.has_global_scale else stored.amax(0))
