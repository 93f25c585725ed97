"""Scales from pieces of a weight equal those of the whole, and observers add up."""

import itertools
import random

import pytest
import torch

from quant.calibrate import (
    SEARCH_FRACTIONS,
    combine,
    needs_search,
    partial_clipped,
    partial_errors,
    partial_stats,
    scales_from_errors,
    scales_from_stats,
)
from quant.observe import Observer
from quant.reference import absmax_scale, fake_quant, inside_range
from quant.spec import TensorSpec

SPECS = [
    TensorSpec("fp8_e4m3", 8, "tensor"),
    TensorSpec("fp8_e4m3", 8, "channel"),
    *(TensorSpec("int", bits, "group", 32) for bits in (2, 3, 4)),
    TensorSpec("int", 8, "channel"),
    TensorSpec("int", 2, "tensor"),
]
FP8 = SPECS[0]


def pieces(numel: int) -> list[tuple[int, int]]:
    """Ranges that cover a weight: ZeRO-3's even ones, or any, empty ones among them."""
    if random.random() < 0.5:
        world = random.randint(1, 9)
        size = -(-numel // world)
        cuts = [min(rank * size, numel) for rank in range(world + 1)]
    else:
        cuts = sorted([0, numel, *(random.randint(0, numel) for _ in range(random.randint(0, 6)))])
    return list(itertools.pairwise(cuts))


def whole_stats(weight: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """absmax per scale, straight from the definition."""
    size = spec.elements_per_scale(tuple(weight.shape))
    return weight.float().abs().reshape(-1, size).amax(1).reshape(spec.scale_shape(tuple(weight.shape)))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_statistics_of_pieces_make_those_of_the_whole(spec, dtype, seed):
    """Exactly, wherever the cuts fall; the same of clipped counts, and of squared errors up to the order of sums."""
    for _ in range(20):
        shape = (random.randint(1, 9), 32 * random.randint(1, 4))
        weight = (torch.randn(shape) * torch.randn(shape[0], 1).exp()).to(dtype)
        flat, cuts = weight.reshape(-1), pieces(weight.numel())
        stats = torch.zeros(spec.scale_shape(shape))
        for start, stop in cuts:
            stats = combine(stats, partial_stats(flat[start:stop], start, shape, spec))
        assert stats.dtype == torch.float32 and torch.equal(stats, whole_stats(weight, spec))
        scales = scales_from_stats(stats, spec)
        assert torch.equal(scales, absmax_scale(stats, spec))

        scales = scales * random.uniform(0.3, 0.9)
        clipped = sum(partial_clipped(flat[start:stop], start, shape, scales, spec) for start, stop in cuts)
        assert clipped == (~inside_range(weight, scales, spec)).sum()

        errors = sum(partial_errors(flat[start:stop], start, shape, stats, spec) for start, stop in cuts)
        assert errors.shape == (len(SEARCH_FRACTIONS), *spec.scale_shape(shape))
        for index, fraction in enumerate(SEARCH_FRACTIONS):
            error = fake_quant(weight.float(), fraction * absmax_scale(stats, spec), spec) - weight.float()
            expected = error.square().reshape(stats.numel(), -1).sum(1).reshape(stats.shape)
            # fp32 sums of up to 1,152 squares, in another order.
            torch.testing.assert_close(errors[index], expected, rtol=1e-5, atol=1e-8)


def test_a_range_outside_the_weight_is_refused():
    """Padding of a partition, or a start that belongs to another tensor."""
    spec = TensorSpec("int", 4, "group", 32)
    for flat, start in ((torch.zeros(65), 0), (torch.zeros(1), 64), (torch.zeros(1), -1), (torch.zeros(2, 32), 0)):
        with pytest.raises(ValueError, match=r"inside the 64 values of a weight \(2, 32\)"):
            partial_stats(flat, start, (2, 32), spec)
    with pytest.raises(ValueError, match="group_size 32"):
        partial_stats(torch.zeros(66), 0, (2, 33), spec)


def test_values_that_are_not_finite_reach_the_scale():
    """A NaN or Inf weight must not disappear in a maximum."""
    for value in (torch.nan, torch.inf):
        weight = torch.zeros(64)
        weight[40] = value
        stats = combine(
            partial_stats(weight[:50], 0, (2, 32), TensorSpec("int", 4, "group", 32)),
            partial_stats(weight[50:], 50, (2, 32), TensorSpec("int", 4, "group", 32)),
        )
        assert stats[0].item() == 0 and not stats[1].isfinite().any()
        assert not scales_from_stats(stats, FP8)[1].isfinite().any()


@pytest.mark.parametrize(("bits", "absmax", "searched"), [(2, 0.223, 0.137), (3, 0.0412, 0.0319)])
def test_the_search_at_few_bits(bits, absmax, searched, seed):
    """Relative squared error of unit Gaussians in groups of 32, against the numbers known for absmax and for a search.

    1% for the sampling of 2 million weights. More than one chunk of the search, and never worse than absmax.
    """
    spec = TensorSpec("int", bits, "group", 32)
    shape = (2048, 1024)
    weight = torch.randn(shape)
    stats = partial_stats(weight.view(-1), 0, shape, spec)
    scales = scales_from_errors(stats, partial_errors(weight.view(-1), 0, shape, stats, spec), spec)

    def relative_error(scales: torch.Tensor) -> torch.Tensor:
        error = (fake_quant(weight, scales, spec) - weight).square().unflatten(-1, (-1, 32)).sum(-1)
        return error / weight.square().unflatten(-1, (-1, 32)).sum(-1)

    before, after = relative_error(scales_from_stats(stats, spec)), relative_error(scales)
    assert (after <= before * (1 + 1e-6)).all()
    energy = weight.square().unflatten(-1, (-1, 32)).sum(-1)
    assert ((before * energy).sum() / energy.sum()).item() == pytest.approx(absmax, rel=0.01)
    assert ((after * energy).sum() / energy.sum()).item() == pytest.approx(searched, rel=0.01)


def test_which_formats_are_searched():
    """Integers of 3 bits and fewer."""
    assert [needs_search(TensorSpec("int", bits, "channel")) for bits in (2, 3, 4, 8)] == [True, True, False, False]
    assert not needs_search(FP8)


def test_the_observer_adds_up(seed):
    """Over batches of any shape, empty ones included; state and load go on where it stopped."""
    observer, scale = Observer(FP8), torch.full((1,), 1.5 / 448)
    batches = [torch.randn(shape).bfloat16() for shape in ((3, 16), (0, 16), (2, 5, 16))]
    for batch in batches[:2]:
        observer.update(batch, scale)
    resumed = Observer(FP8)
    resumed.load(observer.state())
    resumed.update(batches[2], scale)
    together = torch.cat([batch.reshape(-1) for batch in batches])
    assert resumed.absmax.dtype == torch.float32 and resumed.absmax.item() == together.abs().max().item()
    assert resumed.total == together.numel()
    assert resumed.clipped.item() == (~inside_range(together, scale, FP8)).sum().item() > 0
    assert resumed.clipped_fraction() == resumed.clipped.item() / together.numel()
    resumed.reset()
    assert resumed.absmax.item() == 0 and resumed.clipped_fraction() == 0
    resumed.update(torch.tensor([1.0, torch.nan]), None)
    resumed.update(torch.tensor([2.0]), None)
    assert resumed.absmax.isnan(), "a NaN once seen must reach the reader"
