"""Signals as wishes, in one process."""

import os
import signal
import subprocess
import sys

import pytest

from engine.cluster.job import StopRequests
from tests.lib.patience import PATIENCE

# A dead peer is waited for without an end, as in a collective. The other one lives until this process ends.
WAITS = """
import subprocess, sys, threading, time
import psutil
from engine.cluster.job import StopRequests

dead = {dead}
with StopRequests() as requests:
    peer = subprocess.Popen([sys.executable, "-c", "pass" if dead else "input()"], stdin=subprocess.PIPE)
    requests._peers = [psutil.Process(peer.pid)]
    if dead:
        peer.wait()
    print("waiting", flush=True)
    if dead:
        threading.Event().wait()
    while not requests.requested:
        time.sleep(0.01)
    print("wished", flush=True)
peer.kill()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_a_wish_inside_and_what_it_was_outside(number):
    before = signal.getsignal(number)
    with StopRequests() as requests:
        assert not requests.requested
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert requests.requested and requests.signal == number
    assert signal.getsignal(number) == before
    with StopRequests() as again:
        assert not again.requested


@pytest.mark.parametrize("dead", [True, False])
def test_a_rank_whose_peer_is_dead_ends_at_once(dead):
    """It may never come back to Python from a collective; where all are alive the signal is only a wish."""
    command = [sys.executable, "-c", WAITS.format(dead=dead)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == (1 if dead else 0) and rest == ("" if dead else "wished\n")


LEAVES = """
import os, signal, threading
from engine.cluster.job import StopRequests

looks, leaves = threading.Event(), threading.Event()

class Peer:
    def is_running(self):
        looks.set()
        return not leaves.wait(0.5)

with StopRequests() as requests:
    requests._peers = [Peer(), Peer()]
    os.kill(os.getpid(), signal.SIGTERM)
    looks.wait()
leaves.set()
threading.Event().wait(1)
print("done")
"""


def test_a_peer_that_ends_after_this_rank_has_left_is_no_dead_one():
    """A look at the peers that is slow may not see the end of one that only began when all ranks were through."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], check=False, stdout=subprocess.PIPE, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
