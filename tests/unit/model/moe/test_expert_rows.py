"""Tokens to the rows of experts and back: against indexing and its autograd, bit for bit; and finite differences."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.moe.experts import ExpertRows, Experts, StackedMLPs

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def integer(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def choices() -> tuple[Tensor, int]:
    """Random experts of tokens: some chosen by nobody, tokens that choose one twice, and no tokens at all."""
    tokens, experts = integer(0, 40), integer(1, 9)
    return torch.randint(integer(1, experts), (tokens, integer(1, 4))), experts


def by_indexing(where: ExpertRows, hidden: Tensor, factors: Tensor) -> Tensor:
    """What the two moves compute, with autograd's own gradients."""
    rows = hidden[where.token] * factors
    sums = torch.zeros_like(hidden)
    for column in where.of_token.unbind(1):
        sums = sums + rows[column]
    return sums


@pytest.mark.parametrize("_", range(20))
def test_rows_are_grouped_by_expert_and_found_again(seed, _):
    chosen, experts = choices()
    where = ExpertRows.of(chosen, experts)
    assert where.expert.equal(chosen.t().reshape(-1).sort().values)
    assert where.offsets.equal(torch.bincount(where.expert, minlength=experts).cumsum(0).int())
    assert where.choice[where.row].equal(torch.arange(chosen.numel()))
    assert where.arranged(chosen).equal(where.expert)
    tokens = torch.arange(len(chosen))[:, None]
    assert where.token[where.of_token].equal(tokens.expand_as(chosen))
    assert where.expert[where.of_token].equal(chosen.sort(dim=-1).values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("_", range(10))
def test_values_and_gradients_are_those_of_indexing(seed, dtype, _):
    """Autograd adds up in the order of the rows here, since torch works with one thread on tensors of this size."""
    chosen, experts = choices()
    where, width = ExpertRows.of(chosen, experts), integer(1, 33)
    hidden = torch.randn(len(chosen), width).to(dtype)
    factors = torch.randn(chosen.numel(), 1).to(dtype)
    target = torch.randn(width, len(chosen)).to(dtype).t()  # gradients come as views too
    found = []
    for compute in (
        lambda x: by_indexing(where, x, factors),
        lambda x: where.summed(where.spread(x) * factors),
    ):
        x = hidden.clone().requires_grad_()
        result = compute(x)
        result.backward(target)
        found.append((result.detach(), x.grad))
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("_", range(5))
def test_gradients_against_finite_differences(seed, _):
    chosen, experts = choices()
    where = ExpertRows.of(chosen, experts)
    hidden, numbers = (torch.randn(len(chosen), n, dtype=torch.float64) for n in (3, chosen.shape[1]))
    rows = torch.randn(chosen.numel(), 3, dtype=torch.float64)
    for move, value in ((where.spread, hidden), (where.summed, rows), (where.arranged, numbers)):
        assert torch.autograd.gradcheck(move, (value.requires_grad_(),))


class Called(TorchDispatchMode):
    """Names of the operators that run, and whether they accumulate at indices."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        accumulates = name.startswith("index_put") and len(args) > 3 and args[3]
        self.names[f"{name} that accumulates" if accumulates else name] += 1
        return func(*args, **(kwargs or {}))


def test_nothing_is_accumulated_at_indices(seed):
    """Which sorts on a GPU, or adds in any order; but for the integers that count rows. The host waits for nothing: on
    the meta device it would find no value."""
    of = Experts(4, 16, 8, torch.nn.functional.silu)
    weights = (torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in of.shapes().values())
    experts = StackedMLPs(of, weights)
    hidden, factors = (torch.empty(6, size, device="meta", requires_grad=True) for size in (16, 2))
    chosen = torch.zeros(6, 2, dtype=torch.int64, device="meta")
    with Called() as called:
        experts(hidden, chosen, factors).sum().backward()
    assert hidden.grad is not None and factors.grad is not None
    assert not {name for name in called.names if "that accumulates" in name or "scatter_add" in name}
    # Rows are gathered once there and once back, and so are the weights; sums are one pass.
    assert called.names["deepqat::sum_rows"] == 2 and called.names["index_select"] == 4
