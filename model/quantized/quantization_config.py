"""Parse the ``quantization_config`` of a checkpoint's config.json, and reject unsupported configurations.

ModelOpt writes ``hf_quant_config.json``, and newer versions config.json. Both have ``quant_algo``, the excluded layers
(``exclude_modules``, ``ignore``) as names with the wildcard ``*``, and the quantization of keys and values. For the
tensors see :mod:`quant.formats.modelopt`.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from model.checkpoint.safetensors import AGAIN, CheckpointError, DiskTensor, parse_json, read_headers
from model.quantized.tensor import Packing
from quant import Rule, Scheme, TensorSpec
from quant.formats.config_groups import kv_cache_from_config, rules_from_config
from quant.formats.layouts import Layout
from quant.formats.modelopt import ALGORITHMS, MIXED, REFUSED
from quant.rules import pattern_problem
from quant.spec import FP8_TENSOR, SCHEMES

MODELOPT_FILE = "hf_quant_config.json"
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # of AutoGPTQ and AutoAWQ, with their methods

# By method: the key for the packing of codes, its default, and the supported values.
_LAYOUTS: dict[str, tuple[str, str, dict[str, Packing]]] = {
    "gptq": ("checkpoint_format", "gptq", {"gptq": "gptq", "gptq_v2": "gptq_v2"}),
    "awq": ("version", "gemm", {"gemm": "awq", "GEMM": "awq"}),
    "auto-round": (
        "packing_format",
        "auto_round:auto_gptq",
        {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq", "auto_round:auto_awq": "awq"},
    ),
}


# Export layouts with the format of a checkpoint, by its ``quant_method``.
_WRITTEN: dict[str, Layout] = {
    "compressed-tensors": "compressed",
    "fp8": "vllm_fp8",
    "mxfp4": "gpt_oss",
    "modelopt": "modelopt",
}


def source_layout(directory: Path) -> Layout | None:
    """Return the export layout that has the format of a quantized checkpoint; None if there is none (GPTQ, AWQ, ...).
    Raises ValueError if the checkpoint is not quantized."""
    return _WRITTEN.get(str(read_quantization_config(directory).get("quant_method")))


def rounds_scales(config: Mapping[str, Any]) -> bool:
    """Return True if a ``quantization_config`` asks readers to round scales of weights and inputs to powers of two
    (``scale_fmt: ue8m0``, as in DeepSeek-V3.1). vLLM rounds them with DeepGEMM, and transformers on a GPU; training
    does not."""
    return config.get("scale_fmt") == "ue8m0"


def is_quantized(directory: Path) -> bool:
    """Return True if a checkpoint directory has a quantization_config; False also without config.json. Raises
    ValueError as :func:`find_quantization_config`."""
    file = directory / "config.json"
    own = any((directory / name).is_file() for name in (MODELOPT_FILE, *_FILES))
    if not file.is_file() or not (own or b"quantization_config" in file.read_bytes()):
        return False
    return find_quantization_config(directory) is not None


def find_quantization_config(directory: Path) -> dict[str, Any] | None:
    """Read the ``quantization_config`` of a checkpoint directory, from config.json or a quantizer's own file; None if
    it has none. Raises ValueError if there is no configuration file, one is damaged, two contradict each other, or a
    name pattern is invalid."""
    return _find(directory)[0]


def description_file(directory: Path) -> Path:
    """Return the file that has the ``quantization_config`` of a checkpoint: config.json, or a quantizer's own. Raises
    ValueError as :func:`find_quantization_config`."""
    return _find(directory)[1]


def _find(directory: Path) -> tuple[dict[str, Any] | None, Path]:
    """Return the result of :func:`find_quantization_config` and the file that has it (config.json for None). Raises
    ValueError as that function does."""
    file, own = directory / "config.json", directory / MODELOPT_FILE
    if not file.is_file() and not own.is_file():
        raise ValueError(f"{file} does not exist: expected the directory of a checkpoint")
    whole = read_json_object(file) if file.is_file() else {}
    text = whole.get("text_config")  # composite models may have it there
    config = whole.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if own.is_file() and (not config or (isinstance(config, dict) and config.get("quant_method") == "modelopt")):
        said = read_json_object(own).get("quantization")
        if not isinstance(said, dict):
            raise ValueError(
                f"{own} has no object 'quantization', in which ModelOpt describes the layers: download it again"
            )
        for key in ("quant_algo", "group_size", "quantized_layers"):
            one, other = said.get(key), (config or {}).get(key)
            if other not in (None, one):
                raise ValueError(
                    f"{own} has {key} {str(one)[:80]!r}, but {file} has {str(other)[:80]!r}: remove the file that does "
                    "not describe the weights, or download the checkpoint again"
                )
        return {**said, "quant_method": "modelopt"}, own
    for name, method in _FILES.items():  # early AutoGPTQ and AutoAWQ: not in config.json
        if not config and (directory / name).is_file() and any(key.endswith(".qweight") for key in _headers(directory)):
            file, config = directory / name, {"quant_method": method, **read_json_object(directory / name)}
    if not config:
        return None, file
    if not isinstance(config, dict):
        raise ValueError(f"{file} has a quantization_config that is a {type(config).__name__}, expected an object")
    if problem := next(_pattern_problems(config), None):
        raise ValueError(f"{file}: quantization_config.{problem}")
    return config, file


def _headers(directory: Path) -> dict[str, DiskTensor]:
    try:
        return read_headers(directory).tensors
    except (CheckpointError, OSError):  # reported when the weights are read
        return {}


def _has_plain_weights(directory: Path) -> bool:
    """Return True if the files have weights, and neither codes nor scales of any quantizer."""
    tensors = _headers(directory)
    plain = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}
    return bool(tensors) and not any(
        tensor.kind not in plain or re.search(r"scales?(_inv)?$", key) for key, tensor in tensors.items()
    )


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file with a JSON object. Raises ValueError if it cannot be read, or is no JSON object."""
    try:
        whole = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}: {AGAIN}") from error
    if not isinstance(whole, dict):
        raise ValueError(f"{file} is a JSON {type(whole).__name__}, expected an object: {AGAIN}")
    return whole


def read_quantization_config(directory: Path) -> dict[str, Any]:
    """Read the ``quantization_config`` of a checkpoint directory. Raises ValueError if it is missing or invalid."""
    config = find_quantization_config(directory)
    if config is None:
        raise ValueError(f"{directory / 'config.json'} has no quantization_config: this checkpoint is not quantized")
    return config


def described_in(directory: Path) -> str:
    """Return the place of a checkpoint's ``quantization_config``, for error texts: config.json or a quantizer's file.
    Raises ValueError as :func:`find_quantization_config`."""
    file = description_file(directory)
    return f"{file}: quantization_config" if file.name == "config.json" else str(file)


def check_readable(directory: Path, *, rotated: bool = False) -> None:
    """Raise ValueError if the weights of a quantized checkpoint cannot be decoded, or are not quantized although it has
    a quantization_config; reads only configuration and headers. ``rotated``: ignore ``transform_config``, which the
    caller handles."""
    config, where = read_quantization_config(directory), described_in(directory)
    try:
        rules = rules_of({**config, "transform_config": None} if rotated else config)
        problem = "" if any(rule.scheme for rule in rules) else None
    except ValueError as error:
        problem = str(error)
    if problem is not None and _has_plain_weights(directory):
        described = "quantization_config from config.json" if where.endswith("quantization_config") else "this file"
        raise ValueError(
            f"{where} has quant_method {config.get('quant_method')!r}, but the weights in {directory} are not "
            f"quantized: remove {described} to train them"
        )
    if problem:
        raise ValueError(f"{where}: {problem}")


def rules_of(config: Mapping[str, Any], *, scales_only: bool = False) -> list[Rule]:
    """Convert a ``quantization_config`` to rules that give layers their schemes; the first rule that matches a layer
    decides.

    ``scales_only`` also accepts formats whose scales this project reads, but not the codes, and rejects methods whose
    scales are useless without the codes (GPTQ, AWQ, MXFP4, ...). Raises ValueError if the method is not supported, or
    if no scheme of this project computes what the configuration says.
    """
    method = config.get("quant_method")
    try:
        if method == "compressed-tensors":
            return rules_from_config(config, scales_only=scales_only)
        if method == "fp8":
            return fp8_rules(config)
        if method == "modelopt":
            return modelopt_rules(config)
        if scales_only:  # scales of other methods are useless without the codes
            start = "; give this directory as quant.start instead" if method in (*_LAYOUTS, "mxfp4") else ""
            raise ValueError(
                f"quant_method is {method!r}, whose scales are not read: expected 'compressed-tensors', 'fp8' or "
                f"'modelopt'{start}"
            )
        if method == "mxfp4":
            return [Rule(SCHEMES["mxfp4"], r".*\.experts\..*")]
        if packing_of(config) is not None:
            return [Rule(_integers(config))]
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a value has another type than in files of {method!r} ({error})") from error
    raise ValueError(
        f"quant_method is {method!r}, whose codes cannot be read: expected 'compressed-tensors', 'fp8', 'modelopt', "
        "'mxfp4', 'gptq', 'awq' or 'auto-round'; start from the unquantized checkpoint"
    )


def kv_cache_of(config: Mapping[str, Any]) -> TensorSpec | None:
    """Return the number format of the KV cache in a ``quantization_config``; None if it is not quantized. Raises
    ValueError if the format is not supported."""
    if config.get("quant_method") != "modelopt":
        return kv_cache_from_config(config)
    cache, scheme = config.get("kv_cache_quant_algo"), config.get("kv_cache_scheme")
    if cache is None and scheme:
        fp8 = isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
        cache = "FP8" if fp8 and not scheme.get("dynamic") else scheme
    if cache not in (None, "FP8"):
        raise ValueError(f"kv_cache_quant_algo is {cache!r}, expected 'FP8'")
    return FP8_TENSOR if cache else None


def packing_of(config: Mapping[str, Any]) -> Packing | None:
    """Return how a checkpoint of GPTQ, AWQ or AutoRound packs its codes; None for other methods. Raises ValueError if
    the packing is not supported."""
    if str(config.get("quant_method")) not in _LAYOUTS:
        return None
    key, usual, known = _LAYOUTS[str(config["quant_method"])]
    name = str(config.get(key) or usual)
    if name not in known:
        raise ValueError(f"{key} is {name!r}, expected {' or '.join(map(repr, known))}")
    return known[name]


def weights_alone(directory: Path) -> bool:
    """Return True if a checkpoint was quantized by a weight-only method of other tools (GPTQ, AWQ, AutoRound, gpt-oss'
    MXFP4), so that a model with its decoded weights computes the same. Raises ValueError as
    :func:`find_quantization_config`."""
    config = find_quantization_config(directory)
    return config is not None and (config.get("quant_method") in _LAYOUTS or config.get("quant_method") == "mxfp4")


def _integers(config: Mapping[str, Any]) -> Scheme:
    """Create the scheme of a file of GPTQ, AWQ or AutoRound: integer weights, unquantized inputs. Raises ValueError if
    layers have several schemes, or if no scheme of this project has their numerics."""
    if config.get("desc_act"):
        raise ValueError("desc_act is true: quantizing columns in another order is not supported; quantize without it")
    awq = config["quant_method"] == "awq"
    others = {**(config.get("dynamic") or {}), **(config.get("extra_config") or {})}
    for name, other in others.items():
        left_out = name.startswith("-:") or (isinstance(other, dict) and other.get("bits", 0) >= 16)
        if not left_out:
            raise ValueError(
                f"{name!r} has a scheme of its own, expected one for all layers: start from the unquantized checkpoint"
            )
    if config.get("data_type", "int") != "int" or config.get("act_bits", 16) < 16:
        raise ValueError(
            f"data_type is {config.get('data_type', 'int')!r} and act_bits {config.get('act_bits', 16)!r}, expected "
            "'int' and 16: only integer weights with unquantized inputs can be read"
        )
    bits, size = config.get("bits", config.get("w_bit", 4)), config.get("group_size", config.get("q_group_size", 128))
    symmetric = not config.get("zero_point", True) if awq else bool(config.get("sym", True))
    widths = (4,) if awq or packing_of(config) == "awq" else (2, 3, 4, 8)
    if type(bits) is not int or bits not in widths:
        raise ValueError(f"bits is {bits!r}, expected {' or '.join(map(str, widths))}")
    if size is not None and (type(size) is not int or not (size == -1 or size > 0)):
        raise ValueError(f"group_size is {size!r}, expected a number of columns, or -1 for all of them")
    whole = size in (-1, None)
    spec = TensorSpec("int", bits, "channel" if whole else "group", None if whole else size, symmetric)
    kind = "channel" if whole else f"g{size}"
    return Scheme(f"w{bits}a16_{kind}{'' if symmetric else '_asym'}", spec)


def fp8_rules(config: Mapping[str, Any]) -> list[Rule]:
    """Create rules from the fp8 config of vLLM, DeepSeek or transformers: the same scheme for all modules that it does
    not skip. Raises ValueError for options that no scheme of this project computes."""
    sides = config.get("weight_block_size")
    if sides not in (None, [128, 128]):
        raise ValueError(
            f"weight_block_size is {sides!r}, expected [128, 128] or none: start from the unquantized checkpoint"
        )
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"fmt is {config['fmt']!r}, expected 'e4m3': start from the unquantized checkpoint")
    if config.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise ValueError(
            f"scale_fmt is {config['scale_fmt']!r}, expected 'float' or 'ue8m0': start from the unquantized checkpoint"
        )
    inputs = FP8_TENSOR
    if config.get("activation_scheme") != "static":
        size = 128 if sides else None
        inputs = TensorSpec("fp8_e4m3", 8, "group" if sides else "token", size, dynamic=True)
    scheme = Scheme("fp8", TensorSpec("fp8_e4m3", 8, "block", 128) if sides else FP8_TENSOR, inputs)
    skipped = [*(config.get("ignored_layers") or []), *(config.get("modules_to_not_convert") or [])]
    return [*(Rule(None, rf"(.*\.)?{re.escape(name)}(\..*)?") for name in skipped), Rule(scheme)]


def _pattern_problems(config: dict[str, Any]) -> Iterator[str]:
    """Yield problems of a quantization_config's lists of module names and patterns."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        yield f"config_groups: {str(groups)[:80]}, expected groups by name"
        return
    lists = {f"config_groups.{name}.targets": group.get("targets") for name, group in groups.items()}
    for key, entries in {"ignore": config.get("ignore"), **lists}.items():
        if not isinstance(entries, list | None) or not all(isinstance(entry, str) for entry in entries or []):
            yield f"{key}: {str(entries)[:80]}, expected a list of names and patterns"
            continue
        for entry in entries or []:
            if entry.startswith("re:") and (problem := pattern_problem(entry.removeprefix("re:"))):
                yield f"{key}: {entry[:80]!r}, expected a regular expression that is fast to match: {problem}"


def modelopt_rules(config: Mapping[str, Any]) -> list[Rule]:
    """Convert ModelOpt's configuration to rules that give layers their schemes; the first rule that matches a layer
    decides. The name of a module also matches all layers inside it. Raises ValueError if an algorithm or group size is
    not supported."""
    skipped = config.get("exclude_modules") or config.get("ignore") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise ValueError(f"exclude_modules is {str(skipped)[:80]}, expected a list of names")
    rules = [Rule(None, rf"(?:{fnmatch.translate(name)})(\..*)?") for name in skipped]
    if config.get("quant_algo") == MIXED:
        return [*rules, *_rules_of_layers(config.get("quantized_layers") or {})]
    return [*rules, Rule(_algorithm(config))]


def _rules_of_layers(layers: Mapping[str, Any]) -> list[Rule]:
    """Create a rule for each scheme, with one pattern for all experts of a MoE layer, as there may be 50,000 names.
    Raises ValueError if experts of a layer have several schemes."""
    schemes: dict[str, Scheme] = {}
    for name, one in layers.items():
        scheme = _algorithm(one, f"{name}: ")
        pattern = re.sub(r"(\.experts\\\.)\d+", r"\1\\d+", re.escape(name))
        if schemes.setdefault(pattern, scheme) != scheme:
            raise ValueError(
                f"{name}: quant_algo is {one['quant_algo']!r}, but other experts of this layer have another one: start "
                "from the unquantized checkpoint"
            )
    found = dict.fromkeys(schemes.values())
    return [
        Rule(each, rf"(?:{'|'.join(name for name, scheme in schemes.items() if scheme == each)})(\..*)?")
        for each in found
    ]


def _algorithm(config: Mapping[str, Any], of: str = "") -> Scheme:
    """Return the scheme of a model or layer; ``of`` is a prefix of error texts. Raises ValueError if unsupported."""
    name = config.get("quant_algo")
    found = ALGORITHMS.get(str(name).upper())
    if (refused := REFUSED.get(str(name).upper())) is not None:
        why, nearest = refused
        raise ValueError(
            f"{of}quant_algo is {name!r}, which {why}: start from the unquantized checkpoint, for example with "
            f"quant.scheme {nearest}"
        )
    if found is None:
        raise ValueError(
            f"{of}quant_algo is {name!r}, expected {', '.join(ALGORITHMS)}, or {MIXED} with these per layer; start "
            "from the unquantized checkpoint"
        )
    size, expected = config.get("group_size"), found.weights.group_size
    if found.weights.dtype == "fp4_e2m1" and (size or expected) != expected:
        raise ValueError(f"{of}group_size is {size!r}, expected {expected} for {name}: quantize again")
    return found
