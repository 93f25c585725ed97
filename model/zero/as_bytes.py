"""Gather parameters for forward and backward in another form, as bytes (see :mod:`model.zero.quantized_gather`)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, ZeroParamStatus
from torch import Tensor, nn
from torch.nn import Parameter

from model.zero.parameters import is_partitioned, is_whole, local_data


@dataclass(frozen=True)
class ByteForm:
    """Form in which a partitioned parameter is all-gathered for forward and backward.

    Attributes:
        encode: converts the elements of :func:`local_range`, flat, to bytes (uint8).
        decode: converts the bytes of the whole parameter, ``[ranks, bytes of each]`` with padding at the end, to the
            tensor that forward uses in its place, in the parameter's shape and dtype.
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
        form_of: called at every gather, in the same order on all ranks. If it returns None, the parameter is gathered
            unchanged. Parameters that DeepSpeed keeps gathered (``stage3_param_persistence_threshold``) are always
            gathered unchanged.

    Raises:
        ValueError: hpZ is on, which copies gathered parameters.
    """
    parameters = [parameter for parameter in model.parameters() if is_partitioned(parameter)]
    for parameter in parameters:
        if parameter.ds_zero_param_process_group is not None:  # type: ignore[attr-defined]
            raise ValueError("zero_hpz_partition_size: hpZ would keep the decoded bytes as the parameter: set it to 1")
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
    """Partition parameters that a forward left decoded, so that the next gather decodes them again.

    DeepSpeed keeps parameters that it expects to need soon, also after an evaluation's forward. Do not call this
    inside a forward.
    """
    for parameter in parameters:
        if getattr(parameter, "holds_decoded", False):
            if parameter.ds_status is ZeroParamStatus.AVAILABLE:  # type: ignore[attr-defined]
                parameter.partition()  # type: ignore[attr-defined]
            parameter.holds_decoded = False  # type: ignore[attr-defined]
