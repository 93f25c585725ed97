"""Parameters under ZeRO (creation, whole shapes, this rank's elements), process group and devices.

Ranks use the device of DeepSpeed's accelerator, which DS_ACCELERATOR may set, not the device that torch finds.
"""

import copy
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES
from deepspeed.constants import default_pg_timeout
from deepspeed.runtime.keep_in_fp32 import KEEP_IN_FP32_AUTO, keep_buffers_in_fp32, keep_in_fp32_pattern
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import groups, safe_get_local_grad, safe_set_local_grad, set_z3_leaf_module, z3_leaf_module
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
from torch import Tensor, nn
from torch.nn import Parameter

from model.ranks import RankError, meet

# The autograd Function that stage 3 puts before each input of a module (deepspeed/runtime/zero/parameter_offload.py).
# It returns its input detached: the same memory and version counter.
INPUT_ALIASES = frozenset({"PostBackwardFunctionModule"})


def is_partitioned(parameter: Tensor) -> bool:
    """Return True if ``parameter`` is a ZeRO-3 stub (also while it is gathered)."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of the whole parameter; ``parameter.shape`` is ``[0]`` while it is partitioned."""
    if is_partitioned(parameter):
        return torch.Size(parameter.ds_shape)  # type: ignore[attr-defined]
    return parameter.shape


def full_numel(parameter: Tensor) -> int:
    """Return the number of elements of the whole parameter, without padding."""
    return full_shape(parameter).numel()


def local_range(parameter: Tensor) -> tuple[int, int]:
    """Return the range ``(start, stop)`` of this rank's elements in the row-major flattened parameter: the whole range
    for a plain parameter, and empty (start == stop) on a rank whose chunk is all padding."""
    numel = full_numel(parameter)
    if not is_partitioned(parameter):
        return 0, numel
    size = partition_of(parameter).ds_numel  # type: ignore[attr-defined]
    start = size * parameter.ds_process_group.rank()  # type: ignore[attr-defined]
    return min(start, numel), min(start + size, numel)


def local_data(parameter: Tensor) -> Tensor:
    """Return a flat view of the elements of :func:`local_range`; writing to it writes to the parameter. The padding
    behind them is zeroed: DeepSpeed leaves it uninitialized, and a NaN there would reach norms over the partition. Do
    not call this inside a :func:`gathered` block on the same parameter, and call :func:`forget_secondary_copies` after
    writing. Raises RuntimeError if the values are on NVMe or stored as integer codes."""
    if not is_partitioned(parameter):
        return parameter.detach().view(-1)
    start, stop = local_range(parameter)
    partition = partition_of(parameter)
    if partition.numel() > stop - start:
        partition[stop - start :].zero_()
    return partition[: stop - start]


def partition_of(parameter: Tensor) -> Tensor:
    """Return this rank's chunk of a partitioned parameter, 1-D with its padding, not a copy. Raises RuntimeError if
    the values are in a file on NVMe, or stored as integer codes."""
    partition: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    if partition.final_location is OffloadDeviceEnum.nvme:  # type: ignore[attr-defined]
        raise RuntimeError(
            "parameters offloaded to NVMe cannot be read or filled in place: set "
            "zero_optimization.offload_param.device to 'cpu' or 'none'"
        )
    if hasattr(partition, "ds_quant_scale"):
        raise RuntimeError(
            "zero_quantized_nontrainable_weights keeps frozen parameters as integer codes, which cannot be filled in "
            "place: set it to false"
        )
    return partition


def forget_secondary_copies(model: nn.Module) -> None:
    """Drop hpZ's copies within a node, so that the next gather recreates them from the partitions. With
    ``zero_hpz_partition_size`` > 1, forward gathers from the secondary copy, which a write to the partition does not
    change. The copies of *all* parameters must be dropped: DeepSpeed checks only the first parameter of a bucket to
    decide which copy to gather."""
    for parameter in model.parameters():
        if is_partitioned(parameter):
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


def local_gradient(parameter: Parameter) -> Tensor | None:
    """Return the fp32 gradient of the elements of :func:`local_range`; None if the parameter is not trained. Stage 3
    only; call it between the last backward of an optimizer step and the update. The result may be a copy: change the
    gradient with :func:`set_local_gradient`."""
    gradient: Tensor | None = safe_get_local_grad(parameter)
    start, stop = local_range(parameter)
    return None if gradient is None else gradient.flatten()[: stop - start]


def set_local_gradient(parameter: Parameter, gradient: Tensor) -> None:
    """Replace the gradient of the elements of :func:`local_range`, on stage 3, by the flat ``gradient`` of as many
    elements; the padding's gradient becomes 0."""
    whole = zeros_of_partition(parameter)
    whole[: gradient.numel()] = gradient
    safe_set_local_grad(parameter, whole)


def is_whole(parameter: Tensor) -> bool:
    """Return True for a ZeRO-3 parameter that is not split over ranks: each of them has all its elements, as its
    partition group is one rank. False for all other parameters, and always with a single rank."""
    group = getattr(parameter, "ds_process_group", None)
    return group is not None and dist.get_world_size(group=group) == 1 < dist.get_world_size()


def zeros_of_partition(parameter: Parameter) -> Tensor:
    """Create fp32 zeros in the shape of this rank's chunk, padding included."""
    return torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)  # type: ignore[attr-defined]


def partitions(model: nn.Module) -> list[Tensor]:
    """List the tensors that store parameter values (whole or partitions), except hpZ's secondary partitions."""
    held: list[Tensor] = []
    for parameter in model.parameters():
        held.append(parameter.data)
        if is_partitioned(parameter):
            held.append(parameter.ds_tensor.data)  # type: ignore[attr-defined]
    return held


def secondary_partitions(model: nn.Module) -> list[Tensor]:
    """List hpZ's secondary partitions. DeepSpeed drops those of trained parameters at the end of a step."""
    copies = (getattr(parameter, "ds_secondary_tensor", None) for parameter in model.parameters())
    return [copy.data for copy in copies if copy is not None]


DsConfig = dict[str, Any]

# Frozen parameters of up to WHOLE_ELEMENTS stay whole on every rank, up to WHOLE_ELEMENTS_IN_ALL in total (64 MB). The
# former is DeepSpeed's default persistence threshold: it never releases smaller parameters anyway.
WHOLE_ELEMENTS = 100_000
WHOLE_ELEMENTS_IN_ALL = 16 * 2**20


def init_process_group() -> None:
    """Start the process group of this run, unless one exists: NCCL with CUDA, gloo without. RANK, LOCAL_RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set, by the launcher or by the caller. Raises RankError if the ranks
    did not meet within DEEPSPEED_TIMEOUT, or this process closed a group before (DeepSpeed keeps references to it)."""
    if deepspeed.comm.comm.cdb is not None and not dist.is_initialized():
        raise RankError(
            "this process has closed its process group and cannot start another one: let all trainings of a script run "
            "inside one clean_exit()"
        )
    if get_accelerator().device_name() == "cpu":
        # On CPU DeepSpeed compiles a shared-memory op here (25 s when cold) that only inference_all_reduce uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        store = None if dist.is_initialized() else meet(default_pg_timeout)
        deepspeed.init_distributed()
        del store  # rank 0's server lives until torch has taken it
    except RankError:
        raise
    except (RuntimeError, ValueError) as error:
        where = "rank {RANK} of {WORLD_SIZE} has not met the others at {MASTER_ADDR}:{MASTER_PORT}"
        remedy = "look for what ended another rank before, and whether this machine reaches that address"
        if "EADDRINUSE" in str(error):
            remedy = "another job uses that port: set another one (deepspeed --master_port, torchrun --master_port)"
        text = f"{where.format_map(os.environ)} ({str(error).splitlines()[0]}): {remedy}"
        raise RankError(text) from error


def stage(ds_config: DsConfig) -> int:
    """Return the ZeRO stage of a resolved DeepSpeed configuration; 0 if it names none."""
    return int(ds_config.get("zero_optimization", {}).get("stage", 0))


class _One(nn.Module):
    """Module with one uninitialized parameter, which ``zero.Init`` partitions as soon as ``__init__`` returns."""

    def __init__(self, like: Parameter, device: torch.device):
        super().__init__()
        empty = torch.empty(like.shape, dtype=like.dtype, device=device)
        self.weight = Parameter(empty, requires_grad=like.requires_grad)
        self.weight.__dict__.update(like.__dict__)  # type of packed codes (quant.packed_weight)


def materialize(model: nn.Module, ds_config: DsConfig, device: torch.device) -> None:
    """Allocate uninitialized memory for every parameter that is on the meta device; on stage 3 only for this rank's
    partition, as a collective. Parameters are allocated one at a time: a rank never allocates more than its partitions
    and the parameter being partitioned. A Parameter object that several modules share stays one object."""
    made: dict[int, Parameter] = {}
    context: AbstractContextManager[object] = nullcontext()
    if stage(ds_config) == 3:
        # Pass the configuration, never `dtype`: with dtype=torch.float32 zero.Init creates bf16 parameters on a CPU.
        context = deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(ds_config), **_hpz_group(ds_config))
    with context:  # import nothing inside: zero.Init patches torch's tensor constructors
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    if id(parameter) not in made:
                        made[id(parameter)] = _One(parameter, device).weight
                    setattr(module, name, made[id(parameter)])


def _hpz_group(ds_config: DsConfig) -> dict[str, Any]:
    """Return the option that passes hpZ's existing group of ranks to later calls of ``zero.Init``, in which DeepSpeed
    0.19 would try to create it again and raise AssertionError. Empty without hpZ, or before there is a group."""
    if int(ds_config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)) == 1:
        return {}
    group = groups._get_zero_param_intra_parallel_group()
    return {} if group is None else {"zero_param_parallel_group": group}


def partition_new_parameters(module: nn.Module, ds_config: DsConfig) -> None:
    """Partition the parameters of ``module`` that are not partitioned yet, with rank 0's values (but small frozen ones
    keep each rank's own values); no-op on stages 0-2. A collective.

    It is meant for parameters created after the model was built (scales). They keep their dtype, so that frozen fp32
    parameters are possible; parameters created inside ``zero.Init`` get the training dtype. Small frozen parameters are
    partitioned over a group of one rank (``zero.Init``'s ``data_parallel_group``), so that each rank has them whole:
    otherwise every module would need an extra collective for fp32 parameters in addition to bf16 weights.
    """
    if stage(ds_config) < 3:
        return
    small = to_be_whole(parameter for parameter in module.parameters() if not is_partitioned(parameter))
    if small and dist.get_world_size() > 1:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        config = copy.deepcopy(ds_config)
        for key in ("zero_hpz_partition_size", "offload_param"):
            config["zero_optimization"].pop(key, None)
        deepspeed.zero.Init(module=nn.ParameterList(small), config_dict_or_path=config, data_parallel_group=alone)
    deepspeed.zero.Init(module=module, config_dict_or_path=copy.deepcopy(ds_config), **_hpz_group(ds_config))


def to_be_whole(new: Iterable[Parameter]) -> list[Parameter]:
    """Select the new parameters that :func:`partition_new_parameters` keeps whole on every rank: frozen parameters of
    at most ``WHOLE_ELEMENTS``, in the given order, as long as they total at most ``WHOLE_ELEMENTS_IN_ALL``."""
    small, elements = [], 0
    for parameter in new:
        fits = parameter.numel() <= min(WHOLE_ELEMENTS, WHOLE_ELEMENTS_IN_ALL - elements)
        if fits and not parameter.requires_grad:
            small.append(parameter)
            elements += parameter.numel()
    return small


def release(engine: deepspeed.DeepSpeedEngine, parameters: Iterable[Parameter]) -> None:
    """Make DeepSpeed gather these small parameters only when they are used, like large parameters; no-op on stages 0-2.
    Call this after ``initialize`` and before the first forward.

    DeepSpeed keeps small parameters gathered, and after every step gathers each of them in its own collective
    (``_post_step`` in stage3.py, over the list of ``mark_persistent_parameters`` in parameter_offload.py, 0.19).
    Gathered on use, they share a collective with the other parameters needed next.
    """
    persistent = getattr(engine.optimizer, "persistent_parameters", None)
    if persistent is None:
        return
    chosen = {id(parameter) for parameter in parameters}
    for parameter in persistent:
        if id(parameter) in chosen:
            parameter.ds_persist = False
    persistent[:] = [parameter for parameter in persistent if id(parameter) not in chosen]


def mark_leaf(module: nn.Module) -> None:
    """Make stage 3 gather the parameters of ``module`` together and treat the module as one step of its trace.
    Otherwise every submodule costs its own collectives, and all ranks must run the submodules in the same order."""
    set_z3_leaf_module(module, True)


def leaves_of_stage_3(model: nn.Module, ds_config: DsConfig) -> set[int]:
    """Return ``id()`` of the modules whose parameters stage 3 gathers together: those marked by :func:`mark_leaf`, and
    those that DeepSpeed's configuration names (by default the sparse MoE blocks of three model families). The named
    ones are marked here, too, as ``deepspeed.initialize`` does later."""
    zero = DeepSpeedZeroConfig(**ds_config.get("zero_optimization", {}))
    apply_zero_leaf_module_config(model, zero.leaf_module)
    return {id(module) for module in model.modules() if z3_leaf_module(module)}


def upcast_named_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert to fp32 the buffers that the model's transformers class lists as fp32 (such as MoE routing biases) for
    training in ``dtype``; in fp32 nothing is converted. DeepSpeed does the same in ``initialize``, but by then the
    checkpoint's values have been loaded into buffers of ``dtype``, and rounded."""
    pattern = keep_in_fp32_pattern(model, KEEP_IN_FP32_AUTO, dtype)
    if pattern is not None:
        keep_buffers_in_fp32(model, pattern)


@contextmanager
def keep_frozen_fp32(model: nn.Module) -> Iterator[None]:
    """Wrap ``deepspeed.initialize`` so that frozen fp32 parameters keep their dtype and values. On stages 0-2 the
    engine casts every parameter to the training dtype; frozen ones are in no optimizer's flat buffer, so their data can
    be restored. Under stage 3 partitions keep their dtype, and nothing is done."""
    kept = [
        (parameter, parameter.data)
        for parameter in model.parameters()
        if parameter.dtype == torch.float32 and not parameter.requires_grad and not is_partitioned(parameter)
    ]
    yield
    for parameter, data in kept:
        parameter.data = data.to(parameter.device)


def on_cuda() -> bool:
    """Return True if ranks compute on CUDA devices."""
    return bool(get_accelerator().device_name() == "cuda")


def own_device(local_rank: int) -> torch.device:
    """Return the device of the rank with index ``local_rank`` on this machine. Raises RankError if DeepSpeed's
    accelerator is neither cuda nor cpu, or if this machine has too few devices."""
    name = get_accelerator().device_name()
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise RankError(f"DeepSpeed's accelerator is {name!r}, expected cuda or cpu: DS_ACCELERATOR chooses one")
    if local_rank >= torch.cuda.device_count():
        raise RankError(
            f"LOCAL_RANK is {local_rank}, but torch finds {torch.cuda.device_count()} CUDA devices here: start as many "
            "ranks on a machine as it has GPUs (CUDA_VISIBLE_DEVICES hides some), or set DS_ACCELERATOR=cpu"
        )
    return torch.device("cuda", local_rank)


_MODULE = "module"  # DeepSpeed's key of the model's state


@dataclass(frozen=True)
class LeftOut:
    """Frozen parameters of a model that its checkpoints exclude, and that are restored on reading.

    DeepSpeed excludes all frozen parameters or none (``exclude_frozen_parameters``), and some of them are calibrated
    scales. On loading it needs all of them: ``load_module_strict=False`` would ignore any missing name, and on stage 3
    a missing name is a KeyError. So frozen parameters to keep are added to the state that DeepSpeed is about to write,
    and excluded ones, with the model's values, to the state that DeepSpeed has read.

    Attributes:
        model: the whole model, with its current values.
        names: names of the excluded parameters; a tied parameter is listed under each of its names.
    """

    model: nn.Module
    names: Collection[str]

    def leave_out(self, state: dict[str, Any]) -> None:
        """Remove the excluded parameters from ``state``, which a rank is about to write, and add the other frozen
        parameters, in place. Without ``names``, or if the state has no model, nothing is changed."""
        if not self.names or _MODULE not in state:
            return
        module, frozen = state[_MODULE], self._frozen()
        for name, value in self.model.state_dict().items():
            if name in self.names:
                module.pop(name, None)  # DeepSpeed leaves a tied parameter's second name in
            else:
                module.setdefault(name, value)
        kept = {name: own for name, own in frozen.items() if name not in self.names}
        if any(map(is_partitioned, frozen.values())):
            state[FROZEN_PARAM_FRAGMENTS] = {name: _local_part(one).cpu() for name, one in kept.items()}
            state[FROZEN_PARAM_SHAPES] = {name: full_shape(one) for name, one in kept.items()}

    def put_in(self, state: dict[str, Any]) -> None:
        """Add the excluded parameters, with the model's current values, to ``state`` in place; it was read and is about
        to be loaded. If the state has no model, nothing is changed."""
        if not self.names or _MODULE not in state:
            return
        own = self.model.state_dict()
        for name in self.names:
            state[_MODULE].setdefault(name, own[name])
        if state.get(FROZEN_PARAM_FRAGMENTS) is not None:
            for name, parameter in self._frozen().items():
                if name in self.names:
                    state[FROZEN_PARAM_FRAGMENTS].setdefault(name, _local_part(parameter))

    def _frozen(self) -> dict[str, Tensor]:
        """Return the parameters that no optimizer updates, each under its first name."""
        return {name: one for name, one in self.model.named_parameters() if not is_optimized_parameter(one)}


def _local_part(parameter: Tensor) -> Tensor:
    """Return the tensor of a frozen parameter that DeepSpeed writes: the parameter, on stage 3 this rank's padded
    chunk."""
    part: Tensor = parameter.ds_tensor if is_partitioned(parameter) else parameter  # type: ignore[attr-defined]
    return part.detach()
