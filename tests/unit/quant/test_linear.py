"""Modules that replace a Linear or an embedding: switches, kept weight codes, exactly the layer when switched off."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import quant
from quant import Rule, replace_layers
from quant.autograd import Plan, quant_linear
from quant.linear import SCALE_PARAMETERS, QuantEmbedding, QuantLinear
from quant.observers import Observer
from quant.reference import absmax_scale, effective_scale, fake_quant, fake_quant_backward, fake_quantize_tokens
from quant.rotation import rotate_inputs
from quant.scale import Scale
from quant.spec import SCHEMES, Scheme, TensorSpec, get_scheme
from tests.lib.checkpoints import quantize
from tests.lib.scales import fill_scales
from tests.unit.quant.attention import WIDTH, Count, assert_equal, attention, results

pytestmark = pytest.mark.usefixtures("prepared")


DTYPES = (torch.float32, torch.bfloat16)


def make(scheme: Scheme, dtype: torch.dtype, *, learn=True, bias=True) -> tuple[QuantLinear, nn.Linear]:
    """A QuantLinear with measured scales (a little off, so that theta matters), and the Linear it was made from."""
    specs = [spec for spec in (scheme.weights, scheme.activations) if spec is not None]
    out_features, in_features = (128, 256) if any(spec.group_size == 128 for spec in specs) else (20, 96)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype)
    model = nn.ModuleDict({"up_proj": linear})
    q = replace_layers(model, scheme, learn_weight_scale=learn, learn_input_scale=learn and scheme.learns_input)
    fill_scales(q, 2.0)
    with torch.no_grad():
        for group in (*q.weight_groups, *q.input_groups):
            if group.theta is not None:
                group.theta.normal_(std=0.2)
    return model["up_proj"], linear


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
    for tokens in (7, 0):
        layer.zero_grad()
        layer(x[:tokens]).sum().backward()
        assert not layer.weight_theta.grad.any() and not layer.input_theta.grad.any()


def test_one_operand_at_a_time_trains_only_its_theta(seed):
    """The other theta has a gradient of zeros. A forward without gradients, such as a calibration's, trains nothing."""
    for weights, inputs in ((True, False), (False, True)):
        layer, _ = make(get_scheme("fp8_static"), torch.float32)
        layer.weight_fake_quant, layer.input_fake_quant = weights, inputs
        with torch.no_grad():  # clip some: normal e4m3 numbers that are not clipped leave theta alone
            layer.weight_theta.sub_(1.0)
            layer.input_theta.sub_(1.0)
            layer(torch.randn(4, 96))
        assert not layer.trained
        layer(torch.randn(4, 96)).square().sum().backward()
        assert bool(layer.weight_theta.grad.any()) == weights and bool(layer.input_theta.grad.any()) == inputs
        assert layer.weight.grad is not None and layer.trained


def test_the_learning_rate_factors(seed):
    """LSQ's 1/sqrt(numel * qmax): numel as told for the weight, and the features of the input, not its tokens."""
    layer, _ = make(get_scheme("fp8_static"), torch.float32)
    x, thetas = torch.randn(9, 96), (layer.weight_theta, layer.input_theta)
    layer.weight_numel = 1234
    ours = torch.autograd.grad(layer(x).square().sum(), thetas)
    plan = Plan(layer.scheme.weights, layer.scheme.activations, weight_numel=1, input_numel=1)
    output = quant_linear(x, layer.weight, layer.bias, layer.scale_of_weight, layer.scale_of_input, plan)
    theirs = torch.autograd.grad(output.square().sum(), thetas)
    # fp32: the factor is a division by another number.
    torch.testing.assert_close(ours, (theirs[0] / 1234**0.5, theirs[1] / 96**0.5))


def test_the_parameters_are_those_of_the_linear():
    """Taken over as objects, under the same names, beside the scales."""
    layer, linear = make(get_scheme("fp8_static"), torch.bfloat16)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert set(dict(layer.named_parameters())) == {"weight", "bias", *SCALE_PARAMETERS} - {
        "weight_global",
        "weight_zero",
    }
    assert layer.training
    scales = {"weight": layer.scale_of_weight, "input": layer.scale_of_input}
    assert not QuantLinear(linear.eval(), layer.scheme, **scales, weight_numel=1).training
    weight_only, _ = make(get_scheme("w4a16_g32"), torch.bfloat16, learn=False, bias=False)
    assert set(dict(weight_only.named_parameters())) == {"weight", "weight_s0"}
    assert weight_only.input_scale() is None


def test_partitioned_parameters_are_not_looked_at_outside_forward():
    """As ZeRO-3 leaves them: shape [0]; the representation of a layer does not need more."""
    layer, _ = make(get_scheme("fp8_static"), torch.bfloat16)
    for parameter in layer.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    assert "in_features=96, out_features=20" in repr(layer) and "fp8_static" in repr(layer)


def test_what_does_not_fit_is_refused():
    """Scales rounded to bf16; scales that a scheme would never use, or lacks."""
    layer, linear = make(get_scheme("fp8_static"), torch.float32)
    static = {"weight": layer.scale_of_weight, "input": layer.scale_of_input}
    groups = Scheme("mine", TensorSpec("fp8_e4m3", 8, "channel"), TensorSpec("fp8_e4m3", 8, "group", 64, dynamic=True))
    for scheme, scales, words in (
        (get_scheme("w4a16_g32"), static, r"w4a16_g32.* input_s0 is given"),
        (get_scheme("nvfp4"), {**static, "input": None}, r"nvfp4.* weight_global is missing"),
        (groups, {**static, "input": None}, r"in_features 96 is not divisible by the inputs' group_size 64 .* 'mine'"),
    ):
        with pytest.raises(ValueError, match=words):
            QuantLinear(linear, scheme, **scales, weight_numel=1)
    layer.bfloat16().weight_s0.data = layer.weight_s0.data.bfloat16()  # a cast alone leaves it as it is
    with pytest.raises(TypeError, match=r"weight_s0 is torch\.bfloat16, expected torch\.float32"):
        layer(torch.randn(2, 96).bfloat16())


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
    with torch.no_grad():
        layer(100 * first)
    assert observer.total == second.numel()


# ---- weight codes that are kept until the weights change


def keep(q: quant.Quantization, kept: bool = True) -> None:
    for layer in q.layers.values():
        layer.keeps_weight_codes = kept


@pytest.mark.parametrize("scheme", ["fp8_static", "fp8_gemm", "w4a16_g32", "int8_dynamic", "nvfp4", "mxfp4"])
def test_kept_weight_codes(scheme, seed):
    """The same bits, quantized once over forwards and backwards, until the weights change, or theta alone."""
    gemm = scheme == "fp8_gemm"
    model, q = attention("fp8_static" if gemm else scheme, fp8_gemm=gemm, bias=True)
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    sizes = {tuple(layer.weight.shape) for layer in q.layers.values()}
    with Count() as count:
        expected = results(model, x, grad)
    assert sum(map(count.quantized, sizes)) == 2 * len(q.layers), "once in forward, once in backward"
    keep(q)
    with Count() as count:
        for _ in range(3):
            assert_equal(results(model, x, grad), expected)
    assert sum(map(count.quantized, sizes)) == len(q.layers)

    for name, change in (("weight", lambda one: one.mul_(-1)), ("weight_theta", lambda one: one.add_(0.8))):
        with torch.no_grad():
            change(getattr(model.q_proj, name))
        stale = results(model, x, grad)
        if name == "weight":
            assert torch.equal(stale["output"], expected["output"]), "nothing said that it changed: the old codes"
        quant.weights_changed(model)
        changed = results(model, x, grad)
        assert not torch.equal(changed["output"], expected["output"])
        keep(q, False)
        assert_equal(results(model, x, grad), changed)
        keep(q)
        expected = results(model, x, grad)


def test_weight_codes_made_in_inference_mode(seed):
    """An evaluation before the first step must not leave codes that training cannot save."""
    model, q = attention()
    x, grad = torch.randn(6, WIDTH).bfloat16(), torch.randn(6, WIDTH).bfloat16()
    expected = results(model, x, grad)
    keep(q)
    with torch.inference_mode():
        model(x)
    assert_equal(results(model, x, grad), expected)


# ---- a quantized embedding table: rows as a Linear's weight would be, and gradients as its

ROWS, FEATURES = 20, 96


def embedding(scheme: Scheme, dtype: torch.dtype, *, learn: bool = True, padding: int | None = None) -> QuantEmbedding:
    """With scales that clip some, and thetas that are not 0."""
    plain = nn.Embedding(ROWS, FEATURES, padding_idx=padding).to(dtype)
    shape = scheme.weights.scale_shape((ROWS, FEATURES))
    s0 = absmax_scale(plain.weight.detach().float().reshape(*shape, -1).abs().amax(-1), scheme.weights) * 0.8
    theta = nn.Parameter((torch.randn(shape) / 10).to(dtype)) if learn else None
    return QuantEmbedding(plain, scheme, weight=Scale(nn.Parameter(s0, requires_grad=False), theta))


@pytest.mark.parametrize("name", ["w8a16_channel", "w4a16_g32", "w2a16_g32"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("padding", "size"), [(None, (7,)), (3, (3, 5)), (3, (0,))])
def test_values_and_gradients_are_those_of_the_quantized_table(name, dtype, padding, size):
    """The whole table quantized and then looked up is the definition; a row that is read twice gets both gradients."""
    layer = embedding(get_scheme(name), dtype, padding=padding)
    spec = layer.scheme.weights
    ids = torch.randint(ROWS, size)
    ids.view(-1)[:3] = torch.tensor([3, 5, 5])[: ids.numel()]  # the padding, and a row that is read twice
    scale = effective_scale(layer.weight_s0, layer.weight_theta.detach(), spec, dtype)
    table = fake_quant(layer.weight.detach(), scale, spec)
    out = layer(ids)
    assert out.dtype == dtype and torch.equal(out, F.embedding(ids, table))
    assert torch.equal(layer.weight_scale(), scale)

    grad = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    out.backward(grad)
    of_rows = torch.zeros(ROWS, FEATURES, dtype=torch.float64).index_add_(
        0, ids.flatten(), grad.double().flatten(0, -2)
    )
    inside, _ = fake_quant_backward(torch.ones_like(table), layer.weight.detach(), scale, spec, scale_gradient=False)
    expected = of_rows * inside.double()
    padded = torch.arange(ROWS) == (-1 if layer.padding_idx is None else layer.padding_idx)
    expected[padded] = 0
    # A row is read a few times: a few roundings of the sum in dtype.
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=bound, atol=bound)
    _, of_scale = fake_quant_backward(of_rows, layer.weight.detach().double(), scale, spec, scale_gradient=True)
    unrounded = layer.weight_s0.double() * layer.weight_theta.detach().double().exp()
    numel = FEATURES if spec.group_size is None else spec.group_size
    of_theta = of_scale.double() * unrounded / math.sqrt(numel * spec.qmax)
    torch.testing.assert_close(layer.weight_theta.grad.double(), of_theta, rtol=bound, atol=bound)

    # Off it is the table, and theta gets zeros: without a gradient it would be stepped with its last one under ZeRO-3.
    layer.weight_fake_quant = False
    layer.zero_grad()
    out = layer(ids)
    assert torch.equal(out, F.embedding(ids, layer.weight))
    out.sum().backward()
    assert torch.equal(layer.weight_theta.grad, torch.zeros_like(layer.weight_theta))
    with torch.no_grad():
        assert torch.equal(layer(ids), out)


def tied_ends(*schemes: tuple[str, str]) -> tuple[nn.Sequential, quant.Quantization]:
    """An embedding (0) and a Linear (1) with its weight, quantized with the schemes of their names."""
    model = nn.Sequential(nn.Embedding(ROWS, FEATURES), nn.Linear(FEATURES, ROWS, bias=False))
    model[1].weight = model[0].weight
    named = {name: get_scheme(scheme) for name, scheme in schemes}
    return model, quantize(model, named=named)


def test_a_tied_head_has_the_scale_of_the_embedding_and_adds_its_gradients():
    model, quantization = tied_ends(("0", "w4a16_g32"), ("1", "w4a16_g32"))
    (group,) = quantization.weight_groups
    with pytest.raises(ValueError, match="1 has the embeddings' weight"):
        rotate_inputs(quantization, ["1"], 32)
    assert (group.owner, group.members) == ("0", ["0", "1"]) and quantization.ties_layers
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.weight_s0", "0.weight_theta"]
    quantization.set_fake_quant(True, False)
    rows, head = model[0](torch.randint(ROWS, (5,))), model[1](torch.randn(3, FEATURES))
    leaves = model[0].weight, group.theta
    both, of_rows, of_head = (
        torch.autograd.grad(loss, leaves, retain_graph=True)
        for loss in (rows.sum() + head.sum(), rows.sum(), head.sum())
    )
    for one, first, second in zip(both, of_rows, of_head, strict=True):
        assert first.any() and second.any()
        torch.testing.assert_close(one, first + second)


@pytest.mark.parametrize("schemes", ["w4a16_g32 ", " w4a16_g32", "w4a16_g32 w8a16_g32"])
def test_a_tied_weight_has_one_scheme(schemes):
    with pytest.raises(ValueError, match=r"0 and 1 share one weight; leave . unquantized"):
        tied_ends(*((name, scheme) for name, scheme in zip("01", schemes.split(" "), strict=True) if scheme))


def test_it_is_prepared_by_name_only():
    """A rule is for Linears; what an embedding cannot have is refused by its name."""

    def prepared(scheme, table: nn.Embedding | None = None, **options):
        model = nn.Sequential(table or nn.Embedding(ROWS, FEATURES), nn.Linear(FEATURES, 4))
        return model, replace_layers(model, scheme, learn_weight_scale=True, learn_input_scale=False, **options)

    int4 = get_scheme("w4a16_g32")
    assert list(prepared(None, rules=[Rule(int4, layers=".*")])[1].layers) == ["1"]
    table = nn.Embedding(ROWS, FEATURES)
    model, quantization = prepared(get_scheme("fp8_static"), table, named={"0": get_scheme("w8a16_channel")})
    assert list(quantization.layers) == [group.owner for group in quantization.weight_groups] == ["0", "1"]
    assert model[0] is quantization.layers["0"] and model[0].weight is table.weight
    assert quantization.weight_groups[0].s0 is model[0].weight_s0
    per_tensor = Scheme("t", TensorSpec("int", 8, "tensor"))
    for scheme in (get_scheme("fp8_static"), get_scheme("nvfp4"), get_scheme("w8a16_asym"), per_tensor):
        with pytest.raises(ValueError, match=r"0: scheme .* for embeddings, symmetric integer weights"):
            prepared(None, named={"0": scheme})
    with pytest.raises(ValueError, match="does more than look up"):
        prepared(None, nn.Embedding(4, 32, max_norm=1.0), named={"0": int4})
