"""Tensors that autograd keeps for backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def kept_for_backward(living: Iterable[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Collect, by address, the tensors that a forward keeps for backward, but for ``living`` ones (Parameters)."""
    addresses, found = {tensor.data_ptr() for tensor in living}, {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in addresses:
            found[tensor.data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def storages(found: dict[int, Tensor]) -> dict[int, int]:
    """Bytes of their storage, by address: a view of a larger tensor counts as that tensor."""
    return {address: tensor.untyped_storage().nbytes() for address, tensor in found.items()}


def kinds(found: dict[int, Tensor]) -> list[tuple[torch.dtype, int]]:
    """Dtype and bytes of each storage, sorted."""
    return sorted(((found[address].dtype, size) for address, size in storages(found).items()), key=str)
