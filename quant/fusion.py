"""Which layers serving fuses into one, and so must be quantised alike.

Serving fuses q/k/v, gate/up and others (:mod:`quant.fused_layers`) into one GEMM, and runs all experts of a MoE layer
in one kernel. What is fused has one scheme, and the scales that :mod:`quant.scale_groups` gives it are shared.
"""

import re
from collections.abc import Mapping, Sequence

from torch import nn

from quant.experts import StackedLinear, linears_of
from quant.fused_layers import FUSED, GATE_UP
from quant.rules import examples
from quant.spec import Scheme

_EXPERT = re.compile(r"(?P<experts>(?:.*\.)?experts)\.\d+\.(?P<projection>gate_proj|up_proj|down_proj)")


def fused_sets(schemes: dict[str, Scheme], modules: dict[str, nn.Module], *, across_experts: bool) -> list[list[str]]:
    """Sort the layers into the sets that serving fuses; each name is in one set, sets and names are in module order.

    Raises:
        ValueError: the layers of a set have several schemes, or only some have one.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in schemes:
        groups.setdefault(_fused_key(name, modules, across_experts), []).append(name)
    for parent, *leaves in groups:
        if across_experts and parent.rpartition(".")[2] == "experts":
            # Each shares its inputs, but one kernel runs all of them; some have no gate.
            leaves = [leaf for leaf in (*GATE_UP, "down_proj") if f"{parent}.0.{leaf}" in modules]
        _check_one_scheme(_members(parent, leaves, modules, across_experts), schemes)
    return list(groups.values())


def schemes_of_layers(schemes: Mapping[str, Scheme], modules: Mapping[str, nn.Module]) -> dict[str, Scheme]:
    """Turn schemes by name of the Linear in a checkpoint into schemes by name of the layer, in module order.

    Raises:
        ValueError: the Linears of one layer's stacked experts have several schemes, or only some have one.
    """
    experts: dict[str, list[str]] = {}  # Linears by the module that holds the stacks
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
    """What the layers of one set have in common: their parent, or MoE layer, and the names that are fused there."""
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
    """The layers of a set as serving has them, quantised or not."""
    parents = [parent]
    if across_experts and parent.rpartition(".")[2] == "experts":
        parents = [f"{parent}.{index}" for index, _ in modules[parent].named_children() if index.isdigit()]
    return [f"{one}.{leaf}".lstrip(".") for one in parents for leaf in leaves]


def _check_one_scheme(members: Sequence[str], schemes: Mapping[str, Scheme]) -> None:
    missing = [name for name in members if name not in schemes]
    if missing:
        raise ValueError(
            f"{examples(members, 6)} are served as one layer, so all or none of them can be quantised, but "
            f"{examples(missing, 6)} {'is' if len(missing) == 1 else 'are'} exempt or no nn.Linear; exempt the others "
            "too"
        )
    found = {schemes[name]: name for name in reversed(members)}
    if len(found) > 1:
        raise ValueError(
            f"{examples(members, 6)} are served as one layer, so they need one scheme, but "
            + ", ".join(f"{name} has {scheme.name}" for scheme, name in reversed(found.items()))
        )
