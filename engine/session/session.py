"""The session: a run that is ready to train. Its models are checked before data is read, and built after it.

:func:`check_models` first builds the models on the meta device, which takes no memory, and checks configurations and
headers of files, so that an error in a model is found before data is tokenized for minutes.

:func:`build_session` builds in the order that ZeRO requires.

Parameters must exist in partitions before weights stream into them. Layers must be quantized before their scales are
loaded. Both come before ``deepspeed.initialize`` copies the parameters into fp32 masters. Activations are calibrated
after it, because the forward needs the engine's hooks.
"""

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import deepspeed
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.loader import MicroBatch
from data.samples import Sample
from engine.config.config import Recipe
from engine.session.adapter import seed_of
from engine.session.context import META, RunContext, rows_of, stage_0
from engine.session.optimizer import LossScale, initialize_frozen, initialize_student, peak_learning_rates
from engine.session.student import (
    build_student,
    empty_student,
    initial_codes,
    initial_scales,
    quantize_student,
    uses_fp8_gemm,
)
from engine.session.teacher import (
    SelfTeacher,
    Teacher,
    check_cache,
    check_teacher,
    load_teacher,
    open_cached_teacher,
    unquantized_forward,
)
from model.checkpoint.fingerprint import fingerprints, frozen_weights
from model.checkpoint.load import check_headers
from model.console import working
from model.head import LMHead, QuantHead, embedding_rows, install_head, output_head, settle_function
from model.peft import start_from_error
from model.quantized.scales import check_start
from model.ranks import errors_on_all_ranks, rank
from model.scales.in_place import release_scales
from model.scales.loading import check_scale_files
from model.zero.quantized_gather import gather_quantized
from quant import Quantization


@dataclass
class Overrides:
    """Loss weights, peak learning rates and frozen scales set by schedule events.

    Attributes:
        recipe: source of the values that no event has set. In a resumed run it is the new recipe.
        loss_weights: weights of the losses ``lm`` and ``kd`` set by an event.
        peak_rates: peak learning rates set by an event, by parameter group.
        frozen: parameter groups of scales that do not train although their fake quant is on.
    """

    recipe: Recipe
    loss_weights: dict[str, float] = field(default_factory=dict)
    peak_rates: dict[str, float] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that events have set, as plain values for a checkpoint."""
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
        """Set peak learning rates by parameter group; the schedule over the steps continues. Raises ValueError if a
        group is unknown, or a rate negative."""
        known = peak_learning_rates(self.recipe.optim)
        for name, rate in rates.items():
            if name not in known or not rate >= 0:
                raise ValueError(
                    f"learning rate {name}: {rate}, expected 0 or more, for one of the groups {', '.join(known)}"
                )
        self.peak_rates = self.peak_rates | rates

    def set_loss_weights(self, **weights: float) -> None:
        """Set the weights of the losses ``lm`` and ``kd``. Raises ValueError if a loss is unknown, a weight negative,
        both weights would be 0, or ``kd`` gets a weight in a run without a teacher."""
        for name, weight in weights.items():
            if name not in ("lm", "kd") or not weight >= 0:
                raise ValueError(f"loss weight {name}: {weight}, expected lm or kd, with a weight of 0 or more")
        if weights.get("kd") and self.recipe.teacher_kind() == "none":
            raise ValueError(
                "loss weight kd: no teacher is loaded; name one in loss.teacher, and give kd a weight in "
                "loss.kd_weight or in an event under schedule"
            )
        wanted = self.loss_weights | weights
        if not wanted.get("lm", self.recipe.loss.lm_weight) and not wanted.get("kd", self.recipe.loss.kd_weight):
            raise ValueError("loss weights lm and kd: both 0, expected at least one above 0: there is no loss")
        self.loss_weights = wanted

    def replaced(self, before: Recipe) -> Iterator[str]:
        """Yield a warning for each rate and weight that differs between the recipe and ``before``, the recipe of the
        run up to its resume, but has no effect, as an event has set another value."""
        was, now = (peak_learning_rates(one.optim) for one in (before, self.recipe))
        values = [
            (f"peak learning rate of {name}", was[name], now[name], rate) for name, rate in self.peak_rates.items()
        ]
        for name, weight in self.loss_weights.items():
            key = f"{name}_weight"
            values.append((f"loss.{key}", getattr(before.loss, key), getattr(self.recipe.loss, key), weight))
        for what, old, new, own in values:
            if old != new != own:
                yield f"warning: {what} (was {old:g}, is {new:g}) has no effect: an event has set {own:g}"

    def peaks(self) -> dict[str, float]:
        """Return the peak learning rate of every parameter group."""
        return peak_learning_rates(self.recipe.optim) | self.peak_rates

    @property
    def lm_weight(self) -> float:
        """Weight of the language modeling loss."""
        return self.loss_weights.get("lm", self.recipe.loss.lm_weight)

    @property
    def kd_weight(self) -> float:
        """Weight of the distillation loss."""
        return self.loss_weights.get("kd", self.recipe.loss.kd_weight)


@dataclass(frozen=True)
class CheckedModels:
    """Student on the meta device, and the numbers of token ids of the models.

    Attributes:
        model, quantization: the student, quantized, without weights and scales.
        tokens: number of token ids by the recipe's key of the model: ``model.path``, ``loss.teacher``.
    """

    model: PreTrainedModel
    quantization: Quantization
    tokens: dict[str, int]


def check_models(recipe: Recipe, context: RunContext, *, losses: bool = True) -> CheckedModels:
    """Check the student, its scales and the teacher; a collective. It prints nothing: :func:`build_session` does.

    ``losses``: False if the session will not compute losses (an export): then lm_head and teacher are not checked.
    Raises RankError on every rank if a model cannot be built or quantized, its files do not fit it, or the teacher's
    cache does not fit the run.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        # Nothing is computed, so nothing is compiled, and no codes are kept for the next micro-batch.
        train = replace(recipe.train, gradient_accumulation_steps=1, compile=False)
        recipe = replace(recipe, train=train)
        with errors_on_all_ranks(ValueError):
            uses_fp8_gemm(recipe, context.device)
        model, named = empty_student(recipe, stage_0(recipe), META, losses=losses)
        check_headers(model, recipe.model.path)
        # Token ids that the model can read and, with losses, predict.
        tokens = {"model.path": embedding_rows(model)}
        logits = output_head(model)[1].out_features if losses else 0
        if losses:
            tokens["model.path"] = min(tokens["model.path"], logits)
        quantization = quantize_student(recipe, stage_0(recipe), META, model, named)
        if recipe.quant.start is not None:
            check_start(model, quantization, recipe.quant.start)
        if recipe.quant.scales is not None:
            check_scale_files(recipe.quant.scales)
        if losses and recipe.teacher_kind() == "model":
            tokens["loss.teacher"] = check_teacher(recipe, context.tokenizer, logits)
        if losses and recipe.teacher_kind() == "cache":
            check_cache(recipe, context.tokenizer, logits)
    return CheckedModels(model, quantization, tokens)


First = Callable[[int], Iterable[MicroBatch]] | None


@dataclass(frozen=True)
class Session:
    """A run that is ready to train: the student in its engine, its quantization, the teacher, the overrides. Its fields
    are set once; training changes the objects in them."""

    recipe: Recipe
    ds_config: dict[str, Any]
    engine: deepspeed.DeepSpeedEngine
    model: PreTrainedModel
    quantization: Quantization
    uncalibrated: frozenset[str]
    """Owners of the input groups that had no scale when the session was built; see engine.fake_quant."""
    teacher: Teacher | None
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    overrides: Overrides
    head: LMHead | None
    """The student's lm_head, where the losses of training are computed; None in a session without losses."""
    after_backward: list[Callable[[], None]]
    """Functions called after the last backward of every optimizer step, before the update; may be collectives."""
    loss_scale: LossScale | None
    """The loss scale of a run in fp16; None in other dtypes."""
    read: Mapping[str, int]
    """Fingerprints of the frozen weights when they were read. A checkpoint of adapters leaves out all weights whose
    fingerprints are unchanged."""
    mask: bool = True
    """True: padded rows are passed with an attention mask; see engine.session.probes."""

    def stateful(self) -> dict[str, Overrides | Quantization | LossScale]:
        """Return the objects whose state checkpoints keep in addition to DeepSpeed's state, by name."""
        loss_scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale}
        return {"overrides": self.overrides, "quantization": self.quantization, **loss_scale}


def build_session(
    recipe: Recipe, context: RunContext, samples: Sequence[Sample] | None, first: First, *, optimizer: bool = True
) -> Session:
    """Build models, weights, scales and engines from a recipe; a collective.

    Args:
        recipe, context: the run, and the result of :func:`engine.session.context.start_ranks`.
        samples: training samples, for a session that computes losses with the recipe's teacher. None (for an export or
            a calibration): no loss head and no teacher.
        first: ``first(n)`` returns this rank's first n micro-batches, for ``quant.init``. None to choose no initial
            codes or adapters, because a training checkpoint replaces them.
        optimizer: True for an engine that trains or loads a training checkpoint; False for one that only runs forward.

    Raises RankError on every rank: a model, its scales or the teacher's cache cannot be built or read, or a model
    changes its logits after lm_head in another way than its configuration says.
    """
    device, ds_config = context.device, context.ds_config
    head: LMHead | None = None
    teacher: Teacher | None = None
    teacher_kind = recipe.teacher_kind() if samples is not None else "none"
    if samples is not None and teacher_kind == "cache":
        # Before the weights: a cache of other samples should not cost the minutes that a large model takes to load.
        teacher = open_cached_teacher(recipe, samples)
    model, quantization = build_student(recipe, ds_config, device, losses=samples is not None)
    read = fingerprints(model, frozen_weights(model)) if recipe.adapter.on and samples is not None else {}
    with working("first scales"):
        uncalibrated = initial_scales(recipe, model, quantization)
    if recipe.quant.init != "rtn" and first is not None and not recipe.train.resume:
        initial_codes(recipe, model, quantization, first(recipe.quant.calibration_batches), device)
    if recipe.adapter.init == "error" and first is not None and not recipe.train.resume:
        start_from_error(quantization)
    if samples is not None:
        with errors_on_all_ranks(ValueError):
            head = install_head(model)
        if isinstance(head, QuantHead):
            quantization.layers[output_head(model)[0]] = head
        if teacher_kind == "model":
            teacher = load_teacher(recipe, context, head.out_features)
    with working("DeepSpeed engine"):
        engine = initialize_student(recipe, ds_config, model) if optimizer else initialize_frozen(model, ds_config)
    if optimizer:
        release_scales(engine, quantization)
    if head is not None:

        def unquantized(ids: Tensor, head: LMHead = head) -> Tensor:
            return unquantized_forward(engine, head, quantization, {"input_ids": ids.to(device), "use_cache": False})

        settle_function(head, unquantized, model.config)
        if teacher_kind == "self":
            teacher = SelfTeacher(engine, head, quantization)
    if samples is not None and (rows := rows_of(recipe)) is not None:
        rows.start()
    # All ranks had equal random states until here, and would draw equal dropout masks. Checkpoints keep each rank's.
    torch.manual_seed(seed_of(recipe, f"dropout of rank {rank()}"))
    # Gathering of codes is set up here, because the engine's hooks exist now, and no forward has run.
    after_backward = [gather_quantized(model, quantization)] if optimizer and recipe.quant.quantized_all_gather else []
    return Session(
        recipe,
        ds_config,
        engine,
        model,
        quantization,
        frozenset(uncalibrated),
        teacher,
        context.tokenizer,
        device,
        Overrides(recipe),
        head,
        after_backward,
        LossScale.from_config(ds_config["fp16"]) if optimizer and recipe.model.dtype == "float16" else None,
        read,
    )
