"""What one optimizer step costs: the bytes that a ZeRO stage adds at each moment, and the collectives that it makes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.memory.meta_step import Event


@dataclass
class Traffic:
    """The collectives of one step on one rank: calls and bytes by kind.

    Bytes are those of the whole tensor: the result of an all-gather, the operand of a reduction.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, size: int) -> None:
        """Count one call of ``size`` bytes."""
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + size

    def add(self, other: "Traffic", times: int) -> None:
        """Add ``times`` times what ``other`` counted."""
        for own, its in ((self.calls, other.calls), (self.bytes, other.bytes)):
            for kind, value in its.items():
                own[kind] = own.get(kind, 0) + times * value

    def clear(self) -> None:
        """Forget what was counted."""
        self.calls.clear()
        self.bytes.clear()


@dataclass(frozen=True)
class Moment:
    """The moment of a phase at which it holds most: its bytes in all, and by part."""

    total: int
    parts: dict[str, int]


@dataclass(frozen=True)
class Additions:
    """The bytes that a stage adds to those that the model itself holds during a micro-batch.

    Each array has two places per event: the first for the time before the event, in which its peak lies, the second for
    the moment of the event itself.

    Attributes:
        held: parameters, gradients, optimizer states and buckets.
        gathered: parameters that are whole for a time.
        reduction: copies that are made while gradients are reduced.
        backward: whether the moment belongs to backward (not bytes).
    """

    held: np.ndarray
    gathered: np.ndarray
    reduction: np.ndarray
    backward: np.ndarray

    def worst(self, events: Sequence[Event], *, backward: bool) -> Moment:
        """The worst moment of the forward or of the backward, if the model itself holds the bytes of these events."""
        activations = own_bytes(events)
        total = np.where(self.backward == backward, self.held + self.gathered + self.reduction + activations, -1)
        index = int(total.argmax())
        parts = {"held": self.held, "activations": activations, "gathered": self.gathered, "reduction": self.reduction}
        return Moment(int(total[index]), {name: int(values[index]) for name, values in parts.items()})

    def most(self, own: np.ndarray) -> int:
        """Bytes at the worst moment of all, if the model itself holds ``own`` bytes (see :func:`own_bytes`)."""
        return int((self.held + self.gathered + self.reduction + own).max())


def own_bytes(events: Sequence[Event]) -> np.ndarray:
    """The bytes that the model itself holds, in two places per event as in :class:`Additions`."""
    return np.array([size for event in events for size in (event.peak, event.live)])
