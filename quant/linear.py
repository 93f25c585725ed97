"""The module that stands where a quantized nn.Linear stood, and what it has in common with other quantized layers.

It holds the very Parameters of the Linear that it replaces (under ZeRO-3 these are partitioned, and what hangs on them
is kept) and the scales, which layers that serving fuses share. What is quantized at this moment is a switch, not a
structure: a schedule turns fake quantization on in the middle of a run.

The module that stands where a quantized nn.Embedding stood.

One weight for all experts of a MoE layer, and the Linears that a checkpoint has in its place.

A stack ``[E, out, in]`` is one Parameter: one gather under ZeRO-3, one launch of the quantizer, one grouped GEMM.
Rules, files and serving know the Linears of single experts, by names such as ``experts.7.gate_proj``;
:func:`linears_of` says which part of the stack each of them is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import gemm, kernels
from quant.autograd import Plan, UsedWeightFunction, quant_linear
from quant.hadamard import rotate
from quant.inputs import SharedInput, kept_by_attention
from quant.lora import Adapter
from quant.observers import Observer
from quant.packed_weight import packed_codes
from quant.scale import Quantizer, Scale, lsq_factor
from quant.spec import FP8_TENSOR, Scheme, TensorSpec

# The Parameters of a quantized layer that the layer it replaces does not have: the parts of a Scale of the weight, then
# s0 and theta of one of the input. Checkpoints know them by these names.
SCALE_PARAMETERS = ("weight_s0", "weight_theta", "weight_global", "weight_zero", "input_s0", "input_theta")
# Those that a layer with an adapter has beside them.
ADAPTER_PARAMETERS = ("lora_a", "lora_b")


class QuantLayer(nn.Module):
    """A weight ``[out_features, in_features]`` with its scale, fake-quantized where that is switched on; or a stack of
    those of E experts, as in :class:`quant.linear.StackedLinear`.

    Outside forward the Parameters may be ZeRO-3 partitions (shape ``[0]``): take shapes from ``weight_shape``.

    Attributes:
        scheme: how the layer is quantized.
        in_features, out_features: of one expert, where it is a stack.
        num_experts, projections: as in :class:`quant.linear.StackedLinear`; 0 and () where it is none.
        weight, bias: ``[out, in]`` and ``[out]`` or None, in the model's dtype; or ``[E, out, in]`` and None.
        held: how ``weight`` holds its codes instead; None where it does not.
        weight_s0, weight_global, input_s0: frozen fp32 scales, NaN until filled; ``weight_global`` is None but for
            weights with e4m3 scales, ``input_s0`` where no scale of the input is stored.
        weight_zero: the frozen zero points of the weight, fp32, NaN until filled; None where it is symmetric.
        weight_theta, input_theta: learned logarithmic corrections in the model's dtype, or None.
        weight_fake_quant, input_fake_quant: what is quantized now.
        input_observer: watches the input in every forward while set.
        shared_input: hands the quantized input to the layers that read the same tensor, or None.
        fp8_gemm: whether the codes are multiplied while both operands are quantized, instead of their values.
        fast_accum: of the fp8 GEMM, as in :func:`quant.gemm.scaled_linear`.
        keeps_weight_codes: whether the weight's codes are kept from forward to forward, until
            :func:`weights_changed`. Only where weights stay resident.
        trained: whether a forward with gradients has run. Where none has, somebody uses the weight as it is.
        known_weight_scale: the effective scale of the weight, by whoever forms those of many layers at once and forgets
            them in ``when_changed``; None where each forward forms it.
        when_changed: called when weights, scales or switches changed, so that what is kept of them elsewhere is
            dropped; None where nothing is.
        adapter: what is added to the weight before anything is made of it, or to the output; None without one. Its
            Parameters are the layer's, ``lora_a`` and ``lora_b``.
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
        """Takes over the Parameter objects ``weight`` and ``bias`` of the layer that it replaces.

        Args:
            replaced, scheme: the layer, and how it is quantized.
            in_features, out_features: as above.
            weight, input: the scales, of Parameters; of the input None where the scheme stores none.

        Raises:
            ValueError: scheme and scales do not agree.
        """
        super().__init__()
        if (input is None) != (scheme.stored_input is None):
            raise ValueError(f"scheme {scheme.name!r} and input_s0 disagree on whether a scale of the input is stored")
        if input is not None and input.theta is not None and not scheme.learns_input:
            raise ValueError(f"scheme {scheme.name!r} has a global scale of the input, which does not learn")
        if (weight.global_ is None) != (scheme.weights.scale_format != "e4m3"):
            raise ValueError(f"scheme {scheme.name!r} and weight_global disagree on whether there is a global scale")
        if (weight.zero is None) != (not scheme.weights.has_zero_points):
            raise ValueError(f"scheme {scheme.name!r} and weight_zero disagree on whether there are zero points")
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
        self.adapter: Adapter | None = None
        self._weight_codes: Tensor | None = None

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight."""
        stack = (self.num_experts,) if self.projections else ()
        return (*stack, self.out_features, self.in_features)

    def forget_codes(self) -> None:
        """Drop everything that was made of the weight or a scale: they have changed."""
        self._weight_codes = None
        if self.shared_input is not None:
            self.shared_input.drop()
        if self.when_changed is not None:
            self.when_changed()

    @property
    def scale_of_weight(self) -> Scale:
        """The Parameters of the weight's scale as they are now; under ZeRO-3 these may be partitions."""
        return Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)

    @property
    def scale_of_input(self) -> Scale | None:
        """The Parameters of the input's scale likewise; None where none is stored."""
        return None if self.input_s0 is None else Scale(self.input_s0, self.input_theta)

    def attach_adapter(self, adapter: Adapter) -> None:
        """Compute with an adapter from now on; its Parameters become the layer's."""
        for name in ADAPTER_PARAMETERS:
            self.register_parameter(name, getattr(adapter, name))
        self.adapter = adapter

    def merged_weight(self) -> Tensor:
        """What is quantized: the weight, with an adapter that is merged; without a gradient. Parameters gathered."""
        weight = self.weight if self.held is None else self.held.values(self.weight, self._weight_quantizer())
        return weight.detach() if self.adapter is None else self.adapter.merged(weight)

    @torch.no_grad()
    def quantized_weight(self) -> Tensor:
        """The values of :meth:`merged_weight`'s codes, in the model's dtype. Parameters gathered."""
        return kernels.fake_quantize(self.merged_weight(), self._weight_quantizer())

    @torch.no_grad()
    def weight_scale(self) -> Tensor:
        """The effective scale of the weight, as the forward uses it: fp32, shape by the scheme. Parameters gathered."""
        return kernels.effective_scale(self._weight_quantizer())

    def _weight_quantizer(self) -> Quantizer:
        return Quantizer(self.scale_of_weight, self.scheme.weights, self.weight.dtype)

    @torch.no_grad()
    def input_scale(self) -> Tensor | None:
        """The effective scale of the input (NVFP4: the global one), fp32 ``(1,)``; None where none is stored."""
        scale, spec = self.scale_of_input, self.scheme.stored_input
        if scale is None or spec is None or spec.dynamic:
            return None if scale is None else scale.s0.detach().clone()
        return kernels.effective_scale(Quantizer(scale, spec, self.weight.dtype))

    def _check_scale_dtypes(self) -> None:
        """A module-wide cast (DeepSpeed's to bf16, on stages 0 to 2) rounds the frozen scales in silence."""
        for name in ("weight_s0", "weight_global", "weight_zero", "input_s0"):
            scale = getattr(self, name)
            if scale is not None and scale.dtype != torch.float32:
                raise TypeError(
                    f"{name} is {scale.dtype}, expected torch.float32: something cast the whole module; "
                    f"restore the frozen scales after it"
                )


class QuantLinear(QuantLayer):
    """``F.linear`` whose operands are fake-quantized where that is switched on; exactly ``F.linear`` where neither is.

    Made from a :class:`quant.linear.StackedLinear` it is all experts' Linears, with a scale per expert where one would
    have a scale per tensor.

    A theta that trains gets a gradient of zeros while its operand is not quantized.

    Attributes:
        weight_numel: number of weights that share one scale, over all layers that share ``weight_s0``.
        dynamic_codes: as of :class:`quant.autograd.Plan`, for inputs that attention does not keep anyway.
        aliases: as of :func:`quant.inputs.kept_by_attention`; none unless somebody wraps modules in such.
        rotation: in blocks of how many features the input is turned before anything else (:mod:`quant.hadamard`), for a
            weight that was turned likewise; None where it is not.
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
        """The same Linear with scales: its Parameter objects are taken over, not copied.

        Args:
            linear: the Linear, or stack of them, that this module replaces.
            scheme, weight, input, weight_numel: as of :class:`QuantLayer`, and as above.

        Raises:
            ValueError: scheme and scales do not agree, or the inputs' groups do not divide ``in_features``.
        """
        size = {"in_features": linear.in_features, "out_features": linear.out_features}
        super().__init__(linear, scheme, **size, weight=weight, input=input)
        group_size = scheme.activations.group_size if scheme.activations is not None else None
        if group_size is not None and self.in_features % group_size:
            raise ValueError(
                f"in_features {self.in_features} is not divisible by the inputs' group_size {group_size} of scheme "
                f"{scheme.name!r}; choose another scheme, or exempt this layer"
            )
        if isinstance(linear, StackedLinear):
            self.num_experts, self.projections = linear.num_experts, linear.projections
        self.weight_numel = weight_numel
        self.rotation: int | None = None
        self.dynamic_codes = False
        self.train(linear.training)

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        """``x`` is ``[..., in_features]`` in the model's dtype, zero tokens allowed. Returns ``[..., out]``.

        Of a stack ``x`` is ``[rows, in_features]`` and ``offsets`` says whose the rows are, see :mod:`quant.gemm`.
        """
        self.trained = self.trained or torch.is_grad_enabled()
        if self.rotation is not None:
            x = rotate(x, self.rotation)
        if self.input_observer is not None:
            self.input_observer.update(x, self.input_scale() if self.input_fake_quant else None)
        learns = torch.is_grad_enabled() and (self.weight_theta is not None or self.input_theta is not None)
        if not (self.weight_fake_quant or self.input_fake_quant or learns or self.adapter or self.held):
            return gemm.linear(x, self.weight, self.bias, offsets)
        self._check_scale_dtypes()
        both = self.weight_fake_quant and self.input_fake_quant
        plan = Plan(
            weight=self.scheme.weights if self.weight_fake_quant or self.held is not None else None,
            input=self.scheme.activations if self.input_fake_quant else None,
            weight_numel=self.weight_numel,
            input_numel=self.in_features,
            fp8_gemm=self.fp8_gemm and both,
            fast_accum=self.fast_accum,
            held=self.held,
            dynamic_codes=self.dynamic_codes and not kept_by_attention(x, self.aliases),
            weight_scale=self.known_weight_scale,
        )
        return quant_linear(
            x,
            self.weight,
            self.bias,
            self.scale_of_weight,
            self.scale_of_input,
            plan,
            weight_codes=self._kept_weight_codes() if self.weight_fake_quant else None,
            shared=self.shared_input,
            offsets=offsets,
            apply=None if self.adapter is None else partial(self.adapter.apply, self.training),
        )

    def used_weight(self) -> Tensor:
        """The weight ``[out, in]`` as the forward multiplies it now, differentiable.

        It is for a caller that does not want a plain GEMM of it. An adapter has no place there yet.
        """
        assert self.adapter is None, "lm_head is no target of adapters"
        if torch.is_grad_enabled():
            self.trained = True
        if not self.weight_fake_quant:
            if self.weight_theta is None or not torch.is_grad_enabled():
                return self.weight
            # ZeRO-3 would apply the last gradient of a Parameter again that gets none.
            return self.weight + 0 * self.weight_theta.sum()
        self._check_scale_dtypes()
        return UsedWeightFunction.apply(self.scheme.weights, self.weight_numel, self.weight, *self.scale_of_weight)

    def _kept_weight_codes(self) -> Tensor | None:
        """The weight's codes, quantized at the first use after the weight changed; None where they are not kept."""
        if not self.keeps_weight_codes:
            return None
        if self._weight_codes is None:
            # Not in the caller's inference mode either: what is made there cannot be saved for a later backward.
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
    """Say that weights or scales of ``model`` changed, so that no layer uses codes of the old ones.

    The training loop calls it after every optimizer step, load and write of scales. Nothing else can notice: DeepSpeed
    writes to ``.data``, which leaves a tensor's version as it was.
    """
    for module in model.modules():
        if isinstance(module, QuantLayer):
            module.forget_codes()


class QuantEmbedding(QuantLayer):
    """``F.embedding`` of a table whose rows are fake-quantized where that is switched on.

    Only the rows that are looked up are quantized. For its scale, for calibration and export, the table ``[rows,
    features]`` is the weight of a Linear of ``features`` inputs and ``rows`` outputs.

    The scheme is weight-only, of symmetric integers per channel (row) or group: vLLM, the one reader of quantized
    embeddings, passes over their zero points without a word.
    """

    def __init__(self, embedding: nn.Embedding, scheme: Scheme, *, weight: Scale) -> None:
        """Takes over the Parameter object of ``embedding``; ``weight`` is the scale of its table.

        Raises:
            ValueError: the scheme is another one, or the embedding does more than look up.
        """
        if not self.takes(scheme):
            raise ValueError(
                f"scheme {scheme.name!r}: embeddings can have symmetric integer weights per channel or group, without "
                "inputs"
            )
        if type(embedding) is not nn.Embedding or embedding.max_norm is not None or embedding.scale_grad_by_freq:
            raise ValueError(f"{embedding} does more than look up rows; leave it unquantized")
        size = {"in_features": embedding.embedding_dim, "out_features": embedding.num_embeddings}
        super().__init__(embedding, scheme, **size, weight=weight, input=None)
        self.padding_idx = embedding.padding_idx
        self.train(embedding.training)

    @staticmethod
    def takes(scheme: Scheme) -> bool:
        """Whether an embedding can have this scheme."""
        spec = scheme.weights
        integers = spec.dtype == "int" and spec.symmetric and spec.granularity in ("channel", "group")
        return scheme.activations is None and integers

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` int64 of any shape. Returns ``[..., features]`` in the model's dtype."""
        if torch.is_grad_enabled():
            self.trained = True
        rows = F.embedding(ids, self.weight, self.padding_idx)
        theta: Tensor | None = self.weight_theta
        if not self.weight_fake_quant or ids.numel() == 0:
            # ZeRO-3 would apply the last gradient of a Parameter again that gets none.
            return rows if theta is None or not torch.is_grad_enabled() else rows + 0 * theta.sum()
        self._check_scale_dtypes()
        spec = self.scheme.weights
        if theta is not None:
            numel = spec.elements_per_scale((self.out_features, self.in_features))
            theta = F.embedding(ids, scaled_gradient(theta, lsq_factor(numel, spec))).flatten(0, -2)
        s0 = F.embedding(ids, self.weight_s0).flatten(0, -2)
        of_rows = Quantizer(Scale(s0, theta), spec, self.weight.dtype)
        return kernels.fake_quantize(rows.flatten(0, -2), of_rows).view(rows.shape)

    def extra_repr(self) -> str:
        return (
            f"{self.out_features}, {self.in_features}, scheme={self.scheme.name}, fake_quant={self.weight_fake_quant}"
        )


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """``x``, whose gradient is multiplied by ``factor``."""
    return _ScaledGradient.apply(x, factor)


class StackedLinear(nn.Module):
    """The Linears of E experts that read inputs of one kind, without biases.

    Attributes:
        weight: ``[E, out, in]``; a ZeRO-3 partition (shape ``[0]``) outside forward.
        in_features, out_features: of one expert.
        num_experts: E.
        projections: names of the Linears of one expert whose rows lie behind one another, of equal size.
    """

    bias = None

    def __init__(self, weight: nn.Parameter, shape: tuple[int, int, int], projections: tuple[str, ...]) -> None:
        super().__init__()
        self.weight = weight
        self.num_experts, self.out_features, self.in_features = shape
        self.projections = projections

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """``x`` is ``[rows, in]``, sorted by expert; ``offsets`` as in :mod:`quant.gemm`. Returns ``[rows, out]``."""
        return gemm.linear(x, self.weight, None, offsets)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"


@dataclass(frozen=True)
class LinearPart:
    """One Linear of a checkpoint inside a layer of the model.

    Attributes:
        name: of the Linear, as a module of its own would have it.
        out_features, in_features: its sizes.
        expert: its index in a stack; None where the layer is the Linear.
        first_row: where its rows begin among those of the expert.
    """

    name: str
    out_features: int
    in_features: int
    expert: int | None = None
    first_row: int = 0

    def weight(self, whole: Tensor) -> Tensor:
        """``[out, in]``, a view of the layer's weight."""
        return whole if self.expert is None else whole[self.expert].narrow(0, self.first_row, self.out_features)

    def scale(self, whole: Tensor, spec: TensorSpec) -> Tensor:
        """The part of the layer's scale that is this Linear's: a view, in the shape that the scale of a Linear has."""
        if self.expert is None:
            return whole
        if whole.dim() == 1:
            return whole[self.expert].view(1)
        size = spec.group_size if spec.granularity == "block" and spec.group_size else 1
        return whole[self.expert].narrow(0, self.first_row // size, self.out_features // size)

    def of_scale(self, whole: Scale, spec: TensorSpec) -> Scale:
        """This Linear's part of everything that belongs to the layer's scale, see :meth:`scale`."""
        s0, theta, above, zero = whole
        return Scale(
            self.scale(s0, spec),
            None if theta is None else self.scale(theta, spec),
            None if above is None else self.scale(above, FP8_TENSOR),
            None if zero is None else self.scale(zero, spec),
        )


def linears_of(name: str, layer: nn.Module) -> Iterator[LinearPart]:
    """The Linears that a checkpoint has in place of ``layer``, a module called ``name``: the layer itself, or, of a
    stack, the Linears of each expert in turn."""
    projections: tuple[str, ...] = getattr(layer, "projections", ())
    out_features, in_features = int(layer.out_features), int(layer.in_features)  # type: ignore[arg-type]
    if not projections:
        yield LinearPart(name, out_features, in_features)
        return
    parent, rows = name.rpartition(".")[0], out_features // len(projections)
    for expert in range(int(layer.num_experts)):  # type: ignore[arg-type]
        for index, projection in enumerate(projections):
            yield LinearPart(f"{parent}.{expert}.{projection}".lstrip("."), rows, in_features, expert, index * rows)
