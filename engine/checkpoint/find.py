"""Which checkpoint is meant, whether it is whole, and whether a recipe may go on from it.

Which options of a recipe may differ where a run goes on from a checkpoint. Every option is in one of the two lists.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.files import file_crc32, read_object
from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.reading import load_recipe
from model.fingerprint import digest_of_checkpoint
from model.ranks import errors_on_all_ranks, rank, world_size

LATEST = "latest"
BEST = "best.json"
STEPS = "step_????????"
STEP_NAME = r"step_\d{8}"


@dataclass(frozen=True)
class Checkpoint:
    """A step directory whose files are there with their sizes."""

    path: Path
    step: int
    """Optimizer steps done."""
    world_size: int
    stage: int
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of every file, by its name."""
    samples: str | None = None
    """Digest of the training samples; None in checkpoints of before there was one."""
    base: str | None = None
    """Digest of the files of model.path, where adapters trained on them; else None."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Frozen weights that it does not hold, and the fingerprint of each (:mod:`model.checkpoint.fingerprint`): they are
    read from model.path."""


@dataclass(frozen=True)
class Best:
    """What ``best.json`` says."""

    name: str
    """Name of the step directory."""
    step: int
    metric: str
    value: float


def find_checkpoint(directory: Path, which: bool | str = True) -> Checkpoint:
    """Find the checkpoint that a recipe's ``train.resume`` means: True (the latest), ``best``, or a directory's name.

    Raises:
        ValueError: there is none, or it is not whole.
    """
    if which == "best":
        best = best_checkpoint(directory)
        if best is None:
            raise ValueError(f"{directory} has no {BEST}: no checkpoint was marked as the best")
        return read_checkpoint(directory / best.name)
    if isinstance(which, str):
        return read_checkpoint(directory / which)
    pointer = directory / LATEST
    if not pointer.is_file():
        # A run that was killed before it had written its first pointer has a checkpoint all the same.
        if (newest := _newest_whole(directory)) is not None:
            return read_checkpoint(newest)
        raise ValueError(
            f"{directory} has no checkpoint to resume from (no file {LATEST}); set train.resume: false to start anew"
        )
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(STEP_NAME, name):
        raise ValueError(f"{pointer} is damaged: {name[:40]!r}, expected a name like step_00001000")
    return read_checkpoint(directory / name)


def best_checkpoint(directory: Path) -> Best | None:
    """Read which checkpoint was marked last as the best, None if none was. Raises ValueError if the file is damaged."""
    path = directory / BEST
    if not path.is_file():
        return None
    try:
        best = Best(**json.loads(path.read_text(encoding="utf-8")))
        if not re.fullmatch(STEP_NAME, str(best.name)):
            raise ValueError(f"name is {best.name!r}")
        return Best(best.name, int(best.step), str(best.metric), float(best.value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: expected name, step, metric and value ({error}); remove it, and the next evaluated "
            "checkpoint is the best one"
        ) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the manifest of a step directory, and compare the size of every file with it.

    Raises:
        ValueError: it is not there or not whole; names the file, and the checkpoint before it.
    """
    try:
        return _read_manifest(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}{_offer(path)}") from error


def _read_manifest(path: Path) -> Checkpoint:
    """Read the manifest of a step directory. Raises ValueError with what is wrong, as far as names and sizes tell."""
    if not path.is_dir():
        raise ValueError("is not there")
    if not (path / "state.json").is_file():
        raise ValueError("is not a whole checkpoint: it has no state.json")
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        step, ranks, stage = (int(state[key]) for key in ("step", "world_size", "stage"))
        files = {str(name): (int(size), int(crc32)) for name, (size, crc32) in state["files"].items()}
        samples, base = state.get("samples"), state.get("base")
        left_out = {str(name): int(value) for name, value in state.get("left_out", {}).items()}
        good = step >= 0 and 1 <= ranks <= len(files) and stage in range(4)
        if not good or any(
            Path(name).name != name or name == ".." for name in files
        ):  # nothing outside of the directory
            raise ValueError
    except OSError:
        raise ValueError("is not a whole checkpoint: it has no state.json") from None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError("is damaged: state.json is not what was written") from None
    for name, (size, _) in files.items():
        if not (path / name).is_file():  # a pipe or a device would be read for ever
            raise ValueError(f"is damaged: {name} is missing")
        found = (path / name).stat().st_size
        if found != size:
            raise ValueError(f"is damaged: {name} has {found:,} bytes, expected {size:,}")
    return Checkpoint(path, step, ranks, stage, files, samples, base, left_out)


def _is_whole(path: Path) -> bool:
    """Whether a step directory is whole, as far as names and sizes tell."""
    try:
        _read_manifest(path)
    except ValueError:
        return False
    return True


def _newest_whole(directory: Path, *, before: str = "step_~") -> Path | None:
    """The newest step directory that looks whole, of those whose names come before another's; None without any."""
    names = (path for path in sorted(directory.glob(STEPS), reverse=True) if path.name < before)
    return next((path for path in names if _is_whole(path)), None)


def _offer(path: Path) -> str:
    """Name the newest step directory before a damaged one that looks whole, as the end of the error's text."""
    if (whole := _newest_whole(path.parent, before=path.name)) is None:
        return "; there is no whole checkpoint before it"
    return f"; the one before it is {whole.name}: set train.resume to {whole.name} to go on from there"


def check_resumable(recipe: Recipe, directory: Path) -> Checkpoint:
    """Find what is to be resumed, and refuse before any work what cannot be resumed as it was.

    Raises:
        RecipeError: there is no whole checkpoint, or its batches were others: the data cursor is a step, so the samples
            of a step must stay the same, however many ranks share them.
    """
    try:
        found = find_checkpoint(directory, recipe.train.resume)
        best_checkpoint(directory)  # the first checkpoint to be written needs it
        before = load_recipe(found.path / "recipe.yaml")
    except (OSError, ValueError) as error:
        raise RecipeError(f"train.resume: {error}") from error
    changed = changes(before, recipe)
    changed += _rows_problem(before, found.world_size, recipe, int(os.environ.get("WORLD_SIZE", "1")))
    if recipe.adapter.on and found.base != (digest := digest_of_checkpoint(recipe.model.path)):
        changed.append(f"model.path (its files' digest was {found.base}, is {digest}: adapters of another base)")
    if changed:
        raise RecipeError(f"train.resume: {found.path} cannot be continued with other {', '.join(changed)}")
    return found


def check_samples(checkpoint: Checkpoint, samples: str) -> None:
    """Refuse other training samples than those of the run that wrote a checkpoint, whatever their files are called.

    A step takes samples by their numbers, so with others a resumed run would train on some twice and on some never. A
    collective.

    Raises:
        RankError: names the checkpoint.
    """
    with errors_on_all_ranks(ValueError):
        if checkpoint.samples not in (None, samples):
            raise ValueError(
                f"data.train: the samples are not those of the run that wrote {checkpoint.path} (digest {samples}, "
                f"was {checkpoint.samples}): the files have other content, or the tokenizer has changed; bring them "
                "back, or start anew in another output_dir"
            )


def _rows_problem(before: Recipe, old_world: int, recipe: Recipe, world: int) -> list[str]:
    """Say what to set so that a step takes as many rows as it did; nothing if it does."""
    was = before.data.micro_batch_size * before.train.gradient_accumulation_steps * old_world
    now = recipe.data.micro_batch_size * recipe.train.gradient_accumulation_steps * world
    if was == now:
        return []
    rows = f"rows per step (were {was}, are {now} = data.micro_batch_size * train.gradient_accumulation_steps * ranks)"
    if was % world:
        fitting = ", ".join(str(count) for count in range(1, was + 1) if was % count == 0)
        return [f"{rows}: {was} rows do not share out over {world} ranks, expected one of {fitting}"]
    micro = recipe.data.micro_batch_size
    micro = micro if (was // world) % micro == 0 else 1
    expected = f"data.micro_batch_size {micro} and train.gradient_accumulation_steps {was // world // micro}"
    return [f"{rows}: with {world} rank(s) set for example {expected}"]


def verify_checkpoint(checkpoint: Checkpoint) -> None:
    """Compare the CRC-32 of every file, and read those that hold tensors as far as their names and shapes.

    So a file that would run code is refused before DeepSpeed opens it. A collective, in which ranks share the files
    out.

    Raises:
        RankError: names a file that is not what was written, and the checkpoint before it; or one that asks for more
            than tensors and plain values.
    """
    with errors_on_all_ranks(OSError, ValueError):
        # By size, so that the share of every rank is about the same.
        names = sorted(checkpoint.files, key=lambda name: (checkpoint.files[name][0], name))
        for name in names[rank() :: world_size()]:
            if file_crc32(checkpoint.path / name) != checkpoint.files[name][1]:
                raise ValueError(
                    f"{checkpoint.path} is damaged: the content of {name} is not what was written (CRC-32)"
                    f"{_offer(checkpoint.path)}"
                )
            if name.endswith(".pt"):
                read_object(checkpoint.path / name, mmap=True)


# What the checkpoint holds is of these, by section.
STAYS = {
    # The data cursor is a step: the samples of a step must stay the same.
    "data": [
        "train",
        "weights",
        "held_out",
        "kind",
        "loss_on",
        "fields",
        "max_length",
        "too_long",
        "special_tokens",
        "packing",
        "seed",
    ],
    # Shapes and types of the parameters.
    "model": ["dtype", "experts"],
    # Scales of one scheme have shapes that fit another, and each group of the optimizer its parameters. Observers have
    # a histogram or none; a theta corrects a fixed scale or the absmax of its step, of the sign that scales may have.
    # Weights are turned where inputs are. Norms that write codes have the scale of their readers under their own names.
    "quant": [
        "scheme",
        "schemes",
        "rules",
        "lm_head",
        "embedding",
        "exempt",
        "exempt_more",
        "input_range",
        "scales_follow_weights",
        "signed_scales",
        "rotate",
        "rotate_block",
        "fuse_norms",
    ],
    "learnable": ["weight", "embedding", "weight_scale", "act_scale", "norm", "router", "freeze"],
    "adapter": ["kind", "merge", "base", "rank", "alpha", "rslora", "targets", "ranks"],
}
# These are followed as they are given: rates, losses and events from here on; how the same is computed; where files
# lie; what is measured, written and kept; first scales, which the checkpoint has. Rows per step (data.micro_batch_size,
# train.gradient_accumulation_steps) and the ZeRO stage (deepspeed) are compared as such.
MAY_CHANGE = {
    "": ["output_dir", "schedule", "deepspeed"],
    "data": ["eval", "micro_batch_size"],
    "model": ["path", "trust_remote_code", "attn_implementation", "load"],
    "adapter": ["start", "init", "dropout"],
    "quant": [
        "scales",
        "start",
        "snap_to_codes",
        "init",
        "weight_range",
        "percentile",
        "calibration_batches",
        "initial_input_scale",
        "compute",
        "fp8_fast_accum",
        "keep_codes",
        "quantized_all_gather",
        "fake_quant_start",
    ],
    "optim": [
        "lr",
        "embedding_lr",
        "norm_lr",
        "scale_lr",
        "act_scale_lr",
        "adapter_lr",
        "min_lr_ratio",
        "warmup_steps",
        "schedule",
        "decay_steps",
        "weight_decay",
        "betas",
        "eps",
        "grad_clip",
    ],
    "loss": [
        "lm_weight",
        "kd_weight",
        "kd",
        "temperature",
        "top_k",
        "tail",
        "teacher",
        "teacher_cache",
        "diagnostics_every",
        "chunk_tokens",
    ],
    "train": [
        "steps",
        "gradient_accumulation_steps",
        "seed",
        "activation_checkpointing",
        "activation_offload",
        "compile",
        "log_every",
        "quant_stats_every",
        "checkpoint_every",
        "resume",
        "keep_checkpoints",
        "max_skipped_steps",
    ],
    "eval": ["every", "best"],
    "export": ["enabled", "dir", "format", "template", "max_shard_size"],
}


def options(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """Section, name and value of every option; the section is "" for those that have none."""
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        if is_dataclass(value):
            yield from ((item.name, inner.name, getattr(value, inner.name)) for inner in fields(value))
        else:
            yield "", item.name, value


def changes(before: Recipe, recipe: Recipe) -> list[str]:
    """What ``recipe`` says otherwise than ``before`` of what must stay, like ``data.seed (was 0, is 3)``."""
    found = []
    for (section, name, was), (_, _, now) in zip(options(before), options(recipe), strict=True):
        if (section, name) == ("data", "train"):  # files may be moved, but not renamed, left out or added
            was, now = ([Path(file).name for file in files] for files in (was, now))
        if name in STAYS.get(section, ()) and was != now:
            found.append(f"{section}.{name} (was {was!r}, is {now!r})")
    return found
