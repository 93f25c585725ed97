"""Distillation of single tokens, losses that a user adds, and the diagnostics beside a loss."""

import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.loader import Loader, on_device
from data.samples import Sample, samples_of
from data.teacher_cache import TeacherCache, offsets_of
from engine.config.sections import LossRecipe
from engine.losses.chunked import TeacherTopK, chunked_losses
from engine.losses.objective import (
    DIAGNOSTICS,
    KD_KINDS,
    Distillation,
    NamedTokenLoss,
    Objective,
    distil,
    take_top_k,
    top_indices,
)
from engine.session.teacher import CachedTeacher
from tests.lib.counting import Counting
from tests.lib.definitions import kd_loss
from tests.unit.engine.losses.cases import Case


def logits_of_one_token(student, teacher, spec, label=0):
    """Value and gradient of one token, from logits given as lists."""
    student, teacher = torch.tensor([student]), torch.tensor([teacher])
    gradient = torch.zeros_like(student)
    value = distil(spec, student, student.log_softmax(-1), teacher, torch.tensor([label]), gradient=gradient)
    return value[0], gradient[0]


SPECS = [
    Distillation(kind, top_k=k, tail=tail)
    for kind in KD_KINDS
    for k, tail in ((2, False), (2, True), (3, True), (4, True))
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.kind}-{spec.top_k}-{spec.tail}")
def test_masked_vocabulary(spec):
    """Tokens that both models mask are as if they were not there (for mse: count as equal)."""
    inf = torch.inf
    value, gradient = logits_of_one_token([1.0, 2.0, -inf, -1.0], [0.5, -1.0, -inf, 2.0], spec)
    plain, expected = logits_of_one_token([1.0, 2.0, -1.0], [0.5, -1.0, 2.0], spec)
    share = 3 / 4 if spec.kind == "mse" else 1
    torch.testing.assert_close(value, plain * share)
    torch.testing.assert_close(gradient[[0, 1, 3]], expected * share)
    assert gradient[2] == 0


def test_a_token_that_only_one_model_masks():
    inf = torch.inf
    student_masks = ([1.0, -inf, 0.5], [0.0, 3.0, 1.0])
    teacher_masks = ([1.0, 2.0, 0.5], [0.0, -inf, 1.0])
    for kind in ("kl", "cakld", "kd", "mse", "kl_top_k"):
        assert logits_of_one_token(*student_masks, Distillation(kind, top_k=2))[0] == inf, kind
    for kind in ("rkl", "cakld", "mse", "r_kl_top_k"):
        assert logits_of_one_token(*teacher_masks, Distillation(kind, top_k=2))[0] == inf, kind
    for kind, case in (("kl", teacher_masks), ("kl_top_k", teacher_masks), ("rkl", student_masks)):
        value, gradient = logits_of_one_token(*case, Distillation(kind, top_k=2))
        assert value.isfinite() and gradient.isfinite().all(), kind


def test_ties_go_to_the_lower_token_id(seed):
    for _ in range(20):
        rows, vocabulary = random.randint(1, 5), random.randint(1, 30)
        values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1e-40, 3.0])
        logits = values[torch.randint(0, len(values), (rows, vocabulary))]
        k = random.randint(1, vocabulary + 2)
        expected = [
            sorted(range(vocabulary), key=lambda token, row=row: (-row[token], token))[:k] for row in logits.tolist()
        ]
        assert top_indices(logits, k).tolist() == expected


def test_the_defaults_are_those_of_a_recipe():
    assert LossRecipe(kd="kl", top_k=100).objective(lm=1.0, kd=0.0).kd == Distillation("kl")


def test_no_total_without_a_weighted_loss():
    """A cached teacher has no output for held-out samples; a loss without weight may be missing."""
    means = {"lm": 2.0, "router_aux": 0.25}
    for lm, kd, total in ((0.5, 0.0, 1.25), (0.5, 1.0, None), (0.0, 1.0, None)):
        found = Objective(lm, kd, Distillation("kl")).report(means)
        assert found.pop("loss/total", None) == total and found == {"loss/lm": 2.0, "loss/router_aux": 0.25}
    whole = Objective(0.5, 2.0, Distillation("kl")).report({**means, "kd": 3.0})
    assert whole == {"loss/total": 7.25, "loss/lm": 2.0, "loss/kd/kl": 3.0, "loss/router_aux": 0.25}


@pytest.mark.parametrize("tail", [False, True])
def test_a_cached_teacher_is_the_one_that_it_was_made_of(seed, tail):
    case = Case(vocabulary=30)
    bias = case.teacher.bias
    logits = F.linear(case.teacher.hidden[case.valid], case.teacher.weight, bias)
    cached = take_top_k(logits, logits.log_softmax(-1), 12)
    for k in (12, 5, 1):
        objective = Objective(0.5, 1.0, Distillation("kl_top_k", top_k=k, tail=tail), chunk_tokens=4)
        live, gradients = case.found(objective)
        found, others = case.found(objective, teacher=TeacherTopK(cached))
        torch.testing.assert_close(found.sums["kd"], live.sums["kd"])
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(a, b)


def test_a_cached_teacher_has_the_rows_of_learned_samples_only(seed):
    """Some of a batch's samples, or all of them, are excluded by data.skip."""
    samples = [Sample(np.arange(n, dtype=np.int32), np.arange(n, dtype=np.int32)) for n in (3, 5, 2, 4)]
    cache = SimpleNamespace(
        directory="cache",
        manifest=SimpleNamespace(vocabulary=9),
        rows=partial(TeacherCache.rows, SimpleNamespace(_arrays={"offsets": offsets_of(samples_of(samples))})),
        top_k=lambda rows: (torch.tensor(rows)[:, None], torch.tensor(rows)[:, None], torch.tensor(rows)),
    )
    options = {"rank": 0, "world": 1, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "pad_token_id": 0}
    for skip in ({1}, {0, 3}, {0, 1, 3}):
        seen: list[int] = []
        for batch in Loader(samples, seed=seed, skip=skip, **options).step(0):
            found = CachedTeacher(cache).forward({}, on_device(batch, torch.device("cpu"))).teacher
            seen += found.top.log_tail.tolist()
        learned = [range(0, 3), range(3, 8), range(8, 10), range(10, 14)]
        assert sorted(seen) == [row for index, rows in enumerate(learned) if index not in skip for row in rows]


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
