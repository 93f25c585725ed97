"""SIGTERM, SIGUSR1 and SIGINT (Ctrl-C): finish the step, save, exit 0.

A signal may reach any part of a job: one rank, all of them, or only the launcher. So a signal is a wish that a rank
brings to the next reduction over all ranks (``Loop`` adds it to the losses of the step), and all ranks stop after the
same step. A second signal changes nothing, nor does one that comes when the last step is done: what has begun is
written to its end, and the exit code is 0.

DeepSpeed's launcher has ways of its own. ``deepspeed`` on one machine dies of SIGTERM and leaves its children running;
its child ``deepspeed.launcher.launch`` dies of SIGUSR1 likewise, and on SIGTERM (or when a rank has died) it sends
SIGTERM to one rank after the other and waits up to 30 s for each before it kills it. Hence two more rules:

- a run whose launcher is gone stops like one that got a signal;
- a rank that gets a signal while another rank of its machine is dead ends at once. It may be waiting for that rank in a
  collective, from which no Python code runs again, and with eight ranks 30 s each are four minutes.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

import psutil

from model.ranks import world_size

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
DEEPSPEED_LAUNCHER = "deepspeed.launcher.launch"


class StopRequests:
    """A context in which the signals are wishes; before and after it they do what they did before.

    Use it around the steps and the saves. While a model loads nothing is lost by ending at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal that came."""
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._wakeup: tuple[int, int] | None = None
        self._launchers: list[tuple[int, int]] = []
        self._peers: list[psutil.Process] = []

    @property
    def requested(self) -> bool:
        """Whether this rank wants to stop."""
        return self.signal is not None or self._launcher_is_gone()

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python gives signals to the main thread only; a notebook's kernel handles its own
        self._look_around()
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._remember)
        # The byte is written by the C handler, so it arrives while the main thread waits in a collective.
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._previous_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._wakeup = (read, write)
        threading.Thread(target=self._end_with_dead_peers, args=(read,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._previous_fd)
            os.close(self._wakeup[1])  # the thread reads the end of the pipe, and ends
            self._wakeup = None

    def work_alone(self) -> None:
        """From here on this rank waits for no other one, so that it need not end because they have."""
        self._peers = []

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _look_around(self) -> None:
        """Remember the processes that launched this one, and the other ranks that its launcher started."""
        if world_size() == 1:
            return
        parent = psutil.Process().parent()
        if parent is None:
            return
        self._launchers = [(os.getpid(), parent.pid)]
        if DEEPSPEED_LAUNCHER in parent.cmdline():
            self._launchers.append((parent.pid, parent.ppid()))
        self._peers = [process for process in parent.children() if process.pid != os.getpid()]

    def _launcher_is_gone(self) -> bool:
        """Whether a process of the chain has another parent than at the start: its own is dead."""
        try:
            return any(psutil.Process(child).ppid() != parent for child, parent in self._launchers)
        except psutil.NoSuchProcess:
            return True

    def _end_with_dead_peers(self, read: int) -> None:
        """The body of a thread: at each signal end this process if another rank of its machine is dead."""
        while os.read(read, 1):
            if not all(_alive(peer) for peer in self._peers):
                os._exit(1)
        os.close(read)


def ignore_signals() -> None:
    """For the end of a process that has done its work: a signal would make its exit code that of a failure."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended and waits for its parent (a zombie) does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
