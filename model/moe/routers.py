"""Find the routers of a MoE layer, by their computation instead of their names.

A router computes the weights of the chosen experts. So a block's forward is run on the meta device up to its experts,
and autograd's graph of these weights is followed back to the last matrix product: the parameters on this path, and the
block's children that contain them, are the router.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call

_PRODUCTS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0")


class _Reached(Exception):
    """Raised when the forward reaches the experts."""


def routers_of(block: nn.Module, experts: nn.Module, *, num_experts: int, hidden_dim: int) -> list[str]:
    """Find the names, inside ``block``, of the router of ``experts``: children of the block, or its own parameters.

    The gate of shared experts (a Linear with one output) counts as a router, and so do parameters of the block with a
    value per expert.

    Args:
        block: parent of ``experts``; its parameters may be on the meta device.
        experts: called with hidden states, the chosen experts and their weights.
        num_experts, hidden_dim: sizes of the experts.

    Raises:
        ValueError: the block has no router.
    """
    inside = {name for name, module in block.named_modules() if module is experts}
    (own,) = inside
    parameters = {name: value for name, value in block.named_parameters() if not name.startswith(f"{own}.")}
    found = _by_computation(block, experts, parameters, hidden_dim)
    if not found:
        found = {name for name, value in parameters.items() if tuple(value.shape) == (num_experts, hidden_dim)}
    if not found:
        raise ValueError(f"nothing in {type(block).__name__} computes which of the {num_experts} experts are chosen")
    children = {name.partition(".")[0] for name in found}
    for name, child in block.named_children():
        if isinstance(child, nn.Linear) and child.out_features == 1:
            children.add(name)
    for name, value in block.named_parameters(recurse=False):
        if value.numel() == num_experts:
            children.add(name)
    return sorted(children)


def _by_computation(
    block: nn.Module, experts: nn.Module, parameters: dict[str, nn.Parameter], hidden_dim: int
) -> set[str]:
    """Find the names of the parameters in the last product before the weights of the chosen experts; empty if the
    block's forward takes more than hidden states, or needs values."""
    meta = {
        name: torch.empty_like(value, device="meta").requires_grad_(name in parameters and value.is_floating_point())
        for name, value in (*block.named_parameters(), *block.named_buffers())
    }
    dtype = next(iter(parameters.values())).dtype if parameters else torch.float32
    hidden = torch.empty(1, 8, hidden_dim, dtype=dtype, device="meta", requires_grad=True)
    given: list[Tensor] = []

    def reached(module: nn.Module, arguments: tuple, named: dict) -> None:
        given.extend(value for value in (*arguments, *named.values()) if isinstance(value, Tensor))
        raise _Reached

    hook = experts.register_forward_pre_hook(reached, with_kwargs=True)
    try:
        with torch.enable_grad():
            functional_call(block, meta, (hidden,))
    except _Reached:
        pass
    except Exception:  # of any kind: then the caller uses the parameters' shapes
        return set()
    finally:
        hook.remove()
    names = {id(value): name for name, value in meta.items()}
    ends = [value.grad_fn for value in given[1:] if value.is_floating_point() and value.grad_fn is not None]
    return {names[id(leaf)] for end in ends for leaf in _last_product(end, hidden) if id(leaf) in names}


def _last_product(end: Node, hidden: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that ``end`` is computed from, back to the nearest matrix products of ``hidden``."""
    seen: set[Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        before = [other for other, _ in node.next_functions if other is not None]
        if (leaf := getattr(node, "variable", None)) is not None and leaf is not hidden:
            yield leaf
        if node.name() in _PRODUCTS:
            before = [other for other in before if not _reaches(other, hidden)]
        waiting += before


def _reaches(start: Node, leaf: Tensor) -> bool:
    """Return True if ``start`` is computed from ``leaf``."""
    seen: set[Node] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is leaf:
            return True
        waiting += [other for other, _ in node.next_functions if other is not None]
    return False
