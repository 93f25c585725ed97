"""Save training checkpoints: DeepSpeed's state of every rank, and the state that DeepSpeed does not save.

``<directory>/step_00000100/`` contains DeepSpeed's files (weights and fp32 masters, optimizer state), ``recipe.yaml``,
one ``rank_<r>.pt`` per rank (:func:`rank_state`: on stages 1 and 2 DeepSpeed saves client state of rank 0 only), copies
of the optimizer's files if it is on NVMe (:func:`model.zero.swap_name`), and ``state.json``, the manifest: bytes and
CRC-32 of every file. All files are written into ``step_00000100.partial`` with fsync, and the directory is renamed when
every rank is done; then ``latest``, a file with the step's name, is replaced by a rename. So a directory without
``.partial`` was complete when renamed, and the manifest reveals later damage.

``best.json`` names the step with the best value of a metric. Its checkpoint is kept when older checkpoints are removed.
A save writes this file before ``latest``: a run killed between the two repeats that step and marks it again.

A run with adapters saves fingerprints of the frozen weights in the manifest instead of the weights, which are read from
``model.path`` again. A frozen weight that a script has changed is saved.

ZeRO's state has no partially accumulated gradients, so checkpoints are saved at optimizer steps. The position in the
data is the step number, of which the loader's batches are a function. ``engine/checkpoint/resume.py`` explains how a
run continues at another number of ranks.
"""

import json
import math
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from engine.checkpoint.checked_files import CheckedFiles, file_crc32, replace_text, write_text
from engine.checkpoint.find import BEST, LATEST, STEP_DIRECTORIES, Best, best_checkpoint
from engine.config.reading import save_recipe
from engine.session.session import Session
from model.checkpoint.fingerprint import digest_of_checkpoint, fingerprints
from model.checkpoint.load import check_finite
from model.console import working
from model.ranks import RankError, barrier, errors_on_all_ranks, gather_objects, is_main, rank, say, world_size
from model.save.aside import sync
from model.zero import COPIES, LeftOut, copied, on_cuda, optimizer_pieces, stage, swap_files, swap_name

SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # DeepSpeed copies them beside the checkpoints


class Stateful(Protocol):
    """Object with state that a resumed run needs, beside the state that DeepSpeed saves."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors on the CPU."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""


StatefulStates = Mapping[str, Stateful]


class BestMetric(NamedTuple):
    """Name and value of a metric, and the digest of everything on which it depends, apart from the model."""

    metric: str
    value: float
    of: str = ""


class SaveError(RankError):
    """Error on all ranks: a checkpoint could not be written, or older ones could not be removed. The run's state is
    unchanged, and ``latest`` names a whole checkpoint."""


def save_checkpoint(
    session: Session,
    stateful: StatefulStates,
    directory: Path,
    step: int,
    *,
    keep: int,
    samples: str,
    measured: BestMetric | None = None,
) -> Path:
    """Write ``<directory>/step_<step>``, make it the latest checkpoint and remove older ones; a collective. Return its
    path.

    The last ``keep`` checkpoints up to this step are kept, and the best one. If the run was resumed from an earlier
    step, checkpoints of later steps are kept until the run reaches them.

    Args:
        directory: directory of all checkpoints of the run.
        step: optimizer steps done.
        keep: number of checkpoints to keep.
        samples: digest of the training samples, which a resumed run compares with its own.
        measured: a metric evaluated at this step; if its value is below the best checkpoint's, this checkpoint is
            marked as the best.

    Raises:
        SaveError: on every rank: a rank could not write. The message has the directory and the needed and free bytes.
            The partial checkpoint is removed.
        RankError: on every rank: parameters, which the message names, are not finite; nothing is written or removed.
    """
    name = f"step_{step:08d}"
    final, partial = directory / name, directory / f"{name}.partial"
    check_finite(session.model, f"{final} was not written: the model diverged, start from an earlier checkpoint")
    kept_elsewhere = _as_read(session)
    files = CheckedFiles(LeftOut(session.model, kept_elsewhere.keys()))
    try:
        with errors_on_all_ranks(OSError):
            if is_main():
                shutil.rmtree(partial, ignore_errors=True)
                partial.unlink(missing_ok=True)  # if not a directory
                partial.mkdir(parents=True)
                for script in filter(Path.is_symlink, map(directory.joinpath, SCRIPTS)):  # else their targets change
                    script.unlink()
        with working(f"checkpoint of step {step}"):
            _save_engine(session, files, directory, partial.name)
            files.save(rank_state(session, stateful), partial / f"rank_{rank()}.pt")
        reports = gather_objects((files.written, files.failure))
        with errors_on_all_ranks(OSError, ValueError):
            if failure := next((failure for _, failure in reports if failure), None):
                raise OSError(failure)
            if is_main():
                shutil.rmtree(partial / COPIES, ignore_errors=True)  # empty: its files were moved
                manifest = {name: entry for written, _ in reports for name, entry in written.items()}
                _write_manifest(session, partial, step, samples, kept_elsewhere, manifest)
                _make_current(directory, partial, final, keep, measured)
    except RankError as error:
        raise SaveError(_not_written(directory, partial, files, error)) from error
    return final


def rank_state(session: Session, stateful: StatefulStates) -> dict[str, Any]:
    """Collect the content of this rank's file, ``rank_<r>.pt``.

    ``stateful``: states of the stateful objects, by name. ``random``: states of the random generators. ``pieces``:
    slices of every parameter in this rank's DeepSpeed file, for resharding.
    """
    return {
        "stateful": {name: owner.state_dict() for name, owner in stateful.items()},
        "random": random_states(),
        "pieces": [astuple(piece) for piece in optimizer_pieces(session.model, session.engine.optimizer)],
    }


def random_states() -> dict[str, Any]:
    """Collect the random states of this process: torch on the CPU and on the current CUDA device, Python, numpy."""
    name, keys, *position = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if on_cuda() else None,
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *position),
    }


def _save_engine(session: Session, files: CheckedFiles, directory: Path, tag: str) -> None:
    """Write DeepSpeed's files of a checkpoint. An error is stored in ``files``, so that no rank waits for another."""
    engine = session.engine
    engine.checkpoint_engine = files
    swapped = list(swap_files(engine.optimizer))
    files.bytes += sum(file.stat().st_size for file, _, _ in swapped)
    try:
        # DeepSpeed writes `latest` in place, which an interruption leaves empty; ours is replaced by a rename.
        without = bool(files.left_out.names)
        engine.save_checkpoint(str(directory), tag=tag, save_latest=False, exclude_frozen_parameters=without)
    except OSError as error:
        # Only the scripts that rank 0 copies beside the checkpoints, and copies of files on NVMe, are not written
        # through `files`. They come last: run the rest of DeepSpeed's save_checkpoint here, in which the other ranks
        # are.
        if isinstance(error, shutil.Error):  # a list of (file, copy, reason)
            error = OSError(None, error.args[0][0][2], error.args[0][0][1])
        files.fail(error.filename or "a script of DeepSpeed", error)
        if hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()
        barrier()
    for file, group, key in swapped if files.failure is None else []:
        files.adopt(copied(directory / tag, rank(), file), directory / tag / swap_name(rank(), group, key))


def _as_read(session: Session) -> dict[str, int]:
    """Return the fingerprints of frozen weights that are unchanged since they were read from files; a collective."""
    now = fingerprints(session.model, session.read)
    return {name: value for name, value in now.items() if value == session.read[name]}


def _write_manifest(
    session: Session,
    partial: Path,
    step: int,
    samples: str,
    left_out: dict[str, int],
    files: dict[str, tuple[int, int]],
) -> None:
    recipe = partial / "recipe.yaml"
    save_recipe(session.recipe, recipe)
    write_text(recipe, recipe.read_text(encoding="utf-8"))  # again, with fsync
    state = {
        "step": step,
        "world_size": world_size(),
        "stage": stage(session.ds_config),
        "samples": samples,
        "base": digest_of_checkpoint(session.recipe.model.path) if session.recipe.adapter.on else None,
        "left_out": left_out,
        "files": {**files, recipe.name: (recipe.stat().st_size, file_crc32(recipe))},
    }
    write_text(partial / "state.json", json.dumps(state, indent=1))
    sync(partial)


def _make_current(directory: Path, partial: Path, final: Path, keep: int, measured: BestMetric | None) -> None:
    """Rename a written checkpoint, update ``best.json`` and ``latest``, and remove old checkpoints."""
    if final.exists():  # of the same step, before the run was resumed from an earlier one
        final.rename(final.with_name(f"{final.name}.replaced.partial"))
    partial.rename(final)
    sync(directory)
    best = _mark(directory, final.name, measured)
    replace_text(directory / LATEST, final.name)
    _remove_old(directory, final.name, keep, best)


def mark_best(directory: Path, step: int, measured: BestMetric | None, *, keep: int) -> None:
    """Mark the checkpoint of ``step``, which was evaluated after it was written, as the best one if the value of
    ``measured`` (None: no value) is below the best checkpoint's; a collective. The former best is then removed, unless
    it is one of the last ``keep``. Raises RankError on every rank if an old checkpoint cannot be removed; a mark that
    cannot be written is only a warning."""
    name = f"step_{step:08d}"
    with errors_on_all_ranks(OSError):
        if is_main():
            _remove_old(directory, name, keep, _mark(directory, name, measured))


def _mark(directory: Path, name: str, measured: BestMetric | None) -> Best | None:
    """Mark a checkpoint if its value is below the best checkpoint's; return the checkpoint that is now the best.

    A mark that is damaged, not finite, or of this step or a later one is removed: the run was resumed from before the
    marked checkpoint, and does not continue it. Any finite value replaces a mark of another metric, or of one computed
    otherwise. A value that is not finite is never marked. A failed write is only a warning.
    """
    best = None
    try:
        try:
            best = best_checkpoint(directory)
        except ValueError as error:
            say(f"warning: {error}")
            (directory / BEST).unlink()
        if best is not None and (best.name >= name or not math.isfinite(best.value)):
            (directory / BEST).unlink()
            best = None
        if measured is not None and math.isfinite(measured[1]):
            mark = Best(name, int(name.removeprefix("step_")), *measured)
            comparable = best is not None and (best.metric, best.of) == (mark.metric, mark.of)
            if best is not None and best.metric == mark.metric and not comparable:
                say(
                    f"best checkpoint: {best.name} was measured with other losses, loss weights or held-out samples, "
                    f"or without quantization; {name} takes its place"
                )
            if best is None or not comparable or mark.value < best.value:
                replace_text(directory / BEST, json.dumps(asdict(mark), indent=1))
                best = mark
    except OSError as error:
        say(f"warning: {directory / BEST} was not written ({error.strerror}): the best checkpoint is not marked")
    return best


def _remove_old(directory: Path, newest: str, keep: int, best: Best | None) -> None:
    """Remove all checkpoints up to ``newest`` except the last ``keep`` of them and the best one, and partial ones."""
    older = [path for path in sorted(directory.glob(STEP_DIRECTORIES)) if path.name <= newest]
    for old in older[:-keep]:
        if best is None or old.name != best.name:
            # Renamed first: an interruption must not leave an incomplete directory with a final name.
            old.rename(old.with_name(f"{old.name}.partial"))
    for left in directory.glob("step_*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def _not_written(directory: Path, partial: Path, files: CheckedFiles, error: RankError) -> str:
    """Remove a partial checkpoint, and return the error text, the same on every rank; a collective."""
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
