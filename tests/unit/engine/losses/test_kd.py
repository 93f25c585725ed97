"""Distillation of single tokens: a vocabulary that is masked, the K most likely tokens, a teacher that was cached."""

import random

import pytest
import torch
import torch.nn.functional as F

from engine.losses.chunked import TeacherTopK
from engine.losses.kd import KD_KINDS, Distillation, distil, take_top_k, top_indices
from engine.losses.objective import Objective
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
