"""Quantized form of a layer's input, computed once for all layers that read the same tensor.

q, k and v read one tensor and share its scale, as do gate and up. Quantizing the tensor three times would cost two more
passes over it and two more copies of the codes for backward. The modules stay separate, because ZeRO-3 hooks each of
them: the first module that gets a tensor caches its quantized form for the others (:class:`SharedInput`). In backward,
each module needs the dequantized input; the first module decodes it for all (:class:`Restored`). ZeRO-3 passes each
module an alias of the tensor, so two inputs are the same if they share memory and version. Nothing is cached under
``torch.compile``: the compiler merges identical operators.

If all layers that read a norm's output quantize it with one fixed scale, the norm (:mod:`quant.fused`) may return
codes instead of values: a tensor with shape, dtype, device and gradient but without values
(:class:`QuantizedActivation`), from which the layers take the codes (:meth:`SharedInput.get`). Any other use of the
tensor's values (a router, a hook, an unknown forward) raises an error that names the cause.

Layers keep codes for backward so that the input can be freed. The input of o_proj would not be freed, as it is a view
of fused attention's output, which attention keeps for its own backward. So if its scales are dynamic, o_proj keeps the
input instead of codes, at no cost, and quantizes it again in backward, with the same bits. :func:`kept_by_attention`
detects such an input in the autograd graph: behind the input there are only view nodes, then attention's node. Any
computation in between (a gate, a cast, a copy in another layout, a rotation) has its own node, and codes are kept.
Eager attention does not count, as its last product saves its operands, not its output. A wrong detection would cost
memory, but never change results: the input shares the version counter of attention's output, so that a write to either
between forward and backward raises.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from quant import kernels
from quant.scale import Quantizer, Scale
from quant.spec import TensorSpec


class QuantizedInput(NamedTuple):
    """Input of a layer after quantization: operand of the GEMM, and tensors that are saved for backward.

    Attributes:
        values: fake-quantized input; None if the GEMM multiplies codes, or the input is not quantized.
        codes: codes of the input, dynamic e2m1 codes two in a byte; None if neither the GEMM nor backward needs them.
        mask: one bit per element in uint8, 0 where the value was clipped; None if backward does not need it.
        scales: scales of a dynamic input's codes ``[..., groups, 1]`` in their stored format; else None.
    """

    values: Tensor | None = None
    codes: Tensor | None = None
    mask: Tensor | None = None
    scales: Tensor | None = None


class Wanted(NamedTuple):
    """Results that a caller needs from :func:`quantize_input`.

    Attributes:
        codes_for_gemm: codes for the GEMM; if False, fake-quantized values.
        codes: codes for backward.
        mask: bit mask of unclipped elements for backward.
    """

    codes_for_gemm: bool
    codes: bool
    mask: bool


def quantize_input(
    x: Tensor, scale: Scale | None, spec: TensorSpec, model_dtype: torch.dtype, wanted: Wanted
) -> QuantizedInput:
    """Quantize ``x`` for the GEMM, with the tensors that backward needs. ``scale`` is the stored scale of the
    input. If ``spec`` is dynamic, this is the global scale, or None for a format without a global scale."""
    if spec.dynamic:
        above = None if scale is None else scale.s0
        # Integers keep no codes or mask for backward: they clip at one end of every token and may have zero points.
        if not any(wanted) or spec.dtype == "int" or x.numel() == 0:
            return QuantizedInput(kernels.fake_quantize_tokens(x, spec, above))
        kept = QuantizedInput(*kernels.keep_tokens(x, spec, above, mask=wanted.mask))
        return kept if wanted.codes else kept._replace(codes=None)
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
    """Cache, during backward, of the dequantized input that several layers share.

    Autograd nodes of layers with the same input share this object, created in forward and empty until their first
    backward. It is emptied after the last of these backwards, when another :class:`Restored` is filled (only one is
    filled at a time), and at the end of a backward pass that reached only some of the layers. After a backward that
    raised, it is freed with the nodes. If it is empty, or saved tensors were moved to other memory, the input is
    dequantized again, with the same bits.

    Attributes:
        layers: number of layers that keep the input for backward.
    """

    _filled: ClassVar["weakref.ref[Restored] | None"] = None

    def __init__(self) -> None:
        self.layers = 0
        self._uses = 0
        self._entry: tuple[Tensor, Tensor] | None = None

    def has(self, kept: Tensor) -> bool:
        """Return True if the dequantized form of ``kept``, a tensor saved for backward (the input or its codes), is
        cached, so that :meth:`get` computes nothing."""
        return self._entry is not None and _same_memory(self._entry[0], kept)

    def get(self, kept: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the dequantized input, cached for the saved tensor ``kept`` or computed by ``make``. Callers must not
        write to the returned tensor."""
        entry = self._entry
        if entry is None or not _same_memory(entry[0], kept):
            other = None if Restored._filled is None else Restored._filled()
            if other is not None:
                other.drop()
            entry = (kept.detach(), make())
            self._entry, self._uses = entry, 0
            Restored._filled = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(self.drop)
        self._uses += 1
        if self._uses >= self.layers:
            self.drop()
        return entry[1]

    def drop(self) -> None:
        """Free the cached dequantized input."""
        self._entry, self._uses = None, 0


@dataclass
class _Entry:
    """Quantized input in a cache, with the tensor ``x``: keeping ``x`` prevents another tensor from reusing its
    address."""

    x: Tensor
    version: int
    wanted: Wanted
    value: QuantizedInput
    taken: int = 0
    restored: Restored = field(default_factory=Restored)


class SharedInput:
    """Cache of one quantized input, shared by the layers that read the same tensor. The entry is dropped after the last
    layer used it, and replaced when a layer reads another tensor: nothing is kept between two forwards."""

    def __init__(self, consumers: int) -> None:
        """Create an empty cache; ``consumers`` is the number of layers that read each tensor."""
        self.consumers = consumers
        self._entry: _Entry | None = None

    def get(
        self, x: Tensor, wanted: Wanted, make: Callable[[], QuantizedInput]
    ) -> tuple[QuantizedInput, Restored | None]:
        """Return the quantized ``x``, cached for the same ``wanted`` or computed by ``make``; and the cache of the
        dequantized ``x`` for backward, or None if nothing is shared.

        A :class:`QuantizedActivation` carries its quantized form, which has no mask. Raises RuntimeError if that form
        has only codes and the layer needs values: fake quantization was switched between norm and layer.
        """
        if isinstance(x, QuantizedActivation) and x.readers is self:
            if x.quantized.values is None and not wanted.codes_for_gemm:
                raise RuntimeError(
                    f"{x.source} returned only codes, but a layer that reads it needs values: fake quant was switched "
                    "between them; switch it between steps"
                )
            return x.quantized, x.restored if self.consumers > 1 else None
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
        """Empty the cache; called after the entry's last use or a change of the scale."""
        self._entry = None


def _same_memory(other: Tensor, x: Tensor) -> bool:
    """Return True if two tensors are views of the same elements, unchanged in between (same version counter)."""
    return (
        other.data_ptr() == x.data_ptr()
        and other.shape == x.shape
        and other.stride() == x.stride()
        and other.dtype == x.dtype
        and x._version == other._version
    )


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class QuantizedActivation(Tensor):
    """Tensor without values that carries its quantized form for the layers that read it.

    Only detach (used by ZeRO-3's hooks), new_empty and shape queries are allowed; all else raises RuntimeError.

    Attributes:
        quantized: the quantized form, without the mask of clipped values: the producer (a fused norm or SwiGLU) keeps
            this mask, and applies it to the gradient for all readers.
        restored: cache of the dequantized input for backward.
        source: name of the producer, for an error.
        readers: the cache that the layers which read this tensor share; they get the quantized form from it.
    """

    quantized: QuantizedInput
    restored: Restored
    source: str
    readers: SharedInput

    @staticmethod
    def __new__(
        cls, like: Tensor, quantized: QuantizedInput, restored: Restored, source: str, readers: SharedInput
    ) -> "QuantizedActivation":
        """Create a tensor in the shape and dtype of ``like``, contiguous."""
        made: QuantizedActivation = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        made.quantized, made.restored, made.source, made.readers = quantized, restored, source, readers
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
            return QuantizedActivation(one, one.quantized, one.restored, one.source, one.readers)
        if func is torch.ops.aten.new_empty.default:
            return torch.empty(args[1], dtype=args[0].dtype, device=args[0].device)
        given = next(one for one in (*args, *(kwargs or {}).values()) if isinstance(one, QuantizedActivation))
        raise RuntimeError(
            f"{given.source} returns only codes for the layers that read it and has no values, but {func} reads "
            "values; set quant.fuse_norms: false"
        )


# Autograd nodes whose output shares the memory and version of their one input. Not _unsafe_view, which has its own
# version.
VIEWS = frozenset({"Alias", "Permute", "ReshapeAlias", "Slice", "Squeeze", "T", "Transpose", "Unsqueeze", "View"})
# Autograd nodes that save their output: torch's (formulas with `output` in tools/autograd/derivatives.yaml of 2.11 to
# 2.13) and flash-attn's (flash_attn_interface.py, save_for_backward of out_padded).
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
    """Return True if ``x``, a layer's input, is a view of an output that fused attention keeps for its own backward;
    always False under ``torch.compile``, where no graph exists yet. ``aliases`` are names of autograd Functions to
    treat as views, too: their output shares memory and version with their one input, which the graph does not show."""
    if torch.compiler.is_compiling():
        return False
    node = x.grad_fn
    while node is not None:
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind not in VIEWS and kind not in aliases:
            return kind in ATTENTION
        node = node.next_functions[0][0]
    return False
