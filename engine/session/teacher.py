"""Teachers: another model, the student itself without fake quant, or a cache on disk.

``forward(inputs, batch)`` of a teacher runs it on a micro-batch before the student, with the arguments ``inputs`` of
the student's forward; a collective. It returns hidden states, not logits; the losses are computed from them inside the
student's lm_head. Under ZeRO stage 3 the lm_head of a teacher model is gathered while the losses are computed, once per
micro-batch, by all ranks, including ranks without a valid token.

The recipe's teacher, a model or a cache, is checked before data is read (:func:`check_teacher`, :func:`check_cache`),
then built (:func:`load_teacher`, :func:`open_cached_teacher`).
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import Parameter
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.loader import MicroBatch, without_wait
from data.samples import DataError, Sample, load_tokenizer
from data.teacher_cache import TeacherCache
from engine.config.config import Recipe
from engine.config.deepspeed import teacher_config
from engine.losses import chunked as losses
from engine.losses.objective import TopK
from engine.session.adapter import pack_layers
from engine.session.context import META, RunContext, build_for, stage_0
from engine.session.optimizer import initialize_frozen
from engine.session.student import always_exempt
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.checkpoint.load import check_headers, load_weights
from model.head import HiddenStates, LMHead, embedding_rows, hidden_states, output_head, settle_function, take_out_head
from model.quantized.quantization_config import is_quantized
from model.quantized.quantize_on_load import fill_quantize_on_load_scales
from model.ranks import errors_on_all_ranks, rank, say, world_size
from model.zero import forward_only, partition_new_parameters
from quant import SCHEMES, Quantization, QuantLinear, Ranges, replace_layers
from quant.adapters import without_adapters
from quant.rules import assign

INT8 = SCHEMES["w8a16_channel"]  # a scale per output fits every shape; KL by groups: benchmarks/results/kd_loss.md


class TeacherOutput(NamedTuple):
    """Teacher's output for a micro-batch.

    Attributes:
        teacher: the argument ``teacher`` of :func:`engine.losses.chunked.chunked_losses`.
        parameters: parameters to gather around the call of chunked_losses, besides the student's lm_head.
    """

    teacher: losses.TeacherTargets
    parameters: Sequence[Parameter] = ()


@dataclass
class ModelTeacher:
    """Teacher that is a frozen model beside the student.

    Attributes:
        module: the model (an engine under stage 3), without its lm_head.
        head_proxy: module in lm_head's place, which makes the model return hidden states.
        head: the model's lm_head, gathered only while the losses are computed.
        vocabulary: losses compare token ids below this number; None: all.
    """

    module: nn.Module
    head_proxy: HiddenStates
    head: nn.Linear | QuantLinear
    vocabulary: int | None

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Run the model; a collective under stage 3."""
        with torch.no_grad(), self.head_proxy.catching():
            logits = self.module(**inputs).logits
        hidden = self.head_proxy.collect(logits, "the teacher")  # [B, T, H]
        teacher = losses.TeacherHidden(
            hidden, self.head.weight, self.head.bias, self.vocabulary, self.head_proxy.function
        )
        return TeacherOutput(teacher, list(self.head.parameters()))


@dataclass
class SelfTeacher:
    """Teacher that is the student without fake quant and adapters: the initial model, as long as weights are frozen.
    Costs a second forward and no memory for weights."""

    engine: nn.Module
    head: LMHead
    quantization: Quantization

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Run the student without fake quant and adapters; a collective."""
        logits = unquantized_forward(self.engine, self.head, self.quantization, inputs)
        hidden = self.head.collect(logits, "the student")
        # The unquantized weight of lm_head; the student's losses may use a quantized one. It is gathered while the
        # losses are computed, and gets no gradient from the teacher.
        function = self.head.function
        return TeacherOutput(losses.TeacherHidden(hidden, self.head.weight, self.head.bias, function=function))


@torch.no_grad()
def unquantized_forward(
    engine: nn.Module, head: LMHead, quantization: Quantization, inputs: dict[str, Any]
) -> torch.Tensor:
    """Run the student without quantization, and return the ``logits`` of its output, which are hidden states here; a
    collective. Runs in eval mode, with fake quant, adapters and observers off; all are restored afterwards."""
    was_training = engine.training
    engine.eval()
    try:
        with quantization.paused(), without_adapters(quantization), head.computing(hidden_states), forward_only(engine):
            logits: torch.Tensor = engine(**inputs).logits
    finally:
        engine.train(was_training)
    return logits


@dataclass
class CachedTeacher:
    """Teacher whose outputs for the training samples are read from a cache of ``launch/cache_teacher.py``; no model in
    memory."""

    cache: TeacherCache

    def forward(self, inputs: dict[str, Any], batch: MicroBatch) -> TeacherOutput:
        """Read the cache's rows of the batch's samples, one per valid position of this rank, in the order of the batch;
        ``inputs`` are not used. Raises ValueError if batch and cache have different numbers of targets."""
        rows = self.cache.rows(batch["sample_ids"].tolist())
        own = batch.get("own_targets")  # of rows that ranks share
        targets = len(batch["positions"]) if own is None else len(own)
        if targets == 0:  # a batch with all targets removed
            rows = rows[:0]
        if len(rows) != targets:
            raise ValueError(
                f"samples {batch['sample_ids'].tolist()} have {targets} targets in this batch, expected {len(rows)}, "
                f"as in the teacher's cache {self.cache.directory}"
            )
        if own is not None:
            rows = rows[own.numpy()]
        log_probs, indices, log_tail = (
            without_wait(tensor, batch["labels"].device) for tensor in self.cache.top_k(rows)
        )
        top = TopK(log_probs, indices, log_tail)
        return TeacherOutput(losses.TeacherTopK(top, self.cache.manifest.vocabulary))


Teacher = ModelTeacher | SelfTeacher | CachedTeacher


def first_difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """Describe the first token id that differs between two tokenizers; None if there is none."""
    first, second = ({id: token for token, id in each.get_vocab().items()} for each in (ours, theirs))
    for id in sorted(first.keys() | second.keys()):
        if first.get(id) != second.get(id):
            return f"token {id} is {first.get(id)!r} to the student and {second.get(id)!r} to the teacher"
    return None


def common_vocabulary(tokenizer: PreTrainedTokenizerBase, student: int, teacher: int) -> int | None:
    """Return the number of token ids, counted from 0, on which two models are compared: None (all) if both have equally
    many logits, else the number of the tokenizer's tokens.

    Models pad their vocabularies beyond the tokenizer's, and logits of that padding are meaningless. At equal sizes the
    padding is compared too, so that losses compare whole distributions.

    Args:
        tokenizer: tokenizer of both models.
        student, teacher: numbers of logits.

    Raises:
        ValueError: one of the models has no logit for a token.
    """
    if student == teacher:
        return None
    tokens = max(tokenizer.get_vocab().values()) + 1
    if tokens > min(student, teacher):
        raise ValueError(
            f"the tokenizer has {tokens} tokens, the student {student} logits and the teacher {teacher}: expected at "
            "least one logit for each token in both"
        )
    return tokens


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
