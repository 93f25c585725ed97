"""From the recipe's data section to batches: tokenizer, samples, what every rank takes of them, what is held out."""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from data.chat import read_chat
from data.held_out import HeldOut, seen_in_training, split
from data.loader import Loader
from data.samples import Sample, load_tokenizer
from data.special import SpecialTexts
from data.text import read_text
from engine.cluster.nodes import check_same_samples, several_machines
from engine.recipe.recipe import Recipe
from model.ranks import errors_on_all_ranks, is_main, rank, say, world_size


def build_loader(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> tuple[Loader, HeldOut | None]:
    """Read the samples; a collective.

    Returns:
        The loader, which shares the training samples out over ranks and optimizer steps; and the samples that are held
        out, None if the recipe holds none out.
    """
    settings = recipe.data
    training = read_samples(recipe, tokenizer, settings.train)
    held_out: list[Sample] = []
    with errors_on_all_ranks(ValueError):
        if settings.held_out:
            training, chosen = split(training, settings.held_out, settings.seed)
            held_out = _without_copies(training, chosen)
    if settings.eval:
        given = read_samples(recipe, tokenizer, settings.eval)
        _check_unseen(training, given)
        held_out += given
    sharded = {
        "micro_batch_size": settings.micro_batch_size,
        "rank": rank(),
        "world": world_size(),
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
    }
    if several_machines():
        check_same_samples(training, held_out)
    with errors_on_all_ranks(ValueError):
        loader = Loader(
            training,
            gradient_accumulation_steps=recipe.train.gradient_accumulation_steps,
            seed=settings.seed,
            packed_length=settings.max_length if settings.packing else None,
            weights=settings.weights_by_file(),
            **sharded,
        )
    return loader, HeldOut(held_out, **sharded) if held_out else None


def read_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Read the tokenizer of the student's checkpoint. Raises RankError on every rank if there is none."""
    with errors_on_all_ranks(OSError, ValueError):
        return load_tokenizer(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)


def read_samples(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, files: Sequence[str]) -> list[Sample]:
    """Read and tokenise files, every rank for itself. Raises RankError on every rank if a line is bad."""
    settings = recipe.data
    with errors_on_all_ranks(OSError, ValueError):
        if settings.kind == "text":
            samples = read_text(files, tokenizer, settings.max_length, settings.special_tokens, progress=is_main())
            special = list(SpecialTexts(tokenizer).ids)
            # One EOS stands between two files.
            spelled = sum(int(np.isin(sample.input_ids, special).sum()) for sample in samples) - len(files) + 1
            kept = f"; {spelled:,} special tokens spelled out and kept (data.special_tokens)" if spelled > 0 else ""
            say(f"data: {len(samples):,} blocks of {settings.max_length:,} tokens{kept}")
            return samples
        samples, counts = read_chat(
            files,
            tokenizer,
            fields=settings.fields,
            max_length=settings.max_length,
            loss_on=settings.loss_on,
            too_long=settings.too_long,
            special_tokens=settings.special_tokens,
            progress=is_main(),
        )
        say(f"data: {counts.summary()}")
        return samples


def _without_copies(training: Sequence[Sample], held_out: list[Sample]) -> list[Sample]:
    """Held-out samples of which no copy is trained on. Raises ValueError if there are none."""
    seen = seen_in_training(training, held_out)
    if not seen:
        return held_out
    index, copy = next(iter(seen.items()))
    text = (
        f"{len(seen):,} of {len(held_out):,} held-out samples (data.held_out) are trained on too, as copies of the "
        f"same tokens: {held_out[index].where()} is {copy.where()}"
    )
    if len(seen) == len(held_out):
        raise ValueError(f"{text}; remove the copies from data.train")
    say(f"data: {text}; those are not evaluated")
    return [sample for place, sample in enumerate(held_out) if place not in seen]


def _check_unseen(training: Sequence[Sample], given: Sequence[Sample]) -> None:
    """Refuse samples of data.eval that are trained on. Raises RankError on every rank."""
    with errors_on_all_ranks(ValueError):
        if seen := seen_in_training(training, given):
            index, copy = next(iter(seen.items()))
            raise ValueError(
                f"data.eval: {len(seen):,} of {len(given):,} samples are in data.train too, like "
                f"{given[index].where()}, which is {copy.where()}; remove them from one of the two, or use "
                "data.held_out"
            )
