"""Mixture-of-experts layers, in one of two forms, that replace transformers' fused modules.

transformers has all experts of a layer in two 3-D parameters, ``gate_up_proj [E, 2I, H]`` (gate first) and ``down_proj
[E, H, I]``. Quantization needs a module per weight, with one scale per expert and projection, as in checkpoints and
serving. So the fused module is replaced by one of two forms, while the model is still on the meta device, so that
nothing is copied.

- **stacked**: keep the two weights, each in a :class:`quant.linear.StackedLinear` with E scales. Few parameters, few
  collectives, one launch for all experts.
- **per_expert**: three nn.Linears per expert. These are thousands of small parameters, which can be inspected
  individually.

In both forms **every expert has a gradient on every rank**. If each rank ran only the per-expert Linears that its own
tokens chose, ranks would disagree on which parameters have gradients and in which order, and the reductions of ZeRO
stages 1-3 would silently add up gradients of different parameters. So each Linear runs, in a fixed order, with an empty
input if no token chose it: an empty matrix product gives every parameter a zero gradient.

Tokens are moved to the rows of their experts and back by two gathers, each of which is the other's gradient. Autograd's
own gradient of a gather would be an accumulating ``index_put``: on a GPU it sorts the indices first, and writes zeros
before it adds; on a CPU with several threads the order of fp32 sums varies. The functions here sum in the order of the
experts, one addition at a time in the dtype of the rows, as a CPU with one thread does. One pass reads a token's rows
and writes their sum.

Legend: T tokens, K experts per token, E experts, H hidden size, I intermediate size; a choice is one of the K T pairs
of token and expert, a row is a choice ordered by expert.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quant import kernels
from quant.linear import StackedLinear


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
        Does not synchronize with the host."""
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
        spread: Tensor = _Spread.apply(hidden_states, self.token, self.of_token)
        return spread

    def summed(self, rows: Tensor) -> Tensor:
        """Sum each token's rows [K T, H] to [T, H], one by one in the order of their experts: a sum over K would round
        differently, and the order of atomic additions varies. Differentiable."""
        summed: Tensor = _Summed.apply(rows, self.token, self.of_token)
        return summed

    def arranged(self, weights: Tensor) -> Tensor:
        """Reorder values [T, K], one per choice, to one per row, [K T]; differentiable."""
        arranged: Tensor = _Arranged.apply(weights.t().reshape(-1), self.choice, self.row)
        return arranged


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, token: Tensor, of_token: Tensor) -> Tensor:
        ctx.save_for_backward(of_token)
        return hidden_states.index_select(0, token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (of_token,) = ctx.saved_tensors
        return kernels.sum_rows(grad, of_token), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return kernels.sum_rows(rows, of_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None


class _Arranged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, choice: Tensor, row: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        return numbers.index_select(0, choice)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row,) = ctx.saved_tensors
        return grad.index_select(0, row), None, None


Form = Literal["stacked", "per_expert"]
Function = Callable[[Tensor], Tensor]


_DBRX = (("w1", "gate"), ("v1", "up"))


class _Held(NamedTuple):
    """Contents of a parameter of transformers' experts module, in terms of this module's stacks.

    Attributes:
        name: the parameter's name inside the module.
        stack: name of the stack.
        projections: Linears of each expert in it; their rows are concatenated in the parameter and in the stack.
        turned: True if the matrix of each expert is ``[in, out]`` in transformers. Stacks are ``[E, out, in]``, as in
            serving: groups of weights run along the last dimension.
        flat: True if the experts' matrices are concatenated in transformers in two dimensions.
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
    of the hidden states, or, with ``sums_of_weights``, in the dtype of the choices' weights.

    Attributes:
        transposed: transformers' matrices are ``[in, out]``.
        interleaved: rows of gate and up alternate, so that both form one Linear, gate_up_proj.
        biased: every Linear has a bias.
        scales_inputs: the choice's weight multiplies the expert's input, not its output.
        apart: gate, up and down are three matrices, ``mlp.w1``, ``mlp.v1`` and ``mlp.w2``, ``[E * I, H]`` each (DBRX).
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
    def stacks(self) -> dict[str, tuple[tuple[int, int], tuple[str, ...]]]:
        """Shape of one Linear, and names of an expert's Linears, by name of the stack."""
        h, i = self.hidden_dim, self.intermediate_dim
        first: tuple[str, tuple[tuple[int, int], tuple[str, ...]]] = (
            "gate_up_proj",
            ((i, h), ("gate_proj", "up_proj")),
        )
        if self.interleaved:
            first = ("gate_up_proj", ((2 * i, h), ("gate_up_proj",)))
        if not self.has_gate:
            first = ("up_proj", ((i, h), ("up_proj",)))
        return {first[0]: first[1], "down_proj": ((h, i), ("down_proj",))}

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Shapes of the stacks, by name."""
        return {
            name: (self.num_experts, len(projections) * rows, columns)
            for name, ((rows, columns), projections) in self.stacks.items()
        }

    @property
    def held(self) -> tuple[_Held, ...]:
        """Contents of transformers' parameters in terms of the stacks."""
        if self.apart:
            gate_up = [_Held(f"mlp.{name}", "gate_up_proj", (f"{to}_proj",), False, True) for name, to in _DBRX]
            return (*gate_up, _Held("mlp.w2", "down_proj", ("down_proj",), True, True))
        return tuple(_Held(name, name, projections, self.transposed) for name, (_, projections) in self.stacks.items())

    def shape_of(self, held: _Held) -> tuple[int, ...]:
        """Return the shape of a parameter of transformers."""
        (rows, columns), _ = self.stacks[held.stack]
        rows *= len(held.projections)
        matrix = (columns, rows) if held.turned else (rows, columns)
        return (self.num_experts * matrix[0], matrix[1]) if held.flat else (self.num_experts, *matrix)

    def biases(self) -> dict[str, tuple[int, int]]:
        """Shapes of the biases, by name; the same as in transformers."""
        return {f"{name}_bias": shape[:2] for name, shape in self.shapes().items()} if self.biased else {}

    def inner(self, first: Tensor) -> Tensor:
        """Compute the input [rows, I] of down_proj from the outputs [rows, 2I] of gate_proj and up_proj; [rows, I] if
        there is no gate."""
        if not self.has_gate:
            return self.act_fn(first)
        if self.gated is not None:
            return self.gated(first)
        gate, up = first.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def sum_dtype(self, hidden_states: Tensor, weights: Tensor) -> torch.dtype:
        """Return the dtype in which a token's experts are summed."""
        if self.scales_inputs:  # transformers sums over a dimension, which torch rounds once
            return torch.promote_types(hidden_states.dtype, torch.float32)
        return weights.dtype if self.sums_of_weights else hidden_states.dtype


class ExpertMLPs(nn.Module):
    """Experts of one MoE layer, with the signature and results of transformers' eager fused module (the same bits if
    the matrix products have the same bits).

    Attributes:
        of: sizes and function.
        routers: names, in the model, of the modules and parameters that choose experts (:mod:`model.moe.routers`).
        replaces: name of transformers' class.
    """

    routers: tuple[str, ...] = ()
    replaces: str = ""

    def __init__(self, of: Experts):
        super().__init__()
        self.of = of
        self.num_experts = of.num_experts


class StackedMLPs(ExpertMLPs):
    """All experts' weights in two stacks. ``weights`` are Parameters with the shapes and order of ``of.shapes``,
    ``biases`` with those of ``of.biases``."""

    def __init__(self, of: Experts, weights: Iterable[nn.Parameter], biases: Iterable[nn.Parameter] = ()):
        super().__init__(of)
        for weight, (name, shape) in zip(weights, of.shapes().items(), strict=True):
            self.add_module(name, StackedLinear(weight, shape, of.stacks[name][1]))
        for bias, name in zip(biases, of.biases(), strict=True):
            self.register_parameter(name, bias)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts' outputs. With a grouped GEMM, it does not synchronize with
        the host.

        Args:
            hidden_states: ``[T, H]``, or with more dimensions in place of T.
            top_k_index: [T, K] integers in [0, E]; E means no expert, and is computed as a choice with a weight of 0.
            top_k_weights: [T, K].

        Returns:
            Tensor in the shape and dtype of ``hidden_states``; experts are summed in their order.
        """
        shape, hidden_states = hidden_states.shape, hidden_states.reshape(-1, hidden_states.shape[-1])
        # "None" becomes the last expert with a weight of 0: dropping rows would make the host wait for their number.
        none = top_k_index == self.num_experts
        where = ExpertRows.of(top_k_index.clamp(max=self.num_experts - 1), self.num_experts)
        weights = where.arranged(top_k_weights.masked_fill(none, 0))
        rows = where.spread(hidden_states)
        rows = rows * weights[:, None] if self.of.scales_inputs else rows
        first, second = (_with_bias(self, name, where) for name in self.of.stacks)
        rows = second(self.of.inner(first(rows)))
        rows = rows if self.of.scales_inputs else rows * weights[:, None]
        output = where.summed(rows.to(self.of.sum_dtype(hidden_states, weights)))
        return output.to(hidden_states.dtype).view(shape)


def _with_bias(module: StackedMLPs, name: str, where: ExpertRows) -> Function:
    """Wrap the stack ``name`` of ``module``, with its bias if it has one, as a function of rows."""
    stack = module.get_submodule(name)
    if not module.of.biased:
        return lambda rows: stack(rows, where.offsets)
    bias: Tensor = getattr(module, f"{name}_bias")

    def with_bias(rows: Tensor) -> Tensor:
        # In fp32 for the gradient, a sum over an expert's rows. An embedding's gradient is summed in a fixed order.
        wide = bias.to(torch.promote_types(bias.dtype, torch.float32))
        return stack(rows, where.offsets) + F.embedding(where.expert, wide).to(rows.dtype)

    return with_bias


class ExpertMLP(nn.Module):
    """Weights of one expert; :class:`PerExpertMLPs` has everything else."""

    def __init__(self, of: Experts):
        super().__init__()
        for (rows, columns), projections in of.stacks.values():
            for projection in projections:
                self.add_module(projection, nn.Linear(columns, rows, bias=False))

    def forward(self, rows: Tensor, of: Experts, biases: Sequence[Tensor]) -> Tensor:
        """Map [rows, H] to [rows, H]. ``biases`` are this expert's biases of the first Linears and of down_proj, or
        empty."""
        *first, down_proj = self.children()
        if of.has_gate and of.gated is None and not biases:
            gate, up = first
            return down_proj(of.act_fn(gate(rows)) * up(rows))
        inner = torch.cat([linear(rows) for linear in first], dim=-1)
        if not biases:
            return down_proj(of.inner(inner))
        return down_proj(of.inner(inner + biases[0])) + biases[1]


class PerExpertMLPs(ExpertMLPs):
    """Experts as children ``"0"`` to ``"E-1"``; ``biases`` are the biases of all experts, see ``of.biases``."""

    def __init__(self, of: Experts, biases: Iterable[nn.Parameter] = ()):
        super().__init__(of)
        for expert in range(of.num_experts):
            self.add_module(str(expert), ExpertMLP(of))
        for bias, name in zip(biases, of.biases(), strict=True):
            self.register_parameter(name, bias)

    def experts(self) -> Iterator[ExpertMLP]:
        """Iterate over the experts in order."""
        for expert in range(self.num_experts):
            yield self.get_submodule(str(expert))  # type: ignore[misc]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the same as :meth:`StackedMLPs.forward`."""
        shape, hidden_states = hidden_states.shape, hidden_states.reshape(-1, hidden_states.shape[-1])
        tokens = hidden_states.shape[0]
        # [K, T], as transformers orders them, then grouped by expert. Only the counts synchronize with the host.
        choices = top_k_index.t().reshape(-1)
        order = torch.argsort(choices, stable=True)
        counts = torch.bincount(choices, minlength=self.num_experts + 1)[: self.num_experts].tolist()
        order = order[: sum(counts)]
        token_groups = (order % tokens).split(counts)
        weight_groups = top_k_weights.t().reshape(-1)[order].split(counts)
        inputs = hidden_states[order % tokens].split(counts)

        output = torch.zeros_like(hidden_states, dtype=self.of.sum_dtype(hidden_states, top_k_weights))
        whole = [getattr(self, name) for name in self.of.biases()]
        biases = zip(*(bias.unbind() for bias in whole), strict=True) if whole else [()] * self.num_experts
        together = zip(self.experts(), biases, inputs, token_groups, weight_groups, strict=True)
        for expert, bias, rows, token, weight in together:
            # A token chooses an expert at most once: no two of these additions collide, on any device.
            if self.of.scales_inputs:
                rows = expert(rows * weight[:, None], self.of, bias)
            else:
                rows = expert(rows, self.of, bias) * weight[:, None]
            output.index_add_(0, token, rows.to(output.dtype))
        return output.to(hidden_states.dtype).view(shape)


def router_names(model: nn.Module) -> list[str]:
    """List the names of the modules and parameters that choose experts, in a model after ``arrange_experts``."""
    return [name for module in model.modules() if isinstance(module, ExpertMLPs) for name in module.routers]
