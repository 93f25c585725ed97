"""Gradients of merged adapters from thin products: the operators, and the gradients against fp64, however much is
clipped."""

import random
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from quant import kernels, thin
from quant.adapter import Adapter
from quant.function import Plan, quant_linear
from quant.kernels import eager
from quant.packing import pack_bits
from quant.reference import effective_scale, fake_quant, inside_range
from quant.scale import Scale
from tests.unit.quant.one_linear import FP8, SCHEMES, Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the inputs alone, and such as have scales per row of the whole stack.
OF_WEIGHTS = [one for one in SCHEMES if one[0] is not None]
SHARES = (0.0, 0.02, 0.3, 1.0)


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


def exact(grad: Tensor, x: Tensor, clipped: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """``grad.t() @ x`` in fp64 in the shape of ``clipped``, and the sum of the magnitudes of what it adds."""
    ends = [len(x)] if offsets is None else offsets.tolist()
    parts = [(grad[a:b].double().t(), x[a:b].double()) for a, b in zip([0, *ends], ends, strict=False)]
    whole, sizes = [g @ one for g, one in parts], [g.abs() @ one.abs() for g, one in parts]
    return torch.stack(whole).view(clipped.shape), torch.stack(sizes).view(clipped.shape)


def within(ours: Tensor, expected: Tensor, sizes: Tensor, terms: int, dtype: torch.dtype) -> None:
    """A sum of as many terms in fp32, with a few roundings to ``dtype`` on the way, of terms of these magnitudes."""
    bound = (terms + 8) * torch.finfo(torch.float32).eps + (4 * torch.finfo(dtype).eps if dtype != torch.float32 else 0)
    error = (ours.double() - expected).abs()
    tiny = 2e-7 if dtype == torch.float16 else 1e-30  # half of fp16's smallest number, for each rounding
    assert bool((error <= bound * sizes + 8 * tiny).all()), (error - bound * sizes).max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", (0, 3))
def test_products_of_clipped_elements(experts, dtype, seed):
    """Against fp64, the eager form, and themselves at another number of threads."""
    for share in SHARES:
        grad, x, lora_a, lora_b, offsets = random_products(dtype, experts)
        shape = (*lora_b.shape[:-1], lora_a.shape[-1])
        clipped = torch.rand(shape) < share
        mask = pack_bits(~clipped)
        if behind := -clipped.numel() % 8:  # bits behind the last element, which mean nothing
            mask[-1] ^= random.getrandbits(behind) << (8 - behind)
        assert kernels.count_clipped(mask, clipped.numel()) == eager.count_clipped(mask, clipped.numel())
        assert kernels.count_clipped(mask, clipped.numel()) == int(clipped.sum())
        arguments = (grad, x, mask, lora_a, lora_b, offsets)
        found = kernels.clipped_products(*arguments)
        whole, sizes = (one * clipped for one in exact(grad, x, clipped, offsets))
        a, b = lora_a.double().transpose(-2, -1), lora_b.double().transpose(-2, -1)
        expected = ((b @ whole, b.abs() @ sizes), (whole @ a, sizes @ a.abs()))
        for ours, other, (value, size) in zip(found, eager.clipped_products(*arguments), expected, strict=True):
            assert ours.dtype == torch.float32 and ours.is_contiguous()
            within(ours, value, size, sum(grad.shape) + x.shape[1], torch.float32)
            within(other, value, size, sum(grad.shape) + x.shape[1], torch.float32)
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            again = kernels.clipped_products(*arguments)
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_products_of_operands_that_do_not_fit():
    grad, x, lora_a, lora_b = torch.randn(5, 6), torch.randn(5, 8), torch.randn(2, 8), torch.randn(6, 2)
    mask = pack_bits(torch.ones(6, 8, dtype=torch.bool))
    for wrong in (
        (grad, x, mask[:-1], lora_a, lora_b),
        (grad[:-1], x, mask, lora_a, lora_b),
        (grad.bfloat16(), x, mask, lora_a, lora_b),
        (grad, x, mask, lora_a[:, :-1], lora_b),
        (grad, x, mask, lora_a, lora_b[:-1]),
        (grad, x, mask, lora_a, lora_b, torch.tensor([6])),
        (grad, x, mask, lora_a, lora_b, torch.tensor([3, 5])),
        (grad.double(), x.double(), mask, lora_a, lora_b),
    ):
        with pytest.raises(RuntimeError):
            kernels.clipped_products(*wrong)
    with pytest.raises(RuntimeError, match="does not belong"):
        kernels.count_clipped(mask, 49)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", (0, 4))
def test_thin_gradients_with_any_share_clipped(experts, dtype, seed):
    """Against fp64 within what rounding the operands of the whole products can do, also where the caller would not."""
    for share in SHARES:
        grad, x, lora_a, lora_b, offsets = random_products(dtype, experts)
        clipped = torch.rand(*lora_b.shape[:-1], lora_a.shape[-1]) < share
        whole, sizes = exact(grad, x, clipped, offsets)
        for mask in (pack_bits(~clipped), None)[: 2 if share == 0 else 1]:
            ours = thin.thin_gradients(grad, x, lora_a, lora_b, 0.7, mask, offsets)
            check(ours, whole * ~clipped, sizes, lora_a, lora_b, 0.7, sum(grad.shape) + x.shape[1])


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
    """Gradients against fp64 with little, much and everything clipped; with little of it, and without fake quant, no
    product has the weight's shape but for the sum itself, which is formed in fp64."""
    for factor in (4.0, 1.0, 0.3, 1e-3):
        case = Fixed(schemes, dtype, factor)
        output = case()
        grad, clipped = torch.randn_like(output), case.clipped()
        with Products() as products:
            ours = torch.autograd.grad(output, [case.adapter.lora_a, case.adapter.lora_b], grad)
        rows = grad.reshape(-1, grad.shape[-1])
        used_x = case.operands()[0].reshape(-1, case.x.shape[-1])
        whole, sizes = exact(rows, used_x, clipped, None)
        terms = sum(rows.shape) + used_x.shape[1]
        check(ours, whole * ~clipped, sizes, case.adapter.lora_a, case.adapter.lora_b, case.adapter.scaling, terms)
        few = not clipped.any() or int(clipped.sum()) <= thin.MOST_CLIPPED * clipped.numel()
        if tuple(clipped.shape) not in {(len(rows), used_x.shape[1]), tuple(case.adapter.lora_a.shape)}:
            # One for the sum, which backward forms again, and the gradient as a whole where much is clipped.
            assert products.shapes.count(tuple(clipped.shape)) <= 1 + (not few)


@pytest.mark.parametrize("schemes", OF_WEIGHTS[:7], ids=str)
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
        whole, sizes = exact(grad, x, clipped, offsets)
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
