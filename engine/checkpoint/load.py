"""Loading a training checkpoint into a session, at the number of ranks that wrote it or at another one."""

from engine.checkpoint.files import CheckedFiles, read_object
from engine.checkpoint.find import Checkpoint
from engine.checkpoint.owners import Owners, check_owners, from_flat_layout, load_owners, restore_random_states
from engine.checkpoint.reshard import load_resharded, merge_ranks, reseed
from engine.session.session import Session
from model.ranks import barrier, errors_on_all_ranks, rank, say, world_size
from model.zero import OptimizerPiece, forget_secondary_copies, stage, use_masters
from quant import weights_changed

# The recipe's settings of an optimizer's group, beside the learning rate, which is set before every step.
OPTIMIZER_KNOBS = ("weight_decay", "betas", "eps")


def load_checkpoint(session: Session, owners: Owners, checkpoint: Checkpoint) -> int:
    """Load a verified checkpoint into the session and the owners of state; returns the steps done. A collective.

    At the number of ranks that wrote it, DeepSpeed loads it, and everything is as it was. At another one masters,
    moments and scales are those that were saved, observers are merged and the random states are new.

    Raises:
        RankError: it is of another ZeRO stage, does not fit the model, or lacks the state of an owner.
    """
    same = checkpoint.world_size == world_size()
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
            load_resharded(session, checkpoint.path, layouts, checkpoint.stage)
    if same or checkpoint.stage == 0:  # stage 0 keeps everything on every rank
        _load_engine(session, checkpoint)
    else:
        use_masters(session.model, session.engine.optimizer)
    # DeepSpeed writes the partitions of frozen parameters (initial scales) without dropping hpZ's copies of them.
    forget_secondary_copies(session.model)
    weights_changed(session.model)
    load_owners(owners, states[0] if same else merge_ranks(states))
    if same:
        restore_random_states(states[0]["random"])
    else:
        reseed(session.recipe.train.seed, checkpoint.step)
    barrier()
    moved = "" if same else f", written by {checkpoint.world_size} rank(s), now {world_size()}"
    say(f"resumed: {checkpoint.path} ({checkpoint.step} steps done{moved})")
    return checkpoint.step


def _load_engine(session: Session, checkpoint: Checkpoint) -> None:
    """Let DeepSpeed load its part of a checkpoint, and set the optimizer's knobs again.

    DeepSpeed loads those of the old recipe, but a resumed run follows the recipe that it is given.
    """
    settings = [{key: group[key] for key in OPTIMIZER_KNOBS} for group in session.engine.optimizer.param_groups]
    session.engine.checkpoint_engine = CheckedFiles()  # DeepSpeed's own would run whatever a file tells it to
    session.engine.load_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name)
    for group, own in zip(session.engine.optimizer.param_groups, settings, strict=True):
        group.update(own)
