"""Set up a run: everything between its recipe and its first step."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from data.loader import Loader
from engine.checkpoint.find import (
    LATEST,
    STEP_DIRECTORIES,
    TrainingCheckpoint,
    check_resumable,
    check_samples,
    check_stage,
    no_steps_left,
    other_commits,
    verify_checkpoint,
    without_effect,
)
from engine.checkpoint.resume import load_checkpoint
from engine.checkpoint.save import StatefulStates
from engine.cluster.job import RunLock, StopRequests
from engine.cluster.nodes import check_shared
from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe, save_recipe
from engine.fake_quant import FakeQuant, check_inputs
from engine.losses.objective import DIAGNOSTICS, NamedTokenLoss
from engine.metrics import FILE, Metrics, MetricsFile, MetricsWriter, TensorBoard, Tracker, import_trackers
from engine.schedule import Schedule, check_events
from engine.session.context import build_loader, start_ranks
from engine.session.optimizer import parameter_groups
from engine.session.probes import with_checked_rows
from engine.session.session import CheckedModels, Session, build_session, check_models
from engine.session_export import check_export, check_exportable
from engine.state import HeldOutResults, LoopState, SkippedSteps
from model.console import working
from model.ranks import errors_on_all_ranks, is_main, say
from model.save.aside import remove_left
from model.zero import stage


def start_run(
    recipe: Recipe, schedule: Schedule, token_losses: Sequence[NamedTokenLoss], run_lock: RunLock
) -> LoopState:
    """Start ranks, check models, read data, build model and scales, load the checkpoint to resume; a collective.

    Args:
        recipe: is changed: names on the Hub become paths, train.epochs sets train.steps.
        schedule: events of the recipe and of the script.
        token_losses: losses of the script.
        run_lock: locks output_dir here; the caller releases it.

    Returns:
        The state before the run's first step; of a resumed run, at the step of its checkpoint.

    Raises:
        RecipeError: a problem was found before the process group started.
        RankError: any rank found a problem after that.
    """
    recipe.fetch()
    recipe.check_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    output = Path(recipe.output_dir)
    checkpoint = _check_destinations(recipe, output / "checkpoints")
    given = {
        "events of the script": schedule.described(),
        "losses of the script": [(loss.name, loss.weight) for loss in token_losses],
        "checkpoint to resume": checkpoint and checkpoint.path,
    }
    context = start_ranks(recipe, given)
    with errors_on_all_ranks(ValueError):  # the command line has done so, before there were ranks
        recipe.validate_files()
    if recipe.loss.named_teacher() != "none" and not recipe.distils():
        say("warning: the teacher of loss is not used: loss.kd_weight is 0, and no event of schedule sets kd")
    _take_output(recipe, run_lock)
    trackers = import_trackers(recipe)
    if checkpoint is not None:
        for line in (*other_commits(checkpoint, recipe), *without_effect(checkpoint, recipe)):
            say(line)
        check_stage(checkpoint, stage(context.ds_config))
        verify_checkpoint(checkpoint)
    # In the order of how long they take: headers of the models' files, lines of data, weights.
    models = check_models(recipe, context)
    if recipe.schedule:
        _check_schedule(recipe, models, [loss.name for loss in token_losses])
    if recipe.export.enabled:
        check_exportable(recipe, models.model, models.quantization)
    stop_requests = StopRequests()
    make = _loader_class(recipe, min(models.tokens.values()), stop_requests)
    loader, held_out = build_loader(recipe, context.tokenizer, models.tokens, make)
    del models
    if checkpoint is not None:
        check_samples(checkpoint, loader.digest)
    if recipe.train.epochs:
        _set_steps(recipe, loader.steps_of(recipe.train.epochs), schedule)
    session = build_session(recipe, context, loader.samples, loader.first)
    session = with_checked_rows(session, loader.samples)
    with errors_on_all_ranks(OSError, key="output_dir"):
        if is_main():
            save_recipe(recipe, output / "recipe.yaml")
    quant = FakeQuant(session)
    if checkpoint is None and (recipe.quant.fake_quant_start == 0 or recipe.adapter.beside):  # else observers watch
        quant.calibrate(loader.first(recipe.quant.calibration_batches))
        with working("comparing input scales with the first batch"):
            check_inputs(session, loader.first)
    session.engine.train()
    evaluations, skipped = HeldOutResults(), SkippedSteps(recipe.train.max_skipped_steps)
    stateful: StatefulStates = {
        **session.stateful(),
        "fake_quant": quant,
        "events": schedule,
        "evaluations": evaluations,
        "skipped_steps": skipped,
    }
    step = 0
    if checkpoint is not None:
        step = _resume(session, quant, stateful, checkpoint)
    return LoopState(
        session,
        quant,
        loader,
        held_out,
        _open_metrics(recipe, trackers, step),
        evaluations,
        skipped,
        stateful,
        token_losses,
        step=step,
        saved_step=step if checkpoint is not None else None,
        stop_requests=stop_requests,
    )


def _resume(session: Session, quant: FakeQuant, stateful: StatefulStates, checkpoint: TrainingCheckpoint) -> int:
    """Load a checkpoint, and say what the recipe cannot change any more; a collective. Return the checkpoint's step."""
    recipe = session.recipe
    with working(f"loading {checkpoint.path}"):
        step = load_checkpoint(session, stateful, checkpoint)
    before = load_recipe(checkpoint.path / "recipe.yaml")
    begins = before.never_quantizes() and not recipe.never_quantizes() and not quant.enabled
    if begins and not quant.quantization.observing:  # a run that never quantizes observes no inputs
        quant.observe(True)
    for line in (*session.overrides.replaced(before), *no_steps_left(checkpoint, recipe)):
        say(line)
    return step


def _loader_class(recipe: Recipe, vocabulary: int, stop_requests: StopRequests) -> Callable[..., Loader]:
    """Return the loader's class, or for ``data.kind: on_policy`` a function with its arguments."""
    if recipe.data.kind != "on_policy":
        return Loader
    from engine.on_policy import OnPolicyLoader

    return partial(OnPolicyLoader, recipe, vocabulary, stop_requests)


def _open_metrics(recipe: Recipe, trackers: Mapping[str, ModuleType], done: int) -> Metrics:
    """Open the files and trackers that rank 0 writes losses to; a resumed run, which has ``done`` steps, appends."""
    if not is_main():
        return Metrics([])
    output = Path(recipe.output_dir)
    writers: list[MetricsWriter] = [MetricsFile(output / FILE, done=done)]
    if "tensorboard" in recipe.train.report_to:
        writers.append(TensorBoard(output / "tensorboard", output / "recipe.yaml", done=done))
    return Metrics([*writers, *(Tracker(*tracker, recipe, done=done) for tracker in trackers.items())])


def _set_steps(recipe: Recipe, steps: int, schedule: Schedule) -> None:
    """Set train.steps to ``steps``, computed from train.epochs, and check the recipe and the schedule again. Raises
    RankError on every rank."""
    with errors_on_all_ranks(ValueError):
        if recipe.train.steps not in (0, steps):
            raise ValueError(
                f"train.steps: {recipe.train.steps}, expected 0 or {steps}, the steps of train.epochs "
                f"{recipe.train.epochs:g}"
            )
        recipe.train.steps = steps
        recipe.validate()
        schedule.check(steps)
    say(f"train.epochs: {recipe.train.epochs:g} epochs are {steps:,} steps")


def _check_schedule(recipe: Recipe, models: CheckedModels, token_losses: Sequence[str]) -> None:
    """Refuse events that name a missing layer, parameter group or metric. Raises RankError."""
    with errors_on_all_ranks(ValueError):
        groups = [group["name"] for group in parameter_groups(models.model, recipe.optim)]
        check_events(recipe.schedule, models.quantization, groups, _measured(recipe, token_losses))


def _check_destinations(recipe: Recipe, checkpoints: Path) -> TrainingCheckpoint | None:
    """Check before any work that the export can be written, and that no earlier run would be overwritten.

    Returns:
        The checkpoint to resume from; None in a new run.

    Raises:
        RecipeError: a check failed. Every rank runs the checks, without a collective.
    """
    if recipe.export.enabled:
        check_export(recipe)
    if recipe.train.resume:
        return check_resumable(recipe, checkpoints)
    if (checkpoints / LATEST).exists() or any(checkpoints.glob(STEP_DIRECTORIES)):
        raise RecipeError(
            f"output_dir: {recipe.output_dir!r} has checkpoints of an earlier run; "
            "resume it with train.resume, or name another directory"
        )
    return None


def _take_output(recipe: Recipe, run_lock: RunLock) -> None:
    """Create the output directory, check that ranks share it, lock it, and remove what a killed export left; warn if
    the run will write neither export nor checkpoint. A collective; raises RankError on every rank if this fails."""
    output = Path(recipe.output_dir)
    with errors_on_all_ranks(OSError, key="output_dir"):
        if is_main():
            output.mkdir(parents=True, exist_ok=True)
    check_shared(output)
    run_lock.take(output)
    if not recipe.export.enabled and not recipe.train.checkpoint_every:
        say(
            "warning: this run writes neither an export (export.enabled is false) nor a checkpoint "
            "(train.checkpoint_every is 0): the trained model is lost at its end"
        )
    with errors_on_all_ranks(OSError, key="export.dir"):
        if recipe.export.enabled and is_main():
            remove_left(recipe.export_dir())  # a killed export may fill the disk


def _measured(recipe: Recipe, token_losses: Sequence[str]) -> list[str]:
    """List the metrics that a condition of the recipe may use."""
    parts = ["total", "lm", *token_losses]
    parts += ["router_aux"] if recipe.learnable.router else []
    kd = [f"kd/{recipe.loss.kd}"] if recipe.teacher_kind() != "none" else []
    names = [f"loss/{part}" for part in (*parts, *kd)]
    names += [f"kd/{name}" for name in DIAGNOSTICS] if kd and recipe.loss.diagnostics_every else []
    if recipe.eval.every:
        cached = recipe.teacher_kind() == "cache"  # has no output for held-out samples
        names += [f"eval/{part}" for part in (*parts[cached:], *([] if cached else kd), "perplexity")]
    return names
