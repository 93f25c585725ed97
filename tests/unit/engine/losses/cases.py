"""Hidden states, heads and labels of two models at random: what the chunked losses find of them, and what is right."""

import random

import torch
import torch.nn.functional as F

from data.samples import IGNORE
from engine.losses.chunked import TeacherHidden, chunked_losses
from engine.losses.objective import TOP_K_KINDS, Distillation
from model.head import UNCHANGED
from tests.lib.definitions import kd_loss, lm_loss


def spec_of(kind, vocabulary):
    if kind == "kd":
        return Distillation(kind, temperature=random.uniform(0.5, 4))
    if kind in TOP_K_KINDS:
        # Below the vocabulary: what is left of a full vocabulary is rounding alone, in the definition above.
        return Distillation(kind, top_k=random.randint(1, vocabulary - 1), tail=random.random() < 0.5)
    return Distillation(kind)


def logits_of(function, output):
    """What transformers' models write: a factor, and a soft cap."""
    logits = output * function.factor
    return logits if function.cap is None else torch.tanh(logits / function.cap) * function.cap


class Case:
    """Random hidden states, heads and labels of two models; fp64, a third of the positions without a target."""

    def __init__(
        self, *, vocabulary=None, teacher_vocabulary=None, bias=None, dtype=torch.float64, functions=(UNCHANGED,) * 2
    ):
        self.functions = functions  # of the student's and the teacher's logits
        batch, length, width = random.randint(1, 3), random.randint(1, 9), random.randint(2, 12)
        self.vocabulary = vocabulary or random.randint(3, 40)
        self.teacher_vocabulary = teacher_vocabulary or self.vocabulary
        self.bias_on = random.random() < 0.5 if bias is None else bias
        self.labels = torch.randint(0, min(self.vocabulary, self.teacher_vocabulary), (batch, length))
        self.labels[torch.rand(batch, length) < 0.3] = IGNORE
        self.hidden = torch.randn(batch, length, width).to(dtype)
        self.weight = torch.randn(self.vocabulary, width).to(dtype)
        self.bias = torch.randn(self.vocabulary).to(dtype) if self.bias_on else None
        other = random.randint(2, 12)  # a teacher may be wider than its student
        self.teacher = TeacherHidden(
            torch.randn(batch, length, other).to(dtype),
            torch.randn(self.teacher_vocabulary, other).to(dtype),
            torch.randn(self.teacher_vocabulary).to(dtype) if self.bias_on else None,
            function=functions[1],
        )

    @property
    def valid(self):
        return self.labels != IGNORE

    def leaves(self):
        tensors = [self.hidden, self.weight, *([self.bias] if self.bias_on else [])]
        return [tensor.clone().requires_grad_() for tensor in tensors]

    def exact(self, objective, common=None, scale=1.0):
        """Sums and gradients by the definitions in fp64."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.leaves()]
        student = logits_of(self.functions[0], F.linear(leaves[0][self.valid], *leaves[1:]))
        bias = None if self.teacher.bias is None else self.teacher.bias.double()
        teacher = F.linear(self.teacher.hidden[self.valid].double(), self.teacher.weight.double(), bias)
        teacher = logits_of(self.functions[1], teacher)
        targets, spec = self.labels[self.valid], objective.kd
        options = {"temperature": spec.temperature, "top_k": spec.top_k, "tail": spec.tail}
        kd = kd_loss(spec.kind, student[:, :common], teacher[:, :common], targets, **options)
        sums = {"lm": lm_loss(student, targets).sum(), "kd": kd.sum()}
        total = scale * (objective.lm_weight * sums["lm"] + objective.kd_weight * sums["kd"])
        return sums, torch.autograd.grad(total, leaves, allow_unused=True)

    def found(self, objective, *, teacher=None, scale=1.0):
        leaves, options = self.leaves(), {"scale": scale, "function": self.functions[0]}
        inputs = (*leaves[:2], leaves[2] if self.bias_on else None, self.labels, teacher or self.teacher)
        result = chunked_losses(*inputs, objective, **options)
        return result, torch.autograd.grad(result.total, leaves)


def assert_equal(found, expected, *, rtol, atol):
    result, gradients = found
    sums, exact = expected
    for name in ("lm", "kd"):
        torch.testing.assert_close(result.sums[name].double(), sums[name].detach(), rtol=rtol, atol=atol)
    for gradient, reference in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=rtol, atol=atol)
