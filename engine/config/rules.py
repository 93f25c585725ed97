"""Rules between the options of a recipe that are said in one line each: values that are each in bounds and do not go
together. They stand in the order in which their problems are printed.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from data.jsonl import expected_fields
from engine.config.adapter import AdapterRecipe
from engine.config.events import EventRecipe
from engine.config.loss import LossRecipe, TeacherKind
from engine.config.quant import SOURCE, QuantRecipe
from engine.config.sections import (
    DataRecipe,
    EvalRecipe,
    ExportRecipe,
    LearnableRecipe,
    ModelRecipe,
    OptimRecipe,
    TrainRecipe,
)
from engine.losses.kd import CACHED_KINDS, TOP_K_KINDS

TRAINED = ("weight", "weight_scale", "act_scale", "norm", "router")  # switches of learnable, each of something else


class Sections(Protocol):
    """What the rules look at of :class:`engine.config.config.Recipe`, which imports this module."""

    model: ModelRecipe
    data: DataRecipe
    train: TrainRecipe
    quant: QuantRecipe
    learnable: LearnableRecipe
    adapter: AdapterRecipe
    optim: OptimRecipe
    loss: LossRecipe
    schedule: list[EventRecipe]
    eval: EvalRecipe
    export: ExportRecipe

    def distils(self) -> bool: ...

    def teacher_kind(self) -> TeacherKind: ...

    def never_quantizes(self) -> bool: ...

    def invalidates(self) -> bool: ...


class Rule(NamedTuple):
    """What must hold between several options.

    Attributes:
        name: what must hold.
        key: the path of the key to change.
        broken: whether it does not hold.
        expected: what was expected at the key; ``{optim.schedule}`` stands for the recipe's value of that key.
        found: what is there instead, in words; None: the value of ``key``.
    """

    name: str
    key: str
    broken: Callable[[Sections], object]
    expected: str | Callable[[Sections], str]
    found: str | None = None

    def text(self, recipe: Sections) -> str:
        """The line that says that a recipe breaks this rule."""
        found = self.found or f"{{{self.key}!r}}"
        expected = self.expected if isinstance(self.expected, str) else self.expected(recipe)
        return f"{self.key}: {found}, expected {expected}".format_map(vars(recipe))


RULES = (
    Rule(
        "plain text has no keys",
        "data.fields",
        lambda r: r.data.kind != "chat" and r.data.fields is not None,
        "null with data.kind {data.kind}",
    ),
    Rule(
        "a map of fields names the fields of one form of conversations",
        "data.fields",
        lambda r: r.data.kind == "chat" and expected_fields(r.data.fields),
        lambda r: str(expected_fields(r.data.fields)),
    ),
    Rule(
        "plain text has no turns",
        "data.loss_on",
        lambda r: r.data.kind != "chat" and r.data.loss_on != "last",
        "last with data.kind {data.kind}",
    ),
    Rule(
        "every file has a weight, or none has",
        "data.weights",
        lambda r: r.data.weights is not None and len(r.data.weights) != len(r.data.train),
        "one per file of data.train",
    ),
    Rule(
        "flash attention reads where packed samples end in batches of one row alone",
        "data.micro_batch_size",
        lambda r: (
            r.data.packing and r.data.micro_batch_size > 1 and r.model.attn_implementation.startswith("flash_attention")
        ),
        "1 with data.packing and model.attn_implementation {model.attn_implementation}, which reads borders in one row",
    ),
    Rule(
        "something learns",
        "learnable",
        lambda r: not (r.adapter.on or any(getattr(r.learnable, name) for name in TRAINED)),
        f"at least one of {', '.join(TRAINED)} to be true, or adapter.kind lora",
        found="nothing is learnable",
    ),
    Rule(
        "wsd decays",
        "optim.decay_steps",
        lambda r: r.optim.schedule == "wsd" and r.optim.decay_steps < 1,
        "at least 1",
    ),
    Rule(
        "wsd alone has steps of decay",
        "optim.decay_steps",
        lambda r: r.optim.schedule != "wsd" and r.optim.decay_steps != 0,
        "0: optim.schedule {optim.schedule} has no decay_steps (wsd has)",
    ),
    Rule(
        "the warm-up ends during the run",
        "optim.warmup_steps",
        lambda r: r.optim.warmup_steps > r.train.steps > 0,
        "at most {train.steps} (train.steps)",
    ),
    Rule(
        "the decay begins during the run",
        "optim.decay_steps",
        lambda r: r.optim.schedule == "wsd" and r.optim.decay_steps > r.train.steps > 0,
        "at most {train.steps} (train.steps)",
    ),
    Rule(
        "the learning rate reaches its peak",
        "optim.warmup_steps, optim.decay_steps",
        lambda r: (
            max(r.optim.warmup_steps, r.optim.decay_steps) <= r.train.steps < r.optim.warmup_steps + r.optim.decay_steps
        ),
        "at most {train.steps} (train.steps)",
        found="{optim.warmup_steps} and {optim.decay_steps} together",
    ),
    Rule(
        "there is a loss",
        "loss.lm_weight, loss.kd_weight",
        lambda r: r.loss.lm_weight == 0 and r.loss.kd_weight == 0,
        "at least one above 0: there is no loss",
        found="both 0",
    ),
    Rule(
        "distillation has a teacher",
        "loss.teacher",
        lambda r: r.loss.kd_weight > 0 and r.loss.named_teacher() == "none",
        "a directory since loss.kd_weight is {loss.kd_weight}",
    ),
    Rule(
        "an event that distils has a teacher",
        "loss.teacher",
        lambda r: r.distils() and r.loss.kd_weight == 0 and r.loss.named_teacher() == "none",
        "a directory since an event under schedule sets kd",
    ),
    Rule(
        "a student that teaches itself is frozen",
        "loss.teacher",
        lambda r: r.teacher_kind() == "self" and (r.learnable.weight or r.learnable.norm or r.learnable.router),
        lambda r: (
            " and ".join(f"learnable.{name}" for name in ("weight", "norm", "router") if getattr(r.learnable, name))
            + " to be false, or a directory: a student that changes would be taught by what it has become"
        ),
    ),
    Rule(
        "kd alone has a temperature",
        "loss.temperature",
        lambda r: r.loss.kd != "kd" and r.loss.temperature != 1,
        "1.0: loss.kd {loss.kd} has no temperature (loss.kd kd has)",
    ),
    Rule(
        "losses on the likeliest tokens know how many",
        "loss.top_k",
        lambda r: r.loss.kd in TOP_K_KINDS and r.loss.top_k is None,
        "a number of tokens, like 100: loss.kd is {loss.kd}",
    ),
    Rule(
        "losses on the whole vocabulary have no tail",
        "loss.tail",
        lambda r: r.loss.tail and r.loss.kd not in TOP_K_KINDS,
        "false: loss.kd {loss.kd} is of the whole vocabulary",
    ),
    Rule(
        "a cache holds the teacher's likeliest tokens",
        "loss.kd",
        lambda r: r.loss.teacher_cache is not None and r.loss.kd not in CACHED_KINDS,
        "kl_top_k: with loss.teacher_cache only the teacher's most likely tokens are known",
    ),
    Rule(
        "a cache has no teacher that runs",
        "loss.teacher",
        lambda r: r.loss.teacher_cache is not None and r.loss.teacher == "self",
        "a directory or null: loss.teacher_cache is there so that no teacher runs",
    ),
    Rule(
        "a cache holds no distributions to compare",
        "loss.diagnostics_every",
        lambda r: r.loss.teacher_cache is not None and r.loss.diagnostics_every > 0,
        "0: loss.teacher_cache does not hold the distributions that are compared",
    ),
    Rule(
        "offload is of recomputed blocks",
        "train.activation_offload",
        lambda r: r.train.activation_offload and not r.train.activation_checkpointing,
        "false, or train.activation_checkpointing true: it moves the inputs of recomputed blocks",
    ),
    Rule(
        "an evaluation has samples",
        "eval.every",
        lambda r: r.eval.every > 0 and not (r.data.held_out or r.data.eval),
        "0, or samples to evaluate on (data.held_out, data.eval)",
    ),
    Rule(
        "checkpoints fall on evaluations",
        "train.checkpoint_every",
        lambda r: r.eval.every > 0 and r.train.checkpoint_every % r.eval.every,
        "a multiple of eval.every ({eval.every}), so that each checkpoint has been evaluated",
    ),
    Rule(
        "the best checkpoint has a teacher to be judged by",
        "eval.best",
        lambda r: r.eval.best != "lm" and not r.distils(),
        "lm: there is no teacher",
    ),
    Rule(
        "the best checkpoint's teacher knows held-out samples",
        "eval.best",
        lambda r: r.eval.best != "lm" and r.loss.named_teacher() == "cache",
        "lm: loss.teacher_cache holds no held-out samples",
    ),
    Rule(
        "one place says when fake quant starts",
        "quant.fake_quant_start",
        lambda r: r.quant.fake_quant_start > 0 and any(event.fake_quant is not None for event in r.schedule),
        "0 or -1, since events under schedule switch fake quant",
    ),
    Rule(
        "fake quant starts during the run",
        "quant.fake_quant_start",
        lambda r: r.quant.fake_quant_start >= r.train.steps > 0,
        "below train.steps ({train.steps}), or -1 to train without fake quant",
    ),
    Rule(
        "scales that alone learn get a gradient",
        "quant.fake_quant_start",
        lambda r: r.never_quantizes() and r.learnable.scales_alone() and not r.adapter.on,
        "0 or more: only scales learn, and get no gradient",
        found="-1 (never)",
    ),
    Rule(
        "scales that follow the weights are measured by absmax",
        "quant.weight_range",
        lambda r: r.quant.scales_follow_weights and r.quant.weight_range != "absmax",
        "absmax, since quant.scales_follow_weights measures in every step",
    ),
    Rule(
        "one format has a template",
        "export.template",
        lambda r: r.export.template is not None and r.export.format != "gguf",
        "null with export.format {export.format}",
    ),
    Rule(
        "scales come from one checkpoint",
        "quant.start",
        lambda r: r.quant.start is not None and r.quant.scales is not None,
        "null with quant.scales: both are checkpoints to take the scales from",
    ),
    Rule(
        "a quantized start is used as it is",
        "quant.start",
        lambda r: r.quant.start is not None and (r.quant.fake_quant_start != 0 or r.quant.scales_follow_weights),
        "null with quant.fake_quant_start or quant.scales_follow_weights, which measure the scales again",
    ),
    Rule(
        "cells are those of a quantized start",
        "quant.snap_to_codes",
        lambda r: r.quant.snap_to_codes and r.quant.start is None,
        "false: quant.start, which has the cells, is null",
    ),
    Rule(
        "scales that follow the weights come from no checkpoint",
        "quant.scales",
        lambda r: r.quant.scales_follow_weights and r.quant.scales is not None,
        "null: quant.scales_follow_weights replaces its weight scales after the first step",
    ),
)

# Those that ask for the schemes of layers, which must be known by their names.
RULES_OF_SCHEMES = (
    Rule(
        "formats without a quantized KV cache get none",
        "export.format",
        lambda r: (
            r.export.enabled
            and r.export.format in ("gguf", "mlx", "executorch")
            and r.quant.known()
            and r.quant.preset().kv_cache is not None
        ),
        "compressed with quant.scheme {quant.scheme}, which quantizes the KV cache",
    ),
    Rule(
        "weights that have scales are followed by them",
        "quant.scales_follow_weights",
        lambda r: r.quant.scales_follow_weights and not r.quant.linear_schemes(),
        "false: quant.scheme {quant.scheme} has no weight scales",
    ),
    Rule(
        "symmetric integers alone have signed scales",
        "quant.signed_scales",
        lambda r: r.quant.signed_scales and not r.quant.has_signed_integers(),
        "false: no scheme here has symmetric integer weights",
    ),
    Rule(
        "inputs that are measured have stored scales",
        "quant.input_range",
        lambda r: r.quant.input_range != "absmax" and not r.quant.stores_input_scales(),
        "absmax: no scheme here stores scales of inputs",
    ),
    Rule(
        "scales of activations that learn are stored",
        "learnable.act_scale",
        lambda r: r.learnable.act_scale and not r.quant.learns_input_scales(),
        "false: quant.scheme {quant.scheme} stores no scales of activations that can be learned",
    ),
    Rule(
        "global scales of inputs fit the largest magnitude",
        "quant.input_range",
        lambda r: r.quant.input_range != "absmax" and r.quant.has_global_input_scales(),
        "absmax: the scales below a global scale of inputs (NVFP4) are dynamic",
    ),
    Rule(
        "global scales of inputs are measured",
        "quant.initial_input_scale",
        lambda r: r.quant.initial_input_scale is not None and r.quant.has_global_input_scales(),
        "null: a global scale of inputs (NVFP4) is measured, or comes from quant.scales",
    ),
    Rule(
        "scales of activations that are given are stored",
        "quant.initial_input_scale",
        lambda r: r.quant.initial_input_scale is not None and not r.quant.stores_input_scales(),
        "null: quant.scheme {quant.scheme} stores no scales of activations",
    ),
    Rule(
        "one source gives the scales of activations",
        "quant.initial_input_scale",
        lambda r: (
            r.quant.initial_input_scale is not None
            and r.quant.stores_input_scales()
            and r.quant.calibration_batches > 0
        ),
        "null or quant.calibration_batches 0 (it is {quant.calibration_batches}): either is the source of scales that "
        "no PTQ checkpoint gives",
    ),
    Rule(
        "something gives the scales of activations",
        "quant.calibration_batches",
        lambda r: (
            r.quant.stores_input_scales()
            and r.quant.scales is r.quant.start is None
            and r.quant.scheme != SOURCE  # or the files have none, which is an error when they are read
            and r.quant.initial_input_scale is None
            and r.quant.calibration_batches == 0
            and (r.quant.fake_quant_start == 0 or r.adapter.beside)
        ),
        "1 or more (or quant.scales, or quant.initial_input_scale): nothing gives the activation scales of "
        "{quant.scheme}",
    ),
    Rule(
        "the fp8 GEMM has fp8 codes",
        "quant.compute",
        lambda r: r.quant.compute == "fp8_gemm" and not r.quant.has_fp8_gemm(),
        "auto or simulate: quant.scheme {quant.scheme} has no fp8 codes per tensor on both sides",
    ),
    Rule(
        "the fp8 GEMM gives bfloat16",
        "quant.compute",
        lambda r: r.quant.compute == "fp8_gemm" and r.model.dtype != "bfloat16",
        "auto or simulate: the fp8 GEMM gives bfloat16, model.dtype is {model.dtype}",
    ),
    Rule(
        "weight scales that alone learn exist",
        "learnable",
        lambda r: (
            r.learnable.scales_alone() and not (r.learnable.act_scale or r.quant.linear_schemes() or r.adapter.on)
        ),
        "act_scale, weight or norm too: quant.scheme {quant.scheme} has no weight scales",
        found="only weight_scale is true",
    ),
)
