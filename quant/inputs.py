"""The quantised form of a layer's input, made once for all layers that read the same tensor.

q, k and v read one tensor and share its scale, as do gate and up; quantising it three times would waste two passes over
it and keep three copies of the codes for backward. The modules stay separate, because ZeRO-3 hooks each of them, so the
first one that sees a tensor leaves its quantised form for the others (:class:`SharedInput`). In backward each of them
multiplies its gradient by what the forward multiplied, which the first one restores for all (:class:`Restored`).

Under ZeRO-3 each module gets an alias of the tensor, not the tensor itself: two inputs are the same if they show the
same memory in the same version. Under ``torch.compile`` nothing is handed over: the compiler sees that three identical
operators are one.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quant import kernels
from quant.scale import Quantizer, Scale
from quant.spec import TensorSpec


class QuantizedInput(NamedTuple):
    """An input ready for the GEMM, and what backward keeps of it.

    Attributes:
        values: the fake-quantised input; None where the codes are multiplied, or the input is used as it is.
        codes: its codes; None where neither the GEMM nor backward wants them. Of a dynamic input packed.
        mask: packed, which elements are inside the range; None where backward does not want it.
        scales: of the codes of a dynamic input, as :func:`quant.kernels.keep_tokens` has them; else None.
    """

    values: Tensor | None = None
    codes: Tensor | None = None
    mask: Tensor | None = None
    scales: Tensor | None = None


class Wanted(NamedTuple):
    """What is wanted of a quantised input.

    Attributes:
        codes_for_gemm: the GEMM multiplies the codes, not the fake-quantised values.
        codes: backward wants the codes.
        mask: backward wants the mask.
    """

    codes_for_gemm: bool
    codes: bool
    mask: bool


def quantize_input(
    x: Tensor, scale: Scale | None, spec: TensorSpec, model_dtype: torch.dtype, wanted: Wanted
) -> QuantizedInput:
    """Quantise ``x`` for the GEMM, and keep of it what backward wants.

    A dynamic input has no scale but a global one.
    """
    if spec.dynamic:
        return _quantize_dynamic(x, None if scale is None else scale.s0, spec, wanted)
    assert scale is not None
    quantizer = Quantizer(scale, spec, model_dtype)
    if not any(wanted):
        return QuantizedInput(kernels.fake_quantize(x, quantizer))
    values = None
    if wanted.codes_for_gemm:
        codes, mask = kernels.quantize(x, quantizer, mask=wanted.mask)
    else:
        codes, mask, values = kernels.quantize_with_values(x, quantizer, mask=wanted.mask)
    keeps_codes = wanted.codes_for_gemm or wanted.codes
    return QuantizedInput(values, codes if keeps_codes else None, mask if wanted.mask else None)


class Restored:
    """The input of some layers as their forward multiplied it, made once in backward from what was kept of it.

    The autograd nodes of the layers hold one such object for each input, from forward on, but until the first of their
    backwards it is empty. It is emptied by the last of them; when another one is filled, of which there is one at a
    time; and when backward ends, which a backward of only some of the layers brings about. After a backward that raised
    it goes with the nodes. Nobody depends on what it holds: what is not there, or was made from other memory (where
    something moves what is kept), is made anew, with the same bits.

    Attributes:
        layers: how many layers keep the input for backward.
    """

    _filled: ClassVar["weakref.ref[Restored] | None"] = None

    def __init__(self) -> None:
        self.layers = 0
        self._taken = 0
        self._held: tuple[Tensor, Tensor] | None = None

    def has(self, kept: Tensor) -> bool:
        """Whether :meth:`get` would make nothing."""
        return self._held is not None and _same_memory(self._held[0], kept)

    def get(self, kept: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` makes of ``kept``; nobody may write to it. To be called in backward."""
        held = self._held
        if held is None or not _same_memory(held[0], kept):
            other = None if Restored._filled is None else Restored._filled()
            if other is not None:
                other.drop()
            held = (kept.detach(), make())
            self._held, self._taken = held, 0
            Restored._filled = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(self.drop)
        self._taken += 1
        if self._taken >= self.layers:
            self.drop()
        return held[1]

    def drop(self) -> None:
        """Hold nothing."""
        self._held, self._taken = None, 0


def _quantize_dynamic(x: Tensor, above: Tensor | None, spec: TensorSpec, wanted: Wanted) -> QuantizedInput:
    """The same of a dynamic input, below the global scale ``above``. Integers clip at one end of every token, and have
    zero points: of them nothing is kept."""
    if not any(wanted) or spec.dtype == "int" or x.numel() == 0:
        return QuantizedInput(kernels.fake_quantize_tokens(x, spec, above))
    kept = QuantizedInput(*kernels.keep_tokens(x, spec, above, mask=wanted.mask))
    return kept if wanted.codes else kept._replace(codes=None)


@dataclass
class _Entry:
    """What one layer left for the next. Holding ``x`` keeps its address from being given to another tensor."""

    x: Tensor
    version: int
    wanted: Wanted
    value: QuantizedInput
    taken: int = 0
    restored: Restored = field(default_factory=Restored)


class SharedInput:
    """Hands the quantised input from the first of the layers that read it to the others; all of them hold this object.

    The entry is dropped when the last layer has taken it, and replaced when another tensor comes: between two forwards
    nothing is held.
    """

    def __init__(self, consumers: int) -> None:
        """``consumers`` is how many layers read each tensor."""
        self.consumers = consumers
        self._entry: _Entry | None = None

    def get(
        self, x: Tensor, wanted: Wanted, make: Callable[[], QuantizedInput]
    ) -> tuple[QuantizedInput, Restored | None]:
        """The quantised form of ``x`` with what is ``wanted`` of it, from the layer before or made now, and where its
        layers find it in backward."""
        if torch.compiler.is_compiling() or x.is_inference():
            return make(), None
        entry = self._entry
        if entry is None or not (_same_memory(entry.x, x) and x._version == entry.version):
            entry = self._entry = _Entry(x.detach(), x._version, wanted, make())
        entry.taken += 1
        if entry.taken >= self.consumers:
            self.drop()
        return (entry.value, entry.restored) if entry.wanted == wanted else (make(), None)

    def drop(self) -> None:
        """Forget the entry: all layers have taken it, or the scale changed after an unfinished forward."""
        self._entry = None


def _same_memory(seen: Tensor, x: Tensor) -> bool:
    """Whether two tensors show the same elements, and know of the same writes to them."""
    return (
        seen.data_ptr() == x.data_ptr()
        and seen.shape == x.shape
        and seen.stride() == x.stride()
        and seen.dtype == x.dtype
        and x._version == seen._version
    )


def mask_(ctx: Any, saved: Any, grad: Tensor) -> None:
    """Mask an input's gradient as :func:`used_input` would, of a :class:`quant.function.Saved` and its context."""
    if ctx.keeps_codes:
        kernels.masked_(grad, saved.mask)
    else:
        kernels.fake_quantize_tokens_and_mask_(grad, saved.x, ctx.plan.input, saved.input_s0, values=False)


def used_input(ctx: Any, saved: Any, unmasked: Tensor | None = None, *, after: Tensor) -> Tensor:
    """The input as the forward's GEMM saw it, from what was kept of it. The input's gradient, if given, is masked in
    place."""
    spec: TensorSpec | None = ctx.plan.input
    restored: Restored | None = ctx.plan.restored
    make: Callable[[], Tensor]
    if spec is None:
        return saved.x
    if unmasked is not None and restored is not None and restored.has(saved.x):
        mask_(ctx, saved, unmasked)
    if saved.scales is not None:
        above, dtype = saved.input_s0, saved.weight.dtype
        make = partial(kernels.restore_tokens, saved.x, saved.scales, spec, dtype, above, after=after)
    elif spec.dynamic:
        make = partial(_dynamic_values, saved, spec, unmasked, after)
    elif unmasked is not None:
        make = partial(kernels.dequantize_and_mask_, unmasked, saved.mask, saved.x, saved.input_quantizer(spec))
    else:
        restore = kernels.dequantize if ctx.keeps_codes else kernels.fake_quantize
        make = partial(restore, saved.x, saved.input_quantizer(spec), after=after)
    return make() if restored is None else restored.get(saved.x, make)


def _dynamic_values(saved: Any, spec: TensorSpec, unmasked: Tensor | None, after: Tensor) -> Tensor:
    """A dynamic input as it was multiplied; ``unmasked`` is masked in the same launch."""
    x, above = saved.x, saved.input_s0
    if unmasked is None:
        return kernels.fake_quantize_tokens(x, spec, above, after=after)
    values = kernels.fake_quantize_tokens_and_mask_(unmasked, x, spec, above, values=True)
    assert values is not None
    return values
