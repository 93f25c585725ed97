"""Gradients from fp8 codes: against the formula written out in fp64, and what else a layer may be asked for."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config

from quant import SCHEMES, kernels, prepare, weights_changed
from quant.adapter import Adapter
from quant.experts import StackedLinear
from quant.function import Plan, quant_linear
from quant.fused import fuse
from quant.held import stand_in
from quant.kernels import eager
from quant.reference import effective_scale, fake_quant, fake_quant_backward, inside_range, quantize
from quant.reference_gradient import FORMATS
from quant.scale import Scale, lsq_factor
from quant.spec import TensorSpec
from tests.unit.quant.attention import WIDTH, assert_equal, attention, unshared
from tests.unit.quant.kernels.cases import random_layout, special_values

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
MANTISSA = {"e4m3": 3, "e5m2": 2}
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}  # the subnormal numbers' spacing


def values(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.double() * scale.double()


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Whichever NaN a NaN is."""
    nan = ours.double().isnan()
    if not torch.equal(nan, theirs.double().isnan()):
        return False
    whole = (one.view({1: torch.uint8, 4: torch.int32}[one.itemsize]).masked_fill(nan, 0) for one in (ours, theirs))
    return torch.equal(*whole)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_definition(kind, seed):
    """Off by half a step at most, the largest element not at all, which has the largest code."""
    grad = (torch.randn(random.randint(1, 90), 16 * random.randint(1, 9)) * torch.randn(()).mul(9).exp()).bfloat16()
    codes, transposed, scale = kernels.quantize_gradient(grad, FORMATS[kind])
    assert math.isclose(scale.item(), grad.abs().max().item() / LARGEST[kind], rel_tol=1e-6)
    assert codes.double().abs().max() == LARGEST[kind]
    bound = (grad.double().abs() * 2.0 ** -(MANTISSA[kind] + 1)).clamp(min=SMALLEST[kind] / 2 * scale.item())
    assert ((values(codes, scale) - grad.double()).abs() <= bound * (1 + 1e-6)).all()
    tokens = len(grad)
    assert transposed.shape == (grad.shape[1], -(-tokens // 16) * 16) and not transposed[:, tokens:].double().any()
    assert same_bits(transposed[:, :tokens], codes.t())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", FORMATS)
def test_the_kernels_equal_the_definition(kind, dtype, seed):
    for _ in range(30):
        shape = (random.choice((1, 2, 15, 16, 63, 64, 65, 130)), random.choice((1, 5, 8, 16, 64, 72, 130)))
        grad = random_layout(torch.randn(math.prod(shape)).mul(10 ** random.uniform(-6, 3)).to(dtype), shape)
        if random.random() < 0.3:
            grad = special_values(grad, 0.01)
        ours, theirs = kernels.quantize_gradient(grad, FORMATS[kind]), eager.quantize_gradient(grad, FORMATS[kind])
        assert all(map(same_bits, ours, theirs))
        assert same_bits(kernels.transpose_codes(ours[0]), ours[1])
    s0, theta = torch.rand(1).mul(0.01), random.choice((None, torch.randn(1).to(dtype)))
    arguments = (grad, s0, theta)
    assert all(map(same_bits, torch.ops.deepqat.quantize_transposed(*arguments), eager.quantize_transposed(*arguments)))


def test_the_operators_are_what_torch_is_told(seed):
    grad = torch.randn(33, 24).bfloat16()
    torch.library.opcheck(torch.ops.deepqat.quantize_gradient, (grad, random.choice([*FORMATS.values()])))
    torch.library.opcheck(torch.ops.deepqat.quantize_transposed, (grad, torch.full((1,), 0.01), None, grad))
    torch.library.opcheck(torch.ops.deepqat.transpose_codes, (torch.randint(256, (33, 24), dtype=torch.uint8),))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_gradients_that_are_zeros_empty_or_not_finite(dtype, seed):
    for kind in FORMATS.values():
        codes, transposed, scale = kernels.quantize_gradient(torch.zeros(5, 32, dtype=dtype), kind)
        assert scale == 1 and not codes.double().any() and not transposed.double().any()
        codes, transposed, scale = kernels.quantize_gradient(torch.zeros(0, 32, dtype=dtype), kind)
        assert codes.shape == (0, 32) and transposed.shape == (32, 0) and scale == 1
        for bad in (math.inf, -math.inf, math.nan):
            grad = torch.randn(5, 32).to(dtype)
            grad[random.randrange(5), random.randrange(32)] = bad
            codes, transposed, scale = kernels.quantize_gradient(grad, kind)
            assert scale.isnan() and codes.double().isnan().all() and transposed[:, :5].double().isnan().all()


TURN_OVER = ("deepqat::transpose_codes", "deepqat::quantize_transposed")


# ---- a layer


class Operands:
    """Of one Linear, with scales that clip some weights and inputs."""

    def __init__(self, kind: str, dtype: torch.dtype, *, tokens=None, learned=False):
        tokens = random.choice([(7,), (2, 24), (3, 1, 5), (48,)]) if tokens is None else tokens
        out, width = (16 * random.randint(1, 5) for _ in range(2))
        self.x = torch.randn(*tokens, width).to(dtype).requires_grad_()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(out, width).to(dtype)),
            nn.Parameter(torch.randn(out).to(dtype)),
        )
        self.grad = (torch.randn(*tokens, out) * torch.randn(*tokens, out).exp()).to(dtype)
        self.scales = [torch.tensor([random.uniform(1, 2) / 448]) for _ in range(2)]
        self.thetas = [nn.Parameter(0.2 * torch.randn(1).to(dtype)) for _ in range(2)]
        self.learned = learned
        self.plan = Plan(FP8, FP8, out * width, width, True, gradients=FORMATS[kind])

    def effective(self) -> list[Tensor]:
        """As they are multiplied, in fp32: an element in some thousand lies so near a tie that fp64 rounds it apart."""
        thetas = (self.thetas[0].detach(), self.thetas[1].detach() if self.learned else None)
        return [effective_scale(s, t, FP8, torch.float32) for s, t in zip(self.scales, thetas, strict=True)]

    def gradients(self, plan=None, **options) -> dict[str, Tensor]:
        weight, inputs = (
            Scale(self.scales[0], self.thetas[0]),
            Scale(self.scales[1], self.thetas[1] if self.learned else None),
        )
        output = quant_linear(self.x, self.weight, self.bias, weight, inputs, plan or self.plan, **options)
        wanted = {"x": self.x, "weight": self.weight, "bias": self.bias, "weight theta": self.thetas[0]}
        wanted |= {"input theta": self.thetas[1]} if self.learned else {}
        return dict(zip(wanted, torch.autograd.grad(output, list(wanted.values()), self.grad), strict=True))


def exact(case: Operands, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """In fp64, of Q(dY); each with the sum of magnitudes that rounding is measured by."""
    x, weight = (one.detach().double() for one in (case.x.flatten(0, -2), case.weight))
    weight_scale, input_scale = case.effective()
    whole = case.grad.flatten(0, -2)
    step = whole.abs().max().float() / LARGEST[kind]
    grad = (whole.float() * (1 / step)).clamp(-LARGEST[kind], LARGEST[kind]).to(FORMATS[kind]).double() * step.double()
    used_x, used_weight = fake_quant(x, input_scale, FP8), fake_quant(weight, weight_scale, FP8)
    grad_x, of_input = fake_quant_backward(grad @ used_weight, x, input_scale, FP8, scale_gradient=True)
    grad_weight, of_weight = fake_quant_backward(grad.t() @ used_x, weight, weight_scale, FP8, scale_gradient=True)
    sizes = grad.abs() @ used_weight.abs(), grad.abs().t() @ used_x.abs()
    found = {
        "x": (grad_x.view(case.x.shape), sizes[0].view(case.x.shape)),
        "weight": (grad_weight, sizes[1]),
        "bias": (whole.double().sum(0), whole.double().abs().sum(0)),
        "weight theta": (
            of_weight * weight_scale * lsq_factor(weight.numel(), FP8),
            448 * sizes[1].sum() * weight_scale,
        ),
    }
    if case.learned:
        size = 448 * sizes[0].sum() * input_scale
        found["input theta"] = (of_input * input_scale * lsq_factor(x.shape[-1], FP8), size)
    return found


@pytest.mark.parametrize("learned", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", FORMATS)
def test_gradients_against_the_formula(kind, dtype, learned, seed):
    """Of another gradient, Q(dY), the layer's own ones: products in fp32 are exact but for their sums; a result in bf16
    is rounded once, and theta's is made of those."""
    case = Operands(kind, dtype, learned=learned)
    ours, eps = case.gradients(), torch.finfo(dtype).eps
    for name, (expected, size) in exact(case, kind).items():
        error = (ours[name].double() - expected).abs()
        assert (
            ours[name].dtype == dtype
            and (error <= eps * expected.abs() + (2e-6 + eps * ("theta" in name)) * size).all()
        ), name


@pytest.mark.parametrize("kind", FORMATS)
def test_they_are_those_of_bf16_within_the_formats_precision(kind, seed):
    case = Operands(kind, torch.bfloat16, tokens=(64,))
    ours, plain = case.gradients(), case.gradients(replace(case.plan, gradients=None))
    for name in ("x", "weight"):
        error = (ours[name].double() - plain[name].double()).norm() / plain[name].double().norm()
        assert 0 < error < {"e4m3": 0.05, "e5m2": 0.1}[kind], name
    assert torch.equal(ours["bias"], plain["bias"])


@pytest.mark.parametrize("bad", (math.inf, math.nan))
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_not_finite_reaches_the_gradients(kind, bad, seed):
    """An infinity must not become the largest code: the norm would be finite, and the step would be made."""
    case = Operands(kind, torch.bfloat16, learned=random.random() < 0.5)
    case.grad.flatten()[random.randrange(case.grad.numel())] = bad
    ours = case.gradients()
    assert all(not one.isfinite().all() for one in ours.values())


@pytest.mark.parametrize("tokens", [(0,), (0, 5), (2, 0)], ids=str)
@pytest.mark.parametrize("learned", (False, True))
def test_no_tokens_and_no_gradient_give_zeros(tokens, learned, seed):
    case = Operands("e4m3", torch.bfloat16, tokens=tokens, learned=learned)
    assert all(not one.any() for one in case.gradients().values())
    case = Operands("e5m2", torch.bfloat16, learned=learned)
    case.grad.zero_()
    assert all(not one.any() for one in case.gradients().values())


@pytest.mark.parametrize("learned", (False, True))
def test_recomputed_or_with_codes_that_are_known_the_bits_are_the_same(learned, seed):
    """Codes that are kept, or that stand in for a weight, whose own gradient is then for its owner to complete."""
    case = Operands("e4m3", torch.bfloat16, learned=learned)
    expected = case.gradients()
    scale = case.effective()[0].float()
    codes = quantize(case.weight.detach(), scale, FP8)
    assert_equal(case.gradients(weight_codes=codes), expected)
    assert_equal(case.gradients(replace(case.plan, weight_scale=scale)), expected)
    weight, inputs = Scale(case.scales[0], case.thetas[0]), Scale(case.scales[1], case.thetas[1] if learned else None)
    output = checkpoint(quant_linear, case.x, case.weight, case.bias, weight, inputs, case.plan, use_reentrant=False)
    again = torch.autograd.grad(output, [case.x, case.weight], case.grad)
    assert torch.equal(again[0], expected["x"]) and torch.equal(again[1], expected["weight"])
    stands = nn.Parameter(stand_in(codes.view(torch.uint8), codes.shape, torch.bfloat16))
    output = quant_linear(case.x, stands, case.bias, weight, inputs, case.plan)
    grad_x, grad_weight = torch.autograd.grad(output, [case.x, stands], case.grad)
    inside = inside_range(case.weight.detach(), scale, FP8)
    assert torch.equal(grad_x, expected["x"]) and torch.equal(grad_weight * inside, expected["weight"])


def test_gradients_that_are_views(seed):
    case = Operands("e4m3", torch.bfloat16, tokens=(24,))
    expected, whole = case.gradients(), case.grad
    for view in (whole.t().contiguous().t(), torch.stack([whole, whole], -1)[..., 0]):
        case.grad = view
        assert_equal(case.gradients(), expected)


@pytest.mark.parametrize("recomputed", (False, True))
@pytest.mark.parametrize("learn_input", (False, True))
def test_layers_of_one_input_turn_its_codes_over_once(learn_input, recomputed, seed):
    model, q = attention("fp8_static", fp8_gemm=True, learn_input=learn_input)
    for layer in q.layers.values():
        layer.gradients = torch.float8_e5m2
    x, grad = (torch.randn(22, WIDTH).bfloat16() for _ in range(2))

    def gradients() -> tuple[dict[str, Tensor], int]:
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        output = checkpoint(model, leaf, use_reentrant=False) if recomputed else model(leaf)
        with torch.profiler.profile() as profile:
            output.backward(grad)
        turned = sum(event.count for event in profile.key_averages() if event.key in TURN_OVER)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"x": leaf.grad, **found}, turned

    (together, once), _ = gradients(), unshared(q)
    apart, thrice = gradients()
    assert_equal(apart, together)
    assert thrice - once == 2


# ---- a model


def two_layers() -> nn.Module:
    """Layers that do not share, one of which has a side that no 16 divides."""
    return nn.ModuleDict({"o_proj": nn.Linear(32, 48), "down_proj": nn.Linear(48, 20)}).bfloat16()


def prepared(model: nn.Module, **options):
    options = {"fp8_gemm": True, "fp8_gradients": torch.float8_e4m3fn} | options
    return prepare(model, SCHEMES["fp8_static"], learn_weight_scale=True, learn_input_scale=False, **options)


def test_codes_that_norms_hand_over_have_such_gradients_too(seed):
    """The weights' gradients are off from those in bf16 by what the format is, not more."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=64, num_hidden_layers=1, head_dim=16, **sizes)
    model, ids = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), torch.randint(64, (4, 17))
    q = prepared(model)
    with torch.no_grad():
        for group in (*q.weight_groups, *q.input_groups):
            largest = [q.layers[name].weight.abs().max().item() for name in group.members if group in q.weight_groups]
            group.s0.fill_(max(largest, default=3.0) / 448)
    fuse(model)
    weights = [layer.weight for layer in q.layers.values()]
    ours = torch.autograd.grad(model(ids, labels=ids).loss, weights)
    for layer in q.layers.values():
        layer.gradients = None
    plain = torch.autograd.grad(model(ids, labels=ids).loss, weights)
    for one, other in zip(ours, plain, strict=True):
        assert 0 < (one.double() - other.double()).norm() / other.double().norm() < 0.15


def test_layers_that_simulate_keep_their_gradients():
    model = two_layers()
    q = prepared(model)
    assert q.simulated == ["down_proj"]
    assert model["o_proj"].gradients == torch.float8_e4m3fn and model["down_proj"].gradients is None


def test_fake_quant_that_is_off_has_plain_gradients(seed):
    model = two_layers()
    layer = (prepared(model), model["o_proj"])[1]
    with torch.no_grad():
        for scale in (layer.weight_s0, layer.input_s0):
            scale.fill_(2 / 448)
    weights_changed(model)
    x, grad = torch.randn(6, 32).bfloat16().requires_grad_(), torch.randn(6, 48).bfloat16()
    layer.input_fake_quant = False
    with_codes = torch.autograd.grad(layer(x), x, grad)[0]
    layer.gradients = None
    assert torch.equal(torch.autograd.grad(layer(x), x, grad)[0], with_codes)


def test_what_has_no_such_gradients_is_refused_by_name():
    with pytest.raises(ValueError, match=r"quant\.fp8_gradients: expected null: no layer here multiplies codes"):
        prepared(two_layers(), fp8_gemm=False)
    stack = StackedLinear(nn.Parameter(torch.zeros(2, 16, 32).bfloat16()), (2, 16, 32), ("up_proj",))
    experts = nn.ModuleDict({"experts": nn.ModuleDict({"up": stack})})
    with pytest.raises(ValueError, match=r"quant\.fp8_gradients: .*experts\.up is a stack of experts"):
        prepared(experts)
    model = two_layers()
    prepared(model)
    adapter = Adapter(nn.Parameter(torch.zeros(2, 32)), nn.Parameter(torch.zeros(48, 2)), 1.0)
    with pytest.raises(ValueError, match=r"quant\.fp8_gradients: .*adapters"):
        model["o_proj"].attach_adapter(adapter)
