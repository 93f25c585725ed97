"""Loading a training checkpoint into a session, at the number of ranks that wrote it or at another one."""

from engine.checkpoint.files import CheckedFiles, read_object
from engine.checkpoint.find import Checkpoint
from engine.checkpoint.owners import Owners, check_owners, from_flat_layout, load_owners, restore_random_states
from engine.checkpoint.reshard import load_resharded, merge_ranks, reseed
from engine.session.session import Session
from model.finite import check_finite
from model.frozen import fingerprints, frozen_weights
from model.ranks import barrier, errors_on_all_ranks, listed, rank, say, world_size
from model.zero import LeftOut, OptimizerPiece, forget_secondary_copies, stage, use_masters
from quant import weights_changed

# The recipe's settings of an optimizer's group, beside the learning rate, which is set before every step.
OPTIMIZER_KNOBS = ("weight_decay", "betas", "eps")


def load_checkpoint(session: Session, owners: Owners, checkpoint: Checkpoint) -> int:
    """Load a verified checkpoint into the session and the owners of state; returns the steps done. A collective.

    At the number of ranks that wrote it, DeepSpeed loads it, and everything is as it was. At another one masters,
    moments and scales are those that were saved, observers are merged and the random states are new.

    Raises:
        RankError: it is of another ZeRO stage, does not fit the model, lacks the state of an owner, was written beside
            other frozen weights, or has parameters that are not finite.
    """
    same, left_out = checkpoint.world_size == world_size(), LeftOut(session.model, checkpoint.left_out.keys())
    check_base(session, checkpoint)
    with errors_on_all_ranks(OSError, ValueError):
        if checkpoint.stage != stage(session.ds_config):
            raise ValueError(
                f"{checkpoint.path} was written under ZeRO stage {checkpoint.stage}, this run's is "
                f"{stage(session.ds_config)}: set deepspeed in the recipe to what it was"
            )
        files = [checkpoint.path / f"rank_{old}.pt" for old in ([rank()] if same else range(checkpoint.world_size))]
        states = [from_flat_layout(read_object(file)) for file in files]
        check_owners(owners, states[0])
        if not same and checkpoint.stage > 0:
            layouts = [[OptimizerPiece(*piece) for piece in state["pieces"]] for state in states]
            load_resharded(session, checkpoint.path, layouts, checkpoint.stage, left_out)
    if same or checkpoint.stage == 0:  # stage 0 keeps everything on every rank
        _load_engine(session, checkpoint, left_out)
    else:
        use_masters(session.model, session.engine.optimizer)
    # DeepSpeed writes the partitions of frozen parameters (initial scales) without dropping hpZ's copies of them.
    forget_secondary_copies(session.model)
    weights_changed(session.model)
    check_finite(session.model, f"{checkpoint.path} cannot be continued: its run had diverged, take an earlier one")
    load_owners(owners, states[0] if same else merge_ranks(states))
    if same:
        restore_random_states(states[0]["random"])
    else:
        reseed(session.recipe.train.seed, checkpoint.step)
    barrier()
    moved = "" if same else f", written by {checkpoint.world_size} rank(s), now {world_size()}"
    say(f"resumed: {checkpoint.path} ({checkpoint.step} steps done{moved})")
    return checkpoint.step


def check_base(session: Session, checkpoint: Checkpoint) -> None:
    """Refuse frozen weights that are not those of the run whose checkpoint left them out; a collective.

    Raises:
        RankError: on every rank, with the names of some.
    """
    expected = checkpoint.left_out
    there = {*frozen_weights(session.model)}
    now = fingerprints(session.model, (name for name in expected if name in there))
    with errors_on_all_ranks(ValueError):
        if other := [name for name, value in expected.items() if now.get(name) != value]:
            raise ValueError(
                f"{checkpoint.path} does not hold the frozen weights, and {listed(other, 3)} as read from model.path "
                f"{session.recipe.model.path!r} are not those of the run that wrote it: bring its files back, and set "
                "quant.start and quant.start_inside to what they were"
            )


def _load_engine(session: Session, checkpoint: Checkpoint, left_out: LeftOut) -> None:
    """Let DeepSpeed load its part of a checkpoint, and set the optimizer's knobs again.

    DeepSpeed loads those of the old recipe, but a resumed run follows the recipe that it is given.
    """
    settings = [{key: group[key] for key in OPTIMIZER_KNOBS} for group in session.engine.optimizer.param_groups]
    session.engine.checkpoint_engine = CheckedFiles(left_out)  # DeepSpeed's own would run whatever a file tells it to
    session.engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
    for group, own in zip(session.engine.optimizer.param_groups, settings, strict=True):
        group.update(own)
