"""A weight with an adapter is the layer of their sum, or of its product with the factors of a decoupled scale, whose
codes have the stored scale: forward, gradients, and what is kept for backward."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quant import adapters, weights_changed
from quant.adapters import Adapter, AdapterBeside, DecoupledScale, merge, part_for_codes, weight_for_codes
from quant.autograd import Plan, quant_linear
from quant.reference import dequantize, fake_quant, quantize
from quant.scale import Scale, lsq_factor
from quant.spec import TensorSpec
from tests.lib.saved import kept_for_backward
from tests.unit.quant.kernels.cases import special_values
from tests.unit.quant.kernels.comparing import assert_same
from tests.unit.quant.one_linear import FP8, SCHEMES, Case, quantized_linear
from tests.unit.quant.oracle import DTYPES, SPECS, per_scale


def random_adapter(rank: int, *shape: int, dtype: torch.dtype = torch.float32, scaling: float = 0.7) -> Adapter:
    """One of a weight ``[out, in]``, or of each in a stack ``[E, out, in]``."""
    *stack, out, in_ = shape
    sizes = (*stack, rank, in_), (*stack, out, rank)
    return Adapter(*(nn.Parameter(0.3 * torch.randn(size).to(dtype)) for size in sizes), scaling)


class AdaptedCase(Case):
    """The operands of a Linear whose weight is frozen and has an adapter of a random rank."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.weight.requires_grad_(False)
        shape, dtype = self.weight.shape, self.weight.dtype
        rank, scaling = random.randint(1, min(shape)), random.choice([0.5, 2.0, 0.3])
        self.adapter = random_adapter(rank, *shape, dtype=dtype, scaling=scaling)

    def tensors(self):
        return {**super().tensors(), "lora_a": self.adapter.lora_a, "lora_b": self.adapter.lora_b}

    def __call__(self):
        return super().__call__(adapter=self.adapter)

    def merged(self):
        """The same Linear with the sum as the weight, which trains."""
        weight = nn.Parameter(self.adapter.merged(self.weight))
        return weight, quant_linear(self.x, weight, self.bias, *self.scales(), self.plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_it_is_the_layer_of_the_sum(schemes, dtype, seed):
    """Bit for bit in the output and in the gradients of all but the adapter, whose gradients are those of the sum's
    where that is quantized. No tensor as large as the weight outlives the forward but the weight itself, or ZeRO-3
    could not let it go."""
    for learn in (True, False):
        case = AdaptedCase(*schemes, dtype, tokens=(2,) if learn else None)
        for theta in (case.weight_theta, case.input_theta):
            if theta is not None:
                theta.requires_grad_(learn)
        weight, expected = case.merged()
        with kept_for_backward([*case.parameters, case.x]) as kept:
            output = case()
        assert all(tensor.numel() <= case.x.numel() for tensor in kept.values())
        assert torch.equal(output, expected)
        grad = torch.randn_like(output)
        trained = {name: tensor for name, tensor in case.trained().items() if not name.startswith("lora")}
        lora_a, lora_b = case.adapter.lora_a, case.adapter.lora_b
        ours = torch.autograd.grad(output, [*trained.values(), lora_a, lora_b], grad)
        theirs = torch.autograd.grad(expected, [*trained.values(), weight], grad)
        for name, mine, other in zip(trained, ours, theirs, strict=False):
            assert torch.equal(mine, other), name
        if case.weight_theta is not None:
            assert torch.equal(ours[-2], (lora_b.t() @ theirs[-1]) * case.adapter.scaling)
            assert torch.equal(ours[-1], (theirs[-1] @ lora_a.t()) * case.adapter.scaling)


def test_what_trains_decides_what_gets_a_gradient(seed):
    case = AdaptedCase(*SCHEMES[0])
    pair = case.adapter.lora_a, case.adapter.lora_b
    for trains in itertools.product((True, False), repeat=2):
        for tensor, its in zip(pair, trains, strict=True):
            tensor.requires_grad_(its).grad = None
        case().sum().backward()
        assert tuple(tensor.grad is not None for tensor in pair) == trains and case.weight.grad is None


@pytest.mark.parametrize("schemes", [one for one in SCHEMES if one[0] is not None][:7], ids=str)
def test_a_stack_is_its_experts(schemes, seed):
    """Outputs bit for bit those of the layer of the sums, and gradients of each expert's adapter from its sum's; the
    second has no rows."""
    weights = schemes[0]
    first = AdaptedCase(*schemes, tokens=(8,), bias=False)
    shape = (3, *first.weight.shape)
    weight, adapter = nn.Parameter(torch.randn(shape), requires_grad=False), random_adapter(2, *shape)
    lora_a, lora_b = adapter.lora_a, adapter.lora_b
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
    output = quant_linear(x, weight, *arguments, offsets=offsets, adapter=adapter)
    assert torch.equal(output, expected)
    grad = torch.randn_like(output)
    *theirs, of_sum = torch.autograd.grad(expected, [x, scale.theta, merged], grad)
    *ours, of_a, of_b = torch.autograd.grad(output, [x, scale.theta, lora_a, lora_b], grad)
    assert all(map(torch.equal, ours, theirs))
    a, b, of_sum = lora_a.detach().double(), lora_b.detach().double(), of_sum.double()
    torch.testing.assert_close(of_a.double(), 0.7 * b.mT @ of_sum, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(of_b.double(), 0.7 * of_sum @ a.mT, rtol=1e-4, atol=1e-4)
    assert not of_a[1].any() and not of_b[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_the_same_for_any_rows(dtype, seed, monkeypatch):
    """Single rows, blocks of rows, transposed memory, another number of threads, and the exact sum rounded once. With a
    factor of two bits the sums of half precision are exact in fp64, so that none rounds by its order."""
    out, in_, rank = random.randint(1, 200), random.randint(1, 80), random.randint(1, 20)
    weight, lora_b, lora_a = (torch.randn(*size).to(dtype) for size in ((out, in_), (out, rank), (rank, in_)))
    whole = merge(weight, lora_a, lora_b, 0.75)
    exact = weight.double() + 0.75 * (lora_b.double() @ lora_a.double())
    assert whole.dtype == dtype and torch.equal(whole, exact.to(dtype))
    rows = [merge(weight[row : row + 1], lora_a, lora_b[row : row + 1], 0.75) for row in range(out)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(merge(weight.t().contiguous().t(), lora_a, lora_b, 0.75), whole)
    assert merge(weight[:0], lora_a, lora_b[:0], 0.75).shape == (0, in_)
    monkeypatch.setattr(adapters, "CPU_ELEMENTS", 7 * in_)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(merge(weight, lora_a, lora_b, 0.75), whole)
    finally:
        torch.set_num_threads(threads)


class Products(TorchDispatchMode):
    """Shapes of all products of two matrices, but for those in fp64."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "mm" in func._schema.name and result.dtype != torch.float64:
            self.shapes.append(tuple(result.shape[-2:]))
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", (0, 4))
def test_without_quantized_weights_no_product_has_their_size(experts, dtype, seed):
    """The adapter's gradients against fp64, within what rounding the operands can do; some experts have no rows."""
    for _ in range(4):
        rows, out, in_, rank = random.randint(0, 130), random.randint(10, 70), random.randint(10, 70), 3
        shape = (experts, out, in_) if experts else (out, in_)
        ends = [*sorted(random.randint(0, rows) for _ in range(experts - 1)), rows]
        offsets = torch.tensor(ends, dtype=torch.int32) if experts else None
        weight, x, grad = (torch.randn(size).to(dtype) for size in (shape, (rows, in_), (rows, out)))
        adapter, s0 = random_adapter(rank, *shape, dtype=dtype), torch.full((1,), 2.5 / 448)
        lora_a, lora_b = adapter.lora_a, adapter.lora_b
        plan = Plan(None, FP8, weight_numel=1, input_numel=1)
        output = quant_linear(x, weight, None, None, Scale(s0), plan, offsets=offsets, adapter=adapter)
        with Products() as products:
            ours = torch.autograd.grad(output, [lora_a, lora_b], grad)
        assert (out, in_) not in products.shapes

        used = fake_quant(x, s0, FP8).double()
        parts = [(grad[a:b].double().t(), used[a:b]) for a, b in itertools.pairwise((0, *ends))]
        of_sum = torch.stack([g @ one for g, one in parts]).view(shape)
        sizes = torch.stack([g.abs() @ one.abs() for g, one in parts]).view(shape)
        a, b = lora_a.detach().double().mT, lora_b.detach().double().mT
        expected = (b @ of_sum, b.abs() @ sizes), (of_sum @ a, sizes @ a.abs())
        for mine, parameter, (value, size) in zip(ours, (lora_a, lora_b), expected, strict=True):
            assert mine.dtype == parameter.dtype and mine.shape == parameter.shape
            assert_within(mine, 0.7 * value, 0.7 * size, rows + out + in_, dtype)


def assert_within(ours: Tensor, expected: Tensor, sizes: Tensor, terms: int, dtype: torch.dtype) -> None:
    """A sum of as many terms in fp32, with a few roundings to ``dtype`` on the way, of terms of these magnitudes."""
    bound = (terms + 8) * torch.finfo(torch.float32).eps + (4 * torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    error = (ours.double() - expected).abs()
    tiny = 2e-7 if dtype == torch.float16 else 1e-30  # half of fp16's smallest number, for each rounding
    assert bool((error <= bound * sizes + 8 * tiny).all()), (error - bound * sizes).max()


def adapted_layer(scheme: str, adapter: Adapter | None = None, dtype: torch.dtype = torch.bfloat16):
    """A quantized Linear of 64 inputs and 48 outputs with scales and an adapter."""
    layer = quantized_linear(scheme, 48, 64, dtype=dtype, bias=True).requires_grad_(False)
    layer.attach_adapter(random_adapter(4, 48, 64, dtype=dtype) if adapter is None else adapter)
    return layer


@pytest.mark.parametrize("scheme", ("fp8_static", "w4a16_g32", "fp8_dynamic"))
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
        assert all(map(torch.equal, torch.autograd.grad(output, trained, grad), gradients))
    with torch.no_grad():
        layer.lora_b.mul_(-3)
    weights_changed(layer)
    changed = layer(x)
    layer.keeps_weight_codes = False
    assert torch.equal(changed, layer(x)) and not torch.equal(changed, expected)


@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_dropout_is_on_the_input_of_a_alone(dropout, seed):
    """As peft defines it, in training mode alone, and the same where activation checkpointing computes the layer again:
    what is recomputed has the gradients of what was computed."""
    lora_a, lora_b = (nn.Parameter(torch.randn(*size)) for size in ((4, 64), (48, 4)))
    layer = adapted_layer("w4a16_g32", AdapterBeside(lora_a, lora_b, 0.5, dropout), torch.float32)
    x = torch.randn(7, 64, requires_grad=True)
    base = F.linear(x, layer.quantized_weight(), layer.bias)

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
    assert all(map(torch.equal, torch.autograd.grad(again, trained, direction), gradients))

    layer.eval()
    assert torch.equal(layer(x), base + F.linear(F.linear(x, lora_a), lora_b) * 0.5)


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


def test_a_stack_of_decoupled_scales_is_its_experts(seed):
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
