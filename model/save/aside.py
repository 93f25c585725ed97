"""Write a directory beside its final name, and rename it when everything in it is on disk.

The directory is called ``<out>.tmp-<8 hex digits>`` until then, so an incomplete one is never taken for ``<out>``. If
the writing process is killed, its directory remains, and the next run that writes ``<out>`` removes it. The writing
process keeps a lock on the file ``.writing`` inside, and a locked directory is never removed. As some file systems have
no locks between machines, a directory of another machine (named in the file) is removed only after an hour without a
write.
"""

import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from model.ranks import naming, say

WRITING = ".writing"
QUIET_SECONDS = 3600.0


class Aside:
    """Temporary directory, at ``path``, in which one process writes the files of ``out``. Always call :meth:`close`.
    Raises ValueError if ``out`` is a file or not empty, or if the disk has fewer than ``size`` bytes free."""

    def __init__(self, out: Path, size: int) -> None:
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file, expected a directory that is empty or does not exist")
        if out.is_dir() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty: name another directory, or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
        remove_left(out)
        free = shutil.disk_usage(out.parent).free
        if free < size:
            raise ValueError(
                f"{out.parent} has {free:,} bytes free, the weights alone need {size:,}: free space, or name another "
                "directory"
            )
        self._out = out
        self.path = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
        self.path.mkdir()
        self._lock = open(self.path / WRITING, "x")  # noqa: SIM115
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        with naming(self.path / WRITING):
            self._lock.write(socket.gethostname())
            self._lock.flush()

    def publish(self) -> None:
        """Rename the finished directory to ``out``. Raises OSError if the disk fails, or ``out`` is no longer empty."""
        sync(self.path)
        os.rename(self.path, self._out)  # an empty directory is replaced
        (self._out / WRITING).unlink()
        sync(self._out)
        sync(self._out.parent)

    def close(self) -> None:
        """Remove the directory unless it was published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_left(out: Path) -> None:
    """Remove temporary directories that killed processes left beside ``out``. Warn of those that stay, because the
    process that writes them may still run."""
    for left in sorted(out.parent.glob(f"{glob.escape(out.name)}.tmp-*")):
        if re.fullmatch(r".*\.tmp-[0-9a-f]{8}", left.name) and left.is_dir() and not left.is_symlink():
            with suppress(OSError):
                _remove(left)
            if left.exists():
                say(f"warning: {left} belongs to another run that writes {out}: remove it if no such run is active")


def _remove(left: Path) -> None:
    """Remove a directory if the process that wrote it has ended. Raises OSError if that process holds the lock."""
    try:
        lock = open(left / WRITING, "r+")  # noqa: SIM115
    except FileNotFoundError:  # killed just before it was made
        if _quiet(left):
            left.rmdir()
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock.read() == socket.gethostname() or _quiet(left):
            for entry in left.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != WRITING:  # last: without it the rest would be of an unknown run
                    entry.unlink()
            shutil.rmtree(left)


def _quiet(directory: Path) -> bool:
    """Return True if nothing in a directory was written in the last hour."""
    newest = max(path.stat().st_mtime for path in (directory, *directory.rglob("*")))
    return time.time() - newest > QUIET_SECONDS


def sync(path: Path) -> None:
    """Sync a file, or a directory's list of entries, to disk, so that a later rename cannot reach the disk first."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def write_json(value: dict[str, Any], path: Path) -> None:
    """Write ``value`` to ``path`` and sync it to disk."""
    with naming(path):
        path.write_text(json.dumps(value, indent=2) + "\n")
    sync(path)
