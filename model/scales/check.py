"""Check the scales of a checkpoint once, before any of them is written."""

from pathlib import Path

import torch

from model.ranks import listed
from model.scales.arrange import ArrangedScales, ZeroPoints
from model.scales.in_place import check_scale, check_zero_points
from model.scales.read import StoredScales
from quant import Quantization
from quant.spec import TensorSpec


def check_kind(stored: StoredScales, directory: Path) -> None:
    """Reject formats whose scales are useless without their codes, which quant.start reads."""
    if any(key.endswith(".qweight") for key in stored.tensors):
        raise ValueError(
            f"{directory} has qweight, as GPTQ, AWQ and AutoRound write codes: give it, with its config.json, as "
            "quant.start instead of quant.scales"
        )


def check_stored(arranged: ArrangedScales, directory: Path) -> None:
    """Check the scales of a checkpoint.

    Raises:
        ValueError: no scale for any layer that is quantized here (for example a wrong prefix); a scale without its
            global scale or zero points; one of another shape, not finite, zero or negative (integer weights: zero);
            zero points that are no codes, or not 0 for a symmetric scheme.
    """
    if arranged.none_used:
        raise ValueError(
            f"{directory} has no scale of a quantized layer: expected keys like {arranged.expected}, "
            f"found {listed(arranged.unused) or 'no weight_scale and no input_scale'}"
        )
    if arranged.without_global:  # other writers use another name
        raise ValueError(
            f"{directory} has no weight_global_scale beside the weight_scale of {listed(arranged.without_global)}: "
            "expected both, as compressed-tensors writes NVFP4"
        )
    for key in arranged.not_symmetric[:1]:
        raise ValueError(f"{key} is not 0, but what it belongs to has a symmetric scheme here")
    for scale in (*arranged.weights, *arranged.globals, *arranged.inputs):
        for stored in (one for of_layer in scale.layers for one in of_layer):
            check_scale(stored.key, stored.value, stored.shape, scale.group)
            if stored.zero_points is not None:
                _check_zero_points(stored.key, stored.zero_points, scale.group.spec)


# Known tensors beside the scale of a Linear. ``input_global_scale`` is for inputs whose other scales are dynamic.
_BESIDE = {
    "weight",
    "bias",
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    *("k_scale", "v_scale", "output_scale"),  # of keys and values, see model.scales.read.CACHE_SCALES
}
_MEANING = {
    "pre_quant_scale": "its weights were smoothed (AWQ, SmoothQuant)",
    "smooth_scale": "its weights were smoothed",
    "weight_g_idx": "its columns were quantized in another order (actorder: group), which no scheme here has",
    "g_idx": "its columns were quantized in another order, which no scheme here has",
    "qweight": "it is a file of GPTQ or AWQ",
    "qzeros": "it is a file of GPTQ or AWQ",
    "scales": "it is a file of GPTQ or AWQ",
}


def check_beside(quantization: Quantization, arranged: ArrangedScales, stored: StoredScales) -> None:
    """Check that no tensor beside the scales changes their meaning.

    Raises:
        ValueError: an unknown tensor of a quantized Linear, or groups of columns in another order.
    """
    specs = {
        disk: (part, quantization.layers[layer].scheme.weights)
        for layer, parts in arranged.linears.items()
        for disk, part in parts.items()
    }
    unknown: dict[str, list[str]] = {}
    for key in stored.tensors:
        disk, _, suffix = key.rpartition(".")
        if disk not in specs or suffix in _BESIDE:
            continue
        part, spec = specs[disk]
        index = stored.group_indices.get(key)
        if index is not None and spec.granularity in ("channel", "group"):
            in_order = torch.arange(part.in_features) // spec.run_length((part.out_features, part.in_features))
            if torch.equal(index.long().flatten(), in_order):
                continue
        unknown.setdefault(suffix, []).append(key)
    for suffix, keys in unknown.items():
        meaning = _MEANING.get(suffix, "what it means for the scales is not known here")
        raise ValueError(f"{stored.tensors[keys[0]].file} has {suffix} beside a scale: {meaning} ({listed(keys, 3)})")


def _check_zero_points(key: str, zero: ZeroPoints, spec: TensorSpec) -> None:
    """Reject zero points that are missing, of another shape or no codes; ``key`` is that of the scale."""
    if zero.values is None:
        raise ValueError(f"there is {key} without {zero.key}: expected both")
    if tuple(zero.values.shape) != zero.shape:
        raise ValueError(
            f"{zero.key} is {zero.values.dtype} {tuple(zero.values.shape)}, expected {zero.shape}, or packed int32 "
            f"{zero.packed_shape}"
        )
    check_zero_points(key, zero.values, spec)
