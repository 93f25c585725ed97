"""Checks of several options together: options without effect, and values that contradict each other.

Each function in ``RULES`` yields the key to change and a description of the expected value. The error text also shows
the key's value, unless the key is yielded with a text of its own (``learnable: nothing is learnable``).
"""

from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from operator import attrgetter
from typing import Any

from data.jsonl import expected_fields
from engine.config.errors import DERIVED, ONLY_WITH, default_of
from engine.config.quant import SOURCE
from engine.config.sections import DECAYING
from engine.losses.objective import CACHED_KINDS, TOP_K_KINDS
from quant.gptq import takes

_Recipe = Any  # engine.config.config.Recipe, which imports this module
_Problems = Iterator[tuple[str, str]]

TRAINED = ("weight", "weight_scale", "act_scale", "kv_scale", "norm", "router")  # switches of learnable
# Switches that are allowed with merged adapters.
SHARED = ("weight_scale", "act_scale", "kv_scale", "norm", "router")
# Export formats that contain an unmerged adapter, or nothing else (peft).
BESIDE = ("compressed", "vllm_fp8", "dequantized", "peft")


def contradictions(recipe: _Recipe) -> Iterator[str]:
    """Yield one line per option without effect, and per broken rule."""
    for key, _, words in idle(recipe):
        yield f"{key}: {attrgetter(key)(recipe)!r} has no effect unless {words}; remove it or change that"
    for rule in RULES:
        for key, expected in rule(recipe):
            yield f"{key if ': ' in key else f'{key}: {attrgetter(key)(recipe)!r}'}, expected {expected}"


def options(recipe: _Recipe) -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield key, section and field of every option."""
    for section in fields(recipe):
        if is_dataclass(value := getattr(recipe, section.name)):
            yield from ((f"{section.name}.{item.name}", value, item) for item in fields(value))
        else:
            yield section.name, recipe, section


def derive(recipe: _Recipe, before: dict[str, Any]) -> None:
    """Set the default of each unset option whose default follows from other options.

    ``before`` holds the defaults of the last call: an option that still has that value is set again.
    """
    for key, section, item in options(recipe):
        if DERIVED in item.metadata and getattr(section, item.name) in (None, before.get(key)):
            before[key] = item.metadata[DERIVED](recipe)
            setattr(section, item.name, before[key])


def idle(recipe: _Recipe) -> Iterator[tuple[str, Any, str]]:
    """Yield changed options without effect: key, default, and the condition of an effect."""
    for key, section, item in options(recipe):
        if ONLY_WITH in item.metadata and getattr(section, item.name) != (default := _default(recipe, item)):
            for words, holds in item.metadata[ONLY_WITH]:
                if not holds(recipe):
                    yield key, default, words.format_map(vars(recipe))
                    break


def _default(recipe: _Recipe, item: Field[Any]) -> Any:
    if DERIVED in item.metadata:
        return item.metadata[DERIVED](recipe)
    return default_of(item)


def _data(r: _Recipe) -> _Problems:
    data = r.data
    if data.kind == "chat" and (expected := expected_fields(data.fields)):
        yield "data.fields", expected
    if data.weights is not None and len(data.weights) != len(data.train):
        yield "data.weights", "one per file of data.train"
    if data.packing and data.micro_batch_size > 1 and r.model.attn_implementation.startswith("flash_attention"):
        attention = f"model.attn_implementation {r.model.attn_implementation}"
        yield "data.micro_batch_size", f"1 with data.packing and {attention}, which reads borders in one row"


def _steps(r: _Recipe) -> _Problems:
    optim, steps = r.optim, r.train.steps
    warmup, decay = optim.warmup(steps), optim.decay_steps
    if not steps and not r.train.epochs:
        yield "train.steps", "at least 1, or train.epochs"
    if optim.warmup_ratio and optim.warmup_steps:
        yield "optim.warmup_ratio", f"0, as optim.warmup_steps is {warmup}"
    if optim.schedule == "wsd" and decay < 1 and warmup < steps:
        yield "optim.decay_steps", "at least 1"
    if optim.warmup_steps > steps > 0:
        yield "optim.warmup_steps", f"at most {steps} (train.steps)"
    if optim.schedule == "wsd" and decay > steps > 0:
        yield "optim.decay_steps", f"at most {steps} (train.steps)"
    if max(warmup, decay) <= steps < warmup + decay:
        found = f"optim.warmup_steps, optim.decay_steps: {warmup} and {decay} together"
        yield found, f"at most {steps} (train.steps)"
    by_events = [rates.get(group) for rates in (event.lr or {} for event in r.schedule) for group in DECAYING]
    rates = (optim.lr, optim.embedding_lr, optim.adapter_lr, *by_events)
    rate = max(rate for rate in rates if rate is not None)
    if optim.weight_decay * rate > 1:
        taken = f"a step takes so much of every weight times its learning rate, {rate:g}"
        yield "optim.weight_decay", f"at most {1 / rate:g}: {taken}"


def _learnable(r: _Recipe) -> _Problems:
    learnable, quant = r.learnable, r.quant
    if not (r.adapter.on or any(getattr(learnable, name) for name in TRAINED)):
        expected = f"at least one of {', '.join(TRAINED)} to be true, or adapter.kind lora"
        yield "learnable: nothing is learnable", expected
    if r.never_quantizes() and learnable.scales_alone() and not r.adapter.on:
        yield (
            "quant.fake_quant_start: -1 (never)",
            "0 or more with learnable.weight false: only scales learn, and get no gradient",
        )
    weights = not quant.known() or quant.linear_schemes()
    if learnable.scales_alone() and not (learnable.act_scale or learnable.kv_scale or weights or r.adapter.on):
        expected = f"kv_scale, weight or norm too: quant.scheme {quant.scheme} has no weight scales"
        yield "learnable: only weight_scale is true", expected
    cache_alone = quant.quantizes_cache() and not quant.learns_input_scales()
    if learnable.act_scale and not learnable.kv_scale and cache_alone:
        yield "learnable.act_scale", f"false with learnable.kv_scale false: quant.scheme {quant.scheme} has no others"


def _losses(r: _Recipe) -> _Problems:
    loss = r.loss
    if loss.lm_weight == 0 and loss.kd_weight == 0:
        yield "loss.lm_weight, loss.kd_weight: both 0", "at least one above 0: there is no loss"
    if loss.named_teacher() == "none" and loss.kd_weight > 0:
        yield "loss.teacher", f"a directory since loss.kd_weight is {loss.kd_weight}"
    elif loss.named_teacher() == "none" and r.distils():
        yield "loss.teacher", "a directory since an event under schedule sets kd"
    if r.teacher_kind() == "self":
        taught = "would be taught by what it has become"
        if learned := [f"learnable.{name}" for name in ("weight", "norm", "router") if getattr(r.learnable, name)]:
            expected = f"{' and '.join(learned)} to be false, or a directory: a student that changes {taught}"
            yield "loss.teacher", expected
        if r.quant.init != "rtn" or r.quant.snap_to_codes:
            expected = f"a directory: quant.init {r.quant.init} and quant.snap_to_codes move the weights"
            yield "loss.teacher", f"{expected} before the first step, so that the student {taught}"
    if loss.kd in TOP_K_KINDS and loss.top_k is None:
        yield "loss.top_k", f"a number of tokens, like 100: loss.kd is {loss.kd}"
    if loss.teacher_cache is not None:
        if loss.kd not in CACHED_KINDS:
            yield "loss.kd", "kl_top_k: with loss.teacher_cache only the teacher's most likely tokens are known"
        if loss.teacher == "self":
            yield "loss.teacher", "a directory or null: loss.teacher_cache is there so that no teacher runs"
        if loss.diagnostics_every > 0:
            yield "loss.diagnostics_every", "0: loss.teacher_cache does not hold the distributions that are compared"


def _evaluation(r: _Recipe) -> _Problems:
    every = r.eval.every
    if every > 0 and not (r.data.held_out or r.data.eval):
        yield "eval.every", "0, or samples to evaluate on (data.held_out, data.eval)"
    if every > 0 and r.train.checkpoint_every % every:
        expected = f"a multiple of eval.every ({every}), so that each checkpoint has been evaluated"
        yield "train.checkpoint_every", expected
    if r.eval.best != "lm" and r.loss.named_teacher() == "cache":
        yield "eval.best", "lm: loss.teacher_cache holds no held-out samples"


def _fake_quant(r: _Recipe) -> _Problems:
    quant, start = r.quant, r.quant.fake_quant_start
    if start > 0 and any(event.fake_quant is not None for event in r.schedule):
        yield "quant.fake_quant_start", "0 or -1, since events under schedule switch fake quant"
    if start >= r.train.steps > 0:
        expected = f"below train.steps ({r.train.steps}), or -1 to train without fake quant"
        yield "quant.fake_quant_start", expected
    if quant.compute == "fp8_gemm" and r.model.dtype != "bfloat16":
        yield "quant.compute", f"auto or simulate: the fp8 GEMM gives bfloat16, model.dtype is {r.model.dtype}"
    if quant.fuse_norms and r.learnable.act_scale:
        expected = "false with learnable.act_scale: the gradient of a scale needs the unquantized input"
        yield "quant.fuse_norms", expected
    if quant.fuse_norms and r.train.compile:
        yield "quant.fuse_norms", "false with train.compile, which fuses norms itself"
    if quant.rotate and (quant.scheme == SOURCE or quant.scales or quant.start):
        sources = "quant.scheme source, quant.scales or quant.start"
        yield "quant.rotate", f"nothing with {sources}, whose scales belong to weights that are not rotated"
    if quant.rotate and r.export.format != "compressed":
        yield "export.format", "compressed with quant.rotate: no reader of other formats rotates inputs"


def _schemes(r: _Recipe) -> _Problems:
    quant = r.quant
    if not quant.known():
        return
    scheme = f"quant.scheme {quant.scheme}"
    if r.export.enabled and r.export.format in ("gguf", "mlx", "executorch") and quant.preset().kv_cache is not None:
        yield "export.format", f"compressed with {scheme}, which quantizes the KV cache"
    if quant.compute == "fp8_gemm" and not quant.has_fp8_gemm():
        yield "quant.compute", f"auto or simulate: {scheme} has no fp8 codes per tensor on both sides"
    if quant.input_range != "absmax" and quant.has_global_input_scales():
        expected = f"absmax with {scheme}: the scales below a global scale of inputs (NVFP4) are dynamic"
        yield "quant.input_range", expected
    if quant.initial_input_scale is not None and quant.has_global_input_scales():
        expected = f"null with {scheme}: a global scale of inputs (NVFP4) is measured, or comes from quant.scales"
        yield "quant.initial_input_scale", expected
    # Scales missing in the files of a source raise an error when these are read.
    given = quant.scheme == SOURCE or quant.scales or quant.start or quant.initial_input_scale is not None
    needed = quant.stores_input_scales() and (quant.fake_quant_start == 0 or r.adapter.beside)
    if needed and quant.calibration_batches == 0 and not given:
        nothing = f"nothing gives the activation scales of {quant.scheme}"
        yield "quant.calibration_batches", f"1 or more (or quant.scales, or quant.initial_input_scale): {nothing}"


def _first_scales(r: _Recipe) -> _Problems:
    quant, start = r.quant, r.quant.fake_quant_start
    if quant.scales_follow_weights and quant.weight_range == "mse":
        yield "quant.weight_range", "absmax, since quant.scales_follow_weights measures in every step"
    if quant.scales_follow_weights and quant.scales is not None:
        yield "quant.scales", "null: quant.scales_follow_weights replaces its weight scales after the first step"
    if quant.start is not None and quant.scales is not None:
        yield "quant.start", "null with quant.scales: both are checkpoints to take the scales from"
    again = "quant.fake_quant_start or quant.scales_follow_weights, which measure the scales again"
    if quant.start is not None and (start != 0 or quant.scales_follow_weights):
        yield "quant.start", f"null with {again}"
    chosen = quant.init != "rtn"
    off = any(event.fake_quant in (False, "activations") for event in r.schedule)
    if (chosen or quant.start) and off and r.invalidates():
        measured = "the scales of quant.init or quant.start would be measured again afterwards"
        yield "schedule", f"no event that turns fake quant of weights off: {measured}"
    if quant.initial_input_scale is not None and quant.stores_input_scales() and quant.calibration_batches > 0:
        found = f"quant.calibration_batches 0 (it is {quant.calibration_batches})"
        why = "only one of them can set the scales that no PTQ checkpoint provides"
        yield "quant.initial_input_scale", f"null or {found}: {why}"
    if quant.initial_input_scale is not None and start > 0 and r.invalidates():
        why = "the scales are measured again at that step"
        yield "quant.initial_input_scale", f"null with quant.fake_quant_start {start}: {why}"
    if not chosen:
        return
    if quant.start or quant.scales or quant.scheme == SOURCE:
        expected = "rtn: the codes and scales are those of quant.start, quant.scales or quant.scheme source"
        yield "quant.init", expected
    if start != 0 or quant.scales_follow_weights:
        yield "quant.init", f"rtn with {again}"
    if r.adapter.on:
        yield (
            "quant.init",
            f"rtn with adapter.kind {r.adapter.kind}: adapters train on unchanged weights",
        )
    if quant.calibration_batches == 0:
        looks = f"quant.init {quant.init} needs micro-batches to choose codes on"
        yield "quant.calibration_batches", f"1 or more: {looks}"
    scheme = f"quant.scheme {quant.scheme}"
    if quant.known() and not all(takes(scheme.weights) for scheme in quant.linear_schemes()):
        yield "quant.init", f"rtn with {scheme}: a scheme here has a scale for several rows of a weight"


def _adapters(r: _Recipe) -> _Problems:
    if not r.adapter.on:
        return
    kind = f"adapter.kind {r.adapter.kind}"
    if r.learnable.weight:
        yield "learnable.weight", f"false with {kind}, which trains adapters in place of the weights"
    if r.never_quantizes():
        why = "without fake quant the export is a plain checkpoint"
        yield (
            "quant.fake_quant_start: -1 (never)",
            f"0 or more with {kind}: {why}, which contains no adapters",
        )
    if r.train.compile:
        yield "train.compile", f"false with {kind}, whose gradients torch.compile cannot trace"
    if r.quant.quantized_all_gather:
        codes = "the sum of weight and adapter is quantized, which no rank can compute before the layer runs"
        yield "quant.quantized_all_gather", f"false with {kind}: {codes}"
    if r.quant.fuse_norms:
        yield "quant.fuse_norms", f"false with {kind}: adapters were not tested with inputs that exist only as codes"
    if r.quant.rotate:
        yield "quant.rotate", f"nothing with {kind}: no reader supports an adapter of a rotated weight"


def _adapters_beside(r: _Recipe) -> _Problems:
    adapter, quant = r.adapter, r.quant
    if not adapter.beside:
        return
    if any(getattr(r.learnable, name) for name in SHARED):
        expected = f"{', '.join(SHARED)} to be false with adapter.merge false: the model is served with other adapters"
        yield "learnable: more than adapters learns", f"{expected} too"
    if adapter.ranks:
        reads = "vLLM multiplies every layer's adapter by lora_alpha / r, with one r"
        yield "adapter.ranks", f"nothing with adapter.merge false: {reads}"
    if r.export.format not in BESIDE:
        yield "export.format", f"one of {', '.join(BESIDE)} with adapter.merge false"
    if adapter.init == "error" and adapter.start is not None:
        yield "adapter.init", "zeros with adapter.start"
    if adapter.base != "quantized":
        return
    if quant.start or quant.scales:
        read = "quantized without them: scales are then read from model.path or measured"
        yield "adapter.base", f"weights with quant.start or quant.scales; or {read}"
    if quant.fake_quant_start != 0 or quant.scales_follow_weights:
        start = "quantized with quant.fake_quant_start 0 and quant.scales_follow_weights false"
        yield "adapter.base", f"weights; or {start}: there are no unquantized weights to measure scales on"
    if adapter.init == "error":
        yield "adapter.init", "zeros with adapter.base quantized: the weights are the decoded codes"


def _export(r: _Recipe) -> _Problems:
    if r.export.format == "peft" and not r.adapter.beside:
        expected = "another format, or adapter.kind lora with adapter.merge false: there is no adapter to write"
        yield "export.format", expected
    if r.never_quantizes() and r.export.format not in ("compressed", "dequantized", "peft", "gguf"):
        never = "with quant.fake_quant_start -1, and no event that switches fake quant on"
        yield "export.format", f"compressed or dequantized: {never}, the export is a plain checkpoint"


def _events(r: _Recipe) -> _Problems:
    steps, scheme = r.train.steps, r.quant.scheme
    known, weights = r.quant.known(), r.quant.linear_schemes()
    for index, event in enumerate(r.schedule):
        key = f"schedule[{index}]"
        if event.at is not None and event.at >= steps > 0:
            yield f"{key}.at: {event.at}", f"below train.steps ({steps})"
        if event.every is not None and event.every > steps > 0:
            yield f"{key}.every: {event.every}", f"at most train.steps ({steps})"
        if event.fake_quant == "activations" and known and not r.quant.quantizes_activations():
            expected = f"weights or false: quant.scheme {scheme} quantizes no activations"
            yield f"{key}.fake_quant: 'activations'", expected
        if event.fake_quant == "weights" and known and not weights:
            expected = f"true, activations or false: quant.scheme {scheme} quantizes no weights"
            yield f"{key}.fake_quant: 'weights'", expected


def _losses_of_events(r: _Recipe) -> _Problems:
    """Refuse events that may set the weights of both losses to 0. Events with a condition may happen at any step."""
    changes = {index: event for index, event in enumerate(r.schedule) if event.loss}
    fixed = sorted((event.at, index) for index, event in changes.items() if event.at is not None)
    free = [index for index, event in changes.items() if event.at is None]
    start = (r.loss.lm_weight > 0, r.loss.kd_weight > 0)
    if not any(start):
        return  # a problem of the section loss
    reached, refused = {start}, set[int]()

    def follow(states: set[tuple[bool, bool]], index: int) -> set[tuple[bool, bool]]:
        """Apply an event to pairs of (lm has a weight, kd has a weight)."""
        given = changes[index].loss or {}
        after = {(given.get("lm", lm) > 0, given.get("kd", kd) > 0) for lm, kd in states}
        if (False, False) in after:
            refused.add(index)
        return {(lm, kd) for lm, kd in after if lm or kd}

    for index in (None, *(index for _, index in fixed)):
        reached = reached if index is None else follow(reached, index)
        before: set[tuple[bool, bool]] = set()
        while reached != before:  # an event without a step may happen now, or not
            before = reached
            reached = reached.union(*(follow(reached, other) for other in free))
    for index in sorted(refused):
        expected = "a weight above 0 for the other loss in the same event: at that time it may be 0 too"
        yield f"schedule[{index}].loss: {changes[index].loss}", f"{expected}, and there would be no loss"


RULES = (
    _data,
    _learnable,
    _steps,
    _losses,
    _evaluation,
    _fake_quant,
    _first_scales,
    _schemes,
    _adapters,
    _adapters_beside,
    _export,
    _events,
    _losses_of_events,
)
