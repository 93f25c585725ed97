"""Load the scales of a PTQ checkpoint into a model, from files to partitions.

The directory's configuration contains the scheme of each layer's scales. It is the ``quantization_config`` in
config.json (of compressed-tensors, ``fp8`` of vLLM and DeepSeek, or ModelOpt), or ModelOpt's ``hf_quant_config.json``.
Other methods are rejected by name. Without a configuration, scales are only checked against the weights
(:func:`check_fit`).

A scale ``s = s0 * exp(theta)`` is written into ``s0``, a frozen fp32 Parameter, while theta stays 0: step 0 computes
the PTQ model. ``s0`` is partitioned under ZeRO-3 like any Parameter. As it is frozen, no fp32 master copy overwrites
it, so it can also be written after ``deepspeed.initialize``. Scales and zero points of an asymmetric weight are one
tensor ``[2, *scale shape]`` in this package, so that neither changes without the other.

All scales are checked before any of them is written: shapes, values, and a comparison with the loaded weights. No
weight is gathered: each rank checks its own range of every weight. Results are summed over ranks, so that all ranks
raise the same errors.

``grouping.py`` reads files to tensors by key and assigns them to scale groups, ``codes.py`` compares codes with the
weights, and ``in_place.py`` writes scales into partitions, or measures them from the weights.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.safetensors import CheckpointError, Reader, read_header
from model.quantized.quantization_config import (
    MODELOPT_FILE,
    description_file,
    find_quantization_config,
    kv_cache_of,
    rules_of,
)
from model.ranks import errors_on_all_ranks, listed, raise_everywhere, raise_problems, reduce_over_ranks, words_of
from model.scales.codes import FileWeight, count_of_sums, file_weight, local_products, other_weights
from model.scales.grouping import (
    GLOBAL_SCALE,
    WEIGHT_SCALE,
    ZERO_POINT,
    ArrangedScales,
    GroupScale,
    StoredScales,
    ZeroPoints,
    arrange,
    input_ending,
    read_scales,
    scale_files,
    scales_per_head,
)
from model.scales.in_place import (
    check_scale,
    check_values,
    check_zero_points,
    fill_scales,
    measure_global_scales,
    measure_weight_scales,
    scale_buckets,
)
from model.zero import is_partitioned, local_data, local_range
from quant import Quantization, Quantizer, QuantLayer, Ranges, Rule, Scale, Scheme, TensorSpec, kernels
from quant.linear import LinearPart, linears_of
from quant.observers import partial_fit
from quant.scale import Fit, scale_problem

CONFIG = "config.json"


class Source(NamedTuple):
    """Configuration of a directory with scales.

    Attributes:
        file: the file with the configuration.
        rules: scheme of each layer's scales; the first rule that matches decides.
        kv_problem: reason why the configuration of the KV cache cannot be read; an error only if the model quantizes
            its cache.
    """

    file: Path
    rules: list[Rule]
    kv_problem: str | None = None

    def scheme(self, names: Collection[str]) -> Scheme | None:
        """Return the scheme of one Linear, which a rule may call by any of ``names`` (on disk, in the model); None if
        it is not quantized."""
        rule = next((rule for rule in self.rules if any(rule.matches(name, 0) for name in names)), None)
        return None if rule is None else rule.scheme


def read_source(directory: Path) -> Source | None:
    """Read the quantization's configuration in a directory with scales; None if there is none. Raises ValueError if a
    file is no JSON object, the method is not supported, or no scheme of this project has the method's numerics."""
    if not any((directory / name).is_file() for name in (CONFIG, MODELOPT_FILE)):
        return None
    config = find_quantization_config(directory)
    if config is None:
        return None
    file = description_file(directory)
    try:
        rules = rules_of(config, scales_only=True)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    try:
        kv_cache_of(config)
    except (ValueError, AttributeError, TypeError) as error:
        return Source(file, rules, str(error))
    return Source(file, rules)


def check_source(quantization: Quantization, arranged: ArrangedScales, stored: StoredScales, source: Source) -> None:
    """Compare the scheme of every layer that has scales in the files with its scheme in ``source``. Raises ValueError
    if they differ, or if the model uses the files' scales of keys and values and ``source`` has a ``kv_problem``."""
    problems: dict[str, list[str]] = {}
    for layer, parts in arranged.linears.items():
        ours = quantization.layers[layer].scheme
        for disk, part in parts.items():
            if disk + WEIGHT_SCALE not in stored.scales:
                continue
            theirs = source.scheme((disk, part.name))
            static = ours.stored_input if disk + input_ending(ours) in stored.scales else None
            if theirs is None:
                problem = "says that these layers are not quantized, but the files have scales of them"
            elif theirs.weights != ours.weights.wide:
                problem = f"says {_words(theirs.weights)}, but scheme {ours.name!r} has {_words(ours.weights)}"
            elif static is not None and theirs.stored_input != static:
                said = "no stored scale" if theirs.stored_input is None else _words(theirs.stored_input)
                problem = f"says {said} of inputs, but scheme {ours.name!r} has {_words(static)}"
            else:
                continue
            problems.setdefault(problem, []).append(disk)
    lines = [f"{source.file} {problem}: {listed(names, 5)}" for problem, names in problems.items()]
    if arranged.caches and source.kv_problem is not None:
        lines.append(f"{source.file}: {source.kv_problem}")
    if lines:
        said = "\n".join(lines)
        raise ValueError(f"{said}\nUse the scheme that the scales were made for, or other scales")


def _words(spec: TensorSpec) -> str:
    """Describe a spec for a message: int4 in groups of 32."""
    name = {"fp8_e4m3": "e4m3", "fp4_e2m1": "e2m1"}.get(spec.dtype, f"int{spec.bits}")
    shared = {"group": f"in groups of {spec.group_size}", "block": f"in blocks of {spec.group_size}"}
    return f"{name} {shared.get(spec.granularity, f'per {spec.granularity}')}{'' if spec.symmetric else ', asymmetric'}"


@dataclass(frozen=True)
class ScaleReport:
    """Report of where the scales came from: lists of owners of scale groups. A layer may own a group of weights and one
    of inputs.

    Attributes:
        weights_loaded, inputs_loaded: owners of groups whose scale was in a file.
        weights_measured: owners whose scale was in no file, and was measured from the weights.
        inputs_initial: owners whose scale was in no file, and was set to the recipe's initial value.
        inputs_missing: owners whose scale was in no file, and is still to be calibrated.
        unused: keys of those scales in the files whose layers the model does not quantize.
        merged: owners of groups of weights whose layers have different scales in the files; the largest is taken.
        rounded: dtype of the scales of integer codes in the files, if the model's dtype is less precise; else None.
        per_head: keys of the scales of keys and values that the files have per attention head.
    """

    weights_loaded: list[str]
    weights_measured: list[str]
    inputs_loaded: list[str]
    inputs_initial: list[str]
    inputs_missing: list[str]
    unused: list[str]
    merged: list[str] = field(default_factory=list)
    rounded: str | None = None
    per_head: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Format the report as one line for the log."""
        merged = "of layers that are served as one and have several in the files, of which the largest is taken: their"
        per_head = "of keys and values have one for each head in the files, of which the largest is taken"
        named = {
            "measured from the weights": self.weights_measured,
            "of inputs to calibrate": self.inputs_missing,
            "in the files of layers that are not quantized here": self.unused,
            f"{merged} codes are computed again": self.merged,
            per_head: self.per_head,
        }
        parts = [f"{len(self.weights_loaded)} of weights and {len(self.inputs_loaded)} of inputs loaded"]
        if self.inputs_initial:
            parts.append(f"{len(self.inputs_initial)} of inputs set to the initial value")
        parts += [f"{len(names)} {text} ({listed(names)})" for text, names in named.items() if names]
        if self.rounded:
            parts.append(f"those of the files are {self.rounded}, and are rounded to the model's dtype")
        return "scales: " + ", ".join(parts)


def load_scales(
    model: PreTrainedModel,
    quantization: Quantization,
    directory: str | Path,
    *,
    initial_input_scale: float | None = None,
    inputs_calibrated_later: bool = False,
) -> ScaleReport:
    """Read the scales of a PTQ checkpoint into the model; a collective.

    Keys are ``<layer>.weight_scale`` (for NVFP4 also ``weight_global_scale``, for asymmetric weights also
    ``weight_zero_point``) and ``<layer>.input_scale`` with the layers' names on disk, and ``<attention>.k_scale`` (or
    ``k_cache.scale``) and ``v_scale``, in any file of the directory, of shape ``()``, ``[1]`` or the scale's own.
    Layers that share a scale take the largest of their scales in the files, as engines do when they fuse layers; of
    global scales, by which scales are divided, they take the smallest. If the weight scale of any member is missing,
    the whole group is measured from the weights, and listed in the report.

    Args:
        model, quantization: the quantized model; the weights are loaded.
        directory: a directory with ``*.safetensors``.
        initial_input_scale: value for activation scales that are in no file; None to set none.
        inputs_calibrated_later: True leaves activation scales that are in no file, and have no initial value, as NaN.

    Raises:
        RankError: on every rank: there is no such directory; a file is damaged; a scale has another shape, is zero,
            negative or not finite, or is an NVFP4 scale without a global scale; a zero point is missing, or is not 0
            for a symmetric scheme; an activation scale is in no file and is neither calibrated nor set; or scales
            belong to another scheme (:func:`check_source`) or do not fit the weights (:func:`check_fit`).
    """
    directory = Path(directory)
    with errors_on_all_ranks(OSError, ValueError, SafetensorError):
        source, stored = read_source(directory), read_scales(directory)
        arranged = arrange(model, quantization, stored)
        check_beside(quantization, arranged, stored)
        if source is not None:
            check_source(quantization, arranged, stored, source)
        check_stored(quantization, arranged, stored, directory)
        codes = _codes(arranged, stored)
        missing_inputs = _missing(arranged.inputs)
        if missing_inputs and initial_input_scale is None and not inputs_calibrated_later:
            raise ValueError(
                f"{directory} has no input scale for {listed(missing_inputs)}. Set quant.calibration_batches to "
                "measure them in place, or quant.initial_input_scale, or name a PTQ checkpoint that has them"
            )
    values, report = complete(quantization, arranged, initial_input_scale)
    loaded = [scale for scale in arranged.weights if scale.layers]
    check_fit(quantization, loaded, values[1], codes, directory)
    write_all(quantization, values)
    return report


# Scales of weights, global scales of weights, and scales of inputs, each by owner of the scale group.
ScaleValues = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def complete(
    quantization: Quantization,
    arranged: ArrangedScales,
    initial_input_scale: float | None,
    filled: Collection[str] = (),
) -> tuple[ScaleValues, ScaleReport]:
    """Compute scales from those in the files, measure scales of weights that the files lack, and give scales of inputs
    that the files lack the recipe's initial value, if there is one; a collective. Returns the values for
    :func:`write_all`, and the report. ``filled``: owners of groups of weights whose scales are in the model already.
    Raises ValueError, on every rank, if the initial value would be a global scale, and RankError if a weight to measure
    has NaN or Inf."""
    weights, above, inputs = (
        {scale.group.owner: scale.value() for scale in some if scale.layers}
        for some in (arranged.weights, arranged.globals, arranged.inputs)
    )
    measured = [owner for owner in _missing(arranged.weights) if owner not in filled]
    report = ScaleReport(
        weights_loaded=[scale.group.owner for scale in arranged.weights if scale.group.owner not in measured],
        weights_measured=measured,
        inputs_loaded=list(inputs),
        inputs_initial=[] if initial_input_scale is None else _missing(arranged.inputs),
        inputs_missing=_missing(arranged.inputs) if initial_input_scale is None else [],
        unused=arranged.unused,
        per_head=scales_per_head(arranged),
    )
    if measured:
        weights |= measure_weight_scales(quantization, set(measured))
    if missing := _missing(arranged.globals):
        above |= measure_global_scales(quantization, set(missing))
    if initial_input_scale is not None:
        groups = [scale.group for scale in arranged.inputs if not scale.layers]
        if unmeant := [group.owner for group in groups if group.spec.has_global_scale]:
            raise ValueError(
                f"quant.initial_input_scale cannot set the global scale of the inputs of {listed(unmeant)}: set "
                "quant.calibration_batches instead, or name a PTQ checkpoint that has input_global_scale"
            )
        inputs |= {group.owner: torch.tensor([initial_input_scale]) for group in groups}
    return (weights, above, inputs), report


def write_all(quantization: Quantization, values: ScaleValues) -> None:
    """Write into the model the values that :func:`complete` returns; a collective. Raises RankError on every rank, and
    writes nothing, if a scale is invalid."""
    groups = (quantization.weight_groups, quantization.global_groups, quantization.input_groups)
    with errors_on_all_ranks(ValueError):
        for some, of_groups in zip(groups, values, strict=True):
            check_values(some, of_groups)
    for some, of_groups in zip(groups, values, strict=True):
        fill_scales(some, of_groups)


def check_scale_files(directory: str | Path) -> None:
    """Check the configuration and the headers of a directory with scales; a collective. Raises RankError if there are
    no safetensors files, one is damaged, or the configuration is not supported."""
    with errors_on_all_ranks(OSError, ValueError):
        read_source(Path(directory))
        for file in scale_files(Path(directory)):
            list(read_header(file))


def _codes(arranged: ArrangedScales, stored: StoredScales) -> dict[str, FileWeight]:
    """Find the codes or weights that the files have in addition to scales, by the key of the scale."""
    parts = {disk: part for of_layer in arranged.linears.values() for disk, part in of_layer.items()}
    found = {}
    for scale in arranged.weights:
        for one in scale.stored:
            name = one.key.removesuffix(WEIGHT_SCALE)
            zero = None if one.zero_points is None else one.zero_points.values
            codes = file_weight(name, parts[name], scale.group.spec, stored.tensors, one.value, zero)
            if codes is not None:
                found[one.key] = codes
    return found


def _missing(scales: list[GroupScale]) -> list[str]:
    """List the owners of the groups without a scale in the files."""
    return [scale.group.owner for scale in scales if not scale.layers]


# ---- checks


def check_stored(quantization: Quantization, arranged: ArrangedScales, stored: StoredScales, directory: Path) -> None:
    """Check the scales of a checkpoint. Raises ValueError if no quantized layer has a scale (for example because of a
    wrong prefix); a scale lacks its global scale or zero points, has another shape, is not finite, zero or negative
    (symmetric integer weights: zero); or zero points are no codes, or not 0 for a symmetric scheme."""
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
            "compressed-tensors writes NVFP4; use another checkpoint"
        )
    asymmetric = [group.owner for group in quantization.weight_groups if group.zero is not None]
    may_differ = {disk + ZERO_POINT for name in asymmetric for disk in linears[name]}
    of_layers = {key.rpartition(".")[0] for key in arranged.expected}
    for key, zero in stored.zero_points.items():
        if key.rpartition(".")[0] in of_layers and key not in may_differ and bool(zero.any()):
            raise ValueError(
                f"{key} is not 0, but the scheme of its layer in the recipe is symmetric: use other scales, or for "
                "weights an asymmetric scheme"
            )
    for scale in (*arranged.weights, *arranged.globals, *arranged.inputs):
        for one in scale.stored:
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
    "pre_quant_scale": "the weights of the layer were smoothed (AWQ, SmoothQuant)",
    "smooth_scale": "the weights of the layer were smoothed",
    "weight_g_idx": "the columns were quantized in another order (actorder: group), which no scheme here has",
}


def check_beside(quantization: Quantization, arranged: ArrangedScales, stored: StoredScales) -> None:
    """Check that no other tensor of a quantized Linear in the files changes the meaning of its scales.

    Raises ValueError if the files have codes of GPTQ, AWQ or AutoRound (quant.start reads these), if a quantized Linear
    has an unknown tensor beside its scales, or if the groups of its weight are not of consecutive columns.
    """
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
        meaning = _MEANING.get(suffix, "this project does not know it")
        file = stored.tensors[keys[0]].file
        raise ValueError(
            f"{file} has {suffix}, which may change what the scales mean: {meaning} ({listed(keys, 3)}); use a "
            "checkpoint without it"
        )


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
            f"{zero.packed_shape}: use another checkpoint"
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
        own, own_zero: measured scale, not rounded to the stored format, and zero points.
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
        """Number of elements of each tensor that :meth:`local_sums` returns."""
        coded = [part for part, code in zip(self.parts, self.codes, strict=True) if code is not None]
        return [3 * self.scale.numel(), *(count_of_sums(part, self.spec) for part in coded)]

    def local_sums(self, reader: Reader) -> list[Tensor]:
        """Compute, over this rank's range of the weight, one flat tensor of squared errors with the loaded scales,
        squared weights, and squared errors with the measured scales, each per scale; then for every Linear with codes
        in the files a tensor of the sums that compare codes and weights. All are fp64 on the CPU."""
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
        """Describe the problems of the scales, one text each. ``sums`` are the tensors of :meth:`local_sums`, joined
        and added over all ranks."""
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
    """Compare loaded scales of weights with the weights, before the model's scales are set; a collective.

    Args:
        quantization: returned by ``quant.replace_layers``; the weights are loaded.
        loaded: scales from the files, already checked by :func:`check_stored`.
        global_scales: global scales of these weights, by owner of the group of global scales.
        codes: weights in the files, by the key of the scale.
        directory: directory of the files, for the error.

    Raises:
        RankError: on every rank: scales do not fit (:mod:`quant.scale`), or their codes belong to other weights
            (:mod:`model.scales.codes`), with the layers, what was found and expected, and the probable cause; or a file
            cannot be read.
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
    """Collect the layers with a loaded scale, by owner of the scale group, and measure scales of their weights; a
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
