"""Steps whose loss or gradients are not finite: left out, counted, and the end of the run when they do not stop.

DeepSpeed leaves such a step out by itself, on all ranks together, since it looks at the gradient norm over all ranks
(``engine.session.optimizer.SkippingAdamW`` does where there is no optimizer of DeepSpeed's). Neither parameters nor
moments nor step counts of Adam move then.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from data.loader import Loader
from model.ranks import RankError, gather_objects, say


def nan_unless_finite(loss: Tensor) -> Tensor:
    """The loss, which sends NaN backward if it is not finite.

    A loss may be infinite where its gradients are finite; with NaN in every gradient the step is left out then too, on
    all ranks and without another collective.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class SkippedSteps:
    """Counts steps that were left out, says so, and stops the run after too many in a row."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """``train.max_skipped_steps``."""
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """The steps in a row, up to the last, that were left out; for a checkpoint."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.in_a_row = state["in_a_row"]

    def record(self, step: int, skipped: bool, losses: Tensor, loader: Loader, *, lowered: bool = False) -> None:
        """Take note of how step ``step`` (from 0) ended; a collective if it was skipped.

        Args:
            step: number of the step.
            skipped: whether it was left out; the same on all ranks.
            losses: this rank's sums of the step's losses, before a reduction.
            loader: knows the samples of the step.
            lowered: a lower loss scale will be tried next: where all losses are finite, the step does not count as one
                of those in a row.

        Raises:
            RankError: it was the last one allowed in a row.
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
