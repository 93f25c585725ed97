"""What the loop tells people about a step, and about the run when it ends."""

import math
from pathlib import Path

from engine.checkpoint.save import best_checkpoint
from engine.metrics import Progress, Summary, peak_memory_bytes
from engine.state import LoopState, StepResult
from model.ranks import is_main, say, world_size


def report_step(state: LoopState, progress: Progress, seconds: float) -> None:
    """The figures of the step that was just done to the progress bar and TensorBoard."""
    last = state.last
    assert last is not None
    speed = last.tokens / world_size() / seconds
    progress.step({"loss": last.losses["loss/total"], "tok/s/dev": speed})
    if state.step % state.recipe.train.log_every:
        return
    engine = state.session.engine
    rates = {f"lr/{group['name']}": group["lr"] for group in engine.optimizer.param_groups}
    state.log(
        {
            **last.losses,
            **rates,
            **_grad_norms(last),
            "train/tokens_per_second_per_device": speed,
            "train/peak_memory_gib": peak_memory_bytes(state.session.device) / 2**30,
            "train/skipped_steps": engine.skipped_steps,
            **({"train/loss_scale": last.loss_scale} if last.loss_scale is not None else {}),
            "train/epoch": state.loader.epoch_of(state.step),
        }
    )


def _grad_norms(step: StepResult) -> dict[str, float]:
    """What is known of the step's gradient norm: of the whole, and in some steps of weights and of scales."""
    norms = {}
    if step.grad_norm is not None:
        norms["train/grad_norm"] = step.grad_norm
    if step.scale_grad_norm is not None:
        norms["train/grad_norm_scales"] = step.scale_grad_norm
        if step.grad_norm is not None:
            norms["train/grad_norm_weights"] = math.sqrt(max(0.0, step.grad_norm**2 - step.scale_grad_norm**2))
    return norms


def report_end(state: LoopState, summary: Summary, checkpoints: Path) -> None:
    """The last lines that a person reads, and the run's results to TensorBoard, whose files are closed."""
    if is_main() and summary.steps:
        state.metrics.results(state.recipe, {**summary.last, **state.evaluation})
        peak = peak_memory_bytes(state.session.device)
        evaluations = (state.first_evaluation, state.evaluation)
        skipped = state.session.engine.skipped_steps
        say(summary.text(devices=world_size(), skipped=skipped, peak_bytes=peak, evaluations=evaluations))
    if is_main() and (line := best_line(checkpoints)):
        say(line)
    state.metrics.close()


def best_line(checkpoints: Path) -> str | None:
    """What the end of a run says of the best checkpoint in a directory, None where none was marked."""
    try:
        best = best_checkpoint(checkpoints)
    except ValueError as error:  # everything else is done and written
        return f"warning: {error}"
    return None if best is None else f"best checkpoint: {checkpoints / best.name}, {best.metric} {best.value:.4f}"
