"""The compiled CPU kernels against the reference: every operator, bit for bit, whatever the shape, stride and value.

The one result that need not equal the reference's is theta's gradient, a sum of which only the order differs: it must
equal the sum in the order that kernels.h documents, bit for bit, and lie within fp32 rounding of the exact sum.
"""

import decimal
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from quant import kernels, packing, reference
from quant.kernels import eager
from quant.kernels.build import build
from quant.scale import Quantizer, Scale
from quant.spec import TensorSpec

OPS = torch.ops.deepqat
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRIDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, -2, -4, -8)
TOKEN_GRIDS = ((0, True), *((bits, symmetric) for bits in (2, 4, 8) for symmetric in (False, True)))
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code
POSITIONS, SEGMENT = 2048, 16384  # of the order of addition in kernels.h
# Loops over 8, 16 and 64 elements, 2048 accumulators and segments of 16384 end here, or one before, or one after.
EDGES = (1, 8, 16, 24, 64, 80, 128, POSITIONS, POSITIONS + 64, 2 * POSITIONS, SEGMENT, SEGMENT + POSITIONS, 3 * SEGMENT)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """What would be tested without a compiler is the reference, against itself."""
    built = build()
    if built.library is None and "no C++ compiler" in built.why:
        pytest.skip(built.why)
    assert built.library is not None, built.why
    kernels.prepare_kernels()


def spec_of(grid: int) -> TensorSpec:
    """Of a tensor with one scale per row, whatever its length."""
    if grid == 1:
        return TensorSpec("fp4_e2m1", 4, "group", 16)
    if grid == 0:
        return TensorSpec("fp8_e4m3", 8, "channel")
    return TensorSpec("int", abs(grid), "channel", narrow=grid < 0)


def assert_same(ours: Tensor, theirs: Tensor, what: str = "") -> None:
    """Bit for bit, so that -0.0 is not 0.0; only which NaN a NaN is does not matter."""
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    ours, theirs = ours.contiguous(), theirs.contiguous()
    if ours.dtype == torch.float8_e4m3fn:
        nan, equal = (theirs.float().isnan(), ours.float().isnan()), ours.view(torch.uint8) == theirs.view(torch.uint8)
    elif ours.is_floating_point():
        integer = BITS[ours.dtype]
        nan, equal = (theirs.isnan(), ours.isnan()), ours.view(integer) == theirs.view(integer)
    else:
        assert torch.equal(ours, theirs), what
        return
    wrong = ~torch.where(nan[0], nan[1], equal)
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        pytest.fail(
            f"{what}: {wrong.sum()} of {wrong.numel()} differ, first at {first}: {ours[*first]} for {theirs[*first]}"
        )


# ---- random tensors


def random_layout(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``values`` in this shape (expanded: the first ones of them, repeated), in one of many memory layouts."""
    layout = random.choice(("plain", "transposed", "sliced", "strided", "expanded", "offset"))
    x = values.reshape(shape)
    if layout == "transposed":
        order = random.sample(range(len(shape)), len(shape))
        back = [order.index(i) for i in range(len(shape))]
        return x.permute(order).contiguous().permute(back)
    if layout == "sliced":
        return torch.cat([x, x, x], dim=-1)[..., shape[-1] : 2 * shape[-1]]
    if layout == "strided":
        return torch.stack([x, x], dim=-1)[..., 1]
    if layout == "expanded":
        dim = random.randrange(len(shape))
        return x.narrow(dim, 0, min(1, shape[dim])).expand(shape)
    if layout == "offset":  # as odd as addresses can be
        start = random.randint(1, 7)
        return torch.cat([values.new_zeros(start), values.reshape(-1)])[start:].view(shape)
    return x


def random_shape(numel: int) -> tuple[int, ...]:
    """One to four dimensions."""
    shape = []
    for _ in range(random.randint(0, 3)):
        part = random.choice([d for d in range(1, min(numel, 64) + 1) if numel % d == 0])
        shape.append(part)
        numel //= part
    shape.append(numel)
    random.shuffle(shape)
    return tuple(shape)


def special_values(x: Tensor, scale: float) -> Tensor:
    """``x`` with some elements replaced by what rounds, overflows or compares in its own way."""
    info = torch.finfo(x.dtype)
    ties = [scale * v for v in (0.25, 0.5, 0.75, 1.5, 2.5, -0.5, -2.5, 5, -7, 7.5, -8.5, 464, -464)]
    ties += [scale * v for v in (2**-10, 3 * 2**-10, 1.0625, 2**-6)]
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, info.max, info.min, info.tiny, -info.tiny]
    values += [info.smallest_normal / 2, info.max / 2, *ties]
    chosen = torch.tensor(values, dtype=torch.float64).clamp(info.min, info.max)  # clamp lets NaN pass
    chosen[1:3] = torch.tensor([math.inf, -math.inf])
    picked = chosen.to(x.dtype)[torch.randint(len(values), x.shape)]
    return torch.where(torch.rand(x.shape) < random.choice((0.01, 0.2)), picked, x)


@dataclass
class Case:
    """Arguments of the operators."""

    x: Tensor
    grad: Tensor
    s0: Tensor
    theta: Tensor | None
    grid: int
    scale_dtype: torch.dtype
    factor: float
    zero: Tensor | None = None
    above: Tensor | None = None

    def __str__(self) -> str:
        theta = None if self.theta is None else self.theta.dtype
        x = f"x {tuple(self.x.shape)} {self.x.stride()} {self.x.dtype}"
        grid = f"grid {self.grid}{'' if self.zero is None else ', zero points'}"
        return f"{x}, s0 {tuple(self.s0.shape)}, theta {theta}, {grid}, stored as {self.scale_dtype}"

    @property
    def scales(self) -> tuple[Tensor, Tensor | None]:
        return self.s0, self.theta

    def learned(self) -> Tensor:
        """``s0 * exp(theta)`` of every run, not rounded to what is stored."""
        return reference.effective_scale(self.s0, self.theta, spec_of(0), torch.float32).reshape(-1)

    def terms(self) -> Tensor:
        """What theta's gradient is the sum of, ``[runs, block]``: the reference's, asked for one element at a time."""
        scale = eager.effective_scale(self.s0, self.theta, self.scale_dtype, above=self.above).reshape(-1, 1)
        rows = self.x.reshape(scale.numel(), self.x.numel() // scale.numel())
        one_each = scale.expand(rows.shape).reshape(-1, 1)
        x, grad = rows.reshape(-1, 1), self.grad.reshape(-1, 1)
        zero = None if self.zero is None else self.zero.reshape(-1, 1).expand(rows.shape).reshape(-1, 1)
        _, terms = reference.fake_quant_backward(grad, x, one_each, spec_of(self.grid), zero, scale_gradient=True)
        return terms.reshape(rows.shape)


def random_case(largest: int = 60_000) -> Case:
    """A tensor with one scale, one per expert, per row or per group (of any size), most of them finite."""
    block = random.choice((random.randint(1, 300), max(1, random.choice(EDGES) + random.randint(-1, 1))))
    most = max(1, largest // block)
    count = min(most, random.choice((1, 1, random.randint(2, 8), random.randint(1, 700))))
    shape = random_shape(count * block)
    if random.random() < 0.05:
        shape = (*shape[:-1], 0) if random.random() < 0.5 else (0, *shape[1:])
    dtype, theta_dtype = random.choice(DTYPES), random.choice(DTYPES)
    numel = math.prod(shape)
    scale_shape = random.choice(((count,), random_shape(count)))
    s0 = 10 ** random.uniform(-4, 2) * torch.exp(0.5 * torch.randn(scale_shape))
    if random.random() < 0.3:
        s0 = torch.exp2(s0.log2().round())  # then ties are exact
    grid = random.choice(GRIDS)
    spread = spec_of(grid).qmax * random.choice((0.02, 0.3, 0.6)) + 0.5
    typical = s0.flatten()[0].item() if numel else 1.0
    x, grad = typical * spread * torch.randn(numel), torch.randn(numel) * 10 ** random.uniform(-3, 2)
    x, grad = x.to(dtype), grad.to(dtype)
    if random.random() < 0.4:
        x = special_values(x, typical)
    if random.random() < 0.1:
        grad = special_values(grad, 1.0)
    theta = None
    if random.random() < 0.7:
        theta = (random.choice((0.0, 0.3, 3.0)) * torch.randn(scale_shape)).to(theta_dtype)
    if random.random() < 0.05:
        odd = torch.tensor([0.0, math.nan, math.inf, 1e-45, 1e-38, 3e38])
        s0 = torch.where(torch.rand(scale_shape) < 0.3, odd[torch.randint(len(odd), scale_shape)], s0)
    if theta is not None and random.random() < 0.05:
        odd = torch.tensor([-104.0, 88.0, 89.0, math.nan, math.inf, -math.inf]).to(theta_dtype)
        theta = torch.where(torch.rand(scale_shape) < 0.3, odd[torch.randint(len(odd), scale_shape)], theta)
    zero = None
    if grid >= 2 and random.random() < 0.5:
        zero = torch.randint(int(spec_of(grid).qmin), int(spec_of(grid).qmax) + 1, scale_shape).float()
        zero = torch.where(torch.rand(scale_shape) < random.choice((0.0, 0.0, 0.1)), torch.nan, zero)
    factor = random.choice((1.0, random.uniform(1e-4, 1.0)))
    x, grad = random_layout(x, shape), random_layout(grad, shape)
    stored, above = random.choice((*DTYPES, torch.float8_e8m0fnu, torch.float8_e4m3fn)), None
    if stored == torch.float8_e4m3fn:  # that of a tensor, or of a stack one per part
        parts = random.choice([n for n in (1, 1, 2, 3, count) if count % n == 0])
        above = random.choice((1.0, 100.0, 448.0)) / typical * torch.rand(parts)
    return Case(x, grad, s0, theta, grid, stored, factor, zero, above)


# ---- the gradient of theta: a sum


def added_in_order(terms: Tensor) -> Tensor:
    """The sum of each row of ``terms`` in the order that kernels.h documents, in numpy's fp32."""

    def padded(values: np.ndarray, multiple: int) -> np.ndarray:
        return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % multiple)])

    def one_segment(values: np.ndarray) -> np.ndarray:
        steps = padded(values, POSITIONS)
        steps = steps.reshape(*values.shape[:-1], -1, POSITIONS)
        accumulators = np.zeros((*values.shape[:-1], POSITIONS), np.float32)
        for i in range(steps.shape[-2]):
            accumulators = accumulators + steps[..., i, :]
        sums = accumulators.reshape(*accumulators.shape[:-1], POSITIONS // 8, 8)
        for half in (4, 2, 1):
            sums = sums[..., :half] + sums[..., half : 2 * half]
        sums = sums[..., 0]
        while sums.shape[-1] > 1:
            half = sums.shape[-1] // 2
            sums = sums[..., :half] + sums[..., half:]
        return sums[..., 0]

    values = terms.numpy()
    with np.errstate(all="ignore"):
        if values.shape[-1] <= SEGMENT:
            return torch.from_numpy(one_segment(values))
        segments = padded(values, SEGMENT).reshape(len(values), -1, SEGMENT)
        return torch.from_numpy(one_segment(one_segment(segments)))


def additions(n: int) -> int:
    """The longest chain of additions that a term of a run of ``n`` passes through."""
    segments = math.ceil(n / SEGMENT)
    chain = min(8, math.ceil(n / POSITIONS)) + 3 + 8
    return chain + (math.ceil(segments / POSITIONS) + 3 + 8 if segments > 1 else 0)


def check_weight_gradient(case, arguments, grad_x, grad_theta):
    """Of a weight NaN shows what is not finite, in theta's gradient if that is wanted; nothing else changes."""
    ours_x, ours_theta = OPS.fake_quantize_backward(*arguments, True)
    overwritten = case.grad.clone(memory_format=torch.contiguous_format)
    assert_same(OPS.fake_quantize_backward_(overwritten, *arguments[1:], True), ours_theta, f"in place, {case}")
    assert_same(overwritten, ours_x, f"gradient of a weight in place, {case}")
    expected_x, expected_theta = eager.fake_quantize_backward(*arguments, True)
    assert_same(ours_x, expected_x, f"gradient of a weight, {case}")
    if expected_theta.numel() == 0:
        wrong = ~(ours_x.isnan() | (ours_x == grad_x) | grad_x.isnan())
        assert not wrong.any()
        return
    assert_same(ours_x, grad_x, f"gradient of a weight beside theta's, {case}")
    scale = OPS.effective_scale(*case.scales, case.scale_dtype, None, case.above)
    v = case.x.float().reshape(scale.numel(), -1) * (1.0 / scale.reshape(-1, 1))
    broken = ~v.isfinite().all(1).view(ours_theta.shape)
    assert ours_theta[broken].isnan().all()
    assert_same(ours_theta[~broken], grad_theta[~broken], f"of theta, {case}")


def check_theta_gradient(case: Case, ours: Tensor) -> None:
    """Equal to the documented order of addition, which is within fp32 rounding of the exact sum.

    Every addition and every product rounds by at most u = 2^-24 of its result, and all partial sums are bounded by the
    sum S of the terms' magnitudes: a chain of k additions and the products with scale and factor are off by at most
    (k + 2) u S (to first order; 1.01 covers the rest), and the cast to theta's dtype by half its epsilon.
    """
    if case.x.numel() == 0:
        assert not ours.any(), f"of nothing it is 0 whatever the scale, {case}"
        return
    terms, learned = case.terms(), case.learned()
    factor = float(np.float32(case.factor))
    assert case.theta is not None
    in_order = added_in_order(terms) * learned * factor
    assert_same(ours, in_order.to(ours.dtype).reshape(ours.shape), f"order of addition, {case}")
    weights = learned.double() * factor
    exact, size = terms.double().sum(1) * weights, terms.double().abs().sum(1) * weights
    info, tiny = torch.finfo(ours.dtype), 2.0**-149
    bound = 1.01 * (additions(terms.shape[1]) + 2) * 2.0**-24 * size + info.eps / 2 * exact.abs()
    bound += info.smallest_normal * info.eps + tiny * (1 + weights)  # where the result, or a product, is subnormal
    off = (ours.reshape(-1).double() - exact).abs()
    # Beyond the range of either dtype a result, or a product on the way to it, is infinite.
    largest = terms.double().abs().sum(1) * learned.double().clamp(min=1)
    representable = (largest < 1e38) & (exact.abs() + bound < info.max)
    assert (off <= bound)[representable].all(), f"{(off / bound)[representable].max()} times the bound, {case}"


# ---- every operator on random tensors


def check(case: Case) -> None:
    """All operators on one case, against the reference."""
    x, scales, grid, beside, what = case.x, case.scales, case.grid, (case.zero, case.above), str(case)
    codes, mask = OPS.quantize(x, *scales, grid, case.scale_dtype, True, *beside)
    expected_codes, expected_mask = eager.quantize(x, *scales, grid, case.scale_dtype, True, *beside)
    assert_same(codes, expected_codes, f"codes, {what}")
    assert_same(mask, expected_mask, f"mask, {what}")
    alone, nothing = OPS.quantize(x, *scales, grid, case.scale_dtype, False, *beside)
    assert_same(alone, expected_codes, f"codes without a mask, {what}")
    assert nothing.shape == (0,) and nothing.dtype == torch.uint8
    scale = OPS.effective_scale(*scales, case.scale_dtype, None, case.above)
    assert_same(scale, eager.effective_scale(*scales, case.scale_dtype, None, case.above), f"scale, {what}")

    codes_too, scale_too = OPS.quantize_with_scale(x, *scales, grid, case.scale_dtype, *beside)
    assert_same(codes_too, expected_codes, f"codes beside scales, {what}")
    assert_same(scale_too, scale, f"scales beside codes, {what}")
    expected_values = eager.fake_quantize(x, *scales, grid, case.scale_dtype, None, *beside)
    for masked in (True, False):
        codes_too, mask_too, values = OPS.quantize_with_values(x, *scales, grid, case.scale_dtype, masked, *beside)
        assert_same(codes_too, expected_codes, f"codes beside values, {what}")
        assert_same(mask_too, expected_mask if masked else nothing, f"mask beside values, {what}")
        assert_same(values, expected_values, f"values beside codes, {what}")
    values = OPS.fake_quantize(x, *scales, grid, case.scale_dtype, None, *beside)
    assert_same(values, expected_values, f"fake quant, {what}")
    any_codes = random_layout(torch.randint(256, (x.numel(),), dtype=torch.uint8).view(codes.dtype), tuple(x.shape))
    out_dtype = random.choice(DTYPES)
    for some in (codes, any_codes):
        values = OPS.dequantize(some, *scales, case.scale_dtype, out_dtype, None, *beside)
        expected = eager.dequantize(some, *scales, case.scale_dtype, out_dtype, None, *beside)
        assert_same(values, expected, f"dequantised to {out_dtype}, {what}")
        if case.theta is not None:
            values, zeros = OPS.dequantize_with_zeros(some, *scales, case.scale_dtype, out_dtype, None, *beside)
            assert_same(values, expected, f"dequantised to {out_dtype} beside zeros, {what}")
            assert_same(zeros, torch.zeros_like(case.theta), f"zeros, {what}")

    for wanted in (False, True) if case.theta is not None else (False,):
        arguments = (case.grad, x, *scales, grid, case.scale_dtype, case.factor, wanted, *beside)
        grad_x, grad_theta = OPS.fake_quantize_backward(*arguments)
        expected_x, _ = eager.fake_quantize_backward(*arguments)
        assert_same(grad_x, expected_x, f"gradient of x, {what}")
        assert grad_theta.shape == (case.theta.shape if wanted and case.theta is not None else (0,))
        overwritten = case.grad.clone(memory_format=torch.contiguous_format)
        assert_same(OPS.fake_quantize_backward_(overwritten, *arguments[1:]), grad_theta, f"in place, {what}")
        assert_same(overwritten, expected_x, f"gradient of x in place, {what}")
        check_weight_gradient(case, arguments, grad_x, grad_theta)
    if case.theta is not None:
        assert grad_theta.dtype == case.theta.dtype
        check_theta_gradient(case, grad_theta)
    assert_same(OPS.masked(case.grad, mask), eager.masked(case.grad, mask), f"masked, {what}")
    overwritten = case.grad.clone(memory_format=torch.contiguous_format)
    OPS.masked_(overwritten, mask)
    assert_same(overwritten, eager.masked(case.grad, mask), f"masked in place, {what}")
    overwritten = case.grad.clone(memory_format=torch.contiguous_format)
    values = OPS.dequantize_and_mask_(overwritten, mask, codes, *scales, case.scale_dtype, *beside)
    expected = eager.dequantize(codes, *scales, case.scale_dtype, case.grad.dtype, None, *beside)
    assert_same(values, expected, f"dequantised while masking, {what}")
    assert_same(overwritten, eager.masked(case.grad, mask), f"masked while dequantising, {what}")
    assert_same(OPS.amax(x, case.s0.numel()), eager.amax(x, case.s0.numel()), f"amax, {what}")
    check_tokens(x, case.grad, what, random.sample(TOKEN_GRIDS, 3))


def check_tokens(x: Tensor, grad: Tensor, what: str, grids: Sequence[tuple[int, bool]] = TOKEN_GRIDS) -> None:
    """The operators of dynamic codes."""
    for grid in grids:
        about = f"tokens of grid and symmetry {grid}, {what}"
        for ours, theirs in zip(OPS.quantize_tokens(x, *grid), eager.quantize_tokens(x, *grid), strict=True):
            assert_same(ours, theirs, f"codes, scale or zero point, {about}")
        assert_same(OPS.fake_quantize_tokens(x, *grid), eager.fake_quantize_tokens(x, *grid), about)
        grad_x = OPS.fake_quantize_tokens_backward(grad, x, *grid)
        assert_same(grad_x, eager.fake_quantize_tokens_backward(grad, x, *grid), f"gradient, {about}")
        for wanted in (True, False):
            overwritten = grad.clone(memory_format=torch.contiguous_format)
            values = OPS.fake_quantize_tokens_and_mask_(overwritten, x, *grid, wanted)
            expected = eager.fake_quantize_tokens(x, *grid) if wanted else x.new_empty(0)
            assert_same(values, expected, f"values while masking, {about}")
            assert_same(overwritten, grad_x, f"masked, {about}")


def test_random_tensors(seed):
    """Any shape, stride, dtype, grid, number of scales and value."""
    for _ in range(200):
        check(random_case())


@pytest.mark.full
def test_many_random_tensors(seed):
    for _ in range(4000):
        check(random_case())
    for _ in range(100):
        check(random_case(2_000_000))


@pytest.mark.full
def test_a_run_of_more_segments_than_accumulators(seed):
    """Step 4 of the order of addition adds more than one segment per accumulator: beyond 33.5 million elements."""
    numel = SEGMENT * POSITIONS + 3 * SEGMENT + 5
    x, grad = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    case = Case(x, grad, torch.tensor([0.3]), torch.tensor([0.1]), 4, torch.bfloat16, 1.0)
    _, grad_theta = OPS.fake_quantize_backward(grad, x, *case.scales, 4, torch.bfloat16, 1.0, True)
    check_theta_gradient(case, grad_theta)


def test_the_metric_tells_values_apart():
    """assert_same and the bound of check_theta_gradient can fail."""
    assert_same(torch.tensor([math.nan, 1.0, -0.0]), torch.tensor([-math.nan, 1.0, -0.0]))
    for a, b in ((0.0, -0.0), (1.0, 1 + 2**-23), (math.nan, 1.0), (1.0, math.nan)):
        with pytest.raises(pytest.fail.Exception):
            assert_same(torch.tensor([a]), torch.tensor([b]))
    x, grad = torch.randn(5000), torch.rand(5000)
    case = Case(x, grad, torch.tensor([0.3]), torch.tensor([0.1]), 4, torch.float32, 1.0)
    _, grad_theta = OPS.fake_quantize_backward(grad, x, *case.scales, 4, torch.float32, 1.0, True)
    check_theta_gradient(case, grad_theta)
    with pytest.raises(pytest.fail.Exception):
        check_theta_gradient(case, torch.nextafter(grad_theta, torch.tensor(9e9)))


# ---- every value


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_value_of_a_16_bit_dtype(dtype):
    """All 65,536 bit patterns, NaNs and denormals among them, under a few scales of every grid."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    grad = torch.full_like(x, -3.0)
    for grid in GRIDS:
        for scale in (1.0, 0.25, 0.0123, 3.3e-5, 700.0):
            arguments = (torch.tensor([scale]), None, grid, torch.float32)
            what = f"grid {grid}, scale {scale}"
            for ours, theirs in zip(
                OPS.quantize(x, *arguments, True), eager.quantize(x, *arguments, True), strict=True
            ):
                assert_same(ours, theirs, what)
            assert_same(OPS.fake_quantize(x, *arguments), eager.fake_quantize(x, *arguments), what)
            grad_x, _ = OPS.fake_quantize_backward(grad, x, *arguments, 1.0, False)
            assert_same(grad_x, eager.fake_quantize_backward(grad, x, *arguments, 1.0, False)[0], what)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_every_value_as_a_token(dtype):
    """Each bit pattern beside a few others that make its range."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for others in ((), (1.0,), (-0.7, 2.0), (1e-3, -1e3)):
        tokens = torch.stack([x, *(torch.full_like(x, other) for other in others)], dim=1)
        check_tokens(tokens, torch.ones_like(tokens), str(others))


def test_every_code(seed):
    """All 256 of them, under random scales, to every dtype."""
    every = torch.arange(256, dtype=torch.uint8)
    code_dtypes = (torch.float8_e4m3fn, torch.int8, torch.uint8)
    for code_dtype, dtype, scale_dtype in itertools.product(code_dtypes, DTYPES, DTYPES):
        s0 = torch.exp(3 * torch.randn(40))
        codes = every.view(code_dtype).expand(40, 256)
        ours = OPS.dequantize(codes, s0, None, scale_dtype, dtype)
        assert_same(ours, eager.dequantize(codes, s0, None, scale_dtype, dtype))
        held = s0.clamp(2.0**-24, 65504.0) if scale_dtype == torch.float16 else s0  # neither 0 nor infinite
        stored = held.to(scale_dtype).float()[:, None]
        if code_dtype == torch.uint8:
            values = torch.tensor(E2M1 + [-value for value in E2M1])[every.long() % 16].expand(40, 256)
        else:
            values = codes.float()  # what a code is, torch says
        assert_same(ours, (values * stored).to(dtype))


def neighbours(v: Tensor) -> Tensor:
    """``v`` and the floats next to it, two to each side."""
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    above, below = torch.nextafter(v, up), torch.nextafter(v, down)
    return torch.stack([torch.nextafter(below, down), below, v, above, torch.nextafter(above, up)])


@pytest.mark.parametrize("grid", (0, 1))
def test_every_boundary_of_floating_point_grids(grid):
    """The fp32 numbers around each tie between neighbours, and around each value itself, go where they must."""
    if grid == 0:
        # Beyond the end of the grid comes 480, the tie with which goes to the even 448.
        values = torch.cat(
            [torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float(), torch.tensor([480])]
        )
        sign_bit, last_inside = 0x80, 464.0
    else:
        values = torch.tensor([*E2M1, 8.0])  # and here 8, which is even
        sign_bit, last_inside = 8, math.nextafter(7.0, 0.0)
    last = len(values) - 2
    ties = neighbours((values[1:] + values[:-1]) / 2)  # exact in fp32
    below = torch.arange(last + 1)
    even = below + below % 2
    expected = torch.stack([below, below, even, below + 1, below + 1]).clamp(max=last)
    one = (torch.ones(1), None, grid, torch.float32)
    for sign, bit in ((1, 0), (-1, sign_bit)):
        codes, mask = OPS.quantize(sign * ties, *one, True)
        assert torch.equal(codes.view(torch.uint8), (expected | bit).to(torch.uint8))
        inside = ties.double() <= last_inside
        assert torch.equal(packing.unpack_bits(mask, ties.shape), inside)
        around = sign * torch.cat([ties.flatten(), neighbours(values[1:-1]).flatten()])
        assert_same(OPS.fake_quantize(around, *one), eager.fake_quantize(around, *one))
        case = Case(around, torch.ones_like(around), one[0], torch.zeros(1), grid, torch.float32, 1.0)
        grad_x, grad_theta = OPS.fake_quantize_backward(case.grad, around, *case.scales, grid, torch.float32, 1.0, True)
        assert torch.equal(grad_x, (around.abs().double() <= last_inside).float())
        check_theta_gradient(case, grad_theta)


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_boundary_of_integers(bits):
    """Ties go to the even code, also at the ends, where they decide what is inside."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    ties = neighbours(torch.arange(low - 2, high + 2) + 0.5)
    codes, mask = OPS.quantize(ties, torch.ones(1), None, bits, torch.float32, True)
    rounded = torch.from_numpy(np.rint(ties.double().numpy()))
    assert torch.equal(codes.double(), rounded.clamp(low, high))
    assert torch.equal(packing.unpack_bits(mask, ties.shape), (rounded >= low) & (rounded <= high))


# ---- the exponential


def exponentials(theta: Tensor) -> Tensor:
    """The kernel's fp32 ``exp(theta)``: of a code 1 with s0 = 1."""
    ones = torch.ones(theta.numel(), dtype=torch.int8)
    return OPS.dequantize(ones, torch.ones(theta.numel()), theta, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exponential(dtype, seed):
    """The correctly rounded fp32 number: for every 16-bit theta, and for a million fp32 ones around 0 and beyond.

    Where e^theta lies within 2^-50 of itself from a tie between two fp32 numbers, either may come out: fp64 is not
    exact. One in some 2^26 random arguments does.
    """
    if dtype == torch.float32:
        theta = torch.cat([scale * torch.randn(250_000) for scale in (0.01, 1.0, 20.0, 80.0)])
    else:
        theta = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    ours, exact = exponentials(theta), theta.double().exp()
    either = torch.stack([(exact * (1 + side * 2.0**-50)).float() for side in (-1, 1)])
    wrong = ~((ours == either).any(0) | (ours.isnan() & theta.isnan()))
    assert not wrong.any(), f"{wrong.sum()}, such as exp({theta[wrong][0]}) = {ours[wrong][0]}"
    assert (ours != exact.float()).logical_and(~theta.isnan()).sum() <= 2  # expected: 1e6 / 2^26


def test_the_exponential_in_decimal(seed):
    """Against an exponential that shares nothing with fp64: 40 decimal digits."""
    with decimal.localcontext(prec=40):
        theta = torch.cat([0.1 * torch.randn(100), 10 * torch.randn(100), torch.linspace(-103.9, 88.7, 100)])
        for t, ours in zip(theta.tolist(), exponentials(theta).tolist(), strict=True):
            exact = decimal.Decimal(t).exp()
            size = np.float32(ours)
            step = decimal.Decimal(float(np.spacing(size)))
            assert abs(decimal.Decimal(ours) - exact) <= step * decimal.Decimal("0.50000001"), t


def test_the_exponential_of_special_values():
    """1 exactly at 0, the limits of fp32, what is not finite."""
    up, down = np.float32(np.inf), np.float32(-np.inf)
    largest, smallest = np.float32(88.72283), np.float32(-103.97208)  # ln of 2^128 and of 2^-150, rounded down
    pairs = [
        (0.0, 1.0),
        (-0.0, 1.0),
        (1e-45, 1.0),
        (largest, np.float32(np.exp(np.float64(largest)))),
        (np.nextafter(largest, up), math.inf),
        (np.nextafter(smallest, down), 0.0),
        (np.nextafter(smallest, up), 2.0**-149),
        (88.0, np.float32(np.exp(88.0))),
        (-88.0, np.float32(np.exp(-88.0))),
        (104.0, math.inf),
        (-104.0, 0.0),
        *((sign * size, math.inf if sign > 0 else 0.0) for sign in (1, -1) for size in (199.9, 201.0, 1e9, 3e38)),
        (math.inf, math.inf),
        (-math.inf, 0.0),
        (math.nan, math.nan),
    ]
    theta, expected = (torch.tensor([float(pair[i]) for pair in pairs]) for i in (0, 1))
    assert_same(exponentials(theta), expected)


# ---- what torch must know of the operators


def samples() -> list[tuple[str, tuple]]:
    """Arguments of every operator, with one scale and several, not contiguous and empty."""
    found: list[tuple[str, tuple]] = []
    for x, s0 in (
        (torch.randn(6, 16), torch.full((1,), 0.1)),
        (torch.randn(2, 16, 5).bfloat16().transpose(0, 2), torch.full((5, 4), 0.1)),
        (torch.randn(16, 5).t(), torch.full((5, 1), 0.1)),
        (torch.randn(0, 8).half(), torch.full((3,), 0.1)),
    ):
        theta, grad = (0.1 * torch.randn(s0.shape)).to(x.dtype), torch.randn_like(x)
        for t, grid, wanted in ((theta, 0, True), (theta, 4, False), (None, 0, False), (theta, 1, True)):
            stored = x.dtype if grid > 1 else torch.float32
            codes = eager.quantize(x, s0, t, grid, stored, False)[0]
            found += [
                ("effective_scale", (s0, t, stored)),
                ("quantize", (x, s0, t, grid, stored, wanted)),
                ("quantize_with_values", (x, s0, t, grid, stored, wanted)),
                ("quantize_with_scale", (x, s0, t, grid, stored)),
                ("dequantize", (codes, s0, t, stored, x.dtype)),
                ("dequantize_with_zeros", (codes, s0, theta, stored, x.dtype)),
                ("fake_quantize", (x, s0, t, grid, stored)),
                ("fake_quantized", (x, s0, t, grid, stored)),
                ("fake_quantize_backward", (grad, x, s0, t, grid, stored, 0.5, wanted)),
                ("fake_quantize_backward_", (grad.contiguous(), x, s0, t, grid, stored, 0.5, wanted)),
            ]
        mask = packing.pack_bits(torch.rand(x.shape) < 0.5)
        found += [("masked", (grad, mask)), ("masked_", (grad.contiguous(), mask)), ("amax", (x, s0.numel()))]
        lora_a, lora_b = torch.randn(2, 7).to(x.dtype), torch.randn(5, 2).to(x.dtype)
        products = (
            torch.randn(4, 5).to(x.dtype),
            torch.randn(4, 7).to(x.dtype),
            packing.pack_bits(torch.rand(35) < 0.5),
        )
        found += [("count_clipped", (mask, x.numel())), ("clipped_products", (*products, lora_a, lora_b))]
        found.append(("merge", (torch.randn(7, 5).to(x.dtype).t(), lora_a, lora_b, 0.7)))
        found.append(("dequantize_and_mask_", (grad.contiguous(), mask, codes, s0, None, torch.float32)))
        found.append(("keep_tokens", (x, 0, False)))
        for tokens in ((0, True), (8, False)):
            found += [
                ("quantize_tokens", (x, *tokens)),
                ("fake_quantize_tokens", (x, *tokens)),
                ("fake_quantized_tokens", (x, *tokens)),
                ("fake_quantize_tokens_backward", (grad, x, *tokens)),
                ("fake_quantize_tokens_and_mask_", (grad.contiguous(), x, *tokens, tokens[1])),
            ]
    for x in (torch.randn(16, 5).t(), torch.randn(2, 16, 5).bfloat16().transpose(1, 2), torch.randn(0, 8).half()):
        how, other, mask = (torch.ones(1), 0, torch.float32), torch.randn_like(x), packing.pack_bits(x < 0.5)
        weight, rstd = torch.randn(x.shape[-1]).to(x.dtype), torch.rand(x.shape[:-1].numel())
        for wanted in (False, True):
            found += [
                ("rms_norm_quantize", (x, weight, 1e-6, *how, wanted, not wanted)),
                ("rms_norm_backward", (other, x, weight, rstd, mask, wanted)),
                ("silu_mul_quantize", (x, other, *how, wanted, wanted)),
                ("silu_mul_backward", (other, x, x.clone(), mask)),
            ]
        grad = torch.randn(5, 6).to(x.dtype)
        found.append(("quantize_gradient", (grad, random.choice([torch.float8_e4m3fn, torch.float8_e5m2]))))
        found.append(("quantize_transposed", (grad, torch.full((1,), 0.1), None)))
        found.append(("transpose_codes", (grad.to(torch.float8_e4m3fn),)))
    for places in (torch.tensor([[0, 2], [1, 1], [2, 0]]), torch.zeros(4, 0, dtype=torch.int64)):
        found.append(("sum_rows", (torch.randn(5, 3).t(), places.t().contiguous().t())))
    return found


def rows_to_sum() -> tuple[Tensor, Tensor]:
    """Random rows with values that are not finite, and which of them make each of some sums."""
    count, width, sums, per_sum = (random.randint(low, high) for low, high in ((1, 40), (1, 300), (0, 50), (0, 9)))
    values = torch.randn(count * width).to(random.choice(DTYPES))
    rows = random_layout(special_values(values, 1.0) if random.random() < 0.3 else values, (count, width))
    return rows, torch.randint(count, (sums, per_sum))


def test_sums_of_rows(seed):
    """One addition at a time, each rounded: a CPU's sum over a dimension rounds once."""
    for _ in range(200):
        rows, places = rows_to_sum()
        assert_same(kernels.sum_rows(rows, places), eager.sum_rows(rows, places), f"{rows.shape}, {places.shape}")
    with pytest.raises(RuntimeError, match="places are Int on cpu, expected int64 on cpu"):
        kernels.sum_rows(torch.randn(3, 4), torch.zeros(2, 2, dtype=torch.int32))


def test_schemas_shapes_and_registrations():
    """Nothing is written in place, shapes and strides are what torch.compile is told, in every sample."""
    called = set()
    for name, arguments in samples():
        tests = ["test_autograd_registration", "test_faketensor"]
        if arguments[0].dtype != torch.float8_e4m3fn:  # the check itself does arithmetic with the inputs
            tests.append("test_schema")
        opcheck(getattr(OPS, name).default, arguments, test_utils=tests)
        called.add(name)
    assert called == {
        name.removeprefix("deepqat::") for name in torch._C._dispatch_get_all_op_names() if "deepqat::" in name
    }


def test_the_differentiable_operators_under_compilation():
    """opcheck of what autograd is registered for, with gradients, traced with dynamic shapes."""
    x, theta = torch.randn(3, 8, requires_grad=True), torch.randn(3, requires_grad=True)
    opcheck(OPS.fake_quantize.default, (x, torch.full((3,), 0.1), theta, 4, torch.float32))
    opcheck(OPS.fake_quantize_tokens.default, (x, 8, False))


def test_results_are_contiguous_and_new(seed):
    """Whatever the strides: torch.compile relies on it, and a result that shared memory would change with x."""
    for name, arguments in samples():
        if name.endswith("_"):
            continue
        results = getattr(OPS, name)(*arguments)
        before = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        for result in results if isinstance(results, tuple) else (results,):
            assert result.is_contiguous(), name
            inputs = [a for a in arguments if isinstance(a, Tensor) and a.numel()]
            assert result.numel() == 0 or all(result.data_ptr() != a.data_ptr() for a in inputs), name
            result.zero_()
        for a, b in zip(arguments, before, strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a.float(), b.float()), name


def test_the_reference_can_stand_in(seed):
    """Without a compiler: every operator with the same arguments, and results as contiguous."""
    for name, arguments in samples():
        results = getattr(eager, name)(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        assert all(result is None or result.is_contiguous() for result in results), name
    x, s0 = torch.randn(4, 8), torch.full((1,), 0.1)
    codes, _ = eager.quantize(x, s0, None, 0, torch.float32, False)
    for module in (eager, OPS):  # the last argument is there for torch.compile
        values = module.fake_quantize(x, s0, None, 0, torch.float32, x)
        assert torch.equal(values, module.dequantize(codes, s0, None, torch.float32, torch.float32, x))
        assert torch.equal(module.fake_quantize_tokens(x, 0, True, x), module.fake_quantize_tokens(x, 0, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("grid", "shifted"), [(0, False), (1, False), (2, False), (4, False), (-4, False), (4, True), (8, True)]
)
def test_gradients_of_fake_quantize(grid, shifted, dtype, seed):
    """Autograd through the operator is the reference's backward; only what needs a gradient gets one."""
    zero = torch.randint(-(2 ** (grid - 1)), 2 ** (grid - 1), (6, 5)).float() if shifted else None
    x = torch.randn(6, 40).to(dtype).requires_grad_()
    s0 = (torch.rand(6, 5) + 0.5) / spec_of(grid).qmax
    theta = (0.3 * torch.randn(6, 5)).to(dtype).requires_grad_()
    grad = torch.randn(6, 40).to(dtype)
    grad_x, grad_theta = torch.autograd.grad(OPS.fake_quantize(x, s0, theta, grid, dtype, None, zero), [x, theta], grad)
    case = Case(x.detach(), grad, s0, theta.detach(), grid, dtype, 1.0, zero)
    expected, _ = eager.fake_quantize_backward(grad, x.detach(), s0, theta.detach(), grid, dtype, 1.0, False, zero)
    assert_same(grad_x, expected)
    check_theta_gradient(case, grad_theta)
    assert (grad_x == 0).any() and grad_theta.any(), "some must be clipped"
    for wanted in (x, theta):
        x.requires_grad_(wanted is x), theta.requires_grad_(wanted is theta)
        (alone,) = torch.autograd.grad(OPS.fake_quantize(x, s0, theta, grid, dtype, None, zero), [wanted], grad)
        assert torch.equal(alone, grad_x if wanted is x else grad_theta)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_fake_quantize_tokens(dtype, seed):
    """Straight-through within the range of each token; of a token that is not finite nothing."""
    x = torch.randn(50, 33).to(dtype)
    x[3, 5], x[4, 6] = math.nan, math.inf
    x.requires_grad_()
    grad = torch.randn(50, 33).to(dtype)
    for tokens in TOKEN_GRIDS:
        (ours,) = torch.autograd.grad(OPS.fake_quantize_tokens(x, *tokens), x, grad)
        assert_same(ours, eager.fake_quantize_tokens_backward(grad, x.detach(), *tokens))
        assert not ours[3:5].any() and ours[:3].any()


def test_no_scale_of_fp16_is_0_or_infinite(seed):
    """2^-24 and 65504 are the ends, whichever way a scale came there, and signs stay; NaN and infinities are NaN."""
    ends = [1e-12, 2.0**-26, 2.0**-25, 2.9e-8, 2.0**-24, 9e-8, 1e-6, 2.0**-14, 1.0, 65504.0, 65519.0, 65520.0, 1e9]
    expected = torch.tensor(ends).clamp(2.0**-24, 65504).half().float()
    s0 = torch.tensor([*ends, *(-end for end in ends), math.nan, math.inf, -math.inf])
    expected = torch.cat([expected, -expected, torch.full((3,), math.nan)])
    assert_same(OPS.effective_scale(s0, None, torch.float16), expected)
    assert_same(eager.effective_scale(s0, None, torch.float16), expected)
    x = special_values(torch.randn(len(s0), 32), 1e-7)
    theta = torch.where(torch.rand(len(s0)) < 0.5, -200.0, 0.3)  # e^-200 is 0 in fp32
    for dtype, its_theta in itertools.product(DTYPES, (None, theta)):
        arguments = (x.to(dtype), s0, its_theta, 4, torch.float16)
        ours = OPS.fake_quantize(*arguments)
        assert_same(ours, eager.fake_quantize(*arguments))
        assert not ours[: 2 * len(ends)].isnan().logical_xor(arguments[0][: 2 * len(ends)].isnan()).any()


def test_the_functions_are_the_operators(seed):
    """quant.kernels translates specs: integers have their scale rounded to the model's dtype, others in fp32."""
    x, s0, theta = torch.randn(4, 32).bfloat16(), torch.rand(4) + 0.1, torch.randn(4).bfloat16()
    grad = torch.randn_like(x)
    for spec, grid, stored in (
        (TensorSpec("fp8_e4m3", 8, "channel"), 0, torch.float32),
        (TensorSpec("fp4_e2m1", 4, "group", 32), 1, torch.float8_e8m0fnu),
        (TensorSpec("fp4_e2m1", 4, "group", 16), 1, torch.float8_e4m3fn),
        (TensorSpec("fp8_e4m3", 8, "group", 32, mx=True), 0, torch.float8_e8m0fnu),
        (TensorSpec("int", 3, "channel"), 3, torch.bfloat16),
        (TensorSpec("int", 4, "group", 32, ggml=True), 4, torch.float16),
    ):
        above = torch.rand(1) * 100 if spec.has_global_scale else None
        scales, beside = (s0, theta), (None, above)
        quantizer = Quantizer(Scale(s0, theta, above), spec, torch.bfloat16)
        effective = reference.effective_scale(s0, theta, spec, torch.bfloat16, above)
        assert_same(kernels.effective_scale(quantizer), effective)
        codes, mask = kernels.quantize(x, quantizer, mask=True)
        expected_codes, expected_mask = eager.quantize(x, *scales, grid, stored, True, *beside)
        assert_same(codes, expected_codes)
        assert_same(mask, expected_mask)
        assert kernels.quantize(x, quantizer)[1].numel() == 0
        values = kernels.dequantize(codes, quantizer)
        assert_same(values, eager.dequantize(codes, *scales, stored, torch.bfloat16, None, *beside))
        halves = kernels.dequantize(codes, quantizer._replace(dtype=torch.float16))
        stored_in_halves = torch.float16 if stored == torch.bfloat16 else stored
        assert_same(halves, eager.dequantize(codes, *scales, stored_in_halves, torch.float16, None, *beside))
        assert_same(kernels.fake_quantize(x, quantizer), eager.fake_quantize(x, *scales, grid, stored, None, *beside))
        both = kernels.quantize_with_values(x, quantizer, mask=True)
        for ours, theirs in zip(both, (codes, mask, kernels.fake_quantize(x, quantizer)), strict=True):
            assert_same(ours, theirs)
        grad_x, again, overwritten = grad.clone(), grad.clone(), grad.clone()
        grad_theta = kernels.fake_quantize_backward_(grad_x, x, quantizer, factor=0.3, theta_gradient=True)
        assert kernels.masked_(overwritten, mask) is overwritten
        assert_same(grad_x, overwritten)
        check_theta_gradient(Case(x, grad, s0, theta, grid, stored, 0.3, None, above), grad_theta)
        assert kernels.fake_quantize_backward_(again, x, quantizer, factor=0.3, theta_gradient=False) is None
        assert_same(again, grad_x)
    assert_same(kernels.amax(x), eager.amax(x, 1))
    assert_same(kernels.amax(x, 8), eager.amax(x, 8))
    for spec, arguments in (
        (TensorSpec("int", 8, "token", symmetric=False, dynamic=True), (8, False)),
        (TensorSpec("fp8_e4m3", 8, "token", dynamic=True), (0, True)),
        (TensorSpec("fp8_e4m3", 8, "group", 16, dynamic=True), (0, True)),
    ):
        groups = (4, 32) if spec.group_size is None else (4, 2, 16)
        codes, scale, zero_point = kernels.quantize_tokens(x, spec)
        assert scale.shape == zero_point.shape == (4, 1 if spec.group_size is None else 2)
        theirs = eager.quantize_tokens(x.view(groups), *arguments)
        for ours, expected in zip((codes, scale, zero_point), theirs, strict=True):
            assert_same(ours, expected.view(ours.shape))
        for ours, expected in zip((codes, scale, zero_point), reference.quantize_tokens(x, spec), strict=True):
            assert_same(ours, expected)
        assert_same(kernels.fake_quantize_tokens(x, spec), reference.fake_quantize_tokens(x, spec))
        ours = kernels.fake_quantize_tokens_backward(grad, x, spec)
        assert_same(ours, reference.fake_quantize_tokens_backward(grad, x, spec))


# ---- threads


@pytest.mark.parametrize(
    ("rows", "columns", "count"),
    [(1, 40 * SEGMENT + 77, 1), (4096, 96, 4096), (70, SEGMENT + 3, 70), (300, 999, 900)],
)
def test_the_number_of_threads_changes_nothing(rows, columns, count, seed):
    """Many segments of one run, short runs and long ones, tokens: bit for bit, and again the same."""
    x, grad = torch.randn(rows, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    s0, theta = torch.rand(count) * 0.2 + 0.1, 0.3 * torch.randn(count)

    def everything() -> list[Tensor]:
        codes, mask = OPS.quantize(x, s0, theta, 0, torch.float32, True)
        return [
            codes.view(torch.uint8),
            mask,
            OPS.dequantize(codes, s0, theta, torch.float32, torch.bfloat16),
            *OPS.quantize_with_values(x, s0, theta, 5, torch.float16, True),
            OPS.effective_scale(s0, theta, torch.bfloat16),
            OPS.fake_quantize(x, s0, theta, 4, torch.bfloat16),
            *OPS.fake_quantize_backward(grad, x, s0, theta, 4, torch.bfloat16, 0.3, True),
            OPS.masked(grad, mask),
            OPS.amax(x, count),
            OPS.fake_quantize(x, s0, theta, 1, torch.float32),
            *OPS.quantize_tokens(x, 8, False),
            OPS.fake_quantize_tokens(x, 0, True),
            OPS.fake_quantize_tokens_backward(grad, x, 8, False),
            *OPS.quantize_with_scale(x, s0, theta, 4, torch.bfloat16),
            *OPS.dequantize_with_zeros(codes, s0, theta, torch.float32, torch.bfloat16),
            OPS.fake_quantize_tokens_and_mask_(grad.clone(memory_format=torch.contiguous_format), x, 8, False, True),
        ]

    threads = torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3, 3):
            torch.set_num_threads(number)
            results.append(everything())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- errors

X, S0, THETA = torch.randn(4, 6), torch.ones(4), torch.zeros(4)
ONE = torch.ones(1)
QUANTIZE = (X, S0, THETA, 0, torch.float32)
BACKWARD = (X, X, S0, THETA, 0, torch.float32, 1.0, True)


def changed(arguments: tuple, position: int, value) -> tuple:
    return (*arguments[:position], value, *arguments[position + 1 :])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fake_quantize", changed(QUANTIZE, 1, torch.ones(5)), "5 scales do not divide 24 elements"),
        ("fake_quantize", changed(QUANTIZE, 1, torch.ones(0)), "0 scales do not divide 24 elements"),
        ("fake_quantize", changed(QUANTIZE, 1, S0.double()), "s0 is Double, expected float32"),
        ("fake_quantize", changed(QUANTIZE, 1, S0.bfloat16()), "s0 is BFloat16, expected float32"),
        ("fake_quantize", changed(QUANTIZE, 1, torch.ones(8)[::2]), "s0 must be contiguous"),
        ("fake_quantize", changed(QUANTIZE, 2, torch.zeros(3)), "theta has 3 elements, s0 has 4"),
        (
            "fake_quantize",
            changed(QUANTIZE, 2, THETA.double()),
            "theta is Double, expected float32, bfloat16 or float16",
        ),
        ("fake_quantize", changed(QUANTIZE, 2, torch.ones(8)[::2]), "theta must be contiguous"),
        ("fake_quantize", changed(QUANTIZE, 0, X.double()), "x is Double, expected float32, bfloat16 or float16"),
        ("fake_quantize", changed(QUANTIZE, 0, X.int()), "x is Int, expected float32, bfloat16 or float16"),
        ("fake_quantize", changed(QUANTIZE, 3, -1), "grid -1 is neither 0 .e4m3., 1 .e2m1. nor 2 to 8 bits"),
        ("fake_quantize", changed(QUANTIZE, 3, -9), "grid -9 is neither"),
        ("fake_quantize", (X, S0, None, -4, torch.float32, None, S0), "a narrow grid has no zero points"),
        ("fake_quantize", changed(QUANTIZE, 3, 9), "grid 9 is neither"),
        ("fake_quantize", changed(QUANTIZE, 4, torch.float64), "scale_dtype is Double, expected float32"),
        ("quantize", (torch.randn(7), S0, None, 4, torch.float32, True), "4 scales do not divide 7 elements"),
        (
            "dequantize",
            (X.short(), S0, None, torch.float32, torch.float32),
            "codes are Short, expected float8_e4m3fn, uint8 .e2m1. or int8",
        ),
        ("dequantize", (X.char(), S0, None, torch.float32, torch.float64), "dtype is Double, expected float32"),
        ("fake_quantize_backward", changed(BACKWARD, 0, X[:2]), r"grad is \[2, 6\] Float, x is \[4, 6\] Float"),
        ("fake_quantize_backward", changed(BACKWARD, 0, X.t()), r"grad is \[6, 4\] Float, x is \[4, 6\] Float"),
        ("fake_quantize_backward", changed(BACKWARD, 0, X.half()), r"grad is \[4, 6\] Half, x is \[4, 6\] Float"),
        ("fake_quantize_backward", changed(BACKWARD, 3, None), "there is no theta"),
        ("fake_quantize_backward_", changed(BACKWARD, 0, torch.randn(6, 4).t()), "grad has strides"),
        (
            "fake_quantize_backward_",
            changed(BACKWARD, 0, X[:2].clone()),
            r"grad is \[2, 6\] Float, x is \[4, 6\] Float",
        ),
        ("masked_", (torch.randn(6, 4).t(), torch.zeros(3, dtype=torch.uint8)), "grad has strides"),
        ("masked_", (X, torch.zeros(2, dtype=torch.uint8)), r"a mask of 2 bytes \(Byte\) does not belong to 24"),
        ("effective_scale", (S0.double(), None, torch.float32), "s0 is Double, expected float32"),
        ("effective_scale", (S0, torch.zeros(5), torch.float32), "theta has 5 elements, s0 has 4"),
        (
            "quantize_with_values",
            (*QUANTIZE[:1], torch.ones(5), None, 0, torch.float32, True),
            "5 scales do not divide",
        ),
        (
            "masked",
            (X, torch.zeros(2, dtype=torch.uint8)),
            r"a mask of 2 bytes \(Byte\) does not belong to 24 elements",
        ),
        ("masked", (X, torch.zeros(24, dtype=torch.bool)), r"a mask of 24 bytes \(Bool\) does not belong"),
        ("amax", (X, 5), "5 parts do not divide 24 elements"),
        ("amax", (X, 0), "0 parts do not divide 24 elements"),
        ("amax", (X.double(), 1), "x is Double, expected float32, bfloat16 or float16"),
        ("quantize_tokens", (torch.tensor(1.0), 8, True), "at least one dimension"),
        ("quantize_tokens", (X, 9, True), "grid 9 of tokens is neither 0 .e4m3., 1 .e2m1. nor 2 to 8 bits"),
        ("quantize_tokens", (X, 1, True), "scales of tokens are float32, of floats powers of two, of e2m1 also e4m3"),
        ("quantize_tokens", (X, 8, True, torch.float8_e8m0fnu), "scales of tokens are float32, of floats powers"),
        ("quantize_tokens", (X.view(1, 24).repeat(1, 2), 1, True, torch.float8_e8m0fnu), "at most 32 features, got 48"),
        ("quantize_tokens", (X, 1, True, torch.float8_e4m3fn), "scales in e4m3, and no others, lie below a global one"),
        ("quantize_tokens", (X, 1, True, torch.float8_e8m0fnu, ONE), "scales in e4m3, and no others, lie below"),
        ("quantize_tokens", (X, 1, True, torch.float8_e4m3fn, ONE.expand(2)), "tokens have one global scale, got 2"),
        ("fake_quantize", (X, ONE, None, 1, torch.float8_e4m3fn), "scales in e4m3, and no others, lie below a global"),
        ("fake_quantize", (X, ONE, None, 1, torch.float32, None, None, ONE), "scales in e4m3, and no others, lie"),
        ("fake_quantize_tokens", (X, 0, False), "codes of tokens that are floats are symmetric"),
        ("fake_quantize_tokens_backward", (X[:, :3], X, 8, True), r"grad is \[4, 3\] Float, x is \[4, 6\] Float"),
        ("fake_quantize_tokens_and_mask_", (X[:3], X, 8, True, True), r"grad is \[3, 6\] Float on cpu, x is \[4, 6\]"),
        ("fake_quantize_tokens_and_mask_", (X.t(), X.t(), 8, True, True), "must be contiguous, grad has strides"),
        ("quantize_with_scale", (X, ONE.double(), None, 8, torch.float32), "s0 is Double, expected float32"),
    ],
)
def test_errors_name_what_is_wrong(name, arguments, message):
    """An operator refuses what it cannot compute, and says what it got and what it expected."""
    with pytest.raises((RuntimeError, TypeError), match=message):
        getattr(OPS, name)(*arguments)


# ---- sizes beyond 32 bits


@pytest.mark.full
def test_dequantising_more_than_2_to_31_elements():
    """Offsets are 64-bit. 2 GiB of codes, 4 GiB of values."""
    numel = 2**31 + 40
    codes = torch.zeros(numel, dtype=torch.int8)
    codes[-40:] = torch.arange(-20, 20)
    codes[2**31 - 1] = 7
    values = OPS.dequantize(codes, torch.tensor([0.5]), None, torch.float32, torch.bfloat16)
    assert torch.equal(values[-40:].float(), torch.arange(-20, 20) * 0.5)
    assert values[2**31 - 1] == 3.5
    for begin in range(0, 2**31 - 1, 2**28):
        assert not values[begin : min(begin + 2**28, 2**31 - 1)].any()


@pytest.mark.full
def test_the_largest_magnitude_of_more_than_2_to_31_elements():
    """At the very end of them; 4 GiB."""
    x = torch.zeros(2**31 + 7, dtype=torch.bfloat16)
    x[-1] = -3
    assert OPS.amax(x, 1).item() == 3
