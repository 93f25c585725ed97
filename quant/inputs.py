"""The quantised form of a layer's input, made once for all layers that read the same tensor.

q, k and v read one tensor and share its scale, as do gate and up; quantising it three times would waste two passes over
it and keep three copies of the codes for backward. The modules stay separate, because ZeRO-3 hooks each of them, so the
first one that sees a tensor leaves its quantised form for the others (:class:`SharedInput`).

Under ZeRO-3 each module gets an alias of the tensor, not the tensor itself: two inputs are the same if they show the
same memory in the same version. Under ``torch.compile`` nothing is handed over: the compiler sees that three identical
operators are one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quant import kernels
from quant.spec import TensorSpec


class QuantizedInput(NamedTuple):
    """An input ready for the GEMM, and what backward keeps of it.

    Attributes:
        values: the fake-quantised input; None where the codes are multiplied, or the input is used as it is.
        codes: its codes; None where neither the GEMM nor backward wants them.
        mask: packed, which elements are inside the range; None where backward does not want it.
    """

    values: Tensor | None = None
    codes: Tensor | None = None
    mask: Tensor | None = None


def quantize_input(
    x: Tensor,
    s0: Tensor | None,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    *,
    fp8_gemm: bool,
    keep_codes: bool,
    keep_mask: bool,
) -> QuantizedInput:
    """Quantise ``x`` for a GEMM of codes or of fake-quantised values; keep codes and mask for backward as told.

    A dynamic input has no s0, and nothing of it is kept.
    """
    if spec.dynamic:
        return QuantizedInput(kernels.fake_quantize_tokens(x, spec))
    assert s0 is not None
    if not (fp8_gemm or keep_codes or keep_mask):
        return QuantizedInput(kernels.fake_quantize(x, s0, theta, spec, model_dtype))
    scale = (s0, theta, spec, model_dtype)
    values = None
    if fp8_gemm:
        codes, mask = kernels.quantize(x, *scale, mask=keep_mask)
    else:
        codes, mask, values = kernels.quantize_with_values(x, *scale, mask=keep_mask)
    return QuantizedInput(values, codes if fp8_gemm or keep_codes else None, mask if keep_mask else None)


@dataclass
class _Entry:
    """What one layer left for the next. Holding ``x`` keeps its address from being given to another tensor."""

    x: Tensor
    version: int
    kind: tuple[bool, ...]
    value: QuantizedInput
    taken: int = 0


class SharedInput:
    """Hands the quantised input of the first of some layers to the others; a plain object that they share.

    The entry is dropped when the last layer has taken it, and replaced when another tensor comes: between two forwards
    nothing is held.
    """

    def __init__(self, consumers: int) -> None:
        """``consumers`` is how many layers read each tensor."""
        self.consumers = consumers
        self._entry: _Entry | None = None

    def get(self, x: Tensor, kind: tuple[bool, ...], make: Callable[[], QuantizedInput]) -> QuantizedInput:
        """The quantised form of ``x`` of this ``kind``, from the layer before or made now."""
        if torch.compiler.is_compiling() or x.is_inference():
            return make()
        entry = self._entry
        if entry is None or not _same(entry, x):
            entry = self._entry = _Entry(x.detach(), x._version, kind, make())
        entry.taken += 1
        if entry.taken >= self.consumers:
            self.drop()
        return entry.value if entry.kind == kind else make()

    def drop(self) -> None:
        """Hold nothing: all layers have taken it, or the scale changed after a forward that did not get to its end."""
        self._entry = None


def _same(entry: _Entry, x: Tensor) -> bool:
    """Whether ``x`` shows the memory that the entry was made from, and nothing was written to it since."""
    seen = entry.x
    return (
        seen.data_ptr() == x.data_ptr()
        and seen.shape == x.shape
        and seen.stride() == x.stride()
        and seen.dtype == x.dtype
        and x._version == seen._version == entry.version
    )
