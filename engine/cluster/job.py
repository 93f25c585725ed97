"""Processes of a job: join the process group, lock the output directory, stop together at a signal.

Directory lock: two jobs in one directory would remove each other's checkpoints. Every rank locks the file ``.running``
in the directory as long as the process lives, so a killed job leaves no lock behind. Rank 0 first locks the file
exclusively, which fails while a rank of another job has locked it; then all ranks share the lock. Some file systems
have no locks between machines. So rank 0 also writes host and process id into the file and renews its modification
time: a file of another machine that was not renewed for ``STALE_SECONDS`` belongs to a dead job.

Signals (SIGTERM, SIGUSR1, and SIGINT, Ctrl-C: finish the step, save, exit 0) may reach one rank, all ranks or only the
launcher. A signal sets a flag that is all-reduced with the losses of the step, so all ranks stop after the same step. A
second signal changes nothing, nor does a signal after the last step: the run writes its files, and the exit code is 0.

DeepSpeed's launchers handle signals differently. ``deepspeed`` on one machine dies of SIGTERM and leaves its children
running. Its child ``deepspeed.launcher.launch`` dies of SIGUSR1 and leaves the ranks running. On SIGTERM, or when a
rank has died, it sends SIGTERM to one rank after the other and waits up to 30 s for each before killing it. Hence two
more rules:

- a run whose launcher is gone stops as after a signal;
- a rank that gets a signal while another rank of its machine is dead exits at once. It may be waiting for the dead rank
  in a collective, from which Python never returns, and 30 s for each of eight ranks are four minutes.
"""

import errno
import fcntl
import json
import os
import signal
import socket
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil
import torch

from engine.config.errors import RecipeError
from model.ranks import RankError, barrier, errors_on_all_ranks, is_main, world_size
from model.zero import init_process_group, own_device

RUNNING = ".running"
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0


class RunLock:
    """Context manager that keeps a directory locked from a call of :meth:`take` to the exit of the context; without a
    call nothing is locked."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._path: Path | None = None
        self._held = False
        self._end = threading.Event()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._file is not None:
            with suppress(OSError):
                if self._held and is_main() and self._path is not None:
                    self._path.unlink()
            self._file.close()  # releases the lock
            self._file = None

    def take(self, directory: Path) -> None:
        """Lock the existing output directory for this run; a collective.

        Raises:
            RankError: on every rank: another job runs in the directory (the message has its process, machine and start
                time, if it is known), or the file ``.running`` cannot be written.
        """
        self._path = path = directory / RUNNING
        what = f"output_dir: {str(directory)!r}"
        with errors_on_all_ranks(OSError, ValueError):
            if is_main():
                self._file = self._take_alone(path, what)
                self._share(what)
        with errors_on_all_ranks(OSError, ValueError):
            if not is_main():
                self._file = path.open("r+")
                self._share(what)
        self._held = True
        if is_main():
            threading.Thread(target=self._renew, args=(path,), daemon=True).start()
        barrier()  # all ranks hold the lock

    def _share(self, what: str) -> None:
        """Take a shared lock on the file, as all ranks do. Raises ValueError if another job has locked it meanwhile."""
        assert self._file is not None
        if _lock(self._file, fcntl.LOCK_SH) is False:
            raise ValueError(f"{what}: another job has started in it at the same moment; start one of the two again")

    @staticmethod
    def _take_alone(path: Path, what: str) -> IO[str]:
        """Lock the file exclusively, and write host, process id and time. Raises ValueError if another job has it."""
        while True:
            file = open(path, "a+", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o666))  # noqa: SIM115
            locked = _lock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if locked is False or (text and _of_a_running_job(path, text, locks=locked is not None)):
                file.close()
                raise ValueError(f"{what}: {_who(text)} runs in it; wait for its end, or name another directory")
            with suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    break
            file.close()  # removed by a job that ended just now
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
        file.flush()
        return file

    def _renew(self, path: Path) -> None:
        """Renew the file's modification time periodically; runs in a thread."""
        while not self._end.wait(BEAT_SECONDS):
            with suppress(OSError):  # a full disk, or a directory that is gone
                os.utime(path)


def _lock(file: IO[str], kind: int) -> bool | None:
    """Lock a file; return False if another process holds the lock, and None on file systems without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def _of_a_running_job(path: Path, text: str, *, locks: bool) -> bool:
    """Tell if the job that wrote a file without a lock still runs. It can only if it is on another machine, or if the
    file system has no locks (``locks`` is False). Wait until the file is renewed (True) or too old (False)."""
    try:
        if json.loads(text)["host"] == socket.gethostname() and locks:
            return False  # a running job of this machine would hold the lock
    except (KeyError, TypeError, ValueError):
        return False  # no job wrote it completely
    probe = path.with_name(f"{RUNNING}-{os.getpid()}")
    first = path.stat().st_mtime
    while True:
        # The file server's clock, not this machine's; opening a file makes NFS ask it.
        with path.open("rb") as seen, probe.open("wb") as now:
            renewed = os.fstat(seen.fileno()).st_mtime
            age = os.fstat(now.fileno()).st_mtime - renewed
        probe.unlink()
        if renewed != first or age > STALE_SECONDS:
            return renewed != first
        time.sleep(1)


def _who(text: str) -> str:
    """Describe the job that wrote ``text``, for a message."""
    try:
        found = json.loads(text)
        return f"the job of process {found['pid']} on {found['host']}, started {found['started']},"
    except (KeyError, TypeError, ValueError):
        return "another job"


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
NO_LAUNCHER = (
    "but RANK, LOCAL_RANK and WORLD_SIZE are not set: start one launcher per node (srun --ntasks-per-node=1 "
    "torchrun ..., or deepspeed --hostfile ...), which sets them"
)


def join_ranks() -> torch.device:
    """Start the process group (NCCL on CUDA, gloo on CPU) and return this rank's device; a collective.

    Without a launcher the process is rank 0 of 1: the variables in ``ALONE`` are set in the environment.

    Raises:
        RecipeError: the job has several processes, but RANK is not in the environment.
        RankError: RANK, LOCAL_RANK or WORLD_SIZE is no number, the machine has too few devices, the ranks did not meet
            in time, or this process has closed a process group before.
    """
    # DeepSpeed calls two torch collectives by names deprecated in torch 2.13; users cannot change that.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", message=f".*{name}", category=FutureWarning)
    _check_launcher()
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    device = own_device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL uses the current device when it starts
    init_process_group()
    return device


def _check_launcher() -> None:
    """Refuse a job of several processes without RANK: each process would train alone, as rank 0.

    Raises:
        RecipeError: RANK is missing.
        RankError: a variable is not a number.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise RankError(
                f"{name} is {os.environ[name]!r} in the environment, expected a number: start the ranks with a "
                "launcher, which sets it"
            )
    if "RANK" in os.environ:
        return
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") not in ("0", "1"):
            raise RecipeError(f"{name} is {os.environ[name]}, {NO_LAUNCHER}")


SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
DEEPSPEED_LAUNCHER = "deepspeed.launcher.launch"


class StopRequests:
    """Context manager in which ``SIGNALS`` only set a flag; the signal handlers are restored at its exit. Use it around
    the steps and the saves. While a model loads, a signal may end the process at once: nothing is lost."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal received."""
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._wakeup: tuple[int, int] | None = None
        self._launchers: list[tuple[int, int]] = []
        self._peers: list[psutil.Process] = []
        self._looking = threading.Lock()  # work_alone waits until a running check of the peers is done

    @property
    def requested(self) -> bool:
        """True if this rank received a signal or its launcher is gone."""
        return self.signal is not None or self._launcher_is_gone()

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only; a notebook's kernel handles its own
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
        self.work_alone()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._previous_fd)
            os.close(self._wakeup[1])  # ends the thread
            self._wakeup = None

    def work_alone(self) -> None:
        """Stop watching the other ranks of this machine: a signal no longer ends this process if one of them is dead.
        Call it before work in which this rank waits in no collective."""
        with self._looking:
            self._peers = []

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _look_around(self) -> None:
        """Record the launchers of this process, and the other ranks that its launcher started."""
        if world_size() == 1:
            return
        parent = psutil.Process().parent()
        if parent is None:
            return
        self._launchers = [(os.getpid(), parent.pid)]
        if DEEPSPEED_LAUNCHER in parent.cmdline():
            self._launchers.append((parent.pid, parent.ppid()))
        self._peers = other_ranks(parent)

    def _launcher_is_gone(self) -> bool:
        """Tell if this process or its launcher has another parent than at the start, because the old one is dead."""
        try:
            return any(psutil.Process(child).ppid() != parent for child, parent in self._launchers)
        except psutil.NoSuchProcess:
            return True

    def _end_with_dead_peers(self, read: int) -> None:
        """At each signal, exit this process if another rank of its machine is dead; runs in a thread."""
        while os.read(read, 1):
            with self._looking:
                if not all(_alive(peer) for peer in self._peers):
                    os._exit(1)
        os.close(read)


def ignore_signals() -> None:
    """Ignore signals at the end of a finished process: a signal would turn its exit code into a failure."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def other_ranks(launcher: psutil.Process) -> list[psutil.Process]:
    """Find the children of a launcher that are ranks of this job, without this process. If a shell is the launcher, it
    has other children too, such as a ``tee`` that ends early."""
    return [process for process in launcher.children() if _is_other_rank(process)]


def _is_other_rank(process: psutil.Process) -> bool:
    """Tell if a process was started with the address of this job and another LOCAL_RANK."""
    try:
        environment = process.environ()
    except psutil.Error:  # it ended, or belongs to another user
        return False
    same = all(environment.get(name) == os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return same and environment.get("LOCAL_RANK", os.environ["LOCAL_RANK"]) != os.environ["LOCAL_RANK"]


def _alive(process: psutil.Process) -> bool:
    """Tell if a process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
