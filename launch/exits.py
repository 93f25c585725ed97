"""How a script ends when something is wrong: the message once, an exit code on every rank.

For errors that a user can do something about there is no traceback. Anything else is a defect and keeps its own.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from engine.recipe.reading import exit_on_recipe_error
from model.ranks import RankError, barrier, is_main, rank, shut_down, world_size


@contextmanager
def clean_exit() -> Iterator[None]:
    """Around a script's work: exit code 2 for a bad recipe, 1 for what a rank found wrong; closes the process group.

    Any other exception is one rank's own, and the others wait for it in a collective: its process ends at once, with
    the traceback, so that the launcher sees it and ends the others. An ordinary end would first tear down NCCL's
    communicators, which may wait for the others in turn.

    Raises:
        SystemExit: as said.
    """
    with exit_on_recipe_error():
        try:
            yield
        except RankError as error:
            # Every rank raises it together, so every rank comes here.
            if is_main():
                print(f"error: {error}", file=sys.stderr, flush=True)
            barrier()  # the first process to end makes the launcher end the others: not before rank 0 has printed
            shut_down()
            raise SystemExit(1) from None
        except Exception:
            if world_size() == 1:
                raise
            # In one piece, since ranks share the stream, and below rank 0's progress bar.
            print(f"\nerror on rank {rank()}:\n{traceback.format_exc()}", end="", file=sys.stderr, flush=True)
            os._exit(1)
    shut_down()
