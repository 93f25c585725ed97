"""Products of a stack of weights against one product per expert in fp64."""

import pytest
import torch

from quant import gemm

SIDES = [(16, 24), (5, 7), (8, 9), (64, 8)]  # whole 16 bytes in every dtype, and not


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_products_and_gradients_are_those_of_each_expert(dtype, sides, rows, seed):
    experts, (wide, narrow) = 5, sides
    chosen = torch.randint(0, experts - 1, (rows,))  # the last one gets nothing
    counts = torch.bincount(chosen, minlength=experts)
    offsets = counts.cumsum(0).int()
    x = torch.randn(rows, narrow).to(dtype).requires_grad_()
    weight = (torch.randn(experts, wide, narrow) / 4).to(dtype).requires_grad_()
    grad = torch.randn(rows, wide).to(dtype)
    output = gemm.linear(x, weight, None, offsets)
    output.backward(grad)

    parts, whole = x.detach().double().split(counts.tolist()), weight.detach().double()
    grads = grad.double().split(counts.tolist())
    expected = torch.cat([part @ one.t() for part, one in zip(parts, whole, strict=True)])
    grad_x = torch.cat([part @ one for part, one in zip(grads, whole, strict=True)])
    grad_weight = torch.stack([g.t() @ part for g, part in zip(grads, parts, strict=True)])
    # Of a sum of at most 64 terms of size about 1, in the dtype's rounding.
    eps = max(torch.finfo(dtype).eps, 1e-12)
    for ours, theirs in ((output, expected), (x.grad, grad_x), (weight.grad, grad_weight)):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=4 * eps, atol=40 * eps)
    assert not weight.grad[-1].any()


def test_only_what_is_needed_is_computed_and_kept(seed):
    """A frozen weight gets no gradient, and an input that needs none is not asked for."""
    offsets = torch.tensor([2, 3], dtype=torch.int32)
    for trains_x, trains_weight in ((True, False), (False, True)):
        x, weight = torch.randn(3, 8, requires_grad=trains_x), torch.randn(2, 8, 8, requires_grad=trains_weight)
        gemm.linear(x, weight, None, offsets).sum().backward()
        assert (x.grad is not None) == trains_x and (weight.grad is not None) == trains_weight
