"""lm_head's gradient as a sum over chunks, against fp64: a GPU adds products to fp32 unrounded, a CPU rounds each."""

import pytest
import torch

from engine.losses.chunked import chunked_losses
from engine.losses.objective import Objective

EPS = 2.0**-8  # of bf16
# Tokens, hidden size, vocabulary, tokens of a chunk. A CPU takes the first alone.
SHAPES = [(70, 48, 96, 16), (4100, 2048, 32000, 1024)]


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_several_chunks_against_fp64(shape, device, seed):
    tokens, width, vocabulary, chunk = shape
    if device.type == "cpu" and shape != SHAPES[0]:
        pytest.skip("on a GPU")
    hidden = torch.randn(tokens, width, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).bfloat16().requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)
    total = chunked_losses(hidden, weight, None, labels, objective=Objective(chunk_tokens=chunk)).total
    of_hidden, of_weight = torch.autograd.grad(total, (hidden, weight))
    # What is multiplied is the gradient of the logits in bf16: of it the sums must be right.
    h, w = hidden.detach().double(), weight.detach().double()
    at_logits = torch.softmax((h @ w.t()).bfloat16().double(), dim=-1)
    at_logits[torch.arange(tokens, device=device), labels] -= 1
    for found, exact, size in (
        (of_hidden, at_logits @ w, at_logits.abs() @ w.abs()),
        (of_weight, at_logits.t() @ h, at_logits.abs().t() @ h.abs()),
    ):
        assert ((found.double() - exact).abs() <= EPS * exact.abs() + 2 * EPS * size).all()
