"""Codes and scales of one Linear as ModelOpt (NVIDIA Model Optimizer) stores them, for vLLM, SGLang and TensorRT-LLM.

The tensors hold the codes and scales of compressed-tensors, with these differences, as in ModelOpt's
``unified_export_hf.py`` and ``nvfp4_tensor.py`` and vLLM's ``modelopt.py``:

- A single scale has no dimension, scales per row are ``[out]``, and scales per block ``[out / 128, 1, in / 128, 1]``.
- Codes of NVFP4 and MXFP4 are called ``weight`` (uint8 [out, in / 2]).
- NVFP4 has the reciprocals of the global scales: values are ``code * weight_scale * weight_scale_2``, where
  ``weight_scale_2`` is absmax / (6 * 448), and ``input_scale`` is that of the inputs.

fp32 does not hold every reciprocal exactly: for one number in six, the reciprocal of its reciprocal is its neighbor. So
effective scales of NVFP4 differ by a relative 2^-24 between the two formats, and :func:`reciprocal` returns the number
of the file that was read, if it belongs to the same global scale.

Three algorithms have weights of 4 bits and inputs in fp8. This is what they store, according to ModelOpt a2fbac7
(``quant_utils.py``: ``get_weight_scaling_factor``, ``get_weight_scaling_factor_2``, ``pack_int4_in_uint8``,
``to_quantized_weight``; ``unified_export_hf.py``: ``_export_quantized_weight``; ``mxfp4_tensor.py``) and to readers in
TensorRT-LLM (``_torch/modules/linear.py`` and ``fused_moe/quantization.py``; vLLM's ``modelopt.py`` reads none):

- ``W4A8_MXFP4_FP8``: ``weight`` uint8 [out, in / 2], two e2m1 codes a byte, the first in the low half, zeros as -0;
  ``weight_scale`` uint8 [out, in / 32], an exponent plus 127; ``input_scale`` fp32, absmax / 448, if inputs were
  calibrated, which ModelOpt's preset does not do. TensorRT-LLM's experts need ``input_scale``, its other layers ignore
  it and take the maximum of each call.
- ``W4A8_NVFP4_FP8``: ``weight`` uint8 [out, in / 2], packed as above; ``weight_scale`` e4m3 [out, in / 32], at most
  448 / 6; ``weight_scale_2`` fp32, absmax / 448 (not 2688), as kernels decode ``code * weight_scale`` to fp8 (a comment
  there says so); ``input_scale`` fp32, absmax / 448.
- ``W4A8_AWQ``: ``weight`` uint8 [out / 2, in], two's complement of 4 bits, row 2 i in the low half and row 2 i + 1 in
  the high half; ``weight_scale`` fp32 [out, in / 128], absmax / 7; ``weight_scale_2`` fp32, absmax / 448 of the int4
  weights, which are then rounded to fp8; ``pre_quant_scale`` [in], by which inputs are multiplied before they are
  quantized with ``input_scale`` fp32, unless it is merged into the norm before the layer.

The last two are refused (:data:`REFUSED`): no scheme here rounds weights twice, or multiplies inputs.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quant.formats.compressed_tensors import Shapes
from quant.spec import FP8_TENSOR, SCHEMES, Scheme, TensorSpec

# Schemes by ModelOpt's names of them (``quant_algo``).
ALGORITHMS = {
    "FP8": SCHEMES["fp8_static"],
    "FP8_PER_CHANNEL_PER_TOKEN": SCHEMES["fp8_dynamic"],
    "FP8_PB_WO": Scheme("FP8_PB_WO", SCHEMES["fp8_block"].weights),
    "NVFP4": SCHEMES["nvfp4_w4a4"],
    "W4A16_NVFP4": SCHEMES["nvfp4"],
    "W4A8_MXFP4_FP8": Scheme("W4A8_MXFP4_FP8", SCHEMES["mxfp4"].weights, FP8_TENSOR),
}
# Schemes of Linears without input_scale, by the name of the scheme in ALGORITHMS, where the algorithm allows both.
DYNAMIC = {
    "W4A8_MXFP4_FP8": Scheme("W4A8_MXFP4_FP8_DYNAMIC", SCHEMES["mxfp4"].weights, SCHEMES["fp8_dynamic"].activations),
}
# Algorithms that no scheme has: why, and the nearest preset.
REFUSED = {
    "W4A8_AWQ": ("has inputs multiplied by pre_quant_scale, and weights rounded to int4 and again to fp8", "w4a8_fp8"),
    "W4A8_NVFP4_FP8": ("has weights in groups of 32 rounded to fp4 and again to fp8", "mxfp4_mxfp8"),
}
MIXED = "MIXED_PRECISION"
# Names of the tensors of NVFP4 and MXFP4, by compressed-tensors' suffix. The last two are reciprocals.
_NAMES = {
    "weight_packed": "weight",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
}
RECIPROCALS = ("weight_scale_2", "input_scale")


def algorithm(scheme: Scheme) -> str:
    """Return ModelOpt's name of a scheme. Raises ValueError if ModelOpt has no name for the scheme."""
    for name, known in (*ALGORITHMS.items(), *DYNAMIC.items()):
        if (known.weights, known.activations) == (scheme.weights, scheme.activations):
            return name
    presets = ", ".join(known.name for known in ALGORITHMS.values() if known.name in SCHEMES)
    raise ValueError(f"layout 'modelopt' holds {presets}, got {scheme.name}; use layout 'compressed'")


def names_of(scheme: Scheme) -> dict[str, str]:
    """Map suffixes of a Linear's tensors from compressed-tensors to ModelOpt; equal suffixes are left out."""
    return _NAMES if scheme.weights.dtype == "fp4_e2m1" else {}


def modelopt_shapes(shapes: Shapes, scheme: Scheme) -> Shapes:
    """Convert the dtypes and shapes of a Linear's tensors, by suffix, from compressed-tensors' to ModelOpt's."""
    names = names_of(scheme)
    return {names.get(key, key): (dtype, _shape(key, shape, scheme)) for key, (dtype, shape) in shapes.items()}


def _shape(suffix: str, shape: tuple[int, ...], scheme: Scheme) -> tuple[int, ...]:
    if shape == (1,) and suffix.endswith("_scale"):
        return ()
    if suffix == "weight_scale" and scheme.weights.granularity == "channel":
        return shape[:1]
    if suffix == "weight_scale" and scheme.weights.granularity == "block":
        return (shape[0], 1, shape[1], 1)
    return shape


def modelopt_tensors(
    packed: Mapping[str, Tensor], scheme: Scheme, source: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Convert a Linear's tensors, by suffix, from compressed-tensors' to ModelOpt's. ``source`` has the tensors
    :data:`RECIPROCALS` of the file from which the scales were read, by suffix; None if they were not read from one."""
    names, source = names_of(scheme), source or {}
    converted = {}
    for suffix, tensor in packed.items():
        name, shape = names.get(suffix, suffix), _shape(suffix, tuple(tensor.shape), scheme)
        if suffix in names and name in RECIPROCALS:
            tensor = reciprocal(tensor, source.get(name))
        converted[name] = tensor.reshape(shape)
    return converted


def reciprocal(scale: Tensor, stored: Tensor | None) -> Tensor:
    """Return the reciprocal of a global scale, fp32 ``(1,)``: ``stored`` if ``scale`` is exactly the reciprocal of
    ``stored``, else ``1 / scale``."""
    if stored is not None and torch.equal(1 / stored.reshape(scale.shape), scale):
        return stored
    return 1 / scale


def modelopt_config(
    layers: Mapping[str, Scheme], skipped: Iterable[str], kv_cache: TensorSpec | None
) -> dict[str, Any]:
    """Build the object ``quantization`` of ``hf_quant_config.json``: one algorithm, or one for each layer. ``skipped``
    are names of modules that are not quantized, with the wildcard ``*``. Raises ValueError if no layer is quantized,
    which readers refuse, or a scheme has no algorithm."""
    kinds = {name: _entry(scheme) for name, scheme in layers.items()}
    if not kinds:
        raise ValueError("layout 'modelopt' needs quantized layers, not only a KV cache; use layout 'compressed'")
    config: dict[str, Any] = {"kv_cache_quant_algo": None if kv_cache is None else "FP8"}
    one = next(iter(kinds.values()))
    if all(kind == one for kind in kinds.values()):
        return {**one, **config, "exclude_modules": list(dict.fromkeys(skipped))}
    return {"quant_algo": MIXED, **config, "quantized_layers": kinds}


def _entry(scheme: Scheme) -> dict[str, Any]:
    entry: dict[str, Any] = {"quant_algo": algorithm(scheme)}
    return entry | ({"group_size": scheme.weights.group_size} if scheme.weights.dtype == "fp4_e2m1" else {})


def modelopt_in_config(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of :func:`modelopt_config` to the ``quantization_config`` of config.json, in which vLLM looks
    first."""
    others = ("exclude_modules", "kv_cache_quant_algo")
    config = {"quant_method": "modelopt", **{key: one for key, one in quantization.items() if key not in others}}
    config["ignore"] = quantization.get("exclude_modules", [])
    if quantization["kv_cache_quant_algo"] is not None:
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return config
