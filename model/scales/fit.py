"""Compare loaded scales with the loaded weights, without gathering weights.

Each rank checks its own range of every weight. This takes as many collectives as measuring the scales, and one more per
bucket of scales, so that every rank has the same result for whole weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.safetensors import CheckpointError, Reader
from model.ranks import raise_everywhere, reduce_over_ranks
from model.scales.arrange import GroupScale
from model.scales.codes import FileWeight, count_of_sums, local_products, other_weights
from model.scales.in_place import measure_weight_scales, scale_buckets
from model.zero import is_partitioned, local_data, local_range
from quant import Quantization, Quantizer, QuantLayer, Ranges, Scale, ScaleGroup, kernels, partial_fit
from quant.fit import Fit, scale_problem
from quant.linear import LinearPart, linears_of

_MOST = 5  # layers in an error


@dataclass
class _Member:
    """Layer of a scale group, with loaded and measured scales, each fp32 in the scheme's shape.

    Attributes:
        layer, group: the layer, and its group.
        parts: its Linears on disk.
        keys: keys of their scales in the files, in the same order.
        codes: their weights in the files, None if these only have scales.
        scale, zero: loaded effective scale and zero points.
        own, own_zero: measured ones.
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
        loaded: scales from the files, checked before.
        global_scales: their global scales, by owner of the group.
        codes: weights in the files, by the key of the scale.
        directory: of the files, for the error.

    Raises:
        RankError: on every rank: scales that do not fit (:mod:`quant.fit`) or whose codes belong to other weights
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
                    failure = failure or str(error)
                    break
            whole = sum(sum(member.sizes) for member in of_bucket)
            sums = torch.cat(local) if failure is None else torch.zeros(whole, dtype=torch.float64)
            if is_partitioned(bucket[0].s0):  # else every rank has the whole sums
                sums = reduce_over_ranks(sums)
            for member, part in zip(of_bucket, sums.split([sum(member.sizes) for member in of_bucket]), strict=True):
                problems += _judged(member, part)
    raise_everywhere(failure)
    if problems:
        more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        head = f"the scales in {directory} do not fit the weights of this model"
        raise_everywhere("\n".join([head, *problems[:_MOST], *more]))


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
    """Errors with loaded scales, squares, and errors with measured scales, of this rank's range; fp64 on the CPU."""
    layer, spec, (start, _) = member.layer, member.group.spec, local_range(member.layer.weight)
    local, shape = local_data(layer.weight), layer.weight_shape
    found = [
        partial_fit(local, start, shape, scale.to(local.device), spec, None if zero is None else zero.to(local.device))
        for scale, zero in ((member.scale, member.zero), (member.own, member.own_zero))
    ]
    return torch.cat([found[0].flatten(), found[1][0].flatten()]).cpu()


def _local_codes(member: _Member, reader: Reader) -> list[Tensor]:
    """Sums of :func:`model.scales.codes.local_products` for every Linear with codes in the files."""
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
