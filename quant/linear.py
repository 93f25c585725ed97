"""The module that stands where a quantised nn.Linear stood.

It holds the very Parameters of the Linear that it replaces (under ZeRO-3 these are partitioned, and what hangs on them
is kept) and the scales, which layers that serving fuses share. What is quantised at this moment is a switch, not a
structure: a schedule turns fake quantisation on in the middle of a run.
"""

import torch
from torch import Tensor, nn

from quant import gemm
from quant.experts import StackedLinear
from quant.function import Plan, UsedWeightFunction, quant_linear
from quant.layer import QuantLayer
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
        in_features: int,
        out_features: int,
        scheme: Scheme,
        *,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        weight_s0: nn.Parameter,
        weight_theta: nn.Parameter | None,
        input_s0: nn.Parameter | None,
        input_theta: nn.Parameter | None,
        weight_numel: int,
        weight_global: nn.Parameter | None = None,
        weight_zero: nn.Parameter | None = None,
    ) -> None:
        """``weight_numel`` is the number of weights that share one scale, over all layers that share ``weight_s0``."""
        super().__init__(
            in_features,
            out_features,
            scheme,
            weight=weight,
            bias=bias,
            weight_s0=weight_s0,
            weight_theta=weight_theta,
            weight_global=weight_global,
            weight_zero=weight_zero,
            input_s0=input_s0,
            input_theta=input_theta,
        )
        group_size = scheme.activations.group_size if scheme.activations is not None else None
        if group_size is not None and in_features % group_size:
            raise ValueError(
                f"in_features {in_features} is not divisible by the inputs' group_size {group_size} of scheme "
                f"{scheme.name!r}; choose another scheme, or exempt this layer"
            )
        self.weight_numel = weight_numel

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear | StackedLinear,
        scheme: Scheme,
        *,
        weight_s0: nn.Parameter,
        weight_theta: nn.Parameter | None,
        input_s0: nn.Parameter | None,
        input_theta: nn.Parameter | None,
        weight_numel: int,
        weight_global: nn.Parameter | None = None,
        weight_zero: nn.Parameter | None = None,
    ) -> "QuantLinear":
        """The same Linear with scales: its Parameter objects are taken over, not copied."""
        assert isinstance(linear.weight, nn.Parameter)
        module = cls(
            linear.in_features,
            linear.out_features,
            scheme,
            weight=linear.weight,
            bias=linear.bias,
            weight_s0=weight_s0,
            weight_theta=weight_theta,
            input_s0=input_s0,
            input_theta=input_theta,
            weight_numel=weight_numel,
            weight_global=weight_global,
            weight_zero=weight_zero,
        )
        if isinstance(linear, StackedLinear):
            module.num_experts, module.projections = linear.num_experts, linear.projections
        return module.train(linear.training)

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        """``x`` is ``[..., in_features]`` in the model's dtype, zero tokens allowed. Returns ``[..., out]``.

        Of a stack ``x`` is ``[rows, in_features]`` and ``offsets`` says whose the rows are, see :mod:`quant.gemm`.
        """
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
            self.weight_s0,
            self.weight_theta,
            self.input_s0,
            self.input_theta,
            plan,
            weight_global=self.weight_global,
            weight_zero=self.weight_zero,
            weight_codes=self._kept_weight_codes() if self.weight_fake_quant else None,
            shared=self.shared_input,
            offsets=offsets,
        )

    def used_weight(self) -> Tensor:
        """The weight ``[out, in]`` as the forward multiplies it now, differentiable; for who multiplies it himself."""
        if not self.weight_fake_quant:
            if self.weight_theta is None or not torch.is_grad_enabled():
                return self.weight
            # ZeRO-3 would apply the last gradient of a Parameter again that gets none.
            return self.weight + 0 * self.weight_theta.sum()
        self._check_scale_dtypes()
        return UsedWeightFunction.apply(
            self.weight,
            self.weight_s0,
            self.weight_theta,
            self.weight_global,
            self.scheme.weights,
            self.weight_numel,
            self.weight_zero,
        )

    def _kept_weight_codes(self) -> Tensor | None:
        """The weight's codes, quantised at the first use after the weight changed; None where they are not kept."""
        if not self.keeps_weight_codes:
            return None
        if self._weight_codes is None:
            # Not in the caller's inference mode either: what is made there cannot be saved for a later backward.
            with torch.inference_mode(False), torch.no_grad():
                self._weight_codes = self._weight_scale().quantize(self.weight)
        return self._weight_codes

    def extra_repr(self) -> str:
        stack = f"num_experts={self.num_experts}, " if self.projections else ""
        return (
            f"{stack}in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name}, fake_quant(weight={self.weight_fake_quant}, input={self.input_fake_quant})"
        )
