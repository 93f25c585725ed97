"""Steps whose loss or gradients are not finite: skipped, counted, and an error after too many in a row.

DeepSpeed skips such a step on all ranks together, as it tests the gradient norm over all ranks. Where DeepSpeed has no
optimizer of its own, ``engine.session.optimizer.SkippingAdamW`` does the same. Parameters, moments and Adam's step
counts do not change.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from data.loader import Loader
from model.ranks import RankError, gather_objects, say


def nan_unless_finite(loss: Tensor) -> Tensor:
    """Return the loss unchanged if it is finite, else NaN with NaN gradients.

    An infinite loss may have finite gradients. With NaN in every gradient the step is skipped on all ranks, without
    another collective.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class SkippedSteps:
    """Counter of skipped steps, which stops the run after too many in a row."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """``train.max_skipped_steps``."""
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """Return how many steps up to the last were skipped in a row, for a checkpoint."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.in_a_row = state["in_a_row"]

    def record(self, step: int, skipped: bool, losses: Tensor, loader: Loader, *, lowered: bool = False) -> None:
        """Record if step ``step`` (from 0) was skipped; a collective if it was.

        Args:
            step: number of the step.
            skipped: True if the step was skipped; the same on all ranks.
            losses: this rank's sums of the step's losses, before a reduction.
            loader: describes the samples of the step.
            lowered: True if the loss scale was halved. If also all losses are finite, the step does not count as a
                skipped one.

        Raises:
            RankError: ``limit`` steps in a row were skipped.
        """
        if not skipped:
            self.in_a_row = 0
            return
        finite = bool(losses.isfinite().all())
        if lowered and all(gather_objects(finite)):
            say(f"step {step}: a gradient overflowed at this loss scale: left out, and the scale halved")
            return
        self.in_a_row += 1
        found = f"  {loader.describe(step)}: loss {'finite' if finite else 'not finite'}"
        text = "\n".join([f"step {step}: the loss or its gradients are not finite", *gather_objects(found)])
        if self.in_a_row >= self.limit:
            raise RankError(
                f"{text}\n{self.in_a_row} steps in a row were left out (train.max_skipped_steps): the run does not "
                "recover by itself. Weights, scales and optimizer state are as before them"
            )
        say(f"warning: {text}\n  left out ({self.in_a_row} in a row; the run ends at {self.limit})")
