"""Losses through lm_head against their plain definitions in fp64 with autograd, however the tokens are cut."""

import random

import pytest
import torch
import torch.nn.functional as F

from data.samples import IGNORE
from engine.losses import chunked as losses
from engine.losses.chunked import TeacherHidden, TeacherTopK, chunked_losses
from engine.losses.objective import KD_KINDS, TOP_K_KINDS, Distillation, Objective, TopK, tokens_at_a_time
from model.head import LogitFunction
from tests.lib.counting import Counting
from tests.lib.definitions import kd_loss, lm_loss
from tests.unit.engine.losses.cases import Case, assert_equal, spec_of


@pytest.mark.parametrize("kind", KD_KINDS)
@pytest.mark.parametrize("cap", ["unchanged", None, 2.0])
def test_equals_the_definition_in_value_and_gradient_of_all_inputs(seed, kind, cap):
    """In fp64, where the closed forms differ from autograd of the definitions by rounding alone.

    Student and teacher may change their logits; the cap is one that random logits come close to.
    """
    for chunk in 2 * (1, 3, 1000):
        changes = (
            LogitFunction(random.uniform(0.1, 3), cap),
            LogitFunction(random.uniform(0.1, 3), random.uniform(1, 5)),
        )
        case = Case() if cap == "unchanged" else Case(functions=changes)
        objective = Objective(0.7, 1.3, spec_of(kind, case.vocabulary), chunk_tokens=chunk)
        assert_equal(case.found(objective, scale=0.01), case.exact(objective, scale=0.01), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KD_KINDS)
def test_fp32_is_as_exact_as_fp32_allows(seed, kind):
    """Values of some 10 and a few dozen roundings in a row; 300 seeds stayed below a tenth of the bound."""
    case = Case(dtype=torch.float32)
    objective = Objective(0.7, 1.3, spec_of(kind, case.vocabulary), chunk_tokens=4)
    if kind in TOP_K_KINDS:
        objective = Objective(0.7, 1.3, Distillation(kind, top_k=objective.kd.top_k), chunk_tokens=4)
    assert_equal(case.found(objective), case.exact(objective), rtol=5e-5, atol=5e-5)


def test_blocks_cut_a_chunk_anywhere(seed, monkeypatch):
    case = Case(vocabulary=11)
    objective = Objective(1.0, 1.0, Distillation("cakld"), chunk_tokens=5)
    expected = case.exact(objective)
    for elements in (1, 11, 25, 10**6):
        monkeypatch.setitem(losses.BLOCK_ELEMENTS, "cpu", elements)
        monkeypatch.setattr(losses, "SLICE_ELEMENTS", elements)
        assert_equal(case.found(objective), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KD_KINDS)
def test_a_teacher_with_another_padding_is_compared_on_the_common_tokens(seed, kind):
    case = Case(vocabulary=random.randint(9, 20), teacher_vocabulary=random.randint(9, 20))
    common = random.randint(8, min(case.vocabulary, case.teacher_vocabulary))
    case.labels = case.labels.clamp(max=common - 1)
    objective = Objective(0.7, 1.3, spec_of(kind, common), chunk_tokens=3)
    teacher = TeacherHidden(case.teacher.hidden, case.teacher.weight, case.teacher.bias, common)
    assert_equal(case.found(objective, teacher=teacher), case.exact(objective, common), rtol=1e-8, atol=1e-9)


def test_bf16_gradients_are_rounded_once_or_twice(seed):
    """Against fp64 of the same bf16 inputs: logits and their gradient are rounded to bf16, and each result."""
    torch.manual_seed(seed)
    n, width, vocabulary = 64, 32, 500
    hidden, weight = torch.randn(n, width), torch.randn(vocabulary, width) / width**0.5
    labels = torch.randint(0, vocabulary, (n,))
    teacher = TeacherHidden(torch.randn(n, width).bfloat16(), weight.bfloat16())
    for chunk in (16, 1000):
        objective = Objective(1.0, 1.0, Distillation("cakld"), chunk_tokens=chunk)
        leaves = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
        found = torch.autograd.grad(
            chunked_losses(*leaves, None, labels, teacher, objective, scale=1 / 3).total, leaves
        )
        exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        logits = F.linear(*exact_leaves)
        other = F.linear(teacher.hidden.double(), teacher.weight.double())
        lm = lm_loss(logits, labels).sum()
        total = (lm + kd_loss("cakld", logits, other, labels).sum()) / 3
        for gradient, exact in zip(found, torch.autograd.grad(total, exact_leaves), strict=True):
            assert gradient.dtype == torch.bfloat16
            error = (gradient.double() - exact).norm() / exact.norm()
            assert error < 2**-6, error  # bf16's unit is 2^-8; 300 seeds: 2^-8.2 at most


def test_the_incoming_gradient_is_not_rounded_to_the_models_dtype(seed):
    """1/3 in bf16 is off by 2e-3; multiplying in fp32 leaves one more rounding of each element, without a bias."""
    hidden = torch.randn(400, 64).bfloat16().requires_grad_()
    weight = torch.randn(40, 64).bfloat16().requires_grad_()
    labels = torch.randint(0, 40, (400,))
    (whole,) = torch.autograd.grad(chunked_losses(hidden, weight, None, labels).total, hidden)
    (third,) = torch.autograd.grad(chunked_losses(hidden, weight, None, labels).total / 3, hidden)
    ratio = float((third.double() * whole.double()).sum() / whole.double().square().sum())
    # The mean of 25,600 roundings: 7e-5 at most over 300 seeds. A rounded factor is off by 2e-3.
    assert abs(ratio * 3 - 1) < 5e-4


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_a_power_of_two_as_gradient_scale_changes_no_bit(seed, dtype):
    case = Case(dtype=dtype)
    objective = Objective(kd_weight=0.5, kd=spec_of("kl", case.vocabulary), chunk_tokens=random.randint(1, 9))
    gradients = []
    for power in (0, 20):
        leaves, factor = case.leaves(), 2.0**power
        bias, scales = leaves[2] if case.bias_on else None, {"scale": 0.125, "gradient_scale": factor}
        total = chunked_losses(*leaves[:2], bias, case.labels, case.teacher, objective, **scales).total
        (total * factor).backward()
        gradients.append([total.detach(), *(leaf.grad / factor for leaf in leaves)])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_fp16_gradients_that_only_the_loss_scale_holds(seed):
    """A factor of 2^-24, as of 10^7 tokens in a step, is as small as the smallest number of fp16."""
    hidden = torch.randn(16, 32, dtype=torch.float16)
    weight = (0.1 * torch.randn(50, 32)).to(torch.float16)
    labels = torch.randint(0, 50, (16,))
    exact = [leaf.double().requires_grad_() for leaf in (hidden, weight)]
    F.cross_entropy(F.linear(*exact), labels, reduction="sum").backward()
    for gradient_scale, good in ((2.0**24, True), (1.0, False)):
        leaves = [leaf.clone().requires_grad_() for leaf in (hidden, weight)]
        result = chunked_losses(*leaves, None, labels, scale=2.0**-24, gradient_scale=gradient_scale)
        (result.total * 2.0**24).backward()
        errors = [
            float((leaf.grad.double() - of.grad).norm() / of.grad.norm())
            for leaf, of in zip(leaves, exact, strict=True)
        ]
        # Rounding to 11 bits, of the logits and of their gradient, is at most 2^-11 of the largest each time.
        assert all((error < 2e-3) == good for error in errors), (gradient_scale, errors)


def test_no_gradient_is_computed_without_grad_mode_or_for_frozen_parameters(seed, monkeypatch):
    case = Case(bias=True)
    asked = []
    original = losses._Gradients.like.__func__

    def spy(cls, *arguments):
        made = original(cls, *arguments)
        asked.append([made.hidden is not None, made.weight is not None, made.bias is not None])
        return made

    monkeypatch.setattr(losses._Gradients, "like", classmethod(spy))
    leaves = case.leaves()
    with torch.no_grad():
        silent = chunked_losses(*leaves, case.labels, case.teacher)
    assert not silent.total.requires_grad
    trained = chunked_losses(leaves[0], leaves[1].detach(), leaves[2].detach(), case.labels, case.teacher)
    assert trained.total.requires_grad
    assert asked == [[False] * 3, [True, False, False]]
    for name, value in silent.sums.items():
        assert torch.equal(value, trained.sums[name]) and not trained.sums[name].requires_grad


def test_nothing_of_the_size_of_all_logits_is_allocated(seed):
    """The largest tensor that any operator makes has C rows of logits, or the size of lm_head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    tokens, width, vocabulary, chunk = 600, 8, 300, 64
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    teacher = TeacherHidden(hidden.detach(), weight.detach())
    for kind in KD_KINDS:
        objective = Objective(1.0, 1.0, Distillation(kind, top_k=5), chunk_tokens=chunk)
        with Largest() as largest:
            chunked_losses(hidden, weight, None, labels, teacher, objective).total.backward()
        assert largest.elements == chunk * vocabulary, kind


def test_backward_twice_is_an_error(seed):
    hidden = torch.randn(3, 4, requires_grad=True)
    total = chunked_losses(hidden, torch.randn(5, 4), None, torch.tensor([1, 2, 3])).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once per forward"):
        total.backward()


def test_positions_without_target_do_not_count_whatever_they_hold(seed):
    case = Case()
    case.labels[-1, -1] = 1
    case.labels[0, 0] = IGNORE
    assert case.valid.any()
    objective = Objective(1.0, 1.0)
    clean, gradients = case.found(objective)
    case.hidden[0, 0], case.teacher.hidden[0, 0] = torch.inf, torch.nan
    dirty, others = case.found(objective)
    assert torch.equal(clean.total, dirty.total)
    for a, b in zip(gradients, others, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KD_KINDS)
@pytest.mark.parametrize("poisoned", ["student", "teacher"])
def test_nan_and_inf_in_hidden_states_show(seed, kind, poisoned):
    for value in (torch.nan, torch.inf):
        case = Case()
        case.labels[0, 0] = 1
        (case.hidden if poisoned == "student" else case.teacher.hidden)[0, 0] = value
        for tail in (False, True):
            result, gradients = case.found(Objective(1.0, 1.0, Distillation(kind, top_k=2, tail=tail)))
            assert not result.total.isfinite()
            assert not gradients[0][0, 0].isfinite().all() or poisoned == "teacher"
            assert not result.sums["kd"].isfinite()


def test_bad_arguments_say_what_was_expected():
    hidden, weight, labels = torch.randn(2, 3, 4), torch.randn(7, 4), torch.randint(0, 7, (2, 3))
    cached = TeacherTopK(TopK(torch.zeros(4, 2), torch.zeros(4, 2).long(), torch.zeros(4)))
    for call, said in (
        (lambda: chunked_losses(hidden, weight, None, labels[:, :2]), "leading dimensions"),
        (lambda: chunked_losses(hidden, weight, None, labels, cached), "has 4 rows"),
        (lambda: Distillation("kll"), "one of kl, rkl"),
        (lambda: Distillation("kl_top_k", top_k=0), "at least 1"),
        *(
            (lambda teacher=teacher: chunked_losses(hidden, weight, None, labels, teacher), said)
            for teacher, said in (
                (TeacherHidden(hidden[:1], weight), "teacher's hidden states are"),
                (TeacherHidden(hidden, weight[:6]), "have 7 and 6 logits"),
                (TeacherHidden(hidden, weight[:6], None, 7), "7 tokens, expected"),
            )
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("kind", KD_KINDS)
def test_every_kind_at_its_borders(seed, kind, tail):
    """A vocabulary of two and more K than tokens; equal models, whose distance is exactly 0; no valid token."""
    case = Case(vocabulary=2, bias=True)
    objective = Objective(1.0, 1.0, Distillation(kind, top_k=5, tail=tail))
    result, gradients = case.found(objective)
    assert result.total.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
    itself = TeacherHidden(case.hidden, case.weight, case.bias)
    assert case.found(objective, teacher=itself)[0].sums["kd"] == 0
    case.labels.fill_(IGNORE)
    result, gradients = case.found(objective)
    assert result.total == 0 and not any(result.sums.values()) and not any(gradient.any() for gradient in gradients)


def test_the_gradient_of_lm_head_is_one_gemm_for_each_chunk():
    """Added to an fp32 sum, as CUDA does it; on the meta device, whose operator torch 2.11 has wrong."""
    meta = torch.device("meta")
    if not losses._adds_in_fp32(meta):
        pytest.skip("the meta device of this torch does not have CUDA's operator")
    size, tokens, vocabulary = 2048, 300, 2**14  # many slices of the kind that a CPU adds up
    make = {"dtype": torch.bfloat16, "device": meta, "requires_grad": True}
    hidden, weight = torch.empty(1, tokens, size, **make), torch.empty(vocabulary, size, **make)
    labels, positions = torch.zeros(1, tokens, dtype=torch.int64, device=meta), torch.arange(tokens, device=meta)
    objective = Objective(chunk_tokens=100)
    chunked_losses(hidden, weight, None, labels, objective=objective, positions=positions)
    with Counting() as counting:
        chunked_losses(hidden, weight, None, labels, objective=objective, positions=positions)
    # Of each chunk the logits, the gradient of its rows and that of the weight.
    assert counting.launches["mm"] == 2 * 3 and counting.launches["addmm"] == 3
    assert not counting.waits


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 512), ("cuda", 4096), ("meta", 4096)])
def test_chunks_are_larger_on_a_gpu(device: str, tokens: int):
    assert tokens_at_a_time(None, torch.device(device)) == tokens
    assert tokens_at_a_time(7, torch.device(device)) == 7
