"""Moments of a plain optimizer (stage 0) that are made 0."""

import torch
from torch.nn import Parameter

from model.zero import reset_moments


def test_a_parameter_without_a_gradient_yet_has_no_moments():
    """As the scale of a frozen embedding, while fake quant is off."""
    seen, unseen = Parameter(torch.rand(3)), Parameter(torch.rand(2))
    optimizer = torch.optim.AdamW([seen, unseen])
    seen.grad = torch.rand(3)
    optimizer.step()
    reset_moments(optimizer, [unseen, seen])
    assert not optimizer.state[seen]["exp_avg"].any() and not optimizer.state[seen]["exp_avg_sq"].any()
    assert not optimizer.state.get(unseen)
    unseen.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[unseen]["exp_avg"].all()
