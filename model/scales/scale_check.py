"""Check the scales of a checkpoint before any of them is written: shapes, values, and a comparison with the loaded
weights. No weight is gathered: each rank checks its own range of every weight. Results are summed over ranks, so that
all ranks raise the same errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.safetensors import CheckpointError, Reader
from model.ranks import listed, raise_everywhere, raise_problems, reduce_over_ranks, words_of
from model.scales.codes import FileWeight, count_of_sums, local_products, other_weights
from model.scales.grouping import (
    GLOBAL_SCALE,
    WEIGHT_SCALE,
    ZERO_POINT,
    ArrangedScales,
    GroupScale,
    StoredScales,
    ZeroPoints,
)
from model.scales.in_place import check_scale, check_zero_points, measure_weight_scales, scale_buckets
from model.zero import is_partitioned, local_data, local_range
from quant import Quantization, Quantizer, QuantLayer, Ranges, Scale, kernels
from quant.linear import LinearPart, linears_of
from quant.observers import partial_fit
from quant.scale import Fit, scale_problem
from quant.spec import TensorSpec


def check_stored(quantization: Quantization, arranged: ArrangedScales, stored: StoredScales, directory: Path) -> None:
    """Check the scales of a checkpoint. Raises ValueError if no quantized layer has a scale (for example because of a
    wrong prefix); a scale lacks its global scale or zero points, has another shape, is not finite, zero or negative
    (integer weights: zero); or zero points are no codes, or not 0 for a symmetric scheme."""
    if len(arranged.unused) == len(stored.scales):
        raise ValueError(
            f"{directory} has no scale of a quantized layer: expected keys like {min(arranged.expected)}, "
            f"found {listed(arranged.unused) or 'no weight_scale and no input_scale'}"
        )
    linears, scales = arranged.linears, stored.scales
    above = [disk for group in quantization.global_groups for name in group.members for disk in linears[name]]
    without = [disk for disk in above if disk + WEIGHT_SCALE in scales and disk + GLOBAL_SCALE not in scales]
    if without:  # other writers use another name
        raise ValueError(
            f"{directory} has no weight_global_scale beside the weight_scale of {listed(without)}: expected both, as "
            "compressed-tensors writes NVFP4"
        )
    asymmetric = [group.owner for group in quantization.weight_groups if group.zero is not None]
    may_differ = {disk + ZERO_POINT for name in asymmetric for disk in linears[name]}
    of_layers = {key.rpartition(".")[0] for key in arranged.expected}
    for key, zero in stored.zero_points.items():
        if key.rpartition(".")[0] in of_layers and key not in may_differ and bool(zero.any()):
            raise ValueError(f"{key} is not 0, expected 0: the scheme of its layer in the recipe is symmetric")
    for scale in (*arranged.weights, *arranged.globals, *arranged.inputs):
        for one in (one for of_layer in scale.layers for one in of_layer):
            check_scale(one.key, one.value, one.shape, scale.group)
            if one.zero_points is not None:
                _check_zero_points(one.key, one.zero_points, scale.group.spec)


# Known tensors that a Linear may have in addition to its scale. ``input_global_scale`` is for inputs whose other scales
# are dynamic.
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
    *("k_scale", "v_scale", "output_scale"),  # of keys and values, see model.scales.grouping.CACHE_SCALES
}
_MEANING = {
    "pre_quant_scale": "its weights were smoothed (AWQ, SmoothQuant)",
    "smooth_scale": "its weights were smoothed",
    "weight_g_idx": "its columns were quantized in another order (actorder: group), which no scheme here has",
}


def check_beside(quantization: Quantization, arranged: ArrangedScales, stored: StoredScales) -> None:
    """Check that no other tensor of a Linear changes the meaning of its scales. Raises ValueError if the files have
    codes of GPTQ or AWQ, for which only quant.start can be used; or a quantized Linear has an unknown tensor, or groups
    of columns in another order."""
    for key, tensor in stored.tensors.items():
        if key.endswith(".qweight"):
            raise ValueError(
                f"{tensor.file.parent} has qweight, as GPTQ, AWQ and AutoRound write codes: give it, with its "
                "config.json, as quant.start instead of quant.scales"
            )
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
        file = stored.tensors[keys[0]].file
        raise ValueError(f"{file} has {suffix} beside a scale, expected only scales: {meaning} ({listed(keys, 3)})")


def _check_zero_points(key: str, zero: ZeroPoints, spec: TensorSpec) -> None:
    """Raise ValueError if zero points are missing, misshapen or not in the range of codes; ``key`` is the key of the
    scale."""
    if zero.values is None:
        raise ValueError(
            f"the files have {key} but no {zero.key}, expected both for an asymmetric scheme: use another checkpoint"
        )
    if tuple(zero.values.shape) != zero.shape:
        raise ValueError(
            f"{zero.key} is {zero.values.dtype} {tuple(zero.values.shape)}, expected {zero.shape}, or packed int32 "
            f"{zero.packed_shape}"
        )
    check_zero_points(key, zero.values, spec)


@dataclass
class _Member:
    """Layer of a scale group, with loaded and measured scales, each fp32 in the scheme's shape.

    Attributes:
        layer, spec: the layer, and the quantization of its weight.
        parts: its Linears on disk.
        keys: keys of their scales in the files, in the same order.
        codes: weights of the Linears in the files, None if the files only have scales.
        scale, zero: loaded effective scale and zero points.
        own, own_zero: measured effective scale and zero points.
    """

    layer: QuantLayer
    spec: TensorSpec
    parts: list[LinearPart]
    keys: list[str]
    codes: list[FileWeight | None]
    scale: Tensor
    zero: Tensor | None
    own: Tensor
    own_zero: Tensor | None

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor of :meth:`local_sums`."""
        coded = [part for part, code in zip(self.parts, self.codes, strict=True) if code is not None]
        return [3 * self.scale.numel(), *(count_of_sums(part, self.spec) for part in coded)]

    def local_sums(self, reader: Reader) -> list[Tensor]:
        """Compute errors with loaded scales, squared weights, and errors with measured scales, of this rank's range,
        then, for every Linear with codes in the files, the sums that compare codes and weights; fp64 on the CPU."""
        layer, (start, _), local = self.layer, local_range(self.layer.weight), local_data(self.layer.weight)

        def errors(scale: Tensor, zero: Tensor | None) -> Tensor:
            zero = None if zero is None else zero.to(local.device)
            return partial_fit(local, start, layer.weight_shape, scale.to(local.device), self.spec, zero)

        both = [errors(self.scale, self.zero).flatten(), errors(self.own, self.own_zero)[0].flatten()]
        products = [
            local_products(code, part, self.spec, local, start, layer.out_features, reader)
            for part, code in zip(self.parts, self.codes, strict=True)
            if code is not None
        ]
        return [torch.cat(both).cpu(), *products]

    def problems(self, sums: Tensor) -> list[str]:
        """Describe problems of the scales, from the sums over all ranks."""
        errors, *of_codes = sums.split(self.sizes)
        error, squares, own_error = errors.view(3, *self.scale.shape)
        whole = (self.scale, self.own, error, own_error, squares)
        products = iter(of_codes)
        problems = []
        for part, key, code in zip(self.parts, self.keys, self.codes, strict=True):
            fit = Fit(*(part.scale(each, self.spec).flatten().double() for each in whole))
            problem = scale_problem(fit, self.spec)
            if code is not None:
                problem = other_weights(next(products), self.spec) or problem
            if problem is not None:
                problems.append(f"{key}: {problem}")
        return problems


def check_fit(
    quantization: Quantization,
    loaded: Sequence[GroupScale],
    global_scales: Mapping[str, Tensor],
    codes: Mapping[str, FileWeight],
    directory: Path,
) -> None:
    """Compare loaded scales of weights with the weights, before the scales are written; a collective.

    Args:
        quantization: returned by ``quant.replace_layers``; the weights are loaded.
        loaded: scales from the files, already checked by :func:`check_stored`.
        global_scales: their global scales, by owner of the group.
        codes: weights in the files, by the key of the scale.
        directory: directory of the files, for the error.

    Raises:
        RankError: on every rank, naming the layers, both values, and the probable cause: scales do not fit
            (:mod:`quant.scale`), or their codes belong to other weights (:mod:`model.scales.codes`).
    """
    members: dict[str, list[_Member]] = _members(quantization, loaded, global_scales, codes)
    problems: list[str] = []
    failure: str | None = None
    with Reader() as reader, torch.no_grad():
        for bucket in scale_buckets([scale.group for scale in loaded]):
            of_bucket = [member for group in bucket for member in members[group.owner]]
            sizes = [sum(member.sizes) for member in of_bucket]
            try:
                sums = torch.cat([one for member in of_bucket for one in member.local_sums(reader)])
            except (OSError, CheckpointError) as error:  # on this rank only: the others are about to reduce
                failure = failure or words_of(error)
                sums = torch.zeros(sum(sizes), dtype=torch.float64)
            if is_partitioned(bucket[0].s0):  # else every rank has the whole sums
                sums = reduce_over_ranks(sums)
            for member, part in zip(of_bucket, sums.split(sizes), strict=True):
                problems += member.problems(part)
    raise_everywhere(failure)
    raise_problems(f"the scales in {directory} do not fit the weights of this model", problems)


def _members(
    quantization: Quantization,
    loaded: Sequence[GroupScale],
    global_scales: Mapping[str, Tensor],
    codes: Mapping[str, FileWeight],
) -> dict[str, list[_Member]]:
    """Collect the layers with a loaded scale, by owner of the scale group, and measure their own scales; a
    collective."""
    own = measure_weight_scales(quantization, {scale.group.owner for scale in loaded}, Ranges())
    above = {name: global_scales[group.owner] for group in quantization.global_groups for name in group.members}
    members: dict[str, list[_Member]] = {}
    for scale in loaded:
        group = scale.group
        values = (scale.value(), own[group.owner].cpu())
        (value, zero), (mine, my_zero) = ((one, None) if group.zero is None else one.unbind() for one in values)
        for name, stored in zip(group.members, scale.layers, strict=True):
            layer, keys = quantization.layers[name], [one.key for one in stored]
            quantizer = Quantizer(Scale(value, global_=above.get(name)), group.spec, layer.weight.dtype)
            effective, linears = kernels.effective_scale(quantizer), list(linears_of(name, layer))
            of_keys = [codes.get(key) for key in keys]
            member = _Member(layer, group.spec, linears, keys, of_keys, effective, zero, mine, my_zero)
            members.setdefault(group.owner, []).append(member)
    return members
