"""Scales of inputs, keys and values that files gave, compared with the inputs of the first samples.

Nothing in the files tells what inputs are like, so the model looks at some: one micro-batch per rank goes through it,
forward alone, where such scales were loaded.
"""

from collections.abc import Callable, Iterable, Set
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from data.loader import MicroBatch
from engine.quantisation.switches import watch_inputs
from engine.session.session import Session
from model.quantised.config import is_quantised
from model.ranks import raise_everywhere, reduce_over_ranks
from model.scales import input_scales
from quant import Quantization
from quant.scale import first_input_scale

# The largest share of an input that a scale may clip (a Gaussian at 1.6 standard deviations; nobody calibrates so), and
# how many times it may be the absmax scale of a few samples. One token with a massive activation, which these may lack,
# makes it some hundred times; an absmax that was not divided, 448 at e4m3.
MOST_CLIPPED, TOO_LARGE = 0.1, 256.0
_MOST_NAMED = 5


def check_inputs(session: Session, first: Callable[[int], Iterable[MicroBatch]]) -> None:
    """Refuse input scales from files that are none of the inputs of ``first(1)``, the first micro-batch of the training
    on every rank; a collective, after calibration. Raises RankError on every rank."""
    quant = session.recipe.quant
    source = quant.start or quant.scales or session.recipe.model.path
    if quant.start or quant.scales or is_quantised(Path(source)):
        owners = _owners(session)
        check_input_scales(session.engine, session.quantization, owners, first(1), session.device, source)


def _owners(session: Session) -> set[str]:
    """Of the input groups whose scales files gave."""
    owners = {group.owner for group in session.quantization.input_groups} - session.uncalibrated
    if (initial := session.recipe.quant.initial_input_scale) is None:
        return owners
    written, scales = torch.tensor(initial).item(), input_scales(session.quantization)
    return {owner for owner in owners if scales[owner] != written}  # else the recipe gave it


@torch.no_grad()
def check_input_scales(
    forward: nn.Module,
    quantization: Quantization,
    owners: Set[str],
    batches: Iterable[MicroBatch],
    device: torch.device,
    source: str,
) -> None:
    """Run ``batches`` through the model with its inputs quantised, and refuse scales that are none of these inputs; a
    collective, which leaves the model as it was.

    Scales from other data pass, and clipped ones: see :data:`MOST_CLIPPED` and :data:`TOO_LARGE`. A global scale above
    dynamic ones may be so many times smaller, too.

    Args:
        forward, quantization, batches, device: as of :func:`engine.quantisation.switches.calibrate_inputs`.
        owners: of the input groups whose scales are checked.
        source: where the scales are from, for the error.

    Raises:
        RankError: on every rank: names the inputs, both values, and what to do.
    """
    groups = [group for group in quantization.input_groups if group.owner in owners]
    if not groups:
        return
    scales, was_training = input_scales(quantization), forward.training
    try:
        forward.eval()
        with quantization.paused():
            quantization.set_fake_quant(weights=False, activations=True)
            quantization.observe(True)
            for batch in batches:
                watch_inputs(forward, quantization, batch, device)
            seen = [group.observer for group in groups if group.observer is not None]
            counts = torch.tensor([[each.clipped.item(), each.total] for each in seen], dtype=torch.float64)
            largest = torch.tensor([each.absmax.item() for each in seen])
    finally:
        forward.train(was_training)
    counts, largest = reduce_over_ranks(counts), reduce_over_ranks(largest, dist.ReduceOp.MAX)
    problems = []
    for group, (clipped, total), most in zip(groups, counts.tolist(), largest.tolist(), strict=True):
        wanted, above = first_input_scale(torch.tensor([most]), group.spec).item(), group.spec.has_global_scale
        if above and not wanted / TOO_LARGE <= scales[group.owner] <= wanted * TOO_LARGE:
            beyond = "the scales below this one, which divides, are all 0 or clipped"
        elif above:
            continue  # what it clips is what those below it do
        elif clipped > MOST_CLIPPED * total:
            beyond = f"{clipped / total:.2f} of its elements are beyond the range"
        elif 0 < wanted * TOO_LARGE < scales[group.owner]:
            beyond = "nearly all codes are unused"
        else:
            continue
        problems.append(f"{group.owner}: the scale is {scales[group.owner]:.3g}, absmax is {wanted:.3g}: {beyond}")
    if problems:
        more = [f"and {len(problems) - _MOST_NAMED} more"] if len(problems) > _MOST_NAMED else []
        head = (
            f"scales of inputs in {source} do not fit the inputs of the first samples. Leave them out of the files, "
            "and set quant.calibration_batches to measure them"
        )
        raise_everywhere("\n".join([head, *problems[:_MOST_NAMED], *more]))
