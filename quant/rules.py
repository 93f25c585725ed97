"""Assign schemes to layers (exempt patterns, rules for mixed precision, default), and find the layers that serving
fuses.

Exempt layers stay unquantized. For other layers the first matching rule decides, or else the default scheme. lm_head
and embeddings are exempt by default and are quantized if a recipe names them. Serving fuses q/k/v, gate/up and others
into one GEMM (:data:`FUSED`), and runs all experts of a MoE layer in one kernel. Fused layers must have the same
scheme; :mod:`quant.quantization` shares their scales.

:func:`pattern_problem` rejects regexes of recipes that may take exponential time: Python's engine tries every way to
split a name over the repetitions of a pattern. With nested repetitions the number of ways is exponential. With
repetitions one after the other, each multiplies the number by the length of the name: four on a name of 80 characters
have about two million ways, which take 10 ms.

:data:`FUSED` is taken from vLLM (``packed_modules_mapping`` and the stacked parameters of ``load_weights``); a test
compares it with vLLM's full table, ``tests/unit/quant/vllm_groups.json``. Names are names of transformers' modules,
which for some families differ from the names on disk. If one class fuses more layers than other classes (q, k and v
with the gate of a linear attention), its row comes first and names the class. Sharing scales among layers that a server
does not fuse costs only a little precision. So any other row applies to all classes, unless some of them use the row's
names for other layers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from torch import nn

from quant.linear import StackedLinear, linears_of
from quant.spec import Scheme

# Anchored to whole names: `.*gate.*` would also match gate_proj. None of them has to match.
DEFAULT_EXEMPT: tuple[str, ...] = (
    r"(.*\.)?lm_head",
    r"(.*\.)?embed_tokens",
    r"(.*\.)?(gate|router|shared_expert_gate)",  # MoE routers, an nn.Linear or another class
    r"(.*\.)?router\..+",
    # Selects the tokens of sparse attention (DeepSeek-V3.2, GLM-5). Serving keeps it in bf16, except for index_qk_proj,
    # which runs in one GEMM with q, k and v (Qwen4-Exp).
    r"(.*\.)?indexer\.(?!index_qk_proj$).+",
)

_DECODER_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..+")


@dataclass(frozen=True)
class Rule:
    """Scheme for the layers whose name matches ``layers`` and that are in the first or last decoder layers. A condition
    that is None always holds.

    Attributes:
        scheme: scheme of these layers; None leaves them unquantized.
        layers: regex on the whole module name (``re.fullmatch``).
        first, last: match layers inside the first ``first`` or the last ``last`` decoder layers (modules named
            ``layers.0``, ``layers.1``, ...). If both are given, one match is enough.
    """

    scheme: Scheme | None
    layers: str | None = None
    first: int | None = None
    last: int | None = None

    def matches(self, name: str, depth: int) -> bool:
        """Return True if the rule matches the layer ``name`` of a model with ``depth`` decoder layers."""
        if self.layers is not None and not re.fullmatch(self.layers, name):
            return False
        if self.first is None and self.last is None:
            return True
        found = _DECODER_LAYER.fullmatch(name)
        if found is None:
            return False
        index = int(found[1])
        return index < (self.first or 0) or index >= depth - (self.last or 0)

    def __str__(self) -> str:
        parts = {"layers": self.layers, "first": self.first, "last": self.last}
        return ", ".join(f"{key}: {value}" for key, value in parts.items() if value is not None) or "every layer"


def assign(
    model: nn.Module,
    scheme: Scheme | None,
    rules: Sequence[Rule] = (),
    exempt: Sequence[str] = DEFAULT_EXEMPT,
    named: Mapping[str, Scheme] | None = None,
) -> tuple[dict[str, Scheme], list[str]]:
    """Assign a scheme to every nn.Linear of ``model`` and to the named embeddings.

    Patterns match stacked experts by the names of their Linears in a checkpoint, such as ``experts.7.gate_proj``.

    Args:
        scheme: default scheme of the Linears; None leaves them unquantized.
        rules: the first rule that matches a Linear decides.
        exempt: regexes on full names of modules that stay unquantized, whatever the rules are. A pattern outside
            :data:`DEFAULT_EXEMPT` must match.
        named: schemes by exact module name; they take precedence over ``exempt`` and ``rules``.

    Returns:
        Schemes of the quantized layers by name, and names of the modules that an exempt pattern matched (also routers
        that are not nn.Linear), both in module order.

    Raises:
        ValueError: a rule decides for no layer, or a pattern or a name in ``named`` matches no module.
    """
    named = named or {}
    modules = _modules(model)
    layers = [name for name, module in modules.items() if isinstance(module, (*_LINEARS, nn.Embedding))]
    unknown = named.keys() - set(layers)
    if unknown:
        raise ValueError(
            f"{examples(sorted(unknown))}: no such nn.Linear or nn.Embedding, names are {examples(layers)}"
        )
    depth = 1 + max((int(found[1]) for name in layers if (found := _DECODER_LAYER.fullmatch(name))), default=-1)
    kept = _matched(modules, exempt) - named.keys()
    used = set()
    schemes: dict[str, Scheme] = {}
    for name in layers:
        chosen = named.get(name)
        if name not in named and name not in kept and isinstance(modules[name], _LINEARS):
            deciding = ((index, rule.scheme) for index, rule in enumerate(rules) if rule.matches(name, depth))
            index, chosen = next(deciding, (None, scheme))
            used.add(index)
        if chosen is not None:
            schemes[name] = chosen
    for index, rule in enumerate(rules):
        if index not in used:
            raise ValueError(
                f"quant.rules: rule {index} ({rule}) decides for no layer: it matches none, or only layers that are "
                "exempt or that rules before it match; names look like "
                f"{examples([name for name in layers if name not in kept])}"
            )
    return schemes, [name for name in modules if name in kept]


_LINEARS = (nn.Linear, StackedLinear)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name; a stack of experts is listed once for each of its Linears, under that name."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, StackedLinear):
            modules |= {part.name: module for part in linears_of(name, module)}
        else:
            modules[name] = module
    return modules


def _matched(modules: dict[str, nn.Module], patterns: Sequence[str]) -> set[str]:
    """Find the names of all modules that a pattern matches. Raises ValueError if a pattern outside the defaults matches
    none."""
    matched: set[str] = set()
    for pattern in patterns:
        names = {name for name in modules if re.fullmatch(pattern, name)}
        if not names and pattern not in DEFAULT_EXEMPT:
            such = examples([name for name, module in modules.items() if isinstance(module, _LINEARS)])
            where = "(quant.exempt, quant.exempt_more); it must match a full name such as"
            raise ValueError(f"exempt pattern {pattern!r} matches no module {where} {such}")
        matched |= names
    return matched


def examples(names: Sequence[str], most: int = 3) -> str:
    """Format the first ``most`` names, and the number of the others, for an error message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "(there is none)") + more


def exempt_line(names: Iterable[str]) -> str:
    """Write the recipe line (``quant.exempt_more``) that exempts these layers and their counterparts in other decoder
    layers."""
    parts = ((r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")) for name in names)
    quoted = [f"'{pattern}'" for pattern in dict.fromkeys(r"\.".join(some) for some in parts)]
    return f"quant.exempt_more: [{', '.join(quoted)}]"


_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\.(?P<projection>gate_proj|up_proj|down_proj)")


def fused_sets(schemes: dict[str, Scheme], modules: dict[str, nn.Module], *, across_experts: bool) -> list[list[str]]:
    """Group the layers named in ``schemes`` into the sets that serving fuses, in module order. Each layer is in one
    set. With ``across_experts``, a set contains layers of all experts of a MoE layer, which share an input scale; else
    layers of one expert. Raises ValueError if layers of a set have different schemes, or only some have a scheme."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in schemes:
        groups.setdefault(_fused_key(name, modules, across_experts), []).append(name)
    for parent, *leaves in groups:
        if across_experts and parent.rpartition(".")[2] == "experts":
            # Input scales are shared per projection, but one kernel runs all projections; some models have no gate.
            leaves = [leaf for leaf in (*GATE_UP, "down_proj") if f"{parent}.0.{leaf}" in modules]
        _check_one_scheme(_members(parent, leaves, modules, across_experts), schemes)
    return list(groups.values())


def schemes_of_layers(schemes: Mapping[str, Scheme], modules: Mapping[str, nn.Module]) -> dict[str, Scheme]:
    """Convert ``schemes``, whose keys are names of a checkpoint's Linears, to a dict with names of layers as keys, in
    module order (a stack of experts is one layer). Raises ValueError if the experts of one MoE layer have different
    schemes, or only some have one."""
    experts: dict[str, list[str]] = {}  # Linears by the parent module of the stacks
    for name, module in modules.items():
        if isinstance(module, StackedLinear):
            members = experts.setdefault(name.rpartition(".")[0], [])
            members += [part.name for part in linears_of(name, module)]
    found = {}
    for name, module in modules.items():
        if isinstance(module, StackedLinear):
            members = experts[name.rpartition(".")[0]]
            if any(member in schemes for member in members):
                _check_one_scheme(members, schemes)
                found[name] = schemes[members[0]]
        elif name in schemes:
            found[name] = schemes[name]
    return found


def _fused_key(name: str, modules: dict[str, nn.Module], across_experts: bool) -> tuple[str, ...]:
    """Return the key by which :func:`fused_sets` groups layers: the name of the parent module (or of the ``experts``
    module) and the names of the fused layers inside that module."""
    expert = _EXPERT.fullmatch(name)
    if across_experts and expert is not None:
        return (expert["experts"], *(GATE_UP if expert["projection"] in GATE_UP else ("down_proj",)))
    for members, classes in FUSED:
        for member in members:
            if name != member and not name.endswith(f".{member}"):
                continue
            parent = name[: -len(member)].rstrip(".")
            kind = type(modules[parent]).__name__
            present = [other for other in members if f"{parent}.{other}".lstrip(".") in modules]
            if len(present) > 1 and (not classes or kind.startswith(classes)):
                return (parent, *present)
    parent, _, leaf = name.rpartition(".")
    return (parent, leaf)


def _members(parent: str, leaves: Sequence[str], modules: dict[str, nn.Module], across_experts: bool) -> list[str]:
    """List all layers of a set that serving fuses, quantized or not."""
    parents = [parent]
    if across_experts and parent.rpartition(".")[2] == "experts":
        parents = [f"{parent}.{index}" for index, _ in modules[parent].named_children() if index.isdigit()]
    return [f"{one}.{leaf}".lstrip(".") for one in parents for leaf in leaves]


def _check_one_scheme(members: Sequence[str], schemes: Mapping[str, Scheme]) -> None:
    if len({schemes.get(name) for name in members}) <= 1:
        return
    if missing := [name for name in members if name not in schemes]:
        raise ValueError(
            f"{examples(members, 6)} are served as one layer, so all or none of them can be quantized, but "
            f"{examples(missing, 6)} {'is' if len(missing) == 1 else 'are'} exempt or no nn.Linear; exempt the others "
            "too (quant.exempt_more)"
        )
    found = {schemes[name]: name for name in reversed(members)}
    each = ", ".join(f"{name} has {scheme.name}" for scheme, name in reversed(found.items()))
    raise ValueError(
        f"{examples(members, 6)} are served as one layer, so they need one scheme, but {each}: write "
        "quant.rules so that one scheme matches all of them"
    )


MOST_CHARACTERS, MOST_REPEATS = 2000, 4
MANY = 16  # a repetition that may match this many times or more counts as unlimited
_DIGITS = frozenset({(_constants.CATEGORY, _constants.CATEGORY_DIGIT), (_constants.RANGE, (48, 57))})
# Component of a module name that is a layer or expert index.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# Optional prefix of a module name inside the text model.
ANYWHERE = r"(?:.*\.)?"


def pattern_problem(text: str) -> str | None:
    """Return the reason why a regex is not accepted; None if it compiles and matches every module name in short
    time."""
    if len(text) > MOST_CHARACTERS:
        return f"it has {len(text):,} characters, at most {MOST_CHARACTERS:,} are allowed"
    try:
        re.compile(text)
        parsed = _parser.parse(text)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error) or type(error).__name__
    repeats = _repeats(parsed, inside=False)
    if repeats is None:
        return "a repetition contains a repetition or alternatives, which may take for ever; write the parts one by one"
    if repeats > MOST_REPEATS:
        return f"it has {repeats} repetitions like .*, at most {MOST_REPEATS} are allowed: more may take for ever"
    return None


def _repeats(parsed: Any, *, inside: bool) -> int | None:
    """Count the unlimited repetitions of a pattern; None if a repetition contains an unlimited one, or alternatives.
    Repetitions of digits are not counted: a name has few digits in a row. Counts of alternatives are added up."""
    count = 0
    for operation, argument in parsed:
        if operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            _, most, body = argument
            many = int(most) >= MANY
            if many and inside:
                return None
            below = _repeats(body, inside=inside or many or int(most) > 1)
            if below is None:
                return None
            digits = all(kind is _constants.IN and set(choice) <= _DIGITS for kind, choice in body)
            count += below + (many and not digits)
        elif operation is _constants.BRANCH and inside:
            return None
        else:
            for part in _subpatterns(argument):
                below = _repeats(part, inside=inside)
                if below is None:
                    return None
                count += below
    return count


def _subpatterns(argument: Any) -> Iterator[Any]:
    """Find the patterns inside the argument of an element of a parsed regex."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _subpatterns(part)


def name_patterns(names: Iterable[str], others: Iterable[str], end: str = "", *, anywhere: bool = False) -> list[str]:
    """Build a short list for ``targets`` or ``ignore`` of a compressed-tensors config that matches all of ``names`` and
    none of ``others``.

    Names that differ only in numbers (of layers, of experts) share an anchored pattern. It matches all numbers if no
    name in ``others`` has the same form. Otherwise it lists the layer numbers only: a list of every expert of every
    layer would be megabytes. If a name in ``others`` has the same form and layer number, each name is listed alone.

    Args:
        names, others: module names.
        end: a regex for the text that follows each name; if given, all names are written as patterns.
        anywhere: write all names as patterns with an optional prefix, for readers that nest the model in another
            module. Raises ValueError if such a pattern would match a name in ``others``.
    """
    others = list(others)
    alike, strangers = _by_numbers(names), _by_numbers(others)
    exact = not end and not anywhere
    entries = []
    for parts, numbers in alike.items():
        taken = strangers.get(parts, {})
        layers = dict.fromkeys(number[:1] for number in numbers)
        if len(parts) == 1 and exact:
            entries.append(parts[0])
        elif not taken:
            entries.append(_pattern(parts, [r"\d+"] * (len(parts) - 1), end))
        elif len(numbers) > 1 and not layers.keys() & {number[:1] for number in taken}:
            listed = "|".join(number for (number,) in layers)
            entries.append(_pattern(parts, [f"(?:{listed})", *[r"\d+"] * (len(parts) - 2)], end))
        elif not exact:
            entries += [_pattern(parts, number, end) for number in numbers]
        else:
            entries += ["".join(_interleave(parts, number)) for number in numbers]
    if not anywhere:
        return entries
    entries = [entry.replace("re:", f"re:{ANYWHERE}", 1) for entry in entries]
    for entry in entries:
        if caught := next((other for other in others if re.match(entry.removeprefix("re:"), other)), None):
            raise ValueError(
                f"the pattern {entry.removeprefix('re:')} would match {caught} too, which has another scheme or "
                "none: give all layers that the pattern matches one scheme"
            )
    return entries


def _by_numbers(names: Iterable[str]) -> dict[tuple[str, ...], dict[tuple[str, ...], None]]:
    """Group names by the text between their numbers, and list the numbers of each group."""
    found: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for name in names:
        found.setdefault(tuple(_NUMBER.split(name)), {})[tuple(_NUMBER.findall(name))] = None
    return found


def _pattern(parts: Iterable[str], numbers: Iterable[str], end: str) -> str:
    return "re:" + "".join(_interleave([re.escape(part) for part in parts], numbers)) + end + "$"


def _interleave(parts: Iterable[str], numbers: Iterable[str]) -> list[str]:
    between = iter(numbers)
    return [text for part in parts for text in (part, next(between, ""))]


# The version of vLLM from which FUSED is taken.
VLLM_VERSION = "0.33.0"


class FusedLayers(NamedTuple):
    """Layers of one parent module that a server runs as one GEMM.

    Attributes:
        members: names of the layers inside the parent. A model may lack some of them (Gemma 4 uses its keys as values).
        classes: prefixes of the parents' class names; any class if empty.
    """

    members: tuple[str, ...]
    classes: tuple[str, ...] = ()


GATE_UP = ("gate_proj", "up_proj")
_QKV = ("q_proj", "k_proj", "v_proj")
FUSED: tuple[FusedLayers, ...] = (
    FusedLayers((*_QKV, "g_proj"), ("OlmoHybridGatedDeltaNet",)),
    FusedLayers((*_QKV, "b_proj", "forget_gate.f_a_proj"), ("KimiLinearDeltaAttention",)),
    FusedLayers((*_QKV, "b_proj", "forget_gate.f_a_proj", "g_a_proj"), ("Glm5NextTextLinearAttention",)),
    FusedLayers((*_QKV, "b_proj"), ("BailingHybridDeltaAttention",)),
    FusedLayers((*_QKV, "gate_proj"), ("BeamAttention", "MuseSparkTextAttention")),
    FusedLayers((*_QKV, "r_proj"), ("InklingAttention",)),
    FusedLayers((*_QKV, "indexer.index_qk_proj"), ("Qwen4ExpTextAttention",)),
    FusedLayers(("key_proj", "value_proj"), ("Qwen4ExpTextPLELayer",)),
    FusedLayers(("input_mix_weight_down", "block_inject_weight"), ("Qwen4ExpTextGatedResidual",)),
    FusedLayers(("q_a_proj", "kv_proj"), ("DeepseekV4Attention",)),
    FusedLayers(("kv_proj", "gate_proj"), ("DeepseekV4",)),
    FusedLayers(_QKV),
    FusedLayers(GATE_UP),
    FusedLayers(("w1", "w3")),  # LFM2's gate and up
    FusedLayers(("q_a_proj", "kv_a_proj_with_mqa")),  # latent attention
    FusedLayers(("in_proj_qkv", "in_proj_z")),  # Qwen3.5's linear attention
    FusedLayers(("in_proj_b", "in_proj_a")),
)
