"""The module that stands where a quantised nn.Linear stood.

It holds the very Parameters of the Linear that it replaces (under ZeRO-3 these are partitioned, and what hangs on them
is kept) and the scales, which layers that serving fuses share. What is quantised at this moment is a switch, not a
structure: a schedule turns fake quantisation on in the middle of a run.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant import kernels
from quant.function import Plan, quant_linear
from quant.inputs import SharedInput
from quant.observe import Observer
from quant.spec import Scheme
from quant.weight_scale import WeightScale

# The Parameters of a QuantLinear that an nn.Linear does not have.
SCALE_PARAMETERS = ("weight_s0", "weight_theta", "weight_global", "input_s0", "input_theta")


class QuantLinear(nn.Module):
    """``F.linear`` whose operands are fake-quantised where that is switched on; exactly ``F.linear`` where neither is.

    A theta that trains gets a gradient of zeros while its operand is not quantised.

    Outside forward the Parameters may be ZeRO-3 partitions (shape ``[0]``): take shapes from ``in_features`` and
    ``out_features``.

    Attributes:
        weight, bias: ``[out, in]`` and ``[out]`` or None, in the model's dtype.
        weight_s0, weight_global, input_s0: frozen fp32 scales, NaN until filled; ``weight_global`` is None but for
            weights with e4m3 scales, ``input_s0`` where no scale of the input is stored.
        weight_theta, input_theta: learned logarithmic corrections in the model's dtype, or None.
        weight_fake_quant, input_fake_quant: what is quantised now.
        input_observer: watches the input in every forward while set.
        shared_input: hands the quantised input to the layers that read the same tensor, or None.
        fp8_gemm: whether the codes are multiplied while both operands are quantised, instead of their values.
        keeps_weight_codes: whether the weight's codes are kept from forward to forward, until
            :func:`weights_changed`. Only where weights stay resident.
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
    ) -> None:
        """``weight_numel`` is the number of weights that share one scale, over all layers that share ``weight_s0``."""
        super().__init__()
        if (input_s0 is None) != (scheme.static_input is None):
            raise ValueError(f"scheme {scheme.name!r} and input_s0 disagree on whether a scale of the input is stored")
        if (weight_global is None) != (scheme.weights.scale_format != "e4m3"):
            raise ValueError(f"scheme {scheme.name!r} and weight_global disagree on whether there is a global scale")
        group_size = scheme.activations.group_size if scheme.activations is not None else None
        if group_size is not None and in_features % group_size:
            raise ValueError(
                f"in_features {in_features} is not divisible by the inputs' group_size {group_size} of scheme "
                f"{scheme.name!r}; choose another scheme, or exempt this layer"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.weight_numel = weight_numel
        self.weight = weight
        self.bias = bias
        self.weight_s0 = weight_s0
        self.weight_theta = weight_theta
        self.weight_global = weight_global
        self.input_s0 = input_s0
        self.input_theta = input_theta
        self.weight_fake_quant = True
        self.input_fake_quant = scheme.activations is not None
        self.input_observer: Observer | None = None
        self.shared_input: SharedInput | None = None
        self.fp8_gemm = False
        self.keeps_weight_codes = False
        self._weight_codes: Tensor | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scheme: Scheme,
        *,
        weight_s0: nn.Parameter,
        weight_theta: nn.Parameter | None,
        input_s0: nn.Parameter | None,
        input_theta: nn.Parameter | None,
        weight_numel: int,
        weight_global: nn.Parameter | None = None,
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
        )
        return module.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is ``[..., in_features]`` in the model's dtype, zero tokens allowed. Returns ``[..., out]``."""
        if self.input_observer is not None:
            self.input_observer.update(x, self.input_scale() if self.input_fake_quant else None)
        learns = self.weight_theta is not None or self.input_theta is not None
        if not (self.weight_fake_quant or self.input_fake_quant or (learns and torch.is_grad_enabled())):
            return F.linear(x, self.weight, self.bias)
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
            weight_codes=self._kept_weight_codes() if self.weight_fake_quant else None,
            shared=self.shared_input,
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

    def forget_codes(self) -> None:
        """The weight or a scale changed."""
        self._weight_codes = None
        if self.shared_input is not None:
            self.shared_input.drop()

    @torch.no_grad()
    def weight_scale(self) -> Tensor:
        """The effective scale of the weight, as the forward uses it: fp32, shape by the scheme. Parameters gathered."""
        return self._weight_scale().effective()

    def _weight_scale(self) -> WeightScale:
        return WeightScale(
            self.weight_s0, self.weight_theta, self.weight_global, self.scheme.weights, self.weight.dtype
        )

    @torch.no_grad()
    def input_scale(self) -> Tensor | None:
        """The effective scale of the input, fp32 ``(1,)``, or None where none is stored. Parameters gathered."""
        spec = self.scheme.static_input
        if self.input_s0 is None or spec is None:
            return None
        return kernels.effective_scale(self.input_s0, self.input_theta, spec, self.weight.dtype)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme.name}, fake_quant(weight={self.weight_fake_quant}, input={self.input_fake_quant})"
        )

    def _check_scale_dtypes(self) -> None:
        """A module-wide cast (DeepSpeed's to bf16, on stages 0 to 2) rounds the frozen scales in silence."""
        for name in ("weight_s0", "weight_global", "input_s0"):
            scale = getattr(self, name)
            if scale is not None and scale.dtype != torch.float32:
                raise TypeError(
                    f"{name} is {scale.dtype}, expected torch.float32: something cast the whole module; "
                    f"restore the frozen scales after it"
                )


def weights_changed(model: nn.Module) -> None:
    """Say that weights or scales of ``model`` changed, so that no layer uses codes of the old ones.

    The training loop calls it after every optimizer step, load and write of scales. Nothing else can notice: DeepSpeed
    writes to ``.data``, which leaves a tensor's version as it was.
    """
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.forget_codes()
