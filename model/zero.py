"""The one place that knows how DeepSpeed keeps parameters.

Under ZeRO stage 3 a Parameter is a stub: its data is an empty tensor, its shape lies in ``ds_shape``, and each of the
``world`` ranks holds one contiguous chunk of ``ceil(numel / world)`` elements of the row-major flattened parameter in
``ds_tensor``. The chunk of the last ranks ends in padding when the elements do not share out evenly. Everything else in
this project asks the functions below, which answer for plain parameters too (stages 0-2), so that no other file has a
branch on the stage.

Filling a partition directly (:func:`local_data`) is allowed only before ``deepspeed.initialize``: the optimizer copies
the parameters into its fp32 master there, and the next step overwrites whatever was written to them afterwards.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.keep_in_fp32 import KEEP_IN_FP32_AUTO, keep_buffers_in_fp32, keep_in_fp32_pattern
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
)
from torch import Tensor, nn
from torch.nn import Parameter

DsConfig = dict[str, Any]
COALESCED_BYTES = 2**20  # of a parameter up to which it shares a collective with others

# Frozen parameters of at most so many elements are whole on every rank. DeepSpeed's default threshold for parameters
# that it never releases, which are whole anyway.
WHOLE_ELEMENTS = 100_000


def init_process_group() -> None:
    """Start the process group of this run: NCCL with CUDA, gloo without. Nothing if there is one already.

    The launcher, or whoever starts a single process, sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    """
    if get_accelerator().device_name() == "cpu":
        # On CPU DeepSpeed compiles a shared-memory op here (25 s when cold) that only inference_all_reduce uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()


def stage(ds_config: DsConfig) -> int:
    """ZeRO stage that a resolved DeepSpeed configuration asks for (0 where it says nothing)."""
    return int(ds_config.get("zero_optimization", {}).get("stage", 0))


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ``parameter`` is a ZeRO-3 stub (also while it is gathered)."""
    return hasattr(parameter, "ds_id")


def full_shape(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter; ``parameter.shape`` is ``[0]`` while it is partitioned."""
    if is_partitioned(parameter):
        return torch.Size(parameter.ds_shape)  # type: ignore[attr-defined]
    return parameter.shape


def full_numel(parameter: Tensor) -> int:
    """Number of elements of the whole parameter, without padding."""
    return full_shape(parameter).numel()


def local_range(parameter: Tensor) -> tuple[int, int]:
    """``(start, stop)`` in the row-major flattened parameter of the elements that this rank holds.

    The whole of it for a plain parameter; empty (start == stop) for a rank whose chunk is all padding.
    """
    numel = full_numel(parameter)
    if not is_partitioned(parameter):
        return 0, numel
    size = _partition(parameter).ds_numel  # type: ignore[attr-defined]
    start = size * parameter.ds_process_group.rank()  # type: ignore[attr-defined]
    return min(start, numel), min(start + size, numel)


def local_data(parameter: Tensor) -> Tensor:
    """Flat view of the elements of :func:`local_range`; what is written to it is written to the parameter.

    The padding behind them is zeroed: DeepSpeed leaves it uninitialised, and a NaN there would reach norms over the
    partition. Not inside a :func:`gathered` block on the same parameter. Who writes calls
    :func:`forget_secondary_copies` after.
    """
    if not is_partitioned(parameter):
        return parameter.detach().view(-1)
    start, stop = local_range(parameter)
    partition = _partition(parameter)
    if partition.numel() > stop - start:
        partition[stop - start :].zero_()
    return partition[: stop - start]


def _partition(parameter: Tensor) -> Tensor:
    """This rank's chunk, refused where it is not plain memory holding the parameter's own values."""
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
    """Drop the copies that hpZ keeps within a node; the next gather makes them anew from the partitions.

    With ``zero_hpz_partition_size`` > 1 the forward gathers from the secondary copy, which a direct fill does not
    reach. It has to go for *every* parameter: DeepSpeed looks at the first one of a bucket only to decide which copy to
    gather.
    """
    for parameter in model.parameters():
        if is_partitioned(parameter):
            parameter.ds_secondary_tensor = None  # type: ignore[attr-defined]


@contextmanager
def gathered(parameters: Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """Whole parameters inside the block, on every rank; plain parameters are whole anyway.

    Args:
        parameters: any mixture of partitioned and plain ones. To be read, small ones of a dtype come in one collective,
            and are there twice while it runs; each other in one of its own. Blocks must not nest on the same parameter.
        modifier_rank: the rank whose changes reach all ranks, partitioned or plain. None: changes are refused or lost.
    """
    parameters = list(parameters)
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    if modifier_rank is None:
        _gather_together(partitioned)
    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank, enabled=bool(partitioned)):
        yield
        if modifier_rank is not None and dist.is_initialized():
            for parameter in parameters:
                if not is_partitioned(parameter) or is_whole(parameter):
                    dist.broadcast(parameter.detach(), modifier_rank)


def _gather_together(parameters: Sequence[Tensor]) -> None:
    """Gather the small ones of partitioned parameters in one collective of each dtype, and on one rank all of them.

    GatheredParameters, which finds them there then, makes a collective for each, at 0.2 ms or more, and on one rank a
    copy.
    """
    apart = [p for p in parameters if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
    small = [
        p
        for p in dict.fromkeys(apart)
        if p.ds_process_group.size() == 1 or full_numel(p) * p.element_size() <= COALESCED_BYTES  # type: ignore[attr-defined]
    ]
    if small:
        small[0].all_gather_coalesced(small).wait()  # type: ignore[attr-defined]


class _One(nn.Module):
    """A module with one uninitialised parameter, which ``zero.Init`` partitions as soon as ``__init__`` returns."""

    def __init__(self, like: Parameter, device: torch.device):
        super().__init__()
        empty = torch.empty(like.shape, dtype=like.dtype, device=device)
        self.weight = Parameter(empty, requires_grad=like.requires_grad)


def materialise(model: nn.Module, ds_config: DsConfig, device: torch.device) -> None:
    """Give every parameter that lies on the meta device memory, uninitialised; under stage 3 its partition only.

    One parameter at a time: a rank never holds more than its partitions and the one parameter that is being shared out.
    A Parameter object that several modules share stays one object. A collective under stage 3.
    """
    made: dict[int, Parameter] = {}
    with _zero_init(ds_config):
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    if id(parameter) not in made:
                        made[id(parameter)] = _One(parameter, device).weight
                    setattr(module, name, made[id(parameter)])


def _zero_init(ds_config: DsConfig) -> AbstractContextManager[object]:
    """``zero.Init`` under stage 3, else nothing. Import nothing inside: it patches torch's tensor constructors."""
    if stage(ds_config) < 3:
        return nullcontext()
    # The configuration is passed, never `dtype`: with dtype=torch.float32 zero.Init makes bf16 parameters on a CPU.
    return deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(ds_config))


def partition_new_parameters(module: nn.Module, ds_config: DsConfig) -> None:
    """Partition the parameters of ``module`` that are not yet, with rank 0's values; nothing on stages 0-2.

    For parameters made after the model was built (scales). They keep their dtype, unlike those made inside
    ``zero.Init``, which get the training dtype: so frozen fp32 parameters are possible. A collective.

    Small frozen ones are partitioned among a group of one rank (``zero.Init``'s ``data_parallel_group``), which has all
    of them: gathering them costs no collective. fp32 beside bf16 weights would cost every module one of its own.
    """
    if stage(ds_config) < 3:
        return
    new = [parameter for parameter in module.parameters() if not is_partitioned(parameter)]
    small = [parameter for parameter in new if not parameter.requires_grad and parameter.numel() <= WHOLE_ELEMENTS]
    if small and dist.get_world_size() > 1:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        config = copy.deepcopy(ds_config)
        for key in ("zero_hpz_partition_size", "offload_param"):
            config["zero_optimization"].pop(key, None)
        deepspeed.zero.Init(module=nn.ParameterList(small), config_dict_or_path=config, data_parallel_group=alone)
    deepspeed.zero.Init(module=module, config_dict_or_path=copy.deepcopy(ds_config))


def is_whole(parameter: Tensor) -> bool:
    """Whether every rank has all of a ZeRO-3 parameter, though there are several ranks."""
    group = getattr(parameter, "ds_process_group", None)
    return group is not None and dist.get_world_size(group=group) == 1 < dist.get_world_size()


def release(engine: deepspeed.DeepSpeedEngine, parameters: Iterable[Parameter]) -> None:
    """Let DeepSpeed gather these parameters where they are used, as it does large ones.

    It keeps small ones gathered, and after every step gathers each of them in a collective of its own
    (``_post_step`` in stage3.py, over the list that ``mark_persistent_parameters`` in parameter_offload.py makes, in
    0.19). On the way they share a collective with what else is needed next. After ``initialize``, before the first
    forward; nothing on stages 0-2.
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
    """Make stage 3 gather the parameters of ``module`` together and count it as one step of its trace.

    Without it every submodule costs collectives of its own, and all ranks must run them in the same order.
    """
    set_z3_leaf_module(module, True)


def upcast_named_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Make the buffers fp32 that the model's own transformers class lists for it (such as MoE routing biases).

    DeepSpeed does the same in ``initialize``, but that is after the weights were loaded and rounded.
    """
    pattern = keep_in_fp32_pattern(model, KEEP_IN_FP32_AUTO, dtype)
    if pattern is not None:
        keep_buffers_in_fp32(model, pattern)


@contextmanager
def keep_frozen_fp32(model: nn.Module) -> Iterator[None]:
    """Around ``deepspeed.initialize``: frozen fp32 parameters come out of it as fp32, with their exact values.

    On stages 0-2 the engine casts every parameter to the training dtype. Frozen ones are in no optimizer's flat buffer,
    so their data can be put back. Under stage 3 the partitions keep the dtype that they were made with, and nothing is
    done.
    """
    kept = [
        (parameter, parameter.data)
        for parameter in model.parameters()
        if parameter.dtype == torch.float32 and not parameter.requires_grad and not is_partitioned(parameter)
    ]
    yield
    for parameter, data in kept:
        parameter.data = data.to(parameter.device)


def reset_moments(optimizer: Any, parameters: Iterable[Parameter]) -> None:
    """Make Adam's moments of single parameters 0. With a gradient of 0 they then do not move.

    The step count is of a whole parameter group: see :func:`reset_optimizer_state`. No collective.

    Args:
        optimizer: ``engine.optimizer``: DeepSpeed's around torch's, or torch's own.
        parameters: of its groups.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not any(inner.state.values()):
        return  # before the first step there are no moments, and DeepSpeed's setter raises
    masters = _unfused_masters(optimizer)
    for parameter in parameters:
        for key in ("exp_avg", "exp_avg_sq"):
            if is_partitioned(parameter):
                # The setter for a whole parameter cuts the last ranks' share out of it, where one element has none.
                safe_set_local_optimizer_state(parameter, _zeros_of_partition(parameter), key)
            elif not hasattr(parameter, "_hp_mapping"):
                # Stage 0: torch's optimizer, over the parameters themselves or (bf16) over an fp32 copy of each.
                inner.state[masters.get(id(parameter), parameter)][key].zero_()
            elif (mapping := parameter._hp_mapping) is not None:  # None: no part of it is this rank's
                # DeepSpeed 0.19 links parameters to moments after its first group's first step, when the other groups
                # have none, and never again: safe_set_full_optimizer_state raises for all but the first group.
                (flat,) = inner.param_groups[mapping.param_group_index]["params"]
                place = mapping.get_hp_fragment_address()
                inner.state[flat][key].narrow(0, place.start, place.numel).zero_()


def zero_parameters(optimizer: Any, parameters: Sequence[Parameter]) -> None:
    """Make trained parameters 0, the optimizer's fp32 copies of them and their moments too; a collective."""
    with gathered(parameters, modifier_rank=0), torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    masters = _unfused_masters(optimizer)
    for parameter in parameters:
        if id(parameter) in masters:
            masters[id(parameter)].detach().zero_()
        elif is_partitioned(parameter):
            safe_set_local_fp32_param(parameter, _zeros_of_partition(parameter))
        elif hasattr(parameter, "_hp_mapping"):
            safe_set_full_fp32_param(parameter, torch.zeros_like(parameter, dtype=torch.float32))
    reset_moments(optimizer, parameters)


def _unfused_masters(optimizer: Any) -> dict[int, Tensor]:
    """The fp32 copy of each parameter, by the parameter's id, on stage 0 under bf16; else empty."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {id(own): master for group in pairs for own, master in zip(*group, strict=True)}


def _zeros_of_partition(parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)  # type: ignore[attr-defined]


def gradient_norm(parameters: Iterable[Parameter]) -> float:
    """L2 norm over all ranks of the gradients, between the last backward of an optimizer step and the step.

    A collective; on stages 0-2 one for each parameter, so not for every step. Parameters without a gradient count as 0.
    """
    square = torch.zeros((), dtype=torch.float64)
    partitioned = False
    for parameter in parameters:
        if is_partitioned(parameter):
            partitioned = True
            gradient = safe_get_local_grad(parameter)
            start, stop = local_range(parameter)
            gradient = None if gradient is None else gradient.flatten()[: stop - start]  # without padding
        else:
            gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            square += gradient.double().square().sum().cpu()
    if partitioned and dist.is_initialized():
        square = square.to(get_accelerator().current_device_name())
        dist.all_reduce(square)
    return math.sqrt(square.item())


def reset_optimizer_state(optimizer: Any, group: str) -> None:
    """Make the optimizer's state of a parameter group that of a new one: moments and step counts are 0.

    Args:
        optimizer: ``engine.optimizer``: DeepSpeed's around torch's, or torch's own.
        group: the ``name`` of the parameter group; nothing is done if there is none.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for index, settings in enumerate(inner.param_groups):
        if settings["name"] != group:
            continue
        if hasattr(optimizer, "sub_group_to_group_id"):
            # Stage 3 takes a group in pieces, and shows torch's optimizer each of them only while it steps.
            pieces = enumerate(optimizer.fp32_partitioned_groups_flat)
            parameters = [piece for number, piece in pieces if optimizer.sub_group_to_group_id[number] == index]
        else:
            parameters = settings["params"]
        for parameter in parameters:
            for value in inner.state.get(parameter, {}).values():
                value.zero_()


@dataclass(frozen=True)
class OptimizerPiece:
    """What of a trained parameter this rank's optimizer holds, on stages 1-3.

    Elements ``start`` to ``stop`` of the row-major flattened parameter lie from ``offset`` on in the flat fp32 tensor
    number ``group`` (:func:`flat_masters`), and so do their moments.
    """

    name: str
    group: int
    offset: int
    start: int
    stop: int


def optimizer_pieces(model: nn.Module, optimizer: Any) -> list[OptimizerPiece]:
    """This rank's pieces, by the first name that a parameter has in the model; padding belongs to none."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces = []
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3, which takes a parameter group in pieces
        for group, parameters in enumerate(optimizer.fp16_groups):
            offset = 0
            for parameter in parameters:
                pieces.append(OptimizerPiece(names[id(parameter)], group, offset, *local_range(parameter)))
                offset += _partition(parameter).ds_numel  # type: ignore[attr-defined]
    else:
        for parameter in model.parameters():
            mapping = getattr(parameter, "_hp_mapping", None)  # None too where this rank holds nothing of it
            if mapping is not None:
                part, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                stop = part.start + part.numel
                group = mapping.param_group_index
                pieces.append(OptimizerPiece(names[id(parameter)], group, flat.start, part.start, stop))
    return [piece for piece in pieces if piece.start < piece.stop]


def flat_masters(optimizer: Any) -> list[Tensor]:
    """The flat fp32 tensors that hold this rank's pieces, keys of ``optimizer.state``; stages 1-3."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        if optimizer.swap_optimizer:
            raise ValueError("optimizer state on NVMe is not in memory: resume with as many ranks as there were")
        return list(optimizer.fp32_partitioned_groups_flat)
    return [settings["params"][0] for settings in optimizer.param_groups]


@torch.no_grad()
def use_masters(model: nn.Module, optimizer: Any) -> None:
    """Make the model's trained parameters those of the flat fp32 tensors; a collective on stages 1-3."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.update_lp_params()
        return
    parameters = dict(model.named_parameters())
    masters = flat_masters(optimizer)
    optimizer.checkpoint_event_prologue()  # small parameters that stay gathered have no partitions between steps
    for piece in optimizer_pieces(model, optimizer):
        master = masters[piece.group][piece.offset : piece.offset + piece.stop - piece.start]
        local_data(parameters[piece.name]).copy_(master)
    optimizer.checkpoint_event_epilogue()
