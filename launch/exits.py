"""How a script ends when something is wrong: the message is printed once, and every rank has an exit code.

An error that a user can do something about has no traceback. Any other exception is a defect and keeps its own. What
scripts call only raises; the one exception is a rank whose peers are dead (engine/cluster/job.py).
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from engine.cluster.job import ignore_signals
from engine.cluster.nodes import spans_nodes, tell_other_nodes
from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.reading import parse_recipe
from model.ranks import RankError, barrier, is_lost_peer, is_main, rank, shut_down, world_size

# The first process to end makes the launcher end the others, and there is no process group yet to wait in: the silent
# ranks give the one that prints this long to get as far as they are.
GRACE_SECONDS = 5

INTERRUPTED = 130  # what a shell calls the end by SIGINT

LOST_PEER = (
    "another rank has ended, and its connection is closed; that rank says why, unless it was killed (the kernel's log "
    "says whether for want of memory)"
)


def recipe_or_exit(argv: Sequence[str] | None = None, *, check_files: bool = True) -> Recipe:
    """The recipe of a command line (:func:`engine.config.reading.parse_recipe`); a bad one ends the process.

    Raises:
        SystemExit: with code 2, the problems printed.
    """
    with _exit_on_recipe_error():
        return parse_recipe(argv, check_files=check_files)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Around a script's work: exit code 2 for a bad recipe, 1 for what a rank found wrong; closes the process group.

    Any other exception is one rank's own, and the others wait for it in a collective: its process ends at once, with
    the traceback, so that the launcher sees it and ends the others; what these say of it is one line. An ordinary end
    would first tear down NCCL's communicators, which may wait for the others in turn. Ctrl-C outside of training
    (see engine/cluster/job.py) is one line and exit code 130.

    Raises:
        SystemExit: as said.
    """
    with _exit_on_recipe_error():
        try:
            yield
        except RankError as error:
            _end_together(error)
        except Exception as error:
            if world_size() == 1:
                raise
            _end_alone(error)
    _leave()


def _end_together(error: RankError) -> NoReturn:
    """End with an error that every rank raises, so that every rank comes here."""
    if is_main():
        print(f"error: {error}", file=sys.stderr, flush=True)
    barrier()  # the first process to end makes the launcher end the others: not before rank 0 has printed
    _leave()
    raise SystemExit(1) from None


def _end_alone(error: Exception) -> NoReturn:
    """End this process at once, with the traceback of what it alone has found."""
    text = f" {LOST_PEER}\n" if is_lost_peer(error) else f"\n{traceback.format_exc()}"
    # In one piece, since ranks share the stream, and below rank 0's progress bar.
    print(f"\nerror on rank {rank()}:{text}", end="", file=sys.stderr, flush=True)
    os._exit(1)


def _leave() -> None:
    """Close the process group. From here on signals change nothing: the exit code is that of the work."""
    if dist.is_initialized():
        ignore_signals()
        shut_down()


@contextmanager
def _exit_on_recipe_error() -> Iterator[None]:
    """Turn a :class:`RecipeError` into printed lines and exit code 2, without a traceback, and Ctrl-C into one line."""
    try:
        yield
    except RecipeError as error:
        _print_recipe_error(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\ninterrupted", file=sys.stderr, flush=True)
        if world_size() > 1:
            os._exit(INTERRUPTED)
        raise SystemExit(INTERRUPTED) from None


def _print_recipe_error(error: RecipeError) -> None:
    """Only local rank 0 prints, so that a machine with 8 ranks says it once. The ranks of other machines end with the
    same error, if the launcher lets us know that there are any."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr, flush=True)
    elif not spans_nodes():
        time.sleep(GRACE_SECONDS)
    tell_other_nodes(str(error))
