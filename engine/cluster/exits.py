"""Errors that end a job of several machines before it has begun: how the ranks of the other machines learn of them.

Once there is a process group, :mod:`model.ranks` raises what one rank found on all of them. Before that a machine whose
recipe is bad, or which lacks a file, would end alone, and the others would wait for it until the time-out.
"""

import os
import socket
from contextlib import suppress

import torch.distributed as dist

from engine.cluster.job import join_ranks
from model.ranks import RankError, barrier, local_world_size, raise_everywhere, shut_down


def spans_nodes() -> bool:
    """Whether the launcher says that there are ranks on other machines; to be asked before there is a process group."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return (local_world_size() or world) < world


def tell_other_nodes(error: str) -> None:
    """Bring an error from before the process group to the ranks of other machines, which may not have it.

    Every process group begins with a look at such errors (``engine.session.context.init_ranks``), so this rank joins it
    to say what is wrong. Nothing happens on one machine, nor once there is a process group.
    """
    if not spans_nodes() or dist.is_initialized():
        return
    join_ranks()
    with suppress(RankError):  # the caller ends this process
        raise_everywhere(f"on {socket.gethostname()}: {error}")
    # The other ranks wait in the same barriers, at the end of launch.exits.clean_exit. If this process ended before
    # they get there, they would report its disappearance instead of the error.
    barrier()
    shut_down()
