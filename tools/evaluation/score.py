"""Score tokens by log-likelihood, many windows at a time: the basis of perplexities and multiple-choice tasks.

lm_head is removed from the model, and called on the hidden states of some positions at a time. So the logits of a whole
batch never exist: for 4 windows of 1,024 tokens at V = 152k, [B, T, V] takes 1.2 GB in bf16, and a softmax needs two
fp32 copies. No logits are computed for positions without targets, and a quantized head needs no special case.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from data.samples import IGNORE
from engine.losses.chunked import row_blocks
from engine.session.optimizer import initialize_frozen
from model.head import HiddenStates, settle_function, take_out_head
from model.ranks import RankError, errors_on_all_ranks, is_main, rank, reduce_over_ranks, world_size
from model.zero import gathered

CHUNK_TOKENS = 512  # logits computed at a time


class Window(NamedTuple):
    """Input tokens, and the ``targets`` that follow each of the last ``len(targets)`` tokens of ``inputs``."""

    inputs: list[int]
    targets: list[int]


class Score(NamedTuple):
    """Sum of the targets' log-likelihoods in nats, and for each target True if it is the most likely token."""

    log_likelihood: float
    greedy: bool


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
    """Model for scoring only.

    Attributes:
        body: the model (an engine under stage 3), which returns the input of ``head`` as its logits.
        head: lm_head, gathered only by this class.
        device: device of the batches.
        context: maximum length in tokens, None if the configuration has none.
        head_proxy: module of the body in place of ``head``.
    """

    body: nn.Module
    head: nn.Module
    device: torch.device
    context: int | None
    head_proxy: HiddenStates

    @torch.no_grad()
    def log_likelihoods(self, inputs: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute, for each label except -100 in row-major order, its log-likelihood (fp32), and True if it is the most
        likely token.

        Inputs, labels and mask are [B, T] int64. A collective under stage 3: ranks without labels call it too.

        Raises:
            RankError: the model processes its logits after lm_head, but its configuration does not show how.
        """
        with self.head_proxy.catching():
            output = self.body(input_ids=inputs, attention_mask=mask, use_cache=False)
        hidden = self.head_proxy.collect(output.logits, type(self.body).__name__)  # [B, T, H]
        valid = labels != IGNORE
        rows, targets = hidden[valid], labels[valid]  # [N, H], [N]
        found = torch.empty(len(targets), dtype=torch.float32, device=rows.device)
        greedy = torch.empty(len(targets), dtype=torch.bool, device=rows.device)
        with gathered(self.head.parameters()):
            for start in range(0, len(targets), CHUNK_TOKENS):
                logits = self.head(rows[start : start + CHUNK_TOKENS])  # [C, V]
                for block in row_blocks(logits):
                    some = self.head_proxy.function(logits[block].float())
                    at = slice(start + block.start, start + block.start + len(some))
                    wanted = targets[at].unsqueeze(-1)
                    found[at] = some.gather(-1, wanted).squeeze(-1) - some.logsumexp(-1)
                    greedy[at] = some.argmax(-1, keepdim=True).eq(wanted).squeeze(-1)
        return found, greedy


def scoring_model(
    model: PreTrainedModel, device: torch.device, ds_config: dict[str, Any] | None = None
) -> ScoringModel:
    """Freeze ``model`` and remove its lm_head. With ``ds_config``, under which the model must have been built, it is
    sharded."""
    text = model.config.get_text_config()
    lengths = (getattr(text, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
    context = next((int(length) for length in lengths if length is not None), None)
    with errors_on_all_ranks(ValueError):
        head, head_proxy = take_out_head(model)
    head.requires_grad_(False).eval()
    body = initialize_frozen(model, ds_config or {})
    settle_function(head_proxy, lambda ids: body(input_ids=ids.to(device), use_cache=False).logits, model.config)
    return ScoringModel(body, head, device, context, head_proxy)


def score_windows(model: ScoringModel, windows: Sequence[Window], *, batch_size: int, label: str) -> list[Score]:
    """Score each window, on every rank; ranks share the work; a collective.

    Every rank makes the same number of forward calls, as a ZeRO-3 forward is a collective: a rank without further
    windows repeats some windows without counting their tokens.

    Args:
        model: model to score with.
        windows: windows to score, the same on every rank; each has targets, and no more targets than inputs.
        batch_size: windows per forward.
        label: label of the progress bar.

    Raises:
        RankError: a log-likelihood is NaN or infinite.
    """
    # Batch windows of similar length, the longest first, so that running out of memory shows at once.
    order = sorted(range(len(windows)), key=lambda index: -len(windows[index].inputs))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    scores = torch.zeros(len(windows), 2, dtype=torch.float64, device=model.device)
    rounds = range(math.ceil(len(batches) / world_size()))
    for round in tqdm(rounds, desc=label, unit="batch", disable=not is_main(), leave=False):
        mine = round * world_size() + rank()
        batch = batches[mine] if mine < len(batches) else batches[0]
        inputs, labels, mask = (tensor.to(model.device) for tensor in _collate([windows[index] for index in batch]))
        if mine >= len(batches):
            labels.fill_(IGNORE)
        found, greedy = model.log_likelihoods(inputs, labels, mask)
        if mine >= len(batches):
            continue
        sizes = [len(windows[index].targets) for index in batch]
        for index, some, hits in zip(batch, found.split(sizes), greedy.split(sizes), strict=True):
            scores[index, 0], scores[index, 1] = some.double().sum(), hits.all()
    values = reduce_over_ranks(scores)
    if bad := int((~values.isfinite()).any(-1).sum()):
        raise RankError(f"{bad} of {len(windows)} windows have a log-likelihood that is NaN or infinite")
    return [Score(value, hit > 0) for value, hit in values.tolist()]


def _collate(windows: Sequence[Window]) -> list[Tensor]:
    """Collate windows into a batch: inputs, labels and attention mask, each [B, T] int64, padded on the right."""
    length = max(len(window.inputs) for window in windows)
    rows = []
    for ids, targets in windows:
        left, right = len(ids) - len(targets), length - len(ids)
        rows.append([[*ids, *[0] * right], [IGNORE] * left + targets + [IGNORE] * right, [1] * len(ids) + [0] * right])
    return list(torch.tensor(rows).unbind(1))
