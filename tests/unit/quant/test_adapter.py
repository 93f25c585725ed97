"""A weight with an adapter: forward, gradients against the formula written out, and what is kept for backward."""

import itertools
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from quant import get_scheme, prepare, weights_changed
from quant.adapter import Adapter, AdapterBeside, merge
from quant.function import quant_linear
from quant.kernels import eager
from quant.reference import fake_quantize_tokens_backward, inside_range
from quant.scale import Scale
from tests.unit.quant.one_linear import SCHEMES, Case


class AdaptedCase(Case):
    """The operands of a Linear whose weight is frozen and has an adapter of a random rank."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.weight.requires_grad_(False)
        (out, in_), dtype = self.weight.shape, self.weight.dtype
        rank = random.randint(1, min(out, in_))
        lora_a, lora_b = (nn.Parameter(0.3 * torch.randn(*size).to(dtype)) for size in ((rank, in_), (out, rank)))
        self.adapter = Adapter(lora_a, lora_b, random.choice([0.5, 2.0, 0.3]))

    def tensors(self):
        return {**super().tensors(), "lora_a": self.adapter.lora_a, "lora_b": self.adapter.lora_b}

    def scales(self):
        weight = None
        if self.weight_s0 is not None:
            weight = Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)
        return weight, None if self.input_s0 is None else Scale(self.input_s0, self.input_theta)

    def __call__(self):
        return quant_linear(
            self.x, self.weight, self.bias, *self.scales(), self.plan, apply=partial(self.adapter.apply, True)
        )

    def merged(self):
        """The same Linear with the sum as the weight, which trains."""
        weight = nn.Parameter(self.adapter.merged(self.weight))
        return weight, quant_linear(self.x, weight, self.bias, *self.scales(), self.plan)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_it_is_the_layer_of_the_sum(schemes, dtype, seed):
    """Bit for bit in the output and in the gradients of all but the adapter, whose gradients are those of the sum's
    where scales learn; see test_thin for where they do not."""
    for learn in (True, False):
        case = AdaptedCase(*schemes, dtype)
        for theta in (case.weight_theta, case.input_theta):
            if theta is not None:
                theta.requires_grad_(learn)
        weight, expected = case.merged()
        output = case()
        assert torch.equal(output, expected)
        grad = torch.randn_like(output)
        trained = {name: tensor for name, tensor in case.trained().items() if not name.startswith("lora")}
        ours = torch.autograd.grad(output, [*trained.values(), case.adapter.lora_a, case.adapter.lora_b], grad)
        theirs = torch.autograd.grad(expected, [*trained.values(), weight], grad)
        for name, mine, other in zip(trained, ours, theirs, strict=False):
            assert torch.equal(mine, other), name
        if not learn or case.weight_theta is None:
            continue
        *_, grad_a, grad_b = ours
        lora_a, lora_b, of_sum = case.adapter.lora_a.detach(), case.adapter.lora_b.detach(), theirs[-1]
        assert torch.equal(grad_a, (lora_b.t() @ of_sum) * case.adapter.scaling)
        assert torch.equal(grad_b, (of_sum @ lora_a.t()) * case.adapter.scaling)


@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_gradients_against_the_formula_in_fp64(schemes, seed):
    """Autograd of ``Q(x) @ Q(W + s B A).t()`` in fp64, where Q is straight-through inside its range and 0 outside."""
    case = AdaptedCase(*schemes)
    grad = torch.randn_like(output := case())
    names = ("x", "lora_a", "lora_b")
    ours = dict(zip(names, torch.autograd.grad(output, [case.tensors()[name] for name in names], grad), strict=True))
    base, case.weight = case.weight, nn.Parameter(case.adapter.merged(case.weight))  # for operands() and scale()
    used_x, used_weight = (operand.double() for operand in case.operands())
    x, lora_a, lora_b = (case.tensors()[name].detach().double().requires_grad_() for name in names)
    weight = base.double() + case.adapter.scaling * lora_b @ lora_a

    def straight_through(value, used, kind):
        spec, tensor = getattr(case.plan, kind), case.x if kind == "input" else case.weight
        if spec is None:
            return value
        zero = case.weight_zero if kind == "weight" else None
        inside = value * inside_range(tensor.detach(), case.scale(kind), spec, zero).double()
        return inside + (used - inside).detach()

    dynamic = case.plan.input is not None and case.plan.input.dynamic
    of_x = used_x.requires_grad_() if dynamic else straight_through(x, used_x, "input")
    product = F.linear(of_x, straight_through(weight, used_weight, "weight"), case.bias.detach().double())
    values = torch.autograd.grad(product, [used_x if dynamic else x, lora_a, lora_b], grad.double())
    expected = dict(zip(names, values, strict=True))
    if dynamic:  # the range moves with the input, which test_tokens holds against finite differences
        expected["x"] = fake_quantize_tokens_backward(expected["x"].float(), case.x.detach(), case.plan.input)
    for name in names:
        # fp32 sums of up to 96 products, of which the largest is as large as the largest gradient.
        tolerance = 1e-5 * (1 + expected[name].abs().max().item())
        torch.testing.assert_close(ours[name].double(), expected[name].double(), rtol=1e-4, atol=tolerance, msg=name)


def test_what_trains_decides_what_gets_a_gradient(seed):
    case = AdaptedCase(*SCHEMES[0])
    adapter, grad = case.adapter, None
    for trains_a, trains_b in itertools.product((True, False), repeat=2):
        adapter.lora_a.requires_grad_(trains_a)
        adapter.lora_b.requires_grad_(trains_b)
        adapter.lora_a.grad = adapter.lora_b.grad = None
        output = case()
        grad = torch.randn_like(output) if grad is None else grad
        output.backward(grad)
        assert (adapter.lora_a.grad is not None, adapter.lora_b.grad is not None) == (trains_a, trains_b)
        assert case.weight.grad is None


@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_backward_keeps_parameters_and_the_input_alone(schemes, seed):
    """No tensor as large as the weight outlives the forward but the weight itself: ZeRO-3 could not let it go."""
    case = AdaptedCase(*schemes, tokens=(2,))
    own = {id(tensor) for tensor in (*case.tensors().values(), case.weight_global, case.weight_zero)}
    kept = []

    def keep(tensor):
        if id(tensor) not in own:
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        case()
    assert all(tensor.numel() <= case.x.numel() for tensor in kept), [tuple(tensor.shape) for tensor in kept]


@pytest.mark.parametrize("schemes", [one for one in SCHEMES if one[0] is not None][:7], ids=str)
def test_a_stack_is_its_experts(schemes, seed):
    """Outputs bit for bit those of the layer of the sums, and gradients of each expert's adapter from its sum's; the
    second has no rows."""
    weights = schemes[0]
    first, rank = AdaptedCase(*schemes, tokens=(8,), bias=False), random.randint(1, 3)
    shape = (3, *first.weight.shape)
    lora_a, lora_b = (nn.Parameter(0.3 * torch.randn(3, *size)) for size in ((rank, shape[2]), (shape[1], rank)))
    weight = nn.Parameter(torch.randn(shape), requires_grad=False)
    adapter = Adapter(lora_a, lora_b, 0.7)
    merged = nn.Parameter(adapter.merged(weight))
    for expert in range(3):
        assert torch.equal(merged[expert], merge(weight[expert], lora_a[expert], lora_b[expert], 0.7))
    size = weights.scale_shape(shape)
    scale = Scale(
        nn.Parameter(torch.rand(size) / 50 + 0.02, requires_grad=False),
        nn.Parameter(torch.zeros(size)),
        None if weights.scale_format != "e4m3" else nn.Parameter(torch.full((3,), 100.0), requires_grad=False),
        None if not weights.has_zero_points else nn.Parameter(torch.zeros(size), requires_grad=False),
    )
    x = torch.randn(8, shape[2], requires_grad=True)
    offsets = torch.tensor([3, 3, 8], dtype=torch.int32)
    arguments = (None, scale, first.scales()[1], first.plan)
    expected = quant_linear(x, merged, *arguments, offsets=offsets)
    output = quant_linear(x, weight, *arguments, offsets=offsets, apply=partial(adapter.apply, True))
    assert torch.equal(output, expected)
    grad = torch.randn_like(output)
    of_x, of_theta, of_sum = torch.autograd.grad(expected, [x, scale.theta, merged], grad)
    mine_x, mine_theta, of_a, of_b = torch.autograd.grad(output, [x, scale.theta, lora_a, lora_b], grad)
    assert torch.equal(mine_x, of_x) and torch.equal(mine_theta, of_theta)
    for expert in range(3):
        a, b, one = (tensor[expert].detach().double() for tensor in (lora_a, lora_b, of_sum))
        torch.testing.assert_close(of_a[expert].double(), 0.7 * b.t() @ one, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(of_b[expert].double(), 0.7 * one @ a.t(), rtol=1e-4, atol=1e-4)
    assert not of_a[1].any() and not of_b[1].any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_the_sum_is_the_same_for_any_rows(dtype, seed):
    """Each row by itself, turned memory, another number of threads, without compiled kernels, and the exact sum rounded
    once. With a factor of two bits the sums of half precision are exact in fp64, so that none rounds by its order."""
    out, in_, rank = random.randint(1, 200), random.randint(1, 80), random.randint(1, 20)
    weight, lora_b, lora_a = (torch.randn(*size).to(dtype) for size in ((out, in_), (out, rank), (rank, in_)))
    whole = merge(weight, lora_a, lora_b, 0.75)
    exact = weight.double() + 0.75 * (lora_b.double() @ lora_a.double())
    assert whole.dtype == dtype and torch.equal(whole, exact.to(dtype))
    rows = [merge(weight[row : row + 1], lora_a, lora_b[row : row + 1], 0.75) for row in range(out)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(merge(weight.t().contiguous().t(), lora_a, lora_b, 0.75), whole)
    assert merge(weight[:0], lora_a, lora_b[:0], 0.75).shape == (0, in_)
    assert torch.equal(eager.merge(weight, lora_a, lora_b, 0.75), whole)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(merge(weight, lora_a, lora_b, 0.75), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_sum_in_bf16_is_that_in_fp64(seed):
    """Processors that multiply bf16 sum in fp32 where that says what to round to: over sizes of the adapter from none
    to far larger than the weight, sums that nearly cancel or lie between two numbers, and both ends of bf16."""
    out, in_ = 4 * random.randint(1, 9) + random.randint(0, 3), 32 * random.randint(1, 4) + random.randint(0, 31)
    ends = torch.tensor([0.0, -0.0, 1e-40, -9e-39, 1.2e-38, 3e38, 1e-30])
    for size in (0.0, 1e-38, 1e-12, 1e-4, 1.0, 1e6, 1e30):
        for scaling in (2.0, -0.3, 32 / 7, 1e-7, 3e6):
            rank = random.randint(1, 40)
            weight, lora_a, lora_b = torch.randn(out, in_), torch.randn(rank, in_), size * torch.randn(out, rank)
            weight[random.randrange(out)] = 0
            lora_b[random.randrange(out)] = 0
            for one in (weight, lora_a, lora_b):
                places = torch.randint(one.numel(), (3,))
                one.view(-1)[places] = ends[torch.randint(len(ends), (3,))]
            weight, lora_a, lora_b = (one.bfloat16() for one in (weight, lora_a, lora_b))
            if random.random() < 0.5:  # half-way between two numbers, and next to it
                product = scaling * (lora_b.double() @ lora_a.double())
                weight = (-product * random.choice([1, 1 + 2**-9])).float().bfloat16()
            found = merge(weight, lora_a, lora_b, scaling).double()
            # fp64 adds in some order, which shows where terms cancel, or in an exact tie.
            whole = weight.double() + scaling * (lora_b.double() @ lora_a.double())
            terms = weight.double().abs() + abs(scaling) * (lora_b.double().abs() @ lora_a.double().abs())
            least, most = ((whole + side * 2**-48 * terms).float().bfloat16().double() for side in (-1, 1))
            assert bool(((least <= found) & (found <= most) | ~whole.isfinite()).all())


def test_a_sum_with_what_is_not_finite_or_does_not_fit(seed):
    """NaN and Inf come through where they are; shapes are checked."""
    weight, lora_a, lora_b = torch.randn(5, 40), torch.randn(2, 40), torch.randn(5, 2)
    weight[1, 3], weight[2, 4], lora_a[0, 7] = torch.nan, torch.inf, -torch.inf
    whole, expected = merge(weight, lora_a, lora_b, 2.0), eager.merge(weight, lora_a, lora_b, 2.0)
    assert whole[1, 3].isnan() and whole[2, 4] == torch.inf and not whole[:, 7].isfinite().any()
    torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)
    for wrong in ((lora_a[:, :-1], lora_b), (lora_a, lora_b[:-1]), (lora_a[:1], lora_b), (lora_a[None], lora_b[None])):
        with pytest.raises(RuntimeError, match="of a weight"):
            merge(weight, *wrong, 2.0)
    with pytest.raises(RuntimeError, match="a weight is"):
        merge(weight.double(), lora_a.double(), lora_b.double(), 2.0)


def adapted_layer(scheme: str, dtype: torch.dtype = torch.bfloat16):
    """A quantised Linear with scales and an adapter, and what it computes without one."""
    model = nn.Sequential(nn.Linear(64, 48, dtype=dtype)).requires_grad_(False)
    quantization = prepare(model, get_scheme(scheme), exempt=(), learn_weight_scale=False, learn_input_scale=False)
    layer = quantization.layers["0"]
    layer.weight_s0.data.fill_(0.01)
    if layer.input_s0 is not None:
        layer.input_s0.data.fill_(0.02)
    lora_a, lora_b = torch.randn(4, 64, dtype=dtype) / 8, torch.randn(48, 4, dtype=dtype) / 40
    layer.attach_adapter(Adapter(nn.Parameter(lora_a), nn.Parameter(lora_b), 2.0))
    return layer


@pytest.mark.parametrize("scheme", ("fp8_static", "w4a16_g32", "w2a16_g32", "fp8_dynamic", "8da4w"))
def test_a_layer_without_fake_quant_multiplies_the_sum(scheme, seed):
    layer = adapted_layer(scheme)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    layer.weight_fake_quant = layer.input_fake_quant = False
    assert torch.equal(layer(x), F.linear(x, layer.merged_weight(), layer.bias))
    assert not torch.equal(layer.merged_weight(), layer.weight)


def test_kept_codes_are_those_of_the_sum(seed):
    """Made once, and again when the adapter has changed; the gradients are as without them."""
    layer = adapted_layer("w4a16_g32")
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = layer(x)
    trained = [x, layer.lora_a, layer.lora_b]
    grad = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, trained, grad)
    layer.keeps_weight_codes = True
    for _ in range(2):
        output = layer(x)
        assert torch.equal(output, expected)
        for mine, other in zip(torch.autograd.grad(output, trained, grad), gradients, strict=True):
            assert torch.equal(mine, other)
    with torch.no_grad():
        layer.lora_b.mul_(-3)
    weights_changed(layer)
    changed = layer(x)
    layer.keeps_weight_codes = False
    assert torch.equal(changed, layer(x)) and not torch.equal(changed, expected)


def test_checkpointed_and_without_tokens(seed):
    layer = adapted_layer("fp8_static")
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    trained = [x, layer.lora_a, layer.lora_b]
    direct = torch.autograd.grad(layer(x).sum(), trained)
    again = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), trained)
    assert all(torch.equal(one, other) for one, other in zip(direct, again, strict=True))
    layer(x[:0]).sum().backward()
    assert not layer.lora_a.grad.any() and not layer.lora_b.grad.any()


@pytest.mark.parametrize("dropout", (0.0, 0.3, 0.9))
def test_dropout_is_on_the_input_of_a_alone(dropout, seed):
    """As peft defines it, in training mode alone, and the same where activation checkpointing computes the layer again:
    what is recomputed has the gradients of what was computed."""
    quantization = prepare(
        nn.Sequential(nn.Linear(64, 48)), get_scheme("w4a16_g32"), learn_weight_scale=False, learn_input_scale=False
    )
    (layer,) = quantization.layers.values()
    layer.weight_s0.data.fill_(0.02)
    lora_a, lora_b = (nn.Parameter(torch.randn(*size)) for size in ((4, 64), (48, 4)))
    layer.attach_adapter(AdapterBeside(lora_a, lora_b, 0.5, dropout))
    x = torch.randn(7, 64, requires_grad=True)
    base = F.linear(x, layer.quantised_weight(), layer.bias)

    torch.manual_seed(seed)
    seen = F.dropout(x, dropout)
    assert ((seen == 0).any() and not (seen == 0).all()) if dropout else torch.equal(seen, x)
    torch.manual_seed(seed)
    output = layer(x)
    assert torch.equal(output, base + F.linear(F.linear(seen, lora_a), lora_b) * 0.5)
    trained, direction = (x, lora_a, lora_b), torch.randn_like(output)
    gradients = torch.autograd.grad(output, trained, direction)
    torch.manual_seed(seed)
    again = checkpoint(layer, x, use_reentrant=False)
    torch.manual_seed(seed + 1)  # what comes between forward and backward does not show
    for own, expected in zip(torch.autograd.grad(again, trained, direction), gradients, strict=True):
        assert torch.equal(own, expected)

    layer.eval()
    assert torch.equal(layer(x), base + F.linear(F.linear(x, lora_a), lora_b) * 0.5)
