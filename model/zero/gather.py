"""Makes parameters whole for a while on every rank, so many at a time as memory has room for. For rank 0 alone see
``on_main.py``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
    is_partitioned,
    is_whole,
    local_data,
    local_range,
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
