"""The recipe: all options of a run, typed, documented and checked before the process group starts; and the checks of
several options together (``RULES``).

One dataclass field is one option; engine/config/reading.py reads options from YAML and the command line. Values out of
bounds and contradicting options fail here, with the key's path, the value and the expected value: a typo in a 64-GPU
job should cost a second, not the wait for queue, process group and model.

:meth:`Recipe.validate` checks values only, so that a recipe can be read anywhere; :meth:`Recipe.validate_files` checks
the recipe's files. Paths in a YAML file are relative to the current directory, not to that file.
"""

import glob
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from data.files import data_problem
from data.jsonl import expected_fields
from engine.config.errors import (
    DERIVED,
    ONLY_WITH,
    RecipeError,
    checkpoint_problems,
    default_of,
    not_there,
    path_or_name,
    value_problems,
)
from engine.config.hub import HUB, HubError, local_paths
from engine.config.quant import SOURCE, QuantRecipe
from engine.config.sections import (
    DECAYING,
    AdapterRecipe,
    DataRecipe,
    EvalRecipe,
    EventRecipe,
    ExportRecipe,
    LearnableRecipe,
    LossRecipe,
    ModelRecipe,
    OptimRecipe,
    ParallelRecipe,
    TeacherKind,
    TrainRecipe,
)
from engine.losses.objective import CACHED_KINDS, TOP_K_KINDS
from quant.gptq import takes

Contradictions = Iterator[tuple[str, str]]
"""Keys to change, each with a description of the expected value. The error text also shows the key's value, unless the
key has a text of its own (``learnable: nothing is learnable``)."""

TRAINED = ("weight", "weight_scale", "act_scale", "kv_scale", "norm", "router")  # switches of learnable
# Switches that are allowed with merged adapters.
SHARED = ("weight_scale", "act_scale", "kv_scale", "norm", "router")
FETCHED = ("model", "quant", "adapter", "loss", "data")  # sections with names on the Hugging Face Hub
# Export formats that a running vLLM server loads.
SERVED_FORMATS = ("compressed", "dequantized", "vllm_fp8", "modelopt")
# Export formats with an unmerged adapter beside the model, or alone (peft).
UNMERGED_FORMATS = ("compressed", "vllm_fp8", "dequantized", "peft")


@dataclass
class Recipe:
    """Recipe of a run: its sections, and the options output_dir, schedule and deepspeed.

    Built from YAML and the command line by :func:`engine.config.reading.parse_recipe`, or in Python. Raises RecipeError
    if a value is out of bounds or contradicts another value.
    """

    model: ModelRecipe
    """The checkpoint to train."""
    data: DataRecipe
    """Training samples."""
    train: TrainRecipe
    """The loop."""
    output_dir: str = field(metadata=path_or_name("a directory"))
    """Directory for everything that the run writes: recipe, curves, checkpoints, export."""
    quant: QuantRecipe = field(default_factory=QuantRecipe)
    """Quantization."""
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    """Ranks that share the work on a row."""
    learnable: LearnableRecipe = field(default_factory=LearnableRecipe)
    """Switches of trainable parameters."""
    adapter: AdapterRecipe = field(default_factory=AdapterRecipe)
    """Adapters, which train in place of the weights."""
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    """Optimizer and schedule."""
    loss: LossRecipe = field(default_factory=LossRecipe)
    """Losses and teacher."""
    schedule: list[EventRecipe] = field(default_factory=list)
    """Events. Each has one of at (a step), every (a number of steps), when (a condition like loss/lm < 2.5); and one or
    more of fake_quant (true, false, weights, activations), layers (regex), observe, freeze_scales, lr (by group), loss
    (by name)."""
    eval: EvalRecipe = field(default_factory=EvalRecipe)
    """Evaluation during training."""
    export: ExportRecipe = field(default_factory=ExportRecipe)
    """Compressed checkpoint."""
    deepspeed: str = field(default="zero3", metadata=path_or_name("a name in ds_configs/ or a JSON file"))
    """ZeRO strategy: the name of a file in ds_configs/ (zero0 ... zero3_offload) or the path of such a JSON file."""

    def __post_init__(self) -> None:
        self._derived: dict[str, Any] = {}
        self.validate()

    def export_dir(self) -> Path:
        """Return the directory that the export is written to: ``export.dir``, by default ``export`` in output_dir."""
        return Path(self.export.dir) if self.export.dir else Path(self.output_dir) / "export"

    def check_ranks(self, ranks: int) -> None:
        """Raise RecipeError if ``parallel.sequence`` does not divide the number of ``ranks``."""
        if ranks % self.parallel.sequence:
            found = f"parallel.sequence: {self.parallel.sequence}"
            raise RecipeError(f"{found}, expected a divisor of the number of ranks, which is {ranks}")

    def distils(self) -> bool:
        """Tell if the distillation loss has a weight above 0 at any step, from the start or by an event."""
        later = any((event.loss or {}).get("kd", 0) > 0 for event in self.schedule)
        return self.loss.kd_weight > 0 or later

    def teacher_kind(self) -> TeacherKind:
        """Return the kind of the run's teacher; "none" without distillation, even if ``loss`` names a teacher."""
        return self.loss.named_teacher() if self.distils() else "none"

    def never_quantizes(self) -> bool:
        """Tell if the recipe leaves fake quant off in all steps; a script may still switch it on."""
        return self.quant.fake_quant_start == -1 and not any(event.fake_quant for event in self.schedule)

    def invalidates(self) -> bool:
        """Tell if training makes inactive scales (of layers whose fake quant is off) outdated: if weights, norms,
        routers or merged adapters train. Training only scales does not change the unquantized model, and training
        unmerged adapters does not change the base model, to which the scales belong."""
        learn = self.learnable
        return not self.adapter.beside and any((learn.weight, learn.norm, learn.router, self.adapter.on))

    def validate(self) -> None:
        """Set derived defaults, check every value, and check values against each other; no file is read. The
        constructor calls it; call it again after an assignment to a field. Raises RecipeError with one line per
        problem."""
        derive(self, self._derived)
        problems = list(_field_problems(self, ""))
        problems += self.quant.problems()
        for index, event in enumerate(self.schedule):
            problems += event.problems(f"schedule[{index}]")
        problems += _named_twice(self.data, os.path.abspath)
        _refuse(_also(problems, contradictions(self)))

    def fetch(self, sections: Collection[str] = FETCHED) -> None:
        """Download all that the options of these sections name on the Hugging Face Hub, weights included, and replace
        the names by local paths (:mod:`engine.config.hub`). Raises RecipeError if something cannot be fetched."""
        _refuse(self._fetched(sections, weights=True))

    def _fetched(self, sections: Collection[str], *, weights: bool) -> list[str]:
        """Replace names as :meth:`fetch` does, with or without ``weights``. Return a line for each name that cannot be
        fetched, or that means several files although ``data.weights`` has one weight for it."""
        problems = list[str]()
        for key, section, item in recipe_options(self):
            value, kind = getattr(section, item.name), item.metadata.get(HUB)
            unused = value is None or (key == "loss.teacher" and self.teacher_kind() != "model")
            if kind is None or unused or key.partition(".")[0] not in sections:
                continue
            found, before = [], len(problems)
            for index, path in enumerate(value if isinstance(value, list) else [value]):
                at = f"{key}[{index}]" if isinstance(value, list) else key
                try:
                    of_kind = self.data.kind if kind == "data" else kind
                    code = kind == "model" and self.model.trust_remote_code
                    found.append(local_paths(path, of_kind, weights=weights, code=code))
                except HubError as error:
                    local = "a file" if kind == "data" else "a directory with config.json"
                    hub = f"{local}, or a name on the Hugging Face Hub"
                    problems.append(f"{at}: {not_there(path)}, expected {hub}: {error}")
            if key == "data.train" and self.data.weights is not None:
                several = [path for path, files in zip(value, found, strict=False) if len(files) > 1]
                problems += [f"data.weights: {one} has several files, expected each of them by name" for one in several]
            if len(problems) == before:
                setattr(section, item.name, [*chain(*found)] if isinstance(value, list) else found[0][0])
        return problems

    def validate_models(self) -> None:
        """Check that model.path and a teacher model are directories with config.json. Names on the Hub, except those
        of data, are fetched without weights and replaced by local paths. Raises RecipeError if a check or a download
        fails."""
        problems = self._fetched([section for section in FETCHED if section != "data"], weights=False)
        _refuse(_also(problems, self._model_problems(weights=False)))

    def validate_data(self) -> None:
        """Check that the data files and the student's config.json exist, for a script that reads no weights. Names on
        the Hub are fetched without weights, and replaced by local paths. Raises RecipeError if a check or a download
        fails."""
        problems = self._fetched(("model", "data"), weights=False)
        _refuse(_also(problems, (*checkpoint_problems("model.path", self.model.path), *self._data_problems())))

    def validate_files(self) -> None:
        """Fetch all names on the Hugging Face Hub; then check that the recipe's input files and directories exist,
        relative to the current directory, and that output_dir and data.cache are usable as directories. Raises
        RecipeError with one line per problem."""
        fetched = self._fetched(FETCHED, weights=True)
        problems = list(self._model_problems(weights=True))
        if self.teacher_kind() == "cache":
            cache = str(self.loss.teacher_cache)
            if not os.path.isfile(os.path.join(cache, "manifest.json")):
                expected = "expected a directory that launch/cache_teacher.py wrote, with manifest.json"
                problems.append(f"loss.teacher_cache: {not_there(cache)}, {expected}")
        for key in ("scales", "start"):
            if (path := getattr(self.quant, key)) is not None and not os.path.isdir(path):
                problems.append(f"quant.{key}: {not_there(path)}, expected the directory of a PTQ checkpoint")
        problems += self._data_problems()
        for key, path in (("output_dir", self.output_dir), ("data.cache", self.data.cache)):
            if path is not None and os.path.lexists(path) and not os.path.isdir(path):
                problems.append(f"{key}: {path!r}, expected a directory, or no file of that name")
        if glob.escape(path := os.path.abspath(self.output_dir)) != path:
            problems.append(f"output_dir: {path!r}, expected no *, ? or [: DeepSpeed could not load its checkpoints")
        _refuse(_also(fetched, problems))

    def _model_problems(self, *, weights: bool) -> Iterator[str]:
        yield from checkpoint_problems("model.path", self.model.path, weights=weights)
        if self.teacher_kind() == "model":  # with a cache, the teacher's checkpoint is not needed any more
            yield from checkpoint_problems("loss.teacher", str(self.loss.teacher), weights=weights)

    def _data_problems(self) -> Iterator[str]:
        for key, files in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            for index, file in enumerate(files):
                if not os.path.exists(file):
                    pattern = "; patterns are not expanded, name each file" * (glob.escape(file) != file)
                    yield f"{key}[{index}]: {not_there(file)}, expected a file{pattern}"
                elif problem := data_problem(file, plain=self.data.is_text(file)):
                    yield f"{key}[{index}]: {file!r} {problem}"
        yield from _named_twice(self.data, _file_identity)  # links to one file too


def _also(problems: list[str], more: Iterable[str]) -> list[str]:
    """Return ``problems``, and the lines of ``more`` about keys that ``problems`` do not mention."""
    keys = {line.partition(":")[0] for line in problems}
    return problems + [line for line in more if line.partition(":")[0] not in keys]


def _refuse(problems: Iterable[str]) -> None:
    """Raise a RecipeError with a line for each problem, if there are any."""
    if lines := "\n".join(problems):
        raise RecipeError(lines)


def _field_problems(section: Any, path: str) -> Iterator[str]:
    """Yield a line for each bad value in a section and its subsections; defaults are not checked."""
    for item in fields(section):
        value, key = getattr(section, item.name), f"{path}.{item.name}".lstrip(".")
        if value == default_of(item):
            continue
        listed = isinstance(value, list) and ("each" in item.metadata or any(map(is_dataclass, value)))
        for at, one in ({f"{key}[{n}]": one for n, one in enumerate(value)} if listed else {key: value}).items():
            yield from _field_problems(one, at) if is_dataclass(one) else value_problems(at, one, item.metadata)


def _named_twice(data: DataRecipe, identity: Callable[[str], Hashable]) -> Iterator[str]:
    """Yield a line for each repeated file of data.train and data.eval; equal files have equal ``identity``."""
    first: dict[Hashable, str] = {}
    for key, files in (("data.train", data.train), ("data.eval", data.eval)):
        for index, file in enumerate(files):
            here = f"{key}[{index}]"
            if (there := first.setdefault(identity(file), here)) != here:
                yield f"{here}: {file!r} is {there}, expected each file once (data.weights says how often it is used)"


def _file_identity(path: str) -> Hashable:
    """Return (device, inode) of a file, which are equal for all its names; the path if the file does not exist."""
    try:
        found = os.stat(path)
    except OSError:
        return path
    return (found.st_dev, found.st_ino)


def contradictions(recipe: Recipe) -> Iterator[str]:
    """Yield an error text for each option that is set but has no effect, and for each broken rule of ``RULES``."""
    for key, _, words in idle(recipe):
        yield f"{key}: {attrgetter(key)(recipe)!r} has no effect unless {words}; remove it or change that"
    for rule in RULES:
        for key, expected in rule(recipe):
            yield f"{key if ': ' in key else f'{key}: {attrgetter(key)(recipe)!r}'}, expected {expected}"


def recipe_options(recipe: Recipe) -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield every option: its key (``optim.lr``), the object that has its value, and its dataclass field."""
    for section in fields(recipe):
        if is_dataclass(value := getattr(recipe, section.name)):
            yield from ((f"{section.name}.{item.name}", value, item) for item in fields(value))
        else:
            yield section.name, recipe, section


def derive(recipe: Recipe, before: dict[str, Any]) -> None:
    """Set the default of each unset option whose default follows from other options. ``before`` maps keys to the
    defaults that earlier calls set, and is updated: an option that still has such a default counts as unset."""
    for key, section, item in recipe_options(recipe):
        if DERIVED in item.metadata and getattr(section, item.name) in (None, before.get(key)):
            before[key] = item.metadata[DERIVED](recipe)
            setattr(section, item.name, before[key])


def idle(recipe: Recipe) -> Iterator[tuple[str, Any, str]]:
    """Yield options that differ from their default but have no effect: key, default, and the condition under which the
    option would have one."""
    for key, section, item in recipe_options(recipe):
        default = item.metadata[DERIVED](recipe) if DERIVED in item.metadata else default_of(item)
        if ONLY_WITH in item.metadata and getattr(section, item.name) != default:
            for words, holds in item.metadata[ONLY_WITH]:
                if not holds(recipe):
                    yield key, default, words.format_map(vars(recipe))
                    break


def _data(r: Recipe) -> Contradictions:
    data = r.data
    if data.kind != "text" and (expected := expected_fields(data.fields)):
        yield "data.fields", expected
    if data.weights is not None and len(data.weights) != len(data.train):
        yield "data.weights", "one per file of data.train"
    if data.packing and data.micro_batch_size > 1 and r.model.attn_implementation.startswith("flash_attention"):
        attention = f"model.attn_implementation {r.model.attn_implementation}"
        yield (
            "data.micro_batch_size",
            f"1 with data.packing and {attention}, which finds the boundaries of samples in one row only",
        )


def _on_policy(r: Recipe) -> Contradictions:
    data, loss = r.data, r.loss
    if data.kind != "on_policy":
        return
    kind = "with data.kind on_policy"
    own = f"0 {kind}: the student would learn its own tokens as if they were right"
    if data.server is None:
        yield "data.server", f"the address of a vLLM server {kind}, like http://localhost:8000"
    if data.new_tokens >= data.max_length:
        yield "data.new_tokens", f"less than data.max_length ({data.max_length}), as a prompt has tokens too"
    if data.packing:
        yield "data.packing", f"false {kind}: lengths are known only when the answers are written"
    if data.held_out:
        yield "data.held_out", f"0 {kind}: prompts have no answers to evaluate on; data.eval takes chats"
    if data.too_long != "drop":
        yield "data.too_long", f"drop {kind}: the beginning of a prompt is a part of the question"
    if loss.lm_weight > 0:
        yield "loss.lm_weight", own
    for index, event in enumerate(r.schedule):
        if (event.loss or {}).get("lm", 0) > 0:
            yield f"schedule[{index}].loss: {event.loss}", f"lm {own}"
    if loss.teacher_cache is not None:
        yield "loss.teacher_cache", f"null {kind}: the teacher must run on what the student has just written"
    if r.export.format not in (*SERVED_FORMATS, SOURCE):
        yield "export.format", f"one of {', '.join(SERVED_FORMATS)} {kind}: vLLM serves the student while it trains"
    if r.adapter.beside:
        yield "adapter.merge", f"true {kind}: vLLM serves what is published, without an adapter beside it"


def _steps(r: Recipe) -> Contradictions:
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
        taken = f"a step subtracts weight_decay * learning rate ({rate:g}) times every weight"
        yield "optim.weight_decay", f"at most {1 / rate:g}: {taken}"


def _parallel(r: Recipe) -> Contradictions:
    ranks = r.parallel.sequence
    if ranks == 1:
        return
    shared = f"parallel.sequence {ranks}"
    if r.data.packing and r.data.max_length < ranks:
        yield "data.max_length", f"at least {ranks} with {shared}"
    if r.learnable.router:
        yield "learnable.router", f"false with {shared}: its auxiliary loss is defined on whole rows"
    if r.train.compile:
        yield "train.compile", f"false with {shared}: ranks exchange tokens inside each layer"


def _learnable(r: Recipe) -> Contradictions:
    learnable, quant = r.learnable, r.quant
    if not (r.adapter.on or quant.decouples() or any(getattr(learnable, name) for name in TRAINED)):
        expected = f"at least one of {', '.join(TRAINED)} to be true, or adapter.kind lora"
        yield "learnable: nothing is learnable", expected
    if r.never_quantizes() and learnable.scales_alone() and not r.adapter.on:
        yield (
            "quant.fake_quant_start: -1 (never)",
            "0 or more with learnable.weight false: only scales learn, which get no gradient without fake quant",
        )
    weights = not quant.known() or quant.linear_schemes()
    if learnable.scales_alone() and not (learnable.act_scale or learnable.kv_scale or weights or r.adapter.on):
        expected = f"kv_scale, weight or norm too: quant.scheme {quant.scheme} has no weight scales"
        yield "learnable: only weight_scale is true", expected
    cache_alone = quant.quantizes_cache() and not quant.learns_input_scales()
    if learnable.act_scale and not learnable.kv_scale and cache_alone:
        only = f"quant.scheme {quant.scheme} has no input scales except those of the KV cache"
        yield "learnable.act_scale", f"false with learnable.kv_scale false: {only}"


def _losses(r: Recipe) -> Contradictions:
    loss = r.loss
    if loss.lm_weight == 0 and loss.kd_weight == 0:
        yield "loss.lm_weight, loss.kd_weight: both 0", "at least one above 0: there is no loss"
    if loss.named_teacher() == "none" and loss.kd_weight > 0:
        yield "loss.teacher", f"a directory since loss.kd_weight is {loss.kd_weight}"
    elif loss.named_teacher() == "none" and r.distils():
        yield "loss.teacher", "a directory since an event under schedule sets kd"
    if r.teacher_kind() == "self":
        taught = "would be its own teacher in its changed state"
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
            yield "loss.teacher", "a directory or null: with loss.teacher_cache no teacher runs"
        if loss.diagnostics_every > 0:
            lacks = "diagnostics compare whole distributions, which loss.teacher_cache does not contain"
            yield "loss.diagnostics_every", f"0: {lacks}"


def _evaluation(r: Recipe) -> Contradictions:
    every = r.eval.every
    if every > 0 and not (r.data.held_out or r.data.eval):
        yield "eval.every", "0, or samples to evaluate on (data.held_out, data.eval)"
    if every > 0 and r.train.checkpoint_every % every:
        expected = f"a multiple of eval.every ({every}), so that each checkpoint has been evaluated"
        yield "train.checkpoint_every", expected
    if r.eval.best != "lm" and r.loss.named_teacher() == "cache":
        yield "eval.best", "lm: loss.teacher_cache contains no teacher outputs for held-out samples"


def _fake_quant(r: Recipe) -> Contradictions:
    quant, start = r.quant, r.quant.fake_quant_start
    if start > 0 and any(event.fake_quant is not None for event in r.schedule):
        yield "quant.fake_quant_start", "0 or -1, since events under schedule switch fake quant"
    if start >= r.train.steps > 0:
        expected = f"below train.steps ({r.train.steps}), or -1 to train without fake quant"
        yield "quant.fake_quant_start", expected
    if quant.compute == "fp8_gemm" and r.model.dtype != "bfloat16":
        yield "quant.compute", f"auto or simulate: the fp8 GEMM returns bfloat16, but model.dtype is {r.model.dtype}"
    if quant.fuse_norms and r.learnable.act_scale:
        expected = "false with learnable.act_scale: the gradient of a scale needs the unquantized input"
        yield "quant.fuse_norms", expected
    if quant.fuse_norms and r.train.compile:
        yield "quant.fuse_norms", "false with train.compile, which fuses norms itself"
    if quant.rotate and (quant.scheme == SOURCE or quant.scales or quant.start):
        sources = "quant.scheme source, quant.scales or quant.start"
        yield "quant.rotate", f"[] with {sources}, whose scales belong to weights that are not rotated"
    if quant.rotate and r.export.format != "compressed":
        yield "export.format", "compressed with quant.rotate: no reader of other formats rotates inputs"


def _schemes(r: Recipe) -> Contradictions:
    quant = r.quant
    if not quant.known():
        return
    scheme = f"quant.scheme {quant.scheme}"
    if r.export.enabled and r.export.format in ("gguf", "mlx", "executorch") and quant.preset().kv_cache is not None:
        yield "export.format", f"compressed with {scheme}, which quantizes the KV cache"
    if quant.compute == "fp8_gemm" and not quant.has_fp8_gemm():
        yield "quant.compute", f"auto or simulate: {scheme} lacks fp8 weights and inputs with one scale per tensor"
    if quant.input_range != "absmax" and quant.has_global_input_scales():
        expected = (
            f"absmax with {scheme}: NVFP4 inputs have dynamic scales, and their global scale is measured by absmax"
        )
        yield "quant.input_range", expected
    if quant.initial_input_scale is not None and quant.has_global_input_scales():
        expected = f"null with {scheme}: a global scale of inputs (NVFP4) is measured, or comes from quant.scales"
        yield "quant.initial_input_scale", expected
    # Files of a source without these scales raise an error when they are read.
    given = quant.scheme == SOURCE or quant.scales or quant.start or quant.initial_input_scale is not None
    needed = quant.stores_input_scales() and (quant.fake_quant_start == 0 or r.adapter.beside)
    if needed and quant.calibration_batches == 0 and not given:
        nothing = f"{quant.scheme} needs input scales, and the recipe names no source of them"
        yield "quant.calibration_batches", f"1 or more (or quant.scales, or quant.initial_input_scale): {nothing}"


def _first_scales(r: Recipe) -> Contradictions:
    quant, start = r.quant, r.quant.fake_quant_start
    if quant.scales_follow_weights and quant.weight_range == "mse":
        yield (
            "quant.weight_range",
            "absmax, since quant.scales_follow_weights measures scales in every step, where a search would be too slow",
        )
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
        given = f"quant.calibration_batches 0 (it is {quant.calibration_batches})"
        why = "only one of them can set the scales that no PTQ checkpoint provides"
        found = f"null with quant.init {quant.init}, whose samples set these scales, too"
        yield "quant.initial_input_scale", found if chosen else f"null or {given}: {why}"
    why = "the scales are measured again at that step"
    if quant.scales is not None and start > 0 and r.invalidates():
        yield "quant.scales", f"null with quant.fake_quant_start {start}: {why}"
    if quant.initial_input_scale is not None and start > 0 and r.invalidates():
        yield "quant.initial_input_scale", f"null with quant.fake_quant_start {start}: {why}"
    if not chosen:
        return
    if quant.start or quant.scales or quant.scheme == SOURCE:
        expected = "rtn: the codes and scales are those of quant.start, quant.scales or quant.scheme source"
        yield "quant.init", expected
    if start != 0 or quant.scales_follow_weights:
        yield "quant.init", f"rtn with {again}"
    if r.adapter.on:
        yield "quant.init", f"rtn with adapter.kind {r.adapter.kind}: adapters train on unchanged weights"
    if quant.calibration_batches == 0:
        looks = f"quant.init {quant.init} needs micro-batches to choose codes on"
        yield "quant.calibration_batches", f"1 or more: {looks}"
    scheme = f"quant.scheme {quant.scheme}"
    if quant.known() and not all(takes(scheme.weights) for scheme in quant.linear_schemes()):
        yield (
            "quant.init",
            f"rtn with {scheme}: other methods need schemes in which each row of a weight has its own scales",
        )


def _adapters(r: Recipe) -> Contradictions:
    if not r.adapter.on:
        return
    kind = f"adapter.kind {r.adapter.kind}"
    if r.learnable.weight:
        yield "learnable.weight", f"false with {kind}, which trains adapters in place of the weights"
    if r.never_quantizes():
        why = "without fake quant the export is a plain checkpoint"
        yield (
            "quant.fake_quant_start: -1 (never)",
            f"0 or more with {kind}: {why}, which cannot contain adapters",
        )
    if r.quant.rotate:
        yield "quant.rotate", f"[] with {kind}: no reader supports an adapter of a rotated weight"


def _decoupled_scales(r: Recipe) -> Contradictions:
    if not r.quant.decouples():
        return
    option, learnable = "quant.decoupled_scales", r.learnable
    if learnable.weight:
        yield "learnable.weight", f"false with {option}: weights that train change their codes by themselves"
    if not learnable.weight_scale:
        yield "learnable.weight_scale", f"true with {option}, which trains scales of weights"
    if r.adapter.on:
        yield "adapter.kind", f"none with {option}: the codes of a sum of weight and adapter train already"
    if r.quant.scales_follow_weights:
        yield "quant.scales_follow_weights", f"false with {option}: the weights are frozen and their scales learn"


def _changed_weights(r: Recipe) -> Contradictions:
    """Refuse options that do not support adapters, or codes chosen by decoupled scales."""
    option = f"adapter.kind {r.adapter.kind}" if r.adapter.on else "quant.decoupled_scales"
    if not r.adapter.on and not r.quant.decouples():
        return
    if r.train.compile:
        copy = "compiled layers would keep a copy of each weight for backward"
        reason = "torch.compile cannot trace it" if r.adapter.on else copy
        yield "train.compile", f"false with {option}: {reason}"
    if r.quant.quantized_all_gather:
        yield "quant.quantized_all_gather", f"false with {option}: codes are chosen after the weight is gathered"
    if r.quant.fuse_norms:
        yield "quant.fuse_norms", f"false with {option}: the two were not tested together"


def _adapters_beside(r: Recipe) -> Contradictions:
    adapter = r.adapter
    if not adapter.beside:
        return
    if any(getattr(r.learnable, name) for name in SHARED):
        expected = f"{', '.join(SHARED)} to be false with adapter.merge false: servers share the model among adapters"
        yield "learnable: more than adapters learns", expected
    if adapter.ranks:
        reads = "vLLM multiplies every layer's adapter by lora_alpha / r, with one r"
        yield "adapter.ranks", f"{{}} with adapter.merge false: {reads}"
    if r.export.format not in (*UNMERGED_FORMATS, SOURCE):
        yield "export.format", f"one of {', '.join(UNMERGED_FORMATS)} with adapter.merge false"
    if adapter.init == "error" and adapter.start is not None:
        yield "adapter.init", "zeros with adapter.start, which provides the initial adapter"
    if adapter.init == "error":
        added = "with adapter.init error, which would be added to unquantized weights"
        if r.quant.fake_quant_start != 0:
            yield "quant.fake_quant_start", f"0 {added}"
        for index, event in enumerate(r.schedule):
            if event.fake_quant in (False, "activations"):
                yield f"schedule[{index}].fake_quant: {event.fake_quant}", f"true or weights {added}"


def _quantized_base(r: Recipe) -> Contradictions:
    adapter, quant = r.adapter, r.quant
    if not adapter.on or adapter.base != "quantized":
        return
    if adapter.merge:
        if r.learnable.weight_scale:
            yield "learnable.weight_scale", "false with adapter.base quantized, whose codes these scales decode"
        for index, event in enumerate(r.schedule):
            if event.fake_quant in (False, "activations"):
                why = "scales of weights would be measured again, and decode the codes to other weights"
                key = f"schedule[{index}].fake_quant: {event.fake_quant}"
                yield key, f"true or weights with adapter.base quantized: {why}"
    if quant.start or quant.scales:
        read = "scales of a quantized base are read from model.path or measured"
        yield "adapter.base", f"weights, or quant.start and quant.scales null: {read}"
    if quant.fake_quant_start != 0 or quant.scales_follow_weights:
        start = "quantized with quant.fake_quant_start 0 and quant.scales_follow_weights false"
        yield "adapter.base", f"weights; or {start}: a quantized base has no unquantized weights to measure scales from"
    if adapter.init == "error":
        yield (
            "adapter.init",
            "zeros with adapter.base quantized: without the original weights, their quantization error is unknown",
        )


def _export(r: Recipe) -> Contradictions:
    if r.export.format == "peft" and not r.adapter.beside:
        expected = "another format, or adapter.kind lora with adapter.merge false: there is no adapter to write"
        yield "export.format", expected
    if r.never_quantizes() and r.export.format not in ("compressed", "dequantized", "peft", "gguf"):
        never = "with quant.fake_quant_start -1, and no event that switches fake quant on"
        yield "export.format", f"compressed or dequantized: {never}, the export is a plain checkpoint"


def _events(r: Recipe) -> Contradictions:
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


def _losses_of_events(r: Recipe) -> Contradictions:
    """Refuse events that may set the weights of both losses to 0. Events without ``at`` may happen at any step."""
    changes = {index: event for index, event in enumerate(r.schedule) if event.loss}
    fixed = sorted((event.at, index) for index, event in changes.items() if event.at is not None)
    free = [index for index, event in changes.items() if event.at is None]
    states = {(r.loss.lm_weight > 0, r.loss.kd_weight > 0)} - {(False, False)}  # both 0: a problem of the section loss
    refused: set[int] = set()

    def follow(index: int) -> set[tuple[bool, bool]]:
        """Return the pairs (lm has a weight, kd has a weight) that are possible after event ``index``; if both could be
        0, add the event to ``refused``."""
        given = changes[index].loss or {}
        after = {(given.get("lm", lm) > 0, given.get("kd", kd) > 0) for lm, kd in states}
        if (False, False) in after:
            refused.add(index)
        return after - {(False, False)}

    for index in (None, *(index for _, index in fixed)):
        states = states if index is None else follow(index)
        # An event without a step may happen now, or not.
        while more := set[tuple[bool, bool]]().union(*map(follow, free)) - states:
            states = states | more
    for index in sorted(refused):
        expected = "a weight above 0 for the other loss in the same event: at that time it may be 0 too"
        yield f"schedule[{index}].loss: {changes[index].loss}", f"{expected}, and there would be no loss"


RULES = (
    _data,
    _parallel,
    _on_policy,
    _learnable,
    _steps,
    _losses,
    _evaluation,
    _fake_quant,
    _first_scales,
    _schemes,
    _adapters,
    _decoupled_scales,
    _changed_weights,
    _adapters_beside,
    _quantized_base,
    _export,
    _events,
    _losses_of_events,
)
