"""The session: a run that is ready to train, built from a recipe in the order that ZeRO requires.

Parameters must exist in partitions before weights stream into them. Layers must be quantized before their scales are
loaded. Both come before ``deepspeed.initialize`` copies the parameters into fp32 masters. Activations are calibrated
after it, because the forward needs the engine's hooks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.loader import MicroBatch
from data.samples import Sample
from engine.config.config import Recipe
from engine.losses.teacher import SelfTeacher, Teacher, unquantized_forward
from engine.session.build_teacher import load_teacher, open_cached_teacher
from engine.session.context import RunContext
from engine.session.optimizer import LossScale, initialize_frozen, initialize_student, peak_learning_rates
from engine.session.student import build_student, initial_codes, initial_scales
from model.checkpoint.fingerprint import fingerprints, frozen_weights
from model.console import working
from model.head import LMHead, QuantHead, install_head, output_head, settle_function
from model.peft import start_from_error
from model.ranks import errors_on_all_ranks
from model.scales import release_scales
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
        """Return plain values for a checkpoint."""
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
            ValueError: a group is unknown, or a rate negative.
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
            ValueError: a loss is unknown, a weight negative, both weights are 0, or ``kd`` has no teacher.
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


First = Callable[[int], Iterable[MicroBatch]] | None


@dataclass(frozen=True)
class Session:
    """A run that is ready to train: the student in its engine, its quantization, the teacher, the overrides.

    Its fields are set once; training changes the objects in them.
    """

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
        first: returns this rank's first micro-batches; None if a checkpoint will be loaded.
        optimizer: True for an engine that trains or loads a training checkpoint; False for one that only runs forward.
    """
    device, ds_config = context.device, context.ds_config
    head: LMHead | None = None
    teacher: Teacher | None = None
    teacher_kind = recipe.teacher_kind() if samples is not None else "none"
    if samples is not None and teacher_kind == "cache":
        # Before the weights: a cache of other samples should not cost the minutes that a large model takes to load.
        teacher = open_cached_teacher(recipe, samples, context.tokenizer)
    model, quantization = build_student(recipe, ds_config, device, losses=samples is not None)
    read = fingerprints(model, frozen_weights(model)) if recipe.adapter.on and samples is not None else {}
    with working("first scales"):
        uncalibrated = initial_scales(recipe, model, quantization)
    if recipe.adapter.init == "error" or recipe.quant.init != "rtn":
        _better_start(recipe, model, quantization, first, device, trains=samples is not None)
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
        settle_function(head, partial(_unquantized, engine, head, quantization, device), model.config)
    if head is not None and teacher_kind == "self":
        teacher = SelfTeacher(engine, head, quantization)
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


def _better_start(
    recipe: Recipe,
    model: PreTrainedModel,
    quantization: Quantization,
    first: First,
    device: torch.device,
    *,
    trains: bool,
) -> None:
    """Choose initial adapters and codes as the recipe asks, after weights and scales are loaded."""
    if recipe.train.resume:
        return
    if recipe.quant.init != "rtn" and first is not None:
        initial_codes(recipe, model, quantization, first(recipe.quant.calibration_batches), device)
    if recipe.adapter.init == "error" and trains:
        start_from_error(quantization)


def _unquantized(
    engine: nn.Module, head: LMHead, quantization: Quantization, device: torch.device, ids: Tensor
) -> Tensor:
    inputs = {"input_ids": ids.to(device), "use_cache": False}
    return unquantized_forward(engine, head, quantization, inputs)
