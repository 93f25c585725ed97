"""Losses against their formulas in fp64, in value and gradient, whatever the split into chunks and micro-batches."""

import pytest
import torch

from engine.losses import KD_KINDS, loss_sums


def reference(logits, labels, teacher, kind, temperature):
    """The formulas of engine.losses, written out with probabilities in fp64."""
    logits, teacher = logits.double(), teacher.double()
    valid = labels != -100
    q, p = logits.softmax(-1), teacher.softmax(-1)
    lm = -(q[valid, labels[valid]]).log().sum()

    def kl(a, b):
        return (a * (a.log() - b.log())).sum(-1)

    if kind == "kl":
        kd = kl(p, q)
    elif kind == "rkl":
        kd = kl(q, p)
    elif kind == "mse":
        kd = ((logits - teacher) ** 2).sum(-1) / logits.shape[-1]
    elif kind == "kd":
        kd = temperature**2 * kl((teacher / temperature).softmax(-1), (logits / temperature).softmax(-1))
    else:
        confidence = p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        kd = confidence * kl(q, p) + (1 - confidence) * kl(p, q)
    return lm, kd[valid].sum()


def random_case(vocabulary=None):
    seed = torch.seed()
    print("seed", seed)  # shown when a test fails
    generator = torch.Generator().manual_seed(seed % 2**63)
    batch, length = (int(torch.randint(1, high, (), generator=generator)) for high in (4, 9))
    vocabulary = vocabulary or int(torch.randint(2, 50, (), generator=generator))
    logits = 3 * torch.randn(batch, length, vocabulary, generator=generator)
    teacher = 3 * torch.randn(batch, length, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < 0.3] = -100
    return logits, labels, teacher


@pytest.mark.parametrize("kind", KD_KINDS)
@pytest.mark.parametrize("repeat", range(5))
def test_equals_fp64_in_value_and_gradient(kind, repeat):
    logits, labels, teacher = random_case()
    temperature = 2.5 if kind == "kd" else 1.0
    exact = logits.double().requires_grad_()
    lm, kd = reference(exact, labels, teacher, kind, temperature)
    (expected,) = torch.autograd.grad(0.7 * lm + 1.3 * kd, exact)
    for chunk in (1, 3, 1000):
        student = logits.clone().requires_grad_()
        sums = loss_sums(student, labels, teacher, kd_kind=kind, temperature=temperature, chunk_tokens=chunk)
        # fp32 arithmetic: some 1e-7 relative per operation, a few dozen of them in a row.
        torch.testing.assert_close(sums.lm.double(), lm.detach(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(sums.kd.double(), kd.detach(), rtol=2e-5, atol=2e-5)
        (gradient,) = torch.autograd.grad(0.7 * sums.lm + 1.3 * sums.kd, student)
        torch.testing.assert_close(gradient.double(), expected, rtol=2e-5, atol=2e-5)


def test_sum_over_any_split_of_the_tokens():
    logits, labels, teacher = random_case(vocabulary=17)
    whole = loss_sums(logits, labels, teacher)
    parts = [loss_sums(logits[:, t], labels[:, t], teacher[:, t]) for t in range(labels.shape[1])]
    torch.testing.assert_close(sum(part.lm for part in parts), whole.lm)
    torch.testing.assert_close(sum(part.kd for part in parts), whole.kd)


def test_positions_without_target_do_not_count_whatever_they_hold():
    logits, labels, teacher = random_case(vocabulary=11)
    labels[0, 0] = -100
    clean = loss_sums(logits, labels, teacher)
    logits[0, 0], teacher[0, 0] = torch.inf, torch.nan
    dirty = loss_sums(logits, labels, teacher)
    assert clean.lm == dirty.lm and clean.kd == dirty.kd


def test_no_valid_token_gives_a_connected_zero():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    sums = loss_sums(logits, torch.full((2, 3), -100), torch.randn(2, 3, 5))
    (gradient,) = torch.autograd.grad(sums.lm + sums.kd, logits)
    assert sums.lm == 0 and sums.kd == 0 and not gradient.any()


def test_equal_models_have_no_distance():
    logits, labels, _ = random_case()
    for kind in KD_KINDS:
        # Exactly 0 for mse; for the others the two log-softmaxes are the same numbers, so their difference is 0.
        assert loss_sums(logits, labels, logits.clone(), kd_kind=kind).kd == 0


def test_bad_arguments_say_what_was_expected():
    logits, labels, teacher = random_case(vocabulary=8)
    with pytest.raises(ValueError, match="same vocabulary size"):
        loss_sums(logits, labels, teacher[..., :7])
    with pytest.raises(ValueError, match="leading dimensions"):
        loss_sums(logits, labels[:, :-1].reshape(-1))
    with pytest.raises(ValueError, match="one of kl, rkl"):
        loss_sums(logits, labels, teacher, kd_kind="kll")
