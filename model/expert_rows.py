"""Tokens to the rows of their experts and back: two moves, each of which is the other's gradient.

Both are gathers. Left to autograd, the gradient of a gather is an ``index_put`` that accumulates: on a GPU it sorts the
indices first, and writes zeros everywhere before it adds; on a CPU with several threads fp32 sums come in any order.
Here sums come in the order of the experts in both directions, one addition at a time in the dtype of the rows, as a CPU
with one thread made them: each of them in one pass that reads a token's rows and writes their sum.

Legend: T tokens, K experts per token, E experts, H hidden size; a choice is one of the K T pairs of them, a row is a
choice in its place among the rows of its expert.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant import kernels


class ExpertRows(NamedTuple):
    """Which row belongs to which token; integers.

    Attributes:
        offsets: [E] int32, one past the last row of each expert.
        expert: [K T], of each row, ascending.
        token: [K T], of each row.
        choice: [K T], of each row among the choices [K, T].
        row: [K T], of each choice: the inverse of ``choice``.
        of_token: [T, K], the rows of each token, in the order of their experts.
    """

    offsets: Tensor
    expert: Tensor
    token: Tensor
    choice: Tensor
    row: Tensor
    of_token: Tensor

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> "ExpertRows":
        """Of the experts [T, K] that tokens choose, 0 to E - 1; a token may choose one twice. The host waits for
        nothing."""
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
        """The row [K T, H] of each choice, from the hidden states [T, H]; differentiable."""
        spread: Tensor = _Spread.apply(hidden_states, self.token, self.of_token)
        return spread

    def summed(self, rows: Tensor) -> Tensor:
        """Sums [T, H] of each token's rows [K T, H], added one by one in the order of their experts: a sum over K would
        round in another way, and atomic additions come in any order. Differentiable."""
        summed: Tensor = _Summed.apply(rows, self.token, self.of_token)
        return summed

    def arranged(self, weights: Tensor) -> Tensor:
        """Numbers [T, K] of choices in the order of the rows, [K T]; differentiable."""
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
