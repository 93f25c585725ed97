"""Evaluation while training: losses on held-out samples with serving numerics."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.loader import HeldOut, MicroBatch, on_device, valid_tokens
from engine.fake_quant import FakeQuant
from engine.session.session import Session
from model.console import progress_bar
from model.ranks import reduce_over_ranks
from model.zero import forward_only


@dataclass
class HeldOutResults:
    """Results of a run's evaluations: means over the held-out tokens, by logged name.

    Attributes:
        last: losses of the last evaluation, also if it was before a resume; used by conditions of a schedule.
        first: losses of the first evaluation of this process.
        step: optimizer steps done at the last evaluation of this process; None before the first.
    """

    last: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    step: int | None = None

    def record(self, step: int, results: dict[str, float]) -> None:
        """Add an evaluation after ``step`` optimizer steps."""
        self.last, self.first, self.step = results, self.first or results, step

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return plain values for a checkpoint."""
        return {"last": self.last}

    def load_state_dict(self, state: Mapping[str, dict[str, float]]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.last = state["last"]


@torch.no_grad()
def evaluate(
    session: Session,
    quant: FakeQuant,
    held_out: HeldOut,
    calibration: Iterable[MicroBatch],
    losses: Callable[[MicroBatch], Mapping[str, Tensor]],
) -> dict[str, float]:
    """Compute loss means over the valid tokens of all held-out samples and ranks; a collective.

    All layers are fake-quantized, with outdated scales measured again, unless the run never quantizes. Trained
    parameters do not change.

    Args:
        session: the run.
        quant: its fake-quant switches.
        held_out: the samples.
        calibration: training micro-batches to measure outdated input scales on. Held-out batches are ordered by length,
            and short samples would give small scales.
        losses: maps a micro-batch on the device to sums over its valid tokens, the same names on every rank.

    Returns:
        The means, by the names of the sums.
    """
    never = session.recipe.never_quantizes() and not quant.enabled
    session.engine.eval()
    sums: dict[str, Tensor] = {}
    valid = 0
    with nullcontext() if never else quant.as_served(calibration):
        for batch in progress_bar(desc="evaluation", unit="batch", over=held_out):
            with forward_only(session.engine):
                found = losses(on_device(batch, session.device))
            sums = {name: sums.get(name, 0) + value.double() for name, value in found.items()}
            valid += valid_tokens([batch])
    session.engine.train()
    own = torch.stack([*sums.values(), torch.tensor(float(valid), dtype=torch.float64, device=session.device)])
    *whole, tokens = reduce_over_ranks(own).tolist()
    return {name: value / tokens for name, value in zip(sums, whole, strict=True)}
