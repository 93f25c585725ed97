"""Load a training checkpoint into a session, at the number of ranks that wrote it or (resharded) at another number.

Resharding on stages 1 to 3: every rank of the old run saved its flat fp32 masters and Adam moments in a DeepSpeed file,
and in ``rank_<r>.pt`` the slices of each parameter in them (:func:`model.zero.optimizer_pieces`). Every rank of the new
run maps the old files into memory and copies the overlap with its own slices: no conversion, no second copy on disk, no
collective, and no read of unneeded data. 8-bit moments are decoded and rounded again, as a slice may begin inside a
block.

DeepSpeed's alternative is universal checkpoints (``deepspeed.checkpoint.ds_to_universal``, then an engine configured to
load them; it works on these directories too). At 0.19.8 they do not restore the saved state, and that cannot be fixed
from outside: stage 3 uses step count, learning rate, weight decay and eps of the first group for all groups (theta has
its own), stages 1 and 2 raise IndexError if a rank has no slice of a group (as with few scales on many ranks), and
stage 3 does not restore frozen parameters, the initial scales.
"""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.checked_files import CheckedFiles, read_object
from engine.checkpoint.find import TrainingCheckpoint
from engine.checkpoint.save import StatefulStates
from engine.config.deepspeed import offloads_to_nvme
from engine.session.adamw8bit import (
    MOMENT_BLOCK,
    MOMENTS,
    chunks,
    decode_slice,
    empty_moments,
    rounding_at,
    write_moments,
)
from engine.session.session import Session
from model.checkpoint.fingerprint import fingerprints, frozen_weights
from model.checkpoint.load import check_finite
from model.ranks import barrier, errors_on_all_ranks, gather_objects, listed, rank, say, world_size
from model.zero import (
    SWAPPED,
    LeftOut,
    OptimizerPiece,
    flat_masters,
    forget_secondary_copies,
    is_partitioned,
    local_data,
    local_range,
    on_cuda,
    optimizer_pieces,
    stage,
    swap_name,
    swapped_in,
    use_masters,
)
from quant import weights_changed

# Options of an optimizer's group from the recipe, without the learning rate, which is set before every step.
OPTIMIZER_OPTIONS = ("weight_decay", "betas", "eps")


def load_checkpoint(session: Session, stateful: StatefulStates, checkpoint: TrainingCheckpoint) -> int:
    """Load a verified checkpoint into the session and the stateful objects; return the optimizer steps done when it was
    written. A collective.

    If the number of ranks is unchanged, the whole state is restored. At another number of ranks, masters, moments and
    scales are restored, observers are merged, and random states are new.

    DeepSpeed loads the checkpoint on stage 0 and, on other stages, if the number of ranks is unchanged, except where
    DeepSpeed 0.19.8 would fail: the optimizer is or was on NVMe (it would load neither weights nor small groups,
    engine.py:4456), or another DeepSpeed file splits the optimizer's flat tensors differently (``sub_group_size``). In
    all other cases :func:`load_resharded` loads it. Raises RankError on every rank if the checkpoint does not match the
    model, lacks the state of a stateful object, belongs to other frozen weights, or has values that are not finite.
    """
    same, left_out = checkpoint.world_size == world_size(), LeftOut(session.model, checkpoint.left_out.keys())
    on_nvme = offloads_to_nvme(session.ds_config) or any(name.endswith(SWAPPED) for name in checkpoint.files)
    by_deepspeed = checkpoint.stage == 0 or (same and not on_nvme and _same_layout(session, checkpoint))
    check_base(session, checkpoint)
    with errors_on_all_ranks(OSError, ValueError):
        ranks = [rank()] if same and by_deepspeed else range(checkpoint.world_size)
        files = [checkpoint.path / f"rank_{old}.pt" for old in ranks]
        states = [read_object(file) for file in files]
        check_stateful(stateful, states[0])
        if not by_deepspeed:
            layouts = [[OptimizerPiece(*piece) for piece in state["pieces"]] for state in states]
            load_resharded(session, checkpoint.path, layouts, checkpoint.stage, left_out)
    if by_deepspeed:
        _load_engine(session, checkpoint, left_out)
    else:
        use_masters(session.model, session.engine.optimizer)
    # Loading replaces the partitions of frozen parameters (initial scales), but not hpZ's copies of them.
    forget_secondary_copies(session.model)
    weights_changed(session.model)
    check_finite(session.model, f"{checkpoint.path} cannot be continued: its run had diverged, take an earlier one")
    own = states[0 if by_deepspeed else rank()] if same else merge_ranks(states)
    load_stateful(stateful, own)
    if same:
        restore_random_states(own["random"])
    else:
        reseed(session.recipe.train.seed, checkpoint.step)
    barrier()
    moved = "" if same else f", written by {checkpoint.world_size} rank(s), now {world_size()}"
    say(f"resumed: {checkpoint.path} ({checkpoint.step} steps done{moved})")
    return checkpoint.step


def _same_layout(session: Session, checkpoint: TrainingCheckpoint) -> bool:
    """Tell if the optimizers of all ranks have the same slices of parameters at the same places as in the checkpoint,
    which has as many ranks; a collective."""
    if checkpoint.stage == 0 or checkpoint.stage != stage(session.ds_config):
        return True  # stage 0 shards nothing; another stage is refused
    with errors_on_all_ranks(OSError, ValueError):
        saved = {OptimizerPiece(*piece) for piece in read_object(checkpoint.path / f"rank_{rank()}.pt")["pieces"]}
    return all(gather_objects(saved == {*optimizer_pieces(session.model, session.engine.optimizer)}))


def check_stateful(stateful: StatefulStates, state: Mapping[str, Any]) -> None:
    """Raise ValueError if ``state``, the content of a rank's file, lacks the state of an object in ``stateful``."""
    if missing := sorted(stateful.keys() - state["stateful"].keys()):
        raise ValueError(
            f"the checkpoint keeps no state of {', '.join(missing)}: another version has written it; resume it "
            "with that version of DeepQAT, or start a new run"
        )


def load_stateful(stateful: StatefulStates, state: Mapping[str, Any]) -> None:
    """Restore the state of every object in ``stateful`` from a rank's file. States of other objects are ignored: an
    export, for example, has no schedule to restore."""
    for name, owner in stateful.items():
        owner.load_state_dict(state["stateful"][name])


def restore_random_states(state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`engine.checkpoint.save.random_states`."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and on_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    name, keys, *position = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))


def check_base(session: Session, checkpoint: TrainingCheckpoint) -> None:
    """Refuse to resume if frozen weights that the checkpoint does not contain differ from those of the run that wrote
    it; a collective. Raises RankError on every rank, with the names of some of these weights."""
    expected = checkpoint.left_out
    there = {*frozen_weights(session.model)}
    now = fingerprints(session.model, (name for name in expected if name in there))
    with errors_on_all_ranks(ValueError):
        if other := [name for name, value in expected.items() if now.get(name) != value]:
            raise ValueError(
                f"{checkpoint.path} does not hold the frozen weights, and {listed(other, 3)} as read from model.path "
                f"{session.recipe.model.path!r} are not those of the run that wrote it: restore its files, and set "
                "quant.start and quant.snap_to_codes to what they were"
            )


def _load_engine(session: Session, checkpoint: TrainingCheckpoint, left_out: LeftOut) -> None:
    """Load DeepSpeed's files of a checkpoint, and restore the optimizer's options from the new recipe. DeepSpeed would
    use the options in the files, those of the old recipe."""
    settings = [{key: group[key] for key in OPTIMIZER_OPTIONS} for group in session.engine.optimizer.param_groups]
    session.engine.checkpoint_engine = CheckedFiles(left_out)  # DeepSpeed's own engine runs code from pickles
    session.engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
    for group, own in zip(session.engine.optimizer.param_groups, settings, strict=True):
        group.update(own)


@torch.no_grad()
def load_resharded(
    session: Session, path: Path, layouts: list[list[OptimizerPiece]], stage: int, left_out: LeftOut
) -> None:
    """Load parameters, masters, moments, step counts and the engine's counters from the files of ``len(layouts)`` old
    ranks into ``session``.

    Runs no collective; call :func:`model.zero.use_masters` afterwards, if no rank has raised.

    Args:
        path: the step directory, verified.
        layouts: slices of the parameters on every rank of the old run.
        stage: ZeRO stage of the old and of the new run, 1 to 3.
        left_out: parameters that the files do not contain.

    Raises:
        OSError, ValueError: a file cannot be read, or lacks a parameter of this model.
    """
    ranks = range(len(layouts))
    masters = [_Masters(path, old, stage) for old in ranks]
    _load_masters(session, masters, layouts)
    if stage == 3:
        files = [path / f"zero_pp_rank_{old}_mp_rank_00_model_states.pt" for old in ranks]
        states = [read_object(file, mmap=True) for file in files]
        _load_frozen_partitions(session, states, left_out)
        buffers = {name: states[0]["module"][name] for name in states[0]["buffer_names"]}
        session.model.load_state_dict(buffers, strict=False)
    else:
        states = [read_object(path / "mp_rank_00_model_states.pt", mmap=True)]
        left_out.put_in(states[0])
        session.model.load_state_dict(states[0]["module"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(session.engine, counter, states[0][counter])


class _Masters:
    """Optimizer files of one old rank, mapped into memory: DeepSpeed's, and one per tensor that was on NVMe."""

    def __init__(self, path: Path, old: int, stage: int) -> None:
        pattern = f"*zero_pp_rank_{old}_mp_rank_00_optim_states.pt"
        found = list(path.glob(pattern))
        if len(found) != 1:
            raise ValueError(f"{path}: found {len(found)} files {pattern}, expected one: start from another checkpoint")
        saved = read_object(found[0], mmap=True)["optimizer_state_dict"]
        self.fp32: list[Tensor] = saved["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]
        inner = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        self.state: dict[int, dict[str, Tensor]] = inner["state"]
        self.path, self.rank = path, old

    def coded(self, group: int) -> bool:
        """Tell if the optimizer's group number ``group`` has 8-bit moments."""
        return f"{MOMENTS[0]}_codes" in self.state.get(group, {})

    def read(self, group: int, key: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the flat fp32 masters (``key`` is ``fp32``) or of a flat moment
        (``exp_avg``, ``exp_avg_sq``) of the optimizer's group number ``group``."""
        swapped = self.path / swap_name(self.rank, group, key)
        if swapped.exists():
            return torch.from_file(str(swapped), size=swapped.stat().st_size // 4)[start:stop]
        if key == "fp32":
            return self.fp32[group][start:stop]
        return (
            decode_slice(self.state[group], key, start, stop)
            if self.coded(group)
            else self.state[group][key][start:stop]
        )


OldPieces = dict[str, list[tuple[_Masters, OptimizerPiece]]]
"""Slices of each parameter in the old files, by its name."""


def _load_masters(session: Session, sources: list[_Masters], layouts: list[list[OptimizerPiece]]) -> None:
    """Copy this rank's slices of masters and moments, and the step counts of their groups, from the old files."""
    wrapper = session.engine.optimizer
    flats, state = flat_masters(wrapper), wrapper.state
    old_pieces: OldPieces = {}
    for source, layout in zip(sources, layouts, strict=True):
        for piece in layout:
            old_pieces.setdefault(piece.name, []).append((source, piece))
    of_group: dict[int, list[OptimizerPiece]] = {}
    for piece in optimizer_pieces(session.model, wrapper):
        of_group.setdefault(piece.group, []).append(piece)
    for group, pieces in of_group.items():
        with swapped_in(wrapper, group):
            _load_group(flats[group], state, pieces, old_pieces)


def _load_group(flat: Tensor, state: Any, pieces: list[OptimizerPiece], old_pieces: OldPieces) -> None:
    """Copy the slices of one flat tensor, and its step count."""
    old = [one for piece in pieces for one in old_pieces.get(piece.name, [])]
    _fill(flat.detach(), 0, pieces, old_pieces, "fp32")
    # If all steps of a run were skipped, there are no moments yet.
    if not all(one.group in source.state for source, one in old):
        return
    coded = old[0][0].coded(old[0][1].group)
    moments = _moments(state, flat, old[0], coded)
    if not coded:
        for key in MOMENTS:
            _fill(moments[key], 0, pieces, old_pieces, key)
        return
    rng = rounding_at(moments["step"], flat.device)
    for blocks in chunks(flat.numel()):
        first, second = (torch.zeros((blocks.stop - blocks.start) * MOMENT_BLOCK, device=flat.device) for _ in MOMENTS)
        for key, moment in zip(MOMENTS, (first, second), strict=True):
            _fill(moment, blocks.start * MOMENT_BLOCK, pieces, old_pieces, key)
        write_moments(moments, (first, second), blocks, rng)


def _fill(target: Tensor, begin: int, pieces: list[OptimizerPiece], old_pieces: OldPieces, key: str) -> None:
    """Copy masters or moments into ``target``, the elements of this rank's flat tensor from ``begin`` on. Raises
    ValueError if the old files lack some of them."""
    for piece in pieces:
        moved = piece.start - piece.offset  # from a place in the flat tensor to a place in the parameter
        low = max(begin, piece.offset)
        high = min(begin + target.numel(), piece.offset + piece.stop - piece.start)
        if low < high:
            parts = _parts(old_pieces.get(piece.name, []), key, low + moved, high + moved)
            found = _copy(target[low - begin : high - begin], low + moved, parts)
            if found != high - low:
                raise ValueError(
                    f"the checkpoint has only {found:,} of {high - low:,} elements of {piece.name} ({key}): use "
                    "another checkpoint"
                )


def _moments(state: Any, flat: Tensor, old: tuple[_Masters, OptimizerPiece], coded: bool) -> dict[str, Tensor]:
    """Allocate the optimizer's state of a flat tensor if needed, and set its step count to the old one."""
    source, piece = old
    moments = state[flat]
    step = source.state[piece.group]["step"]
    if not moments:
        # torch's fused Adam counts on the device, the others on the host.
        moments["step"] = torch.zeros_like(step, device=flat.device if flat.is_cuda else "cpu")
        moments.update(empty_moments(flat) if coded else {key: torch.zeros_like(flat) for key in MOMENTS})
    moments["step"].copy_(step)
    return moments


def _parts(old: list[tuple[_Masters, OptimizerPiece]], key: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield start and elements of the old slices of one parameter between ``start`` and ``stop``."""
    for source, piece in old:
        low, high, moved = max(start, piece.start), min(stop, piece.stop), piece.offset - piece.start
        if low < high:
            yield low, source.read(piece.group, key, low + moved, high + moved)


def _copy(target: Tensor, start: int, parts: Iterator[tuple[int, Tensor]]) -> int:
    """Copy the overlap of ``parts`` with ``target``, a slice of the parameter from element ``start`` on; return the
    number of copied elements."""
    copied = 0
    for begin, part in parts:
        low, high = max(start, begin), min(start + target.numel(), begin + part.numel())
        if low < high:
            target[low - start : high - start].copy_(part[low - begin : high - begin])
            copied += high - low
    return copied


def _load_frozen_partitions(session: Session, states: list[dict[str, Any]], left_out: LeftOut) -> None:
    """Load frozen parameters of stage 3, such as the initial scales, which are not in the optimizer. Raises ValueError
    if the checkpoint has too few elements of one."""
    for name, parameter in session.model.named_parameters():
        if parameter.requires_grad or not is_partitioned(parameter) or name in left_out.names:
            continue
        target, (start, _) = local_data(parameter), local_range(parameter)
        fragments = [state["frozen_param_fragments"][name].flatten() for state in states]
        parts = ((index * fragment.numel(), fragment) for index, fragment in enumerate(fragments))
        found = _copy(target, start, parts)  # padding of the old run is after the parameter's end
        if found != target.numel():
            raise ValueError(
                f"the checkpoint has only {found:,} of {target.numel():,} elements of the frozen {name}: use another "
                "checkpoint"
            )


def reseed(seed: int, step: int) -> None:
    """Seed the generators of a rank after resharding, by the recipe's seed, the step and the rank. Random states of
    another number of ranks cannot be reused. Resuming twice gives the same seeds."""
    of_torch, of_python, of_numpy = np.random.SeedSequence((seed, step, rank())).generate_state(3).tolist()
    torch.manual_seed(of_torch)
    random.seed(of_python)
    np.random.seed(of_numpy)


def merge_ranks(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state with which this rank resumes a run of another number of ranks. ``states``: contents of the files
    ``rank_<r>.pt`` of all old ranks. They differ in random states and in the layout of the optimizer's slices, of which
    the result has those of rank 0, and in the statistics of observers, which :func:`merge_observers` combines."""
    stateful = states[0]["stateful"]
    quantization = stateful["quantization"]
    seen = [state["stateful"]["quantization"]["observers"] for state in states]
    merged = {owner: merge_observers([one[owner] for one in seen]) for owner in quantization["observers"]}
    return {**states[0], "stateful": {**stateful, "quantization": {**quantization, "observers": merged}}}


def merge_observers(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the statistics of one input's observers on all old ranks, and return this rank's: the maximum on every
    rank, the summed counts on rank 0, and counts of 0 on other ranks. So a maximum or sum over the new ranks equals
    that over the old ranks."""
    absmax = torch.stack([state["absmax"] for state in states]).amax()
    share = 1 if rank() == 0 else 0
    counts = {key: share * torch.stack([state[key] for state in states]).sum(0) for key in states[0] if key != "absmax"}
    return {"absmax": absmax, **counts}
