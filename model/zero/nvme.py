"""Optimizer states that stage 3 keeps in files, on an NVMe drive (``offload_optimizer.device: nvme``).

DeepSpeed swaps the fp32 masters and moments of a sub-group into memory for its update, and out after it. In between its
tensors are empty. Sub-groups of less than 1 MB stay in memory.

DeepSpeed's public functions (``safe_get_local_fp32_param``, ``safe_set_local_optimizer_state``, ...) swap too, but for
each parameter they read the files of its whole sub-group, which has up to ``sub_group_size`` (1e9) elements.
:func:`swapped_in` reads them once per sub-group.
"""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import Tensor

COPIES = "offloaded_tensors"  # where DeepSpeed copies the files in a checkpoint
SWAPPED = ".swp"


def load_async_io() -> None:
    """Load DeepSpeed's op ``async_io``, which reads and writes the files; it is compiled once per machine.

    Raises:
        ValueError: libaio or a compiler is missing, or the process may not lock memory.
    """
    remedy = "install the package libaio-dev (libaio-devel) and a C++ compiler, or offload to cpu"
    if not AsyncIOBuilder().is_compatible():  # it links a program of one line
        raise ValueError(f"libaio or a compiler is missing: {remedy}")
    try:
        AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        what = str(error).partition("\n")[0]
        raise ValueError(f"DeepSpeed's op async_io cannot be built ({what}): {remedy}") from error
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and not _may_lock():
        raise ValueError(
            f"the limit of locked memory is {limit:,} bytes, expected unlimited (ulimit -l unlimited): DeepSpeed would "
            "abort when it locks its buffers"
        )


def check_space(directory: Path, elements: int) -> None:
    """Refuse a drive without space for 16 bytes per element: master, two moments, gradient. Files of an earlier run in
    ``directory`` are overwritten. DeepSpeed's op (0.19.8) reports no failed write, and aborts when it reads a file that
    is too short. Raises ValueError, OSError."""
    free = shutil.disk_usage(directory).free
    free += sum(file.stat().st_size for file in directory.rglob("*.swp"))
    if free < 16 * elements:
        raise ValueError(
            f"{directory}: {free / 1e9:,.1f} GB are free, but the optimizer's files take "
            f"{16 * elements / 1e9:,.1f} GB: name another drive in zero_optimization.offload_optimizer.nvme_path"
        )


def _may_lock() -> bool:
    """Return True if the process may lock any amount of memory (CAP_IPC_LOCK, as root usually has)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)
    return False


def swapped(optimizer: Any, group: int) -> bool:
    """Return True if the states of sub-group ``group`` are in files; ``optimizer`` is the engine's, on any stage."""
    return _swaps(optimizer) and optimizer._swappable_optimizer_subgroup(group)


def _swaps(optimizer: Any) -> bool:
    return getattr(optimizer, "swap_optimizer", False)


@contextmanager
def swapped_in(optimizer: Any, group: int) -> Iterator[None]:
    """Keep the states of sub-group ``group`` in memory, and write them back at the end; between two steps only. No
    effect on states that are not in files."""
    if not swapped(optimizer, group):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        optimizer._optimizer_states_and_gradient_swap_out(group)


def swap_name(rank: int, group: int, key: str) -> str:
    """Return the name of a file of swapped states in a checkpoint: fp32 values of ``key`` (``fp32`` or a moment), with
    DeepSpeed's padding behind them."""
    return f"rank_{rank}_group_{group}_{key}{SWAPPED}"


def swap_files(optimizer: Any) -> Iterator[tuple[Path, int, str]]:
    """Yield file, sub-group and key of all states of this rank that are in files, between two steps."""
    for group, master in enumerate(getattr(optimizer, "fp32_partitioned_groups_flat", [])):
        if swapped(optimizer, group):
            states = {"fp32": master, **optimizer.state.get(master, {})}
            for key, tensor in states.items():
                if key != "step":
                    folder = optimizer.optimizer_swapper.swap_folder
                    yield Path(folder, f"{tensor.ds_id}.tensor.swp"), group, key


def swap_buffers(optimizer: Any) -> list[Tensor]:
    """List the page-locked buffers through which states are swapped."""
    return optimizer.optimizer_swapper.swap_buffer_manager.all_buffers if _swaps(optimizer) else []


def unswapped_gradients(optimizer: Any) -> list[Tensor]:
    """List the gradients of swapped sub-groups that stay in memory until the step."""
    infos = optimizer.optimizer_swapper.swap_params_info.values() if _swaps(optimizer) else []
    return [gradient for info in infos for gradient in info.unswapped_gradients.values()]


def copied(checkpoint: Path, rank: int, file: Path) -> Path:
    """Return the path of DeepSpeed's copy of a file of :func:`swap_files` in the directory of a checkpoint (DeepSpeed
    0.19.8, engine.py:4937)."""
    return checkpoint / COPIES / f"rank{rank:02d}" / file.name
