"""Scales that were chosen in any legitimate way pass, on weights of every kind; those of something else do not."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from model.scales.codes import Values, add_products, count_of_sums, other_weights
from quant import SCHEMES, Ranges
from quant.gptq import add_inputs, compensate
from quant.linear import LinearPart
from quant.observers import (
    partial_errors,
    partial_fit,
    partial_stats,
    scales_from_errors,
    scales_from_stats,
    zero_points_from_stats,
)
from quant.reference import dequantize, fake_quant, inside_range, quantize, round_scale
from quant.scale import CLIPPED, WORSE, Fit, Scale, scale_problem
from quant.spec import TensorSpec
from tests.lib.thinned import thinned

TINY = 1e-12
SIZE = 256
WEIGHTS = {
    "gaussian": lambda noise: noise,
    "heavy tails": lambda noise: noise * torch.randn_like(noise).abs().clamp(0.3, 4),
    "outlier columns": lambda noise: noise * torch.where(torch.rand(noise.shape[1]) < 0.02, 20.0, 1.0),
    "unequal rows": lambda noise: noise * torch.exp(0.7 * torch.randn(len(noise), 1)),
    "rows of zeros": lambda noise: noise * (torch.rand(len(noise), 1) < 0.7),
}
NAMES = ("fp8_static", "fp8_dynamic", "fp8_block", "int8_dynamic", "w4a16_g32", "w4a16_channel", "w3a16_g32")
NAMES += ("w2a16_g32", "w4a16_asym", "nvfp4", "mxfp4")


class Case:
    """A weight under a scheme: its statistics and its own scales."""

    def __init__(self, weight: Tensor, spec: TensorSpec):
        self.weight, self.spec, self.shape = weight, spec, tuple(weight.shape)
        self.stats = partial_stats(weight.flatten(), 0, self.shape, spec)
        self.largest = self.stats.amax(0).clamp(min=TINY)
        self.absmax, self.zero = scales_from_stats(self.stats, spec), zero_points_from_stats(self.stats, spec)
        errors = partial_errors(weight.flatten(), 0, self.shape, self.stats, spec)
        self.best = scales_from_errors(self.stats, errors, spec)  # of the smallest squared error
        self.own = self.best if Ranges().searches(spec) else self.absmax
        self.half = (spec.qmax - spec.qmin) / 2

    def gptq(self, scale: Tensor) -> Tensor:
        """Weights that lie on the grid, each column's error made good by others, for inputs of which a few directions
        are large."""
        columns = self.shape[1]
        inputs = torch.randn(2 * columns, 32) @ torch.randn(32, columns) + torch.randn(2 * columns, columns)
        gram = torch.zeros(columns, columns, dtype=torch.float64)
        add_inputs(gram, inputs)
        chosen = compensate(self.weight, Scale(scale, zero=self.zero), self.spec, gram, dtype=torch.float32)
        return fake_quant(chosen, scale, self.spec, self.zero)

    def stored(self, scale: Tensor) -> Tensor:
        """As a file of the scheme would hold it; negative ones of integers alone."""
        if self.spec.dtype != "int":
            scale = scale.clamp(min=TINY)
        if self.spec.scale_format == "float32":
            return scale
        if self.spec.scale_format == "model":
            return scale.bfloat16().float()
        return round_scale(scale, self.spec, 448 * 6 / self.weight.abs().max())

    def error(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Squared errors and squares by scale."""
        error, squares = partial_fit(self.weight.flatten(), 0, self.shape, scale, self.spec, self.zero)
        return error.flatten().double(), squares.flatten().double()

    def loss(self, scale: Tensor) -> float:
        error, squares = self.error(scale)
        return float(error.sum() / squares.sum())

    def refused(self, scale: Tensor) -> str | None:
        """Return the problem of scales alone."""
        error, squares = self.error(scale)
        scales = (each.flatten().double() for each in (scale, self.own))
        return scale_problem(Fit(*scales, error, self.error(self.own)[0], squares), self.spec)

    def refused_codes(self, scale: Tensor, source: Tensor, of_source: Tensor) -> str | None:
        """Return the problem of codes that were made of ``source`` with the scales ``of_source``, beside ``scale``."""
        decoded = dequantize(
            quantize(source, of_source, self.spec, self.zero), scale, self.spec, torch.float32, self.zero
        )
        rounded = fake_quant(self.weight, scale, self.spec, self.zero)
        values = Values(self.weight, rounded, decoded, inside_range(self.weight, scale, self.spec, self.zero))
        part = LinearPart("", *self.shape)
        sums = torch.zeros(count_of_sums(part, self.spec), dtype=torch.float64)
        add_products(sums, part, self.spec, 0, slice(0, self.weight.numel()), values)
        return other_weights(sums, self.spec)


Takes, Way = Callable[[TensorSpec], bool], Callable[[Case], Tensor]


def strayed(by: float, down: float = 0.0) -> Way:
    """Scales that trained: theta moved so far."""
    return lambda case: case.own * torch.exp(torch.randn_like(case.own).clamp(-2, 2) * by - down)


def signed(case: Case) -> Tensor:
    """The extreme weight on the code that has no counterpart."""
    return case.absmax * (case.half / -case.spec.qmin) * torch.where(case.stats[0] > case.stats[1], -1.0, 1.0)


def of_int(bits: int) -> tuple[Takes, Way]:
    """Scales of another number of bits."""

    def way(case: Case) -> Tensor:
        spec = case.spec
        return Case(case.weight, TensorSpec("int", bits, spec.granularity, spec.group_size, spec.symmetric)).own

    return lambda spec: spec.dtype == "int" and spec.bits != bits, way


ANY: Takes = lambda spec: True  # noqa: E731
INTEGERS: Takes = lambda spec: spec.dtype == "int" and spec.symmetric  # noqa: E731
FREE: Takes = lambda spec: spec.scale_format in ("float32", "model")  # noqa: E731
E8M0: Takes = lambda spec: spec.scale_format == "e8m0"  # noqa: E731
SEVERAL: Takes = lambda spec: spec.granularity != "tensor"  # noqa: E731
GROUPED: Takes = lambda spec: spec.granularity in ("group", "block")  # noqa: E731

# Scales that must pass: of which specs, and how they are chosen.
LEGITIMATE: dict[str, tuple[Takes, Way]] = {
    "largest magnitude": (ANY, lambda case: case.absmax),
    "smallest squared error": (ANY, lambda case: case.best),
    "clipped to 80%": (ANY, lambda case: case.own * 0.8),
    "clipped to 70% (AWQ, AutoRound)": (lambda spec: spec.bits < 8 and not E8M0(spec), lambda case: case.own * 0.7),
    "absmax / qmax": (INTEGERS, lambda case: case.absmax * (case.half / case.spec.qmax)),
    "signed": (INTEGERS, signed),
    "trained, theta strayed by 0.3": (ANY, strayed(0.3)),
    "trained, theta -0.2 +- 0.2": (ANY, strayed(0.2, 0.2)),
    "OCP rule, absmax in [4, 8)": (E8M0, lambda case: torch.exp2(case.largest.log2().floor() - 2)),
    "powers of two, up": (FREE, lambda case: torch.exp2(case.own.log2().ceil())),
    "powers of two, nearest": (FREE, lambda case: torch.exp2(case.own.log2().round())),
}
# Scales of something else, beside codes that were made with the weight's own.
WRONG: dict[str, tuple[Takes, Way]] = {
    "times 2": (ANY, lambda case: case.own * 2),
    "divided by 2": (ANY, lambda case: case.own / 2),
    "reciprocal": (ANY, lambda case: 1 / case.own.clamp(min=TINY)),
    "absmax, not divided": (ANY, lambda case: case.largest),
    "divided by 57344 (e5m2)": (lambda spec: spec.dtype != "int", lambda case: case.largest / 57344),
    "without e8m0's bias": (E8M0, lambda case: case.own * 2.0**-100),
    "permuted": (SEVERAL, lambda case: case.own.flatten()[torch.randperm(case.own.numel())].view_as(case.own)),
    "next row's": (SEVERAL, lambda case: case.own.roll(1, 0)),
    "transposed": (GROUPED, lambda case: case.own.t().reshape(case.own.shape)),
    "next group's": (GROUPED, lambda case: case.own.roll(1, 1)),
    **{f"of int{bits}": of_int(bits) for bits in (2, 3, 4, 8)},
}
# Those that are refused whatever the weight is like, alone and beside codes.
ALWAYS = {"reciprocal", "divided by 57344 (e5m2)", "without e8m0's bias"}


PAIRS = pytest.mark.parametrize(("name", "kind"), thinned(product(NAMES, WEIGHTS)))


def case_of(name: str, kind: str) -> Case:
    return Case(WEIGHTS[kind](0.02 * torch.randn(SIZE, SIZE)).bfloat16().float(), SCHEMES[name].weights)


def ways(table: dict[str, tuple[Takes, Way]], case: Case) -> dict[str, Tensor]:
    return {title: case.stored(way(case)) for title, (has, way) in table.items() if has(case.spec)}


def harmless(case: Case, error: float) -> bool:
    return error <= max(CLIPPED[case.spec.bits == 8], WORSE * case.loss(case.stored(case.own)) * 1.001)


@PAIRS
def test_legitimate_scales_pass_alone_and_beside_their_codes(name, kind, seed):
    """Beside codes of a random weight of this size, whose scales may do as well, they are refused."""
    case = case_of(name, kind)
    for title, scale in ways(LEGITIMATE, case).items():
        # 30% off an outlier that is all of its group are 0.09 of its squares, and the others round: with enough of them
        # that is more than the tenth which clipping may cost.
        assert case.refused(scale) is None or (title.startswith("clipped to 70%") and case.loss(scale) > 0.1), title
        assert case.refused_codes(scale, case.weight, scale) is None, title
    trained = case.weight + 0.3 * torch.randn_like(case.weight) * case.weight.std()
    own, best = case.stored(case.own), case.stored(case.best)
    assert case.refused_codes(own, trained, own) is None
    if kind == "outlier columns" and case.spec.granularity in ("group", "channel"):
        assert case.refused_codes(best, case.gptq(best), best) is None
    other = torch.randn_like(case.weight) * case.weight.std()
    its = case.stored(Case(other, case.spec).own)
    assert case.refused_codes(its, other, its) is not None


@PAIRS
def test_what_passes_of_wrong_scales_does_little_harm(name, kind, seed):
    """By the scales alone, and beside codes that were made with the right ones."""
    case = case_of(name, kind)
    own = case.stored(case.own)
    for title, scale in ways(WRONG, case).items():
        alone = case.refused(scale)
        beside = alone or case.refused_codes(scale, case.weight, own)
        if kind == "unequal rows" and title in ("permuted", "next row's") and case.own.numel() >= 64:
            assert alone, title  # however little they lose
        if not (name == "w2a16_g32" and title.startswith("absmax")):  # that is the grid -1..1
            assert alone or (title not in ALWAYS and harmless(case, case.loss(scale))), title
        assert beside or (title not in {*ALWAYS, "times 2"} and harmless(case, case.loss(scale))), title
