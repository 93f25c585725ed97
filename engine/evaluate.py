"""Perplexity of a text: per token, word and byte, and bits per byte.

The text is cut into windows of ``length`` tokens that do not overlap; each token is predicted from those before it in
its window, and the first from one token of context (the last of the window before; at the start of the text the
tokenizer's BOS or EOS), so that every token is predicted exactly once. This is the rolling log-likelihood of
lm-evaluation-harness (get_rolling_token_windows with context_len=1), and so are the definitions: with L the sum of the
log-likelihoods in nats,

    per token exp(-L / tokens), per word exp(-L / words), per byte exp(-L / bytes), bits per byte -L / bytes / ln 2

where words are what white space separates and bytes are those of the UTF-8 text.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from data.samples import IGNORE
from engine.setup import initialize_frozen
from model.build import build_model
from model.compressed import load_compressed
from model.load import load_weights
from model.ranks import errors_on_all_ranks, is_main, rank, reduce_over_ranks, world_size

BLOCK_ELEMENTS = 2**24  # of the fp32 copies of logits

Forward = Callable[[Tensor, Tensor], Tensor]
"""input_ids [B, T], attention_mask [B, T] -> logits [B, T, V]"""


@dataclass(frozen=True)
class Perplexity:
    """Perplexities of one text."""

    tokens: int
    words: int
    bytes: int
    log_likelihood: float
    """Sum over the tokens, nats."""

    @property
    def per_token(self) -> float:
        """exp of the mean negative log-likelihood per token."""
        return math.exp(-self.log_likelihood / self.tokens)

    @property
    def per_word(self) -> float:
        """exp of the negative log-likelihood per white-space separated word."""
        return math.exp(-self.log_likelihood / self.words)

    @property
    def per_byte(self) -> float:
        """exp of the negative log-likelihood per UTF-8 byte."""
        return math.exp(-self.log_likelihood / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood per byte in bits; compares models with different tokenizers."""
        return -self.log_likelihood / self.bytes / math.log(2)


@dataclass(frozen=True)
class EvalText:
    """A text to evaluate on: its tokens, and the words and bytes that they stand for."""

    token_ids: list[int]
    words: int
    bytes: int
    prefix: int
    """The token that stands before the text."""


def read_eval_text(path: str | Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> EvalText:
    """Read and tokenise a UTF-8 text file, or its first ``max_tokens`` tokens.

    Raises:
        ValueError: the file is empty or not UTF-8, or the tokenizer has neither BOS nor EOS.
    """
    try:
        # Without newline translation: bytes are those of the file.
        text = Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file ({error})") from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if max_tokens is not None and len(ids) > max_tokens:
        ids = ids[:max_tokens]
        text = str(tokenizer.decode(ids))
    if not ids or not text.strip():
        raise ValueError(f"{path}: no text to evaluate on")
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise ValueError("the tokenizer has neither a BOS nor an EOS token to predict the first token from")
    return EvalText(ids, len(re.split(r"\s+", text.strip())), len(text.encode()), prefix)


@torch.no_grad()
def evaluate_text(
    forward: Forward, text: EvalText, *, length: int, batch_size: int = 1, device: torch.device | None = None
) -> Perplexity:
    """Perplexity of a text, its windows shared out over the ranks; a collective.

    Every rank makes the same number of forward calls, as a ZeRO-3 forward is a collective itself: a rank that has run
    out of windows repeats one whose tokens do not count.

    Args:
        forward: input_ids, attention_mask -> logits; in eval mode.
        text: what to predict.
        length: tokens per window; at most the model's context.
        batch_size: windows per forward.
        device: where the batches go, CPU by default.
    """
    windows = _windows(text, length)
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    rounds = math.ceil(len(batches) / world_size())
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for index in range(rounds):
        mine = index * world_size() + rank()
        inputs, labels, mask = _collate(batches[mine] if mine < len(batches) else batches[0])
        if mine >= len(batches):
            labels.fill_(IGNORE)
        inputs, labels, mask = (tensor.to(device) for tensor in (inputs, labels, mask))
        total += torch.stack([_nll(forward(inputs, mask), labels), (labels != IGNORE).sum().double()])
    nll, tokens = reduce_over_ranks(total).tolist()
    assert tokens == len(text.token_ids), f"{tokens} tokens were predicted of {len(text.token_ids)}"
    return Perplexity(int(tokens), text.words, text.bytes, -nll)


def _nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the negative log-likelihoods of the labels, fp64; ``logits`` [B, T, V] become fp32 some rows at a time."""
    rows = max(1, BLOCK_ELEMENTS // logits.shape[-1])
    blocks = zip(logits.flatten(0, 1).split(rows), labels.flatten().split(rows), strict=True)
    return torch.stack(
        [F.cross_entropy(some.float(), them, ignore_index=IGNORE, reduction="sum").double() for some, them in blocks]
    ).sum()


def _windows(text: EvalText, length: int) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) per window: inputs are the targets' predecessors."""
    shifted = [text.prefix, *text.token_ids[:-1]]
    return [(shifted[i : i + length], text.token_ids[i : i + length]) for i in range(0, len(text.token_ids), length)]


def _collate(windows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """inputs, labels, attention mask, [B, T] int64, padded right."""
    longest = max(len(inputs) for inputs, _ in windows)
    shape = (len(windows), longest)
    inputs = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORE)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, (ids, targets) in enumerate(windows):
        inputs[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(targets)
        mask[row, : len(ids)] = 1
    return inputs, labels, mask


def load_for_evaluation(
    directory: str | Path, dtype: torch.dtype, device: torch.device, *, sharded: bool = False
) -> nn.Module:
    """A checkpoint, plain or compressed, as something to call; a collective.

    Args:
        directory: the checkpoint. A compressed one computes with codes and scales as in training.
        dtype: of weights and computation.
        device: where the model or its partitions go.
        sharded: partition the weights over the ranks (ZeRO-3); plain checkpoints only.

    Raises:
        RankError: on every rank: a damaged checkpoint, or a compressed one that is to be sharded.
    """
    with errors_on_all_ranks(OSError, ValueError):
        config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
        compressed = "quantization_config" in config
        if compressed and sharded:
            raise ValueError(
                f"{directory} is compressed: evaluate it without sharding, every rank holds the whole of it"
            )
    if compressed:
        model, _ = load_compressed(directory, dtype=dtype, device=device)
        return model
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3 if sharded else 0},
    }
    model = build_model(directory, ds_config, dtype=dtype, device=device)
    load_weights(model, directory, progress=is_main())
    return initialize_frozen(model, ds_config)
