"""Ranks, errors that every rank sees, and the text of errors of the file system.

If only one rank raises an error, the others wait in the next collective until the time-out. So errors that may occur on
one rank only (a file, a tensor, a sample) are collected and raised by all ranks together, with the same text.

Every function also works without a process group: one process is then rank 0 of 1.
"""

import errno
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

_MOST = 5  # problems that one error names
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of the machine's disks, not of the program: full, read-only, not this user's, broken, or no longer mounted.
OF_DISKS = (
    *_FULL,
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG),
    *(errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENODEV, errno.ENOENT),
)
# Texts by which gloo and NCCL report that another rank has ended.
_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited")


class RankError(RuntimeError):
    """Error raised on all ranks when at least one of them found a problem."""


NOTICE_SECONDS = 60.0
"""Time after which a rank that waits for others to start prints which ones are missing."""
MEET_SECONDS = 60.0
"""Time between two collectives while rank 0 waits for something else (:func:`made_by_main`)."""
_ALL = "all"
_CHECK = (
    "check that WORLD_SIZE is the number of processes that you started, that no other rank has ended, and that every "
    "machine reaches this address"
)


def meet(patience: timedelta) -> dist.Store | None:
    """Wait until all ranks have started; does nothing for a single rank. The environment must have RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT.

    torch would print nothing while it waits, and then raise an error that does not name the missing ranks.

    Args:
        patience: time to wait. After ``NOTICE_SECONDS`` each rank prints which ranks are missing.

    Returns:
        The store that the ranks joined; None with a single rank. Unless torchrun's agent serves it, rank 0 does while
            the object exists, also to torch's process group.

    Raises:
        RankError: on every rank that has started: ranks are missing after ``patience`` (the text names them), or two
            processes have the same rank.
        RuntimeError: the address cannot be used, or rank 0 has ended.
    """
    own, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world == 1:
        return None
    keys = f"deepqat/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun's store outlives its ranks
    joined, number, met = f"{keys}/joined", f"{keys}/number", f"{keys}/met"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = own == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent does
    store: dist.TCPStore | None = None
    now = time.monotonic()
    notice, until = now + NOTICE_SECONDS, now + patience.total_seconds()
    while store is None or not store.check([met]):
        if store is None and (serves or _answers(host, port)):
            store = dist.TCPStore(host, port, world, serves, wait_for_workers=False, multi_tenant=serves)
            if store.add(f"{joined}/{own}", 1) > 1:
                store.compare_set(met, "", f"RANK is {own} in two processes, expected another number in each")
            elif store.add(number, 1) == world:
                store.compare_set(met, "", _ALL)
        elif time.monotonic() < min(notice, until):
            time.sleep(0.1)
        else:
            missing = [i for i in range(world) if not store.check([f"{joined}/{i}"])] if store is not None else [0]
            what = f"rank{'s' * (len(missing) > 1)} {listed(list(map(str, missing)))} of {world} at {host}:{port}"
            if time.monotonic() < until:
                say(
                    f"rank {own} waits for {what}, at most {(until - notice) / 60:.0f} min more: {_CHECK}",
                    any_rank=True,
                )
                notice = until
            else:  # the first rank to give up tells the others
                error = f"rank {own} has waited {patience} for {what}: {_CHECK}"
                if store is None:
                    raise RankError(error)
                store.compare_set(met, "", error)
    if (found := store.get(met).decode()) != _ALL:
        if serves:
            time.sleep(2)  # the others read it from here
        raise RankError(found)
    return store


def _answers(host: str, port: int) -> bool:
    """Return True if a process listens at an address; torch's store would print 30 lines for each failed attempt."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


class _Alone:
    """Flag that :func:`alone` sets."""

    now = False


@contextmanager
def alone() -> Iterator[None]:
    """Make this process rank 0 of 1 inside the block, for all functions of this module except :func:`meet`,
    :func:`local_world_size` and :func:`shut_down`. They then run no collective, so one rank of the process group can
    write files without the others."""
    _Alone.now = True
    try:
        yield
    finally:
        _Alone.now = False


def rank() -> int:
    """Return the global rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() and not _Alone.now else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() and not _Alone.now else 1


def local_world_size() -> int | None:
    """Return the number of ranks on this machine; None if the launcher does not set it. torchrun and ``launch/slurm``
    set LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE."""
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(size) if size else None


def is_main() -> bool:
    """Return True on rank 0, which prints, shows progress and writes files."""
    return rank() == 0


def say(text: str, any_rank: bool = False) -> None:
    """Print on rank 0, or with ``any_rank`` on the calling rank, without breaking a progress bar. If the log's disk is
    full, the text is lost, but the run continues."""
    if any_rank or is_main():
        with suppress(OSError):
            tqdm.write(text)
            sys.stdout.flush()  # a log file shows the line at once


def barrier() -> None:
    """Wait for every rank; does nothing without a process group."""
    if world_size() > 1:
        dist.barrier()


def listed(names: Sequence[str], limit: int = 20) -> str:
    """Join names for a message; after ``limit`` names only the number of the others follows."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def reduce_over_ranks(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``tensor`` over all ranks, by default to the sum; a collective. Every rank gets the result, on the
    tensor's device; it may be ``tensor`` itself, overwritten. NCCL only reduces CUDA tensors, so a CPU tensor (of
    offloaded parameters) is copied to this rank's GPU and back."""
    if world_size() == 1:
        return tensor
    if dist.get_backend() == dist.Backend.NCCL and tensor.device.type == "cpu":
        on_gpu = tensor.cuda()
        dist.all_reduce(on_gpu, op=operation)
        return on_gpu.cpu()
    dist.all_reduce(tensor, op=operation)
    return tensor


def shut_down() -> None:
    """Close the process group, if any, when all ranks are done; otherwise NCCL warns and gloo may abort at exit. A
    collective: all ranks first meet in a barrier. If one closed while a peer had not yet returned from the last
    collective, gloo would report a lost connection to that peer; in the barrier itself this error is ignored."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.barrier()
        dist.destroy_process_group()
        _wait_for_gloo()


def _wait_for_gloo() -> None:
    """Wait until gloo's threads are idle.

    A gloo thread that has finished a collective wakes the waiting thread, and then drops the tensors, for which it
    needs Python's GIL (seen in torch 2.13: ~AsyncAllreduceWork, TensorImpl::decref_pyobject). If the interpreter is
    exiting by then, the thread ends inside a C++ destructor, and the process aborts ("terminate called without an
    active exception", exit code -6) though everything is written. The threads outlive destroy_process_group, since
    DeepSpeed's modules, engines and parameters refer to the group. While this thread sleeps the GIL is free, so a busy
    thread runs, or waits for a core, which the kernel reports.
    """
    idle = 0
    while idle < 3:
        time.sleep(0.002)
        idle = 0 if _gloo_is_busy() else idle + 1


def _gloo_is_busy() -> bool:
    """Return True if a thread of gloo's collectives runs, or waits for a core or a page, instead of sleeping."""
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "S" and (thread / "comm").read_text().strip() == "pt_gloo_runloop":
                return True
    return False


def is_lost_peer(error: Exception) -> bool:
    """Return True if an error of a collective reports that another rank has ended."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def gather_objects(value: Any) -> list[Any]:
    """Gather the values of all ranks, in rank order, on every rank; a collective. They are pickled: keep them small."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def from_main(value: Any) -> Any:
    """Send rank 0's ``value`` to every rank, pickled, and return it; a collective. Other ranks' values are ignored."""
    values = [value]
    if world_size() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def made_by_main(make: Callable[[], Any]) -> Any:
    """Call ``make`` on rank 0 and return its result on every rank; a collective that may last longer than the time-out
    of a single one (10 minutes): ``make`` runs in a thread, and the ranks meet every ``MEET_SECONDS``. It must call no
    collective. What it raises is raised on rank 0 alone."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    if is_main():
        Thread(target=run, daemon=True).start()  # not of a pool, which would wait for it at the end of the process
    done, value = False, None
    while not done:
        if is_main():
            done = bool(wait([made], MEET_SECONDS).done)
            value = made.result() if done else None
        done, value = from_main((done, value))
    return value


def raise_everywhere(error: str | None) -> None:
    """Raise :class:`RankError` on every rank if any rank passes a text: with all ranks' texts, equal ones once; return
    if every rank passes None. A collective: every rank must call this function."""
    found: dict[str, list[int]] = {}
    for index, text in enumerate(gather_objects(error)):
        if text is not None:
            found.setdefault(text, []).append(index)
    if not found:
        return
    if len(found) == 1 and len(next(iter(found.values()))) == world_size():
        raise RankError(next(iter(found)))
    raise RankError("\n".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in found.items()))


def raise_problems(head: str, problems: Sequence[str]) -> None:
    """Raise :class:`RankError` with ``head`` and the first ``_MOST`` problems; return if the list is empty. Every rank
    must pass the same problems: with any, this is a collective."""
    if problems:
        more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        raise_everywhere("\n".join([head, *problems[:_MOST], *more]))


@contextmanager
def errors_on_all_ranks(*kinds: type[Exception], key: str = "") -> Iterator[None]:
    """Convert an exception of ``kinds`` inside the block to a :class:`RankError` on every rank, with ``key`` (if any)
    as a prefix of its text; other exceptions are raised on this rank only. The end of the block is a collective: every
    rank must enter the block, and run no collective inside."""
    error, cause = None, None
    try:
        yield
    except kinds as caught:
        error, cause = f"{key}: " * bool(key) + words_of(caught), caught
    try:
        raise_everywhere(error)
    except RankError as everywhere:
        raise everywhere from cause


@contextmanager
def naming(path: str | os.PathLike[str], size: int | None = None) -> Iterator[None]:
    """Add the file ``path`` to any OSError of the block that lacks a file name, as errors of writing and syncing do; if
    the disk is full, also the ``size`` of the file in bytes, unless it is None."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
            if size is not None and error.errno in _FULL:
                error.strerror = f"{error.strerror}, the file takes {size:,} bytes"
        raise


def words_of(error: BaseException) -> str:
    """Describe an error in one phrase: for an OSError the file and the reason, then for a full disk the bytes that are
    free, and for a file that was not found the folder that is missing above it."""
    if not isinstance(error, OSError) or error.strerror is None or error.filename is None:
        return str(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    text = f"{' -> '.join(names)}: {error.strerror}"
    try:
        path = Path(names[-1]).absolute()
    except FileNotFoundError:  # of a relative path
        return f"{text}; the working directory is missing: was it removed, or its disk unmounted?"
    there = next(filter(os.path.exists, path.parents), path)
    if error.errno in _FULL:
        with suppress(OSError):
            text += f"; {shutil.disk_usage(there).free:,} bytes are free there"
    elif error.errno == errno.ENOENT and there != path.parent:
        text += f"; {there} has no {path.relative_to(there).parts[0]}: was it removed, or its disk unmounted?"
    return text
