"""A weight with a decoupled scale is the layer of its product with the factors, whose codes have the stored scale."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quant import weights_changed
from quant.autograd import quant_linear
from quant.decoupled import DecoupledScale, part_for_codes, weight_for_codes
from quant.reference import dequantize, quantize
from quant.scale import lsq_factor
from quant.spec import TensorSpec
from tests.unit.quant.kernels.cases import special_values
from tests.unit.quant.kernels.comparing import assert_same
from tests.unit.quant.one_linear import SCHEMES, Case, quantized_linear
from tests.unit.quant.oracle import DTYPES, SPECS, per_scale

WEIGHTS = [one for one in SCHEMES if one[0] is not None]


class DecoupledCase(Case):
    """The operands of a Linear whose weight is frozen and has a decoupled scale."""

    def __init__(self, spec, *arguments, **options):
        super().__init__(spec, *arguments, **options)
        self.weight.requires_grad_(False)
        theta = nn.Parameter((0.3 * torch.randn(self.weight_s0.shape)).to(self.weight.dtype))
        self.decoupled = DecoupledScale(theta, spec)

    def __call__(self):
        return super().__call__(adapter=self.decoupled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schemes", WEIGHTS, ids=str)
def test_it_is_the_layer_of_the_product(schemes, dtype, seed):
    """Bit for bit in the output and in the gradients of input, bias and scales; code_theta's gradient is that of the
    product, by the chain rule in fp64."""
    case = DecoupledCase(*schemes, dtype)
    theta, spec = case.decoupled.code_theta, schemes[0]
    weight = nn.Parameter(case.decoupled.merged(case.weight))
    expected = quant_linear(case.x, weight, case.bias, *case.scales(), case.plan)
    output = case()
    assert torch.equal(output, expected)
    trained = [tensor for tensor in (case.x, case.bias, case.weight_theta, case.input_theta) if tensor is not None]
    grad = torch.randn_like(output)
    *ours, of_theta = torch.autograd.grad(output, [*trained, theta], grad)
    *theirs, of_weight = torch.autograd.grad(expected, [*trained, weight], grad)
    assert all(map(torch.equal, ours, theirs))
    terms = per_scale(of_weight.double() * weight.double(), spec).flatten(0, -2)
    factor = lsq_factor(case.plan.weight_numel, spec)
    error = (of_theta.double().flatten() - factor * terms.sum(-1)).abs()
    eps = terms.shape[-1] * torch.finfo(torch.float32).eps
    bound = factor * eps * terms.abs().sum(-1) + torch.finfo(dtype).eps * (factor * terms.sum(-1)).abs()
    assert bool((error <= bound + torch.finfo(dtype).smallest_normal).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_weight_is_multiplied_and_rounded_once(spec, dtype, seed):
    """By the fp32 number of exp(code_theta); also values that are not finite."""
    case = DecoupledCase(spec, None, dtype)
    theta = case.decoupled.code_theta.detach()
    weight = special_values(case.weight.detach(), 1.0)
    factors = theta.double().exp().float().reshape(-1, 1)
    expected = (per_scale(weight.double(), spec).flatten(0, -2) * factors).float().to(dtype)
    found = per_scale(weight_for_codes(weight, theta, spec), spec).flatten(0, -2)
    assert_same(found, expected)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_weight_that_trains_gets_the_gradient_of_the_product_times_the_factor(spec, seed):
    case = DecoupledCase(spec, None, torch.float32)
    grad = torch.randn_like(case())
    (frozen,) = torch.autograd.grad(case(), [case.decoupled.code_theta], grad)
    case.weight.requires_grad_(True)
    weight = nn.Parameter(case.decoupled.merged(case.weight))
    of_weight, of_theta = torch.autograd.grad(case(), [case.weight, case.decoupled.code_theta], grad)
    (of_product,) = torch.autograd.grad(
        quant_linear(case.x, weight, case.bias, *case.scales(), case.plan), weight, grad
    )
    assert torch.equal(of_weight, weight_for_codes(of_product, case.decoupled.code_theta, spec))
    assert torch.equal(of_theta, frozen)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_stored_scale_alone_decodes(spec, seed):
    """Codes are chosen with scale / factor, and their values are codes times the stored scale."""
    case = DecoupledCase(spec, None, torch.float32)
    x = torch.eye(case.weight.shape[1])
    with torch.no_grad():
        used = quant_linear(x, case.weight, None, *case.scales(), case.plan, adapter=case.decoupled).t()
        scale = case.scale("weight")
        factor = case.decoupled.code_theta.double().exp().float()
        rows = per_scale(case.weight, spec).flatten(0, -2), scale.reshape(-1, 1), spec.of_runs
        zero = None if case.weight_zero is None else case.weight_zero.reshape(-1, 1)
        codes = quantize(rows[0] * factor.reshape(-1, 1), *rows[1:], zero)
        values = dequantize(codes, *rows[1:], torch.float32, zero)
    assert torch.equal(per_scale(used, spec).flatten(0, -2), values)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_part_has_the_bits_of_the_whole(spec, seed):
    shape = (random.randint(1, 40), random.randint(1, 70) if spec.granularity == "block" else 96)
    for stack in ((), (3,)):
        weight = special_values(torch.randn(*stack, *shape).to(random.choice(DTYPES)), 1.0)
        theta = torch.randn(spec.scale_shape(tuple(weight.shape))).to(weight.dtype)
        whole = weight_for_codes(weight, theta, spec).flatten()
        start, stop = sorted(random.sample(range(weight.numel() + 1), 2))
        part = part_for_codes(weight.flatten()[start:stop], start, tuple(weight.shape), theta, spec)
        assert_same(part, whole[start:stop])


def test_a_stack_is_its_experts(seed):
    spec = TensorSpec("fp4_e2m1", 4, "group", 32)
    weight, theta = torch.randn(3, 8, 64), torch.randn(3, 8, 2)
    whole = weight_for_codes(weight, theta, spec)
    assert all(torch.equal(whole[one], weight_for_codes(weight[one], theta[one], spec)) for one in range(3))


def test_without_fake_quant_the_weight_is_itself(seed):
    """Then code_theta has a gradient of zeros: under ZeRO-3 it would otherwise get its last one again."""
    layer = quantized_linear("mxfp4", 48, 64).requires_grad_(False)
    theta = nn.Parameter(torch.randn(48, 2, dtype=torch.bfloat16))
    layer.attach_adapter(DecoupledScale(theta, layer.scheme.weights))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert not torch.equal(layer(x), F.linear(x, layer.weight))
    layer.weight_fake_quant = False
    output = layer(x)
    assert torch.equal(output, F.linear(x, layer.weight))
    output.sum().backward()
    assert theta.grad is not None and not theta.grad.any()


def test_kept_codes_are_those_of_the_product(seed):
    layer = quantized_linear("mxfp4", 48, 64, learn_weight_scale=True).requires_grad_(False)
    theta = nn.Parameter(torch.randn(48, 2, dtype=torch.bfloat16))
    layer.attach_adapter(DecoupledScale(theta, layer.scheme.weights))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    expected = layer(x)
    expected.sum().backward()
    gradient, theta.grad = theta.grad, None
    layer.keeps_weight_codes = True
    for _ in range(2):
        output = layer(x)
        assert torch.equal(output, expected)
    output.sum().backward()
    assert torch.equal(theta.grad, gradient)
    with torch.no_grad():
        theta.neg_()
    weights_changed(layer)
    assert not torch.equal(layer(x), expected)
