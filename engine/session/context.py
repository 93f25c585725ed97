"""Setup before the weights: process group, DeepSpeed configuration, kernels, seeds, tokenizer, data, empty models."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from data.cache import TokenCache, digest
from data.chat import read_chat
from data.loader import HeldOut, Loader, MicroBatch, sample_inputs, seen_in_training, split_held_out
from data.samples import IGNORE, Samples, load_tokenizer, samples_of
from data.show import Detokenizer, Split, described
from data.text import read_text
from engine.cluster.job import join_ranks
from engine.cluster.nodes import check_ranks_agree, check_same_samples, files_of
from engine.config.config import Recipe
from engine.config.deepspeed import offloads_to_nvme, remarks, resolve
from engine.config.errors import RecipeError
from model.build import build_model, read_config
from model.console import progress_bar, working
from model.ranks import (
    errors_on_all_ranks,
    gather_objects,
    listed,
    raise_everywhere,
    rank,
    reduce_over_ranks,
    say,
    world_size,
)
from model.zero import load_async_io
from quant import prepare_kernels

if TYPE_CHECKING:
    from model.sequence import SharedRows

META = torch.device("meta")
SLOW_SECONDS = 60.0
"""Time of reading data files after which a run names the option that shortens it."""
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class RunContext:
    """Device, DeepSpeed configuration and tokenizer of a run, ready before the model exists."""

    device: torch.device
    ds_config: dict[str, Any]
    tokenizer: PreTrainedTokenizerBase


def start_ranks(recipe: Recipe, inputs: Mapping[str, Any] | None = None) -> RunContext:
    """Start the process group, prepare kernels, seed the random generators and read the tokenizer; a collective.
    ``inputs``: values beside the recipe that must be equal on all ranks (such as schedule actions), by name.

    Raises:
        RecipeError: on every rank, before there is a process group: the DeepSpeed configuration is wrong, a checkpoint
            cannot be fetched, this machine has no fp16, or a launcher is missing.
        RankError: as in :func:`init_ranks`; or there is no tokenizer, or nvme_path cannot be used.
    """
    recipe.fetch(("model", "quant", "adapter"))
    ds_config = resolve(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    accelerator = get_accelerator()
    if recipe.model.dtype == "float16" and not accelerator.is_fp16_supported():
        raise RecipeError(
            f"model.dtype: 'float16', expected bfloat16 or float32: DeepSpeed has no fp16 on this machine's "
            f"{accelerator.device_name()}"
        )
    asked = {**asdict(recipe), "deepspeed configuration": ds_config, **(inputs or {})}
    device = init_ranks(asked, files_of(recipe))
    if offloads_to_nvme(ds_config):
        with (
            working("compiling DeepSpeed's async_io, once per machine"),
            errors_on_all_ranks(ValueError, OSError, key="zero_optimization.offload_optimizer: device 'nvme'"),
        ):
            load_async_io()
            ds_config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(_own_directory(ds_config, recipe))
    with working("compiling kernels, once per machine"):
        slower = Counter(text for text in gather_objects(prepare_kernels()) if text)
    for text, ranks in slower.items():
        say(text if ranks == world_size() else f"{text} ({ranks} of {world_size()} ranks)")
    for line in remarks(recipe.deepspeed):
        say(line)
    for seeder in (torch.manual_seed, random.seed, np.random.seed):
        seeder(recipe.train.seed)
    return RunContext(device, ds_config, read_tokenizer(recipe))


def _own_directory(ds_config: dict[str, Any], recipe: Recipe) -> Path:
    """Create a directory below ``nvme_path`` that no other running job uses: DeepSpeed's names of files differ only by
    rank. A resumed run finds the same directory, and overwrites the files in it."""
    outputs = digest([os.path.realpath(path) for path in (recipe.output_dir, recipe.export_dir())])
    directory = Path(ds_config["zero_optimization"]["offload_optimizer"]["nvme_path"], f"deepqat-{outputs}")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def init_ranks(
    inputs: Mapping[str, Any] | None = None, files: Mapping[str, str | Path | None] | None = None
) -> torch.device:
    """Start the process group (:func:`engine.cluster.job.join_ranks`) and return this rank's device; a collective.

    ``inputs`` (arguments by name), and the contents of ``files`` (paths by name), must be equal on all ranks. Raises
    the errors of join_ranks, and RankError if the ranks differ, or another rank failed before the group existed.
    """
    device = join_ranks()
    raise_everywhere(None)
    check_ranks_agree(inputs or {}, files or {})
    return device


def stage_0(recipe: Recipe) -> dict[str, Any]:
    """Return a DeepSpeed configuration that partitions nothing, in the recipe's dtype."""
    precision = {"bfloat16": {"bf16": {"enabled": True}}, "float16": {"fp16": {"enabled": True}}}
    return {"zero_optimization": {"stage": 0}, **precision.get(recipe.model.dtype, {})}


def build_for(
    recipe: Recipe,
    path: str,
    ds_config: dict[str, Any],
    device: torch.device,
    hold: Callable[[PreTrainedModel], None] | None = None,
    *,
    untie: bool = False,
) -> PreTrainedModel:
    """Build the student or the teacher in ``path`` without weights, with the options of the recipe's section model, and
    let ranks share rows of tokens if ``parallel.sequence`` says so. The other arguments are those of
    :func:`model.build.build_model`."""
    own = recipe.model
    model = build_model(
        path,
        ds_config,
        dtype=TORCH_DTYPES[own.dtype],
        device=device,
        trust_remote_code=own.trust_remote_code,
        attn_implementation=own.attn_implementation,
        experts=own.experts,
        hold=hold,
        untie=untie,
    )
    if (rows := rows_of(recipe)) is not None:
        with errors_on_all_ranks(ValueError, key=path):
            rows.attach(model)
    return model


def rows_of(recipe: Recipe) -> "SharedRows | None":
    """Return the object by which ranks share the tokens of a row; None if ``parallel.sequence`` is 1."""
    if recipe.parallel.sequence == 1:
        return None
    from model.sequence import shared_rows

    return shared_rows(recipe.parallel.sequence)


def build_loader(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Mapping[str, int],
    make: Callable[..., Loader] = Loader,
) -> tuple[Loader, HeldOut | None]:
    """Read the samples and build the loader; a collective.

    Args:
        tokens: number of token ids of each model, by the recipe's key of the model: ``model.path``, ``loss.teacher``.
        make: the class of the loader, or a function with the arguments of `Loader`.

    Returns:
        The loader, which shards the training samples over ranks and optimizer steps, and the held-out samples (None
        if the recipe has none).

    Raises RankError on every rank: data cannot be read or do not suffice, a model lacks a token, or the ranks differ.
    """
    settings, together, rows = recipe.data, recipe.parallel.sequence, rows_of(recipe)
    found = read_data(recipe, tokenizer)
    if settings.show:
        for text in described(found.splits(), Detokenizer(tokenizer), settings.show):
            say(text)
    training, held_out = found.training, found.held_out + found.evaluation
    with errors_on_all_ranks(ValueError):
        for part in (training, held_out):
            _check_tokens(recipe, tokenizer, part, tokens)
    sharded: dict[str, Any] = {
        "micro_batch_size": settings.micro_batch_size,
        "rank": rank() // together,
        "world": world_size() // together,
        "pad_token_id": pad_token(tokenizer, min(tokens.values())),
        "share": None if rows is None else rows.share,
        "together": together,
    }
    check_same_samples(training, held_out)
    with errors_on_all_ranks(ValueError):
        loader = make(
            training,
            gradient_accumulation_steps=recipe.train.gradient_accumulation_steps,
            seed=settings.seed,
            packed_length=settings.max_length if settings.packing else None,
            weights=settings.weights_by_file(),
            skip=found.skip,
            **sharded,
        )
    return loader, HeldOut(held_out, **sharded) if held_out else None


def _check_tokens(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, samples: Samples, tokens: Mapping[str, int]
) -> None:
    """Raise ValueError for samples with a token for which a model has no embedding or logit."""
    key, count = min(tokens.items(), key=lambda item: item[1])
    section, name = key.split(".")
    path = getattr(getattr(recipe, section), name)
    if samples.highest < count:
        return
    beyond = [sample for sample in samples if max(sample.input_ids.max(), sample.labels.max()) >= count]
    if not beyond:
        return
    ids = {int(token) for sample in beyond for token in (*sample.input_ids, *sample.labels) if token >= count}
    first = min(int(token) for token in (*beyond[0].input_ids, *beyond[0].labels) if token >= count)
    raise ValueError(
        f"{beyond[0].where()}: found token {first} ({tokenizer.convert_ids_to_tokens(first)!r}), expected ids below "
        f"{count}, the number of tokens of {key} {path} ({len(beyond):,} samples have {len(ids):,} "
        "such tokens): take the tokenizer that belongs to the model, or add rows to its embeddings "
        "(resize_token_embeddings of transformers)"
    )


def pad_token(tokenizer: PreTrainedTokenizerBase, count: int) -> int:
    """Return the id of the token that pads rows: the tokenizer's pad token, or 0 if there is none below ``count``, the
    number of token ids. Neither attention nor losses see the padding."""
    pad = tokenizer.pad_token_id
    if pad is not None and pad >= count:
        say(f"data: rows are padded with token 0: the tokenizer's pad token {pad} has no embedding (of {count})")
    return pad if pad is not None and pad < count else 0


def read_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Read the tokenizer of the student's checkpoint. Raises RankError on every rank if there is none, or if
    config.json cannot be read."""
    path, trust = recipe.model.path, recipe.model.trust_remote_code
    with errors_on_all_ranks(OSError, ValueError):
        read_config(Path(path), trust, rotated=True)  # else the tokenizer would be blamed for a damaged config.json
        return load_tokenizer(path, trust_remote_code=trust)


@dataclass
class Data:
    """Samples of a run by their use. ``skip``: indices of training samples that are in batches but have no targets
    (data.skip)."""

    training: Samples
    skip: list[int]
    held_out: Samples
    evaluation: Samples

    def splits(self) -> dict[Split, Samples]:
        """Return the samples by use: ``train``, ``skip``, ``held_out``, ``eval``. Skipped samples are not in ``train``,
        and all their labels are -100, as in training."""
        skip = set(self.skip)
        trained = self.training.take(np.delete(np.arange(len(self.training)), self.skip))
        skipped = [
            replace(self.training[index], labels=np.full_like(self.training[index].labels, IGNORE))
            for index in sorted(skip)
        ]
        return {"train": trained, "skip": samples_of(skipped), "held_out": self.held_out, "eval": self.evaluation}


def read_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Read the samples of data.train, data.held_out (split off from them) and data.eval; a collective. Held-out copies
    of training samples are removed. Raises RankError on every rank if a line is bad, all held-out samples are copies, a
    sample of data.eval is trained on too, or a line of data.skip is no training sample."""
    settings = recipe.data
    none = samples_of([])
    prompts = settings.kind == "on_policy"
    found = Data(read_samples(recipe, tokenizer, settings.train, prompts=prompts), [], none, none)
    with errors_on_all_ranks(ValueError):
        if settings.held_out:
            found.training, chosen = split_held_out(found.training, settings.held_out, settings.seed)
            found.held_out = _without_copies(found.training, chosen)
        found.skip = _skipped(found.training, settings.skip)
    if settings.eval:
        found.evaluation = read_samples(recipe, tokenizer, settings.eval)
        _check_unseen(found.training, found.evaluation)
    return found


def _skipped(samples: Samples, lines: Sequence[str]) -> list[int]:
    """Print the number of samples that ``data.skip`` names, and return their indices. Raises ValueError for a line that
    is no training sample."""
    if not lines:
        return []
    indices = {line: samples.named(line) for line in lines}
    if unknown := [line for line in lines if not len(indices[line])]:
        raise ValueError(
            f"data.skip: {listed(unknown, 3)}, expected lines of data.train that are samples to train on, such as "
            f"{samples[0].where()}"
        )
    say(
        f"data.skip: {len(set(lines)):,} samples are not learned; a step that has only these takes the rows of the "
        "step after it"
    )
    return [int(index) for found in indices.values() for index in found]


def read_samples(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, files: Sequence[str], *, prompts: bool = False
) -> Samples:
    """Read and tokenize files, or read their tokens from ``data.cache``; a collective. ``prompts``: True to leave out
    the last answer of each chat, which the student will write. Raises RankError on every rank if a line is bad."""
    settings = recipe.data
    cache = TokenCache(settings.cache, say)
    bar = progress_bar if settings.cache is None else partial(progress_bar, any_rank=True)  # one rank tokenizes
    options: dict[str, Any] = {"progress": bar, "cache": cache}
    chats, texts = ([file for file in files if settings.is_text(file) == plain] for plain in (False, True))
    samples, began = samples_of([]), time.monotonic()
    with errors_on_all_ranks(OSError, ValueError):
        if chats:
            samples, counts = read_chat(
                chats,
                tokenizer,
                fields=settings.fields,
                max_length=settings.max_length - (settings.new_tokens if prompts else 0),
                prompts=prompts,
                loss_on=settings.loss_on,
                too_long=settings.too_long,
                special_tokens=settings.special_tokens,
                say=partial(say, any_rank=settings.cache is not None),
                **options,
            )
            by_file = counts.by_file.items() if settings.show and len(chats) > 1 else ()
            for line in (counts.summary(), *(f"{file}: {one.summary()}" for file, one in by_file), *counts.notes()):
                say(f"data: {line}")
        if texts:
            blocks = read_text(texts, tokenizer, settings.max_length, settings.special_tokens, **options)
            kept = f"; {blocks.spelled:,} special tokens spelled out and kept (data.special_tokens)"
            say(f"data: {len(blocks):,} blocks of {settings.max_length:,} tokens{kept if blocks.spelled else ''}")
            samples += blocks
        if settings.cache is None and (took := time.monotonic() - began) > SLOW_SECONDS:
            say(f"data.cache: every rank tokenized its files in {took:.0f} s; set data.cache to keep the tokens")
        return samples


def samples_on_all_ranks(
    batches: Iterable[MicroBatch], together: int = 1, shared: "SharedRows | None" = None
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the samples of all batches without padding, in groups of samples of equal length; every rank yields equally
    many groups.

    A collective runs before the first group.

    Args:
        batches: micro-batches, the same number on every rank.
        together: maximal number of samples in a group.
        shared: if given, the ranks that share rows have the same batches, and divide their samples.

    Yields:
        ``input_ids`` [n, T] of a group, and True. A rank that has no more groups yields filler tokens and False until
        all ranks are done.
    """
    given = list(batches)
    samples = (ids for batch in given for ids in sample_inputs(batch))
    own = samples if shared is None else islice(samples, shared.index, None, shared.ranks)
    groups = _of_equal_length(own, together)
    most = int(reduce_over_ranks(torch.tensor(len(groups)), dist.ReduceOp.MAX))
    for index in range(most):
        counts = index < len(groups)
        yield groups[index] if counts else given[0]["input_ids"][:1, :2], counts


def _of_equal_length(samples: Iterable[torch.Tensor], most: int) -> list[torch.Tensor]:
    """Group samples [1, T] of equal length into tensors [n, T], in the order of the first sample of each group."""
    groups: list[list[torch.Tensor]] = []
    filling: dict[int, list[torch.Tensor]] = {}
    for ids in samples:
        group = filling.setdefault(ids.shape[1], [])
        if not group:
            groups.append(group)
        group.append(ids)
        if len(group) == most:
            del filling[ids.shape[1]]
    return [torch.cat(group) for group in groups]


def _without_copies(training: Samples, held_out: Samples) -> Samples:
    """Remove copies of training samples from held-out samples. Raises ValueError if all are copies."""
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
    say(f"data: {text}; these copies are not evaluated")
    return held_out.take(np.delete(np.arange(len(held_out)), [*seen]))


def _check_unseen(training: Samples, given: Samples) -> None:
    """Refuse samples of data.eval that are in data.train too. Raises RankError on every rank."""
    with errors_on_all_ranks(ValueError):
        if seen := seen_in_training(training, given):
            index, copy = next(iter(seen.items()))
            raise ValueError(
                f"data.eval: {len(seen):,} of {len(given):,} samples are in data.train too, like "
                f"{given[index].where()}, which is {copy.where()}; remove them from one of the two, or use "
                "data.held_out"
            )
