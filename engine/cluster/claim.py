"""One job at a time in an output directory: two would remove each other's checkpoints.

Every rank keeps a lock of the operating system on the file ``.running`` there, for as long as its process lives, so
that nothing is stale after a kill, and the directory is free when the last rank of a job has ended. Rank 0 takes the
lock alone at first, which no rank of another job lets it; then all share it.

Not every file system has locks between machines. So rank 0 also writes down who it is, and renews the file's time: a
file of another machine that was not renewed for ``STALE_SECONDS`` is that of a job which is gone.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from model.ranks import barrier, errors_on_all_ranks, is_main

RUNNING = ".running"
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0


class Claim:
    """A context that holds a directory from :meth:`take` to its end; it may end without having taken any."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None
        self._path: Path | None = None
        self._held = False
        self._end = threading.Event()

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._file is not None:
            with suppress(OSError):
                if self._held and is_main() and self._path is not None:
                    self._path.unlink()
            self._file.close()  # which gives the lock up
            self._file = None

    def take(self, directory: Path, key: str) -> None:
        """Claim ``directory``, which is there; a collective.

        Args:
            directory: what this job writes into.
            key: the recipe's key that names the directory, for the message.

        Raises:
            RankError: on every rank: another job runs in it; says which one, on which machine and since when.
        """
        self._path = path = directory / RUNNING
        with errors_on_all_ranks(OSError, ValueError):
            if is_main():
                self._file = self._take_alone(path, f"{key}: {str(directory)!r}")
                self._share(f"{key}: {str(directory)!r}")
        with errors_on_all_ranks(OSError, ValueError):
            if not is_main():
                self._file = path.open("r+")
                self._share(f"{key}: {str(directory)!r}")
        self._held = True
        if is_main():
            threading.Thread(target=self._renew, args=(path,), daemon=True).start()
        barrier()  # from here on no other job gets the lock

    def _share(self, what: str) -> None:
        """Lock the file together with the other ranks. Raises ValueError if another job was faster."""
        assert self._file is not None
        if not _lock(self._file, fcntl.LOCK_SH):
            raise ValueError(f"{what}: another job has begun in it at the same moment; start one of them again")

    @staticmethod
    def _take_alone(path: Path, what: str) -> IO[str]:
        """The file, locked for this rank alone, with who it is. Raises ValueError if another job has it."""
        while True:
            file = open(path, "a+", opener=lambda name, how: os.open(name, how | os.O_NOFOLLOW, 0o666))  # noqa: SIM115
            free = _lock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if not free or (text and _of_a_running_job(path, text)):
                file.close()
                raise ValueError(f"{what}: {_who(text)} runs in it; wait for its end, or name another directory")
            with suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    break
            file.close()  # a job that ended just now has removed it
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "started": started}, file)
        file.flush()
        return file

    def _renew(self, path: Path) -> None:
        """The body of a thread: show other machines that this job lives."""
        while not self._end.wait(BEAT_SECONDS):
            with suppress(OSError):  # a full disk, or a directory that is gone
                os.utime(path)


def _lock(file: IO[str], kind: int) -> bool:
    """Lock a file; False if somebody else's lock is in the way. Where a file system has no locks nothing is."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _of_a_running_job(path: Path, text: str) -> bool:
    """Whether a file that nobody on this machine has locked is that of a job on another one, which renews it."""
    try:
        if json.loads(text)["host"] == socket.gethostname():
            return False  # a job of this machine would have the lock
    except (KeyError, TypeError, ValueError):
        return False  # nobody has written who it is
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
    """The job that wrote a file, for a message."""
    try:
        found = json.loads(text)
        return f"the job of process {found['pid']} on {found['host']}, started {found['started']},"
    except (KeyError, TypeError, ValueError):
        return "another job"
