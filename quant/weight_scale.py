"""The scales of a weight, and what the kernels do with them.

The kernels give each of ``n`` equal runs of consecutive elements the scale ``s0 * exp(theta)``, rounded at most to a
dtype, and perhaps a zero point. Two kinds of scales are not like that: one per block covers runs in many rows, and
those of 4-bit floats are rounded to e8m0, or to e4m3 below a global scale. Of these the effective scales are formed
first, one per run, which the kernels take as they are: an fp32 number for 128, 32 or 16 weights, as long as the
operation lasts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quant import kernels
from quant.spec import TensorSpec


class WeightScale(NamedTuple):
    """Of a weight ``[out, in]`` or a stack of them ``[E, out, in]``, in the shape of ``spec.scale_shape``.

    Attributes:
        s0, theta, global_scale: as in :func:`quant.reference.effective_scale`.
        spec: how the weight is quantised.
        dtype: of the weight.
        zero: the zero points; None where the weight is symmetric.
    """

    s0: Tensor
    theta: Tensor | None
    global_scale: Tensor | None
    spec: TensorSpec
    dtype: torch.dtype
    zero: Tensor | None = None

    def effective(self, *, after: Tensor | None = None) -> Tensor:
        """The scale that the forward uses, fp32; ``after`` as in :mod:`quant.kernels.ops`."""
        above = self.global_scale
        if above is not None:
            above = above.view(-1, *[1] * (self.s0.dim() - 1))  # of a stack, one per expert
        return kernels.effective_scale(self.s0, self.theta, self.spec, self.dtype, above, after=after)

    def quantize(self, weight: Tensor) -> Tensor:
        """The weight's codes."""
        codes, _ = kernels.quantize(weight, *self._of_runs(), self.zero)
        return codes

    def dequantize(self, codes: Tensor, *, after: Tensor | None = None) -> Tensor:
        """The weight that these codes stand for; ``after`` as in :mod:`quant.kernels.ops`."""
        return kernels.dequantize(codes, *self._of_runs(after), self.dtype, self.zero, after=after)

    def fake_quantize(self, weight: Tensor, *, after: Tensor | None = None) -> Tensor:
        """The weight through its codes and back; ``after`` as in :mod:`quant.kernels.ops`."""
        return kernels.fake_quantize(weight, *self._of_runs(after), self.zero, after=after)

    def backward_(self, grad: Tensor, weight: Tensor, *, factor: float, theta_gradient: bool) -> Tensor | None:
        """Theta's gradient times ``factor``, where wanted; that of the weight takes the place of ``grad``."""
        if not theta_gradient or self._kernels_form_it():
            return kernels.fake_quantize_backward_(
                grad, weight, *self._of_runs(grad), self.zero, factor=factor, theta_gradient=theta_gradient
            )
        assert self.theta is not None
        learned = kernels.learned_scale(self.s0, self.theta, after=grad)
        effective = self.effective(after=grad)
        runs = self._per_run(effective)
        # With a theta of 0 the kernel multiplies by the effective scale, where s0 * exp(theta) belongs.
        gradient = kernels.fake_quantize_backward_(
            grad, weight, runs, torch.zeros_like(runs), self.spec, torch.float32, factor=factor, theta_gradient=True
        )
        assert gradient is not None
        if self.spec.granularity == "block":
            gradient = gradient.unflatten(-2, (effective.shape[-2], -1)).sum(-2)
        return (gradient * (learned / effective)).to(self.theta.dtype)

    def _kernels_form_it(self) -> bool:
        return self.spec.granularity != "block" and self.spec.scale_format in ("float32", "model")

    def _of_runs(self, after: Tensor | None = None) -> tuple[Tensor, Tensor | None, TensorSpec, torch.dtype]:
        """``s0, theta, spec, model_dtype`` for the kernels."""
        if self._kernels_form_it():
            return self.s0, self.theta, self.spec, self.dtype
        return self._per_run(self.effective(after=after)), None, self.spec, torch.float32  # rounded already

    def _per_run(self, scale: Tensor) -> Tensor:
        """``[..., out / size, in / size]`` of blocks as ``[..., out, in / size]``; others as they are."""
        if self.spec.granularity != "block":
            return scale
        assert self.spec.group_size is not None
        return scale.repeat_interleave(self.spec.group_size, dim=-2)
