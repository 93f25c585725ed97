"""Training checkpoints: DeepSpeed's state of every rank, and what DeepSpeed does not keep.

``<directory>/step_00000100/`` holds DeepSpeed's files (weights and fp32 masters, optimizer state), ``state.json`` and
one ``rank_<r>.pt`` per rank (random state, observers: DeepSpeed stores a client's state of rank 0 only on stages 1 and
2). Everything is written into ``step_00000100.partial`` and renamed when every rank is done; then ``latest``, a file
with the step's name, is replaced by a rename. So a directory without ``.partial`` is whole, whatever interrupted the
run.

ZeRO's state holds no half-accumulated gradients, so checkpoints are taken at optimizer steps. The data cursor is the
step itself: the loader's batches are a function of the step.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from engine.recipe import Recipe, RecipeError, load_recipe, save_recipe
from engine.setup import Session, say
from model.ranks import barrier, errors_on_all_ranks, is_main, rank, world_size
from model.zero import forget_secondary_copies
from quant import weights_changed

LATEST = "latest"


def save_checkpoint(session: Session, directory: Path, step: int, *, keep: int) -> Path:
    """Write ``<directory>/step_<step>``, make it the latest and remove all but the last ``keep``; a collective.

    Raises:
        RankError: on every rank, if what DeepSpeed does not keep could not be written, by any rank.
        OSError, RuntimeError: DeepSpeed could not write (disk full, say); on the rank that failed, and the launcher
            ends the others. The checkpoints before are untouched either way.
    """
    name = f"step_{step:08d}"
    final, partial = directory / name, directory / f"{name}.partial"
    with errors_on_all_ranks(OSError):
        if is_main():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    # DeepSpeed opens its own `latest` for writing in place, which an interruption leaves empty: ours is renamed
    # instead.
    session.engine.save_checkpoint(str(directory), tag=partial.name, save_latest=False)
    with errors_on_all_ranks(OSError):
        torch.save(_rank_state(session), partial / f"rank_{rank()}.pt")
        if is_main():
            save_recipe(session.recipe, partial / "recipe.yaml")
            text = json.dumps({"step": step, "world_size": world_size()}, indent=2)
            (partial / "state.json").write_text(text, encoding="utf-8")
    with errors_on_all_ranks(OSError):
        if is_main():
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            pointer = directory / f"{LATEST}.partial"
            pointer.write_text(name, encoding="utf-8")
            os.replace(pointer, directory / LATEST)
            for old in sorted(directory.glob("step_????????"))[:-keep]:
                # Renamed first: a directory that is not whole must not look so, however this ends.
                shutil.rmtree(old.rename(old.with_name(f"{old.name}.partial")))
    return final


def latest_checkpoint(directory: Path) -> Path:
    """The directory that ``latest`` names.

    Raises:
        ValueError: there is none, or it is not whole.
    """
    pointer = directory / LATEST
    if not pointer.is_file():
        raise ValueError(
            f"{directory} has no checkpoint to resume from (no file {LATEST}); set train.resume: false to start anew"
        )
    found = directory / pointer.read_text(encoding="utf-8").strip()
    if not (found / "state.json").is_file():
        raise ValueError(f"{pointer} names {found}, which is not a whole checkpoint (no state.json)")
    return found


def check_resumable(recipe: Recipe, directory: Path) -> None:
    """Refuse before any work to resume what cannot be resumed as it was.

    Raises:
        RecipeError: there is no whole checkpoint, it was written by another number of ranks, or its batches were
            others: the data cursor is a step, so the samples of a step must stay the same.
    """
    try:
        found = latest_checkpoint(directory)
        saved = json.loads((found / "state.json").read_text(encoding="utf-8"))
        before = load_recipe(found / "recipe.yaml")
    except (OSError, ValueError) as error:
        raise RecipeError(f"train.resume: {error}") from error
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if saved["world_size"] != world:
        raise RecipeError(f"train.resume: {found} was written by {saved['world_size']} rank(s), this run has {world}")
    keys = ("kind", "fields", "max_length", "too_long", "micro_batch_size", "seed")
    pairs = {f"data.{key}": (getattr(before.data, key), getattr(recipe.data, key)) for key in keys}
    key = "gradient_accumulation_steps"
    pairs[f"train.{key}"] = (getattr(before.train, key), getattr(recipe.train, key))
    changed = [f"{name} (was {old!r}, is {new!r})" for name, (old, new) in pairs.items() if old != new]
    if changed:
        raise RecipeError(f"train.resume: {found} has other batches: {', '.join(changed)}")


def load_checkpoint(session: Session, path: Path) -> int:
    """Load a directory's latest checkpoint, or the step directory itself, into the session; returns the steps done.

    A collective.

    Raises:
        RankError: no checkpoint there, or one of another number of ranks.
    """
    with errors_on_all_ranks(OSError, ValueError):
        found = path if (path / "state.json").is_file() else latest_checkpoint(path)
        saved = json.loads((found / "state.json").read_text(encoding="utf-8"))
        if saved["world_size"] != world_size():
            raise ValueError(f"{found} was written by {saved['world_size']} rank(s), this run has {world_size()}")
        own = torch.load(found / f"rank_{rank()}.pt", weights_only=True)
    loaded, _ = session.engine.load_checkpoint(str(found.parent), tag=found.name)
    # DeepSpeed writes the partitions of frozen parameters (initial scales) without dropping hpZ's copies of them.
    forget_secondary_copies(session.model)
    weights_changed(session.model)
    with errors_on_all_ranks(ValueError):
        if loaded is None:
            raise ValueError(f"DeepSpeed found nothing to load in {found}")
    _restore_rank_state(session, own)
    barrier()
    say(f"resumed: {found} ({saved['step']} steps done)")
    return saved["step"]


def _rank_state(session: Session) -> dict[str, Any]:
    """What only this rank knows: random state, observers, which layers are fake-quantised, what events have set."""
    quantization = session.quantization
    return {
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "fake_quant": quantization.fake_quant_state(),
        "observing": quantization.observing,
        "levers": session.levers.state(),
        "observers": {group.owner: group.observer.state() for group in quantization.input_groups if group.observer},
    }


def _restore_rank_state(session: Session, state: dict[str, Any]) -> None:
    quantization = session.quantization
    torch.set_rng_state(state["rng"])
    if state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])
    quantization.restore_fake_quant(state["fake_quant"])
    quantization.observe(state["observing"])
    session.levers.load(state["levers"])
    for group in quantization.input_groups:
        if group.observer is not None:
            group.observer.load(state["observers"][group.owner])
