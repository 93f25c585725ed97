"""Run one micro-batch's forward and backward on the meta device, and count the bytes alive at each moment.

Nothing is computed and no weight exists, but every operator of the real step runs with its real shapes. Every storage
is counted from the operator that creates it until the last reference to it is gone. So tensors that autograd keeps,
that activation checkpointing drops, and that exist only briefly are counted by running the code, not by a formula for
an architecture. Only the number of targets and the experts of each token depend on data: every token is assumed to have
a target, and tokens are spread evenly over the experts.

Only two of a run of equal consecutive decoder layers are executed. The second one also stands for all layers that
follow: the forward of each adds the same bytes, and its backward frees them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Number of consecutive equal layers that are run: the first, and one that is counted for all that follow.
REPRESENTATIVES = 2


@dataclass(frozen=True)
class Event:
    """Moment of a micro-batch.

    Attributes:
        kind: ``forward``: a module's call begins; ``forward_end``: a decoder layer's call ends; ``loss``: the loss is
            known, and backward begins; ``backward``: gradients of a decoder layer are about to be computed (once for
            each of its outputs); ``gradient``: the gradient of a Parameter is complete; ``teacher``: the teacher's
            whole forward; ``end``: the micro-batch is over.
        name: name of the module or Parameter in the model.
        live: bytes alive at this moment.
        peak: most bytes alive since the event before.
    """

    kind: str
    name: str
    live: int
    peak: int


def own_bytes(events: Sequence[Event]) -> np.ndarray:
    """Return the bytes alive at two moments per event, in order: the peak before the event, and the bytes at it."""
    return np.array([size for event in events for size in (event.peak, event.live)])


def _tensors(value: Any) -> list[Tensor]:
    """Collect all tensors in an argument or result of an operator."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class _Bytes(TorchDispatchMode):
    """Mode that counts the storages that operators create inside it, except those of ``known`` tensors, and lets
    operators mix meta tensors with the real tensors of a routing."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: dict[int, weakref.ref | None] = {tensor.untyped_storage()._cdata: None for tensor in known}

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


def record_step(model: PreTrainedModel, forward: Callable[[], Tensor], *, backward: bool = True) -> list[Event]:
    """Record the events of one micro-batch of a model on the meta device, in order.

    ``forward`` creates the model's inputs, runs the model, and returns the tensor to differentiate. Gradients of
    Parameters are dropped as soon as they are complete, since the ZeRO stage determines how long they are kept.
    """
    events: list[Event] = []
    counter = _Bytes([*model.parameters(), *model.buffers()])

    def note(kind: str, name: str) -> None:
        events.append(Event(kind, name, counter.live, counter.peak))
        counter.peak = counter.live

    # Hooks first: representatives renumbers the layers.
    with _hooks(model, note), representatives(model) as runs, torch.set_grad_enabled(backward), counter:
        result = forward()
        if backward:
            note("loss", "")
            result.backward()
        del result
    note("end", "")
    for run in runs:
        events = list(_repeat(events, run))
    return events


def layer_lists(model: PreTrainedModel) -> dict[str, nn.ModuleList]:
    """Find the lists of decoder layers, by name. They have as many layers as the configuration says, and transformers
    can checkpoint each of them."""
    layers = model.config.get_text_config().num_hidden_layers
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == layers
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    }


@contextmanager
def representatives(model: PreTrainedModel) -> Iterator[list[list[str]]]:
    """Reduce each run of consecutive equal decoder layers to its first ``REPRESENTATIVES`` layers inside the block; a
    model with several lists of decoder layers stays whole. Yields for each reduced run the names of all its layers but
    the first one: the second layer, which is kept, stands for all of them."""
    runs: list[list[str]] = []
    config = model.config.get_text_config()
    layers, lists = config.num_hidden_layers, layer_lists(model)
    # Models loop over num_hidden_layers of their single list; with several lists, all layers are run.
    for name, module in lists.items() if len(lists) == 1 else ():
        kept: list[nn.Module] = []
        for _, group in groupby(range(layers), lambda index: _signature(module[index])):  # noqa: B023 (used at once)
            first, *others = group
            run = [f"{name}.{index}" for index in others]
            if len(others) >= REPRESENTATIVES:
                runs.append(run)
                others = others[: REPRESENTATIVES - 1]
            kept += [module[index] for index in (first, *others)]
        model.set_submodule(name, nn.ModuleList(kept))
        config.num_hidden_layers = len(kept)
    try:
        yield runs
    finally:
        for name, module in lists.items():
            model.set_submodule(name, module)
        config.num_hidden_layers = layers


def _signature(layer: nn.Module) -> tuple:
    """Return a value that is equal for layers that need equally much memory in a step."""
    tensors = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in layer.named_parameters()]
    switches = [
        (name, type(module), getattr(module, "weight_fake_quant", None), getattr(module, "input_fake_quant", None))
        for name, module in layer.named_modules()
    ]
    return tuple(tensors), tuple(switches)


@contextmanager
def _hooks(model: PreTrainedModel, note: Callable[[str, str], None]) -> Iterator[None]:
    """Make modules and Parameters record their events inside the block."""
    layers = {layer for module in layer_lists(model).values() for layer in module}

    def ends(name: str, _: nn.Module, inputs: tuple, output: Any) -> None:
        note("forward_end", name)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: note("backward", name))

    def drop(name: str, parameter: Tensor) -> None:
        parameter.grad = None
        note("gradient", name)

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: note("forward", name)))
        if module in layers:
            handles.append(module.register_forward_hook(partial(ends, name)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(partial(drop, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _repeat(events: list[Event], run: list[str]) -> Iterator[Event]:
    """Repeat the events of the layer ``run[0]`` for each layer in ``run``."""
    segments = _segments(events, run[0])
    extra = 0  # bytes of layers that were not run
    position = 0
    for start, stop in segments:
        for event in events[position:start]:
            yield replace(event, live=event.live + extra, peak=event.peak + extra)
        grows = events[stop].live - events[start].live  # up to the event that follows: the last tensors are freed there
        forward = not any(event.kind == "backward" for event in events[start:stop])
        names = run if forward else run[::-1]
        before = events[start].peak  # the peak between the layer before and this one
        for name in names:
            for event in events[start:stop]:
                own = f"{event.name}.".startswith(f"{run[0]}.")
                renamed = name + event.name.removeprefix(run[0]) if own else event.name
                peak = before if event is events[start] else event.peak
                yield replace(event, name=renamed, live=event.live + extra, peak=peak + extra)
            extra += grows
            before = events[stop].peak - grows
        extra -= grows  # the representative's own share is in the events
        position = stop
    for event in events[position:]:
        yield replace(event, live=event.live + extra, peak=event.peak + extra)


def _segments(events: list[Event], layer: str) -> list[tuple[int, int]]:
    """Find the ranges of events of the layer's forward and of its backward: the first index, and one past the last."""

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
