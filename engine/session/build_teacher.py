"""Build the recipe's teacher: a frozen model beside the student, or a cache on disk."""

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from data.samples import Sample
from data.teacher_cache import TeacherCache
from engine.config.config import Recipe
from engine.config.deepspeed import teacher_config
from engine.losses.teacher import CachedTeacher, ModelTeacher, common_vocabulary
from engine.session.context import TORCH_DTYPES, RunContext
from engine.session.optimizer import initialize_frozen
from model.build import build_model
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.checkpoint.load import load_weights
from model.head import output_head, settle_function, take_out_head
from model.quantized.quantization_config import is_quantized
from model.ranks import errors_on_all_ranks, rank, say, world_size


def load_teacher(recipe: Recipe, context: RunContext, logits: int) -> ModelTeacher:
    """Load the frozen teacher model, which :func:`engine.session.check_models.check_teacher` has checked; a collective.

    Args:
        recipe: the run; ``loss.teacher`` is the directory of the teacher's checkpoint.
        context: result of :func:`engine.session.context.start_ranks`.
        logits: number of the student's logits per token.

    Raises the errors of :func:`model.checkpoint.load.load_weights`.
    """
    path = recipe.loss.teacher
    assert path is not None, "the recipe's teacher is no model"
    model = build_model(
        path,
        teacher_config(context.ds_config),
        dtype=TORCH_DTYPES[recipe.model.dtype],
        device=context.device,
        trust_remote_code=recipe.model.trust_remote_code,
        attn_implementation=recipe.model.attn_implementation,
        experts=recipe.model.experts,
    )
    _, linear = output_head(model)
    vocabulary = common_vocabulary(context.tokenizer, logits, linear.out_features)
    if vocabulary is not None:
        say(
            f"distillation compares the {vocabulary:,} tokens of the tokenizer: the student has {logits:,} logits, "
            f"the teacher {linear.out_features:,}"
        )
    report = load_weights(model, path, method=recipe.model.load)
    say(f"teacher: {report.summary()}")
    if is_quantized(Path(path)):
        say("teacher: its weights are decoded from its codes, and its inputs are not quantized")
    _, head_proxy = take_out_head(model)
    module = initialize_frozen(model, context.ds_config)
    settle_function(
        head_proxy, lambda ids: module(input_ids=ids.to(context.device), use_cache=False).logits, model.config
    )
    return ModelTeacher(module, head_proxy, linear.requires_grad_(False), vocabulary)


def open_cached_teacher(recipe: Recipe, samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> CachedTeacher:
    """Open ``loss.teacher_cache``, and check that it was made from this run's samples and teacher; a collective.

    Raises:
        RankError: on every rank: the cache is damaged, or was made from other samples or by another tokenizer or
            teacher.
    """
    directory, top_k = recipe.loss.teacher_cache, recipe.loss.top_k
    assert directory is not None, "the recipe's teacher is no cache"
    with errors_on_all_ranks(OSError, ValueError):
        cache = TeacherCache(directory)
        if top_k is not None and top_k > cache.manifest.top_k:
            raise ValueError(
                f"loss.top_k: {top_k}, expected at most {cache.manifest.top_k}, as many as loss.teacher_cache "
                f"{directory} keeps"
            )
        cache.check_made_from(samples, tokenizer)
        teacher = recipe.loss.teacher
        if teacher is not None and (Path(teacher) / "config.json").is_file():
            cache.check_teacher(teacher, digest_of_checkpoint(teacher))
        logits = _logits_of(recipe)
        if cache.manifest.vocabulary not in (logits, tokens := max(tokenizer.get_vocab().values()) + 1):
            raise ValueError(
                f"loss.teacher_cache: {directory} is of {cache.manifest.vocabulary:,} tokens, expected {logits:,}, as "
                f"many as the student has logits, or {tokens:,}, as many as the tokenizer has"
            )
        cache.verify(rank(), world_size())
    say(f"teacher: {cache.manifest.positions:,} positions from {directory}, no model in memory")
    return CachedTeacher(cache)


def _logits_of(recipe: Recipe) -> int:
    """Read the number of the student's logits from its configuration."""
    own = recipe.model
    config = AutoConfig.from_pretrained(own.path, trust_remote_code=own.trust_remote_code, local_files_only=True)
    return int(config.get_text_config().vocab_size)
