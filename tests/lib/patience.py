"""How long tests wait: long enough that nothing but a hang is ever cut off.

No test measures time. A machine with a load of 20 is slow, and that is all: what a test needs to know is that something
ended, in which order things happened, or how often. So every time-out is this one, or a multiple of it where a test
runs dozens of jobs.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

PATIENCE = 1800.0  # seconds; a launch of two ranks takes 20 to 90 on two idle cores
EXAMPLE = 600.0  # seconds for one of thousands of examples, each of which takes far less than one


@contextmanager
def ends(what: object) -> Iterator[None]:
    """Fail by the name of an example that does not come to its end; in the main thread."""

    def give_up(*_: object) -> None:
        pytest.fail(f"does not end: {what}")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, EXAMPLE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def until(condition: Callable[[], object], failure: Callable[[], str]) -> None:
    """Wait until ``condition`` holds; an AssertionError with the text of ``failure`` if that takes forever."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, failure()
        time.sleep(0.02)
