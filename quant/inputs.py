"""The quantized form of a layer's input, made once for all layers that read the same tensor.

q, k and v read one tensor and share its scale, as do gate and up; quantizing it three times would waste two passes over
it and keep three copies of the codes for backward. The modules stay separate, because ZeRO-3 hooks each of them, so the
first one that sees a tensor leaves its quantized form for the others (:class:`SharedInput`). In backward each of them
multiplies its gradient by what the forward multiplied, which the first one restores for all (:class:`Restored`).

Under ZeRO-3 each module gets an alias of the tensor, not the tensor itself: two inputs are the same if they show the
same memory in the same version. Under ``torch.compile`` nothing is handed over: the compiler sees that three identical
operators are one.

An output that exists in quantized form alone, and the layers that it is handed to.

A norm whose readers all quantize what it gives them with one fixed scale need not write it: it gives them codes. What
it returns stands where its output would stand in the model, with shape, dtype, device and gradient, and without values
(:class:`QuantizedActivation`). The readers take the codes out of it (:class:`QuantizedActivationInput`). Whoever else
looks at its values, a router, a hook, a model whose forward is another one than was thought, ends with an error that
says so.

Whether an input is kept for backward anyway, because fused attention made it and keeps its own output.

A layer that keeps codes for its backward does so to free what they were made of. Of o_proj's input that frees nothing:
it is a view of what fused attention gave out, and attention's backward wants that output, beside queries, keys and
values. Codes would then be bytes on top. So such an input is kept itself, which takes none, and quantized again in
backward, which gives the bits that the codes stand for.

The graph says it: behind an input that shows attention's output as it lies there are nodes of views, and then
attention's node. Whatever computes (a gate, a cast, a copy in another layout, a rotation) has a node of its own, and
codes are kept. Eager attention is no such node: its last product keeps what it multiplied, not what it gave out.

A wrong answer would cost bytes, never bits. The input shares attention's version counter, so that a write to either
between forward and backward is an error there.
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
        values: the fake-quantized input; None where the codes are multiplied, or the input is used as it is.
        codes: its codes; None where neither the GEMM nor backward wants them. Of a dynamic input packed.
        mask: packed, which elements are inside the range; None where backward does not want it.
        scales: of the codes of a dynamic input, as :func:`quant.kernels.keep_tokens` has them; else None.
    """

    values: Tensor | None = None
    codes: Tensor | None = None
    mask: Tensor | None = None
    scales: Tensor | None = None


class Wanted(NamedTuple):
    """What is wanted of a quantized input.

    Attributes:
        codes_for_gemm: the GEMM multiplies the codes, not the fake-quantized values.
        codes: backward wants the codes.
        mask: backward wants the mask.
    """

    codes_for_gemm: bool
    codes: bool
    mask: bool


def quantize_input(
    x: Tensor, scale: Scale | None, spec: TensorSpec, model_dtype: torch.dtype, wanted: Wanted
) -> QuantizedInput:
    """Quantize ``x`` for the GEMM, and keep of it what backward wants.

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
    """Hands the quantized input from the first of the layers that read it to the others; all of them hold this object.

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
        """The quantized form of ``x`` with what is ``wanted`` of it, from the layer before or made now, and where its
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
    """Mask an input's gradient as :func:`used_input` would, of a :class:`quant.autograd.Saved` and its context."""
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


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class QuantizedActivation(Tensor):
    """A tensor of which readers get the quantized form, and nobody the values.

    It may be detached, which ZeRO-3's hooks do, and asked for its shape; every other operator is an error.

    Attributes:
        quantized: what the readers use. Its mask stays with whoever made it, who masks the gradient of them all.
        restored: where they find it in backward.
        source: whose output it is, for an error.
    """

    quantized: QuantizedInput
    restored: Restored
    source: str

    @staticmethod
    def __new__(cls, like: Tensor, quantized: QuantizedInput, restored: Restored, source: str) -> "QuantizedActivation":
        """In the shape and dtype of ``like``, contiguous."""
        made: QuantizedActivation = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.quantized, made.restored, made.source = quantized, restored, source
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedActivation(shape={tuple(self.shape)}, dtype={self.dtype}, by {self.source})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _ALIASES:
            one = args[0]
            return QuantizedActivation(one, one.quantized, one.restored, one.source)
        if func is torch.ops.aten.new_empty.default:
            return torch.empty(args[1], dtype=args[0].dtype, device=args[0].device)
        given = next(one for one in (*args, *(kwargs or {}).values()) if isinstance(one, QuantizedActivation))
        raise RuntimeError(
            f"{given.source} hands the layers behind it their quantized input and has no values, which {func} reads; "
            "set quant.fuse_norms: false"
        )


class QuantizedActivationInput(SharedInput):
    """What layers share that may be handed an input: its quantized form, or what :class:`SharedInput` makes of one that
    has values."""

    def get(
        self, x: Tensor, wanted: Wanted, make: Callable[[], QuantizedInput]
    ) -> tuple[QuantizedInput, Restored | None]:
        """As of the base class. The mask is None where the input was handed over.

        Raises:
            RuntimeError: what was handed over lacks what is wanted: a switch moved between norm and layer.
        """
        if not isinstance(x, QuantizedActivation):
            return super().get(x, wanted, make)
        if x.quantized.values is None and not wanted.codes_for_gemm:
            raise RuntimeError(
                f"{x.source} gave codes alone and a layer behind it simulates: fake quant was switched between them; "
                "switch it between steps"
            )
        return x.quantized, x.restored if self.consumers > 1 else None


# Nodes of operators whose output shows the memory, and counts the writes, of their one input. _unsafe_view is none of
# them: it counts writes of its own.
VIEWS = frozenset({"Alias", "Permute", "ReshapeAlias", "Slice", "Squeeze", "T", "Transpose", "Unsqueeze", "View"})
# Nodes whose backward asks for their output: torch's (tools/autograd/derivatives.yaml of 2.11 to 2.13, in which each of
# these formulas has `output`), and flash-attn's (flash_attn_interface.py, save_for_backward of out_padded).
ATTENTION = frozenset(
    {
        "ScaledDotProductFlashAttentionForCpu",
        "ScaledDotProductFlashAttention",
        "ScaledDotProductEfficientAttention",
        "ScaledDotProductCudnnAttention",
        "ScaledDotProductFusedAttentionOverrideable",
        "FlashAttentionForward",
        "EfficientAttentionForward",
        "CudnnAttentionForward",
        "FlashAttnFunc",
        "FlashAttnVarlenFunc",
    }
)


def kept_by_attention(x: Tensor, aliases: frozenset[str] = frozenset()) -> bool:
    """Whether ``x`` shows the memory of an output that fused attention keeps for its own backward.

    Args:
        x: a layer's input, as autograd knows it.
        aliases: names of autograd Functions around modules whose output shows the memory of their one input, and counts
            its writes. Nothing says that of a Function but its author.

    Returns:
        False also under ``torch.compile``, which has no graph yet to look at.
    """
    if torch.compiler.is_compiling():
        return False
    node = x.grad_fn
    while node is not None:
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind not in VIEWS and kind not in aliases:
            return kind in ATTENTION
        node = node.next_functions[0][0]
    return False
