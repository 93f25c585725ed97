"""State of a run between steps, which the loop updates and schedule actions receive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from data.loader import HeldOut, Loader
from engine.checkpoint.save import StatefulStates
from engine.cluster.job import StopRequests
from engine.config.config import Recipe
from engine.evaluation import HeldOutResults
from engine.fake_quant import FakeQuant, QuantStats
from engine.faults import SkippedSteps
from engine.losses.objective import NamedTokenLoss, Objective
from engine.metrics import Metrics
from engine.session.session import Session


@dataclass
class StepResult:
    """Result of one optimizer step over all ranks; losses are means over the valid tokens."""

    losses: dict[str, float]
    valid_tokens: int
    tokens: int
    """Number of tokens without padding."""
    grad_norm: float | None
    """Gradient norm before clipping; None on stage 0 in fp32, where DeepSpeed does not keep the norm."""
    scale_grad_norm: float | None
    """Gradient norm of the scales before clipping; None in steps that do not measure the quantization."""
    skipped: bool
    """True if the loss or a gradient was not finite, so that nothing was updated."""
    stop_requested: bool
    """True if a signal asked at least one rank to stop; the same on all ranks."""
    loss_scale: float | None
    """Loss scale of the step in fp16, else None."""
    quantization: QuantStats | None
    """Statistics of the quantization; None in steps that do not measure them."""


@dataclass
class LoopState:
    """State of the run and its overrides, passed to every schedule action."""

    session: Session
    quant: FakeQuant
    loader: Loader
    held_out: HeldOut | None
    metrics: Metrics
    evaluations: HeldOutResults
    """Results of the evaluations so far."""
    skipped: SkippedSteps
    """Counter of the skipped steps."""
    stateful: StatefulStates
    """Objects whose state a checkpoint saves in addition to DeepSpeed's state, by name."""
    token_losses: Sequence[NamedTokenLoss] = ()
    """Losses that the user's script added."""
    step: int = 0
    """Optimizer steps done."""
    last: StepResult | None = None
    """Result of the last step."""
    saved_step: int | None = None
    """Step of the checkpoint that this run wrote last, or was resumed from."""
    stopped: bool = False
    stop_requests: StopRequests = field(default_factory=StopRequests)

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.session.recipe

    @property
    def model(self) -> torch.nn.Module:
        """The student; under stage 3 its Parameters are partitioned."""
        return self.session.model

    @property
    def evaluation(self) -> dict[str, float]:
        """Results of the last evaluation."""
        return self.evaluations.last

    def objective(self) -> Objective:
        """Build the current objective: losses of the recipe and of the script, with weights that events have set."""
        overrides = self.session.overrides
        own = tuple(self.token_losses)
        return self.recipe.loss.objective(lm=overrides.lm_weight, kd=overrides.kd_weight, token_losses=own)

    def log(self, values: Mapping[str, float]) -> None:
        """Write values to TensorBoard at the current step."""
        self.metrics.log(values, self.step)

    def set_peak_rates(self, **rates: float) -> None:
        """Set peak learning rates by parameter group (weights, embeddings, norms, biases, weight_scales, act_scales,
        adapters)."""
        self.session.overrides.set_peak_rates(**rates)

    def set_loss_weights(self, **weights: float) -> None:
        """Set the weights of the losses lm and kd."""
        self.session.overrides.set_loss_weights(**weights)

    def value_of(self, metric: str) -> float | None:
        """Look up a loss of the last step or a result of the last evaluation by name; None if not measured yet."""
        return {**self.evaluation, **(self.last.losses if self.last else {})}.get(metric)

    def stop(self) -> None:
        """End the run after this step; the export still follows."""
        self.stopped = True


Action = Callable[[LoopState], object]
StateCondition = Callable[[LoopState], bool]
