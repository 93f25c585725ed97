"""Scales into their Parameters: read from a PTQ checkpoint, or measured from the weights where they lie.

A scale ``s = s0 * exp(theta)`` is loaded or measured into ``s0``, a frozen fp32 Parameter, while theta stays 0: step 0
computes the PTQ model. Under ZeRO-3 ``s0`` is partitioned like any Parameter and written through
``GatheredParameters``; being frozen it has no fp32 master copy, so that this also holds after ``deepspeed.initialize``.

Weights are measured from the partitions: each rank takes the largest values of its own range, and one all-reduce of
the maxima (a few bytes per scale) gives the scale. No weight is gathered.

Of a weight that is not symmetric, what is read, measured and written is ``[2, *scale shape]``: scales, then zero
points, so that neither changes without the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from model.names import module_name_on_disk
from model.ranks import errors_on_all_ranks, listed, raise_everywhere, reduce_over_ranks
from model.zero import (
    full_numel,
    full_shape,
    gathered,
    is_partitioned,
    local_data,
    local_range,
    release,
)
from quant import (
    SCALE_PARAMETERS,
    Quantization,
    QuantLayer,
    ScaleGroup,
    combine,
    partial_clipped,
    partial_errors,
    partial_squares,
    partial_stats,
    scales_from_errors,
    scales_from_stats,
    zero_points_from_stats,
)
from quant.experts import LinearPart, linears_of
from quant.export import bad_zero_points
from quant.packing import packed_columns, unpack_zero_points
from quant.reference import E8M0_BIAS
from quant.spec import FP8_MAX, FP8_TENSOR, TensorSpec

# Scales as their keys on disk end. Those of the KV cache have several spellings (llm-compressor's now and before, and
# ModelOpt's), under the name of the attention module.
LAYER_SCALES = (".weight_scale", ".weight_global_scale", ".input_scale")
ZERO_POINT = ".weight_zero_point"
CACHE_SCALES = {
    "k_cache": (".k_scale", ".k_cache.scale", ".k_proj.k_scale"),
    "v_cache": (".v_scale", ".v_cache.scale", ".v_proj.v_scale"),
}

# Scales held at full size at a time while measuring or writing. Group scales are 1/32 of the weights' number or fewer.
BUCKET_ELEMENTS = 16 * 2**20


@dataclass(frozen=True)
class ScaleReport:
    """Where the scales came from: owners of scale groups. A layer may own a group of weights and one of inputs.

    Attributes:
        weights_loaded, inputs_loaded: had their scale in a file.
        weights_measured: had none, and were measured.
        inputs_initial: had none, and got the recipe's initial value.
        inputs_missing: have none yet.
        unused: keys in the files of layers that are not quantised here.
    """

    weights_loaded: list[str]
    weights_measured: list[str]
    inputs_loaded: list[str]
    inputs_initial: list[str]
    inputs_missing: list[str]
    unused: list[str]

    def summary(self) -> str:
        """One line for people."""
        parts = [f"{len(self.weights_loaded)} of weights and {len(self.inputs_loaded)} of inputs loaded"]
        if self.weights_measured:
            parts.append(f"{len(self.weights_measured)} measured from the weights ({listed(self.weights_measured)})")
        if self.inputs_initial:
            parts.append(f"{len(self.inputs_initial)} of inputs set to the initial value")
        if self.inputs_missing:
            parts.append(f"{len(self.inputs_missing)} of inputs to calibrate ({listed(self.inputs_missing)})")
        if self.unused:
            parts.append(
                f"{len(self.unused)} in the files of layers that are not quantised here ({listed(self.unused)})"
            )
        return "scales: " + ", ".join(parts)


def write_scales(groups: Sequence[ScaleGroup], values: Mapping[str, Tensor]) -> None:
    """Make each group's scale ``values[group.owner]`` by writing its s0; a collective under ZeRO-3.

    Theta is left as it is and s0 takes the rest, ``s0 = value / exp(theta)``: theta has an fp32 master copy and moments
    in the optimizer, which a write here would not reach. Before training theta is 0 and s0 is the value itself.

    Args:
        groups: scale groups; those whose owner has no value are left as they are.
        values: fp32 tensors of the group's scale shape (with zero points ``[2, *scale shape]``), on any device. Only
            rank 0's are used, but every rank must pass the same owners.

    Raises:
        ValueError: a scale that is not finite and positive (or, of integer weights, not 0), a zero point that is none
            of the codes, or another shape; before anything is written.
    """
    chosen = [group for group in groups if group.owner in values]
    for group in chosen:
        _checked(f"the scale of {group.owner}", values[group.owner], group)
    for bucket in _buckets(chosen):
        with gathered([p for group in bucket for p in group.parameters], modifier_rank=0), torch.no_grad():
            for group in bucket:
                value = _write_zero_points(group, values[group.owner].to(group.s0.device))
                group.s0.copy_(value if group.theta is None else value / group.theta.float().exp())


def _write_zero_points(group: ScaleGroup, value: Tensor) -> Tensor:
    """The scales alone, after the zero points beside them have been written."""
    if group.zero is None:
        return value
    group.zero.copy_(value[1])
    return value[0]


def release_scales(engine: deepspeed.DeepSpeedEngine, quantization: Quantization) -> None:
    """Let ZeRO-3 gather scales on the way, beside the weights that come next, not each by itself after every step."""
    release(
        engine,
        (
            parameter
            for module in quantization.modules.values()
            for name, parameter in module.named_parameters(recurse=False)
            if name in SCALE_PARAMETERS
        ),
    )


def renew_weight_scales(quantization: Quantization, owners: set[str] | None = None) -> None:
    """Measure weights as they are now and write their scales, global ones too; a collective.

    Args:
        quantization: what ``quant.prepare`` returned.
        owners: of the weight groups to measure; all of them by default.

    Raises:
        RankError: a weight holds NaN or Inf (on every rank, naming the layers).
    """
    write_scales(quantization.weight_groups, measure_weight_scales(quantization, owners))
    write_scales(quantization.global_groups, _global_scales(quantization, owners))


def follow_weights(quantization: Quantization) -> None:
    """Make every s0 the absmax scale of the weight as it is now, whatever theta is, and zero points those of its range;
    a collective under ZeRO-3.

    With a theta that learns, ``exp(theta)`` is then the share of the range that is kept: learnable weight clipping
    (OmniQuant, Shao et al. 2024, section 3.2, where a sigmoid stands for the exponential).
    """
    for bucket in _buckets(quantization.weight_groups):
        stats = _bucket_stats(quantization, bucket)
        written = [p for group in bucket for p in (group.s0, group.zero) if p is not None]
        with gathered(written, modifier_rank=0), torch.no_grad():
            for group, stat in zip(bucket, stats, strict=True):
                scales = scales_from_stats(stat, group.spec, signed=quantization.ranges.signs(group.spec))
                group.s0.copy_(_write_zero_points(group, _with_zero_points(scales, stat, group.spec)))
    write_scales(quantization.global_groups, _global_scales(quantization, None))


def measure_weight_scales(quantization: Quantization, owners: set[str] | None = None) -> dict[str, Tensor]:
    """Initial scales of the weights as they are now, by owner of the scale group; a collective.

    What they fit is said by ``quantization.ranges``.

    Args:
        quantization: what ``quant.prepare`` returned.
        owners: measure these groups only; all of them by default.

    Returns:
        fp32 tensors of the groups' scale shapes (with zero points ``[2, *scale shape]``), equal on every rank. Write
        them with :func:`write_scales`.

    Raises:
        RankError: a weight holds NaN or Inf (on every rank, naming the layers).
    """
    ranges = quantization.ranges
    groups = [group for group in quantization.weight_groups if owners is None or group.owner in owners]
    values: dict[str, Tensor] = {}
    bad: list[str] = []
    for bucket in _buckets(groups):
        for group, stats in zip(bucket, _bucket_stats(quantization, bucket), strict=True):
            if not bool(torch.isfinite(stats).all()):
                bad.append(group.owner)
                continue
            if ranges.searches(group.spec):
                scales = _searched(quantization, group, stats)
            else:
                scales = scales_from_stats(stats, group.spec, signed=ranges.signs(group.spec))
            values[group.owner] = _with_zero_points(scales, stats, group.spec)
    raise_everywhere(f"weights with NaN or Inf cannot be quantised: {listed(bad)}" if bad else None)
    return values


def _with_zero_points(scales: Tensor, stats: Tensor, spec: TensorSpec) -> Tensor:
    """What :func:`write_scales` takes."""
    zero = zero_points_from_stats(stats, spec)
    return scales if zero is None else torch.stack([scales, zero])


def _bucket_stats(quantization: Quantization, bucket: Sequence[ScaleGroup]) -> list[Tensor]:
    """Statistics of whole weights, one tensor per group; a collective."""
    stats = [_local_stats(quantization, group) for group in bucket]
    flat = reduce_over_ranks(torch.cat([stat.flatten() for stat in stats]), dist.ReduceOp.MAX)
    parts = flat.split([stat.numel() for stat in stats])
    return [part.view_as(stat) for part, stat in zip(parts, stats, strict=True)]


def _global_scales(quantization: Quantization, owners: set[str] | None) -> dict[str, Tensor]:
    """NVFP4's second scale, one for what serving fuses, by owner: the largest scale of a group becomes 448.

    Of the sets with a layer in ``owners``, if given. ``448 * 6 / absmax``, as compressed-tensors stores it.
    """
    groups = [g for g in quantization.global_groups if owners is None or not owners.isdisjoint(g.members)]
    if not groups:
        return {}
    absmax = [_local_stats(quantization, group, FP8_TENSOR).amax(0) for group in groups]
    reduced = reduce_over_ranks(torch.cat(absmax), dist.ReduceOp.MAX).split([one.numel() for one in absmax])
    scales = {group.owner: FP8_MAX * group.spec.qmax / one for group, one in zip(groups, reduced, strict=True)}
    # Of nothing but zeros, which are exact under any scale.
    return {owner: torch.where(scale.isinf(), 1.0, scale) for owner, scale in scales.items()}


@dataclass(frozen=True)
class WeightStatistics:
    """How the weights of one layer fit their scales now."""

    clipped: float
    """Fraction of the weights outside the range."""
    error: float
    """Squared quantisation error over the squared weights."""
    scale: float
    """Geometric mean of the magnitudes of the effective scales."""


def weight_statistics(quantization: Quantization) -> dict[str, WeightStatistics]:
    """Statistics of every layer's weight, by the layer's name; a collective.

    Every rank looks at its own partition, with the scales as the forward uses them. Scales are gathered, weights not.
    """
    groups = quantization.weight_groups
    if not groups:
        return {}
    names, sums, scales = [], [], []
    for bucket in _buckets(groups):
        parameters = [p for group in bucket for p in group.parameters]
        parameters += _global_scales_of(quantization, bucket)
        with gathered(parameters), torch.no_grad():
            for name in (name for group in bucket for name in group.members):
                layer = quantization.layers[name]
                names.append(name)
                sums.append(_local_sums(layer))
                scales.append(layer.weight_scale().abs().log().mean().cpu())
    whole = torch.stack(sums)
    # Where weights are not partitioned, every rank has counted all of them.
    if is_partitioned(groups[0].s0):
        whole = reduce_over_ranks(whole)
    return {
        name: WeightStatistics(
            clipped / math.prod(quantization.layers[name].weight_shape),
            error / energy if energy else 0.0,
            math.exp(scale),
        )
        for name, (clipped, error, energy), scale in zip(names, whole.tolist(), scales, strict=True)
    }


def _global_scales_of(quantization: Quantization, bucket: Sequence[ScaleGroup]) -> list[nn.Parameter]:
    """The second scales that the effective ones of these groups are formed with, each once."""
    used = [quantization.layers[name].weight_global for group in bucket for name in group.members]
    return list({id(scale): scale for scale in used if scale is not None}.values())


def input_scales(quantization: Quantization) -> dict[str, float]:
    """Every effective activation scale, by owner of its group; a collective under ZeRO-3."""
    groups, modules = quantization.input_groups, quantization.modules
    found = {}
    for bucket in _buckets(groups):
        with gathered([p for group in bucket for p in group.parameters]), torch.no_grad():
            for group in bucket:
                scale = modules[group.owner].input_scale()
                assert scale is not None
                found[group.owner] = scale.item()
    return found


def _local_sums(layer: QuantLayer) -> Tensor:
    """Clipped weights, squared errors and squared weights of this rank's range, fp64 [3] on the CPU."""
    start, _ = local_range(layer.weight)
    spec, shape = layer.scheme.weights, layer.weight_shape
    local = local_data(layer.weight)
    # An offloaded partition is on the CPU, what is gathered on the GPU.
    scale = layer.weight_scale().to(local.device)
    zero = None if layer.weight_zero is None else layer.weight_zero.to(local.device)
    clipped = partial_clipped(local, start, shape, scale, spec, zero)
    return torch.cat([clipped.double().view(1), partial_squares(local, start, shape, scale, spec, zero)]).cpu()


def _searched(quantization: Quantization, group: ScaleGroup, stats: Tensor) -> Tensor:
    """Scales of the smallest squared error over all ranks' ranges; ``stats`` are of the whole weights. A collective."""
    spec, errors = group.spec, torch.zeros((), device=stats.device)
    signed = quantization.ranges.signs(spec)
    for name in group.members:
        layer = quantization.layers[name]
        start, _ = local_range(layer.weight)
        flat, shape = local_data(layer.weight), layer.weight_shape
        errors = errors + partial_errors(flat, start, shape, stats, spec, signed=signed)
    # Where weights are not partitioned every rank adds the same errors: the smallest stays the smallest.
    return scales_from_errors(stats, reduce_over_ranks(errors), spec, signed=signed)


def _local_stats(quantization: Quantization, group: ScaleGroup, spec: TensorSpec | None = None) -> Tensor:
    """Statistics of this rank's share of the group's weights, for its spec or another one; NaN counts as Inf so that a
    MAX reduction keeps it."""
    total: Tensor | None = None
    for name in group.members:
        layer = quantization.layers[name]
        start, _ = local_range(layer.weight)
        stat = partial_stats(local_data(layer.weight), start, layer.weight_shape, spec or group.spec)
        stat = torch.where(torch.isnan(stat), torch.inf, stat)
        total = stat if total is None else combine(total, stat)
    assert total is not None, f"the scale group of {group.owner} has no members"
    return total


def _buckets(groups: Sequence[ScaleGroup]) -> Iterator[list[ScaleGroup]]:
    """Consecutive groups of at most ``BUCKET_ELEMENTS`` scales: one collective each, and bounded memory."""
    bucket: list[ScaleGroup] = []
    elements = 0
    for group in groups:
        if bucket and elements + full_numel(group.s0) > BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(group)
        elements += full_numel(group.s0)
    if bucket:
        yield bucket


def load_scales(
    model: PreTrainedModel,
    quantization: Quantization,
    directory: str | Path,
    *,
    initial_input_scale: float | None = None,
    inputs_calibrated_later: bool = False,
) -> ScaleReport:
    """Read the scales of a PTQ checkpoint into the model; a collective.

    Keys are ``<layer>.weight_scale`` (NVFP4: and ``weight_global_scale``; not symmetric: and ``weight_zero_point``) and
    ``<layer>.input_scale`` with the layers' names on disk, and ``<attention>.k_scale`` (or ``k_cache.scale``) and
    ``v_scale``, in any file of the directory, of shape ``()``, ``[1]`` or the scale's own. Layers that share one take
    the largest of theirs (the smallest of global scales, which divide), as engines do when they fuse them. Where
    the weight scale of any member is missing, the whole group is measured from the weights, and listed in the report.

    Args:
        model: the quantised model; the weights are loaded.
        quantization: what ``quant.prepare`` returned for it.
        directory: a directory with ``*.safetensors``.
        initial_input_scale: for activation scales that no file holds.
        inputs_calibrated_later: leave activation scales that no file holds to a calibration in place.

    Raises:
        RankError: on every rank: no such directory, a damaged file, a scale of another shape, zero, negative or not
            finite, NVFP4's without a global one, a zero point that is missing or, of what is symmetric here, not 0, or
            an activation scale that is missing without a way to get it.
    """
    with errors_on_all_ranks(OSError, ValueError, SafetensorError):
        found, zero_points = _read_scales(Path(directory))
        on_disk = {
            name: [module_name_on_disk(model, part.name) for part in linears_of(name, layer)]
            for name, layer in quantization.layers.items()
        }
        keys = {kind: {n: [disk + kind for disk in disks] for n, disks in on_disk.items()} for kind in LAYER_SCALES}
        keys[".input_scale"] |= {name: cache_keys(model, name) for name in quantization.caches}
        unused = _unused(Path(directory), found, keys)
        _check_global_scales(quantization, found, on_disk, Path(directory))
        found = _without_global_scales(found)
        _stack(quantization, found, keys)
        _add_zero_points(quantization, found, zero_points, on_disk, keys)
        weights, missing_weights = _group_values(quantization.weight_groups, found, keys[".weight_scale"])
        # With the smallest of several global scales no scale of their layers is beyond e4m3.
        global_scales, missing_globals = _group_values(
            quantization.global_groups, found, keys[".weight_global_scale"], smallest=True
        )
        # q, k and v see one tensor, and an expert that calibration never reached has no scale of its own: any member's
        # input scale will do. Each weight needs its own.
        inputs, missing_inputs = _group_values(quantization.input_groups, found, keys[".input_scale"], any_member=True)
        if missing_inputs and initial_input_scale is None and not inputs_calibrated_later:
            raise ValueError(
                f"{directory} has no input scale for {listed(missing_inputs)}. Set quant.calibration_batches to "
                "measure them in place, or quant.initial_input_scale, or name a PTQ checkpoint that has them"
            )
    report = ScaleReport(
        weights_loaded=list(weights),
        weights_measured=missing_weights,
        inputs_loaded=list(inputs),
        inputs_initial=[] if initial_input_scale is None else missing_inputs,
        inputs_missing=missing_inputs if initial_input_scale is None else [],
        unused=unused,
    )
    if missing_weights:
        weights |= measure_weight_scales(quantization, set(missing_weights))
    if initial_input_scale is not None:
        inputs |= {owner: torch.tensor([initial_input_scale]) for owner in missing_inputs}
    if missing_globals:
        global_scales |= _global_scales(quantization, set(missing_globals))
    write_scales(quantization.weight_groups, weights)
    write_scales(quantization.global_groups, global_scales)
    write_scales(quantization.input_groups, inputs)
    return report


def _read_scales(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every scale of the directory's safetensors files, fp32, and every zero point as it is stored, by key."""
    endings = (*LAYER_SCALES, *(ending for spellings in CACHE_SCALES.values() for ending in spellings))
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no *.safetensors file: expected a PTQ checkpoint")
    found: dict[str, Tensor] = {}
    zero_points: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                for key in reader.keys():  # noqa: SIM118 (a safe_open handle is not iterable)
                    if key.endswith(endings):
                        scale = reader.get_tensor(key)
                        # A power of two is stored as its exponent.
                        found[key] = (
                            torch.exp2(scale.float() - E8M0_BIAS) if scale.dtype == torch.uint8 else scale.float()
                        )
                    elif key.endswith("zero_point"):
                        zero_points[key] = reader.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    return found, zero_points


def _add_zero_points(
    quantization: Quantization,
    found: dict[str, Tensor],
    zero_points: Mapping[str, Tensor],
    on_disk: Mapping[str, Sequence[str]],
    keys: Mapping[str, Mapping[str, Sequence[str]]],
) -> None:
    """Make scales that ``keys`` name ``[2, *scale shape]``, zero points beside them, where a group has these.

    Raises:
        ValueError: scales without zero points, or zero points of another shape; zero points that are not 0 of what is
            symmetric here.
    """
    groups = [group for group in quantization.weight_groups if group.zero is not None]
    expected = {name + ZERO_POINT for group in groups for name in on_disk[group.owner]}
    known = {name.rpartition(".")[0] for some in keys.values() for names in some.values() for name in names}
    known |= {name for names in on_disk.values() for name in names}
    for key, zero in zero_points.items():
        if key.rpartition(".")[0] in known and key not in expected and bool(zero.any()):
            raise ValueError(f"{key} is not 0, but what it belongs to has a symmetric scheme here")
    for group in groups:
        (key,) = keys[".weight_scale"][group.owner]
        if key in found:
            scales = _usable(key, found[key], full_shape(group.s0), group)
            parts = zip(on_disk[group.owner], linears_of(group.owner, quantization.layers[group.owner]), strict=True)
            zeros = [_zero_points(zero_points, name, part, group.spec) for name, part in parts]
            found[key] = torch.stack([scales.reshape(-1), torch.cat(zeros)]).view(2, *full_shape(group.s0))


def _zero_points(zero_points: Mapping[str, Tensor], name: str, part: LinearPart, spec: TensorSpec) -> Tensor:
    """Those of one Linear, fp32, flat; packed in the file or not."""
    if (stored := zero_points.get(name + ZERO_POINT)) is None:
        raise ValueError(f"there is {name}.weight_scale without {name}{ZERO_POINT}: expected both")
    shape = spec.scale_shape((part.out_features, part.in_features))
    packed = (packed_columns(shape[0], spec.bits), shape[1])
    if stored.dtype == torch.int32 and stored.shape == packed:
        stored = unpack_zero_points(stored, spec.bits, shape[0])
    if tuple(stored.shape) != shape:
        raise ValueError(
            f"{name}{ZERO_POINT} is {stored.dtype} {tuple(stored.shape)}, expected {shape}, or packed int32 {packed}"
        )
    return stored.float().flatten()


def _without_global_scales(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """NVFP4 stores a weight's scales times a global one: this makes them what a code is multiplied with."""
    whole = {}
    for key, scale in found.items():
        divisor = found.get(f"{key.removesuffix('_scale')}_global_scale")
        whole[key] = scale if divisor is None else scale / divisor
    return whole


def _check_global_scales(
    quantization: Quantization, found: Mapping[str, Tensor], on_disk: Mapping[str, Sequence[str]], directory: Path
) -> None:
    """Of NVFP4 a scale says nothing without its global one, which other writers may spell in another way."""
    layers = [disk for group in quantization.global_groups for name in group.members for disk in on_disk[name]]
    alone = [n for n in layers if f"{n}.weight_scale" in found and f"{n}.weight_global_scale" not in found]
    if alone:
        raise ValueError(
            f"{directory} has no weight_global_scale beside the weight_scale of {listed(alone)}: expected both, as "
            "compressed-tensors writes NVFP4"
        )


def _stack(quantization: Quantization, found: dict[str, Tensor], keys: Mapping[str, dict[str, list[str]]]) -> None:
    """Add the scales of stacked experts, where the file has those of all of them, as one key per stack, which ``keys``
    then names.

    gate and up of an expert share a scale per tensor and take the larger, and the smaller of global scales.
    """
    for group, kind, smallest in (
        *((group, ".weight_scale", False) for group in quantization.weight_groups),
        *((group, ".weight_global_scale", True) for group in quantization.global_groups),
    ):
        layer = quantization.layers[group.owner]
        if not layer.projections:
            continue
        spellings, keys[kind][group.owner] = keys[kind][group.owner], [f"{group.owner}{kind}"]
        if not all(key in found for key in spellings):
            continue
        shape = full_shape(group.s0)
        shared = len(shape) == 1
        expected = (1,) if shared else (shape[1] // len(layer.projections), *shape[2:])
        scales = [_usable(key, found[key], expected, group).flatten() for key in spellings]
        whole = torch.stack(scales).view(layer.num_experts, len(layer.projections), -1)
        whole = (whole.amin(1) if smallest else whole.amax(1)) if shared else whole
        found[f"{group.owner}{kind}"] = whole.reshape(shape)


def cache_keys(model: PreTrainedModel, name: str) -> list[str]:
    """Keys that the scale of a quantiser of keys or values may have."""
    attention, _, kind = name.rpartition(".")
    return [module_name_on_disk(model, attention) + ending for ending in CACHE_SCALES[kind]]


def _unused(directory: Path, found: Mapping[str, Tensor], keys: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Keys of layers that the model does not quantise; an error if there are no others, as with a wrong prefix."""
    expected = [key for by_name in keys.values() for spellings in by_name.values() for key in spellings]
    layers = {key.rpartition(".")[0] for key in expected}
    unused = [key for key in found if key.rpartition(".")[0] not in layers]
    if len(unused) == len(found):
        raise ValueError(
            f"{directory} has no scale of a quantised layer: expected keys like {min(expected)}, "
            f"found {listed(unused) or 'no weight_scale and no input_scale'}"
        )
    return unused


def _group_values(
    groups: Sequence[ScaleGroup],
    found: Mapping[str, Tensor],
    keys: Mapping[str, Sequence[str]],
    *,
    any_member: bool = False,
    smallest: bool = False,
) -> tuple[dict[str, Tensor], list[str]]:
    """The value of each group (the largest of its members'), and the owners of groups without any.

    Args:
        groups: scale groups.
        found: scales by key.
        keys: the keys that a member's scale may have, by the member's name.
        any_member: one member's scale is enough; else each must have one.
        smallest: the smallest value instead.
    """
    values: dict[str, Tensor] = {}
    missing: list[str] = []
    for group in groups:
        own = [[key for key in keys[name] if key in found] for name in group.members]
        if any(own) if any_member else all(own):
            members = torch.stack([_checked(key, found[key], group) for some in own for key in some])
            values[group.owner] = members.amin(0) if smallest else members.amax(0)
        else:
            missing.append(group.owner)
    return values, missing


def _checked(key: str, value: Tensor, group: ScaleGroup) -> Tensor:
    """``value`` in the group's shape; of a group with zero points these beside it."""
    if group.zero is not None:
        if value.shape != (both := (2, *full_shape(group.s0))):
            raise ValueError(f"{key} has shape {tuple(value.shape)}, expected scales and zero points {both}")
        if problem := bad_zero_points(value[1], group.spec):
            raise ValueError(f"the zero point beside {key} {problem}")
        _usable(key, value[0], full_shape(group.s0), group)
        return value
    return _usable(key, value, full_shape(group.s0), group).reshape(full_shape(group.s0))


def _usable(key: str, value: Tensor, shape: Sequence[int], group: ScaleGroup) -> Tensor:
    """``value``, if it has that shape, give or take dimensions of size 1, and can be a scale of the group."""
    # As many elements in another order of dimensions are scales of other weights.
    if [side for side in value.shape if side != 1] != [side for side in shape if side != 1]:
        raise ValueError(
            f"{key} has shape {tuple(value.shape)}, but this scheme has {math.prod(shape)} scale(s) there, of shape "
            f"{tuple(shape)}"
        )
    may_be_negative = group.observer is None and group.spec.dtype == "int"
    if not bool((torch.isfinite(value) & ((value != 0) if may_be_negative else (value > 0))).all()):
        expected = "finite and not 0" if may_be_negative else "finite and positive"
        raise ValueError(f"{key} must be {expected}, got {value.flatten()[:4].tolist()}")
    return value
