"""Scales of a weight as other tools choose them, and scales of something else."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.scales.codes import add_products, count_of_sums, other_weights
from quant import Ranges, partial_errors, partial_fit, partial_stats, scales_from_errors, scales_from_stats
from quant.fit import Fit, scale_problem
from quant.linear import LinearPart
from quant.observers import zero_points_from_stats
from quant.reference import dequantize, fake_quant, quantize, round_scale
from quant.spec import TensorSpec

TINY = 1e-12


class Case:
    """A weight under a scheme: its statistics and its own scales."""

    def __init__(self, weight: Tensor, spec: TensorSpec):
        self.weight, self.spec, self.shape = weight, spec, tuple(weight.shape)
        self.stats = partial_stats(weight.flatten(), 0, self.shape, spec)
        self.absmax, self.zero = scales_from_stats(self.stats, spec), zero_points_from_stats(self.stats, spec)
        self.own = self.best() if Ranges().searches(spec) else self.absmax

    def best(self) -> Tensor:
        """Scales of the smallest squared error."""
        errors = partial_errors(self.weight.flatten(), 0, self.shape, self.stats, self.spec)
        return scales_from_errors(self.stats, errors, self.spec)

    def gptq(self, scale: Tensor) -> Tensor:
        """Weights that lie on the grid: columns in turn, each one's error made good by those to come (Frantar et al.
        2023), for inputs of which a few directions are large."""
        columns = self.shape[1]
        inputs = torch.randn(2 * columns, 32) @ torch.randn(32, columns) + torch.randn(2 * columns, columns)
        hessian = inputs.t() @ inputs / len(inputs)
        hessian += 0.01 * hessian.diagonal().mean() * torch.eye(columns)
        upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
        weight, result = self.weight.clone(), torch.empty_like(self.weight)
        for column in range(columns):
            group = column * scale.shape[1] // columns
            its, zero = (None if each is None else each[:, [group]] for each in (scale, self.zero))
            assert its is not None
            result[:, column] = fake_quant(weight[:, [column]], its, self.spec, zero)[:, 0]
            error = (weight[:, column] - result[:, column]) / upper[column, column]
            weight[:, column:] -= error[:, None] * upper[column, column:]
        return result

    def stored(self, scale: Tensor) -> Tensor:
        """As a file of the scheme would hold it."""
        if self.spec.scale_format == "float32":
            return scale
        if self.spec.scale_format == "model":
            return scale.bfloat16().float()
        return round_scale(scale.clamp(min=TINY), self.spec, 448 * 6 / self.weight.abs().max())

    def sums(self, scale: Tensor) -> Tensor:
        """Errors and squares by scale."""
        return partial_fit(self.weight.flatten(), 0, self.shape, scale, self.spec, self.zero)

    def refused(self, scale: Tensor) -> tuple[bool, float]:
        """Whether the scales are refused, and the error that they make."""
        error, squares = self.sums(scale)
        parts = (scale, self.own, self.absmax, error, self.sums(self.own)[0], squares)
        problem = scale_problem(Fit(*(part.flatten().double() for part in parts)), self.spec)
        return problem is not None, float(error.sum() / squares.sum())

    def refused_codes(self, scale: Tensor, source: Tensor, of_source: Tensor) -> bool:
        """Whether codes are refused that were made of ``source`` with the scales ``of_source``, beside ``scale``."""
        codes = quantize(source, of_source, self.spec, self.zero)
        decoded = dequantize(codes, scale, self.spec, torch.float32, self.zero)
        rounded = fake_quant(self.weight, scale, self.spec, self.zero)
        part = LinearPart("", *self.shape)
        sums = torch.zeros(count_of_sums(part, self.spec), dtype=torch.float64)
        add_products(sums, part, self.spec, 0, slice(0, self.weight.numel()), (self.weight, rounded, decoded))
        return other_weights(sums, part) is not None


def legitimate(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Scales that must pass."""
    spec, own = case.spec, case.own
    yield "largest magnitude", case.absmax
    yield "smallest squared error", case.best()
    yield "clipped to 80%", own * 0.8
    if spec.granularity in ("group", "channel"):
        yield "codes of GPTQ", case.best()
    yield "codes of weights that trained by 30% of their size", own
    if spec.bits < 8 and spec.scale_format != "e8m0":
        yield "clipped to 70% (AWQ, AutoRound)", own * 0.7
    if spec.dtype == "int" and spec.symmetric:
        yield "absmax / qmax", case.absmax * ((spec.qmax - spec.qmin) / 2 / spec.qmax)
        signs = torch.where(case.stats[0] > case.stats[1], -1.0, 1.0)
        yield "signed, extreme on qmin", case.absmax * ((spec.qmax - spec.qmin) / 2 / -spec.qmin) * signs
    for stray in (0.1, 0.2, 0.3):
        yield f"trained, theta strayed by {stray}", own * torch.exp(torch.randn_like(own).clamp(-2, 2) * stray)
    yield "trained, theta -0.2 +- 0.2", own * torch.exp(torch.randn_like(own).clamp(-2, 2) * 0.2 - 0.2)
    if spec.scale_format == "e8m0":
        yield "OCP rule, absmax in [4, 8)", torch.exp2(case.stats.amax(0).clamp(min=TINY).log2().floor() - 2)
    if spec.scale_format in ("float32", "model"):
        yield "powers of two, up", torch.exp2(own.log2().ceil())
        yield "powers of two, nearest", torch.exp2(own.log2().round())


def wrong(case: Case) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, scales of the file, and of what weight and with which scales its codes were made."""
    spec, own, weight = case.spec, case.own, case.weight
    largest = case.stats.amax(0).clamp(min=TINY)
    shuffled = own.flatten()[torch.randperm(own.numel())].view_as(own)
    tampered = {"times 2": own * 2, "divided by 2": own / 2, "reciprocal": 1 / own, "absmax, not divided": largest}
    tampered |= {"divided by 57344 (e5m2)": largest / 57344} if spec.dtype != "int" else {}
    tampered |= {"without e8m0's bias": own * 2.0**-100} if spec.scale_format == "e8m0" else {}
    if own.numel() > 1:
        tampered |= {"permuted": shuffled, "next row's": own.roll(1, 0)}
        if own.shape[1] > 1:
            tampered |= {"transposed": own.t().reshape(own.shape), "next group's": own.roll(1, 1)}
    for name, scale in tampered.items():
        yield name, scale, weight, own
    for bits in (2, 3, 4, 8):
        if spec.dtype == "int" and bits != spec.bits:
            of = TensorSpec("int", bits, spec.granularity, spec.group_size, spec.symmetric)
            yield f"of int{bits}, alone", Case(weight, of).own, weight, own
    for spread in (0.3, 0.5):
        smooth = torch.exp(torch.randn(weight.shape[1]) * spread)
        made = Case(weight * smooth / (smooth.max() * smooth.min()).sqrt(), spec)
        yield f"of smoothed weights, spread {spread}", made.own, made.weight, made.own
    stranger = torch.randn_like(weight) * weight.std()
    made = Case(stranger, spec)
    yield "of a random weight of this size", made.own, stranger, made.own
