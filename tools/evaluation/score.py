"""Score tokens by log-likelihood, many windows at a time: the basis of perplexities and multiple-choice tasks.

lm_head is removed from the model, and called on the hidden states of some positions at a time. So the logits of a whole
batch never exist: for 4 windows of 1,024 tokens at V = 152k, [B, T, V] takes 1.2 GB in bf16, and a softmax needs two
fp32 copies. No logits are computed for positions without targets, and a quantized head needs no special case.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from data.samples import IGNORE
from engine.losses.chunked import row_blocks
from engine.losses.objective import forward_kl
from engine.session.optimizer import initialize_frozen
from model.console import progress_bar
from model.head import HiddenStates, embedding_rows, settle_function, take_out_head
from model.ranks import RankError, errors_on_all_ranks, rank, reduce_over_ranks, world_size
from model.zero import gathered

CHUNK_TOKENS = 512  # logits computed at a time


class Window(NamedTuple):
    """Token ids of one forward: ``inputs``, and ``targets``, the next tokens of the last ``len(targets)`` inputs."""

    inputs: list[int]
    targets: list[int]


class Score(NamedTuple):
    """Score of a window's targets."""

    log_likelihood: float  # sum over the targets, in nats
    greedy: bool  # each target is the most likely token
    kl: float  # sum of KL(reference || model) over the targets' positions, in nats; 0 without a reference
    agreed: float  # number of positions where the reference's most likely token is the model's, too


def rolling_windows(token_ids: list[int], prefix: int, length: int) -> list[Window]:
    """Cut a text into windows of ``length`` tokens in which each token is a target once.

    Each window begins with one token of context: the token before its first target, or ``prefix`` at the start of the
    text. The last window of a text of several windows begins with more context, so that it has full length. This is the
    rolling log-likelihood of lm-evaluation-harness (get_rolling_token_windows with context_len=1, as its Hugging Face
    models call it).
    """
    stream = [prefix, *token_ids]
    windows = []
    for start in range(0, len(token_ids), length):
        targets = token_ids[start : start + length]
        stop = start + len(targets)
        windows.append(Window(stream[max(0, stop - length) : stop], targets))
    return windows


@dataclass
class ScoringModel:
    """Frozen model that scores windows: its body without lm_head, and lm_head."""

    body: nn.Module  # the model (an engine under stage 3), which returns the input of ``head`` as its logits
    head: nn.Module  # lm_head, which is no part of ``body``; under stage 3 it is gathered only to compute logits
    device: torch.device  # of the batches
    vocabulary: int  # number of logits, as configured
    context: int | None  # maximum length in tokens, None if the configuration has none
    head_proxy: HiddenStates  # takes the place of ``head`` in ``body`` and returns its input
    tokens: int  # number of token ids that the model has embeddings of

    @torch.no_grad()
    def hidden_states(self, batch: "WindowBatch") -> Tensor:
        """Compute the input of lm_head that predicts each target of a batch, [N, H]; a collective under stage 3. Raises
        RankError if the model processes its logits after lm_head, but its configuration does not show how."""
        inputs, mask = batch.inputs.to(self.device), batch.mask.to(self.device)
        with self.head_proxy.catching():
            output = self.body(input_ids=inputs, attention_mask=mask, use_cache=False)
        hidden = self.head_proxy.collect(output.logits, type(self.body).__name__)  # [B, T, H]
        return hidden[(batch.labels != IGNORE).to(self.device)]

    def logits(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Compute the logits of hidden states ``rows`` [N, H] in blocks of rows; yield the slice of the rows and the
        logits [n, V] (fp32) of each block; a collective under stage 3."""
        return _logits(self.head, self.head_proxy, rows)


@dataclass(frozen=True)
class Reference:
    """Predictions of a model for some windows, which other models are compared with.

    Only lm_head stays on the device. The hidden states before it, [N, H] for each batch of this rank, stay on the host:
    in bf16 they take 2 H bytes per token.
    """

    windows: Sequence[Window]
    batch_size: int
    vocabulary: int
    head: nn.Module
    head_proxy: HiddenStates
    hidden_states: Sequence[Tensor]

    def logits(self, batch: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """Compute the logits of this rank's batch number ``batch`` in blocks of rows (targets); yield the slice of the
        rows and the logits [n, V] (fp32) of each block; a collective under stage 3."""
        return _logits(self.head, self.head_proxy, self.hidden_states[batch].to(device))


@torch.no_grad()
def _logits(head: nn.Module, head_proxy: HiddenStates, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    with gathered(head.parameters()):
        for start in range(0, len(rows), CHUNK_TOKENS):
            logits = head(rows[start : start + CHUNK_TOKENS])  # [C, V]
            for block in row_blocks(logits):
                some = head_proxy.function(logits[block].float())
                yield slice(start + block.start, start + block.start + len(some)), some


def reference_of(model: ScoringModel, windows: Sequence[Window], *, batch_size: int) -> Reference:
    """Compute the predictions that :func:`score_windows` takes as ``reference``; a collective. Raises RankError for a
    token beyond the model's embeddings."""
    _check_tokens(model, windows)
    batches = _batches(windows, batch_size, "reference")
    hidden = [model.hidden_states(batch).cpu() for batch in batches]
    return Reference(windows, batch_size, model.vocabulary, model.head, model.head_proxy, hidden)


def _check_tokens(model: ScoringModel, windows: Sequence[Window]) -> None:
    largest = max((max(*window.inputs, *window.targets) for window in windows), default=0)
    if largest >= model.tokens:
        raise RankError(
            f"found token {largest}, expected ids below {model.tokens}, the number of tokens of the model: take the "
            "tokenizer that belongs to the model"
        )


def scoring_model(
    model: PreTrainedModel, device: torch.device, ds_config: dict[str, Any] | None = None
) -> ScoringModel:
    """Freeze ``model`` in place, and split it to score windows: into a body that returns hidden states, and lm_head,
    which computes logits from them; a collective. ``ds_config`` is the DeepSpeed configuration with which the model was
    built; it is required if the model is sharded (stage 3). Raises RankError if there is no lm_head, or the model
    changes the output of lm_head by more than a factor and a soft cap."""
    text = model.config.get_text_config()
    lengths = (getattr(text, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    context = next((int(length) for length in lengths if length is not None), None)
    with errors_on_all_ranks(ValueError):
        tokens = embedding_rows(model)
        head, head_proxy = take_out_head(model)
    head.requires_grad_(False).eval()
    body = initialize_frozen(model, ds_config or {})
    settle_function(head_proxy, lambda ids: body(input_ids=ids.to(device), use_cache=False).logits, model.config)
    return ScoringModel(body, head, device, text.vocab_size, context, head_proxy, tokens)


def score_windows(
    model: ScoringModel,
    windows: Sequence[Window],
    *,
    batch_size: int,
    label: str,
    reference: Reference | None = None,
) -> list[Score]:
    """Score all windows; ranks share the work, and each returns all scores; a collective.

    Args:
        windows: the same on every rank; each has targets, and no more targets than inputs.
        batch_size: windows per forward.
        label: of the progress bar.
        reference: predictions for the same windows and batch size, to compare with.

    Raises:
        RankError: on every rank: a token is beyond the model's embeddings, a log-likelihood or KL divergence is NaN or
            infinite, or the reference has other windows or another vocabulary.
    """
    _check_tokens(model, windows)
    if reference is not None:
        _check_reference(reference, model, windows, batch_size)
    scores = torch.zeros(len(windows), 4, dtype=torch.float64, device=model.device)
    for number, batch in enumerate(_batches(windows, batch_size, label)):
        targets = batch.labels[batch.labels != IGNORE].to(model.device)
        tokens = torch.zeros(len(targets), 4, dtype=torch.float64, device=model.device)
        theirs = itertools.repeat(None) if reference is None else reference.logits(number, model.device)
        ours = model.logits(model.hidden_states(batch))
        for (at, logits), known in zip(ours, theirs, strict=reference is not None):
            tokens[at] = _score_tokens(logits, targets[at], None if known is None else known[1])
        sizes = [len(windows[index].targets) for index in batch.indices]
        for index, some in zip(batch.indices, tokens.split(sizes), strict=True):
            scores[index] = some.sum(0)
    values = reduce_over_ranks(scores)
    if bad := int((~values.isfinite()).any(-1).sum()):
        what = "KL divergence from the reference" if values[:, 0].isfinite().all() else "log-likelihood"
        raise RankError(
            f"{bad} of {len(windows)} windows have a {what} that is NaN or infinite: set --dtype float32, or take "
            "another checkpoint (or reference) if its weights are damaged"
        )
    return [
        Score(value, hits == len(window.targets), kl, agreed)
        for window, (value, hits, kl, agreed) in zip(windows, values.tolist(), strict=True)
    ]


def _score_tokens(logits: Tensor, targets: Tensor, reference: Tensor | None) -> Tensor:
    """Return log-likelihood, hit, KL(reference || model) and agreement of each row of logits [n, V]: [n, 4]."""
    log_q, top = F.log_softmax(logits, dim=-1), logits.argmax(-1)
    columns = [log_q.gather(-1, targets.unsqueeze(-1)).squeeze(-1), top.eq(targets)]
    if reference is not None:
        columns += [forward_kl(F.log_softmax(reference, dim=-1), log_q), top.eq(reference.argmax(-1))]
    return F.pad(torch.stack([column.double() for column in columns], -1), (0, 4 - len(columns)))


def _check_reference(reference: Reference, model: ScoringModel, windows: Sequence[Window], batch_size: int) -> None:
    if (reference.windows, reference.batch_size) != (windows, batch_size):
        raise RankError(
            "the reference was computed on other windows: compare models with the same tokenizer, and give --length if "
            "their contexts differ"
        )
    if model.vocabulary != reference.vocabulary:
        raise RankError(
            f"the model has logits of {model.vocabulary:,} tokens and the reference of {reference.vocabulary:,}, "
            "expected the same number: compare models of one family"
        )


class WindowBatch(NamedTuple):
    """Windows of one forward: their indices, and the tensors of the batch, [B, T] int64. A rank that has no windows
    left repeats the first batch to take part in the collectives, without indices and with IGNORE as every label."""

    indices: list[int]
    inputs: Tensor
    labels: Tensor
    mask: Tensor


def _batches(windows: Sequence[Window], batch_size: int, label: str) -> Iterator[WindowBatch]:
    """Yield this rank's batches, with a progress bar.

    Every rank gets the same number of batches, as a ZeRO-3 forward is a collective: a rank without further windows
    repeats the first batch without labels. Windows of similar length share a batch. The longest come first, so that
    running out of memory shows at once.
    """
    order = sorted(range(len(windows)), key=lambda index: -len(windows[index].inputs))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    rounds = range(math.ceil(len(batches) / world_size()))
    for round in progress_bar(desc=label, unit="batch", over=rounds):
        mine = round * world_size() + rank()
        if mine < len(batches):
            yield WindowBatch(batches[mine], *_collate([windows[index] for index in batches[mine]]))
        else:
            inputs, labels, mask = _collate([windows[index] for index in batches[0]])
            yield WindowBatch([], inputs, labels.fill_(IGNORE), mask)


def _collate(windows: Sequence[Window]) -> list[Tensor]:
    """Collate windows into a batch: inputs, labels and attention mask, each [B, T] int64, padded on the right."""
    length = max(len(window.inputs) for window in windows)
    rows = []
    for ids, targets in windows:
        left, right = len(ids) - len(targets), length - len(ids)
        rows.append([[*ids, *[0] * right], [IGNORE] * left + targets + [IGNORE] * right, [1] * len(ids) + [0] * right])
    return list(torch.tensor(rows).unbind(1))
