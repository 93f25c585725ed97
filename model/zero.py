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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import deepspeed.comm
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.keep_in_fp32 import KEEP_IN_FP32_AUTO, keep_buffers_in_fp32, keep_in_fp32_pattern
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus
from deepspeed.utils import (
    groups,
    safe_get_full_grad,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
    z3_leaf_module,
)
from deepspeed.utils.z3_leaf_module import apply_zero_leaf_module_config
from torch import Tensor, nn
from torch.nn import Parameter

DsConfig = dict[str, Any]
COALESCED_BYTES = 2**20  # of a parameter up to which it shares a collective with others

# Frozen parameters of at most so many elements are whole on every rank, as long as they are at most so many in all (64
# MB). The first is DeepSpeed's default threshold for parameters that it never releases, which are whole anyway.
WHOLE_ELEMENTS = 100_000
WHOLE_ELEMENTS_IN_ALL = 16 * 2**20


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


def hpz_size(ds_config: DsConfig) -> int:
    """Ranks that hold a second partitioning of the weights among them (hpZ); 1 without it."""
    return int(ds_config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1))


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
    release_decoded(partitioned)
    if modifier_rank is None:
        _gather_together(partitioned)
    # Apart: DeepSpeed partitions a list by the settings of its first one, and whole ones know nothing of hpZ.
    shared = [parameter for parameter in partitioned if not is_whole(parameter)]
    whole = [parameter for parameter in partitioned if is_whole(parameter)]
    with (
        deepspeed.zero.GatheredParameters(shared, modifier_rank=modifier_rank, enabled=bool(shared)),
        deepspeed.zero.GatheredParameters(whole, modifier_rank=modifier_rank, enabled=bool(whole)),
    ):
        yield
        if modifier_rank is not None and dist.is_initialized():
            _broadcast([p for p in parameters if not is_partitioned(p) or is_whole(p)], modifier_rank)


@contextmanager
def gathered_on_main(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Whole parameters inside the block on rank 0, to be read there; on the other ranks they stay as they are.

    Each rank sends its partitions to rank 0, which receives them in their places: with gloo in a sixth of the time of
    an all-gather, and without memory on the other ranks. DeepSpeed takes no part, and finds everything as it left it.
    A collective.
    """
    stubs = [parameter for parameter in dict.fromkeys(parameters) if is_partitioned(parameter)]
    shared = [parameter for parameter in stubs if not is_whole(parameter) and dist.get_world_size() > 1]
    shares = [_for_collectives(_partition(parameter).detach()) for parameter in shared]
    if shared and dist.get_rank() > 0:
        _exchange([dist.P2POp(dist.isend, share, 0) for share in shares])
        yield
        return
    whole = {}
    received = []
    for parameter, share in zip(shared, shares, strict=True):
        flat = share.new_empty(dist.get_world_size() * share.numel())
        mine, *others = flat.split(share.numel())
        mine.copy_(share)
        received += [dist.P2POp(dist.irecv, place, rank) for rank, place in enumerate(others, 1)]
        whole[parameter] = flat[: full_numel(parameter)]
    _exchange(received)
    kept = [parameter.data for parameter in stubs]
    try:
        for parameter in stubs:
            values = whole[parameter] if parameter in whole else local_data(parameter)
            parameter.data = values.view(full_shape(parameter))
        yield
    finally:
        for parameter, data in zip(stubs, kept, strict=True):
            parameter.data = data


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _for_collectives(tensor: Tensor) -> Tensor:
    """On the device whose tensors NCCL takes: partitions may be offloaded."""
    return tensor.to(get_accelerator().current_device_name())


def _broadcast(parameters: Sequence[Tensor], source: int) -> None:
    """Make plain parameters what they are on rank ``source``; the small ones of a dtype in one collective."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() <= WHOLE_ELEMENTS:
            small.setdefault(parameter.dtype, []).append(parameter.detach())
        else:
            dist.broadcast(parameter.detach(), source)
    for together in small.values():
        flat = torch.cat([parameter.flatten() for parameter in together])
        dist.broadcast(flat, source)
        for parameter, value in zip(together, flat.split([p.numel() for p in together]), strict=True):
            parameter.copy_(value.view_as(parameter))


def _gather_together(parameters: Sequence[Tensor]) -> None:
    """Gather the small ones of partitioned parameters in one collective of each dtype, and on one rank all of them.

    GatheredParameters, which finds them there then, makes a collective for each, at 0.2 ms or more, and on one rank a
    copy. Not under hpZ, where this would gather the second copies.
    """
    apart = [p for p in parameters if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
    small = [
        p
        for p in dict.fromkeys(apart)
        if p.ds_process_group.size() == 1 or full_numel(p) * p.element_size() <= COALESCED_BYTES  # type: ignore[attr-defined]
    ]
    if small and not any(p.ds_secondary_tensor is not None for p in small):  # type: ignore[attr-defined]
        gather = small[0].all_gather_coalesced  # type: ignore[attr-defined]
        if isinstance(gather, partial):  # of gather_as_bytes: here the parameters themselves are wanted
            gather = gather.args[0]
        gather(small).wait()


@torch.no_grad()
def whole_values(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copies of small parameters, whole, fp32 and 1-D, on every rank; at most one collective for all of them.

    It leaves them gathered or partitioned, as they are, so it may run in the middle of a forward.
    """
    sizes = [full_numel(parameter) for parameter in parameters]
    flat = torch.zeros(sum(sizes), device=get_accelerator().current_device_name())
    shared = [is_partitioned(parameter) and not is_whole(parameter) for parameter in parameters]
    places = flat.split(sizes)
    for parameter, place, partly in zip(parameters, places, shared, strict=True):
        if partly:
            place[slice(*local_range(parameter))] = local_data(parameter)
    if any(shared):
        dist.all_reduce(flat)  # every element is one rank's, and 0 on the others
    for parameter, place, partly in zip(parameters, places, shared, strict=True):
        if not partly:
            place.copy_(local_data(parameter))
    return list(places)


@dataclass(frozen=True)
class ByteForm:
    """How a partitioned parameter travels to the ranks whose forward or backward is about to use it.

    Attributes:
        encode: elements of :func:`local_range`, flat, to their bytes (uint8).
        decode: the bytes of the whole parameter, flat, to what the forward is to find in its place: as many elements
            of the parameter's dtype.
        width: bytes per element.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    width: int = 1


def gather_as_bytes(model: nn.Module, form_of: Callable[[Parameter], ByteForm | None]) -> None:
    """Have stage 3 gather some parameters for forward and backward in a :class:`ByteForm`.

    Before a module runs, and ahead of time, DeepSpeed gathers lists of parameters by ``all_gather_coalesced``, a
    function that every partitioned Parameter carries; it calls that of the first one of a list, which comes out of a
    set (0.19.8: ``PartitionedParameterCoordinator.__all_gather_params_``, its only caller). There is no hook for
    another form, so this replaces that function on every Parameter of the model. All else sees the parameters
    themselves: :func:`gathered`, and what DeepSpeed saves, gathers by ``all_gather``.

    Args:
        model: after ``deepspeed.initialize``; stage 3.
        form_of: asked at every gather, in the same order on all ranks; None: as they are, like parameters that
            DeepSpeed keeps gathered (``stage3_param_persistence_threshold``) in any case.

    Raises:
        ValueError: hpZ is on, which copies what is gathered.
    """
    parameters = [parameter for parameter in model.parameters() if is_partitioned(parameter)]
    for parameter in parameters:
        if parameter.ds_zero_param_process_group is not None:  # type: ignore[attr-defined]
            raise ValueError("zero_hpz_partition_size: hpZ would keep what the bytes stand for as the parameter itself")
    for parameter in parameters:
        own = parameter.all_gather_coalesced  # type: ignore[attr-defined]
        parameter.all_gather_coalesced = partial(_gather, own, form_of)  # type: ignore[attr-defined]


def _gather(
    as_they_are: Callable[..., Any],
    form_of: Callable[[Parameter], ByteForm | None],
    parameters: Iterable[Parameter],
    safe_mode: bool = False,
    quantize: bool = False,
) -> Any:
    """In place of ``all_gather_coalesced``: starts gathering, and returns a handle to wait for."""
    if quantize:
        raise ValueError("zero_quantized_weights: expected false, DeepSpeed would quantise scales too")
    # The list has another order on every rank.
    ordered: list[Any] = sorted(parameters, key=lambda parameter: parameter.ds_id)
    forms = {parameter: None if parameter.ds_persist else form_of(parameter) for parameter in ordered}
    if all(form is None for form in forms.values()):
        return as_they_are(ordered, safe_mode=safe_mode)
    # What else the list has travels along, so that there are not more collectives; widest first, for their alignment.
    sent = sorted(
        (parameter for parameter in ordered if not is_whole(parameter)),
        key=lambda parameter: -parameter.element_size() if forms[parameter] is None else 0,
    )
    handles = [_BytesInFlight([(parameter, forms[parameter]) for parameter in sent])]
    if len(sent) < len(ordered):
        handles.append(as_they_are([parameter for parameter in ordered if is_whole(parameter)], safe_mode=safe_mode))
    return MultipleAllGatherHandles(handles)


def _unchanged(parameter: Tensor) -> ByteForm:
    return ByteForm(
        encode=lambda flat: flat.view(torch.uint8),
        decode=lambda whole: whole.view(parameter.dtype),
        width=parameter.element_size(),
    )


class _BytesInFlight:
    """Handle of one all-gather of bytes, as DeepSpeed's coordinator wants it: it may be waited for more than once.

    Parameters without a form travel as they are.
    """

    def __init__(self, sent: Sequence[tuple[Any, ByteForm | None]]) -> None:
        self.decoded = [parameter for parameter, form in sent if form is not None]
        self.sent = [(parameter, form or _unchanged(parameter)) for parameter, form in sent]
        group = sent[0][0].ds_process_group
        self.sizes = [parameter.ds_tensor.ds_numel * form.width for parameter, form in self.sent]
        device = get_accelerator().current_device_name()
        shape = (dist.get_world_size(group), sum(self.sizes))
        self.bytes: Tensor | None = torch.empty(shape, dtype=torch.uint8, device=device)
        own = self.bytes[dist.get_rank(group)]
        for (parameter, form), place in zip(self.sent, own.split(self.sizes), strict=True):
            parameter.ds_status = ZeroParamStatus.INFLIGHT
            encoded = form.encode(local_data(parameter).to(device))
            place[: encoded.numel()] = encoded
        self.work = deepspeed.comm.all_gather_into_tensor(self.bytes.view(-1), own, group=group, async_op=True)

    def wait(self, handle_dependency: bool = True) -> None:
        if self.bytes is None:
            return
        self.work.wait()
        self.work = None  # it holds the bytes, and the handle is there until the last parameter is read
        for (parameter, form), parts in zip(self.sent, self.bytes.split(self.sizes, dim=1), strict=True):
            whole = parts.reshape(-1)[: parameter.ds_numel * form.width]
            parameter.data = form.decode(whole).view(parameter.ds_shape)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        for parameter in self.decoded:
            parameter.holds_decoded = True
        if not get_accelerator().is_synchronized_device():
            self.bytes.record_stream(get_accelerator().current_stream())
        self.bytes = None


def release_decoded(parameters: Iterable[Tensor]) -> None:
    """Partition those parameters that a forward left gathered from bytes; the next gather makes them anew.

    DeepSpeed keeps what it expects to need again soon, from an evaluation's forward as well. Not inside a forward.
    """
    for parameter in parameters:
        if getattr(parameter, "holds_decoded", False):
            if parameter.ds_status is ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
                parameter.partition()  # type: ignore[attr-defined]
            parameter.holds_decoded = False  # type: ignore[attr-defined]


def local_gradient(parameter: Parameter) -> Tensor | None:
    """fp32 gradient of the elements of :func:`local_range` between the last backward of a step and the step; stage 3.

    None if it is not trained. To change it use :func:`set_local_gradient`: this may be a copy.
    """
    gradient: Tensor | None = safe_get_local_grad(parameter)
    start, stop = local_range(parameter)
    return None if gradient is None else gradient.flatten()[: stop - start]


def set_local_gradient(parameter: Parameter, gradient: Tensor) -> None:
    """Replace the gradient that :func:`local_gradient` gives; that of the padding becomes 0."""
    whole = _zeros_of_partition(parameter)
    whole[: gradient.numel()] = gradient
    safe_set_local_grad(parameter, whole)


@contextmanager
def forward_only(module: nn.Module) -> Iterator[None]:
    """Around a forward without a backward of an engine that trains, so that it costs later steps nothing.

    DeepSpeed learns from a whole step in which order parameters are used, gathers ahead accordingly, in few large
    collectives, and keeps what backward needs first. From forwards alone it learns that nothing is needed again. It
    notices the first backward, and learns anew, but what it concluded per module and position it keeps for ever
    (0.19.8: ``__params_to_release`` has a ``functools.lru_cache``): every later step then gathers module by module, and
    twice. So what it learns here is forgotten, unless it knew whole steps before, which this is the beginning of.

    What it began to gather for a backward that does not come is waited for: GatheredParameters takes no parameter that
    is on its way.
    """
    offload = getattr(getattr(module, "optimizer", None), "parameter_offload", None)
    if offload is None:
        yield
        return
    coordinator = offload.get_param_coordinator()
    knows_steps = not coordinator.is_invalid_trace()  # one that it has just seen is known when the next forward begins
    yield
    if knows_steps and coordinator.is_complete_trace():
        coordinator.reset_step()
    elif not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


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
    return deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(ds_config), **_hpz_group(ds_config))


def _hpz_group(ds_config: DsConfig) -> dict[str, Any]:
    """hpZ's group of ranks, for a ``zero.Init`` that is not the first: DeepSpeed 0.19 would make it again, and raises
    AssertionError since there is one. Empty where there is no hpZ, or no group yet."""
    if hpz_size(ds_config) == 1:
        return {}
    group = groups._get_zero_param_intra_parallel_group()
    return {} if group is None else {"zero_param_parallel_group": group}


def partition_new_parameters(module: nn.Module, ds_config: DsConfig) -> None:
    """Partition the parameters of ``module`` that are not yet, with rank 0's values; nothing on stages 0-2.

    For parameters made after the model was built (scales). They keep their dtype, unlike those made inside
    ``zero.Init``, which get the training dtype: so frozen fp32 parameters are possible. A collective.

    Small frozen ones are partitioned among a group of one rank (``zero.Init``'s ``data_parallel_group``), which has all
    of them: gathering them costs no collective. fp32 beside bf16 weights would cost every module one of its own.
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
    """Which of new parameters :func:`partition_new_parameters` makes whole on every rank: frozen ones of at most
    ``WHOLE_ELEMENTS``, in the order given, as long as they are at most ``WHOLE_ELEMENTS_IN_ALL`` together."""
    small, elements = [], 0
    for parameter in new:
        fits = parameter.numel() <= min(WHOLE_ELEMENTS, WHOLE_ELEMENTS_IN_ALL - elements)
        if fits and not parameter.requires_grad:
            small.append(parameter)
            elements += parameter.numel()
    return small


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


def leaves_of_stage_3(model: nn.Module, ds_config: DsConfig) -> set[int]:
    """Ids of the modules that stage 3 takes as a whole: those marked here, and those that its configuration names.

    DeepSpeed's default names the sparse MoE blocks of three model families by class; ``initialize`` marks them.
    """
    zero = DeepSpeedZeroConfig(**ds_config.get("zero_optimization", {}))
    apply_zero_leaf_module_config(model, zero.leaf_module)
    return {id(module) for module in model.modules() if z3_leaf_module(module)}


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
            gradient = local_gradient(parameter)
        else:
            gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            square += gradient.double().square().sum().cpu()
    if partitioned and dist.is_initialized():
        square = square.to(get_accelerator().current_device_name())
        dist.all_reduce(square)
    return math.sqrt(square.item())


def backward(engine: Any, loss: Tensor) -> None:
    """``engine.backward``, the loss times the loss scale of fp16 on every stage.

    DeepSpeed 0.19 leaves the factor out on stage 0 (``engine.backward`` asks its ZeRO optimizers alone for it), and
    divides the gradients by it all the same: they would be smaller by it, and clipped by nothing.
    """
    engine.backward(loss * engine.optimizer.loss_scale if _wraps_fp16_unsharded(engine) else loss)


def global_gradient_norm(engine: Any) -> float | None:
    """L2 norm of all gradients in the last optimizer step, before clipping and without the loss scale of fp16; None on
    stage 0 in fp32, where DeepSpeed keeps none. No collective."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return None
    return float(norm) / (engine.optimizer.loss_scale if _wraps_fp16_unsharded(engine) else 1.0)


def _wraps_fp16_unsharded(engine: Any) -> bool:
    return engine.fp16_enabled() and engine.zero_optimization_stage() == 0


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


def partitions(model: nn.Module) -> list[Tensor]:
    """Every tensor that holds values of parameters now: whole ones, shares, and hpZ's shares of a node."""
    held: list[Tensor] = []
    for parameter in model.parameters():
        held.append(parameter.data)
        if is_partitioned(parameter):
            held.append(parameter.ds_tensor.data)  # type: ignore[attr-defined]
            if parameter.ds_secondary_tensor is not None:  # type: ignore[attr-defined]
                held.append(parameter.ds_secondary_tensor.data)  # type: ignore[attr-defined]
    return held


def master_weights(optimizer: Any) -> list[Tensor]:
    """The fp32 copies that the optimizer updates; on stage 0 in fp32 there are none but the parameters."""
    if hasattr(optimizer, "fp32_groups"):  # stage 0
        return [master for group in optimizer.fp32_groups for master in group]
    # Stage 2 shows its optimizer one group at a time while it steps.
    names = ("fp32_partitioned_groups_flat", "fp32_groups_flat_partition", "single_partition_of_fp32_groups")
    return [master for name in names for master in getattr(optimizer, name, [])]


def gradient_buffers(optimizer: Any) -> list[Tensor]:
    """Where DeepSpeed 0.19 adds gradients up outside of the parameters, while there are any.

    Stage 3 has one flat buffer, and where the optimizer is offloaded a gradient of each master beside it; bf16's
    stage 1 one buffer for each group; stage 2 one for each group too, which becomes its master's gradient.
    """
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    if flat is not None:
        masters = master_weights(optimizer) if optimizer.offload_optimizer else []
        return [flat, *(master.grad for master in masters if master.grad is not None)]
    buffers = list(getattr(optimizer, "fp32_groups_gradients_flat", []))
    groups = getattr(optimizer, "averaged_gradients", {}).values()
    buffers += [group.flat_partition for group in groups if hasattr(group, "flat_partition")]
    shared = getattr(optimizer, "single_partition_of_fp32_groups", [])
    return buffers + [master.grad for master in shared if master.grad is not None]


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
