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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

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


class Experts(NamedTuple):
    """What the experts of a layer are: their sizes E, H and I, and what they compute.

    That is ``down(act_fn(gate(x)) * up(x))``; or ``down(gated([gate(x), up(x)]))`` for classes that say so (some clamp
    both); or ``down(act_fn(up(x)))`` for classes without a gate. A token's experts are added up in the dtype of the
    hidden states, or, with ``sums_of_weights``, in the dtype of the choices' weights.
    """

    num_experts: int
    hidden_dim: int
    intermediate_dim: int
    act_fn: Function
    gated: Function | None = None
    has_gate: bool = True
    sums_of_weights: bool = False

    @property
    def stacks(self) -> dict[str, tuple[tuple[int, int], tuple[str, ...]]]:
        """By the name of transformers' parameters: the shape of one Linear, and which of them lie in it per expert."""
        h, i = self.hidden_dim, self.intermediate_dim
        first = ("gate_up_proj", ("gate_proj", "up_proj")) if self.has_gate else ("up_proj", ("up_proj",))
        return {first[0]: ((i, h), first[1]), "down_proj": ((h, i), ("down_proj",))}

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Of transformers' parameters, by name."""
        return {
            name: (self.num_experts, len(projections) * rows, columns)
            for name, ((rows, columns), projections) in self.stacks.items()
        }

    def inner(self, first: Tensor) -> Tensor:
        """What goes into down_proj, [rows, I], from the outputs of gate_proj and up_proj [rows, 2I], or up_proj's."""
        if not self.has_gate:
            return self.act_fn(first)
        if self.gated is not None:
            return self.gated(first)
        gate, up = first.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def sum_dtype(self, hidden_states: Tensor, weights: Tensor) -> torch.dtype:
        """In which a token's experts are added up."""
        return weights.dtype if self.sums_of_weights else hidden_states.dtype


class ExpertMLPs(nn.Module):
    """The experts of one MoE layer; same signature and same results as transformers' eager fused module, bit for bit
    where the matrix products are.

    Attributes:
        of: what they are.
        routers: names, in the model, of the modules and parameters that choose among them (:mod:`model.routers`).
    """

    routers: tuple[str, ...] = ()

    def __init__(self, of: Experts):
        super().__init__()
        self.of = of
        self.num_experts = of.num_experts


class StackedMLPs(ExpertMLPs):
    """All experts' weights in two stacks; ``weights`` are Parameters as ``of.shapes`` has them, in its order."""

    def __init__(self, of: Experts, weights: Iterable[nn.Parameter]):
        super().__init__(of)
        for weight, (name, shape) in zip(weights, of.shapes().items(), strict=True):
            self.add_module(name, StackedLinear(weight, shape, of.stacks[name][1]))

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
        first, down_proj = self.children()
        rows = down_proj(self.of.inner(first(hidden_states[order % tokens], offsets)), offsets)
        weights = top_k_weights.masked_fill(none, 0).t().reshape(-1)[order]
        rows = (rows * weights[:, None]).to(self.of.sum_dtype(hidden_states, weights))
        # Where the rows of each token ended up, in the order of their experts. Added one by one: a sum over K would
        # round in another way, and the atomic additions of index_add come in any order.
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        place = place.view(per_token, tokens).t().gather(1, top_k_index.argsort(dim=-1, stable=True))
        output = torch.zeros_like(hidden_states, dtype=rows.dtype)
        for column in place.unbind(1):
            output = output + rows[column]
        return output.to(hidden_states.dtype)


class ExpertMLP(nn.Module):
    """Weights of one expert; :class:`PerExpertMLPs` shares the rest among them."""

    def __init__(self, of: Experts):
        super().__init__()
        for (rows, columns), projections in of.stacks.values():
            for projection in projections:
                self.add_module(projection, nn.Linear(columns, rows, bias=False))

    def forward(self, rows: Tensor, of: Experts) -> Tensor:
        """[rows, H] to [rows, H]."""
        *first, down_proj = self.children()
        if of.has_gate and of.gated is None:
            gate, up = first
            return down_proj(of.act_fn(gate(rows)) * up(rows))
        return down_proj(of.inner(torch.cat([linear(rows) for linear in first], dim=-1)))


class PerExpertMLPs(ExpertMLPs):
    """Children ``"0"`` to ``"E-1"`` are the experts' weights."""

    def __init__(self, of: Experts):
        super().__init__(of)
        for expert in range(of.num_experts):
            self.add_module(str(expert), ExpertMLP(of))

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

        output = torch.zeros_like(hidden_states, dtype=self.of.sum_dtype(hidden_states, top_k_weights))
        for expert, rows, token, weight in zip(self.experts(), inputs, token_groups, weight_groups, strict=True):
            # A token chooses an expert at most once: no two of these additions meet, on any device.
            output.index_add_(0, token, (expert(rows, self.of) * weight[:, None]).to(output.dtype))
        return output.to(hidden_states.dtype)


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
    checked: dict[type, bool] = {}
    for name, fused in found:
        of = _read(name, fused)
        if type(fused) not in checked:
            checked[type(fused)] = _check_function(name, fused, of)
        of = of._replace(sums_of_weights=checked[type(fused)])
        experts: ExpertMLPs
        if form == "stacked":
            experts = StackedMLPs(of, [fused.get_parameter(key) for key in of.stacks])
        else:
            experts = PerExpertMLPs(of)
        block = name.rpartition(".")[0]
        below = routers_of(model.get_submodule(block), fused, num_experts=of.num_experts, hidden_dim=of.hidden_dim)
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
    gated: Any = without_weights._apply_gate
    return gated


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


def _read(name: str, module: nn.Module) -> Experts:
    """What the experts of ``module`` are, if it has the attributes and shapes that this file knows, and no other
    parameter. Raises ValueError otherwise."""
    problem = None
    missing = [attribute for attribute in ATTRIBUTES if not hasattr(module, attribute)]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        problem = "the model runs only those of the list that are hit"
    elif missing:
        problem = f"it has no attribute {', '.join(missing)}"
    else:
        shapes = {key: tuple(zero.full_shape(parameter)) for key, parameter in module.named_parameters()}
        e, h, i = (int(getattr(module, attribute)) for attribute in ATTRIBUTES[:3])
        has_gate = "up_proj" not in shapes
        # Some read a projection of the hidden states, which is narrower.
        h = h if has_gate else shapes["up_proj"][-1]
        of = Experts(e, h, i, module.act_fn, _gated_of(module), has_gate)  # type: ignore[arg-type]
        if shapes == of.shapes():
            return of
        problem = f"its parameters are {shapes}, not {of.shapes()}"
    raise ValueError(
        f"{name} ({type(module).__name__}) is a mixture of experts in a layout that is not supported: {problem}"
    )


@torch.no_grad()
def _check_function(name: str, module: nn.Module, of: Experts) -> bool:
    """Whether the class adds up in the dtype of the choices' weights. Raises ValueError unless a tiny case gives the
    same result both ways: some classes with these attributes compute something else, or in another dtype."""
    of = of._replace(num_experts=3, hidden_dim=4, intermediate_dim=5)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Gates of up to some hundreds, so that a clamp would show. In fp64, so that a cast to fp32 inside would show.
    stacks, inputs = {key: random(*shape) for key, shape in of.shapes().items()}, 30 * random(16, of.hidden_dim)
    chosen = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(16)])
    weights = random(16, 2).abs()
    config = copy.deepcopy(getattr(module, "config", None))
    if config is not None:
        config._experts_implementation = "eager"
    sizes = dict(zip(ATTRIBUTES, of, strict=False), config=config)

    def agree(of: Experts, dtype: torch.dtype, rtol: float = 0.0, atol: float = 0.0) -> bool:
        theirs, used = copy.copy(module), {key: stack.to(dtype) for key, stack in stacks.items()}
        theirs._parameters = {}
        theirs.__dict__.update({**sizes, "act_fn": of.act_fn}, **used)
        ours = StackedMLPs(of, map(nn.Parameter, used.values()))
        for stack, weight in zip(ours.children(), used.values(), strict=True):
            del stack.weight  # while a model is built every Parameter lands on the meta device
            stack.weight = weight
        arguments = inputs.to(dtype), chosen, weights
        return torch.allclose(ours(*arguments).double(), theirs(*arguments).double(), rtol, atol)

    try:
        # fp64 products in another order differ by about 1e-15; an intermediate fp32 by 1e-8, a clamp by more than 1e-2.
        same = agree(of, torch.float64, rtol=1e-11, atol=1e-9)
        # In fp32 with weights in fp64 a sum in fp64 is rounded once.
        wide = same and not agree(of, torch.float32)
    except Exception as error:
        raise ValueError(
            f"{name} ({type(module).__name__}) is a mixture of experts that is not supported: {error}"
        ) from error
    if not same:
        raise ValueError(
            f"{name} ({type(module).__name__}) is a mixture of experts that is not supported: it has the usual "
            "parameters, but computes something else than down(gated(gate(x), up(x)))"
        )
    return wide and agree(of._replace(sums_of_weights=True), torch.float32)
