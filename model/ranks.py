"""Ranks, and errors that every rank sees.

A rank that raises alone leaves its peers waiting in the next collective until the time-out. So whatever one rank may
find wrong by itself (a file, a tensor, a sample) is collected and raised by all of them together, with the same text.

Every function works without a process group too: one process is then rank 0 of 1.
"""

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

# As gloo and NCCL call it.
_LOST = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exited")


class RankError(RuntimeError):
    """Raised on all ranks when at least one of them found something wrong."""


def rank() -> int:
    """Global rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_world_size() -> int | None:
    """Number of ranks on this machine; None if the launcher does not say.

    torchrun and ``launch/slurm`` set LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(size) if size else None


def is_main() -> bool:
    """Whether this process is the one that prints, shows progress and writes files."""
    return rank() == 0


def say(text: str) -> None:
    """Print on rank 0, without tearing a progress bar apart. A log on a full disk loses the text, not the run."""
    if is_main():
        with suppress(OSError):
            tqdm.write(text)


def barrier() -> None:
    """Wait for every rank; nothing without a process group."""
    if dist.is_initialized():
        dist.barrier()


def listed(names: Sequence[str], limit: int = 20) -> str:
    """Names for a message, cut where the list gets long."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def reduce_over_ranks(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """``tensor`` reduced over all ranks, on every rank and on its own device; a collective.

    The result may be the tensor itself. NCCL reduces CUDA tensors only, so a CPU tensor (of offloaded parameters, say)
    travels through this rank's GPU.
    """
    if world_size() == 1:
        return tensor
    if dist.get_backend() == dist.Backend.NCCL and tensor.device.type == "cpu":
        on_gpu = tensor.cuda()
        dist.all_reduce(on_gpu, op=operation)
        return on_gpu.cpu()
    dist.all_reduce(tensor, op=operation)
    return tensor


def shut_down() -> None:
    """Close the process group when all ranks have come to their end; without it NCCL warns and gloo may abort at exit.

    A rank that leaves closes its connections, and gloo tells a peer that has not yet returned from the last collective
    that the connection is lost. So nobody leaves before all have returned from it: they wait for each other once more,
    and whether a peer has left this last wait already does not matter.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.barrier()
        dist.destroy_process_group()
        _wait_for_gloo()


def _wait_for_gloo() -> None:
    """Wait until gloo's threads have nothing to do.

    A thread that has done a collective tells who waits for it first, and drops the tensors then, for which it needs
    Python's lock (seen in torch 2.13: ~AsyncAllreduceWork, TensorImpl::decref_pyobject). If the interpreter has begun
    to end by then, Python ends the thread inside a C++ destructor, and the process aborts: "terminate called without an
    active exception", exit code -6, though all is written. The threads live on behind destroy_process_group, since
    DeepSpeed's modules, engines and parameters refer to the group; idle ones sleep. While this thread sleeps the lock
    is free, so that one which is not idle runs, or waits for a core, and is seen: the kernel says so.
    """
    idle = 0
    while idle < 3:
        time.sleep(0.002)
        idle = 0 if any(map(_runs, _gloo_threads())) else idle + 1


def _gloo_threads() -> list[Path]:
    """The directories in /proc of the threads that carry out gloo's collectives."""
    found = []
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has ended
            if (thread / "comm").read_text().strip() == "pt_gloo_runloop":
                found.append(thread)
    return found


def _runs(thread: Path) -> bool:
    """Whether a thread runs or waits for a core or a page, and does not sleep."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] != "S"
    except OSError:
        return False


def is_lost_peer(error: Exception) -> bool:
    """Whether an error of a collective says that another rank has gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def gather_objects(value: Any) -> list[Any]:
    """The value of every rank, in rank order, on every rank. Values are pickled: keep them small."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def raise_everywhere(error: str | None) -> None:
    """Raise :class:`RankError` on every rank if any rank passes a text. A collective: every rank must call it.

    Ranks that found the same thing are named together, so that an error in a shared file is printed once.
    """
    found: dict[str, list[int]] = {}
    for index, text in enumerate(gather_objects(error)):
        if text is not None:
            found.setdefault(text, []).append(index)
    if not found:
        return
    if len(found) == 1 and len(next(iter(found.values()))) == world_size():
        raise RankError(next(iter(found)))
    raise RankError("\n".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in found.items()))


@contextmanager
def errors_on_all_ranks(*kinds: type[Exception], key: str = "") -> Iterator[None]:
    """Turn an exception of ``kinds`` inside the block into a :class:`RankError` on every rank.

    A collective at the end of the block: every rank must enter it, and nothing inside is one. ``key`` opens the text.
    """
    error, cause = None, None
    try:
        yield
    except kinds as caught:
        error, cause = f"{key}: " * bool(key) + (str(caught) or type(caught).__name__), caught
    try:
        raise_everywhere(error)
    except RankError as everywhere:
        raise everywhere from cause
