"""What a layer's input looks like over many batches: its largest magnitude, how much of it a static scale clips, and
where that is wanted a histogram of its magnitudes.

The statistics stay on the device and are never read here, so that watching costs no host synchronisation (but for a
histogram on CUDA, whose counting waits for the device). The reader decides when to look, and reduces over ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quant import kernels
from quant.reference import inside_range
from quant.spec import TensorSpec

# A magnitude's bin is its bf16 number without the two lowest bits: 32 bins per power of two, over all powers of two, so
# that ranks and batches need not agree on a range before they have seen anything.
_DROPPED = 2
BINS = 2**15 >> _DROPPED
# The middle of each bin.
MAGNITUDES = ((torch.arange(BINS, dtype=torch.int32) << _DROPPED | 1 << _DROPPED - 1) << 16).view(torch.float32)
MAGNITUDES[0] = 0


class _Recomputing:
    """A plain flag and not a context variable: on CUDA autograd recomputes in a thread of its own."""

    now = False


@contextmanager
def recomputing() -> Iterator[None]:
    """Put this around a backward: the forwards that activation checkpointing repeats in it are not counted again."""
    _Recomputing.now = True
    try:
        yield
    finally:
        _Recomputing.now = False


class Observer:
    """Statistics of one input; a plain object, shared by the layers that share its scale.

    Such layers read the same tensor (q, k and v) or different tokens (the experts of a layer). A tensor that is counted
    by three layers changes neither a maximum nor a ratio.

    Attributes:
        spec: how the input is quantised.
        histogram: int64 ``[BINS]``, how many magnitudes fell into each bin (:data:`MAGNITUDES`); None if not kept.
        absmax: largest magnitude seen, fp32 scalar; 0 before the first token, NaN once a NaN was seen.
        clipped: elements outside the range so far, int64 scalar.
        total: elements that ``clipped`` was counted over.
    """

    def __init__(self, spec: TensorSpec, *, histogram: bool = False) -> None:
        """``histogram``: whether to keep one, which costs a pass over the input."""
        self.spec = spec
        self.histogram: Tensor | None = torch.zeros(0) if histogram else None
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        self.absmax = torch.zeros((), dtype=torch.float32)
        self.clipped = torch.zeros((), dtype=torch.int64)
        self.total = 0
        if self.histogram is not None:
            self.histogram = torch.zeros(BINS, dtype=torch.int64)

    @torch.no_grad()
    def update(self, x: Tensor, scale: Tensor | None) -> None:
        """Add the elements of ``x``, any shape; with a scale, count those outside its range too.

        Nothing happens in a block of :func:`recomputing`.
        """
        if _Recomputing.now or x.numel() == 0:  # an expert that no token chose
            return
        self.absmax = torch.maximum(self.absmax.to(x.device), kernels.amax(x)[0])
        if self.histogram is not None:
            bits = x.detach().to(torch.bfloat16).abs().view(torch.int16).flatten()
            self.histogram = self.histogram.to(x.device) + torch.bincount(bits.int() >> _DROPPED, minlength=BINS)
        if scale is not None:
            self.clipped = self.clipped.to(x.device) + (~inside_range(x, scale, self.spec)).sum()
            self.total += x.numel()

    def clipped_fraction(self) -> float:
        """Share of elements outside the range, 0 where nothing was counted. Reads the device."""
        return self.clipped.item() / self.total if self.total else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """What was seen so far, for a checkpoint; :meth:`load_state_dict` takes it back."""
        state = {"absmax": self.absmax.cpu(), "clipped": self.clipped.cpu(), "total": torch.tensor(self.total)}
        return state if self.histogram is None else state | {"histogram": self.histogram.cpu()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.absmax, self.clipped, self.total = state["absmax"], state["clipped"], int(state["total"])
        if self.histogram is not None:
            self.histogram = state["histogram"]
