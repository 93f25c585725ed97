"""Tensors that quant_linear keeps for backward, in bytes; and that it needs no more, not even the weight."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quant.spec import TensorSpec
from tests.lib.saved import kept_for_backward, storages
from tests.unit.quant.one_linear import ASYMMETRIC, FP8, INT4, MX8, NVFP4, SCHEMES, Case, gradients

BYTES = {torch.float8_e4m3fn: lambda n: n, torch.uint8: lambda n: (n + 7) // 8}  # codes, and a mask of bits


def kept(case: Case) -> dict[int, torch.Tensor]:
    with kept_for_backward(case.parameters) as found:
        case()
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    ("schemes", "frozen", "expected"),
    [
        ((FP8, FP8), (), "input"),  # a learned scale
        # A fixed scale: n bytes of codes for the weight's gradients, n/8 of mask for the input's.
        ((FP8, FP8), ("input_theta",), {torch.float8_e4m3fn, torch.uint8}),
        ((FP8, FP8), ("input_theta", "weight"), {torch.float8_e4m3fn, torch.uint8}),  # codes for theta
        ((FP8, FP8), ("input_theta", "weight", "weight_theta"), {torch.uint8}),
        ((FP8, FP8), ("input_theta", "x"), {torch.float8_e4m3fn}),  # a first layer
        ((INT4, None), (), "input"),
        ((INT4, None), ("weight", "weight_theta"), set()),
        # Dynamic: also where only the input's own gradient is wanted. Scales that the kernels do not form are formed
        # again in backward.
        ((NVFP4, ASYMMETRIC), (), "input"),
        ((NVFP4, ASYMMETRIC), ("weight", "weight_theta", "bias"), "input"),
        ((NVFP4, ASYMMETRIC), ("weight", "weight_theta", "bias", "x"), set()),
    ],
    ids=str,
)
def test_bytes_kept_for_backward(schemes, frozen, expected, dtype, seed):
    """Of n inputs. Counted in storage, so that a view of a bigger tensor would count as that tensor."""
    for _ in range(5):
        case = Case(*schemes, dtype, tokens=(random.randint(1, 9), random.randint(1, 9)))
        for name in frozen:
            getattr(case, name).requires_grad_(False)
        found = kept(case)
        if expected == "input":
            assert storages(found) == {case.x.data_ptr(): case.x.untyped_storage().nbytes()}
            continue
        assert case.x.data_ptr() not in found and {one.dtype for one in found.values()} == expected
        assert sum(storages(found).values()) == sum(BYTES[one](case.x.numel()) for one in expected)


MX4 = TensorSpec("fp4_e2m1", 4, "group", 32, dynamic=True)
NVFP4_INPUTS = TensorSpec("fp4_e2m1", 4, "group", 16, dynamic=True)
# Bytes per element where both operands train: codes, a byte of scale per group, of NVFP4 a mask.
KEPT = [(MX4, 1 / 2 + 1 / 32), (MX8, 1 + 1 / 32), (NVFP4_INPUTS, 1 / 2 + 1 / 16 + 1 / 8)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("spec", "each"), KEPT, ids=str)
def test_codes_of_dynamic_floats_are_kept_instead_of_the_input(spec, each, dtype, seed):
    """The same output and gradients bit for bit, where an input is clipped, zero or not finite too."""
    case = Case(INT4, spec, dtype, tokens=(random.randint(2, 9), random.randint(1, 9)))
    with torch.no_grad():
        case.x.mul_(10 ** torch.empty(*case.x.shape[:-1], 1).uniform_(-6, 3))
        case.x[0, 0] = 0
    if spec.has_global_scale:  # a third of the largest magnitude was seen when it was measured
        case.input_s0 = nn.Parameter(448 * 6 / (case.x.detach().float().abs().max().view(1) / 3), requires_grad=False)
    output = case()
    grad = torch.randn_like(output)
    plain = torch.autograd.grad(output, list(case.trained().values()), grad)
    case.plan = replace(case.plan, dynamic_codes=True)
    with kept_for_backward(case.parameters) as saved:
        again = case()
    assert torch.equal(again, output) and case.x.data_ptr() not in saved
    assert sum(storages(saved).values()) == each * case.x.numel()  # groups of 16 and 32: whole bytes
    found = torch.autograd.grad(again, list(case.trained().values()), grad)
    for name, ours, theirs in zip(case.trained(), found, plain, strict=True):
        assert torch.equal(ours, theirs), name
    # Of an input that alone needs a gradient the mask of what is clipped; of one that needs none the codes alone.
    for parameter in (case.weight, case.weight_theta, case.bias):
        parameter.requires_grad_(False)
    assert sum(storages(kept(case)).values()) <= (each - spec.bits / 8) * case.x.numel() + 8
    with torch.no_grad():
        case.x[0, 0, 1], case.x[-1, -1, 3] = math.inf, math.nan
    case.weight.requires_grad_()
    (ours,) = torch.autograd.grad(case(), case.x, grad)
    case.plan = replace(case.plan, dynamic_codes=False)
    (theirs,) = torch.autograd.grad(case(), case.x, grad)
    assert torch.equal(ours, theirs)


def test_no_tokens_and_integers_keep_what_they_kept(seed):
    for spec, tokens in ((MX4, (0,)), (ASYMMETRIC, (3,))):
        case = Case(INT4, spec, tokens=tokens)
        case.plan = replace(case.plan, dynamic_codes=True)
        with kept_for_backward(case.parameters) as saved:
            output = case()
        assert set(saved) <= {case.x.data_ptr(), 0}
        output.sum().backward()
        assert case.x.grad is not None and case.x.grad.shape == case.x.shape


@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_weights_that_are_gone_in_between_and_recomputation_change_nothing(schemes, seed):
    """As under ZeRO-3: released after forward (shape [0]), gathered into a new tensor before backward. And as with
    activation checkpointing. Bit for bit, with learned and with fixed scales."""
    for learn in (True, False):
        case = Case(*schemes)
        if case.input_theta is not None:
            case.input_theta.requires_grad_(learn)
        output = case()
        recomputed = checkpoint(lambda x: case(), case.x, use_reentrant=False)  # noqa: B023 (within this iteration)
        found = []
        for one in (case(), recomputed, output):
            if one is output:
                full = [(p, p.data) for p in case.parameters]
                for p, _ in full:
                    p.data = torch.empty(0)
                for p, data in full:
                    p.data = data.clone()
            torch.manual_seed(1)
            found.append(gradients(case, one)[0])
        for other in found[1:]:
            for name, gradient in other.items():
                assert torch.equal(gradient, found[0][name]), name
