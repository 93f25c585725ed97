"""A weight with an adapter: forward, gradients against the formula written out, and what is kept for backward."""

import itertools
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quant import get_scheme, prepare, weights_changed
from quant.autograd import Plan, quant_linear
from quant.lora import Adapter, AdapterBeside, low_rank_gradients, merge
from quant.reference import effective_scale, fake_quant, fake_quantize_tokens_backward, inside_range
from quant.scale import Scale
from tests.unit.quant.one_linear import FP8, SCHEMES, Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_it_is_the_layer_of_the_sum(schemes, dtype, seed):
    """Bit for bit in the output and in the gradients of all but the adapter, whose gradients are those of the sum's
    where that is quantized."""
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
        if case.weight_theta is None:
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_the_same_for_any_rows(dtype, seed):
    """Single rows, transposed memory, another number of threads, and the exact sum rounded once. With a factor of two
    bits the sums of half precision are exact in fp64, so that none rounds by its order."""
    out, in_, rank = random.randint(1, 200), random.randint(1, 80), random.randint(1, 20)
    weight, lora_b, lora_a = (torch.randn(*size).to(dtype) for size in ((out, in_), (out, rank), (rank, in_)))
    whole = merge(weight, lora_a, lora_b, 0.75)
    exact = weight.double() + 0.75 * (lora_b.double() @ lora_a.double())
    assert whole.dtype == dtype and torch.equal(whole, exact.to(dtype))
    rows = [merge(weight[row : row + 1], lora_a, lora_b[row : row + 1], 0.75) for row in range(out)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(merge(weight.t().contiguous().t(), lora_a, lora_b, 0.75), whole)
    assert merge(weight[:0], lora_a, lora_b[:0], 0.75).shape == (0, in_)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(merge(weight, lora_a, lora_b, 0.75), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_sum_in_bf16_is_that_in_fp64(seed):
    """Over sizes of the adapter from none to far larger than the weight, sums that nearly cancel or lie between two
    numbers, and both ends of bf16."""
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
    whole = merge(weight, lora_a, lora_b, 2.0)
    assert whole[1, 3].isnan() and whole[2, 4] == torch.inf and not whole[:, 7].isfinite().any()
    for wrong in ((lora_a[:, :-1], lora_b), (lora_a, lora_b[:-1]), (lora_a[:1], lora_b), (lora_a[None], lora_b[None])):
        with pytest.raises(RuntimeError):
            merge(weight, *wrong, 2.0)


def random_products(dtype: torch.dtype, experts: int = 0):
    """``grad, x, lora_a, lora_b, offsets`` of random sizes; of a stack some experts have no rows."""
    rows, out, in_, rank = (random.randint(0, 130), *(random.randint(1, 70) for _ in range(2)), random.randint(1, 9))
    stack, offsets = (), None
    if experts:
        stack = (experts,)
        ends = sorted(random.randint(0, rows) for _ in range(experts - 1))
        offsets = torch.tensor([*ends, rows], dtype=torch.int32)
    sizes = (rows, out), (rows, in_), (*stack, rank, in_), (*stack, out, rank)
    return (*(torch.randn(size).to(dtype) for size in sizes), offsets)


def exact(grad: Tensor, x: Tensor, shape: tuple[int, ...], offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """``grad.t() @ x`` in fp64 in ``shape``, and the sum of the magnitudes of what it adds."""
    ends = [len(x)] if offsets is None else offsets.tolist()
    parts = [(grad[a:b].double().t(), x[a:b].double()) for a, b in zip([0, *ends], ends, strict=False)]
    whole, sizes = [g @ one for g, one in parts], [g.abs() @ one.abs() for g, one in parts]
    return torch.stack(whole).view(shape), torch.stack(sizes).view(shape)


def within(ours: Tensor, expected: Tensor, sizes: Tensor, terms: int, dtype: torch.dtype) -> None:
    """A sum of as many terms in fp32, with a few roundings to ``dtype`` on the way, of terms of these magnitudes."""
    bound = (terms + 8) * torch.finfo(torch.float32).eps + (4 * torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    error = (ours.double() - expected).abs()
    tiny = 2e-7 if dtype == torch.float16 else 1e-30  # half of fp16's smallest number, for each rounding
    assert bool((error <= bound * sizes + 8 * tiny).all()), (error - bound * sizes).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", (0, 4))
def test_low_rank_gradients(experts, dtype, seed):
    """Against fp64 within what rounding the operands of the whole products can do."""
    for _ in range(4):
        grad, x, lora_a, lora_b, offsets = random_products(dtype, experts)
        whole, sizes = exact(grad, x, (*lora_b.shape[:-1], lora_a.shape[-1]), offsets)
        ours = low_rank_gradients(grad, x, lora_a, lora_b, 0.7, offsets)
        check(ours, whole, sizes, lora_a, lora_b, 0.7, sum(grad.shape) + x.shape[1])


def check(ours, of_sum, sizes, lora_a, lora_b, scaling, terms):
    """The gradients of A and B against those of a sum of weight and adapter in fp64."""
    a, b = lora_a.detach().double().transpose(-2, -1), lora_b.detach().double().transpose(-2, -1)
    for mine, parameter, expected, size in zip(
        ours,
        (lora_a, lora_b),
        (b @ of_sum, of_sum @ a),
        (b.abs() @ sizes, sizes @ a.abs()),
        strict=True,
    ):
        assert mine.dtype == parameter.dtype and mine.shape == parameter.shape
        within(mine, scaling * expected, scaling * size, terms, parameter.dtype)


class Fixed(Case):
    """Operands of a Linear with an adapter, whose scales do not learn; the weight's are ``factor`` times absmax's."""

    def __init__(self, schemes, dtype, factor):
        super().__init__(*schemes, dtype)
        self.weight.requires_grad_(False)
        (out, in_), rank = self.weight.shape, random.randint(1, 4)
        a, b = (nn.Parameter(0.3 * torch.randn(*size).to(dtype)) for size in ((rank, in_), (out, rank)))
        self.adapter = Adapter(a, b, random.choice([0.5, 2.0, 0.3]))
        for theta in (self.weight_theta, self.input_theta):
            if theta is not None:
                theta.requires_grad_(False)
        if self.weight_theta is not None:
            self.weight_theta.data.fill_(torch.tensor(factor).log())
        self.base, self.weight = self.weight, nn.Parameter(self.adapter.merged(self.weight), requires_grad=False)

    def __call__(self):
        weight = None
        if self.weight_s0 is not None:
            weight = Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)
        input_ = None if self.input_s0 is None else Scale(self.input_s0, self.input_theta)
        apply = partial(self.adapter.apply, True)
        return quant_linear(self.x, self.base, self.bias, weight, input_, self.plan, apply=apply)

    def clipped(self):
        """What of the sum is outside the range."""
        if self.plan.weight is None:
            return torch.zeros(self.weight.shape, dtype=torch.bool)
        return ~inside_range(self.weight.detach(), self.scale("weight"), self.plan.weight, self.weight_zero)


class Products(TorchDispatchMode):
    """Shapes of all results of products of two matrices."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schemes", SCHEMES, ids=str)
def test_a_layer_whose_scales_are_fixed(schemes, dtype, seed):
    """Gradients against fp64 with little, much and everything clipped; without fake quant of the weight no product has
    its shape but for the sum itself, which is formed in fp64."""
    for factor in (4.0, 1.0, 0.3, 1e-3):
        case = Fixed(schemes, dtype, factor)
        output = case()
        grad, clipped = torch.randn_like(output), case.clipped()
        with Products() as products:
            ours = torch.autograd.grad(output, [case.adapter.lora_a, case.adapter.lora_b], grad)
        rows = grad.reshape(-1, grad.shape[-1])
        used_x = case.operands()[0].reshape(-1, case.x.shape[-1])
        whole, sizes = exact(rows, used_x, clipped.shape, None)
        terms = sum(rows.shape) + used_x.shape[1]
        check(ours, whole * ~clipped, sizes, case.adapter.lora_a, case.adapter.lora_b, case.adapter.scaling, terms)
        if tuple(clipped.shape) not in {(len(rows), used_x.shape[1]), tuple(case.adapter.lora_a.shape)}:
            # One for the sum, which backward forms again, and the gradient as a whole where the weight is quantized.
            assert products.shapes.count(tuple(clipped.shape)) <= 1 + (case.plan.weight is not None)


@pytest.mark.parametrize("schemes", [one for one in SCHEMES if one[0] is not None][:7], ids=str)
def test_a_stack_whose_scales_are_fixed(schemes, seed):
    """Of each expert, one of which has no rows, and one whose weight is clipped as a whole."""
    weights = schemes[0]
    for few in (True, False):
        out, in_, rank = 32, 32 * random.randint(1, 2), random.randint(1, 3)
        weight = torch.randn(4, out, in_)
        lora_a, lora_b = (nn.Parameter(0.1 * torch.randn(4, *size)) for size in ((rank, in_), (out, rank)))
        adapter = Adapter(lora_a, lora_b, 0.7)
        merged = adapter.merged(weight)
        size = weights.scale_shape(weight.shape)
        s0 = torch.full(size, float(merged.abs().max()) / (0.9 if few else 2.0) / weights.qmax)
        if not few:
            s0.view(4, -1)[3] = 1e-6
        zero = torch.zeros(size) if weights.has_zero_points else None
        above = torch.full((4,), 10.0) if weights.scale_format == "e4m3" else None
        x = torch.randn(12, in_)
        offsets = torch.tensor([3, 3, 8, 12], dtype=torch.int32)
        plan = Plan(weights, None, weight_numel=1, input_numel=1)
        apply = partial(adapter.apply, True)
        scale = Scale(s0, None, above, zero)
        output = quant_linear(x, weight, None, scale, None, plan, offsets=offsets, apply=apply)
        grad = torch.randn_like(output)
        ours = torch.autograd.grad(output, [lora_a, lora_b], grad)
        effective = effective_scale(s0, None, weights, torch.float32, above)
        zeros = [None] * 4 if zero is None else zero
        experts = list(zip(merged, effective, [weights] * 4, zeros, strict=True))
        clipped = torch.stack([~inside_range(*one) for one in experts])
        used = torch.stack([fake_quant(*one) for one in experts])
        begins = [0, 3, 3, 8]
        expected = torch.cat([x[b:e] @ used[i].t() for i, (b, e) in enumerate(zip(begins, offsets, strict=True))])
        torch.testing.assert_close(output, expected)
        whole, sizes = exact(grad, x, clipped.shape, offsets)
        check(ours, whole * ~clipped, sizes, lora_a, lora_b, 0.7, 12 + out + in_)
        assert not ours[0][1].any() and not ours[1][1].any()


@pytest.mark.parametrize("value", (float("nan"), float("inf"), -float("inf")))
def test_what_is_not_finite_stays_so(value, seed):
    """A gradient or an input that is not finite makes all of a gradient so that the written-out formula does."""
    for where in ("grad", "x"):
        case = Fixed((FP8, None), torch.float32, 1.2)
        with torch.no_grad():
            if where == "x":
                case.x.view(-1)[random.randrange(case.x.numel())] = value
        output = case()
        grad, clipped = torch.randn_like(output), case.clipped()
        if where == "grad":
            grad.view(-1)[random.randrange(grad.numel())] = value
        ours = torch.autograd.grad(output, [case.adapter.lora_a, case.adapter.lora_b], grad)
        rows, x = grad.reshape(-1, grad.shape[-1]), case.x.detach().reshape(-1, case.x.shape[-1])
        of_sum = (rows.t() @ x).masked_fill(clipped, 0)
        expected = (case.adapter.lora_b.t() @ of_sum, of_sum @ case.adapter.lora_a.t())
        for mine, other in zip(ours, expected, strict=True):
            assert not mine[~other.isfinite()].isfinite().any()


def adapted_layer(scheme: str, dtype: torch.dtype = torch.bfloat16):
    """A quantized Linear with scales and an adapter, and what it computes without one."""
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
    for own, expected in zip(torch.autograd.grad(again, trained, direction), gradients, strict=True):
        assert torch.equal(own, expected)

    layer.eval()
    assert torch.equal(layer(x), base + F.linear(F.linear(x, lora_a), lora_b) * 0.5)
