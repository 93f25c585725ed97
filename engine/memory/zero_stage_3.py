"""What ZeRO stage 3 adds to the bytes of a step, and which collectives it makes.

The rules are DeepSpeed 0.19's; what is gathered when is decided in :mod:`engine.memory.zero_gather`.
"""

import math
from collections.abc import Sequence
from typing import Any

from engine.memory.meta_step import Event
from engine.memory.zero_cost import Moment
from engine.memory.zero_gather import Gatherer
from engine.memory.zero_parameters import ShardedParameter
from engine.memory.zero_stages import FP64, STEP_COPIES, Replay
from engine.memory.zero_states import FP32

TEACHER = "teacher"  # the kind of the event that stands for the teacher's whole forward


class Stage3(Replay):
    """Each rank holds a share of the parameters, too.

    They are gathered for the time of a call; gradients are reduced to their shares as soon as their bucket is full.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.waiting: list[ShardedParameter] = []  # parameters whose gradients are in the bucket
        self.filled = 0  # elements of the bucket that are in use
        self.late = 0  # bytes of gradients that are kept until their leaf's backward is done, or exceed the bucket
        self.in_leaf = {
            parameter.name: name for name, module in self.modules.items() if module.leaf for parameter in module.below
        }
        self.of_leaf: dict[str, list[ShardedParameter]] = {}  # by leaf, in the order of the optimizer
        for parameter in self.inventory.trained:
            if parameter.name in self.in_leaf:
                self.of_leaf.setdefault(self.in_leaf[parameter.name], []).append(parameter)
        self.ready: dict[str, set[ShardedParameter]] = {}  # by leaf, parameters whose gradients are made
        gatherer = self.inventory.gatherer or Gatherer
        self.gatherer: Gatherer = gatherer(self.modules, self.settings.zero, self.settings.ranks, self._gathers)
        # DeepSpeed decides in the first micro-batch of all what each call may let go; that one is not counted.
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
        """As the base class has it, without the parameters that persist: they count as held."""
        most = self.gatherer.forget_most()
        return self.gatherer.whole - self.persistent, most - self.persistent

    def begin(self) -> None:
        self.gatherer.begin(self.events)

    def event(self, event: Event) -> None:
        if event.kind == TEACHER and self.own_teacher:
            self.gatherer.switch(quantizes=False)
            for one in self.own_teacher:
                self.gatherer.event(one)
            self.gatherer.switch(quantizes=True)
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
        # reduce_scatter_coalesced makes a flat copy, unless there is one tensor that is shared without padding.
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
        norm = FP64 * max(max(piece) for piece in pieces)  # the norm is taken of one gradient at a time, in fp64
        if ranks > 1 and self.settings.size != FP32 and not self.settings.bf16:
            self.traffic.count("all_reduce", 1)  # a flag of fp16: whether a gradient overflowed
        for _ in pieces if ranks > 1 else ():
            self.traffic.count("all_reduce", FP32 if self.settings.offloads_optimizer else FP64)
        self.gatherer.step()
        if self.settings.offloads_optimizer:
            self.held.host[STEP_COPIES] = self._adam(largest, fused)
            return self._step(norm)
        return self._step(max(norm, FP32 * largest + self._adam(largest, fused)))


def _sub_groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Divide a parameter group, given as the sizes of its shares, into the pieces that stage 3 updates one by one.

    A piece is complete as soon as it has ``limit`` elements (DeepSpeed's ``sub_group_size``).
    """
    if limit >= sum(sizes):
        return [list(sizes)]
    pieces: list[list[int]] = [[]]
    for size in sizes:
        if pieces[-1] and sum(pieces[-1]) >= limit:
            pieces.append([])
        pieces[-1].append(size)
    return pieces
