"""The recipe's sections except ``quant``: model, parallel, learnable, adapter, data, loss, optim, train, schedule, eval
and export.

One field is one option: ``--help`` shows the text below it, and its metadata declares allowed values, and conditions
under which the option has an effect. Checks of several options together are in engine/config/config.py.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.config.errors import (
    FACTOR,
    LOSS_WEIGHT,
    RATE,
    Condition,
    at_least,
    derived,
    each,
    need,
    only_with,
    parse_size,
    path_or_name,
    regex,
    value_problems,
    values,
)
from engine.config.hub import HUB
from engine.config.quant import LEARNED_INPUTS, QUANTIZED_CACHE, QUANTIZED_WEIGHTS, QUANTIZES
from engine.losses.objective import TOP_K_KINDS, Distillation, NamedTokenLoss, Objective
from quant.formats.layouts import Layout
from quant.rules import pattern_problem

ExportFormat = Literal[Layout, "peft", "source"]

_DIRECTORY = path_or_name("a directory, or null")
_TRAINED_FILES = values("at least one file", lambda files: files and "" not in files)
_EVALUATED_FILES = values("files", lambda files: "" not in files)
_SHARES = values(
    "numbers above 0 (leave a file out of data.train instead of 0)",
    lambda weights: all(math.isfinite(weight) and weight > 0 for weight in weights),
)
_HELD_OUT = values(
    "a number of samples, or a share between 0 and 1",
    lambda given: 0 < given < 1 if isinstance(given, float) and given else given >= 0,
)
_SEED = values("0 to 4294967295, which every generator takes", lambda seed: 0 <= seed < 2**32)
_RESUME = values(
    "true, false, best, or a name like step_00001000",
    lambda name: isinstance(name, bool) or re.fullmatch(r"best|step_\d{8}", name),
)
_RANKS = values(
    "regular expressions that end soon, each with a rank of at least 1",
    lambda ranks: all(rank >= 1 and not pattern_problem(pattern) for pattern, rank in ranks.items()),
)
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_TRACKERS = values(
    f"a list of {', '.join(TRACKERS)}, each once",
    lambda names: set(names) <= {*TRACKERS} and len(set(names)) == len(names),
)
_SHARE = values("a number of at least 0 and below 1", lambda share: 0 <= share < 1)
_SIZE = values("a positive number and a unit, like 5GB, 500MB or 2GiB", parse_size)
_WHEN = values("like loss/lm < 2.5", lambda text: parse_condition(text) is not None)

_SERVER = values(
    "an address like http://localhost:8000", lambda url: re.fullmatch(r"https?://[^\s/]+/?", url) is not None
)
_TEMPERATURES = values("0 or 0.01 to 100, as vLLM raises lower ones", lambda t: t == 0 or 0.01 <= t <= 100)

CONDITION = re.compile(r"(?P<metric>\S+)\s*(?P<relation><=|>=|<|>)\s*(?P<value>\S+)")
# Parameter groups of engine.session.optimizer, which imports this module.
EVENT_RATES = ("weights", "embeddings", "norms", "biases", "weight_scales", "act_scales", "adapters")
DECAYING = ("weights", "embeddings", "adapters")
CODED = ("weights", "adapters")  # groups whose moments have 8 bits with optim.moments: 8bit
TeacherKind = Literal["none", "self", "cache", "model"]
"""Teacher of the distillation: none, the student without fake quant, a cache on disk, or another model in memory."""

_CHAT = Condition("data.kind is not text", lambda r: r.data.kind != "text")
_ON_POLICY = Condition("data.kind is on_policy", lambda r: r.data.kind == "on_policy")
_ADAPTERS = Condition("adapter.kind is lora", lambda r: r.adapter.on)
_BESIDE = Condition("adapter.kind is lora and adapter.merge false", lambda r: r.adapter.beside)
_TOP_K = Condition("loss.kd is kl_top_k or r_kl_top_k", lambda r: r.loss.kd in TOP_K_KINDS)
_TEMPERATURE = Condition("loss.kd is kd", lambda r: r.loss.kd == "kd")
_EMBEDDINGS = Condition(
    "learnable.weight and learnable.embedding are true", lambda r: r.learnable.weight and r.learnable.embedding
)
_CODED = Condition(
    "learnable.weight or learnable.router is true, or adapter.kind lora",
    lambda r: r.learnable.weight or r.learnable.router or r.adapter.on,
)
_NORMS = Condition("learnable.norm is true", lambda r: r.learnable.norm)
_ACT_SCALES = Condition(
    "learnable.act_scale or learnable.kv_scale is true", lambda r: r.learnable.act_scale or r.learnable.kv_scale
)
_WSD = Condition("optim.schedule is wsd", lambda r: r.optim.schedule == "wsd")
_RECOMPUTES = Condition("train.activation_checkpointing is true", lambda r: r.train.activation_checkpointing)
_GGUF = Condition("export.format is gguf", lambda r: r.export.format == "gguf")
_TEACHER = Condition("loss.kd_weight is above 0 (at the start, or by an event)", lambda r: r.distils())
_TEACHER_MODEL = Condition(
    "loss.teacher is a directory, and loss.kd_weight is above 0", lambda r: r.teacher_kind() == "model"
)
_EVALUATION = Condition("eval.every is above 0", lambda r: r.eval.every)
_OF_CACHE = only_with(QUANTIZES, QUANTIZED_CACHE)


@dataclass
class ModelRecipe:
    """The Hugging Face checkpoint to train."""

    path: str = field(metadata=path_or_name("a directory or a name on the Hugging Face Hub") | {HUB: "model"})
    """Directory of the checkpoint: config.json, safetensors files, tokenizer. Relative to the current directory. Or a
    name on the Hugging Face Hub, like Qwen/Qwen3-4B or Qwen/Qwen3-4B@main (a branch, tag or commit)."""
    trust_remote_code: bool = False
    """Run the Python files in the checkpoint directory. They can do anything: read them first."""
    attn_implementation: str = field(default="auto", metadata=path_or_name("a name like sdpa"))
    """Attention implementation of transformers: sdpa, eager, flash_attention_2 (which needs its own package), ...
    auto: sdpa, or eager for the few models without it."""
    load: Literal["direct", "rank0"] = "direct"
    """direct: each rank reads only its own slices of the files; rank0: rank 0 reads all and sends, which is slow."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the parameters and of the GEMMs; the optimizer's copies are fp32. float16, for GPUs without bfloat16, has
    dynamic loss scaling. float32 takes twice the memory and is for tests."""
    experts: Literal["stacked", "per_expert"] = "stacked"
    """Form of MoE layers in memory; files are the same. stacked: all experts of a layer in two parameters, with scales
    per expert; per_expert: a module per expert and projection, with many times the parameters and collectives."""


@dataclass
class ParallelRecipe:
    """Ranks that share the work on a row."""

    sequence: int = field(default=1, metadata=at_least(1))
    """Number of ranks that share each row. Each computes a part of the row's tokens, and keeps only their activations.
    Must divide the number of ranks and that of attention heads. 1: rows are not shared."""


@dataclass
class LearnableRecipe:
    """Trainable parameters; all others are frozen."""

    weight: bool = derived(lambda r: not (r.adapter.on or r.quant.decouples() or r.teacher_kind() == "self"))
    """Linear weights and biases, embeddings and lm_head. Costs gradients and optimizer state of the whole model. null:
    true; false with adapter.kind lora, quant.decoupled_scales or loss.teacher self."""
    embedding: bool = True
    """Embeddings and lm_head, if learnable.weight is true; false freezes them."""
    weight_scale: bool = derived(lambda r: not (r.adapter.beside or (r.adapter.on and r.adapter.base == "quantized")))
    """Scales of the quantized weights (theta of s0 * exp(theta)). null: true; false with adapter.merge false or
    adapter.base quantized."""
    act_scale: bool = field(default=False, metadata=only_with(QUANTIZES, LEARNED_INPUTS))
    """Static scales of the quantized inputs of layers. Layers then save each shared input for backward unquantized, not
    as 1-byte codes."""
    kv_scale: bool = derived(lambda r: r.learnable.act_scale and r.quant.quantizes_cache(), _OF_CACHE)
    """Scales of the quantized keys and values, with or without those of inputs. null: as learnable.act_scale."""
    norm: bool = False
    """Weights of the norms."""
    router: bool = False
    """MoE routers; their auxiliary loss, if transformers computes one for the model, is then added to the loss."""
    freeze: list[str] = field(default_factory=list, metadata=each(regex()))
    """Regexes; a Parameter whose whole name matches one is frozen, whatever the other options are."""

    def scales_alone(self) -> bool:
        """Tell if scales train, and no weights, norms or routers. Adapters, which another section sets, are not
        considered."""
        return (self.weight_scale or self.act_scale or self.kv_scale) and not (self.weight or self.norm or self.router)


@dataclass
class AdapterRecipe:
    """Adapters, which train in place of the weights."""

    kind: Literal["none", "lora"] = field(default="none", metadata=only_with(QUANTIZED_WEIGHTS))
    """lora: two low-rank matrices A and B per layer train, and the weights W are frozen. none: no adapters."""
    merge: bool = field(default=True, metadata=only_with(_ADAPTERS))
    """true: a layer quantizes the sum W + alpha / rank * B A in every forward, and the export contains the codes of
    the sum. false: the adapter stays separate from the quantized weight, Q(W) x + alpha / rank * B (A x), so that many
    adapters can be served on one model. The export is then that model, with the adapter in the folder adapter, for peft
    and vLLM."""
    base: Literal["weights", "quantized"] = field(default="weights", metadata=only_with(_ADAPTERS))
    """Form of the frozen quantized weights in memory. weights: in model.dtype. quantized: codes (QLoRA), half a byte
    per weight at 4 bits, which layers decode as they run. Results are the same bit for bit, and no rank stores a weight
    in model.dtype. The codes are read from a quantized model.path. An unquantized model.path is quantized as it is
    read, if its schemes have scales per row, group or block."""
    start: str | None = field(default=None, metadata=_DIRECTORY | only_with(_ADAPTERS) | {HUB: "adapter"})
    """Folder, or a name like model.path, of an adapter in peft's format, with the first values of A and B. null: B is
    0."""
    init: Literal["zeros", "error"] = field(default="zeros", metadata=only_with(_BESIDE))
    """zeros: B is 0, so that step 0 computes the quantized model. error, with adapter.merge false: B A is the best
    approximation of this rank to the quantization error W - Q(W) (the first step of LoftQ)."""
    rank: int = field(default=16, metadata=at_least(1) | only_with(_ADAPTERS))
    """Rows of A and columns of B."""
    alpha: float = field(default=32.0, metadata=FACTOR | only_with(_ADAPTERS))
    """Strength: B A is multiplied by alpha / rank."""
    rslora: bool = field(default=False, metadata=only_with(_ADAPTERS))
    """true: B A is multiplied by alpha / sqrt(rank) (rsLoRA), so that large ranks learn as fast as small ones."""
    dropout: float = field(default=0.0, metadata=_SHARE | only_with(_BESIDE))
    """For adapter.merge false: share of the elements of A's input that are set to 0 in a training step, drawn for each
    layer; the others are divided by 1 - dropout. The quantized weight gets the whole input."""
    targets: list[str] = field(default_factory=list, metadata=each(regex()) | only_with(_ADAPTERS))
    """Regexes; a quantized linear layer whose whole module name matches one gets an adapter. []: all except lm_head."""
    ranks: dict[str, int] = field(default_factory=dict, metadata=_RANKS | only_with(_ADAPTERS))
    """Ranks other than adapter.rank, by regex on the whole module name: {'.*\\.down_proj': 32}. The first match
    decides."""

    @property
    def on(self) -> bool:
        """True if there are adapters."""
        return self.kind != "none"

    @property
    def beside(self) -> bool:
        """True if there are adapters, which stay separate from the quantized weights (``merge`` is false)."""
        return self.on and not self.merge

    def scaling(self, rank: int) -> float:
        """Compute the factor of B A for an adapter of this rank: alpha / rank (Hu et al. 2021), or with ``rslora``
        alpha / sqrt(rank) (Kalajdzievski 2023)."""
        return self.alpha / (rank**0.5 if self.rslora else rank)


@dataclass
class DataRecipe:
    """Training samples and how they become batches."""

    train: list[str] = field(metadata=_TRAINED_FILES | {HUB: "data"})
    """Files to train on, relative to the current directory. For chat: JSONL, Parquet, or folders that save_to_disk of
    datasets wrote; for text: plain text. JSONL and text may be compressed with gzip or zstd. A data set on the Hugging
    Face Hub is a name like user/name, which means its training split, or hf://datasets/user/name/FILE."""
    weights: list[float] | None = field(default=None, metadata=_SHARES)
    """One weight per file of data.train: the file's share of an epoch's samples is its weight divided by the sum of the
    weights. The number of samples in an epoch stays the same, so an epoch may have some samples of a file several
    times, and others not at all. null: every sample once."""
    held_out: int | float = field(default=0, metadata=_HELD_OUT)
    """Samples of data.train to evaluate on instead, drawn with data.seed: a number, or below 1 a share. 0: none."""
    eval: list[str] = field(default_factory=list, metadata=_EVALUATED_FILES | only_with(_EVALUATION) | {HUB: "data"})
    """Files to evaluate on, in addition to data.held_out; they are read like the files of data.train."""
    kind: Literal["chat", "text", "mixed", "on_policy"] = "chat"
    """chat: conversations, loss on the assistant's turns; text: plain text, loss on every token; mixed: files named
    *.txt, *.txt.gz or *.txt.zst are text, and all others are chats. on_policy: chats whose last answer the student
    writes itself, on data.server, before each step."""
    server: str | None = field(default=None, metadata=_SERVER | only_with(_ON_POLICY))
    """Address, such as http://localhost:8000, of the vLLM server that writes the answers of data.kind on_policy. The
    schedule must publish to it."""
    new_tokens: int = field(default=512, metadata=at_least(1, 2**31 - 1) | only_with(_ON_POLICY))
    """Largest number of tokens of an answer that the student writes. A prompt has at most max_length less these."""
    temperature: float = field(default=1.0, metadata=_TEMPERATURES | only_with(_ON_POLICY))
    """Temperature at which the student writes; 1 samples from the distribution that is learned."""
    max_age: int = field(default=50, metadata=at_least(0) | only_with(_ON_POLICY))
    """Largest number of steps from the publish of the version that wrote an answer to the step that learns it. If the
    server's version is older, the run saves a checkpoint and ends."""
    server_seconds: float = field(default=600.0, metadata=at_least(1, 1500) | only_with(_ON_POLICY))
    """Seconds that a step waits for the server to start and to answer. After them the run saves a checkpoint and
    ends."""
    loss_on: Literal["last", "all"] = field(default="last", metadata=only_with(_CHAT))
    """last: of a chat only the last assistant turn is learned; all: every assistant turn."""
    fields: dict[str, str] | None = field(default=None, metadata=only_with(_CHAT))
    """Keys of JSONL files in another form, by our names: {input: question, output: answer}. null: the common forms
    (messages, conversations, input and output) are recognized. Only for chat."""
    max_length: int = field(default=2048, metadata=at_least(2, 2**31 - 1))
    """Tokens per sample, at most (chat) or exactly (text), and per packed row. Activation memory grows with it."""
    too_long: Literal["drop", "truncate"] = field(default="drop", metadata=only_with(_CHAT))
    """Chat samples longer than max_length. drop: they are left out; truncate: their beginning is cut off. Both are
    counted."""
    special_tokens: Literal["keep", "text", "refuse"] = "keep"
    """Special tokens spelled out in the data (<|im_end|> in an answer, <s> in HTML). keep: tokenized as special tokens,
    and counted; text: tokenized as plain text; refuse: the line is an error."""
    packing: bool = False
    """Fill rows of max_length tokens with several samples each, which do not see each other. false: a sample per row,
    padded to the longest sample of the micro-batch."""
    micro_batch_size: int = field(default=1, metadata=at_least(1))
    """Rows per forward and rank; a row is one sample, or several with data.packing. Activation memory grows with it."""
    seed: int = field(default=0, metadata=at_least(0))
    """Seed of the order of the samples, and of the choice of held-out samples."""
    show: int = field(default=0, metadata=at_least(0))
    """Samples of each file that a run prints before it trains, with what is learned of them marked; see also
    launch/show_data.py."""
    skip: list[str] = field(default_factory=list, metadata=values("lines like chat.jsonl:17", all) | only_with(_CHAT))
    """Lines that are not learned, named as errors name them: datasets/chat.jsonl:17. The order of all other samples
    stays, so a resumed run can leave out the lines of a step whose loss jumped."""

    cache: str | None = field(default=None, metadata=_DIRECTORY)
    """Directory in which the tokens of data files are kept: each file is tokenized once, in several processes, and read
    from there by all ranks, and by later runs. null: every rank tokenizes all files at every start."""

    def is_text(self, file: str) -> bool:
        """Tell if a file is read as plain text."""
        return self.kind == "text" or (self.kind == "mixed" and file.endswith((".txt", ".txt.gz", ".txt.zst")))

    def weights_by_file(self) -> dict[str, float] | None:
        """Map the path of each file of data.train to its weight; None without data.weights."""
        if self.weights is None:
            return None
        return {str(Path(file)): weight for file, weight in zip(self.train, self.weights, strict=True)}


@dataclass
class LossRecipe:
    """Losses: total = lm_weight * lm + kd_weight * kd; lm and kd are means over the valid tokens of a step."""

    lm_weight: float = field(default=1.0, metadata=LOSS_WEIGHT)
    """Weight of the language modeling loss."""
    kd_weight: float = field(default=0.0, metadata=LOSS_WEIGHT)
    """Weight of the distillation loss. If it is 0, and no event sets it, no teacher is loaded."""
    kd: Literal["kl", "rkl", "mse", "cakld", "kd", "kl_top_k", "r_kl_top_k"] = derived(
        lambda r: "cakld" if r.loss.teacher_cache is None else "kl_top_k"
    )
    """kl: KL(teacher||student); rkl: KL(student||teacher); cakld: both, mixed by the teacher's confidence in the label;
    kd: kl at loss.temperature; mse: squared difference of the logits; kl_top_k: kl on the teacher's loss.top_k most
    likely tokens; r_kl_top_k: rkl on the student's. engine/losses/objective.py has the formulas. null: cakld; kl_top_k
    with loss.teacher_cache."""
    temperature: float = field(default=1.0, metadata=FACTOR | only_with(_TEMPERATURE))
    """Temperature of loss.kd kd; the other kinds have no temperature."""
    top_k: int | None = field(default=None, metadata=at_least(1))
    """Number of tokens, such as 100, for kl_top_k, r_kl_top_k and each position in launch/cache_teacher.py's cache."""
    tail: bool = field(default=False, metadata=only_with(_TOP_K))
    """For kl_top_k and r_kl_top_k: one more bucket for all other tokens, instead of renormalizing without them."""
    teacher: str | None = field(default=None, metadata=_DIRECTORY | {HUB: "model"})
    """Directory of the teacher's checkpoint, or a name like model.path; often the same. The teacher is frozen, and
    sharded under stage 3. self: the student without fake quant, which takes no memory and needs frozen weights, norms
    and routers."""
    teacher_weights: Literal["full", "int8"] = field(default="full", metadata=only_with(_TEACHER_MODEL))
    """full: the teacher's weights are in model.dtype. int8: those of its linear layers are 8-bit codes with a scale per
    output, in half the memory of bf16; each layer decodes its own. lm_head, embeddings and routers stay full."""
    teacher_cache: str | None = field(default=None, metadata=_DIRECTORY)
    """Directory that launch/cache_teacher.py wrote: training reads the teacher's loss.top_k tokens from there and loads
    no teacher. Only for kl_top_k."""
    diagnostics_every: int = derived(
        lambda r: 10 if r.teacher_kind() in ("model", "self") else 0, at_least(0) | only_with(_TEACHER)
    )
    """Steps between two measurements of kd/forward_kl, kd/backward_kl and kd/top1_agreement, whatever loss.kd is; 0:
    never. Needs a teacher in memory. null: 10 with a teacher in memory, else 0."""
    chunk_tokens: int | None = field(default=None, metadata=at_least(1))
    """Tokens whose logits exist at once, of student and teacher: 2 * chunk_tokens * vocabulary * 2 bytes in bf16.
    null: 4096 on a GPU, where few large GEMMs are faster, and 512 on a CPU."""

    def named_teacher(self) -> TeacherKind:
        """Return the kind of teacher that this section names, used or not; :meth:`Recipe.teacher_kind` is "none" if the
        run does not distill."""
        if self.teacher_cache is not None:
            return "cache"  # the teacher that wrote it may be named too
        if self.teacher == "self":
            return "self"
        return "model" if self.teacher else "none"

    def objective(self, *, lm: float, kd: float, token_losses: tuple[NamedTokenLoss, ...] = ()) -> Objective:
        """Build the objective with this section's distillation loss and chunks, the weights ``lm`` and ``kd`` (events
        may change them), and a user's own losses."""
        distillation = Distillation(self.kd, self.temperature, self.top_k or 1, self.tail)
        return Objective(lm, kd, distillation, token_losses, self.chunk_tokens)


@dataclass
class OptimRecipe:
    """AdamW and the learning-rate schedule."""

    lr: float = field(default=1e-5, metadata=RATE)
    """Peak learning rate of weights, biases and routers, and of groups whose own rate is null."""
    embedding_lr: float | None = field(default=None, metadata=RATE | only_with(_EMBEDDINGS))
    """Peak learning rate of embeddings and lm_head. null: lr."""
    norm_lr: float | None = field(default=None, metadata=RATE | only_with(_NORMS))
    """Peak learning rate of the norms. null: lr."""
    scale_lr: float = field(default=1e-3, metadata=RATE)
    """Peak learning rate of the weight scales; relative, since theta is a logarithm."""
    act_scale_lr: float | None = field(default=None, metadata=RATE | only_with(_ACT_SCALES))
    """Peak learning rate of the scales of inputs, keys and values. null: scale_lr."""
    adapter_lr: float | None = field(default=None, metadata=RATE | only_with(_ADAPTERS))
    """Peak learning rate of adapters, often ten times the rate for weights. null: lr."""
    min_lr_ratio: float = field(default=0.1, metadata=values("between 0 and 1", lambda share: 0 <= share <= 1))
    """The learning rates end at this share of their peaks (linear, cosine, wsd)."""
    warmup_ratio: float = field(default=0.0, metadata=values("between 0 and 1", lambda share: 0 <= share <= 1))
    """Share of train.steps that warm up, rounded up, in place of optim.warmup_steps."""
    warmup_steps: int = field(default=0, metadata=at_least(0))
    """Optimizer steps of linear warm-up, from 1/warmup_steps of the rate. Scales warm up again if the fake quant of
    all of them starts again."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Course of the learning rates after the warm-up. wsd: constant until the last decay_steps, then linear."""
    decay_steps: int = derived(lambda r: r.optim.default_decay(r.train.steps), at_least(0) | only_with(_WSD))
    """Optimizer steps of decay at the end, for schedule wsd. null: a tenth of train.steps, at least 1."""
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    """Weight decay of weights, embeddings and adapters. Scales, norms and biases never decay."""
    betas: tuple[float, float] = field(
        default=(0.9, 0.95),
        metadata=values("two numbers in [0, 1)", lambda betas: all(0 <= beta < 1 for beta in betas)),
    )
    """AdamW's decay rates of the first and second moment."""
    eps: float = field(default=1e-8, metadata=at_least(1e-30))
    """AdamW's eps. If fp32 rounded it to 0, every weight with a gradient of 0 would become NaN."""
    moments: Literal["float32", "8bit"] = field(default="float32", metadata=only_with(_CODED))
    """AdamW's moments of linear weights and adapters: 8 bytes per element, or with 8bit about 2, which changes updates
    by about 10%. Embeddings, norms and scales keep float32."""
    grad_clip: float = field(default=1.0, metadata=at_least(0))
    """Largest global gradient norm; 0 disables clipping."""

    def warmup(self, steps: int) -> int:
        """Return the warm-up steps of a run of ``steps`` steps."""
        # 1e-9 absorbs rounding errors (0.07 * 100 is more than 7). Neither is checked yet: steps may be any integer.
        share = self.warmup_ratio if 0 < self.warmup_ratio <= 1 else 0
        return self.warmup_steps or math.ceil(share * min(steps, 2**62) - 1e-9)

    def default_decay(self, steps: int) -> int:
        """Compute the default of decay_steps: a tenth of ``steps``, at least 1, but only steps after the warm-up; 0 if
        the schedule is not wsd."""
        return max(0, min(max(1, steps // 10), steps - self.warmup(steps))) if self.schedule == "wsd" else 0


@dataclass
class TrainRecipe:
    """The loop: how long, how much per step, what is written and when."""

    steps: int = field(default=0, metadata=at_least(1))
    """Optimizer steps. 0: as many as train.epochs takes."""
    epochs: float = field(default=0.0, metadata=at_least(0))
    """Passes over the training samples, in place of train.steps; may have a fraction. The last step is filled up."""
    gradient_accumulation_steps: int = field(default=1, metadata=at_least(1))
    """Micro-batches per rank and optimizer step."""
    seed: int = field(default=0, metadata=_SEED)
    """Seed of everything random except what data.seed decides."""
    activation_checkpointing: bool = False
    """Recompute each block in backward: memory of one block's activations instead of all, a third more compute."""
    activation_offload: bool = field(default=False, metadata=only_with(_RECOMPUTES))
    """Keep the inputs of the recomputed blocks (tokens * hidden size * 2 bytes each) in host memory until backward.
    Needs activation_checkpointing."""
    compile: bool = False
    """torch.compile each decoder layer: the first steps take minutes longer. Not under ZeRO stage 3."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"], metadata=_TRACKERS)
    """Trackers that get the metrics of metrics.jsonl in output_dir, too: tensorboard (files in output_dir), and wandb,
    mlflow and trackio, which need their own packages. []: none."""
    log_every: int = field(default=1, metadata=at_least(1))
    """Steps between two points of the curves."""
    quant_stats_every: int = field(default=50, metadata=at_least(0))
    """Steps between two measurements of the quantization for the curves: scales, clipped fractions, errors by layer,
    and the gradient norm of the scales. 0: never."""
    checkpoint_every: int = field(default=0, metadata=at_least(0))
    """Steps between two training checkpoints (weights, optimizer state, data cursor); 0: none."""
    resume: bool | str = field(default=False, metadata=_RESUME)
    """Continue from a training checkpoint of output_dir: true for the latest, best, or a name like step_00001000."""
    keep_checkpoints: int = field(default=2, metadata=at_least(1))
    """Latest training checkpoints to keep, besides the best; each takes 12 to 14 bytes per trained parameter, or
    6 to 8 with optim.moments 8bit."""
    max_skipped_steps: int = field(default=10, metadata=at_least(1))
    """Steps whose loss or gradients are not finite are skipped. The run ends after this many such steps in a row."""


@dataclass
class EventRecipe:
    """One change during the run: its time (exactly one of at, every, when), and at least one of the other options."""

    at: int | None = field(default=None, metadata=at_least(0))
    """Once, when this many optimizer steps are done and before the next step begins."""
    every: int | None = field(default=None, metadata=at_least(1))
    """Repeatedly, each time after this many optimizer steps."""
    when: str | None = field(default=None, metadata=_WHEN)
    """Once, after the first step at which this holds: a loss or a result of the evaluation (loss/total, loss/lm,
    eval/perplexity, ...), one of < <= > >=, and a number."""
    fake_quant: bool | Literal["weights", "activations"] | None = None
    """true: on for weights and activations; weights, activations: on for only these; false: off."""
    layers: str | None = field(default=None, metadata=regex())
    """Regex: fake_quant switches only the layers whose whole module name matches."""
    observe: bool | None = None
    """true: observers measure the inputs, after a reset; false: they stop. With fake_quant false they run unless this
    is false."""
    freeze_scales: bool | None = None
    """true: learned scales are frozen from now on; false: they train again."""
    lr: dict[str, float] | None = None
    """Peak learning rates from now on, by group: weights, embeddings, norms, biases, weight_scales, act_scales,
    adapters."""
    loss: dict[str, float] | None = None
    """Weights of the losses from now on: lm, kd."""

    def problems(self, key: str) -> Iterator[str]:
        """Yield one line per contradiction in this event; ``key`` is its path in the recipe, like ``schedule[0]``."""
        times = {name: getattr(self, name) for name in ("at", "every", "when") if getattr(self, name) is not None}
        if len(times) != 1:
            yield f"{key}: {times or 'no time'}, expected exactly one of at, every, when"
        actions = (self.fake_quant, self.observe, self.freeze_scales, self.lr, self.loss)
        if all(action is None for action in actions):
            yield f"{key}: nothing happens, expected one of fake_quant, observe, freeze_scales, lr, loss"
        if self.layers is not None:
            yield from need(self.fake_quant is not None, f"{key}.layers", self.layers, "fake_quant beside it")
        for name, known, declared in (("lr", EVENT_RATES, RATE), ("loss", ("lm", "kd"), LOSS_WEIGHT)):
            given = getattr(self, name)
            yield from need(given is None or len(given) > 0, f"{key}.{name}", given, f"one of {', '.join(known)}")
            for what, value in (getattr(self, name) or {}).items():
                yield from need(what in known, f"{key}.{name}", what, f"one of {', '.join(known)}")
                yield from value_problems(f"{key}.{name}.{what}", value, declared)


def parse_condition(text: str) -> tuple[str, str, float] | None:
    """Parse metric, relation and number of a condition like ``loss/lm < 2.5``; None if it is not a condition."""
    match = CONDITION.fullmatch(text.strip())
    try:
        number = float(match["value"]) if match else math.nan
    except ValueError:
        return None
    return (match["metric"], match["relation"], number) if match and math.isfinite(number) else None


@dataclass
class EvalRecipe:
    """Evaluation during training, on held-out samples (data.held_out, data.eval), with serving numerics."""

    every: int = field(default=0, metadata=at_least(0))
    """Optimizer steps between two evaluations; 0: none. A run also evaluates after the last step and, unless it never
    quantizes, before the first step. train.checkpoint_every must be a multiple of eval.every, so that each checkpoint
    is evaluated."""
    best: Literal["lm", "kd", "total"] = field(default="lm", metadata=only_with(_EVALUATION, _TEACHER))
    """Loss whose smallest value selects the best training checkpoint, which is kept in addition to the latest ones."""


@dataclass
class ExportRecipe:
    """The compressed checkpoint at the end."""

    enabled: bool = True
    """Write the compressed checkpoint when training ends."""
    dir: str | None = field(default=None, metadata=_DIRECTORY)
    """Directory to write it to. null: export in output_dir."""
    format: ExportFormat = derived(lambda r: "compressed")  # noqa: RUF009 (the alias hides a Literal)
    """source: the format of the quantized checkpoint in model.path or quant.start, the default with quant.scheme source
    and without quant.start, if this format is written. compressed, the default otherwise: compressed-tensors, which
    transformers, vLLM and SGLang read. vllm_fp8: the same tensors under vLLM's own fp8 configuration (fp8_static and
    fp8_block). gpt_oss: gpt-oss with its experts in mxfp4, in the published form. modelopt: NVIDIA Model Optimizer's
    format of fp8 and NVFP4, for vLLM, SGLang and TensorRT-LLM. dequantized: a plain checkpoint of fake-quantized
    weights. gguf: one file for llama.cpp (q4_0, q8_0, w4a16_g32, w8a16_g32, mxfp4, nvfp4); it needs export.template.
    mlx: for mlx-lm (integers in groups of 32, 64 or 128, MXFP4, MXFP8). executorch: torchao's tensors, to be lowered to
    XNNPACK (8da4w). peft: only the adapter of a run with adapter.merge false, for the quantized checkpoint in
    model.path."""
    template: str | None = field(default=None, metadata=path_or_name("a GGUF file") | only_with(_GGUF))
    """For export.format gguf: a GGUF file of the base model, made by llama.cpp's convert_hf_to_gguf.py. The export
    copies its metadata and vocabulary."""
    max_shard_size: str = field(default="5GB", metadata=_SIZE)
    """Largest safetensors file, like 5GB, 500MB or 2GiB."""
