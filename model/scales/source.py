"""Read from a directory's configuration for which scheme each layer's scales were made.

Supported are the ``quantization_config`` in config.json of compressed-tensors, of vLLM's and DeepSeek's ``fp8``, and of
ModelOpt, and ModelOpt's own ``hf_quant_config.json``. Other methods are rejected by name. Without any of these, scales
are only checked against the weights (``fit.py``).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model.quantized.quantization_config import (
    MODELOPT_FILE,
    find_quantization_config,
    fp8_rules,
    modelopt_kv_cache,
    modelopt_rules,
)
from model.ranks import listed
from model.scales.grouping import LinearParts
from model.scales.read import WEIGHT_SCALE, StoredScales, input_ending
from quant import Quantization, Rule, Scheme, TensorSpec
from quant.formats.config_groups import kv_cache_from_config, rules_from_config

CONFIG = "config.json"
_STARTS = ("gptq", "awq", "auto-round", "mxfp4")  # methods for quant.start: their scales are useless without the codes


class Source(NamedTuple):
    """Configuration of a directory with scales.

    Attributes:
        file: the file with the configuration.
        rules: scheme of each layer's scales; the first rule that matches decides.
        kv_cache: quantization of keys and values; None if there is none.
        kv_problem: reason why it cannot be read, for models whose cache is quantized here.
    """

    file: Path
    rules: list[Rule]
    kv_cache: TensorSpec | None = None
    kv_problem: str | None = None

    def scheme(self, names: Iterable[str]) -> Scheme | None:
        """Scheme of the Linear with any of these names; None if it is not quantized."""
        spellings = list(names)
        rule = next((rule for rule in self.rules if any(rule.matches(name, 0) for name in spellings)), None)
        return None if rule is None else rule.scheme


def read_source(directory: Path) -> Source | None:
    """Read the configuration of a directory with scales; None if it has none.

    Raises:
        ValueError: a file that is no JSON object, an unsupported method, or numerics that no scheme here has.
    """
    if not any((directory / name).is_file() for name in (CONFIG, MODELOPT_FILE)):
        return None
    config = find_quantization_config(directory)
    if config is None:
        return None
    method = config.get("quant_method")
    file = directory / (MODELOPT_FILE if method == "modelopt" and (directory / MODELOPT_FILE).is_file() else CONFIG)
    try:
        if method == "compressed-tensors":
            return _compressed(file, config)
        if method == "fp8":
            return Source(file, fp8_rules(config))
        if method == "modelopt":
            return _modelopt(file, config)
        start = "; give this directory as quant.start instead" if method in _STARTS else ""
        raise ValueError(
            f"quant_method is {method!r}, whose scales are not read: expected 'compressed-tensors', 'fp8' or 'modelopt'"
            + start
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{file}: a value is not of the kind that {method!r} has ({error})") from None


def _compressed(file: Path, config: Mapping[str, Any]) -> Source:
    rules = rules_from_config(config, scales_only=True)
    try:
        return Source(file, rules, kv_cache_from_config(config))
    except ValueError as error:  # matters to models whose cache is quantized here
        return Source(file, rules, kv_problem=str(error))


def _modelopt(file: Path, config: Mapping[str, Any]) -> Source:
    rules = modelopt_rules(config, scales_only=True)
    try:
        return Source(file, rules, modelopt_kv_cache(config))
    except ValueError as error:
        return Source(file, rules, kv_problem=str(error))


def check_source(
    quantization: Quantization, linears: Mapping[str, LinearParts], stored: StoredScales, source: Source, caches: bool
) -> None:
    """Compare the scheme of every layer with that of its scales.

    Args:
        quantization: the layers, with their schemes.
        linears: Linears of each layer by name on disk.
        stored: scales of the directory.
        source: configuration of the directory.
        caches: True if the directory has scales of keys and values that are used here.

    Raises:
        ValueError: they differ.
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
                problem = "says that they are not quantized, but there are scales of them"
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
