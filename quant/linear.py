"""Modules that replace a quantized nn.Linear, a quantized nn.Embedding, or a stack of expert Linears.

A module keeps the Parameters of the layer it replaces (under ZeRO-3 with their partition state) and adds Parameters for
its scales; layers that serving fuses share some of these (:mod:`quant.quantization`). Fake quantization is a switch,
not a structure: a schedule may turn it on in the middle of a run.

A stack ``[E, out, in]`` of all experts of a MoE layer is one Parameter: one gather under ZeRO-3, one launch of the
quantizer, one grouped GEMM. Rules, checkpoints and serving use the Linears of single experts, with names such as
``experts.7.gate_proj``; :func:`linears_of` maps them to slices of the stack.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import gemm, kernels
from quant.adapters import Adapter, AdapterBeside, DecoupledScale
from quant.autograd import Plan, UsedWeightFunction, quant_linear
from quant.inputs import SharedInput, kept_by_attention
from quant.observers import Observer
from quant.packed_weight import packed_codes
from quant.scale import Quantizer, Scale, check_fp32, lsq_factor
from quant.spec import FP8_TENSOR, Scheme, TensorSpec

# Parameters that a quantized layer adds to the layer it replaces, and their names in checkpoints: the fields of the
# weight's Scale, then s0 and theta of the input's Scale.
SCALE_PARAMETERS = ("weight_s0", "weight_theta", "weight_global", "weight_zero", "input_s0", "input_theta")
_FROZEN_SCALES = tuple(name for name in SCALE_PARAMETERS if not name.endswith("_theta"))
# Parameters that adapters add.
ADAPTER_PARAMETERS = (*Adapter.parameters, *DecoupledScale.parameters)


class QuantLayer(nn.Module):
    """Weight ``[out_features, in_features]`` with its scale and switchable fake quantization; or a stack of E such
    weights, one per expert.

    Outside forward the Parameters may be ZeRO-3 partitions (shape ``[0]``): take shapes from ``weight_shape``.

    Attributes:
        scheme: number formats of the layer.
        in_features, out_features: for a stack, of one expert.
        num_experts, projections: experts of a stack, and names of one expert's Linears in it (gate_proj, up_proj); 0
            and () without a stack.
        weight, bias: ``[out, in]`` and ``[out]`` or None, in the model's dtype; or ``[E, out, in]`` and None.
        held: layout of the codes in ``weight`` if it is a packed weight; else None.
        weight_s0, weight_global, input_s0: frozen fp32 scales, NaN until filled; ``weight_global`` only for weights
            with e4m3 scales, ``input_s0`` only if a scale of the input is stored, else None.
        weight_zero: frozen zero points of the weight, fp32, NaN until filled; None if symmetric.
        weight_theta, input_theta: logarithmic corrections of the scales that train, in the model's dtype; None for
            fixed scales.
        weight_fake_quant, input_fake_quant: switches of fake quantization.
        input_observer: if set, observes the input in every forward.
        shared_input: cache of the quantized input for layers that read the same tensor, or None.
        fp8_gemm: multiply the codes instead of their values while both operands are quantized.
        fast_accum: accumulate the fp8 GEMM in Hopper's tensor cores, faster but in fewer bits than fp32.
        keeps_weight_codes: keep the weight's codes between forwards, until :func:`weights_changed`. Only for weights
            that stay resident.
        trained: True after a forward with gradients. If it stays False in training, the model's code uses the weight
            without calling this layer.
        known_weight_scale: effective scale, computed for many layers at once and invalidated by ``when_changed``; None
            if each forward computes it.
        when_changed: callback after a change of weights, scales or switches, to invalidate values derived from them; or
            None.
        adapter: low-rank adapter merged into the weight or added to the output, or decoupled scale; or None. Its
            Parameters are registered on the layer.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_s0: nn.Parameter
    weight_theta: nn.Parameter | None
    weight_global: nn.Parameter | None
    weight_zero: nn.Parameter | None
    input_s0: nn.Parameter | None
    input_theta: nn.Parameter | None

    def __init__(
        self,
        replaced: nn.Module,
        scheme: Scheme,
        *,
        in_features: int,
        out_features: int,
        weight: Scale,
        input: Scale | None,
    ) -> None:
        """Take over the Parameter objects ``weight`` and ``bias`` of the layer ``replaced``. The scales ``weight`` and
        ``input`` are made of Parameters; ``input`` is None if the scheme stores no input scale. Raises ValueError if
        scheme and scales do not agree."""
        super().__init__()
        for name, scale, expected in (
            ("input_s0", input, scheme.stored_input is not None),
            ("weight_global", weight.global_, scheme.weights.has_global_scale),
            ("weight_zero", weight.zero, scheme.weights.has_zero_points),
        ):
            if (scale is not None) != expected:
                raise ValueError(f"scheme {scheme.name!r}: {name} is {'missing' if expected else 'given'}")
        self.in_features = in_features
        self.out_features = out_features
        self.num_experts = 0
        self.projections: tuple[str, ...] = ()
        self.scheme = scheme
        assert isinstance(replaced.weight, nn.Parameter)
        self.weight = replaced.weight
        self.held = packed_codes(replaced.weight)
        self.bias = getattr(replaced, "bias", None)
        parts = (*weight, *((None, None) if input is None else input[:2]))
        for name, part in zip(SCALE_PARAMETERS, parts, strict=True):
            assert part is None or isinstance(part, nn.Parameter)
            self.register_parameter(name, part)
        self.weight_fake_quant = True
        self.input_fake_quant = scheme.activations is not None
        self.input_observer: Observer | None = None
        self.shared_input: SharedInput | None = None
        self.fp8_gemm = False
        self.fast_accum = False
        self.keeps_weight_codes = False
        self.trained = False
        self.known_weight_scale: Tensor | None = None
        self.when_changed: Callable[[], None] | None = None
        self.adapter: Adapter | DecoupledScale | None = None
        self._weight_codes: Tensor | None = None

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the weight, also while its Parameter is a ZeRO-3 partition: ``(out, in)`` or ``(E, out, in)``."""
        stack = (self.num_experts,) if self.projections else ()
        return (*stack, self.out_features, self.in_features)

    def forget_codes(self) -> None:
        """Drop everything derived from the weight or a scale, after either changed."""
        self._weight_codes = None
        if self.shared_input is not None:
            self.shared_input.drop()
        if self.when_changed is not None:
            self.when_changed()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantLayer":
        """Move or cast the Parameters (``.to()``, ``.half()``), except that frozen scales stay fp32, with their values.

        Raises:
            TypeError: a cast of packed weights, whose elements are codes.
        """
        uncast = (*_FROZEN_SCALES, *(("weight",) if self.held else ()))
        before = {name: own.data for name in uncast if (own := self._parameters.get(name)) is not None}
        super()._apply(fn, recurse)
        for name, data in before.items():
            parameter = self.get_parameter(name)
            if parameter.dtype != data.dtype:
                found, parameter.data = parameter.dtype, data.to(parameter.device)
                if name == "weight":
                    raise TypeError(f"packed weights of {data.dtype} cannot be cast to {found}: cast before packing")
        return self

    @property
    def scale_of_weight(self) -> Scale:
        """Scale of the weight, made of the layer's Parameters; under ZeRO-3 possibly partitions."""
        return Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)

    @property
    def scale_of_input(self) -> Scale | None:
        """Scale of the input, made of the layer's Parameters, under ZeRO-3 possibly partitions; None if none is
        stored."""
        return None if self.input_s0 is None else Scale(self.input_s0, self.input_theta)

    def attach_adapter(self, adapter: Adapter | DecoupledScale) -> None:
        """Register the adapter's Parameters on the layer and use it from now on."""
        for name in adapter.parameters:
            self.register_parameter(name, getattr(adapter, name))
        self.adapter = adapter

    def merged_weight(self) -> Tensor:
        """Return the weight before quantization, without a gradient: decoded if packed, with the adapter or decoupled
        scale merged into it; unchanged by an adapter that adds to the output. Parameters must be gathered."""
        weight = self.weight if self.held is None else self.held.values(self.weight, self._weight_quantizer())
        return weight.detach() if self.adapter is None else self.adapter.merged(weight)

    @torch.no_grad()
    def quantized_weight(self) -> Tensor:
        """Fake-quantize :meth:`merged_weight`, in the model's dtype. Parameters must be gathered."""
        return kernels.fake_quantize(self.merged_weight(), self._weight_quantizer())

    @torch.no_grad()
    def weight_scale(self) -> Tensor:
        """Compute the effective scale of the weight as the forward uses it: fp32, in the shape of ``weight_s0``.
        Parameters must be gathered."""
        return kernels.effective_scale(self._weight_quantizer())

    def _weight_quantizer(self) -> Quantizer:
        return Quantizer(self.scale_of_weight, self.scheme.weights, self.weight.dtype)

    @torch.no_grad()
    def input_scale(self) -> Tensor | None:
        """Compute the effective scale of the input (NVFP4: the global scale), fp32 ``(1,)``; None if none is stored.
        Parameters must be gathered."""
        scale, spec = self.scale_of_input, self.scheme.stored_input
        if scale is None or spec is None or spec.dynamic:
            return None if scale is None else scale.s0.detach().clone()
        return kernels.effective_scale(Quantizer(scale, spec, self.weight.dtype))

    def _check_scale_dtypes(self) -> None:
        check_fp32({name: getattr(self, name) for name in _FROZEN_SCALES})


class QuantLinear(QuantLayer):
    """``F.linear`` with switchable fake quantization of its operands; exactly ``F.linear`` if both are off and it
    has no adapter, rotation or packed weight.

    Built from a :class:`quant.linear.StackedLinear`, it computes all experts' Linears, with a scale per expert in place
    of a scale per tensor. A trainable theta gets a gradient of zeros while its operand is not quantized.

    Attributes:
        weight_numel: number of weights that share one scale, over all layers that share ``weight_s0``.
        dynamic_codes: for e4m3 or e2m1 inputs with dynamic scales, save codes for backward instead of the input: less
            memory, but backward decodes them.
        aliases: names of autograd Functions whose output is the same tensor as their input; used to detect attention's
            output.
        rotation: block size of the Hadamard rotation of the input (:func:`quant.gemm.rotate`), whose inverse the weight
            contains; or None.
    """

    aliases: frozenset[str] = frozenset()

    def __init__(
        self,
        linear: "nn.Linear | StackedLinear | QuantLinear",
        scheme: Scheme,
        *,
        weight: Scale,
        input: Scale | None,
        weight_numel: int,
    ) -> None:
        """Take over the Parameter objects of ``linear``, without a copy, and add scales made of Parameters; ``input``
        is None if the scheme stores no input scale. Raises ValueError if scheme and scales do not agree, or groups of
        the weight or input do not divide ``in_features``."""
        size = {"in_features": linear.in_features, "out_features": linear.out_features}
        super().__init__(linear, scheme, **size, weight=weight, input=input)
        check_sizes(LinearPart("", **size), scheme)
        if isinstance(linear, StackedLinear):
            self.num_experts, self.projections = linear.num_experts, linear.projections
        self.weight_numel = weight_numel
        self.rotation: int | None = None
        self.dynamic_codes = False
        self.train(linear.training)

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Compute the layer's output ``[..., out]`` for ``x [..., in_features]`` in the model's dtype; zero tokens are
        allowed. Raises TypeError if something has cast the frozen scales from fp32.

        For a stack, ``x`` is ``[rows, in_features]``, sorted by expert, and ``offsets``, int32 ``[E]``, are the ends of
        the experts' rows.
        """
        self.trained |= torch.is_grad_enabled()
        given = x
        if x.dtype != self.weight.dtype and torch.is_autocast_enabled(x.device.type):
            x = x.to(self.weight.dtype)  # the weight's codes and scales depend on its dtype, so that is kept
        if self.rotation is not None:
            x = gemm.rotate(x, self.rotation)
        if self.input_observer is not None:
            self.input_observer.update(x, self.input_scale() if self.input_fake_quant else None)
        learns = torch.is_grad_enabled() and (self.weight_theta is not None or self.input_theta is not None)
        if not (self.weight_fake_quant or self.input_fake_quant or learns or self.adapter or self.held):
            return gemm.linear(x, self.weight, self.bias, offsets)
        self._check_scale_dtypes()
        both = self.weight_fake_quant and self.input_fake_quant
        merges = self.adapter is not None and self.adapter.merges
        plan = Plan(
            weight=self.scheme.weights if self.weight_fake_quant or (self.held and not merges) else None,
            input=self.scheme.activations if self.input_fake_quant else None,
            weight_numel=self.weight_numel,
            input_numel=self.in_features,
            fp8_gemm=self.fp8_gemm and both,
            fast_accum=self.fast_accum,
            held=self.held,
            dynamic_codes=self.dynamic_codes and not kept_by_attention(x, self.aliases),
            weight_scale=self.known_weight_scale,
        )
        beside = self.adapter if isinstance(self.adapter, AdapterBeside) else None
        output = quant_linear(
            x,
            self.weight,
            self.bias,
            self.scale_of_weight,
            self.scale_of_input,
            plan,
            weight_codes=self._kept_weight_codes() if self.weight_fake_quant else None,
            shared=self.shared_input if x is given else None,
            offsets=offsets,
            adapter=self.adapter if beside is None else None,
        )
        return output if beside is None else output + beside.added(x, self.training)

    def used_weight(self) -> Tensor:
        """Return the weight ``[out, in]`` as the forward multiplies it: fake-quantized if ``weight_fake_quant``, else
        unchanged; differentiable. For callers whose product is not a plain GEMM; the layer must have no adapter."""
        assert self.adapter is None, "lm_head is no target of adapters"
        self.trained |= torch.is_grad_enabled()
        if not self.weight_fake_quant:
            if self.weight_theta is None or not torch.is_grad_enabled():
                return self.weight
            # Under ZeRO-3 a Parameter without a gradient would get its last gradient again.
            return self.weight + 0 * self.weight_theta.sum()
        self._check_scale_dtypes()
        spec = self.scheme.weights
        return UsedWeightFunction.apply(spec, lsq_factor(self.weight_numel, spec), self.weight, *self.scale_of_weight)

    def _kept_weight_codes(self) -> Tensor | None:
        """Return the codes of the weight, computed when they are first used after the weight changed; None without
        ``keeps_weight_codes``."""
        if not self.keeps_weight_codes:
            return None
        if self._weight_codes is None:
            # Outside of inference mode, too: its tensors cannot be saved for a later backward.
            with torch.inference_mode(False), torch.no_grad():
                self._weight_codes = kernels.quantize(self.merged_weight(), self._weight_quantizer())[0]
        return self._weight_codes

    def extra_repr(self) -> str:
        stack = f"num_experts={self.num_experts}, " if self.projections else ""
        return (
            f"{stack}in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name}, fake_quant(weight={self.weight_fake_quant}, input={self.input_fake_quant})"
        )


def weights_changed(model: nn.Module) -> None:
    """Invalidate everything that layers of ``model`` derived from their weights or scales.

    Call this function after every optimizer step, after loading weights and after writing scales. Layers cannot detect
    changes: DeepSpeed writes to ``.data``, which does not change a tensor's version.
    """
    for module in model.modules():
        if isinstance(module, QuantLayer):
            module.forget_codes()


class QuantEmbedding(QuantLayer):
    """``F.embedding`` of a table with switchable fake quantization of its rows.

    Only the looked-up rows are quantized. For scales, calibration and export, the table ``[rows, features]`` is the
    weight of a Linear with ``features`` inputs and ``rows`` outputs.

    The scheme is weight-only, symmetric integers per channel (row) or group: vLLM, the only reader of quantized
    embeddings, silently ignores their zero points.
    """

    def __init__(self, embedding: nn.Embedding, scheme: Scheme, *, weight: Scale) -> None:
        """Take over the Parameter object of ``embedding``; ``weight`` is the scale of its table. Raises ValueError if
        the scheme is not supported, or the embedding does more than look up rows."""
        if not self.takes(scheme):
            raise ValueError(
                f"scheme {scheme.name!r}: expected, for embeddings, symmetric integer weights per channel or group and "
                "unquantized inputs"
            )
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.scale_grad_by_freq:
            raise ValueError(
                f"{embedding} does more than look up rows, expected a plain nn.Embedding: set quant.embedding to null"
            )
        size = {"in_features": embedding.embedding_dim, "out_features": embedding.num_embeddings}
        super().__init__(embedding, scheme, **size, weight=weight, input=None)
        self.padding_idx = embedding.padding_idx
        self.train(embedding.training)

    @staticmethod
    def takes(scheme: Scheme) -> bool:
        """Return True if embeddings support this scheme."""
        spec = scheme.weights
        integers = spec.dtype == "int" and spec.symmetric and spec.granularity in ("channel", "group")
        return scheme.activations is None and integers

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ``ids`` (int64, any shape). Returns ``[..., features]`` in the model's dtype."""
        self.trained |= torch.is_grad_enabled()
        rows = F.embedding(ids, self.weight, self.padding_idx)
        theta: Tensor | None = self.weight_theta
        if not self.weight_fake_quant or ids.numel() == 0:
            # Under ZeRO-3 a Parameter without a gradient would get its last gradient again.
            return rows if theta is None or not torch.is_grad_enabled() else rows + 0 * theta.sum()
        self._check_scale_dtypes()
        spec = self.scheme.weights
        if theta is not None:
            numel = spec.elements_per_scale((self.out_features, self.in_features))
            theta = F.embedding(ids, _ScaledGradient.apply(theta, lsq_factor(numel, spec))).flatten(0, -2)
        s0 = F.embedding(ids, self.weight_s0).flatten(0, -2)
        return UsedWeightFunction.apply(spec, 1.0, rows.flatten(0, -2), *Scale(s0, theta)).view(rows.shape)

    def extra_repr(self) -> str:
        return (
            f"{self.out_features}, {self.in_features}, scheme={self.scheme.name}, fake_quant={self.weight_fake_quant}"
        )


class _ScaledGradient(torch.autograd.Function):
    """Autograd function ``apply(x, factor)``: returns ``x``, and multiplies its gradient by ``factor``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class StackedLinear(nn.Module):
    """Linears of E experts in one Parameter, without biases.

    Attributes:
        weight: ``[E, out, in]``; a ZeRO-3 partition (shape ``[0]``) outside forward.
        in_features, out_features: sizes of one expert.
        num_experts: E.
        projections: names of one expert's Linears (gate_proj, up_proj), of equal size, concatenated along ``out``.
    """

    bias = None

    def __init__(self, weight: nn.Parameter, shape: tuple[int, int, int], projections: tuple[str, ...]) -> None:
        super().__init__()
        self.weight = weight
        self.num_experts, self.out_features, self.in_features = shape
        self.projections = projections

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Compute the output ``[rows, out]`` for ``x [rows, in]``, sorted by expert; ``offsets``, int32 [E], are the
        ends of the experts' rows."""
        return gemm.linear(x, self.weight, None, offsets)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"


@dataclass(frozen=True)
class LinearPart:
    """Slice of a layer; a checkpoint stores each slice as a Linear of its own.

    Attributes:
        name: module name of the Linear in the checkpoint.
        out_features, in_features: its sizes.
        expert: index of the expert in the stack; None if the layer is the Linear itself.
        first_row: index of the Linear's first row in the expert's weight.
        projections: number of Linears in the expert's weight.
    """

    name: str
    out_features: int
    in_features: int
    expert: int | None = None
    first_row: int = 0
    projections: int = 1

    def weight(self, whole: Tensor) -> Tensor:
        """Return the weight ``[out, in]`` of this Linear as a view of ``whole``, the weight of the layer. For a stack
        ``[E, rows, in]`` these are the Linear's rows in its expert; otherwise ``whole`` itself."""
        return whole if self.expert is None else whole[self.expert].narrow(0, self.first_row, self.out_features)

    def scale(self, whole: Tensor, spec: TensorSpec) -> Tensor:
        """Return the Linear's scale, a view of the layer's scale ``whole``, in the shape for a weight ``[out, in]``."""
        if self.expert is None:
            return whole
        if whole.dim() == 1:
            return whole[self.expert].view(1)
        size = spec.rows_per_scale
        return whole[self.expert].narrow(0, self.first_row // size, -(-self.out_features // size))

    def of_scale(self, whole: Scale, spec: TensorSpec) -> Scale:
        """Return the Linear's slices of all tensors of the layer's scale ``whole``."""
        specs = (spec, spec, FP8_TENSOR, spec)
        parts = [None if one is None else self.scale(one, of) for one, of in zip(whole, specs, strict=True)]
        return Scale(*parts)  # type: ignore[arg-type]


def check_sizes(part: LinearPart, scheme: Scheme) -> None:
    """Raise ValueError if a scheme does not support the sizes of a Linear: groups of its weight or inputs do not divide
    ``in_features``, or in a stack with several Linears per expert a block would be in two of them."""
    scheme.weights.scale_shape((part.out_features, part.in_features))
    size = scheme.activations.group_size if scheme.activations is not None else None
    if size is not None and part.in_features % size:
        raise ValueError(
            f"in_features {part.in_features} is not divisible by the inputs' group_size {size} of scheme "
            f"{scheme.name!r}; choose another scheme, or exempt this layer"
        )
    if part.projections > 1 and part.out_features % (size := scheme.weights.rows_per_scale):
        raise ValueError(
            f"out_features {part.out_features} is not divisible by the block size {size}, and in a stack of experts a "
            "block would be in two projections; choose another scheme, or exempt this layer"
        )


def linears_of(name: str, layer: nn.Module) -> Iterator[LinearPart]:
    """List the Linears that represent ``layer``, a module called ``name``, in a checkpoint: the layer itself, or for a
    stack the Linears of each expert in turn."""
    projections: tuple[str, ...] = getattr(layer, "projections", ())
    out_features, in_features = int(layer.out_features), int(layer.in_features)  # type: ignore[arg-type]
    if not projections:
        yield LinearPart(name, out_features, in_features)
        return
    parent, rows = name.rpartition(".")[0], out_features // len(projections)
    for expert in range(int(layer.num_experts)):  # type: ignore[arg-type]
        for index, projection in enumerate(projections):
            yield LinearPart(
                f"{parent}.{expert}.{projection}".lstrip("."), rows, in_features, expert, index * rows, len(projections)
            )
