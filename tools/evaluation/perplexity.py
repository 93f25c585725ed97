"""Measure the perplexity of a text: per token, word and byte, and bits per byte.

The text is cut into windows of ``length`` tokens: every token is predicted exactly once, from the tokens before it in
its window; the first token is predicted from the tokenizer's BOS or EOS. Windows and definitions are the same as in
lm-evaluation-harness: with L the sum of the log-likelihoods in nats,

    per token exp(-L / tokens), per word exp(-L / words), per byte exp(-L / bytes), bits per byte -L / bytes / ln 2

where words are separated by white space (lm-evaluation-harness also counts the empty string before or after white space
at the ends of a text) and bytes are counted in the UTF-8 text.

With a reference model, two more figures are measured: the mean of KL(reference || model) over the tokens, in nats, and
the share of tokens at which both models predict the same token. They show errors that cancel out in a perplexity.
"""

import hashlib
import io
import math
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from data.samples import load_tokenizer
from engine.config.hub import named
from engine.session.context import META
from model.build import build_model
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.checkpoint.load import check_headers, load_weights
from model.console import perplexity
from model.peft import say_left_out
from model.quantized.quantization_config import is_quantized, weights_alone
from model.ranks import RankError, errors_on_all_ranks
from tools.compressed import load_compressed
from tools.evaluation.results import Evaluation, Measurement, weights_size
from tools.evaluation.score import (
    Reference,
    Score,
    ScoringModel,
    Window,
    reference_of,
    rolling_windows,
    score_windows,
    scoring_model,
)

if TYPE_CHECKING:
    from tools.evaluation.tasks import Tasks  # needs lm-evaluation-harness, which is optional

DEFAULT_LENGTH = 1024  # tokens per window of a text
KL, AGREEMENT = "KL divergence per token", "top-token agreement"  # of a model and a reference


@dataclass(frozen=True)
class EvalText:
    """Text to evaluate on, and the numbers of words and bytes that its tokens cover."""

    token_ids: list[int]
    words: int
    bytes: int
    prefix: int  # the token from which the first token is predicted (BOS or EOS)
    digest: str  # a checksum, to detect that two models were evaluated on different texts

    def perplexities(self, log_likelihood: float) -> dict[str, float]:
        """Compute perplexities and bits per byte, by name. ``log_likelihood`` is the sum over the tokens, in nats."""
        return {
            "perplexity per token": perplexity(-log_likelihood / len(self.token_ids)),
            "perplexity per word": perplexity(-log_likelihood / self.words),
            "perplexity per byte": perplexity(-log_likelihood / self.bytes),
            "bits per byte": -log_likelihood / self.bytes / math.log(2),  # compares models with different tokenizers
        }


def read_eval_text(path: str | Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> EvalText:
    """Read and tokenize a UTF-8 text file, or its first ``max_tokens`` tokens. Raises ValueError if the file is empty
    or not UTF-8, or the tokenizer has neither BOS nor EOS."""
    try:
        text = Path(path).read_bytes().decode("utf-8")  # newlines are not translated: bytes count as in the file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}): convert it, such as with iconv") from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if max_tokens is not None and len(ids) > max_tokens:
        ids = ids[:max_tokens]
        text = str(tokenizer.decode(ids))
    if not ids or not text.strip():
        raise ValueError(f"{path}: no text to evaluate on, expected words")
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise ValueError("the tokenizer has neither a BOS nor an EOS token to predict the first token from: define one")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return EvalText(ids, len(re.split(r"\s+", text.strip())), len(text.encode()), prefix, digest)


def evaluate_text(
    model: ScoringModel, text: EvalText, *, length: int, batch_size: int = 1, reference: Reference | None = None
) -> Score:
    """Score all tokens of a text in windows of ``length`` tokens, and return the sums over the tokens (``greedy`` is
    True if every token is the most likely one). Ranks share the windows; a collective. ``reference`` has predictions of
    another model for the same text and batch size, to compare with. Raises RankError if ``length`` is more than the
    model's context, or for the reasons of :func:`tools.evaluation.score.score_windows`."""
    windows = _windows(model, text, length)
    scores = score_windows(model, windows, batch_size=batch_size, label="perplexity", reference=reference)
    likelihoods, greedy, kl, agreed = zip(*scores, strict=True)
    return Score(sum(likelihoods), all(greedy), sum(kl), sum(agreed))


def _windows(model: ScoringModel, text: EvalText, length: int) -> list[Window]:
    if model.context is not None and length > model.context:
        raise RankError(f"windows of {length} tokens, expected at most {model.context}: the context of the model")
    return rolling_windows(text.token_ids, text.prefix, length)


def load_for_evaluation(
    directory: str | Path, dtype: torch.dtype, device: torch.device, *, sharded: bool = False
) -> ScoringModel:
    """Load a checkpoint, plain or compressed; a collective. The model of a compressed checkpoint computes with codes
    and scales as in training. Checkpoints of GPTQ, AWQ and AutoRound, and gpt-oss as published, are dequantized. With
    ``sharded`` the weights of a plain checkpoint are partitioned over the ranks (ZeRO-3). Raises RankError on every
    rank if the checkpoint is damaged, or is compressed and ``sharded`` is True."""
    say_left_out(directory)
    if _is_compressed(directory):
        if sharded:
            raise RankError(
                f"{directory} is compressed, and --sharded needs a plain checkpoint: leave --sharded out, so that "
                "every rank has the whole model"
            )
        model, _ = load_compressed(directory, dtype=dtype, device=device)
        return scoring_model(model, device)
    ds_config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "zero_optimization": {"stage": 3 if sharded else 0},
    }
    model = build_model(directory, ds_config, dtype=dtype, device=device)
    load_weights(model, directory)
    return scoring_model(model, device, ds_config)


def check_checkpoint(directory: str | Path) -> None:
    """Compare the headers of a checkpoint's files with its model, before anything is evaluated; a collective. Raises
    RankError on every rank if a file is missing or damaged, or does not fit the model."""
    compressed = _is_compressed(directory)
    with redirect_stdout(io.StringIO()):  # printed when the model is built for its evaluation
        if compressed:
            load_compressed(directory, device=META)
        else:
            check_headers(build_model(directory, {}, dtype=torch.float32, device=META), directory)


def _is_compressed(directory: str | Path) -> bool:
    """Return True if a checkpoint is quantized in a format that training's forward can compute (not only dequantize); a
    collective."""
    with errors_on_all_ranks(OSError, ValueError):
        # hf_quant_config.json alone may say it: read as a plain checkpoint, the inputs would not be quantized.
        return is_quantized(Path(directory)) and not weights_alone(Path(directory))


@dataclass(frozen=True)
class Questions:
    """Options of an evaluation: a text, tasks, or both."""

    text: Path | None = None
    tokens: int | None = None  # of the text, at most
    tasks: "Tasks | None" = None
    length: int | None = None  # tokens per window; None: DEFAULT_LENGTH for a text, the model's context for tasks
    batch_size: int = 4  # windows per forward
    dtype: torch.dtype = torch.bfloat16  # of weights and GEMMs
    sharded: bool = False  # weights are partitioned over the ranks (ZeRO-3)


@dataclass(frozen=True)
class TextReference:
    """Predictions of a reference checkpoint for a text; ``digest`` is a hash of the checkpoint's files."""

    digest: str
    predictions: Reference


def read_reference(directory: str | Path, questions: Questions, device: torch.device) -> TextReference:
    """Compute the predictions of a checkpoint for the text of ``questions``, and free all of the model but lm_head; a
    collective. Raises RankError on every rank if the checkpoint or the text cannot be read."""
    _, text = _tokenizer_and_text(directory, questions)
    assert text is not None, "a reference needs a text"
    model = load_for_evaluation(directory, questions.dtype, device, sharded=questions.sharded)
    windows = _windows(model, text, questions.length or default_length(model))
    with errors_on_all_ranks(OSError, ValueError):
        digest = digest_of_checkpoint(directory)[:12]
    return TextReference(digest, reference_of(model, windows, batch_size=questions.batch_size))


def evaluate_checkpoint(
    directory: str | Path, questions: Questions, device: torch.device, reference: TextReference | None = None
) -> Evaluation:
    """Measure all ``questions`` on one checkpoint, and free its memory; a collective. Raises RankError on every rank if
    a checkpoint, text or task cannot be read, or they do not fit together."""
    tokenizer, text = _tokenizer_and_text(directory, questions)
    with errors_on_all_ranks(OSError, ValueError):
        size = weights_size(directory)
    model = load_for_evaluation(directory, questions.dtype, device, sharded=questions.sharded)
    found: dict[str, Measurement] = {}
    dtype = str(questions.dtype).removeprefix("torch.")
    if text is not None:
        length = questions.length or default_length(model)
        predictions = None if reference is None else reference.predictions
        total = evaluate_text(model, text, length=length, batch_size=questions.batch_size, reference=predictions)
        conditions = f"{len(text.token_ids):,} tokens of text {text.digest}, windows of {length}, {dtype}"
        figures = text.perplexities(total.log_likelihood)
        found = {name: Measurement(value, False, conditions) for name, value in figures.items()}
        if reference is not None:
            tokens, against = len(text.token_ids), f"against checkpoint {reference.digest}, {conditions}"
            found[KL] = Measurement(total.kl / tokens, False, against)
            found[AGREEMENT] = Measurement(total.agreed / tokens, True, against)
    if questions.tasks is not None:
        found |= questions.tasks.measure(
            model, tokenizer, length=questions.length, batch_size=questions.batch_size, dtype=dtype
        )
    return Evaluation(str(named(directory)), size, found)


def default_length(model: ScoringModel) -> int:
    """Return the default number of tokens per window: ``DEFAULT_LENGTH``, or the model's context if it is shorter."""
    return min(DEFAULT_LENGTH, model.context or DEFAULT_LENGTH)


def _tokenizer_and_text(directory: str | Path, questions: Questions) -> tuple[PreTrainedTokenizerBase, EvalText | None]:
    with errors_on_all_ranks(OSError, ValueError):
        if not (Path(directory) / "config.json").is_file():
            raise ValueError(f"{directory}: no config.json there, expected the directory of a checkpoint")
        tokenizer = load_tokenizer(directory)
        if questions.text is None:
            return tokenizer, None
        return tokenizer, read_eval_text(questions.text, tokenizer, questions.tokens)
