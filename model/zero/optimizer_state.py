"""Gradients, fp32 masters and moments in DeepSpeed's optimizers, in memory or in files.

With ``offload_optimizer.device: nvme`` stage 3 keeps states in files on an NVMe drive. DeepSpeed swaps the fp32 masters
and moments of a sub-group into memory before the sub-group's update, and out after it. Between updates these tensors
are empty. Sub-groups of less than 1 MB stay in memory.

DeepSpeed's public functions (``safe_get_local_fp32_param``, ``safe_set_local_optimizer_state``, ...) swap too, but for
each parameter they read the files of its whole sub-group, which has up to ``sub_group_size`` (1e9) elements.
:func:`swapped_in` reads them once per sub-group.
"""

import math
import resource
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import (
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from torch.nn import Parameter

from model.zero.gather import gathered
from model.zero.parameters import (
    is_partitioned,
    local_data,
    local_gradient,
    local_range,
    partition_of,
    zeros_of_partition,
)

# DeepSpeed 0.19's own classes that a checkpoint pickles, for any stage and dtype: their objects hold plain values only.
CHECKPOINT_CLASSES = (LossScaler, ZeroStageEnum, fragment_address)


def stage_of(kind: Any, name: Any) -> ZeroStageEnum:
    """Return the member ``name`` of ``kind``, which must be ZeroStageEnum; ValueError for any other arguments. Called
    in place of ``getattr`` on reading a checkpoint's pickle: Python 3.11.0 to 3.11.3 write an enum member as
    ``getattr(ZeroStageEnum, name)``, other versions write its value."""
    if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise ValueError(f"GLOBAL getattr of {kind!r} and {name!r}")  # in torch's words, which read_object searches
    return ZeroStageEnum[name]


# Everything that reading a checkpoint may call (torch.serialization.safe_globals).
CHECKPOINT_GLOBALS: list[Any] = [*CHECKPOINT_CLASSES, (stage_of, "builtins.getattr")]


def reset_moments(optimizer: Any, parameters: Iterable[Parameter]) -> None:
    """Zero Adam's moments of single parameters, so that a gradient of 0 leaves these parameters unchanged (up to weight
    decay). No collective. The step count does not change, as it belongs to a whole parameter group.

    Args:
        optimizer: ``engine.optimizer``: DeepSpeed's wrapper of torch's, or torch's own.
        parameters: some parameters of its groups; KeyError for a parameter with 8-bit moments.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not any(inner.state.values()):
        return  # before the first step there are no moments, and DeepSpeed's setter raises
    masters = _unfused_masters(optimizer)
    for parameter in parameters:
        for key in ("exp_avg", "exp_avg_sq"):  # a parameter with 8-bit moments has none: KeyError
            if is_partitioned(parameter):
                start, stop = local_range(parameter)
                # After a resume with another number of ranks, a group whose share here is all padding has no moments.
                # The setter for whole parameters would cut the last ranks' share out of it.
                if start < stop:
                    safe_set_local_optimizer_state(parameter, zeros_of_partition(parameter), key)
            elif not hasattr(parameter, "_hp_mapping"):
                # Stage 0: torch's optimizer, on the parameters or (bf16, fp16) on fp32 copies. Without a gradient so
                # far there are no moments: Adam creates them, as zeros, at the parameter's first step.
                if moments := inner.state.get(masters.get(id(parameter), parameter)):
                    moments[key].zero_()
            elif (mapping := parameter._hp_mapping) is not None:  # None: this rank has no part of it
                # DeepSpeed 0.19 links parameters to moments once, after its first group's first step, when the other
                # groups have none: safe_set_full_optimizer_state raises for all but the first group.
                (flat,) = inner.param_groups[mapping.param_group_index]["params"]
                place = mapping.get_hp_fragment_address()
                inner.state[flat][key].narrow(0, place.start, place.numel).zero_()


def zero_parameters(optimizer: Any, parameters: Sequence[Parameter]) -> None:
    """Zero trained parameters, their fp32 masters and their moments; a collective."""
    with gathered(parameters, modifier_rank=0), torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    masters = _unfused_masters(optimizer)
    for parameter in parameters:
        if id(parameter) in masters:
            masters[id(parameter)].detach().zero_()
        elif is_partitioned(parameter):
            safe_set_local_fp32_param(parameter, zeros_of_partition(parameter))
        elif hasattr(parameter, "_hp_mapping"):
            safe_set_full_fp32_param(parameter, torch.zeros_like(parameter, dtype=torch.float32))
    reset_moments(optimizer, parameters)


def _unfused_masters(optimizer: Any) -> dict[int, Tensor]:
    """Map ids of parameters to their fp32 copies on stage 0 under bf16 or fp16; empty otherwise."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {id(own): master for group in pairs for own, master in zip(*group, strict=True)}


def gradient_norm(parameters: Iterable[Parameter]) -> float:
    """Compute the L2 norm of the gradients of ``parameters`` over all ranks, multiplied by fp16's loss scale; call it
    between the last backward of an optimizer step and the update. A collective; on stages 1 and 2 one per parameter, so
    do not call it in every step. Parameters without a gradient count as 0."""
    square = torch.zeros((), dtype=torch.float64, device=get_accelerator().current_device_name())
    partitioned = False
    for parameter in parameters:
        if is_partitioned(parameter):
            partitioned = True
            gradient = local_gradient(parameter)
        else:
            gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            square += gradient.double().square().sum().to(square.device)  # offloaded gradients are on the host
    if partitioned and dist.is_initialized():
        dist.all_reduce(square)
    return math.sqrt(square.item())


def backward(engine: Any, loss: Tensor) -> None:
    """Run ``engine.backward`` so that on every stage the loss is multiplied by fp16's loss scale. On stage 0 DeepSpeed
    0.19 omits the factor (``engine.backward`` reads it from its ZeRO optimizers only), so it is applied here: DeepSpeed
    still divides the gradients by it, and they would be too small by this factor and never clipped."""
    engine.backward(loss * engine.optimizer.loss_scale if _wraps_fp16_unsharded(engine) else loss)


def global_gradient_norm(engine: Any, device: torch.device) -> Tensor | None:
    """Return the L2 norm of all gradients in the last step, fp64 ``[1]`` on ``device``, before clipping and without
    fp16's loss scale; None on stage 0 in fp32, where DeepSpeed keeps no norm. No collective."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return None
    scale = engine.optimizer.loss_scale if _wraps_fp16_unsharded(engine) else 1.0
    return torch.as_tensor(norm, dtype=torch.float64, device=device).view(1) / scale


def _wraps_fp16_unsharded(engine: Any) -> bool:
    return engine.fp16_enabled() and engine.zero_optimization_stage() == 0


def reset_optimizer_state(optimizer: Any, group: str) -> None:
    """Zero the moments and step counts of the parameter group named ``group`` in ``optimizer``, the engine's; do
    nothing if there is no such group."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for index, settings in enumerate(inner.param_groups):
        if settings["name"] != group:
            continue
        if hasattr(optimizer, "sub_group_to_group_id"):
            # Stage 3 splits a group into sub-groups and passes each to torch's optimizer only while it steps.
            pieces = enumerate(optimizer.fp32_partitioned_groups_flat)
            parameters = [one for one in pieces if optimizer.sub_group_to_group_id[one[0]] == index]
        else:
            parameters = [(index, parameter) for parameter in settings["params"]]
        for number, parameter in parameters:
            with swapped_in(optimizer, number):
                for value in inner.state.get(parameter, {}).values():
                    value.zero_()


@dataclass(frozen=True)
class OptimizerPiece:
    """Slice of a trained parameter in this rank's optimizer, on stages 1-3.

    Elements ``start`` to ``stop`` of the row-major flattened parameter begin at ``offset`` in the flat fp32 tensor
    number ``group`` (:func:`flat_masters`), and so do their moments.
    """

    name: str
    group: int
    offset: int
    start: int
    stop: int


def optimizer_pieces(model: nn.Module, optimizer: Any) -> list[OptimizerPiece]:
    """List this rank's slices of trained parameters, without padding; stages 1-3. A tied parameter is listed once,
    under its first name in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces = []
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3, which splits a parameter group into sub-groups
        for group, parameters in enumerate(optimizer.fp16_groups):
            offset = 0
            for parameter in parameters:
                pieces.append(OptimizerPiece(names[id(parameter)], group, offset, *local_range(parameter)))
                offset += partition_of(parameter).ds_numel  # type: ignore[attr-defined]
    else:
        for parameter in model.parameters():
            mapping = getattr(parameter, "_hp_mapping", None)  # also None if this rank has no part of it
            if mapping is not None:
                part, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                stop = part.start + part.numel
                group = mapping.param_group_index
                pieces.append(OptimizerPiece(names[id(parameter)], group, flat.start, part.start, stop))
    return [piece for piece in pieces if piece.start < piece.stop]


def flat_masters(optimizer: Any) -> list[Tensor]:
    """Return the flat fp32 masters with this rank's slices of parameters, one tensor per group or (stage 3) sub-group;
    they are the keys of ``optimizer.state``. Stages 1-3. Tensors that are in files (:func:`swapped`) are empty outside
    of :func:`swapped_in`."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(optimizer.fp32_partitioned_groups_flat)
    return [settings["params"][0] for settings in optimizer.param_groups]


def master_weights(optimizer: Any) -> list[Tensor]:
    """List the fp32 copies that the optimizer updates; on stage 0 in fp32 there are none."""
    if hasattr(optimizer, "fp32_groups"):  # stage 0
        return [master for group in optimizer.fp32_groups for master in group]
    # Stage 2 passes its optimizer one group at a time while it steps.
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    return [master for name in names for master in getattr(optimizer, name, [])]


def gradient_buffers(optimizer: Any) -> list[Tensor]:
    """List the tensors outside of the parameters in which DeepSpeed 0.19 accumulates gradients, while they exist. Stage
    3 has one flat buffer and, with an offloaded optimizer, also a gradient per master. Stages 1 (in bf16) and 2 have
    one buffer per group; that of stage 2 becomes the gradient of the group's master. If stages 1 and 2 keep gradients
    in the parameters' own dtype, they have lists of tensors, and the masters' gradients are copies of these tensors."""
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if flat is not None:
        masters = master_weights(optimizer) if optimizer.offload_optimizer else []
        gradients = [master.grad for master in masters if master.grad is not None]
        return [flat, *gradients, *unswapped_gradients(optimizer)]
    buffers = list(getattr(optimizer, "fp32_groups_gradients_flat", []))
    groups = [group for group in getattr(optimizer, "averaged_gradients", {}).values() if group is not None]
    if lists := [gradient for group in groups if not hasattr(group, "flat_partition") for gradient in group]:
        return lists
    buffers += [group.flat_partition for group in groups]
    shared = getattr(optimizer, "single_partition_of_fp32_groups", [])
    return buffers + [master.grad for master in shared if master.grad is not None]


def drop_gradients(optimizer: Any) -> None:
    """Drop the gradients of a skipped step. With an offloaded optimizer, stage 2 of DeepSpeed 0.19 keeps its fp32 sums:
    the gradients of the next steps would be added to values that are not finite, and these steps skipped too."""
    sums = getattr(optimizer, "averaged_gradients", {})
    for index, group in sums.items():
        if hasattr(group, "flat_partition"):
            sums[index] = None


@torch.no_grad()
def use_masters(model: nn.Module, optimizer: Any) -> None:
    """Copy the values of the flat fp32 masters into the model's trained parameters; stages 1-3 only. A collective."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.update_lp_params()
        return
    parameters = dict(model.named_parameters())
    masters = flat_masters(optimizer)
    optimizer.checkpoint_event_prologue()  # small parameters that stay gathered have no partitions between steps
    for group, pieces in groupby(optimizer_pieces(model, optimizer), lambda piece: piece.group):
        with swapped_in(optimizer, group):
            for piece in pieces:
                master = masters[group][piece.offset : piece.offset + piece.stop - piece.start]
                local_data(parameters[piece.name]).copy_(master)
    optimizer.checkpoint_event_epilogue()


# ---- states in files

COPIES = "offloaded_tensors"  # folder in a checkpoint, to which DeepSpeed copies the files
SWAPPED = ".swp"


def load_async_io() -> None:
    """Load DeepSpeed's op ``async_io``, which reads and writes the files; it is compiled once per machine. Raises
    ValueError if libaio or a compiler is missing, or the process may not lock memory."""
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
    """Raise ValueError if the drive of ``directory`` has no space for 16 bytes per element: master, two moments and
    gradient. Files of an earlier run there count as free, as they are overwritten. DeepSpeed's op (0.19.8) reports no
    failed write, and aborts when it reads a file that is too short. Raises OSError if the drive cannot be read."""
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
    """Return True if the states of sub-group ``group`` are in files between steps; False on any other stage than 3.
    ``optimizer`` is the engine's."""
    return _swaps(optimizer) and optimizer._swappable_optimizer_subgroup(group)


def _swaps(optimizer: Any) -> bool:
    return getattr(optimizer, "swap_optimizer", False)


@contextmanager
def swapped_in(optimizer: Any, group: int) -> Iterator[None]:
    """Keep the states of sub-group ``group`` in memory inside the block, and write them to their files at its end; call
    it between two steps only. No effect on states that are not in files."""
    if not swapped(optimizer, group):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(group)
    try:
        yield
    finally:
        optimizer._optimizer_states_and_gradient_swap_out(group)


def swap_name(rank: int, group: int, key: str) -> str:
    """Return the name that a file of swapped states has in a checkpoint. The file has this rank's fp32 values of
    ``key`` (``fp32`` for the masters, or a moment) in sub-group ``group``, with DeepSpeed's padding behind them."""
    return f"rank_{rank}_group_{group}_{key}{SWAPPED}"


def swap_files(optimizer: Any) -> Iterator[tuple[Path, int, str]]:
    """Yield the path, sub-group and key (``fp32`` for the masters, or a moment) of every file with states of this rank;
    call it between two steps. Yields nothing without such files."""
    for group, master in enumerate(getattr(optimizer, "fp32_partitioned_groups_flat", [])):
        if swapped(optimizer, group):
            states = {"fp32": master, **optimizer.state.get(master, {})}
            for key, tensor in states.items():
                if key != "step":
                    folder = optimizer.optimizer_swapper.swap_folder
                    yield Path(folder, f"{tensor.ds_id}.tensor.swp"), group, key


def swap_buffers(optimizer: Any) -> list[Tensor]:
    """List the page-locked buffers through which states are swapped; empty if none are in files."""
    return optimizer.optimizer_swapper.swap_buffer_manager.all_buffers if _swaps(optimizer) else []


def unswapped_gradients(optimizer: Any) -> list[Tensor]:
    """List those gradients of swapped sub-groups that stay in memory until the update, not in files."""
    infos = optimizer.optimizer_swapper.swap_params_info.values() if _swaps(optimizer) else []
    return [gradient for info in infos for gradient in info.unswapped_gradients.values()]


def copied(checkpoint: Path, rank: int, file: Path) -> Path:
    """Return the path to which DeepSpeed copies ``file``, one of :func:`swap_files` of ``rank``, in the directory
    ``checkpoint`` (DeepSpeed 0.19.8, engine.py:4937)."""
    return checkpoint / COPIES / f"rank{rank:02d}" / file.name
