"""Find the experts and routers in transformers' modules, by structure instead of name, and replace the experts by this
project's modules.

Each module's results are compared with its replacement's on a tiny case. A module with several experts in an unknown
form is an error: ranks that route differently would run different submodules of it.

For Llama 4, :class:`Routed` replaces the MoE block, so that an expert gets only the tokens that chose it. transformers
passes all tokens to every expert, multiplied by a score that is zero if the token did not choose the expert: E times
the arithmetic, and E copies of the hidden states. An expert's output and gradient for zeros are zero, so the result is
the same.

Routers compute the weights of the chosen experts. So a block's forward is run on the meta device up to its experts, and
autograd's graph of these weights is followed back to the last matrix product: the parameters on this path, and the
block's children that contain them, are the router.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from model import zero
from model.moe.experts import ExpertMLPs, Experts, Form, Function, PerExpertMLPs, StackedMLPs
from quant import QuantLayer

# Attribute names of classes for their sizes, and for their activation function.
_SIZES = {
    "num_experts": ("num_experts", "moe_num_experts"),
    "hidden_dim": ("hidden_dim", "hidden_size"),
    "intermediate_dim": ("intermediate_dim", "intermediate_size", "ffn_hidden_size", "expert_dim"),
}
ACT_FN = ("act_fn", "activation_fn")
# Parts of configuration keys about experts whose value is not the number of experts to choose from.
_NO_NUMBER = re.compile(r"tok|top|shared|group|size|dim|interval|freq|step|layer|zero")
_PRODUCTS = ("MmBackward0", "AddmmBackward0", "BmmBackward0", "BaddbmmBackward0")
_UNSUPPORTED = "is a mixture of experts that is not supported"


def arrange_experts(model: nn.Module, form: Form) -> int:
    """Replace, in place, every fused experts module of a model by a module of ``form``, which ZeRO-3 gathers as a
    whole; return the number of replaced modules. With ``stacked`` the weights keep their values; with ``per_expert``
    they are new: use it for an empty model only, in a context that creates parameters on the meta device. Raises
    ValueError, naming the class, if experts have an unknown layout or function, or no router."""
    found = find_experts(model)
    checked: dict[type, bool] = {}
    for name, fused in found:
        of = _read(name, fused)
        if type(fused) not in checked:
            checked[type(fused)] = _check_function(name, fused, of)
        of = of._replace(sums_of_weights=checked[type(fused)])
        biases = [fused.get_parameter(key) for key in of.biases()]
        experts: ExpertMLPs
        if form == "stacked":
            experts = StackedMLPs(of, [_parameter(fused, key, of) for key in of.stacks], biases)
        else:
            experts = PerExpertMLPs(of, biases)
        block = name.rpartition(".")[0]
        below = routers_of(model.get_submodule(block), fused, num_experts=of.num_experts, hidden_dim=of.hidden_dim)
        experts.routers = tuple(f"{block}.{router}".lstrip(".") for router in below)
        experts.replaces = type(fused).__name__
        experts.train(fused.training)
        zero.mark_leaf(experts)
        model.set_submodule(name, experts)
        if of.scales_inputs:
            model.set_submodule(block, Routed(block, model.get_submodule(block)))
    return len(found)


def find_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List name and module of the experts that :func:`arrange_experts` would replace, or reject as unsupported."""
    counts = _numbers_of_experts(model.config.to_dict() if isinstance(model, PreTrainedModel) else {})
    arranged = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, ExpertMLPs))
    return [
        _holder(name, module, model)
        for name, module in model.named_modules()
        if not name.startswith(arranged) and _looks_like_experts(name, module, model, counts)
    ]


def _parameter(fused: nn.Module, name: str, of: Experts) -> nn.Parameter:
    """Create the Parameter of a stack ``[E, out, in]``, or return transformers' own if it has this layout."""
    inside = [held for held in of.held if held.stack == name]
    if inside[0].name == name and not inside[0].turned:
        return fused.get_parameter(name)
    wholes = [fused.get_parameter(held.name).detach().unflatten(0, (of.num_experts, -1)) for held in inside]
    wholes = [whole if held.flat else whole.squeeze(1) for held, whole in zip(inside, wholes, strict=True)]
    matrices = [whole.mT if held.turned else whole for held, whole in zip(inside, wholes, strict=True)]
    return nn.Parameter(torch.cat(matrices, dim=1).contiguous())


def _gated_of(fused: nn.Module) -> Function | None:
    """Return the function of gate and up that the class of ``fused`` defines; None for ``act_fn(gate) * up``."""
    own = getattr(type(fused), "_apply_gate", None)
    if own is None or own.__module__ == "transformers.integrations.moe":  # transformers' default
        return None
    without_weights = copy.copy(fused)
    without_weights._parameters = {}
    gated: Any = without_weights._apply_gate
    return gated


def _looks_like_experts(name: str, module: nn.Module, model: nn.Module, counts: set[int]) -> bool:
    """Return True if ``module`` of ``model`` has several experts in any form; the caller rejects unknown forms.
    Evidence is the module's name, the names of its 3-D parameters, or its number of equal parts: one of ``counts``, the
    numbers of experts in the configuration, or the output size of another module of the same block (a router)."""
    if isinstance(module, (ExpertMLPs, QuantLayer)):
        return False
    own = {key: tuple(zero.full_shape(parameter)) for key, parameter in module.named_parameters(recurse=False)}
    stacked = {key for key, shape in own.items() if len(shape) > 2}
    if stacked and (hasattr(module, "num_experts") or not stacked.isdisjoint({"gate_up_proj", "down_proj"})):
        return True
    parts, widths = _alike_parts(module, own)
    if parts > 1 and name.rpartition(".")[2] == "experts":
        return True
    blocks = list(_blocks_around(name))
    if parts > 1 and blocks:  # else it is outside of layers: for example the list of the layers
        return parts in counts or any(_is_chosen(model, block, name, parts, widths) for block in blocks[:-1] or blocks)
    if isinstance(module, nn.Linear) or type(module).__module__.startswith("torch.nn"):
        return False
    # Experts' matrices concatenated, [E * I, H], in a block of the layer.
    matrices = [shape for shape in own.values() if len(shape) == 2]
    return any(
        rows > count and rows % count == 0 and _is_chosen(model, block, name, count, {width})
        for rows, width in matrices
        for count in counts
        for block in blocks[:-1]
    )


def _holder(name: str, module: nn.Module, model: nn.Module) -> tuple[str, nn.Module]:
    """Return name and module of the experts whose forward takes tokens and the router's choices: ``module`` itself,
    which has the weights, but in DBRX its parent."""
    parent = name.rpartition(".")[0]
    if {key for key, _ in module.named_parameters(recurse=False)} == {"w1", "v1", "w2"} and parent.endswith("experts"):
        return parent, model.get_submodule(parent)
    return name, module


def _alike_parts(module: nn.Module, own: Mapping[str, tuple[int, ...]]) -> tuple[int, set[int]]:
    """Count the equally shaped matrices, or modules with matrices, in the container ``module``, and return the sizes of
    these matrices; 0 if it is no container. ``own`` has the shapes of its parameters, which are 3-D in a stack."""
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
    """Yield the names of the parents of ``name``, innermost first, up to its layer (``...layers.3``)."""
    around = name.split(".")[:-1]
    if any(part.isdigit() for part in around):
        while around:
            yield ".".join(around)
            if around.pop().isdigit():
                return


def _is_chosen(model: nn.Module, block: str, name: str, parts: int, widths: set[int]) -> bool:
    """Return True if ``block`` has a router for the module ``name``: a matrix outside of it with ``parts`` rows and an
    input size in ``widths``."""
    shapes = {
        tuple(zero.full_shape(parameter))
        for other, parameter in model.get_submodule(block).named_parameters()
        if not f"{block}.{other}".startswith(f"{name}.")
    }
    return any((parts, width) in shapes for width in widths)


def _numbers_of_experts(values: Mapping[str, Any]) -> set[int]:
    """Collect the integers above 1 in a configuration, nested ones too, whose keys name a number of experts."""
    found: set[int] = set()
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers_of_experts(value)
        elif type(value) is int and value > 1 and "expert" in key and not _NO_NUMBER.search(key):
            found.add(value)
    return found


def _first(module: nn.Module, names: tuple[str, ...]) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _read(name: str, module: nn.Module) -> Experts:
    """Describe the experts of ``module``. Raises ValueError unless it has known attributes and shapes, and no other
    parameter."""
    shapes = {key: tuple(zero.full_shape(parameter)) for key, parameter in module.named_parameters()}
    gated = _gated_of(module)
    act_fn = _first(module, ACT_FN) or _first(getattr(module, "mlp", module), ACT_FN)
    sizes = {key: _first(module, names) for key, names in _SIZES.items()}
    missing = [" or ".join(_SIZES[key][:2]) for key, size in sizes.items() if size is None]
    missing += [] if act_fn is not None or gated is not None else [ACT_FN[0]]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        problem = "the model runs only the experts that a token chose"
    elif missing:
        problem = f"it has no attribute {', '.join(missing)}"
    else:
        has_gate = "up_proj" not in shapes
        # In some models, experts read a narrower projection of the hidden states.
        h = sizes["hidden_dim"] if has_gate else shapes["up_proj"][-1]
        alone = list(inspect.signature(type(module).forward).parameters)[1:] == ["hidden_states"]
        of = Experts(
            sizes["num_experts"],
            h,
            sizes["intermediate_dim"],
            act_fn if act_fn is not None else nn.Identity(),
            gated,
            has_gate,
            transposed=bool(getattr(module, "is_transposed", alone)),
            interleaved=not getattr(module, "is_concatenated", True),
            biased=any(key.endswith("_bias") for key in shapes),
            scales_inputs=alone,
            apart="mlp.w1" in shapes,
        )
        expected = {held.name: of.shape_of(held) for held in of.held} | of.biases()
        if shapes == expected:
            return of
        problem = f"its parameters are {shapes}, not {expected}"
    raise ValueError(
        f"{name} ({type(module).__name__}) is a mixture of experts in a layout that is not supported: {problem}"
    )


@torch.no_grad()
def _check_function(name: str, module: nn.Module, of: Experts) -> bool:
    """Compare the class with its replacement on a tiny case; raise ValueError if results differ (another function or
    dtype). Returns True if the class sums in the dtype of the routing weights."""
    of = of._replace(num_experts=3, hidden_dim=4, intermediate_dim=5)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Gates up to several hundred, so that a clamp would show. In fp64, so that an internal cast to fp32 would show.
    stacks = {key: random(*shape) for key, shape in (of.shapes() | of.biases()).items()}
    inputs = 30 * random(16, of.hidden_dim)
    chosen = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(16)])
    weights = random(16, 2).abs()

    def agree(of: Experts, dtype: torch.dtype, rtol: float = 0.0, atol: float = 0.0) -> bool:
        used = {key: stack.to(dtype) for key, stack in stacks.items()}
        ours = StackedMLPs(of, *([nn.Parameter(used[key]) for key in keys] for keys in (of.shapes(), of.biases())))
        for key in of.shapes():
            stack = ours.get_submodule(key)
            del stack.weight  # while a model is built every new Parameter is created on the meta device
            stack.weight = used[key]
        for key in of.biases():
            delattr(ours, key)
            setattr(ours, key, used[key])
        arguments = inputs.to(dtype), chosen, weights
        theirs = _as_ours(_tiny(module, of, used), of)(*arguments)
        return torch.allclose(ours(*arguments).double(), theirs.double().view_as(inputs), rtol, atol)

    try:
        # fp64 products in another order differ by about 1e-15; an intermediate fp32 by 1e-8, a clamp by more than 1e-2.
        same = agree(of, torch.float64, rtol=1e-11, atol=1e-9)
        # In fp32 with fp64 weights, a sum in fp64 is rounded once. Some classes only take weights in their own dtype.
        wide = same and not (of.scales_inputs or of.apart) and not agree(of, torch.float32)
    except Exception as error:
        raise ValueError(f"{name} ({type(module).__name__}) {_UNSUPPORTED}: {error}") from error
    if not same:
        raise ValueError(
            f"{name} ({type(module).__name__}) {_UNSUPPORTED}: it has the usual parameters, but computes "
            "something else than down(gated(gate(x), up(x)))"
        )
    return wide and agree(of._replace(sums_of_weights=True), torch.float32)


def _tiny(module: nn.Module, of: Experts, stacks: Mapping[str, Tensor]) -> nn.Module:
    """Copy transformers' ``module`` at the (tiny) sizes of ``of``, with the values of ``stacks``, by the
    names of :class:`StackedMLPs`."""
    config = copy.deepcopy(getattr(module, "config", None))
    if config is not None:
        config._experts_implementation = "eager"
    sizes = {name: getattr(of, key) for key, names in _SIZES.items() for name in names}
    tiny = copy.copy(module)
    tiny._modules = {key: copy.copy(child) for key, child in module._modules.items() if child is not None}
    for part in (tiny, *tiny.children()):
        part._parameters = {}
        known = {name: value for name, value in sizes.items() if name in part.__dict__}
        part.__dict__.update(known, config=config)
    for held in of.held:
        (rows, _), projections = of.stacks[held.stack]
        stack = stacks[held.stack]
        first = rows * projections.index(held.projections[0])
        stack = stack[:, first : first + rows * len(held.projections)]
        stack = stack.transpose(1, 2) if held.turned else stack
        parent, _, leaf = held.name.rpartition(".")
        tiny.get_submodule(parent).__dict__[leaf] = stack.reshape(of.shape_of(held)).contiguous()
    tiny.__dict__.update({key: stacks[key] for key in of.biases()})
    return tiny


def _as_ours(theirs: nn.Module, of: Experts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Wrap transformers' module ``theirs`` in a function that takes the arguments of the replacement."""
    if not of.scales_inputs:
        return theirs

    def dense(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        scores = torch.zeros(len(hidden), of.num_experts, dtype=weights.dtype).scatter(1, chosen, weights)
        rows = hidden.repeat(of.num_experts, 1) * scores.t().reshape(-1, 1)
        given: Tensor = theirs(rows.to(hidden.dtype))
        return given.view(of.num_experts, *hidden.shape).sum(0)

    return dense


class Routed(nn.Module):
    """MoE block of Llama 4 that passes each expert only its own tokens, and takes over the children of transformers'
    ``block`` under the same names, with the same results. Raises ValueError, naming the module by ``name``, if
    ``block`` is not of Llama 4's class: another class's forward might differ."""

    def __init__(self, name: str, block: nn.Module):
        super().__init__()
        if type(block) is not Llama4TextMoe:
            raise ValueError(
                f"{name} ({type(block).__name__}) {_UNSUPPORTED}: it passes all tokens to every expert, which only "
                "Llama 4's Llama4TextMoe may do"
            )
        self.top_k, self.hidden_dim = block.top_k, block.hidden_dim
        self.experts, self.router, self.shared_expert = block.experts, block.router, block.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the block's output ``[T, H]`` and the router's logits ``[T, E]`` for hidden states ``[..., H]`` of T
        tokens."""
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(hidden_states)
        chosen = logits.topk(self.top_k, dim=1).indices
        routed = self.experts(hidden_states, chosen, scores.gather(1, chosen))
        return self.shared_expert(hidden_states) + routed, logits


class _Reached(Exception):
    """Exception that ends a block's forward when it reaches the experts."""


def routers_of(block: nn.Module, experts: nn.Module, *, num_experts: int, hidden_dim: int) -> list[str]:
    """Find the names, inside ``block``, of the router of ``experts``: children of the block, or its own parameters. The
    gate of shared experts (a Linear with one output) counts as a router, and so do parameters with a value per expert.
    Parameters may be on the meta device. If the block's forward cannot be followed (:func:`_by_computation`), routers
    are the parameters of shape ``[num_experts, hidden_dim]``. Raises ValueError if the block has no router."""
    (own,) = (name for name, module in block.named_modules() if module is experts)
    parameters = {name: value for name, value in block.named_parameters() if not name.startswith(f"{own}.")}
    found = _by_computation(block, experts, parameters, hidden_dim)
    if not found:
        found = {name for name, value in parameters.items() if tuple(value.shape) == (num_experts, hidden_dim)}
    if not found:
        raise ValueError(
            f"nothing in {type(block).__name__} computes which of the {num_experts} experts are chosen, expected a "
            "router: see docs/adding_a_model.md"
        )
    children = {name.partition(".")[0] for name in found}
    modules, own_parameters = block.named_children(), block.named_parameters(recurse=False)
    children |= {name for name, one in modules if isinstance(one, nn.Linear) and one.out_features == 1}
    children |= {name for name, value in own_parameters if value.numel() == num_experts}
    return sorted(children)


def _by_computation(
    block: nn.Module, experts: nn.Module, parameters: dict[str, nn.Parameter], hidden_dim: int
) -> set[str]:
    """Find the parameters in the last matrix product before the routing weights, by name, from a forward on the meta
    device; empty if that is impossible (the forward needs values, or more than hidden states)."""
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

    def goes_on(node: Node, before: Node) -> bool:  # back to the nearest matrix products of the hidden states
        return node.name() not in _PRODUCTS or all(leaf is not hidden for leaf in _leaves(before))

    return {names[id(leaf)] for end in ends for leaf in _leaves(end, through=goes_on) if id(leaf) in names}


def _leaves(end: Node, through: Callable[[Node, Node], bool] = lambda node, before: True) -> Iterator[Tensor]:
    """Yield the leaf tensors from which ``end`` was computed, by autograd's graph. ``through`` gets a node and the node
    of one of its inputs, and returns True if the search continues from that input."""
    seen: set[Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf
            waiting += [before for before, _ in node.next_functions if before is not None and through(node, before)]
