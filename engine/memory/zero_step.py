"""One optimizer step under a ZeRO stage: the bytes that come and go during it, and its collectives.

The events of a micro-batch (:mod:`engine.memory.meta_step`) say what the model itself keeps at each moment. Here comes
on top of them what the stage adds: gradients as they are made, buckets and their reduction, parameters that are
gathered, the copies of the optimizer's step. The rules are DeepSpeed 0.19's, named where they are used.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from engine.memory.meta_step import Event
from engine.memory.zero_gather import Gatherer, ModuleParameters, ShardedParameter
from engine.memory.zero_states import FP32, Held, Inventory, Settings, flat_elements
from model.zero import leaves_of_stage_3

FP64 = 8
TEACHER = "teacher"  # the kind of the event that is the teacher's forward
STEP_COPIES = "copies in the step"  # in host memory, of an offloaded optimizer
# DeepSpeed's engine reduces gradients outside of an optimizer of its own in buffers of so many elements.
FALLBACK_BUCKET = 500_000_000


@dataclass
class Traffic:
    """Collectives of one step, on one rank: calls and bytes by kind.

    Bytes are those of the whole tensor: what an all-gather gives, what a reduction takes.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, size: int) -> None:
        """One call."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + size

    def add(self, other: "Traffic", times: int) -> None:
        """So many times what ``other`` counted."""
        for own, its in ((self.calls, other.calls), (self.bytes, other.bytes)):
            for kind, value in its.items():
                own[kind] = own.get(kind, 0) + times * value

    def clear(self) -> None:
        """Nothing was counted."""
        self.calls.clear()
        self.bytes.clear()


@dataclass(frozen=True)
class Moment:
    """The most that a phase of the step holds, in bytes: all of it, and what of it is what."""

    total: int
    parts: dict[str, int]


@dataclass(frozen=True)
class Additions:
    """What a stage adds to a micro-batch's own bytes, in arrays with two places per event: before it, where the event's
    peak lies, and at it."""

    held: np.ndarray
    gathered: np.ndarray
    reduction: np.ndarray
    backward: np.ndarray
    """Whether the moment belongs to backward."""

    def worst(self, events: Sequence[Event], *, backward: bool) -> Moment:
        """The worst moment of the forward or of the backward with these bytes of the model's own."""
        activations = own_bytes(events)
        total = np.where(self.backward == backward, self.held + self.gathered + self.reduction + activations, -1)
        index = int(total.argmax())
        parts = {"held": self.held, "activations": activations, "gathered": self.gathered, "reduction": self.reduction}
        return Moment(int(total[index]), {name: int(values[index]) for name, values in parts.items()})

    def most(self, own: np.ndarray) -> int:
        """Bytes at the worst moment of all, with ``own`` bytes of the model (see :func:`own_bytes`)."""
        return int((self.held + self.gathered + self.reduction + own).max())


def own_bytes(events: Sequence[Event]) -> np.ndarray:
    """Peak before and bytes at each event, as :class:`Additions` has them."""
    return np.array([size for event in events for size in (event.peak, event.live)])


@dataclass
class StepCost:
    """Of one optimizer step. ``gathered``: the most bytes of parameters that are gathered at a time."""

    additions: Additions
    step: Moment
    gathered: int
    traffic: Traffic

    def moments(self, events: Sequence[Event]) -> dict[str, Moment]:
        """The worst moments with these events, those that were replayed or others of the same model."""
        worst = self.additions.worst
        return {
            "forward": worst(events, backward=False),
            "backward": worst(events, backward=True),
            "step": self.step,
        }


def module_parameters(model: nn.Module, inventory: Inventory, ds_config: dict[str, Any]) -> dict[str, ModuleParameters]:
    """Parameters of every module that has ZeRO-3's hooks: all but those inside a leaf."""
    known = {parameter.name: parameter for parameter in inventory.parameters}
    by_id = {id(own): known[name] for name, own in model.named_parameters() if name in known}
    leaves = leaves_of_stage_3(model, ds_config)
    found: dict[str, ModuleParameters] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        direct = _ordered(by_id[id(own)] for own in module.parameters(recurse=False))
        below = _ordered(by_id[id(own)] for own in module.parameters())
        leaf = id(module) in leaves
        if leaf:
            inside |= {id(part) for part in module.modules() if part is not module}
        found[name] = ModuleParameters(below if leaf else direct, direct, below, leaf)
    return found


def _ordered(parameters) -> list[ShardedParameter]:
    return sorted(dict.fromkeys(parameters), key=lambda parameter: parameter.order)


def cost_of_step(
    settings: Settings,
    held: Held,
    inventory: Inventory,
    modules: Mapping[str, ModuleParameters],
    events: Sequence[Event],
    *,
    fused_optimizer: bool,
    own_teacher: Sequence[Event] = (),
) -> StepCost:
    """Replay a step.

    Args:
        settings: of the run.
        held: what is there anyway; of its gradients and buckets only what is there at a moment counts then.
        inventory: of the student.
        modules: of the student, as stage 3 sees them.
        events: of one of its micro-batches.
        fused_optimizer: whether the optimizer makes no copies of what it updates (torch's fused AdamW, on CUDA).
        own_teacher: of a forward of the student itself that comes before each of them, at their event ``TEACHER``.
    """
    stage = (_Stage0, _Stage1, _Stage2, _Stage3)[settings.stage]
    replay = stage(settings, held, inventory, modules, events, own_teacher)
    additions = replay.run()
    step = replay.optimizer(fused_optimizer)
    return StepCost(additions, step, int(additions.gathered.max()), replay.traffic)


class _Replay:
    """What stages have in common: :meth:`run` goes through the micro-batches and asks what the stage adds."""

    def __init__(
        self,
        settings: Settings,
        held: Held,
        inventory: Inventory,
        modules: Mapping[str, ModuleParameters],
        events: Sequence[Event],
        own_teacher: Sequence[Event],
    ) -> None:
        self.settings, self.held, self.inventory = settings, held, inventory
        self.modules, self.events, self.own_teacher = modules, events, own_teacher
        self.by_name = {parameter.name: parameter for parameter in inventory.trained}
        self.made = 0  # bytes of gradients that Parameters have now
        self.moment = 0  # bytes that live during the event only
        self.traffic = Traffic()
        # What is there all the time.
        self.constant = sum(size for item, size in held.device.items() if item not in ("gradients", "buckets"))

    def gradients(self) -> float:
        """Bytes of gradients and of their buckets now."""
        return self.made

    def gathered(self) -> tuple[int, int]:
        """Bytes of parameters gathered now, and the most since the last question."""
        return 0, 0

    def event(self, event: Event) -> None:
        """What the stage does at an event."""

    def begin(self) -> None:
        """A micro-batch begins."""

    def end(self, last: bool) -> None:
        """Its backward is over."""

    def optimizer(self, fused: bool) -> Moment:
        """The optimizer's step."""
        raise NotImplementedError

    def run(self) -> Additions:
        """All micro-batches of a step. Those between the second and the last are like the second."""
        count = self.settings.accumulation
        additions = None
        for index in dict.fromkeys((0, min(1, count - 1), count - 1)):
            calls, sizes = dict(self.traffic.calls), dict(self.traffic.bytes)
            additions = self._micro_batch(index == count - 1, additions)
            if index == 1 and count > 3:
                for now, before in ((self.traffic.calls, calls), (self.traffic.bytes, sizes)):
                    for kind in now:
                        now[kind] += (count - 3) * (now[kind] - before.get(kind, 0))
        assert additions is not None
        return additions

    def _micro_batch(self, last: bool, others: Additions | None) -> Additions:
        rows: list[tuple[float, float, float, bool]] = []
        backward = False
        self.begin()
        for event in self.events:
            backward = backward or event.kind == "backward"
            rows.append((self.constant + self.gradients(), self.gathered()[0], 0, backward))
            self.moment = 0
            if event.kind == "end":
                self.end(last)
            else:
                self.event(event)
            rows.append((self.constant + self.gradients(), self.gathered()[1], self.moment, backward))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        if others is not None:  # each moment at its worst
            before = (others.held, others.gathered, others.reduction)
            columns[:3] = [np.maximum(own, its) for own, its in zip(columns[:3], before, strict=True)]
        return Additions(*columns)

    def _step(self, copies: int) -> Moment:
        held = int(self.constant + self.gradients())
        return Moment(held + copies, {"held": held, "copies": copies})

    def _largest(self) -> int:
        return max(parameter.numel for parameter in self.inventory.trained)

    def _adam(self, largest: int, fused: bool) -> int:
        """torch's AdamW makes a root of the second moment and a quotient of it, unless it is fused."""
        return 0 if fused else 2 * FP32 * largest

    def _buffers(self, sizes: Sequence[int], limit: int) -> list[list[int]]:
        """Tensors of ``sizes`` elements in buffers that are closed as soon as they hold more than ``limit``."""
        buffers: list[list[int]] = [[]]
        for size in sizes:
            buffers[-1].append(size)
            if sum(buffers[-1]) > limit:
                buffers.append([])
        return [buffer for buffer in buffers if buffer]


class _Stage0(_Replay):
    """Every rank has everything; gradients are averaged after the last backward."""

    def event(self, event: Event) -> None:
        if event.kind == "gradient":
            full = self.held.device["gradients"]
            self.made = min(full, self.made + self.by_name[event.name].numel * self.settings.size)

    def end(self, last: bool) -> None:
        if last and self.settings.ranks > 1:
            # engine.buffered_allreduce_fallback: flat copies, of one tensor only where types differ
            for buffer in self._buffers([p.numel for p in self.inventory.parameters if p.trains], FALLBACK_BUCKET):
                size = sum(buffer)
                copies = size * self.settings.size if len(buffer) > 1 else 0
                if self.settings.communicated != self.settings.size:
                    copies += size * self.settings.communicated
                self.moment = max(self.moment, copies)
                self.traffic.count("all_reduce", size * self.settings.communicated)

    def optimizer(self, fused: bool) -> Moment:
        half = self.settings.size != FP32
        copy = sum(p.numel for p in self.inventory.trained) * FP32 if half else 0
        return self._step(copy + self._adam(self._largest(), fused))


class _Stage1(_Replay):
    """Optimizer states are shared out; each rank has all gradients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        groups = self.inventory.groups.values() if self.settings.bf16_optimizer else ()
        self.flat = FP32 * sum(flat_elements(group, self.settings.ranks) for group in groups)

    def gradients(self) -> float:
        return self.made + self.flat

    def event(self, event: Event) -> None:
        if event.kind != "gradient" or (self.settings.bf16_optimizer and self.settings.immediate):
            return
        kept = self.settings.size if self.settings.bf16_optimizer else self.settings.accumulated
        full = sum(parameter.numel for parameter in self.inventory.trained) * kept
        self.made = min(full, self.made + self.by_name[event.name].numel * kept)

    def end(self, last: bool) -> None:
        if self.settings.bf16_optimizer:
            self.moment = self._largest() * FP32  # a gradient in fp32, added to the buffer
        if not last or self.settings.ranks == 1:
            return
        if not self.settings.bf16_optimizer:
            self._reduce_buckets()
            return
        for buffer in self._buffers(
            [flat_elements(g, self.settings.ranks) for g in self.inventory.groups.values()], FALLBACK_BUCKET
        ):
            size = sum(buffer)
            copies = size * FP32 if len(buffer) > 1 else 0
            if self.settings.communicated != FP32:
                copies += size * self.settings.communicated
            self.moment = max(self.moment, copies)
            self.traffic.count("all_reduce", size * self.settings.communicated)

    def _reduce_buckets(self) -> None:
        limit = self.settings.zero.reduce_bucket_size
        filled = 0
        for parameter in self.inventory.trained:
            if filled and filled + parameter.numel > limit:
                self._reduce(filled)
                filled = 0
            filled += parameter.numel
        self._reduce(filled)

    def _reduce(self, elements: int) -> None:
        bucket = self.held.device["buckets"]
        self.moment = max(self.moment, bucket + elements * self.settings.communicated)
        self.traffic.count("all_reduce", elements * self.settings.communicated)

    def optimizer(self, fused: bool) -> Moment:
        ranks = self.settings.ranks
        shares = [flat_elements(group, ranks) // ranks for group in self.inventory.groups.values()]
        if ranks > 1:
            for share in shares:
                self.traffic.count("all_gather", share * ranks * self.settings.size)
        if not self.settings.bf16_optimizer and ranks > 1:
            for size in (1, *(FP32 for _ in shares)):  # whether a gradient is not finite, and a norm for each group
                self.traffic.count("all_reduce", size)
        if self.settings.offloads_optimizer:
            self.held.host[STEP_COPIES] = self._adam(max(shares), fused)
            return self._step(0)
        copy = 0 if self.settings.bf16_optimizer or self._fp32_share() else max(shares) * FP32
        return self._step(copy + max(self._adam(max(shares), fused), FP64 * self._largest()))

    def _fp32_share(self) -> bool:
        """Whether the step updates from the buffer that gradients were added up in."""
        return self.settings.stage == 2 and self.settings.size != FP32 and self.settings.accumulated == FP32


class _Stage2(_Stage1):
    """Each rank keeps its share of the gradients, which leave through a bucket in every backward."""

    def begin(self) -> None:
        self.filled = self.pieces = self.pending = 0
        self.bucket = 0

    def gradients(self) -> float:
        return self.made + self.bucket + self.pending

    def event(self, event: Event) -> None:
        if event.kind != "gradient":
            return
        numel = self.by_name[event.name].numel
        self.bucket = self.held.device["buckets"]
        if self.filled and self.filled + numel > self.settings.zero.reduce_bucket_size:
            self._flush()
        # A gradient that is larger than the bucket stays where it is until it is reduced.
        large = numel > self.settings.zero.reduce_bucket_size or not self.settings.zero.contiguous_gradients
        self.pending += numel * self.settings.size if large else 0
        self.filled += numel
        self.pieces += 1

    def _flush(self) -> None:
        self.made = self.held.device["gradients"]
        copies = self.filled * self.settings.communicated if self.pieces > 1 else 0
        self.moment = max(self.moment, copies)
        if self.settings.ranks > 1:
            self.traffic.count("all_reduce", self.filled * self.settings.communicated)
        self.filled = self.pieces = self.pending = 0

    def end(self, last: bool) -> None:
        self._flush()
        # The bucket is there while the rest of it is reduced.
        self.moment += self.bucket
        self.bucket = 0


class _Stage3(_Replay):
    """Parameters are gathered for the time of a call, gradients are shared out as soon as their bucket is full."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waiting: list[ShardedParameter] = []
        self.filled = 0
        self.late = 0  # bytes of gradients that a leaf keeps until its backward is done, or too large for the bucket
        self.in_leaf = {
            parameter.name: name for name, module in self.modules.items() if module.leaf for parameter in module.below
        }
        self.of_leaf: dict[str, list[ShardedParameter]] = {}  # in the optimizer's order
        for parameter in self.inventory.trained:
            if parameter.name in self.in_leaf:
                self.of_leaf.setdefault(self.in_leaf[parameter.name], []).append(parameter)
        self.ready: dict[str, set[ShardedParameter]] = {}
        self.gatherer = Gatherer(self.modules, self.settings.zero, self.settings.ranks, self._gathers)
        # A micro-batch before the step decides what may be let go where.
        everything = self.inventory.parameters if self.settings.ranks > 1 else []
        self.persistent = sum(p.numel * p.size for p in everything if p.persists(self.settings.zero))
        self.counting = False
        self._micro_batch(True, None)
        self.gatherer.step()
        self.counting = True

    def _gathers(self, kind: str, size: int) -> None:
        if self.counting:
            self.traffic.count(kind, size)

    def gradients(self) -> float:
        return self.held.device["gradients"] + self.held.device["buckets"] + self.late

    def gathered(self) -> tuple[int, int]:
        """Beyond what persists, which is held anyway."""
        most = self.gatherer.forget_most()
        return self.gatherer.whole - self.persistent, most - self.persistent

    def begin(self) -> None:
        self.gatherer.begin(self.events)

    def event(self, event: Event) -> None:
        if event.kind == TEACHER and self.own_teacher:
            self.gatherer.switch(quantises=False)
            for one in self.own_teacher:
                self.gatherer.event(one)
            self.gatherer.switch(quantises=True)
            self.gatherer.begin(self.events)
        elif event.kind == "gradient":
            parameter = self.by_name[event.name]
            if parameter.name in self.in_leaf:
                self.ready.setdefault(self.in_leaf[parameter.name], set()).add(parameter)
                self.late += parameter.numel * self.settings.size
            else:
                self._bucket(parameter)
        elif event.kind == "backward_end" and event.name in self.ready:
            self._leaf(event.name)
        self.gatherer.event(event)

    def _leaf(self, name: str) -> None:
        ready = self.ready.pop(name)
        for parameter in self.of_leaf[name]:
            if parameter in ready:
                self.late -= parameter.numel * self.settings.size
                self._bucket(parameter)

    def _bucket(self, parameter: ShardedParameter) -> None:
        limit = self.settings.zero.reduce_bucket_size
        if self.waiting and self.filled + parameter.numel > limit:
            self._reduce()
        if parameter.numel > limit or not self.settings.zero.contiguous_gradients:
            self.late += parameter.numel * self.settings.size
        self.waiting.append(parameter)
        self.filled += parameter.numel

    def _reduce(self) -> None:
        ranks, zero = self.settings.ranks, self.settings.zero
        if not self.waiting:
            return
        sizes = [math.ceil(parameter.numel / ranks) * ranks for parameter in self.waiting]
        # reduce_scatter_coalesced: a flat copy, unless it is one tensor that the ranks share evenly
        alone = len(sizes) == 1 and sizes[0] == self.waiting[0].numel
        copies = 0 if alone else sum(sizes) * self.settings.communicated
        if self.settings.communicated != self.settings.accumulated:
            copies += sum(sizes) // ranks * self.settings.accumulated
        self.moment = max(self.moment, copies)
        for parameter in self.waiting:
            if parameter.numel > zero.reduce_bucket_size or not zero.contiguous_gradients:
                self.late -= parameter.numel * self.settings.size
        if self.counting:
            kind = "reduce_scatter" if zero.reduce_scatter else "all_reduce"
            self.traffic.count(kind, sum(sizes) * self.settings.communicated)
        self.waiting, self.filled = [], 0

    def end(self, last: bool) -> None:
        for name in list(self.ready):
            self._leaf(name)
        self._reduce()
        self.gatherer.end()

    def optimizer(self, fused: bool) -> Moment:
        ranks, zero = self.settings.ranks, self.settings.zero
        pieces = [
            piece
            for group in self.inventory.groups.values()
            for piece in _sub_groups([math.ceil(p.numel / ranks) for p in group], zero.sub_group_size)
        ]
        largest = max(sum(piece) for piece in pieces)
        norm = FP64 * max(max(piece) for piece in pieces)  # of one gradient at a time
        if ranks > 1 and self.settings.size != FP32 and not self.settings.bf16:
            self.traffic.count("all_reduce", 1)  # fp16: whether a gradient overflowed
        for _ in pieces if ranks > 1 else ():
            self.traffic.count("all_reduce", FP32 if self.settings.offloads_optimizer else FP64)
        self.gatherer.step()
        if self.settings.offloads_optimizer:
            self.held.host[STEP_COPIES] = self._adam(largest, fused)
            return self._step(norm)
        return self._step(max(norm, FP32 * largest + self._adam(largest, fused)))


def _sub_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """A parameter group in the pieces that stage 3 updates one by one (``sub_group_size`` elements of a share)."""
    if limit >= sum(sizes):
        return [list(sizes)]
    pieces: list[list[int]] = [[]]
    for size in sizes:
        if pieces[-1] and sum(pieces[-1]) >= limit:
            pieces.append([])
        pieces[-1].append(size)
    return pieces
