"""Consecutive things in batches of a bounded size: what is sent, written or held together."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Split ``items`` into consecutive lists whose sizes add up to at most ``limit``; a larger item stands alone.

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
