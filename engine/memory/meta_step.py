"""One micro-batch's forward and backward on the meta device, and how many bytes it holds alive at each moment.

Nothing is computed and no weight exists, but every operator of the real step runs with its real shapes, and every
storage that it makes is counted from the operator that made it until the last reference to it is gone. So what autograd
keeps, what activation checkpointing does not keep, and what lives for a moment only come from the code itself, not from
a formula for an architecture. What only the data would say is assumed: each token has a target, and tokens are spread
evenly over the experts.

Of equal decoder layers in a row only two are run, and the second stands for all that follow: the forward of each of
them adds the same bytes, and its backward takes them away again.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import z3_leaf_module
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# How many of equal layers in a row are run: the first, and one that stands for all that follow.
REPRESENTATIVES = 2


@dataclass(frozen=True)
class Event:
    """A moment of the step.

    Attributes:
        kind: ``forward`` and ``forward_end``: a module's call begins, ends; ``backward``: its gradients are about to be
            computed (once for each of its outputs); ``backward_end``: they have been computed; ``gradient``: the
            gradient of a Parameter is complete; ``end``: the micro-batch is over.
        name: the name of the module or of the Parameter in the model.
        live: bytes alive at this moment.
        peak: the most bytes alive since the event before.
        recomputed: whether it belongs to a forward that activation checkpointing repeats in backward.
    """

    kind: str
    name: str
    live: int
    peak: int
    recomputed: bool = False


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value that an operator takes or returns: in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class _Bytes(TorchDispatchMode):
    """Counts the storages that operators make inside it, and lets meta tensors meet the real ones of a routing."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kinds = {tensor.is_meta for tensor in _tensors((args, kwargs))}
        if len(kinds) == 2:
            args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta") if x.dim() else x, (args, kwargs))
        result = operator(*args, **kwargs)
        for tensor in _tensors(result):
            self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, partial(self._freed, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, size: int, _: weakref.ref) -> None:
        del self._seen[key]
        self.live -= size

    def known(self, tensors: Sequence[Tensor]) -> None:
        """Do not count these tensors: they exist anyway."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._seen[storage._cdata] = weakref.ref(storage)


@dataclass(frozen=True)
class _Run:
    """Equal layers in a row: the layer ``kept`` was run for all of ``names``, which are all but the first of them."""

    kept: str
    names: list[str]


def record_step(model: PreTrainedModel, forward: Callable[[], Tensor], *, backward: bool = True) -> list[Event]:
    """The events of one micro-batch, in order.

    Gradients of Parameters are dropped as soon as they are complete: how long they are kept depends on the ZeRO stage.

    Args:
        model: a model on the meta device, in which the same is quantized and trains as in the run.
        forward: makes the model's inputs, runs it, and returns what is differentiated.
        backward: whether a backward follows.
    """
    events: list[Event] = []
    counter = _Bytes()
    names = {id(part): name for name, part in (*model.named_modules(), *model.named_parameters())}
    counter.known([*model.parameters(), *model.buffers()])
    with (
        representatives(model) as runs,
        _hooks(model, names, counter, events),
        torch.set_grad_enabled(backward),
        counter,
    ):
        result = forward()
        if backward:
            result.backward()
        del result
    events.append(Event("end", "", counter.live, counter.peak))
    return _repeated(events, runs)


def layer_lists(model: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """The lists of decoder layers by name. They have as many layers as the configuration says, all checkpointable."""
    layers = model.config.get_text_config().num_hidden_layers
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == layers
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    }


@contextmanager
def representatives(model: PreTrainedModel) -> Iterator[list[_Run]]:
    """Inside the block the model has at most ``REPRESENTATIVES`` of equal decoder layers in a row."""
    runs: list[_Run] = []
    config = model.config.get_text_config()
    layers, lists = config.num_hidden_layers, layer_lists(model)
    # Models loop over num_hidden_layers of their one list; where there are several, all layers are run.
    for name, module in lists.items() if len(lists) == 1 else ():
        kept: list[nn.Module] = []
        for start, stop in _equal_in_a_row([_signature(layer) for layer in module]):
            chosen = list(range(start, stop))
            if len(chosen) > REPRESENTATIVES:
                runs.append(_Run(f"{name}.{start + 1}", [f"{name}.{index}" for index in range(start + 1, stop)]))
                chosen = [start, start + 1]
            kept += [module[index] for index in chosen]
        model.set_submodule(name, nn.ModuleList(kept))
        config.num_hidden_layers = len(kept)
    try:
        yield runs
    finally:
        for name, module in lists.items():
            model.set_submodule(name, module)
        config.num_hidden_layers = layers


def _signature(layer: nn.Module) -> tuple:
    """A value that is equal for layers whose steps hold the same bytes."""
    tensors = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in layer.named_parameters()]
    switches = [
        (name, type(module), getattr(module, "weight_fake_quant", None), getattr(module, "input_fake_quant", None))
        for name, module in layer.named_modules()
    ]
    return tuple(tensors), tuple(switches)


def _equal_in_a_row(values: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of the longest stretches of equal values."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            yield start, index
            start = index


@contextmanager
def _hooks(model: nn.Module, names: dict[int, str], counter: _Bytes, events: list[Event]) -> Iterator[None]:
    """Inside the block modules and Parameters record their events, at the places where ZeRO-3 has its hooks."""

    def note(kind: str, name: str) -> None:
        recomputed = kind == "forward" and torch._C._current_graph_task_id() != -1
        events.append(Event(kind, name, counter.live, counter.peak, recomputed))
        counter.peak = counter.live

    handles = []
    inside = {
        id(part) for leaf in model.modules() if z3_leaf_module(leaf) for part in leaf.modules() if part is not leaf
    }
    for module in model.modules():
        if id(module) in names and id(module) not in inside:
            handles += _module_hooks(module, partial(note, name=names[id(module)]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(partial(_drop, note, names[id(parameter)])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _module_hooks(module: nn.Module, note: Callable[[str], None]) -> list[Any]:
    """Hook one module. Each forward, a repeated one too, counts anew how many inputs have gradients.

    ZeRO-3's hook counts so, too, and takes a backward for over when the last of these gradients has been computed.
    """
    remaining = 0

    def input_passes() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            note("backward_end")

    def before(_: nn.Module, inputs: tuple) -> tuple:
        nonlocal remaining
        note("forward")
        remaining = sum(tensor.requires_grad for tensor in _tensors(inputs))
        return _on_tensors(lambda tensor: _Mark.apply(tensor, input_passes), inputs)

    def after(_: nn.Module, inputs: tuple, output: Any) -> Any:
        note("forward_end")
        return _on_tensors(lambda tensor: _Mark.apply(tensor, partial(note, "backward")), output)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _drop(note: Callable[[str, str], None], name: str, parameter: nn.Parameter) -> None:
    parameter.grad = None
    note("gradient", name)


class _Mark(torch.autograd.Function):
    """The identity, in the same memory. It calls a function when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passes: Callable[[], None]) -> Tensor:
        ctx.passes = passes
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.passes()
        return grad, None


MARKS = frozenset({_Mark.__name__})  # of the Functions that :func:`record_step` puts around inputs


def _on_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` of every tensor in tuples, lists and dictionaries; dictionaries change in place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _on_tensors(function, value[key])
        return value
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_on_tensors(function, item) for item in value)
    return value


def _repeated(events: list[Event], runs: Sequence[_Run]) -> list[Event]:
    """The events of all layers: those of a representative are repeated for each layer that it stands for."""
    for run in runs:
        events = list(_repeat(events, run))
    return events


def _repeat(events: list[Event], run: _Run) -> Iterator[Event]:
    segments = _segments(events, run.kept)
    extra = 0  # bytes that layers hold which were not run
    position = 0
    for start, stop in segments:
        for event in events[position:start]:
            yield replace(event, live=event.live + extra, peak=event.peak + extra)
        grows = events[stop].live - events[start].live  # up to the event that follows: the last tensors are freed there
        forward = not any(event.kind == "backward" for event in events[start:stop])
        names = run.names if forward else run.names[::-1]
        before = events[start].peak  # the peak between the layer before and this one
        for name in names:
            for event in events[start:stop]:
                own = f"{event.name}.".startswith(f"{run.kept}.")
                renamed = name + event.name.removeprefix(run.kept) if own else event.name
                peak = before if event is events[start] else event.peak
                yield replace(event, name=renamed, live=event.live + extra, peak=peak + extra)
            extra += grows
            before = events[stop].peak - grows
        extra -= grows  # the representative's own share is in the events
        position = stop
    for event in events[position:]:
        yield replace(event, live=event.live + extra, peak=event.peak + extra)


def _segments(events: list[Event], layer: str) -> list[tuple[int, int]]:
    """The ranges of events of the layer's forward and of its backward: the first index, and one past the last."""

    def first(kind: str, start: int) -> int | None:
        found = (i for i in range(start, len(events)) if (events[i].name, events[i].kind) == (layer, kind))
        return next(found, None)

    opened = first("forward", 0)
    assert opened is not None, f"{layer} was not run"
    closed = first("forward_end", opened)
    assert closed is not None
    segments = [(opened, closed + 1)]
    if (backward := first("backward", closed)) is not None:
        own = [i for i in range(backward, len(events)) if f"{events[i].name}.".startswith(f"{layer}.")]
        segments.append((backward, own[-1] + 1))
    return segments
