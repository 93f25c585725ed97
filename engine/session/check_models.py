"""Check the recipe's models before any data is read: everything that configurations and headers of files can tell.

The models are built once more, on the meta device, which takes no memory. So an error of a model does not cost the
minutes in which the data is tokenized. Nothing is printed: the run prints it when it builds the models.
"""

import contextlib
import io
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.samples import DataError, load_tokenizer
from engine.config.config import Recipe
from engine.losses.teacher import common_vocabulary, first_difference
from engine.session.context import TORCH_DTYPES, RunContext
from engine.session.student import empty_student, quantize_student, uses_fp8_gemm
from model.build import build_model
from model.checkpoint.load import check_weights
from model.head import embedding_rows, output_head
from model.quantized.scales import check_start
from model.ranks import errors_on_all_ranks
from model.scales.loading import check_scale_files
from quant import Quantization

META = torch.device("meta")


@dataclass(frozen=True)
class CheckedModels:
    """Student on the meta device, and how many token ids the models have.

    Attributes:
        model, quantization: the student, quantized, without weights and scales.
        tokens: number of token ids by the recipe's key of the model: ``model.path``, ``loss.teacher``.
    """

    model: PreTrainedModel
    quantization: Quantization
    tokens: dict[str, int]


def check_models(recipe: Recipe, context: RunContext, *, losses: bool = True) -> CheckedModels:
    """Check the student, its scales and the teacher; a collective.

    ``losses``: as in :func:`engine.session.student.build_student`; without losses there is no teacher.

    Raises:
        RankError: on every rank: a model cannot be built, quantized or filled from its files.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        # Nothing is computed, so nothing is compiled, and no codes are kept for the next micro-batch.
        train = replace(recipe.train, gradient_accumulation_steps=1, compile=False)
        recipe = replace(recipe, train=train)
        with errors_on_all_ranks(ValueError):
            uses_fp8_gemm(recipe, context.device)
        model, named = empty_student(recipe, stage_0(recipe), META, losses=losses)
        check_weights(model, recipe.model.path)
        tokens = {"model.path": _tokens(model, losses)}
        quantization = quantize_student(recipe, stage_0(recipe), META, model, named)
        if recipe.quant.start is not None:
            check_start(model, quantization, recipe.quant.start)
        if recipe.quant.scales is not None:
            check_scale_files(recipe.quant.scales)
        if losses and recipe.teacher_kind() == "model":
            tokens["loss.teacher"] = check_teacher(recipe, context.tokenizer, output_head(model)[1].out_features)
    return CheckedModels(model, quantization, tokens)


def check_teacher(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, logits: int) -> int:
    """Check the teacher in ``loss.teacher``; a collective.

    Args:
        recipe: the run.
        tokenizer: the student's tokenizer.
        logits: number of the student's logits per token.

    Returns:
        Number of token ids of the teacher.

    Raises:
        RankError: on every rank: the teacher has no tokenizer or not the student's, has no logit for a token, cannot be
            filled from its files, or changes its lm_head's output in an unsupported way.
    """
    path = recipe.loss.teacher
    assert path is not None, "the recipe's teacher is no model"
    with errors_on_all_ranks(OSError, ValueError):
        if os.path.realpath(path) != os.path.realpath(recipe.model.path):
            _check_same_tokens(recipe, tokenizer, path)
    model = build_model(
        path,
        stage_0(recipe),
        dtype=TORCH_DTYPES[recipe.model.dtype],
        device=META,
        trust_remote_code=recipe.model.trust_remote_code,
        attn_implementation=recipe.model.attn_implementation,
        experts=recipe.model.experts,
    )
    with errors_on_all_ranks(ValueError):
        try:
            common_vocabulary(tokenizer, logits, output_head(model)[1].out_features)
        except ValueError as error:
            raise ValueError(f"loss.teacher: {path}: {error}") from error
    check_weights(model, path)
    return _tokens(model, losses=True)


def stage_0(recipe: Recipe) -> dict[str, Any]:
    """Return a DeepSpeed configuration that partitions nothing, in the recipe's dtype."""
    precision = {"bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}}
    return {"zero_optimization": {"stage": 0}, **precision.get(recipe.model.dtype, {})}


def _tokens(model: PreTrainedModel, losses: bool) -> int:
    """Return how many token ids a model can read and, with ``losses``, predict."""
    rows = embedding_rows(model)
    return min(rows, output_head(model)[1].out_features) if losses else rows


def _check_same_tokens(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a teacher whose tokenizer differs from the student's."""
    try:
        theirs = load_tokenizer(path, trust_remote_code=recipe.model.trust_remote_code)
    except DataError as error:
        raise ValueError(
            f"loss.teacher: {path} has no tokenizer to compare with the student's: distillation compares token by "
            f"token ({error})"
        ) from error
    if difference := first_difference(tokenizer, theirs):
        raise ValueError(f"loss.teacher: {path} has another tokenizer: {difference}")
