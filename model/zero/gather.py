"""Makes parameters whole for a while on every rank, so many at a time as memory has room for. For rank 0 alone see
``on_main.py``.

Makes parameters whole on rank 0 for a while, one batch of them after another.
"""

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

T = TypeVar("T")

COALESCED_BYTES = 2**20  # of a parameter up to which it shares a collective with others


@contextmanager
def gathered(parameters: Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """Inside the block the parameters are whole on every rank; plain ones are so anyway.

    Args:
        parameters: any mixture of partitioned and plain ones. If they are only read, the small ones of a dtype come in
            one collective, during which they are there twice; every other one comes in a collective of its own. Blocks
            must not nest on the same parameter.
        modifier_rank: the rank whose changes to partitioned and plain parameters reach all ranks. With None, changes
            are refused or lost.
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
        gather_as_they_are(small).wait()


@torch.no_grad()
def whole_values(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Copy small parameters whole, as fp32 and 1-D, to every rank; at most one collective for all of them.

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


@contextmanager
def forward_only(module: nn.Module) -> Iterator[None]:
    """Stands around a forward, without a backward, of an engine that trains, so that later steps cost no more for it.

    DeepSpeed learns from a whole step in which order parameters are used, gathers ahead accordingly, in few large
    collectives, and keeps what backward needs first. From forwards alone it learns that nothing is needed again. It
    notices the first backward, and learns anew, but what it concluded per module and position it keeps for ever
    (0.19.8: ``__params_to_release`` has a ``functools.lru_cache``): every later step then gathers module by module, and
    twice. So what it learns here is forgotten, unless it knew whole steps before, which this is the beginning of.

    What it began to gather for a backward that does not come is waited for: GatheredParameters takes no parameter that
    is on its way. Every such forward has to be in here: one that is not is taken for a step by the next.
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


def batches(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Split ``items``, to be gathered, sent or written together, into consecutive lists whose sizes add up to at most
    ``limit``; a larger item stands alone.

    Args:
        items: in the order in which the lists have them.
        size: the size of one item, in the unit of ``limit``.
        limit: the largest sum of sizes in one list.
    """
    batch: list[T] = []
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
    """The memory of rank 0 for two batches at a time: one that is whole, and the next, which is coming.

    On a CPU new memory of megabytes comes from the system page by page, which takes about as long as to receive it: so
    one block serves all batches, in turn from its beginning and from its end, and is as large as the largest two
    neighbors.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def reserve(self, batches: Sequence[Batch]) -> None:
        """Make room for these batches, which come one after another. A lack of memory shows here then, and not when the
        other ranks are sending already."""
        sizes = [sum(_rooms(_shared(batch))) for batch in batches]
        size = max((a + b for a, b in pairwise([*sizes, 0])), default=0)
        if self._memory is None or self._memory.numel() < size:
            self._memory = None  # first give back what there is
            self._memory = torch.empty(size, dtype=torch.uint8, device=get_accelerator().current_device_name())

    def places(self, number: int, shared: Sequence[Tensor]) -> list[Tensor]:
        """For each parameter of batch ``number`` a 1-D tensor for all ranks' partitions, not initialized."""
        assert self._memory is not None
        rooms = _rooms(shared)
        begin = 0 if number % 2 == 0 else self._memory.numel() - sum(rooms)
        places = self._memory[begin : begin + sum(rooms)].split(rooms)
        return [
            place[: dist.get_world_size() * partition_of(parameter).nbytes].view(parameter.dtype)
            for parameter, place in zip(shared, places, strict=True)
        ]


_ALIGNED = 64  # bytes: where a tensor may begin


def _shared(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters of which other ranks hold parts."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return [p for p in dict.fromkeys(parameters) if several and is_partitioned(p) and not is_whole(p)]


def _rooms(shared: Iterable[Tensor]) -> list[int]:
    """For each parameter the bytes of all ranks' partitions, up to where the next one may begin."""
    return [-(-dist.get_world_size() * partition_of(p).nbytes // _ALIGNED) * _ALIGNED for p in shared]


def gathered_on_main(batches: Sequence[Batch], buffer: ReceiveBuffer | None = None) -> Iterator[None]:
    """Yields once for each batch: its parameters are whole on rank 0 then, to be read there. A collective.

    On the other ranks they stay as they are. Each rank sends its partitions to rank 0, which receives them in their
    places: faster than an all-gather, and the other ranks need no memory, but for a copy of what is offloaded.
    DeepSpeed takes no part, and finds everything as it left it, as soon as the next batch is asked for. While rank 0
    reads a batch, the next one comes; when the last one has been read, nothing is on its way.

    Args:
        batches: lists of parameters, partitioned and plain ones in any mixture. Those of a list are gathered together.
        buffer: memory with room for ``batches``, so that a caller who gathers again and again makes it once.
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
class _Coming:
    """A batch on its way to rank 0: what is shared of it, the places for all ranks' partitions, and who fills them."""

    shared: list[Tensor]
    places: list[Tensor]
    works: list[dist.Work]

    def values(self) -> dict[Tensor, Tensor]:
        """Wait until all have come, and return the whole parameters, 1-D, by parameter."""
        for parameter, place in zip(self.shared, self.places, strict=True):  # while the others' come
            share = partition_of(parameter).detach()
            place[: share.numel()].copy_(share)
        _finish(self.works)
        return {p: place[: full_numel(p)] for p, place in zip(self.shared, self.places, strict=True)}


def _receive(buffer: ReceiveBuffer, number: int, batches: Sequence[Batch]) -> _Coming:
    """Have rank 0 begin to receive the other ranks' partitions of batch ``number``, if there is one."""
    shared = _shared(batches[number]) if number < len(batches) else []
    places = buffer.places(number, shared) if shared else []
    from_others = [
        dist.P2POp(dist.irecv, part, rank)
        for parameter, place in zip(shared, places, strict=True)
        for rank, part in enumerate(place.split(partition_of(parameter).numel()))
        if rank > 0
    ]
    return _Coming(shared, places, _begin(from_others))


def _begin(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _finish(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _for_collectives(tensor: Tensor) -> Tensor:
    """``tensor`` on a device whose tensors NCCL takes; an offloaded partition is in host memory."""
    return tensor.to(get_accelerator().current_device_name())
