"""Which layer gets which scheme: exempt patterns, rules for mixed precision, the default.

An exempt layer stays as it is; of the others the first rule that matches decides, and where none does the default.
lm_head and embeddings, which the default patterns exempt, are quantised by naming them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from quant.experts import StackedLinear, linears_of
from quant.spec import Scheme

# Anchored as whole names: `.*gate.*` would also take gate_proj. A model need not have any of these.
DEFAULT_EXEMPT: tuple[str, ...] = (
    r"(.*\.)?lm_head",
    r"(.*\.)?embed_tokens",
    r"(.*\.)?(gate|router|shared_expert_gate)",  # MoE routers, whether nn.Linear or a class of their own
    r"(.*\.)?router\..+",
    r"(.*\.)?indexer\..+",  # chooses the tokens of sparse attention (DeepSeek-V3.2, GLM-5); serving keeps it in bf16
)

_DECODER_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..+")


@dataclass(frozen=True)
class Rule:
    """A scheme for the layers that all given conditions match.

    Attributes:
        scheme: of these layers; None to leave them unquantised.
        layers: a regex on the whole module name (``re.fullmatch``).
        first: layers inside the first so many decoder layers.
        last: layers inside the last so many.
    """

    scheme: Scheme | None
    layers: str | None = None
    first: int | None = None
    last: int | None = None

    def matches(self, name: str, depth: int) -> bool:
        """Whether the rule is for the layer ``name`` of a model of ``depth`` decoder layers."""
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


@dataclass(frozen=True)
class Assignment:
    """What :func:`assign` decided.

    Attributes:
        schemes: by name of the layer, in module order; only layers that are quantised.
        exempt: names of the modules that an exempt pattern matched (routers that are no nn.Linear among them), in
            module order.
    """

    schemes: dict[str, Scheme]
    exempt: list[str]


def assign(
    model: nn.Module,
    scheme: Scheme | None,
    rules: Sequence[Rule] = (),
    exempt: Sequence[str] = DEFAULT_EXEMPT,
    named: Mapping[str, Scheme] | None = None,
) -> Assignment:
    """The scheme of every nn.Linear of ``model``, and of the embeddings that are named.

    Stacked experts go by the names of the Linears that they are in a checkpoint, ``experts.7.gate_proj``.

    Args:
        model: any module tree.
        scheme: of the Linears for which nothing else decides; None leaves them as they are.
        rules: the first that matches a Linear decides.
        exempt: regexes on full module names, before the rules. One that is not in :data:`DEFAULT_EXEMPT` must match.
        named: schemes by exact name, before everything else.

    Raises:
        ValueError: a rule, a pattern or a name is not that of any layer.
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
    unused = dict(enumerate(rules))
    schemes: dict[str, Scheme] = {}
    for name in layers:
        chosen = named.get(name)
        if name not in named and name not in kept and isinstance(modules[name], _LINEARS):
            index = next((index for index, rule in enumerate(rules) if rule.matches(name, depth)), None)
            chosen = scheme if index is None else rules[index].scheme
            unused.pop(index, None)  # type: ignore[arg-type]
        if chosen is not None:
            schemes[name] = chosen
    for index, rule in unused.items():
        raise ValueError(
            f"rule {index} ({rule}) matches no layer that an exempt pattern or a rule before it leaves to it; names "
            f"look like {examples([name for name in layers if name not in kept])}"
        )
    return Assignment(schemes, [name for name in modules if name in kept])


_LINEARS = (nn.Linear, StackedLinear)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name; a stack by the name of each Linear in it."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, StackedLinear):
            modules |= {part.name: module for part in linears_of(name, module)}
        else:
            modules[name] = module
    return modules


def _matched(modules: dict[str, nn.Module], patterns: Sequence[str]) -> set[str]:
    """Names of the modules that a pattern matches; an error for a pattern of the user's that matches none."""
    matched: set[str] = set()
    for pattern in patterns:
        names = {name for name in modules if re.fullmatch(pattern, name)}
        if not names and pattern not in DEFAULT_EXEMPT:
            linears = [name for name, module in modules.items() if isinstance(module, _LINEARS)]
            raise ValueError(
                f"exempt pattern {pattern!r} matches no module; it must match a full name such as {examples(linears)}"
            )
        matched |= names
    return matched


def examples(names: Sequence[str], most: int = 3) -> str:
    """The first few names, for an error that must show what they look like."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "(there is none)") + more


def exempt_line(names: Iterable[str]) -> str:
    """The line of a recipe that leaves layers of these names, and those like them in other layers, unquantised."""
    parts = ((r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")) for name in names)
    quoted = [f"'{pattern}'" for pattern in dict.fromkeys(r"\.".join(some) for some in parts)]
    return f"quant.exempt_more: [{', '.join(quoted)}]"
