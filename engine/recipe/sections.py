"""The recipe's sections on model, data, optimizer, loop, evaluation and export.

One field is one knob: the text below it is what ``--help`` shows. ``problems`` of a section yields a line per value
that is out of bounds by itself; what only several sections together show is in engine/recipe/contradictions.py.
"""

import math
import os
import re
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from engine.recipe.checks import at_least, need, pattern, positive
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
    attn_implementation: str = "auto"
    """Attention of transformers: sdpa, eager, flash_attention_2 (which needs its own package), ...
    auto: sdpa, or eager for the few models without it."""
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
    freeze: list[str] = field(default_factory=list)
    """Regexes; a Parameter whose whole name matches one stays as it is, whatever the switches say."""

    def problems(self) -> Iterator[str]:
        """One line per bad value of this section."""
        for index, regex in enumerate(self.freeze):
            yield from pattern(f"learnable.freeze[{index}]", regex)
        switches = {name: on for name, on in asdict(self).items() if name not in ("embedding", "freeze")}
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
    special_tokens: Literal["keep", "text", "refuse"] = "keep"
    """What becomes of a special token that people spelled out (<|im_end|> in an answer, <s> in HTML). keep: it is one,
    and counted; text: it is read as the text that it is; refuse: the line is an error."""
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
        yield from self.files_named_twice(os.path.abspath)
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
        """One line per way in which ``weights`` do not fit the files of data.train."""
        good = all(math.isfinite(weight) and weight > 0 for weight in weights)
        yield from need(good, "data.weights", weights, "numbers above 0 (leave a file out of data.train instead of 0)")
        same = len(weights) == len(self.train)
        yield from need(same, "data.weights", weights, f"{len(self.train)} of them, one per file of data.train")

    def files_named_twice(self, identity: Callable[[str], Hashable]) -> Iterator[str]:
        """One line per file that has been named before; ``identity`` tells files apart."""
        first: dict[Hashable, str] = {}
        for key, files in (("data.train", self.train), ("data.eval", self.eval)):
            for index, file in enumerate(files):
                here = f"{key}[{index}]"
                if (there := first.setdefault(identity(file), here)) != here:
                    yield (
                        f"{here}: {file!r} is {there}, expected each file once (data.weights says how often it is used)"
                    )

    def weights_by_file(self) -> dict[str, float] | None:
        """The weight of each file by its path, which is how a sample names its file; None: every sample once."""
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
        yield from need(0 <= self.seed < 2**32, "train.seed", self.seed, "0 to 4294967295, which every generator takes")
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
