"""QuantLinear: what its switches do, and that it is F.linear when they are off."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quant.function import Plan, quant_linear
from quant.layer import SCALE_PARAMETERS
from quant.linear import QuantLinear
from quant.observe import Observer
from quant.reference import absmax_scale, effective_scale, fake_quant
from quant.spec import Scheme, get_scheme

DTYPES = (torch.float32, torch.bfloat16)
SCHEMES = [get_scheme(name) for name in ("fp8_static", "w4a16_g32", "w2a16_g32")]


def make(scheme: Scheme, dtype: torch.dtype, *, learn=True, bias=True) -> tuple[QuantLinear, nn.Linear]:
    """A QuantLinear with measured scales (a little off, so that theta matters), and the Linear it was made from."""
    linear = nn.Linear(96, 20, bias=bias).to(dtype)
    spec, shape = scheme.weights, (20, 96)
    absmax = linear.weight.detach().float().reshape(-1, spec.elements_per_scale(shape)).abs().amax(1)
    absmax = absmax.reshape(spec.scale_shape(shape))

    def scale(value: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter | None]:
        theta = nn.Parameter((0.2 * torch.randn(value.shape)).to(dtype)) if learn else None
        return nn.Parameter(value, requires_grad=False), theta

    weight_s0, weight_theta = scale(absmax_scale(absmax, spec))
    input_s0 = input_theta = None
    if scheme.activations is not None:
        input_s0, input_theta = scale(torch.full((1,), 2.0 / 448))
    quantised = QuantLinear.from_linear(
        linear,
        scheme,
        weight_s0=weight_s0,
        weight_theta=weight_theta,
        input_s0=input_s0,
        input_theta=input_theta,
        weight_numel=linear.weight.numel() // weight_s0.numel(),
    )
    return quantised, linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_state_of_the_switches(scheme, dtype, seed):
    """Each operand is the reference's fake quant where its switch is on, and itself where it is not."""
    for learn, bias, weights, inputs in itertools.product((True, False), repeat=4):
        layer, _ = make(scheme, dtype, learn=learn, bias=bias)
        inputs = inputs and scheme.activations is not None
        layer.weight_fake_quant, layer.input_fake_quant = weights, inputs
        x = torch.randn(3, 5, 96).to(dtype)
        weight_scale = effective_scale(layer.weight_s0, layer.weight_theta, scheme.weights, dtype).detach()
        assert torch.equal(layer.weight_scale(), weight_scale) and not layer.weight_scale().requires_grad
        used_weight = fake_quant(layer.weight, weight_scale, scheme.weights) if weights else layer.weight
        used_x = fake_quant(x, layer.input_scale(), scheme.activations) if inputs else x
        assert torch.equal(layer(x), F.linear(used_x, used_weight, layer.bias))
        if weights:
            assert not torch.equal(layer(x), F.linear(used_x, layer.weight, layer.bias)), "quantisation must show"


@pytest.mark.parametrize("dtype", DTYPES)
def test_off_is_exactly_the_linear_with_its_gradients(dtype, seed):
    """Same output and gradients bit for bit, nothing for theta; NaN scales (not yet filled) do no harm."""
    layer, linear = make(get_scheme("fp8_static"), dtype)
    layer.weight_fake_quant = layer.input_fake_quant = False
    with torch.no_grad():
        layer.weight_s0.fill_(torch.nan)
        layer.input_s0.fill_(torch.nan)
    x = torch.randn(7, 96).to(dtype).requires_grad_()
    results = []
    for module in (layer, linear):
        output = module(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), [x, linear.weight, linear.bias])))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    layer(x).sum().backward()
    assert not layer.weight_theta.grad.any() and not layer.input_theta.grad.any()


def test_one_operand_at_a_time_trains_only_its_theta(seed):
    """Weight-only and activation-only states leave the other theta with a gradient of zeros."""
    for weights, inputs in ((True, False), (False, True)):
        layer, _ = make(get_scheme("fp8_static"), torch.float32)
        layer.weight_fake_quant, layer.input_fake_quant = weights, inputs
        with torch.no_grad():  # clip some: normal e4m3 numbers that are not clipped leave theta alone
            layer.weight_theta.sub_(1.0)
            layer.input_theta.sub_(1.0)
        layer(torch.randn(4, 96)).square().sum().backward()
        assert bool(layer.weight_theta.grad.any()) == weights
        assert bool(layer.input_theta.grad.any()) == inputs
        assert layer.weight.grad is not None


def test_the_learning_rate_factors(seed):
    """LSQ's 1/sqrt(numel * qmax): numel as told for the weight, and the features of the input, not its tokens."""
    layer, _ = make(get_scheme("fp8_static"), torch.float32)
    layer.weight_numel = 1234
    x = torch.randn(9, 96)
    layer(x).square().sum().backward()
    again, _ = make(get_scheme("fp8_static"), torch.float32)
    again.load_state_dict(layer.state_dict())
    plan = Plan(layer.scheme.weights, layer.scheme.activations, weight_numel=1, input_numel=1)
    quant_linear(x, *again.parameters(), plan).square().sum().backward()
    # fp32: the factor is a division by another number.
    torch.testing.assert_close(layer.weight_theta.grad, again.weight_theta.grad / 1234**0.5)
    torch.testing.assert_close(layer.input_theta.grad, again.input_theta.grad / 96**0.5)


def test_the_parameters_are_those_of_the_linear():
    """Taken over as objects, under the same names, beside the scales."""
    layer, linear = make(get_scheme("fp8_static"), torch.bfloat16)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert set(dict(layer.named_parameters())) == {"weight", "bias", *SCALE_PARAMETERS} - {"weight_global"}
    assert layer.training
    linear.eval()
    scales = {name: getattr(layer, name) for name in SCALE_PARAMETERS}
    assert not QuantLinear.from_linear(linear, layer.scheme, **scales, weight_numel=1).training
    weight_only, _ = make(get_scheme("w4a16_g32"), torch.bfloat16, learn=False, bias=False)
    assert set(dict(weight_only.named_parameters())) == {"weight", "weight_s0"}
    assert weight_only.input_scale() is None


def test_partitioned_parameters_are_not_looked_at_outside_forward():
    """As ZeRO-3 leaves them: shape [0]. Representation and switches must not need more."""
    layer, _ = make(get_scheme("fp8_static"), torch.bfloat16)
    for parameter in layer.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    assert "in_features=96, out_features=20" in repr(layer) and "fp8_static" in repr(layer)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_no_tokens(scheme, seed):
    """An expert that no token chose: zero gradients for everything that trains, in both states."""
    for on in (True, False):
        layer, _ = make(scheme, torch.bfloat16)
        layer.weight_fake_quant, layer.input_fake_quant = on, on and scheme.activations is not None
        layer.input_observer = Observer(scheme.activations) if scheme.activations is not None else None
        x = torch.empty(0, 96, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        trained = {"weight", "bias", "weight_theta"} | ({"input_theta"} if scheme.activations is not None else set())
        for name, parameter in layer.named_parameters():
            assert (parameter.grad is not None) == (name in trained), name
            assert parameter.grad is None or not parameter.grad.any()
        if layer.input_observer is not None:
            assert layer.input_observer.absmax == 0 and layer.input_observer.total == 0


def test_a_module_wide_cast_is_noticed():
    """bf16 would round the frozen scales by up to 0.4%."""
    layer, _ = make(get_scheme("fp8_static"), torch.float32)
    layer.bfloat16()
    with pytest.raises(TypeError, match=r"weight_s0 is torch\.bfloat16, expected torch\.float32"):
        layer(torch.randn(2, 96).bfloat16())


def test_scheme_and_scales_must_agree():
    """An input scale for a scheme without input quantisation would never be used."""
    layer, linear = make(get_scheme("fp8_static"), torch.float32)
    scales = {name: getattr(layer, name) for name in SCALE_PARAMETERS}
    with pytest.raises(ValueError, match="w4a16_g32"):
        QuantLinear.from_linear(linear, get_scheme("w4a16_g32"), **scales, weight_numel=1)


def test_the_input_observer_sees_what_the_forward_sees(seed):
    """absmax over all forwards; clipped elements only while inputs are quantised."""
    layer, _ = make(get_scheme("fp8_static"), torch.bfloat16, learn=False)
    layer.input_observer = observer = Observer(layer.scheme.activations)
    layer.input_fake_quant = False
    first, second = torch.randn(5, 96).bfloat16(), 2 * torch.randn(2, 3, 96).bfloat16()
    layer(first)
    assert observer.absmax.item() == first.abs().max().item() and observer.total == 0
    layer.input_fake_quant = True
    layer(second)
    assert observer.absmax.item() == max(first.abs().max().item(), second.abs().max().item())
    clipped = (second.float() * (1 / layer.input_scale())).abs() > 464
    assert clipped.any() and observer.clipped_fraction() == clipped.sum().item() / second.numel()
    layer.input_observer = None
    layer(100 * first)
    assert observer.total == second.numel()
