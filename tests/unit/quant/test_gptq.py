"""GPTQ against what it is defined by, in fp64: after each column the best rest, found by solving for it again."""

import random

import pytest
import torch
from torch import Tensor

from quant import SCHEMES, Quantizer, Scale, TensorSpec
from quant.gptq import DAMPING, add_inputs, choose, compensate, fit_scales, row_errors, takes
from quant.observers import partial_stats, scales_from_stats, zero_points_from_stats
from quant.reference import dequantize, fake_quant, quantize

pytestmark = pytest.mark.usefixtures("seed")

SPECS = [
    *(TensorSpec("int", bits, "group", 8) for bits in (2, 3, 4)),
    TensorSpec("int", 3, "group", 64),  # with more columns than a block has
    TensorSpec("int", 2, "channel"),
    TensorSpec("int", 4, "group", 32, symmetric=False),
    TensorSpec("fp4_e2m1", 4, "group", 32),
]


def problem(spec: TensorSpec, *, signed: bool = False) -> tuple[Tensor, Scale, Tensor]:
    """A weight, its scales, and the Gram matrix of inputs that are correlated and of unequal sizes."""
    size = spec.group_size or 8
    rows, columns = random.randint(1, 9), size * random.randint(1, 5 if size < 100 else 2)
    weight = torch.randn(rows, columns)
    inputs = torch.randn(3 * columns, columns) @ torch.randn(columns, columns) * torch.rand(columns).mul(3).exp()
    gram = torch.zeros(columns, columns, dtype=torch.float64)
    add_inputs(gram, inputs)
    stats = partial_stats(weight.flatten(), 0, (rows, columns), spec)
    zero = zero_points_from_stats(stats, spec)
    return weight, Scale(scales_from_stats(stats, spec, signed=signed), zero=zero), gram


def damped_gram(gram: Tensor) -> Tensor:
    return gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)


def by_definition(weight: Tensor, scale: Scale, spec: TensorSpec, gram: Tensor) -> Tensor:
    """Round the column of the largest inputs, move all that are left to where the outputs are best, and so on."""
    exact = weight.double()
    damped = damped_gram(gram)
    order = gram.diagonal().argsort(descending=True, stable=True).tolist()
    rounded, left = torch.zeros_like(exact), exact.clone()
    size = weight.shape[1] // scale.s0.shape[1]
    for done, column in enumerate(order, 1):
        group, one = slice(column // size, column // size + 1), slice(column, column + 1)
        zero = None if scale.zero is None else scale.zero[:, group]
        rounded[:, one] = fake_quant(left[:, one].float(), scale.s0[:, group], spec, zero).double()
        fixed, rest = order[:done], order[done:]
        error = rounded[:, fixed] - exact[:, fixed]
        left[:, rest] = exact[:, rest] - error @ damped[fixed][:, rest] @ torch.linalg.inv(damped[rest][:, rest])
    return rounded


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("signed", [False, True])
def test_codes_are_those_of_the_definition(spec, signed):
    rows = []
    for _ in range(10):
        weight, scale, gram = problem(spec, signed=signed and spec.dtype == "int" and spec.symmetric)
        chosen = compensate(weight, scale, spec, gram, dtype=torch.float32)
        found = fake_quant(chosen, scale.s0, spec, scale.zero).double()
        rows.append((found == by_definition(weight, scale, spec, gram)).all(1))
    # A weight on the border of two cells but for a rounding, and the columns behind it, may differ.
    assert torch.cat(rows).float().mean() >= 0.9


def test_a_row_that_compensation_spoils_keeps_its_nearest_codes():
    """Rounding column by column may end further away; drawn until it does, which takes some tens of problems."""
    spec = TensorSpec("int", 3, "group", 8)
    for _ in range(1000):
        weight, scale, gram = problem(spec)
        errors, bounds = assert_no_worse_rows(weight, scale, spec, gram)
        greedy = fake_quant(compensate(weight, scale, spec, gram, dtype=torch.float32), scale.s0, spec)
        if bool((greedy != fake_quant(weight, scale.s0, spec)).any(1)[errors == bounds].any()):
            return
    raise AssertionError("no row was spoiled: this shows nothing")


@pytest.mark.parametrize(
    "spec", dict.fromkeys([*SPECS, *(one.weights for one in SCHEMES.values() if takes(one.weights))]), ids=str
)
def test_every_format_that_is_taken_has_codes_of_its_own_kind_and_no_worse_rows(spec):
    """Found by the presets, so that a new format is tried without being named here."""
    for signed in (False, True):
        weight, scale, gram = problem(spec, signed=signed and spec.dtype == "int" and spec.symmetric)
        codes, _ = choose(weight, Quantizer(scale, spec, torch.float32), gram)
        assert codes.dtype == quantize(weight, scale.s0, spec, scale.zero).dtype and codes.shape == weight.shape
        assert_no_worse_rows(weight, scale, spec, gram)


def assert_no_worse_rows(weight: Tensor, scale: Scale, spec: TensorSpec, gram: Tensor) -> tuple[Tensor, Tensor]:
    """The errors of rows with the codes that are chosen, and with the nearest ones; as damped as they are chosen."""
    codes, scales = choose(weight, Quantizer(scale, spec, torch.float32), gram)
    found = dequantize(codes, scales, spec, torch.float32, scale.zero).double() - weight
    nearest = fake_quant(weight, scale.s0, spec, scale.zero).double() - weight
    damped = damped_gram(gram)
    errors, bounds = (((one @ damped) * one).sum(1) for one in (found, nearest))
    assert bool((errors <= bounds * (1 + 1e-4)).all())
    return errors, bounds


def test_what_no_input_reached_keeps_its_nearest_codes():
    """Inputs that were all 0, experts without a token, and rows of zeros."""
    spec = TensorSpec("int", 2, "group", 8)
    weight, scale, gram = problem(spec)
    quantizer = Quantizer(scale, spec, torch.float32)
    codes, scales = choose(torch.zeros_like(weight), quantizer, gram)
    assert not codes.any() and torch.equal(scales, scale.s0)
    codes, scales = choose(weight, quantizer, torch.zeros_like(gram))
    assert torch.equal(codes, quantize(weight, scale.s0, spec)) and torch.equal(scales, scale.s0)
    dead = torch.rand(len(gram)) < 0.4
    gram[dead], gram[:, dead] = 0, 0
    chosen = compensate(weight, scale, spec, gram, dtype=torch.float32)
    torch.testing.assert_close(chosen[:, dead], weight[:, dead])
    gram[0, 0] = random.choice([torch.nan, torch.inf])
    with pytest.raises(ValueError, match="NaN or Inf"):
        compensate(weight, scale, spec, gram, dtype=torch.float32)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.dtype == "int"], ids=str)
def test_no_other_scales_suit_the_codes_better(spec):
    """Outputs are worse with any of the scales a little larger or smaller: finite differences in fp64."""
    weight, scale, gram = problem(spec)
    codes = quantize(weight, scale.s0, spec, scale.zero)
    values = dequantize(codes, torch.ones_like(scale.s0), spec, torch.float32, scale.zero)
    fitted = fit_scales(weight, values, scale.s0, gram).double()
    damped = damped_gram(gram)

    def errors(scales: Tensor) -> Tensor:
        wide = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        difference = values.double() * wide - weight.double()
        return ((difference @ damped) * difference).sum(1)

    kept = (fitted.float() == scale.s0).all(1)  # where a scale would have changed its sign
    assert not bool(kept.all()) or len(kept) < 3
    used = values.unflatten(1, (scale.s0.shape[1], -1)).abs().sum(-1) > 0
    for group in range(scale.s0.shape[1]):
        for step in (1.01, 0.99):
            other = fitted.clone()
            other[:, group] *= step
            assert bool((errors(other) > errors(fitted))[used[:, group] & ~kept].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_and_scales_that_are_chosen_keep_the_outputs(dtype):
    """Far better than the nearest codes, and the scales are numbers of the model's dtype."""
    spec, shape = TensorSpec("int", 2, "group", 32), (64, 256)
    weight = torch.randn(shape).to(dtype)
    gram = torch.zeros(256, 256, dtype=torch.float64)
    add_inputs(gram, torch.randn(2048, 64) @ torch.randn(64, 256) + 0.3 * torch.randn(2048, 256))
    stats = partial_stats(weight.flatten(), 0, shape, spec)
    scale = 0.7 * scales_from_stats(stats, spec).to(dtype).float()
    quantizer = Quantizer(Scale(scale.to(dtype).float()), spec, dtype)
    codes, chosen = choose(weight, quantizer, gram)
    assert torch.equal(chosen, chosen.to(dtype).float())
    nearest = fake_quant(weight.float(), quantizer.scale.s0, spec) - weight.float()
    difference = dequantize(codes, chosen, spec, torch.float32) - weight.float()
    assert row_errors(difference, gram).sum() < 0.5 * row_errors(nearest, gram).sum()
