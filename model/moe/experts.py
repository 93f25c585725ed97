"""Mixture-of-experts layers, in one of two forms, that replace transformers' fused modules.

transformers has all experts of a layer in two 3-D parameters, ``gate_up_proj [E, 2I, H]`` (gate first) and ``down_proj
[E, H, I]``. Quantization needs a scale per expert and projection, as in checkpoints and serving. So the fused module is
replaced, while the model is still on the meta device:

- **stacked**: keep the two weights, each in a :class:`quant.linear.StackedLinear` with E scales. Few parameters, few
collectives, one launch for all experts.
- **per_expert**: three nn.Linears per expert. These are thousands of small parameters, which can be inspected
individually.

In both forms **every expert has a gradient on every rank**. If each rank ran only the Linears that its own tokens
chose, ranks would disagree on which parameters have gradients and in which order, and the reductions of ZeRO stages 1-3
would silently add up gradients of different parameters. So each Linear runs, in a fixed order, with an empty input if
no token chose it: an empty matrix product gives every parameter a zero gradient.

Tokens are moved to the rows of their experts and back by two gathers, each of which is the other's gradient. Autograd's
own gradient of a gather would be an accumulating ``index_put``: on a GPU it sorts the indices first; on a CPU with
several threads the order of fp32 sums varies. The functions here sum in the order of the experts, one addition at a
time in the dtype of the rows, as a CPU with one thread does.

Legend: T tokens, K experts per token, E experts, H hidden size, I intermediate size; a choice is one of the K T pairs
of token and expert, a row is a choice ordered by expert.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quant import kernels
from quant.linear import StackedLinear
from quant.observers import only_rows_of_tokens


class ExpertRows(NamedTuple):
    """Mapping between tokens, choices and rows; integers.

    Attributes:
        offsets: [E] int32, one past the last row of each expert.
        expert: [K T], expert of each row, ascending.
        token: [K T], token of each row.
        choice: [K T], index of each row among the choices [K, T].
        row: [K T], row of each choice: the inverse of ``choice``.
        of_token: [T, K], rows of each token, in the order of their experts.
    """

    offsets: Tensor
    expert: Tensor
    token: Tensor
    choice: Tensor
    row: Tensor
    of_token: Tensor

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> "ExpertRows":
        """Compute the mapping from the experts [T, K] of each token, 0 to E - 1; a token may choose an expert twice.
        Causes no synchronization of GPU and host."""
        tokens, per_token = top_k_index.shape
        choices = top_k_index.t().reshape(-1)  # [K, T], as transformers orders them
        choice = torch.argsort(choices, stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=choice.device)
        counts.index_add_(0, choices, torch.ones_like(choices, dtype=torch.int32))
        row = torch.empty_like(choice)
        row[choice] = torch.arange(choice.numel(), device=choice.device)
        # Rows ascend with their expert, and with the choice among those of one expert.
        of_token = row.view(per_token, tokens).t().sort(dim=-1).values
        offsets = counts.cumsum(0, dtype=torch.int32)
        return cls(offsets, choices[choice], choice % tokens, choice, row, of_token)

    def spread(self, hidden_states: Tensor) -> Tensor:
        """Gather the row [K T, H] of each choice from the hidden states [T, H]; differentiable."""
        spread: Tensor = _Move.apply(hidden_states, _take, self.token, kernels.sum_rows, self.of_token)
        return spread

    def summed(self, rows: Tensor) -> Tensor:
        """Sum each token's rows [K T, H] to [T, H], one by one in the order of their experts: a sum over K would round
        differently, and the order of atomic additions varies. Differentiable."""
        summed: Tensor = _Move.apply(rows, kernels.sum_rows, self.of_token, _take, self.token)
        return summed

    def arranged(self, weights: Tensor) -> Tensor:
        """Reorder values [T, K], one per choice, to one per row, [K T]; differentiable."""
        arranged: Tensor = _Move.apply(weights.t().reshape(-1), _take, self.choice, _take, self.row)
        return arranged


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values.index_select(0, index)


class _Move(torch.autograd.Function):
    """Autograd function that computes ``move(values, index)``; its backward is ``back(gradient, back_index)``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, move: "Move", index: Tensor, back: "Move", back_index: Tensor) -> Tensor:
        ctx.save_for_backward(back_index)
        ctx.back = back
        return move(values, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (back_index,) = ctx.saved_tensors
        return ctx.back(grad, back_index), None, None, None, None


Form = Literal["stacked", "per_expert"]
Function = Callable[[Tensor], Tensor]
Move = Callable[[Tensor, Tensor], Tensor]
Stacks = dict[str, tuple[tuple[int, int], tuple[str, ...]]]
_DBRX = (("w1", "gate"), ("v1", "up"))


class _Held(NamedTuple):
    """Parameter of transformers' experts module, and the stack ``[E, out, in]`` that contains its values here.

    Attributes:
        name: the parameter's name inside transformers' module.
        stack: name of the stack.
        projections: names of each expert's Linears in it; their rows are concatenated in the parameter and in the
            stack.
        turned: True if the matrix of each expert is ``[in, out]`` in transformers.
        flat: True if the parameter is 2-D in transformers, with the experts' matrices concatenated.
    """

    name: str
    stack: str
    projections: tuple[str, ...]
    turned: bool = False
    flat: bool = False


class Experts(NamedTuple):
    """Experts of a layer: their sizes E, H and I, and their function.

    The function is ``down(act_fn(gate(x)) * up(x))``; or ``down(gated([gate(x), up(x)]))`` for classes that define it
    (some clamp both); or ``down(act_fn(up(x)))`` for classes without a gate. A token's experts are summed in the dtype
    of the hidden states, or, with ``sums_of_weights``, in the dtype of the routing weights.

    Attributes:
        transposed: True if transformers' matrices are ``[in, out]``.
        interleaved: True if rows of gate and up alternate, so that both form one Linear, gate_up_proj.
        biased: True if every Linear has a bias; otherwise none has.
        scales_inputs: True if the routing weight multiplies the expert's input instead of its output.
        apart: True if transformers has gate, up and down in three matrices, ``mlp.w1``, ``mlp.v1`` and ``mlp.w2``,
            ``[E * I, H]`` each (DBRX).
    """

    num_experts: int
    hidden_dim: int
    intermediate_dim: int
    act_fn: Function
    gated: Function | None = None
    has_gate: bool = True
    sums_of_weights: bool = False
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False
    scales_inputs: bool = False
    apart: bool = False

    @property
    def stacks(self) -> Stacks:
        """Map the name of each stack (the weights of all experts in one 3-D tensor) to the shape ``(out, in)`` of each
        of its Linears, and the names of an expert's Linears in it."""
        h, i = self.hidden_dim, self.intermediate_dim
        first: Stacks = {"gate_up_proj": ((i, h), ("gate_proj", "up_proj"))}
        if self.interleaved:
            first = {"gate_up_proj": ((2 * i, h), ("gate_up_proj",))}
        if not self.has_gate:
            first = {"up_proj": ((i, h), ("up_proj",))}
        return first | {"down_proj": ((h, i), ("down_proj",))}

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Return the shapes ``(E, out, in)`` of the stacks, by name; ``out`` sums over an expert's Linears."""
        return {
            name: (self.num_experts, len(projections) * rows, columns)
            for name, ((rows, columns), projections) in self.stacks.items()
        }

    @property
    def held(self) -> tuple[_Held, ...]:
        """Weights of transformers' module, each with the stack that contains its values here."""
        if self.apart:
            gate_up = [_Held(f"mlp.{name}", "gate_up_proj", (f"{to}_proj",), False, True) for name, to in _DBRX]
            return (*gate_up, _Held("mlp.w2", "down_proj", ("down_proj",), True, True))
        return tuple(_Held(name, name, projections, self.transposed) for name, (_, projections) in self.stacks.items())

    def shape_of(self, held: _Held) -> tuple[int, ...]:
        """Return the shape that the parameter ``held`` has in transformers' module."""
        (rows, columns), _ = self.stacks[held.stack]
        rows *= len(held.projections)
        matrix = (columns, rows) if held.turned else (rows, columns)
        return (self.num_experts * matrix[0], matrix[1]) if held.flat else (self.num_experts, *matrix)

    def biases(self) -> dict[str, tuple[int, int]]:
        """Return the shapes ``(E, out)`` of the biases, by name, as in transformers; empty without biases."""
        return {f"{name}_bias": shape[:2] for name, shape in self.shapes().items()} if self.biased else {}

    def inner(self, first: Tensor) -> Tensor:
        """Compute the input [rows, I] of down_proj from the outputs of the first Linears: [rows, 2I], or [rows, I]
        without gate."""
        if not self.has_gate:
            return self.act_fn(first)
        if self.gated is not None:
            return self.gated(first)
        gate, up = first.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class ExpertMLPs(nn.Module):
    """Experts of one MoE layer, with the signature and results of transformers' eager fused module (the same bits if
    the matrix products have the same bits).

    Attributes:
        of: sizes and function of the experts.
        biases: the biases of all experts, with the names and shapes of ``of.biases``.
        routers: names, in the model, of the modules and parameters that choose among these experts.
        replaces: name of transformers' class that this module replaces.
    """

    routers: tuple[str, ...] = ()
    replaces: str = ""

    def __init__(self, of: Experts, biases: Iterable[nn.Parameter] = ()):
        super().__init__()
        self.of = of
        self.num_experts = of.num_experts
        for bias, name in zip(biases, of.biases(), strict=True):
            self.register_parameter(name, bias)

    def computed(self, rows: Tensor, where: ExpertRows) -> Tensor:
        """Compute the outputs [K T, H] of all ``rows`` [K T, H]: each row by its expert in ``where``."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts' outputs, in the shape and dtype of ``hidden_states``; experts
        are summed in their order.

        Args:
            hidden_states: ``[T, H]``, or with more dimensions in place of T.
            top_k_index: [T, K] integers in [0, E]; E means no expert: computed as expert E - 1 with a weight of 0.
            top_k_weights: [T, K], routing weight of each choice.
        """
        shape, hidden_states = hidden_states.shape, hidden_states.reshape(-1, hidden_states.shape[-1])
        # "None" becomes the last expert with a weight of 0: dropping rows would make the host wait for their number.
        none = top_k_index == self.num_experts
        where = ExpertRows.of(top_k_index.clamp(max=self.num_experts - 1), self.num_experts)
        weights = where.arranged(top_k_weights.masked_fill(none, 0))
        rows = where.spread(hidden_states)
        dtype = weights.dtype if self.of.sums_of_weights else hidden_states.dtype
        if self.of.scales_inputs:
            rows = self.computed(rows * weights[:, None], where)
            # transformers sums over a dimension, which torch rounds once
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        else:
            rows = self.computed(rows, where) * weights[:, None]
        output = where.summed(rows.to(dtype))
        return output.to(hidden_states.dtype).view(shape)


class StackedMLPs(ExpertMLPs):
    """Experts of one MoE layer, with their weights in two stacks: ``weights`` are Parameters in the shapes and order of
    ``of.shapes``."""

    def __init__(self, of: Experts, weights: Iterable[nn.Parameter], biases: Iterable[nn.Parameter] = ()):
        super().__init__(of, biases)
        for weight, (name, shape) in zip(weights, of.shapes().items(), strict=True):
            self.add_module(name, StackedLinear(weight, shape, of.stacks[name][1]))

    def computed(self, rows: Tensor, where: ExpertRows) -> Tensor:
        """Compute the outputs [K T, H] of all rows [K T, H], each by its own expert. Without a grouped GEMM
        (:mod:`quant.gemm`), GPU and host synchronize."""
        first, second = self.of.stacks
        with only_rows_of_tokens(where.token, *where.of_token.shape):
            return self._linear(second, self.of.inner(self._linear(first, rows, where)), where)

    def _linear(self, name: str, rows: Tensor, where: ExpertRows) -> Tensor:
        """Multiply rows by the stack ``name``, and add its bias if it has one."""
        output: Tensor = self.get_submodule(name)(rows, where.offsets)
        if not self.of.biased:
            return output
        # In fp32 for the gradient, a sum over an expert's rows. An embedding's gradient is summed in a fixed order.
        bias: Tensor = getattr(self, f"{name}_bias")
        wide = bias.to(torch.promote_types(bias.dtype, torch.float32))
        return output + F.embedding(where.expert, wide).to(rows.dtype)


class ExpertMLP(nn.Module):
    """Linears of one expert; :class:`PerExpertMLPs` has its biases and routing."""

    def __init__(self, of: Experts):
        super().__init__()
        for (rows, columns), projections in of.stacks.values():
            for projection in projections:
                self.add_module(projection, nn.Linear(columns, rows, bias=False))

    def forward(self, rows: Tensor, of: Experts, biases: Sequence[Tensor]) -> Tensor:
        """Compute the expert's output [rows, H] for its rows [rows, H], with the function of ``of``. ``biases`` are
        this expert's for gate and up (concatenated) and for down_proj, or empty."""
        *first, down_proj = self.children()
        if of.has_gate and of.gated is None and not biases:
            gate, up = first
            return down_proj(of.act_fn(gate(rows)) * up(rows))
        inner = torch.cat([linear(rows) for linear in first], dim=-1)
        if not biases:
            return down_proj(of.inner(inner))
        return down_proj(of.inner(inner + biases[0])) + biases[1]


class PerExpertMLPs(ExpertMLPs):
    """Experts of one MoE layer as separate modules, children ``"0"`` to ``"E-1"``."""

    def __init__(self, of: Experts, biases: Iterable[nn.Parameter] = ()):
        super().__init__(of, biases)
        for expert in range(of.num_experts):
            self.add_module(str(expert), ExpertMLP(of))

    def computed(self, rows: Tensor, where: ExpertRows) -> Tensor:
        """Compute the outputs [K T, H] of all rows [K T, H], each by its own expert. GPU and host synchronize once, for
        the row counts."""
        counts = where.offsets.diff(prepend=where.offsets.new_zeros(1)).tolist()
        whole = [getattr(self, name) for name in self.of.biases()]
        biases = zip(*(bias.unbind() for bias in whole), strict=True) if whole else [()] * self.num_experts
        parts, tokens, outputs = rows.split(counts), where.token.split(counts), []
        for expert, part, token, bias in zip(self.children(), parts, tokens, biases, strict=True):
            with only_rows_of_tokens(token, len(where.of_token), per_token=None):
                outputs.append(expert(part, self.of, bias))
        return torch.cat(outputs)


def router_names(model: nn.Module) -> list[str]:
    """List the names of the modules and parameters that choose experts, in a model after ``arrange_experts``."""
    return [name for module in model.modules() if isinstance(module, ExpertMLPs) for name in module.routers]
