"""Random tensors, scales and grids for the operators, with values that are not finite, in many memory layouts."""

import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from quant import reference
from quant.formats import packing
from quant.kernels.operators import REFERENCE
from quant.spec import TensorSpec

eager = SimpleNamespace(**REFERENCE)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRIDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, -2, -4, -8)
POSITIONS, SEGMENT = 2048, 16384  # of the order of addition in kernels.h
# Where loops over 8, 16 and 64 elements, 2048 accumulators and segments of 16384 end.
EDGES = (1, 8, 16, 24, 64, 80, 128, POSITIONS, POSITIONS + 64, 2 * POSITIONS, SEGMENT, SEGMENT + POSITIONS, 3 * SEGMENT)


def spec_of(grid: int) -> TensorSpec:
    """The spec of a tensor with one scale per row, of any length."""
    if grid == 1:
        return TensorSpec("fp4_e2m1", 4, "group", 16)
    if grid == 0:
        return TensorSpec("fp8_e4m3", 8, "channel")
    return TensorSpec("int", abs(grid), "channel", narrow=grid < 0)


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


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65,536 bit patterns of a 16-bit dtype, NaNs and denormals among them."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


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


def with_odd(values: Tensor | None, odd: list[float]) -> Tensor | None:
    """Rarely, some of the values replaced by odd ones."""
    if values is None or random.random() >= 0.05:
        return values
    chosen = torch.tensor(odd).to(values.dtype)[torch.randint(len(odd), values.shape)]
    return torch.where(torch.rand(values.shape) < 0.3, chosen, values)


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
        """Terms of theta's gradient ``[runs, block]``: the reference's gradients of single elements."""
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
    s0 = with_odd(s0, [0.0, math.nan, math.inf, 1e-45, 1e-38, 3e38])
    theta = with_odd(theta, [-104.0, 88.0, 89.0, math.nan, math.inf, -math.inf])
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


def rows_to_sum() -> tuple[Tensor, Tensor]:
    """Random rows with values that are not finite, and which of them make each of some sums."""
    count, width, sums, per_sum = (random.randint(low, high) for low, high in ((1, 40), (1, 300), (0, 50), (0, 9)))
    values = torch.randn(count * width).to(random.choice(DTYPES))
    rows = random_layout(special_values(values, 1.0) if random.random() < 0.3 else values, (count, width))
    return rows, torch.randint(count, (sums, per_sum))


def calls_with_scales(x: Tensor, s0: Tensor) -> list[tuple[str, tuple]]:
    """Calls of the quantizers, and of the operators on their codes and masks: names and arguments."""
    found: list[tuple[str, tuple]] = []
    theta, grad = (0.1 * torch.randn(s0.shape)).to(x.dtype), torch.randn_like(x)
    for t, grid, wanted in ((theta, 0, True), (theta, 4, False), (None, 0, False), (theta, 1, True)):
        stored = x.dtype if grid > 1 else torch.float32
        codes = eager.quantize(x, s0, t, grid, stored, False, False, False)[0]
        found += [
            ("effective_scale", (s0, t, stored)),
            ("quantize", (x, s0, t, grid, stored, wanted, not wanted, wanted)),
            ("dequantize", (codes, s0, theta, stored, x.dtype, wanted)),
            ("fake_quantize", (x, s0, t, grid, stored)),
            ("fake_quantize_backward_", (grad.contiguous(), x, s0, t, grid, stored, 0.5, wanted and t is not None)),
        ]
    found += [("multiply_runs", (x, theta)), ("sum_products", (x, grad, theta, 0.5))]
    mask = packing.pack_bits(torch.rand(x.shape) < 0.5)
    found += [("masked_", (grad.contiguous(), mask)), ("amax", (x, s0.numel())), ("keep_tokens", (x, 0, False))]
    found.append(("dequantize_and_mask_", (grad.contiguous(), mask, codes, s0, None, torch.float32)))
    for tokens in ((0, True), (8, False)):
        found.append(("fake_quantize_tokens", (x, *tokens)))
        found.append(("fake_quantize_tokens_and_mask_", (grad.contiguous(), x, *tokens, tokens[1])))
    return found


def calls_of_layers(x: Tensor) -> list[tuple[str, tuple]]:
    """Calls of norms and SwiGLU, with features that 8 divides."""
    found: list[tuple[str, tuple]] = []
    how, other, mask = (torch.ones(1), 0, torch.float32), torch.randn_like(x), packing.pack_bits(x < 0.5)
    weight, rstd = torch.randn(x.shape[-1]).to(x.dtype), torch.rand(x.shape[:-1].numel())
    for wanted in (False, True):
        found += [
            ("rms_norm_quantize", (x, weight, 1e-6, *how, wanted, not wanted)),
            ("rms_norm_backward", (other, x, weight, rstd, mask, wanted)),
            ("silu_mul_quantize", (x, other, *how, wanted, wanted)),
            ("silu_mul_backward", (other, x, x.clone(), mask)),
        ]
    return found
