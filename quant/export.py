"""Codes and scales in compressed-tensors' layout, which transformers, vLLM and SGLang read.

What is written is not quantised anew: the codes come from the reference quantiser with the very effective scale that
the forward used, so that the file holds the numbers that the last step trained, bit for bit.

Two layouts, per Linear of ``out`` x ``in`` features:

- ``float-quantized``: ``weight`` float8_e4m3fn [out, in], ``weight_scale`` and ``input_scale`` fp32 of shape [1]
  (transformers rejects a 0-dim scale).
- ``pack-quantized``: ``weight_packed`` int32 [out, ceil(in * bits / 32)], ``weight_scale`` [out, in / group] (or [out,
  1]) in the model's dtype, ``weight_shape`` int64 [2]. Packing is one dense little-endian bitstream per row, of ``code
  + 2^(bits - 1)``: code ``i`` occupies bits ``[i * bits, (i + 1) * bits)``, so that at 3 bits some codes straddle two
  words. 32 codes fill exactly ``bits`` words.

Everything here works on one module's tensors; which tensors, and when, is decided in ``model.save``.
"""

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

from quant.reference import dequantize, quantize
from quant.spec import SCHEMES, Dtype, Scheme, TensorSpec

FLOAT_QUANTIZED = "float-quantized"
PACK_QUANTIZED = "pack-quantized"

# Rows are quantised and packed a few at a time: the reference works in fp32 and packing in int32, 4-10 times the size
# of the codes, which would otherwise be paid for a whole tensor on top of the one that is gathered.
CHUNK_ELEMENTS = 1 << 20


# ---------------------------------------------------------------------------------------------------------------------
# Integer codes as a bitstream
# ---------------------------------------------------------------------------------------------------------------------


def packed_columns(columns: int, bits: int) -> int:
    """How many int32 words hold ``columns`` codes of ``bits`` bits."""
    return math.ceil(columns * bits / 32)


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack signed int8 codes [out, in] of ``bits`` bits into int32 [out, ceil(in * bits / 32)]."""
    rows, columns = codes.shape
    groups = math.ceil(columns / 32)
    unsigned = codes.to(torch.int32) + (1 << (bits - 1))
    unsigned = torch.nn.functional.pad(unsigned, (0, groups * 32 - columns)).view(rows, groups, 32)
    words = torch.zeros(rows, groups, bits, dtype=torch.int32, device=codes.device)
    for index in range(32):
        word, offset = divmod(index * bits, 32)
        words[..., word] |= unsigned[..., index] << offset
        if offset + bits > 32:
            words[..., word + 1] |= unsigned[..., index] >> (32 - offset)
    return words.view(rows, groups * bits)[:, : packed_columns(columns, bits)].contiguous()


def unpack_int32(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """The int8 codes [out, columns] of words packed by :func:`pack_int32`."""
    rows, groups = packed.shape[0], math.ceil(columns / 32)
    words = torch.nn.functional.pad(packed, (0, groups * bits - packed.shape[1])).view(rows, groups, bits)
    codes = torch.empty(rows, groups, 32, dtype=torch.int8, device=packed.device)
    for index in range(32):
        word, offset = divmod(index * bits, 32)
        low = min(bits, 32 - offset)
        # The shift is arithmetic and drags the sign bit in; the mask takes it off again.
        value = (words[..., word] >> offset) & ((1 << low) - 1)
        if low < bits:
            value = value | ((words[..., word + 1] & ((1 << (bits - low)) - 1)) << low)
        codes[..., index] = value - (1 << (bits - 1))
    return codes.view(rows, groups * 32)[:, :columns].contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# One Linear
# ---------------------------------------------------------------------------------------------------------------------


def export_format(scheme: Scheme) -> str:
    """The compressed-tensors format that stores ``scheme``; ValueError if none is known to be read as trained."""
    weights, activations = scheme.weights, scheme.activations
    if weights.dtype == "fp8_e4m3" and activations is not None and activations.dtype == "fp8_e4m3":
        return FLOAT_QUANTIZED
    if weights.dtype == "int" and weights.granularity != "tensor" and activations is None:
        return PACK_QUANTIZED
    raise ValueError(
        f"scheme {scheme.name!r} has no export format: {weights} with inputs {activations}. Exported are "
        "fp8 weights with static fp8 inputs, and integer weights per channel or group with inputs as they are."
    )


def packed_shapes(
    in_features: int, out_features: int, scheme: Scheme, model_dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor that stands for one Linear's weight and scales on disk, by its suffix, in order.

    A pure function of the Linear's sizes, so that every rank can plan the shards without holding a weight.
    """
    scale_shape = scheme.weights.scale_shape((out_features, in_features))
    if export_format(scheme) == FLOAT_QUANTIZED:
        return {
            "weight": (torch.float8_e4m3fn, (out_features, in_features)),
            "weight_scale": (torch.float32, scale_shape),
            "input_scale": (torch.float32, (1,)),
        }
    return {
        "weight_packed": (torch.int32, (out_features, packed_columns(in_features, scheme.weights.bits))),
        "weight_scale": (model_dtype, scale_shape),
        "weight_shape": (torch.int64, (2,)),
    }


def weight_codes(weight: torch.Tensor, scale: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """``quantize(weight, scale, spec)`` of a weight [out, in] on any device, in CPU memory, made a few rows at a time.

    Raises:
        ValueError: a weight is not finite (integers have no code for that).
    """
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn if spec.dtype == "fp8_e4m3" else torch.int8)
    for rows in _row_chunks(weight.shape):
        part = weight[rows]
        if not bool(torch.isfinite(part).all()):
            raise ValueError("the weight holds NaN or Inf; the model diverged, export an earlier checkpoint")
        codes[rows] = quantize(part, _rows_of_scale(scale, rows, spec), spec).cpu()
    return codes


def dequantized_weight(
    codes: torch.Tensor, scale: torch.Tensor, spec: TensorSpec, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``dequantize(codes, scale, spec, dtype)`` of the codes [out, in] of a weight, made a few rows at a time."""
    weight = torch.empty(codes.shape, dtype=dtype)
    for rows in _row_chunks(codes.shape):
        weight[rows] = dequantize(codes[rows], _rows_of_scale(scale, rows, spec), spec, dtype)
    return weight


def _row_chunks(shape: torch.Size) -> Iterable[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, shape[1]))
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _rows_of_scale(scale: torch.Tensor, rows: slice, spec: TensorSpec) -> torch.Tensor:
    """The part of a weight's scale that belongs to ``rows``: all of it where one scale serves the whole tensor."""
    return scale if spec.granularity == "tensor" else scale[rows]


@torch.no_grad()
def pack_linear(
    name: str,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    scheme: Scheme,
    model_dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """The tensors that stand for one Linear on disk, in CPU memory, none sharing storage with an argument.

    Args:
        name: the Linear's name on disk, the prefix of every key.
        weight: [out, in], as trained; may be on a GPU.
        weight_scale: the *effective* fp32 scale of the forward, ``spec.scale_shape(weight.shape)``; for integers
            already rounded to the model's dtype, so that storing it in that dtype loses nothing.
        input_scale: effective fp32 scale [1] of the inputs, None where the scheme leaves inputs as they are.
        bias: [out] or None.
        scheme: the numerics.
        model_dtype: dtype of everything that is not quantised.

    Raises:
        ValueError: a scale is missing, misshapen, not finite, not positive, or not representable in the dtype in which
        it is stored.
    """
    out_features, in_features = weight.shape
    shapes = packed_shapes(in_features, out_features, scheme, model_dtype)
    _check_scale(f"{name}.weight_scale", weight_scale, *shapes["weight_scale"])
    try:
        codes = weight_codes(weight, weight_scale, scheme.weights)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    packed = {"weight_scale": stored(weight_scale, shapes["weight_scale"][0])}
    if export_format(scheme) == FLOAT_QUANTIZED:
        if input_scale is None:
            raise ValueError(
                f"{name} has no input scale, and scheme {scheme.name!r} needs one: calibrate or load a PTQ checkpoint"
            )
        _check_scale(f"{name}.input_scale", input_scale, *shapes["input_scale"])
        packed |= {"weight": codes, "input_scale": stored(input_scale, torch.float32)}
    else:
        columns = shapes["weight_packed"][1][1]
        words = torch.empty(out_features, columns, dtype=torch.int32)
        for rows in _row_chunks(codes.shape):
            words[rows] = pack_int32(codes[rows], scheme.weights.bits)
        packed |= {"weight_packed": words, "weight_shape": torch.tensor([out_features, in_features], dtype=torch.int64)}
    tensors = {f"{name}.{suffix}": packed[suffix] for suffix in shapes}
    if bias is not None:
        tensors[f"{name}.bias"] = stored(bias, model_dtype)
    return tensors


def stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy in CPU memory: what a gathered parameter lends is gone after the gathering block."""
    return tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _check_scale(key: str, scale: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tuple(scale.shape) != shape:
        raise ValueError(f"{key} has shape {tuple(scale.shape)}, expected {shape}")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ValueError(
            f"{key} has a value that is not finite and positive; the model diverged, export an earlier checkpoint"
        )
    if not torch.equal(scale.to(dtype).to(scale.dtype), scale):
        raise ValueError(
            f"{key} is stored in {dtype}, which cannot hold its values: the forward used a scale that was not rounded"
        )


def unpack_weight(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The codes [out, in] of one Linear, float8_e4m3fn or int8, from its tensors on disk by suffix.

    Raises:
        ValueError: ``weight_shape`` and the packed width disagree.
    """
    if export_format(scheme) == FLOAT_QUANTIZED:
        return tensors["weight"]
    packed, bits = tensors["weight_packed"], scheme.weights.bits
    rows, columns = tensors["weight_shape"].tolist()
    expected = (rows, packed_columns(columns, bits))
    if tuple(packed.shape) != expected:
        raise ValueError(
            f"weight_packed has shape {tuple(packed.shape)}, weight_shape {[rows, columns]} at {bits} bits means "
            f"{expected}"
        )
    codes = torch.empty(rows, columns, dtype=torch.int8)
    for chunk in _row_chunks(codes.shape):
        codes[chunk] = unpack_int32(packed[chunk], bits, columns)
    return codes


# ---------------------------------------------------------------------------------------------------------------------
# quantization_config
# ---------------------------------------------------------------------------------------------------------------------


def quantization_config(scheme: Scheme, ignore: Iterable[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json, as compressed-tensors, vLLM and SGLang read it.

    Args:
        scheme: the numerics of every Linear that ``ignore`` does not name.
        ignore: exact module names and anchored ``re:`` patterns, see :func:`ignore_patterns`. A Linear that is neither
            quantised nor listed is loaded without complaint and predicts noise.
    """
    layout = export_format(scheme)
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "format": layout,
        "weights": _args(scheme.weights),
        "input_activations": None if scheme.activations is None else _args(scheme.activations),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _args(spec: TensorSpec) -> dict[str, Any]:
    """compressed-tensors' QuantizationArgs of one tensor."""
    args: dict[str, Any] = {
        "num_bits": spec.bits,
        "type": "float" if spec.dtype == "fp8_e4m3" else "int",
        "symmetric": True,
        "strategy": spec.granularity,
    }
    if spec.granularity == "group":
        args["group_size"] = spec.group_size
    return args | {"dynamic": False}


def scheme_from_config(config: dict[str, Any]) -> Scheme:
    """The scheme that a ``quantization_config`` describes: the inverse of :func:`quantization_config`.

    Keys that only steered the calibration (``observer``, ``actorder: null``, ...) are passed over, whatever would
    change the numbers is checked.

    Raises:
        ValueError: not compressed-tensors, not exactly one config group over all Linears, or numerics outside what the
            schemes here express (asymmetric, dynamic, output activations, KV cache, activation ordering).
    """
    if config.get("quant_method") != "compressed-tensors":
        raise ValueError(f"quant_method is {config.get('quant_method')!r}, expected 'compressed-tensors'")
    if config.get("kv_cache_scheme") is not None:
        raise ValueError("kv_cache_scheme is set: a quantised KV cache is not read")
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise ValueError(f"config_groups has {sorted(groups)}, expected exactly one group: mixed schemes are not read")
    name, group = next(iter(groups.items()))
    if group.get("targets") != ["Linear"]:
        raise ValueError(f"config_groups.{name}.targets is {group.get('targets')}, expected ['Linear']")
    if group.get("output_activations") is not None:
        raise ValueError(f"config_groups.{name}.output_activations is set: outputs are not quantised here")
    if group.get("weights") is None:
        raise ValueError(f"config_groups.{name}.weights is missing")
    weights = _spec(f"config_groups.{name}.weights", group["weights"])
    inputs = group.get("input_activations")
    activations = None if inputs is None else _spec(f"config_groups.{name}.input_activations", inputs)
    for scheme in SCHEMES.values():
        if (scheme.weights, scheme.activations) == (weights, activations):
            return scheme
    return Scheme(name=_name(weights, activations), weights=weights, activations=activations)


def _spec(key: str, args: dict[str, Any]) -> TensorSpec:
    bits = args.get("num_bits", 8)
    dtype: Dtype
    match args.get("type", "int"):
        case "float" if bits == 8:
            dtype = "fp8_e4m3"
        case "int" if 2 <= bits <= 8:
            dtype = "int"
        case other:
            raise ValueError(f"{key}: type {other!r} with num_bits {bits} is not read")
    for option, expected in (("symmetric", True), ("dynamic", False), ("actorder", None), ("block_structure", None)):
        if args.get(option, expected) != expected:
            raise ValueError(f"{key}.{option} is {args[option]!r}, expected {expected!r}")
    match args.get("strategy"):
        case "group":
            return TensorSpec(dtype, bits, "group", args.get("group_size"))
        case "tensor" | "channel" as granularity:
            return TensorSpec(dtype, bits, granularity)
        case other:
            raise ValueError(f"{key}.strategy is {other!r}, expected 'tensor', 'channel' or 'group'")


def _name(weights: TensorSpec, activations: TensorSpec | None) -> str:
    """A name in the manner of the presets, for numerics that no preset has: w2a16_channel, w4a16_g64."""
    inputs = "a16" if activations is None else f"a{activations.bits}"
    suffix = f"g{weights.group_size}" if weights.granularity == "group" else weights.granularity
    return f"w{weights.bits}{inputs}_{suffix}"


def ignore_patterns(skipped: Iterable[str], quantized: Iterable[str], routers: Iterable[str] = ()) -> list[str]:
    """The ``ignore`` list that keeps ``skipped`` Linears out and no ``quantized`` one.

    A name with numbers in it (layers, experts) becomes one anchored pattern for all numbers if that catches no
    quantised Linear: a list of every expert of every layer would be megabytes. MoE routers are listed by the end of
    their names, anchored: they are Linears to vLLM, which would quantise them silently, and ``gate`` without an anchor
    also catches ``gate_proj``.

    Args:
        skipped: module names of the Linears that stay as they are.
        quantized: module names of the Linears that are quantised.
        routers: module names of the MoE routers.
    """
    quantized = list(quantized)
    patterns = dict.fromkeys(f"re:.*{re.escape('.'.join(name.split('.')[-2:]))}$" for name in routers)
    for name in skipped:
        pattern = r"\d+".join(re.escape(part) for part in re.split(r"(?<=\.)\d+(?=\.|$)", name)) + "$"
        general = pattern != re.escape(name) + "$" and not any(re.match(pattern, other) for other in quantized)
        patterns[f"re:{pattern}" if general else name] = None
    return list(patterns)
