"""What ZeRO stages 0 to 2 add to the bytes of a step, and which collectives they make; stage 3 is in a file of its own.

Each replays the events of a micro-batch. The rules are DeepSpeed 0.19's; comments name the code that they are from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.memory.meta_step import Event
from engine.memory.zero_cost import Additions, Moment, Traffic
from engine.memory.zero_parameters import Inventory, ModuleParameters, flat_elements
from engine.memory.zero_states import FP32, Held, Settings

FP64 = 8
STEP_COPIES = "copies in the step"  # the item of host memory that an offloaded optimizer takes for its step
# DeepSpeed's engine reduces gradients in buffers of so many elements where its optimizer does not reduce them.
FALLBACK_BUCKET = 500_000_000


class Replay:
    """What the stages have in common: :meth:`run` goes through the micro-batches and asks the stage what it adds.

    The arguments are those of :func:`engine.memory.zero_step.cost_of_step`.
    """

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
        self.made = 0  # bytes of the gradients that exist now
        self.moment = 0  # bytes that live only as long as the event
        self.traffic = Traffic()
        # These bytes are there all the time.
        self.constant = sum(size for item, size in held.device.items() if item not in ("gradients", "buckets"))

    def gradients(self) -> float:
        """Bytes of gradients and of their buckets at this moment."""
        return self.made

    def gathered(self) -> tuple[int, int]:
        """Bytes of parameters that are gathered now, and the most since the last call."""
        return 0, 0

    def event(self, event: Event) -> None:
        """Do what the stage does at an event."""

    def begin(self) -> None:
        """Do what the stage does when a micro-batch begins."""

    def end(self, last: bool) -> None:
        """Do what the stage does when a backward is over; ``last``: that of the step's last micro-batch."""

    def optimizer(self, fused: bool) -> Moment:
        """The worst moment of the optimizer's step; ``fused``: it makes no copies of what it updates."""
        raise NotImplementedError

    def run(self) -> Additions:
        """Replay all micro-batches of a step. Those between the second and the last are like the second."""
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
        if others is not None:  # keep each moment at its worst
            before = (others.held, others.gathered, others.reduction)
            columns[:3] = [np.maximum(own, its) for own, its in zip(columns[:3], before, strict=True)]
        return Additions(*columns)

    def _step(self, copies: int) -> Moment:
        held = int(self.constant + self.gradients())
        return Moment(held + copies, {"held": held, "copies": copies})

    def _largest(self) -> int:
        return max(parameter.numel for parameter in self.inventory.trained)

    def _adam(self, largest: int, fused: bool) -> int:
        """Bytes of the root of the second moment and of the quotient that torch's AdamW makes unless it is fused."""
        return 0 if fused else 2 * FP32 * largest

    def _buffers(self, sizes: Sequence[int], limit: int) -> list[list[int]]:
        """Tensors of ``sizes`` elements in buffers that are closed as soon as they hold more than ``limit``."""
        buffers: list[list[int]] = [[]]
        for size in sizes:
            buffers[-1].append(size)
            if sum(buffers[-1]) > limit:
                buffers.append([])
        return [buffer for buffer in buffers if buffer]


class Stage0(Replay):
    """Every rank holds everything. Gradients are averaged after the last backward."""

    def event(self, event: Event) -> None:
        if event.kind == "gradient":
            full = self.held.device["gradients"]
            self.made = min(full, self.made + self.by_name[event.name].numel * self.settings.size)

    def end(self, last: bool) -> None:
        if last and self.settings.ranks > 1:
            # engine.buffered_allreduce_fallback copies a buffer's tensors into a flat one, but not where there is only
            # one; and it makes a copy in the dtype of communication where that is another.
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


class Stage1(Replay):
    """Each rank holds a share of the optimizer's states, and all gradients."""

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
            for size in (1, *(FP32 for _ in shares)):  # a flag, whether a gradient is not finite; a norm for each group
                self.traffic.count("all_reduce", size)
        if self.settings.offloads_optimizer:
            self.held.host[STEP_COPIES] = self._adam(max(shares), fused)
            return self._step(0)
        copy = 0 if self.settings.bf16_optimizer or self._fp32_share() else max(shares) * FP32
        return self._step(copy + max(self._adam(max(shares), fused), FP64 * self._largest()))

    def _fp32_share(self) -> bool:
        """Whether the step updates from the buffer that gradients were added up in."""
        return self.settings.stage == 2 and self.settings.size != FP32 and self.settings.accumulated == FP32


class Stage2(Stage1):
    """Each rank keeps its share of the gradients, too. They are reduced through a bucket in every backward."""

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
        # The bucket still exists while what is left in it is reduced.
        self.moment += self.bucket
        self.bucket = 0
