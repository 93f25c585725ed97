"""Find a checkpoint, check that it is complete, and check that a recipe may resume from it."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path

from engine.checkpoint.checked_files import file_crc32, read_object
from engine.config.config import Recipe, recipe_options
from engine.config.errors import RecipeError
from engine.config.hub import HUB, named
from engine.config.reading import load_recipe
from engine.config.sections import LossRecipe, OptimRecipe, TrainRecipe
from model.checkpoint.fingerprint import digest_of_checkpoint
from model.console import working
from model.ranks import errors_on_all_ranks, rank, world_size

LATEST = "latest"
BEST = "best.json"
LAST = "step_~"  # sorts after every step directory
STEP_DIRECTORIES = "step_????????"
STEP_NAME = r"step_\d{8}"


@dataclass(frozen=True)
class TrainingCheckpoint:
    """Directory of one step's checkpoint, with the contents of its manifest; all files exist with the right sizes."""

    path: Path
    step: int
    """Optimizer steps done."""
    world_size: int
    stage: int
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 of every file, by its name."""
    samples: str
    """Digest of the training samples."""
    base: str | None
    """Digest of the files of model.path in a run with adapters; else None."""
    left_out: Mapping[str, int]
    """Fingerprints (:mod:`model.checkpoint.fingerprint`) of the frozen weights that the checkpoint does not contain, by
    name; these weights are read from model.path."""


@dataclass(frozen=True)
class Best:
    """Content of ``best.json``: the best checkpoint and its metric."""

    name: str
    """Name of the step directory."""
    step: int
    metric: str
    value: float
    of: str = ""
    """Digest of everything on which the metric depends, apart from the model."""


def find_checkpoint(directory: Path, which: bool | str = True) -> TrainingCheckpoint:
    """Find a checkpoint in ``directory``. ``which`` is the value of ``train.resume``: True (the latest), ``best``, or
    the name of a step directory. Raises ValueError if there is no such checkpoint, or it is incomplete."""
    if which == "best":
        best = best_checkpoint(directory)
        if best is None:
            raise ValueError(
                f"{directory} has no {BEST}: no checkpoint was marked as the best; set train.resume to true or to a "
                "checkpoint's name"
            )
        return read_step_directory(directory / best.name)
    if isinstance(which, str):
        return read_step_directory(directory / which)
    pointer = directory / LATEST
    if not pointer.is_file():
        # A run killed before it wrote its first pointer may have a complete checkpoint.
        if (newest := _newest_whole(directory)) is not None:
            return read_step_directory(newest)
        raise ValueError(
            f"{directory} has no checkpoint to resume from (no file {LATEST}); set train.resume: false to start over"
        )
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(STEP_NAME, name):
        raise ValueError(
            f"{pointer} is damaged: {name[:40]!r}, expected a name like step_00001000{_offer(directory / LAST)}"
        )
    return read_step_directory(directory / name)


def best_checkpoint(directory: Path) -> Best | None:
    """Read ``best.json``; None if it does not exist. Raises ValueError if the file is damaged."""
    path = directory / BEST
    if not path.is_file():
        return None
    try:
        best = Best(**json.loads(path.read_text(encoding="utf-8")))
        if not re.fullmatch(STEP_NAME, str(best.name)):
            raise ValueError(f"name is {best.name!r}")
        return Best(best.name, int(best.step), str(best.metric), float(best.value), str(best.of))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: expected name, step, metric and value ({error}); remove it, and the next evaluated "
            "checkpoint is the best one"
        ) from error


def read_step_directory(path: Path) -> TrainingCheckpoint:
    """Read the manifest of a step directory, and compare the size of every file with it. Raises ValueError if the
    directory is missing or incomplete; the message names the bad file and the last complete checkpoint before it."""
    try:
        return _read_manifest(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}{_offer(path)}") from error


def _read_manifest(path: Path) -> TrainingCheckpoint:
    """Read the manifest of a step directory. Raises ValueError if the manifest is damaged, or a file in it is missing
    or has another size."""
    if not path.is_dir():
        raise ValueError("is not there")
    if not (path / "state.json").is_file():
        raise ValueError("is incomplete: it has no state.json")
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        step, ranks, stage = (int(state[key]) for key in ("step", "world_size", "stage"))
        files = {str(name): (int(size), int(crc32)) for name, (size, crc32) in state["files"].items()}
        samples, base = state["samples"], state["base"]
        left_out = {str(name): int(value) for name, value in state["left_out"].items()}
        good = step >= 0 and 1 <= ranks <= len(files) and stage in range(4)
        if not good or any(
            Path(name).name != name or name == ".." for name in files
        ):  # nothing outside of the directory
            raise ValueError
    except OSError:
        raise ValueError("is incomplete: it has no state.json") from None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError("is damaged: state.json is not what was written") from None
    for name, (size, _) in files.items():
        if not (path / name).is_file():  # reading a pipe or a device would never end
            raise ValueError(f"is damaged: {name} is missing")
        found = (path / name).stat().st_size
        if found != size:
            raise ValueError(f"is damaged: {name} has {found:,} bytes, expected {size:,}")
    return TrainingCheckpoint(path, step, ranks, stage, files, samples, base, left_out)


def _newest_whole(directory: Path, *, before: str = LAST) -> Path | None:
    """Find the newest complete step directory with a name before ``before``; None if there is none."""
    for path in sorted(directory.glob(STEP_DIRECTORIES), reverse=True):
        if path.name < before:
            with suppress(ValueError):
                return _read_manifest(path).path
    return None


def _offer(path: Path) -> str:
    """Return a clause for error texts that names the newest complete checkpoint before ``path``, or what else to do."""
    if (whole := _newest_whole(path.parent, before=path.name)) is None:
        return "; there is no complete checkpoint before it: start over in another output_dir"
    return f"; the one before it is {whole.name}: set train.resume to {whole.name} to go on from there"


def check_resumable(recipe: Recipe, directory: Path) -> TrainingCheckpoint:
    """Find the checkpoint to resume from, and refuse it if the recipe changes an option that a resumed run must keep.
    Raises RecipeError if there is no complete checkpoint, its recipe or ``best.json`` cannot be read, or these differ:
    an option that must be kept (:func:`stays`), the base model of adapters, the scheduled events before the
    checkpoint's step, or the number of rows per step. The position in the data is the step number, so a step must have
    the same samples on any number of ranks."""
    try:
        found = find_checkpoint(directory, recipe.train.resume)
        best_checkpoint(directory)  # raises if damaged, before the first save reads it
    except (OSError, ValueError) as error:
        raise RecipeError(f"train.resume: {error}") from error
    try:
        before = load_recipe(found.path / "recipe.yaml")
    except (OSError, ValueError) as error:
        raise RecipeError(f"train.resume: {error}{_offer(found.path)}") from error
    changed = changes(before, recipe)
    if (was := _events_before(before, found.step)) != (now := _events_before(recipe, found.step)):
        changed.append(f"events before step {found.step} (were {was}, are {now})")
    changed += _rows_problem(before, found.world_size, recipe, int(os.environ.get("WORLD_SIZE", "1")))
    if recipe.adapter.on and found.base != (digest := digest_of_checkpoint(recipe.model.path)):
        changed.append(f"model.path (its files' digest was {found.base}, is {digest}: adapters of another base)")
    if changed:
        raise RecipeError(
            f"train.resume: {found.path} cannot be continued with other {', '.join(changed)}; set these "
            "options to their old values, or start a new run in another output_dir"
        )
    return found


def other_commits(checkpoint: TrainingCheckpoint, recipe: Recipe) -> Iterator[str]:
    """Yield a warning for each model of the Hugging Face Hub whose commit or name differs from that of the checkpoint's
    run."""
    before = load_recipe(checkpoint.path / "recipe.yaml")
    for (key, old, item), (_, new, _) in zip(recipe_options(before), recipe_options(recipe), strict=True):
        was, now = getattr(old, item.name), named(getattr(new, item.name))
        if item.metadata.get(HUB, "data") != "data" and was != now and "@" in f"{was}{now}" and was and now:
            yield f"warning: {key}: {now}, was {was} when {checkpoint.path} was written"


def without_effect(checkpoint: TrainingCheckpoint, recipe: Recipe) -> Iterator[str]:
    """Yield a warning for each option (of ``FIRST_VALUES``) that was changed in the recipe, but is read in a new run
    only: in the resumed run it has no effect."""
    before = load_recipe(checkpoint.path / "recipe.yaml")
    for key in FIRST_VALUES:
        was, now = (attrgetter(key)(one) for one in (before, recipe))
        if named(now) != was:
            yield f"warning: {key} (was {was!r}, is {now!r}) has no effect: {checkpoint.path} has its own values"


def no_steps_left(checkpoint: TrainingCheckpoint, recipe: Recipe) -> Iterator[str]:
    """Yield a warning if the checkpoint has ``train.steps`` steps or more."""
    if checkpoint.step >= recipe.train.steps:
        yield (
            f"warning: {checkpoint.path} has {checkpoint.step} steps, and train.steps is {recipe.train.steps}: no step "
            "is left to train"
        )


def check_stage(checkpoint: TrainingCheckpoint, stage: int) -> None:
    """Refuse a run of another ZeRO ``stage`` than the checkpoint's; a collective. Raises RankError on every rank."""
    with errors_on_all_ranks(ValueError):
        if checkpoint.stage != stage:
            raise ValueError(
                f"{checkpoint.path} was written under ZeRO stage {checkpoint.stage}, but this run has stage {stage}: "
                "set deepspeed in the recipe to its earlier value"
            )


def check_samples(checkpoint: TrainingCheckpoint, samples: str) -> None:
    """Refuse training samples, given by their digest, that are not those of the checkpoint's run; a collective.

    A step selects samples by index, so with other samples a resumed run would train on some twice and never on others.

    Raises:
        RankError: on every rank: the digests differ on a rank.
    """
    with errors_on_all_ranks(ValueError):
        if checkpoint.samples != samples:
            raise ValueError(
                f"data.train: the samples are not those of the run that wrote {checkpoint.path} (digest {samples}, "
                f"was {checkpoint.samples}): the files have other content, or the tokenizer has changed; restore "
                "them, or start over in another output_dir"
            )


def _events_before(recipe: Recipe, step: int) -> list[str]:
    """Describe the recipe's events at steps below ``step``, and the start of fake quant if it is below. A resumed run
    does not repeat them: their effects are in the checkpoint."""
    start = recipe.quant.fake_quant_start
    events = [f"quant.fake_quant_start: {start}"] if 0 <= start < step else []
    return events + [
        str({key: value for key, value in asdict(event).items() if value is not None})
        for event in recipe.schedule
        if event.at is not None and event.at < step
    ]


def _rows_problem(before: Recipe, old_world: int, recipe: Recipe, world: int) -> list[str]:
    """Return a list with one error text, which names the remedy, if the number of rows per step has changed, else an
    empty list. Ranks that share rows count as one."""
    old_world, world = old_world // before.parallel.sequence, world // recipe.parallel.sequence
    was = before.data.micro_batch_size * before.train.gradient_accumulation_steps * old_world
    now = recipe.data.micro_batch_size * recipe.train.gradient_accumulation_steps * world
    if was == now:
        return []
    shared = recipe.parallel.sequence > 1
    counted = f"ranks{' / parallel.sequence' * shared}"
    rows = (
        f"rows per step (were {was}, are {now} = data.micro_batch_size * train.gradient_accumulation_steps * {counted})"
    )
    groups = f"{world} groups of ranks that share rows"
    if was % world:
        fitting = ", ".join(str(count) for count in range(1, was + 1) if was % count == 0)
        found = groups if shared else f"{world} ranks"
        return [f"{rows}: {was} rows are not divisible by {found}, expected one of {fitting}"]
    micro = recipe.data.micro_batch_size
    micro = micro if (was // world) % micro == 0 else 1
    expected = f"data.micro_batch_size {micro} and train.gradient_accumulation_steps {was // world // micro}"
    return [f"{rows}: with {groups if shared else f'{world} rank(s)'} set for example {expected}"]


def verify_checkpoint(checkpoint: TrainingCheckpoint) -> None:
    """Verify the CRC-32 of every file, and unpickle ``.pt`` files with a restricted unpickler; a collective.

    A file that would run code is refused before DeepSpeed opens it. Each rank verifies a share of the files. Raises
    RankError on every rank if a file is damaged, or contains more than tensors and plain values. The text names the
    last complete checkpoint before this one.
    """
    with working(f"checking {checkpoint.path}"), errors_on_all_ranks(OSError, ValueError):
        # Sorted by size, so that all ranks read about equally many bytes.
        names = sorted(checkpoint.files, key=lambda name: (checkpoint.files[name][0], name))
        for name in names[rank() :: world_size()]:
            try:
                if file_crc32(checkpoint.path / name) != checkpoint.files[name][1]:
                    changed = f"the content of {name} is not what was written (CRC-32)"
                    raise ValueError(f"{checkpoint.path} is damaged: {changed}")
                if name.endswith(".pt"):
                    read_object(checkpoint.path / name, mmap=True)
            except ValueError as error:
                raise ValueError(f"{error}{_offer(checkpoint.path)}") from error


# Options that a resumed run takes from its new recipe, in the sections on which a checkpoint's content depends. All
# other options of these sections must stay. data: the position is a step, and a step must select the same samples.
# model, adapter, learnable, schemes and optim.moments: shapes and dtypes of parameters, scales and optimizer states.
# quant.input_range: histograms of observers. quant.scales_follow_weights and signed_scales: theta corrects a fixed
# scale or the absmax of each step, with the allowed signs. quant.rotate: weights are rotated with inputs.
# quant.fuse_norms: norms that write codes store the next layers' scales under their own names. loss.teacher_weights:
# losses may change, the values of the same teacher's weights must not. train.seed: random states begin with it.
#
# Sections that are not here may change: rates, losses, events, output. The number of rows per step and the ZeRO stage
# have checks of their own.
MAY_CHANGE: dict[str, set[str]] = {
    "data": {"cache", "eval", "micro_batch_size", "show", "skip", "server", "max_age", "server_seconds"},
    "model": {"path", "trust_remote_code", "attn_implementation", "load"},
    "quant": {
        # First scales and codes, which the checkpoint's replace,
        *("scales", "start", "snap_to_codes", "init", "weight_range", "percentile", "calibration_batches"),
        *("initial_input_scale", "input_headroom", "fake_quant_start"),
        # and implementations of the same computation.
        *("compute", "fp8_fast_accum", "keep_codes", "quantized_all_gather"),
    },
    "learnable": set(),
    "adapter": {"start", "init", "dropout"},
    "optim": {option.name for option in fields(OptimRecipe)} - {"moments"},
    "loss": {option.name for option in fields(LossRecipe)} - {"teacher_weights"},
    "train": {option.name for option in fields(TrainRecipe)} - {"seed"},
}


# Options of MAY_CHANGE that only a new run reads; a warning says so if they change.
FIRST_VALUES = ("quant.scales", "quant.init", "adapter.start", "adapter.init")


def stays(key: str) -> bool:
    """Tell if the option ``key`` (``data.seed``) must have the same value in a resumed run as before."""
    section, _, name = key.partition(".")
    return section in MAY_CHANGE and name not in MAY_CHANGE[section]


def changes(before: Recipe, recipe: Recipe) -> list[str]:
    """List the options that must stay (:func:`stays`), but differ between the old recipe ``before`` and the new one,
    like ``data.seed (was 0, is 3)``."""
    found = []
    for (key, old, item), (_, new, _) in zip(recipe_options(before), recipe_options(recipe), strict=True):
        was, now = getattr(old, item.name), getattr(new, item.name)
        if key == "data.train":  # files may be moved, but not renamed, left out or added
            was, now = ([Path(file).name for file in files] for files in (was, now))
        if stays(key) and was != now:
            found.append(f"{key} (was {was!r}, is {now!r})")
    return found
