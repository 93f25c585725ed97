"""Rounding that shares nothing with torch's casts, random cases, and the fp64 surrogate whose gradients ours are."""

import random

import numpy as np
import torch

from quant.reference import absmax_scale, asymmetric_grid
from quant.spec import TensorSpec

FP8 = TensorSpec("fp8_e4m3", 8, "tensor")
NVFP4, MXFP4 = TensorSpec("fp4_e2m1", 4, "group", 16), TensorSpec("fp4_e2m1", 4, "group", 32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = [
    FP8,
    TensorSpec("fp8_e4m3", 8, "channel"),
    TensorSpec("fp8_e4m3", 8, "group", 16),
    TensorSpec("fp8_e4m3", 8, "block", 16),
    NVFP4,
    MXFP4,
    *(TensorSpec("int", bits, "group", 16) for bits in (2, 3, 4, 8)),
    TensorSpec("int", 4, "channel"),
    TensorSpec("int", 8, "tensor"),
    *(TensorSpec("int", bits, "group", 16, narrow=True) for bits in (2, 4, 8)),
    *(TensorSpec("int", bits, "group", 16, symmetric=False) for bits in (2, 4, 8)),
    TensorSpec("int", 8, "channel", symmetric=False),
]
# Every e2m1 value by its code.
E2M1 = torch.tensor([sign * size for sign in (1.0, -1.0) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
# Exponent and mantissa bits: where subnormal numbers end, and 2 to the power of how many spacings fill a power of two.
SMALLEST_EXPONENT = {"fp8_e4m3": -6, "fp4_e2m1": 0}
MANTISSA = {"fp8_e4m3": 3, "fp4_e2m1": 1}


def round_oracle(v: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Nearest value of the *unbounded* grid, ties to even, by arithmetic in float64 that shares nothing with torch's
    cast.

    e4m3 continued beyond 448 and e2m1 beyond 6 as if their exponents had no end; integers beyond qmin and qmax.
    """
    v = v.astype(np.float64)
    if spec.dtype == "int":
        return np.rint(v)
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(v))), SMALLEST_EXPONENT[spec.dtype])
    spacing = np.exp2(exponent - MANTISSA[spec.dtype])
    return np.rint(v / spacing) * spacing


def values_of(codes: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What codes stand for, fp32."""
    return E2M1[codes.long()] if spec.dtype == "fp4_e2m1" else codes.float()


def per_scale(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The elements of ``x [out, in]`` as ``[*scale shape, elements]``, by the scale that they have; zeros where the
    last block of a row or column lacks elements."""
    if spec.granularity == "tensor":
        return x.reshape(1, -1)
    down = spec.group_size if spec.granularity == "block" else 1
    across = x.shape[1] if spec.granularity == "channel" else spec.group_size
    whole = torch.zeros(-(-x.shape[0] // down) * down, -(-x.shape[1] // across) * across, dtype=x.dtype)
    whole[: x.shape[0], : x.shape[1]] = x
    return whole.unflatten(1, (-1, across)).unflatten(0, (-1, down)).transpose(1, 2).flatten(2)


def random_case(spec: TensorSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A tensor in a random shape and stride with a scale that clips some of it, and its zero points if it has any.

    With zero points some rows are of one sign alone, and one is of zeros. Blocks need not divide rows and columns.
    """
    rows, columns = random.randint(1, 40), 32 * random.randint(1, 6)
    if spec.granularity == "block":
        rows, columns = (random.choice((16 * random.randint(1, 3), random.randint(1, 50))) for _ in range(2))
    x = torch.randn(rows, columns) * torch.exp(torch.randn(rows, 1))
    layout = random.choice(("plain", "transposed", "sliced"))
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "sliced":
        x = torch.cat([x, x], dim=1)[:, :columns]
    x = x.to(dtype)
    if spec.has_zero_points:
        x = x + torch.randint(-3, 4, (rows, 1)).to(dtype)
        x[1:2] = 0
    parts = per_scale(x.float(), spec)
    clip = torch.empty(parts.shape[:-1]).uniform_(0.3, 1.2)
    clip.view(-1)[0] = 0.3
    if not spec.has_zero_points:
        return x, absmax_scale(parts.abs().amax(-1), spec) * clip, None
    scale, zero = asymmetric_grid(parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0), spec)
    return x, scale * clip, zero


def ends(x: torch.Tensor, zero: torch.Tensor | None, spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest value of every element's grid, in steps from 0."""
    shift = torch.zeros(()) if zero is None else expand(zero, x, spec).double()
    return spec.qmin - shift, spec.qmax - shift


def expand(scale: torch.Tensor, x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The scale of every element."""
    if spec.granularity == "tensor":
        return scale.expand(x.shape)
    if spec.granularity == "block" and scale.shape != x.shape:
        down, across = (torch.arange(side) // spec.group_size for side in x.shape)
        return scale[down[:, None], across]
    rows = scale.repeat_interleave(x.shape[0] // scale.shape[0], dim=0)
    return rows.repeat_interleave(x.shape[1] // scale.shape[1], dim=1)


class Surrogate:
    """What the gradients are those of: fp64 fake quant with the rounding errors of (x, scale) held fixed.

    ``s * clamp(v + e, qmin - z, qmax - z)``, where the error e is fixed in codes on an evenly spaced grid, and in units
    of x (e shrinks as s grows) where the spacing follows x: normal numbers of floating-point grids. Rounding is to the
    unbounded grid, so that clamp alone decides what is outside. Beyond the largest number of a floating-point grid it
    is ``s * bound``, and follows x all the same where that is inside: ``s * bound + x - stopgrad(x)``.
    """

    def __init__(self, x, scale, spec, zero=None):
        self.spec, self.ends = spec, ends(x, zero, spec)
        s = expand(scale, x, spec)
        v = x.float() * (1 / s)
        rounded = torch.from_numpy(round_oracle(v.numpy(), spec))
        # Towards the middle of the grid: an element that rounds to an end of it is inside.
        self.inwards = torch.where(rounded > sum(self.ends) / 2, -1.0, 1.0)
        self.error = rounded - x.double() / s.double()
        self.scale = s.double()
        self.follows_x = torch.zeros_like(v, dtype=torch.bool)
        if spec.dtype != "int":
            self.follows_x = v.abs() >= 2.0 ** SMALLEST_EXPONENT[spec.dtype]
        self.beyond = (v.abs() > spec.qmax) & (spec.dtype != "int")
        self.x, self.inside = x.double(), rounded.abs() <= spec.qmax

    def __call__(self, x, scale):
        s = expand(scale, x, self.spec)
        error = torch.where(self.follows_x, self.error * self.scale / s, self.error)
        values = s * (x / s + error).clamp(*self.ends)
        bound = s * self.spec.qmax * self.x.sign()
        return torch.where(self.beyond, bound + torch.where(self.inside, x - self.x, 0.0), values)
