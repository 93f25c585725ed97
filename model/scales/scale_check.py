"""Check the scales of a checkpoint once, before any of them is written, and compare them with the loaded weights.

No weight is gathered. Each rank checks its own range of every weight. The check takes as many collectives as measuring
the scales, and one more per bucket of scales: its result is the same on every rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.safetensors import CheckpointError, Reader
from model.disk_errors import words_of
from model.ranks import listed, raise_everywhere, raise_problems, reduce_over_ranks
from model.scales.codes import FileWeight, count_of_sums, local_products, other_weights
from model.scales.grouping import ArrangedScales, GroupScale, ZeroPoints
from model.scales.in_place import check_scale, check_zero_points, measure_weight_scales, scale_buckets
from model.scales.read import StoredScales
from model.zero import is_partitioned, local_data, local_range
from quant import Quantization, Quantizer, QuantLayer, Ranges, Scale, ScaleGroup, kernels, partial_fit
from quant.linear import LinearPart, linears_of
from quant.scale import Fit, scale_problem
from quant.spec import TensorSpec


def check_kind(stored: StoredScales, directory: Path) -> None:
    """Reject formats whose scales are useless without their codes; only quant.start reads such formats."""
    if any(key.endswith(".qweight") for key in stored.tensors):
        raise ValueError(
            f"{directory} has qweight, as GPTQ, AWQ and AutoRound write codes: give it, with its config.json, as "
            "quant.start instead of quant.scales"
        )


def check_stored(arranged: ArrangedScales, directory: Path) -> None:
    """Check the scales of a checkpoint.

    Raises:
        ValueError: no quantized layer has a scale (for example because of a wrong prefix); a scale lacks its global
            scale or zero points, has another shape, is not finite, zero or negative (integer weights: zero); or zero
            points are no codes, or not 0 for a symmetric scheme.
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
    """Check that no other tensor of a Linear changes the meaning of its scales.

    Raises:
        ValueError: a quantized Linear has an unknown tensor, or groups of columns in another order.
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
    """Reject zero points that are missing, of another shape or no codes; ``key`` is the key of the scale."""
    if zero.values is None:
        raise ValueError(f"there is {key} without {zero.key}: expected both")
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
        layer, group: the layer, and its scale group.
        parts: its Linears on disk.
        keys: keys of their scales in the files, in the same order.
        codes: weights of the Linears in the files, None if the files only have scales.
        scale, zero: loaded effective scale and zero points.
        own, own_zero: measured effective scale and zero points.
    """

    layer: QuantLayer
    group: ScaleGroup
    parts: list[LinearPart]
    keys: list[str]
    codes: list[FileWeight | None]
    scale: Tensor
    zero: Tensor | None
    own: Tensor
    own_zero: Tensor | None
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        of_codes = [
            count_of_sums(part, self.group.spec)
            for part, code in zip(self.parts, self.codes, strict=True)
            if code is not None
        ]
        self.sizes = [3 * self.scale.numel(), *of_codes]


def check_fit(
    quantization: Quantization,
    loaded: Sequence[GroupScale],
    global_scales: Mapping[str, Tensor],
    codes: Mapping[str, FileWeight],
    directory: Path,
) -> None:
    """Compare loaded scales of weights with the weights, before the scales are written; a collective.

    Args:
        quantization: returned by ``quant.prepare``; the weights are loaded.
        loaded: scales from the files, already checked by :func:`check_stored`.
        global_scales: their global scales, by owner of the group.
        codes: weights in the files, by the key of the scale.
        directory: directory of the files, for the error.

    Raises:
        RankError: on every rank: scales that do not fit (:mod:`quant.scale`) or whose codes belong to other weights
            (:mod:`model.scales.codes`). The text names the layers, both values, and the probable cause.
    """
    members: dict[str, list[_Member]] = {scale.group.owner: [] for scale in loaded}
    for member in _members(quantization, loaded, global_scales, codes):
        members[member.group.owner].append(member)
    problems: list[str] = []
    failure: str | None = None
    with Reader() as reader, torch.no_grad():
        for bucket in scale_buckets([scale.group for scale in loaded]):
            of_bucket = [member for group in bucket for member in members[group.owner]]
            local = []
            for member in of_bucket:
                try:
                    local += [_local_errors(member), *_local_codes(member, reader)]
                except (OSError, CheckpointError) as error:  # on this rank only: the others are about to reduce
                    failure = failure or words_of(error)
                    break
            whole = sum(sum(member.sizes) for member in of_bucket)
            sums = torch.cat(local) if failure is None else torch.zeros(whole, dtype=torch.float64)
            if is_partitioned(bucket[0].s0):  # else every rank has the whole sums
                sums = reduce_over_ranks(sums)
            for member, part in zip(of_bucket, sums.split([sum(member.sizes) for member in of_bucket]), strict=True):
                problems += _judged(member, part)
    raise_everywhere(failure)
    raise_problems(f"the scales in {directory} do not fit the weights of this model", problems)


def _members(
    quantization: Quantization,
    loaded: Sequence[GroupScale],
    global_scales: Mapping[str, Tensor],
    codes: Mapping[str, FileWeight],
) -> Iterator[_Member]:
    """Yield every layer with a loaded scale, and measure its own scales; a collective."""
    owners = {scale.group.owner for scale in loaded}
    own = measure_weight_scales(quantization, owners, Ranges())
    above = {name: global_scales[group.owner] for group in quantization.global_groups for name in group.members}
    for scale in loaded:
        group = scale.group
        (value, zero), (mine, my_zero) = (_split(each, group) for each in (scale.value(), own[group.owner].cpu()))
        for name, stored in zip(group.members, scale.layers, strict=True):
            layer, keys = quantization.layers[name], [one.key for one in stored]
            quantizer = Quantizer(Scale(value, global_=above.get(name)), group.spec, layer.weight.dtype)
            yield _Member(
                layer,
                group,
                list(linears_of(name, layer)),
                keys,
                [codes.get(key) for key in keys],
                kernels.effective_scale(quantizer),
                zero,
                mine,
                my_zero,
            )


def _split(value: Tensor, group: ScaleGroup) -> tuple[Tensor, Tensor | None]:
    """Split a value of :func:`model.scales.in_place.write_scales` into scales and zero points."""
    return (value, None) if group.zero is None else (value[0], value[1])


def _local_errors(member: _Member) -> Tensor:
    """Compute errors with loaded scales, squared weights, and errors with measured scales, of this rank's range; fp64
    on the CPU."""
    layer, spec, (start, _) = member.layer, member.group.spec, local_range(member.layer.weight)
    local, shape = local_data(layer.weight), layer.weight_shape
    found = [
        partial_fit(local, start, shape, scale.to(local.device), spec, None if zero is None else zero.to(local.device))
        for scale, zero in ((member.scale, member.zero), (member.own, member.own_zero))
    ]
    return torch.cat([found[0].flatten(), found[1][0].flatten()]).cpu()


def _local_codes(member: _Member, reader: Reader) -> list[Tensor]:
    """Compute the sums of :func:`model.scales.codes.local_products` for every Linear with codes in the files."""
    layer, (start, _) = member.layer, local_range(member.layer.weight)
    local = local_data(layer.weight)
    return [
        local_products(code, part, member.group.spec, local, start, layer.out_features, reader)
        for part, code in zip(member.parts, member.codes, strict=True)
        if code is not None
    ]


def _judged(member: _Member, sums: Tensor) -> list[str]:
    """Describe problems of the scales of a layer's Linears, from the sums over all ranks."""
    errors, *of_codes = sums.split(member.sizes)
    shape, spec = member.scale.shape, member.group.spec
    error, squares, own_error = errors.view(3, *shape)
    whole = (member.scale, member.own, error, own_error, squares)
    products = iter(of_codes)
    problems = []
    for part, key, code in zip(member.parts, member.keys, member.codes, strict=True):
        fit = Fit(*(part.scale(each, spec).flatten().double() for each in whole))
        problem = scale_problem(fit, spec)
        if code is not None:
            problem = other_weights(next(products), spec) or problem
        if problem is not None:
            problems.append(f"{key}: {problem}")
    return problems
