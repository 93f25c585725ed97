"""Write and read the ``quantization_config`` of config.json for compressed-tensors, vLLM and SGLang.

A config group describes the number formats of some layers. Its ``targets`` are a class (``Linear``), module names, or
regexes after ``re:``, matched from the start of a name. A single scheme targets ``Linear``, except the names in
``ignore``. Several schemes become several groups, whose targets are only name patterns that match no layer of another
group. Readers differ in precedence: transformers prefers names to classes, but vLLM first looks for the class of a
fused layer (``qkv_proj``), so a group for ``Linear`` would win over a group that names q, k and v. transformers decodes
the experts of every layer with the first group that has ``experts`` in a pattern: schemes that differ between the
experts of two layers are read correctly by vLLM only.
"""

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from quant.formats.compressed_tensors import export_format
from quant.rules import ANYWHERE, Rule, name_patterns
from quant.spec import MX_GROUP, SCHEMES, Dtype, Granularity, Scheme, TensorSpec

_EXPERTS = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\..+")

# Dtypes of scales that do not have the model's dtype, as llm-compressor writes them.
_SCALE_DTYPES = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8", "float16": "torch.float16"}


def quantization_config(
    layers: Mapping[str, Scheme],
    ignore: Iterable[str],
    kv_cache: TensorSpec | None = None,
    *,
    no_linears: Iterable[str] = (),
    embedding: Scheme | None = None,
    anywhere: bool = False,
) -> dict[str, Any]:
    """Build the ``quantization_config`` of a model.

    Args:
        layers: schemes of the quantized layers by module name; if names on disk differ from transformers', both.
        ignore: result of :func:`ignore_patterns`. A Linear that is neither quantized nor listed would load without an
            error, with random output.
        kv_cache: format of keys and values; None leaves them unquantized.
        no_linears: layers that ``Linear`` does not match: embeddings, and lm_head, which is not a Linear in vLLM.
        embedding: scheme of all embeddings, if they share one. The group also targets the class ``Embedding``, as vLLM
            has no name for the embeddings of some models (Llama, Granite).
        anywhere: write all names as patterns with an optional prefix, for readers that nest the model in another
            module.

    Raises:
        ValueError: a scheme has no format; or, with ``anywhere``, no pattern separates layers of two schemes.
    """
    schemes, ignore = list(dict.fromkeys(layers.values())), list(ignore)
    if not schemes and any("experts" in entry for entry in ignore):
        # Only the KV cache is quantized. transformers takes the first group for MoE experts without checking that one
        # exists: add a group whose Linears are all in ``ignore``.
        schemes = [SCHEMES["fp8_static"]]
    targets = {scheme: _targets(layers, scheme, anywhere) for scheme in schemes}
    if len(schemes) == 1:
        named = name_patterns(no_linears, (), anywhere=True) if anywhere else no_linears
        targets = {schemes[0]: ["Linear", *named]}
    if embedding is not None:
        targets[embedding].append("Embedding")
    formats = {export_format(scheme) for scheme in layers.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision" if len(formats) > 1 else next(iter(formats), "dense"),
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": targets[scheme],
                "format": export_format(scheme),
                "weights": quantization_args(scheme.weights),
                "input_activations": None if scheme.activations is None else quantization_args(scheme.activations),
                "output_activations": None,
            }
            for index, scheme in enumerate(schemes)
        },
        "ignore": ignore,
        "kv_cache_scheme": None if kv_cache is None else quantization_args(kv_cache),
    }


def _targets(layers: Mapping[str, Scheme], scheme: Scheme, anywhere: bool) -> list[str]:
    """List the ``targets`` of ``scheme``: patterns that match its layers only, one for all experts of a MoE layer if
    possible."""
    of_experts: dict[str, set[Scheme]] = {}
    for name, its in layers.items():
        if (expert := _EXPERTS.fullmatch(name)) is not None:
            of_experts.setdefault(expert["experts"], set()).add(its)
    mine, others, whole = dict[str, None](), dict[str, None](), dict[str, None]()
    for name, its in layers.items():
        expert = _EXPERTS.fullmatch(name)
        if expert is None or len(of_experts[expert["experts"]]) > 1:
            (mine if its == scheme else others)[name] = None
        else:
            (whole if its == scheme else others)[expert["experts"]] = None
    # transformers decodes all experts with the first group that has "experts" in a pattern: not shared_experts.
    named = [
        re.sub("(?<=[a-z_])experts", "expert[s]", entry) if entry.startswith("re:") else entry
        for entry in name_patterns(mine, others, anywhere=anywhere)
    ]
    return named + name_patterns(whole, others, r"\..+", anywhere=anywhere)


def quantization_args(spec: TensorSpec) -> dict[str, Any]:
    """Build compressed-tensors' QuantizationArgs of one tensor."""
    args: dict[str, Any] = {
        "num_bits": spec.bits,
        "type": "int" if spec.dtype == "int" else "float",
        "symmetric": spec.symmetric,
        # Groups with a global scale have their own strategy.
        "strategy": "tensor_group" if spec.scale_format == "e4m3" else spec.granularity,
    }
    if spec.granularity == "group":
        args["group_size"] = spec.group_size
    if spec.granularity == "block":
        args["block_structure"] = [spec.group_size, spec.group_size]
    if spec.scale_format in _SCALE_DTYPES:
        args["scale_dtype"] = _SCALE_DTYPES[spec.scale_format]
    # Dynamic scales relative to a stored global scale are "local".
    return args | {"dynamic": "local" if spec.dynamic and spec.has_global_scale else spec.dynamic}


# ---- names


def ignore_patterns(
    skipped: Iterable[str],
    quantized: Iterable[str],
    routers: Iterable[str] = (),
    copied: Iterable[str] = (),
    *,
    anywhere: bool = False,
) -> list[str]:
    """Build the ``ignore`` list: it matches every ``skipped`` Linear and no ``quantized`` layer.

    MoE routers are listed by the end of their names, anchored: vLLM treats them as Linears and would silently quantize
    them, and ``gate`` without an anchor also matches ``gate_proj``.

    Args:
        skipped, quantized, routers: module names of the unquantized Linears, the quantized layers and the MoE routers.
        copied: names of modules to ignore with all their submodules, under any prefix.
        anywhere: as in :func:`quantization_config`.
    """
    quantized = list(quantized)
    ends = dict.fromkeys(f"re:.*{re.escape('.'.join(name.split('.')[-2:]))}$" for name in routers)
    whole = dict.fromkeys(_inside(name, quantized) for name in copied)
    return [*ends, *whole, *name_patterns(skipped, quantized, anywhere=anywhere)]


def _inside(module: str, others: Iterable[str]) -> str:
    """Write a pattern for a module and its submodules. It matches the end of the module's name, or the full name if the
    end would also match a name in ``others``."""
    names = module.split(".")
    short = names[-2:] if names[-1].isdigit() else names[-1:]
    pattern = rf"{ANYWHERE}{re.escape('.'.join(short))}(?:\..*)?$"
    if any(re.match(pattern, other) for other in others):
        pattern = rf"{re.escape(module)}(?:\..*)?$"
    return f"re:{pattern}"


# ---- reading


def rules_from_config(config: Mapping[str, Any], *, scales_only: bool = False) -> list[Rule]:
    """Convert a ``quantization_config`` to rules: the first match decides.

    This is the inverse of :func:`quantization_config`. Keys that only affected calibration (``observer``, ...) are
    ignored; everything that would change the numbers is checked. The only supported class is ``Linear``; its rule comes
    last and matches every name. ``Embedding`` is ignored in a group that names the embeddings, too.

    Args:
        config: contents of config.json.
        scales_only: True if only stored scales are read: accept any format of the codes, and leave out inputs that have
            no stored scale.

    Raises:
        ValueError: the config is not compressed-tensors', or describes numerics that no scheme of this project has
            (output activations, activation ordering, rotated weights, ...).
    """
    if config.get("quant_method") != "compressed-tensors":
        raise ValueError(f"quant_method is {config.get('quant_method')!r}, expected 'compressed-tensors'")
    if config.get("transform_config"):
        raise ValueError("transform_config is set, expected none: rotated weights and inputs are not supported")
    sparsity = config.get("sparsity_config") or {}
    form, structure = sparsity.get("format", "dense"), sparsity.get("sparsity_structure")
    if form != "dense" or structure == "2:4":
        raise ValueError(
            f"sparsity_config has format {form!r} and sparsity_structure {structure!r}, expected dense weights, as "
            "training does not keep zeros: start from the checkpoint without sparsity"
        )
    rules = [Rule(None, _regex(entry)) for entry in config.get("ignore") or []]
    named: dict[str, Scheme] = {}
    for name, group in (config.get("config_groups") or {}).items():
        key = f"config_groups.{name}"
        scheme = _scheme(key, group, None if scales_only else config)
        targets = group.get("targets") or []
        for target in targets:
            if target == "Embedding" and any("embed" in other for other in targets):
                continue
            if target in named:
                raise ValueError(f"{key}.targets has {target!r}, which another group has too: keep one")
            if target != "Linear" and re.fullmatch(r"[A-Z]\w*", target):
                raise ValueError(f"{key}.targets has {target!r}, expected 'Linear', module names or 're:' patterns")
            named[target] = scheme
    # Names before patterns before classes, patterns in alphabetical order, as compressed-tensors' match_targets.
    ordered = sorted(named, key=lambda target: (target == "Linear", target.startswith("re:"), target))
    return rules + [Rule(named[target], None if target == "Linear" else _regex(target)) for target in ordered]


def _regex(entry: str) -> str:
    """Convert ``entry`` of ``targets`` or ``ignore`` to an equivalent full-match regex."""
    return f"(?:{entry.removeprefix('re:')}).*" if entry.startswith("re:") else re.escape(entry)


def kv_cache_from_config(config: Mapping[str, Any]) -> TensorSpec | None:
    """Read the format of keys and values from a ``quantization_config``; None if unquantized. Raises ValueError if the
    format is not fp8 with one stored scale for keys and one for values."""
    args = _arguments("kv_cache_scheme", config.get("kv_cache_scheme"))
    if args is None:
        return None
    spec = _spec("kv_cache_scheme", args)
    if spec != TensorSpec("fp8_e4m3", 8, "tensor"):
        raise ValueError(f"kv_cache_scheme is {spec}, expected one stored scale of fp8 per tensor")
    return spec


def _scheme(key: str, group: Mapping[str, Any], config: Mapping[str, Any] | None) -> Scheme:
    """Read the scheme of a config group. If ``config`` is None, leave out inputs without a stored scale and accept any
    ``format``. Raises ValueError if the group has no weights or is not supported."""
    if group.get("output_activations") is not None:
        raise ValueError(f"{key}.output_activations is set, expected null: quantized outputs are not supported")
    stored = _arguments(f"{key}.weights", group.get("weights"))
    if stored is None:
        raise ValueError(f"{key}.weights is missing")
    weights = _spec(f"{key}.weights", stored)
    inputs = _arguments(f"{key}.input_activations", group.get("input_activations"))
    if config is None and inputs is not None and inputs.get("dynamic", False) is True:
        inputs = None
    activations = None if inputs is None else _spec(f"{key}.input_activations", inputs)
    scheme = Scheme(_name(weights, activations), weights, activations)
    known = (each for each in SCHEMES.values() if (each.weights, each.activations) == (weights, activations))
    scheme = next(known, scheme)
    if config is None:
        return scheme
    layout, expected = group.get("format") or config.get("format"), export_format(scheme)
    if layout not in (expected, "naive-quantized" if expected in ("float-quantized", "int-quantized") else expected):
        raise ValueError(f"{key}.format is {layout!r}, expected {expected!r} for the weights and inputs of this group")
    return scheme


def _arguments(key: str, args: Any) -> Mapping[str, Any] | None:
    """Check the types of a QuantizationArgs object (``num_bits``, ...) and return the object; None for null. Raises
    ValueError if a type is wrong."""
    if args is None:
        return None
    if not isinstance(args, Mapping):
        raise ValueError(f"{key} is {args!r}, expected an object")
    for option, kinds, expected in (
        ("num_bits", (int,), "an integer"),
        ("symmetric", (bool,), "true or false"),
        ("group_size", (int, type(None)), "an integer or null"),
    ):
        if option in args and type(args[option]) not in kinds:
            raise ValueError(f"{key}.{option} is {args[option]!r}, expected {expected}")
    return args


def _spec(key: str, args: Mapping[str, Any]) -> TensorSpec:
    bits = args.get("num_bits", 8)
    strategy: Any = args.get("strategy")
    dtype: Dtype
    match args.get("type", "int"):
        case "float" if bits == 8:
            dtype = "fp8_e4m3"
        case "float" if bits == 4:
            dtype = "fp4_e2m1"
        case "int":
            dtype = "int"
        case other:
            raise ValueError(f"{key} has type {other!r} with num_bits {bits}, expected int, or float with 4 or 8 bits")
    known = (*get_args(Granularity), "tensor_group")
    if strategy not in known:
        raise ValueError(f"{key}.strategy is {strategy!r}, expected {', '.join(map(repr, known))}")
    granularity: Granularity = "group" if strategy == "tensor_group" else strategy
    size = args.get("group_size") if granularity == "group" else None
    if granularity == "block":
        size = _side(key, args.get("block_structure"))
    dynamic = args.get("dynamic", False)
    if not isinstance(dynamic, bool) and (dynamic, strategy) != ("local", "tensor_group"):
        raise ValueError(f"{key}.dynamic is {dynamic!r}, expected true or false")
    try:
        ggml = dtype == "int" and args.get("scale_dtype") == _SCALE_DTYPES["float16"]
        mx = dtype != "int" and size == MX_GROUP and args.get("scale_dtype") == _SCALE_DTYPES["e8m0"]
        spec = TensorSpec(dtype, bits, granularity, size, args.get("symmetric", True), bool(dynamic), ggml, mx=mx)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    scale_dtype = _SCALE_DTYPES.get(spec.scale_format)
    for option, expected, allowed in (
        ("strategy", quantization_args(spec)["strategy"], ()),
        ("dynamic", quantization_args(spec)["dynamic"], (None,)),
        ("actorder", None, ("weight", "static")),  # affects calibration only; columns are not permuted
        ("scale_dtype", scale_dtype, (None,)),
    ):
        if (found := args.get(option)) not in (expected, *allowed):
            raise ValueError(f"{key}.{option} is {found!r}, expected {expected!r}")
    return spec


def _side(key: str, structure: Any) -> int:
    """Read the side of a square block, from a list [n, n] or, in old checkpoints, a text '128x128'. Raises ValueError
    for anything else."""
    sides = structure.split("x") if isinstance(structure, str) else structure
    try:
        height, width = (int(side) if isinstance(side, str) else operator.index(side) for side in sides)
    except (TypeError, ValueError):
        raise ValueError(f"{key}.block_structure is {structure!r}, expected [height, width]") from None
    if height != width:
        raise ValueError(f"{key}.block_structure is {structure!r}, expected two equal numbers")
    return height


def _name(weights: TensorSpec, activations: TensorSpec | None) -> str:
    """Make a name in the style of the presets for a scheme without a preset: w2a8_channel, w4a16_g64."""
    inputs = "a16" if activations is None else f"a{activations.bits}"
    suffix = f"g{weights.group_size}" if weights.granularity == "group" else weights.granularity
    return f"w{weights.bits}{inputs}_{suffix}{'' if weights.symmetric else '_asym'}"
