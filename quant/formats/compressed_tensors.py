"""Codes and scales of one Linear in compressed-tensors' layout, which transformers, vLLM and SGLang read.

Codes come from the reference quantizer with the effective scale of the forward, so that the file has exactly the
numbers of the last training step.

The six formats, for a Linear of ``out`` x ``in`` features. Scales have the shape ``TensorSpec.scale_shape``, in the
model's dtype for integers and in fp32 for fp8; ``input_scale`` [1] (transformers rejects a 0-dim tensor) is present if
inputs have a stored scale:

- ``float-quantized``: ``weight`` float8_e4m3fn [out, in], ``weight_scale``.
- ``int-quantized``, 8-bit weights with 8-bit integer inputs: ``weight`` int8 [out, in], ``weight_scale``.
- ``pack-quantized``, all other integers: ``weight_packed`` int32 [out, ceil(in * bits / 32)] (see ``packing.py``),
  ``weight_scale`` (fp32 for ggml formats), ``weight_shape`` int64 [2]; for asymmetric weights also
  ``weight_zero_point`` int32 [ceil(out * bits / 32), in / size].
- ``nvfp4-pack-quantized``: ``weight_packed`` uint8 [out, in / 2], ``weight_scale`` float8_e4m3fn [out, in / 16],
  ``weight_global_scale`` fp32 [1]; the effective scale is ``weight_scale / weight_global_scale``.
- ``mxfp4-pack-quantized``: ``weight_packed``, ``weight_scale`` uint8 [out, in / 32], the exponent of a power of two
  plus 127.
- ``mxfp8-quantized``: ``weight`` float8_e4m3fn [out, in], ``weight_scale`` as for MXFP4.

Functions here handle one module's tensors; ``model/save/`` selects the tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quant.formats.packing import (
    pack_int32,
    pack_nibbles,
    pack_zero_points,
    packed_columns,
    unpack_int32,
    unpack_nibbles,
    unpack_zero_points,
)
from quant.reference import E8M0_BIAS, dequantize, quantize
from quant.scale import Scale
from quant.spec import Dtype, Scheme, TensorSpec

FLOAT_QUANTIZED = "float-quantized"
INT_QUANTIZED = "int-quantized"
PACK_QUANTIZED = "pack-quantized"
NVFP4_PACKED = "nvfp4-pack-quantized"
MXFP4_PACKED = "mxfp4-pack-quantized"
MXFP8_QUANTIZED = "mxfp8-quantized"
_WHOLE_CODES = (FLOAT_QUANTIZED, INT_QUANTIZED, MXFP8_QUANTIZED)  # one byte per code, in the tensor `weight`

# Rows are quantized and packed in chunks: the reference computes in fp32 and packing in int32, 4-10 times the size of
# the codes, too much for a whole tensor on top of the gathered one.
CHUNK_ELEMENTS = 1 << 20

_CODES: dict[Dtype, torch.dtype] = {"fp8_e4m3": torch.float8_e4m3fn, "fp4_e2m1": torch.uint8, "int": torch.int8}

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def export_format(scheme: Scheme) -> str:
    """Return the compressed-tensors format that stores ``scheme``; ValueError if no format is known to reproduce the
    training numerics."""
    weights, inputs = scheme.weights, scheme.activations
    if weights.mx and (inputs is None or (inputs.mx and inputs.bits >= weights.bits)):
        return MXFP4_PACKED if weights.bits == 4 else MXFP8_QUANTIZED
    fp8 = inputs is not None and inputs.dtype == "fp8_e4m3" and inputs.granularity in ("tensor", "token")
    if weights.mx and weights.bits == 4 and fp8:
        return MXFP4_PACKED
    if weights.has_global_scale and (inputs is None or inputs.has_global_scale):
        return NVFP4_PACKED
    plain = weights.dtype == "fp8_e4m3" and not weights.mx
    if plain and (inputs is None or (inputs.dtype == "fp8_e4m3" and not inputs.mx)):
        return FLOAT_QUANTIZED
    if weights.dtype == "int" and weights.granularity != "block":
        rows = weights.granularity in ("tensor", "channel")
        eight = weights.bits == 8 and weights.symmetric
        if eight and rows and inputs is not None and inputs.dtype == "int":
            return INT_QUANTIZED
        if weights.granularity != "tensor":
            return PACK_QUANTIZED
    raise ValueError(
        f"scheme {scheme.name!r} has no export format: {weights} with inputs {inputs}; supported are fp8 weights with "
        "inputs in fp8 or as they are, fp4 weights with inputs as they are, NVFP4 weights with NVFP4 inputs too, MXFP4 "
        "weights with inputs in MXFP4, MXFP8 or fp8, MXFP8 weights with inputs in MXFP8 or as they are, and integer "
        "weights per channel or group"
    )


def packed_shapes(in_features: int, out_features: int, scheme: Scheme, model_dtype: torch.dtype) -> Shapes:
    """Return dtypes and shapes of the tensors for one Linear's weight and scales on disk, by suffix, in order. They
    depend only on the Linear's sizes, so that every rank can plan the shards without the weight."""
    spec, layout = scheme.weights, export_format(scheme)
    scale = (_stored_dtype(spec, model_dtype), spec.scale_shape((out_features, in_features)))
    shapes: Shapes
    if layout in _WHOLE_CODES:
        shapes = {"weight": (_CODES[spec.dtype], (out_features, in_features)), "weight_scale": scale}
    elif layout == PACK_QUANTIZED:
        shapes = {
            "weight_packed": (torch.int32, (out_features, packed_columns(in_features, spec.bits))),
            "weight_scale": scale,
            "weight_shape": (torch.int64, (2,)),
        }
        if spec.has_zero_points:
            shapes["weight_zero_point"] = (torch.int32, (packed_columns(out_features, spec.bits), scale[1][1]))
    else:
        shapes = {"weight_packed": (torch.uint8, (out_features, in_features // 2)), "weight_scale": scale}
        if layout == NVFP4_PACKED:
            shapes["weight_global_scale"] = (torch.float32, (1,))
    if scheme.stored_input is not None:
        global_ = scheme.stored_input.has_global_scale
        dtype = torch.float32 if global_ else _stored_dtype(scheme.stored_input, model_dtype)
        shapes[input_suffix(scheme.stored_input)] = (dtype, (1,))
    return shapes


def input_suffix(spec: TensorSpec) -> str:
    """Return the suffix of the stored input scale after the name of its Linear."""
    return "input_global_scale" if spec.has_global_scale else "input_scale"


def _stored_dtype(spec: TensorSpec, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a scale on disk."""
    return {
        "float32": torch.float32,
        "model": model_dtype,
        "float16": torch.float32,  # readers multiply in the dtype on disk, and products may overflow fp16
        "e4m3": torch.float8_e4m3fn,
        "e8m0": torch.uint8,
    }[spec.scale_format]


def weight_codes(
    weight: torch.Tensor, scale: torch.Tensor, spec: TensorSpec, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize a weight [out, in], on any device, to codes in CPU memory, in chunks of rows. Raises ValueError if a
    weight is not finite (integers have no code for it)."""
    codes = torch.empty(weight.shape, dtype=_CODES[spec.dtype])
    for rows in _row_chunks(weight.shape, spec):
        part = weight[rows]
        if not bool(torch.isfinite(part).all()):
            raise ValueError("the weight holds NaN or Inf; the model diverged, export an earlier checkpoint")
        of_rows, zero_of_rows = scales_of_rows(rows, scale, zero, spec)
        codes[rows] = quantize(part, of_rows, spec, zero_of_rows).cpu()
    return codes


def dequantized_weight(
    codes: torch.Tensor,
    scale: torch.Tensor,
    spec: TensorSpec,
    dtype: torch.dtype = torch.float32,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize a weight's codes [out, in] to ``dtype`` in CPU memory, in chunks of rows. ``scale`` is effective, fp32
    in the shape of :meth:`quant.spec.TensorSpec.scale_shape`; ``zero`` has zero points in this shape, or is None."""
    weight = torch.empty(codes.shape, dtype=dtype)
    for rows in _row_chunks(codes.shape, spec):
        of_rows, zero_of_rows = scales_of_rows(rows, scale, zero, spec)
        weight[rows] = dequantize(codes[rows], of_rows, spec, dtype, zero_of_rows)
    return weight


def _row_chunks(shape: torch.Size, spec: TensorSpec) -> Iterable[slice]:
    """Split rows into slices of about ``CHUNK_ELEMENTS`` elements; if blocks of rows share scales, no block is
    split."""
    together = spec.rows_per_scale
    step = max(1, CHUNK_ELEMENTS // max(1, shape[1] * together)) * together
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def scales_of_rows(
    rows: slice, scale: torch.Tensor, zero: torch.Tensor | None, spec: TensorSpec
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Select the scale and zero points (None if there are none) of a slice of a weight's rows. A scale per tensor is
    returned unchanged."""
    if spec.granularity == "tensor":
        return scale, None
    size = spec.rows_per_scale
    return scale[rows.start // size : -(-rows.stop // size)], None if zero is None else zero[rows]


@dataclass(frozen=True)
class TrainedLinear:
    """A Linear as trained, to be written.

    Attributes:
        name: the Linear's name on disk, for messages.
        weight: [out, in]; may be on a GPU.
        scale: scale of the weight. theta is None, as s0 contains it: s0 is the *effective* fp32 scale of the forward,
            ``spec.scale_shape(weight.shape)``, already rounded to the stored format, so that storing is lossless.
        input_scale: effective fp32 scale [1] of the inputs, None if the scheme stores none.
        bias: [out] or None.
        scheme: number formats of the weight and the input.
        dtype: dtype of the model, for all unquantized tensors.
    """

    name: str
    weight: torch.Tensor
    scale: Scale
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None
    scheme: Scheme
    dtype: torch.dtype


@torch.no_grad()
def pack_linear(linear: TrainedLinear) -> dict[str, torch.Tensor]:
    """Build the tensors of one Linear as stored on disk, by suffix (``weight_scale``, ...): new tensors in CPU memory.
    Raises ValueError if the weight is not finite; a scale is missing, misshapen, not finite, 0, negative for a
    non-integer weight, or not representable in its stored format; or a zero point is missing, misshapen or no code."""
    name, scheme, scale = linear.name, linear.scheme, linear.scale
    assert scale.theta is None
    spec, layout = scheme.weights, export_format(scheme)
    shapes = packed_shapes(linear.weight.shape[1], linear.weight.shape[0], scheme, linear.dtype)
    packed = _pack_scales(linear, shapes["weight_scale"][1])
    static = scheme.stored_input
    if static is not None:
        if linear.input_scale is None:
            raise ValueError(
                f"{name} has no input scale, and scheme {scheme.name!r} needs one: calibrate or load a PTQ checkpoint"
            )
        suffix = input_suffix(static)
        _check_scale(f"{name}.{suffix}", linear.input_scale, (1,), signed=False)
        packed[suffix] = (
            stored(linear.input_scale, torch.float32)
            if static.has_global_scale
            else _pack_scale(f"{name}.{suffix}", linear.input_scale, static, linear.dtype)
        )
    try:
        codes = weight_codes(linear.weight, scale.s0, spec, scale.zero)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if layout in _WHOLE_CODES:
        packed["weight"] = codes
    elif layout == PACK_QUANTIZED:
        words = torch.empty(shapes["weight_packed"][1], dtype=torch.int32)
        for rows in _row_chunks(codes.shape, spec):
            words[rows] = pack_int32(codes[rows], spec.bits)
        packed |= {"weight_packed": words, "weight_shape": torch.tensor(codes.shape, dtype=torch.int64)}
    else:
        packed["weight_packed"] = pack_nibbles(codes)
    tensors = {suffix: packed[suffix] for suffix in shapes}
    return tensors if linear.bias is None else {**tensors, "bias": stored(linear.bias, linear.dtype)}


def _pack_scales(linear: TrainedLinear, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Build the stored scales, global scale and zero points of the weight, by suffix. Raises ValueError if one of them
    is missing, misshapen or not valid."""
    name, scheme, scale, spec = linear.name, linear.scheme, linear.scale, linear.scheme.weights
    packed: dict[str, torch.Tensor] = {}
    if spec.scale_format == "e4m3":
        if scale.global_ is None:
            raise ValueError(f"{name} has no global scale, scheme {scheme.name!r} needs one: set Scale.global_")
        _check_scale(f"{name}.weight_global_scale", scale.global_, (1,), signed=False)
        packed["weight_global_scale"] = stored(scale.global_, torch.float32)
    key = f"{name}.weight_scale"
    _check_scale(key, scale.s0, shape, signed=spec.dtype == "int")
    packed["weight_scale"] = _pack_scale(key, scale.s0, spec, linear.dtype, packed.get("weight_global_scale"))
    if spec.has_zero_points:
        key, zero = f"{name}.weight_zero_point", scale.zero
        if zero is None or zero.shape != scale.s0.shape:
            found = "missing" if zero is None else f"of shape {tuple(zero.shape)}"
            raise ValueError(f"{key} is {found}, expected {tuple(scale.s0.shape)}, as the scale")
        if problem := bad_zero_points(zero, spec):
            raise ValueError(f"{key} {problem}")
        packed["weight_zero_point"] = pack_zero_points(stored(zero, torch.int8), spec.bits)
    return packed


def cache_scale(key: str, scale: torch.Tensor) -> torch.Tensor:
    """Build the stored scale [1] of keys or values, fp32. Raises ValueError if it is not finite and positive; the
    message names ``key``, the scale's key on disk."""
    _check_scale(key, scale, (1,), signed=False)
    return stored(scale, torch.float32)


def stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor to contiguous CPU memory in ``dtype``. The copy outlives a gathered ZeRO-3 parameter, whose memory
    is freed at the end of the block that gathers it."""
    return tensor.detach().to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)


def _pack_scale(
    key: str,
    scale: torch.Tensor,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convert the effective fp32 ``scale`` to its stored form. Raises ValueError if that would change its values."""
    dtype = _stored_dtype(spec, model_dtype)
    scale = stored(scale, torch.float32)
    if spec.scale_format == "float16" and not torch.equal(scale.to(torch.float16).float(), scale):
        raise ValueError(f"{key} has values that fp16 does not hold: the forward used a scale that was not rounded")
    if spec.scale_format == "e8m0":
        packed = (torch.frexp(scale).exponent - 1 + E8M0_BIAS).to(dtype)
    else:
        packed = (scale if global_scale is None else scale * global_scale).to(dtype)
    if not torch.equal(unpack_scale(packed, spec, global_scale), scale):
        raise ValueError(
            f"{key} is stored in {dtype}, which cannot hold its values: the forward used a scale that was not rounded"
        )
    return packed


def bad_zero_points(zero: torch.Tensor, spec: TensorSpec) -> str | None:
    """Describe zero points that are not codes of the grid; return None if all are."""
    wrong = ~((zero == zero.round()) & (zero >= spec.qmin) & (zero <= spec.qmax))
    if not bool(wrong.any()):
        return None
    return f"must be integers from {spec.qmin:g} to {spec.qmax:g}, got {zero[wrong][0].item():g}"


def bad_scales(scale: torch.Tensor, spec: TensorSpec | None = None) -> str | None:
    """Describe scales that are infinite, NaN, 0 or negative; return None if there are none. With ``spec``, a weight's
    format, scales of integers may be negative, and scales stored in e4m3 may be 0 (they are far below the largest scale
    of their layer)."""
    good, expected = scale > 0, "finite and positive"
    if spec is not None and spec.dtype == "int":
        good, expected = scale != 0, "finite and not 0"
    elif spec is not None and spec.scale_format == "e4m3":
        good, expected = scale >= 0, "finite and not negative"
    wrong = scale[~(good & scale.isfinite())]
    return f"must be {expected}, got {wrong.flatten()[:4].tolist()}" if wrong.numel() else None


def unpack_scale(packed: torch.Tensor, spec: TensorSpec, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Convert a ``weight_scale`` or ``input_scale`` on disk to the effective fp32 scale, in the same shape;
    ``global_scale`` is ``weight_global_scale``, if the format has it."""
    if spec.scale_format == "e8m0":
        exponent = packed.to(torch.int32) - E8M0_BIAS
        return torch.ldexp(torch.ones(exponent.shape), exponent)
    return packed.float() if global_scale is None else packed.float() / global_scale


def _check_scale(key: str, scale: torch.Tensor, shape: tuple[int, ...], *, signed: bool) -> None:
    if tuple(scale.shape) != shape:
        raise ValueError(f"{key} has shape {tuple(scale.shape)}, expected {shape}")
    size = scale.abs() if signed else scale
    if not bool((torch.isfinite(scale) & (size > 0)).all()):
        usable = "or is 0" if signed else "and positive"
        raise ValueError(
            f"{key} has a value that is not finite {usable}; the model diverged, export an earlier checkpoint"
        )


def unpack_zero(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor | None:
    """Unpack the zero points of one Linear to fp32 [out, groups]; None if the format has none. ``tensors`` are the
    Linear's tensors on disk by suffix (``weight_scale``, ...). Raises ValueError if the packed zero points do not match
    ``weight_shape`` and ``weight_scale``."""
    if not scheme.weights.has_zero_points:
        return None
    packed, bits, rows = tensors["weight_zero_point"], scheme.weights.bits, int(tensors["weight_shape"][0])
    expected = (packed_columns(rows, bits), tensors["weight_scale"].shape[-1])
    if tuple(packed.shape) != expected:
        raise ValueError(
            f"weight_zero_point has shape {tuple(packed.shape)}, {rows} rows at {bits} bits mean {expected}"
        )
    return unpack_zero_points(packed, bits, rows).float()


def unpack_weight(tensors: dict[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """Unpack the codes [out, in] of one Linear: float8_e4m3fn, int8, or uint8 for e2m1. ``tensors`` are the Linear's
    tensors on disk by suffix (``weight_packed``, ...). Raises ValueError if ``weight_shape`` is not the shape of a
    matrix, or does not match the packed width."""
    layout = export_format(scheme)
    if layout in _WHOLE_CODES:
        return tensors["weight"]
    packed, bits = tensors["weight_packed"], scheme.weights.bits
    if layout != PACK_QUANTIZED:
        return unpack_nibbles(packed)
    shape = tensors["weight_shape"]
    if tuple(shape.shape) != (2,) or shape.is_floating_point() or not (shape > 0).all():
        raise ValueError(
            f"weight_shape is {shape.dtype} {list(shape.shape)} with the values {shape.flatten()[:4].tolist()}, "
            "expected two positive integers [out, in]"
        )
    rows, columns = shape.tolist()
    expected = (rows, packed_columns(columns, bits))
    if tuple(packed.shape) != expected:
        raise ValueError(
            f"weight_packed has shape {tuple(packed.shape)}, weight_shape {[rows, columns]} at {bits} bits means "
            f"{expected}"
        )
    codes = torch.empty(rows, columns, dtype=torch.int8)
    for chunk in _row_chunks(codes.shape, scheme.weights):
        codes[chunk] = unpack_int32(packed[chunk], bits, columns)
    return codes
