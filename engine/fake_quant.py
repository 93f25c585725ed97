"""Fake quant on and off while training: what ``state.quant`` offers to a schedule."""

from engine.calibrate import observed_input_scales
from engine.setup import Session
from model.scales import measure_weight_scales, write_scales
from model.zero import reset_optimizer_state
from quant import weights_changed


class FakeQuant:
    """Switches fake quant; every method is to be called on all ranks at the same step.

    While fake quant is off, the model trains as it is, theta rests, and observers watch the activations. Switching on
    after such steps measures again: weight scales from the weights as they are now, activation scales from the
    observers. The scales that were loaded or measured before would fit a model that no longer exists. Theta's training
    begins anew then, with fresh moments and a warm-up of its own.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.quantization = session.quantization
        self.stale = False

    @property
    def enabled(self) -> bool:
        """Whether any layer is fake-quantised."""
        return any(weights or inputs for weights, inputs in self.quantization.fake_quant_state().values())

    def enable(self, *, weights: bool = True, activations: bool = True) -> None:
        """Fake quant on, in all layers; if the model trained without it, scales are measured again, in a collective."""
        if self.stale:
            self.measure()
        self.quantization.observe(False)
        self.quantization.set_fake_quant(weights=weights, activations=activations)

    def disable(self, *, observe: bool = True) -> None:
        """Fake quant off, in all layers; observers on, unless fake quant is not to come back."""
        self.quantization.set_fake_quant(weights=False, activations=False)
        self.quantization.observe(observe)

    def measure(self) -> None:
        """Weight scales from the weights as they are now, activation scales from the observers; a collective."""
        write_scales(self.quantization.weight_groups, measure_weight_scales(self.quantization))
        write_scales(self.quantization.input_groups, observed_input_scales(self.quantization))
        weights_changed(self.session.model)
        reset_optimizer_state(self.session.engine.optimizer, "scales")
        self.session.scale_steps = 0
        self.stale = False
