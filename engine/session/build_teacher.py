"""The recipe's teacher, a model beside the student or a cache on disk: checked before data is read, then built."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.samples import DataError, Sample, load_tokenizer
from data.teacher_cache import TeacherCache
from engine.config.config import Recipe
from engine.config.deepspeed import teacher_config
from engine.losses.teacher import CachedTeacher, ModelTeacher, common_vocabulary, first_difference
from engine.session.adapter import pack_layers
from engine.session.context import META, RunContext, build_for, stage_0
from engine.session.optimizer import initialize_frozen
from engine.session.student import always_exempt
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.checkpoint.load import check_headers, load_weights
from model.head import embedding_rows, output_head, settle_function, take_out_head
from model.quantized.quantization_config import is_quantized
from model.quantized.quantize_on_load import fill_quantize_on_load_scales
from model.ranks import errors_on_all_ranks, rank, say, world_size
from model.zero import partition_new_parameters
from quant import SCHEMES, Quantization, Ranges, replace_layers
from quant.rules import assign

INT8 = SCHEMES["w8a16_channel"]  # a scale per output fits every shape; KL by groups: benchmarks/results/kd_loss.md


def check_teacher(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, logits: int) -> int:
    """Check the teacher model in ``loss.teacher``, given the student's ``tokenizer`` and its number of ``logits`` per
    token; a collective.

    Returns:
        Number of token ids that the teacher can read and has logits for.

    Raises:
        RankError: on every rank: the teacher is not supported, has no tokenizer or another one than the student, has no
            logit for a token of the tokenizer, does not fit its files, or cannot be quantized to int8.
    """
    path = str(recipe.loss.teacher)
    with errors_on_all_ranks(OSError, ValueError):
        if os.path.realpath(path) != os.path.realpath(recipe.model.path):
            _check_same_tokens(recipe, tokenizer, path)
    model = empty_teacher(recipe, stage_0(recipe), META)
    with errors_on_all_ranks(ValueError):
        own = output_head(model)[1].out_features
        try:
            common_vocabulary(tokenizer, logits, own)
        except ValueError as error:
            raise ValueError(f"loss.teacher: {path}: {error}") from error
    check_headers(model, path)
    quantize_teacher(recipe, model, stage_0(recipe))
    return min(embedding_rows(model), own)


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
        raise ValueError(
            f"loss.teacher: {path} has another tokenizer: {difference}; name a teacher with the student's tokenizer"
        )


def empty_teacher(recipe: Recipe, ds_config: dict[str, Any], device: torch.device) -> PreTrainedModel:
    """Build the teacher without weights; with ``loss.teacher_weights: int8`` its linear layers have packed weights.
    Raises RankError on every rank if the model is not supported, or its weights cannot be packed."""
    path, option = str(recipe.loss.teacher), _option(recipe)
    if option is None:
        return build_for(recipe, path, ds_config, device)

    def pack(model: PreTrainedModel) -> None:
        if is_quantized(Path(path)):
            raise ValueError(f"{option}: {path} is quantized: remove that option, or name an unquantized teacher")
        chosen, _ = assign(model, INT8, exempt=always_exempt(model))
        pack_layers(model, chosen, option, Ranges())

    return build_for(recipe, path, ds_config, device, hold=pack)


def quantize_teacher(recipe: Recipe, model: PreTrainedModel, ds_config: dict[str, Any]) -> Quantization | None:
    """Replace the layers that :func:`empty_teacher` gave packed weights by quantized layers, whose scales are to be
    filled. Without ``loss.teacher_weights: int8`` do nothing and return None. Raises RankError on every rank if a layer
    cannot be quantized."""
    if (option := _option(recipe)) is None:
        return None
    with errors_on_all_ranks(ValueError):
        try:
            quantization = replace_layers(
                model, INT8, exempt=always_exempt(model), learn_weight_scale=False, learn_input_scale=False
            )
        except ValueError as error:
            raise ValueError(f"{option}: {recipe.loss.teacher}: {error}; remove that option") from error
    partition_new_parameters(model, ds_config)
    return quantization


def _option(recipe: Recipe) -> str | None:
    """Return the recipe's option of 8-bit weights, as errors name it; None without it."""
    return None if recipe.loss.teacher_weights == "full" else f"loss.teacher_weights: {recipe.loss.teacher_weights}"


def load_teacher(recipe: Recipe, context: RunContext, logits: int) -> ModelTeacher:
    """Load the frozen teacher model, which :func:`check_teacher` has checked; a collective. ``logits``: number of the
    student's logits per token. Raises RankError on every rank if the files do not fit the model, or the model changes
    its logits after lm_head in another way than its configuration says."""
    path, config = str(recipe.loss.teacher), teacher_config(context.ds_config)
    model = empty_teacher(recipe, config, context.device)
    _, linear = output_head(model)
    vocabulary = common_vocabulary(context.tokenizer, logits, linear.out_features)
    if vocabulary is not None:
        say(
            f"distillation compares the {vocabulary:,} tokens of the tokenizer: the student has {logits:,} logits, "
            f"the teacher {linear.out_features:,}"
        )
    report = load_weights(model, path, method=recipe.model.load)
    say(f"teacher: {report.summary()}")
    if (quantization := quantize_teacher(recipe, model, config)) is not None:
        fill_quantize_on_load_scales(model, quantization)
        codes = sum(math.prod(layer.weight_shape) for layer in quantization.layers.values())
        say(
            f"teacher in int8: {codes:,} weights of {len(quantization.layers)} linear layers, rounded to 8 bits with a "
            "scale per output (loss.teacher_weights)"
        )
    if is_quantized(Path(path)):
        say("teacher: its weights are decoded from its codes, and its inputs are not quantized")
    _, head_proxy = take_out_head(model)
    module = initialize_frozen(model, context.ds_config)
    settle_function(
        head_proxy, lambda ids: module(input_ids=ids.to(context.device), use_cache=False).logits, model.config
    )
    return ModelTeacher(module, head_proxy, linear.requires_grad_(False), vocabulary)


def check_cache(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, logits: int) -> None:
    """Check by its manifest that ``loss.teacher_cache`` fits the recipe, the student's ``tokenizer`` and its number of
    ``logits`` per token; a collective.

    Raises:
        RankError: on every rank: the cache is incomplete, keeps fewer tokens than ``loss.top_k``, or was made with
            another tokenizer, by another teacher, or for another vocabulary size.
    """
    directory, top_k, teacher = str(recipe.loss.teacher_cache), recipe.loss.top_k, recipe.loss.teacher
    with errors_on_all_ranks(OSError, ValueError):
        cache = TeacherCache(directory)
        if top_k is not None and top_k > cache.manifest.top_k:
            raise ValueError(
                f"loss.top_k: {top_k}, expected at most {cache.manifest.top_k}, as many as loss.teacher_cache "
                f"{directory} keeps"
            )
        cache.check_tokenizer(tokenizer)
        if teacher is not None and (Path(teacher) / "config.json").is_file():
            cache.check_teacher(teacher, digest_of_checkpoint(teacher))
        if cache.manifest.vocabulary not in (logits, tokens := max(tokenizer.get_vocab().values()) + 1):
            raise ValueError(
                f"loss.teacher_cache: {directory} is for a vocabulary of {cache.manifest.vocabulary:,} tokens, "
                f"expected {logits:,}, as many as the student has logits, or {tokens:,}, as many as the tokenizer has: "
                "write it again with launch/cache_teacher.py"
            )


def open_cached_teacher(recipe: Recipe, samples: Sequence[Sample]) -> CachedTeacher:
    """Open ``loss.teacher_cache``, which :func:`check_cache` has checked; a collective. Raises RankError on every rank
    if the cache is damaged, or was made from other samples."""
    with errors_on_all_ranks(OSError, ValueError):
        cache = TeacherCache(str(recipe.loss.teacher_cache))
        cache.check_samples(samples)
        cache.verify(rank(), world_size())
    say(f"teacher: {cache.manifest.positions:,} positions from {cache.directory}, no model in memory")
    return CachedTeacher(cache)
