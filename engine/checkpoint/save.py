"""Training checkpoints: DeepSpeed's state of every rank, and what DeepSpeed does not keep.

``<directory>/step_00000100/`` holds DeepSpeed's files (weights and fp32 masters, optimizer state), ``recipe.yaml``, one
``rank_<r>.pt`` per rank (random state, observers: DeepSpeed stores a client's state of rank 0 only on stages 1 and 2)
and ``state.json``, the manifest: bytes and CRC-32 of every file. Everything is written into
``step_00000100.partial``, through to the disk, and renamed when every rank is done; then ``latest``, a file with the
step's name, is replaced by a rename. So a directory without ``.partial`` was whole when it got its name, whatever
interrupted the run, and what happened to it since shows in the manifest.

``best.json`` names the step with the best value of a metric (:func:`mark_if_best`), which stays when older ones go.

ZeRO's state holds no half-accumulated gradients, so checkpoints are taken at optimizer steps. The data cursor is the
step itself: the loader's batches are a function of the step. At another number of ranks see
``engine/checkpoint/reshard.py``.
"""

import json
import os
import random
import shutil
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.checkpoint.files import CheckedFiles, file_crc32, replace_text, sync_directory, write_text
from engine.checkpoint.reshard import load_resharded, merge_observers, reseed
from engine.recipe.checks import RecipeError
from engine.recipe.reading import load_recipe, save_recipe
from engine.recipe.recipe import Recipe
from engine.session.session import Session
from model.ranks import RankError, barrier, errors_on_all_ranks, gather_objects, is_main, rank, say, world_size
from model.zero import OptimizerPiece, forget_secondary_copies, optimizer_pieces, stage, use_masters
from quant import weights_changed

LATEST = "latest"
BEST = "best.json"
STEPS = "step_????????"
# Of data, what may differ in a resumed run: what is not trained on, and how a step's rows are shared out.
MOVABLE = {"eval", "micro_batch_size"}
# What of an optimizer's group is the recipe's, beside the learning rate, which is set before every step.
OPTIMIZER_KNOBS = ("weight_decay", "betas", "eps")


class CheckpointError(RankError):
    """A checkpoint could not be written; raised on all ranks. The ones before it and the run's state are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A step directory whose files are there with their sizes."""

    path: Path
    step: int
    """Optimizer steps done."""
    world_size: int
    stage: int
    files: dict[str, tuple[int, int]]
    """Bytes and CRC-32 by name."""


@dataclass(frozen=True)
class Best:
    """What ``best.json`` says."""

    name: str
    """Of the step directory."""
    step: int
    metric: str
    value: float


def save_checkpoint(session: Session, directory: Path, step: int, *, keep: int) -> Path:
    """Write ``<directory>/step_<step>``, make it the latest and remove older ones; a collective.

    The last ``keep`` up to this step stay, and the best. Later ones are those of a run that was resumed before them:
    they stay until this run comes to their step.

    Raises:
        CheckpointError: on every rank, if any could not write; names the directory, the bytes needed and those free.
            What was written of it is removed.
    """
    name = f"step_{step:08d}"
    final, partial = directory / name, directory / f"{name}.partial"
    files = CheckedFiles()
    try:
        with errors_on_all_ranks(OSError):
            if is_main():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        _save_engine(session, files, directory, partial.name)
        files.save(_rank_state(session), partial / f"rank_{rank()}.pt")
        reports = gather_objects((files.written, files.failure))
        with errors_on_all_ranks(OSError, ValueError):
            if failure := next((failure for _, failure in reports if failure), None):
                raise OSError(failure)
            if is_main():
                manifest = {name: entry for written, _ in reports for name, entry in written.items()}
                _write_manifest(session, partial, step, manifest)
                _make_current(directory, partial, final, keep)
    except RankError as error:
        raise CheckpointError(_not_written(directory, partial, files, error)) from error
    return final


def _save_engine(session: Session, files: CheckedFiles, directory: Path, tag: str) -> None:
    """DeepSpeed's part of a checkpoint; errors of any rank end in ``files``, and no rank waits for another."""
    engine = session.engine
    engine.checkpoint_engine = files
    try:
        # DeepSpeed opens its own `latest` for writing in place, which an interruption leaves empty: ours is renamed
        # instead.
        engine.save_checkpoint(str(directory), tag=tag, save_latest=False)
    except OSError as error:
        # All but the scripts that rank 0 copies beside the checkpoints goes through `files`. They come last: what the
        # other ranks are at is the rest of DeepSpeed's save_checkpoint.
        files.fail(error.filename or "a script of DeepSpeed", error)
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        barrier()


def _write_manifest(session: Session, partial: Path, step: int, files: dict[str, tuple[int, int]]) -> None:
    recipe = partial / "recipe.yaml"
    save_recipe(session.recipe, recipe)
    write_text(recipe, recipe.read_text(encoding="utf-8"))  # the same again, through to the disk
    state = {
        "step": step,
        "world_size": world_size(),
        "stage": stage(session.ds_config),
        "files": {**files, recipe.name: (recipe.stat().st_size, file_crc32(recipe))},
    }
    write_text(partial / "state.json", json.dumps(state, indent=1))
    sync_directory(partial)


def _make_current(directory: Path, partial: Path, final: Path, keep: int) -> None:
    """Rename a written checkpoint, point to it, and remove what is to go."""
    if final.exists():  # of the same step, from a run that was resumed before it
        final.rename(final.with_name(f"{final.name}.replaced.partial"))
    partial.rename(final)
    sync_directory(directory)
    replace_text(directory / LATEST, final.name)
    _remove_old(directory, final.name, keep)


def _remove_old(directory: Path, newest: str, keep: int) -> None:
    """Remove all steps up to ``newest`` but the last ``keep`` of them and the best."""
    best = best_checkpoint(directory)
    older = [path for path in sorted(directory.glob(STEPS)) if path.name <= newest]
    for old in older[:-keep]:
        if best is None or old.name != best.name:
            # Renamed first: a directory that is not whole must not look so, however this ends.
            old.rename(old.with_name(f"{old.name}.partial"))
    for left in directory.glob("step_*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def _not_written(directory: Path, partial: Path, files: CheckedFiles, error: RankError) -> str:
    """Remove what was written of a checkpoint; the text of the error, the same on every rank."""
    needed = sum(gather_objects(files.bytes))
    text = None
    if is_main():
        shutil.rmtree(partial, ignore_errors=True)
        try:
            free = f"{shutil.disk_usage(directory).free / 1e6:,.1f} MB are free there"
        except OSError:
            free = "it is not there"
        text = f"{directory}/{partial.stem} was not written: {error}. It takes {needed / 1e6:,.1f} MB, {free}"
    return gather_objects(text)[0]


def mark_if_best(directory: Path, step: int, metric: str, value: float, *, keep: int) -> None:
    """Make an existing checkpoint the best one if its value is less than the best one's; a collective.

    It stays until another is marked; the one before goes then, unless it is among the last ``keep``. Rank 0 alone
    compares: another rank may see its new file before it has read the old one, or on a shared disk not at all. A mark
    of another metric gives way, and that of an earlier checkpoint of the same step, which this one has replaced.

    Raises:
        CheckpointError: there is no checkpoint of that step, or the file could not be read or written.
    """
    name = f"step_{step:08d}"
    try:
        with errors_on_all_ranks(OSError, ValueError):
            if is_main():
                if not (directory / name / "state.json").is_file():
                    raise ValueError(f"{directory} has no checkpoint {name} to mark as the best: save it first")
                before = best_checkpoint(directory)
                if before is None or before.metric != metric or before.name == name or value < before.value:
                    best = asdict(Best(name, step, metric, value))
                    replace_text(directory / BEST, json.dumps(best, indent=1))
                    _remove_old(directory, name, keep)
    except RankError as error:
        raise CheckpointError(f"{directory / BEST} was not written: {error}") from error


def best_checkpoint(directory: Path) -> Best | None:
    """What was marked last as the best, None if nothing was. Raises ValueError if the file is damaged."""
    path = directory / BEST
    if not path.is_file():
        return None
    try:
        best = Best(**json.loads(path.read_text(encoding="utf-8")))
        return Best(str(best.name), int(best.step), str(best.metric), float(best.value))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: expected name, step, metric and value ({error}); remove it, and the next evaluated "
            "checkpoint is the best one"
        ) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """The manifest of a step directory, every file's size compared.

    Raises:
        ValueError: it is not there or not whole; names the file, and the checkpoint before it.
    """
    problem = _manifest_problem(path)
    if problem is not None:
        raise ValueError(f"{path} {problem}{_offer(path)}")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    files = {name: (entry[0], entry[1]) for name, entry in state["files"].items()}
    return Checkpoint(path, state["step"], state["world_size"], state["stage"], files)


def _manifest_problem(path: Path) -> str | None:
    """What is wrong with a step directory, as far as names and sizes tell."""
    if not path.is_dir():
        return "is not there"
    try:
        files = json.loads((path / "state.json").read_text(encoding="utf-8"))["files"]
    except OSError:
        return "is not a whole checkpoint: it has no state.json"
    except (KeyError, TypeError, ValueError):
        return "is damaged: state.json is not what was written"
    for name, (size, _) in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"is damaged: {name} is missing"
        if found != size:
            return f"is damaged: {name} has {found:,} bytes, expected {size:,}"
    return None


def _offer(path: Path) -> str:
    """The end of an error about a step directory: the newest one before it that looks whole."""
    older = (other for other in sorted(path.parent.glob(STEPS), reverse=True) if other.name < path.name)
    whole = next((other for other in older if _manifest_problem(other) is None), None)
    if whole is None:
        return "; there is no whole checkpoint before it"
    return f"; the one before it is {whole.name}: set train.resume to {whole.name} to go on from there"


def find_checkpoint(directory: Path, which: bool | str = True) -> Checkpoint:
    """The checkpoint that a recipe's ``train.resume`` means: True the latest, ``best``, or a step directory's name.

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
        raise ValueError(
            f"{directory} has no checkpoint to resume from (no file {LATEST}); set train.resume: false to start anew"
        )
    return read_checkpoint(directory / pointer.read_text(encoding="utf-8").strip())


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
    old, new = asdict(before.data), asdict(recipe.data)
    # Files may be moved, but not renamed, left out or added.
    old["train"], new["train"] = ([Path(file).name for file in data["train"]] for data in (old, new))
    keys = [key for key in new if key not in MOVABLE and old[key] != new[key]]
    changed = [f"data.{key} (was {old[key]!r}, is {new[key]!r})" for key in keys]
    changed += _rows_problem(before, found.world_size, recipe, int(os.environ.get("WORLD_SIZE", "1")))
    # Scales of one scheme have shapes that fit another, and each group of the optimizer its parameters.
    knobs = [("model", "dtype"), ("model", "experts")]
    knobs += [("quant", name) for name in ("scheme", "schemes", "rules", "lm_head", "embedding", "exempt")]
    # Observers have a histogram or none; a theta corrects a fixed scale or the absmax of its step.
    knobs += [("quant", "input_range"), ("quant", "scales_follow_weights")]
    knobs += [("learnable", name) for name in asdict(recipe.learnable)]
    for section, name in knobs:
        was, now = (getattr(getattr(one, section), name) for one in (before, recipe))
        if was != now:
            changed.append(f"{section}.{name} (was {was!r}, is {now!r})")
    if changed:
        raise RecipeError(f"train.resume: {found.path} cannot be continued with other {', '.join(changed)}")
    return found


def _rows_problem(before: Recipe, old_world: int, recipe: Recipe, world: int) -> list[str]:
    """What to set so that a step takes as many rows as it did; nothing if it does."""
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
    """Compare every file's CRC-32, each rank its share of the files; a collective. Nothing is unpickled before it.

    Raises:
        RankError: names a file that is not what was written, and the checkpoint before it.
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


def load_checkpoint(session: Session, checkpoint: Checkpoint) -> int:
    """Load a verified checkpoint into the session; returns the steps done. A collective.

    At the number of ranks that wrote it, DeepSpeed loads it, and everything is as it was. At another one masters,
    moments and scales are those that were saved, observers are merged and the random states are new.

    Raises:
        RankError: it is of another ZeRO stage, or does not fit the model.
    """
    ranks = range(checkpoint.world_size)
    same = checkpoint.world_size == world_size()
    with errors_on_all_ranks(OSError, ValueError):
        if checkpoint.stage != stage(session.ds_config):
            raise ValueError(
                f"{checkpoint.path} was written under ZeRO stage {checkpoint.stage}, this run's is "
                f"{stage(session.ds_config)}: set deepspeed in the recipe to what it was"
            )
        states = [
            torch.load(checkpoint.path / f"rank_{old}.pt", weights_only=True) for old in ((rank(),) if same else ranks)
        ]
        if not same and checkpoint.stage > 0:
            layouts = [[OptimizerPiece(*piece) for piece in state["pieces"]] for state in states]
            load_resharded(session, checkpoint.path, layouts, checkpoint.stage)
    if same or checkpoint.stage == 0:  # stage 0 keeps everything on every rank
        # A resumed run follows the recipe that it is given; DeepSpeed loads the old one's weight decay, betas and eps.
        settings = [{key: group[key] for key in OPTIMIZER_KNOBS} for group in session.engine.optimizer.param_groups]
        session.engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
        for group, own in zip(session.engine.optimizer.param_groups, settings, strict=True):
            group.update(own)
    else:
        use_masters(session.model, session.engine.optimizer)
    # DeepSpeed writes the partitions of frozen parameters (initial scales) without dropping hpZ's copies of them.
    forget_secondary_copies(session.model)
    weights_changed(session.model)
    _restore_settings(session, states, merge=not same)
    if same:
        _restore_random_states(states[0])
    else:
        reseed(session.recipe.train.seed, checkpoint.step)
    barrier()
    moved = "" if same else f", written by {checkpoint.world_size} rank(s), now {world_size()}"
    say(f"resumed: {checkpoint.path} ({checkpoint.step} steps done{moved})")
    return checkpoint.step


def _rank_state(session: Session) -> dict[str, Any]:
    """What only this rank knows: random state, observers, switches, what events have set, where its pieces lie."""
    name, keys, *position = np.random.get_state()
    return {
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python_rng": random.getstate(),
        "numpy_rng": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *position),
        **session.quantization.state_dict(),
        "levers": session.levers.state(),
        "loss_scale": session.loss_scale.state() if session.loss_scale is not None else None,
        "pieces": [astuple(piece) for piece in optimizer_pieces(session.model, session.engine.optimizer)],
    }


def _restore_random_states(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])
    random.setstate(state["python_rng"])
    name, keys, *position = state["numpy_rng"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))


def _restore_settings(session: Session, states: list[dict[str, Any]], *, merge: bool) -> None:
    """What was on, and what the observers saw: this rank's own state, or those of all ranks of another number."""
    quantization, state = session.quantization, states[0]
    quantization.restore_fake_quant(state["fake_quant"])
    quantization.observe(state["observing"])
    session.levers.load(state["levers"])
    if session.loss_scale is not None:
        session.loss_scale.load(state["loss_scale"])
    for group in quantization.input_groups:
        if group.observer is not None:
            seen = [one["observers"][group.owner] for one in states]
            group.observer.load_state_dict(merge_observers(seen) if merge else seen[0])
