"""Activation scales measured in place: forward passes of the unquantised model, under whatever ZeRO stage it lives."""

import math
from collections.abc import Iterable, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader import MicroBatch, sample_inputs
from model.ranks import raise_everywhere, reduce_over_ranks
from model.scales import write_scales
from model.zero import forward_only
from quant import Quantization, Ranges, ScaleGroup, exempt_line, scale_from_histogram
from quant.scale import first_input_scale


def observed_input_scales(quantization: Quantization, owners: Set[str] | None = None) -> dict[str, Tensor]:
    """Find static activation scales from what the observers of all ranks saw; a collective.

    Args:
        quantization: knows the groups of inputs and their observers.
        owners: of the groups that are wanted; all of them without it.

    Returns:
        fp32 tensors of shape (1,), equal on every rank, by owner of the group.

    Raises:
        RankError: on every rank, naming layers whose inputs were never seen or held NaN or Inf.
    """
    groups = [group for group in quantization.input_groups if owners is None or group.owner in owners]
    if not groups:
        return {}
    device = groups[0].s0.device
    absmax = torch.stack([group.observer.absmax.to(device) for group in groups if group.observer is not None])
    # A MAX reduction may drop NaN; Inf survives it.
    absmax = torch.where(torch.isnan(absmax), torch.inf, absmax)
    absmax = reduce_over_ranks(absmax, dist.ReduceOp.MAX)
    values = dict(zip((group.owner for group in groups), absmax.tolist(), strict=True))
    _check_seen(values, quantization)
    if quantization.ranges.inputs == "absmax":
        return {group.owner: first_input_scale(torch.tensor([values[group.owner]]), group.spec) for group in groups}
    return {group.owner: _from_histogram(group, quantization.ranges) for group in groups}


def _check_seen(absmax: dict[str, float], quantization: Quantization) -> None:
    """Refuse the largest magnitudes of inputs, over all ranks, that no scale can be made of. Raises RankError."""
    bad = [owner for owner, value in absmax.items() if not math.isfinite(value)]
    unseen = [owner for owner, value in absmax.items() if value == 0]
    problems = []
    if bad:
        problems.append(f"inputs with NaN or Inf: {', '.join(bad[:20])}")
    if unseen:
        layers = [owner for owner in unseen if owner in quantization.layers]
        remedy = f"; to leave them as they are, set {exempt_line(layers)}" if layers else ""
        problems.append(f"inputs that no batch reached, or that are all zero: {', '.join(unseen[:20])}{remedy}")
    raise_everywhere("; ".join(problems) or None)


def _from_histogram(group: ScaleGroup, ranges: Ranges) -> Tensor:
    """Find the scale that all ranks' histograms together ask for; a collective."""
    assert group.observer is not None and group.observer.histogram is not None
    counts = reduce_over_ranks(group.observer.histogram.to(group.s0.device))
    return scale_from_histogram(counts, ranges, group.spec)


@torch.no_grad()
def calibrate_inputs(
    forward: nn.Module,
    quantization: Quantization,
    owners: Set[str],
    batches: Iterable[MicroBatch],
    device: torch.device,
) -> None:
    """Run ``batches`` through the unquantised model and write the activation scales that they ask for; a collective.

    Args:
        forward: the engine (or the plain model); called with input_ids alone.
        quantization: its quantisation, paused during the passes: its switches and what its observers have seen are
            afterwards as they were.
        owners: of the input groups to write; other groups keep their scales.
        batches: as many on every rank.
        device: where the batches go.
    """
    was_training = forward.training
    try:
        forward.eval()
        with quantization.paused():
            quantization.observe(True)
            for batch in batches:
                watch_inputs(forward, quantization, batch, device)
            write_scales(quantization.input_groups, observed_input_scales(quantization, owners))
    finally:
        forward.train(was_training)


def watch_inputs(forward: nn.Module, quantization: Quantization, batch: MicroBatch, device: torch.device) -> None:
    """Run the samples of a batch through the model while its observers watch; a collective under ZeRO-3."""
    # One sample at a time, without its padding: what padding positions hold is never served.
    samples = list(sample_inputs(batch))
    # Rows hold unequal numbers of samples when they are packed or the last ones, and a forward is a collective under
    # ZeRO-3: a rank that has fewer goes along with some tokens that are not counted.
    most = int(reduce_over_ranks(torch.tensor(len(samples)), dist.ReduceOp.MAX))
    for sample in samples:
        with forward_only(forward):
            forward(input_ids=sample.to(device), use_cache=False)
    with quantization.paused():
        for _ in range(most - len(samples)):
            with forward_only(forward):
                forward(input_ids=batch["input_ids"][:1, :2].to(device), use_cache=False)
