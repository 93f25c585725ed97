"""quant_linear: its output bit for bit, its gradients by those of the reference, and what it keeps for backward."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from quant.reference import fake_quant_backward, inside_range
from quant.spec import TensorSpec
from tests.lib.saved import kept_for_backward, storages
from tests.unit.quant.one_linear import ASYMMETRIC, FP8, INT4, MX8, NVFP4, SCHEMES, Case, gradients


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_every_dtype_against_the_formulas_written_out(schemes, dtype, seed):
    """The output bit for bit that of F.linear of the fake-quantized operands; gradients by GEMMs in the model's dtype,
    with masks and gradients of scales by the reference. The input scale learns (the input is kept) or not (its codes
    are kept)."""
    for learn, bias in itertools.product((True, False), (True, False)):
        case = Case(*schemes, dtype, bias=bias)
        if case.input_theta is not None:
            case.input_theta.requires_grad_(learn)
        output = case()
        x, weight = (operand.requires_grad_() for operand in case.operands())
        expected_output = F.linear(x, weight, None if case.bias is None else case.bias.detach())
        assert output.dtype == dtype and torch.equal(output, expected_output)
        ours, grad = gradients(case, output)
        expected_output.backward(grad)
        for name, operand, kind in (("x", x, "input"), ("weight", weight, "weight")):
            expected, spec = operand.grad, getattr(case.plan, kind)
            if spec is not None:
                scale, zero = None if spec.dynamic else case.scale(kind), case.weight_zero if kind == "weight" else None
                expected = expected * inside_range(getattr(case, name).detach(), scale, spec, zero)
            assert ours[name].dtype == dtype
            # The same products, rounded once to the dtype; the order of fp32 sums may differ.
            torch.testing.assert_close(ours[name], expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
            theta = getattr(case, f"{kind}_theta")
            if theta is not None and theta.requires_grad:
                tensor, s0 = getattr(case, name).detach(), getattr(case, f"{kind}_s0")
                _, of_scale = fake_quant_backward(operand.grad, tensor, scale, spec, zero, scale_gradient=True)
                factor = 1 / math.sqrt(getattr(case.plan, f"{kind}_numel") * spec.qmax)  # of LSQ
                expected = of_scale.double() * s0 * theta.detach().double().exp() * factor
                found = ours[f"{kind}_theta"]
                assert found.dtype == dtype and found.shape == theta.shape
                # Sums of some 1,000 terms of both signs, and as above.
                bound = 4 * torch.finfo(dtype).eps + 1e-4
                torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound * expected.abs().max())
        if bias:
            torch.testing.assert_close(ours["bias"], grad.reshape(-1, grad.shape[-1]).sum(0))


@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_only_what_trains_gets_a_gradient(schemes, seed):
    """For every choice of frozen tensors, the rest is as if nothing were frozen."""
    case = Case(*schemes)
    everything = case.trained()
    torch.manual_seed(1)
    reference, _ = gradients(case)
    for chosen in itertools.product((True, False), repeat=len(everything)):
        for tensor, trains in zip(everything.values(), chosen, strict=True):
            tensor.requires_grad_(trains)
        if not any(chosen):
            assert not case().requires_grad
            continue
        torch.manual_seed(1)
        some, _ = gradients(case)
        assert some.keys() == {name for name, trains in zip(everything, chosen, strict=True) if trains}
        for name, gradient in some.items():
            assert torch.equal(gradient, reference[name]), name


def test_a_frozen_scale_is_not_trained_in_silence(seed):
    """s0 has no gradient; asking for one is a mistake to hear about."""
    case = Case(FP8, FP8)
    case.weight_s0.requires_grad_()
    with pytest.raises(ValueError, match="train the thetas"):
        case()


@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_no_tokens_give_zero_gradients(schemes, seed):
    """Not None: every rank must take part in the reduction of an expert's gradient."""
    for tokens in ((0,), (0, 5), (2, 0)):
        case = Case(*schemes, tokens=tokens)
        output = case()
        assert output.shape == (*tokens, case.weight.shape[0])
        for name, gradient in gradients(case, output)[0].items():
            assert gradient is not None and gradient.shape == getattr(case, name).shape
            assert not gradient.any(), name


def test_operands_that_are_not_contiguous_and_autocast(seed):
    """Expanded (from sum) and transposed gradients and inputs equal contiguous ones; a region of autocast around the
    model does not lower the GEMM."""
    case = Case(FP8, FP8, tokens=(4, 3))
    trained = list(case.trained().values())
    grad = torch.randn(3, 4, case.weight.shape[0]).transpose(0, 1)
    for strided in (grad, torch.ones(()).expand(4, 3, case.weight.shape[0])):
        reference = torch.autograd.grad(case(), trained, strided.contiguous())
        for ours, theirs in zip(torch.autograd.grad(case(), trained, strided), reference, strict=True):
            assert torch.equal(ours, theirs)
    output = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(case(), output)
    case.x = case.x.detach().transpose(0, 1).contiguous().transpose(0, 1)
    assert not case.x.is_contiguous()
    torch.testing.assert_close(case(), output)  # another layout may take another GEMM


def test_values_that_are_not_finite(seed):
    """A NaN input poisons its token and the weight's gradient, but has no gradient itself; Inf only clips."""
    for learn in (True, False):
        case = Case(FP8, FP8, tokens=(3,), bias=False)
        case.input_theta.requires_grad_(learn)
        with torch.no_grad():
            case.x[1, 2] = torch.inf
            case.x[2, 4] = torch.nan
        output = case()
        assert output[:2].isfinite().all() and output[2].isnan().all()
        ours, _ = gradients(case, output)
        assert ours["x"].isfinite().all()
        assert ours["x"][1, 2] == 0 and ours["x"][2, 4] == 0
        inside = inside_range(case.weight.detach(), case.scale("weight"), FP8)
        assert torch.equal(ours["weight"].isnan().nonzero()[:, 0], inside[:, 4].nonzero()[:, 0])
        assert ours["weight"][:, :4].isfinite().all()
        if learn:
            assert ours["input_theta"].isfinite().all()


# ---- tensors kept for backward

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
)
def test_bytes_kept_for_backward(schemes, frozen, expected, dtype, seed):
    """Bytes of n inputs, counted in storage: a view of a larger tensor counts as that tensor."""
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
