"""The recipe's sections on model, data, optimizer, loop, evaluation and export.

One field is one option: the text below it is what ``--help`` shows, and its metadata says which values it takes. What
several options together show is in engine/config/contradictions.py.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.config.errors import RATE, at_least, each, not_empty, regex, size, values
from quant.formats.layouts import Layout

ExportFormat = Literal[Layout, "peft"]

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


@dataclass
class ModelRecipe:
    """The Hugging Face checkpoint to train."""

    path: str = field(metadata=not_empty("a directory"))
    """Directory of the checkpoint: config.json, safetensors files, tokenizer. Relative to the current directory."""
    trust_remote_code: bool = False
    """Run the Python files that the checkpoint directory brings along. They can do anything: read them first."""
    attn_implementation: str = field(default="auto", metadata=not_empty("a name like sdpa"))
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


@dataclass
class LearnableRecipe:
    """What the optimizer trains; everything else is frozen."""

    weight: bool = True
    """Linear weights and biases, embeddings and lm_head. Costs gradients and optimizer state of the whole model. Must
    be false where adapters train in their place."""
    embedding: bool = True
    """Embeddings and lm_head, where weight is on; false freezes them."""
    weight_scale: bool = True
    """Scales of the quantized weights (theta of s0 * exp(theta))."""
    act_scale: bool = False
    """Static scales of the quantized activations, keys and values too. Keeps each shared input in full for backward,
    not 1-byte codes."""
    norm: bool = False
    """Weights of the norms."""
    router: bool = False
    """MoE routers; their auxiliary loss is then added to the loss."""
    freeze: list[str] = field(default_factory=list, metadata=each(regex()))
    """Regexes; a Parameter whose whole name matches one stays as it is, whatever the switches say."""

    def scales_alone(self) -> bool:
        """Whether scales train and nothing else does."""
        return (self.weight_scale or self.act_scale) and not (self.weight or self.norm or self.router)


@dataclass
class DataRecipe:
    """Training samples and how they become batches."""

    train: list[str] = field(metadata=values("at least one file", lambda files: files and "" not in files))
    """Files to train on, JSONL for chat, plain text for text. Relative to the current directory."""
    weights: list[float] | None = field(default=None, metadata=_SHARES)
    """One per file of data.train: the file's share of an epoch's samples is its weight over their sum. An epoch keeps
    its number of samples: a file may give each of its samples several times, or only some. null: every sample once."""
    held_out: int | float = field(default=0, metadata=_HELD_OUT)
    """Samples taken out of data.train to evaluate on, drawn with data.seed: a number, or below 1 a share. 0: none."""
    eval: list[str] = field(default_factory=list, metadata=values("files", lambda files: "" not in files))
    """Files to evaluate on, beside the samples held out; read as those of data.train are."""
    kind: Literal["chat", "text"] = "chat"
    """chat: JSONL conversations, loss on the assistant's turns; text: plain text, loss on every token."""
    loss_on: Literal["last", "all"] = "last"
    """last: of a chat only the last assistant turn is learned; all: every assistant turn."""
    fields: dict[str, str] | None = None
    """For JSONL with keys of its own: {input: question, output: answer}. null: keys are recognized. Only for chat."""
    max_length: int = field(default=2048, metadata=at_least(2, 2**31 - 1))
    """Tokens per sample at most (chat) or exactly (text), and of a packed row. Activation memory grows with it."""
    too_long: Literal["drop", "truncate"] = "drop"
    """A chat sample above max_length is dropped, or loses its beginning; both are counted."""
    special_tokens: Literal["keep", "text", "refuse"] = "keep"
    """What becomes of a special token that people spelled out (<|im_end|> in an answer, <s> in HTML). keep: it is one,
    and counted; text: it is read as the text that it is; refuse: the line is an error."""
    packing: bool = False
    """Fill rows of max_length tokens with several samples each, which do not see each other. false: a sample per row,
    padded to the longest of the micro-batch."""
    micro_batch_size: int = field(default=1, metadata=at_least(1))
    """Rows per forward and rank: samples, or with data.packing rows of several. Activation memory grows with it."""
    seed: int = field(default=0, metadata=at_least(0))
    """Seed of the order of the samples, and of the choice of those held out."""

    def weights_by_file(self) -> dict[str, float] | None:
        """The weight of each file by its path, which is how a sample names its file; None: every sample once."""
        if self.weights is None:
            return None
        return {str(Path(file)): weight for file, weight in zip(self.train, self.weights, strict=True)}


@dataclass
class OptimRecipe:
    """AdamW and the learning rate's way over the steps."""

    lr: float = field(default=1e-5, metadata=RATE)
    """Peak learning rate of weights, biases and routers, and of what has no rate of its own below."""
    embedding_lr: float | None = field(default=None, metadata=RATE)
    """Peak learning rate of embeddings and lm_head. null: lr."""
    norm_lr: float | None = field(default=None, metadata=RATE)
    """Peak learning rate of the norms. null: lr."""
    scale_lr: float = field(default=1e-3, metadata=RATE)
    """Peak learning rate of the weight scales; relative, since theta is a logarithm."""
    act_scale_lr: float | None = field(default=None, metadata=RATE)
    """Peak learning rate of the activation scales. null: scale_lr."""
    adapter_lr: float | None = field(default=None, metadata=RATE)
    """Peak learning rate of adapters, which often take ten times that of weights. null: lr."""
    min_lr_ratio: float = field(default=0.1, metadata=values("between 0 and 1", lambda share: 0 <= share <= 1))
    """The learning rates end at this share of their peaks (linear, cosine)."""
    warmup_steps: int = field(default=0, metadata=at_least(0))
    """Optimizer steps of linear warm-up from 0; scales warm up anew whenever their fake quant starts."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Course of the learning rates after the warm-up. wsd: constant until the last decay_steps, then linear."""
    decay_steps: int = 0
    """Optimizer steps of decay at the end, for schedule wsd."""
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    """Decay of weights. Scales, norms and biases never decay."""
    betas: tuple[float, float] = field(
        default=(0.9, 0.95),
        metadata=values("two numbers in [0, 1)", lambda betas: all(0 <= beta < 1 for beta in betas)),
    )
    """AdamW's decay rates of the first and second moment."""
    eps: float = field(default=1e-8, metadata=at_least(1e-30))
    """AdamW's eps. What fp32 rounds to 0 would make every weight without a gradient NaN."""
    grad_clip: float = field(default=1.0, metadata=at_least(0))
    """Largest global gradient norm; 0 disables clipping."""


@dataclass
class TrainRecipe:
    """The loop: how long, how much per step, what is written and when."""

    steps: int = field(metadata=at_least(1))
    """Optimizer steps."""
    gradient_accumulation_steps: int = field(default=1, metadata=at_least(1))
    """Micro-batches per rank and optimizer step."""
    seed: int = field(default=0, metadata=_SEED)
    """Seed of everything random but the order of the samples."""
    activation_checkpointing: bool = False
    """Recompute each block in backward: memory of one block's activations instead of all, a third more compute."""
    activation_offload: bool = False
    """Keep the inputs of the recomputed blocks (tokens * hidden size * 2 bytes each) in host memory until backward.
    Needs activation_checkpointing."""
    compile: bool = False
    """torch.compile each decoder layer: the first steps take minutes longer. Not under ZeRO stage 3."""
    log_every: int = field(default=1, metadata=at_least(1))
    """Steps between two log lines and TensorBoard points."""
    quant_stats_every: int = field(default=50, metadata=at_least(0))
    """Steps between two looks at the quantization for TensorBoard: scales, clipped fractions, errors by layer, and the
    scales' share of the grad norm. 0: never."""
    checkpoint_every: int = field(default=0, metadata=at_least(0))
    """Steps between two training checkpoints (weights, optimizer state, data cursor); 0: none."""
    resume: bool | str = field(default=False, metadata=_RESUME)
    """Continue from a training checkpoint of output_dir: true for the latest, best, or a name like step_00001000."""
    keep_checkpoints: int = field(default=2, metadata=at_least(1))
    """Latest training checkpoints to keep, besides the best; each holds 12 to 14 bytes per trained parameter."""
    max_skipped_steps: int = field(default=10, metadata=at_least(1))
    """The run ends after so many steps in a row whose loss or gradients are not finite; each is left out."""


@dataclass
class EvalRecipe:
    """Evaluation during training, on held-out samples (data.held_out, data.eval), as the model would be served."""

    every: int = field(default=0, metadata=at_least(0))
    """Optimizer steps between two evaluations; also after the last step, and before the first unless nothing is ever
    quantized. 0: none. Training checkpoints have to fall on evaluations: train.checkpoint_every is a multiple of it."""
    best: Literal["lm", "kd", "total"] = "lm"
    """The loss whose smallest value makes a training checkpoint the best one, which is kept beside the latest."""


@dataclass
class ExportRecipe:
    """The compressed checkpoint at the end."""

    enabled: bool = True
    """Write the compressed checkpoint when training ends."""
    dir: str | None = None
    """Where to write it. null: export in output_dir."""
    format: ExportFormat = "compressed"
    """compressed: compressed-tensors, which transformers, vLLM and SGLang read. vllm_fp8: the same tensors under vLLM's
    own fp8 configuration (fp8_static and fp8_block). gpt_oss: its experts in mxfp4 as it is published. dequantized: a
    plain checkpoint of fake-quantized weights. gguf: one file for llama.cpp (q4_0, q8_0, w4a16_g32, w8a16_g32); it
    needs export.template. mlx: affine groups for mlx-lm (integers in groups of 32 or 128). executorch: torchao's
    tensors, to be lowered to XNNPACK (8da4w). peft: of a run with adapter.merge false the adapter alone, for the
    quantized checkpoint in model.path."""
    template: str | None = None
    """For export.format gguf: a GGUF file of the base model, which llama.cpp's convert_hf_to_gguf.py makes. Metadata
    and vocabulary are its own."""
    max_shard_size: str = field(default="5GB", metadata=size())
    """Largest safetensors file, like 5GB, 500MB or 2GiB; rank 0 holds one such file in memory while writing."""
