"""Exit scripts on errors: the message is printed once, and every rank has an exit code.

An error that a user can fix, also one of a disk, is printed without a traceback. Any other exception is a defect and
keeps its traceback.
Library code raises errors and does not exit, except on a rank whose peers are dead (engine/cluster/job.py).
"""

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from engine.cluster.job import ignore_signals
from engine.cluster.nodes import RanksDifferError, tell_other_ranks
from engine.config.config import Recipe
from engine.config.errors import RecipeError
from engine.config.reading import parse_recipe
from model.ranks import OF_DISKS, RankError, barrier, is_lost_peer, is_main, rank, shut_down, words_of, world_size

INTERRUPTED = 130  # exit code of a shell for SIGINT

LOST_PEER = (
    "another rank has ended, and its connection is closed; that rank says why, unless it was killed (the kernel's log "
    "says if it ran out of memory)"
)


def recipe_or_exit(argv: Sequence[str] | None = None, *, check_files: bool = True) -> Recipe:
    """Parse the recipe of a command line (:func:`engine.config.reading.parse_recipe`); if it is bad, print the problems
    and exit with code 2."""
    with _exit_on_recipe_error():
        return parse_recipe(argv, check_files=check_files)


@contextmanager
def clean_exit() -> Iterator[None]:
    """Context of a script's work: exit code 2 for a bad recipe, 1 for a RankError or an error of a disk. Closes the
    process group.

    Any other exception is raised on one rank only, while the other ranks wait in a collective. So this rank's process
    ends at once, with the traceback. The launcher then ends the other ranks, which print one line each. An ordinary
    exit would first close NCCL's communicators, which may wait for the other ranks. Before there is a process group,
    the error is sent to the other ranks. Ctrl-C outside of training (see engine/cluster/job.py) prints one line, and
    the exit code is 130.
    """
    with _exit_on_recipe_error():
        try:
            yield
        except RankError as error:
            _end_together(error)
        except Exception as error:
            if world_size() > 1:
                _end_alone(error)
            if isinstance(error, RecipeError):
                raise  # to _exit_on_recipe_error, which also tells the other ranks
            of_a_disk = _is_of_a_disk(error)
            tell_other_ranks(words_of(error) if of_a_disk else f"{type(error).__name__}: {error}")
            if not of_a_disk:
                raise
            _end_together(RankError(words_of(error)))
    _leave()


def _is_of_a_disk(error: Exception) -> bool:
    """Return True for a full, vanished or read-only disk, and a file that the user may not use: no defect."""
    return isinstance(error, OSError) and error.errno in OF_DISKS


def _end_together(error: RankError) -> NoReturn:
    """Exit with an error that is raised on every rank."""
    if is_main() or isinstance(error, RanksDifferError):
        print(f"error: {error}\n", end="", file=sys.stderr, flush=True)  # in one write, as ranks share the stream
    barrier()  # the first process to end makes the launcher end the others: not before rank 0 has printed
    _leave()
    raise SystemExit(1) from None


def _end_alone(error: Exception) -> NoReturn:
    """Exit this process at once, with an error on this rank only, in one line or with its traceback."""
    line = LOST_PEER if is_lost_peer(error) else words_of(error) if _is_of_a_disk(error) else None
    text = f"\n{traceback.format_exc()}" if line is None else f" {line}\n"
    # In one write, since ranks share the stream, and below rank 0's progress bar.
    print(f"\nerror on rank {rank()}:{text}", end="", file=sys.stderr, flush=True)
    os._exit(1)


def _leave() -> None:
    """Close the process group. Signals are ignored from here on, so that they do not change the exit code."""
    if dist.is_initialized():
        ignore_signals()
        shut_down()


@contextmanager
def _exit_on_recipe_error() -> Iterator[None]:
    """Convert a :class:`RecipeError` to printed lines and exit code 2, without a traceback, and Ctrl-C to one line."""
    try:
        yield
    except RecipeError as error:
        text = "\n".join(f"error: {line}" for line in str(error).splitlines())
        # Once per machine, unless it is the error of another local rank alone. The others end with the same error.
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        if first:
            print(text, file=sys.stderr, flush=True)
        if tell_other_ranks(str(error), shown=first):
            print(text, file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("\ninterrupted", file=sys.stderr, flush=True)
        if world_size() > 1:
            os._exit(INTERRUPTED)
        raise SystemExit(INTERRUPTED) from None
