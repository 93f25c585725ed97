"""How a script ends when something is wrong: the message once, an exit code on every rank, no traceback.

For errors that a user can do something about. Anything else is a defect and keeps its traceback.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.recipe import exit_on_recipe_error
from model.ranks import RankError, barrier, is_main, shut_down


@contextmanager
def clean_exit() -> Iterator[None]:
    """Around a script's work: exit code 2 for a bad recipe, 1 for what a rank found wrong; closes the process group.

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
    shut_down()
