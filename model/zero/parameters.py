"""A Parameter under ZeRO: its whole shape, and the elements of it that this rank holds."""

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import safe_get_local_grad, safe_set_local_grad
from torch import Tensor, nn
from torch.nn import Parameter


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

    It is all of a plain parameter, and empty (start == stop) on a rank whose chunk is all padding.
    """
    numel = full_numel(parameter)
    if not is_partitioned(parameter):
        return 0, numel
    size = partition_of(parameter).ds_numel  # type: ignore[attr-defined]
    start = size * parameter.ds_process_group.rank()  # type: ignore[attr-defined]
    return min(start, numel), min(start + size, numel)


def local_data(parameter: Tensor) -> Tensor:
    """Flat view of the elements of :func:`local_range`; what is written to it is written to the parameter.

    The padding behind them is zeroed: DeepSpeed leaves it uninitialised, and a NaN there would reach norms over the
    partition. Do not call it inside a :func:`gathered` block on the same parameter, and call
    :func:`forget_secondary_copies` after writing.
    """
    if not is_partitioned(parameter):
        return parameter.detach().view(-1)
    start, stop = local_range(parameter)
    partition = partition_of(parameter)
    if partition.numel() > stop - start:
        partition[stop - start :].zero_()
    return partition[: stop - start]


def partition_of(parameter: Tensor) -> Tensor:
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


def local_gradient(parameter: Parameter) -> Tensor | None:
    """The fp32 gradient of the elements of :func:`local_range`, between the last backward of a step and the step.

    For stage 3 only. None if the parameter is not trained. It may be a copy: change it with :func:`set_local_gradient`.
    """
    gradient: Tensor | None = safe_get_local_grad(parameter)
    start, stop = local_range(parameter)
    return None if gradient is None else gradient.flatten()[: stop - start]


def set_local_gradient(parameter: Parameter, gradient: Tensor) -> None:
    """Replace the gradient that :func:`local_gradient` gives; that of the padding becomes 0."""
    whole = zeros_of_partition(parameter)
    whole[: gradient.numel()] = gradient
    safe_set_local_grad(parameter, whole)


def is_whole(parameter: Tensor) -> bool:
    """Whether every rank has all of a ZeRO-3 parameter, though there are several ranks."""
    group = getattr(parameter, "ds_process_group", None)
    return group is not None and dist.get_world_size(group=group) == 1 < dist.get_world_size()


def zeros_of_partition(parameter: Parameter) -> Tensor:
    """fp32 zeros in the shape of this rank's chunk, padding included."""
    return torch.zeros_like(parameter.ds_tensor, dtype=torch.float32)  # type: ignore[attr-defined]


def partitions(model: nn.Module) -> list[Tensor]:
    """Every tensor that holds values of parameters now: whole parameters, shares, and hpZ's shares within a node."""
    held: list[Tensor] = []
    for parameter in model.parameters():
        held.append(parameter.data)
        if is_partitioned(parameter):
            held.append(parameter.ds_tensor.data)  # type: ignore[attr-defined]
            if parameter.ds_secondary_tensor is not None:  # type: ignore[attr-defined]
                held.append(parameter.ds_secondary_tensor.data)  # type: ignore[attr-defined]
    return held
