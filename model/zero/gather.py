"""Gather whole parameters temporarily, on every rank or, batch by batch, on rank 0 only. Also make forward and backward
gather parameters as bytes (for :mod:`model.zero.quantized_gather`)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus
from torch import Tensor, nn
from torch.nn import Parameter

from model.zero.parameters import (
    WHOLE_ELEMENTS,
    full_numel,
    full_shape,
    is_partitioned,
    is_whole,
    local_data,
    local_range,
    partition_of,
)

_T = TypeVar("_T")

COALESCED_BYTES = 2**20  # parameters up to this size share a collective


@contextmanager
def gathered(parameters: Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """Gather parameters on every rank inside the block; plain parameters are whole already. A collective.

    Args:
        parameters: any mixture of partitioned and plain parameters. If they are only read, small parameters of one
            dtype share one collective and exist twice meanwhile; every other parameter has its own collective. Blocks
            must not nest on the same parameter.
        modifier_rank: rank whose changes to the parameters (plain ones, too) reach all ranks at the end of the block.
            With None, the block must not change them.
    """
    parameters = list(parameters)
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    release_decoded(partitioned)
    if modifier_rank is None:
        _gather_together(partitioned)
    # Separately: DeepSpeed partitions a list by the settings of its first parameter, and whole parameters have no hpZ.
    shared = [parameter for parameter in partitioned if not is_whole(parameter)]
    whole = [parameter for parameter in partitioned if is_whole(parameter)]
    with (
        deepspeed.zero.GatheredParameters(shared, modifier_rank=modifier_rank, enabled=bool(shared)),
        deepspeed.zero.GatheredParameters(whole, modifier_rank=modifier_rank, enabled=bool(whole)),
    ):
        yield
        if modifier_rank is not None and dist.is_initialized():
            _broadcast([p for p in parameters if not is_partitioned(p) or is_whole(p)], modifier_rank)


def _broadcast(parameters: Sequence[Tensor], source: int) -> None:
    """Broadcast plain parameters from rank ``source``; the small parameters of a dtype share one collective."""
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
    """Gather small partitioned parameters in one collective per dtype; with a single rank, gather large ones too.
    GatheredParameters then finds them gathered; else it would run a collective of at least 0.2 ms for each, and with a
    single rank a copy. Under hpZ nothing is done, as the secondary copies would be gathered."""
    apart = [p for p in parameters if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
    small = [
        p
        for p in dict.fromkeys(apart)
        if p.ds_process_group.size() == 1 or full_numel(p) * p.element_size() <= COALESCED_BYTES  # type: ignore[attr-defined]
    ]
    if small and not any(p.ds_secondary_tensor is not None for p in small):  # type: ignore[attr-defined]
        gather_as_they_are(small).wait()


@torch.no_grad()
def whole_values(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a whole copy of each small parameter, fp32 and 1-D, on the accelerator of every rank; one collective for
    all parameters. A parameter stays gathered or partitioned, so this may run in the middle of a forward."""
    sizes = [full_numel(parameter) for parameter in parameters]
    flat = torch.zeros(sum(sizes), device=get_accelerator().current_device_name())
    shared = [is_partitioned(parameter) and not is_whole(parameter) for parameter in parameters]
    places = flat.split(sizes)
    for parameter, place, partly in zip(parameters, places, shared, strict=True):
        if partly:
            place[slice(*local_range(parameter))] = local_data(parameter)
    if any(shared):
        dist.all_reduce(flat)  # every element is nonzero on one rank only
    for parameter, place, partly in zip(parameters, places, shared, strict=True):
        if not partly:
            place.copy_(local_data(parameter))
    return list(places)


@contextmanager
def forward_only(module: nn.Module) -> Iterator[None]:
    """Wrap a forward of the training engine ``module`` that no backward follows, so that later steps stay fast; no
    effect on stages 0-2.

    DeepSpeed records during a whole step in which order parameters are used. From this trace it prefetches in few large
    collectives and keeps the parameters that backward needs first. After a forward without a backward, DeepSpeed
    assumes that no parameter is needed again. At the next backward it records a new trace, but these assumptions per
    module and position are cached forever (0.19.8: ``__params_to_release`` has a ``functools.lru_cache``): every later
    step then gathers module by module, and twice. So the forward's trace is dropped, unless a trace of whole steps
    already existed, which begins with the same forward. On exit, pending prefetches for the backward that will not run
    are awaited: GatheredParameters rejects parameters in flight.
    """
    offload = getattr(getattr(module, "optimizer", None), "parameter_offload", None)
    if offload is None:
        yield
        return
    coordinator = offload.get_param_coordinator()
    knows_steps = not coordinator.is_invalid_trace()  # a trace just recorded becomes valid when the next forward begins
    yield
    if knows_steps and coordinator.is_complete_trace():
        coordinator.reset_step()
    elif not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def batches(items: Iterable[_T], size: Callable[[_T], int], limit: int) -> Iterator[list[_T]]:
    """Split ``items`` into consecutive lists, to be gathered, sent or written together. In a list, ``size(item)`` sums
    to at most ``limit``; an item larger than ``limit`` forms a list of its own."""
    batch: list[_T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


Batch = Sequence[Tensor]  # parameters, partitioned or plain


class ReceiveBuffer:
    """Memory of rank 0 for two batches at a time: a complete batch, and the next batch, which is being received. On a
    CPU, the system provides new memory page by page, which takes about as long as receiving the data. So one block, as
    large as the largest two consecutive batches, is used for all, alternately from its beginning and from its end."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def reserve(self, batches: Sequence[Batch]) -> None:
        """Allocate memory for these consecutive batches now, so that running out of it is an error before other ranks
        send."""
        sizes = [sum(_aligned_sizes(_shared(batch))) for batch in batches]
        size = max((a + b for a, b in pairwise([*sizes, 0])), default=0)
        if self._memory is None or self._memory.numel() < size:
            self._memory = None  # free the old block first
            self._memory = torch.empty(size, dtype=torch.uint8, device=get_accelerator().current_device_name())

    def places(self, number: int, shared: Sequence[Tensor]) -> list[Tensor]:
        """Return for each parameter in ``shared`` an uninitialized 1-D tensor, which has room for the partitions of all
        ranks. ``shared`` are the parameters of batch ``number`` (from 0) that are split over ranks."""
        assert self._memory is not None
        sizes = _aligned_sizes(shared)
        begin = 0 if number % 2 == 0 else self._memory.numel() - sum(sizes)
        places = self._memory[begin : begin + sum(sizes)].split(sizes)
        return [
            place[: dist.get_world_size() * partition_of(parameter).nbytes].view(parameter.dtype)
            for parameter, place in zip(shared, places, strict=True)
        ]


_ALIGNMENT = 64  # alignment of tensors, in bytes


def _shared(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Select the parameters of which other ranks have partitions."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return [p for p in dict.fromkeys(parameters) if several and is_partitioned(p) and not is_whole(p)]


def _aligned_sizes(shared: Iterable[Tensor]) -> list[int]:
    """Compute the bytes of all ranks' partitions of each parameter, aligned."""
    return [-(-dist.get_world_size() * partition_of(p).nbytes // _ALIGNMENT) * _ALIGNMENT for p in shared]


def gathered_on_main(batches: Sequence[Batch], buffer: ReceiveBuffer) -> Iterator[None]:
    """Gather batches of parameters on rank 0, for reading. A collective that yields on every rank once for each batch.

    Each rank sends its partitions to rank 0. This is faster than an all-gather, and the other ranks, where parameters
    do not change, need no memory except for a copy of offloaded partitions. DeepSpeed is not involved. When the next
    batch is requested, rank 0's parameters are as they were before the call. While rank 0 reads a batch, it receives
    the next one; after the last batch nothing is in flight.

    Args:
        batches: lists of parameters to gather together, partitioned and plain in any mixture.
        buffer: memory, on rank 0 reserved for ``batches``.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        for batch in batches:
            shares = [_for_collectives(partition_of(parameter).detach()) for parameter in _shared(batch)]
            _finish(_begin([dist.P2POp(dist.isend, share, 0) for share in shares]))
            yield
        return
    following = _receive(buffer, 0, batches)
    for number, batch in enumerate(batches):
        received, following = following, _receive(buffer, number + 1, batches)
        whole = received()
        stubs = [parameter for parameter in dict.fromkeys(batch) if is_partitioned(parameter)]
        kept = [parameter.data for parameter in stubs]
        try:
            for parameter in stubs:
                values = whole[parameter] if parameter in whole else _for_collectives(local_data(parameter))
                parameter.data = values.view(full_shape(parameter))
            yield
        finally:
            for parameter, data in zip(stubs, kept, strict=True):
                parameter.data = data


def _receive(buffer: ReceiveBuffer, number: int, batches: Sequence[Batch]) -> Callable[[], dict[Tensor, Tensor]]:
    """Start receiving the other ranks' partitions of batch ``number``, if there is one, on rank 0. Returns a function
    that waits for all partitions and returns the whole parameters, 1-D, by parameter."""
    shared = _shared(batches[number]) if number < len(batches) else []
    places = buffer.places(number, shared) if shared else []
    from_others = [
        dist.P2POp(dist.irecv, part, rank)
        for parameter, place in zip(shared, places, strict=True)
        for rank, part in enumerate(place.split(partition_of(parameter).numel()))
        if rank > 0
    ]
    works = _begin(from_others)

    def received() -> dict[Tensor, Tensor]:
        for parameter, place in zip(shared, places, strict=True):  # overlaps with receiving
            share = partition_of(parameter).detach()
            place[: share.numel()].copy_(share)
        _finish(works)
        return {p: place[: full_numel(p)] for p, place in zip(shared, places, strict=True)}

    return received


def _begin(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _for_collectives(tensor: Tensor) -> Tensor:
    """Move ``tensor`` to this rank's device: an offloaded partition is in host memory, which NCCL cannot send."""
    return tensor.to(get_accelerator().current_device_name())


@dataclass(frozen=True)
class ByteForm:
    """Form in which a partitioned parameter is all-gathered for forward and backward.

    Attributes:
        encode: converts the elements of :func:`local_range`, flat, to bytes (uint8).
        decode: converts the bytes of all ranks, ``[ranks, bytes of each]`` with padding at the end, to the tensor that
            forward uses as the parameter, in its shape and dtype.
        width: bytes per element.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    width: int = 1


def gather_as_bytes(model: nn.Module, form_of: Callable[[Parameter], ByteForm | None]) -> None:
    """Make stage 3 gather some parameters for forward and backward in a :class:`ByteForm`.

    Before a module runs, and when prefetching, DeepSpeed gathers lists of parameters with ``all_gather_coalesced``, an
    attribute of every partitioned Parameter. For each list it calls the function of the first parameter, and any
    parameter may be first, as lists come from sets (0.19.8: ``PartitionedParameterCoordinator.__all_gather_params_``,
    the only caller). DeepSpeed has no hook for another form, so the function is replaced on every Parameter of the
    model. All other code gathers the parameters themselves: :func:`gathered`, and DeepSpeed's saving, use
    ``all_gather``.

    Args:
        model: after ``deepspeed.initialize``; stage 3.
        form_of: returns a parameter's form, or None to gather it unchanged; called at every gather, in the same order
            on all ranks, except for small parameters that DeepSpeed keeps gathered, which are gathered unchanged.

    Raises:
        ValueError: hpZ is on, which would keep the decoded tensors as its secondary copies of the weights.
    """
    parameters = [parameter for parameter in model.parameters() if is_partitioned(parameter)]
    for parameter in parameters:
        if parameter.ds_zero_param_process_group is not None:  # type: ignore[attr-defined]
            raise ValueError("zero_hpz_partition_size: expected 1: hpZ would cache decoded codes, not weights")
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
    """Start gathering in place of ``all_gather_coalesced``, and return a handle to wait for."""
    assert not quantize, "the recipe refuses zero_quantized_weights"
    # The order of the list differs between ranks.
    ordered: list[Any] = sorted(parameters, key=lambda parameter: parameter.ds_id)
    forms = {parameter: None if parameter.ds_persist else form_of(parameter) for parameter in ordered}
    if all(form is None for form in forms.values()):
        return as_they_are(ordered, safe_mode=safe_mode)
    # The list's other parameters are gathered in the same collective; widest dtype first, for their alignment.
    sent = sorted(
        (parameter for parameter in ordered if not is_whole(parameter)),
        key=lambda parameter: -parameter.element_size() if forms[parameter] is None else 0,
    )
    handles = [_BytesInFlight([(parameter, forms[parameter]) for parameter in sent])]
    if len(sent) < len(ordered):
        handles.append(as_they_are([parameter for parameter in ordered if is_whole(parameter)], safe_mode=safe_mode))
    return MultipleAllGatherHandles(handles)


def gather_as_they_are(parameters: Sequence[Any]) -> Any:
    """Run DeepSpeed's own ``all_gather_coalesced``, ignoring any :class:`ByteForm`; returns a handle to wait for."""
    gather = parameters[0].all_gather_coalesced
    return (gather.args[0] if isinstance(gather, partial) else gather)(parameters)


def _unchanged(parameter: Any) -> ByteForm:
    size = parameter.ds_numel * parameter.element_size()
    return ByteForm(
        encode=lambda flat: flat.view(torch.uint8),
        decode=lambda parts: parts.reshape(-1)[:size].view(parameter.dtype).view(parameter.ds_shape),
        width=parameter.element_size(),
    )


class _BytesInFlight:
    """Handle of one all-gather of bytes, for which DeepSpeed's coordinator may wait more than once."""

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
        self.work = None  # it references the bytes, and the handle lives until the last parameter is read
        for (parameter, form), parts in zip(self.sent, self.bytes.split(self.sizes, dim=1), strict=True):
            parameter.data = form.decode(parts)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        for parameter in self.decoded:
            parameter.holds_decoded = True
        if not get_accelerator().is_synchronized_device():
            self.bytes.record_stream(get_accelerator().current_stream())
        self.bytes = None


def release_decoded(parameters: Iterable[Tensor]) -> None:
    """Partition parameters that a forward left decoded from a :class:`ByteForm`, so that the next gather encodes and
    decodes the current values. DeepSpeed keeps parameters that it expects to need soon, also after an evaluation's
    forward. Do not call this inside a forward."""
    for parameter in parameters:
        if getattr(parameter, "holds_decoded", False):
            if parameter.ds_status is ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
                parameter.partition()  # type: ignore[attr-defined]
            parameter.holds_decoded = False  # type: ignore[attr-defined]
