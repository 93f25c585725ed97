"""Load the scales of a PTQ checkpoint into a model, from files to partitions.

The directory's configuration contains the scheme of each layer's scales. It is the ``quantization_config`` in
config.json (of compressed-tensors, ``fp8`` of vLLM and DeepSeek, or ModelOpt), or ModelOpt's ``hf_quant_config.json``.
Other methods are rejected by name. Without a configuration, scales are only checked against the weights
(``scale_check.py``).

A scale ``s = s0 * exp(theta)`` is written into ``s0``, a frozen fp32 Parameter, while theta stays 0: step 0 computes
the PTQ model. ``s0`` is partitioned under ZeRO-3 like any Parameter. As it is frozen, no fp32 master copy overwrites
it, so it can also be written after ``deepspeed.initialize``. Scales and zero points of an asymmetric weight are one
tensor ``[2, *scale shape]`` in this package, so that neither changes without the other.

``grouping.py`` reads files to tensors by key and assigns them to scale groups, ``codes.py`` and ``scale_check.py``
compare them with the weights, and ``in_place.py`` writes them into partitions, or measures them from the weights.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from model.checkpoint.safetensors import read_header
from model.quantized.quantization_config import MODELOPT_FILE, find_quantization_config, kv_cache_of, rules_of
from model.ranks import errors_on_all_ranks, listed
from model.scales.codes import FileWeight, file_weight
from model.scales.grouping import (
    WEIGHT_SCALE,
    ArrangedScales,
    GroupScale,
    LinearParts,
    StoredScales,
    arrange,
    input_ending,
    read_scales,
    scale_files,
    scales_per_head,
)
from model.scales.in_place import check_values, fill_scales, measure_global_scales, measure_weight_scales
from model.scales.scale_check import check_beside, check_fit, check_stored
from quant import Quantization, Rule, ScaleGroup, Scheme, TensorSpec

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

    def scheme(self, names: Iterable[str]) -> Scheme | None:
        """Return the scheme of a Linear that has these ``names``; None if it is not quantized."""
        spellings = list(names)
        rule = next((rule for rule in self.rules if any(rule.matches(name, 0) for name in spellings)), None)
        return None if rule is None else rule.scheme


def read_source(directory: Path) -> Source | None:
    """Read the configuration of a directory with scales; None if it has none. Raises ValueError if a file is no JSON
    object, the method is not supported, or no scheme of this project has its numerics."""
    if not any((directory / name).is_file() for name in (CONFIG, MODELOPT_FILE)):
        return None
    config = find_quantization_config(directory)
    if config is None:
        return None
    method = config.get("quant_method")
    file = directory / (MODELOPT_FILE if method == "modelopt" and (directory / MODELOPT_FILE).is_file() else CONFIG)
    try:
        rules = rules_of(config, scales_only=True)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    try:
        kv_cache_of(config)
    except (ValueError, AttributeError, TypeError) as error:
        return Source(file, rules, str(error))
    return Source(file, rules)


def check_source(
    quantization: Quantization, linears: Mapping[str, LinearParts], stored: StoredScales, source: Source, caches: bool
) -> None:
    """Compare the scheme of every layer with the scheme for which its scales were made. Raises ValueError if they
    differ.

    Args:
        quantization: the layers, with their schemes.
        linears: Linears of each layer by name on disk.
        stored, source: scales and configuration of the directory.
        caches: True if the directory has scales of keys and values that the model uses.
    """
    problems: dict[str, list[str]] = {}
    for layer, parts in linears.items():
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
    if caches and source.kv_problem is not None:
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
        inputs_missing: owners whose scale is still to be calibrated.
        unused: keys in the files of scales of layers that the model does not quantize.
        merged: owners of groups of weights whose layers have different scales in the files.
        rounded: dtype of the scales of integers in the files, if the model's dtype is less precise.
        per_head: keys of the scales of keys and values that the files have per head.
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
        initial_input_scale: value for activation scales that are in no file.
        inputs_calibrated_later: leave activation scales that are in no file to a later calibration.

    Raises:
        RankError: on every rank: there is no such directory; a file is damaged; a scale has another shape, is zero,
            negative or not finite, or is an NVFP4 scale without a global scale; a zero point is missing, or is not 0
            for a symmetric scheme; an activation scale is in no file and is neither calibrated nor set; or scales
            belong to another scheme (:func:`check_source`) or do not fit the weights (``scale_check.py``).
    """
    directory = Path(directory)
    with errors_on_all_ranks(OSError, ValueError, SafetensorError):
        source, stored = read_source(directory), read_scales(directory)
        arranged = arrange(model, quantization, stored)
        check_beside(quantization, arranged, stored)
        if source is not None:
            check_source(quantization, arranged.linears, stored, source, arranged.caches)
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


# Of weights, global ones, of inputs; by owner.
ScaleValues = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def complete(
    quantization: Quantization,
    arranged: ArrangedScales,
    initial_input_scale: float | None,
    filled: Collection[str] = (),
) -> tuple[ScaleValues, ScaleReport]:
    """Compute the scales in the files, measure those that are missing there, and set missing ones of inputs to the
    recipe's initial value, if there is one; a collective. ``filled``: owners of groups of weights that have their
    scales already."""
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
        inputs |= _initial([scale.group for scale in arranged.inputs if not scale.layers], initial_input_scale)
    return (weights, above, inputs), report


def write_all(quantization: Quantization, values: ScaleValues) -> None:
    """Write the result of :func:`complete`; a collective. Raises RankError if a scale is invalid; nothing is
    written."""
    groups = (quantization.weight_groups, quantization.global_groups, quantization.input_groups)
    with errors_on_all_ranks(ValueError):
        for some, of_groups in zip(groups, values, strict=True):
            check_values(some, of_groups)
    for some, of_groups in zip(groups, values, strict=True):
        fill_scales(some, of_groups)


def check_scale_files(directory: str | Path) -> None:
    """Check the configuration and the headers of a directory with scales; a collective. Raises RankError."""
    with errors_on_all_ranks(OSError, ValueError):
        read_source(Path(directory))
        for file in scale_files(Path(directory)):
            list(read_header(file))


def _codes(arranged: ArrangedScales, stored: StoredScales) -> dict[str, FileWeight]:
    """Find the codes or weights that the files have in addition to scales, by the key of the scale."""
    parts = {disk: part for of_layer in arranged.linears.values() for disk, part in of_layer.items()}
    found = {}
    for scale in arranged.weights:
        for one in (one for of_layer in scale.layers for one in of_layer):
            name = one.key.removesuffix(WEIGHT_SCALE)
            zero = None if one.zero_points is None else one.zero_points.values
            codes = file_weight(name, parts[name], scale.group.spec, stored.tensors, one.value, zero)
            if codes is not None:
                found[one.key] = codes
    return found


def _missing(scales: list[GroupScale]) -> list[str]:
    """List the owners of the groups without a scale in the files."""
    return [scale.group.owner for scale in scales if not scale.layers]


def _initial(groups: list[ScaleGroup], value: float) -> dict[str, Tensor]:
    """Set the scale of each group of inputs to ``value``, the recipe's initial scale: returns scales by owner. Raises
    ValueError if a group has a global scale, for which the recipe's value is not meant."""
    above = [group.owner for group in groups if group.spec.has_global_scale]
    if above:
        raise ValueError(
            f"quant.initial_input_scale is no global scale of the inputs of {listed(above)}: set "
            "quant.calibration_batches instead, or name a PTQ checkpoint that has input_global_scale"
        )
    return {group.owner: torch.tensor([value]) for group in groups}
