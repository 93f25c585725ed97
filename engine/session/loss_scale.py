"""The loss scale of fp16 training: as large as gradients allow, so that small ones do not vanish.

fp16 has no number between 0 and 6e-8, and none above 65504. Loss and gradients are multiplied by a power of two, and
the sums of gradients, in fp32, divided by it again. The scale is found while training (Micikevicius et al. 2018, Mixed
Precision Training, section 3.2, arXiv:1710.03740): a step with an Inf in a gradient is left out and halves it, so many
steps in a row without one double it.

DeepSpeed has a scaler of its own, which doubles the scale between a step's backward and its update: that update divides
by twice what its gradients were multiplied with. On stage 0 it knows other settings, too. Here DeepSpeed gets a static
scale, and :class:`LossScale` sets it before each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class LossScale:
    """A scale that follows the gradients.

    Attributes:
        value: the scale of the next step, a power of two.
        window: steps in a row without an overflow after which it doubles; None: it never changes.
        least: it is not halved below this.
        good_steps: in a row, since the last change.
    """

    value: float
    window: int | None
    least: float
    good_steps: int = 0

    @classmethod
    def from_config(cls, fp16: dict[str, Any]) -> "LossScale":
        """The scale that the ``fp16`` section of a DeepSpeed configuration asks for, with DeepSpeed's defaults."""
        fp16 = {key: value for key, value in fp16.items() if value != "auto"}  # which means the default
        static = float(fp16.get("loss_scale", 0))
        if static:
            return cls(static, None, static)
        least = float(fp16.get("min_loss_scale", 1))
        return cls(
            max(2.0 ** fp16.get("initial_scale_power", 16), least), int(fp16.get("loss_scale_window", 1000)), least
        )

    def stepped(self, *, overflow: bool) -> bool:
        """A step is done; ``overflow``: a gradient was not finite. Whether the scale went down for it."""
        if self.window is None:
            return False
        if overflow:
            self.good_steps = 0
            before, self.value = self.value, max(self.value / 2, self.least)
            return self.value < before
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.good_steps, self.value = 0, 2 * self.value
        return False

    def state_dict(self) -> dict[str, float]:
        """What moves, for a checkpoint."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what :meth:`state_dict` gave; a scale that does not move stays what it is."""
        if self.window is None:
            return
        self.value, self.good_steps = state["value"], int(state["good_steps"])
