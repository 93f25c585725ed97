"""Makes parameters whole on rank 0 for a while, one batch of them after another."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from model.zero.parameters import full_numel, full_shape, is_partitioned, is_whole, local_data, partition_of

Batch = Sequence[Tensor]  # parameters, partitioned or plain


class ReceiveBuffer:
    """The memory of rank 0 for two batches at a time: one that is whole, and the next, which is coming.

    On a CPU new memory of megabytes comes from the system page by page, which takes about as long as to receive it: so
    one block serves all batches, in turn from its beginning and from its end, and is as large as the largest two
    neighbours.
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
        """For each parameter of batch ``number`` a 1-D tensor for all ranks' partitions, not initialised."""
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
