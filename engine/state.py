"""State of a run between steps, which the loop updates and schedule actions receive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.loader import HeldOut, Loader
from engine.checkpoint.save import StatefulStates
from engine.cluster.job import StopRequests
from engine.config.config import Recipe
from engine.fake_quant import FakeQuant, QuantStats
from engine.losses.objective import NamedTokenLoss, Objective
from engine.metrics import Metrics
from engine.session.session import Session
from model.ranks import RankError, gather_objects, say


class NoSamplesError(RankError):
    """Error on all ranks before a step for which a server has written no samples; the run can still be saved."""


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
class HeldOutResults:
    """Results of a run's evaluations: means over the held-out tokens, by logged name."""

    last: dict[str, float] = field(default_factory=dict)
    """Losses of the last evaluation, also if it was before a resume; used by conditions of a schedule."""
    first: dict[str, float] = field(default_factory=dict)
    """Losses of the first evaluation of this process."""
    step: int | None = None
    """Optimizer steps done at the last evaluation of this process; None before the first."""
    before: int | None = None
    """Optimizer steps done at the last evaluation before the resume; None if there was none."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of the losses in the last evaluation of this process; events of the same step may change them later."""

    def record(self, step: int, results: dict[str, float], weights: dict[str, float]) -> None:
        """Store the results of an evaluation after ``step`` optimizer steps, with these weights of the losses."""
        self.last, self.first, self.step, self.weights = results, self.first or results, step, weights

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"last": self.last, "step": self.before if self.step is None else self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`. Checkpoints of earlier versions have no step."""
        self.last, self.before = state["last"], state.get("step")


@dataclass
class SkippedSteps:
    """Counter of steps that were skipped because their loss or gradients were not finite.

    DeepSpeed skips such a step on all ranks together, as it tests the gradient norm over all ranks. Where DeepSpeed has
    no optimizer of its own, ``engine.session.optimizer.SkippingAdamW`` does the same. Parameters, moments and Adam's
    step counts do not change.
    """

    limit: int
    """``train.max_skipped_steps``: the run ends after this many skipped steps in a row."""
    in_a_row: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return for a checkpoint how many steps in a row, up to the last one, were skipped."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.in_a_row = state["in_a_row"]

    def record(self, step: int, losses: Tensor, loader: Loader, *, lowered: bool) -> None:
        """Count step ``step`` (from 0), which was skipped, and name its samples; a collective.

        Args:
            step: number of the step.
            losses: this rank's sums of the step's losses, before a reduction.
            loader: describes the samples of the step.
            lowered: True if fp16's loss scale was lowered. If the losses of all ranks are also finite, only gradients
                overflowed: a line is printed, and the step is not counted.

        Raises:
            RankError: ``limit`` steps in a row were skipped.
        """
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
                "recover alone: lower the learning rate or look at the samples. Weights and optimizer are unchanged"
            )
        say(f"warning: {text}\n  left out ({self.in_a_row} in a row; the run ends at {self.limit})")


@dataclass(frozen=True)
class Published:
    """Result of a publish, the same on every rank."""

    step: int
    path: Path | None
    """Directory of the version; None if it could not be written."""
    served: tuple[str, ...]
    """Addresses of the servers that serve this version now."""


@dataclass
class LoopState:
    """State of the run between steps, passed to every schedule action, with methods that change the run."""

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
        """Results of the last evaluation; empty before the first."""
        return self.evaluations.last

    def objective(self) -> Objective:
        """Build the current objective: losses of the recipe and of the script, with weights that events have set."""
        overrides = self.session.overrides
        own = tuple(self.token_losses)
        return self.recipe.loss.objective(lm=overrides.lm_weight, kd=overrides.kd_weight, token_losses=own)

    def log(self, values: Mapping[str, float]) -> None:
        """Add a point per value to the curves, at the current step. Raises ValueError if a name is ``step`` or
        ``time``."""
        self.metrics.log(values, self.step)

    def set_peak_rates(self, **rates: float) -> None:
        """Set peak learning rates by parameter group (weights, embeddings, norms, biases, weight_scales, act_scales,
        adapters). Raises ValueError if a group is unknown or has no trained parameter, or a rate is negative."""
        trained = [group["name"] for group in self.session.engine.optimizer.param_groups]
        for name in rates:
            if name not in trained:
                raise ValueError(
                    f"learning rate {name}: no parameter of this group trains, expected one of {', '.join(trained)}"
                )
        self.session.overrides.set_peak_rates(**rates)

    def set_loss_weights(self, **weights: float) -> None:
        """Set the weights of the losses lm and kd. Raises ValueError if a loss is unknown, a weight negative, both
        weights are 0, or kd has no teacher."""
        self.session.overrides.set_loss_weights(**weights)

    def publish(self, directory: str | Path, *servers: str, keep: int = 2, seconds: float = 300.0) -> Published:
        """Write the model into ``directory`` as the export would be now, and let vLLM servers load it; a collective.

        An error of an argument, the disk or a server is printed, and training goes on; see :mod:`engine.publish`.

        Args:
            directory: an empty or new one, for versions of this run only. The servers must see it under this name.
            servers: their addresses (``http://localhost:8000``), each started with ``directory``/current.
            keep: number of versions to keep, 2 or more. Choose more if a server takes longer to start than the run from
                one publish to the next.
            seconds: time after which servers are no longer waited for; all ranks wait.
        """
        from engine.publish import publish

        folder, first = Path(directory), self.loader.first
        path, served = publish(self.session, self.quant, first, self.step, folder, servers, keep, seconds)
        return Published(self.step, path, served)

    def value_of(self, metric: str) -> float | None:
        """Look up a loss of the last step or a result of the last evaluation by name; None if not measured yet."""
        return {**self.evaluation, **(self.last.losses if self.last else {})}.get(metric)

    def stop(self) -> None:
        """End the run, with the export; call it on every rank. If an action ``at`` a step calls it, that step still
        runs."""
        self.stopped = True


Action = Callable[[LoopState], object]
StateCondition = Callable[[LoopState], bool]
