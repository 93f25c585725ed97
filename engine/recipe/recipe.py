"""The recipe: every knob of a run, typed, documented and checked before any process group starts.

One dataclass field is one knob; engine/recipe/reading.py reads them from YAML and the command line. A typo in a 64-GPU
job should cost a second, not the time that the queue, the process group and the model take to come up: so a value out
of bounds and knobs that contradict each other fail here, with the key's path, the value and what was expected.

Two kinds of checks are separate on purpose. :meth:`Recipe.validate` looks at values only, so that a recipe can be
read anywhere; :meth:`Recipe.validate_files` looks at the files that the recipe names. Paths in a YAML file are
relative to the current directory, not to that file.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from engine.losses.kd import CACHED_KINDS, TOP_K_KINDS, Distillation
from engine.losses.objective import NamedTokenLoss, Objective
from engine.recipe.checks import RecipeError, at_least, need, pattern, positive
from engine.recipe.quant import QuantRecipe
from quant.layouts import Layout

SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes in a size like ``5GB`` (10^9), ``500MB`` or ``2GiB`` (2^30); without a unit the number is bytes.

    Raises:
        ValueError: it is something else, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(match[1]) * SIZE_UNITS.get(match[2].upper(), 0) if match else 0
    if size < 1:
        raise ValueError(f"{text!r} is not a size: expected a positive number and a unit, like 5GB, 500MB or 2GiB")
    return int(size)


@dataclass
class ModelRecipe:
    """The Hugging Face checkpoint to train."""

    path: str
    """Directory of the checkpoint: config.json, safetensors files, tokenizer. Relative to the current directory."""
    trust_remote_code: bool = False
    """Run the Python files that the checkpoint directory brings along. They can do anything: read them first."""
    attn_implementation: str = "sdpa"
    """Attention of transformers: sdpa, eager, flash_attention_2, ... (flash_attention_2 needs its own package)."""
    load: Literal["direct", "rank0"] = "direct"
    """direct: each rank reads only its own slices of the files; rank0: rank 0 reads all and sends, which is slow."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the parameters and of the GEMMs; the optimizer's copies are fp32. float16, for GPUs without bfloat16, has
    dynamic loss scaling. float32 takes twice the memory and is for tests."""
    experts: Literal["stacked", "per_expert"] = "stacked"
    """Form of MoE layers in memory; on disk they are the same. stacked: all experts of a layer in two parameters, with
    a scale each; per_expert: a module per expert and projection, many times the parameters and collectives."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        yield from need(self.path != "", "model.path", self.path, "a directory")
        yield from need(
            self.attn_implementation != "", "model.attn_implementation", self.attn_implementation, "a name like sdpa"
        )


@dataclass
class LearnableRecipe:
    """What the optimizer trains; everything else is frozen."""

    weight: bool = True
    """Linear weights and biases, embeddings and lm_head. Costs gradients and optimizer state of the whole model."""
    embedding: bool = True
    """Embeddings and lm_head, where weight is on; false freezes them."""
    weight_scale: bool = True
    """Scales of the quantised weights (theta of s0 * exp(theta))."""
    act_scale: bool = False
    """Static scales of the quantised activations, keys and values too. Keeps each shared input in full for backward,
    not 1-byte codes."""
    norm: bool = False
    """Weights of the norms."""
    router: bool = False
    """MoE routers; their auxiliary loss is then added to the loss."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        switches = {name: on for name, on in asdict(self).items() if name != "embedding"}
        if not any(switches.values()):
            yield f"learnable: nothing is learnable, expected at least one of {', '.join(switches)} to be true"


@dataclass
class DataRecipe:
    """Training samples and how they become batches."""

    train: list[str]
    """Files to train on, JSONL for chat, plain text for text. Relative to the current directory."""
    weights: list[float] | None = None
    """One per file of data.train: the file's share of an epoch's samples is its weight over their sum. An epoch keeps
    its number of samples: a file may give each of its samples several times, or only some. null: every sample once."""
    held_out: int | float = 0
    """Samples taken out of data.train to evaluate on, drawn with data.seed: a number, or below 1 a share. 0: none."""
    eval: list[str] = field(default_factory=list)
    """Files to evaluate on, beside the samples held out; read as those of data.train are."""
    kind: Literal["chat", "text"] = "chat"
    """chat: JSONL conversations, loss on the assistant's turns; text: plain text, loss on every token."""
    loss_on: Literal["last", "all"] = "last"
    """last: of a chat only the last assistant turn is learned; all: every assistant turn."""
    fields: dict[str, str] | None = None
    """For JSONL with keys of its own: {input: question, output: answer}. null: keys are recognised. Only for chat."""
    max_length: int = 2048
    """Tokens per sample at most (chat) or exactly (text), and of a packed row. Activation memory grows with it."""
    too_long: Literal["drop", "truncate"] = "drop"
    """A chat sample above max_length is dropped, or loses its beginning; both are counted."""
    packing: bool = False
    """Fill rows of max_length tokens with several samples each, which do not see each other. false: a sample per row,
    padded to the longest of the micro-batch."""
    micro_batch_size: int = 1
    """Rows per forward and rank: samples, or with data.packing rows of several. Activation memory grows with it."""
    seed: int = 0
    """Seed of the order of the samples, and of the choice of those held out."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        yield from need(len(self.train) > 0 and "" not in self.train, "data.train", self.train, "at least one file")
        yield from need("" not in self.eval, "data.eval", self.eval, "files")
        if self.weights is not None:
            yield from self._weight_problems(self.weights)
        share = isinstance(self.held_out, float)
        good = 0 < self.held_out < 1 if share and self.held_out else self.held_out >= 0
        yield from need(good, "data.held_out", self.held_out, "a number of samples, or a share between 0 and 1")
        if self.kind != "chat":
            yield from need(self.fields is None, "data.fields", self.fields, f"null with data.kind {self.kind}")
            yield from need(self.loss_on == "last", "data.loss_on", self.loss_on, f"last with data.kind {self.kind}")
        yield from at_least("data.max_length", self.max_length, 2)
        yield from at_least("data.micro_batch_size", self.micro_batch_size, 1)
        yield from at_least("data.seed", self.seed, 0)

    def _weight_problems(self, weights: list[float]) -> Iterator[str]:
        good = all(math.isfinite(weight) and weight > 0 for weight in weights)
        yield from need(good, "data.weights", weights, "numbers above 0 (leave a file out of data.train instead of 0)")
        same = len(weights) == len(self.train)
        yield from need(same, "data.weights", weights, f"{len(self.train)} of them, one per file of data.train")
        once = len({str(Path(file)) for file in self.train}) == len(self.train)
        yield from need(once, "data.train", self.train, "each file once: data.weights says how often it is used")

    def weights_by_file(self) -> dict[str, float] | None:
        """The weights by path, as samples name their file."""
        if self.weights is None:
            return None
        return {str(Path(file)): weight for file, weight in zip(self.train, self.weights, strict=True)}


@dataclass
class OptimRecipe:
    """AdamW and the learning rate's way over the steps."""

    lr: float = 1e-5
    """Peak learning rate of weights, biases and routers, and of what has no rate of its own below."""
    embedding_lr: float | None = None
    """Peak learning rate of embeddings and lm_head. null: lr."""
    norm_lr: float | None = None
    """Peak learning rate of the norms. null: lr."""
    scale_lr: float = 1e-3
    """Peak learning rate of the weight scales; relative, since theta is a logarithm."""
    act_scale_lr: float | None = None
    """Peak learning rate of the activation scales. null: scale_lr."""
    min_lr_ratio: float = 0.1
    """The learning rates end at this share of their peaks (linear, cosine)."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0; scales warm up anew whenever their fake quant starts."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Course of the learning rates after the warm-up. wsd: constant until the last decay_steps, then linear."""
    decay_steps: int = 0
    """Optimizer steps of decay at the end, for schedule wsd."""
    weight_decay: float = 0.0
    """Decay of weights. Scales, norms and biases never decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's eps."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 disables clipping."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        yield from at_least("optim.lr", self.lr, 0)
        yield from at_least("optim.scale_lr", self.scale_lr, 0)
        for name in ("embedding_lr", "norm_lr", "act_scale_lr"):
            value = getattr(self, name)
            if value is not None:
                yield from at_least(f"optim.{name}", value, 0)
        yield from need(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "between 0 and 1")
        yield from at_least("optim.warmup_steps", self.warmup_steps, 0)
        if self.schedule == "wsd":
            yield from at_least("optim.decay_steps", self.decay_steps, 1)
        else:
            expected = f"0: optim.schedule {self.schedule} has no decay_steps (wsd has)"
            yield from need(self.decay_steps == 0, "optim.decay_steps", self.decay_steps, expected)
        yield from at_least("optim.weight_decay", self.weight_decay, 0)
        yield from need(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "two numbers in [0, 1)")
        yield from positive("optim.eps", self.eps)
        yield from at_least("optim.grad_clip", self.grad_clip, 0)


TeacherKind = Literal["none", "self", "cache", "model"]
"""Whose distributions the student is distilled from: nobody's, its own without fake quant, those that a cache on disk
holds, or those of a model of its own in memory."""


@dataclass
class LossRecipe:
    """total = lm_weight * lm + kd_weight * kd, means over the valid tokens of the optimizer step."""

    lm_weight: float = 1.0
    """Weight of the language modelling loss."""
    kd_weight: float = 0.0
    """Weight of the distillation loss; 0 loads no teacher."""
    kd: Literal["kl", "rkl", "mse", "cakld", "kd", "kl_top_k", "r_kl_top_k"] = "cakld"
    """kl: KL(teacher||student); rkl: KL(student||teacher); cakld: both, mixed by the teacher's confidence in the label;
    kd: kl at loss.temperature; mse: squared difference of the logits; kl_top_k: kl on the teacher's loss.top_k most
    likely tokens; r_kl_top_k: rkl on the student's. engine/losses/kd.py has the formulas."""
    temperature: float = 1.0
    """Temperature of kd: kd; the other kinds have none."""
    top_k: int | None = None
    """Tokens of kl_top_k and r_kl_top_k, and that launch/cache_teacher.py keeps per position; like 100."""
    tail: bool = False
    """kl_top_k, r_kl_top_k: one more bucket for all other tokens, instead of renormalising without them."""
    teacher: str | None = None
    """Directory of the teacher's checkpoint, often model.path. It is frozen, and sharded too under stage 3. self: the
    student without fake quant, which takes no memory and needs frozen weights, norms and routers."""
    teacher_cache: str | None = None
    """Directory that launch/cache_teacher.py wrote: training reads the teacher's loss.top_k tokens from there and loads
    no teacher. Only for kl_top_k."""
    diagnostics_every: int = 0
    """Steps between two measurements of kd/forward_kl, kd/backward_kl and kd/top1_agreement, whatever loss.kd is; 0:
    never. Needs a teacher in memory."""
    chunk_tokens: int = 512
    """Tokens whose logits exist at once, of student and teacher: 2 * chunk_tokens * vocabulary * 2 bytes in bf16."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        yield from at_least("loss.lm_weight", self.lm_weight, 0)
        yield from at_least("loss.kd_weight", self.kd_weight, 0)
        if self.lm_weight == 0 and self.kd_weight == 0:
            yield "loss.lm_weight, loss.kd_weight: both 0, expected at least one above 0: there is no loss"
        if self.kd_weight > 0 and self.named_teacher() == "none":
            yield f"loss.teacher: {self.teacher!r}, expected a directory since loss.kd_weight is {self.kd_weight}"
        yield from positive("loss.temperature", self.temperature)
        if self.kd != "kd":
            expected = f"1.0: loss.kd {self.kd} has no temperature (loss.kd kd has)"
            yield from need(self.temperature == 1, "loss.temperature", self.temperature, expected)
        if self.kd in TOP_K_KINDS:
            expected = f"a number of tokens, like 100: loss.kd is {self.kd}"
            yield from need(self.top_k is not None, "loss.top_k", self.top_k, expected)
        elif self.tail:
            yield f"loss.tail: {self.tail}, expected false: loss.kd {self.kd} is of the whole vocabulary"
        if self.top_k is not None:
            yield from at_least("loss.top_k", self.top_k, 1)
        yield from at_least("loss.diagnostics_every", self.diagnostics_every, 0)
        if self.teacher_cache is not None:
            yield from self._cache_problems()
        yield from at_least("loss.chunk_tokens", self.chunk_tokens, 1)

    def named_teacher(self) -> TeacherKind:
        """Which teacher this section names, whether or not the run distils (that is :meth:`Recipe.teacher_kind`)."""
        if self.teacher_cache is not None:
            return "cache"  # the teacher that wrote it may be named too
        if self.teacher == "self":
            return "self"
        return "model" if self.teacher else "none"

    def objective(self, *, lm: float, kd: float, token_losses: tuple[NamedTokenLoss, ...] = ()) -> Objective:
        """What is minimised, with the weights ``lm`` and ``kd``, which events may have changed since, and a user's own
        losses."""
        distillation = Distillation(self.kd, self.temperature, self.top_k or 1, self.tail)
        return Objective(lm, kd, distillation, token_losses, self.chunk_tokens)

    def _cache_problems(self) -> Iterator[str]:
        """A cache holds the teacher's own K tokens alone."""
        yield from need(self.teacher_cache != "", "loss.teacher_cache", self.teacher_cache, "a directory")
        expected = "kl_top_k: with loss.teacher_cache only the teacher's most likely tokens are known"
        yield from need(self.kd in CACHED_KINDS, "loss.kd", self.kd, expected)
        expected = "a directory or null: loss.teacher_cache is there so that no teacher runs"
        yield from need(self.teacher != "self", "loss.teacher", self.teacher, expected)
        expected = "0: loss.teacher_cache does not hold the distributions that are compared"
        yield from need(self.diagnostics_every == 0, "loss.diagnostics_every", self.diagnostics_every, expected)


@dataclass
class TrainRecipe:
    """The loop: how long, how much per step, what is written and when."""

    steps: int
    """Optimizer steps."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per rank and optimizer step."""
    seed: int = 0
    """Seed of everything random but the order of the samples."""
    activation_checkpointing: bool = False
    """Recompute each block in backward: memory of one block's activations instead of all, a third more compute."""
    activation_offload: bool = False
    """Keep the inputs of the recomputed blocks (tokens * hidden size * 2 bytes each) in host memory until backward.
    Needs activation_checkpointing."""
    compile: bool = False
    """torch.compile each decoder layer: the first steps take minutes longer. Not under ZeRO stage 3."""
    log_every: int = 1
    """Steps between two log lines and TensorBoard points."""
    quant_stats_every: int = 50
    """Steps between two looks at the quantisation for TensorBoard: scales, clipped fractions, errors by layer, and the
    scales' share of the grad norm. 0: never."""
    checkpoint_every: int = 0
    """Steps between two training checkpoints (weights, optimizer state, data cursor); 0: none."""
    resume: bool | str = False
    """Continue from a training checkpoint of output_dir: true for the latest, best, or a name like step_00001000."""
    keep_checkpoints: int = 2
    """Latest training checkpoints to keep, besides the best; each holds 12 to 14 bytes per trained parameter."""
    max_skipped_steps: int = 10
    """The run ends after so many steps in a row whose loss or gradients are not finite; each is left out."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        yield from at_least("train.steps", self.steps, 1)
        yield from at_least("train.gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        yield from at_least("train.seed", self.seed, 0)
        yield from at_least("train.log_every", self.log_every, 1)
        yield from at_least("train.quant_stats_every", self.quant_stats_every, 0)
        yield from at_least("train.checkpoint_every", self.checkpoint_every, 0)
        yield from at_least("train.keep_checkpoints", self.keep_checkpoints, 1)
        yield from at_least("train.max_skipped_steps", self.max_skipped_steps, 1)
        expected = "false, or train.activation_checkpointing true: it moves the inputs of recomputed blocks"
        good = self.activation_checkpointing or not self.activation_offload
        yield from need(good, "train.activation_offload", self.activation_offload, expected)
        if isinstance(self.resume, str):
            good = re.fullmatch(r"best|step_\d{8}", self.resume) is not None
            yield from need(good, "train.resume", self.resume, "true, false, best, or a name like step_00001000")


CONDITION = re.compile(r"(?P<metric>\S+)\s*(?P<relation><=|>=|<|>)\s*(?P<value>\S+)")


@dataclass
class EventRecipe:
    """One change during the run: when it happens (one of at, every, when), and what (at least one of the others)."""

    at: int | None = None
    """Once, when so many optimizer steps are done and before the next begins."""
    every: int | None = None
    """After each so many optimizer steps."""
    when: str | None = None
    """Once, after the first step at which this holds: a loss or a result of the evaluation (loss/total, loss/lm,
    eval/perplexity, ...), one of < <= > >=, and a number."""
    fake_quant: bool | Literal["weights", "activations"] | None = None
    """true: of weights and activations; weights, activations: of these alone; false: off."""
    layers: str | None = None
    """Regex: fake_quant of the layers whose whole module name matches only."""
    observe: bool | None = None
    """Whether observers watch the inputs; starting forgets what they saw. While off they watch unless this is false."""
    freeze_scales: bool | None = None
    """true: learned scales rest from now on; false: they train again."""
    lr: dict[str, float] | None = None
    """Peak learning rates from now on, by group: weights, embeddings, norms, biases, weight_scales, act_scales."""
    loss: dict[str, float] | None = None
    """Weights of the losses from now on: lm, kd."""

    def problems(self, key: str) -> Iterator[str]:
        """One line per bad value of this event, whose path is ``key``."""
        times = {name: getattr(self, name) for name in ("at", "every", "when") if getattr(self, name) is not None}
        if len(times) != 1:
            yield f"{key}: {times or 'no time'}, expected exactly one of at, every, when"
        if self.at is not None:
            yield from at_least(f"{key}.at", self.at, 0)
        if self.every is not None:
            yield from at_least(f"{key}.every", self.every, 1)
        if self.when is not None:
            yield from need(parse_condition(self.when) is not None, f"{key}.when", self.when, "like loss/lm < 2.5")
        actions = (self.fake_quant, self.observe, self.freeze_scales, self.lr, self.loss)
        if all(action is None for action in actions):
            yield f"{key}: nothing happens, expected one of fake_quant, observe, freeze_scales, lr, loss"
        if self.layers is not None:
            yield from need(self.fake_quant is not None, f"{key}.layers", self.layers, "fake_quant beside it")
            yield from pattern(f"{key}.layers", self.layers)
        for name, known in (("lr", EVENT_RATES), ("loss", ("lm", "kd"))):
            for what, value in (getattr(self, name) or {}).items():
                yield from need(what in known, f"{key}.{name}", what, f"one of {', '.join(known)}")
                yield from at_least(f"{key}.{name}.{what}", value, 0)


# Parameter groups of engine.session.optimizer, which imports this module.
EVENT_RATES = ("weights", "embeddings", "norms", "biases", "weight_scales", "act_scales")


def parse_condition(text: str) -> tuple[str, str, float] | None:
    """Metric, relation and number of a condition like ``loss/lm < 2.5``; None if it is something else."""
    match = CONDITION.fullmatch(text.strip())
    try:
        return (match["metric"], match["relation"], float(match["value"])) if match else None
    except ValueError:
        return None


@dataclass
class EvalRecipe:
    """Evaluation during training, on held-out samples (data.held_out, data.eval), as the model would be served."""

    every: int = 0
    """Optimizer steps between two evaluations; also after the last step, and before the first unless nothing is ever
    quantised. 0: none. Training checkpoints have to fall on evaluations: train.checkpoint_every is a multiple of it."""
    best: Literal["lm", "kd", "total"] = "lm"
    """The loss whose smallest value makes a training checkpoint the best one, which is kept beside the latest."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        yield from at_least("eval.every", self.every, 0)


@dataclass
class ExportRecipe:
    """The compressed checkpoint at the end."""

    enabled: bool = True
    """Write the compressed checkpoint when training ends."""
    dir: str | None = None
    """Where to write it. null: export in output_dir."""
    format: Layout = "compressed"
    """compressed: compressed-tensors, which transformers, vLLM and SGLang read. vllm_fp8: the same tensors under vLLM's
    own fp8 configuration (fp8_static and fp8_block). dequantized: a plain checkpoint of fake-quantised weights."""
    max_shard_size: str = "5GB"
    """Largest safetensors file, like 5GB, 500MB or 2GiB; rank 0 holds one such file in memory while writing."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        try:
            parse_size(self.max_shard_size)
        except ValueError as error:
            yield f"export.max_shard_size: {error}"


@dataclass
class Recipe:
    """Where results go, and how parameters are sharded.

    The whole recipe: built from YAML and the command line by :func:`engine.recipe.reading.parse_recipe`, or in Python.

    Raises:
        RecipeError: a value is out of bounds or contradicts another one.
    """

    model: ModelRecipe
    """The checkpoint to train."""
    data: DataRecipe
    """Training samples."""
    train: TrainRecipe
    """The loop."""
    output_dir: str
    """Directory for everything that the run writes: recipe, TensorBoard files, checkpoints, export."""
    quant: QuantRecipe = field(default_factory=QuantRecipe)
    """Quantisation."""
    learnable: LearnableRecipe = field(default_factory=LearnableRecipe)
    """What trains."""
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    """Optimizer and schedule."""
    loss: LossRecipe = field(default_factory=LossRecipe)
    """Losses and teacher."""
    schedule: list[EventRecipe] = field(default_factory=list)
    """Events. Each has one of at (a step), every (so many steps), when (a condition like loss/lm < 2.5); and some of
    fake_quant (true, false, weights, activations), layers (regex), observe, freeze_scales, lr (by group), loss (by
    name)."""
    eval: EvalRecipe = field(default_factory=EvalRecipe)
    """Evaluation during training."""
    export: ExportRecipe = field(default_factory=ExportRecipe)
    """Compressed checkpoint."""
    deepspeed: str = "zero3"
    """ZeRO strategy: the name of a file in ds_configs/ (zero0 ... zero3_offload) or the path of such a JSON file."""

    def __post_init__(self) -> None:
        self.validate()

    def export_dir(self) -> Path:
        """Where the compressed checkpoint goes."""
        return Path(self.export.dir) if self.export.dir else Path(self.output_dir) / "export"

    def distils(self) -> bool:
        """Whether the distillation loss has a weight above 0 at any step, from the start or by an event."""
        later = any((event.loss or {}).get("kd", 0) > 0 for event in self.schedule)
        return self.loss.kd_weight > 0 or later

    def teacher_kind(self) -> TeacherKind:
        """Which teacher the run has: none where it does not distil, whatever ``loss`` names."""
        return self.loss.named_teacher() if self.distils() else "none"

    def never_quantises(self) -> bool:
        """Whether fake quant is off from the first step to the last, as the recipe has it."""
        return self.quant.fake_quant_start == -1 and not any(event.fake_quant for event in self.schedule)

    def validate(self) -> None:
        """Check every value, and values against each other; no file is touched. Call it again after an assignment.

        Raises:
            RecipeError: names every problem, one line each.
        """
        sections = (
            self.model,
            self.quant,
            self.learnable,
            self.data,
            self.optim,
            self.loss,
            self.train,
            self.eval,
            self.export,
        )
        problems = [problem for section in sections for problem in section.problems()]
        for index, event in enumerate(self.schedule):
            problems += event.problems(f"schedule[{index}]")
        problems += self._contradictions()
        if problems:
            raise RecipeError("\n".join(problems))

    def _contradictions(self) -> Iterator[str]:
        """Problems that only several sections together show."""
        quant, learn, steps = self.quant, self.learnable, self.train.steps
        if self.distils() and self.loss.kd_weight == 0 and self.loss.named_teacher() == "none":
            yield f"loss.teacher: {self.loss.teacher!r}, expected a directory since an event under schedule sets kd"
        moving = [f"learnable.{name}" for name in ("weight", "norm", "router") if getattr(learn, name)]
        if self.teacher_kind() == "self" and moving:
            yield (
                f"loss.teacher: 'self', expected {' and '.join(moving)} to be false, or a directory: a student that "
                "changes would be taught by what it has become"
            )
        for index, event in enumerate(self.schedule):
            if event.at is not None and event.at >= steps > 0:
                yield f"schedule[{index}].at: {event.at}, expected below train.steps ({steps})"
            if event.fake_quant in (True, "activations") and quant.known():
                expected = f"weights or false: quant.scheme {quant.scheme} quantises no activations"
                good = quant.quantises_activations() or event.fake_quant is True
                yield from need(good, f"schedule[{index}].fake_quant", event.fake_quant, expected)
            if event.fake_quant == "weights" and quant.known():
                expected = f"true, activations or false: quant.scheme {quant.scheme} quantises no weights"
                yield from need(
                    bool(quant.linear_schemes()), f"schedule[{index}].fake_quant", event.fake_quant, expected
                )
        held_out = self.data.held_out or self.data.eval
        if self.eval.every and not held_out:
            yield f"eval.every: {self.eval.every}, expected 0, or samples to evaluate on (data.held_out, data.eval)"
        if self.eval.every > 0 and self.train.checkpoint_every % self.eval.every:
            expected = f"a multiple of eval.every ({self.eval.every}), so that each checkpoint has been evaluated"
            yield f"train.checkpoint_every: {self.train.checkpoint_every}, expected {expected}"
        if self.eval.best != "lm":
            yield from need(self.distils(), "eval.best", self.eval.best, "lm: there is no teacher")
            expected = "lm: loss.teacher_cache holds no held-out samples"
            yield from need(self.loss.named_teacher() != "cache", "eval.best", self.eval.best, expected)
        if quant.fake_quant_start > 0 and any(event.fake_quant is not None for event in self.schedule):
            yield (
                f"quant.fake_quant_start: {quant.fake_quant_start}, expected 0 or -1, "
                "since events under schedule switch fake quant"
            )
        yield from need(self.output_dir != "", "output_dir", self.output_dir, "a directory")
        yield from need(self.deepspeed != "", "deepspeed", self.deepspeed, "a name in ds_configs/ or a JSON file")
        if quant.known() and not quant.stores_input_scales():
            why = "has dynamic scales of activations" if quant.quantises_activations() else "quantises no activations"
            expected = f"false: quant.scheme {quant.scheme} {why}"
            yield from need(not learn.act_scale, "learnable.act_scale", learn.act_scale, expected)
            expected = f"null: quant.scheme {quant.scheme} {why}"
            value = quant.initial_input_scale
            yield from need(value is None, "quant.initial_input_scale", value, expected)
        if quant.fake_quant_start >= steps > 0:
            expected = f"below train.steps ({steps}), or -1 to train without fake quant"
            yield f"quant.fake_quant_start: {quant.fake_quant_start}, expected {expected}"
        if quant.compute == "fp8_gemm" and quant.known():
            expected = f"auto or simulate: quant.scheme {quant.scheme} has no fp8 codes per tensor on both sides"
            yield from need(quant.has_fp8_gemm(), "quant.compute", quant.compute, expected)
            expected = f"auto or simulate: the fp8 GEMM gives bfloat16, model.dtype is {self.model.dtype}"
            yield from need(self.model.dtype == "bfloat16", "quant.compute", quant.compute, expected)
        others = learn.weight or learn.norm or learn.router
        if self.never_quantises() and (learn.weight_scale or learn.act_scale) and not others:
            yield "quant.fake_quant_start: -1 (never), expected 0 or more: only scales learn, and get no gradient"
        if learn.weight_scale and quant.known() and not (others or learn.act_scale or quant.linear_schemes()):
            yield (
                "learnable: only weight_scale is true, expected act_scale, weight or norm too: quant.scheme "
                f"{quant.scheme} has no weight scales"
            )
        both = quant.initial_input_scale is not None and quant.calibration_batches > 0
        if both and quant.stores_input_scales():
            yield (
                f"quant.initial_input_scale: {quant.initial_input_scale}, expected null or quant.calibration_batches 0 "
                f"(it is {quant.calibration_batches}): either is the source of scales that no PTQ checkpoint gives"
            )
        no_source = quant.scales is None and quant.calibration_batches == 0 and quant.initial_input_scale is None
        if quant.stores_input_scales() and no_source and quant.fake_quant_start == 0:
            yield (
                f"quant.calibration_batches: 0, expected 1 or more (or quant.scales, or quant.initial_input_scale): "
                f"nothing gives the activation scales of {quant.scheme}"
            )
        # A schedule that never reaches its peak is a mistake; a train.steps below 1 has been reported already.
        for key, taken in (("warmup_steps", self.optim.warmup_steps), ("decay_steps", self.optim.decay_steps)):
            yield from need(steps < 1 or taken <= steps, f"optim.{key}", taken, f"at most {steps} (train.steps)")
        both_ends = self.optim.warmup_steps + self.optim.decay_steps
        if max(self.optim.warmup_steps, self.optim.decay_steps) <= steps < both_ends:
            yield (
                f"optim.warmup_steps, optim.decay_steps: {both_ends} together, expected at most {steps} (train.steps)"
            )

    def validate_models(self) -> None:
        """Check that there are configurations of the models that the recipe names, whose weights nobody reads.

        Raises:
            RecipeError: names every one that is missing, one line each.
        """
        problems = list(_checkpoint_problems("model.path", self.model.path))
        if self.teacher_kind() == "model":
            problems += _checkpoint_problems("loss.teacher", str(self.loss.teacher))
        if problems:
            raise RecipeError("\n".join(problems))

    def validate_files(self) -> None:
        """Check that the files and directories which the recipe reads exist, relative to the current directory.

        Raises:
            RecipeError: names every one that is missing, one line each.
        """
        problems = list(_checkpoint_problems("model.path", self.model.path))
        if self.teacher_kind() == "cache":
            # The teacher itself need not be there any more.
            assert self.loss.teacher_cache is not None
            if not os.path.isfile(os.path.join(self.loss.teacher_cache, "manifest.json")):
                problems.append(
                    f"loss.teacher_cache: {not_there(self.loss.teacher_cache)}, expected a directory that "
                    "launch/cache_teacher.py wrote, with manifest.json"
                )
        elif self.teacher_kind() == "model":
            problems += _checkpoint_problems("loss.teacher", str(self.loss.teacher))
        if self.quant.scales is not None and not os.path.isdir(self.quant.scales):
            problems.append(f"quant.scales: {not_there(self.quant.scales)}, expected the directory of a PTQ checkpoint")
        for key, files in (("data.train", self.data.train), ("data.eval", self.data.eval)):
            for index, file in enumerate(files):
                if not os.path.isfile(file):
                    problems.append(f"{key}[{index}]: {not_there(file)}, expected a file")
        if problems:
            raise RecipeError("\n".join(problems))


def not_there(path: str) -> str:
    """A path as an error names it: relative ones with the directory that they are relative to."""
    return repr(path) if os.path.isabs(path) else f"{path!r} (in {os.getcwd()})"


def _checkpoint_problems(key: str, path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield f"{key}: {not_there(path)}, expected a directory with config.json (a local Hugging Face checkpoint)"
    elif not os.path.isfile(os.path.join(path, "config.json")):
        yield f"{key}: {not_there(path)}, expected config.json in that directory (a Hugging Face checkpoint)"
