"""Errors of disks in words: the file, the reason, and what can be done about it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of the machine's disks, not of the program: full, read-only, not this user's, broken, or no longer mounted.
OF_DISKS = (
    *_FULL,
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENODEV, errno.ENOENT),
)


@contextmanager
def naming(path: str | os.PathLike[str], size: int | None = None) -> Iterator[None]:
    """Context in which an error of the system without a file name is one of ``path``, a file of ``size`` bytes.

    Only opening a file names it in the error; a write or a sync that fails does not.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
            if size is not None and error.errno in _FULL:
                error.strerror = f"{error.strerror}, the file takes {size:,} bytes"
        raise


def words_of(error: BaseException) -> str:
    """Write an error in one phrase. An error of the system becomes its file, the reason, and the free bytes of a full
    disk or the missing folder."""
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return str(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    text, path = f"{' -> '.join(names)}: {error.strerror}", Path(names[-1]).absolute()
    there = next(filter(os.path.exists, path.parents))
    if error.errno in _FULL:
        with suppress(OSError):
            text += f"; {shutil.disk_usage(there).free:,} bytes are free there"
    elif error.errno == errno.ENOENT and there != path.parent:
        text += f"; {there} has no {path.relative_to(there).parts[0]}: was it removed, or its disk unmounted?"
    return text
