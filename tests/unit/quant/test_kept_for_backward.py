"""What the autograd Function keeps for backward, in bytes; and that it needs no more, not even the weight."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quant.spec import TensorSpec
from tests.unit.quant.one_linear import ASYMMETRIC, FP8, INT4, NVFP4, SCHEMES, Case, Saved, gradients


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_bytes_kept_for_backward(dtype, seed):
    """The arithmetic: n inputs cost n bytes of codes and n/8 of mask with a fixed scale, nothing of their own
    otherwise.

    Counted in storage, so that a view of a bigger tensor would count as that tensor.
    """

    def kept(case):
        with Saved(case) as saved:
            case()
        return saved

    for _ in range(5):
        case = Case(FP8, FP8, dtype, tokens=(random.randint(1, 9), random.randint(1, 9)))
        n = case.x.numel()
        own = case.x.data_ptr()
        # Learned scale: the input itself.
        assert kept(case).bytes == {own: case.x.untyped_storage().nbytes()}
        # Fixed scale: codes and mask. Codes are for the weight's gradients, the mask is for the input's.
        case.input_theta.requires_grad_(False)
        saved = kept(case)
        assert sum(saved.bytes.values()) == n + (n + 7) // 8 and own not in saved.bytes
        assert set(saved.dtypes) == {torch.float8_e4m3fn, torch.uint8}
        case.weight.requires_grad_(False)
        assert sum(kept(case).bytes.values()) == n + (n + 7) // 8, "a learned weight scale needs the codes"
        case.weight_theta.requires_grad_(False)
        saved = kept(case)
        assert sum(saved.bytes.values()) == (n + 7) // 8 and saved.dtypes == [torch.uint8]
        # The input of the first layer needs no gradient, so no mask.
        case.weight.requires_grad_(True)
        case.x.requires_grad_(False)
        saved = kept(case)
        assert sum(saved.bytes.values()) == n and saved.dtypes == [torch.float8_e4m3fn]
        # Weight-only: the input itself, and nothing where the weight is frozen.
        case = Case(INT4, None, dtype)
        assert kept(case).bytes == {case.x.data_ptr(): case.x.untyped_storage().nbytes()}
        case.weight.requires_grad_(False)
        case.weight_theta.requires_grad_(False)
        assert kept(case).bytes == {}
        # Dynamic: the input itself, also where only its own gradient is wanted. Scales that the kernels do not form are
        # formed again in backward.
        case = Case(NVFP4, ASYMMETRIC, dtype)
        own = {case.x.data_ptr(): case.x.untyped_storage().nbytes()}
        assert kept(case).bytes == own
        for parameter in (case.weight, case.weight_theta, case.bias):
            parameter.requires_grad_(False)
        assert kept(case).bytes == own
        case.x.requires_grad_(False)
        assert kept(case).bytes == {}


MX4, MX8 = (
    TensorSpec("fp4_e2m1", 4, "group", 32, dynamic=True),
    TensorSpec("fp8_e4m3", 8, "group", 32, dynamic=True, mx=True),
)
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
    with Saved(case) as saved:
        kept = case()
    assert torch.equal(kept, output)
    assert case.x.data_ptr() not in saved.bytes
    assert sum(saved.bytes.values()) == each * case.x.numel()  # groups of 16 and 32: whole bytes
    for name, ours, theirs in zip(
        case.trained(), torch.autograd.grad(kept, list(case.trained().values()), grad), plain, strict=True
    ):
        assert torch.equal(ours, theirs), name
    # Of an input that alone needs a gradient what says where it was clipped; of one that needs none the codes alone.
    for parameter in (case.weight, case.weight_theta, case.bias):
        parameter.requires_grad_(False)
    with Saved(case) as saved:
        case()
    assert sum(saved.bytes.values()) <= (each - spec.bits / 8) * case.x.numel() + 8
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
        with Saved(case) as saved:
            output = case()
        assert set(saved.bytes) <= {case.x.data_ptr(), 0}
        output.sum().backward()
        assert case.x.grad is not None and case.x.grad.shape == case.x.shape


def test_layers_that_read_one_input_keep_it_once(seed):
    """q, k and v with a learned input scale."""
    first, second = Case(FP8, FP8), Case(FP8, FP8)
    second.x, second.weight = first.x, nn.Parameter(torch.randn(5, first.x.shape[-1]))
    second.bias = None
    with Saved(first) as saved:
        saved.parameters |= Saved(second).parameters
        first(), second()
    assert saved.bytes == {first.x.data_ptr(): first.x.untyped_storage().nbytes()}


@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_the_weight_may_be_gone_between_forward_and_backward(schemes, seed):
    """As under ZeRO-3: released after forward (shape [0]), gathered into a new tensor before backward."""
    case = Case(*schemes)
    torch.manual_seed(1)
    reference, _ = gradients(case)
    output = case()
    parameters = [
        t for t in (*case.tensors().values(), case.weight_global, case.weight_zero) if isinstance(t, nn.Parameter)
    ]
    full = [p.data for p in parameters]
    for p in parameters:
        p.data = torch.empty(0)
    for p, data in zip(parameters, full, strict=True):
        p.data = data.clone()
    torch.manual_seed(1)
    ours, _ = gradients(case, output)
    for name, gradient in ours.items():
        assert torch.equal(gradient, reference[name]), name


@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_activation_checkpointing_changes_nothing(schemes, seed):
    """Non-reentrant: bit for bit the gradients without it, with learned and with fixed scales."""
    for learn in (True, False):
        case = Case(*schemes)
        if case.input_theta is not None:
            case.input_theta.requires_grad_(learn)
        torch.manual_seed(1)
        reference, _ = gradients(case)
        output = checkpoint(lambda x: case(), case.x, use_reentrant=False)  # noqa: B023 (called within this iteration)
        torch.manual_seed(1)
        ours, _ = gradients(case, output)
        for name, gradient in ours.items():
            assert torch.equal(gradient, reference[name]), name
