"""The module that stands where a quantised nn.Linear stood.

It holds the very Parameters of the Linear that it replaces (under ZeRO-3 these are partitioned, and what hangs on them
is kept) and the scales, which layers that serving fuses share. What is quantised at this moment is a switch, not a
structure: a schedule turns fake quantisation on in the middle of a run.
"""

import torch
from torch import Tensor, nn

from quant import gemm, kernels
from quant.experts import StackedLinear
from quant.function import Plan, UsedWeightFunction, quant_linear
from quant.layer import QuantLayer
from quant.scale import Scale
from quant.spec import Scheme


class QuantLinear(QuantLayer):
    """``F.linear`` whose operands are fake-quantised where that is switched on; exactly ``F.linear`` where neither is.

    Made from a :class:`quant.experts.StackedLinear` it is all experts' Linears, with a scale per expert where one would
    have a scale per tensor.

    A theta that trains gets a gradient of zeros while its operand is not quantised.

    Attributes:
        weight_numel: number of weights that share one scale, over all layers that share ``weight_s0``.
    """

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
            scheme, weight, input: as of :class:`quant.layer.QuantLayer`.
            weight_numel: as above.

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
        self.train(linear.training)

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        """``x`` is ``[..., in_features]`` in the model's dtype, zero tokens allowed. Returns ``[..., out]``.

        Of a stack ``x`` is ``[rows, in_features]`` and ``offsets`` says whose the rows are, see :mod:`quant.gemm`.
        """
        if torch.is_grad_enabled():
            self.trained = True
        if self.input_observer is not None:
            self.input_observer.update(x, self.input_scale() if self.input_fake_quant else None)
        learns = self.weight_theta is not None or self.input_theta is not None
        if not (self.weight_fake_quant or self.input_fake_quant or (learns and torch.is_grad_enabled())):
            return gemm.linear(x, self.weight, self.bias, offsets)
        self._check_scale_dtypes()
        plan = Plan(
            weight=self.scheme.weights if self.weight_fake_quant else None,
            input=self.scheme.activations if self.input_fake_quant else None,
            weight_numel=self.weight_numel,
            input_numel=self.in_features,
            fp8_gemm=self.fp8_gemm and self.weight_fake_quant and self.input_fake_quant,
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
        )

    def used_weight(self) -> Tensor:
        """The weight ``[out, in]`` as the forward multiplies it now, differentiable.

        It is for a caller that does not want a plain GEMM of it.
        """
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
        """The weight's codes, quantised at the first use after the weight changed; None where they are not kept."""
        if not self.keeps_weight_codes:
            return None
        if self._weight_codes is None:
            # Not in the caller's inference mode either: what is made there cannot be saved for a later backward.
            with torch.inference_mode(False), torch.no_grad():
                self._weight_codes = kernels.quantize(self.weight, self._weight_quantizer())[0]
        return self._weight_codes

    def extra_repr(self) -> str:
        stack = f"num_experts={self.num_experts}, " if self.projections else ""
        return (
            f"{stack}in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name}, fake_quant(weight={self.weight_fake_quant}, input={self.input_fake_quant})"
        )
