"""Mixture-of-experts layers in one of two forms, in the place of transformers' fused modules.

transformers keeps all experts of a layer in two 3-D parameters, ``gate_up_proj [E, 2I, H]`` (gate first) and
``down_proj [E, H, I]``. Quantisation wants a module around each weight, with one scale per expert and projection, as
checkpoints on disk and serving have them. So the fused module is replaced while the model is still empty (on the meta
device): nothing is copied.

- **stacked**: the two weights stay what they are, each in a :class:`quant.experts.StackedLinear` with E scales. Few
  parameters, few collectives, one launch for all experts.
- **per_expert**: three nn.Linears for each expert: thousands of small parameters, any of which can be looked at by
  itself.

In either form **every expert has a gradient on every rank**. Were each rank to run only those per-expert Linears that
its own tokens chose, ranks would disagree on which parameters have gradients and in which order they come, and the
reductions of ZeRO stages 1-3 would add unlike things up, in silence. So each of them runs, in a fixed order, with an
empty input if no token chose it: an empty matrix product gives every parameter its zero gradient.

Legend: T tokens, K experts per token, E experts, H hidden size, I intermediate size.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model import zero
from model.routers import routers_of
from quant.experts import StackedLinear

ATTRIBUTES = ("num_experts", "hidden_dim", "intermediate_dim", "act_fn")
Form = Literal["stacked", "per_expert"]
Function = Callable[[Tensor], Tensor]
# In the keys of configurations that speak of experts, but not of how many there are to choose from.
_NO_NUMBER = re.compile(r"tok|top|shared|group|size|dim|interval|freq|step|layer|zero")


class ExpertMLPs(nn.Module):
    """The experts of one MoE layer; same signature and same results as transformers' eager fused module, bit for bit
    where the matrix products are.

    Args:
        num_experts, hidden_dim, intermediate_dim: E, H and I.
        act_fn: of the gate.
        gated: what a class computes from gate and up, ``[rows, 2I]`` to ``[rows, I]``, where that is not
            ``act_fn(gate) * up``: some clamp both.

    Attributes:
        routers: names, in the model, of the modules and parameters that choose among them (:mod:`model.routers`).
    """

    routers: tuple[str, ...] = ()

    def __init__(
        self, num_experts: int, hidden_dim: int, intermediate_dim: int, act_fn: Function, gated: Function | None = None
    ):
        super().__init__()
        self.num_experts = num_experts
        self.hidden_dim = hidden_dim
        self.intermediate_dim = intermediate_dim
        self.act_fn = act_fn
        self._gated = gated

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """What goes into down_proj, [rows, I], from the outputs of gate_proj and up_proj."""
        if self._gated is None:
            return self.act_fn(gate) * up
        return self._gated(torch.cat([gate, up], dim=-1))


class StackedMLPs(ExpertMLPs):
    """All experts' weights in two stacks; ``weights`` are Parameters ``[E, 2I, H]`` and ``[E, H, I]``."""

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        act_fn: Function,
        gated: Function | None,
        weights: tuple[nn.Parameter, nn.Parameter],
    ):
        super().__init__(num_experts, hidden_dim, intermediate_dim, act_fn, gated)
        e, h, i = num_experts, hidden_dim, intermediate_dim
        self.gate_up_proj = StackedLinear(weights[0], (e, 2 * i, h), ("gate_proj", "up_proj"))
        self.down_proj = StackedLinear(weights[1], (e, h, i), ("down_proj",))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs. The host waits for nothing, where the GEMM is a grouped one.

        Args:
            hidden_states: [T, H].
            top_k_index: [T, K] integers in [0, E]; E means none. Such a choice is computed, with a weight of 0.
            top_k_weights: [T, K].

        Returns:
            [T, H] in the dtype of ``hidden_states``, experts added up in their order.
        """
        tokens, per_token = top_k_index.shape
        # "None" is the last expert with a weight of 0: leaving rows out would make the host wait for their number.
        none = top_k_index == self.num_experts
        top_k_index = top_k_index.clamp(max=self.num_experts - 1)
        # [K, T], as transformers orders them, then grouped by expert.
        choices = top_k_index.t().reshape(-1)
        order = torch.argsort(choices, stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=order.device)
        counts.index_add_(0, choices, torch.ones_like(choices, dtype=torch.int32))
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate, up = self.gate_up_proj(hidden_states[order % tokens], offsets).chunk(2, dim=-1)
        rows = self.down_proj(self.gated(gate, up), offsets)
        weights = top_k_weights.masked_fill(none, 0).t().reshape(-1)[order]
        rows = (rows * weights[:, None]).to(hidden_states.dtype)
        # Where the rows of each token ended up, in the order of their experts. Added one by one: a sum over K would
        # round in another way, and the atomic additions of index_add come in any order.
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        place = place.view(per_token, tokens).t().gather(1, top_k_index.argsort(dim=-1, stable=True))
        output = torch.zeros_like(hidden_states)
        for column in place.unbind(1):
            output = output + rows[column]
        return output


class ExpertMLP(nn.Module):
    """Weights of one expert; :class:`PerExpertMLPs` shares the activation among them."""

    def __init__(self, hidden_dim: int, intermediate_dim: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_dim, intermediate_dim, bias=False)
        self.up_proj = nn.Linear(hidden_dim, intermediate_dim, bias=False)
        self.down_proj = nn.Linear(intermediate_dim, hidden_dim, bias=False)


class PerExpertMLPs(ExpertMLPs):
    """Children ``"0"`` to ``"E-1"`` are the experts' weights."""

    def __init__(
        self, num_experts: int, hidden_dim: int, intermediate_dim: int, act_fn: Function, gated: Function | None = None
    ):
        super().__init__(num_experts, hidden_dim, intermediate_dim, act_fn, gated)
        for expert in range(num_experts):
            self.add_module(str(expert), ExpertMLP(hidden_dim, intermediate_dim))

    def experts(self) -> Iterator[ExpertMLP]:
        """The experts' weights in order."""
        for expert in range(self.num_experts):
            yield self.get_submodule(str(expert))  # type: ignore[misc]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The same as :meth:`StackedMLPs.forward`."""
        tokens = hidden_states.shape[0]
        # [K, T], as transformers orders them, then grouped by expert. The counts are the only thing the host waits for.
        choices = top_k_index.t().reshape(-1)
        order = torch.argsort(choices, stable=True)
        counts = torch.bincount(choices, minlength=self.num_experts + 1)[: self.num_experts].tolist()
        order = order[: sum(counts)]
        token_groups = (order % tokens).split(counts)
        weight_groups = top_k_weights.t().reshape(-1)[order].split(counts)
        inputs = hidden_states[order % tokens].split(counts)

        output = torch.zeros_like(hidden_states)
        for expert, rows, token, weight in zip(self.experts(), inputs, token_groups, weight_groups, strict=True):
            rows = expert.down_proj(self.gated(expert.gate_proj(rows), expert.up_proj(rows)))
            # A token chooses an expert at most once: no two of these additions meet, on any device.
            output.index_add_(0, token, (rows * weight[:, None]).to(output.dtype))
        return output


def arrange_experts(model: nn.Module, form: Form) -> int:
    """Replace every fused experts module of an empty model by one of ``form``, a leaf for ZeRO-3.

    Run it where new parameters land on the meta device: nothing is copied. Returns how many there were.

    Raises:
        ValueError: experts in a layout, or with a function, that this does not know, by class name.
    """
    counts = _numbers_of_experts(model.config.to_dict() if isinstance(model, PreTrainedModel) else {})
    found = [
        (name, module) for name, module in model.named_modules() if _looks_like_experts(name, module, model, counts)
    ]
    checked: set[type] = set()
    for name, fused in found:
        _check_layout(name, fused)
        if type(fused) not in checked:
            _check_function(name, fused)
            checked.add(type(fused))
        sizes = (fused.num_experts, fused.hidden_dim, fused.intermediate_dim, fused.act_fn, _gated_of(fused))
        experts: ExpertMLPs
        if form == "stacked":
            experts = StackedMLPs(*sizes, (fused.gate_up_proj, fused.down_proj))
        else:
            experts = PerExpertMLPs(*sizes)
        block = name.rpartition(".")[0]
        below = routers_of(
            model.get_submodule(block), fused, num_experts=fused.num_experts, hidden_dim=fused.hidden_dim
        )
        experts.routers = tuple(f"{block}.{router}".lstrip(".") for router in below)
        experts.train(fused.training)
        zero.mark_leaf(experts)
        model.set_submodule(name, experts)
    return len(found)


def _gated_of(fused: nn.Module) -> Function | None:
    """What the class of ``fused`` computes from gate and up, if it says so itself; else it is ``act_fn(gate) * up``."""
    own = getattr(type(fused), "_apply_gate", None)
    if own is None or own.__module__ == "transformers.integrations.moe":  # what transformers gives to all others
        return None
    without_weights = copy.copy(fused)
    without_weights._parameters = {}
    return without_weights._apply_gate  # type: ignore[no-any-return]


def router_names(model: nn.Module) -> list[str]:
    """Names of the modules and parameters that choose experts, of a model whose experts were arranged."""
    return [name for module in model.modules() if isinstance(module, ExpertMLPs) for name in module.routers]


def _looks_like_experts(name: str, module: nn.Module, model: nn.Module, counts: set[int]) -> bool:
    """Whether ``module`` of ``model`` holds several experts in some form: then it must be one that we know.

    Its name may say so, or that it holds as many alike parts as the configuration has experts (``counts``), or as many
    as something beside it can choose from.
    """
    if isinstance(module, ExpertMLPs):
        return False
    own = {key: tuple(zero.full_shape(parameter)) for key, parameter in module.named_parameters(recurse=False)}
    stacked = {key for key, shape in own.items() if len(shape) > 2}
    if stacked and (hasattr(module, "num_experts") or not stacked.isdisjoint({"gate_up_proj", "down_proj"})):
        return True
    parts, widths = _alike_parts(module, own)
    if parts > 1 and name.rpartition(".")[2] == "experts":
        return True
    blocks = list(_blocks_around(name))
    if parts > 1 and blocks:  # else not inside a layer: the list of the layers themselves, say
        return parts in counts or any(_is_chosen(model, block, name, parts, widths) for block in blocks[:-1] or blocks)
    if isinstance(module, nn.Linear) or type(module).__module__.startswith("torch.nn"):
        return False
    # Matrices one below the other, [E * I, H], in a block of the layer.
    matrices = [shape for shape in own.values() if len(shape) == 2]
    return any(
        rows > count and rows % count == 0 and _is_chosen(model, block, name, count, {width})
        for rows, width in matrices
        for count in counts
        for block in blocks[:-1]
    )


def _alike_parts(module: nn.Module, own: Mapping[str, tuple[int, ...]]) -> tuple[int, set[int]]:
    """How many matrices, or modules with matrices, of one shape ``module`` holds side by side, and the sides of these
    matrices; 0 if it is no container.

    ``own`` are the shapes of its parameters, where those of a stack have three dimensions.
    """
    shapes: list[tuple[int, ...]] = []
    parts = 0
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        children = [
            [tuple(zero.full_shape(parameter)) for parameter in child.parameters()] for child in module.children()
        ]
        if len(children) > 1 and children.count(children[0]) == len(children):
            parts, shapes = len(children), [shape for shape in children[0] if len(shape) > 1]
    elif isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        if len(set(own.values())) == 1:
            parts, shapes = len(own), [shape for shape in own.values() if len(shape) > 1]
    elif not type(module).__module__.startswith("torch.nn"):
        stacks = [shape for shape in own.values() if len(shape) > 2]
        parts, shapes = max((shape[0] for shape in stacks), default=0), [shape[1:] for shape in stacks]
    return parts if shapes else 0, {side for shape in shapes for side in shape}


def _blocks_around(name: str) -> Iterator[str]:
    """Names of the modules around ``name``, the innermost first, up to the layer (``...layers.3``) that it is in."""
    around = name.split(".")[:-1]
    if any(part.isdigit() for part in around):
        while around:
            yield ".".join(around)
            if around.pop().isdigit():
                return


def _is_chosen(model: nn.Module, block: str, name: str, parts: int, widths: set[int]) -> bool:
    """Whether ``block`` has a matrix outside of ``name`` with a row per part, such as a router's, for inputs of one of
    the ``widths``."""
    shapes = {
        tuple(zero.full_shape(parameter))
        for other, parameter in model.get_submodule(block).named_parameters()
        if not f"{block}.{other}".startswith(f"{name}.")
    }
    return any((parts, width) in shapes for width in widths)


def _numbers_of_experts(values: Mapping[str, Any]) -> set[int]:
    """The numbers of experts in a configuration, whatever its keys are called, in its parts too."""
    found: set[int] = set()
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers_of_experts(value)
        elif type(value) is int and value > 1 and "expert" in key and not _NO_NUMBER.search(key):
            found.add(value)
    return found


def _check_layout(name: str, module: nn.Module) -> None:
    """Raise unless ``module`` has the attributes and shapes that the module docstring names, and no other parameter."""
    problem = None
    missing = [attribute for attribute in ATTRIBUTES if not hasattr(module, attribute)]
    shapes = {key: tuple(zero.full_shape(parameter)) for key, parameter in module.named_parameters()}
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        problem = "the model runs only those of the list that are hit"
    elif missing:
        problem = f"it has no attribute {', '.join(missing)}"
    else:
        e, h, i = (int(getattr(module, attribute)) for attribute in ATTRIBUTES[:3])
        expected = {"gate_up_proj": (e, 2 * i, h), "down_proj": (e, h, i)}
        if shapes != expected:
            problem = f"its parameters are {shapes}, not {expected}"
    if problem:
        raise ValueError(
            f"{name} ({type(module).__name__}) is a mixture of experts in a layout that is not supported: {problem}"
        )


@torch.no_grad()
def _check_function(name: str, module: nn.Module) -> None:
    """Raise unless a tiny case gives the same result both ways.

    Some classes with these attributes clamp in a place of their own, or add up in another dtype.
    """
    e, h, i, tokens = 3, 4, 5, 16
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Gates of up to some hundreds, so that a clamp would show. In fp64, so that a cast to fp32 inside would show.
    gate_up, down, inputs = random(e, 2 * i, h), random(e, h, i), 30 * random(tokens, h)
    chosen = torch.stack([torch.randperm(e, generator=generator)[:2] for _ in range(tokens)])
    weights = random(tokens, 2).abs()

    theirs = copy.copy(module)
    theirs._parameters = {}
    config = copy.deepcopy(getattr(module, "config", None))
    if config is not None:
        config._experts_implementation = "eager"
    values = {"num_experts": e, "hidden_dim": h, "intermediate_dim": i, "config": config}
    theirs.__dict__.update(values, gate_up_proj=gate_up, down_proj=down)
    try:
        weights_of_ours = (nn.Parameter(gate_up), nn.Parameter(down))
        ours = StackedMLPs(e, h, i, module.act_fn, _gated_of(module), weights_of_ours)  # type: ignore[arg-type]
        for stack, weight in ((ours.gate_up_proj, gate_up), (ours.down_proj, down)):
            del stack.weight  # while a model is built every Parameter lands on the meta device
            stack.weight = weight  # type: ignore[assignment]
        result, expected = ours(inputs, chosen, weights), theirs(inputs, chosen, weights)
    except Exception as error:
        raise ValueError(
            f"{name} ({type(module).__name__}) is a mixture of experts that is not supported: {error}"
        ) from error
    # fp64 products in another order differ by about 1e-15; an intermediate fp32 by 1e-8, a clamp by more than 1e-2.
    if not torch.allclose(result, expected, rtol=1e-11, atol=1e-9):
        raise ValueError(
            f"{name} ({type(module).__name__}) is a mixture of experts that is not supported: it has the usual "
            "parameters, but computes something else than down(gated(gate(x), up(x)))"
        )
