"""Values that schedule events have set in place of the recipe's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.config.config import Recipe
from engine.session.optimizer import peak_learning_rates


@dataclass
class Overrides:
    """Loss weights, peak learning rates and frozen scales set by schedule events.

    Attributes:
        recipe: used for values that no event has set. A resumed run uses the recipe of the resumed start.
        loss_weights: set by an event: ``lm``, ``kd``.
        peak_rates: peak learning rates set by an event, by parameter group.
        frozen: parameter groups of scales that do not train although their fake quant is on.
    """

    recipe: Recipe
    loss_weights: dict[str, float] = field(default_factory=dict)
    peak_rates: dict[str, float] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "loss_weights": dict(self.loss_weights),
            "peak_rates": dict(self.peak_rates),
            "frozen": set(self.frozen),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.loss_weights, self.peak_rates = dict(state["loss_weights"]), dict(state["peak_rates"])
        self.frozen = set(state["frozen"])

    def set_peak_rates(self, **rates: float) -> None:
        """Set peak learning rates by parameter group; the schedule over the steps continues.

        Raises:
            ValueError: unknown group, or negative rate.
        """
        known = peak_learning_rates(self.recipe.optim)
        for name, rate in rates.items():
            if name not in known or not rate >= 0:
                raise ValueError(
                    f"learning rate {name}: {rate}, expected 0 or more, of a group out of {', '.join(known)}"
                )
        self.peak_rates = self.peak_rates | rates

    def set_loss_weights(self, **weights: float) -> None:
        """Set the weights of the losses ``lm`` and ``kd``.

        Raises:
            ValueError: unknown loss, negative weight, both weights 0, or no teacher for ``kd``.
        """
        for name, weight in weights.items():
            if name not in ("lm", "kd") or not weight >= 0:
                raise ValueError(f"loss weight {name}: {weight}, expected 0 or more, of lm or kd")
        if weights.get("kd") and self.recipe.teacher_kind() == "none":
            raise ValueError(
                "loss weight kd: no teacher is loaded; name one in loss.teacher, and set loss.kd_weight or an event "
                "under schedule"
            )
        wanted = self.loss_weights | weights
        if not wanted.get("lm", self.recipe.loss.lm_weight) and not wanted.get("kd", self.recipe.loss.kd_weight):
            raise ValueError("loss weights lm and kd: both 0, expected at least one above 0: there is no loss")
        self.loss_weights = wanted

    def peaks(self) -> dict[str, float]:
        """Peak learning rate of every parameter group."""
        return peak_learning_rates(self.recipe.optim) | self.peak_rates

    @property
    def lm_weight(self) -> float:
        """Weight of the language modeling loss."""
        return self.loss_weights.get("lm", self.recipe.loss.lm_weight)

    @property
    def kd_weight(self) -> float:
        """Weight of the distillation loss."""
        return self.loss_weights.get("kd", self.recipe.loss.kd_weight)
