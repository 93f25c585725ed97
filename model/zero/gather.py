"""Gather whole parameters temporarily, on every rank or, batch by batch, on rank 0 only."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from model.zero.as_bytes import gather_as_they_are, release_decoded
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
    """Gather parameters on every rank inside the block; plain parameters are whole without gathering.

    Args:
        parameters: any mixture of partitioned and plain parameters. If they are only read, the small parameters of a
            dtype share one collective, during which they exist twice; every other parameter has its own collective.
            Blocks must not nest on the same parameter.
        modifier_rank: rank whose changes to partitioned and plain parameters reach all ranks. With None, changes are
            refused or lost.
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

    GatheredParameters then finds them gathered. Without this it would run a collective of at least 0.2 ms for each, and
    with a single rank a copy. Under hpZ nothing is done, as the secondary copies would be gathered.
    """
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
    """Copy small parameters whole, as fp32 and 1-D, to every rank; at most one collective for all of them.

    It does not change which parameters are gathered, so it may run in the middle of a forward.
    """
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
    """Wrap a forward without a backward of a training engine, so that it does not slow down later steps.

    DeepSpeed records during a whole step in which order parameters are used. From this trace it prefetches in few large
    collectives and keeps the parameters that backward needs first. From a forward without a backward it concludes that
    nothing is needed again. At the first backward it records a new trace, but its conclusions per module and position
    are cached forever (0.19.8: ``__params_to_release`` has a ``functools.lru_cache``): every later step then gathers
    module by module, and twice. So the forward's trace is dropped, unless a trace of whole steps already existed, which
    begins with the same forward.

    On exit, pending prefetches for a backward that does not follow are awaited: GatheredParameters rejects parameters
    in flight. Every forward without a backward needs this wrapper: DeepSpeed would take an unwrapped one for a whole
    step.
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
    """Split ``items``, to be gathered, sent or written together, into consecutive lists of at most ``limit`` in total.

    A larger item forms a list of one.

    Args:
        items: in the order of the lists.
        size: returns the size of one item, in the unit of ``limit``.
        limit: largest sum of sizes in one list.
    """
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
    """Memory of rank 0 for two batches at a time: a complete batch, and the next batch, which is being received.

    On a CPU, the system provides new memory page by page, which takes about as long as receiving the data. So one block
    is used for all batches, alternately from its beginning and from its end. It is as large as the largest two
    consecutive batches.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def reserve(self, batches: Sequence[Batch]) -> None:
        """Allocate memory for these consecutive batches, so that a lack of memory is an error before other ranks begin
        to send."""
        sizes = [sum(_aligned_sizes(_shared(batch))) for batch in batches]
        size = max((a + b for a, b in pairwise([*sizes, 0])), default=0)
        if self._memory is None or self._memory.numel() < size:
            self._memory = None  # free the old block first
            self._memory = torch.empty(size, dtype=torch.uint8, device=get_accelerator().current_device_name())

    def places(self, number: int, shared: Sequence[Tensor]) -> list[Tensor]:
        """Return an uninitialized 1-D tensor for all ranks' partitions of each parameter of batch ``number``."""
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


def gathered_on_main(batches: Sequence[Batch], buffer: ReceiveBuffer | None = None) -> Iterator[None]:
    """Gather batches of parameters on rank 0, for reading; yields once for each batch. A collective.

    On the other ranks parameters do not change. Each rank sends its partitions to rank 0. This is faster than an
    all-gather, and the other ranks need no memory except for a copy of offloaded partitions. DeepSpeed is not involved.
    Rank 0's parameters are restored when the next batch is requested. While rank 0 reads a batch, it receives the next
    one; after the last batch nothing is in flight.

    Args:
        batches: lists of parameters, partitioned and plain in any mixture. The parameters of a list are gathered
            together.
        buffer: memory reserved for ``batches``, for callers that gather repeatedly.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        for batch in batches:
            shares = [_for_collectives(partition_of(parameter).detach()) for parameter in _shared(batch)]
            _finish(_begin([dist.P2POp(dist.isend, share, 0) for share in shares]))
            yield
        return
    if buffer is None:
        buffer = ReceiveBuffer()
        buffer.reserve(batches)
    following = _receive(buffer, 0, batches)
    for number, batch in enumerate(batches):
        coming, following = following, _receive(buffer, number + 1, batches)
        whole = coming.values()
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


@dataclass
class _Receiving:
    """Batch being received by rank 0: its partitioned parameters, their buffers and the pending receives."""

    shared: list[Tensor]
    places: list[Tensor]
    works: list[dist.Work]

    def values(self) -> dict[Tensor, Tensor]:
        """Wait for all partitions and return the whole parameters, 1-D, by parameter."""
        for parameter, place in zip(self.shared, self.places, strict=True):  # overlaps with receiving
            share = partition_of(parameter).detach()
            place[: share.numel()].copy_(share)
        _finish(self.works)
        return {p: place[: full_numel(p)] for p, place in zip(self.shared, self.places, strict=True)}


def _receive(buffer: ReceiveBuffer, number: int, batches: Sequence[Batch]) -> _Receiving:
    """Start receiving the other ranks' partitions of batch ``number``, if there is one, on rank 0."""
    shared = _shared(batches[number]) if number < len(batches) else []
    places = buffer.places(number, shared) if shared else []
    from_others = [
        dist.P2POp(dist.irecv, part, rank)
        for parameter, place in zip(shared, places, strict=True)
        for rank, part in enumerate(place.split(partition_of(parameter).numel()))
        if rank > 0
    ]
    return _Receiving(shared, places, _begin(from_others))


def _begin(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _for_collectives(tensor: Tensor) -> Tensor:
    """Move ``tensor`` to a device that NCCL accepts; an offloaded partition is in host memory."""
    return tensor.to(get_accelerator().current_device_name())
