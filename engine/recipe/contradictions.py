"""What no section of a recipe can see alone: values that are each in bounds and do not go together.

Every rule is a function of its own. Its name and the first line of its docstring say what must hold, and it yields one
line per violation, which opens with the path of the key to change. ``RULES`` at the end lists them in the order in
which their problems are printed.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

from engine.recipe.checks import need
from engine.recipe.events import EventRecipe
from engine.recipe.loss import LossRecipe, TeacherKind
from engine.recipe.quant import QuantRecipe
from engine.recipe.sections import DataRecipe, EvalRecipe, LearnableRecipe, ModelRecipe, OptimRecipe, TrainRecipe


class Sections(Protocol):
    """What the rules look at of :class:`engine.recipe.recipe.Recipe`, which imports this module."""

    model: ModelRecipe
    data: DataRecipe
    train: TrainRecipe
    quant: QuantRecipe
    learnable: LearnableRecipe
    optim: OptimRecipe
    loss: LossRecipe
    schedule: list[EventRecipe]
    eval: EvalRecipe

    def distils(self) -> bool: ...

    def teacher_kind(self) -> TeacherKind: ...

    def never_quantises(self) -> bool: ...


def an_event_that_distils_has_a_teacher(recipe: Sections) -> Iterator[str]:
    """An event that gives the distillation loss a weight needs a teacher, as loss.kd_weight does."""
    loss = recipe.loss
    if recipe.distils() and loss.kd_weight == 0 and loss.named_teacher() == "none":
        yield f"loss.teacher: {loss.teacher!r}, expected a directory since an event under schedule sets kd"


def a_student_that_teaches_itself_is_frozen(recipe: Sections) -> Iterator[str]:
    """With loss.teacher self the weights, norms and routers do not train: they are the teacher's too."""
    moving = [f"learnable.{name}" for name in ("weight", "norm", "router") if getattr(recipe.learnable, name)]
    if recipe.teacher_kind() == "self" and moving:
        yield (
            f"loss.teacher: 'self', expected {' and '.join(moving)} to be false, or a directory: a student that "
            "changes would be taught by what it has become"
        )


def events_happen_during_the_run(recipe: Sections) -> Iterator[str]:
    """An event's step is one that the run begins."""
    steps = recipe.train.steps
    for index, event in enumerate(recipe.schedule):
        if event.at is not None and event.at >= steps > 0:
            yield f"schedule[{index}].at: {event.at}, expected below train.steps ({steps})"


def events_leave_a_loss(recipe: Sections) -> Iterator[str]:
    """At no step have both losses the weight 0, whenever the events with a condition come."""
    changes = {index: event for index, event in enumerate(recipe.schedule) if event.loss}
    fixed = sorted((event.at, index) for index, event in changes.items() if event.at is not None)
    free = [index for index, event in changes.items() if event.at is None]
    start = (recipe.loss.lm_weight > 0, recipe.loss.kd_weight > 0)
    if not any(start):
        return  # a problem of the section loss
    reached, refused = {start}, set[int]()

    def follow(states: set[tuple[bool, bool]], index: int) -> set[tuple[bool, bool]]:
        """What an event makes of these pairs: whether lm has a weight, and whether kd has."""
        given = changes[index].loss or {}
        after = {(given.get("lm", lm) > 0, given.get("kd", kd) > 0) for lm, kd in states}
        if (False, False) in after:
            refused.add(index)
        return {(lm, kd) for lm, kd in after if lm or kd}

    for index in (None, *(index for _, index in fixed)):
        reached = reached if index is None else follow(reached, index)
        before: set[tuple[bool, bool]] = set()
        while reached != before:  # an event without a step may come now, or not
            before = reached
            reached = reached.union(*(follow(reached, other) for other in free))
    for index in sorted(refused):
        yield (
            f"schedule[{index}].loss: {changes[index].loss}, expected a weight above 0 for the other loss in the same "
            "event: at that time it may be 0 too, and there would be no loss"
        )


def events_switch_what_the_scheme_quantises(recipe: Sections) -> Iterator[str]:
    """An event switches on fake quant only of weights or activations that the scheme quantises."""
    quant = recipe.quant
    if not quant.known():
        return
    for index, event in enumerate(recipe.schedule):
        key = f"schedule[{index}].fake_quant"
        if event.fake_quant == "activations":
            expected = f"weights or false: quant.scheme {quant.scheme} quantises no activations"
            yield from need(quant.quantises_activations(), key, event.fake_quant, expected)
        if event.fake_quant == "weights":
            expected = f"true, activations or false: quant.scheme {quant.scheme} quantises no weights"
            yield from need(bool(quant.linear_schemes()), key, event.fake_quant, expected)


def flash_attention_packs_a_row_at_a_time(recipe: Sections) -> Iterator[str]:
    """Flash attention reads where packed samples end in batches of one row alone."""
    attention, rows = recipe.model.attn_implementation, recipe.data.micro_batch_size
    if recipe.data.packing and attention.startswith("flash_attention"):
        expected = f"1 with data.packing and model.attn_implementation {attention}, which reads borders in one row"
        yield from need(rows == 1, "data.micro_batch_size", rows, expected)


def an_evaluation_has_samples(recipe: Sections) -> Iterator[str]:
    """Evaluation during training needs samples that are held out or given."""
    every = recipe.eval.every
    if every and not (recipe.data.held_out or recipe.data.eval):
        yield f"eval.every: {every}, expected 0, or samples to evaluate on (data.held_out, data.eval)"


def checkpoints_fall_on_evaluations(recipe: Sections) -> Iterator[str]:
    """Where there are evaluations, every checkpoint has been evaluated, so that the best one is known."""
    every, checkpoint_every = recipe.eval.every, recipe.train.checkpoint_every
    if every > 0 and checkpoint_every % every:
        expected = f"a multiple of eval.every ({every}), so that each checkpoint has been evaluated"
        yield f"train.checkpoint_every: {checkpoint_every}, expected {expected}"


def the_best_checkpoint_is_chosen_by_a_loss_that_is_measured(recipe: Sections) -> Iterator[str]:
    """eval.best kd or total needs a teacher that can be asked about held-out samples."""
    best = recipe.eval.best
    if best != "lm":
        yield from need(recipe.distils(), "eval.best", best, "lm: there is no teacher")
        expected = "lm: loss.teacher_cache holds no held-out samples"
        yield from need(recipe.loss.named_teacher() != "cache", "eval.best", best, expected)


def one_place_says_when_fake_quant_starts(recipe: Sections) -> Iterator[str]:
    """Either quant.fake_quant_start or events say when fake quant starts."""
    start = recipe.quant.fake_quant_start
    if start > 0 and any(event.fake_quant is not None for event in recipe.schedule):
        yield (f"quant.fake_quant_start: {start}, expected 0 or -1, since events under schedule switch fake quant")


def scales_of_activations_are_set_only_where_they_are_stored(recipe: Sections) -> Iterator[str]:
    """Scales of activations are learned or initialised only where the scheme stores such scales."""
    quant, act_scale, initial = recipe.quant, recipe.learnable.act_scale, recipe.quant.initial_input_scale
    if not quant.known() or quant.stores_input_scales():
        return
    why = "has dynamic scales of activations" if quant.quantises_activations() else "quantises no activations"
    yield from need(not act_scale, "learnable.act_scale", act_scale, f"false: quant.scheme {quant.scheme} {why}")
    expected = f"null: quant.scheme {quant.scheme} {why}"
    yield from need(initial is None, "quant.initial_input_scale", initial, expected)


def fake_quant_starts_during_the_run(recipe: Sections) -> Iterator[str]:
    """Fake quant that starts after the last step never starts."""
    start, steps = recipe.quant.fake_quant_start, recipe.train.steps
    if start >= steps > 0:
        expected = f"below train.steps ({steps}), or -1 to train without fake quant"
        yield f"quant.fake_quant_start: {start}, expected {expected}"


def the_fp8_gemm_has_fp8_codes(recipe: Sections) -> Iterator[str]:
    """quant.compute fp8_gemm needs fp8 codes per tensor on both sides, and a model in bfloat16."""
    quant, dtype = recipe.quant, recipe.model.dtype
    if quant.compute == "fp8_gemm" and quant.known():
        expected = f"auto or simulate: quant.scheme {quant.scheme} has no fp8 codes per tensor on both sides"
        yield from need(quant.has_fp8_gemm(), "quant.compute", quant.compute, expected)
        expected = f"auto or simulate: the fp8 GEMM gives bfloat16, model.dtype is {dtype}"
        yield from need(dtype == "bfloat16", "quant.compute", quant.compute, expected)


def what_learns_gets_a_gradient(recipe: Sections) -> Iterator[str]:
    """If scales alone learn, there are such scales, and fake quant is on at some step."""
    quant, learn = recipe.quant, recipe.learnable
    others = learn.weight or learn.norm or learn.router
    if recipe.never_quantises() and (learn.weight_scale or learn.act_scale) and not others:
        yield "quant.fake_quant_start: -1 (never), expected 0 or more: only scales learn, and get no gradient"
    if learn.weight_scale and quant.known() and not (others or learn.act_scale or quant.linear_schemes()):
        yield (
            "learnable: only weight_scale is true, expected act_scale, weight or norm too: quant.scheme "
            f"{quant.scheme} has no weight scales"
        )


def one_source_gives_the_scales_of_activations(recipe: Sections) -> Iterator[str]:
    """Stored scales of activations that no PTQ checkpoint gives come from calibration or from a number, not both."""
    quant = recipe.quant
    if not quant.stores_input_scales():
        return
    initial, batches = quant.initial_input_scale, quant.calibration_batches
    if initial is not None and batches > 0:
        yield (
            f"quant.initial_input_scale: {initial}, expected null or quant.calibration_batches 0 "
            f"(it is {batches}): either is the source of scales that no PTQ checkpoint gives"
        )
    if quant.scales is None and batches == 0 and initial is None and quant.fake_quant_start == 0:
        yield (
            f"quant.calibration_batches: 0, expected 1 or more (or quant.scales, or quant.initial_input_scale): "
            f"nothing gives the activation scales of {quant.scheme}"
        )


def the_learning_rate_reaches_its_peak(recipe: Sections) -> Iterator[str]:
    """Warm-up and decay fit into the run, each alone and both together."""
    warmup, decay, steps = recipe.optim.warmup_steps, recipe.optim.decay_steps, recipe.train.steps
    for key, taken in (("warmup_steps", warmup), ("decay_steps", decay)):
        # A train.steps below 1 has been reported already.
        yield from need(steps < 1 or taken <= steps, f"optim.{key}", taken, f"at most {steps} (train.steps)")
    if max(warmup, decay) <= steps < warmup + decay:
        yield (
            f"optim.warmup_steps, optim.decay_steps: {warmup + decay} together, expected at most {steps} (train.steps)"
        )


RULES: tuple[Callable[[Sections], Iterator[str]], ...] = (
    an_event_that_distils_has_a_teacher,
    a_student_that_teaches_itself_is_frozen,
    events_happen_during_the_run,
    events_leave_a_loss,
    events_switch_what_the_scheme_quantises,
    flash_attention_packs_a_row_at_a_time,
    an_evaluation_has_samples,
    checkpoints_fall_on_evaluations,
    the_best_checkpoint_is_chosen_by_a_loss_that_is_measured,
    one_place_says_when_fake_quant_starts,
    scales_of_activations_are_set_only_where_they_are_stored,
    fake_quant_starts_during_the_run,
    the_fp8_gemm_has_fp8_codes,
    what_learns_gets_a_gradient,
    one_source_gives_the_scales_of_activations,
    the_learning_rate_reaches_its_peak,
)
