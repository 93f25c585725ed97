"""Losses that a user adds, and the diagnostics beside a loss."""

import pytest
import torch
import torch.nn.functional as F

from engine.losses.chunked import chunked_losses
from engine.losses.kd import Distillation
from engine.losses.objective import DIAGNOSTICS, NamedTokenLoss, Objective
from tests.lib.counting import Counting
from tests.lib.definitions import kd_loss
from tests.unit.engine.losses.cases import Case


def test_diagnostics(seed):
    case = Case()
    objective = Objective(kd=Distillation("mse"))
    inputs = (case.hidden, case.weight, case.bias, case.labels, case.teacher)
    result = chunked_losses(*inputs, objective, diagnostics=True)
    student = F.linear(case.hidden[case.valid], case.weight, case.bias)
    teacher = F.linear(case.teacher.hidden[case.valid], case.teacher.weight, case.teacher.bias)
    targets = case.labels[case.valid]
    torch.testing.assert_close(result.sums["forward_kl"], kd_loss("kl", student, teacher, targets).sum())
    torch.testing.assert_close(result.sums["backward_kl"], kd_loss("rkl", student, teacher, targets).sum())
    assert result.sums["top1_agreement"] == (student.argmax(-1) == teacher.argmax(-1)).sum()
    assert list(result.sums) == ["lm", "kd", *DIAGNOSTICS]


@pytest.mark.parametrize("kind", ["kl", "cakld"])
def test_diagnostics_cost_15_operators_on_logits_and_no_gemm_or_wait(kind, seed):
    """docs/losses.md says so. Four more operators take a number per token."""
    case, found = Case(), {False: Counting(), True: Counting()}
    inputs = (case.hidden, case.weight, case.bias, case.labels, case.teacher)
    for diagnostics, counting in found.items():
        with counting:
            chunked_losses(*inputs, Objective(1.0, 1.0, Distillation(kind)), diagnostics=diagnostics)
    assert found[True].launches.total() - found[False].launches.total() == 15 + 4
    assert found[True].products == found[False].products and found[True].waits == found[False].waits


def test_a_users_loss_gets_value_and_gradient_by_autograd(seed):
    case = Case(bias=True)

    def focal(chunk):
        log_q = chunk.student.log_softmax(-1).gather(-1, chunk.labels[:, None])[:, 0]
        agreement = (chunk.teacher.softmax(-1) * chunk.student.softmax(-1)).sum(-1)
        return -((1 - log_q.exp()) ** 2) * log_q + agreement

    objective = Objective(0.0, 0.0, token_losses=(NamedTokenLoss("focal", 0.3, focal),), chunk_tokens=2)
    result, gradients = case.found(objective, scale=2.0)
    leaves = case.leaves()
    student = F.linear(leaves[0][case.valid], *leaves[1:])
    teacher = F.linear(case.teacher.hidden[case.valid], case.teacher.weight, case.teacher.bias)
    log_q = student.log_softmax(-1).gather(-1, case.labels[case.valid][:, None])[:, 0]
    agreement = (teacher.softmax(-1) * student.softmax(-1)).sum(-1)
    expected = (-((1 - log_q.exp()) ** 2) * log_q + agreement).sum()
    torch.testing.assert_close(result.sums["focal"], expected.detach())
    torch.testing.assert_close(result.total, 0.6 * expected.detach())
    for a, b in zip(gradients, torch.autograd.grad(0.6 * expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda chunk: chunk.student.sum(), r"'mine' returned \[\], expected a tensor \[3\]"),
        (lambda chunk: chunk.student, r"'mine' returned \[3, 5\]"),
        (lambda chunk: 0.5, r"'mine' returned float"),
        (lambda chunk: chunk.labels.float(), "does not depend on the student's logits"),
    ],
)
def test_a_users_loss_of_the_wrong_kind_is_named(function, message):
    objective = Objective(token_losses=(NamedTokenLoss("mine", 1.0, function),))
    hidden, weight, labels = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4), torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match=message):
        chunked_losses(hidden, weight, None, labels, None, objective)
