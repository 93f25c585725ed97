"""QuantLinear: what its switches do, and that it is F.linear when they are off."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quant.autograd import Plan, quant_linear
from quant.linear import SCALE_PARAMETERS, QuantLinear
from quant.observers import Observer
from quant.reference import absmax_scale, effective_scale, fake_quant, fake_quantize_tokens, inside_range
from quant.scale import Scale
from quant.spec import SCHEMES, Scheme, TensorSpec, get_scheme
from tests.unit.quant.oracle import per_scale

DTYPES = (torch.float32, torch.bfloat16)


def shape_for(scheme: Scheme) -> tuple[int, int]:
    """``(out, in)`` of a weight that the scheme's groups and blocks divide."""
    specs = [spec for spec in (scheme.weights, scheme.activations) if spec is not None]
    return (128, 256) if any(spec.group_size == 128 for spec in specs) else (20, 96)


def make(scheme: Scheme, dtype: torch.dtype, *, learn=True, bias=True) -> tuple[QuantLinear, nn.Linear]:
    """A QuantLinear with measured scales (a little off, so that theta matters), and the Linear it was made from."""
    spec, shape = scheme.weights, shape_for(scheme)
    linear = nn.Linear(shape[1], shape[0], bias=bias).to(dtype)
    absmax = per_scale(linear.weight.detach().float(), spec.scale_shape(shape)).abs().amax(-1)

    def scale(value: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter | None]:
        theta = nn.Parameter((0.2 * torch.randn(value.shape)).to(dtype)) if learn else None
        return nn.Parameter(value, requires_grad=False), theta

    weight_s0, weight_theta = scale(absmax_scale(absmax, spec))
    input_s0 = input_theta = weight_global = weight_zero = None
    if scheme.stored_input is not None:
        input_s0, input_theta = scale(torch.full((1,), 2.0 / scheme.stored_input.qmax))
        if scheme.stored_input.has_global_scale:
            input_s0, input_theta = nn.Parameter(torch.full((1,), 448 * 6 / 2.0), requires_grad=False), None
    if spec.scale_format == "e4m3":
        weight_global = nn.Parameter((448 / weight_s0.max()).reshape(1), requires_grad=False)
    if spec.has_zero_points:
        zero = torch.randint(int(spec.qmin), int(spec.qmax) + 1, weight_s0.shape).float()
        weight_zero = nn.Parameter(zero, requires_grad=False)
    quantized = QuantLinear(
        linear,
        scheme,
        weight=Scale(weight_s0, weight_theta, weight_global, weight_zero),
        input=None if input_s0 is None else Scale(input_s0, input_theta),
        weight_numel=linear.weight.numel() // weight_s0.numel(),
    )
    return quantized, linear


def used_operands(layer: QuantLinear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the reference makes of input and weight, by the switches."""
    spec, weight = layer.scheme.activations, layer.weight.detach()
    if layer.weight_fake_quant:
        weight = fake_quant(weight, layer.weight_scale(), layer.scheme.weights, layer.weight_zero)
    if not layer.input_fake_quant or spec is None:
        return x, weight
    if spec.dynamic:
        return fake_quantize_tokens(x, spec, layer.input_scale()), weight
    return fake_quant(x, layer.input_scale(), spec), weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_every_state_of_the_switches(scheme, dtype, seed):
    """Each operand is the reference's fake quant where its switch is on, and itself where it is not."""
    for learn, bias, weights, inputs in itertools.product((True, False), repeat=4):
        layer, _ = make(scheme, dtype, learn=learn, bias=bias)
        layer.weight_fake_quant, layer.input_fake_quant = weights, inputs and scheme.activations is not None
        x = torch.randn(3, 5, layer.in_features).to(dtype)
        arguments = (layer.weight_s0, layer.weight_theta, scheme.weights, dtype, layer.weight_global)
        weight_scale = effective_scale(*arguments).detach()
        assert torch.equal(layer.weight_scale(), weight_scale) and not layer.weight_scale().requires_grad
        used_x, used_weight = used_operands(layer, x)
        assert torch.equal(layer(x), F.linear(used_x, used_weight, layer.bias))
        # int8 per channel of a bf16 weight differs from it by half a step of 2^-8 of the largest: it shows as well.
        assert torch.equal(used_weight, layer.weight) != weights and torch.equal(used_x, x) != layer.input_fake_quant


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_gradients_of_every_scheme(scheme, seed):
    """In fp32 against the formulas written out: GEMMs of the used operands, masks, and for theta the derivative of the
    scale before rounding times the sum of what each element adds.

    Only the order of fp32 sums differs. Kept codes give the very same bits.
    """
    layer, _ = make(scheme, torch.float32)
    with torch.no_grad():
        layer.weight_theta.uniform_(-0.4, -0.2)  # so that scales of every format clip
    x, grad = torch.randn(30, layer.in_features, requires_grad=True), torch.randn(30, layer.out_features)
    parameters = [x, *(p for p in layer.parameters() if p.requires_grad)]
    results = []
    for layer.keeps_weight_codes in (False, True):
        found = torch.autograd.grad(layer(x), parameters, grad)
        results.append(found)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    names = ["x", *(name for name, p in layer.named_parameters() if p.requires_grad)]
    ours = dict(zip(names, results[0], strict=True))

    used_x, used_weight = used_operands(layer, x.detach())
    spec, scale = scheme.weights, layer.weight_scale()
    by_used_weight, by_used_x = grad.t() @ used_x, grad @ used_weight
    inside = inside_range(layer.weight.detach(), scale, spec, layer.weight_zero)
    assert not inside.all(), "some must be clipped"
    torch.testing.assert_close(ours["weight"], by_used_weight * inside, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours["bias"], grad.sum(0), rtol=1e-4, atol=1e-4)
    if scheme.activations is None:
        torch.testing.assert_close(ours["x"], by_used_x, rtol=1e-4, atol=1e-4)
    else:  # what it clips has a test of its own
        kept = ours["x"] != 0
        assert kept.float().mean() > 0.5
        torch.testing.assert_close(ours["x"][kept], by_used_x[kept], rtol=1e-4, atol=1e-4)

    v = layer.weight.detach() * (1 / expanded(scale, layer.weight))  # the definition's, which counts at qmax
    rounded = used_weight / expanded(scale, layer.weight)
    if spec.dtype == "int":
        terms = torch.where(inside, rounded - v, rounded) * by_used_weight
    else:
        smallest_normal = 2.0**-6 if spec.dtype == "fp8_e4m3" else 1.0
        below = torch.where(v.abs() < smallest_normal, rounded - v, 0.0)
        terms = torch.where(v.abs() > spec.qmax, rounded, below) * by_used_weight
    unrounded = layer.weight_s0 * layer.weight_theta.exp()
    factor = (layer.weight_numel * spec.qmax) ** -0.5
    expected = factor * unrounded * per_scale(terms, tuple(scale.shape)).sum(-1)
    size = factor * unrounded * per_scale(terms.abs() + 1e-3 * by_used_weight.abs(), tuple(scale.shape)).sum(-1)
    assert ((ours["weight_theta"] - expected).abs() <= 1e-3 * size).all()
    assert ours["weight_theta"].any()


def expanded(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The scale of every weight."""
    if scale.dim() == 1:
        return scale.expand(weight.shape)
    return scale.repeat_interleave(weight.shape[0] // scale.shape[0], 0).repeat_interleave(
        weight.shape[1] // scale.shape[1], 1
    )


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
    bias_and_scales = (again.bias, again.scale_of_weight, again.scale_of_input)
    quant_linear(x, again.weight, *bias_and_scales, plan).square().sum().backward()
    # fp32: the factor is a division by another number.
    torch.testing.assert_close(layer.weight_theta.grad, again.weight_theta.grad / 1234**0.5)
    torch.testing.assert_close(layer.input_theta.grad, again.input_theta.grad / 96**0.5)


def test_the_parameters_are_those_of_the_linear():
    """Taken over as objects, under the same names, beside the scales."""
    layer, linear = make(get_scheme("fp8_static"), torch.bfloat16)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert set(dict(layer.named_parameters())) == {"weight", "bias", *SCALE_PARAMETERS} - {
        "weight_global",
        "weight_zero",
    }
    assert layer.training
    linear.eval()
    scales = {"weight": layer.scale_of_weight, "input": layer.scale_of_input}
    assert not QuantLinear(linear, layer.scheme, **scales, weight_numel=1).training
    weight_only, _ = make(get_scheme("w4a16_g32"), torch.bfloat16, learn=False, bias=False)
    assert set(dict(weight_only.named_parameters())) == {"weight", "weight_s0"}
    assert weight_only.input_scale() is None


def test_partitioned_parameters_are_not_looked_at_outside_forward():
    """As ZeRO-3 leaves them: shape [0]. Representation and switches must not need more."""
    layer, _ = make(get_scheme("fp8_static"), torch.bfloat16)
    for parameter in layer.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    assert "in_features=96, out_features=20" in repr(layer) and "fp8_static" in repr(layer)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_no_tokens(scheme, seed):
    """An expert that no token chose: zero gradients for everything that trains, in both states."""
    for on in (True, False):
        layer, _ = make(scheme, torch.bfloat16)
        layer.weight_fake_quant, layer.input_fake_quant = on, on and scheme.activations is not None
        static = scheme.stored_input
        layer.input_observer = Observer(static) if static is not None else None
        x = torch.empty(0, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()
        trained = {"weight", "bias", "weight_theta"} | ({"input_theta"} if scheme.learns_input else set())
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
    """An input scale for a scheme without input quantization would never be used."""
    layer, linear = make(get_scheme("fp8_static"), torch.float32)
    scales = {"weight": layer.scale_of_weight, "input": layer.scale_of_input}
    with pytest.raises(ValueError, match=r"w4a16_g32.* a scale of the input is stored"):
        QuantLinear(linear, get_scheme("w4a16_g32"), **scales, weight_numel=1)
    scales["input"] = None
    with pytest.raises(ValueError, match=r"nvfp4.* whether there is a global scale"):
        QuantLinear(linear, get_scheme("nvfp4"), **scales, weight_numel=1)
    groups = Scheme("mine", TensorSpec("fp8_e4m3", 8, "channel"), TensorSpec("fp8_e4m3", 8, "group", 64, dynamic=True))
    with pytest.raises(ValueError, match=r"in_features 96 is not divisible by the inputs' group_size 64 .* 'mine'"):
        QuantLinear(linear, groups, **scales, weight_numel=1)


def test_the_input_observer_sees_what_the_forward_sees(seed):
    """absmax over all forwards; clipped elements only while inputs are quantized."""
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
    assert clipped.any() and observer.clipped == clipped.sum() and observer.total == second.numel()
    layer.input_observer = None
    layer(100 * first)
    assert observer.total == second.numel()


def test_a_layer_knows_whether_it_was_trained():
    """A forward without gradients, such as a calibration's, trains nothing."""
    layer, _ = make(get_scheme("fp8_static"), torch.float32)
    with torch.no_grad():
        layer(torch.randn(2, 96))
    assert not layer.trained
    layer(torch.randn(2, 96))
    assert layer.trained
